"""Checks that the installed packages can run the notebooks, before anything heavy is imported.

There are two environments, told apart by Python's version: under 3.11 that of TensorFlow Federated
0.87.0 (lane A, "tff"), under 3.12 and later that of current JAX (lane B, "current"). There, pip
falls back without a word to TensorFlow Federated 0.1.0 or 0.33, whose errors say nothing of the
cause; and stable TFP 0.25 breaks on JAX 0.7 and later, and hides the nightly that works. The check
reads package metadata and looks at files; it imports neither TensorFlow nor JAX.
"""

import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

PYTHON_VERSION = (3, 11)  # Of lane A.
# What lane A's lock pins, of which another version does not work or was not tried.
REQUIRED_VERSIONS = {
    "tensorflow-federated": "0.87.0",
    "jax": "0.4.30",
    "jaxlib": "0.4.30",
}
# Lane B takes what a machine has from these on, as Colab brings its own JAX; the lock is tested.
MINIMUM_VERSIONS = {
    "jax": "0.8",
    "jaxlib": "0.8",
    "tfp-nightly": "0.26",
    "federated-language": "0.5",
}
_DESCRIBED_PACKAGES = {
    "tff": (
        "tensorflow-federated",
        "jax",
        "jaxlib",
        "tensorflow",
        "tensorflow-probability",
        "numpy",
    ),
    "current": ("federated-language", "jax", "jaxlib", "tfp-nightly", "numpy"),
}
_JAX_FRONT_END = Path("python", "core", "environments", "jax_frontend", "jax_computation.py")
_FIX_PACKAGES = {
    "tff": 'run "make lab", or "pip install --no-deps -r requirements.txt"',
    "current": 'run "make lab LANE=current", or "pip install -r requirements-current.txt"',
}
_FIX_PYTHON = (
    "use Python 3.11 (lane A, TensorFlow Federated) or 3.12 and later (lane B, current JAX)"
)


class UnfitEnvironmentError(RuntimeError):
    """The environment cannot run the notebooks; the message says in one line what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback, which would only bury the message.
        return [f"{type(self).__name__}: {self}"]


def lane() -> str:
    """Returns which environment this Python can have: 'tff' under 3.11, else 'current'."""
    return "tff" if sys.version_info[:2] == PYTHON_VERSION else "current"


def check_environment() -> None:
    """Raises an error if the notebooks cannot run in this environment.

    It takes milliseconds: no package is imported. It also sets TF_CPP_MIN_LOG_LEVEL, unless the
    user did: TFP's JAX part imports TensorFlow in lane A, and what that writes to stderr at
    start-up would be stored as a notebook's output.

    Raises:
      UnfitEnvironmentError: Python is older than 3.11. Under 3.11: TensorFlow Federated, jax or
        jaxlib is missing or not the version of the lock; TensorFlow Federated lacks its JAX front
        end; or XLA_FLAGS holds a flag that jaxlib does not know and would end the process for.
        Under 3.12 and later: a package is missing or too old, or one is installed that hides
        another. The message names what was found, what is needed and the command that fixes it.
    """
    _check_python()
    if lane() == "tff":
        for package in REQUIRED_VERSIONS:
            _check_exact(package)
        _check_jax_front_end()
        _check_xla_flags()
    else:
        _check_nothing_hides()
        for package in MINIMUM_VERSIONS:
            _check_minimum(package)
    # 1 is what `import jax` sets where there is nothing.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def describe_environment() -> str:
    """Lists the lane and the versions of Python and of the main packages.

    Returns:
      One item a line, without the machine's name or any path.
    """
    versions = {"lane": lane(), "python": platform.python_version()}
    versions |= {package: _version(package) or "missing" for package in _DESCRIBED_PACKAGES[lane()]}
    width = max(map(len, versions))
    return "\n".join(f"{name:{width}}  {version}" for name, version in versions.items())


def _check_python() -> None:
    if sys.version_info[:2] < PYTHON_VERSION:
        found = ".".join(map(str, sys.version_info[:2]))
        raise UnfitEnvironmentError(f"found Python {found}; {_FIX_PYTHON}")


def _check_exact(package: str) -> None:
    needed = REQUIRED_VERSIONS[package]
    found = _version(package)
    if found != needed:
        raise UnfitEnvironmentError(
            f"found {_state(package)}; {package} {needed} is needed under Python 3.11: "
            f"{_FIX_PACKAGES['tff']}"
        )


def _check_minimum(package: str) -> None:
    needed = MINIMUM_VERSIONS[package]
    found = _version(package)
    if found is None or _numbers(found) < _numbers(needed):
        raise UnfitEnvironmentError(
            f"found {_state(package)}; {package} {needed} or later is needed: "
            f"{_FIX_PACKAGES['current']}"
        )


def _check_nothing_hides() -> None:
    federated = _version("tensorflow-federated")
    if federated:
        raise UnfitEnvironmentError(
            f"found tensorflow-federated {federated}, which has no JAX front end: run "
            '"pip uninstall -y tensorflow-federated" (under this Python, federated-language takes '
            "its place), or use Python 3.11"
        )
    stable = _version("tensorflow-probability")
    if stable:
        # The two put their files in the same place.
        raise UnfitEnvironmentError(
            f"found tensorflow-probability {stable}, which breaks on current JAX and hides "
            'tfp-nightly: run "pip uninstall -y tensorflow-probability tfp-nightly", then "pip '
            'install -r requirements-current.txt"'
        )


def _check_jax_front_end() -> None:
    # Of a top-level name, find_spec looks for the files and does not run them.
    spec = importlib.util.find_spec("tensorflow_federated")
    folders = spec.submodule_search_locations if spec else None
    if not any((Path(folder) / _JAX_FRONT_END).is_file() for folder in folders or ()):
        raise UnfitEnvironmentError(
            "found a tensorflow-federated without its JAX front end (tff.jax.computation); "
            f"that of {REQUIRED_VERSIONS['tensorflow-federated']} is needed: "
            f"{_FIX_PACKAGES['tff']}"
        )


def _check_xla_flags() -> None:
    # XLA ends the process at an unknown flag, which in a notebook looks like a dead kernel.
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_cpu_max_isa" in flags:
        raise UnfitEnvironmentError(
            f"found --xla_cpu_max_isa in XLA_FLAGS, which jaxlib {REQUIRED_VERSIONS['jaxlib']} "
            "does not know; --xla_cpu_prefer_vector_width=128 or =256 comes nearest to it there"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _state(package: str) -> str:
    found = _version(package)
    return f"{package} {found}" if found else f"no {package}"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: enough to compare releases, without a package for it."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))
