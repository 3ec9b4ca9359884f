"""Runs, stores and stamps the notebooks: what `make run`, `make outputs` and `make badges` do.

Usage: python -m helpers.notebooks {run,outputs,badges} [NOTEBOOK...]
"""

import argparse
import base64
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Tags steer the tools; the others fold a cell's input, in Jupyter and in Colab.
CELL_METADATA = {"tags", "jupyter", "cellView"}
# Without its note that it talks to this process unencrypted, which a reader cannot act on.
_KERNEL_ARGUMENTS = ["--log-level=ERROR"]

# The second cell of every notebook.
SETUP_CELL = """\
import importlib.util
import os
import sys

if importlib.util.find_spec("helpers") is None:
    if os.path.isdir("../helpers"):  # in the repository, but not in its environment
        sys.path.insert(0, "..")
    else:  # Colab, or a notebook on its own
        REPOSITORY = "{address}"
        if not os.path.isdir("repository"):
            !git clone --quiet --depth 1 {{REPOSITORY}} repository
        !{{sys.executable}} repository/helpers/environment.py install
        sys.path.insert(0, "repository")

from helpers.environment import check_environment

check_environment()"""
_BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
_BADGE_PATTERN = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*/notebooks/([^)/]+\.ipynb)\)")


class NotebookError(Exception):
    """A notebook, or a request about one, is wrong; the message says what to do."""


def find_notebooks(paths: Sequence[Path] = (), folder: Path = ROOT / "notebooks") -> list[Path]:
    """Finds the notebooks to work on.

    Args:
      paths: notebook files; none for all in `folder`.
      folder: where the collection is.

    Returns:
      `paths`, or the notebooks of the folder in the order of their names.

    Raises:
      NotebookError: a path is not a notebook, or there is none.
    """
    for path in paths:
        if path.suffix != ".ipynb" or not path.is_file():
            raise NotebookError(f"{path} is not a notebook; name one, such as notebooks/01_….ipynb")
    found = list(paths) or sorted(folder.glob("*.ipynb"))
    if not found:
        raise NotebookError(f"there is no notebook in {folder.name}/")
    return found


