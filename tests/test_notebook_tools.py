"""The programs behind make run, make outputs and make html, and the sweep after make test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat import v4

from helpers import notebooks
from helpers.notebooks import (
    KERNELSPEC,
    NotebookError,
    find_notebooks,
    find_picture,
    find_problems,
    minimal_notebook,
    parse_parameters,
    run_notebooks,
    store_outputs,
    write_atomically,
    write_html,
)

ROOT = Path(__file__).resolve().parent.parent
STORED = sorted((ROOT / "notebooks").glob("*.ipynb"))


def write_notebook(path, *sources):
    """Writes a notebook whose first cell is tagged `parameters`, full of metadata."""
    cells = [v4.new_code_cell(source) for source in sources]
    for cell in cells:
        cell.metadata = {"ExecuteTime": {"start": 0}, "collapsed": True, "tags": []}
    if cells:
        cells[0].metadata["tags"] = ["parameters"]
    metadata = {"kernelspec": {"name": "other", "display_name": "Other"}, "widgets": {"a": 1}}
    nbformat.write(v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def texts(path):
    """What the code cells of a notebook file printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


# --- what is committed


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_notebook_has_nothing_that_must_not_be_there(path):
    assert find_problems(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_notebook_has_the_parts_that_every_notebook_has(path):
    cells = nbformat.read(path, as_version=4).cells
    for words in ("**You will learn**", "**Needs**"):
        assert words in cells[0].source
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in cells) == 1
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for heading in ("## Exercises", "## Summary", "## Next"):
        assert f"\n{heading}\n" in prose


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_solutions_are_folded_in_jupyter_and_in_colab(path):
    cells = nbformat.read(path, as_version=4).cells
    solutions = [cell for cell in cells if "solution" in cell.metadata.get("tags", ())]
    assert len(solutions) >= 2
    for cell in solutions:
        assert cell.metadata["jupyter"] == {"source_hidden": True}
        assert cell.metadata["cellView"] == "form"
        assert re.match(r'# @title Solution .*\{display-mode: "form"\}', cell.source)


def test_readme_names_every_notebook_and_every_file_it_names_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?!https?:)[^)#]+)", readme)
    assert {f"notebooks/{path.name}" for path in STORED} <= set(links)
    assert [link for link in links if not (ROOT / link).exists()] == []


# --- the README's pictures


def test_the_figure_of_the_tagged_cell_is_the_picture():
    plain = v4.new_code_cell(outputs=[v4.new_output("display_data", {"image/png": "YQ=="})])
    tagged = v4.new_code_cell(outputs=[v4.new_output("display_data", {"image/png": "Yg=="})])
    tagged.metadata["tags"] = ["picture"]
    assert find_picture(v4.new_notebook(cells=[plain, tagged])) == b"b"
    assert find_picture(v4.new_notebook(cells=[plain])) is None


# --- choosing notebooks and parameters


def test_all_notebooks_are_found_in_order(tmp_path):
    paths = [write_notebook(tmp_path / name) for name in ("02_b.ipynb", "01_a.ipynb")]
    assert find_notebooks([], tmp_path) == paths[::-1]


def test_missing_notebook_is_refused(tmp_path):
    with pytest.raises(NotebookError, match=r"nowhere\.ipynb is not a notebook"):
        find_notebooks([tmp_path / "nowhere.ipynb"])


def test_folder_without_notebooks_is_refused(tmp_path):
    with pytest.raises(NotebookError, match="there is no notebook"):
        find_notebooks([], tmp_path)


def test_parameters_have_the_types_of_yaml():
    parsed = parse_parameters("scale=full rounds=3 rate=0.5 plot=true name='a b'")
    assert parsed == {"scale": "full", "rounds": 3, "rate": 0.5, "plot": True, "name": "a b"}


@pytest.mark.parametrize("text", ["scale", "=3", "a-b=1", "a=[1"])
def test_malformed_parameters_are_refused(text):
    with pytest.raises(NotebookError, match="PARAMS has"):
        parse_parameters(text)


# --- make run


def test_run_overrides_a_parameter_and_leaves_the_notebook(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "rounds = 2", "print(rounds + 1)")
    before = path.read_bytes()
    run_notebooks([path], {"rounds": 10}, tmp_path / "out")
    assert texts(tmp_path / "out" / "n.ipynb")[-1] == "11\n"
    assert path.read_bytes() == before
    assert "11" in (tmp_path / "out" / "n.html").read_text()


