"""Hierarchical all-reduce: for example inside machines, between the machines of a rack, and between racks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.cluster.groups import Levels
from ddlsim.collectives.combine import on_ranks, parallel, sequence, split, strided, uniform
from ddlsim.collectives.lookup import bound_arguments, called, find, parameters_of
from ddlsim.collectives.schedule import Collective, Ints, Ranks, Round, Schedule, Segments
from ddlsim.errors import ConfigError, unknown_name

#: a reduce-scatter and an all-gather
Pair: TypeAlias = tuple[Collective, Collective]
#: algorithms inside a group before and after the exchange between groups: reduce-scatter and all-gather ...
_SHARED = {
    "ring": ("ring", "ring"),
    "halving_doubling": ("recursive_halving", "recursive_doubling"),
    "direct": ("direct", "direct"),
}
#: ... or reduce to a leader and broadcast
_LEADER = {"binomial_tree": ("binomial", "binomial"), "chain": ("chain", "chain")}


@checked
def hierarchical(
    n_ranks: Ranks,
    inside: str | Pair | None = None,
    between: str | Collective | None = None,
    further: Sequence[str | Collective] = (),
    *,
    groups: Sequence[Ints],
    levels: Levels | None = None,
    n_segments: Segments = 1,
) -> Schedule:
    """Reduce inside groups, all-reduce between them, broadcast inside, on every level (Cho et al. 2017; BlueConnect).

    inside      "ring", "halving_doubling", "direct", or a (reduce-scatter, all-gather) pair of functions: the n members
                of a group share the work, and n all-reduces run between the groups in parallel. "binomial_tree",
                "chain": only the first member of a group communicates with other groups. None: chosen by the links, or
                "binomial_tree" if the groups have unequal sizes
    between     any all-reduce with one lane, between all groups, which makes two levels. None: chosen by the links of
                each level
    further     algorithms of more levels; all but the outermost as `inside`
    groups      ranks of each group (machine), together all ranks, if no `levels` are given
    levels      levels of a cluster (:mod:`ddlsim.cluster.groups`)
    n_segments  segments of pipelined inner algorithms

    With rings, groups of n, m groups: 2(n-1) a1 + 2 (n-1)/n S b1 + 2(m-1) a2 + 2 (m-1)/m S/n b2. Raises ConfigError for
    groups that do not contain all ranks once, unknown names, and more names than levels.
    """
    levels = levels or grouped(groups, n_ranks)
    n_levels = len(levels.groups) + 1
    names = [inside, *[None] * (n_levels - 1)] if between is None else [inside, between, *further]
    if len(names) > n_levels:
        raise ConfigError(f"hierarchical: got {len(names)} algorithms for {n_levels} levels; use at most one per level")
    return _level_by_level(levels.groups[: len(names) - 1], n_ranks, names, levels.algorithms, n_segments)


def _level_by_level(
    levels: Sequence[Sequence[Ints]],
    n_ranks: int,
    names: Sequence[str | Collective | Pair | None],
    usual: Sequence[str],
    n_segments: int,
) -> Schedule:
    """Return the all-reduce of ranks in groups at several levels. ``names[i]`` is the algorithm at level i, from the
    innermost; None: ``usual[i]``."""
    name = names[0]
    if not levels:
        name = name or usual[0]
        if name == "direct":
            name = find(name, "reduce_scatter"), find(name, "all_gather")
        if isinstance(name, tuple):
            return sequence(*(part(n_ranks) for part in name), kind="all_reduce")
        return _bound(find(name), n_segments)(n_ranks)
    groups = levels[0]
    exchange = _level_by_level(levels[1:], len(groups), names[1:], usual[1:], n_segments)
    equal = len({len(g) for g in groups}) == 1
    name = name or (usual[0] if equal else "binomial_tree")
    if isinstance(name, str) and name in _LEADER:
        return _through_leaders(groups, n_ranks, name, exchange, n_segments)
    if not equal:
        sizes = sorted({len(g) for g in groups})
        raise ConfigError(
            f"hierarchical: inside={name!r} requires groups of equal size, but the sizes are {sizes}; "
            f"use inside='binomial_tree', or place the same number of ranks on each machine"
        )
    if not isinstance(name, tuple):
        if name not in _SHARED:
            raise unknown_name("algorithm inside groups", str(name), [*_SHARED, *_LEADER])
        name = find(_SHARED[name][0], "reduce_scatter"), find(_SHARED[name][1], "all_gather")
    down, up = (_bound(part, n_segments)(len(groups[0])) for part in name)
    return _shared_work(np.stack(groups), down, exchange, up)


def scattered(levels: Sequence[Sequence[Ints]], n_ranks: int, usual: Sequence[str]) -> Schedule:
    """Return the reduce-scatter inside groups, then between the groups, level by level."""
    down = find(_SHARED.get(usual[0], _SHARED["ring"])[0], "reduce_scatter")
    if not levels:
        return down(n_ranks)
    if len({len(group) for group in levels[0]}) > 1:
        sizes = sorted({len(group) for group in levels[0]})
        raise ConfigError(f"hierarchical: requires groups of equal size, but the sizes are {sizes}; use 'ring'")
    members, between = np.stack(levels[0]), scattered(levels[1:], len(levels[0]), usual[1:])
    inside = down(members.shape[1])
    schedule = _shared_work(members, inside, between, dataclasses.replace(inside, lanes=()))
    owner = members[between.blocks(len(members))[:, None], inside.blocks(members.shape[1])]
    return dataclasses.replace(schedule, kind="reduce_scatter", block_of=owner.ravel())


def scattered_on_axes(places: Ints) -> Schedule:
    """Return the reduce-scatter over all links of tori at once. Each block has one part per axis and direction, which
    is scattered in rings along that axis, then along the next ones, and finally between the slices.

    places  ranks by position, shape (slices, sizes of the axes)
    """
    n_axes, parts = places.ndim - 1, []
    for first in range(n_axes):
        inwards = [1 + (first + i) % n_axes for i in reversed(range(n_axes))]
        for way in (places, np.flip(places, axis=tuple(range(1, places.ndim)))):
            rest, lines = way.transpose([0, *inwards]), []
            while rest.ndim > 1:
                lines.append(tuple(rest.reshape(-1, rest.shape[-1])))
                rest = np.arange(rest.size // rest.shape[-1]).reshape(rest.shape[:-1])
            parts.append(scattered(lines, places.size, ["ring"] * (n_axes + 1)))
    return split(*parts) if parts else scattered([], places.size, ["ring"])


@checked
def torus_2d(
    n_ranks: Ranks,
    rows: Count | None = None,
    columns: Count | None = None,
    *,
    groups: Sequence[Ints] | None = None,
    levels: Levels | None = None,
) -> Schedule:
    """Rings along the rows, then along the columns, then along the rows again (Mikami et al. 2018).

    With X columns, Y rows: 2(X-1) a1 + 2 (X-1)/X S b1 + 2(Y-1) a2 + 2 (Y-1)/Y S/X b2.

    The shape is `rows` x `columns` if given; consecutive ranks form a row unless the network has this shape. Otherwise
    it is that of the network's `levels`, in all dimensions; else a row is a machine (`groups`) if machines have several
    ranks; else the shape closest to a square. Raises ConfigError if the shape does not match n_ranks.
    """
    singles = np.arange(n_ranks)[:, None]
    groups = _checked_groups(groups or tuple(singles), n_ranks)
    levels = levels or Levels((groups,))
    if rows is None and max(map(len, groups if levels.places is None else levels.groups[0])) == 1:
        rows = next(y for y in range(math.isqrt(n_ranks), 0, -1) if n_ranks % y == 0)
    if rows is not None:
        columns = n_ranks // max(rows, 1) if columns is None else columns
        if rows < 1 or rows * columns != n_ranks:
            raise ConfigError(
                f"torus_2d: {rows} x {columns} does not equal the number of ranks, {n_ranks}; change the shape"
            )
        if levels.places is None or levels.places.shape != (rows, columns):
            levels = Levels((tuple(singles.reshape(rows, columns)),))
    inner = levels.groups[: 1 if levels.places is None else levels.places.ndim - 1]
    return _level_by_level(inner, n_ranks, ["ring"] * (len(inner) + 1), (), 1)


def grouped(groups: Sequence[Ints], n_ranks: int) -> Levels:
    """Return the two levels of ranks in groups, with rings on both."""
    return Levels((_checked_groups(groups, n_ranks),), ("ring", "ring"))


def _checked_groups(groups: Sequence[Ints], n_ranks: int) -> tuple[Ints, ...]:
    arrays = tuple(np.asarray(g, dtype=np.int64) for g in groups)
    if not arrays or any(g.ndim != 1 or len(g) == 0 for g in arrays):
        raise ConfigError("hierarchical: groups must be one or more non-empty lists of ranks")
    if not np.array_equal(np.sort(np.concatenate(arrays)), np.arange(n_ranks)):
        raise ConfigError(f"hierarchical: the groups must contain each rank from 0 to {n_ranks - 1} exactly once")
    return arrays


def _bound(function: Collective, n_segments: int) -> Collective:
    if "n_segments" in parameters_of(function) and "n_segments" not in bound_arguments(function):
        function = functools.partial(function, n_segments=n_segments)

    def checked_call(n_ranks: int) -> Schedule:
        return called(function, n_ranks)

    return checked_call


def _through_leaders(
    groups: Sequence[Ints], n_ranks: int, inside: str, exchange: Schedule, n_segments: int
) -> Schedule:
    """Reduce to each group's first member, all-reduce among these, broadcast."""
    down_name, up_name = _LEADER[inside]
    reduce = _bound(find(down_name, "reduce"), n_segments)
    spread = _bound(find(up_name, "broadcast"), n_segments)
    down = parallel(*(on_ranks(reduce(len(g)), g, n_ranks) for g in groups))
    up = parallel(*(on_ranks(spread(len(g)), g, n_ranks) for g in groups))
    leaders = on_ranks(exchange, [g[0] for g in groups], n_ranks)
    schedule = sequence(down, leaders, up, kind="all_reduce")
    return dataclasses.replace(schedule, groups=None)


