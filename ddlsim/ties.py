"""Ties between results, as used in all rankings.

Two results *tie* if they differ by less than their stability (:meth:`ddlsim.Result.stability`) or, if that is unknown,
by less than :data:`FLOOR`, which covers rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

#: relative difference below which simulated numbers always tie
FLOOR = 1e-9

T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)


def distinct(values: npt.NDArray[Number], axis: int | None = None) -> npt.NDArray[Number]:
    """Return the distinct values, or slices along an axis, in ascending order, without importing ``numpy.ma``."""
    ordered: npt.NDArray[Number] = np.unique(values, return_counts=True, axis=axis)[0]
    return ordered


def tie(a: float, b: float, spread: float = 0.0) -> bool:
    """Return whether two numbers are tied: they differ by no more than the relative `spread`, or than :data:`FLOOR`.

    The larger of the two limits applies. Infinity is tied only with itself.
    """
    if a == b:
        return True
    if math.isinf(a) or math.isinf(b):
        return False
    return abs(a - b) <= max(spread, FLOOR) * max(abs(a), abs(b))


def places(values: Sequence[float], spreads: Sequence[float] | None = None) -> list[int]:
    """Return the rank of each of n values, 0 for the smallest; values that tie share a rank.

    Because ties are not transitive, there is a rule: the smallest value and all that tie with it, by the larger of the
    two `spreads` (n,), share a rank; then the smallest of the rest and all that tie with it, and so on. Among equal
    values, the one with the largest spread comes first.
    """
    widths = [0.0] * len(values) if spreads is None else list(spreads)
    widest = max(widths, default=0.0)
    ascending = sorted(range(len(values)), key=lambda i: (values[i], -widths[i]))
    ranks = [-1] * len(values)
    n_places = 0
    for start, leader in enumerate(ascending):
        if ranks[leader] >= 0:
            continue
        for i in _near(values, ascending, start, widest):
            if ranks[i] < 0 and tie(values[leader], values[i], max(widths[leader], widths[i])):
                ranks[i] = n_places
        n_places += 1
    return ranks


def _near(values: Sequence[float], ascending: Sequence[int], start: int, widest: float) -> list[int]:
    """Return the value at `start` in ascending order, and those after it that may tie with it (indices)."""
    end = start + 1
    while end < len(ascending) and tie(values[ascending[start]], values[ascending[end]], widest):
        end += 1
    return list(ascending[start:end])


def in_order(items: Sequence[T], keys: Callable[[T], Sequence[float]], spread: Callable[[T], float]) -> list[T]:
    """Return the items sorted by their first key; those that tie in it by the next key, and so on.

    Items that tie in all keys keep their order. `spread` is the relative stability of an item's keys.
    """
    return _by_key(list(items), {id(item): keys(item) for item in items}, spread, 0)


def _by_key(items: list[T], keys: dict[int, Sequence[float]], spread: Callable[[T], float], level: int) -> list[T]:
    if len(items) < 2 or level == len(keys[id(items[0])]):
        return items
    ranks = places([keys[id(item)][level] for item in items], [spread(item) for item in items])
    groups: dict[int, list[T]] = {}
    for place, item in zip(ranks, items, strict=True):
        groups.setdefault(place, []).append(item)
    return [item for place in sorted(groups) for item in _by_key(groups[place], keys, spread, level + 1)]
