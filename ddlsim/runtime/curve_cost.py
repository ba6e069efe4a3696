"""The time of a collective by a measured curve: factors on the parts of its simulated time.

Simulated on the calibrated cluster, an operation takes A (per message: latencies and overheads) + B (bytes) + G (adding
up). A curve multiplies A by one factor and B by factors that depend on the size:

    T(S) = per_message A + sum_k per_byte_k B(part of S in piece k) + G

A, B and G are simulated where the curve is used, so it carries over to other numbers of ranks.
:mod:`ddlsim.validation.curves` fits the factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parts:
    """What the simulated seconds of one operation over `nbytes` are made of, all in s."""

    nbytes: float
    per_message: float
    per_byte: float
    reduction: float


def parts_of(seconds: Callable[[Cluster], float], cluster: Cluster, nbytes: float) -> Parts:
    """Return the parts of an operation that takes ``seconds(cluster)`` by simulation: the same without latency and with
    twice the rate tells them apart."""
    idle = np.zeros_like(cluster.send_overhead)
    hardly = 1e-15 * cluster.link_latency  # with none at all, messages could take other routes
    free = dataclasses.replace(cluster, link_latency=hardly, send_overhead=idle, recv_overhead=idle)
    fast = dataclasses.replace(free, link_bandwidth=2.0 * free.link_bandwidth)
    whole, bytes_only, faster = (seconds(c) for c in (cluster, free, fast))
    per_byte = 2.0 * (bytes_only - faster)
    return Parts(nbytes, whole - bytes_only, per_byte, bytes_only - per_byte)


def columns(parts: Sequence[Parts], sizes: Sequence[int]) -> Floats:
    """Return what each factor of a curve multiplies, shape (n_rows, 1 + n_pieces); pieces meet at `sizes` (bytes)."""
    size = np.array([p.nbytes for p in parts])
    edges = np.array([0.0, *sizes, math.inf])
    inside = np.clip(size[:, None], edges[:-1], edges[1:]) - edges[:-1]
    per_byte = np.array([p.per_byte for p in parts])
    return np.column_stack([[p.per_message for p in parts], inside * (per_byte / size)[:, None]])


def curve_seconds(parts: Parts, per_message: float, sizes: Sequence[int], per_byte: Sequence[float]) -> float:
    """Return the seconds of an operation by a curve with these factors."""
    return float(columns([parts], sizes)[0] @ np.array([per_message, *per_byte])) + parts.reduction
