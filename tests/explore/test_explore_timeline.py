"""The explorer's timeline has the bars of the picture in reports."""

import pytest

import ddlsim

pytest.importorskip("panel")

from ddlsim.explore.screens import run as explored
from ddlsim.report.gantt import bars_of, styles_of, tracks, window


@pytest.mark.parametrize("strategy", [ddlsim.AllReduce("ring"), ddlsim.ParameterServer(2)])
def test_it_has_the_bars_of_reports(strategy):
    result = ddlsim.simulate("office-1gbe", "lenet5", strategy, 8, 3, steps=4, warmup=1).traced
    _, pane = explored.timeline(result)
    rows = {track: float(i) for i, track in enumerate(tracks(result, explored.N_WORKERS))}
    styles = styles_of(result.shares)
    wanted = {
        (bar.row + styles[bar.kind].low, bar.start, bar.end, bar.name) for bar in bars_of(result, rows, *window(result))
    }
    sources = [glyph.data_source.data for glyph in pane.object.renderers]
    drawn = {
        bar for data in sources for bar in zip(data["top"], data["left"], data["right"], data["name"], strict=True)
    }
    assert drawn == wanted
    assert len(drawn) > 10
    assert [*pane.object.yaxis.major_label_overrides.values()] == list(rows)
