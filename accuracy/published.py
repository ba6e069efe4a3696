"""Published weak scaling: throughput of many machines from measurements of one machine or one device.

What a prediction knows: model, batch, machines, nominal rates, the algorithm, and rows of one full machine or less.

* All-reduce and TensorFlow's servers: the row of one full machine gives the compute time, namely what is left of it
  after the simulated exchange inside the machine. Where the case ends at one machine, the one-device row gives it.
* MXNet's servers: the one-device row gives the compute time and the one-machine row the rate at which the devices copy
  to the one that adds up (kvstore ``dist_device_sync``), since that exchange is what slows the machine down; the
  servers take the time of their one thread's memory traffic.
* Theano-MPI, and TensorFlow's replicated variables: one NCCL call per tensor after the backward pass; compute from the
  one-device row. TensorFlow's communication stream waits for all that has been launched on the compute stream when the
  call is made (``ThenWaitFor`` in tensorflow/contrib/nccl/kernels/nccl_manager.cc), and launches run far ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from scipy.optimize import brentq

from accuracy.machines import FIRST_COME, KVSTORE, NVLINK, device_of, host_of, nic_efficiency
from accuracy.rows import Row, show
from ddlsim import AllReduce, Cluster, DdpBuckets, Measured, ParameterServer, load_cluster, simulate
from ddlsim.cluster import star
from ddlsim.cluster.nodes import Graph
from ddlsim.strategies import Strategy
from ddlsim.units import parse
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload

__all__ = ["DATA", "MODELS", "Run", "TensorByTensor", "calibrated", "predict", "read", "rows", "runs", "solve"]

FOLDER = Path(__file__).with_name("data")
DATA = FOLDER / "cases.yaml"
MODELS = {
    "AlexNet (MXNet symbol)": str(FOLDER / "mxnet-alexnet.toml"),
    "AlexNet": "alexnet",
    "GoogLeNet with auxiliary heads": "googlenet",
    "Inception-v3": "inception-v3",
    "ResNet-50": "resnet50",
    "ResNet-50 v1.5": "resnet50",
    "ResNet-101": "resnet101",
    "ResNet-152": "resnet152",
    "ResNeXt-101 32x8d": "resnext101-32x8d",
    "VGG-16": "vgg16",
}
LATENCY = {"rdma": 1e-6, "tcp": 25e-6}  # s per link; two links between machines


@dataclass(frozen=True)
class TensorByTensor:
    """Exchange every tensor by itself, one after the other, after the backward pass."""

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return tuple(Bucket(nbytes, 0, 0, i) for i, nbytes in enumerate(workload.tensor_nbytes.tolist()))


@dataclass(frozen=True, eq=False)
class Run:
    """One published run. `measured` maps devices to s per step."""

    case: Mapping[str, Any]
    model: str
    batch: int
    per_node: int
    measured: dict[int, float]

    @property
    def text(self) -> str:
        """System and algorithm, in small letters."""
        return f"{self.case['system']} {' '.join(map(str, self.case['algorithm'].values()))}".lower()

    @property
    def n_nodes(self) -> int:
        return max(1, max(self.measured) // self.per_node)

    @property
    def kvstore(self) -> bool:
        """Whether devices add up at one of them, as in MXNet's distributed key-value store."""
        return self.text.startswith("mxnet") and "parameter server" in self.text


def read(case: Mapping[str, Any]) -> Run | None:
    """Return a case of weak scaling, None for any other (or one whose model or batch is not stated)."""
    algorithm, worker, topology = (case.get(name) for name in ("algorithm", "worker", "topology"))
    if not (isinstance(case.get("model"), Mapping) and isinstance(worker, Mapping) and isinstance(topology, Mapping)):
        return None
    model, batch = MODELS.get(case["model"]["name"]), worker.get("batch")
    weak = isinstance(algorithm, Mapping) and str(algorithm.get("scaling", "")).startswith("weak")
    if not weak or model is None or batch is None or "gpus_per_node" not in topology:
        return None
    measured = {row["n"]: seconds for row in case["measured"] if (seconds := _seconds(row, batch)) is not None}
    return Run(case, model, batch, topology["gpus_per_node"], measured) if len(measured) > 1 else None


def _seconds(row: Mapping[str, float], batch: int) -> float | None:
    """Return the s of a step, however the row says it."""
    if "throughput" in row:
        return row["n"] * batch / row["throughput"]
    if "compute_s_per_5120" in row:
        return (row["compute_s_per_5120"] + row["comm_s_per_5120"]) / row["iterations_per_5120"]
    return row.get("t_step_s_bucket25MB")


# ---------------------------------------------------------------- the simulated run


