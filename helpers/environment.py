"""Checks that the installed packages can run the notebooks, before anything heavy is imported.

There are two environments, told apart by Python's version: under 3.11 that of TensorFlow Federated
0.87.0 (lane A, "tff"), under 3.12 and later that of current JAX (lane B, "current"). There, pip
falls back without a word to TensorFlow Federated 0.1.0 or 0.33, whose errors say nothing of the
cause; and stable TFP 0.25 breaks on JAX 0.7 and later, and hides the nightly that works. The check
reads package metadata and looks at files; it imports neither TensorFlow nor JAX.

`python helpers/environment.py install` adds to another environment, such as Colab's, what the
notebooks lack there. The file needs nothing but Python, not even the rest of the package.
"""

import argparse
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
# What the notebooks import besides, in any version.
OTHER_PACKAGES = ("scikit-learn", "arviz", "matplotlib", "seaborn", "pandas", "tqdm")
_LOCKS = {"tff": "requirements.txt", "current": "requirements-current.txt"}
_ROOT = Path(__file__).resolve().parent.parent
# Modules that a kernel may have loaded before the set-up cell installed another version of them.
_PRELOADED = ("numpy", "scipy", "pandas", "matplotlib", "jax", "jaxlib")
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
        another. In both: a package of `OTHER_PACKAGES` is missing, or this process loaded another
        version of one than is installed now. The message names what was found, what is needed and
        the command that fixes it.
    """
    importlib.invalidate_caches()  # The set-up cell may just have installed something.
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
    for package in OTHER_PACKAGES:
        _check_presence(package)
    for package in _PRELOADED:
        _check_loaded(package)
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


def install_missing() -> None:
    """Installs with pip what the notebooks need and this environment lacks.

    Meant for Colab, and for a notebook away from its repository. Under Python 3.12 and later, what
    is there and new enough stays, above all the JAX of an accelerator; the rest comes in the
    versions of the lock. On Colab alone, stable TFP, which hides the nightly, is removed. Under
    3.11 the whole lock is installed, except what the running kernel is made of.

    Raises:
      UnfitEnvironmentError: Python is older than 3.11, there is no pip, or pip fails; what pip
        says is printed.
    """
    _check_python()
    if importlib.util.find_spec("pip") is None:
        raise UnfitEnvironmentError(
            'found no pip in this environment: run "python -m ensurepip", or '
            f"{_FIX_PACKAGES[lane()]}"
        )
    pins = _read_lock(_ROOT / _LOCKS[lane()])
    if lane() == "tff":
        _install_lock(pins)
    else:
        _install_current(pins)


def _install_lock(pins: dict[str, str]) -> None:
    kept = _closure("ipykernel")
    wanted = [name for name in pins if name not in kept and _version(name) != _pinned(pins[name])]
    print(f"installing {len(wanted)} packages of requirements.txt", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "requirements.txt")
        part.write_text("\n".join(pins[name] for name in wanted) + "\n", encoding="utf-8")
        _pip("install", "--no-deps", "-r", str(part))


def _install_current(pins: dict[str, str]) -> None:
    stable = _version("tensorflow-probability")
    if stable and importlib.util.find_spec("google") and importlib.util.find_spec("google.colab"):
        print(f"removing tensorflow-probability {stable}, which hides tfp-nightly", flush=True)
        _pip("uninstall", "--yes", "tensorflow-probability", "tfp-nightly")
    wanted = [name for name, least in MINIMUM_VERSIONS.items() if _is_older(name, least)]
    wanted += [name for name in OTHER_PACKAGES if _version(name) is None]
    if wanted:
        pinned = [f"{name}=={_pinned(pins[name])}" for name in wanted]
        print(f"installing {', '.join(pinned)}", flush=True)
        _pip("install", *pinned)


def _read_lock(path: Path) -> dict[str, str]:
    """The entries of a lock, by the name of their package."""
    text = re.sub(r"(?m)^\s*#.*\n?", "", path.read_text(encoding="utf-8"))
    entries = re.split(r"\n(?=\S)", text.strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def _pinned(entry: str) -> str:
    return re.match(r"[^=]+==([^\s;]+)", entry)[1]


def _closure(package: str) -> set[str]:
    """An installed package and all that it needs here, by their normal names."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        name = _normal(waiting.pop())
        if name in found or _version(name) is None:
            continue
        found.add(name)
        needs = metadata.requires(name) or ()
        waiting += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]]
    if subprocess.run([*command, "--disable-pip-version-check"]).returncode:
        raise UnfitEnvironmentError(f"pip {arguments[0]} failed; its own message is above")


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
    if _is_older(package, needed):
        raise UnfitEnvironmentError(
            f"found {_state(package)}; {package} {needed} or later is needed: "
            f"{_FIX_PACKAGES['current']}"
        )


def _check_presence(package: str) -> None:
    if _version(package) is None:
        raise UnfitEnvironmentError(f"found no {package}; it is needed: {_FIX_PACKAGES[lane()]}")


def _check_loaded(package: str) -> None:
    loaded = _loaded_version(package)
    installed = _version(package)
    if loaded and installed and _numbers(loaded) != _numbers(installed):
        raise UnfitEnvironmentError(
            f"found {package} {loaded} loaded and {installed} installed: restart the kernel (in "
            "Colab: Runtime, Restart session) and run this cell again"
        )


def _loaded_version(package: str) -> str | None:
    return getattr(sys.modules.get(package), "__version__", None)


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


def _is_older(package: str, least: str) -> bool:
    """Whether an installed package is older than that, or missing."""
    found = _version(package)
    return found is None or _numbers(found) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: enough to compare releases, without a package for it."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `check` or `install`, and says in one line what is wrong.

    Args:
      arguments: the command line; None for that of the process.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(prog="environment.py", description=__doc__)
    parser.add_argument("command", choices=("check", "install"))
    command = parser.parse_args(arguments).command
    try:
        if command == "install":
            install_missing()
        check_environment()
    except UnfitEnvironmentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
