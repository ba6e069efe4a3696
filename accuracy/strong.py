"""Strong scaling in MLPerf logs and a vendor's table: the batch of a device shrinks as their number grows.

A device's step is affine in its batch, t(b) = c0 + c1 b. Where a series has three rows, the one with the fewest devices
and the one with the most that has another batch give c0 and c1 (so that the simulation, exchange included, reproduces
both), and the others are predicted. Where it has two, its first row gives c1, and c0 is the median of what the series
of the same model with three rows say, those of its own software release if there are any, as c0 is the software's;
without one, a second batch cannot be predicted. Where all rows have one batch on
each device, that of the fewest devices is all that is needed.
BERT's series have nothing of this kind in common beyond that rule: small runs skip padding, large ones do not.

NVIDIA's table of BERT keeps the global batch by accumulating gradients: its rows with the fewest and the most devices
give the times of a micro-step and of an update (the stack's `step_time`); of two rows the first one gives a micro-step.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from accuracy.machines import RDMA_EFFICIENCY
from accuracy.published import DATA, cases
from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import Affine, AllReduce, Cluster, HorovodFusion, Measured, load_cluster, load_stack, simulate
from ddlsim.cluster import MultiGpu, star

__all__ = ["Point", "Series", "calibrated", "claims", "left_out", "other", "read", "rows", "step", "table"]

LATENCY = 1e-6
#: GPUs, bytes/s into the switch of a machine, network interfaces of 1e9 bits/s each
MACHINES = {
    "a100": (8, "nvswitch", 240e9, 8, 200),  # 12 NVLinks of 20 GB/s (NCCL's topology model)
    "dgx-2h": (16, "nvswitch", 120e9, 8, 100),  # 6 NVLinks
    "dgx-1": (8, "hybrid_cube_mesh", 20e9, 4, 100),
}
DEVICES = {"a100": "a100-40g", "dgx-2h": "v100-32g", "dgx-1": "v100"}
MODELS = {"ResNet-50 v1.5": "resnet50", "BERT-Large": "bert-large"}


@dataclass(frozen=True)
class Point:
    """A row: devices, samples per device, measured s per step."""

    n: int
    batch: int
    seconds: float


@dataclass(frozen=True)
class Series:
    """Rows of one model on one kind of machine, ascending in devices, by a `release` of the software."""

    id: str
    release: str
    model: str
    machine: str
    points: tuple[Point, ...]


def _machine(text: str) -> str:
    words = text.lower().replace(" ", "-")
    found = next((name for name in MACHINES if name in words), None)
    if found is None:
        raise UnpredictableError(f"machines of this kind are not described: {text}")
    return found


def claims(case: Mapping[str, Any]) -> bool:
    """Whether a case of the data file is one of strong scaling."""
    return str(case.get("system")).startswith("MLPerf") or "accumulation" in str(_algorithm(case).get("sync"))


def _algorithm(case: Mapping[str, Any]) -> Mapping[str, Any]:
    found = case.get("algorithm")
    return found if isinstance(found, Mapping) else {}


def _name(case: Mapping[str, Any]) -> str:
    """Return the model's name in the catalogue."""
    model = case.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    if name not in MODELS:
        raise UnpredictableError(f"model {name!r} is not described")
    return MODELS[name]


def read(path: Path = DATA, omitted: Table | None = None) -> list[Series]:
    """Return MLPerf's series; what says no step time goes to `omitted`."""
    left = omitted if omitted is not None else Table()
    found = []
    for case in cases(path):
        if not str(case.get("system")).startswith("MLPerf"):
            continue
        by_machine: dict[str, list[Point]] = {}
        for row in case.get("measured") or []:
            where = str(row.get("device") or case["system"])
            try:
                _name(case)
                n, batch = number(row, "n"), number(row, "global_batch")
                point = Point(int(n), round(batch / n), batch / number(row, "throughput"))
                accumulates = re.search(r"(\S+) uses \d+ accumulation", str(case.get("note")))
                if accumulates is not None and accumulates[1] in where.split():
                    raise UnpredictableError("gradients are accumulated, but the size of a micro-batch is not stated")
                by_machine.setdefault(_machine(where), []).append(point)
            except UnpredictableError as error:
                left.omit(str(case["id"]), f"{where}, {row.get('n')} GPUs", str(error))
        for machine, points in by_machine.items():
            release = " ".join(str(case["system"]).split()[:3])  # "MLPerf Training v0.7"
            ordered = tuple(sorted(points, key=lambda p: p.n))
            found.append(Series(str(case["id"]), release, _name(case), machine, ordered))
    return found


