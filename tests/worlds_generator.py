"""Random worlds: a cluster, a model, a strategy and all that can be varied about a run, drawn from a seed.

The rows of `tests/record` are some of these worlds: what the same seed draws must stay what it is.
`world(seed)` is a :class:`World`; some of them ddlsim refuses, as their parts do not fit together. What nothing here
can draw is missing from the guarantees that `worlds_invariants` checks, so a test asks for every part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ddlsim
from ddlsim import compression as cp
from ddlsim import strategies as sg
from ddlsim.cluster import (
    Cluster,
    Host,
    MultiGpu,
    dragonfly,
    fat_tree,
    leaf_spine,
    racks,
    star,
    torus,
    with_detail,
    with_storage,
)
from ddlsim.cluster.calibration_table import CalibrationTable, CurveTable
from ddlsim.cluster.storage import Endpoints
from ddlsim.reliability import Slowdown
from ddlsim.strategies import contract
from ddlsim.workload.compute import Affine, Measured
from ddlsim.workload.jitter import (
    Exponential,
    Gamma,
    Lognormal,
    NoJitter,
    Pareto,
    ShiftedExponential,
    Uniform,
)

__all__ = ["JobsWorld", "World", "jobs_world", "world"]

Draw = random.Random


@dataclass(frozen=True)
class World:
    """A run to be made: `cut` is where it is made again with an earlier end, as a share of its time (None: not)."""

    seed: int
    experiment: ddlsim.Experiment
    cut: float | None


# ------------------------------------------------------------ clusters

RATES = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "25 Gbit/s")
LATENCIES = ("0 s", "5 us", "50 us", "2 ms")
TCP = {"frame_header": "66 B", "frame_payload": "1448 B", "burst": "4542 B", "reverse_load": 0.0218}


def interior(draw: Draw) -> Host | MultiGpu:
    if draw.random() < 0.6:
        overhead = draw.choice((0.0, 0.0, 2e-6, 2e-4))
        reduction = draw.choice((None, None, "1 GB/s"))
        return Host(send_overhead=overhead, recv_overhead=overhead, reduce_bandwidth=reduction)
    inside = draw.choice(("nvswitch", "nvlink_mesh", "pcie_tree"))
    n_gpus = draw.choice((2, 3, 4))
    switches = draw.choice((1, n_gpus))
    return MultiGpu(
        n_gpus, inside, nvlink_bandwidth=None if inside == "pcie_tree" else "25 GB/s",
        n_pcie_switches=switches, n_nics=draw.choice((1, switches, 2 * switches)),
    )  # fmt: skip


def generated(draw: Draw) -> Cluster:
    link: dict[str, Any] = {"bandwidth": draw.choice(RATES), "latency": draw.choice(LATENCIES), "host": interior(draw)}
    kinds = ("star", "shared star", "lopsided star", "racks", "leaf-spine", "fat tree", "dragonfly", "torus")
    kind = draw.choice(kinds)
    if kind == "shared star":
        graph = star(draw.randint(4, 9), shared=True, **link)
    elif kind == "lopsided star":
        graph = star(draw.randint(4, 9), reverse_bandwidth="300 Mbit/s", **link)
    elif kind == "racks":
        graph = racks(2, draw.randint(3, 5), oversubscription=draw.choice((1.0, 4.0)), **link)
    elif kind == "leaf-spine":
        graph = leaf_spine(2, 4, 2, routing=draw.choice(("d-mod-k", "ecmp")), **link)
    elif kind == "fat tree":
        graph = fat_tree(4, **link)
    elif kind == "dragonfly":
        graph = dragonfly(3, (2,), 2, global_links=1, **link)
    elif kind == "torus":
        graph = torus((3, draw.choice((2, 3))), **link)
    else:
        graph = star(draw.randint(4, 9), **link)
    if draw.random() < 0.4:  # every link as it comes
        for _, _, data in graph.edges(data=True):
            if not data.get("shared"):
                data["bandwidth"] *= draw.choice((0.05, 0.5, 1.0, 1.0, 3.0))
    return Cluster.from_graph(graph)


@functools.cache
def bundled(name: str) -> Cluster:
    return ddlsim.load_cluster(name)


def cluster(draw: Draw) -> Cluster:
    found = bundled(draw.choice(BUNDLED)) if draw.random() < 0.35 else generated(draw)
    if draw.random() < 0.2:
        chosen = {key: value for key, value in TCP.items() if draw.random() < 0.7}
        if "frame_header" in chosen or "frame_payload" in chosen:
            chosen |= {key: TCP[key] for key in ("frame_header", "frame_payload")}
        found = with_detail(found, **chosen, kinds=[draw.choice(sorted(set(found.link_kind)))])
    found = with_transport(Draw(str(draw.getstate()[1][:3])), found)  # other draws stay what they were
    if Draw(str(draw.getstate()[1][3:6])).random() < 0.2:
        found = dataclasses.replace(found, routing="spray")
    return dataclasses.replace(found, calibration=CalibrationTable(curves=[curve(draw, inside) for inside in (0, 1)]))


def with_transport(draw: Draw, found: Cluster) -> Cluster:
    """Return the cluster, of which some links may name a transport and keep what else they do."""
    if draw.random() < 0.85:
        return found
    kind = draw.choice(sorted(set(found.link_kind)))
    before = found.details.of(found.link_kind.index(kind)).written() if found.details else {}
    chosen = {
        "rendezvous": draw.choice((0.0, 1e3, 1e6)), "window": draw.choice((0.0, "64 KiB")),
        "flow_rate": draw.choice((0.0, "500 Mbit/s")), "connections": draw.choice((1, 4)),
        "unordered": draw.random() < 0.3, "warm": draw.random() < 0.5,
    }  # fmt: skip
    if (transport := draw.choice(("tcp-cubic", "tcp-reno", "tcp-bbr", "roce", "infiniband"))).startswith("tcp"):
        chosen["loss"], chosen["buffer"] = draw.choice((0.0, 1e-4)), draw.choice((0.0, 0.0, "8 KiB"))
    return with_detail(found, **{**before, **chosen, "transport": transport}, kinds=[kind])


def with_queues(found: Cluster) -> Cluster:
    """Return the cluster with links that serve bytes in the order of their arrival, if it can have them."""
    if found.splits or (found.details is not None and found.details.buffer.any()):
        return found
    kind = min(found.link_kind)
    before = found.details.of(found.link_kind.index(kind)).written() if found.details else {}
    return with_detail(found, **{**before, "sharing": "fifo"}, kinds=[kind])


def curve(draw: Draw, inside: int) -> CurveTable:
    """Return a measured curve, of a library that may be slower or faster than one ring over the cluster's links."""
    return CurveTable(
        operation="all_reduce", algorithm="ring", per_message=draw.choice((0.5, 2.0)), sizes=[65536], dof=5.0,
        per_byte=[draw.choice((0.1, 1.5)), draw.choice((0.2, 1.1))], covariance=[[0.0] * 3] * 3, spread=0.03,
        nbytes=[64, 2**24], ranks=[2, 64], inside=bool(inside),
    )  # fmt: skip


