"""Operations on rows of a plan: joins, ragged ranges, CSRs, and errors that name a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import Bools, Ints, Plan

T = TypeVar("T", bound=np.generic)


def refuse(plan: Plan, rows: Ints, problem: str, other: Ints | None = None, **columns: npt.NDArray[Any]) -> None:
    """Raise ConfigError for the first of `rows`, if there are any.

    problem  text after the task; {other} is the task in the row of `other`, and names in braces refer to values of
             `columns`, (n_rows,) each
    """
    for row in rows[:1].tolist():
        values = {name: column[0] for name, column in columns.items()}
        text = problem.format(other="" if other is None else plan.task(int(other[0])), **values)
        raise ConfigError(f"plan: {plan.task(row)}{text}")


def refuse_needs_across_ranks(plan: Plan, owner: str, language: str) -> None:
    """Raise ConfigError if a task depends on one of another rank, which a language cannot express."""
    for i in np.flatnonzero(plan.rank[plan.needs] != plan.rank[plan.needing])[:1].tolist():
        raise ConfigError(
            f"{owner}: {plan.task(int(plan.needing[i]))} depends on {plan.task(int(plan.needs[i]))} of another rank, "
            f"which {language} cannot express; use a 0-byte message instead"
        )


def csr(keys: Ints, values: npt.NDArray[T], n: int) -> tuple[Ints, npt.NDArray[T]]:
    """Group `values` by key from 0 to n - 1, in stable order: return offsets, (n + 1,), and values."""
    return np.append(0, np.cumsum(np.bincount(keys, minlength=n))), values[np.argsort(keys, kind="stable")]


def ranges(begin: Ints, count: Ints) -> Ints:
    """Return the concatenated ranges ``begin[i]`` to ``begin[i] + count[i] - 1``."""
    numbers: Ints = np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)
    return numbers


def pairs(rows: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return a list of pairs as two arrays, (n,) each."""
    first, second = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return first, second


def occurrences(values: Ints) -> Ints:
    """Return how often each value (at least 0) has occurred before, (n,)."""
    sizes, before = np.bincount(values), np.empty(len(values), dtype=np.int64)
    before[np.argsort(values, kind="stable")] = ranges(0 * sizes, sizes)
    return before


def repeats(values: Ints) -> Bools:
    """Return whether each value has occurred before, (n,)."""
    again = np.ones(len(values), dtype=np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def key_ends(plan: Plan) -> Ints:
    """Return the number of keys before each step, and in all, (n_steps + 1,); keys are in the order of their steps."""
    ends = np.zeros(plan.n_steps + 1, dtype=np.int64)
    np.maximum.at(ends, plan.step + 1, plan.key + 1)
    return np.maximum.accumulate(ends)


def joined(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (i, j) with ``left[i] == right[j]``, as two arrays, sorted by i."""
    order = np.argsort(right, kind="stable")
    begin = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - begin
    return np.repeat(np.arange(len(left)), count), order[ranges(begin, count)]


def overlapping(
    left: Ints, first: Ints, end: Ints, right: Ints, other_first: Ints, other_end: Ints
) -> tuple[Ints, Ints]:
    """Return all pairs (i, j) with ``left[i] == right[j]`` whose ranges `first` to `end` - 1 share a layer."""
    i, j = joined(left, right)
    common = (first[i] < other_end[j]) & (other_first[j] < end[i])
    return i[common], j[common]


def with_parts(first: Ints, end: Ints, part_first: Ints, part_end: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (i, p) where the range `first` to `end` - 1 of i shares a layer with part p, sorted by i."""
    spans, which = np.unique(np.stack([first, end]), axis=1, return_inverse=True)
    common = (spans[0][:, None] < part_end) & (part_first < spans[1][:, None])
    n_common, (_, part) = common.sum(axis=1), np.nonzero(common)
    which = which.reshape(-1)
    at = ranges((np.cumsum(n_common) - n_common)[which], n_common[which])
    return np.repeat(np.arange(len(first)), n_common[which]), part[at]
