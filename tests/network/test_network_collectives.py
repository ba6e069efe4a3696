"""Collectives beside each other and beside messages, late ranks, LogGP's overheads, exact replay."""

import dataclasses

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, leaf_spine, star, two_racks
from ddlsim.collectives import Schedule, all_reduce, all_to_all, broadcast, build, cost, messages
from ddlsim.errors import ConfigError
from ddlsim.network import Network

ALPHA, BETA = 2e-5, 8e-10


def one_switch(n_hosts, **changes):
    cluster = Cluster.from_graph(star(n_hosts, bandwidth="10 Gbit/s", latency="10 us"))
    return dataclasses.replace(cluster, **changes)


def start(network, cluster, schedule, nbytes, now=0.0, nodes=None):
    nodes = cluster.workers[: schedule.n_ranks] if nodes is None else nodes
    collective = network.collective(schedule, nodes, nbytes)
    network.join([collective] * schedule.n_ranks, np.arange(schedule.n_ranks), now)
    return collective


def finish(network, until=np.inf):
    """Return {(id, rank): time} of all completions up to `until`."""
    ends = {}
    while (done := network.advance(until)) is not None:
        ends.update(dict.fromkeys(zip(done.ids.tolist(), done.ranks.tolist(), strict=True), done.time))
    return ends


# ---------------------------------------------------------------- figures that were computed elsewhere too


@pytest.mark.parametrize(("n", "seconds"), [(256, 0.169575), (1024, 0.20076375)])
def test_large_rings(n, seconds):
    cluster = one_switch(n)
    network = Network(cluster)
    start(network, cluster, all_reduce.ring(n), 1e8)
    assert max(finish(network).values()) == pytest.approx(seconds, rel=1e-12)
    assert network.n_messages == 2 * (n - 1) * n
    assert network.n_replayed > 0.9 * network.n_messages


def test_all_pairs_at_once_end_one_by_one():
    n = 64
    cluster = one_switch(n)
    (round,) = all_to_all.direct(n).lanes[0]
    sizes = (1e6 * (0.5 + (7919 * round.src + 104729 * round.dst) % 1000 / 1000)).astype(np.int64)
    network = Network(cluster)
    collective = network.collective(all_to_all.direct(n), cluster.workers, [sizes[None, :].astype(float)])
    network.join([collective] * n, np.arange(n), 0.0)
    ends = finish(network)
    assert len(ends) == n
    assert max(ends.values()) == pytest.approx(0.0516904233331, rel=1e-11)


# ---------------------------------------------------------------- LogGP


def test_a_message_takes_latency_two_overheads_and_its_bytes():
    cluster = one_switch(2, send_overhead=np.full(3, 3e-6), recv_overhead=np.full(3, 5e-6))
    network = Network(cluster)
    (handle,) = network.send([0], [1], np.array([1e6]), 0.5).tolist()
    assert handle < 0
    done = network.advance()
    assert done.ids.tolist() == [handle]
    assert done.time == pytest.approx(0.5 + 3e-6 + ALPHA + 1e6 * BETA + 5e-6, rel=1e-12)


def test_sends_of_one_node_are_spaced_by_the_overhead():
    """Empty messages from one node to three others leave o apart; into one node they are taken o apart."""
    o = 4e-6
    cluster = one_switch(4, send_overhead=np.full(5, o), recv_overhead=np.full(5, o))
    network = Network(cluster)
    network.send([0, 0, 0], [1, 2, 3], np.zeros(3), 0.0)
    times = [network.advance().time for _ in range(3)]
    assert times == pytest.approx([o + ALPHA + o, 2 * o + ALPHA + o, 3 * o + ALPHA + o], rel=1e-12)
    network = Network(cluster)
    network.send([1, 2, 3], [0, 0, 0], np.zeros(3), 1.0)
    times = [network.advance().time - 1 for _ in range(3)]
    assert times == pytest.approx([o + ALPHA + o, o + ALPHA + 2 * o, o + ALPHA + 3 * o], rel=1e-9)


