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
    block_of = schedule.blocks(size)
    blocks = [_slices(np.flatnonzero(block_of == i), bounds) for i in range(size)]
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        if kind == "reduce" and not at_root:
            return ()
        total = np.zeros(n_elements, np.float32)
        for member in range(size):
            total += of(member)
        return tuple(Promise(each, total[each]) for each in (blocks[place] if kind == "reduce_scatter" else [whole]))
    if kind in ("broadcast", "scatter"):
        sent = of(schedule.root)
        return tuple(Promise(each, sent[each]) for each in (blocks[place] if kind == "scatter" else [whole]))
    if kind == "gather" and not at_root:
        return ()
    source = [(place - i) % size if kind == "all_to_all" else i for i in range(size)]
    return tuple(
        Promise(each, of(member)[each]) for block, member in zip(blocks, source, strict=True) for each in block
    )


def _slices(chunks: Ints, bounds: Ints) -> list[slice]:
    """Return where chunks are in a buffer, those that follow each other together."""
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) > 1) + 1) if len(chunks) else []
    return [slice(int(bounds[run[0]]), int(bounds[run[-1] + 1])) for run in runs]


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
