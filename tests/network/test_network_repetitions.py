"""A round that repeats is the same rounds written out, whatever overtakes what and whatever happens at one instant."""

import dataclasses
import functools

import numpy as np
import pytest
from draws import seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.collectives import Schedule, build, messages
from ddlsim.network import Network


def written_out(schedule):
    """The schedule with every repetition as a round of its own."""
    lanes = tuple(
        tuple(
            dataclasses.replace(r, repeat=1, shift=0, start=(r.start + k * r.shift) % schedule.n_chunks)
            for r in lane
            for k in range(r.repeat)
        )
        for lane in schedule.lanes
    )
    return dataclasses.replace(schedule, lanes=lanes)


def ends(cluster, schedule, nbytes, joins, times=1, network=None, order=None):
    """When each rank ends, in the last of `times` executions one after the other on one network, (n_ranks,).

    Ranks that join at the same time do so in their order, or in `order`.
    """
    network, now = network or Network(cluster), 0.0
    for _ in range(times):
        collective = network.collective(schedule, cluster.workers[: schedule.n_ranks], nbytes)
        end = np.full(schedule.n_ranks, np.nan)

        def until(time, end=end):
            while (done := network.advance(time)) is not None:
                end[done.ranks] = done.time

        for rank in order or np.argsort(joins, kind="stable").tolist():
            until(now + joins[rank])
            network.join([collective], [rank], now + joins[rank])
        until(np.inf)
        assert not np.isnan(end).any()
        began, now = now, float(end.max())
    return end - began


def machines(n_hosts, **columns):
    cluster = Cluster.from_graph(star(n_hosts, bandwidth="8 Gbit/s", latency=0.0))
    return dataclasses.replace(cluster, **columns)


CHAIN = messages([0, 1], [1, 2], [0, 0], reduce=True, repeat=2, shift=1)  # chunk 0, then chunk 1
SLOW = {"reduce_time": np.array([0.0, 4e-9, 0.0, 0.0])}


@pytest.mark.parametrize("times", [1, 2])
def test_a_later_message_does_not_stand_for_an_earlier_one_that_is_still_reduced(times):
    """0 sends to 1 and 1 to 2: 1 MB, then 0.1 MB (1 ms and 0.1 ms on the way; rank 1 reduces for 4 ms and 0.4 ms).

    Rank 1 has the second message at 1.1 + 0.4 ms, the first at 1 + 4 ms. Only then may it send its second.
    """
    schedule = Schedule(3, 2, ((CHAIN,),), chunk_weight=np.array([10.0, 1.0]))
    for each in (schedule, written_out(schedule)):
        end = ends(machines(3, **SLOW), each, 1.1e6, [0.0, 0.0, 0.0], times)
        assert end == pytest.approx([1.1e-3, 5.1e-3, 5.1e-3], rel=1e-9)


def test_an_empty_message_waits_for_the_reduction_before_it():
    """As above with sizes of 1 MB and 0: what is not reduced at all cannot overtake either."""
    schedule = Schedule(3, 2, ((CHAIN,),), chunk_weight=np.array([1.0, 0.0]))
    for each in (schedule, written_out(schedule)):
        end = ends(machines(3, **SLOW), each, 1e6, [0.0, 0.0, 0.0])
        assert end == pytest.approx([1e-3, 5e-3, 5e-3], rel=1e-9)


# ---------------------------------------------------------------- ties

sent = functools.partial(messages, reduce=False)
N_SENDERS = 5
TO_ONE = np.arange(1, N_SENDERS + 1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 1, 3]])
def test_messages_that_end_together_are_received_in_the_order_of_issue(order):
    """Each of five machines sends 1 MB to machine 0, in a lane of its own. The messages share a link and end at 5 ms.
    Machine 0 spends 0.1 ms on each, then answers with an empty message."""
    lanes = tuple((sent([i], [0], [0], [1]), sent([0], [i], [1], [1])) for i in TO_ONE)
    schedule = Schedule(6, 2, lanes, chunk_weight=np.array([1.0, 0.0]))
    cluster = machines(6, recv_overhead=np.array([1e-4] + [0.0] * 6))
    end = ends(cluster, schedule, 1e6, [0.0] * 6, order=order)
    assert end[[rank for rank in order if rank > 0]] == pytest.approx(5e-3 + 1e-4 * TO_ONE, rel=1e-12)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 1, 3]])
