"""Plots of runs and clusters at the edges: no jitter, no links, one worker, unused links."""

import json

import networkx as nx
import numpy as np
import pytest
from matplotlib.collections import LineCollection

import ddlsim
from ddlsim.cluster import star, with_detail
from ddlsim.report import plots
from ddlsim.report.cluster_plot import cluster_plot


@pytest.fixture(scope="module")
def lonely():
    graph = nx.Graph(name="one")
    graph.add_node("pc", kind="host", device="desktop-cpu")
    return ddlsim.simulate(graph, "lenet5", batch_size=8, steps=2)


@pytest.fixture(scope="module")
def half_used():
    return ddlsim.simulate("office-1gbe", "lenet5", batch_size=8, workers=4, steps=8)


def test_equal_steps_are_one_bar(half_used, tmp_path):
    assert np.ptp(half_used.step_times) < 1e-9
    axes = half_used.plot_step_times(tmp_path / "steps.png")
    heights = [bar.get_height() for bar in axes.patches]
    assert sorted(heights)[-1] == len(half_used.step_times) == sum(heights)


def test_a_cluster_without_links_can_be_shown(lonely, tmp_path):
    lonely.plot_cluster(tmp_path / "cluster.png")
    lonely.plot_timeline(tmp_path / "timeline.png")
    lonely.save_trace(tmp_path / "trace.json")
    cluster_plot(lonely.cluster)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.png", "timeline.png", "trace.json"]


NETWORKS = {
    "background": (star(6, bandwidth="1 Gbit/s", latency="5 us"), {}),
    "half-duplex": (star(6, bandwidth="1 Gbit/s", latency="5 us", shared=True), {}),
    "transport": (star(6, bandwidth="1 Gbit/s", latency="5 us"), {"transport": "roce"}),
    "half-duplex transport": (star(6, bandwidth="1 Gbit/s", latency="5 us", shared=True), {"transport": "tcp-cubic"}),
    "queues": (star(6, bandwidth="1 Gbit/s", latency="5 us"), {"sharing": "fifo", "spread": 0.1}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_output_shows_every_kind_of_network(name, tmp_path):
    graph, details = NETWORKS[name]
    cluster = ddlsim.load_cluster(graph)
    cluster = with_detail(cluster, **details) if details else cluster
    result = ddlsim.simulate(
        cluster,
        "lenet5",
        batch_size=8,
        workers=4,
        steps=2,
        background=[ddlsim.Background("h4", "h5", on="1 ms", off="1 ms")],
    )
    assert ("1 connection between two workers" in str(result)) == ("transport" in details)
    assert "<table" in result._repr_html_()
    result.to_json(tmp_path / "result.json")
    result.save_trace(tmp_path / "trace.json", whole=True)
    result.plot_timeline(tmp_path / "timeline.png")
    result.plot_cluster(tmp_path / "cluster.png")
    tracks = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"h0 -> switch (nic)", "h4 -> switch (nic)"} <= {e["args"].get("name") for e in tracks if e["ph"] == "M"}


def test_unused_links_are_drawn_apart_and_the_busiest_on_top(half_used):
    unused, used = (c for c in half_used.plot_cluster().collections if isinstance(c, LineCollection))
    hosts = len(half_used.cluster.host_names)
    assert (len(unused.get_segments()), len(used.get_segments())) == (hosts - 4, 4)
    shares = used.get_array()
    assert (np.diff(shares) >= 0.0).all()
    assert used.get_clim() == (0.0, 100.0)  # so that two pictures are compared by their colours
    assert shares[-1] == pytest.approx(100.0 * half_used.links["utilisation"].max())


def test_a_breakdown_of_nothing_is_refused():
    with pytest.raises(ddlsim.ConfigError, match="breakdown: results is empty"):
        plots.breakdown({})
