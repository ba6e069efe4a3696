"""The report of a study in Chromium, on a desk and on a telephone, light and dark."""

import shutil

import pytest
from report_studies import learners, study
from test_report_html import two_models

from ddlsim.report.html import html_report
from ddlsim.run.sensitivity import Sensitivity

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)"),
]
#: elements that reach beyond the screen, but for what lies in a box that scrolls
BEYOND = """[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest(".scroll") && !e.closest(".hidden");
}).map(e => e.tagName + ": " + e.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    found = [Sensitivity("compute speed", 0.1, 0.07), Sensitivity("bandwidth of nic", 0.1, 0.02)]
    report = html_report(study(), question="Is 100 Gbit/s worth it?", sensitivities=found)
    (folder / "study.html").write_text(report, encoding="utf-8")
    learners().save_html(folder / "learners.html")
    two_models().save_html(folder / "models.html")
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["study", "learners", "models"])
def test_a_report_fits_and_asks_nobody(chromium, pages, name, width, scheme):
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    wrong = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((pages / f"{name}.html").as_uri())
    for closed in page.locator("details").all():
        closed.evaluate("element => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(BEYOND) == []
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    table = page.locator("#configurations table")
    numbers = table.locator("tbody tr th").all_inner_texts()
    heading = table.locator("thead button", has_text="throughput")
    heading.click()
    sorted_by = table.locator("tbody tr th").all_inner_texts()
    assert sorted(sorted_by) == sorted(numbers)
    assert heading.locator("xpath=..").get_attribute("aria-sort") == "descending"
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    light = sum(map(int, paper.strip("rgb()").split(","))) > sum(map(int, ink.strip("rgb()").split(",")))
    assert light == (scheme == "light")
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()
