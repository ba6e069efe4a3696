"""Combinators for schedules: on other ranks, one after the other, or in parallel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ddlsim.arguments import Positive, checked
from ddlsim.collectives.check import groups_of
from ddlsim.collectives.schedule import PER_MESSAGE, Floats, Ints, Kind, Ranks, Round, Schedule, Wholes
from ddlsim.errors import ConfigError
from ddlsim.ties import distinct


@checked
def on_ranks(schedule: Schedule, ranks: Wholes, n_ranks: Ranks) -> Schedule:
    """Map a schedule to a subset of the ranks of a larger communicator.

    ranks    new number of each rank: rank i of the schedule becomes rank ``ranks[i]``
    n_ranks  number of ranks in the larger communicator

    Raises ConfigError unless `ranks` contains one distinct rank for every rank of the schedule.
    """
    members = np.asarray(ranks, dtype=np.int64)
    if members.shape != (schedule.n_ranks,):
        raise ConfigError(
            f"on_ranks: got {members.size} ranks for a schedule with {schedule.n_ranks}; pass one for each"
        )
    if len(distinct(members)) != len(members) or members.min() < 0 or members.max() >= n_ranks:
        listed = members.tolist()
        raise ConfigError(f"on_ranks: ranks = {listed}: must be distinct ranks from 0 to {n_ranks - 1}")
    groups = (members,) if schedule.groups is None else tuple(members[g] for g in schedule.groups)
    relabelled = _each_round(schedule, lambda r: dataclasses.replace(r, src=members[r.src], dst=members[r.dst]))
    return dataclasses.replace(relabelled, n_ranks=n_ranks, groups=groups)


@checked
def reorder(schedule: Schedule, order: Wholes) -> Schedule:
    """Renumber the ranks of a schedule: rank i becomes rank ``order[i]``.

    For example, a ring can be rearranged so that it enters and leaves each rack only once. In a reduce-scatter,
    all-gather or all-to-all, block i then belongs to rank ``order[i]``.
    """
    return on_ranks(schedule, order, schedule.n_ranks)


def reverse(schedule: Schedule, kind: Kind) -> Schedule:
    """Return the schedule reversed in time, with every message as a copy.

    This turns a reduce into a broadcast, and a reduce-scatter into an all-gather.
    """

    def back(r: Round) -> Round:
        start = (r.start + (r.repeat - 1) * r.shift) % schedule.n_chunks
        return dataclasses.replace(r, src=r.dst, dst=r.src, start=start, shift=-r.shift, reduce=False)

    lanes = tuple(tuple(back(r) for r in lane[::-1]) for lane in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes, kind=kind)


@checked
def sequence(*schedules: Schedule, kind: Kind) -> Schedule:
    """Concatenate schedules of the same ranks into a collective of the given `kind`.

    If the schedules divide the buffer into different numbers of chunks, the chunks are subdivided so that the numbers
    match. There is no barrier between the schedules: each rank continues as soon as it has finished its part of the
    previous schedule. Raises ConfigError if a schedule has several lanes.
    """
    for schedule in schedules:
        if len(schedule.lanes) > 1:
            raise ConfigError(
                f"sequence: a schedule has {len(schedule.lanes)} lanes; only schedules with one lane can be "
                "concatenated"
            )
    parts = _same_chunks(schedules)
    rounds = tuple(r for part in parts for lane in part.lanes for r in lane)
    return dataclasses.replace(parts[0], lanes=(rounds,) if rounds else (), kind=kind)


@checked
def parallel(*schedules: Schedule) -> Schedule:
    """Combine schedules on disjoint sets of ranks into one schedule that runs them concurrently.

    Use :func:`on_ranks` to give each schedule its ranks. Corresponding rounds are merged where possible. Raises
    ConfigError if two schedules use the same rank, or differ in kind or root.
    """
    parts = _same_chunks(schedules)
    first = parts[0]
    if any((p.kind, p.root) != (first.kind, first.root) for p in parts):
        raise ConfigError("parallel: the schedules must have the same kind and root")
    groups = tuple(g for p in parts for g in groups_of(p))
    used, n_users = np.unique(np.concatenate([_users(p) for p in parts]), return_counts=True)
    if (n_users > 1).any():
        rank = used[n_users > 1][0]
        raise ConfigError(
            f"parallel: rank {rank} is in several schedules; use split() to divide the buffer among schedules"
        )
    n_lanes = max(len(p.lanes) for p in parts)
    lanes = tuple(tuple(_merged([p.lanes[i] for p in parts if i < len(p.lanes)])) for i in range(n_lanes))
    return dataclasses.replace(first, lanes=lanes, groups=groups)


@checked
def split(*schedules: Schedule, shares: Sequence[Positive] | None = None) -> Schedule:
    """Divide the buffer into parts, and run the schedules concurrently in separate lanes, one on each part.

    shares  relative sizes of the parts; None: equal sizes

    With n schedules, schedule i uses the chunks i, i + n, i + 2n, ..., so that chunk numbers still wrap around modulo
    n_chunks. In a reduce-scatter or all-gather, the chunks of each block are divided in this way.

    Raises ConfigError if the schedules differ in kind, root or number of ranks.
    """
    parts = _same_chunks(schedules, weights=False)
    first, n_parts = parts[0], len(parts)
    if any((p.kind, p.root, p.n_ranks) != (first.kind, first.root, first.n_ranks) for p in parts):
        raise ConfigError("split: the schedules must have the same kind, root and number of ranks")
    of_blocks = first.kind in ("reduce_scatter", "all_gather")
    if first.kind not in ("all_reduce", "broadcast", "reduce") and n_parts > 1 and not of_blocks:
        raise ConfigError(f"split: a {first.kind} cannot be split; use another kind, such as all_reduce")
    share = np.ones(n_parts) if shares is None else np.asarray(shares, dtype=np.float64)
    if share.shape != (n_parts,):
        raise ConfigError(f"split: shares = {shares}: must be {n_parts} positive numbers, one per schedule")
    lanes = tuple(
        tuple(strided(r, p.n_chunks, n_parts, np.full(len(r.src), i)) for r in lane)
        for i, p in enumerate(parts)
        for lane in p.lanes
    )
    weight = np.stack([_weight(p) * s for p, s in zip(parts, share, strict=True)], axis=1).ravel()
    equal = shares is None and all(p.chunk_weight is None for p in parts)
    blocks = [p.blocks(len(groups_of(p)[0])) for p in parts] if of_blocks else []
    block_of = np.stack(blocks, axis=1).ravel() if of_blocks else None
    n_chunks, weight_of = first.n_chunks * n_parts, None if equal else weight
    return dataclasses.replace(first, n_chunks=n_chunks, lanes=lanes, chunk_weight=weight_of, block_of=block_of)


def with_root(schedule: Schedule, root: int) -> Schedule:
    """Return `schedule`, made for root 0, rotated so that `root` is the root."""
    n_ranks = schedule.n_ranks
    if not 0 <= root < n_ranks:
        raise ConfigError(f"root = {root}: must be a rank from 0 to {n_ranks - 1}")
    if root == 0:
        return schedule
    rotated = on_ranks(schedule, (np.arange(n_ranks) + root) % n_ranks, n_ranks)
    return dataclasses.replace(rotated, groups=None, root=root)


def refine(schedule: Schedule, factor: int) -> Schedule:
    """Split every chunk into `factor` equal chunks."""
    if factor == 1:
        return schedule

    def finer(r: Round) -> Round:
        slots = None if r.slots is None else (r.slots[:, None] * factor + np.arange(factor)).ravel()
        return dataclasses.replace(
            r, start=r.start * factor, count=r.count * factor, shift=r.shift * factor, slots=slots
        )

    weight = None if schedule.chunk_weight is None else np.repeat(schedule.chunk_weight / factor, factor)
    blocks = None if schedule.block_of is None else np.repeat(schedule.block_of, factor)
    finest = dataclasses.replace(schedule, n_chunks=schedule.n_chunks * factor, chunk_weight=weight, block_of=blocks)
    return _each_round(finest, finer)


def strided(round: Round, n_chunks: int, stride: int, offset: Ints, width: int = 1) -> Round:
    """Return `round` with chunk c of message i renamed to the chunks `c * stride + offset[i] + (0..width-1)`.

    n_chunks  number of chunks in the original schedule
    offset    (m,)  each in 0..stride-width
    """
    even, which = uniform(round, n_chunks)
    carried = np.arange(even.count[0]) if even.slots is None else even.slots
    slots = (carried[:, None] * stride + np.arange(width)).ravel()
    kept = None if len(carried) == 1 and even.slots is None else slots
    start, count = even.start * stride + offset[which], even.count * width
    return dataclasses.replace(even, start=start, count=count, shift=even.shift * stride, slots=kept)


def uniform(round: Round, n_chunks: int) -> tuple[Round, Ints]:
    """Return `round` with messages of equal count, and the original message (m',) of each.

    Messages of unequal counts are split into messages of their greatest common divisor, which are sent concurrently.
    """
    count = round.count
    if round.slots is not None or (count == count[0]).all():
        return round, np.arange(len(count))
    unit = int(np.gcd.reduce(count))
    which = np.repeat(np.arange(len(count)), count // unit)
    begin = np.cumsum(count) - count
    start = (round.start[which] + np.arange(len(which)) * unit - begin[which]) % n_chunks
    equal = np.full(len(which), unit)
    columns: dict[str, Any] = {
        name: None if getattr(round, name) is None else getattr(round, name)[which]
        for name in ("src", "dst", *PER_MESSAGE)
    }
    return dataclasses.replace(round, start=start, count=equal, **columns), which


def _each_round(schedule: Schedule, change: Callable[[Round], Round]) -> Schedule:
    lanes = tuple(tuple(change(r) for r in lane) for lane in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes)


def _weight(schedule: Schedule) -> Floats:
    """Relative chunk sizes that add up to 1, shape (n_chunks,)."""
    weight = np.ones(schedule.n_chunks) if schedule.chunk_weight is None else schedule.chunk_weight
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def _users(schedule: Schedule) -> Ints:
    """Return the distinct ranks that send, receive or belong to a group."""
    ends = [e for lane in schedule.lanes for r in lane for e in (r.src, r.dst)]
    return distinct(np.concatenate([*ends, *groups_of(schedule)]))


def _same_chunks(schedules: Sequence[Schedule], weights: bool = True) -> list[Schedule]:
    """Subdivide the chunks of all schedules to a common number; raise ConfigError if the schedules are incompatible."""
    if not schedules:
        raise ConfigError("there are no schedules to combine; pass at least one")
    if len({(s.n_ranks, s.copies) for s in schedules}) > 1:
        raise ConfigError("schedules can be combined only if they have the same n_ranks (see on_ranks) and copies")
    n_chunks = math.lcm(*(s.n_chunks for s in schedules))
    parts = [refine(s, n_chunks // s.n_chunks) for s in schedules]
    if weights and any(s.chunk_weight is not None for s in schedules):
        if not all(np.allclose(_weight(p), _weight(parts[0]), rtol=1e-12) for p in parts):
            raise ConfigError("the schedules divide the buffer differently; they must have the same chunk_weight")
        parts = [dataclasses.replace(p, chunk_weight=_weight(parts[0])) for p in parts]
    return parts


def _merged(sequences: Iterable[tuple[Round, ...]]) -> Iterable[Round]:
    """Merge sequences on disjoint ranks position by position, combining rounds of the same pattern into one."""
    for rounds in itertools.zip_longest(*sequences):
        patterns: dict[tuple[object, ...], list[Round]] = {}
        for r in rounds:
            if r is not None:
                slots = None if r.slots is None else r.slots.tobytes()
                lacks = [getattr(r, name) is None for name in PER_MESSAGE]
                alike = (r.reduce, r.repeat, r.shift, slots, r.header, *lacks)
                patterns.setdefault(alike, []).append(r)
        for same in patterns.values():
            columns: dict[str, Any] = {
                name: None if getattr(same[0], name) is None else np.concatenate([getattr(r, name) for r in same])
                for name in ("src", "dst", "start", "count", *PER_MESSAGE)
            }
            yield dataclasses.replace(same[0], **columns)