def test_reducing_delays_the_receiver_only():
    """Chain of 3 ranks, reduce to 0 then broadcast: gamma counts on the two reduced messages."""
    gamma = 3e-10
    cluster = one_switch(2, reduce_time=np.full(3, gamma))
    network = Network(cluster)
    collective = start(network, cluster, build("chain", 2, kind="reduce", nbytes=1), 1e7)
    ends = finish(network)
    assert ends[collective, 1] == pytest.approx(ALPHA + 1e7 * BETA, rel=1e-12)
    assert ends[collective, 0] == pytest.approx(ALPHA + 1e7 * (BETA + gamma), rel=1e-12)


def test_a_message_to_oneself_crosses_nothing():
    cluster = one_switch(2, recv_overhead=np.full(3, 5e-6))
    network = Network(cluster)
    network.send([1], [1], np.array([1e9]), 2.0)
    assert network.advance().time == 2.0 + 5e-6
    assert network.channel_nbytes.sum() == 0.0


def test_messages_sent_one_by_one_are_those_sent_together():
    """...however often the network is asked in between, and whatever it was waiting for before."""
    cluster = one_switch(6)
    src, dst, nbytes = [0, 1, 2, 3, 0], [4, 4, 4, 0, 5], np.array([1e6, 2e6, 0.0, 5e5, 1e6])
    histories = []
    for one_by_one in (False, True):
        network = Network(cluster)
        history = []
        for begin in (0.0, 1e-3, 1.0):
            parts = [[i] for i in range(5)] if one_by_one else [list(range(5))]
            for part in parts:
                network.send([src[i] for i in part], [dst[i] for i in part], nbytes[part], begin)
                if one_by_one:
                    assert network.advance(begin) is None
            stop = {0.0: 1e-3, 1e-3: 1.0, 1.0: np.inf}[begin]
            while (done := network.advance(stop)) is not None:
                assert begin < done.time <= stop
                history.append((done.time, done.ids.tolist()))
            assert network.advance(stop) is None
        histories.append(history)
    assert histories[0] == histories[1]
    assert sum(len(ids) for _, ids in histories[0]) == 15


def test_half_duplex_links_carry_both_directions():
    """Two hosts exchange n bytes each: on half duplex links each link carries 2 n."""
    cluster = Cluster.from_graph(star(2, bandwidth="10 Gbit/s", latency="10 us", shared=True))
    network = Network(cluster)
    start(network, cluster, all_reduce.recursive_doubling(2), 1e6)
    ends = finish(network)
    assert list(ends.values()) == pytest.approx([ALPHA + 2e6 * BETA] * 2, rel=1e-12)
    assert network.channel_nbytes.tolist() == [2e6, 2e6]
    assert network.channel_busy == pytest.approx([2e6 * BETA] * 2, rel=1e-9)


# ---------------------------------------------------------------- several things at once


def test_late_ranks_delay_those_that_depend_on_them():
    """A broadcast chain 0 -> 1 -> 2 -> 3: rank 2 enters late, so 2 and 3 are late, 0 and 1 are not."""
    cluster = one_switch(4)
    network = Network(cluster)
    collective = network.collective(broadcast.chain(4, n_segments=1), cluster.workers, 1e6)
    hop = ALPHA + 1e6 * BETA
    network.join([collective] * 3, [0, 1, 3], 0.0)
    first = finish(network, until=1.0)
    assert first == {(collective, 0): pytest.approx(hop), (collective, 1): pytest.approx(2 * hop)}
    assert not network.pending
    network.join([collective], [2], 1.0)
    # rank 1 has sent already, so rank 2 sends on at once
    assert finish(network) == {(collective, r): pytest.approx(1.0 + hop) for r in (2, 3)}


def test_two_collectives_on_the_same_links_share_them():
    """Two equal rings from the same start: everything takes twice the bytes' time, once the latency."""
    n = 8
    cluster = one_switch(n)
    network = Network(cluster)
    ids = [start(network, cluster, all_reduce.ring(n), 1e7) for _ in range(2)]
    ends = finish(network)
    assert len(set(ids)) == 2
    assert len(ends) == 2 * n
    assert max(ends.values()) == pytest.approx(cost.ring(n, 1e7, ALPHA, 2 * BETA), rel=1e-9)


