"""Runs a command and makes sure that no process that it started outlives it.

`python -m helpers.processes COMMAND...` is what the make targets use: its exit status is the
command's own, or 1 if the command succeeded and left a process behind. What is left is listed on
stderr and killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence

import psutil

# Names a run in the environment of every process that it starts, at whatever depth.
RUN_ID = "DJN_RUN_ID"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_and_sweep(command: Sequence[str], grace: float = 5.0) -> int:
    """Runs a command, then finds, lists and kills every process of it that is left.

    Args:
      command: the program and its arguments.
      grace: seconds that processes have to end by themselves after the command has ended.

    Returns:
      The command's exit status (128 + n after signal n); 1 if it was 0 and a process was left.
    """
    _adopt_orphans()
    run_id = uuid.uuid4().hex
    with _terminate_as_exit():
        try:
            status = _wait(subprocess.Popen(command, env=os.environ | {RUN_ID: run_id}))
        except OSError as error:
            print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
            return 127
        except SystemExit:
            _end(_started_by(run_id))
            return 128 + signal.SIGTERM
        left = _survivors(run_id, grace)
        for survivor in left:
            print(f"error: left running: {_describe(survivor)}", file=sys.stderr)
        _end(left)
    return status or (1 if left else 0)


def _adopt_orphans() -> None:
    # On Linux, a process whose parent has ended becomes our child, even one that cleared its
    # environment; elsewhere the environment's mark must do.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _terminate_as_exit:
    """Turns SIGTERM into SystemExit, so that a run that is ended from outside is swept too."""

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._exit)

    def _exit(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the sweep is not interrupted
        sys.exit(128 + signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)


def _wait(process: subprocess.Popen) -> int:
    while True:
        try:
            _reap_adopted(process)
            status = process.wait()
        except KeyboardInterrupt:
            continue  # the terminal has interrupted the command too: let it clean up
        return status if status >= 0 else 128 - status


def _reap_adopted(process: subprocess.Popen) -> None:
    """Until the command has ended, collects what was adopted and ends.

    Otherwise it stays a zombie, which a command that waits for its end takes for a running process.
    """
    if sys.platform != "linux":
        return
    while process.returncode is None:
        # Left to be collected: the command itself is Popen's to collect.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        if ended == process.pid:
            return
        os.waitpid(ended, 0)


def _survivors(run_id: str, grace: float) -> list[psutil.Process]:
    deadline = time.monotonic() + grace
    while (left := _started_by(run_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _started_by(run_id: str) -> list[psutil.Process]:
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != me.pid and process.environ().get(RUN_ID) == run_id:
                found[process.pid] = process
        except (psutil.Error, OSError):
            continue  # another user's, or gone by now
    return [process for process in found.values() if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"process {process.pid}"


def _end(processes: Sequence[psutil.Process]) -> None:
    """Asks processes to end, and kills those that have not after some seconds."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m helpers.processes COMMAND [ARGUMENT...]")
    sys.exit(run_and_sweep(sys.argv[1:]))
