"""Every gradient is summed once, and weights are whole where they are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan.order import Order
from ddlsim.plan.overlaps import joined, with_parts
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, FORWARD, UPDATE, Ints, Plan

__all__ = ["check_gradients"]

#: of a number that stands for a micro-batch; sums wrap around
Marks = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Touching:
    """Tasks that have to do with a part on their rank, in their step: `row`, `part`, and the place of both, (n,)."""

    row: Ints
    part: Ints
    place: Ints


def check_gradients(plan: Plan, order: Order) -> None:
    """Raise ConfigError for a gradient that is not summed exactly once, and for weights that are used too early."""
    backward, update, forward = (_touching(plan, kind) for kind in (BACKWARD, UPDATE, FORWARD))
    sums = _sums(plan)
    _updated_once(plan, backward, update)
    # no bucket leaves before it is full, nor does an update come before the last sum
    for early, late, why in ((backward, sums, "which it sums"), (sums, update, "whose gradients it uses")):
        i, j = joined(early.place, late.place)
        order.demand(early.row[i], late.row[j], why)
    _summed_once(plan, order, backward, sums, update)
    n_places = plan.n_ranks * len(plan.parts)  # of a step
    later = plan.step[forward.row] > 0
    uses, before = forward.row[later], forward.place[later] - n_places
    for row in uses[~np.isin(before, update.place)].tolist():
        raise ConfigError(f"plan: {plan.task(row)}: its weights have not been updated on its rank in the step before")
    i, j = joined(update.place, before)
    order.demand(update.row[i], uses[j], "whose weights it uses")


def _touching(plan: Plan, kind: int) -> _Touching:
    rows = plan.rows(kind)
    first, end = (np.array([getattr(part, name) for part in plan.parts], dtype=np.int64) for name in ("first", "end"))
    i, part = with_parts(plan.first[rows], plan.end[rows], first, end)
    return _Touching(rows[i], part, _place(plan, rows[i], part))


def _sums(plan: Plan) -> _Touching:
    rows = plan.rows(ALL_REDUCE)
    rows = rows[plan.part[rows] >= 0]
    return _Touching(rows, plan.part[rows], _place(plan, rows, plan.part[rows]))


def _place(plan: Plan, rows: Ints, part: Ints) -> Ints:
    return (plan.step[rows] * plan.n_ranks + plan.rank[rows]) * len(plan.parts) + part


def _updated_once(plan: Plan, backward: _Touching, update: _Touching) -> None:
    again = np.ones(len(update.place), dtype=np.bool_)
    again[np.unique(update.place, return_index=True)[1]] = False
    for row, part in zip(update.row[again].tolist(), update.part[again].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(row)}: part {part} is updated a second time in this step")
    never = ~np.isin(backward.place, update.place)
    for row, part in zip(backward.row[never].tolist(), backward.part[never].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(row)}: its gradient of part {part} is never used: no update follows")


def _summed_once(plan: Plan, order: Order, backward: _Touching, sums: _Touching, update: _Touching) -> None:
    """Check what each update finds: every micro-batch of the step that has a gradient of the part, once."""
    n_batches = int(plan.batch.max(initial=-1)) + 1
    marks = np.random.default_rng(0).integers(1, 2**63, (n_batches, 1), dtype=np.uint64)
    places, held = _replay(plan, order, backward, sums, marks)
    n_parts = len(plan.parts)
    whole = places // (plan.n_ranks * n_parts) * n_parts + places % n_parts  # one for all ranks: step and part
    total = np.zeros((plan.n_steps * n_parts, 1), dtype=np.uint64)
    own = _contributions(plan, backward)
    kinds, which = np.unique(own[0] // (plan.n_ranks * n_parts) * n_parts + own[0] % n_parts, return_inverse=True)
    batches = np.unique(np.stack([kinds[which.reshape(-1)], own[1]]), axis=1)
    np.add.at(total, batches[0], marks[batches[1]])
    wrong = np.isin(places, update.place) & (held != total[whole]).any(axis=1)
    if wrong.any():
        place = int(places[wrong][0])
        row = int(update.row[update.place == place][0])
        raise ConfigError(f"plan: {plan.task(row)}: {_what_is_wrong(plan, order, backward, sums, place, n_batches)}")
    never = ~np.isin(update.place, places)
    for row, part in zip(update.row[never].tolist(), update.part[never].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(row)}: the gradient of part {part} is never summed on this rank")


def _contributions(plan: Plan, backward: _Touching) -> Ints:
    """Return which micro-batches have a gradient where: (2, n) of distinct places and batches."""
    return np.unique(np.stack([backward.place, plan.batch[backward.row]]), axis=1)


def _replay(plan: Plan, order: Order, backward: _Touching, sums: _Touching, marks: Marks) -> tuple[Ints, Marks]:
    """Return all places with gradients, and the marks (n_places, width) that are there in the end."""
    places = np.union1d(backward.place, sums.place)
    held = np.zeros((len(places), marks.shape[1]), dtype=np.uint64)
    own = _contributions(plan, backward)
    np.add.at(held, np.searchsorted(places, own[0]), marks[own[1]])
    at = np.searchsorted(places, sums.place)
    turn = np.empty(len(plan), dtype=np.int64)
    turn[order.rows] = np.arange(len(plan))
    by_place = np.lexsort((turn[sums.row], at))
    begins = np.flatnonzero(np.diff(at[by_place], prepend=-1))
    nth = np.empty(len(at), dtype=np.int64)  # which sum of its place each is
    nth[by_place] = np.arange(len(at)) - np.repeat(begins, np.diff(np.append(begins, len(at))))
    _, which, size = np.unique(plan.key[sums.row], return_inverse=True, return_counts=True)
    which, n_done, left = which.reshape(-1), np.zeros(len(places), dtype=np.int64), np.arange(len(at))
    while len(left):  # those collectives whose members have all come so far
        here = left[nth[left] == n_done[at[left]]]
        go = here[(np.bincount(which[here], minlength=len(size)) == size)[which[here]]]
        total = np.zeros((len(size), marks.shape[1]), dtype=np.uint64)
        np.add.at(total, which[go], held[at[go]])
        held[at[go]] = total[which[go]]
        n_done[at[go]] += 1
        left = left[~np.isin(left, go)]
    return places, held


def _what_is_wrong(
    plan: Plan, order: Order, backward: _Touching, sums: _Touching, place: int, n_batches: int
) -> str:
    """Replay one part of one step with a column per micro-batch, and say which is not there once."""
    n_parts = len(plan.parts)
    step, part = place // (plan.n_ranks * n_parts), place % n_parts
    few = []
    for each in (backward, sums):
        mine = (each.part == part) & (plan.step[each.row] == step)
        few.append(_Touching(each.row[mine], each.part[mine], each.place[mine]))
    places, held = _replay(plan, order, few[0], few[1], np.eye(n_batches, dtype=np.uint64))
    counts = held[np.searchsorted(places, place)]
    expected = np.zeros(n_batches, dtype=np.uint64)
    expected[plan.batch[few[0].row]] = 1
    batch = int(np.flatnonzero(counts != expected)[0])
    n = int(counts[batch])
    times = {0: "never summed", 2: "summed twice"}.get(n, f"summed {n} times")
    return f"the gradient of batch {batch} is {times} in part {part}; it must be once"

