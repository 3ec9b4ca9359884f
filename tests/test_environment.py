"""The environment: its check, its lock, its conda file and the script that builds .venv."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from helpers import environment
from helpers.environment import UnfitEnvironmentError, check_environment, describe_environment

ROOT = Path(__file__).resolve().parent.parent
OTHER_VERSIONS = dict.fromkeys(environment.OTHER_PACKAGES, "1.0")
GOOD_VERSIONS = {"tensorflow-federated": "0.87.0", "jax": "0.4.30", "jaxlib": "0.4.30"}
CURRENT_VERSIONS = {
    "jax": "0.12.0.1",
    "jaxlib": "0.12.0.1",
    "tfp-nightly": "0.26.0.dev20261027",
    "federated-language": "0.5.4",
}
LOCKS = {"tff": "requirements.txt", "current": "requirements-current.txt"}
INPUTS = ["requirements.in", "overrides.txt", "requirements-current.in"]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A fit environment of lane A, made up: change its members to make it unfit."""
    fake = SimpleNamespace(
        versions=GOOD_VERSIONS | OTHER_VERSIONS,
        loaded={},  # Other tests of the same run have loaded the real ones.
        tff_folder=tmp_path / "tff",
    )
    front_end = fake.tff_folder / "python" / "core" / "environments" / "jax_frontend"
    front_end.mkdir(parents=True)
    fake.front_end = front_end / "jax_computation.py"
    fake.front_end.touch()

    def version(package):
        try:
            return fake.versions[package]
        except KeyError:
            raise metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(environment.metadata, "version", version)
    monkeypatch.setattr(environment, "_loaded_version", lambda package: fake.loaded.get(package))
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(fake.tff_folder)]),
    )
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7, "final", 0))
    return fake


@pytest.fixture
def current(installed, monkeypatch):
    """A fit environment of lane B, made up."""
    installed.versions = CURRENT_VERSIONS | OTHER_VERSIONS
    monkeypatch.setattr(environment.sys, "version_info", (3, 13, 0, "final", 0))
    return installed


def unfit_message():
    with pytest.raises(UnfitEnvironmentError) as caught:
        check_environment()
    return str(caught.value)


# --- check_environment


