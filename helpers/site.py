"""Builds the site: a page for each notebook with its stored outputs, and an index of them.

Usage: python -m helpers.site [NOTEBOOK...]

The pages run no script and fetch nothing: formulas are MathML, pictures are in the page, solutions
fold with plain HTML. So the site reads the same from a disk, from any web server, and offline.
"""

import argparse
import dataclasses
import html
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from helpers.notebooks import (
    ROOT,
    NotebookError,
    badge,
    find_notebooks,
    repository_address,
    without_badges,
    write_atomically,
)

_ROW = re.compile(
    r"(?m)^\| (?P<number>\d+) \| \[(?P<title>.+?)\]\(notebooks/(?P<name>[^)]+\.ipynb)\) "
    r"\| (?P<teaches>.+?) \| (?P<lane>.+?) \| (?P<devices>.+?) \| (?P<time>.+?) \|"
)
_FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$]+)\$", re.DOTALL)
_STYLE = """
body { max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; box-sizing: border-box; }
nav { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; padding: .8rem 0;
  font: 15px/1.5 system-ui, sans-serif; border-bottom: 1px solid #ddd; }
a { color: #0b57a4; }
math[display=block] { margin: 1em 0; overflow-x: auto; overflow-y: hidden; }
pre, .jp-RenderedHTMLCommon table { overflow-x: auto; }
.jp-RenderedHTMLCommon table { display: block; max-width: 100%; }
.jp-OutputArea-output { min-width: 0; overflow-x: auto; }
.jp-OutputArea-output pre { word-break: normal !important; overflow-wrap: anywhere; }
.jp-InputArea-editor { min-width: 0; overflow-x: auto; }
img, svg { max-width: 100%; height: auto; }
summary { cursor: pointer; padding: .4em 0; font: 15px/1.5 system-ui, sans-serif; }
@media (max-width: 45rem) {
  .jp-InputPrompt, .jp-OutputPrompt, .jp-Collapser { display: none !important; }
  body.jp-Notebook, .jp-Cell { padding-left: 0 !important; padding-right: 0 !important; }
  body.jp-Notebook { padding: 0 .8rem 2rem !important; }
  .jp-RenderedHTMLCommon { padding-right: 0 !important; overflow-wrap: anywhere; }
}
"""
_INDEX_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; }
ol { list-style: none; padding: 0; display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
li { border: 1px solid #ddd; border-radius: 6px; padding: 1rem; }
li img { width: 100%; height: 11rem; object-fit: contain; }
h2 { font-size: 1.2rem; margin: .6rem 0 .3rem; }
li p { margin: .4rem 0; }
.facts { color: #555; }
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A notebook as the README's table describes it, in Markdown.

    Attributes:
      number: Its place in the collection.
      title: Its title.
      name: Its file name.
      teaches: What it teaches.
      lane: The lanes that it runs in.
      devices: How many devices it needs.
      time: How long it runs at demo scale.
    """

    number: str
    title: str
    name: str
    teaches: str
    lane: str
    devices: str
    time: str

    @property
    def page(self) -> str:
        """The file name of its page."""
        return str(Path(self.name).with_suffix(".html"))


def read_entries(readme: str, paths: Sequence[Path]) -> list[Entry]:
    """Reads what the README's table says of notebooks.

    Args:
      readme: its text.
      paths: the notebooks.

    Returns:
      An entry for each notebook, in their order.

    Raises:
      NotebookError: the table has no row for a notebook.
    """
    entries = {match["name"]: Entry(**match.groupdict()) for match in _ROW.finditer(readme)}
    if missing := [path.name for path in paths if path.name not in entries]:
        raise NotebookError(f"the README's table of notebooks has no row for {missing[0]}")
    return [entries[path.name] for path in paths]


def write_site(paths: Sequence[Path], folder: Path, address: str, readme: str) -> None:
    """Writes the site: `index.html`, a page and the file of each notebook, and pictures.

    Args:
      paths: the notebooks; a picture `pictures/NN.png` beside one stands for it in the index.
      folder: where the site goes; it is made if it is missing.
      address: of the repository on GitHub, for links to Colab.
      readme: the README's text, whose table says what each notebook teaches.

    Raises:
      NotebookError: the README's table has no row for a notebook.
    """
    entries = read_entries(readme, paths)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for place, (path, entry) in enumerate(zip(paths, entries)):
        before = entries[place - 1] if place else None
        after = entries[place + 1] if place + 1 < len(entries) else None
        page = notebook_page(path, _navigation(entry, before, after, address), entry)
        write_atomically(folder / entry.page, page)
        shutil.copy(path, folder / path.name)
        picture = _picture(path)
        if picture.is_file():
            shutil.copy(picture, folder / "pictures")
    pictures = {path.name for path in paths if _picture(path).is_file()}
    write_atomically(folder / "index.html", index_page(entries, pictures, address))


def notebook_page(path: Path, navigation: str, entry: Entry) -> str:
    """Makes the page of a notebook from its stored outputs.

    Args:
      path: the notebook.
      navigation: HTML for the top of the page.
      entry: what the README says of it.

    Returns:
      HTML.
    """
    import bs4
    import nbconvert

    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = without_badges(notebook.cells[0].source)
    text, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    page = bs4.BeautifulSoup(text, "html.parser")
    for script in page.find_all("script"):
        script.decompose()
    for part in page.select(".jp-RenderedMarkdown"):
        _set_formulas(part)
    for cell in page.select(".celltag_solution"):
        title = re.search(r"@title ([^{\n]+)", cell.get_text())
        _fold(page, cell, title[1].strip() if title else "Solution")
    for cell in page.select(".jp-CodeCell"):
        if "check_environment()" in cell.get_text():
            _fold(page, cell, "Set-up, the same in every notebook")
    for link in page.select("a[href$='.ipynb']:not([href*=':'])"):
        link["href"] = str(Path(link["href"]).with_suffix(".html"))
    page.title.string = _plain(entry.title)
    style = page.new_tag("style")
    style.string = _STYLE
    page.head.append(style)
    page.body.insert(0, bs4.BeautifulSoup(navigation, "html.parser"))
    return str(page)


def index_page(entries: Sequence[Entry], pictures: set[str], address: str) -> str:
    """Makes the index: what each notebook teaches, its time and its picture.

    Args:
      entries: the notebooks.
      pictures: the file names of those that have a picture.
      address: of the repository on GitHub.

    Returns:
      HTML.
    """
    items = "\n".join(_item(entry, entry.name in pictures, address) for entry in entries)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Distributed JAX in notebooks</title>
<link rel="icon" href="data:,">
<style>{_STYLE}{_INDEX_STYLE}</style>
</head>
<body>
<h1>Distributed JAX in notebooks</h1>
<p>Federated averaging in TensorFlow Federated with JAX, SPMD with collectives, and Bayesian
inference over sharded data. Every notebook runs from start to end without a network; times are for
two CPU cores. The <a href="{address}">repository</a> says how.</p>
<ol>
{items}
</ol>
</body>
</html>
"""


def _item(entry: Entry, has_picture: bool, address: str) -> str:
    image = f'<img src="pictures/{_picture(Path(entry.name)).name}" alt="">' if has_picture else ""
    return f"""<li>
<a href="{entry.page}">{image}</a>
<h2><a href="{entry.page}">{entry.number}. {_inline(entry.title)}</a></h2>
<p>{_inline(entry.teaches)}</p>
<p class="facts">{_inline(entry.time)} at demo scale, lane {_inline(entry.lane)},
devices: {_inline(entry.devices)}</p>
<p><a href="{_colab(entry, address)}">Open in Colab</a>,
<a href="{entry.name}">notebook file</a></p>
</li>"""


def _navigation(entry: Entry, before: Entry | None, after: Entry | None, address: str) -> str:
    links = [("index.html", "All notebooks")]
    links += [
        (other.page, f"{other.number}. {_inline(other.title)}")
        for other in (before, after)
        if other
    ]
    links += [(_colab(entry, address), "Open in Colab"), (entry.name, "Notebook file")]
    return "<nav>" + " ".join(f'<a href="{link}">{name}</a>' for link, name in links) + "</nav>"


def _colab(entry: Entry, address: str) -> str:
    return badge(entry.name, address).rpartition("(")[2].rstrip(")")


def _picture(path: Path) -> Path:
    return path.parent / "pictures" / f"{path.stem.partition('_')[0]}.png"


def _inline(text: str) -> str:
    """HTML of a line of Markdown that has code and nothing else."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _plain(text: str) -> str:
    return text.replace("`", "")


def _set_formulas(part: Any) -> None:
    """Turns TeX into MathML, which browsers set without a script."""
    import bs4
    from latex2mathml.converter import convert

    for text in part.find_all(string=_FORMULA):
        if text.find_parent(["code", "pre"]):
            continue
        pieces, end = [], 0
        for match in _FORMULA.finditer(text):
            display = "block" if match["block"] else "inline"
            formula = convert(match["block"] or match["inline"], display=display)
            pieces += [text[end : match.start()], bs4.BeautifulSoup(formula, "html.parser")]
            end = match.end()
        text.replace_with(*pieces, text[end:])


def _fold(page: Any, cell: Any, title: str) -> None:
    """Hides a cell, code and output, until the reader asks for it."""
    details, summary = page.new_tag("details"), page.new_tag("summary")
    summary.string = title
    cell.wrap(details)
    details.insert(0, summary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the site of this repository to build/html: what `make html` does.

    Args:
      arguments: the command line, notebooks; None for that of the process.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m helpers.site", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all, if none is named")
    folder = ROOT / "build" / "html"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    try:
        paths = find_notebooks(parser.parse_args(arguments).notebooks)
        write_site(paths, folder, repository_address(), readme)
    except NotebookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"HTML: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
