"""Pauses, in which nothing starts: work in progress finishes, and ready work waits until they end.

The clock of whatever starts tasks, messages and services says when what is ready now starts (:func:`earliest`); Python
asks the network (:meth:`~ddlsim.network.network.Network.earliest`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.state import Floats

#: (n, 2) s: start and end of each pause, in order of time, without overlap
NO_PAUSES: Floats = np.zeros((0, 2))


@inlined
def earliest(pauses, now):  # type: ignore[no-untyped-def]
    """Return the earliest start (s) of what is ready at `now`."""
    for i in range(pauses.shape[0]):
        if pauses[i, 0] <= now and now < pauses[i, 1]:
            return pauses[i, 1]
    return now


@inlined
def paused(pauses, begin, end):  # type: ignore[no-untyped-def]
    """Return the seconds of pauses between `begin` and `end` (s)."""
    seconds = 0.0
    for i in range(pauses.shape[0]):
        seconds += max(min(end, pauses[i, 1]) - max(begin, pauses[i, 0]), 0.0)
    return seconds


def earliest_start(pauses: Floats, now: float) -> float:
    """:func:`earliest` outside compiled code."""
    return cast(float, earliest.py_func(pauses, now)) if len(pauses) else now  # type: ignore[attr-defined]


def merged(windows: Iterable[tuple[float, float]]) -> Floats:
    """Return the pauses that cover the given windows (s, s), which may overlap and come in any order."""
    pauses: list[tuple[float, float]] = []
    for start, end in sorted(windows):
        if pauses and start <= pauses[-1][1]:
            pauses[-1] = pauses[-1][0], max(pauses[-1][1], end)
        else:
            pauses.append((start, end))
    return np.array(pauses).reshape(-1, 2)
