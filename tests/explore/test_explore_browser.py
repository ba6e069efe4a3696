"""The explorer in Chromium, wide and narrow, light and dark: from a preset to a script that gives the same number."""

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("panel")
playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)"),
]
#: ms after which something that should appear has not; machines may be busy, and kernels not compiled
PATIENCE = 300_000
HEIGHT = 900


@pytest.fixture(scope="module")
def address():
    """Serve the explorer as people start it; return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ddlsim", "explore", "--port", str(port), "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        url = f"http://127.0.0.1:{port}/"
        for _ in range(600):
            assert server.poll() is None, server.stdout.read().decode()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}favicon.ico"):
                break
            time.sleep(0.2)
        yield url
        server.terminate()


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page of the explorer, and what was wrong with it."""

    def __init__(self, browser, address, width, theme="default"):
        self.wrong = []
        self.narrow = width < 768
        context = browser.new_context(viewport={"width": width, "height": HEIGHT}, accept_downloads=True)
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.route("**/*", lambda route: self._local(route, address))
        self.page.goto(f"{address}?theme={theme}")
        if self.narrow:  # the form is closed at first, which a busy machine does late
            playwright.expect(self.page.locator("#sidebar")).to_be_hidden()

    def _local(self, route, address):
        url = route.request.url
        if url.startswith((address, address.replace("http", "ws"), "data:", "blob:")):
            route.continue_()
        else:
            self.wrong.append(f"asked for {url}")
            route.abort()

    def settings(self):
        """Open the form by the keyboard where it lies above the page, or close it there."""
        if self.narrow:
            form = self.page.locator("#sidebar")
            was_open = form.is_visible()
            self.page.get_by_role("button", name="Settings", exact=True).press("Enter")
            playwright.expect(form).to_be_visible(visible=not was_open)

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()

    def tile(self, label):
        value = self.page.locator(".tile", has_text=label).locator(".v").first
        value.wait_for()
        return value.inner_text()

    def choose(self, label, value):
        self.page.get_by_label(label, exact=True).select_option(value)

    def fill(self, label, text):
        field = self.page.get_by_label(label)
        field.fill(text)
        field.press("Enter")

    def exported(self, name):
        """Return the exported file of this name, as downloaded."""
        with self.page.expect_download() as downloading:
            self.page.get_by_text(f"Download {name}", exact=True).click()
        return Path(downloading.value.path()).read_text(encoding="utf-8")

    def fits(self):
        """Whether nothing is wider than the page."""
        return self.page.evaluate("document.getElementById('main').scrollWidth <= window.innerWidth")

    def picture(self, name):
        """Keep a picture of the page where somebody wants to look at it: DDLSIM_SCREENSHOTS names a folder."""
        if "DDLSIM_SCREENSHOTS" in os.environ:
            self.page.screenshot(path=Path(os.environ["DDLSIM_SCREENSHOTS"]) / f"{name}.png")


def printed_by(program, folder):
    """Return what a program prints."""
    path = folder / "exported.py"
    path.write_text(program, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(program, path, "exec"), {"__name__": "__main__"})
    return said.getvalue()


@pytest.mark.parametrize("theme", ["default", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_from_a_preset_to_a_script_that_says_the_same(address, chromium, tmp_path, width, theme):
    page = Page(chromium, address, width, theme)
    assert page.tile("workers") == "128"
    page.settings()
    page.choose("Cluster", "dgx1-v100")
    page.choose("Model", "alexnet")
    page.choose("Algorithm", "double_binary_tree")
    page.fill("Batch size", "16")
    page.settings()
    page.press("Run")
    page.press("Start")
    page.page.get_by_text("8 workers on dgx1-v100: all-reduce (double_binary_tree, ddp)").wait_for()
    throughput = page.tile("throughput")
    page.press("Timeline of two steps")
    page.page.locator(".bk-Canvas, .bk-CanvasView, canvas").first.wait_for()
    page.press("Export as TOML and Python")
    program = page.exported("run.py")
    assert "double_binary_tree" in program
    assert f", {throughput} in total" in printed_by(program, tmp_path)
    assert 'model = "alexnet"' in page.exported("run.toml")
    assert page.fits()
    page.picture(f"run-{width}-{theme}")
    assert page.wrong == []


@pytest.mark.parametrize("width", [1280, 390])
def test_what_cannot_be_used_is_said_on_every_screen(address, chromium, width):
    page = Page(chromium, address, width)
    page.settings()
    page.fill("Cluster or file, with +key=value", "cloud-25g-16x8-v10")
    page.settings()
    for button in ("Cluster", "Run", "What if"):
        page.press(button)
        if button == "Run":
            page.press("Start")
        page.page.locator("#main").get_by_text("unknown cluster 'cloud-25g-16x8-v10'; did you mean").wait_for()
    page.settings()
    page.fill("Cluster or file, with +key=value", "dgx1-v100")
    page.press("More")
    page.fill("Seed", "")
    page.settings()
    page.press("Run")
    page.page.locator("#main").get_by_text("seed is empty; enter a number").wait_for()
    assert page.wrong == []


def test_what_if_keeps_a_run_and_compares_it(address, chromium, tmp_path):
    page = Page(chromium, f"{address}", 1280)
    page.choose("Cluster", "dgx1-v100")
    page.choose("Model", "alexnet")
    page.press("What if")
    page.press("Start")
    page.page.get_by_text("B is A so far.").wait_for()
    page.fill("Batch size", "64")
    page.page.get_by_text("Changes", exact=True).wait_for()
    row = page.page.get_by_role("row", name=re.compile("^throughput "))
    a, b = (row.get_by_role("cell").nth(i).inner_text() for i in (1, 2))
    assert a != b
    page.press("Possible improvements of A and B")
    page.page.get_by_label("+10 % compute speed").first.wait_for()
    page.press("Export as TOML and Python")
    assert f"throughput: {a} -> {b}\n" in printed_by(page.exported("what_if.py"), tmp_path)
    page.press("Back to A")
    page.page.get_by_text("B is A so far.").wait_for()
    assert page.page.get_by_label("Batch size").input_value() == ""
    page.picture("what-if")
    assert page.wrong == []


def test_a_file_can_be_uploaded_and_the_address_brings_the_page_back(address, chromium, tmp_path):
    page = Page(chromium, address, 1280)
    own = tmp_path / "two+machines.toml"
    own.write_text(
        '[generator]\ntype = "star"\nn_hosts = 3\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n'
        '[host]\ndevice = "desktop-cpu"\n'
    )
    page.page.get_by_label("Upload a cluster file").set_input_files(own)
    page.page.get_by_role("heading", name="two_machines").wait_for()
    workers = page.page.locator(".tile", has_text="workers").locator(".v").first
    playwright.expect(workers).to_have_text("3")  # which comes after the heading
    page.fill("Batch size", "48")
    page.page.wait_for_function("window.location.search.includes('batch_size=48')")
    page.page.reload()
    assert page.tile("workers") == "3"
    assert page.page.get_by_label("Batch size").input_value() == "48"
    assert page.wrong == []
