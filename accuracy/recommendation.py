"""NVIDIA's DLRM: several GPUs from the row of one.

The one-GPU row of a framework, machine and precision gives the efficiency of matrix products at its batch; memory is
streamed at 0.8 of its bandwidth and rows at random are read at 0.75 of that, as everywhere. At another batch products
have another efficiency: whole waves of whole tiles are made (NVIDIA, Matrix Multiplication Background User's Guide:
tiles of 256 x 128, 108 multiprocessors on an A100 and 80 on a V100), of which small products leave more empty; those of
the weights' gradients are split along the batch and leave none.

The layout is that of the code (dlrm/utils/distributed.py, dlrm/model/distributed.py): tables whole, the bottom MLP on
the first GPU for all samples, its results in the same all-to-all, the top MLP in DistributedDataParallel; every GPU
reads the indices of its own tables; plain SGD.

On a V100 the host launches each kernel, in the time of PyTorch of that year (stack "megatron-2021", fitted to steps of
Megatron-DeepSpeed). On an A100 it replays a CUDA graph; the GPU waits only for the launches of :data:`EXPOSED`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from scipy.optimize import brentq

from accuracy.machines import NVLINK_LATENCY, PCIE_LATENCY
from accuracy.rows import Omitted, Row, Table, UnpredictableError, show
from ddlsim import Cluster, EmbeddingParallel, Roofline, load_cluster, load_model, simulate
from ddlsim.cluster import MultiGpu, star
from ddlsim.workload.stacks import Stack, load_stack

__all__ = ["Point", "calibrated", "filled", "left_out", "predict", "read", "rows", "table"]

DATA = Path(__file__).with_name("data") / "dlrm.yaml"
TILE = (256, 128)
#: launches while the GPU idles (dlrm/scripts/main.py): after the wait at the beginning of a step, copies of two inputs
#: and the graph; in mixed precision after the wait for the check of the gradients (GradScaler.step), the update of the
#: MLPs, and the unscaling and update of the tables
EXPOSED = {"tf32": 3, "fp16": 6}


@dataclass(frozen=True)
class Machine:
    """Device, multiprocessors, and what leads into the switch (or is a link) between n devices, bytes/s."""

    device: str
    units: int
    inside: str
    nvlink: float
    n_gpus: int
    full: str  # what "full precision" computes in


MACHINES = {
    "dgx-a100": Machine("a100-80g", 108, "nvswitch", 240e9, 8, "tf32"),
    "dgx-2": Machine("v100-32g", 80, "nvswitch", 120e9, 16, "fp32"),
    "dgx-1": Machine("v100-32g", 80, "hybrid_cube_mesh", 20e9, 8, "fp32"),
}
MODELS = {"small": "dlrm-criteo", "large": "dlrm-criteo-large"}
STRATEGY = EmbeddingParallel("table-wise", table_optimizer="sgd", indices="local", bottom_mlp="one rank")


@dataclass(frozen=True)
class Point:
    """A row in one precision."""

    framework: str
    machine: str
    gpus: int
    size: str
    batch: int
    precision: str
    measured: float  # samples/s

    @property
    def stack(self) -> Stack:
        """The software, for the times of its launches."""
        if self.framework != "pytorch":
            return load_stack("pytorch")
        stack = load_stack("megatron-2021")
        graphs = MACHINES[self.machine].device.startswith("a100")
        idle = stack.forward_launch * EXPOSED.get(self.precision, 0)
        return replace(stack, forward_launch=0.0, backward_launch=0.0, step_time=idle) if graphs else stack


def read(path: Path = DATA, omitted: Table | None = None) -> list[Point]:
    """Return all points; what cannot be one goes to `omitted`."""
    left, points = omitted if omitted is not None else Table(), []
    for framework, machine, gpus, size, batch, full, mixed in yaml.safe_load(path.read_text(encoding="utf-8"))["rows"]:
        for name, measured in (("full", full), ("mixed", mixed)):
            what = f"{gpus} GPUs, {size}, {name} precision"
            if machine not in MACHINES or size not in MODELS:
                left.omit(f"{framework}_{machine}", what, "machine or size of the model is not described")
            elif not isinstance(measured, int | float):
                left.omit(f"{framework}_{machine}", what, "no figure is stated")
            else:
                precision = MACHINES[machine].full if name == "full" else "fp16"
                points.append(Point(framework, machine, gpus, size, batch, precision, float(measured)))
    return points


def filled(batch: int, units: int) -> float:
    """Return which share of what multiprocessors make at a batch is wanted, of all products of the MLPs' step."""
    wanted = made = 0.0
    for layer in load_model(MODELS["small"]).layers:
        if layer.type != "dense":
            continue
        inputs, outputs = layer.in_shape[0], layer.out_shape[0]
        for columns, count in ((outputs, 1), (inputs, int(layer.input_grad))):
            tiles = math.ceil(batch / TILE[0]) * math.ceil(columns / TILE[1])
            waves = math.ceil(tiles / units) * units * TILE[0] * TILE[1]
            wanted += count * layer.flops * batch
            made += count * layer.flops * batch * waves / (batch * columns)
        wanted += layer.flops * batch
        made += layer.flops * batch
    return wanted / made