def test_run_refuses_a_parameter_that_no_notebook_has(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "rounds = 2")
    with pytest.raises(NotebookError, match="no notebook has a parameter round; they have: rounds"):
        run_notebooks([path], {"round": 10}, tmp_path / "out")


def test_run_names_the_cell_that_failed(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "rounds = 2", "print(rounds)", "rounds / 0")
    with pytest.raises(NotebookError, match=r"n\.ipynb: cell \[3\] failed with ZeroDivisionError"):
        run_notebooks([path], {}, tmp_path / "out")


def test_command_line_ends_with_an_error_when_a_cell_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    path = write_notebook(tmp_path / "n.ipynb", "1 / 0")
    assert notebooks.main(["run", str(path)]) == 1
    assert "error: n.ipynb: cell [1] failed with ZeroDivisionError" in capsys.readouterr().err


# --- make outputs


def test_outputs_are_stored_with_minimal_metadata(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "rounds = 2", "print(rounds + 1)")
    store_outputs(path)
    stored = json.loads(path.read_text())
    assert stored["metadata"] == {"kernelspec": KERNELSPEC}
    assert [cell["metadata"] for cell in stored["cells"]] == [{"tags": ["parameters"]}, {}]
    assert [cell["execution_count"] for cell in stored["cells"]] == [1, 2]
    assert texts(path) == ["", "3\n"]


def test_outputs_stored_twice_are_the_same_file(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "rounds = 2", "print(rounds + 1)")
    store_outputs(path)
    first = path.read_bytes()
    store_outputs(path)
    assert path.read_bytes() == first


def test_failing_cell_leaves_the_stored_notebook(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "print(1)", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(NotebookError, match=r"cell \[2\] failed with ZeroDivisionError"):
        store_outputs(path)
    assert path.read_bytes() == before


def test_output_with_a_path_of_this_machine_is_not_stored(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "import sys", "print(sys.executable)")
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="cell 1 prints a path of this machine"):
        store_outputs(path)
    assert path.read_bytes() == before


def test_interrupted_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]


# --- find_problems, write_html


def executed_notebook():
    cell = v4.new_code_cell("1", execution_count=1)
    return minimal_notebook(v4.new_notebook(cells=[cell]))


def test_minimal_executed_notebook_has_no_problem():
    assert find_problems(executed_notebook()) == []


@pytest.mark.parametrize("count", [None, 2])
def test_cell_that_was_not_run_in_order_is_a_problem(count):
    notebook = executed_notebook()
    notebook.cells[0].execution_count = count
    assert len(find_problems(notebook)) == 1


def test_widget_state_is_a_problem():
    notebook = executed_notebook()
    notebook.metadata["widgets"] = {}
    assert len(find_problems(notebook)) == 1


def test_execution_times_are_a_problem():
    notebook = executed_notebook()
    notebook.cells[0].metadata["execution"] = {}
    assert find_problems(notebook) == ["cell 0 has metadata execution"]


def test_html_shows_the_stored_output(tmp_path):
    notebook = executed_notebook()
    notebook.cells[0].outputs = [v4.new_output("stream", text="stored and shown")]
    nbformat.write(notebook, tmp_path / "n.ipynb")
    write_html(tmp_path / "n.ipynb", tmp_path / "n.html")
    assert "stored and shown" in (tmp_path / "n.html").read_text()


# --- nbval: what make test compares


def stdout(text):
    return v4.new_output("stream", name="stdout", text=text)


def picture(text):
    return v4.new_output("display_data", {"image/png": "BBBB", "text/plain": text})


