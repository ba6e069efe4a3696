"""What can be read while messages are under way: bytes, busy seconds and intervals as of now, and what is ahead."""

import dataclasses
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, racks, star, with_detail
from ddlsim.collectives import all_reduce, build
from ddlsim.network import Network

sys.path.insert(0, str(Path(__file__).parent))
from network_reference import Paths


def two_hosts(**more):
    return Cluster.from_graph(star(2, bandwidth=100.0, latency=0.5, **more))


def check(network):
    """Nothing is lost: what was issued is delivered or in flight, and has crossed its channels or is ahead of them."""
    accounts = network.accounts()
    assert (accounts.nbytes == network.channel_nbytes).all()
    assert (accounts.busy == network.channel_busy).all()
    assert accounts.issued == pytest.approx(accounts.delivered + accounts.in_flight, rel=1e-12)
    carried = network.channel_nbytes.sum() + accounts.left_crossings
    assert accounts.issued_crossings == pytest.approx(carried, rel=1e-12, abs=1e-12)
    room = accounts.capacity * network.channel_busy + accounts.passed
    assert (network.channel_nbytes <= room * (1 + 1e-9) + 1e-9).all()
    assert (network.channel_busy <= network.now * (1 + 1e-12)).all()


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("replay", [0, 1])
def test_a_message_counts_as_far_as_it_has_come(others, replay):
    """1000 bytes at 100 bytes/s after 1 s of latency; with a second message each has half of the link."""
    cluster = two_hosts()
    network = Network(cluster, record=True)
    network.engine.net.counts.replay = replay
    n = 1 + others
    network.send([cluster.workers[0]] * n, [cluster.workers[1]] * n, np.full(n, 1000.0), 0.0)
    for now, seconds in ((0.5, 0.0), (1.0, 0.0), (1.25, 0.25), (5.0, 4.0), (10.9, 9.9)):
        assert network.advance(now) is None
        assert network.now == now
        assert network.channel_nbytes.max() == pytest.approx(100.0 * seconds, rel=1e-12)
        assert network.channel_busy.max() == pytest.approx(seconds, rel=1e-12)
        log = network.busy_intervals()
        assert (log.start.tolist(), log.end.tolist()) == (([1.0, 1.0], [now, now]) if seconds else ([], []))
        assert network.nbytes_sent == 1000.0 * n
        check(network)
    while network.advance() is not None:
        check(network)
    assert network.channel_nbytes.max() == 1000.0 * n
    assert network.channel_busy.max() == pytest.approx(10.0 * n, rel=1e-12)
    assert network.busy_intervals().end.tolist() == [1.0 + 10.0 * n] * 2


def test_what_a_bucket_lets_through_needs_no_busy_time():
    """300 of 1000 bytes pass at once; in frames of 10 bytes with headers of 2 they are 1200 on the wire."""
    cluster = with_detail(two_hosts(), burst="300 B", frame_header="2 B", frame_payload="10 B")
    network = Network(cluster)
    network.send([cluster.workers[0]], [cluster.workers[1]], np.array([1000.0]), 0.0)
    network.advance(1.0 + 4.0)  # 300 at once and 400 since then, of 1200
    accounts = network.accounts()
    assert accounts.passed.max() == 300.0
    assert network.channel_nbytes.max() == pytest.approx(1000.0 * 700 / 1200)
    assert network.channel_busy.max() == pytest.approx(4.0)
    assert accounts.left_crossings == pytest.approx(2 * 1000.0 * 500 / 1200)
    check(network)


def test_acknowledgements_leave_less_room_on_half_duplex_links():
    cluster = with_detail(two_hosts(shared=True), reverse_load=0.25)
    network = Network(cluster)
    assert network.accounts().capacity == pytest.approx([80.0, 80.0])
    network.send([cluster.workers[0]], [cluster.workers[1]], np.array([1000.0]), 0.0)
    network.advance(2.0)
    assert network.channel_nbytes == pytest.approx([80.0, 80.0])
    check(network)


def test_messages_that_wait_or_are_being_received_are_in_flight():
    cluster = two_hosts()
    overhead = np.full(cluster.n_nodes, 0.25)
    network = Network(dataclasses.replace(cluster, send_overhead=overhead, recv_overhead=overhead))
    network.send([cluster.workers[0]] * 2, [cluster.workers[1]] * 2, np.full(2, 100.0), 0.0)
    seen = []
    for now in (0.1, 1.25, 1.75, 3.2, 3.6):
        network.advance(now)
        accounts = network.accounts()
        seen.append((accounts.in_flight, accounts.left_crossings))
        check(network)
    # both wait; the first flows alone for 0.25 s, then both share the link; the first is received from 2.75 s on
    assert seen[:3] == [(200.0, 400.0), (200.0, 400.0), (200.0, pytest.approx(300.0))]
    while network.advance() is not None:
        check(network)
    assert network.accounts()[2:7] == (200.0, 200.0, 0.0, 400.0, 0.0)