def _cluster(machine: Machine) -> Cluster:
    latency = NVLINK_LATENCY / (2 if machine.inside == "nvswitch" else 1)
    host = MultiGpu(machine.n_gpus, machine.inside, machine.device, nvlink_bandwidth=machine.nvlink,
                    nvlink_latency=latency, pcie_latency=PCIE_LATENCY,
                    n_pcie_switches=4 if machine.n_gpus == 8 else 8)  # fmt: skip
    return load_cluster(star(1, bandwidth="100 Gbit/s", latency="1 us", host=host))


def predict(point: Point, efficiency: float) -> float:
    """Return the samples/s of a point with this efficiency of matrix products."""
    machine = MACHINES[point.machine]
    result = simulate(
        _cluster(machine), MODELS[point.size], STRATEGY, workers=point.gpus, batch_size=point.batch * point.gpus,
        precision=point.precision, compute=Roofline(efficiency), stack=point.stack, steps=4,
        warmup=2,
    )  # fmt: skip
    return result.throughput


@functools.cache
def calibrated(point: Point) -> float:
    """Return the efficiency of matrix products with which the prediction of a one-GPU point is what was measured."""
    found: float = brentq(lambda e: predict(point, e) / point.measured - 1.0, 0.05, 1.0, xtol=1e-5)
    return found


@functools.cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of the rows of a file: those of one GPU calibrate."""
    found = Table()
    points = sorted(read(path, found), key=lambda point: point.gpus)
    one = {_key(point): point for point in points if point.gpus == 1}
    for point in points:
        many = f"{point.gpus} GPU{'s' if point.gpus > 1 else ''}, {point.precision}"
        found.add(f"{point.framework}_{point.machine}", many, functools.partial(_row, point, one, many))
    return found


def _key(point: Point) -> tuple[str, str, str]:
    return point.framework, point.machine, point.precision


def _row(point: Point, one: dict[tuple[str, str, str], Point], what: str) -> Row:
    if _key(point) not in one:
        raise UnpredictableError("no row of one GPU of this framework, machine and precision")
    first, units = one[_key(point)], MACHINES[point.machine].units
    efficiency = calibrated(first) * filled(point.batch, units) / filled(first.batch, units)
    return Row(
        f"{point.framework}_{point.machine}", what, point.measured, predict(point, efficiency), "samples/s",
        point.gpus == 1, f"efficiency of products {efficiency:.3f}", unchanged=first.measured * point.gpus,
        kind="run/embedding-parallel",
    )  # fmt: skip


def rows(path: Path = DATA) -> list[Row]:
    """Return all rows: those of one GPU calibrate."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    show(rows(), left_out())
