"""NCCL's schedules for the choices of :mod:`ddlsim.collectives.nccl_choice`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.collectives.nccl_choice import SLICES, Way
from ddlsim.collectives.nccl_tuner import SIMPLE_ONLY
from ddlsim.collectives.schedule import Floats, Ints, Round, Schedule, messages
from ddlsim.collectives.trees import double_tree, pipeline
from ddlsim.errors import ConfigError


def side_by_side(ring: Callable[[int], Schedule], n_ranks: int, rings: Sequence[Ints] | None) -> Schedule:
    """Run ``ring(n_ranks)`` concurrently in each of the rank orders `rings`, in lockstep.

    Ring k carries part k of each block, so a rank owns the same block in all rings. Raises ConfigError unless every
    order is a permutation of the ranks.
    """
    alone = ring(n_ranks)
    if rings is None or n_ranks == 1:
        return alone
    if not len(rings):
        raise ConfigError("rings = (): must contain at least one permutation of the ranks")
    for order in rings:
        if not np.array_equal(np.sort(np.asarray(order)), np.arange(n_ranks)):
            ranks = np.asarray(order).tolist()
            raise ConfigError(f"rings: {ranks} must contain each rank from 0 to {n_ranks - 1} once")
    n_rings, orders = len(rings), np.stack(rings)
    which = np.arange(n_rings)[:, None]
    (lap,) = alone.lanes  # all rings have the same rounds, which run together; each message carries one chunk
    rounds = [
        dataclasses.replace(
            r,
            src=orders[:, r.src].ravel(),
            dst=orders[:, r.dst].ravel(),
            start=(r.start * n_rings + which).ravel(),
            count=np.tile(r.count, n_rings),
            shift=r.shift * n_rings,
        )
        for r in lap
    ]
    return dataclasses.replace(
        alone,
        n_chunks=n_ranks * n_rings,
        lanes=(tuple(rounds),),
        block_of=None if alone.kind == "all_reduce" else orders.T.ravel(),
    )


class _Edges(NamedTuple):
    """Messages of the reduction, (m,) each; the broadcast sends them backwards.

    start, width  chunks of each segment
    wire, handled see :class:`ddlsim.collectives.Round`
    up, down      latency of the first message in the reduction and the broadcast, in s
    """

    src: Ints
    dst: Ints
    stage: Ints
    start: Ints
    width: Ints
    wire: Floats
    handled: Floats
    up: Floats
    down: Floats


def _edges(src: Ints, *columns: Ints | Floats | float) -> _Edges:
    """Return messages from `src`; a column can be one number for all of them."""
    return _Edges(src, *(np.broadcast_to(column, src.shape) for column in columns))


def through_machines(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce over machines: one head per machine reduces each part of the buffer, then the heads of a
    part all-reduce it. Segments of the parts are pipelined."""
    n_machines = len(way.machines)
    width = 2 if way.choice.algorithm == "nvls_tree" else n_machines  # chunks per segment: one per tree or per head
    inside, heads = _chains(way, width) if way.choice.algorithm == "collnet_chain" else _straight(way, width)
    n_inside = int(inside.stage.max(initial=-1)) + 1
    between = (_trees_between if way.choice.algorithm == "nvls_tree" else _switches)(way, heads, n_inside)
    edges = _Edges(*(np.concatenate(column) for column in zip(inside, between, strict=True)))
    n_segments, part = way.choice.n_chunks, edges.start // width
    first = part * n_segments * width + edges.start % width
    up = pipeline(edges.src, edges.dst, edges.stage, n_segments, reduce=True, first=first, latency=edges.up,
                  count=edges.width, width=width, wire=edges.wire, handled=edges.handled)  # fmt: skip
    down = pipeline(edges.dst, edges.src, edges.stage.max() - edges.stage, n_segments, reduce=False, first=first,
                    latency=edges.down, count=edges.width, width=width, wire=edges.wire,
                    handled=edges.handled)  # fmt: skip
    chunks = len(heads) * n_segments * width
    return Schedule(n_ranks, chunks, ((*up, *down),), wire=way.wire, handled=way.handled)


def _straight(way: Way, width: int) -> tuple[_Edges, Ints]:
    """Return direct messages to the rank that owns the part, and these ranks, (parts, machines)."""
    machines = np.stack(way.machines)
    n = machines.shape[1]
    machine, src, step = (a.ravel() for a in np.indices((len(machines), n, n - 1)))
    dst = (src + 1 + step) % n
    ends, late = (machines[machine, src], machines[machine, dst]), way.first_inside
    down = 0.0 if way.choice.algorithm.startswith("nvls") else late  # for NVLS, the latency covers both directions
    return _edges(*ends, 0, dst * width, width, *way.inside, late, down), machines.T


