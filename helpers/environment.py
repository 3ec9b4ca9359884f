"""Checks that the installed packages can run the notebooks, before anything heavy is imported.

On Python 3.12 and later, pip falls back without a word to TensorFlow Federated 0.1.0 or 0.33, whose
errors say nothing of the cause. The check reads package metadata and looks at files; it imports
neither TensorFlow nor JAX.
"""

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

LANE = "tff"
PYTHON_VERSION = (3, 11)
# What the lock pins, of which another version does not work or was not tried.
REQUIRED_VERSIONS = {
    "tensorflow-federated": "0.87.0",
    "jax": "0.4.30",
    "jaxlib": "0.4.30",
}
_DESCRIBED_PACKAGES = (
    "tensorflow-federated",
    "jax",
    "jaxlib",
    "tensorflow",
    "tensorflow-probability",
    "numpy",
)
_JAX_FRONT_END = Path("python", "core", "environments", "jax_frontend", "jax_computation.py")
_FIX_PACKAGES = 'run "make lab", or "pip install --no-deps -r requirements.txt"'
_FIX_PYTHON = f"{_FIX_PACKAGES} under Python 3.11"


class UnfitEnvironmentError(RuntimeError):
    """The environment cannot run the notebooks; the message says in one line what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback, which would only bury the message.
        return [f"{type(self).__name__}: {self}"]


def check_environment() -> None:
    """Raises an error if the notebooks cannot run in this environment.

    It takes milliseconds: no package is imported. It also sets TF_CPP_MIN_LOG_LEVEL, unless the
    user did: TFP's JAX part imports TensorFlow in lane A, and what that writes to stderr at
    start-up would be stored as a notebook's output.

    Raises:
      UnfitEnvironmentError: Python is not 3.11; TensorFlow Federated, jax or jaxlib is missing or
        not the version of the lock; TensorFlow Federated lacks its JAX front end; or XLA_FLAGS
        holds a flag that jaxlib does not know and would end the process for. The message names
        what was found, what is needed and the command that fixes it.
    """
    _check_python()
    for package in REQUIRED_VERSIONS:
        _check_package(package)
    _check_jax_front_end()
    _check_xla_flags()
    # 1 is what `import jax` sets where there is nothing.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def describe_environment() -> str:
    """Lists the lane and the versions of Python and of the main packages.

    Returns:
      One item a line, without the machine's name or any path.
    """
    versions = {"lane": LANE, "python": platform.python_version()}
    versions |= {package: _version(package) or "missing" for package in _DESCRIBED_PACKAGES}
    width = max(map(len, versions))
    return "\n".join(f"{name:{width}}  {version}" for name, version in versions.items())


def _check_python() -> None:
    found = sys.version_info[:2]
    if found != PYTHON_VERSION:
        raise UnfitEnvironmentError(
            f"found Python {'.'.join(map(str, found))}; TensorFlow Federated "
            f"{REQUIRED_VERSIONS['tensorflow-federated']} needs Python 3.11: {_FIX_PYTHON}"
        )


def _check_package(package: str) -> None:
    needed = REQUIRED_VERSIONS[package]
    found = _version(package)
    if found != needed:
        state = f"{package} {found}" if found else f"no {package}"
        raise UnfitEnvironmentError(f"found {state}; {package} {needed} is needed: {_FIX_PACKAGES}")


def _check_jax_front_end() -> None:
    # Of a top-level name, find_spec looks for the files and does not run them.
    spec = importlib.util.find_spec("tensorflow_federated")
    folders = spec.submodule_search_locations if spec else None
    if not any((Path(folder) / _JAX_FRONT_END).is_file() for folder in folders or ()):
        raise UnfitEnvironmentError(
            "found a tensorflow-federated without its JAX front end (tff.jax.computation); "
            f"that of {REQUIRED_VERSIONS['tensorflow-federated']} is needed: {_FIX_PACKAGES}"
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
