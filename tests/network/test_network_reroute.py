"""Routes that change while messages are on them: against sums by hand; no byte is lost; the same bit for bit."""

from itertools import pairwise

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim import ConfigError
from ddlsim.cluster import Cluster, MultiGpu, leaf_spine, star, torus, with_detail
from ddlsim.collectives import build
from ddlsim.network import Network

RATE = 1e6
CLOS = Cluster.from_graph(leaf_spine(2, 2, 2, bandwidth=RATE, latency=0.0, trunk_bandwidth=RATE))


def links(cluster, *pairs):
    """Return both directions of the links between nodes."""
    ends = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    places = {frozenset(map(cluster.node, pair)) for pair in pairs}
    return frozenset(i for i, pair in enumerate(ends) if frozenset(pair) in places)


def way(cluster, route):
    return [cluster.node_names[node] for node in cluster.link_dst[route].tolist()]


def around(cluster, source, target, *down):
    src, dst = np.array([cluster.node(source)]), np.array([cluster.node(target)])
    return way(cluster, cluster.around(sorted(links(cluster, *down))).routes(src, dst, cluster.routes(src, dst))[0])


def usual(cluster, source, target):
    return way(cluster, cluster.routes([cluster.node(source)], [cluster.node(target)])[0])


def test_switches_find_other_ways_and_machines_do_not():
    leaf, spine, other, end = usual(CLOS, "h0", "h3")
    left = next(name for name in ("spine0", "spine1") if name != spine)
    assert around(CLOS, "h0", "h3", (leaf, spine)) == [leaf, left, other, end]
    assert around(CLOS, "h0", "h3", (leaf, left)) == [leaf, spine, other, end]
    assert around(CLOS, "h0", "h3", (leaf, spine), (left, other)) == [leaf, spine, other, end]  # there is none
    assert around(CLOS, "h0", "h3", ("h0", leaf)) == [leaf, spine, other, end]


def test_nothing_passes_through_the_machines_of_others():
    gpus = MultiGpu(2, nvlink_bandwidth="100 GB/s", inside="nvlink_mesh", n_pcie_switches=2, n_nics=2)
    graph = leaf_spine(4, 2, 1, bandwidth=RATE, latency=0.0, rail_optimised=True, host=gpus)
    cluster = Cluster.from_graph(graph)
    route = usual(cluster, "h0.gpu0", "h2.gpu0")
    trunk = next(pair for pair in pairwise(route) if pair[1].startswith("spine"))
    found = around(cluster, "h0.gpu0", "h2.gpu0", trunk)
    assert not any(name.startswith(("h1.", "h3.")) for name in found)


def test_a_torus_goes_the_other_way_round():
    cluster = Cluster.from_graph(torus([4], bandwidth=RATE, latency=0.0))
    assert usual(cluster, "h0", "h1") == ["h1"]
    assert around(cluster, "h0", "h1", ("h0", "h1")) == ["h3", "h2", "h1"]


def sent(cluster, sends, shares=(), avoided=(), *, replay=1, record=False):
    """Return when each of the messages (source, target, bytes, time) ends, and the network."""
    network = Network(cluster, record=record)
    network.engine.net.counts.replay = replay
    network.will_change(shares, (), avoided)
    ids, ended = [], {}
    for source, target, nbytes, time in sorted(sends, key=lambda one: one[3]):
        while (done := network.advance(time)) is not None:
            ended.update(dict.fromkeys(done.ids.tolist(), done.time))
        src, dst = cluster.node(source), cluster.node(target)
        ids += network.send([src], [dst], np.array([float(nbytes)]), time).tolist()
    while (done := network.advance()) is not None:
        ended.update(dict.fromkeys(done.ids.tolist(), done.time))
    return [ended[number] for number in ids], network


def falls(cluster, start, end, *pairs):
    channels = {int(cluster.link_channel[link]) for link in links(cluster, *pairs)}
    return [(start, end, channel, 0.0) for channel in channels]


def carried(network, cluster, source, target):
    (link,) = np.flatnonzero(
        (cluster.link_src == cluster.node(source)) & (cluster.link_dst == cluster.node(target))
    ).tolist()
    return network.accounts().nbytes[cluster.link_channel[link]]


def test_a_flow_goes_on_over_the_other_way():
    """A quarter has arrived when the link goes down; half a second later the rest takes the other spine."""
    leaf, spine, far, _ = usual(CLOS, "h0", "h3")
    left = "spine1" if spine == "spine0" else "spine0"
    down = falls(CLOS, 0.25, 100.0, (leaf, spine))
    avoided = [(0.75, 100.5, links(CLOS, (leaf, spine)))]
    (end,), network = sent(CLOS, [("h0", "h3", 1e6, 0.0)], down, avoided, record=True)
    assert end == pytest.approx(1.5, rel=1e-12)
    assert carried(network, CLOS, leaf, spine) == pytest.approx(0.25e6, rel=1e-9)
    assert carried(network, CLOS, leaf, left) == pytest.approx(0.75e6, rel=1e-9)
    assert carried(network, CLOS, left, far) == pytest.approx(0.75e6, rel=1e-9)
    assert carried(network, CLOS, "h0", leaf) == pytest.approx(1e6, rel=1e-9)
    assert network.accounts().delivered == 1e6
    assert network.busy_intervals().seconds() == pytest.approx(network.channel_busy)
    (waits,), _ = sent(CLOS, [("h0", "h3", 1e6, 0.0)], down)
    assert waits == pytest.approx(100.75)


