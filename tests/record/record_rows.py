"""The experiments of the record: name -> what runs it. Names begin with the kind, as in ``"faults/AllReduce"``.

A row stays what it is. If an argument or a name of the library changes, change how a row says it, and not what it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from bundled_strategies import BUNDLED, EXPERTS, VARIANTS, Bundled
from worlds_generator import jobs_world, world

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

__all__ = ["ROWS"]

ROWS: dict[str, Callable[[], Any]] = {}
#: two workers in each of two racks
PLACES = (0, 1, 4, 5)
COMPUTE = ddlsim.Affine(1e-3, 2.5e-4)


@functools.cache
def two_racks() -> Cluster:
    """Two racks of four machines behind a trunk that is half as fast as they are together; rings were measured on it.

    It has a storage, prices and powers.
    """
    plain = ddlsim.load_cluster(racks(2, 4, bandwidth="20 Mbit/s", latency="50 us", oversubscription=2))
    stored = with_storage(plain, "storage", read="2 MB/s", operations=2e4, at="rack0", bandwidth="40 Mbit/s")
    return calibrated(stored).with_costs(price="3.6 USD/h", switch_power="100 W")


def calibrated(cluster: Cluster) -> Cluster:
    curves = [
        CurveTable(
            operation=operation,
            algorithm="ring",
            per_message=2.0,
            sizes=[65536],
            per_byte=[1.5, 1.1],
            covariance=[[0.01, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]],
            spread=0.03,
            dof=5.0,
            nbytes=[64, 2**24],
            ranks=[2, 8],
            inside=inside,
        )
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        for inside in (False, True)
    ]
    return dataclasses.replace(cluster, calibration=CalibrationTable(curves=curves))


@functools.cache
def gpus() -> Cluster:
    """Six machines of two GPUs each."""
    return calibrated(ddlsim.load_cluster(star(6, bandwidth="100 Mbit/s", latency="20 us", host=MultiGpu(2))))


def row(name: str, run: Callable[[], Any]) -> None:
    """Add a row."""
    assert name not in ROWS, name
    ROWS[name] = run


def add(name: str, strategy: Any, batch_size: int = 8, model: str = "digits-cnn", **more: Any) -> None:
    """Add a run on the two racks, or on ``cluster``."""
    row(name, lambda: ddlsim.simulate(experiment(strategy, batch_size, model, **more)))


def experiment(strategy: Any, batch_size: int = 8, model: str = "digits-cnn", **more: Any) -> ddlsim.Experiment:
    """Return a run of four workers; parts that are functions are made now, so that a refusal is one of the row."""
    fields = {"cluster": two_racks, "workers": PLACES, "steps": 4, "warmup": 1, "compute": COMPUTE} | more
    made = {name: value() if name in MADE_LATE and callable(value) else value for name, value in fields.items()}
    strategy = strategy() if callable(strategy) else strategy
    return ddlsim.Experiment(made.pop("cluster"), model, strategy, batch_size, **made)


#: fields whose values may be functions that make them
MADE_LATE = ("cluster", "compression", "training", "fabric", "failures", "checkpoints", "elastic", "faults", "input")


def learning(data: str | None, **more: Any) -> ddlsim.Training:
    fields = {"rate": 0.02, "updates": 12, "evaluate_every": 6, "optimizer": ddlsim.Momentum(0.9)} | more
    return ddlsim.Training(data or "digits", **fields)


# ------------------------------------------------------------ every bundled strategy with every kind of disturbance

JITTER = {
    "jitter": ddlsim.Lognormal(0.2),
    "speed": (1.0, 0.8, 1.1, 0.9),
    "slowdowns": (ddlsim.Slowdown(1, 0.004, 0.01, 2.0),),
}
FAULTS = (
    ddlsim.Stop(1, "4 ms", "6 ms"),
    ddlsim.LinkFault("rack0", "rack1", "2 ms", "30 ms", factor=0.3),
    ddlsim.LinkFault("h4", "rack1", "12 ms", "5 ms", factor=0.0, reroute=math.inf),
)
FAILURES = ddlsim.Failures("1 s", per="host", repair="150 ms", restart="15 ms", detection="2 ms")
SAVING = ddlsim.Checkpoints("100 ms", stall="4 ms")
INPUT = ddlsim.Input(
    storage="storage",
    samples=2000,
    sample_bytes=300.0,
    decoded_bytes="1 kB",
    prep_seconds="0.1 ms",
    prefetch=1,
    cache=ddlsim.Cache("lru", "100 kB"),
)
COST = cp.CodecCost(encode=1e-9, decode=1e-9)
SPARSE, KEPT = cp.Compression(cp.ErrorFeedback(cp.TopK(0.05)), cost=COST), cp.Compression(cp.TopK(0.05), cost=COST)
KINDS: dict[str, Callable[[Bundled], dict[str, Any]]] = {
    "plain": lambda one: {},
    "jitter": lambda one: JITTER,
    "compression": lambda one: {"compression": KEPT if one.differences else SPARSE, **JITTER},
    "faults": lambda one: {"faults": FAULTS, "jitter": ddlsim.Lognormal(0.1)},
    "random faults": lambda one: {
        "faults": (ddlsim.RandomFaults("20 ms", "3 ms", factor=2.0), ddlsim.RandomFaults("40 ms", "2 ms", kind="stop"))
    },
    "pauses": lambda one: {"faults": (ddlsim.Pause("2 ms", "5 ms"), ddlsim.Pause("11 ms", "20 ms")), **JITTER},
    "input": lambda one: {"input": INPUT},
    "copies": lambda one: {"input": ddlsim.Copies("host", prepare="0.1 ms", cut=2.0)},
    "overlap slowdown": lambda one: {"overlap_slowdown": ddlsim.OverlapSlowdown(1.1, 1.3)},
    "failures": lambda one: {"failures": FAILURES, "checkpoints": SAVING, "max_time": "3 s"},
    "crashes": lambda one: {"failures": FAILURES, "max_time": "2 s"},
    "elastic": lambda one: {
        "failures": FAILURES,
        "checkpoints": SAVING,
        "elastic": ddlsim.Elastic(2, rejoin="20 ms"),
        "max_time": "3 s",
    },
    "accumulation": lambda one: {"accumulation": 2, "jitter": ddlsim.Gamma(0.3)},
    "training": lambda one: {"training": learning(one.data), **JITTER},
    "training compressed": lambda one: {
        "training": learning(one.data, optimizer=ddlsim.SGD()),
        "compression": cp.RandomK(0.1) if one.differences else cp.QSGD(4),
        **JITTER,
    },
    "training among failures": lambda one: {
        "training": learning(one.data, updates=40),
        "failures": FAILURES,
        "checkpoints": SAVING,
        "elastic": ddlsim.Elastic(2, rejoin="20 ms", rate="linear"),
    },
}
#: kinds in which second instances of a strategy are run, too
ALSO_VARIANTS = ("plain", "jitter", "faults", "training", "training compressed")


def jobs_of(one: Bundled) -> ddlsim.Jobs:
    """Run a strategy beside a ring on the same trunk and background traffic."""
    needed = {"training": learning(one.data)} if one.needs_data else {}
    first = ddlsim.Job(experiment(one.strategy, one.batch_size, one.model, **needed, **JITTER), "first")
    ring = experiment(sg.AllReduce("ring"), workers=(6, 7, 2), jitter=ddlsim.Lognormal(0.1), seed=3)
    traffic = ddlsim.Background("h3", "h7", "5 Mbit/s", on="10 ms", off="5 ms")
    return ddlsim.simulate_jobs([first, ddlsim.Job(ring, "ring", start=0.002), traffic])


for kind, fields in KINDS.items():
    for key, one in {**BUNDLED, **(VARIANTS if kind in ALSO_VARIANTS else {})}.items():
        needed = {"training": learning(one.data)} if one.needs_data else {}
        add(f"{kind}/{key}", one.strategy, one.batch_size, one.model, **needed | fields(one))
for key, one in BUNDLED.items():
    row(f"jobs/{key}", functools.partial(jobs_of, one))
for key, one in BUNDLED.items():  # 5 workers that are not in two equal groups, on machines of two GPUs
    if one.batch_size == 8:
        add(
            f"gpus/{key}",
            one.strategy,
            one.batch_size,
            one.model,
            cluster=gpus,
            workers=5,
            jitter=ddlsim.Gamma(0.2),
            **({"training": learning(one.data)} if one.needs_data else {}),
        )

# ------------------------------------------------------------ splits

ORDERS = ("gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "pipedream", "2bw")
#: what a strategy that divides one batch is run with: plainly, with jitter, learning
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "jitter": JITTER,
    "learning": {"training": functools.partial(learning, "digits"), "jitter": ddlsim.Lognormal(0.1)},
}


def split(name: str, make: Callable[[], Any], runs: str = "plain learning", **more: Any) -> None:
    """Add runs of a split of digits-cnn, or of ``model``."""
    for run in runs.split():
        add(
            f"split/{name}, {run}",
            make,
            more.get("batch_size", 32),
            more.get("model", "digits-cnn"),
            **RUNS[run],
            **{key: value for key, value in more.items() if key not in ("batch_size", "model")},
        )


for order in ORDERS:
    split(
        f"pipeline 2 x 2, {order}",
        functools.partial(
            sg.Parallel, pipeline=2, data=2, order=order, micro_batch=None if order in ("pipedream", "2bw") else 4
        ),
    )
    split(
        f"pipeline 4, {order}",
        functools.partial(
            sg.Parallel, pipeline=4, order=order, micro_batch=None if order in ("pipedream", "2bw") else 2
        ),
        "jitter",
        model="lenet5",
    )
PIPELINES: dict[str, dict[str, Any]] = {
    "interleaved": {"interleave": 2},
    "sharded": {"sharded": True},
    "sharded, layer": {"sharded": True, "overlap": "layer"},
    "recomputed": {"recompute": "stage", "order": "gpipe"},
    "exchange": {"p2p": "exchange"},
    "in turns": {"p2p": "in turns"},
    "nccl": {"cost": "nccl", "algorithm": "ring"},
    "calibrated": {"cost": "calibrated", "algorithm": "ring"},
    "none": {"overlap": "none"},
    "layer": {"overlap": "layer"},
    "megatron": {"overlap": "megatron"},
    "zb-v sharded": {"order": "zb-v", "sharded": True},
    "doubling": {"algorithm": "halving_doubling"},
    "own table": {
        "order": (
            (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("F", 0, 3), ("B", 0, 2), ("B", 0, 3)),
            (("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("F", 1, 2), ("B", 1, 2), ("F", 1, 3), ("B", 1, 3)),
        )
    },
}
for key, fields_ in PIPELINES.items():
    split(f"pipeline, {key}", functools.partial(sg.Parallel, **{"pipeline": 2, "data": 2, "micro_batch": 4} | fields_))
for key, optimizer in {"LARS": ddlsim.LARS(trust=0.01), "LAMB": ddlsim.LAMB(), "Adam": ddlsim.Adam()}.items():
    trains = functools.partial(learning, "digits", optimizer=optimizer, rate=0.01)
    for shape, make in {
        "pipeline sharded": functools.partial(sg.Parallel, pipeline=2, micro_batch=4, sharded=True),
        "FSDP": functools.partial(sg.FSDP, micro_batch=4),
        "FSDP stage 1": functools.partial(sg.FSDP, stage=1),
        "FSDP hybrid": functools.partial(sg.FSDP, shard=2),
        "Hybrid": functools.partial(sg.Hybrid, {"dense1": 1}),
    }.items():
        add(f"split/{shape}, {key}", make, 32, training=trains, jitter=ddlsim.Lognormal(0.1))
    for shape, replicated in {"AllReduce": sg.AllReduce(), "ShardedUpdate": sg.ShardedUpdate(overlap="layer")}.items():
        add(f"split/{shape}, {key}", replicated, 8, training=trains, jitter=ddlsim.Lognormal(0.1))

#: tensor parallelism of a transformer: on one switch, and inside of machines
TENSOR: dict[str, dict[str, Any]] = {
    "4": {"tensor": 4},
    "2 x data 2": {"tensor": 2, "data": 2},
    "2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "4, sequence": {"tensor": 4, "sequence": True},
    "2 x data 2, overlapped": {"tensor": 2, "data": 2, "sequence": True, "tp_comm_overlap": True},
    "4, overlapped": {"tensor": 4, "sequence": True, "tp_comm_overlap": True},
    "2 x data 2, layer": {"tensor": 2, "data": 2, "overlap": "layer", "algorithm": "ring"},
    "2 x data 2, sharded": {"tensor": 2, "data": 2, "sharded": True, "overlap": "megatron"},
    "2 x data 2, nccl": {"tensor": 2, "data": 2, "cost": "nccl", "algorithm": "ring"},
    "2 x pipeline 2, recomputed": {"tensor": 2, "pipeline": 2, "recompute": "full", "sequence": True},
    "2 x pipeline 2, selective": {"tensor": 2, "pipeline": 2, "recompute": "selective", "order": "gpipe"},
    "2 x pipeline 2, layers": {"tensor": 2, "pipeline": 2, "cut": "layers", "p2p": "exchange"},
    "2 x pipeline 2, interleaved": {"tensor": 2, "pipeline": 2, "interleave": 2},
}
for key, fields_ in TENSOR.items():
    for place, cluster in {"switch": "office-1gbe", "gpus": gpus, "pod": "dgx-a100-pod"}.items():
        make = functools.partial(sg.Parallel, **{"micro_batch": 2} | fields_)
        for disturbed in (False, True):
            if not disturbed or place == "switch":
                add(
                    f"tensor/{key} on {place}{', jitter' * disturbed}",
                    make,
                    16,
                    "char-transformer",
                    cluster=cluster,
                    workers=4,
                    **({"jitter": ddlsim.Lognormal(0.1)} if disturbed else {}),
                )
for key, fields_ in {
    "tensor 2, data 2, pipeline 2": {"tensor": 2, "data": 2, "pipeline": 2},
    "tensor 4, data 2": {"tensor": 4, "data": 2, "sequence": True},
    "tensor 8": {"tensor": 8},
}.items():
    for place, cluster in {"gpus": gpus, "dgx": "dgx1-v100-16", "pod": "dgx-h100-pod"}.items():
        make = functools.partial(sg.Parallel, **{"micro_batch": 1} | fields_)
        add(
            f"tensor/{key} on {place}, bert-large",
            make,
            8,
            "bert-large",
            cluster=cluster,
            workers=8,
            device="v100",
            compute=None,
            steps=2,
        )
add(
    "tensor/4, faults",
    sg.Parallel(tensor=4, micro_batch=4),
    4,
    "bert-base",
    cluster="office-1gbe",
    workers=4,
    device="v100",
    compute=None,
    steps=2,
    faults=(ddlsim.LinkFault("h0", "switch", "0 s", "1000 s", factor=0.1),),
)
row(
    "tensor/4, beside traffic",
    lambda: ddlsim.simulate_jobs(
        [
            ddlsim.Job(
                experiment(
                    sg.Parallel(tensor=4, micro_batch=4),
                    4,
                    "bert-base",
                    cluster="office-1gbe",
                    workers=4,
                    device="v100",
                    compute=None,
                    steps=2,
                )
            ),
            ddlsim.Background("h0", "h1", "0.9 Gbit/s"),
        ]
    ),
)

FSDPS: dict[str, dict[str, Any]] = {
    **{
        f"stage {stage}, {overlap}": {"stage": stage, "overlap": overlap}
        for stage in (1, 2)
        for overlap in ("none", "layer", "ddp")
    },
    **{f"prefetch {prefetch}": {"prefetch": prefetch} for prefetch in (0, 1, 2)},
    "weights kept": {"reshard": False},
    "hybrid 2": {"shard": 2},
    "hybrid 2, kept": {"shard": 2, "reshard": False},
    "hybrid 2, doubling": {"shard": 2, "all_reduce": "halving_doubling"},
    "no sync": {"no_sync": True},
    "stage 2, no sync": {"stage": 2, "no_sync": True},
    "units": {"units": (0, 3, 7)},
    "gloo": {"reduce_scatter": "gloo_reduce_scatter", "all_gather": "gloo_all_gather"},
    "rank order": {"rank_order": (2, 0, 3, 1)},
    "bf16 weights": {"param_dtype": "bf16"},
}
for key, fields_ in FSDPS.items():
    split(f"FSDP {key}", functools.partial(sg.FSDP, **{"micro_batch": 4} | fields_))
for recompute in ("none", "selective", "full", "early-stop"):
    for cluster in ("dgx-a100-pod", two_racks):
        add(
            f"split/FSDP {recompute} recomputation on {cluster if isinstance(cluster, str) else 'racks'}",
            functools.partial(sg.FSDP, recompute=recompute),
            16,
            "char-transformer",
            cluster=cluster,
            workers=4,
        )
HYBRIDS: dict[str, dict[str, Any]] = {
    "none": {"groups": {}},
    "balance": {"groups": "balance"},
    "2 x 2": {"groups": sg.Distribution(2, 2)},
    "1 x 4": {"groups": sg.Distribution(1, 4)},
    "conv": {"groups": {"conv2": 2, "dense1": 1}},
    "none, ddp": {"groups": {"dense1": 2}, "overlap": ddlsim.DdpBuckets(2e3, 1e3)},
    "waiting": {"groups": {"dense1": 2}, "overlap": sg.WhileWaiting()},
    "nccl": {"groups": {"dense1": 2}, "cost": "nccl"},
    "micro-batches": {"groups": {"dense1": 2}, "micro_batches": 2, "overlap": "none"},
}
for key, fields_ in HYBRIDS.items():
    split(f"Hybrid {key}", functools.partial(sg.Hybrid, **fields_))
    split(f"Hybrid {key}, lenet5", functools.partial(sg.Hybrid, **fields_), "jitter", model="lenet5")
TABLES: dict[str, dict[str, Any]] = {
    **{sharding: {"sharding": sharding} for sharding in ("table-wise", "row-wise", "column-wise")},
    "prefetched": {"indices": "prefetched"},
    "local": {"indices": "local"},
    "copies": {"data_parallel": "10 kB"},
    "bottom MLP": {"bottom_mlp": "one rank"},
    "host": {"host": sg.HostMemory("64 MB", "8 GB/s")},
    "layer": {"overlap": "layer"},
    "no overlap": {"overlap": "none", "table_optimizer": "sgd", "table_dtype": "fp16"},
}
for key, fields_ in TABLES.items():
    for run in ("plain", "jitter"):
        jitter = {"jitter": ddlsim.Lognormal(0.2)} if run == "jitter" else {}
        add(
            f"split/tables {key}, {run}",
            functools.partial(sg.EmbeddingParallel, **fields_),
            48,
            "dlrm",
            workers=6,
            **jitter,
        )
    add(
        f"split/tables {key}, learning",
        functools.partial(sg.EmbeddingParallel, **fields_),
        32,
        "clicks-dlrm",
        training=functools.partial(learning, "clicks"),
    )
EXPERT: dict[str, dict[str, Any]] = {
    "all": {},
    "2": {"degree": 2},
    "layer": {"overlap": "layer"},
    "none": {"overlap": "none", "degree": 2},
    "doubling": {"algorithm": "halving_doubling", "all_to_all": "bruck"},
}
for key, fields_ in EXPERT.items():
    for run in ("plain", "jitter"):
        add(f"split/experts {key}, {run}", functools.partial(sg.ExpertParallel, **fields_), 32, EXPERTS, **RUNS[run])

# ------------------------------------------------------------ replicas: overlaps, costs, algorithms, servers

OVERLAPS: dict[str, Any] = {
    "none": "none",
    "layer": "layer",
    "ddp": sg.DdpBuckets(3e3, 1e3),
    "horovod": sg.HorovodFusion(4e3, "0.7 ms"),
    "priority": sg.Priority(2e3, 2),
    "waiting": sg.WhileWaiting(sg.DdpBuckets(3e3, 1e3)),
}
for key, overlap in OVERLAPS.items():
    for algorithm in ("ring", "halving_doubling", "default", "auto", "nccl"):
        add(f"exchange/{algorithm}, {key}", functools.partial(sg.AllReduce, algorithm, overlap), **JITTER)
    for cost in ("nccl", "calibrated"):
        add(f"exchange/{cost} cost, {key}", functools.partial(sg.AllReduce, "ring", overlap, cost=cost), **JITTER)
    for servers, placement, local in ((1, "own", False), (3, "own", "tree"), (3, "colocated", "star")):
        make = functools.partial(sg.ParameterServer, servers, placement, overlap, local)
        add(
            f"exchange/servers {servers} {placement} {local}, {key}",
            make,
            cluster=gpus,
            workers=6,
            jitter=ddlsim.Lognormal(0.2),
        )
    work = sg.ServerWork("0.2 GB/s", threads=2, update=5, unsplit_below="2 KB")
    add(
        f"exchange/servers working, {key}",
        functools.partial(sg.ParameterServer, 3, overlap=overlap, work=work),
        **JITTER,
    )
    add(f"exchange/sharded, {key}", functools.partial(sg.ShardedUpdate, overlap=overlap), **JITTER)
    add(
        f"exchange/accumulated, {key}",
        functools.partial(sg.AllReduce, "ring", overlap, no_sync=False),
        accumulation=3,
        **JITTER,
    )
for algorithm in ddlsim.algorithm_names():
    add(f"algorithm/{algorithm}", functools.partial(sg.AllReduce, algorithm, "none"), cluster=gpus, workers=8)
    add(
        f"algorithm/{algorithm} on racks", functools.partial(sg.AllReduce, algorithm, "layer"), jitter=ddlsim.Gamma(0.2)
    )
for key, fabric in {
    "tree": functools.partial(ddlsim.Fabric, "double_binary_tree", "given"),
    "hierarchical": functools.partial(ddlsim.Fabric, "hierarchical"),
    "auto": functools.partial(ddlsim.Fabric, "auto"),
    "nccl": functools.partial(ddlsim.Fabric, "ring", cost="nccl"),
    "hierarchical nccl": functools.partial(ddlsim.Fabric, "hierarchical", cost="nccl"),
    "calibrated": functools.partial(ddlsim.Fabric, "ring", cost="calibrated"),
    "order": functools.partial(ddlsim.Fabric, "ring", (3, 1, 0, 2)),
}.items():
    for name in ("LocalSGD", "DiLoCo", "DaSGD", "HierarchicalLocalSGD", "SPARTA", "FSDP", "Parallel"):
        add(
            f"fabric/{name}, {key}",
            BUNDLED[name].strategy,
            BUNDLED[name].batch_size,
            cluster=gpus,
            workers=4,
            fabric=fabric,
            jitter=ddlsim.Lognormal(0.2),
        )

# ------------------------------------------------------------ clusters

TCP = {"frame_header": "66 B", "frame_payload": "1448 B", "burst": "4542 B", "reverse_load": 0.0218}
LINK: dict[str, Any] = {"bandwidth": "50 Mbit/s", "latency": "20 us"}


def detailed(**fields: Any) -> Cluster:
    return with_detail(two_racks(), **fields)


def sprayed(**fields: Any) -> Cluster:
    graph = leaf_spine(2, 4, 2, **LINK)
    return dataclasses.replace(
        with_detail(ddlsim.load_cluster(graph), **fields) if fields else ddlsim.load_cluster(graph), routing="spray"
    )


CLUSTERS: dict[str, Any] = {
    "frames": functools.partial(detailed, **TCP),
    "rendezvous": functools.partial(detailed, rendezvous=1e3, transport="infiniband"),
    "cubic": functools.partial(detailed, transport="tcp-cubic", loss=1e-4, connections=2, window="16 KiB"),
    "reno": functools.partial(detailed, transport="tcp-reno", buffer="8 KiB", **TCP),
    "bbr": functools.partial(detailed, transport="tcp-bbr", flow_rate="10 Mbit/s", warm=True),
    "roce": functools.partial(detailed, transport="roce", unordered=True),
    "sprayed": sprayed,
    "sprayed roce": functools.partial(sprayed, transport="roce", unordered=True),
    "leaf-spine": lambda: ddlsim.load_cluster(leaf_spine(2, 4, 2, routing="d-mod-k", **LINK)),
    "ecmp": lambda: ddlsim.load_cluster(leaf_spine(2, 4, 2, routing="ecmp", **LINK)),
    "fat tree": lambda: ddlsim.load_cluster(fat_tree(4, **LINK)),
    "dragonfly": lambda: ddlsim.load_cluster(dragonfly(3, (2,), 2, global_links=1, **LINK)),
    "torus": lambda: ddlsim.load_cluster(torus((3, 3), **LINK)),
    "shared star": lambda: ddlsim.load_cluster(star(8, shared=True, **LINK)),
    "lopsided star": lambda: ddlsim.load_cluster(star(8, reverse_bandwidth="5 Mbit/s", **LINK)),
    "slow hosts": lambda: ddlsim.load_cluster(
        star(8, host=Host(send_overhead=2e-4, recv_overhead=1e-4, reduce_bandwidth="20 MB/s"), **LINK)
    ),
    "PCIe": lambda: ddlsim.load_cluster(star(3, host=MultiGpu(4, "pcie_tree", n_pcie_switches=2, n_nics=2), **LINK)),
    "NVLink mesh": lambda: ddlsim.load_cluster(
        star(2, host=MultiGpu(4, "nvlink_mesh", nvlink_bandwidth="1 GB/s"), **LINK)
    ),
    "endpoints": lambda: ddlsim.Endpoints(2, 16, message_rate=1e5).on(star(8, **LINK)),
    **{
        name: name
        for name in (
            "aws-p2-16xlarge-16",
            "cloud-25g-16x8-v100",
            "dgx-a100-pod",
            "dgx1-v100-16",
            "fat-tree-k8-10g",
            "lab-heterogeneous",
            "minicluster",
            "three-regions-wan",
            "torus-3d",
            "two-racks-oversubscribed",
        )
    },
}
ON_CLUSTERS = {
    "AllReduce": sg.AllReduce(),
    "asynchronous": sg.AsyncParameterServer(1, "colocated"),
    "pipeline": sg.Parallel(pipeline=2, micro_batch=4, sharded=True),
}
for key, cluster in CLUSTERS.items():
    for name, strategy in ON_CLUSTERS.items():
        big = 24 if name == "pipeline" else 8
        add(
            f"cluster/{key}, {name}",
            strategy,
            big,
            "lenet5",
            cluster=cluster,
            workers=6,
            steps=2,
            jitter=ddlsim.Lognormal(0.1),
        )

# ------------------------------------------------------------ compressors

COMPRESSORS: dict[str, Any] = {
    "FP16": cp.FP16(),
    "BF16": cp.BF16(),
    "TopK": cp.TopK(0.05),
    "MSTopK": cp.MSTopK(0.05),
    "RandomK": cp.RandomK(0.05),
    "Threshold": cp.Threshold(0.01),
    "DGC": cp.DGC(steps_per_stage=2),
    "GTopK": cp.GTopK(0.05),
    "CountSketch": cp.CountSketch(0.05, rows=3, columns=500),
    "QSGD": cp.QSGD(4),
    "TernGrad": cp.TernGrad(),
    "Natural": cp.Natural(),
    "SignSGD": cp.SignSGD(),
    "OneBit": cp.OneBit(),
    "PowerSGD": cp.PowerSGD(2),
    "with feedback": cp.ErrorFeedback(cp.RandomK(0.1)),
}
COMPRESSED = {
    "AllReduce": sg.AllReduce("ring", "layer"),
    "nccl": sg.AllReduce("ring", cost="nccl"),
    "servers": sg.ParameterServer(1),
    "FSDP": sg.FSDP(stage=2),
    "asynchronous": sg.AsyncParameterServer(),
}
for key, compressor in COMPRESSORS.items():
    for name, strategy in COMPRESSED.items():
        add(
            f"compressor/{key}, {name}",
            strategy,
            32 if name == "FSDP" else 8,
            cluster=gpus,
            workers=4,
            compression=functools.partial(cp.Compression, compressor),
            training=functools.partial(learning, "digits", optimizer=ddlsim.SGD()),
            jitter=ddlsim.Lognormal(0.1),
        )
for name in ("ParameterServer", "AsyncParameterServer", "ElasticAveraging", "FedAvg", "FedBuff", "KSync", "SoftSync"):
    add(
        f"compressor/both ways, {name}",
        BUNDLED[name].strategy,
        compression=functools.partial(cp.Compression, cp.TopK(0.1), down=cp.FP16()),
        training=functools.partial(learning, "digits", optimizer=ddlsim.SGD()),
    )
for key, strategy in {
    "horovod": sg.AllReduce("ring", sg.HorovodFusion()),
    "priority": sg.AllReduce("ring", sg.Priority()),
    "calibrated": sg.AllReduce("ring", cost="calibrated"),
    "hierarchical nccl": sg.AllReduce("hierarchical", cost="nccl"),
    "auto": sg.AllReduce("auto"),
    "servers horovod": sg.ParameterServer(2, overlap=sg.HorovodFusion()),
    "servers local": sg.ParameterServer(2, local_reduction=True),
    "servers working": sg.ParameterServer(2, work=sg.ServerWork()),
}.items():
    add(f"compressor/FP16, {key}", strategy, cluster=gpus, workers=4, compression=cp.FP16())

# ------------------------------------------------------------ learning

LEARNING: dict[str, dict[str, Any]] = {
    "schedule": {"rate": ddlsim.WarmUp(ddlsim.Steps(0.05, (0.05, 0.1)), 0.05)},
    "shared": {"sharding": "shared"},
    "by class": {"sharding": "by_class"},
    "Dirichlet": {"sharding": ddlsim.Dirichlet(0.5)},
    "charged": {"charge_evaluation": True, "evaluate_every": "10 ms"},
    "no batching": {"batching": False},
    "growing": {"growing_batch": ddlsim.GrowingBatch(8, (0.02,))},
    "phases": {"phases": (ddlsim.Phase(0.02, rate=0.1), ddlsim.Phase(1.0, batch=16))},
    "target": {"updates": None, "target_accuracy": 0.3, "epochs": 0.3, "rate": 0.1},
    "Adam": {"optimizer": ddlsim.Adam(), "rate": 0.002},
}
for key, fields_ in LEARNING.items():
    for name in ("AllReduce", "ParameterServer", "LocalSGD", "DPSGD", "AsyncParameterServer", "KSync", "DiLoCo"):
        add(
            f"learning/{key}, {name}",
            BUNDLED[name].strategy,
            training=functools.partial(learning, "digits", **fields_),
            jitter=ddlsim.Lognormal(0.2),
        )
for name in ("AllReduce", "ShardedUpdate", "FedAvg", "ADPSGD", "SlowMo", "FSDP", "KBatchSync"):
    add(
        f"learning/time model, {name}",
        BUNDLED[name].strategy,
        BUNDLED[name].batch_size,
        time_model="resnet18-cifar",
        training=functools.partial(learning, "digits"),
        jitter=ddlsim.Lognormal(0.2),
    )
for name in ("AllReduce", "LocalSGD", "GossipSGD", "AsyncParameterServer", "KBatchSync"):
    add(
        f"learning/batch normalisation, {name}",
        BUNDLED[name].strategy,
        2,
        "shapes-cnn",
        training=functools.partial(learning, "shapes", updates=3, evaluate_every=3),
        jitter=ddlsim.Lognormal(0.2),
    )
for staleness in (None, "inverse", sg.ExponentialPenalty(0.8), sg.InverseStaleness(), sg.SquareRootStaleness()):
    add(
        f"learning/staleness {staleness}",
        functools.partial(sg.AsyncParameterServer, 2, staleness_scaling=staleness),
        training=functools.partial(learning, "digits"),
        **JITTER,
    )
for key, compensation in {
    "fixed": sg.DelayCompensation(0.04),
    "adaptive": sg.DelayCompensation(2.0, adaptive=0.95),
}.items():
    add(
        f"learning/compensation {key}",
        functools.partial(sg.AsyncParameterServer, delay_compensation=compensation),
        training=functools.partial(learning, "digits"),
        **JITTER,
    )

# ------------------------------------------------------------ lives

Fail = functools.partial(ddlsim.Failures, repair="200 ms", restart="15 ms")
LIVES: dict[str, dict[str, Any]] = {
    "devices": {"failures": functools.partial(Fail, "1 s", per="device"), "checkpoints": SAVING},
    "hangs": {"failures": functools.partial(Fail, "1 s", kind="hang", detection="50 ms"), "checkpoints": SAVING},
    "racks": {"failures": functools.partial(Fail, "2 s", per="rack", shape=0.7), "checkpoints": SAVING},
    "switches": {"failures": functools.partial(Fail, "2 s", per="switch"), "checkpoints": SAVING},
    "software": {"failures": functools.partial(Fail, "500 ms", per="job"), "checkpoints": SAVING},
    "spares": {"failures": functools.partial(Fail, "1 s", per="host", spares=1), "checkpoints": SAVING},
    "announced": {"failures": functools.partial(Fail, "1 s", warning="50 ms", discount=0.5), "checkpoints": SAVING},
    "peers": {"failures": FAILURES, "checkpoints": functools.partial(ddlsim.Checkpoints, "100 ms", to="peers")},
    "storage": {
        "failures": FAILURES,
        "checkpoints": functools.partial(ddlsim.Checkpoints, "200 ms", to="storage", asynchronous=True),
    },
    "bandwidth": {
        "failures": FAILURES,
        "checkpoints": functools.partial(ddlsim.Checkpoints, "100 ms", bandwidth="2 MB/s", load="10 ms"),
    },
    "checkpoints only": {"checkpoints": SAVING},
    "elastic global": {
        "failures": FAILURES,
        "elastic": functools.partial(ddlsim.Elastic, 1, rejoin="30 ms", batch="global"),
    },
    "faults too": {"failures": FAILURES, "checkpoints": SAVING, "faults": FAULTS},
    "elastic, faults too": {
        "failures": FAILURES,
        "elastic": functools.partial(ddlsim.Elastic, 2, rejoin="30 ms"),
        "faults": FAULTS,
    },
}
for key, fields_ in LIVES.items():
    for name in ("AllReduce", "LocalSGD", "FSDP", "Parallel", "AsyncParameterServer", "DPSGD"):
        stops = name != "AsyncParameterServer"  # whose workers go back to no checkpoint
        kept = {field: value for field, value in fields_.items() if stops or field not in ("checkpoints", "elastic")}
        add(f"life/{key}, {name}", BUNDLED[name].strategy, BUNDLED[name].batch_size, **{"max_time": "3 s"} | kept)
    add(
        f"life/{key}, learning",
        sg.AllReduce(),
        training=functools.partial(learning, "digits", updates=150),
        **{"max_time": "4 s"} | fields_,
    )

# ------------------------------------------------------------ random worlds

#: of which servers, places and times do not go together
MISFITS = (5000, 5008, 5038, 5041, 5051, 5056, 5058, 5068, 5070, 5077)
#: seeds of :func:`worlds_generator.world`; their draws decide what these rows are
WORLDS = [seed for seed in range(5000, 5080) if seed not in MISFITS]
#: seed of :func:`worlds_generator.jobs_world` -> the numbers of its jobs, as they were drawn when the record was made
JOBS_WORLDS = {
    500: (2, 3, 4, 5),
    501: (2, 3, 4, 5),
    502: (3, 7, 11, 12),
    503: (1, 2, 3, 4),
    504: (1, 2, 3, 4),
    505: (3, 4, 5, 6),
    506: (2, 3, 4, 5),
    507: (1, 3, 4, 5),
    508: (3, 4, 5, 6),
    509: (2, 11, 22, 31),
    510: (6, 7, 8, 9),
    511: (2, 3, 4, 5),
}


def jobs_of_world(seed: int) -> ddlsim.Jobs:
    drawn = jobs_world(seed, JOBS_WORLDS[seed])
    return ddlsim.simulate_jobs(drawn.jobs, queue=True, faults=drawn.faults)


for seed in WORLDS:
    row(f"world/{seed}", lambda seed=seed: ddlsim.simulate(world(seed).experiment))
for seed in JOBS_WORLDS:
    row(f"jobs world/{seed}", functools.partial(jobs_of_world, seed))
