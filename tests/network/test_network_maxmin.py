"""Rates are max-min fair at every event, and flows end when a plain re-computation says."""

from itertools import product

import numpy as np
import pytest
from draws import rows, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from network_reference import Paths, fair_rates, finish_times, run_flows

from ddlsim.cluster import Cluster, leaf_spine
from ddlsim.collectives.all_reduce import ring
from ddlsim.network import Network
from ddlsim.network.state import MOST_LIMITS


def test_two_flows_share_the_link_they_both_cross():
    """A crosses links 0 and 1, B only link 1, C only link 0; they carry 10 and 4 bytes/s.
    Link 1 is tightest: A = B = 4 / 2 = 2.  C takes what A leaves on link 0: 10 - 2 = 8.
    """
    fabric = Paths([10.0, 4.0], [0.0, 0.0], [[0, 1], [1], [0]])
    network = Network(fabric)
    network.send([0, 2, 4], [1, 3, 5], np.array([100.0, 100.0, 100.0]), 0.0)
    assert network.advance(0.0) is None
    hops, rates = network.rates()
    assert hops == [[0, 1], [1], [0]]
    assert rates.tolist() == [2.0, 2.0, 8.0]


def test_the_rates_follow_who_comes_and_goes_by_hand():
    """One link of 10 bytes/s. A (100 bytes) starts at 0, B (20 bytes) at 4 s.
    Alone, A has moved 40 bytes at 4 s; then both move 5 bytes/s, so B ends at 8 s, when A has 40 left:
    it ends at 8 + 40 / 10 = 12 s.
    """
    fabric = Paths([10.0], [0.0], [[0], [0]])
    end, _ = run_flows(Network(fabric), fabric, [0.0, 4.0], [100.0, 20.0])
    assert end.tolist() == pytest.approx([12.0, 8.0], rel=1e-15)


def test_half_duplex_directions_share_one_channel():
    """Two links, one channel of 8 bytes/s: 16 bytes each way take 4 s, not 2."""
    fabric = Paths([8.0], [0.0, 0.0], [[0], [1]], link_channel=np.array([0, 0]))
    end, _ = run_flows(Network(fabric), fabric, [0.0, 0.0], [16.0, 16.0])
    assert end.tolist() == [4.0, 4.0]


def test_a_flow_that_crosses_a_channel_twice_is_one_flow():
    """Both directions of a half-duplex link, of 2 bytes/s: A has 1 on each, B what A leaves on the other link."""
    fabric = Paths([2.0, 8.0], [0.0] * 3, [[0, 1, 2], [2]], link_channel=np.array([0, 0, 1]))
    network = Network(fabric)
    network.send([0, 2], [1, 3], np.array([10.0, 10.0]), 0.0)
    assert network.advance(0.0) is None
    assert network.rates()[1].tolist() == [1.0, 7.0]


@pytest.mark.parametrize(("n", "seed"), rows(product([5], range(40)), 4) + rows(product([60], range(40)), 1))
def test_routes_that_cross_channels_several_times_are_fair(n, seed):
    rng = np.random.default_rng(seed)
    n_flows = 4 * n
    capacity = [*rng.choice([1.0, 2.0, 5.0], n), *rng.uniform(0.01, 1.0, n_flows)]
    paths = [[*rng.choice(n, rng.integers(1, 5)).tolist(), n + flow] for flow in range(n_flows)]
    fabric = Paths(capacity, [0.0] * len(capacity), paths)
    starts, nbytes = rng.choice([0.0, 1.0, 2.5], n_flows).tolist(), rng.exponential(3.0, n_flows).tolist()
    end, _ = run_flows(Network(fabric), fabric, starts, nbytes)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-10)