WRITE_PICTURE = "display({'image/png': 'AAAA', 'text/plain': 'a'}, raw=True)"
# What a cell does and what is stored of it, and whether make test must pass it.
NBVAL_CASES = {
    "same_number": ("print(0.5)", [stdout("0.5\n")], True),
    "other_number": ("print(0.5)", [stdout("0.25\n")], False),
    "other_text": ("print(0.5)", [stdout("0.5 in all\n")], False),
    "other_result": ("0.5", [v4.new_output("execute_result", {"text/plain": "1"})], False),
    "nothing_stored": ("print(0.5)", [], False),
    "stderr_not_stored": ("import sys; print('warning', file=sys.stderr)", [], False),
    "address": ("print(object())", [stdout("<object object at 0x7f0000000000>\n")], True),
    "duration": ("print('2 rounds in 1.5 s')", [stdout("2 rounds in 20 ms\n")], True),
    "number_beside_duration": ("print('2 rounds in 1 s')", [stdout("3 rounds in 1 s\n")], False),
    "progress": (
        "print('2/2 [00:03<00:00, 1.2it/s]')",
        [stdout("2/2 [01:00<00:01, 9it/s]\n")],
        True,
    ),
    "progress_count": (
        "print('2/2 [00:03<00:00, 1it/s]')",
        [stdout("1/2 [00:03<00:00, 1it/s]\n")],
        False,
    ),
    "pixels": (WRITE_PICTURE, [picture("a")], True),
    "text_beside_picture": (WRITE_PICTURE, [picture("b")], False),
    "picture_not_stored": (WRITE_PICTURE, [stdout("a\n")], False),
}


@pytest.fixture(scope="module")
def nbval_verdicts(tmp_path_factory):
    """By case: did nbval, with our settings, pass the cell? One notebook with a cell a case."""
    folder = tmp_path_factory.mktemp("nbval")
    for name in ("conftest.py", "nbval_sanitize.cfg"):
        (folder / name).write_text((ROOT / "notebooks" / name).read_text())
    cells = [
        v4.new_code_cell(source, execution_count=1, outputs=outputs)
        for source, outputs, _ in NBVAL_CASES.values()
    ]
    nbformat.write(v4.new_notebook(cells=cells), folder / "n.ipynb")
    options = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", "nbval_sanitize.cfg"]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
    report = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    lines = re.findall(r"^(PASSED|FAILED) n\.ipynb::Cell (\d+)", report, flags=re.MULTILINE)
    verdicts = {int(number): verdict == "PASSED" for verdict, number in lines}
    return {case: verdicts.get(number) for number, case in enumerate(NBVAL_CASES)}


@pytest.mark.parametrize("case", NBVAL_CASES)
def test_nbval_compares_all_but_times_addresses_and_pixels(case, nbval_verdicts):
    assert nbval_verdicts[case] == NBVAL_CASES[case][-1]


# --- processes that are left


WATCH = (
    "import sys; from helpers.processes import run_and_sweep;"
    "sys.exit(run_and_sweep(sys.argv[2:], grace=float(sys.argv[1])))"
)


def watch(*command, grace=1):
    return subprocess.run(
        [sys.executable, "-c", WATCH, str(grace), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("status", [0, 3])
def test_watch_passes_on_the_exit_status(status):
    assert watch("bash", "-c", f"exit {status}").returncode == status


def test_watch_of_a_missing_command_is_an_error():
    result = watch("no-such-command")
    assert (result.returncode, "cannot run no-such-command" in result.stderr) == (127, True)


@pytest.mark.parametrize(
    "start", ["sleep 600", "setsid sleep 600", "env -i /usr/bin/env sleep 600"]
)
def test_watch_lists_and_kills_a_process_that_is_left(start):
    result = watch("bash", "-c", f"{start} >/dev/null 2>&1 & echo $!")
    assert result.returncode == 1
    assert "sleep 600" in result.stderr
    assert not psutil.pid_exists(int(result.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system collects orphans")
def test_watch_leaves_no_zombie_of_an_orphan_that_ends():
    code = (
        "import psutil, subprocess\n"
        "shell = ['bash', '-c', 'sleep 1 >/dev/null 2>&1 & echo $!']\n"
        "orphan = psutil.Process(int(subprocess.check_output(shell)))\n"
        "print(orphan.ppid() == psutil.Process().ppid())\n"
        "psutil.wait_procs([orphan], timeout=20)\n"
        "print(psutil.pid_exists(orphan.pid))\n"
    )
    result = watch(sys.executable, "-c", code)
    assert (result.returncode, result.stdout.split()) == (0, ["True", "False"]), result.stderr


def test_watch_lets_a_process_end_by_itself():
    assert watch("bash", "-c", "sleep 1 >/dev/null 2>&1 &", grace=60).returncode == 0


def test_watch_that_is_terminated_takes_its_processes_along():
    script = "setsid sleep 600 >/dev/null 2>&1 & echo $!; sleep 600"
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.processes", "bash", "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    sleeper = int(process.stdout.readline())
    process.terminate()
    assert process.wait(timeout=60) == 128 + 15
    assert not psutil.pid_exists(sleeper)