def test_a_flag_that_this_jaxlib_would_die_of_is_named(installed, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_cpu_max_isa=AVX2")
    assert "found --xla_cpu_max_isa in XLA_FLAGS" in unfit_message()


def test_fit_environment_passes(installed):
    check_environment()


@pytest.mark.parametrize(("given", "kept"), [(None, "3"), ("1", "3"), ("0", "0"), ("2", "2")])
def test_tensorflow_is_silenced_unless_the_user_says_otherwise(installed, monkeypatch, given, kept):
    if given is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", given)
    check_environment()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == kept


@pytest.mark.parametrize("version", [(3, 9), (3, 10)])
def test_an_older_python_is_unfit(installed, monkeypatch, version):
    monkeypatch.setattr(environment.sys, "version_info", (*version, 0, "final", 0))
    assert re.search(
        rf"found Python 3\.{version[1]}; use Python 3\.11 .* or 3\.12", unfit_message()
    )


@pytest.mark.parametrize("version", [(3, 12), (3, 13), (3, 14)])
def test_current_packages_are_fit_for_a_current_python(current, monkeypatch, version):
    monkeypatch.setattr(environment.sys, "version_info", (*version, 0, "final", 0))
    check_environment()
    assert environment.lane() == "current"


@pytest.mark.parametrize("package", CURRENT_VERSIONS)
def test_missing_package_of_lane_b_is_unfit(current, package):
    del current.versions[package]
    assert re.search(rf"found no {package}; {package} 0\S+ or later is needed", unfit_message())


@pytest.mark.parametrize(
    ("package", "version"),
    [("jax", "0.7.2"), ("jaxlib", "0.4.30"), ("tfp-nightly", "0.25.0.dev20240401")],
)
def test_package_that_is_too_old_for_lane_b_is_unfit(current, package, version):
    current.versions[package] = version
    assert f"found {package} {version}; {package} 0" in unfit_message()


def test_stable_tfp_beside_the_nightly_is_unfit(current):
    current.versions["tensorflow-probability"] = "0.25.0"
    message = unfit_message()
    assert "found tensorflow-probability 0.25.0, which breaks on current JAX" in message
    assert "pip uninstall -y tensorflow-probability tfp-nightly" in message


@pytest.mark.parametrize("version", ["0.1.0", "0.33.0"])
def test_the_tff_that_pip_falls_back_to_is_unfit(current, version):
    current.versions["tensorflow-federated"] = version
    assert f"found tensorflow-federated {version}, which has no JAX" in unfit_message()


def test_a_flag_that_current_jaxlib_knows_is_fit(current, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    check_environment()


@pytest.mark.parametrize("version", ["0.1.0", "0.33.0", "0.88.0"])
def test_another_version_of_tff_is_unfit(installed, version):
    installed.versions["tensorflow-federated"] = version
    assert f"found tensorflow-federated {version}; tensorflow-federated 0.87.0" in unfit_message()


@pytest.mark.parametrize("package", ["tensorflow-federated", "jax", "jaxlib"])
def test_missing_package_is_unfit(installed, package):
    del installed.versions[package]
    assert f"found no {package}; {package} {GOOD_VERSIONS[package]} is needed" in unfit_message()


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_jax_and_jaxlib_of_different_versions_are_unfit(installed, package):
    installed.versions[package] = "0.4.31"
    assert f"found {package} 0.4.31; {package} 0.4.30 is needed" in unfit_message()


def test_tff_without_its_jax_front_end_is_unfit(installed):
    installed.front_end.unlink()
    assert "without its JAX front end" in unfit_message()


def test_tff_with_metadata_but_no_files_is_unfit(installed, monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert "without its JAX front end" in unfit_message()


@pytest.mark.parametrize("fault", ["version", "missing", "front end"])
def test_message_is_one_line_with_the_command_that_fixes_it(installed, fault):
    if fault == "version":
        installed.versions["jax"] = "0.12.0"
    elif fault == "missing":
        installed.versions.clear()
    else:
        installed.front_end.unlink()
    message = unfit_message()
    assert "\n" not in message
    assert 'run "make lab", or "pip install --no-deps -r requirements.txt"' in message


@pytest.mark.parametrize("fault", [*CURRENT_VERSIONS, "tensorflow-probability"])
def test_message_of_lane_b_is_one_line_with_the_command_that_fixes_it(current, fault):
    current.versions[fault] = "0.1"
    message = unfit_message()
    assert "\n" not in message
    assert "pip install -r requirements-current.txt" in message


@pytest.mark.parametrize("lane", ["installed", "current"])
@pytest.mark.parametrize("package", environment.OTHER_PACKAGES)
def test_missing_package_that_any_version_of_would_do_is_named(request, lane, package):
    del request.getfixturevalue(lane).versions[package]
    assert f"found no {package}; it is needed: run" in unfit_message()


def test_kernel_that_loaded_another_version_is_to_be_restarted(current):
    current.versions["numpy"] = "2.5.5"
    current.loaded["numpy"] = "1.26.4"
    assert "found numpy 1.26.4 loaded and 2.5.5 installed: restart" in unfit_message()
    current.loaded["numpy"] = "2.5.5+local"
    check_environment()


def test_what_is_loaded_is_found_without_importing_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="1.26.4"))
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    assert environment._loaded_version("numpy") == "1.26.4"
    assert environment._loaded_version("pandas") is None
    assert "pandas" not in sys.modules


# --- install_missing, with a made-up pip


@pytest.fixture
def pip(current, monkeypatch):
    """What pip was called with, in a made-up environment of lane B."""
    calls = []
    monkeypatch.setattr(environment, "_pip", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: None if name.startswith("google") else SimpleNamespace(),
    )
    return calls


def test_nothing_is_installed_where_nothing_is_missing(pip):
    environment.install_missing()
    assert pip == []


def test_what_is_missing_or_too_old_comes_from_the_lock_and_jax_stays(current, pip, capsys):
    lock = read_lock(LOCKS["current"])
    current.versions |= {"jax": "0.9.1", "tfp-nightly": "0.25.0.dev20240401"}
    del current.versions["federated-language"], current.versions["arviz"]
    environment.install_missing()
    names = ["tfp-nightly", "federated-language", "arviz"]
    assert pip == [("install", *(f"{name}=={lock[name]}" for name in names))]
    assert "installing tfp-nightly==" in capsys.readouterr().out


def test_stable_tfp_is_removed_on_colab_alone(current, pip, monkeypatch):
    current.versions["tensorflow-probability"] = "0.25.0"
    environment.install_missing()
    assert pip == []
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: SimpleNamespace())
    environment.install_missing()
    assert pip == [("uninstall", "--yes", "tensorflow-probability", "tfp-nightly")]