#: of which worlds are made; with other ones, the same seeds would make other worlds
BUNDLED = (
    "aws-p2-16xlarge-16", "aws-p3-2xlarge", "cloud-25g-16x8-v100", "dgx-a100-pod", "dgx-h100-pod", "dgx1-v100",
    "dgx1-v100-16", "fat-tree-k8-10g", "lab-heterogeneous", "minicluster", "office-1gbe", "star-1024-10g", "theta",
    "three-regions-wan", "torus-2d", "torus-3d", "two-racks-oversubscribed", "zenith",
)  # fmt: skip

# ------------------------------------------------------------ strategies


def overlap(draw: Draw) -> Any:
    return draw.choice((
        sg.NoOverlap(), sg.PerLayer(), sg.DdpBuckets(2e5, 3e4), sg.HorovodFusion(draw.choice((1e5, 1e8)), "0.7 ms"),
        sg.Priority(draw.choice((1e5, 4e6)), draw.choice((1, 2, 4))), sg.WhileWaiting(),
    ))  # fmt: skip


def all_reduce(draw: Draw) -> Any:
    cost = draw.choice(("simulated", "simulated", "nccl", "calibrated"))
    names = {
        "simulated": (*(name for name in ddlsim.algorithm_names() if name != "open_mpi"), "auto"),  # it is one of these
        "nccl": ("ring", "double_binary_tree", "auto"),
        "calibrated": ("ring",),
    }  # fmt: skip
    return sg.AllReduce(draw.choice(names[cost]), overlap(draw), draw.choice(("topology", "given")), cost)