def test_ranks_that_go_on_together_do_so_in_their_order(order):
    """As above, but each machine first sends 1 MB to its own partner: all go on after 1 ms, whoever joined first."""
    lanes = tuple(
        (sent([i], [i + N_SENDERS], [0], [1]), sent([i], [0], [0], [1]), sent([0], [i], [1], [1])) for i in TO_ONE
    )
    schedule = Schedule(11, 2, lanes, chunk_weight=np.array([1.0, 0.0]))
    cluster = machines(11, recv_overhead=np.array([1e-4] + [0.0] * 11))
    end = ends(cluster, schedule, 1e6, [0.0] * 11, order=[*order, *range(6, 11)])
    assert end[TO_ONE] == pytest.approx(6e-3 + 1e-4 * TO_ONE, rel=1e-12)


def test_ranks_go_on_when_all_that_is_delivered_at_one_instant_has_been():
    """Rank 1 receives A and then B in lane 0, C in lane 1, and reduces each for 4 s per MiB (1 s on the link).

    A (1 MiB) and C (7/8 MiB, from 3/8 s on) share the link. A ends at 13/8 s and is reduced at 45/8 s, C ends at 17/8 s
    and is reduced at 45/8 s, too. B (1/2 MiB, after A) ends at 19/8 s; its reduction would end before that of A and
    counts at 45/8 s. Then rank 1 sends an empty message in each lane, which costs it 1 s: first in lane 0.
    """
    to_1 = messages([0], [1], [0], [1], reduce=True, repeat=2, shift=1)
    lanes = (
        (to_1, sent([1], [2], [3], [1])),
        (messages([3], [1], [2], [1], reduce=True), sent([1], [3], [3], [1])),
    )
    schedule = Schedule(4, 5, lanes, chunk_weight=np.array([1.0, 0.5, 0.875, 0.0, 1.625]))
    mib = float(1 << 20)
    cluster = dataclasses.replace(
        Cluster.from_graph(star(4, bandwidth=mib, latency=0.0)),
        send_overhead=np.array([0.0, 1.0, 0.0, 0.0, 0.0]),
        reduce_time=np.array([0.0, 4.0 / mib, 0.0, 0.0, 0.0]),
    )
    for each in (schedule, written_out(schedule)):
        end = ends(cluster, each, 4.0 * mib, [0.0, 0.0, 0.0, 0.375])
        assert end[2:] == pytest.approx([45 / 8 + 1, 45 / 8 + 2], rel=1e-12)


PERMUTATIONS = {  # rounds of (senders, receivers, repetitions) and the s that each message costs its sender
    "another round": ([([3, 0, 1, 2], [2, 3, 0, 1], 6), ([0], [2], 1), ([1, 3, 2, 0], [2, 0, 1, 3], 2)], 0.0),
    "two to one": (
        [
            ([0, 3, 1, 2, 4, 5], [5, 0, 3, 1, 2, 4], 5),
            ([5, 4], [3, 3], 2),
            ([4, 3, 1, 0, 5, 2], [2, 4, 3, 1, 0, 5], 6),
        ],
        2e-5,
    ),
    "two to one, once": (
        [
            ([2, 6, 5, 1, 3, 0, 4], [4, 2, 6, 5, 1, 3, 0], 5),
            ([0, 2], [6, 6], 1),
            ([5, 2, 3, 0, 1, 6, 4], [4, 5, 2, 3, 0, 1, 6], 2),
        ],
        0.0,
    ),
}


@pytest.mark.parametrize("case", PERMUTATIONS)
def test_the_order_after_replayed_rounds_is_that_after_simulated_ones(case):
    """Rounds in which each rank sends to another one are replayed. Messages that come to one rank together follow."""
    rounds, overhead = PERMUTATIONS[case]
    n = len(rounds[0][0])
    lane = tuple(sent(src, dst, [0] * len(src), [1] * len(src), repeat=repeat) for src, dst, repeat in rounds)
    plain = Cluster.from_graph(star(n, bandwidth="8 Gbit/s", latency="5 us"))
    costs = {"send_overhead": np.full(n + 1, overhead), "recv_overhead": np.full(n + 1, 1e-4)}
    cluster, schedule = dataclasses.replace(plain, **costs), Schedule(n, 1, (lane,))
    fast, slow = Network(cluster), Network(cluster)
    slow.engine.net.counts.replay = 0
    expected = ends(cluster, schedule, 1e6, [0.0] * n, network=slow)
    assert ends(cluster, schedule, 1e6, [0.0] * n, network=fast).tolist() == expected.tolist()
    assert fast.n_replayed > 0 == slow.n_replayed
    np.testing.assert_allclose(ends(cluster, written_out(schedule), 1e6, [0.0] * n), expected, rtol=1e-12)


