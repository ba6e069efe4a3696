"""Published weak scaling: throughput of many machines from measurements of one machine or one device.

What a prediction knows: model, batch, machines, nominal rates, the algorithm, and rows of one full machine or less.

* All-reduce and TensorFlow's servers: the row of one full machine gives the compute time, namely what is left of it
  after the simulated exchange inside the machine. Where the case ends at one machine, the one-device row gives it.
* MXNet's servers: the one-device row gives the compute time and the one-machine row the rate at which the devices copy
  to the one that adds up (kvstore ``dist_device_sync``), since that exchange is what slows the machine down; the
  servers take the time of their one thread's memory traffic.
* Theano-MPI: one NCCL call per tensor after the backward pass; compute from the one-device row. TensorFlow's replicated
  variables are reduced layer by layer beside the backward pass.
* Updates of several devices take the fixed time of the stacks "paddle-amp" (Paddle in mixed precision) and
  "tensorflow-distributed" (a distributed session of TensorFlow).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from scipy.optimize import brentq

from accuracy.machines import FIRST_COME, HOST_EFFICIENCY, NVLINK, RDMA_EFFICIENCY, device_of, host_of, nic_efficiency
from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import AllReduce, Cluster, DdpBuckets, Measured, ParameterServer, Spread, load_cluster, simulate
from ddlsim.cluster import star
from ddlsim.cluster.nodes import Graph
from ddlsim.runtime.server_work import EARLY_MXNET_SERVERS, TENSORFLOW_SERVERS
from ddlsim.strategies import Strategy
from ddlsim.units import parse
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload
from ddlsim.workload.contention import BESIDE_KERNELS, NO_SLOWDOWN
from ddlsim.workload.input import MXNET_INPUT

__all__ = [
    "DATA", "MODELS", "Run", "TensorByTensor", "base", "calibrated", "cases", "left_out", "predict", "read", "rows",
    "runs", "solve", "table",
]  # fmt: skip

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
#: what the fixed times of stacks come from
GAVE_STEP_TIME = {("paddle_v100_resnet50_amp_b64", 8), ("tf_k80_ps_inception3", 8), ("tf_k80_ps_resnet152", 8)}
BUCKETS = re.compile(r"t_step_s_bucket(\d+)MB(_p75)?$")


@dataclass(frozen=True)
class TensorByTensor:
    """Exchange every tensor by itself, one after the other, after the backward pass."""

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return tuple(Bucket(nbytes, 0, 0, i) for i, nbytes in enumerate(workload.tensor_nbytes.tolist()))


@dataclass(frozen=True, eq=False)
class Run:
    """One published run. `measured` maps devices to s per step; `name` is the case's, with the column if it has more.

    bucket_mb  MiB of PyTorch's buckets, where the column is of another size than the default; None: the default
    """

    case: Mapping[str, Any]
    model: str
    batch: float
    per_node: int
    measured: dict[int, float]
    name: str
    bucket_mb: float | None = None

    @property
    def text(self) -> str:
        """System and algorithm, in small letters."""
        return f"{self.case['system']} {' '.join(map(str, self.case['algorithm'].values()))}".lower()

    @property
    def n_nodes(self) -> int:
        return math.ceil(max(self.measured) / self.per_node)

    @property
    def overlaps(self) -> bool:
        """Whether kernels of a communication library run beside those that compute."""
        return ("overlap" in self.text and "no overlap" not in self.text) or self.replicated

    @property
    def replicated(self) -> bool:
        """Whether NCCL reduces TensorFlow's replicated variables."""
        return self.text.startswith("tensorflow") and "parameter server" not in self.text.replace("_", " ")

    @property
    def stack(self) -> str | None:
        """The software, where its fixed times are known."""
        worker = self.case.get("worker")
        mixed = isinstance(worker, Mapping) and worker.get("precision") == "amp"
        if "distributed_replicated" in self.text:
            return "tensorflow-distributed"
        return "paddle-amp" if mixed and self.text.startswith("paddle") else None

    @property
    def kvstore(self) -> bool:
        """Whether devices add up at one of them, as in MXNet's distributed key-value store."""
        return self.text.startswith("mxnet") and "parameter server" in self.text


