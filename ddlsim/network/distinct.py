"""Distinct values of many small integers, without sorting."""

from __future__ import annotations

import numpy as np

from ddlsim.network.state import Ints

#: largest number for which a place of its own is kept; untouched pages of memory cost nothing
MOST = 1 << 27


def distinct(numbers: Ints, below: int) -> tuple[Ints, Ints]:
    """Return the different ones of some numbers from 0 to `below` - 1 in ascending order, and which of them each is:
    what ``np.unique(numbers, return_inverse=True)`` returns, in time linear in their number."""
    if below > MOST:
        values, which = np.unique(numbers, return_inverse=True)
        return values, which.reshape(-1)
    seen = np.zeros(below, dtype=np.bool_)
    seen[numbers] = True
    values = np.flatnonzero(seen)
    place = np.empty(below, dtype=np.int64)
    place[values] = np.arange(len(values))
    return values, place[numbers]