# ---------------------------------------------------------------- whatever is drawn


@st.composite
def cases(draw):
    """(cluster, schedule, joins): messages of any sizes between machines of which each takes its own time."""
    n = draw(st.integers(2, 4))
    n_chunks = draw(st.integers(2, 4))
    rank, chunk = st.integers(0, n - 1), st.integers(0, n_chunks - 1)

    def a_round():
        m = draw(st.integers(1, 4))
        parts = (rank, st.integers(1, n - 1), chunk, st.integers(1, n_chunks))
        src, further, start, count = (draw(st.lists(part, min_size=m, max_size=m)) for part in parts)
        lists = [src, [(a + b) % n for a, b in zip(src, further, strict=True)], start, count]  # never to itself
        reduce, repeat, shift = draw(st.sampled_from([True, True, False])), draw(st.integers(1, 5)), draw(chunk)
        return messages(*lists, reduce=reduce, repeat=repeat, shift=shift, header=draw(st.sampled_from([0.0, 3e4])))

    lanes = tuple(tuple(a_round() for _ in range(draw(st.integers(1, 3)))) for _ in range(draw(st.integers(1, 2))))
    weight = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=n_chunks, max_size=n_chunks))
    weight = [1.0] * n_chunks if sum(weight) == 0.0 else weight
    schedule = Schedule(n, n_chunks, lanes, chunk_weight=np.array(weight))

    def column(*values):
        return np.array(draw(st.lists(st.sampled_from(values), min_size=n + 1, max_size=n + 1)))

    cluster = machines(
        n, send_overhead=column(0.0, 2e-5), recv_overhead=column(0.0, 1e-4), reduce_time=column(0.0, 1e-9, 5e-9, 2e-8)
    )
    return cluster, schedule, draw(st.lists(st.sampled_from([0.0, 0.7e-3]), min_size=n, max_size=n))


def served_at_one_instant():
    """Two messages reach a machine at one instant, while timers of later ones have been set: an empty one first, and
    one that is reduced for 1 ms. The machine has an overhead for each, in the order in which they came."""
    alone = messages([0], [0], [0], [1], reduce=True)
    to_1 = messages([0, 1, 1, 0], [1, 1, 1, 0], [0] * 4, [2, 1, 4, 1], reduce=True, repeat=3, shift=2)
    to_0 = messages([0, 0, 0, 0], [0, 0, 0, 1], [0] * 4, [1] * 4, reduce=True, repeat=2, shift=3)
    weight = np.array([0.0, 0.0, 0.0, 0.1])
    overhead, reduce_time = np.array([0.0, 1e-4, 0.0]), np.array([0.0, 1e-9, 0.0])
    cluster = machines(2, recv_overhead=overhead, reduce_time=reduce_time)
    return cluster, Schedule(2, 4, ((alone, to_1), (to_0, alone, alone)), chunk_weight=weight), [0.0, 0.0]


def ended_at_one_instant():
    """Three messages of two lanes end at one instant, after others have waited long for their reduction. The kernel
    needs more slots for these if the rounds are repeated, and then stores the three in another order."""
    lanes = (
        ([0], [2], 3, 0), ([0, 0], [1, 1], 1, 0), ([0], [1], 1, 0),
    ), (
        ([1, 1], [1, 1], 5, 1), ([0, 0], [1, 1], 1, 0), ([0] * 3, [1] * 3, 1, 0),
    )  # fmt: skip
    rounds = tuple(
        tuple(
            messages([0] * len(start), [1] * len(start), start, count, reduce=True, repeat=repeat, shift=shift)
            for start, count, repeat, shift in lane
        )
        for lane in lanes
    )
    overhead, reduce_time = np.array([0.0, 1e-4, 0.0]), np.array([0.0, 2e-8, 0.0])
    cluster = machines(2, recv_overhead=overhead, reduce_time=reduce_time)
    return cluster, Schedule(2, 2, rounds, chunk_weight=np.array([0.1, 3.0])), [0.0, 0.0]


