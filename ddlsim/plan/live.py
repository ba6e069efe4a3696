"""Steps that repeat, as tasks of a few steps that are gone through over and over."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.network.executor import TaskColumns
from ddlsim.plan.execute import columns, key_sizes
from ddlsim.plan.plan import Floats, Ints, Plan

#: Steps that can be under way. Where no rank updates before all have contributed, a third one begins only after all
#: ranks have updated in the first.
LIVE = 3
#: steps of a plan that :func:`live_steps` needs to see: the first one, the second, and what it is to the third
N_STEPS = 3

_BY_ROW = ("kind", "seconds", "queue", "place", "missing", "slow")


@dataclass(frozen=True, eq=False)
class LiveSteps:
    """The first step of a plan (slot 0) and those after it (slots 1 to `live`, over and over).

    tasks  of all slots
    row    the plan's row that each task is, (n_tasks,)
    rows   of the tasks of each slot
    keys   of each slot
    live   steps that can be under way
    """

    plan: Plan
    tasks: TaskColumns
    row: Ints
    rows: tuple[slice, ...]
    keys: tuple[slice, ...]
    live: int

    def slot(self, step: int) -> int:
        """Return where a step is executed."""
        return step if step <= self.live else 1 + (step - 1) % self.live

    @cached_property
    def key_sizes(self) -> Floats:
        """Bytes of the buffer of each key's collective, (n_keys,)."""
        sizes = key_sizes(self.plan)[0]
        return np.concatenate([sizes[self.keys[0]], np.tile(sizes[self.keys[1]], self.live)])


def live_steps(plan: Plan, live: int = LIVE) -> LiveSteps | None:
    """Return how a plan of N_STEPS steps goes on, or None if those after the first are not alike.

    live  steps of which something can be under way at the same time
    """
    bounds = np.searchsorted(plan.step, np.arange(N_STEPS + 1))
    begin, end, n = int(bounds[1]), int(bounds[2]), int(bounds[2] - bounds[1])
    if (np.diff(plan.step) < 0).any() or plan.n_steps != N_STEPS or bounds[3] - end != n:
        return None
    keys = _keys(plan, bounds)
    every = columns(plan)
    if keys is None or not _alike(plan, every, bounds, keys):
        return None
    offsets = every.offsets[begin : end + 1]
    counts, following = np.diff(offsets), every.following[offsets[0] : offsets[-1]] - begin  # below 2 n
    later = [np.where(following >= n * (live - slot), following - n * live, following) + slot * n
             for slot in range(live)]  # fmt: skip
    n_keys, key = keys[1].stop - keys[1].start, every.key[begin:end]
    own = [np.where(key >= 0, key + slot * n_keys, -1) for slot in range(live)]
    row = np.concatenate([np.arange(end), *[np.arange(end, end + n)] * (live - 1)])
    missing = every.missing[row]
    tasks = every._replace(
        **{name: getattr(every, name)[row] for name in _BY_ROW}, waits=missing,
        key=np.concatenate([every.key[:begin], *own]), step=np.repeat(np.arange(live + 1), [begin, *[n] * live]),
        offsets=np.concatenate([every.offsets[:begin], offsets[0] + np.cumsum([0, *np.tile(counts, live)])]),
        following=np.concatenate([every.following[: offsets[0]], *(begin + each for each in later)]),
    )  # fmt: skip
    own_keys = _slices(keys[0].start, keys[1].start, n_keys, live)
    return LiveSteps(plan, tasks, row, tuple(_slices(0, begin, n, live)), tuple(own_keys), live)


def first_steps(plan: Plan) -> LiveSteps | None:
    """Return the steps of a plan that are not gone through again, or None if keys do not follow each other as steps
    do: enough for a run that ends with the first one."""
    bounds = np.searchsorted(plan.step, np.arange(plan.n_steps + 1))
    keys = _keys(plan, bounds)
    if keys is None or (np.diff(plan.step) < 0).any():
        return None
    rows = tuple(slice(a, b) for a, b in itertools.pairwise(bounds.tolist()))
    return LiveSteps(plan, columns(plan), np.arange(len(plan)), rows, tuple(keys), plan.n_steps - 1)


def _slices(start: int, begin: int, n: int, live: int) -> list[slice]:
    """Return what the first step has, and each slot of further ones."""
    return [slice(start, begin), *(slice(begin + slot * n, begin + (slot + 1) * n) for slot in range(live))]


def _keys(plan: Plan, bounds: Ints) -> list[slice] | None:
    """Return the keys of each step, or None if they do not follow each other as the steps do."""
    keys: list[slice] = []
    for first, last in itertools.pairwise(bounds):
        own = plan.key[first:last]
        own = own[own >= 0]
        at = keys[-1].stop if keys else 0
        if len(own) and own.min() != at:
            return None
        keys.append(slice(at, int(own.max()) + 1 if len(own) else at))
    return keys


def _alike(plan: Plan, every: TaskColumns, bounds: Ints, keys: list[slice]) -> bool:
    """Whether all steps after the first do the same, and wait for themselves and the step before only."""
    n = bounds[2] - bounds[1]

    def shape(step: int) -> list[Ints | Floats]:
        own = slice(int(bounds[step]), int(bounds[step + 1]))
        same = [plan.lane, plan.kind, plan.peer, plan.part, plan.nbytes, plan.seconds, every.missing]
        return [*(column[own] for column in same), np.where(plan.key[own] >= 0, plan.key[own] - keys[step].start, -1)]

    def inside(step: int) -> list[Ints]:
        """Return what follows what within a step."""
        offsets = every.offsets[bounds[step] : bounds[step + 1] + 1]
        row = np.repeat(np.arange(n), np.diff(offsets))
        after = every.following[offsets[0] : offsets[-1]] - bounds[step]
        return [row[after < n], after[after < n]]

    first, second = (every.following[every.offsets[bounds[i]] : every.offsets[bounds[i + 1]]] for i in (0, 1))
    return (
        all(np.array_equal(a, b) for a, b in zip(shape(1), shape(2), strict=True))
        and all(np.array_equal(a, b) for a, b in zip(inside(1), inside(2), strict=True))
        and bool((first < bounds[2]).all())
        and bool(((second >= bounds[1]) & (second < bounds[3])).all())
    )