def read(case: Mapping[str, Any]) -> tuple[tuple[Run, ...], list[Omitted]]:
    """Return the columns of a case of weak scaling, and its figures that say no step time.

    Raises :class:`UnpredictableError`, saying why, for any other case.
    """
    algorithm, topology, model = (case.get(name) for name in ("algorithm", "topology", "model"))
    if not (isinstance(algorithm, Mapping) and str(algorithm.get("scaling", "")).startswith("weak")):
        raise UnpredictableError(
            "the source does not say that this is weak scaling, with the same batch on every device"
        )
    if not isinstance(model, Mapping):
        raise UnpredictableError("several models in one case, without a one-machine step time of each")
    if model.get("name") not in MODELS:
        raise UnpredictableError(f"model {model.get('name')!r} is not described")
    batch, per_node = number(case.get("worker"), "batch"), int(number(topology, "gpus_per_node"))
    omitted: list[Omitted] = []
    measured = case.get("measured") or []
    columns = list(dict.fromkeys(key for row in measured for key in row if _is_seconds(key))) or [""]
    found = []
    for column in columns:
        size = BUCKETS.match(column)
        default = size is None or float(size[1]) == 25.0
        name = str(case["id"]) + ("" if default else f" ({size[1]} MiB buckets{', p75' if size[2] else ''})")
        seconds: dict[int, float] = {}
        for row in measured:
            try:
                n = int(number(row, "n")) * (per_node if "n counts nodes" in str(case.get("unit")) else 1)
                seconds[n] = _seconds(row, column, n, batch)
            except UnpredictableError as error:
                omitted.append(Omitted(name, f"n = {row.get('n')}", str(error)))
        if seconds:
            found.append(
                Run(case, MODELS[model["name"]], batch, per_node, seconds, name, None if default else float(size[1]))
            )
    return tuple(found), omitted


def _is_seconds(key: str) -> bool:
    return bool(BUCKETS.match(key)) or key == "t_step_s"


def _seconds(row: Mapping[str, float], column: str, n: int, batch: float) -> float:
    """Return the s of a step, however the row says it."""
    if column:
        return number(row, column)
    if "compute_s_per_5120" in row:
        beside = 0.0 if row.get("comm_s_per_5120") == 0 else number(row, "comm_s_per_5120")
        return (number(row, "compute_s_per_5120") + beside) / number(row, "iterations_per_5120")
    return n * batch / number(row, "throughput")


# ---------------------------------------------------------------- the simulated run


def _cluster(run: Run, m: int, copies: float | None) -> Cluster:
    """Return `m` machines on a switch without contention; `copies` as in :func:`_kvstore_machine`."""
    host = host_of(run.case)
    efficiency = nic_efficiency(run.case)
    latency = LATENCY["rdma" if efficiency in (RDMA_EFFICIENCY, HOST_EFFICIENCY) else "tcp"]
    gbps = number(run.case["topology"], "nic_gbps") if m > 1 else 10.0
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
        return ParameterServer(m, "colocated", FIRST_COME, local_reduction="star", work=EARLY_MXNET_SERVERS)
    if "parameter server" in run.text or "parameter_server" in run.text:
        stated = run.case["algorithm"].get(f"parameter_servers_at_{m * run.per_node}_gpus", m)
        return ParameterServer(stated, "colocated", local_reduction=True, work=TENSORFLOW_SERVERS)
    if "no overlap" in run.text:
        return AllReduce("ring", TensorByTensor())
    if run.replicated:
        return AllReduce("ring", "layer")
    if run.bucket_mb is not None:
        return AllReduce("ring", DdpBuckets(run.bucket_mb * 2**20, run.bucket_mb * 2**20))
    if run.text.startswith("paddle"):  # fused gradients of 32 MB
        return AllReduce("ring", DdpBuckets("32 MiB", "32 MiB"))
    return AllReduce("ring", "ddp")


def _step(run: Run, n: int, compute: float, copies: float | None = None) -> float:
    m = math.ceil(n / run.per_node)
    return simulate(
        _cluster(run, m, copies), run.model, _strategy(run, m), round(run.batch), workers=n, steps=1, warmup=0,
        compute=Measured(compute, round(run.batch)), speed=Spread(), stack=run.stack,
        overlap_slowdown=BESIDE_KERNELS if run.overlaps else NO_SLOWDOWN, input=MXNET_INPUT if run.kvstore else None,
    ).step_time  # fmt: skip


