"""Which ranges of layers have layers in common."""

from __future__ import annotations

import numpy as np

from ddlsim.plan.plan import Ints


def joined(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Return all (i, j) with ``left[i] == right[j]``, as two arrays, by i."""
    order = np.argsort(right, kind="stable")
    begin = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - begin
    i = np.repeat(np.arange(len(left)), count)
    offset = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    return i, order[begin[i] + offset]


def overlapping(
    left: Ints, first: Ints, end: Ints, right: Ints, other_first: Ints, other_end: Ints
) -> tuple[Ints, Ints]:
    """Return all (i, j) with ``left[i] == right[j]`` whose ranges `first` to `end` - 1 have a layer in common."""
    i, j = joined(left, right)
    common = (first[i] < other_end[j]) & (other_first[j] < end[i])
    return i[common], j[common]


def with_parts(first: Ints, end: Ints, part_first: Ints, part_end: Ints) -> tuple[Ints, Ints]:
    """Return all (i, p) where the range `first` to `end` - 1 of i has a layer of part p, by i."""
    ranges, which = np.unique(np.stack([first, end]), axis=1, return_inverse=True)
    common = (ranges[0][:, None] < part_end) & (part_first < ranges[1][:, None])
    n_common, (_, part) = common.sum(axis=1), np.nonzero(common)
    which = which.reshape(-1)
    count = n_common[which]
    begin = (np.cumsum(n_common) - n_common)[which]
    i = np.repeat(np.arange(len(first)), count)
    offset = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    return i, part[begin[i] + offset]
