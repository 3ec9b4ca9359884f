"""The set-up cell and the Colab badge of each notebook: what they say, and that they work."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from helpers import environment, notebooks
from helpers.notebooks import NotebookError

ROOT = Path(__file__).resolve().parent.parent
STORED = sorted((ROOT / "notebooks").glob("*.ipynb"))
OTHER = "https://github.com/someone/a-fork"


# --- stamps


@pytest.fixture
def copies(tmp_path):
    """The notebooks and the README, to be stamped."""
    paths = [Path(shutil.copy(path, tmp_path)) for path in STORED]
    return paths, Path(shutil.copy(ROOT / "README.md", tmp_path))


def test_what_is_committed_is_stamped_with_the_address_of_pyproject(copies):
    assert notebooks.stamp(*copies, notebooks.repository_address()) == []


def test_another_address_changes_every_notebook_and_the_readme(copies):
    paths, readme = copies
    assert set(notebooks.stamp(*copies, OTHER)) == {*paths, readme}
    old = notebooks.repository_address().removeprefix("https://")
    for path in (*paths, readme):
        text = path.read_text(encoding="utf-8")
        assert old not in text
        assert old.removeprefix("github.com/") not in text
    for path in paths:
        link = f"/someone/a-fork/blob/main/notebooks/{path.name})"
        cells = nbformat.read(path, as_version=4).cells
        assert cells[0].source.splitlines()[2].endswith(link)
        assert f'REPOSITORY = "{OTHER}"' in cells[1].source
        assert link in readme.read_text(encoding="utf-8")


def test_stamping_back_gives_the_same_files(copies):
    paths, readme = copies
    notebooks.stamp(paths, readme, OTHER)
    notebooks.stamp(paths, readme, notebooks.repository_address())
    for path in (*paths, readme):
        original = ROOT / ("notebooks" if path.suffix == ".ipynb" else "") / path.name
        assert path.read_bytes() == original.read_bytes()


def test_notebook_without_a_title_is_named_and_nothing_is_written(copies):
    paths, readme = copies
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("1")]), paths[-1])
    before = paths[0].read_bytes()
    with pytest.raises(NotebookError, match=f"{paths[-1].name} must start with a title"):
        notebooks.stamp(paths, readme, OTHER)
    assert paths[0].read_bytes() == before


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_address_is_read_without_its_end(tmp_path, end):
    settings = tmp_path / "pyproject.toml"
    settings.write_text(f'[project.urls]\nRepository = "{OTHER}{end}"\n')
    assert notebooks.repository_address(settings) == OTHER


@pytest.mark.parametrize("line", ["", 'Repository = "https://example.org/a/b"'])
def test_address_that_colab_cannot_open_is_refused(tmp_path, line):
    settings = tmp_path / "pyproject.toml"
    settings.write_text(f"[project.urls]\n{line}\n")
    with pytest.raises(NotebookError, match="Colab needs https://github"):
        notebooks.repository_address(settings)


# --- a bare environment, with Jupyter alone in it


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    jupyter = [f"{name}=={metadata.version(name)}" for name in ("ipykernel", "nbconvert")]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *jupyter], check=True)
    return python


def execute(python, path, **variables):
    """Runs a notebook in place with that Python, and returns it; cells may fail."""
    hidden = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV", "TF_CPP_MIN_LOG_LEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    command = "nbconvert --to notebook --inplace --execute --allow-errors --log-level=ERROR"
    subprocess.run(
        [str(python), "-m", *command.split(), path.name],
        cwd=path.parent,
        env={**inherited, **variables, "JUPYTER_PATH": "", "IPYTHONDIR": str(path.parent / "i")},
        check=True,
        timeout=550,
    )
    return nbformat.read(path, as_version=4)


def errors(notebook):
    return [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]


def text(cell):
    outputs = (
        output.get("text") or output.get("data", {}).get("text/plain") for output in cell.outputs
    )
    return "".join(output or "" for output in outputs)


def test_wrong_environment_inside_the_repository_gets_one_line(bare_python, tmp_path):
    cell = v4.new_code_cell(notebooks.SETUP_CELL.format(address=OTHER))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "helpers").symlink_to(ROOT / "helpers")
    path = tmp_path / "notebooks" / "some.ipynb"
    nbformat.write(v4.new_notebook(cells=[cell]), path)
    (error,) = errors(execute(bare_python, path))
    assert error.traceback == [f"UnfitEnvironmentError: {error.evalue}"]
    assert re.match(r"found no \S+; .* is needed.*: run \"make lab", error.evalue)
    assert not (path.parent / "repository").exists()


@pytest.fixture
def remote(tmp_path):
    """This working tree, committed to a repository that git fetches in place of the real one."""
    folder = tmp_path / "remote"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{folder.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": notebooks.repository_address(),
    }


@pytest.mark.skipif(
    environment.lane() == "tff" and "TEST_BARE_LANE_A" not in os.environ,
    reason="installs 3 GB; TEST_BARE_LANE_A=1 runs it",
)
def test_notebook_alone_in_a_bare_environment_installs_what_it_needs(bare_python, remote, tmp_path):
    stored = ROOT / "notebooks" / "02_pmap_spmd_basics.ipynb"
    path = tmp_path / "elsewhere" / stored.name
    path.parent.mkdir()
    shutil.copy(stored, path)
    result = execute(bare_python, path, **remote)
    # A cell may show an error on purpose.
    expected = [output.ename for output in errors(nbformat.read(stored, as_version=4))]
    assert [output.ename for output in errors(result)] == expected, errors(result)
    assert text(result.cells[1]).startswith("installing ")
    assert (path.parent / "repository" / "helpers").is_dir()
    checked = 0
    for new, old in zip(result.cells, nbformat.read(stored, as_version=4).cells, strict=True):
        if "nbval-check-output" in old.metadata.get("tags", ()):
            assert text(new) == text(old)
            checked += 1
    assert checked
