"""Collectives on an idle, uniform star take exactly the time of their closed forms; any schedule that of a
slow executor that shares no code with the engine."""

import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from draws import few, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, star
from ddlsim.collectives import KINDS, Schedule, algorithm_names, build, cost, messages
from ddlsim.network import Network

sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))
from collectives_reference import execute

RANKS = (2, 3, 4, 5, 7, 8, 12, 16)
#: (bytes, s per message, s per byte): latency-bound, mixed, bandwidth-bound, no latency
POINTS = [(1e3, 1e-5, 1e-9), (3e5, 1e-5, 1e-9), (1.7e8, 3e-6, 8e-10), (1e6, 0.0, 1e-9)]
POWER_OF_TWO = {
    "binomial_tree",
    "halving_doubling",
    "recursive_doubling",
    "broadcast_scatter_all_gather",
    "reduce_binomial",
    "reduce_scatter_recursive_halving",
    "all_gather_recursive_doubling",
}
#: no closed form for any number of ranks; compared with the executor below
OTHERS = {"nccl", "nccl_ring", "open_mpi", "double_binary_tree", "hierarchical", "torus", "torus_2d"}


def formula_name(kind, name):
    return name if kind == "all_reduce" else f"{kind}_{name}"


def cluster(n_ranks, alpha, beta, gamma=0.0):
    """A star on which a message takes alpha + bytes * beta, and gamma per byte if it is reduced."""
    one = Cluster.from_graph(star(n_ranks, bandwidth=1 / beta, latency=alpha / 2))
    return dataclasses.replace(one, reduce_time=np.full(one.n_nodes, gamma))


def run(fabric, schedule, nbytes, entry=None, **options):
    """Return when each rank ends; `entry[r]` is when rank r enters."""
    network = Network(fabric, **options)
    collective = network.collective(schedule, fabric.workers[: schedule.n_ranks], nbytes)
    end = np.full(schedule.n_ranks, np.nan)

    def until(time):
        while (done := network.advance(time)) is not None:
            assert (done.ids == collective).all()
            end[done.ranks] = done.time

    entry = entry or [0.0] * schedule.n_ranks
    for time in sorted(set(entry)):
        until(time)
        ranks = [r for r in range(schedule.n_ranks) if entry[r] == time]
        network.join([collective] * len(ranks), ranks, time)
    until(np.inf)
    assert not np.isnan(end).any()
    assert not network.pending
    assert network.n_messages == schedule.n_messages
    headers = sum(r.header * r.repeat * len(r.src) for lane in schedule.lanes for r in lane)
    sent = schedule.bytes_sent(nbytes).sum() + headers
    np.testing.assert_allclose(network.channel_nbytes.sum(), 2 * sent, rtol=1e-9)
    return end


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, n) for k in KINDS for n in algorithm_names(k) if n not in OTHERS and not n.startswith("gloo_")],
)
def test_the_time_is_the_closed_form(kind, name):
    formula = getattr(cost, formula_name(kind, name))
    gammas = (0.0, 0.3) if "gamma" in inspect.signature(formula).parameters else (0.0,)
    for n_ranks, (nbytes, alpha, beta), part in itertools.product(RANKS, POINTS, gammas):
        if formula_name(kind, name) in POWER_OF_TWO and n_ranks & (n_ranks - 1):
            continue
        gamma = part * beta
        schedule = build(name, n_ranks, kind=kind, nbytes=1)
        end = run(cluster(n_ranks, alpha, beta, gamma), schedule, nbytes)
        expected = formula(n_ranks, nbytes, alpha, beta, *((gamma,) if gamma else ()))
        assert end.max() == pytest.approx(expected, rel=1e-9), (n_ranks, nbytes, alpha, beta, gamma)