def _cluster(run: Run, m: int, copies: float | None) -> Cluster:
    """Return `m` machines on a switch without contention; `copies` as in :func:`_kvstore_machine`."""
    host = host_of(run.case)
    efficiency = nic_efficiency(run.case)
    latency = LATENCY["rdma" if efficiency == 0.96 else "tcp"]
    gbps = run.case["topology"].get("nic_gbps") or 10  # without a row of several machines it plays no part
    graph = star(m, bandwidth=f"{gbps / host.n_nics} Gbit/s", latency=latency, efficiency=efficiency, host=host)
    if device_of(run.case) == "p100":
        _single_links(graph)
    if run.kvstore:
        _kvstore_machine(graph, host.n_gpus, copies)
    return load_cluster(graph)


def _single_links(graph: Graph) -> None:
    """Make the mesh that of a DGX-1 with P100: the same neighbours, one of a device's four NVLinks to each."""
    for _, _, data in graph.edges(data=True):
        if data["kind"] == "nvlink":
            data["bandwidth"] = parse(NVLINK["p100"], "bandwidth")


def _kvstore_machine(graph: Graph, n_gpus: int, copies: float | None) -> None:
    """Set how fast a machine's devices copy to and from the one that adds up: `copies` bytes/s, all of them together.

    That device copies to and from the memory of the machine at the full rate of PCIe.
    """
    for a, b, data in graph.edges(data=True):
        leader = a.endswith(".gpu0") or b.endswith(".gpu0")
        if data["kind"] == "pcie" and not leader and (".gpu" in a or ".gpu" in b) and copies is not None:
            data["bandwidth"] = copies / (n_gpus - 1)


def _strategy(run: Run, m: int) -> Strategy:
    if run.kvstore:
        return ParameterServer(m, "colocated", FIRST_COME, local_reduction="star", work=KVSTORE)
    if "parameter server" in run.text or "parameter_server" in run.text:
        stated = run.case["algorithm"].get(f"parameter_servers_at_{m * run.per_node}_gpus", m)
        return ParameterServer(stated, "colocated", local_reduction=True)
    if "no overlap" in run.text or run.text.startswith("tensorflow"):
        return AllReduce("ring", TensorByTensor())  # type: ignore[arg-type]
    if run.text.startswith("paddle"):  # fused gradients of 32 MB
        return AllReduce("ring", DdpBuckets("32 MiB", "32 MiB"))
    return AllReduce("ring", "ddp")


def _step(run: Run, n: int, compute: float, copies: float | None = None) -> float:
    m = max(1, n // run.per_node)
    return simulate(
        _cluster(run, m, copies), run.model, _strategy(run, m), run.batch, workers=n, steps=1, warmup=0,
        compute=Measured(compute, run.batch),
    ).step_time  # fmt: skip


def solve(error: Callable[[float], float], low: float, high: float) -> float:
    """Return where `error` changes its sign, or the end at which it is smaller."""
    at_low, at_high = error(low), error(high)
    if at_low * at_high > 0.0:
        return low if abs(at_low) < abs(at_high) else high
    return float(brentq(error, low, high, rtol=1e-5))


def base(run: Run) -> list[int]:
    """Return the rows (numbers of devices) that calibrate a run."""
    one, full = min(run.measured), run.per_node
    if run.n_nodes == 1:
        return [one]
    return [one, full] if run.kvstore and one < full else [full]


@cache
def calibrated(run: Run) -> tuple[float, float | None]:
    """Return the s of compute and the bytes/s of copies inside a machine, if these are known."""
    rows = base(run)
    if len(rows) == 2:
        one, full = rows
        compute = run.measured[one]
        rate = solve(lambda rate: _step(run, full, compute, rate) / run.measured[full] - 1.0, 0.5e9, 12e9)
        return compute, rate
    n = rows[0]
    seconds = run.measured[n]
    return solve(lambda compute: _step(run, n, compute) / seconds - 1.0, 0.5 * seconds, seconds), None


def predict(run: Run, n: int) -> float:
    """Return the predicted s of a step on `n` devices."""
    compute, copies = calibrated(run)
    return _step(run, n, compute, copies)


@cache
def runs(path: Path = DATA) -> tuple[Run, ...]:
    """Return all weak-scaling runs of a file of cases."""
    cases = yaml.safe_load(path.read_text())["cases"]
    return tuple(run for case in cases if (run := read(case)) is not None)


def rows(path: Path = DATA, most: float = math.inf) -> list[Row]:
    """Return the rows of all weak-scaling runs, in s per step: those that calibrate, and what is beyond them.

    most  devices; rows of more are left out
    """
    found = []
    for run in runs(path):
        known = base(run)
        for n, seconds in sorted(run.measured.items()):
            if n in known or max(known) < n <= most:
                unit = "GPU" if n == 1 else "GPUs"
                predicted = predict(run, n)
                found.append(Row(run.case["id"], f"{n} {unit}", seconds, predicted, "s", n in known))
    return found


if __name__ == "__main__":
    show(rows())