def test_collectives_on_other_nodes_do_not_feel_each_other():
    cluster = one_switch(8)
    network = Network(cluster)
    a = start(network, cluster, all_reduce.ring(4), 1e7, nodes=cluster.workers[:4])
    b = start(network, cluster, all_reduce.ring(4), 3e7, nodes=cluster.workers[4:])
    ends = finish(network)
    assert ends[a, 0] == pytest.approx(cost.ring(4, 1e7, ALPHA, BETA), rel=1e-9)
    assert ends[b, 0] == pytest.approx(cost.ring(4, 3e7, ALPHA, BETA), rel=1e-9)


def test_a_message_takes_half_of_a_link_from_a_collective():
    """Broadcast of n bytes 0 -> 1 and, at the same time, a message 0 -> 2 of n/2 bytes by hand:
    both run at B/2 until the message has ended at n/B, then the broadcast has n/2 left: 3/2 n/B in all."""
    cluster = one_switch(3)
    network = Network(cluster)
    collective = start(network, cluster, broadcast.chain(2, n_segments=1), 1e6)
    (handle,) = network.send([0], [2], np.array([5e5]), 0.0).tolist()
    ends = finish(network)
    assert ends[handle, 0] == pytest.approx(ALPHA + 1e6 * BETA, rel=1e-12)
    assert ends[collective, 1] == pytest.approx(ALPHA + 1.5e6 * BETA, rel=1e-12)


def test_ids_are_used_again_and_every_execution_is_like_the_first():
    cluster = one_switch(6)
    network = Network(cluster)
    schedule = all_reduce.halving_doubling(6)
    took, ids = [], []
    for i in range(5):
        ids.append(start(network, cluster, schedule, 1e6, now=float(i)))
        took.append(max(finish(network).values()) - i)
    assert set(ids) == {ids[0]}
    assert took == pytest.approx([took[0]] * 5, rel=1e-9)
    one, two = (start(network, cluster, schedule, 1e6, now=10.0) for _ in range(2))
    assert one != two


def test_message_sizes_can_be_given_one_by_one():
    """Rank 0 sends 1, 2, 3 MB to rank 1, one after the other."""
    cluster = one_switch(2)
    schedule = broadcast.chain(2, n_segments=3)
    assert [(r.repeat, len(r.src)) for r in schedule.lanes[0]] == [(3, 1)]
    network = Network(cluster)
    start(network, cluster, schedule, [np.array([[1e6], [2e6], [3e6]])])
    assert max(finish(network).values()) == pytest.approx(3 * ALPHA + 6e6 * BETA, rel=1e-12)
    assert network.n_replayed == 0


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "got 0 tables of message sizes for 1 rounds; pass one table per round"),
        ([np.ones((1, 3))], r"round 0 has shape \(1, 3\); expected \(3, 1\), with one row per repetition"),
        ([np.array([[1.0], [np.nan], [1.0]])], "round 0 contains a size that is negative or not finite"),
        ([np.array([[1.0], [-1.0], [1.0]])], "round 0 contains a size"),
    ],
)
def test_message_sizes_that_do_not_fit_are_refused(tables, message):
    cluster = one_switch(2)
    with pytest.raises(ConfigError, match=f"nbytes: .*{message}"):
        Network(cluster).collective(broadcast.chain(2, n_segments=3), cluster.workers, tables)


def test_weighted_chunks_travel_with_their_own_sizes():
    weight = np.array([1.0, 2.0, 5.0])
    schedule = dataclasses.replace(all_reduce.ring(3), chunk_weight=weight)
    cluster = one_switch(3)
    network = Network(cluster)
    start(network, cluster, schedule, 8e6)
    assert max(finish(network).values()) > cost.ring(3, 8e6, ALPHA, BETA)
    up = [network.channel_nbytes[cluster.link_channel[link]] for link in np.flatnonzero(cluster.link_src < 3)]
    assert sorted(up) == pytest.approx(sorted(schedule.bytes_sent(8e6)), rel=1e-12)


# ---------------------------------------------------------------- replay