def served(draw: Draw) -> dict[str, Any]:
    placement = draw.choice(("own", "colocated"))
    return {"servers": draw.choice((1, 1, 2, 3)), "placement": placement, "apply_time": draw.choice((0.0, "1 ms"))}


def parameter_server(draw: Draw) -> Any:
    where = served(draw)
    del where["apply_time"]
    work = draw.choice(
        (None, None, sg.ServerWork("2 GB/s", threads=2), sg.ServerWork(update=5, unsplit_below="100 KB"))
    )
    return sg.ParameterServer(**where, overlap=overlap(draw), local_reduction=draw.random() < 0.3, work=work)


def asynchronous(draw: Draw) -> Any:
    scaling = draw.choice((None, "inverse", sg.ExponentialPenalty(0.8), sg.InverseStaleness()))
    compensation = draw.choice((None, None, sg.DelayCompensation(0.04), sg.DelayCompensation(2.0, adaptive=0.95)))
    accumulate = 1 if compensation else draw.choice((1, 1, 3))
    return sg.AsyncParameterServer(
        **served(draw), staleness_scaling=scaling, delay_compensation=compensation, accumulate=accumulate
    )


def local(draw: Draw) -> Any:
    return sg.LocalSGD(draw.choice((1, 2, 4)), cost=draw.choice(("simulated", "nccl")))


def backup(draw: Draw) -> Any:
    return sg.BackupWorkers(1, draw.random() < 0.5, **served(draw))


def elastic(draw: Draw) -> Any:
    return sg.ElasticAveraging(0.2, draw.choice((1, 3)), synchronous=draw.random() < 0.5, **served(draw))


STRATEGIES: tuple[Callable[[Draw], Any], ...] = (
    all_reduce, all_reduce, all_reduce, parameter_server, parameter_server, asynchronous, local, backup, elastic,
    lambda draw: sg.ShardedUpdate(
        cost=draw.choice(("simulated", "nccl")), overlap=draw.choice(("none", "layer", "ddp"))
    ),
    lambda draw: sg.AdaComm(draw.choice((2, 8)), 2),
    lambda draw: sg.BMUF(draw.choice((1, 4))),
    lambda draw: sg.DaSGD(4, draw.choice((1, 2)), 0.25),
    lambda draw: sg.OverlapLocalSGD(draw.choice((1, 3))),
    lambda draw: sg.CoCoDSGD(draw.choice((1, 3))),
    lambda draw: sg.DiLoCo(draw.choice((1, 3))),
    lambda draw: sg.SlowMo(draw.choice((1, 3)), buffers=draw.choice(("maintain", "reset"))),
    lambda draw: sg.HierarchicalLocalSGD(draw.choice((1, 2)), 2, draw.choice(("machine", 2))),
    lambda draw: sg.QsparseLocalSGD(draw.choice((1, 3)), cp.ErrorFeedback(cp.TopK(0.05))),
    lambda draw: sg.SPARTA(draw.choice((0.005, 0.3))),
    lambda draw: sg.FedAvg(draw.choice((0.3, 1.0)), local_steps=draw.choice((1, 3)), **served(draw)),
    lambda draw: sg.FedBuff(draw.choice((1, 2)), draw.choice((2, 3)), **served(draw)),
    lambda draw: sg.CHOCOSGD(draw.choice((0.3, 1.0)), draw.choice(("ring", "complete"))),
    lambda draw: sg.DPSGD(draw.choice(("ring", "complete"))),
    lambda draw: sg.ADPSGD("bipartite"),
    lambda draw: sg.GossipSGD(draw.choice((0.1, 0.5, 1.0))),
    lambda draw: sg.SoftSync(2, **served(draw)),
    lambda draw: sg.StaleSynchronous(draw.choice((0, 1, 3)), **served(draw)),
    lambda draw: sg.KSync(2, **served(draw)),
    lambda draw: sg.KBatchSync(2, **served(draw)),
    lambda draw: sg.KAsync(2, **served(draw)),
    lambda draw: sg.KBatchAsync(2, **served(draw)),
)  # fmt: skip