def _shared_work(members: Ints, down: Schedule, exchange: Schedule, up: Schedule) -> Schedule:
    """Compose reduce-scatter, parallel all-reduces and all-gather; `members` has shape (n_groups, n_inside).

    Chunk a of the inner schedule and chunk b of the exchange become chunk b * A + a. The inner schedule sends whole
    residue classes mod A and the exchange strides by A, so both keep their arithmetic modulo the number of chunks.
    """
    if len(exchange.lanes) > 1 or exchange.copies > 1:
        raise ConfigError("hierarchical: the algorithm between groups must use one lane and one buffer, such as 'ring'")
    n_inside = members.shape[1]
    if len(down.lanes) > 1 or len(up.lanes) > 1 or down.n_chunks != up.n_chunks or down.n_chunks % n_inside:
        raise ConfigError("hierarchical: both algorithms used inside groups must have one lane and equal-sized blocks")
    a, b = down.n_chunks, exchange.n_chunks
    width = a // n_inside
    rounds = [_inside(r, members, a, b) for lane in down.lanes for r in lane]
    for lane in exchange.lanes:
        for r in lane:
            every = np.repeat(np.arange(len(r.src)), n_inside)
            which = np.tile(np.arange(n_inside), len(r.src))
            one = dataclasses.replace(
                r,
                src=members[r.src[every], which],
                dst=members[r.dst[every], which],
                start=r.start[every],
                count=r.count[every],
            )
            rounds.append(strided(one, b, a, which * width, width))
    rounds += [_inside(r, members, a, b) for lane in up.lanes for r in lane]
    weight = None if exchange.chunk_weight is None else np.repeat(exchange.chunk_weight, a)
    return Schedule(members.size, a * b, (tuple(rounds),) if rounds else (), weight)


def _inside(round: Round, members: Ints, a: int, b: int) -> Round:
    """Run a round of the inner schedule in all groups at once, on all chunks b * a + (its chunks)."""
    even, _ = uniform(round, a)
    carried = np.arange(even.count[0]) if even.slots is None else even.slots
    slots = (np.arange(b)[:, None] * a + carried).ravel()
    return dataclasses.replace(
        even,
        src=members[:, even.src].ravel(),
        dst=members[:, even.dst].ravel(),
        start=np.tile(even.start, len(members)),
        count=np.tile(even.count * b, len(members)),
        slots=None if b == 1 and even.slots is None else slots,
    )