def test_environment_without_pip_is_told_what_to_do(current, monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnfitEnvironmentError, match="found no pip in this environment: run"):
        environment.install_missing()


def test_failing_pip_is_an_error(monkeypatch):
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(environment.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UnfitEnvironmentError, match="pip install failed"):
        environment._pip("install", "x==0")


def test_lane_a_installs_its_lock_but_what_the_kernel_is_made_of(installed, monkeypatch):
    installed.versions |= {"ipykernel": "1", "psutil": "1", "numpy": "2.0"}
    needs = {"ipykernel": ["psutil>=1", 'numpy; extra == "x"'], "psutil": None}
    monkeypatch.setattr(environment.metadata, "requires", needs.get)
    calls = []

    def pip(*arguments):
        calls.append((arguments[:3], Path(arguments[-1]).read_text()))

    monkeypatch.setattr(environment, "_pip", pip)
    environment.install_missing()
    ((arguments, text),) = calls
    assert arguments == ("install", "--no-deps", "-r")
    names = set(re.findall(r"^(\S+)==", text, flags=re.MULTILINE))
    lock = read_lock(LOCKS["tff"])
    kept = {"ipykernel", "psutil", "jax", "jaxlib", "tensorflow-federated"}
    assert names == lock.keys() - kept
    assert text.count("--hash=") > len(names)