# ------------------------------------------------------------ the rest of a run

PLAIN = (
    cp.NoCompression(), cp.FP16(), cp.BF16(), cp.TopK(0.05), cp.MSTopK(0.05), cp.RandomK(0.05), cp.Threshold(0.5),
    cp.DGC(steps_per_stage=2), cp.GTopK(0.05), cp.CountSketch(0.05, rows=3, columns=2000), cp.QSGD(4), cp.TernGrad(),
    cp.Natural(), cp.SignSGD(), cp.OneBit(), cp.PowerSGD(2),
)  # fmt: skip


def compression(draw: Draw, learns: bool, served: bool) -> Any:
    plain = draw.choice([c for c in PLAIN if learns or not isinstance(c, cp.Threshold)])  # its bytes depend on values
    if not plain.traits.no_feedback and draw.random() < 0.5:
        plain = cp.ErrorFeedback(plain)
    down = draw.choice((None, None, cp.FP16())) if served else None
    return cp.Compression(plain, down, draw.choice((None, cp.CodecCost(encode=1e-10, decode=1e-10))))


#: strategies that no world compresses: the record has these draws (tests/record)
DENSE = (
    sg.CoCoDSGD, sg.DaSGD, sg.OverlapLocalSGD, sg.FedAvg, sg.AdaComm, sg.HierarchicalLocalSGD, sg.LocalSGD, sg.SlowMo,
)  # fmt: skip


def may_compress(strategy: Any) -> bool:
    """Whether what a run sends may be compressed: servers' work describes the cost of uncompressed gradients."""
    if isinstance(strategy, sg.QsparseLocalSGD | sg.SPARTA):
        return False  # one says its compression, the other is one
    if isinstance(strategy, DENSE):
        return False
    served = isinstance(strategy, sg.ParameterServer) and (strategy.work is not None or strategy.local_reduction)
    return not served


def jitter(draw: Draw) -> Any:
    return draw.choice((
        NoJitter(), NoJitter(), Lognormal(0.2), Gamma(0.5), Exponential(), ShiftedExponential(0.5), Pareto(3.0),
        Uniform(0.5, 1.5),
    ))  # fmt: skip