@st.composite
def networks(draw):
    """Random channels and routes: equal or very different capacities, ties, no latency, no bytes, no hops."""
    n_links = draw(st.integers(1, 7))
    n_channels = draw(st.integers(1, n_links))
    capacity = draw(st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0, 7.5, 1e3]), min_size=n_channels, max_size=n_channels))
    channel = [min(i, n_channels - 1) for i in range(n_links)]  # the last links share a channel
    latency = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1 / 3]), min_size=n_links, max_size=n_links))
    n_flows = draw(st.integers(1, 14))
    path = st.lists(st.integers(0, n_channels - 1), unique=True, max_size=5)
    last = st.integers(n_channels - 1, n_links - 1)  # parallel links of the last channel
    paths = [[draw(last) if link == n_channels - 1 else link for link in draw(path)] for _ in range(n_flows)]
    starts = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 4 / 3]), min_size=n_flows, max_size=n_flows))
    size = st.one_of(st.sampled_from([0.0, 1.0, 4.0]), st.floats(0.01, 50.0))
    nbytes = draw(st.lists(size, min_size=n_flows, max_size=n_flows))
    return Paths(capacity, latency, paths, np.array(channel)), starts, nbytes


@pytest.mark.parametrize("share", seeds(1, 5))  # of 250 examples
@given(networks())
@settings(max_examples=50, deadline=None)
def test_random_flows_are_fair_at_every_event_and_end_on_time(share, case):
    fabric, starts, nbytes = case
    end, _ = run_flows(Network(fabric), fabric, starts, nbytes)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-10)


@pytest.mark.parametrize("share", seeds(1, 3))  # of 150 examples
@given(networks(), st.data())
@settings(max_examples=50, deadline=None)
def test_flows_that_are_split_are_fair_and_end_on_time(share, case, data):
    """A flow at rate r puts its share of r on each channel; all flows are raised together."""
    fabric, starts, nbytes = case
    share = st.sampled_from([1.0, 0.5, 1 / 3, 0.25, 1 / 7])
    fabric.shares = [[data.draw(share) for _ in path] for path in fabric.paths]
    end, _ = run_flows(Network(fabric), fabric, starts, nbytes)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-9)


def test_a_split_flow_by_hand():
    """A takes half of its bytes over each of two links of 4 bytes/s, B all of its over the first: 4 = A / 2 + B with
    A = B = 8 / 3, as the second link has room for A at 8.
    """
    fabric = Paths([4.0, 4.0], [0.0, 0.0], [[0, 1], [0]], shares=[[0.5, 0.5], [1.0]])
    network = Network(fabric)
    network.send([0, 2], [1, 3], np.array([8.0, 8.0]), 0.0)
    assert network.advance(0.0) is None
    assert network.rates()[1].tolist() == pytest.approx([8 / 3, 8 / 3], rel=1e-15)
    assert network.advance().time == pytest.approx(3.0, rel=1e-15)
    assert network.channel_nbytes.tolist() == [12.0, 4.0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_crowded_networks_are_fair_at_every_event(seed, split):
    """Enough flows and channels to use the scan for ends, the filling heap and the truncated solve."""
    rng = np.random.default_rng(seed)
    n_channels, n_flows = 40, 220
    capacity = rng.choice([1.0, 2.0, 5.0], n_channels) if seed % 2 else rng.uniform(0.5, 9.0, n_channels)
    paths = [rng.choice(n_channels, rng.integers(1, 6), replace=False).tolist() for _ in range(n_flows)]
    fabric = Paths(capacity.tolist(), [0.01] * n_channels, paths)
    starts = rng.choice([0.0, 1.0, 2.5], n_flows).tolist()
    nbytes = rng.choice([1.0, 2.0], n_flows) if seed == 3 else rng.exponential(3.0, n_flows)
    if split:
        fabric.shares = [(1.0 / rng.integers(1, 9, len(path))).tolist() for path in paths]
    end, n_checked = run_flows(Network(fabric), fabric, starts, nbytes.tolist())
    assert n_checked > 10 * n_flows
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-10)


