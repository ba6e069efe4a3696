"""All-reduces that sum up inside machines, between them, and spread the sum inside: NVLS trees and CollNet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddlsim.collectives.nccl_way import Way
from ddlsim.collectives.pipeline import pipeline
from ddlsim.collectives.schedule import Floats, Ints, Schedule
from ddlsim.collectives.trees import double_tree


class _Edges(NamedTuple):
    """Messages on the way to the sum, (m,) each; the way back is the same backwards.

    start, width  chunks of each segment
    wire, handled see :class:`ddlsim.collectives.Round`
    up, down      s until the first one flows, on either way
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


def through_machines(n_ranks: int, way: Way) -> Schedule:
    """Return the all-reduce: the parts of the buffer are each summed up at one head in every machine, then by all heads
    of a part; segments of the parts follow each other."""
    n_machines = len(way.machines)
    width = 2 if way.choice.algorithm == "nvls_tree" else n_machines  # chunks of a segment: trees, or heads in switches
    inside, heads = _chains(way, width) if way.choice.algorithm == "collnet_chain" else _straight(way, width)
    n_inside = int(inside.stage.max(initial=-1)) + 1
    between = (_trees if way.choice.algorithm == "nvls_tree" else _switches)(way, heads, n_inside)
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
    """Return the messages to the rank whose part it is, and who that is, (parts, machines)."""
    machines = np.stack(way.machines)
    n = machines.shape[1]
    machine, src, step = (a.ravel() for a in np.indices((len(machines), n, n - 1)))
    dst = (src + 1 + step) % n
    late = np.full(len(src), way.first_inside)
    one_way = way.choice.algorithm.startswith("nvls")  # whose latency is that of both ways
    return _Edges(
        machines[machine, src], machines[machine, dst], np.zeros_like(src), dst * width, np.full(len(src), width),
        np.full(len(src), way.inside[0]), np.full(len(src), way.inside[1]), late,
        np.zeros_like(late) if one_way else late,
    ), machines.T  # fmt: skip


def _chains(way: Way, width: int) -> tuple[_Edges, Ints]:
    """Return the messages along each channel's chains, and the ranks in which they end, (channels, machines)."""
    chains = np.array(way.chains)  # (channels, machines, ranks)
    n = chains.shape[2]
    part, machine, place = (a.ravel() for a in np.indices((*chains.shape[:2], n - 1)))
    late = np.full(len(part), way.first_inside)
    return _Edges(
        chains[part, machine, place + 1], chains[part, machine, place], n - 2 - place, part * width,
        np.full(len(part), width), np.full(len(part), way.inside[0]), np.full(len(part), way.inside[1]), late, late,
    ), chains[:, :, 0]  # fmt: skip


def _trees(way: Way, heads: Ints, stage: int) -> _Edges:
    """Return the messages up two trees between the machines, half of each part on either."""
    columns = []
    for number, (parent, depth) in enumerate(double_tree(heads.shape[1])):
        child = np.flatnonzero(depth)
        part, which = (a.ravel() for a in np.indices((len(heads), len(child))))
        src, dst = heads[part, child[which]], heads[part, parent[child[which]]]
        level = depth.max() - depth[child[which]] + stage
        columns.append((src, dst, level, 2 * part + number, way.latency(src, dst), way.latency(dst, src)))
    src, dst, level, start, up, down = (np.concatenate(column) for column in zip(*columns, strict=True))
    return _Edges(src, dst, level, start, np.ones_like(src), np.ones(len(src)), np.ones(len(src)), up, down)


def _switches(way: Way, heads: Ints, stage: int) -> _Edges:
    """Return the messages between all heads of a part, as many bytes as links carry to switches that add up."""
    n_parts, n_machines = heads.shape
    part, machine, step = (a.ravel() for a in np.indices((n_parts, n_machines, n_machines - 1)))
    other = (machine + 1 + step) % n_machines
    src, dst = heads[part, machine], heads[part, other]
    wire = n_machines / (2.0 * (n_machines - 1))
    return _Edges(
        src, dst, np.full(len(src), stage), part * n_machines + other, np.ones_like(src), np.full(len(src), wire),
        np.ones(len(src)), way.latency(src, dst), np.zeros(len(src)),
    )  # fmt: skip