def experiment(draw: Draw) -> ddlsim.Experiment:
    chosen = cluster(draw)
    strategy = draw.choice(STRATEGIES)(draw)
    most = len(chosen.workers)
    n = 1 if draw.random() < 0.05 else draw.randint(2, min(8, most)) if draw.random() < 0.9 else min(16, most)
    learns = draw.random() < 0.3 or isinstance(strategy, sg.AdaComm)
    seconds, batch_size = draw.choice((1e-4, 4e-3, 0.05)), draw.choice((1, 8))
    training = None
    model = draw.choice(("lenet5", "digits-cnn", "ffn", "resnet18-cifar", "googlenet", "resnet50"))
    if learns:
        model = "digits-cnn"
        every = draw.choice((3, 7, "5 ms"))
        growing = ddlsim.GrowingBatch(batch_size, (0.01,)) if draw.random() < 0.1 else None
        parts = (ddlsim.Phase(0.01, rate=0.1), ddlsim.Phase(1.0, batch=2 * batch_size))
        phases = parts if growing is not None and draw.random() < 0.5 else ()
        optimizer = draw.choice((ddlsim.SGD(), ddlsim.Momentum(0.9), ddlsim.Adam()))
        training = ddlsim.Training(
            "digits", rate=0.05, updates=draw.randint(2, 14), evaluate_every=every, optimizer=optimizer,
            sharding=draw.choice(("iid", "shared", "by_class")), charge_evaluation=draw.random() < 0.3,
            growing_batch=growing if phases == () else None, phases=phases,
        )  # fmt: skip
    queued = isinstance(getattr(strategy, "overlap", None), ddlsim.HorovodFusion | ddlsim.Priority)
    coding = random.Random(repr((strategy, n, seconds))) if queued else draw  # the rest is drawn as ever
    compress = may_compress(strategy) and coding.random() < 0.4
    return ddlsim.Experiment(
        chosen, model, strategy, batch_size, n,
        steps=draw.randint(1, 5),
        warmup=draw.randint(0, 2),
        accumulation=draw.choice((1, 1, 3)),
        compute=draw.choice((Measured(seconds, batch_size), Affine(seconds, seconds / 8))),
        jitter=jitter(draw),
        slowdowns=tuple(
            Slowdown(draw.randrange(n), draw.random() * seconds, 3 * seconds, 5.0)
            for _ in range(draw.choice((0, 0, 2)))
        ),
        speed=tuple(draw.choice((0.3, 1.0, 1.0, 2.0)) for _ in range(n)) if draw.random() < 0.3 else None,
        seed=draw.randrange(100),
        training=training,
        compression=compression(coding, learns, hasattr(strategy, "servers")) if compress else None,
    )  # fmt: skip


# ------------------------------------------------------------ strategies whose batch is that of all workers together