def test_it_shares_the_other_way_with_who_is_there_already():
    leaf, spine, _, _ = usual(CLOS, "h0", "h3")
    left = "spine1" if spine == "spine0" else "spine0"
    other = next(name for name in ("h2", "h3") if usual(CLOS, "h1", name)[1] == left)
    fault = falls(CLOS, 0.5, 100.0, (leaf, spine)), [(0.5, 100.0, links(CLOS, (leaf, spine)))]
    ends, _ = sent(CLOS, [("h0", "h3", 1e6, 0.0), ("h1", other, 1e6, 0.0)], *fault)
    assert ends == pytest.approx([1.5, 1.5], rel=1e-12)


def test_what_begins_meanwhile_takes_it_and_later_goes_back():
    leaf, spine, _, _ = usual(CLOS, "h0", "h3")
    left = "spine1" if spine == "spine0" else "spine0"
    fault = falls(CLOS, 1.0, 3.0, (leaf, spine)), [(1.0, 4.0, links(CLOS, (leaf, spine)))]
    ends, network = sent(CLOS, [("h0", "h3", 0.5e6, 2.0), ("h0", "h3", 2e6, 3.0)], *fault)
    assert ends == pytest.approx([2.5, 5.0], rel=1e-12)
    assert carried(network, CLOS, leaf, left) == pytest.approx(1.5e6)  # and from 4 s on the usual one
    assert carried(network, CLOS, leaf, spine) == pytest.approx(1e6)


def test_latency_is_that_of_the_new_route():
    cluster = Cluster.from_graph(torus([4], bandwidth=RATE, latency=0.125))
    fault = falls(cluster, 1.0, 100.0, ("h0", "h1")), [(1.0, 100.0, links(cluster, ("h0", "h1")))]
    ends, _ = sent(cluster, [("h0", "h1", 0.25e6, 0.0), ("h0", "h1", 0.25e6, 2.0)], *fault)
    assert ends == pytest.approx([0.375, 2.0 + 3 * 0.125 + 0.25])


SHAPES = {
    "leaf-spine": CLOS,
    "frames": with_detail(CLOS, burst="100 kB", reverse_load=0.02, frame_header=78, frame_payload=1448),
    "torus": Cluster.from_graph(torus([2, 3], bandwidth=RATE, latency=0.01)),
    "star": Cluster.from_graph(star(4, bandwidth=RATE, latency=0.0)),
    "roce": with_detail(CLOS, transport="roce"),
    "tcp": with_detail(CLOS, transport="tcp-cubic", buffer="20 kB", frame_header=78, frame_payload=1448),
}


@pytest.mark.parametrize("share", seeds(1, 4))  # of 40 examples
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_no_byte_is_lost_whatever_goes_down(share, shape, data):
    cluster = SHAPES[shape]
    joined = sorted({tuple(sorted(pair)) for pair in zip(cluster.link_src, cluster.link_dst, strict=True)})
    shares, avoided = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = joined[data.draw(st.integers(0, len(joined) - 1))]
        start, lasts = data.draw(st.floats(0.0, 4.0)), data.draw(st.floats(0.1, 3.0))
        pair = cluster.node_names[a], cluster.node_names[b]
        converges = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
        avoided.append((start + converges, start + lasts + converges, links(cluster, pair)))
    for start, end, own in avoided:  # links are down one after the other where they are the same
        if not any(own & other for _, _, other in avoided if other is not own):
            channels = {int(cluster.link_channel[link]) for link in own}
            shares += [(start, end, each, 0.0) for each in channels]
    workers = cluster.workers
    found = []
    for replay in (1, 0):
        network = Network(cluster)
        network.engine.net.counts.replay = replay
        network.will_change(shares, (), avoided)
        n = len(workers)
        number = network.collective(build("ring", n), workers, 1e6 * n)
        network.join([number] * n, range(n), 0.0)
        single = network.send(workers[[0, 1]], workers[[-1, -2]], np.array([3e6, 2e5]), 0.0)
        times, at = [], 0.0
        while (done := network.advance(at)) is not None or network.pending:
            if done is not None:
                times.append((done.time, done.ids.tolist(), done.ranks.tolist()))
            accounts = network.accounts()
            moved = accounts.nbytes.sum() + accounts.left_crossings
            assert moved == pytest.approx(accounts.issued_crossings, rel=1e-9)
            assert accounts.issued == pytest.approx(accounts.delivered + accounts.in_flight)
            assert (accounts.nbytes >= -1e-3).all()
            assert (accounts.nbytes <= accounts.capacity * accounts.busy * (1 + 1e-9) + accounts.passed + 1e-3).all()
            at = np.inf if at > 50.0 else at + 0.37
        assert len(single) == 2
        total = 2e6 * (n - 1) * n + 3.2e6
        assert accounts.delivered == accounts.issued == pytest.approx(total)
        found.append(times)
    assert found[0] == found[1]


def test_links_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="has no link 16; its links are 0 to 15"):
        CLOS.around([3, 16])
