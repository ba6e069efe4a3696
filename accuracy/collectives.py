"""NCCL all-reduce sweeps: every third size calibrates, the others are predicted.

A single pair of latency and bandwidth misses real sweeps by up to 41 % below 256 MiB, because NCCL changes its protocol
and algorithm with the size. Between two calibrated sizes a protocol is one such pair: t(S) = alpha + beta S there
(Hockney 1994, Parallel Computing 20(3)), so the prediction is linear in S, piece by piece. Where a piece's latency
would be negative below the smallest calibrated size, time goes with the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from accuracy.rows import Omitted, Row, Table, number, show
from ddlsim import collective_time, load_cluster
from ddlsim.cluster import star

__all__ = ["DATA", "Pieces", "left_out", "read_sweep", "ring_rows", "rows", "sweep_rows", "table"]

DATA = Path(__file__).with_name("data") / "collectives.yaml"
EVERY = 3  # sizes 0, 3, 6, ... calibrate, or others as far apart
GIB = 2.0**30


@dataclass(frozen=True)
class Pieces:
    """Measured s at some sizes (bytes, ascending, at least two), and a pair of latency and bandwidth between them."""

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, nbytes: float) -> float:
        """Return the s of `nbytes`; beyond the ends the outermost pair goes on."""
        size = np.asarray(self.nbytes)
        i = int(np.clip(np.searchsorted(size, nbytes) - 1, 0, len(size) - 2))
        beta = (self.seconds[i + 1] - self.seconds[i]) / (self.nbytes[i + 1] - self.nbytes[i])
        alpha = self.seconds[i] - beta * self.nbytes[i]
        if alpha < 0.0 and nbytes < self.nbytes[0]:
            return self.seconds[0] * nbytes / self.nbytes[0]
        return alpha + beta * nbytes


def read_sweep(case: Mapping[str, object]) -> dict[float, float]:
    """Return bytes -> s of a sweep, whose columns are "bytes: time_us" or "bytes: algbw_GBps" (1e9 bytes/s)."""
    data = case["data"]
    assert isinstance(data, dict)
    stated = {float(size): number(data, size) for size, value in data.items() if value is not None}
    if "time_us" in str(case["columns"]):
        return {size: value * 1e-6 for size, value in stated.items()}
    return {size: size / (value * 1e9) for size, value in stated.items()}


def sweep_rows(name: str, measured: Mapping[float, float], first: int = 0) -> list[Row]:
    """Return the sizes of a sweep, every third one from number `first` on as calibrated."""
    sizes = sorted(measured)
    known = sizes[first::EVERY]
    predict = Pieces(tuple(known), tuple(measured[size] for size in known))
    return [
        Row(name, _size(size), measured[size] * 1e6, predict(size) * 1e6, "us", size in known) for size in sizes
    ]


def ring_rows(name: str, bus_bandwidth: Mapping[int, float]) -> list[Row]:
    """Return the bus bandwidth (GB/s) of a ring over several numbers of GPUs; the smallest number calibrates."""
    first = min(bus_bandwidth)
    found = []
    for n, measured in sorted(bus_bandwidth.items()):
        cluster = load_cluster(star(n, bandwidth=bus_bandwidth[first] * 1e9, latency=0.0))
        seconds = collective_time(cluster, "ring", 8 * GIB)
        predicted = 2 * (n - 1) / n * 8 * GIB / seconds * 1e-9
        found.append(Row(name, f"{n} GPUs, 8 GiB, ring", measured, predicted, "GB/s", n == first))
    return found


def _size(nbytes: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2.0**20)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes / 1024:g} KiB"


@cache
def table(path: Path = DATA, first: int = 0) -> Table:
    """Return what becomes of the sweeps, and of the ring on several numbers of GPUs, of a file of collectives."""
    found = Table()
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))["collectives"]:
        name, columns = str(case["id"]), str(case["columns"])
        if columns.startswith("bytes:"):
            for size, value in case["data"].items():
                if value is None:
                    found.omit(name, _size(size), "no figure is stated")
            measured = read_sweep(case)
            if len(measured) > EVERY + first:
                found.rows += sweep_rows(name, measured, first)
            else:
                found.omit(name, f"{len(measured)} sizes", "too few to calibrate a line and predict others")
        elif "ring only" in columns:
            rings = {int(n): number(dict(enumerate(figures)), 1) for n, figures in case["data"].items()
                     if isinstance(figures, list) and figures[1:] and figures[1] is not None}  # fmt: skip
            if rings:
                found.rows += ring_rows(name, rings)
            for n in case["data"]:
                found.omit(name, f"{n} GPUs, default algorithm", "NVLS above 4 GPUs, whose switch adds up: not a ring")
                if n not in rings:
                    found.omit(name, f"{n} GPUs, ring", "no figure is stated")
        elif columns.startswith("n: [alpha"):
            found.omit(name, "alpha and beta", "a fit, and for n = 2 and 4 faster than the wire allows")
        else:
            found.omit(name, ", ".join(map(str, case["data"])), "single figures: nothing is left to calibrate on")
    return found


def rows(path: Path = DATA, first: int = 0) -> list[Row]:
    """Return the sweeps, and the ring on several numbers of GPUs, of a file of collectives."""
    return table(path, first).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the figures of a file of collectives that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    show(rows(), left_out())