def parallel(draw: Draw, n: int) -> sg.Parallel:
    p = draw.choice([p for p in (1, 2, 3, 4) if n % p == 0])
    order = draw.choice(("gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "pipedream", "2bw"))
    asynchronous = order in ("pipedream", "2bw")
    return sg.Parallel(
        pipeline=p, data=n // p, order=order, micro_batch=None if asynchronous else draw.choice((1, 2)),
        overlap=draw.choice(("none", "layer", "ddp")), sharded=not asynchronous and draw.random() < 0.3,
        recompute=draw.choice(("none", "stage")), cost=draw.choice(("simulated", "simulated", "nccl")),
    )  # fmt: skip


def fsdp(draw: Draw, n: int) -> sg.FSDP:
    stage, shard = draw.choice((1, 2, 3)), draw.choice([None, *(s for s in (1, 2, n) if n % s == 0)])
    only: dict[str, Any] = {"prefetch": draw.choice((0, 1, 3)), "shard": shard}
    if stage < 3:
        only = {"overlap": draw.choice(("none", "layer", "ddp"))}
    return sg.FSDP(stage=stage, micro_batch=draw.choice((1, 2)), no_sync=stage > 1 and draw.random() < 0.5, **only)


def hybrid(draw: Draw, n: int) -> sg.Hybrid:
    ways = [g for g in (1, 2, n) if n % g == 0]
    groups = draw.choice(("balance", {}, {draw.choice(("conv1", "conv2", "dense1")): draw.choice(ways)}))
    overlap = draw.choice(("none", "layer", "ddp", sg.WhileWaiting()))
    return sg.Hybrid(groups, overlap, micro_batches=draw.choice((1, 2)), cost=draw.choice(("simulated", "nccl")))


#: (what is drawn for so many workers, a model for it that may learn, one for time only)
LAYOUTS: tuple[tuple[Callable[[Draw, int], Any], str, str], ...] = (
    (parallel, "digits-cnn", "resnet18-cifar"), (parallel, "digits-cnn", "lenet5"),
    (parallel, "digits-cnn", "googlenet"),
    (fsdp, "digits-cnn", "resnet18-cifar"), (fsdp, "digits-cnn", "lenet5"),
    (hybrid, "digits-cnn", "lenet5"), (lambda draw, n: sg.Hybrid(), "digits-cnn", "vgg-a"),
    (lambda draw, n: sg.EmbeddingParallel(draw.choice(("table-wise", "row-wise"))), "clicks-dlrm", "dlrm"),
    (lambda draw, n: sg.ExpertParallel(), "mixtral-8x7b", "mixtral-8x7b"),
)  # fmt: skip


def laid_out(draw: Draw, one: ddlsim.Experiment) -> ddlsim.Experiment:
    """Return an experiment with such a strategy in the place of its own."""
    most = len(one.cluster.workers)
    n = draw.choice([n for n in (1, 2, 4, 6, 8) if n <= most])
    make, learns, model = draw.choice(LAYOUTS)
    strategy = make(draw, n)
    training = one.training if learns in ("digits-cnn", "clicks-dlrm") else None
    if training is not None:
        training = dataclasses.replace(
            training, data="clicks" if learns == "clicks-dlrm" else "digits", rate=0.01, growing_batch=None, phases=(),
            sharding=draw.choice(("iid", "shared")), updates=training.updates, charge_evaluation=draw.random() < 0.2,
            optimizer=draw.choice((training.optimizer, ddlsim.LARS(trust=0.01), ddlsim.LAMB())),
        )  # fmt: skip
    replicas = isinstance(strategy, sg.Parallel) and strategy.data != 1
    compresses = (replicas or isinstance(strategy, sg.FSDP | sg.Hybrid)) and draw.random() < 0.4
    compressor = draw.choice((cp.FP16(), cp.TopK(0.05), cp.OneBit(), cp.PowerSGD(2), cp.SignSGD()))
    jitters = draw.random() < 0.5
    cluster = one.cluster
    if draw.random() < 0.2 and not any(cluster.node_kind[node] == "gpu" for node in cluster.workers):
        cluster = Endpoints(draw.choice((1, 4)), 16, message_rate=draw.choice((None, 1e5))).on(cluster)
    return one.with_(
        cluster=cluster, model=model if training is None else learns, strategy=strategy, workers=n, batch_size=24 * n,
        accumulation=1, training=training, compression=compressor if compresses else None,
        jitter=jitter(draw) if jitters else NoJitter(), compute=Affine(1e-3, draw.choice((1e-4, 4e-3))),
        speed=tuple(draw.choice((0.3, 1.0, 2.0)) for _ in range(n)) if draw.random() < 0.3 else None,
        slowdowns=(Slowdown(draw.randrange(n), 1e-3, 2e-2, 5.0),) if draw.random() < 0.2 else (),
    )  # fmt: skip


def stored(draw: Draw, cluster: Cluster) -> Cluster:
    """Return a cluster with a storage somewhere."""
    return with_storage(
        cluster, "storage", read=draw.choice(("10 MB/s", "1 GB/s")), operations=draw.choice((None, 1e4)),
        at=draw.choice(cluster.node_names), bandwidth=draw.choice(RATES), latency=draw.choice(LATENCIES),
    )  # fmt: skip


def read_from_storage(draw: Draw, one: ddlsim.Experiment, cluster: Cluster) -> ddlsim.Experiment:
    """Return an experiment whose samples come from the storage of a cluster, caches and processors."""
    lru, levels = ddlsim.Cache("lru", "1 MB"), ddlsim.multi_level_cache("1 MB", "9 MB")
    caches = ((), lru, ddlsim.partitioned_cache("2 MB"), levels)
    return one.with_(cluster=cluster, input=ddlsim.Input(
        storage="storage", samples=2000, sample_bytes=draw.choice((100.0, "10 kB")), decoded_bytes="4 kB",
        prep_seconds=draw.choice((0.0, "1 ms")), prefetch=draw.choice((0, 1, 3)), cache=draw.choice(caches),
    ))  # fmt: skip


def disturbed(draw: Draw, one: ddlsim.Experiment) -> ddlsim.Experiment:
    """Return an experiment in which things go wrong at known times and at random, and machines perhaps fail."""
    n, scale = one.n_workers or len(one.cluster.workers), draw.choice((0.01, 0.1, 1.0))
    names = one.cluster.node_names
    pairs = [(names[a], names[b]) for a, b in zip(one.cluster.link_src, one.cluster.link_dst, strict=True)]

    def when() -> tuple[float, float]:
        return draw.uniform(0.0, 3.0 * scale), scale * draw.choice((0.01, 0.5, 20.0))

    many = range(draw.randrange(3))
    faults: list[Any] = [ddlsim.Stop(draw.randrange(n), *when()) for _ in many]
    faults += [
        ddlsim.LinkFault(*draw.choice(pairs), *when(), draw.choice((0.0, 0.1, 0.5))) for _ in range(draw.randrange(3))
    ]
    if draw.random() < 0.3:
        kind = draw.choice(({"factor": 2.0}, {"kind": "stop", "per": "device"}, {"kind": "link", "factor": 0.3}))
        faults.append(ddlsim.RandomFaults(2.0 * scale, 0.3 * scale, **kind))
    one = one.with_(faults=faults, slowdowns=[Slowdown(draw.randrange(n), *when(), 3.0) for _ in many])
    if draw.random() < 0.4:
        return one
    free = contract.of(one.strategy).updates(1000, 2) >= 2000
    failures = ddlsim.Failures(
        n * 20.0 * scale, per=draw.choice(("host", "device")), repair=draw.choice((0.0, 5.0)) * scale,
        kind=draw.choice(("crash", "crash", "hang")), detection=0.1 * scale, restart=0.3 * scale,
        spares=draw.randrange(2),
    )  # fmt: skip
    saves = not free and draw.random() < 0.6
    elastic = ddlsim.Elastic(draw.choice((1, 2)), rejoin=0.2 * scale, batch=draw.choice(("worker", "global")))
    return one.with_(
        failures=failures, max_time=one.max_time if one.training is not None else 100.0 * scale,
        checkpoints=ddlsim.Checkpoints(5.0 * scale, stall=0.1 * scale) if saves else None,
        elastic=elastic if not free and draw.random() < 0.5 else None,
    )  # fmt: skip


def world(seed: int) -> World:
    """Return the world of a seed."""
    draw = Draw(seed)
    one, cut = experiment(draw), draw.random() if draw.random() < 0.5 else None
    layouts, beside = Draw(f"layout {seed}"), Draw(f"beside {seed}")
    one = laid_out(layouts, one) if layouts.random() < 0.15 else one
    if beside.random() < 0.2:
        one = one.with_(overlap_slowdown=ddlsim.OverlapSlowdown(beside.choice((1.0, 1.3)), beside.choice((1.1, 2.0))))
    shared = Draw(f"machines {seed}")
    if shared.random() < 0.15:
        one = one.with_(speed=ddlsim.Spread(shared.choice((0.08, 0.5))))
    if shared.random() < 0.15 and (not isinstance(one.strategy, sg.Parallel) or one.strategy.pipeline == 1):
        one = one.with_(input=ddlsim.Copies(
            shared.choice(("device", "host")), prepare=shared.choice((0.0, "1 ms")), cut=shared.choice((0.0, 2.0))
        ))  # fmt: skip
    fed = Draw(f"input {seed}")
    if one.input is None and not one.cluster.grid and fed.random() < 0.15:
        one = read_from_storage(fed, one, stored(fed, one.cluster))
    failing = Draw(f"failures {seed}")
    if isinstance(one.strategy, WITHOUT_STEPS) and failing.random() < 0.4:
        one = with_crashes(failing, one)
    faulty = Draw(f"faults {seed}")
    if faulty.random() < 0.1:
        one = one.with_(faults=[link_fault(faulty, one.cluster)])
    events = Draw(f"events {seed}")
    if events.random() < 0.2 and one.failures is None and not one.faults:
        one = disturbed(events, one)
    return World(seed, one, cut)


#: strategies whose workers do not stop for each other
WITHOUT_STEPS = (
    sg.AsyncParameterServer, sg.StaleSynchronous, sg.KAsync, sg.KBatchAsync, sg.SoftSync, sg.FedBuff, sg.ADPSGD,
    sg.GossipSGD,
)  # fmt: skip


def with_crashes(draw: Draw, one: ddlsim.Experiment) -> ddlsim.Experiment:
    """Return an experiment whose devices or machines crash now and then."""
    failures = ddlsim.Failures(
        draw.choice(("50 ms", "500 ms", "5 s")), per=draw.choice(("device", "host")),
        repair=draw.choice(("5 ms", "50 ms", "1 s")), restart=draw.choice((0.0, "3 ms")),
        spares=draw.choice((0, 1)), kind=draw.choice(("crash", "hang")), detection=draw.choice((0.0, "2 ms")),
    )  # fmt: skip
    return one.with_(failures=failures, max_time=draw.choice(("200 ms", "5 s")))


def link_fault(draw: Draw, cluster: Cluster) -> ddlsim.LinkFault:
    """Return a fault of one of the links, which is slow, or down and not gone around."""
    link = draw.randrange(len(cluster.link_src))
    ends = (cluster.node_names[int(nodes[link])] for nodes in (cluster.link_src, cluster.link_dst))
    start, duration = draw.choice((0.0, 1e-3, 2e-2)), draw.choice((1e-2, 0.3))
    return ddlsim.LinkFault(*ends, start, duration, draw.choice((0.0, 0.1, 0.5)), reroute=float("inf"))


@dataclass(frozen=True)
class JobsWorld:
    """What :func:`ddlsim.simulate_jobs` is given, with queue=True."""

    jobs: tuple[ddlsim.Job | ddlsim.Background, ...]
    faults: tuple[ddlsim.LinkFault, ...]


def jobs_world(seed: int, numbers: Sequence[int] | None = None) -> JobsWorld:
    """Return random jobs of one random cluster with a storage, prices and powers: with simulated and known costs,
    splits of models, samples from the storage and crashes; and background traffic.

    numbers  of the jobs to take; None: the first four that ddlsim runs on the cluster
    """
    draw = Draw(f"jobs {seed}")
    jobs: list[ddlsim.Job | ddlsim.Background] = []
    own = None
    for number in range(60):
        one = world(1000 * seed + number).experiment
        if own is None:
            if 4 <= len(one.cluster.workers) <= 40 and not one.cluster.grid and not one.cluster.storages.size:
                own = stored(draw, one.cluster).with_costs(price="3.6 USD/h", switch_power="100 W")
            continue
        one = one.with_(
            cluster=own, workers=draw.randint(2, max(2, len(own.workers) // 3)), failures=None, max_time=math.inf,
            speed=None, slowdowns=(), faults=(), device="v100", input=None, checkpoints=None, elastic=None,
        )  # fmt: skip
        if draw.random() < 0.25 and hasattr(one.strategy, "cost"):
            one = one.with_(strategy=dataclasses.replace(one.strategy, cost="nccl"))
        if draw.random() < 0.5:
            one = read_from_storage(draw, one, own)
        if isinstance(one.strategy, WITHOUT_STEPS) and draw.random() < 0.5:
            one = with_crashes(draw, one)
        placement = draw.choice(("packed", "spread", "random"))
        job = ddlsim.Job(one, f"job {number}", start=draw.choice((0.0, 0.01, 0.1)), placement=placement)
        if numbers is None:
            try:
                ddlsim.simulate_jobs([job], queue=True)
            except ddlsim.DdlsimError:
                continue  # its parts do not fit together on this cluster
        elif number not in numbers:
            continue
        jobs.append(job)
        if len(jobs) == (4 if numbers is None else len(numbers)):
            break
    assert own is not None
    ends = draw.sample([own.node_names[node] for node in own.workers.tolist()], 2)
    jobs.append(ddlsim.Background(*ends, draw.choice((None, "50 Mbit/s")), on="10 ms", off="5 ms"))
    return JobsWorld(tuple(jobs), (link_fault(draw, own),) if draw.random() < 0.3 else ())
