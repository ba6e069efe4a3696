"""The schedules that NCCL runs (:mod:`ddlsim.collectives.nccl_way` says what they are made of)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ddlsim.collectives.nccl_machines import through_machines
from ddlsim.collectives.nccl_ring import side_by_side
from ddlsim.collectives.nccl_tuner import SIMPLE_ONLY
from ddlsim.collectives.nccl_way import Way
from ddlsim.collectives.pipeline import pipeline
from ddlsim.collectives.schedule import Floats, Ints, Round, Schedule, messages
from ddlsim.collectives.trees import double_tree


def by_nccl(ring: Callable[[int], Schedule], n_ranks: int, way: Way | None) -> Schedule:
    """Return the schedule of the `way` that NCCL has chosen; without one, ``ring(n_ranks)``."""
    if way is None or n_ranks == 1:
        return ring(n_ranks)
    if way.choice.algorithm == "tree":
        return _trees(n_ranks, way)
    if way.choice.algorithm in SIMPLE_ONLY:
        return _in_switches(n_ranks, way) if way.site.n_nodes == 1 else through_machines(n_ranks, way)
    return _timed(side_by_side(ring, n_ranks, way.rings), way)


def _timed(schedule: Schedule, way: Way) -> Schedule:
    """Return the schedule of rings whose messages take what the protocol adds.

    Here a rank goes on when its last message has arrived; NCCL's connections hold several steps, so that slow hops do
    not hold up the others and the time that a chunk needs for a lap counts. So each hop takes its ring's average.
    """
    (lane,) = schedule.lanes
    rounds = []
    for i, r in enumerate(lane):
        r = dataclasses.replace(r, handled=way.handled_between(r.src, r.dst))
        if i == 0:
            rounds.append(dataclasses.replace(r, repeat=1, latency=_average(way, r, first=True) + way.start))
            r = dataclasses.replace(r, repeat=r.repeat - 1, start=(r.start + r.shift) % schedule.n_chunks)
        if r.repeat:
            rounds.append(dataclasses.replace(r, latency=_average(way, r)))
    return dataclasses.replace(schedule, lanes=(tuple(rounds),), wire=way.wire, handled=way.handled)


def _average(way: Way, r: Round, first: bool = False) -> Floats:
    """Return the average latency of the hops of each message's ring, (m,)."""
    each = way.latency(r.src, r.dst, first).reshape(len(way.rings), -1)
    return np.repeat(each.mean(axis=1), each.shape[1])


def _in_switches(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce in the switches of a machine: all parts to the rank that each is of, and from it to all."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    other = (rank + 1 + step) % n_ranks
    latency = np.full(len(rank), way.first_inside)
    down = dataclasses.replace(messages(rank, other, other, reduce=True), latency=latency)
    up = dataclasses.replace(messages(rank, other, rank, reduce=False), latency=np.zeros(len(rank)))
    wire, handled = way.inside
    return Schedule(n_ranks, n_ranks, ((down, up),), wire=way.wire * wire, handled=way.handled * handled)


def _trees(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce over the trees of all channels, in step; one after the other they reduce and broadcast."""
    n_chunks = way.choice.n_chunks
    trees = [tree for chains in way.chains for tree in _parents(n_ranks, chains)]
    edges = []
    for number, (parent, depth) in enumerate(trees):
        child = np.flatnonzero(depth)
        edges.append((child, parent[child], depth[child], np.full(len(child), number * n_chunks)))
    child, above, depth, first = (np.concatenate(column) for column in zip(*edges, strict=True))
    late, more = way.latency(child, above) + way.start * (depth == depth.max()), way.handled_between(child, above)
    up = pipeline(child, above, depth.max() - depth, n_chunks, reduce=True, first=first, latency=late, handled=more)
    late = way.latency(above, child)
    down = pipeline(above, child, depth - 1, n_chunks, reduce=False, first=first, latency=late, handled=more)
    return Schedule(n_ranks, len(trees) * n_chunks, ((*up, *down),), wire=way.wire, handled=way.handled)


def _parents(n_ranks: int, chains: tuple[Ints, ...]) -> list[tuple[Ints, Ints]]:
    """Return a channel's trees as `(parent, depth)`, both (n_ranks,): two over machines, one inside a single one."""
    found = []
    for over, level in double_tree(len(chains))[: min(len(chains), 2)]:
        parent, depth = np.arange(n_ranks), np.zeros(n_ranks, dtype=np.int64)
        for machine, chain in enumerate(chains):
            parent[chain] = np.append(chains[over[machine]][0], chain[:-1])
            depth[chain] = level[machine] + np.arange(len(chain))
        found.append((parent, depth))
    return found
