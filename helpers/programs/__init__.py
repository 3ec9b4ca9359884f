"""Programs that run in one process or, started by `helpers.launch`, in several."""
