"""What needs several devices runs in a process of its own: JAX counts devices once."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_COUNT = "--xla_force_host_platform_device_count"


@pytest.fixture(scope="session")
def run_on_devices():
    """A function that runs a Python file with 8 forced CPU devices and returns what it prints."""

    def run(path, num_devices=8):
        # The user's other flags stay: the tests run under several.
        others = re.sub(rf"{_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        environment = os.environ | {
            "XLA_FLAGS": f"{others} {_COUNT}={num_devices}".strip(),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        result = subprocess.run(
            [sys.executable, str(path)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run


@pytest.fixture(scope="module")
def facts(request, run_on_devices):
    """What the test's own file, run with 8 devices, prints as JSON in its last line."""
    return json.loads(run_on_devices(request.path).splitlines()[-1])