def solve(error: Callable[[float], float], low: float, high: float) -> float:
    """Return where `error` changes its sign, or the end at which it is smaller."""
    at_low, at_high = error(low), error(high)
    if at_low * at_high > 0.0:
        return low if abs(at_low) < abs(at_high) else high
    return float(brentq(error, low, high, rtol=1e-5))


def base(run: Run, machine: bool = True) -> list[int]:
    """Return the rows (numbers of devices) that calibrate a run: of one full `machine`, or of one device.

    Raises :class:`UnpredictableError` where there is none.
    """
    one, full = min(run.measured), run.per_node
    if not machine or max(run.measured) <= run.per_node:
        if one != 1:
            raise UnpredictableError("no row of one device")
        return [one]
    if full not in run.measured:
        raise UnpredictableError("no row of one full machine")
    return [one, full] if run.kvstore and one == 1 < full else [full]


@cache
def calibrated(run: Run, machine: bool = True) -> tuple[float, float | None]:
    """Return the s of compute and the bytes/s of copies inside a machine, if these are known."""
    rows = base(run, machine)
    if len(rows) == 2:
        one, full = rows
        compute = run.measured[one]
        rate = solve(lambda rate: _step(run, full, compute, rate) / run.measured[full] - 1.0, 0.5e9, 12e9)
        return compute, rate
    n = rows[0]
    seconds = run.measured[n]
    return solve(lambda compute: _step(run, n, compute) / seconds - 1.0, 0.5 * seconds, seconds), None


def predict(run: Run, n: int, machine: bool = True) -> float:
    """Return the predicted s of a step on `n` devices, from one full `machine` or from one device."""
    compute, copies = calibrated(run, machine)
    return _step(run, n, compute, copies)


def cases(path: Path = DATA) -> list[dict[str, Any]]:
    """Return the cases of a file."""
    return [case for case in yaml.safe_load(path.read_text(encoding="utf-8"))["cases"] if isinstance(case, dict)]


@cache
def runs(path: Path = DATA) -> tuple[Run, ...]:
    """Return all weak-scaling runs of a file of cases; :mod:`accuracy.coverage` says why others are none."""
    found: list[Run] = []
    for case in cases(path):
        with suppress(UnpredictableError):
            found += read(case)[0]
    return tuple(found)


@cache
def table(path: Path = DATA, most: float = math.inf, machine: bool = True) -> Table:
    """Return what becomes of the figures of all weak-scaling runs, in s per step: from one full `machine`, or device.

    most  devices; rows of more are left out
    """
    found = Table()
    for run in runs(path):
        try:
            known = base(run, machine)
        except UnpredictableError as error:
            for n in sorted(run.measured):
                found.omit(run.name, f"{n} GPUs", str(error))
            continue
        for n in sorted(run.measured):
            what = f"{n} GPU" if n == 1 else f"{n} GPUs"
            if n < max(known) and n not in known:
                found.omit(run.name, what, "fewer devices than the calibrated row; predicted from one device")
            elif n <= most:
                found.add(run.name, what, partial(_row, run, n, what, known, machine))
    return found


def _row(run: Run, n: int, what: str, known: list[int], machine: bool) -> Row:
    seconds, unchanged = predict(run, n, machine), run.measured[max(known)]
    strategy = "parameter-server" if "parameter server" in run.text.replace("_", " ") else "all-reduce"
    kind = f"run/{strategy}/weak-from-one-{'machine' if machine else 'device'}"
    fitted = n in known or (run.name, n) in GAVE_STEP_TIME
    inside = n <= run.per_node
    return Row(run.name, what, run.measured[n], seconds, "s", fitted, unchanged=unchanged, kind=kind, inside=inside)


def rows(path: Path = DATA, most: float = math.inf, machine: bool = True) -> list[Row]:
    """Return the rows of all weak-scaling runs, in s per step: those that calibrate, and what is beyond them."""
    return table(path, most, machine).rows


def left_out(path: Path = DATA, machine: bool = True) -> list[Omitted]:
    """Return the figures of weak-scaling runs that are not predicted."""
    return table(path, machine=machine).omitted


if __name__ == "__main__":
    print("from one machine")
    show(rows(), left_out())
    print("from one device")
    show(rows(machine=False), left_out(machine=False))