@st.composite
def traffic(draw):
    n_channels = draw(st.integers(1, 5))
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 7.5, 1e3]), min_size=n_channels, max_size=n_channels))
    n_flows = draw(st.integers(1, 12))
    path = st.lists(st.integers(0, n_channels - 1), unique=True, max_size=4)
    paths = [draw(path) for _ in range(n_flows)]
    latency = draw(st.lists(st.sampled_from([0.0, 0.25, 1 / 3]), min_size=n_channels, max_size=n_channels))
    starts = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 4 / 3]), min_size=n_flows, max_size=n_flows))
    nbytes = draw(st.lists(st.one_of(st.just(0.0), st.floats(0.01, 50.0)), min_size=n_flows, max_size=n_flows))
    return Paths(capacity, latency, paths), starts, nbytes, draw(st.lists(st.floats(0.0, 60.0), max_size=6))


@pytest.mark.parametrize("share", seeds(1, 3))  # of 150 examples
@given(traffic())
@settings(max_examples=50, deadline=None)
def test_reading_at_any_time_is_the_integral_of_the_rates(share, case):
    """Between two stops at which nothing starts or ends, a channel gains its flows' rates times the time."""
    fabric, starts, nbytes, stops = case
    network = Network(fabric, record=True)
    network.engine.net.counts.replay = len(starts) % 2
    none = np.zeros(len(fabric.channel_capacity))
    read = (0.0, none, none)

    def until(stop):
        nonlocal read
        while True:
            before, (hops, rates) = read, network.rates()
            done = network.advance(stop)
            read = (network.now, network.channel_nbytes, network.channel_busy)
            gain, busy, span = none.copy(), none.copy(), read[0] - before[0]
            for channels, rate in zip(hops, rates.tolist(), strict=True):
                gain[channels] += rate * span
                busy[channels] = span
            np.testing.assert_allclose(read[1] - before[1], gain, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(read[2] - before[2], busy, rtol=1e-9, atol=1e-9)
            check(network)
            if done is None:
                return

    begins = {start + fabric.delay(i) for i, start in enumerate(starts)}
    for stop in sorted({*starts, *begins, *stops, 1e4}):
        until(stop)
        now = [i for i in range(len(starts)) if starts[i] == stop]
        if now:
            network.send(2 * np.array(now), 2 * np.array(now) + 1, np.array([nbytes[i] for i in now]), stop)
            until(stop)
    log = network.busy_intervals()
    seconds = np.bincount(log.channel, log.end - log.start, len(read[2]))
    np.testing.assert_allclose(seconds, read[2], rtol=1e-9, atol=1e-9)
    crossed = sum(size * len(path) for size, path in zip(nbytes, fabric.paths, strict=True))
    assert read[1].sum() == pytest.approx(crossed, rel=1e-9, abs=1e-9)


FABRICS = {
    "switch": Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="10 us")),
    "racks": Cluster.from_graph(racks(2, 4, bandwidth="10 Gbit/s", latency="10 us", oversubscription=4)),
    "half duplex": Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="10 us", shared=True)),
    "shaped": with_detail(
        Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="10 us")), frame_header="66 B",
        frame_payload="1448 B", burst="4542 B", reverse_load=0.0218,
    ),
}  # fmt: skip


@given(
    st.sampled_from(sorted(FABRICS)),
    st.sampled_from([all_reduce.ring(8), all_reduce.double_binary_tree(8, n_segments=4), build("gloo_ring", 8)]),
    st.lists(st.floats(0.0, 0.05), min_size=1, max_size=5),
)
@pytest.mark.parametrize("share", seeds(1, 4))  # of 80 examples
@settings(max_examples=20, deadline=None)
def test_collectives_can_be_read_anywhere(share, name, schedule, stops):
    """With and without replayed rounds, which begin long before they are booked."""
    read = []
    for replay in (0, 1):
        fabric = FABRICS[name]
        network = Network(fabric, record=True)
        if name != "shaped":
            network.engine.net.counts.replay = replay
        number = network.collective(schedule, fabric.workers, 1e7)
        network.join([number] * 8, range(8), 0.0)
        seen = []
        for stop in [*sorted(stops), 1.0]:
            while network.advance(stop) is not None:
                pass
            check(network)
            log = network.busy_intervals()
            logged = np.bincount(log.channel, log.end - log.start, fabric.n_channels)
            np.testing.assert_allclose(logged, network.channel_busy, rtol=1e-9, atol=1e-12)
            seen.append((network.channel_nbytes, network.channel_busy, network.nbytes_sent))
        read.append(seen)
    for events, rounds in zip(*read, strict=True):
        np.testing.assert_allclose(events[0], rounds[0], rtol=1e-9, atol=1e-3)
        np.testing.assert_allclose(events[1], rounds[1], rtol=1e-9, atol=1e-12)
        assert events[2] == pytest.approx(rounds[2], rel=1e-12)


