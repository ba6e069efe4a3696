"""Scaling, Learning and Collective in Chromium: charts, points that come live, cancelling, a schedule to its end."""

import re

import pytest

pytest.importorskip("panel")
pytest.importorskip("playwright.sync_api")

from test_explore_browser import (
    Page,
    address,  # noqa: F401
    chromium,  # noqa: F401
    playwright,
    printed_by,
    pytestmark,  # noqa: F401
)

from ddlsim.readable import seconds

#: what somebody may wait for a run to end that is not wanted any more, ms: a second, on a machine that may be busy
SOON = 15_000
#: ms until kernels of networks, too, are compiled, on a machine that may be busy
COMPILED = 900_000
SIZES = pytest.mark.parametrize(("width", "theme"), [(w, t) for w in (1280, 390) for t in ("default", "dark")])


def canvas(page):
    """Wait for a chart; return how many of its dots are not of the commonest colour."""
    drawn = page.page.locator("canvas").first
    drawn.wait_for()
    return drawn.evaluate("""canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Map();
        for (let i = 0; i < data.length; i += 4) {
            const key = `${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`;
            seen.set(key, (seen.get(key) || 0) + 1);
        }
        return data.length / 4 - Math.max(...seen.values());
    }""")


@SIZES
def test_scaling_shows_a_chart_a_table_and_the_study(address, chromium, tmp_path, width, theme):  # noqa: F811
    page = Page(chromium, address, width, theme)
    page.press("Scaling")
    page.press("Start")
    page.fill("Numbers of workers", "1, 8, 16")
    row = page.page.get_by_role("row", name=re.compile("^all-reduce .* 16 "))
    row.wait_for()  # the table of other numbers may have one, too
    playwright.expect(page.page.get_by_role("row")).to_have_count(4)
    assert canvas(page) > 1000
    page.page.get_by_text("no bands: there is neither jitter").wait_for()
    assert page.fits()
    page.picture(f"scaling-{width}-{theme}")
    page.press("Export as TOML and Python")
    assert "workers = [1, 8, 16]" in page.exported("scaling.toml")
    if (width, theme) == (1280, "default"):
        shown = row.get_by_role("cell").nth(2).inner_text()
        printed = printed_by(page.exported("scaling.py"), tmp_path)
        throughput = re.search(r"^ *16 +([\d,.]+)", printed, re.MULTILINE)[1].replace(",", "")
        assert shown == f"{float(throughput):,.0f} samples/s"
    assert page.wrong == []


@SIZES
def test_learning_shows_points_live_and_can_be_cancelled(address, chromium, width, theme):  # noqa: F811
    page = Page(chromium, address, width, theme)
    page.press("Learning")
    page.fill("Epochs", "2000")  # so that it does not end before somebody cancels it
    page.press("Start")
    page.page.get_by_text(re.compile(r"all-reduce .*: .* updates, epoch")).wait_for(timeout=COMPILED)
    before = canvas(page)
    page.page.wait_for_timeout(3000)
    assert canvas(page) != before, "points come while it learns"
    page.picture(f"learning-{width}-{theme}")
    page.press("Cancel")
    page.page.get_by_text(re.compile(r"cancelled; the first \d+ points remain")).wait_for(timeout=SOON)
    kept = canvas(page)
    page.page.wait_for_timeout(3000)
    assert canvas(page) == kept, "nothing comes any more, and nothing goes"
    page.fill("Epochs", "1")
    page.press("Start")
    page.page.get_by_role("row", name=re.compile("^asynchronous parameter server")).wait_for()
    page.page.get_by_label("Over", exact=True).select_option("bytes sent (GB)")
    assert page.fits()
    page.press("Export as TOML and Python")
    assert re.search(r"epochs = 1\b", page.exported("learning.toml"))
    assert page.wrong == []


@SIZES
def test_a_collective_is_stepped_to_its_end_and_every_rank_is_whole(address, chromium, tmp_path, width, theme):  # noqa: F811
    page = Page(chromium, address, width, theme)
    page.press("Collective")
    page.press("Start")
    time = page.tile("time")
    said = page.page.locator(".words")
    said.get_by_text("Before the first round: 0 of 8 ranks are complete.").wait_for()
    for number in range(1, 4):
        page.page.locator("button.next").click()
        said.get_by_text(f"Round {number} of 14:").wait_for()
    page.picture(f"collective-{width}-{theme}")
    page.page.locator("button.play").click()
    said.get_by_text(re.compile(r"^Round 14 of 14: .* every rank is complete\.$")).wait_for()
    page.page.get_by_label("64 of 64 required blocks are complete").wait_for()
    assert page.fits()
    page.press("Export as TOML and Python")
    printed = printed_by(page.exported("collective.py"), tmp_path).splitlines()
    assert seconds(float(printed[0].removesuffix(" ms")) / 1e3) == time
    assert printed[-1] == "after round 14: 8 of 8 ranks whole"
    page.choose("Collective", "broadcast")
    page.tile("broadcast, 8 ranks")
    assert page.wrong == []
