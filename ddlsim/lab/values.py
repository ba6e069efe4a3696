"""What the ranks put in, and what each must hold in the end: so a wrong result is seen.

Contributions are whole numbers below 1000, so their sums are exact in float32 for 16,000 ranks, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlsim.collectives.schedule import Ints, Schedule
from ddlsim.lab.executor import Buffer


@dataclass(frozen=True)
class Promise:
    """Elements of the result, and what they must be."""

    where: slice
    values: Buffer


def contribution(rank: int, n_elements: int, n_silent: int = 0, n_ranks: int = 0) -> Buffer:
    """Return what `rank` puts in; zeros for the last `n_silent` of `n_ranks` (servers), shape (n_elements,)."""
    if n_silent and rank >= n_ranks - n_silent:
        return np.zeros(n_elements, np.float32)
    return np.random.default_rng(rank).integers(0, 1000, n_elements).astype(np.float32)


def _group(schedule: Schedule, rank: int) -> Ints | None:
    groups = (np.arange(schedule.n_ranks),) if schedule.groups is None else schedule.groups
    return next((group for group in groups if rank in group), None)


def initial(schedule: Schedule, rank: int, n_elements: int, n_silent: int = 0) -> Buffer:
    """Return the buffer of `rank` at the start, shape (copies * n_elements,): its own in its copy, else zeros."""
    group = _group(schedule, rank)
    place = 0 if group is None else int(np.flatnonzero(group == rank)[0])
    buffer = np.zeros((schedule.copies, n_elements), np.float32)
    buffer[place % schedule.copies] = contribution(rank, n_elements, n_silent, schedule.n_ranks)
    return buffer.ravel()


def promises(
    schedule: Schedule, rank: int, bounds: Ints, n_elements: int, n_silent: int = 0
) -> tuple[Promise, ...]:
    """Return what the schedule's kind promises to `rank`, as told in :mod:`ddlsim.collectives.check`.

    `bounds` is where the chunks begin and end. Nothing is promised to the last `n_silent` ranks.
    """
    group = _group(schedule, rank)
    if group is None or rank >= schedule.n_ranks - n_silent:
        return ()
    place, size, kind = int(np.flatnonzero(group == rank)[0]), len(group), schedule.kind

    def of(member: int) -> Buffer:
        return contribution(int(group[member]), n_elements, n_silent, schedule.n_ranks)

    whole, at_root = slice(0, n_elements), place == schedule.root
    width = schedule.n_chunks // schedule.copies // size
    blocks = [slice(int(bounds[i * width]), int(bounds[(i + 1) * width])) for i in range(size)]
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        if kind == "reduce" and not at_root:
            return ()
        where = blocks[place] if kind == "reduce_scatter" else whole
        total = np.zeros(where.stop - where.start, np.float32)
        for member in range(size):
            total += of(member)[where]
        return (Promise(where, total),)
    if kind in ("broadcast", "scatter"):
        where = blocks[place] if kind == "scatter" else whole
        return (Promise(where, of(schedule.root)[where]),)
    if kind == "gather" and not at_root:
        return ()
    source = [(place - i) % size if kind == "all_to_all" else i for i in range(size)]
    return tuple(Promise(block, of(member)[block]) for block, member in zip(blocks, source, strict=True))


def problem(result: Buffer, promised: tuple[Promise, ...]) -> str:
    """Say where `result`, shape (n_elements,), is not as promised; "" if it is."""
    for promise in promised:
        wrong = np.flatnonzero(result[promise.where] != promise.values)
        if len(wrong):
            first = int(wrong[0])
            return (
                f"{len(wrong)} of {len(promise.values)} elements are wrong; element {promise.where.start + first} is "
                f"{result[promise.where][first]:g} instead of {promise.values[first]:g}"
            )
    return ""
