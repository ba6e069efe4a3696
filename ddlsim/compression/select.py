"""Which k elements of a vector are largest in magnitude: exactly, and by MSTopK's threshold search."""

from __future__ import annotations

import numpy as np

from ddlsim.compression.contract import Indices, Vector

#: passes of an exact selection on a device: a radix select reads 32-bit keys 8 bits at a time, then collects
SELECT_PASSES = 5.0
#: kernels of collecting what reaches a threshold: count, prefix sum, write; and of the selection: four digits, a
#: histogram and a choice each, then that
COLLECT_KERNELS = 3
SELECT_KERNELS = 8 + COLLECT_KERNELS

#: passes of sorting all elements with their places: a radix sort of 4-byte keys and 8-byte indices takes four digits,
#: for each of which it reads the keys, then reads and writes both: 4 (4 + 12 + 12) bytes, in units of 4; its kernels
SORT_PASSES = 28.0
SORT_KERNELS = 8


def top_k(values: Vector, k: int) -> Indices:
    """Return the coordinates, ascending, of the k largest magnitudes; among equal ones the lowest win.

    values  (n,)
    k       0 <= k <= n
    """
    n = values.size
    if k == 0:
        return np.empty(0, np.int32)
    if k == n:
        return np.arange(n, dtype=np.int32)
    magnitude = np.abs(values)
    smallest = np.partition(magnitude, n - k)[n - k]
    above = magnitude > smallest
    equal = np.flatnonzero(magnitude == smallest)  # at least one of them is needed
    above[equal[: k - np.count_nonzero(above)]] = True
    return np.flatnonzero(above).astype(np.int32)


def ms_top_k(values: Vector, k: int, n_searches: int, rng: np.random.Generator) -> Indices:
    """Return k coordinates, ascending, found with `n_searches` counts and no sort.

    MSTopK (Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
    algorithm 1): a binary search between the mean and the largest magnitude for a threshold that k elements
    reach. The k1 <= k elements above the best threshold found are all taken; the other k - k1 are consecutive
    ones, from a random start, of those between it and the best threshold that more than k reach.
    """
    n = values.size
    if k == 0 or k == n:
        return np.arange(k, dtype=np.int32)
    magnitude = np.abs(values)
    low, high = 0.0, 1.0
    mean, largest = float(magnitude.mean(dtype=np.float64)), float(magnitude.max())
    k1, upper = 0, np.inf  # at most k elements reach `upper`; k1 do
    k2, lower = n, 0.0  # more than k reach `lower`
    for _ in range(n_searches):
        ratio = 0.5 * (low + high)
        threshold = float(np.float32(mean + ratio * (largest - mean)))
        reached = int(np.count_nonzero(magnitude >= np.float32(threshold)))
        if reached <= k:
            high = ratio
            if reached > k1:
                k1, upper = reached, threshold
        else:
            low = ratio
            if reached < k2:
                k2, lower = reached, threshold
        if k1 == k:
            break  # later thresholds could not be better
    taken = magnitude >= np.float32(upper)
    between = np.flatnonzero((magnitude >= np.float32(lower)) & ~taken)
    start = int(rng.integers(between.size - (k - k1) + 1))
    taken[between[start : start + k - k1]] = True
    return np.flatnonzero(taken).astype(np.int32)