def _cluster(machine: str, n: int) -> Cluster:
    per_node, inside, nvlink, n_nics, gbps = MACHINES[machine]
    host = MultiGpu(
        per_node, inside, DEVICES[machine], nvlink_bandwidth=nvlink, n_pcie_switches=n_nics, n_nics=n_nics,
        pcie_bandwidth="24 GB/s" if machine == "a100" else "12 GB/s",
    )  # fmt: skip
    network = star(
        math.ceil(n / per_node), bandwidth=f"{gbps} Gbit/s", latency=LATENCY, efficiency=RDMA_EFFICIENCY, host=host
    )
    return load_cluster(network)


def step(series: Series, point: Point, compute: Affine) -> float:
    """Return the simulated s of a step: gradients in fp16, fused by Horovod, reduced inside machines first."""
    return simulate(
        _cluster(series.machine, point.n), series.model, AllReduce("hierarchical", HorovodFusion()), point.batch,
        workers=point.n, steps=1, warmup=0, precision="fp16", gradient_dtype="fp16", compute=compute,
    ).step_time  # fmt: skip


def _affine(first: tuple[int, float], last: tuple[int, float]) -> Affine:
    """Return the line through two (batch, s)."""
    c1 = max(0.0, (first[1] - last[1]) / (first[0] - last[0]))
    return Affine(max(0.0, first[1] - c1 * first[0]), c1)


def other(series: Series) -> Point | None:
    """Return the row with the most devices whose batch per device is not that of the first row, if there is one."""
    return next((point for point in series.points[::-1] if point.batch != series.points[0].batch), None)


@cache
def calibrated(series: Series) -> Affine:
    """Return the compute time with which the first row, and the last one with another batch, are reproduced."""
    first, last = series.points[0], other(series)
    if last is None:
        return _through(series, 0.0)
    t_first, t_last = first.seconds, last.seconds
    for _ in range(8):
        compute = _affine((first.batch, t_first), (last.batch, t_last))
        errors = [point.seconds - step(series, point, compute) for point in (first, last)]
        if max(abs(error) / first.seconds for error in errors) < 1e-4:
            break
        t_first, t_last = t_first + errors[0], t_last + errors[1]
    return compute


def _through(series: Series, c0: float) -> Affine:
    """Return the compute time of a known c0 with which the first row is reproduced."""
    first, whole = series.points[0], series.points[0].seconds
    for _ in range(8):
        compute = Affine(min(c0, whole), max(whole - c0, 0.0) / first.batch)
        error = first.seconds - step(series, first, compute)
        if abs(error) < 1e-4 * first.seconds:
            break
        whole += error
    return compute


@cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of the rows of strong scaling, in s per step."""
    found = Table()
    every = read(path, found)
    whole = {series: calibrated(series) for series in every if len(series.points) > 2 and other(series) is not None}
    for series in every:
        alike = {known: compute.c0 for known, compute in whole.items() if known.model == series.model}
        own = [c0 for known, c0 in alike.items() if known.release == series.release]
        same = own or list(alike.values())
        for i, point in enumerate(series.points):
            what = f"{series.machine.upper()}, {point.n} GPUs, batch {point.batch}"
            found.add(series.id, what, partial(_row, series, point, i, whole.get(series), same, what))
    for case in cases(path):
        if "accumulation" in str(_algorithm(case).get("sync")) and not str(case.get("system")).startswith("MLPerf"):
            _accumulating(case, found)
    return found


def _row(series: Series, point: Point, i: int, own: Affine | None, same: list[float], what: str) -> Row:
    first, last = series.points[0], other(series)
    if len(series.points) == 1:
        raise UnpredictableError("the only row of its series: nothing is left to calibrate on")
    note, fitted = "", i == 0
    if own is not None:
        compute, fitted = own, fitted or point is last
    elif last is None:
        compute = calibrated(series)
    elif same:
        c0 = statistics.median(same)
        compute = _through(series, c0)
        note = "" if fitted else f"c0 = {c0 * 1e3:.3g} ms of other series of this model"
    else:
        raise UnpredictableError("two batches, and no other series of this model tells the part that is fixed")
    return Row(
        series.id, what, point.seconds, step(series, point, compute), "s", fitted, note,
        unchanged=first.seconds * point.batch / first.batch, kind="run/all-reduce/strong",
    )  # fmt: skip


def rows(path: Path = DATA) -> list[Row]:
    """Return MLPerf's series and those with accumulated gradients, in s per step."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows of strong scaling that are not predicted."""
    return table(path).omitted


def _accumulating(case: Mapping[str, Any], found: Table) -> None:
    """Add a series with a fixed global batch, reached by gradient accumulation ("accumulation 32 to 1")."""
    name, points = str(case["id"]), []
    try:
        steps = re.search(r"accumulation (\d+) to \d+", str(_algorithm(case).get("sync")))
        batch = re.search(r"global batch (\d+)", str(_algorithm(case).get("scaling")))
        if steps is None or batch is None:
            raise UnpredictableError("micro-batches or global batch are not stated")
        most, global_batch = int(steps[1]), int(batch[1])
        model, per_node = _name(case), int(number(case.get("topology"), "gpus_per_node"))
        machine = _machine(f"{case['system']} {case.get('worker')}")
    except UnpredictableError as error:
        for row in case.get("measured") or []:
            found.omit(name, f"n = {row.get('n')}", str(error))
        return
    for row in case.get("measured") or []:
        try:
            points.append((int(number(row, "n")), global_batch / number(row, "throughput")))
        except UnpredictableError as error:
            found.omit(name, f"n = {row.get('n')}", str(error))
    points.sort()
    if not points:
        return
    first, whole = points[0]
    shared = [(n, seconds) for n, seconds in points if most * first % n == 0]
    last, shortest = shared[-1]
    micro = global_batch // (per_node * first * most)

    def step(n: int, seconds: float, update: float) -> float:
        return simulate(
            _cluster(machine, n * per_node), model, AllReduce("hierarchical", "ddp"), micro, steps=1, warmup=0,
            accumulation=most * first // n, precision="fp16", gradient_dtype="fp16", compute=Measured(seconds, micro),
            stack=dataclasses.replace(load_stack("pytorch"), step_time=update),
        ).step_time  # fmt: skip

    seconds, update = whole / most, 0.0
    for _ in range(2 if len(shared) > 2 else 0):  # both errors are linear in both times
        errors = whole - step(first, seconds, update), shortest - step(last, seconds, update)
        n_micro = most, most * first // last
        seconds += (errors[0] - errors[1]) / (n_micro[0] - n_micro[1])
        update = max(0.0, update + errors[1] - n_micro[1] * (errors[0] - errors[1]) / (n_micro[0] - n_micro[1]))
    for n, measured in points:
        what, fitted = f"{n * per_node} GPUs", n == first or (n == last and len(shared) > 2)
        if most * first % n:
            found.omit(name, what, f"{most * first} micro-batches cannot be shared by {n} machines")
            continue

        def make(n: int = n, measured: float = measured, what: str = what, fitted: bool = fitted) -> Row:
            note = f"an update takes {update * 1e3:.3g} ms" if fitted and n == last != first else ""
            predicted = step(n, seconds, update)
            return Row(name, what, measured, predicted, "s", fitted, note, unchanged=whole * first / n,
                       kind="run/all-reduce/strong")  # fmt: skip

        found.add(name, what, make)


if __name__ == "__main__":
    show(rows(), left_out())
