"""NCCL all-reduce sweeps: every third size calibrates, the others are predicted.

:func:`ddlsim.calibrate` reads every third size of a sweep, as somebody would who has that file and a cluster of eight
GPUs a machine: NCCL changes its protocol and algorithm with the size, so that its curve goes through all of them
(docs/calibration.md). Of the number of GPUs in a ring the smallest one calibrates the links between all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from accuracy.rows import Omitted, Row, Table, number, show
from ddlsim import calibrate, collective_time, load_cluster
from ddlsim.cluster import star
from ddlsim.cluster.calibrated import with_parameters
from ddlsim.measure import Measurement

__all__ = [
    "CLUSTER",
    "DATA",
    "left_out",
    "measured_as",
    "read_sweep",
    "ring_rows",
    "rows",
    "size_text",
    "sweep_rows",
    "table",
]

DATA = Path(__file__).with_name("data") / "collectives.yaml"
CLUSTER, PER_HOST, MOST = "dgx-a100-pod", 8, 160  # one sweep does not state its machines, and it hardly matters
EVERY = 3  # sizes 0, 3, 6, ... calibrate, or others as far apart
GIB = 2.0**30
NVLINK = "450 GB/s"  # data sheet of the H200, each way


def measured_as(nbytes: float, seconds: float, n_ranks: int, n_hosts: int) -> Measurement:
    """Return an all-reduce as a row of measurements."""
    return Measurement(
        experiment="collective", operation="all_reduce", n_ranks=n_ranks, n_hosts=n_hosts, nbytes=round(nbytes),
        median_s=seconds, backend="nccl",
    )  # fmt: skip


def read_sweep(case: Mapping[str, object]) -> dict[float, float]:
    """Return bytes -> s of a sweep, whose columns are "bytes: time_us" or "bytes: algbw_GBps" (1e9 bytes/s)."""
    data = case["data"]
    assert isinstance(data, dict)
    stated = {float(size): number(data, size) for size, value in data.items() if value is not None}
    if "time_us" in str(case["columns"]):
        return {size: value * 1e-6 for size, value in stated.items()}
    return {size: size / (value * 1e9) for size, value in stated.items()}


def sweep_rows(name: str, measured: Mapping[float, float], n_ranks: int, first: int = 0) -> list[Row]:
    """Return the sizes of a sweep, every third one from number `first` on as calibrated."""
    sizes, n_hosts = sorted(measured), math.ceil(n_ranks / PER_HOST) if n_ranks <= MOST else n_ranks
    known = sizes[first::EVERY]
    cluster = CLUSTER if n_ranks <= MOST else star(n_ranks, bandwidth=NVLINK, latency="2 us")
    calibration = calibrate([measured_as(size, measured[size], n_ranks, n_hosts) for size in known], cluster)
    found = []
    for size in sizes:
        time = calibration.time("all_reduce", size, n_ranks, n_hosts)
        around = None if size in known else (time.low * 1e6, time.high * 1e6)
        found.append(
            Row(name, size_text(size), measured[size] * 1e6, time.value * 1e6, "us", size in known, interval=around)
        )
    return found


def ring_rows(name: str, bus_bandwidth: Mapping[int, float]) -> list[Row]:
    """Return the bus bandwidth (GB/s) of a ring over several numbers of GPUs; the smallest number calibrates."""
    first, found = min(bus_bandwidth), []
    moved = {n: 2 * (n - 1) / n * 8 * GIB for n in bus_bandwidth}
    seconds = moved[first] / (bus_bandwidth[first] * 1e9)
    calibration = calibrate(
        [measured_as(8 * GIB, seconds, first, first)], star(first, bandwidth=NVLINK, latency=0.0)
    )  # fmt: skip
    values = {parameter.name: parameter.value for parameter in calibration.parameters}
    for n, measured in sorted(bus_bandwidth.items()):
        cluster = with_parameters(load_cluster(star(n, bandwidth=NVLINK, latency=0.0)), values)
        predicted = moved[n] / collective_time(cluster, "ring", 8 * GIB) * 1e-9
        what = f"{n} GPUs, 8 GiB, ring"
        found.append(Row(name, what, measured, predicted, "GB/s", n == first, kind="collective/ring/nvlink"))
    return found


def size_text(nbytes: float) -> str:
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
                    found.omit(name, size_text(size), "no figure is stated")
            measured, n_ranks = read_sweep(case), case.get("n")
            if len(measured) > EVERY + first:
                found.rows += sweep_rows(name, measured, n_ranks if isinstance(n_ranks, int) else PER_HOST, first)
            else:
                found.omit(name, f"{len(measured)} sizes", "too few to calibrate a line and predict others")
        elif "ring only" in columns:
            rings = {int(n): number(dict(enumerate(figures)), 1) for n, figures in case["data"].items()
                     if isinstance(figures, list) and figures[1:] and figures[1] is not None}  # fmt: skip
            if rings:
                found.rows += ring_rows(name, rings)
            for n in case["data"]:
                found.omit(
                    name,
                    f"{n} GPUs, default algorithm",
                    "above 4 GPUs NCCL uses NVLS, where the switch reduces: not a ring",
                )
                if n not in rings:
                    found.omit(name, f"{n} GPUs, ring", "no figure is stated")
        elif columns.startswith("n: [alpha"):
            found.omit(name, "alpha and beta", "a fit, which for n = 2 and 4 is faster than the link allows")
        else:
            found.omit(name, ", ".join(map(str, case["data"])), "single figures, so no row is left for calibration")
    return found


def rows(path: Path = DATA, first: int = 0) -> list[Row]:
    """Return the sweeps, and the ring on several numbers of GPUs, of a file of collectives."""
    return table(path, first).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the figures of a file of collectives that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    show(rows(), left_out())