def test_bytes_are_sent_when_messages_start_not_when_a_collective_is_prepared():
    fabric = FABRICS["switch"]
    network = Network(fabric)
    number = network.collective(all_reduce.ring(8), fabric.workers, 8e6)
    assert network.nbytes_sent == 0.0
    network.join([number] * 8, range(8), 0.0)
    assert network.nbytes_sent == 8e6  # every rank's first of 14 messages of 1 MB
    while network.advance() is not None:
        pass
    assert network.nbytes_sent == pytest.approx(14 * 8e6)


@pytest.mark.parametrize("replay", [0, 1])
@pytest.mark.parametrize("kind", ["ring", "uneven ring", "messages", "bursts", "shared network"])
def test_sums_do_not_drift(kind, replay):
    """After 2^53 bytes, whose neighbouring numbers are 2 apart, terms below 1 still count."""
    n = 3 if kind == "uneven ring" else 2
    cluster = Cluster.from_graph(star(n, bandwidth=100.0, latency=0.0))
    if kind == "bursts":
        cluster = with_detail(cluster, burst="300 B")
    network = Network(cluster)
    if kind == "shared network":
        network.shared()
    net = network.engine.net
    net.counts.replay = replay
    before = 2.0**53
    net.channels["nbytes"] = before
    if kind == "shared network":
        network.routes([cluster.workers[0]], [cluster.workers[1]])
        net = network.engine.net
        net.routed["issued"] = before
    for name in ("issued", "issued_hops", "delivered"):
        setattr(net.reals, name, before)
    if "ring" in kind:
        size = 3.0 if kind == "ring" else 2.0  # chunks of size / n bytes
        schedule = build(all_reduce.ring, n)
        for _ in range(50):
            collective = network.collective(schedule, cluster.workers[:n], size)
            network.join([collective] * n, list(range(n)), network.now)
            while network.advance() is not None:
                pass
        sent = 50 * 2 * (n - 1) * size
    else:
        for _ in range(60):
            network.send([cluster.workers[0]], [cluster.workers[1]], np.array([0.7]), network.now)
            while network.advance() is not None:
                pass
        sent = 60 * 0.7
    for name, per_message in (("issued", 1), ("issued_hops", 2), ("delivered", 1)):
        high, low = (getattr(net.reals, word) for word in (name, f"{name}_low"))
        assert (high - before) + low == pytest.approx(per_message * sent, rel=1e-12)
    carried = (net.channels["nbytes"] - before) + net.channels["nbytes_low"]
    assert carried.sum() == pytest.approx(2 * sent, rel=1e-12)
    if kind == "shared network":
        assert ((net.routed["issued"] - before) + net.routed["issued_low"]).max() == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize("replay", [0, 1])
def test_replayed_rounds_count_like_simulated_ones(replay):
    """1,000 rounds of messages of 1/3 byte: sums are exact, however many rounds are booked at once."""
    cluster = Cluster.from_graph(star(2, bandwidth=100.0, latency=0.0))
    network = Network(cluster)
    network.engine.net.counts.replay = replay
    ring = build(all_reduce.ring, 2)
    (lane,) = ring.lanes
    rounds = tuple(dataclasses.replace(each, repeat=500 * each.repeat) for each in lane)
    schedule = dataclasses.replace(ring, lanes=(rounds,))
    collective = network.collective(schedule, cluster.workers[:2], 2.0 / 3.0)
    network.join([collective] * 2, [0, 1], 0.0)
    while network.advance() is not None:
        pass
    each = Fraction(2.0 / 3.0 / 2)
    accounts, n_messages = network.accounts(), network.n_messages
    assert n_messages == 2000
    assert accounts.issued == accounts.delivered == float(n_messages * each)
    assert accounts.issued_crossings == float(2 * n_messages * each)
    assert (accounts.nbytes == float(n_messages // 2 * each)).all()
