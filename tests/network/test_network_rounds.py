"""Replayed rounds whose messages start and end at several instants give the bits of their events."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, MultiGpu, fat_tree, leaf_spine, star
from ddlsim.collectives import Schedule, build, messages
from ddlsim.network import Network
from ddlsim.network.state import N_EVENTS, REPLAY

N = 12
CLUSTERS = ("switch", "slow reduction", "pods", "two adapters", "tree")


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
    return made if name != "slow reduction" else dataclasses.replace(made, reduce_time=np.full(N + 1, 1e-10))


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
    network._net.counts[REPLAY] = replay
    for schedule in schedules:
        collective = network.collective(schedule, fabric.workers[:N], nbytes)
        network.join([collective] * N, np.arange(N), 0.0)
    seen = []
    for horizon in [*sorted(horizons), np.inf]:
        while (done := network.advance(horizon)) is not None:
            seen.append((done.time, done.ids.tolist(), done.ranks.tolist()))
        if horizon < np.inf and horizon > network._net.reals[0] and len(seen) % 2 == 0:
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


@given(
    st.sampled_from(CLUSTERS),
    rings(),
    st.sampled_from([1e5, 3.7e7, 1e8 / 3]),
    st.lists(st.floats(0.0, 0.2), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_rounds_of_several_instants_keep_every_bit(name, schedule, nbytes, horizons):
    same(cluster(name), [schedule], nbytes, horizons)


ORDER = list(range(N))
CASES = {
    "two latencies": ("switch", rings_of([ORDER], [1], [2e-5, 3e-5] * 6, [40])),
    "what others leave": ("two adapters", build("nccl", N, 1e8, kind="all_gather", where=at("two adapters"))),
    "reduction": ("slow reduction", rings_of([ORDER], [1], [2e-5], [40, 40])),
    "channels": ("pods", build("nccl", N, 1e8, where=at("pods"))),
}


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_replayed(case):
    name, schedule = CASES[case]
    replayed = same(cluster(name), [schedule], 3.7e7)
    assert replayed > 0.5 * schedule.n_messages, case


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
    assert network._net.counts[N_EVENTS] < again._net.counts[N_EVENTS] / 2