FABRICS = {
    "switch": one_switch(12),
    "racks": Cluster.from_graph(two_racks(6, bandwidth="10 Gbit/s", latency="10 us", oversubscription=3)),
    "leaf-spine": Cluster.from_graph(leaf_spine(3, 4, 2, bandwidth="10 Gbit/s", latency="10 us", oversubscription=2)),
    "half duplex": Cluster.from_graph(star(12, bandwidth="10 Gbit/s", latency="10 us", shared=True)),
    "slow reduction": one_switch(12, reduce_time=np.full(13, 1e-10)),
    "overhead": one_switch(12, send_overhead=np.full(13, 1e-6)),
    "no latency": Cluster.from_graph(star(12, bandwidth="10 Gbit/s", latency="0 s")),
}
ALGORITHMS = {
    "ring": all_reduce.ring(12),
    "scattered ring": build("ring", 12),
    "pipelined": all_reduce.pipelined_ring(12),
    "naive": all_reduce.naive_ring(12),
    "chain": broadcast.chain(12, n_segments=40),
    "tree": all_reduce.double_binary_tree(12, n_segments=9),
    "hierarchical": build("hierarchical", 12, hosts=[r // 4 for r in range(12)]),
}
SHUFFLED = np.random.default_rng(0).permutation(12)
CROSSING = np.arange(12).reshape(3, 4).T.ravel()  # every hop of a ring goes from one leaf to another


def story(replay, fabric, schedule, order, horizons):
    """Run a collective up to each horizon in turn, with a message in between; return all that can be seen."""
    network = Network(fabric, record=True)
    network.engine.net.counts.replay = replay
    collective = network.collective(schedule, fabric.workers[order], 3.7e7)
    network.join([collective] * 12, np.arange(12), 0.0)
    seen = []
    for horizon in [*sorted(horizons), np.inf]:
        while (done := network.advance(horizon)) is not None:
            seen.append((done.time, done.ids.tolist(), done.ranks.tolist()))
        if horizon < np.inf and len(seen) % 2 == 0:
            seen.append(network.send([fabric.workers[0]], [fabric.workers[7]], np.array([2e5]), horizon).tolist())
    return network, seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("fabric", FABRICS)
def test_replay_changes_no_bit(fabric, algorithm):
    for order in (np.arange(12), SHUFFLED, CROSSING):
        fast, seen = story(1, FABRICS[fabric], ALGORITHMS[algorithm], order, [])
        slow, expected = story(0, FABRICS[fabric], ALGORITHMS[algorithm], order, [])
        assert seen == expected
        assert slow.n_replayed == 0
        assert fast.n_messages == slow.n_messages == ALGORITHMS[algorithm].n_messages
        np.testing.assert_allclose(fast.channel_nbytes, slow.channel_nbytes, rtol=1e-9)
        np.testing.assert_allclose(fast.channel_busy, slow.channel_busy, rtol=1e-9)


def test_replay_happens_where_it_can():
    cases = [("switch", "ring"), ("switch", "chain"), ("leaf-spine", "ring"), ("half duplex", "naive")]
    for fabric, algorithm in cases:
        network, _ = story(1, FABRICS[fabric], ALGORITHMS[algorithm], CROSSING, [])
        assert network.n_replayed > 0, (fabric, algorithm)


@pytest.mark.parametrize("share", seeds(1, 4))  # of 120 examples
@given(
    st.sampled_from(["switch", "racks", "leaf-spine"]),
    st.sampled_from(["ring", "chain", "naive", "hierarchical"]),
    st.sampled_from([np.arange(12), SHUFFLED, CROSSING]),
    st.lists(st.floats(0.0, 0.09), max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_replay_may_be_cut_anywhere(share, fabric, algorithm, order, horizons):
    fast, seen = story(1, FABRICS[fabric], ALGORITHMS[algorithm], order, horizons)
    slow, expected = story(0, FABRICS[fabric], ALGORITHMS[algorithm], order, horizons)
    assert seen == expected
    np.testing.assert_allclose(fast.channel_nbytes, slow.channel_nbytes, rtol=1e-9)
    np.testing.assert_allclose(fast.channel_busy, slow.channel_busy, rtol=1e-9)
    assert intervals(fast) == intervals(slow)


def intervals(network):
    """The recorded busy intervals, in order of channel and time."""
    busy = network.busy_intervals()
    return sorted(zip(*(column.tolist() for column in (busy.channel, busy.start, busy.end)), strict=True))


def test_recording_changes_nothing():
    cluster = FABRICS["switch"]
    ends = []
    for record in (False, True):
        network = Network(cluster, record=record)
        start(network, cluster, ALGORITHMS["ring"], 1e8)
        ends.append(finish(network))
        assert network.n_replayed > 0
        assert (len(network.busy_intervals().start) > 0) == record
    assert ends[0] == ends[1]


def test_a_thread_that_ends_stops_the_replay_of_its_share():
    """Two lanes over one link, of four and of two messages of 5 bytes at 10 bytes/s, latency 1 s:
    both share the link in rounds 1 and 2 (1 + 1 s each), then the longer lane has it alone (1 + 0.5 s)."""
    cluster = Cluster.from_graph(star(2, bandwidth=10.0, latency=0.5))
    lanes = tuple((messages([0], [1], reduce=False, repeat=n),) for n in (4, 2))
    network = Network(cluster)
    start(network, cluster, Schedule(2, 1, lanes), 5.0)
    assert set(finish(network).values()) == {7.0}


# ---------------------------------------------------------------- recorded intervals


def test_busy_intervals_add_up_to_busy_seconds():
    cluster = FABRICS["leaf-spine"]
    network, _ = story(1, cluster, ALGORITHMS["hierarchical"], np.arange(12), [])
    log = network.busy_intervals()
    assert (log.end > log.start).all()
    total = np.bincount(log.channel, weights=log.end - log.start, minlength=cluster.n_channels)
    np.testing.assert_allclose(total, network.channel_busy, rtol=1e-9)
    np.testing.assert_allclose(log.seconds(), total, rtol=1e-9)
    for channel in range(cluster.n_channels):
        own = log.channel == channel
        assert (log.start[own][1:] >= log.end[own][:-1]).all(), "intervals of a channel do not overlap"
        assert [column.tolist() for column in log.of(channel)] == [log.start[own].tolist(), log.end[own].tolist()]
    some = [int(channel) for channel in np.flatnonzero(total)[::3]]
    part = log.only(some)
    assert set(part.channel.tolist()) == set(some)
    for channel in range(cluster.n_channels):
        expected = [each.tolist() for each in log.of(channel)] if channel in some else [[], []]
        assert [each.tolist() for each in part.of(channel)] == expected
        assert part.seconds()[channel] == (log.seconds()[channel] if channel in some else 0.0)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_a_log_that_is_emptied_often_says_the_same(monkeypatch, algorithm):
    logs = []
    for rounds, room, repeats in ((8, 1 << 16, 1 << 10), (1, 0, 1)):
        monkeypatch.setattr("ddlsim.network.engine._LOG_ROUNDS", rounds)
        monkeypatch.setattr("ddlsim.network.engine._LOG_ROOM", room)
        monkeypatch.setattr("ddlsim.network.engine._LOG_REPEATS", repeats)
        network = Network(FABRICS["switch"], record=True)
        start(network, FABRICS["switch"], ALGORITHMS[algorithm], 1e8)
        finish(network)
        logs.append(intervals(network))
        assert intervals(network) == logs[-1], "reading takes nothing away"
    assert logs[0] == logs[1]
    assert len(logs[0]) > len(FABRICS["switch"].channel_capacity), "more than the short log takes"


def test_rounds_that_come_again_are_logged_once():
    """A ring of 12: 22 rounds, all alike, each of 12 messages over two links."""
    rows = []
    for replay in (1, 0):
        network = Network(FABRICS["switch"], record=True)
        network.engine.net.counts.replay = replay
        start(network, FABRICS["switch"], ALGORITHMS["ring"], 1e8)
        finish(network)
        busy = network.busy_intervals()
        assert len(busy.start) == 22 * 24
        assert busy.only([3]).start.tolist() == busy.of(3)[0].tolist() != []
        rows.append(sum(len(part.rows) for part in busy._parts))
    assert rows[0] < rows[1] / 3, "but for the first rounds of both halves"
