"""Summaries, traces and plots of results."""

import itertools
import json

import numpy as np
import pytest

import ddlsim
from ddlsim.readable import percent, rate, seconds, si, size
from ddlsim.report import plots
from ddlsim.report.cluster_plot import cluster_plot
from ddlsim.report.trace import _merged

STRATEGIES = {
    "ring": ddlsim.AllReduce("ring"),
    "priority": ddlsim.AllReduce("ring", overlap="priority"),
    "servers": ddlsim.AsyncParameterServer(2, "colocated", apply_time="1 ms"),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def result(request):
    return ddlsim.simulate(
        "office-1gbe", "cifar-cnn", STRATEGIES[request.param], batch_size=64, workers=4, steps=4,
        jitter=ddlsim.Lognormal(0.2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (si(4.2264e9, "B/s"), "4.226 GB/s"),
        (si(12.0, "FLOP"), "12 FLOP"),
        (seconds(0.01723), "17.23 ms"),
        (seconds(2.5), "2.5 s"),
        (seconds(3e-6), "3 us"),
        (seconds(0.0), "0 s"),
        (size(102228128.0), "102.2 MB"),
        (rate(40941.6), "40,942 samples/s"),
        (percent(0.9307), "93.1 %"),
    ],
)
def test_numbers_as_people_read_them(text, shown):
    assert text == shown


def test_summary_says_what_matters(result):
    text = str(result)
    for word in ("throughput", "efficiency", "exposed communication", "waiting", "bottleneck", "busy links"):
        assert word in text
    assert ("staleness" in text) == bool(result.recorder.staleness)
    assert max(len(line) for line in text.splitlines()) < 200


def test_json_holds_the_numbers(result, tmp_path):
    data = json.loads(result.to_json(tmp_path / "r.json"))
    assert data == json.loads((tmp_path / "r.json").read_text())
    assert sum(data["shares"].values()) == pytest.approx(1.0)


def test_trace_has_a_track_per_worker_and_busy_link(result, tmp_path):
    path = tmp_path / "trace.json"
    result.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"worker 0", "worker 3"} <= names
    assert any("->" in name for name in names)
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0.0 and e["ts"] >= 0.0 for e in spans)
    spans.sort(key=lambda e: (e["pid"], e["tid"], e["ts"]))
    tracks = itertools.groupby(spans, lambda e: (e["pid"], e["tid"]))
    for _, group in tracks:  # no two events of a track overlap
        track = list(group)
        for a, b in itertools.pairwise(track):
            assert a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-12) + 1e-6
    own = [e for e in spans if e["pid"] == 1]
    total = sum(sum(s.values()) for s in result.recorder.seconds)
    assert sum(e["dur"] for e in own) == pytest.approx(1e6 * total, rel=1e-9)


def test_merging_keeps_the_longest_gaps():
    start = np.arange(5000.0)
    end = start + 0.5
    end[99] = start[99] + 0.25  # the longest gap comes after interval 99
    merged_start, merged_end = _merged(start, end)
    assert len(merged_start) == 2000
    assert end[99] in merged_end
    assert (merged_start[0], merged_end[-1]) == (start[0], end[-1])


def test_plots_are_written_and_labelled(result, tmp_path):
    drawn = {"timeline": result.plot_timeline, "cluster": result.plot_cluster, "steps": result.plot_step_times}
    for name, draw in drawn.items():
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert result.plot_timeline().get_xlabel() == "simulated time (s)"
    axes = plots.breakdown({"this": result})
    assert axes.get_ylabel().startswith("time of the workers (%)")


def test_scaling_plot_has_a_line_per_series_and_the_ideal():
    experiment = ddlsim.Experiment("office-1gbe", "lenet5", steps=2)
    left, right = plots.scaling({"a": ddlsim.scaling(experiment, [1, 2, 4])})
    assert [line.get_label() for line in left.get_lines()] == ["ideal (linear)", "a"]
    assert right.get_ylabel() == "scaling efficiency (%)"


@pytest.mark.parametrize(
    "name", ["dgx1-v100", "torus-3d", "fat-tree-k8-10g", "three-regions-wan", "cloud-25g-16x8-v100"]
)
def test_every_kind_of_cluster_can_be_drawn(name, tmp_path):
    cluster_plot(ddlsim.load_cluster(name), tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 5000