@pytest.mark.parametrize("n", [3, MOST_LIMITS, MOST_LIMITS + 1, 40])
@pytest.mark.parametrize("split", [False, True])
def test_flows_with_different_limits_share_what_the_slower_ones_leave(n, split):
    """Flow i has a link of its own of i + 1 bytes/s; n of them cross links 0 and 1, of 2 n and 3 n bytes/s, whose other
    flows have no own link. More limits than the filling has places for are channels like others."""
    paths = [[0, 1, 2 + i] for i in range(n)] + [[0], [0], [1], [n + 2, n + 3]]
    capacity = [2.0 * n, 3.0 * n, *(1.0 + np.arange(n)), 5.0, 4.0]
    fabric = Paths(capacity, [0.0] * len(capacity), paths)
    if split:
        fabric.shares = [[0.5 + 0.125 * (i % 3)] * len(path) for i, path in enumerate(paths)]
    network = Network(fabric)
    nodes = np.arange(len(paths)) * 2
    network.send(nodes.tolist(), (nodes + 1).tolist(), np.full(len(paths), 1e6), 0.0)
    assert network.advance(0.0) is None
    hops, rates = network.rates()
    assert hops == paths
    np.testing.assert_allclose(rates, fair_rates(capacity, paths, fabric.shares), rtol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_rates_at_hubs_are_those_of_the_filling_to_the_last_bit(seed):
    """150 clients, each with its own link, at one to four servers; with four, some links are narrow."""
    rng = np.random.default_rng(seed)
    clients, hubs = 150, 1 + seed
    capacity = np.concatenate([rng.choice([10.0, 7.5], hubs), rng.choice([1.0, 2.0], clients)])
    if seed == 3:
        capacity[-5:] = 0.2
    paths = [[int(rng.integers(hubs)), hubs + i % clients] for i in range(3 * clients)]
    fabric = Paths(capacity.tolist(), [0.0] * len(capacity), paths)
    starts = (50.0 * np.repeat(np.arange(3), clients) + rng.choice([0.0, 0.5, 4 / 3], 3 * clients)).tolist()
    nbytes = rng.choice([1.0, 2.0, 2.5], 3 * clients) * rng.choice([1.0, rng.uniform(0.5, 1.5)], 3 * clients)
    ends = []
    for narrowest in (capacity.min(), 0.0):  # 0: no channel is taken for a hub
        network = Network(fabric)
        network.engine.net.reals.narrowest = narrowest
        ends.append(run_flows(network, fabric, starts, nbytes.tolist(), check=False)[0])
    assert network.engine.net.counts.heap_valid == 0
    assert (ends[0] == ends[1]).all()


def test_a_change_far_away_leaves_rates_alone_to_the_last_bit():
    """Two crowds without a common channel: what happens in one does not touch the other's planned ends."""
    rng = np.random.default_rng(1)
    paths = [rng.choice(6, 3, replace=False).tolist() for _ in range(30)]
    nbytes = rng.exponential(3.0, 30)
    alone = Paths([3.0] * 6, [0.0] * 6, paths)
    ends, _ = run_flows(Network(alone), alone, [0.0] * 30, nbytes.tolist(), check=False)
    both = Paths([3.0] * 12, [0.0] * 12, paths + [[link + 6 for link in p] for p in paths])
    sizes = np.concatenate([nbytes, rng.exponential(3.0, 30)])
    starts = [0.0] * 30 + rng.uniform(0.0, 5.0, 30).tolist()
    together, _ = run_flows(Network(both), both, starts, sizes.tolist(), check=False)
    assert together[:30].tolist() == ends.tolist()


def test_searches_return_when_the_flows_of_even_rings_are_no_longer_connected():
    """All messages of two even rings begin together, and searches have found nearly all flows, say. From then on, the
    rings drift apart, a message that ends concerns few flows, and only these are filled again.
    """
    cluster, schedule = Cluster.from_graph(leaf_spine(32, 4, 2, bandwidth="10 Gbit/s", latency="1 us")), ring(64)
    places = np.random.default_rng(0).permutation(cluster.workers).reshape(2, 64)
    network = Network(cluster)
    ids = [network.collective(schedule, nodes, nbytes) for nodes, nbytes in zip(places, (1e8, 0.7e8), strict=True)]
    network.join(np.repeat(ids, 64), np.tile(np.arange(64), 2), 0.0)
    counts = network.engine.net.counts
    assert network.advance(0.005) is None
    assert counts.heap_valid == 0
    counts.sweeping, counts.usually_found = 1, 16 * counts.n_active
    sweeping = []
    for time in np.linspace(0.005, 0.1, 50):
        assert network.advance(time) is None
        sweeping.append(counts.sweeping)
    assert sweeping[0] == 1
    assert sweeping[25:] == [0] * 25


def test_the_reference_itself_by_hand():
    """The parking lot: one flow over three links of 6, 3 and 9, and one flow on each."""
    assert fair_rates([6.0, 3.0, 9.0], [[0, 1, 2], [0], [1], [2]]).tolist() == [1.5, 4.5, 1.5, 7.5]
