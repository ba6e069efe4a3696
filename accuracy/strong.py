"""Strong scaling in MLPerf logs and a vendor's table: the batch of a device shrinks as their number grows.

A device's step is affine in its batch, t(b) = c0 + c1 b. Where a series has three batches, the rows with the largest
and the smallest number of devices give c0 and c1 (so that the simulation, exchange included, reproduces both), and the
ones between are predicted. Where it has two, its one-machine row gives c1, and c0 is that of the same model in the
other MLPerf series; without another one the series cannot be predicted and is left out.
BERT's series have nothing of this kind in common beyond that rule: small runs skip padding, large ones do not.

NVIDIA's table of BERT keeps the global batch by accumulating gradients: its one-machine row gives a micro-step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accuracy.machines import RDMA_EFFICIENCY
from accuracy.published import DATA
from accuracy.rows import Row, show
from ddlsim import Affine, AllReduce, Cluster, HorovodFusion, Measured, load_cluster, simulate
from ddlsim.cluster import MultiGpu, star

__all__ = ["Point", "Series", "calibrated", "predict", "read", "rows", "step"]

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
    """Rows of one model on one kind of machine, ascending in devices."""

    id: str
    model: str
    machine: str
    points: tuple[Point, ...]


def _machine(text: str) -> str:
    text = text.lower().replace(" ", "-")
    return next((name for name in MACHINES if name in text), "dgx-1")


def read(path: Path = DATA) -> list[Series]:
    """Return MLPerf's series. BERT's one with gradient accumulation is left out: its micro-batch is not stated."""
    found = []
    for case in yaml.safe_load(path.read_text())["cases"]:
        if not str(case["system"]).startswith("MLPerf"):
            continue
        by_machine: dict[str, list[Point]] = {}
        for row in case["measured"]:
            point = Point(row["n"], round(row["global_batch"] / row["n"]), row["global_batch"] / row["throughput"])
            by_machine.setdefault(_machine(row.get("device", case["system"])), []).append(point)
        for machine, points in by_machine.items():
            if len(points) > 1:
                found.append(Series(case["id"], MODELS[case["model"]["name"]], machine, tuple(points)))
    return found


def _cluster(machine: str, n: int) -> Cluster:
    per_node, inside, nvlink, n_nics, gbps = MACHINES[machine]
    host = MultiGpu(
        per_node, inside, DEVICES[machine], nvlink_bandwidth=nvlink, n_pcie_switches=n_nics, n_nics=n_nics,
        pcie_bandwidth="24 GB/s" if machine == "a100" else "12 GB/s",
    )  # fmt: skip
    network = star(
        max(1, n // per_node), bandwidth=f"{gbps} Gbit/s", latency=LATENCY, efficiency=RDMA_EFFICIENCY, host=host
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


def calibrated(series: Series) -> Affine:
    """Return the compute time with which the first and the last row are reproduced."""
    first, last = series.points[0], series.points[-1]
    t_first, t_last = first.seconds, last.seconds
    for _ in range(8):
        compute = _affine((first.batch, t_first), (last.batch, t_last))
        errors = [point.seconds - step(series, point, compute) for point in (first, last)]
        if max(abs(error) / first.seconds for error in errors) < 1e-4:
            break
        t_first, t_last = t_first + errors[0], t_last + errors[1]
    return compute


def predict(series: Series, point: Point, c0: float) -> float:
    """Return the s of a step from the first row and a known c0, the exchange inside a machine being hidden."""
    first = series.points[0]
    return step(series, point, Affine(c0, (first.seconds - c0) / first.batch))


def rows(path: Path = DATA) -> list[Row]:
    """Return MLPerf's series, in s per step."""
    found: list[Row] = []
    every = read(path)
    known = {series.model: (calibrated(series), series) for series in every if len(series.points) > 2}
    for series in every:
        if series.model not in known:
            continue
        compute, source = known[series.model]
        own = series is source
        for i, point in enumerate(series.points):
            fitted = i == 0 or (own and i == len(series.points) - 1)
            if own:
                seconds = step(series, point, compute)
            else:
                seconds = point.seconds if fitted else predict(series, point, compute.c0)
            what = f"{series.machine.upper()}, {point.n} GPUs, batch {point.batch}"
            note = "" if own or fitted else f"c0 = {compute.c0 * 1e3:.3g} ms of the series on {source.machine.upper()}"
            found.append(Row(series.id, what, point.seconds, seconds, "s", fitted, note))
    return found + _accumulating(path)


def _accumulating(path: Path) -> list[Row]:
    """Return series with a fixed global batch, reached by gradient accumulation ("... 32 to 1")."""
    found = []
    for case in yaml.safe_load(path.read_text())["cases"]:
        algorithm = case.get("algorithm", {})
        if "accumulation 32 to 1" not in str(algorithm.get("sync")):
            continue
        global_batch = int(str(algorithm["scaling"]).split("global batch ")[1].rstrip(")"))
        found += _accumulated(case, global_batch, most=32)
    return found


def _accumulated(case: Mapping[str, Any], global_batch: int, most: int) -> list[Row]:
    first = case["measured"][0]
    per_node = case["topology"]["gpus_per_node"]
    micro = global_batch // (per_node * first["n"] * most)
    whole = global_batch / first["throughput"]
    found = []
    for row in case["measured"]:
        n, measured = row["n"], global_batch / row["throughput"]
        fitted = row is first
        seconds = measured
        if not fitted:
            seconds = simulate(
                _cluster("a100", n * per_node), MODELS[case["model"]["name"]], AllReduce("hierarchical", "ddp"), micro,
                steps=1, warmup=0, accumulation=most // n, precision="fp16", gradient_dtype="fp16",
                compute=Measured(whole / most, micro),
            ).step_time  # fmt: skip
        found.append(Row(case["id"], f"{n * per_node} GPUs", measured, seconds, "s", fitted))
    return found


if __name__ == "__main__":
    show(rows())
