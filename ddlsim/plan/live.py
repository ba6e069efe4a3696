"""Steps that repeat, as tasks of a few steps that are gone through over and over."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.network.executor import TaskColumns
from ddlsim.plan.plan import Floats, Ints, Plan
from ddlsim.plan.runner import columns, key_sizes

__all__ = ["LIVE", "MORE_STEPS", "N_STEPS", "LiveSteps", "live_steps"]

#: Steps that can be under way. Where no rank updates before all have contributed, a third one begins only after all
#: ranks have updated in the first.
LIVE = 3
#: steps of a plan that :func:`live_steps` needs to see beside those that can be under way
MORE_STEPS = 2
#: the same, of steps of which :data:`LIVE` can be
N_STEPS = LIVE + MORE_STEPS

_BY_ROW = ("kind", "seconds", "key", "place", "queue", "step", "missing", "slow")


@dataclass(frozen=True, eq=False)
class LiveSteps:
    """The first step of a plan (slot 0) and those after it (slots 1 to `live`, over and over).

    tasks  of all slots
    rows   of each slot
    keys   of each slot
    live   steps that can be under way
    """

    plan: Plan
    tasks: TaskColumns
    rows: tuple[slice, ...]
    keys: tuple[slice, ...]
    live: int = LIVE

    def slot(self, step: int) -> int:
        """Return where a step is executed."""
        return step if step <= self.live else 1 + (step - 1) % self.live

    @cached_property
    def key_sizes(self) -> Floats:
        """Bytes of the buffer of each key's collective, (n_keys,)."""
        return key_sizes(self.plan)[0][: self.keys[-1].stop]


def live_steps(plan: Plan, live: int = LIVE) -> LiveSteps | None:
    """Return how a plan of `live` + MORE_STEPS steps goes on, or None if those after the first are not alike.

    live  steps of which something can be under way at the same time
    """
    bounds = np.searchsorted(plan.step, np.arange(live + MORE_STEPS + 1))
    sizes = np.diff(bounds)
    if (np.diff(plan.step) < 0).any() or plan.n_steps != live + MORE_STEPS or (sizes[1:] != sizes[1]).any():
        return None
    keys = _keys(plan, bounds)
    every = columns(plan)
    if keys is None or not _alike(plan, every, bounds, keys):
        return None
    n, again = int(bounds[-2]), slice(int(bounds[1]), int(bounds[2]))
    offsets = every.offsets[: n + 1]
    following = every.following[: offsets[-1]]
    waits = every.missing[:n].copy()
    waits[again] = every.missing[n:]
    tasks = every._replace(
        **{name: getattr(every, name)[:n] for name in _BY_ROW}, offsets=offsets, waits=waits,
        following=np.where(following >= n, following - n + bounds[1], following),
    )  # fmt: skip
    rows = tuple(slice(int(a), int(b)) for a, b in itertools.pairwise(bounds[:-1]))
    return LiveSteps(plan, tasks, rows, tuple(keys[:-1]), live)


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

    def shape(step: int) -> list[Ints | Floats]:
        own = slice(int(bounds[step]), int(bounds[step + 1]))
        first = keys[step].start
        same = [plan.lane, plan.kind, plan.peer, plan.part, plan.nbytes, plan.seconds, every.missing]
        return [*(column[own] for column in same), np.where(plan.key[own] >= 0, plan.key[own] - first, -1)]

    def after(step: int) -> list[Ints]:
        first, last = bounds[step], bounds[step + 1]
        offsets = every.offsets[first : last + 1]
        return [offsets - offsets[0], every.following[offsets[0] : offsets[-1]] - first]

    steps = range(1, plan.n_steps)
    ends = every.following[: every.offsets[bounds[1]]]
    return (
        all(np.array_equal(a, b) for step in steps for a, b in zip(shape(1), shape(step), strict=True))
        and all(np.array_equal(a, b) for step in steps[:-1] for a, b in zip(after(1), after(step), strict=True))
        and bool((ends < bounds[2]).all())
        and all(bool(((own >= 0) & (own < bounds[3] - bounds[1])).all()) for own in after(1)[1:])
    )
