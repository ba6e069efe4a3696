"""A part of many cases for `make test`. The others are marked slow, for `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def seeds(quick: int, whole: int) -> list[Any]:
    """Return the seeds 0 to `whole` - 1, of which those from `quick` on are left to the slow tests."""
    return [*range(quick), *(slow(seed) for seed in range(quick, whole))]


def slow(*values: Any) -> Any:
    """Return the values of a case that is left to the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def few(cases: Iterable[Any], quick: int, *, start: int = 0) -> list[Any]:
    """Return all cases, of which `quick` are in `make test`, evenly spaced from case `start` on.

    Tests of several rules on the same cases differ in `start`, so that every case is in `make test` with some rule.
    """
    listed = list(cases)
    chosen = _spread(len(listed), quick, start)
    return [case if i in chosen else slow(case) for i, case in enumerate(listed)]


def rows(cases: Iterable[Any], quick: int, *, start: int = 0) -> list[Any]:
    """Return what :func:`few` does, of cases that have a value for each of several arguments."""
    listed = [case if hasattr(case, "marks") else pytest.param(*case) for case in cases]
    chosen = _spread(len(listed), quick, start)
    mark = pytest.mark.slow
    return [case if i in chosen else case._replace(marks=[*case.marks, mark]) for i, case in enumerate(listed)]


def _spread(n: int, quick: int, start: int) -> set[int]:
    quick = min(quick, n)
    return {(start + i * n // quick) % n for i in range(quick)}


def pairwise(*factors: Sequence[Any]) -> list[Any]:
    """Return the full product of three or more factors; in `make test` is a covering array of all pairs of values."""
    places = [list(range(len(values))) for values in factors]
    chosen = {tuple(row) for row in AllPairs(places)}
    product = (
        (place, [values[i] for values, i in zip(factors, place, strict=True)]) for place in itertools.product(*places)
    )
    return [tuple(values) if place in chosen else slow(*values) for place, values in product]


def latin(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs; in `make test` is a part that has every value of both equally often."""
    left, right = list(first), list(second)
    n = min(len(left), len(right))
    return [(a, b) if (i + j) % n == 0 else slow(a, b) for i, a in enumerate(left) for j, b in enumerate(right)]