def _chains(way: Way, width: int) -> tuple[_Edges, Ints]:
    """Return the messages along each channel's chains, and the ranks at which they end, (channels, machines)."""
    chains = np.array(way.chains)  # (channels, machines, ranks)
    n = chains.shape[2]
    part, machine, place = (a.ravel() for a in np.indices((*chains.shape[:2], n - 1)))
    ends, late = (chains[part, machine, place + 1], chains[part, machine, place]), way.first_inside
    return _edges(*ends, n - 2 - place, part * width, width, *way.inside, late, late), chains[:, :, 0]


def _trees_between(way: Way, heads: Ints, stage: int) -> _Edges:
    """Return the messages up two trees between the machines; each tree carries half of each part."""
    columns = []
    for number, (parent, depth) in enumerate(double_tree(heads.shape[1])):
        child = np.flatnonzero(depth)
        part, which = (a.ravel() for a in np.indices((len(heads), len(child))))
        src, dst = heads[part, child[which]], heads[part, parent[child[which]]]
        level = depth.max() - depth[child[which]] + stage
        columns.append((src, dst, level, 2 * part + number, way.latency(src, dst), way.latency(dst, src)))
    src, dst, level, start, up, down = (np.concatenate(column) for column in zip(*columns, strict=True))
    return _edges(src, dst, level, start, 1, 1.0, 1.0, up, down)


def _switches(way: Way, heads: Ints, stage: int) -> _Edges:
    """Return the messages between all heads of a part; they carry as many bytes as links to switches that reduce."""
    n_parts, n_machines = heads.shape
    part, machine, step = (a.ravel() for a in np.indices((n_parts, n_machines, n_machines - 1)))
    other = (machine + 1 + step) % n_machines
    src, dst = heads[part, machine], heads[part, other]
    wire, start = n_machines / (2.0 * (n_machines - 1)), part * n_machines + other
    return _edges(src, dst, stage, start, 1, wire, 1.0, way.latency(src, dst), 0.0)


def by_nccl(ring: Callable[[int], Schedule], n_ranks: int, way: Way | None) -> Schedule:
    """Return NCCL's schedule for `way`; if None, ``ring(n_ranks)``."""
    if way is None or n_ranks == 1:
        return ring(n_ranks)
    if way.choice.algorithm == "tree":
        return _trees(n_ranks, way)
    if way.choice.algorithm in SIMPLE_ONLY:
        return _in_switches(n_ranks, way) if way.site.n_nodes == 1 else through_machines(n_ranks, way)
    return _timed(side_by_side(ring, n_ranks, way.rings), way)


def _timed(schedule: Schedule, way: Way) -> Schedule:
    """Add the protocol's latencies and costs to a schedule of rings.

    In a schedule, a rank proceeds when its last message has arrived. NCCL's connections buffer several steps, so that
    only the time of a whole lap matters. Each hop therefore has its ring's average latency.

    The last step of a ring sends nothing. Its time, that of sending a slice, is divided among all messages.
    """
    (lane,) = schedule.lanes
    n_slices = SLICES * sum(r.repeat for r in lane)
    handled = way.handled * (1.0 + 1.0 / n_slices if way.idle_last else 1.0)
    rounds = []
    for i, r in enumerate(lane):
        r = dataclasses.replace(r, handled=way.handled_between(r.src, r.dst))
        if i == 0:
            rounds.append(dataclasses.replace(r, repeat=1, latency=_average(way, r, first=True) + way.start))
            r = dataclasses.replace(r, repeat=r.repeat - 1, start=(r.start + r.shift) % schedule.n_chunks)
        if r.repeat:
            rounds.append(dataclasses.replace(r, latency=_average(way, r)))
    return dataclasses.replace(schedule, lanes=(tuple(rounds),), wire=way.wire, handled=handled)


def _average(way: Way, r: Round, first: bool = False) -> Floats:
    """Return the average latency of the hops in each message's ring, (m,)."""
    latencies = way.latency(r.src, r.dst, first).reshape(len(way.rings), -1)
    return np.repeat(latencies.mean(axis=1), latencies.shape[1])


def _in_switches(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce in a machine's switches: each part is sent to its owner, and from there to all."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    other = (rank + 1 + step) % n_ranks
    latency = np.full(len(rank), way.first_inside)
    down = dataclasses.replace(messages(rank, other, other, reduce=True), latency=latency)
    up = dataclasses.replace(messages(rank, other, rank, reduce=False), latency=np.zeros(len(rank)))
    wire, handled = way.inside
    return Schedule(n_ranks, n_ranks, ((down, up),), wire=way.wire * wire, handled=way.handled * handled)


def _trees(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce over the trees of all channels: all trees reduce in lockstep, then broadcast."""
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
    """Return a channel's trees as `(parent, depth)`, both (n_ranks,): two if there are several machines, else one."""
    trees = []
    for over, level in double_tree(len(chains))[: min(len(chains), 2)]:
        parent, depth = np.arange(n_ranks), np.zeros(n_ranks, dtype=np.int64)
        for machine, chain in enumerate(chains):
            parent[chain] = np.append(chains[over[machine]][0], chain[:-1])
            depth[chain] = level[machine] + np.arange(len(chain))
        trees.append((parent, depth))
    return trees
