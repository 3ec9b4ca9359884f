"""Asking for host devices: each case in a process of its own, since JAX starts once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.devices import DeviceDescription, request_devices

ROOT = Path(__file__).resolve().parent.parent


def run(code, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_import_does_not_import_jax():
    code = "import sys, helpers.devices; print('jax' in sys.modules)"
    assert run(code).stdout.strip() == "False"


@pytest.mark.parametrize("first", ["", "import jax, jax.numpy, helpers.sharding, helpers.models; "])
def test_devices_are_there_after_a_request(first):
    code = f"{first}from helpers.devices import *; request_devices(3); import jax"
    assert run(f"{code}; print(jax.device_count())").stdout.strip() == "3"


def test_request_does_not_start_jax():
    code = (
        "from helpers import devices; devices.request_devices(3); print(devices._jax_has_started())"
    )
    assert run(code).stdout.strip() == "False"


def test_request_keeps_other_flags():
    code = "from helpers.devices import *; request_devices(3); import os; print(os.environ)"
    assert (
        "--xla_cpu_enable_fast_math=false"
        in run(code, XLA_FLAGS="--xla_cpu_enable_fast_math=false").stdout
    )


def test_users_count_wins_and_a_warning_says_so():
    code = (
        "from helpers.devices import *; request_devices(3); import jax; print(jax.device_count())"
    )
    result = run(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert result.stdout.strip() == "2"
    assert "keeping XLA_FLAGS=--xla_force_host_platform_device_count=2" in result.stderr


def test_request_after_jax_has_started_with_fewer_is_an_error():
    code = (
        "import jax; jax.devices(); from helpers.devices import *\n"
        "try: request_devices(3)\n"
        "except RuntimeError as error: print(error)"
    )
    assert "already started with 1 CPU device, 3 were asked for; restart" in run(code).stdout


def test_request_after_jax_has_started_with_enough_passes():
    code = "from helpers.devices import *; request_devices(3); import jax; jax.devices()"
    run(f"{code}; request_devices(2)")


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "8"])
def test_bad_count_is_refused(bad):
    with pytest.raises(ValueError, match="num_devices must be a positive integer, given"):
        request_devices(bad)


def test_description_of_this_machine():
    code = "from helpers.devices import *; request_devices(3); print(describe_devices())"
    assert run(code).stdout.startswith("3 cpu devices: cpu; ")


def describe(**changes):
    facts = {"platform": "cpu", "kind": "cpu", "count": 8, "local_count": 8, "cores": 2}
    return str(DeviceDescription(**(facts | {"memory": 2**34} | changes)))


def test_description_says_that_too_many_host_devices_do_not_speed_up():
    assert "8 host devices share 2 cores" in describe()


@pytest.mark.parametrize("fit", [{"cores": 8}, {"platform": "tpu", "kind": "TPU v2"}])
def test_description_of_fit_devices_is_one_line(fit):
    assert "\n" not in describe(**fit)


def test_description_of_unknown_memory():
    assert "unknown memory a device" in describe(platform="gpu", memory=None)
