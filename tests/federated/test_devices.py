"""Clients spread over several devices: the same results as on one."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_COUNT = "--xla_force_host_platform_device_count"


def test_clients_spread_over_devices_give_the_same_results():
    others = re.sub(rf"{_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    run = subprocess.run(
        [sys.executable, "devices_battery.py"],
        cwd=HERE,
        env={**os.environ, "XLA_FLAGS": f"{others} {_COUNT}=8".strip()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for count in (2, 3, 8):
        assert f"all checks passed on {count} devices" in run.stdout