@pytest.mark.parametrize("overhead", [2e-6, 3e-5])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("all_reduce", "ring"), ("all_gather", "bruck"), ("broadcast", "binomial"), ("all_to_all", "pairwise")],
)
def test_overheads_add_to_the_latency_of_every_step(kind, name, overhead):
    """A rank sends one message per step and waits for one, so o at each end is latency (LogGP: L + 2 o)."""
    for n_ranks, (nbytes, alpha, beta) in itertools.product((2, 4, 8, 13), POINTS):
        if name == "binomial" and n_ranks == 13:
            continue
        fabric = cluster(n_ranks, alpha, beta)
        all_nodes = np.full(fabric.n_nodes, overhead)
        fabric = dataclasses.replace(fabric, send_overhead=all_nodes, recv_overhead=all_nodes)
        end = run(fabric, build(name, n_ranks, kind=kind, nbytes=1), nbytes)
        formula = getattr(cost, formula_name(kind, name))
        assert end.max() == pytest.approx(formula(n_ranks, nbytes, alpha + 2 * overhead, beta), rel=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        "double_binary_tree",
        "halving_doubling",
        "recursive_doubling",
        "torus_2d",
        "pipelined_ring",
        "parameter_server(3)",
        "hierarchical",
        "hierarchical(binomial_tree, ring)",
        "halving_doubling(far)",
        "binomial_tree(1)",
        "gloo_ring",
    ],
)
@pytest.mark.parametrize("n_ranks", few([3, 6, 15, 16], 2, start=1))
def test_contended_schedules_agree_with_the_plain_executor(algorithm, n_ranks):
    hosts = [r // 3 for r in range(n_ranks)] if n_ranks % 3 == 0 else [r // 4 for r in range(n_ranks)]
    schedule = build(algorithm, n_ranks, nbytes=3e6, hosts=hosts)
    late = np.random.default_rng(n_ranks).choice([0.0, 1e-3, 2.5e-3], n_ranks).tolist()
    for entry in (None, late):
        expected = execute(schedule, 3e6, 1e-5, 1e-9, 2e-10, entry)
        end = run(cluster(n_ranks, 1e-5, 1e-9, 2e-10), schedule, 3e6, entry)
        np.testing.assert_allclose(end, expected, rtol=1e-9)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in algorithm_names(k) if n.startswith("gloo_")])
def test_gloo_agrees_with_the_plain_executor(kind, name):
    for n_ranks in (2, 3, 4, 7):
        schedule = build(name, n_ranks, nbytes=3e6, kind=kind)
        end = run(cluster(n_ranks, 1e-5, 1e-9, 2e-10), schedule, 3e6)
        np.testing.assert_allclose(end, execute(schedule, 3e6, 1e-5, 1e-9, 2e-10), rtol=1e-9)


@st.composite
def schedules(draw):
    """Any rounds of any messages, repeated, shifted, weighted, in one or two lanes."""
    n_ranks, n_chunks = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    rank = st.integers(0, n_ranks - 1)
    lanes = []
    for _ in range(draw(st.integers(1, 2))):
        lane = []
        for _ in range(draw(st.integers(1, 3))):
            pairs = draw(st.lists(st.tuples(rank, rank).filter(lambda p: p[0] != p[1]), min_size=1, max_size=6))
            start = draw(st.integers(0, n_chunks - 1))
            more = {"repeat": draw(st.integers(1, 5)), "shift": draw(st.integers(0, n_chunks - 1))}
            src, dst = zip(*pairs, strict=True)
            lane.append(messages(src, dst, start, draw(st.integers(1, n_chunks)), reduce=draw(st.booleans()), **more))
        lanes.append(tuple(lane))
    weight = draw(st.none() | st.lists(st.sampled_from([1.0, 1.0, 3.0]), min_size=n_chunks, max_size=n_chunks))
    entry = draw(st.lists(st.sampled_from([0.0, 0.0, 0.7, 11.0]), min_size=n_ranks, max_size=n_ranks))
    return Schedule(n_ranks, n_chunks, tuple(lanes), None if weight is None else np.array(weight)), entry


@pytest.mark.parametrize("share", seeds(1, 3))  # of 150 examples
@given(schedules(), st.sampled_from([(1.0, 0.1, 0.0), (0.37, 1.0, 0.2), (0.0, 1.0, 0.0)]))
@settings(max_examples=50, deadline=None)
def test_random_schedules_agree_with_the_plain_executor(share, case, model):
    schedule, entry = case
    end = run(cluster(schedule.n_ranks, *model[:2], model[2]), schedule, 5.0, entry)
    np.testing.assert_allclose(end, execute(schedule, 5.0, *model, entry), rtol=1e-9)
