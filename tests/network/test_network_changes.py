"""Links that change their bandwidth at known times, nodes that stand still: against sums by hand, and splitting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.collectives import build
from ddlsim.network import Network

RATE = 1e6
CLUSTER = Cluster.from_graph(star(4, bandwidth=RATE, latency=0.0))


def channels(source, target):
    hosts = CLUSTER.workers
    routes = CLUSTER.routes(hosts[[source]], hosts[[target]])
    return CLUSTER.link_channel[routes.links].tolist()


def ends(sends, links=(), pauses=()):
    """Return when each of the messages (source, target, bytes) ends that are sent at 0."""
    network = Network(CLUSTER)
    hosts = CLUSTER.workers
    network.will_change(links, [(start, end, int(hosts[i])) for start, end, i in pauses])
    sources, targets, nbytes = zip(*sends, strict=True)
    ids = network.send(hosts[list(sources)], hosts[list(targets)], np.array(nbytes, dtype=float), 0.0).tolist()
    found = {}
    while (done := network.advance()) is not None:
        found.update(dict.fromkeys(done.ids.tolist(), done.time))
    return [found[number] for number in ids], network


def test_a_link_that_is_down_carries_nothing_until_it_is_back():
    (end,), _ = ends([(0, 1, 1e6)], [(0.25, 3.0, channels(0, 1)[0], 0.0)])
    assert end == pytest.approx(3.75, rel=1e-12)


def test_a_degraded_link_carries_its_share():
    (end,), _ = ends([(0, 1, 1e6)], [(0.25, np.inf, channels(0, 1)[1], 0.5), (0.75, np.inf, channels(0, 1)[1], 0.2)])
    assert end == pytest.approx(0.75 + 0.5 / 0.1, rel=1e-12)


def test_others_take_what_a_degraded_link_leaves_them():
    """Two flows share the receiver's link; when one sender's link has a tenth, the other has nine tenths."""
    found, _ = ends([(0, 2, 1e6), (1, 2, 1e6)], [(0.5, np.inf, channels(0, 2)[0], 0.1)])
    second = 0.5 + 0.75 / 0.9
    assert found == pytest.approx([second + (0.75 - 0.1 * (second - 0.5)) / 0.1, second], rel=1e-12)


def test_faults_that_overlap_multiply_whoever_brings_them():
    """Half of half is a quarter; what ends first does not give all of it back, nor what is known later."""
    channel = channels(0, 1)[0]
    (together,), _ = ends([(0, 1, 4e6)], [(0.0, 8.0, channel, 0.5), (1.0, 3.0, channel, 0.5)])
    assert together == pytest.approx(8.0 + 4.0 - 0.5 - 0.5 - 2.5, rel=1e-12)
    network = Network(CLUSTER)
    hosts = CLUSTER.workers
    network.will_change([(0.0, 8.0, channel, 0.5)])
    network.send(hosts[[0]], hosts[[1]], np.array([4e6]), 0.0)
    assert network.advance(1.0) is None
    network.will_change([(1.0, 3.0, channel, 0.5)])
    assert network.advance().time == pytest.approx(together, rel=1e-12)


def test_a_node_that_stands_still_takes_nothing_and_begins_nothing():
    found, _ = ends([(0, 1, 1e6), (2, 3, 1e6)], pauses=[(0.5, 7.0, 1), (0.5, 7.0, 2)])
    assert found == [7.0, 1.0]  # what flows goes on; what has arrived waits
    ring = build("ring", 4)

    def took(pauses):
        network = Network(CLUSTER)
        network.will_change([], [(a, b, int(CLUSTER.workers[i])) for a, b, i in pauses])
        number = network.collective(ring, CLUSTER.workers, 4e6)
        network.join([number] * 4, range(4), 0.0)
        times = []
        while (done := network.advance()) is not None:
            times += [done.time] * len(done.ids)
        return max(times), network

    assert took([])[0] == pytest.approx(6.0)
    late, network = took([(2.5, 10.0, 1)])
    assert late == pytest.approx(
        10.0 + 3.0
    )  # the third round ends at 3 but for that host, which begins the fourth at 10
    assert network.accounts().delivered == pytest.approx(24e6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changes_are_those_of_a_network_that_is_stepped_through(data):
    """Rounds are replayed up to a change and not over it; the same with replays switched off, bit for bit."""
    edges = data.draw(st.lists(st.floats(0.01, 8.0), min_size=1, max_size=4))
    links = [
        (edge, edge + data.draw(st.floats(0.1, 3)), data.draw(st.integers(0, 7)), data.draw(st.sampled_from([0, 0.3])))
        for edge in edges
    ]
    start = data.draw(st.floats(0.0, 4.0))
    pauses = [(start, start + data.draw(st.floats(0.1, 3.0)), int(CLUSTER.workers[data.draw(st.integers(0, 3))]))]
    shaped = data.draw(st.booleans())
    cluster = with_detail(CLUSTER, burst="100 kB", reverse_load=0.02) if shaped else CLUSTER
    found = []
    for replay in (1, 0):
        network = Network(cluster)
        network.engine.net.counts.replay = replay
        network.will_change(links, pauses)
        number = network.collective(build("ring", 4), CLUSTER.workers, 4e6)
        network.join([number] * 4, range(4), 0.0)
        times = []
        while (done := network.advance()) is not None:
            times.append((done.time, done.ranks.tolist()))
        accounts = network.accounts()
        assert accounts.delivered == pytest.approx(24e6)
        assert accounts.nbytes.sum() == pytest.approx(48e6)
        assert (accounts.nbytes <= accounts.capacity * accounts.busy * (1 + 1e-9) + accounts.passed + 1e-3).all()
        found.append(times)
    assert found[0] == found[1]


def test_a_change_happens_before_what_is_sent_after_it():
    """Also where nothing was under way when it was due."""
    network = Network(CLUSTER)
    hosts = CLUSTER.workers
    network.will_change([], [(1.5, 9.0, int(hosts[0]))])
    network.send(hosts[[0]], hosts[[1]], np.array([1e6]), 0.0)
    assert network.advance(2.0).time == 1.0
    assert network.advance(2.0) is None
    network.send(hosts[[0]], hosts[[1]], np.array([1e6]), 2.0)
    assert network.advance().time == pytest.approx(10.0)