def test_ipython_shows_the_message_alone():
    code = 'from helpers.environment import *; raise UnfitEnvironmentError("found X; Y is needed")'
    shown = subprocess.run(
        [sys.executable, "-m", "IPython", "--quick", "--colors=NoColor", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    assert shown.strip() == "UnfitEnvironmentError: found X; Y is needed"


def test_import_and_check_load_no_heavy_package():
    code = (
        "import sys, helpers.environment as e\n"
        "try: e.check_environment()\n"
        "except e.UnfitEnvironmentError: pass\n"
        "print({'numpy', 'jax', 'jaxlib', 'tensorflow', 'tensorflow_federated'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_description_lists_versions_and_what_is_missing(installed):
    lines = dict(line.split() for line in describe_environment().splitlines())
    assert lines["lane"] == "tff"
    assert lines["jax"] == "0.4.30"
    assert lines["tensorflow"] == "missing"


def test_description_of_lane_b_lists_its_packages(current):
    lines = dict(line.split() for line in describe_environment().splitlines())
    assert lines["lane"] == "current"
    assert lines["federated-language"] == "0.5.4"
    assert "tensorflow" not in lines


# --- the lock


def read_requirements(name):
    lines = (ROOT / name).read_text().splitlines()
    stripped = (line.split("#")[0].strip() for line in lines)
    return [Requirement(line) for line in stripped if line]


def read_lock(name):
    text = (ROOT / name).read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)(?: ; .*)? \\$", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "lane"),
    [("requirements.in", "tff"), ("overrides.txt", "tff"), ("requirements-current.in", "current")],
)
def test_lock_satisfies(name, lane):
    lock = read_lock(LOCKS[lane])
    unmet = [
        str(requirement)
        for requirement in read_requirements(name)
        if not requirement.specifier.contains(lock.get(requirement.name, "0"), prereleases=True)
    ]
    assert unmet == []


@pytest.mark.parametrize("name", ["requirements.in", "requirements-current.in"])
def test_every_direct_dependency_has_a_reason(name):
    lines = (ROOT / name).read_text().splitlines()
    without = [line for line in lines if line and not re.search(r"#\s*\S", line)]
    assert without == []


@pytest.mark.parametrize("name", LOCKS.values())
def test_lock_has_a_hash_for_every_package(name):
    text = (ROOT / name).read_text()
    entries = re.findall(r"^\S+==\S+ (?:; .* )?\\\n    --hash=sha256:", text, flags=re.MULTILINE)
    packages = re.findall(r"^[^\s#]", text, flags=re.MULTILINE)
    assert len(entries) == len(read_lock(name)) == len(packages) > 50


def test_locks_say_how_they_are_made_and_installed():
    header = (ROOT / "requirements.txt").read_text().split("\n\n")[0]
    assert "make lock" in header
    assert "Linux x86_64" in header
    assert "pip install --no-deps -r requirements.txt" in header
    header = (ROOT / "requirements-current.txt").read_text().split("\n\n")[0]
    assert "make lock" in header
    assert "pip install -r requirements-current.txt" in header


@pytest.mark.parametrize("name", [*INPUTS, *LOCKS.values(), "environment.yml"])
def test_no_package_index_is_named(name):
    text = (ROOT / name).read_text()
    assert re.findall(r"\S*://\S*|--(?:extra-)?index-url|--find-links", text) == []


def test_check_wants_the_versions_of_the_lock():
    lock = read_lock(LOCKS["tff"])
    assert {name: lock[name] for name in environment.REQUIRED_VERSIONS} == (
        environment.REQUIRED_VERSIONS
    )


def test_lock_of_lane_b_passes_the_check(current):
    current.versions = read_lock(LOCKS["current"])
    check_environment()


# --- conda


@pytest.fixture(scope="module")
def conda():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def test_conda_installs_the_lock_and_nothing_else_by_pip(conda):
    assert conda["dependencies"][-1] == {"pip": ["-r requirements.txt"]}


def test_conda_python_is_that_of_the_check(conda):
    python = ".".join(map(str, environment.PYTHON_VERSION))
    assert [d for d in conda["dependencies"] if isinstance(d, str)] == [f"python={python}", "pip"]


def test_conda_file_says_how_pip_gets_no_deps():
    assert "PIP_NO_DEPS=1 conda env create" in (ROOT / "environment.yml").read_text()


# --- .ci/venv, in a copy and with made-up tools

TOOLS = ["bash", "awk", "cat", "cp", "dirname", "grep", "head", "mkdir", "rm", "sed", "sha256sum"]
TOOLS += ["sort", "tail", "tr"]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with .ci/venv and a PATH of made-up uname, getconf and Pythons."""
    root = tmp_path / "checkout"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "venv", root / ".ci")
    for name in LOCKS.values():
        (root / name).write_text("setuptools==1 \\\n    --hash=sha256:0\n")
    (root / "pyproject.toml").write_text("")
    commands = tmp_path / "bin"
    commands.mkdir()
    for tool in TOOLS:
        (commands / tool).symlink_to(shutil.which(tool))
    put_command(commands, "uname", '[[ $1 == -s ]] && echo "Linux" || echo "x86_64"')
    put_command(commands, "getconf", 'echo "glibc 2.36"')
    return SimpleNamespace(root=root, commands=commands)


def put_command(folder, name, script):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


# Stands for Python: says its version; `-m venv DIR` copies it there; `-m pip` is logged.
FAKE_PYTHON = """
case "$*" in
  --version) echo "Python VERSION.0" ;;
  -c*) echo "VERSION" | tr . ' ' ;;
  "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip"*) echo "$*" >>pip.log; [[ "$*" != *"FAILING"* ]] ;;
