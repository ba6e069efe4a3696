"""The site that `make docs` has built: links lead somewhere, nothing comes from elsewhere, browsers show it.

``make docs`` runs these tests; they need the site and, for the second half, a Chromium.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import ROOT, contents, page_of

SITE = ROOT / "out" / "site"
PAGES = sorted(SITE.rglob("*.html"))
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
#: one page of each kind
KINDS = (
    "index", "overview", "tutorial", "api/strategies", "examples/index", "examples/scaling_demo", "formats/index",
    "accuracy",
)  # fmt: skip
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser would load for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value for name, value in attrs if value}
        self.anchors |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag == "link" and of.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loads.append(of.get("href", ""))
        elif "src" in of:
            self.loads.append(of["src"])


page = functools.cache(Page)


def test_every_page_of_the_contents_is_there():
    files = [page_of(file).replace(".md", ".html") for section in contents() for file in section.files]
    there = {path.relative_to(SITE).as_posix() for path in PAGES}
    assert len(there) > 80
    assert not {file for file in files if file != "notebooks/index.html"} - there


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(SITE).as_posix())
def test_links_lead_somewhere_and_nothing_comes_from_elsewhere(path):
    wrong = [load for load in page(path).loads if urlsplit(load).scheme not in ("", "data")]
    for link in page(path).links:
        parts = urlsplit(link)
        if parts.scheme:  # whether these answer cannot be asked without a network
            fine = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+\.\w+", parts.netloc)
        else:
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fine = goal.is_file() and (not parts.fragment or unquote(parts.fragment) in page(goal).anchors)
        wrong += [] if fine else [link]
    assert not wrong


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium) -> Iterator:
    """A function that opens a tab of a width and a colour scheme; what goes wrong in tabs fails the test."""
    wrong, contexts = [], []

    def opened(width=1280, scheme="light"):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        new = contexts[-1].new_page()
        new.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        new.on("pageerror", lambda error: wrong.append(str(error)))
        new.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        new.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        return new

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def assert_fits(tab, path):
    """The page is as wide as the window, so that nobody has to scroll sideways; wide tables do in themselves."""
    assert tab.evaluate("document.documentElement.scrollWidth") <= tab.viewport_size["width"], path


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_one_page_of_each_kind_is_shown(tab, width, scheme):
    opened = tab(width, scheme)
    for kind in KINDS:
        opened.goto((SITE / f"{kind}.html").as_uri())
        assert opened.locator("h1").first.is_visible()
        assert_fits(opened, kind)
        dark = opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c < 60)")
        assert dark == (scheme == "dark")


def test_every_page_opens_on_a_telephone(tab):
    opened = tab(390)
    for path in PAGES:
        opened.goto(path.as_uri())
        assert_fits(opened, path)
        broken = opened.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
        assert not broken, path


def test_search_finds_a_page_and_a_name(tab):
    opened = tab()
    for words, page_found in (("staleness", "models/asynchronous.html"), ("read_nccl_tests", "api/measurements.html")):
        opened.goto((SITE / "search.html").as_uri() + f"?q={words}")
        opened.wait_for_selector(f"ul.search li a[href*='{page_found}']")


def test_a_telephone_reaches_all_pages_through_the_menu(tab):
    opened = tab(390)
    opened.goto((SITE / "index.html").as_uri())
    opened.locator(".header-left label").click()
    opened.locator(".sidebar-tree a", has_text="Changelog").click()
    assert opened.url.endswith("changelog.html")