def parse_parameters(text: str) -> dict[str, Any]:
    """Reads parameters as they are given to `make run`.

    Args:
      text: `name=value` pairs with spaces between, values in YAML: `scale=full num_rounds=3`.

    Returns:
      The values by name.

    Raises:
      NotebookError: a part is not a `name=value` pair.
    """
    import yaml

    parameters = {}
    for part in shlex.split(text):
        name, equals, value = part.partition("=")
        if not (name.isidentifier() and equals):
            raise NotebookError(f'PARAMS has "{part}"; write name=value, such as scale=full')
        try:
            parameters[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise NotebookError(f'PARAMS has "{part}", whose value is not YAML') from error
    return parameters


def run_notebooks(paths: Sequence[Path], parameters: dict[str, Any], folder: Path) -> None:
    """Executes notebooks and writes each, with its outputs, as a notebook and as HTML.

    Args:
      paths: the notebooks; they stay as they are.
      parameters: values for the cells tagged `parameters`; a notebook takes those that it has.
      folder: where the results go; it is made if it is missing.

    Raises:
      NotebookError: no notebook has one of the parameters, or a cell fails.
    """
    import papermill

    # With the kernel set, papermill knows the language also where an editor left it out.
    notebooks = {path: minimal_notebook(nbformat.read(path, as_version=4)) for path in paths}
    known = {path: set(papermill.inspect_notebook(book)) for path, book in notebooks.items()}
    if unknown := set(parameters).difference(*known.values()):
        names = ", ".join(sorted(set().union(*known.values()))) or "none"
        raise NotebookError(f"no notebook has a parameter {min(unknown)}; they have: {names}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        print(path.name, file=sys.stderr)
        result = folder / path.name
        try:
            papermill.execute_notebook(
                notebooks[path],
                str(result),
                parameters={name: parameters[name] for name in known[path] & parameters.keys()},
                kernel_name=KERNELSPEC["name"],
                cwd=str(path.parent),
                progress_bar={"unit": "cell"},
                extra_arguments=_KERNEL_ARGUMENTS,
            )
        except papermill.PapermillExecutionError as error:
            message = _failure(path, error.exec_count, error.source, error.ename, error.evalue)
            raise NotebookError(f"{message}\nIts outputs up to there: {result}") from None
        write_html(result, result.with_suffix(".html"))


def store_outputs(path: Path) -> None:
    """Executes a notebook and stores its outputs in place, with minimal metadata.

    The file is replaced at the end in one step: an interrupted or failing run leaves it as it was.
    The figure of a cell tagged `picture` is written to `pictures/` beside it, for the README.

    Args:
      path: the notebook.

    Raises:
      NotebookError: a cell fails, or an output names a path of this machine.
    """
    import nbclient
    import tqdm

    notebook = minimal_notebook(nbformat.read(path, as_version=4))
    print(path.name, file=sys.stderr)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    with tqdm.tqdm(total=len(cells), unit="cell") as progress:
        client = nbclient.NotebookClient(
            notebook,
            timeout=None,
            kernel_name=KERNELSPEC["name"],
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            store_widget_state=False,
            extra_arguments=_KERNEL_ARGUMENTS,
            coalesce_streams=True,
            on_cell_complete=lambda **_: progress.update(),
        )
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            cell = next(
                cell
                for cell in cells
                if any(output.output_type == "error" for output in cell.outputs)
                and "raises-exception" not in cell.metadata.get("tags", ())
            )
            message = _failure(path, cell.execution_count, cell.source, error.ename, error.evalue)
            raise NotebookError(message) from None
    notebook = minimal_notebook(notebook)
    if problems := find_problems(notebook):
        raise NotebookError("\n".join(f"{path.name}: {problem}" for problem in problems))
    write_atomically(path, nbformat.writes(notebook) + "\n")
    if (picture := find_picture(notebook)) is not None:
        folder = path.parent / "pictures"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{path.stem.partition('_')[0]}.png", picture)


def repository_address(settings: Path = ROOT / "pyproject.toml") -> str:
    """Reads where the repository is, the one setting that badges and set-up cells are made from.

    Args:
      settings: a pyproject.toml with `Repository` under `[project.urls]`.

    Returns:
      The address on GitHub, without a slash or `.git` at its end.

    Raises:
      NotebookError: there is no such setting, or it is not a repository on GitHub, from where alone
        Colab opens notebooks.
    """
    urls = tomllib.loads(settings.read_text(encoding="utf-8")).get("project", {}).get("urls", {})
    address = urls.get("Repository", "").removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise NotebookError(
            f'{settings.name} has Repository = "{address}" under [project.urls]; Colab needs '
            "https://github.com/OWNER/NAME"
        )
    return address


def badge(name: str, address: str) -> str:
    """Makes the Markdown of a badge that opens a notebook in Colab.

    Args:
      name: the notebook's file name.
      address: of the repository on GitHub.

    Returns:
      An image with a link.
    """
    place = address.removeprefix("https://github.com/")
    link = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}"
    return f"[![Open in Colab]({_BADGE_IMAGE})]({link})"


def stamp_notebook(notebook: NotebookNode, name: str, address: str) -> NotebookNode:
    """Copies a notebook with the badge under its title and the set-up cell of this address.

    Args:
      notebook: a notebook of format 4.
      name: its file name.
      address: of the repository on GitHub.

    Returns:
      The copy; stored outputs stay.

    Raises:
      NotebookError: the notebook does not start with a title and a set-up cell.
    """
    copy = nbformat.from_dict(notebook)
    first, second = [*copy.cells, None, None][:2]
    if not (first and second and first.source.startswith("# ") and second.cell_type == "code"):
        raise NotebookError(f"{name} must start with a title and a set-up cell")
    title, _, rest = without_badges(first.source).partition("\n")
    first.source = f"{title}\n\n{badge(name, address)}\n\n{rest.lstrip()}"
    second.source = SETUP_CELL.format(address=address)
    return copy


def stamp_text(text: str, address: str) -> str:
    """Rewrites the badges of a text, such as the README, for this address.

    Args:
      text: Markdown.
      address: of the repository on GitHub.

    Returns:
      The text.
    """
    return _BADGE_PATTERN.sub(lambda match: badge(match[1], address), text)


def without_badges(text: str) -> str:
    """Removes badges from a text, where there is another link to Colab or no network.

    Args:
      text: Markdown.

    Returns:
      The text.
    """
    return re.sub(rf"{_BADGE_PATTERN.pattern}\n*", "", text)


def stamp(paths: Sequence[Path], readme: Path, address: str) -> list[Path]:
    """Puts badges and set-up cells into notebooks, and badges into the README.

    Args:
      paths: the notebooks.
      readme: the README.
      address: of the repository on GitHub.

    Returns:
      The files that changed.

    Raises:
      NotebookError: a notebook does not start with a title and a set-up cell; nothing is written.
    """
    texts = {}
    for path in paths:
        stamped = stamp_notebook(nbformat.read(path, as_version=4), path.name, address)
        texts[path] = nbformat.writes(stamped) + "\n"
    texts[readme] = stamp_text(readme.read_text(encoding="utf-8"), address)
    changed = [path for path in texts if path.read_text(encoding="utf-8") != texts[path]]
    for path in changed:
        write_atomically(path, texts[path])
    return changed


def find_picture(notebook: NotebookNode) -> bytes | None:
    """Finds the figure that stands for a notebook in the README.

    Args:
      notebook: a notebook of format 4.

    Returns:
      The first PNG of the first cell tagged `picture`, or None where there is none.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code" and "picture" in cell.metadata.get("tags", ()):
            for output in cell.outputs:
                if encoded := output.get("data", {}).get("image/png"):
                    return base64.b64decode(encoded)
    return None


def minimal_notebook(notebook: NotebookNode) -> NotebookNode:
    """Copies a notebook without the metadata that changes with every run or editor.

    Args:
      notebook: a notebook of format 4.

    Returns:
      The copy: kernel `python3`; of the cells' metadata what `CELL_METADATA` names.
    """
    copy = nbformat.from_dict(notebook)
    copy.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC})
    for cell in copy.cells:
        cell.metadata = nbformat.from_dict(
            {key: value for key, value in cell.metadata.items() if value and key in CELL_METADATA}
        )
    return copy


def find_problems(notebook: NotebookNode) -> list[str]:
    """Finds what must not be in a notebook that is committed.

    Args:
      notebook: a notebook of format 4.

    Returns:
      A line a problem: metadata that is not minimal, code cells that were not run, or not in
      order, outputs that name a path of this machine.
    """
    problems = []
    if notebook.metadata != {"kernelspec": KERNELSPEC}:
        problems.append("its metadata is not the kernel python3 alone; run make outputs")
    expected_count = 1
    for number, cell in enumerate(notebook.cells):
        if extra := cell.metadata.keys() - CELL_METADATA:
            problems.append(f"cell {number} has metadata {', '.join(sorted(extra))}")
        if cell.cell_type != "code":
            continue
        if cell.source.strip():
            if cell.execution_count != expected_count:
                problems.append(
                    f"cell {number} was stored as run [{cell.execution_count}], not "
                    f"[{expected_count}]; run make outputs"
                )
            expected_count += 1
        problems += [
            f"cell {number} prints a path of this machine: {name}"
            for name in _machine_paths()
            if any(name in text for output in cell.outputs for text in _texts(output))
        ]
    return problems


def write_html(notebook: Path, result: Path) -> None:
    """Converts a notebook, as it is stored, to an HTML page.

    Args:
      notebook: the notebook file.
      result: the HTML file.
    """
    import nbconvert

    page, _ = nbconvert.HTMLExporter().from_filename(str(notebook))
    write_atomically(result, page)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file in one step: whoever reads it finds the old content or the whole new one.

    Args:
      path: the file.
      content: its new content; text is encoded as UTF-8.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _failure(path: Path, count: object, source: str, name: str, value: str) -> str:
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    return f"{path.name}: cell [{count}] failed with {name}: {value}\n{lines}"


def _machine_paths() -> list[str]:
    paths = {ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir())}
    return sorted(f"{path}/" for path in paths if len(path.parts) > 1)


def _texts(output: NotebookNode) -> list[str]:
    texts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", ())]
    data = output.get("data", {})
    return texts + [value for kind, value in data.items() if kind.startswith("text/")]


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m helpers.notebooks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "outputs", "badges"):
        command = commands.add_parser(name)
        command.add_argument("notebooks", nargs="*", type=Path, help="all, if none is named")
        if name == "run":
            command.add_argument("--parameters", default="", help='"name=value name=value"')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of the command line.

    Args:
      arguments: the command line; None for that of the process.

    Returns:
      The exit status.
    """
    options = _parse_arguments(arguments)
    try:
        paths = find_notebooks(options.notebooks)
        if options.command == "run":
            folder = ROOT / "build" / "run"
            run_notebooks(paths, parse_parameters(options.parameters), folder)
            print(f"HTML: {folder}")
        elif options.command == "outputs":
            for path in paths:
                store_outputs(path)
        else:
            changed = stamp(paths, ROOT / "README.md", repository_address())
            print("stamped:", ", ".join(path.name for path in changed) or "nothing to change")
    except NotebookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
