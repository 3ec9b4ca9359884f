"""The site of the notebooks: what its pages say, and what Chromium makes of them."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import bs4
import nbformat
import pytest
from nbformat import v4

from helpers import site
from helpers.notebooks import SETUP_CELL, NotebookError, find_notebooks

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/someone/a-fork"
README = "| 1 | [A `b` < c](notebooks/01_a.ipynb) | `x` & y | A, B | any | 1 min | badge |\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The site of the real notebooks."""
    folder = tmp_path_factory.mktemp("site")
    site.write_site(find_notebooks(), folder, ADDRESS, (ROOT / "README.md").read_text())
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    return {
        path.name: bs4.BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for path in sorted(folder.glob("*.html"))
    }


def write_small(folder, *cells):
    """The page of a notebook of these cells."""
    path = folder / "01_a.ipynb"
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    site.write_site([path], folder / "site", ADDRESS, README)
    return bs4.BeautifulSoup((folder / "site" / "01_a.html").read_text(), "html.parser")


# --- what is written


def test_formulas_become_mathml_and_code_stays(tmp_path):
    text = "# T\n\nLet $x_1$ be, and `$HOME` not; $$\\mu \\sim\nN(0, 1).$$ End"
    page = write_small(tmp_path, v4.new_markdown_cell(text))
    inline, block = page.select("math")
    assert (inline["display"], block["display"]) == ("inline", "block")
    assert inline.find("msub").get_text() == "x1"
    assert "μ" in block.get_text()
    assert page.find("code", string="$HOME")
    assert page.select_one(".jp-RenderedMarkdown p").get_text().endswith(" End")


def test_solution_is_folded_with_its_output_and_nothing_else_is(tmp_path):
    cell = v4.new_code_cell('# @title Solution 7 {display-mode: "form"}\nprint(1)')
    cell.metadata["tags"] = ["solution"]
    cell.outputs = [v4.new_output("stream", name="stdout", text="the output")]
    page = write_small(tmp_path, v4.new_markdown_cell("# T"), v4.new_code_cell("2"), cell)
    (details,) = page.find_all("details")
    assert details.find("summary").string == "Solution 7"
    assert "the output" in details.get_text()
    assert not details.has_attr("open")


def test_set_up_cell_is_folded(tmp_path):
    cell = v4.new_code_cell(SETUP_CELL.format(address=ADDRESS))
    (details,) = write_small(tmp_path, v4.new_markdown_cell("# T"), cell).find_all("details")
    assert details.find("summary").string.startswith("Set-up")


def test_page_has_a_plain_title_and_links_to_colab_and_to_the_file(tmp_path):
    page = write_small(tmp_path, v4.new_markdown_cell("# T\n\nsee [that](02_b.ipynb#x)"))
    assert page.title.string == "A b < c"
    links = [link["href"] for link in page.find_all("a")]
    assert f"https://colab.research.google.com/github/{ADDRESS[19:]}/blob/main/" in links[1]
    assert {"index.html", "01_a.ipynb"} <= set(links)


def test_index_says_what_a_notebook_teaches(tmp_path):
    write_small(tmp_path, v4.new_markdown_cell("# T"))
    index = (tmp_path / "site" / "index.html").read_text()
    assert "A <code>b</code> &lt; c" in index
    assert "<code>x</code> &amp; y" in index
    assert "1 min at demo scale" in index
    assert "<img" not in index


def test_notebook_that_the_readme_does_not_describe_is_named(tmp_path):
    with pytest.raises(NotebookError, match=r"no row for 09_new\.ipynb"):
        site.write_site([tmp_path / "09_new.ipynb"], tmp_path / "site", ADDRESS, README)
    assert not (tmp_path / "site").exists()


def test_pages_fetch_nothing_and_run_nothing(pages):
    for page in pages.values():
        assert page.find_all("script") == []
        for tag in page.find_all(["img", "link", "iframe", "source"]):
            assert not tag.get("src", tag.get("href", "")).startswith(("http:", "https:", "//"))


def test_index_has_every_notebook_with_its_picture(pages, folder):
    index = pages["index.html"]
    assert len(index.find_all("li")) == len(find_notebooks())
    images = [image["src"] for image in index.find_all("img")]
    assert len(images) == len(find_notebooks())
    for image in images:
        assert (folder / image).is_file()


def test_every_link_inside_the_site_works(pages, folder):
    count = 0
    for name, page in pages.items():
        for link in page.find_all("a", href=True):
            if link["href"].startswith(("http:", "https:")):
                continue
            target, fragment = urldefrag(urljoin(name, link["href"]))
            assert (folder / target).is_file(), f"{name}: {link['href']}"
            if fragment:
                assert pages[target].find(id=unquote(fragment)), f"{name}: {link['href']}"
            count += 1
    assert count > 50


# --- in Chromium


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    arguments = "headless disable-gpu no-first-run disable-background-networking disable-sync"
    arguments += " disable-component-update disable-dev-shm-usage"
    if os.geteuid() == 0:
        arguments += " no-sandbox"  # Chromium's needs another user than root.
    for argument in arguments.split():
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService(executable_path=driver)
    with webdriver.Chrome(options=options, service=service) as browser:
        yield browser


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def url(folder):
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


PAGES = ["index.html", *(path.with_suffix(".html").name for path in find_notebooks())]


def open_page(browser, address, width):
    # A window has a least width, a device that is emulated has not.
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(address)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_page_opens_without_errors_and_nothing_sticks_out(browser, url, name, width):
    open_page(browser, f"{url}/{name}", width)
    assert [
        entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]
    ] == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    broken = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
    assert browser.execute_script(broken) == []


@pytest.mark.parametrize("name", PAGES)
def test_text_is_readable_on_a_phone(browser, url, name):
    open_page(browser, f"{url}/{name}", 390)
    script = """return [...document.querySelectorAll('p')].filter(p => p.offsetParent).map(p =>
        [parseFloat(getComputedStyle(p).fontSize), p.getBoundingClientRect().right, p.innerText])"""
    texts = browser.execute_script(script)
    assert len(texts) > 10
    assert [text for text in texts if text[0] < 13 or text[1] > 390] == []
    script = """return Math.max(...[...document.querySelectorAll('p')].map(
        p => p.getBoundingClientRect().width))"""
    assert browser.execute_script(script) > 300


def test_formulas_are_set(browser, url):
    open_page(browser, f"{url}/04_sharded_logistic_regression.html", 1280)
    script = """return [...document.querySelectorAll('math')].map(m => {
        const box = m.getBoundingClientRect();
        return [box.width, box.height]})"""
    formulas = browser.execute_script(script)
    assert len(formulas) >= 3
    for width, height in formulas:
        assert width > 5
        assert height > 5
    # Not the heights of the boxes: those are the letters' own, and a j is as high as a W.
    script = """return [...document.querySelectorAll('msub')].map(({children}) =>
        [...children].map(part => parseFloat(getComputedStyle(part).fontSize)))"""
    indices = browser.execute_script(script)
    assert indices
    for letter, index in indices:
        assert index < letter * 0.9  # An index is smaller: it was set, not spelled.
    script = "return document.querySelector('main, body').innerText"
    assert "$" not in browser.execute_script(script)


def test_solution_opens_at_a_click(browser, url):
    open_page(browser, f"{url}/02_pmap_spmd_basics.html", 1280)
    details = browser.find_elements("tag name", "details")[-1]
    code = details.find_element("css selector", ".jp-InputArea-editor")
    assert not code.is_displayed()
    details.find_element("tag name", "summary").click()
    assert code.is_displayed()
