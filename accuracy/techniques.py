"""What techniques gain: local SGD, gradient compression, and the scheduling of transfers.

Each row is a ratio of throughputs, with the technique to without. Both are simulated with ddlsim's own strategy or
compressor, and each of these arms is judged, too: a ratio can be right although both are wrong. What calibrates each
case is stated at its function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from accuracy.machines import ETHERNET_EFFICIENCY, FIRST_COME, PCIE, RDMA_EFFICIENCY, device_of, host_of
from accuracy.published import DATA, MODELS, cases, solve
from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import (
    DGC,
    AllReduce,
    Cluster,
    LocalSGD,
    Measured,
    NoOverlap,
    ParameterServer,
    Priority,
    SignSGD,
    Spread,
    load_cluster,
    load_device,
    load_model,
    simulate,
)
from ddlsim.cluster import MultiGpu, star
from ddlsim.compression import Compression
from ddlsim.compression.cost import CodecCost
from ddlsim.errors import ConfigError
from ddlsim.runtime.server_work import MXNET_SERVERS
from ddlsim.strategies import Strategy
from ddlsim.units import parse, si
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.precision import FP32_NBYTES

__all__ = ["bytescheduler", "claims", "dgc", "left_out", "local_sgd", "onebit_adam", "rows", "table"]

Case = Mapping[str, Any]


def stated(case: Case, found: Table, *keys: str) -> list[Case]:
    """Return the rows of a case that state these numbers; the others go to `found` as not predicted."""
    whole = []
    for row in case["measured"]:
        try:
            for key in keys:
                number(row, key)
            whole.append(row)
        except UnpredictableError as error:
            first = next(iter(row.items()), ("row", ""))
            found.omit(str(case["id"]), f"{first[0]} = {first[1]}", str(error))
    return whole


def local_sgd(case: Case, found: Table) -> list[Row]:
    """Local SGD of Paddle: parameters are averaged after every tau steps, without overlap.

    The page does not state the network. The rows tau = 1 and the largest tau give compute and exchange (a line in
    1 / tau: t = t_c + t_ar / tau), as the rate of a network interface that the simulated average takes t_ar over.
    """
    measured = {row["tau"]: row["t_step_s"] for row in stated(case, found, "tau", "t_step_s")}
    n, batch, model = int(number(case, "n")), int(number(case.get("worker"), "batch")), named(case)
    if len(measured) < 3:
        raise UnpredictableError("two values of tau calibrate, and no third one is stated")
    first, last = min(measured), max(measured)
    average = (measured[first] - measured[last]) / (1 / first - 1 / last)
    compute = Measured(measured[first] - average / first, batch)

    def step(tau: int, gbps: float) -> float:
        cluster = _v100_machines(case, n, gbps)
        return simulate(cluster, model, LocalSGD(tau), batch, steps=tau, warmup=0, compute=compute).step_time

    gbps = solve(lambda rate: step(first, rate) / measured[first] - 1.0, 1.0, 400.0)
    base = measured[first], step(first, gbps)
    return [
        _ratio(case, f"tau = {tau} against {first}", base, (t, step(tau, gbps)), tau == last, "local-sgd")
        for tau, t in measured.items()
        if tau != first
    ]


def _ratio(
    case: Case, what: str, without: tuple[float, float], technique: tuple[float, float], fitted: bool, kind: str
) -> Row:
    """Return the gain of a technique as a row, from the (measured, predicted) s of both arms."""
    measured, predicted = (a / b for a, b in zip(without, technique, strict=True))
    arms = without, technique
    return Row(case["id"], what, measured, predicted, "x", fitted, unchanged=1.0, kind=f"gain/{kind}", arms=arms)


def _v100_machines(case: Case, n: int, gbps: float) -> Cluster:
    host = host_of(case)
    efficiency = RDMA_EFFICIENCY
    network = star(n // host.n_gpus, bandwidth=gbps * 1e9 / 8, latency=1e-6, efficiency=efficiency, host=host)
    return load_cluster(network)


#: stand in for detectors whose number of parameters is not stated: networks that detectors are built on
BACKBONES = ("resnet50", "resnet101", "resnet152", "resnext101-32x8d")
#: elements from which on PaddlePaddle compresses a tensor (DGCMomentumOptimizer._is_use_dgc)
COMPRESSED = 16384


@dataclass(frozen=True)
class TensorByTensor:
    """Encode and exchange every tensor by itself, one after the other, after the backward pass.

    As PaddlePaddle does with DGC, which forbids it to fuse. Batch normalisation, which detectors do not train (Ren et
    al. 2015), is in the stand-in: its tensors, all smaller than what is compressed, travel with the next large one.
    """

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        buckets, nbytes = [], 0.0
        for each in workload.tensor_nbytes.tolist()[::-1]:
            nbytes += each
            if each >= 4 * COMPRESSED:
                buckets.append(Bucket(nbytes, 0, 0, 0))
                nbytes = 0.0
        return (*buckets, Bucket(nbytes, 0, 0, 0)) if nbytes else tuple(buckets)


def dgc(case: Case, found: Table) -> list[Row]:
    """Deep gradient compression (99.9 %) on two machines at several rates of their link.

    The dense row at the highest rate gives the compute time, those at the highest and the lowest one the bytes, to
    which the next of :data:`BACKBONES` stands in for the network (of which the tensors' sizes are not stated); the gain
    at the lowest rate does not count, therefore. That nothing overlaps is a choice made after seeing the dense rows,
    which lie on a line in 1 / rate.
    """
    measured = {row["link_gbps"]: row for row in stated(case, found, "link_gbps", "t_dense_s", "t_dgc_s")}
    if len(measured) < 3:
        raise UnpredictableError("two rates calibrate, and no third one is stated")
    if case.get("n") != 2:
        raise UnpredictableError("described for two machines")
    slowest, fastest, batch = min(measured), max(measured), 1
    longer = measured[slowest]["t_dense_s"] - measured[fastest]["t_dense_s"]
    nbytes = longer * ETHERNET_EFFICIENCY * 1e9 / 8 / (1 / slowest - 1 / fastest)
    detector = min(BACKBONES, key=lambda name: abs(4.0 * load_model(name).n_params - nbytes))

    def step(gbps: float, compute: float, compressed: bool) -> float:
        host = MultiGpu(1, device="p40")
        network = star(2, bandwidth=gbps * 1e9 / 8, latency=25e-6, efficiency=ETHERNET_EFFICIENCY, host=host)
        strategy = AllReduce("ring", TensorByTensor() if compressed else "none")
        return simulate(
            network, detector, strategy, batch, steps=1, warmup=0, compute=Measured(compute, batch),
            compression=DGC(1, sparsities=(0.999,)) if compressed else None,
        ).step_time  # fmt: skip

    dense = measured[fastest]["t_dense_s"]
    compute = solve(lambda x: step(fastest, x, compressed=False) / dense - 1.0, 0.5 * dense, dense)
    return [
        _ratio(
            case, f"{gbps} Gbit/s", (row["t_dense_s"], step(gbps, compute, compressed=False)),
            (row["t_dgc_s"], step(gbps, compute, compressed=True)), gbps == slowest, "compression",
        )
        for gbps, row in measured.items()
    ]  # fmt: skip


#: passes over fp32 gradients by which DeepSpeed compresses, counted in deepspeed/runtime/fp16/onebit_adam.py: errors,
#: scale and packing of signs; unpacking and sum of the received signs; unpacking of the averaged signs
SIGN_PASSES = 16.5 + 8.5 + 7.5
ONE_GPU = re.compile(r"(\d+) samples/s on one GPU")


def onebit_adam(case: Case, found: Table) -> list[Row]:
    """Adam with fp16 gradients, and 1-bit Adam: signs to the owner of each shard, averaged signs back.

    The throughput of one GPU, which the source states for both arms, gives the compute time. The one-machine row of
    each arm then gives the rate at which the GPUs of a machine exchange data (NCCL and MPI differ). The rate of the
    network is the measured one that the source states. Nothing overlaps (both arms exchange after the backward pass);
    signs are 1/16 of fp16.
    """
    topology, worker = case["topology"], case.get("worker")
    batch, per_node = int(number(worker, "batch")), int(number(topology, "gpus_per_node"))
    gbps, single = number(topology, "effective_gbps"), ONE_GPU.search(str(worker))
    model = {"BERT-Large": "bert-large", **MODELS}.get(case["model"]["name"])
    if model is None:
        raise UnpredictableError(f"model {case['model']['name']!r} is not described")
    rows = {row["n"]: row for row in stated(case, found, "n", "throughput_adam", "throughput_1bit")}
    if per_node not in rows:
        raise UnpredictableError("no row of one full machine")
    if single is None:
        raise UnpredictableError("the throughput of one GPU is not stated")
    seconds = SIGN_PASSES * FP32_NBYTES / si(load_device("v100").memory_bandwidth, "bandwidth")
    signs = Compression(SignSGD(), cost=CodecCost(encode=seconds))

    def step(n: int, copies: float, compressed: bool) -> float:
        host = MultiGpu(per_node, device="v100", pcie_bandwidth=copies)
        network = star(n // per_node, bandwidth=gbps * 1e9 / 8, latency=25e-6, host=host)
        return simulate(
            network, model, AllReduce("ring", NoOverlap()), batch, steps=1, warmup=0, speed=Spread(),
            compute=Measured(batch / float(single[1]), batch), gradient_dtype="fp32" if compressed else "fp16",
            compression=signs if compressed else None,
        ).step_time  # fmt: skip

    def arm(name: str, compressed: bool) -> dict[int, tuple[float, float]]:
        one = per_node * batch / rows[per_node][name]
        copies = solve(lambda rate: step(per_node, rate, compressed) / one - 1.0, 0.05e9, parse(PCIE, "bandwidth"))
        return {n: (n * batch / row[name], step(n, copies, compressed)) for n, row in rows.items()}

    adam, onebit = arm("throughput_adam", compressed=False), arm("throughput_1bit", compressed=True)
    return [_ratio(case, f"{n} GPUs", adam[n], onebit[n], n == per_node, "compression") for n in rows]


#: parameters in flight that ByteScheduler's tuner chooses from, in slices of a million: its default and the upper end
#: of its range (bytescheduler/common/bytecore.py, tuner.py in bytedance/byteps)
CREDITS = (4, 16)


def bytescheduler(case: Case, found: Table, most: float = math.inf) -> list[Row]:
    """MXNet's parameter servers over RDMA: whole tensors first come first served, against ByteScheduler's slices.

    The batch is not stated; 32 images per GPU are assumed (the batch of its paper, Peng et al. 2019). The catalogue's
    device gives the compute time (measured with MXNet, or the roofline). The one-machine row, the same for both arms,
    is the step of a whole machine, which needs no server: it gives the rate at which devices copy (as for MXNet's weak
    scaling). If a machine is faster than that device, copies have the rate of PCIe, and that row gives the compute
    time. The credit is tuned, as ByteScheduler does unless told otherwise: the fastest counts. Rows of more than `most`
    devices are left out.
    """
    model, per_node, batch = named(case), int(number(case["topology"], "gpus_per_node")), 32
    rows = {row["n"]: row for row in stated(case, found, "n", "throughput_fifo", "throughput_bytescheduler")}
    if per_node not in rows:
        raise UnpredictableError("no row of one full machine")
    gbps, one = number(case["topology"], "nic_gbps"), per_node * batch / rows[per_node]["throughput_fifo"]

    @cache
    def step(n: int, copies: float, seconds: float, overlap: Priority) -> float:
        m, host = n // per_node, replace(host_of(case), pcie_bandwidth=copies)
        network = star(m, bandwidth=gbps * 1e9 / 8, latency=1e-6, efficiency=RDMA_EFFICIENCY, host=host)
        strategy: Strategy = ParameterServer(m, "colocated", overlap, local_reduction="tree", work=MXNET_SERVERS)
        if m == 1:
            strategy = AllReduce("binomial_tree", overlap)
        compute = Measured(seconds, batch)
        return simulate(
            network, model, strategy, batch, workers=n, steps=2, warmup=1, compute=compute, speed=Spread()
        ).step_time

    copies, device = parse(PCIE, "bandwidth"), load_device(device_of(case))
    seconds = make_workload(load_model(model), device, batch).step_time
    if seconds < one:
        known = seconds
        copies = solve(lambda rate: step(per_node, rate, known, FIRST_COME) / one - 1.0, 0.5e9, copies)
    else:
        seconds = solve(lambda x: step(per_node, copies, x, FIRST_COME) / one - 1.0, 0.3 * one, one)

    def row_of(n: int, row: Case) -> Row:
        first = tuned = step(n, copies, seconds, FIRST_COME)
        if n > per_node:
            tuned = min(step(n, copies, seconds, Priority("4 MB", credit)) for credit in CREDITS)
        fifo, scheduled = (n * batch / row[f"throughput_{arm}"] for arm in ("fifo", "bytescheduler"))
        return _ratio(case, f"{n} GPUs", (fifo, first), (scheduled, tuned), n == per_node, "priority")

    return [row_of(n, row) for n, row in rows.items() if n <= most]


def named(case: Case) -> str:
    """Return the catalogue's name of a case's model."""
    name = case["model"]["name"] if isinstance(case.get("model"), Mapping) else None
    if name not in MODELS:
        raise UnpredictableError(f"model {name!r} is not described")
    return MODELS[name]


#: a column that only cases of one technique have -> what predicts them
TECHNIQUES = {
    "tau": local_sgd, "t_dgc_s": dgc, "throughput_1bit": onebit_adam, "throughput_bytescheduler": bytescheduler,
}  # fmt: skip


def claims(case: Case) -> bool:
    """Whether a case of the data file compares a technique with its absence."""
    return any(key in row for row in case.get("measured") or [] for key in TECHNIQUES)


@cache
def table(path: Path = DATA, most: float = math.inf) -> Table:
    """Return what becomes of the cases that compare a technique with its absence; ByteScheduler's to `most` devices."""
    found = Table()
    for case in filter(claims, cases(path)):
        function = next(f for key, f in TECHNIQUES.items() if any(key in row for row in case["measured"]))
        try:
            if not isinstance(case.get("topology"), Mapping):
                raise UnpredictableError("the machines are not stated")
            made = bytescheduler(case, found, most) if function is bytescheduler else function(case, found)
            found.rows += made
        except (UnpredictableError, ConfigError) as error:
            found.omit(str(case["id"]), f"{len(case['measured'])} rows", str(error))
    return found


def rows(path: Path = DATA, most: float = math.inf) -> list[Row]:
    """Return the ratios of all cases that compare a technique with its absence; ByteScheduler's to `most` devices."""
    return table(path, most).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows of techniques that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    show(rows(), left_out())
