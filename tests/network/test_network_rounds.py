"""Replayed rounds whose messages start and end at several instants give the bits of their events."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, MultiGpu, fat_tree, leaf_spine, star, with_detail
from ddlsim.collectives import Schedule, build, messages
from ddlsim.network import Network

N = 12
DETAILS = {
    "frames": {"frame_header": 78, "frame_payload": 1448, "reverse_load": 0.02},
    "bursts": {"burst": "3 MiB", "frame_header": 78, "frame_payload": 1448},
    "tcp": {"transport": "tcp-cubic", "frame_header": 78, "frame_payload": 1448},
    "small windows": {"transport": "tcp-reno", "window": "64 KiB", "connections": 2},
    "unordered": {"transport": "tcp-cubic", "unordered": True, "flow_rate": "5 Gbit/s"},
    "rendezvous": {"transport": "infiniband", "rendezvous": "64 KiB"},
    # with 50 kB under way, one window fits
    "shallow": {"transport": "tcp-bbr", "warm": True, "buffer": "1 KiB", "connections": 8},
}
CLUSTERS = ("switch", "slow reduction", "overheads", "pods", "two adapters", "tree", *DETAILS)


@cache
def cluster(name):
    if name in ("pods", "two adapters"):  # three machines of four GPUs; in pods, each has an adapter of its own
        n_nics = 4 if name == "pods" else 2
        switches = {"n_pcie_switches": n_nics, "n_nics": n_nics}
        host = MultiGpu(n_gpus=4, inside="nvswitch", nvlink_bandwidth="300 GB/s", reduce_bandwidth="1 TB/s", **switches)
        graph = leaf_spine(n_nics, 3, 2, bandwidth="200 Gbit/s", latency="0.6 us", rail_optimised=True, host=host)
    elif name == "tree":
        graph = fat_tree(4, bandwidth="10 Gbit/s", latency="10 us")
    else:
        graph = star(N, bandwidth="10 Gbit/s", latency="10 us")
    made = Cluster.from_graph(graph)
    if name in DETAILS:
        return with_detail(made, **DETAILS[name])
    changes = {
        "slow reduction": {"reduce_time": 1e-10},
        "overheads": {"reduce_time": 1e-10, "send_overhead": 1e-3, "recv_overhead": 5e-4},
    }
    values = {field: np.full(N + 1, value) for field, value in changes.get(name, {}).items()}
    return dataclasses.replace(made, **values)


def at(name):
    return cluster(name), tuple(cluster(name).workers[:N].tolist())


def rings_of(orders, counts, latencies, repeats):
    """Rings side by side, in one lane: each sends so many chunks a round, after its latency or latencies."""
    src = np.concatenate([np.asarray(order) for order in orders])
    dst = np.concatenate([np.roll(order, -1) for order in orders])
    rounds = [
        dataclasses.replace(
            messages(src, dst, 0, np.repeat(counts, N), reduce=number % 2 == 0, repeat=repeat),
            latency=np.ravel(
                np.broadcast_to(np.asarray(latencies, dtype=float).reshape(len(orders), -1), (len(orders), N))
            ),
        )
        for number, repeat in enumerate(repeats)
    ]
    return Schedule(N, max(counts), (tuple(rounds),))


def story(replay, fabric, schedules, nbytes, horizons, record=False):
    """Run collectives up to each horizon in turn; return the network and all that can be seen."""
    network = Network(fabric, record=record)
    network.engine.net.counts.replay = replay
    for schedule in schedules:
        collective = network.collective(schedule, fabric.workers[:N], nbytes)
        network.join([collective] * N, np.arange(N), 0.0)
    seen = []
    for horizon in [*sorted(horizons), np.inf]:
        while (done := network.advance(horizon)) is not None:
            seen.append((done.time, done.ids.tolist(), done.ranks.tolist()))
        if horizon < np.inf and horizon > network.engine.net.reals.now and len(seen) % 2 == 0:
            network.send([fabric.workers[0]], [fabric.workers[7]], np.array([2e5]), horizon)
    return network, seen


def same(fabric, schedules, nbytes, horizons=(), record=False):
    """Run with and without replay; return how many messages were replayed."""
    fast, seen = story(1, fabric, schedules, nbytes, horizons, record)
    slow, expected = story(0, fabric, schedules, nbytes, horizons, record)
    assert seen == expected
    assert slow.n_replayed == 0
    assert fast.n_messages == slow.n_messages
    np.testing.assert_allclose(fast.channel_nbytes, slow.channel_nbytes, rtol=1e-9)
    np.testing.assert_allclose(fast.channel_busy, slow.channel_busy, rtol=1e-9)
    for one, other in zip(fast.accounts()[2:], slow.accounts()[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-6)
    return fast.n_replayed


@st.composite
def rings(draw):
    n_rings = draw(st.integers(1, 4))
    orders = [draw(st.permutations(range(N))) for _ in range(n_rings)]
    counts = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=n_rings, max_size=n_rings))
    latencies = draw(st.lists(st.sampled_from([2e-5, 2e-5, 3.3e-5, 1e-6]), min_size=n_rings, max_size=n_rings))
    repeats = draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))
    return rings_of(orders, counts, latencies, repeats)


@pytest.mark.parametrize("share", seeds(1, 4))  # of 100 examples
@given(
    st.sampled_from(CLUSTERS),
    st.lists(rings(), min_size=1, max_size=2),
    st.sampled_from([1e5, 3.7e7, 1e8 / 3, 1e10]),
    st.lists(st.floats(0.0, 0.2), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_rounds_of_several_instants_keep_every_bit(share, name, schedules, nbytes, horizons):
    same(cluster(name), schedules, nbytes, horizons)


ORDER = list(range(N))
CASES = {
    "two latencies": ("switch", rings_of([ORDER], [1], [2e-5, 3e-5] * 6, [40])),
    "what others leave": ("two adapters", build("nccl", N, 1e8, kind="all_gather", where=at("two adapters"))),
    "frames": ("frames", rings_of([ORDER], [1], [2e-5], [40])),
    "transport": ("tcp", rings_of([ORDER], [1], [2e-5, 3e-5] * 6, [40])),
    "two connections": ("small windows", rings_of([ORDER], [1], [2e-5], [40])),
    "buffers": ("shallow", rings_of([ORDER], [1], [2e-5], [40])),
    "reduction": ("slow reduction", rings_of([ORDER], [1], [2e-5], [40, 40])),
    "processors": ("overheads", rings_of([ORDER], [1], [2e-5], [40, 40])),
    "channels": ("pods", build("nccl", N, 1e8, where=at("pods"))),
}


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_replayed(case):
    name, schedule = CASES[case]
    replayed = same(cluster(name), [schedule], 3.7e7)
    assert replayed > 0.5 * schedule.n_messages, case


def test_collectives_in_step_are_replayed_together():
    """Rings of different lengths in two groups of hosts, and one that all take part in; what each group has, ends with
    the shorter one."""
    ring = CASES["frames"][1]
    for name in ("switch", "frames"):
        assert same(cluster(name), [ring, rings_of([ORDER[::-1]], [1], [2e-5], [25])], 3.7e7) > 0.5 * ring.n_messages
    halves = [messages(ORDER[i::2], np.roll(ORDER[i::2], -1), 0, reduce=False, repeat=20 + 9 * i) for i in (0, 1)]
    assert same(cluster("switch"), [Schedule(N, 1, ((half,),)) for half in halves], 3.7e7) > 200


def test_processors_are_occupied_after_replayed_rounds():
    """Another message is sent while the processors send those of a round, for 1 ms."""
    ring = rings_of([ORDER], [1], [1.2e-5], [40])
    _, seen = story(0, cluster("overheads"), [ring], 3.7e7, [])
    a_round = seen[-1][0] / 40
    for elapsed in (-1e-4, 1e-4, 5e-4, 9e-4, 1.1e-3):
        assert same(cluster("overheads"), [ring], 3.7e7, [20 * a_round + elapsed]) > 0.4 * ring.n_messages


def test_messages_that_wait_for_a_processor_are_not_replayed():
    two_each = rings_of([ORDER, ORDER[::-1]], [1, 1], [2e-5, 2e-5], [40])
    assert same(cluster("overheads"), [two_each], 3.7e7) == 0


@pytest.mark.parametrize("name", ["bursts", "rendezvous"])
def test_what_remembers_more_than_its_round_is_not_replayed(name):
    assert same(cluster(name), [rings_of([ORDER], [1], [2e-5], [40])], 3.7e7) == 0


def test_rounds_with_timeouts_are_not_replayed():
    both_ways = rings_of([ORDER, ORDER[::-1]], [1, 1], [2e-5, 2e-5], [40])
    assert same(cluster("shallow"), [both_ways], 3.7e7) == 0
    _, seen = story(1, cluster("shallow"), [both_ways], 3.7e7, ())
    assert seen[-1][0] > 40 * 0.2


def test_a_window_that_shrinks_while_its_connection_idles_is_not_replayed():
    """First all messages are large and open the windows; then every second one is so small that its connection idles
    until the others have come, a little longer than TCP waits: its window is halved, which the last messages show."""
    after = np.roll(ORDER, -1)
    opening = messages(ORDER, after, 0, 18750, reduce=False)
    idling = messages(ORDER, after, 0, [1, 18750] * 6, reduce=False, repeat=30)
    last = messages(ORDER, after, 0, 2, reduce=False)
    same(cluster("tcp"), [Schedule(N, 18750, ((opening, idling, last),))], 3.75e8)


def test_rounds_of_several_instants_are_logged_as_their_events_are():
    logs = []
    for replay in (1, 0):
        network, _ = story(replay, cluster("pods"), [CASES["channels"][1]], 3.7e7, [], record=True)
        busy = network.busy_intervals()
        logs.append([busy.channel.tolist(), busy.start.tolist(), busy.end.tolist()])
    assert logs[0] == logs[1]


def test_a_replayed_round_is_no_event():
    network, _ = story(1, cluster("pods"), [CASES["channels"][1]], 3.7e7, [])
    again, _ = story(0, cluster("pods"), [CASES["channels"][1]], 3.7e7, [])
    assert network.engine.net.counts.n_events < again.engine.net.counts.n_events / 2