@pytest.mark.parametrize("share", seeds(1, 5))  # of 300 examples
@settings(max_examples=60, deadline=None)
@example(served_at_one_instant())
@example(ended_at_one_instant())
@given(cases())
def test_repeated_rounds_are_the_rounds_written_out(share, case):
    cluster, schedule, joins = case
    repeated = ends(cluster, schedule, 1e6, joins)
    np.testing.assert_allclose(repeated, ends(cluster, written_out(schedule), 1e6, joins), rtol=1e-12)


# ---------------------------------------------------------------- transports and queues


def transports():
    """Properties of links: a transport, most of them with slow start, or none, with fair shares or in queues."""
    tcp = {
        "transport": st.sampled_from(["tcp-cubic", "tcp-reno", "tcp-bbr"]),
        "window": st.sampled_from([0.0, 3e4, 1e5]),  # bytes; 0: the default
        "connections": st.sampled_from([1, 2]),
        "loss": st.sampled_from([0.0, 1e-4, 1e-3]),
        "warm": st.sampled_from([False, False, True]),
        "unordered": st.sampled_from([False, False, True]),
    }
    shaped = {
        "burst": st.sampled_from([0.0, 5e3, 1e5]),
        "frame_header": st.just("90 B"),
        "frame_payload": st.just("1448 B"),
    }
    losing = tcp | {"buffer": st.sampled_from([8e3, 32e3])}  # windows are lost, and sent again after a time-out
    queues = {"sharing": st.just("fifo")}
    others = {"transport": st.sampled_from(["roce", "infiniband"]), "unordered": st.booleans()}
    wanted = tcp, tcp | queues, tcp | queues | shaped, tcp | shaped, losing, others | queues, queues, queues | shaped
    return st.one_of(*(st.fixed_dictionaries(each) for each in wanted))


def overtaken_while_the_window_opens():
    """Rank 1 sends to rank 0 in six rounds, then to rank 2: the first message of a connection waits for its window."""
    rounds = (sent([1, 0], [0, 1], [0, 0], [1, 1], repeat=6), sent([1, 2], [2, 1], [0, 0], [1, 1], repeat=3))
    return machines(3), Schedule(3, 1, (rounds,)), [0.0] * 3


@pytest.mark.parametrize("share", seeds(1, 50))  # of 3,000 examples
@settings(max_examples=60, deadline=None)
@example(overtaken_while_the_window_opens(), {"transport": "tcp-cubic", "sharing": "fifo"}, 5e-6)
@given(cases(), transports(), st.sampled_from([5e-6, 5e-5, 1e-3]))
def test_repeated_rounds_are_the_rounds_written_out_with_any_transport(share, case, details, latency):
    cluster, schedule, joins = case
    cluster = dataclasses.replace(cluster, link_latency=np.full(cluster.n_links, latency))
    cluster = with_detail(cluster, **details)
    repeated = ends(cluster, schedule, 1e6, joins)
    np.testing.assert_allclose(repeated, ends(cluster, written_out(schedule), 1e6, joins), rtol=1e-12)
    simulated = Network(cluster)
    simulated.engine.net.counts.replay = 0
    np.testing.assert_allclose(repeated, ends(cluster, schedule, 1e6, joins, network=simulated), rtol=1e-12)


@pytest.mark.parametrize("columns", [{}, {"recv_overhead": np.full(9, 2e-6)}, {"send_overhead": np.full(9, 2e-6)}])
def test_the_clock_can_stop_between_two_repetitions(columns):
    """At any time, the links have carried as much as with the rounds written out, and so they have in the end."""
    cluster, schedule = machines(8, **columns), build("ring", 8, 8e6)
    networks = [Network(cluster), Network(cluster)]
    for network, each in zip(networks, (schedule, written_out(schedule)), strict=True):
        collective = network.collective(each, cluster.workers, 8e6)
        network.join([collective] * 8, list(range(8)), 0.0)
    for time in np.linspace(0.3e-3, 13.9e-3, 11).tolist():
        assert [network.advance(time) for network in networks] == [None, None]
        (nbytes, busy), others = ([network.accounts().nbytes, network.channel_busy] for network in networks)
        assert nbytes.sum() == pytest.approx(8 * 2 * 1e9 * busy.max())  # both links of each host are as busy
        assert (nbytes.tolist(), busy.tolist()) == tuple(each.tolist() for each in others)
    ended = [network.advance() for network in networks]
    assert ended[0].time == ended[1].time
    assert ended[0].time >= 14e-3