esac
"""


def put_python(checkout, name, version, failing="nothing"):
    script = FAKE_PYTHON.replace("VERSION", version).replace("FAILING", failing)
    put_command(checkout.commands, name, script)


def build(checkout, **variables):
    return subprocess.run(
        ["bash", ".ci/venv"],
        cwd=checkout.root,
        env={"PATH": str(checkout.commands)} | variables,
        capture_output=True,
        text=True,
    )


def pip_calls(checkout):
    log = checkout.root / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


def assert_refused(result, message):
    assert result.returncode == 1
    assert re.fullmatch(rf"error: .*{message}.*\n", result.stderr)


def test_no_python_311_is_refused_with_what_was_found(checkout):
    put_python(checkout, "python3", "3.13")
    found = r"python3\.11: none, python3: Python 3\.13\.0, python: none"
    assert_refused(build(checkout), rf"{found}.*make PYTHON=")


def test_given_python_of_another_version_is_refused(checkout):
    put_python(checkout, "python3.11", "3.11")
    put_python(checkout, "mine", "3.12")
    assert_refused(
        build(checkout, PYTHON="mine"), r"PYTHON=mine is not Python 3\.11 \(Python 3\.12"
    )


@pytest.mark.parametrize("name", ["python3.11", "python3", "python"])
def test_python_311_is_found_under(name, checkout):
    put_python(checkout, name, "3.11")
    assert build(checkout).returncode == 0


def test_another_system_is_refused(checkout):
    put_command(checkout.commands, "uname", '[[ $1 == -s ]] && echo Darwin || echo "arm64"')
    assert_refused(build(checkout), "this is Darwin arm64")


@pytest.mark.parametrize(
    ("script", "shown"), [("echo glibc 2.28", r"glibc 2\.28"), ("exit 1", "no glibc")]
)
def test_another_c_library_is_refused(checkout, script, shown):
    put_command(checkout.commands, "getconf", script)
    assert_refused(build(checkout), f"this system has {shown}")


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_lane_b_is_built_beside_lane_a_by_plain_pip(checkout, version):
    put_python(checkout, "python3", version)
    put_command(checkout.commands, "uname", "echo Darwin")
    assert build(checkout, LANE="current").returncode == 0
    assert (checkout.root / ".venv-current" / "stamp").exists()
    assert not (checkout.root / ".venv").exists()
    lock, package = pip_calls(checkout)
    assert lock.endswith("--require-hashes -r requirements-current.txt")
    assert "--no-deps" not in lock
    assert package.endswith("--editable .")


def test_no_current_python_is_refused_with_what_was_found(checkout):
    put_python(checkout, "python3", "3.11")
    found = r"python3\.13: none, python3\.12: none, python3: Python 3\.11\.0, python: none"
    message = rf"no Python 3\.12 or later found \({found}.*make PYTHON="
    assert_refused(build(checkout, LANE="current"), message)


def test_python_of_pyenv_is_found_behind_its_shims(checkout):
    put_python(checkout, "python3", "3.11")
    folder = checkout.root / "3.13.1" / "bin"
    folder.mkdir(parents=True)
    put_command(
        folder, "python", FAKE_PYTHON.replace("VERSION", "3.13").replace("FAILING", "nothing")
    )
    put_command(
        checkout.commands,
        "pyenv",
        f"[[ $1 == versions ]] && printf '%s\\n' 3.11.7 3.13.1 || echo {checkout.root}/$2",
    )
    assert build(checkout, LANE="current").returncode == 0
    assert (checkout.root / ".venv-current" / "stamp").exists()


def test_unknown_lane_is_refused(checkout):
    assert_refused(build(checkout, LANE="curent"), "unknown LANE=curent; there are tff and current")


def test_lock_is_installed_with_hashes_and_without_dependencies(checkout):
    put_python(checkout, "python3.11", "3.11")
    build(checkout)
    (call,) = [call for call in pip_calls(checkout) if "-r requirements.txt" in call]
    assert "--no-deps --require-hashes" in call


def test_build_that_is_up_to_date_installs_nothing(checkout):
    put_python(checkout, "python3.11", "3.11")
    build(checkout)
    before = pip_calls(checkout)
    os.utime(checkout.root / "requirements.txt")  # new time, same content
    assert build(checkout).returncode == 0
    assert pip_calls(checkout) == before


def test_changed_lock_is_installed(checkout):
    put_python(checkout, "python3.11", "3.11")
    build(checkout)
    before = pip_calls(checkout)
    (checkout.root / "requirements.txt").write_text("setuptools==2 \\\n    --hash=sha256:0\n")
    build(checkout)
    assert pip_calls(checkout) == 2 * before


def test_changed_pyproject_installs_the_package_alone(checkout):
    put_python(checkout, "python3.11", "3.11")
    build(checkout)
    before = pip_calls(checkout)
    (checkout.root / "pyproject.toml").write_text("# changed")
    build(checkout)
    (call,) = pip_calls(checkout)[len(before) :]
    assert call.endswith("--editable .")


@pytest.mark.parametrize("failing", ["build-tools", "-r requirements.txt", "--editable"])
def test_build_that_failed_is_built_again(checkout, failing):
    put_python(checkout, "python3.11", "3.11", failing=failing)
    assert build(checkout).returncode != 0
    put_python(checkout, "python3.11", "3.11")
    (checkout.root / "pip.log").unlink()
    assert build(checkout).returncode == 0
    assert len(pip_calls(checkout)) == 3
