"""Every bundled strategy once: a small instance for four workers, with a model and a batch that it can run.

Tests that are about all strategies take them from here. A new strategy adds one line, and
``tests/record/test_record.py`` fails until it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ddlsim
from ddlsim.strategies import Strategy

#: workers that every instance runs on
N_WORKERS = 4
EXPERTS = str(Path(__file__).parent / "data" / "small-experts.toml")


@dataclass(frozen=True)
class Bundled:
    """A strategy, and what it runs with.

    batch_size  samples per worker and step; of all workers together where the strategy divides one batch
    model       a small model; it can learn if `data` is not None
    data        data set for `model`; None: no bundled model for this strategy can learn
    needs_data  the loss decides what happens when, so nothing runs without data
    differences what it sends are differences to what the receiver holds, which compressors with errors that nobody
                keeps, such as QSGD, do not suit
    """

    strategy: Strategy
    batch_size: int = 8
    model: str = "digits-cnn"
    data: str | None = "digits"
    needs_data: bool = False
    differences: bool = False


BUNDLED: dict[str, Bundled] = {
    # synchronous
    "AllReduce": Bundled(ddlsim.AllReduce()),
    "ShardedUpdate": Bundled(ddlsim.ShardedUpdate()),
    "ParameterServer": Bundled(ddlsim.ParameterServer(2)),
    # periodic averaging
    "LocalSGD": Bundled(ddlsim.LocalSGD(2)),
    "AdaComm": Bundled(ddlsim.AdaComm(2, 2), needs_data=True),
    "QsparseLocalSGD": Bundled(ddlsim.QsparseLocalSGD(2, ddlsim.ErrorFeedback(ddlsim.TopK(0.1)))),
    "HierarchicalLocalSGD": Bundled(ddlsim.HierarchicalLocalSGD(1, 2, 2)),
    "BMUF": Bundled(ddlsim.BMUF(2)),
    "DiLoCo": Bundled(ddlsim.DiLoCo(2)),
    "SlowMo": Bundled(ddlsim.SlowMo(2)),
    "DaSGD": Bundled(ddlsim.DaSGD(2, 1)),
    "OverlapLocalSGD": Bundled(ddlsim.OverlapLocalSGD(2)),
    "CoCoDSGD": Bundled(ddlsim.CoCoDSGD(2)),
    "SPARTA": Bundled(ddlsim.SPARTA(0.1)),
    "FedAvg": Bundled(ddlsim.FedAvg(0.5, local_steps=2), differences=True),
    "ElasticAveraging": Bundled(ddlsim.ElasticAveraging(0.2, 2), differences=True),
    # decentralised
    "DPSGD": Bundled(ddlsim.DPSGD(), differences=True),
    "CHOCOSGD": Bundled(ddlsim.CHOCOSGD(0.5), differences=True),
    "ADPSGD": Bundled(ddlsim.ADPSGD(), differences=True),
    "GossipSGD": Bundled(ddlsim.GossipSGD(0.5), differences=True),
    # servers that do not wait for everybody
    "AsyncParameterServer": Bundled(ddlsim.AsyncParameterServer()),
    "SoftSync": Bundled(ddlsim.SoftSync(2, apply_time="0.2 ms")),
    "StaleSynchronous": Bundled(ddlsim.StaleSynchronous(1, servers=2)),
    "KSync": Bundled(ddlsim.KSync(2)),
    "KBatchSync": Bundled(ddlsim.KBatchSync(2)),
    "KAsync": Bundled(ddlsim.KAsync(2)),
    "KBatchAsync": Bundled(ddlsim.KBatchAsync(2, placement="colocated")),
    "BackupWorkers": Bundled(ddlsim.BackupWorkers(1)),
    "FedBuff": Bundled(ddlsim.FedBuff(2, 2)),
    # the model, its state or one batch divided over the workers
    "FSDP": Bundled(ddlsim.FSDP(), 24),
    "Parallel": Bundled(ddlsim.Parallel(pipeline=2, micro_batch=3), 24),
    "Hybrid": Bundled(ddlsim.Hybrid({"dense1": 2}), 24),
    "EmbeddingParallel": Bundled(ddlsim.EmbeddingParallel(), 24, "clicks-dlrm", "clicks"),
    "ExpertParallel": Bundled(ddlsim.ExpertParallel(), 24, EXPERTS, None),
}

#: second instances of strategies whose parameters choose another mechanism
VARIANTS: dict[str, Bundled] = {
    "BackupWorkers finishing": Bundled(ddlsim.BackupWorkers(1, restart=False)),
    "ElasticAveraging asynchronous": Bundled(ddlsim.ElasticAveraging(0.2, 2, synchronous=False), differences=True),
    "AsyncParameterServer accumulating": Bundled(ddlsim.AsyncParameterServer(2, "colocated", accumulate=2)),
    "AllReduce layer": Bundled(ddlsim.AllReduce("ring", "layer")),
    "AllReduce nccl": Bundled(ddlsim.AllReduce("ring", cost="nccl")),
    "AllReduce priority": Bundled(ddlsim.AllReduce("ring", ddlsim.Priority(1e4, 2))),
    "ShardedUpdate layer": Bundled(ddlsim.ShardedUpdate(overlap="layer")),
    "ParameterServer working": Bundled(ddlsim.ParameterServer(2, "colocated", work=ddlsim.ServerWork("0.5 GB/s"))),
    "FSDP stage 2": Bundled(ddlsim.FSDP(stage=2, micro_batch=3, no_sync=True), 24),
    "Parallel pipedream": Bundled(ddlsim.Parallel(pipeline=2, order="pipedream"), 24),
}

#: strategies of each kind, with servers on the machines of workers, so that no cluster is too small
STRATEGIES: dict[str, Strategy] = {
    "ddp": ddlsim.AllReduce("ring"),
    "all-reduce": ddlsim.AllReduce("ring", "none"),
    "layer": ddlsim.AllReduce("ring", "layer"),
    "trees": ddlsim.AllReduce("double_binary_tree", "none"),
    "halving": ddlsim.AllReduce("halving_doubling"),
    "nccl": ddlsim.AllReduce("ring", cost="nccl"),
    "sharded": ddlsim.ShardedUpdate(),
    "fsdp": ddlsim.FSDP(micro_batch=1),
    "pipeline": ddlsim.Parallel(pipeline=2, micro_batch=2),
    "server": ddlsim.ParameterServer(2, "colocated"),
    "asynchronous": ddlsim.AsyncParameterServer(2, "colocated"),
    "soft": ddlsim.SoftSync(2, placement="colocated"),
    "stale": ddlsim.StaleSynchronous(2, placement="colocated"),
    "backup": ddlsim.BackupWorkers(1, placement="colocated"),
    "k-sync": ddlsim.KSync(3, placement="colocated"),
    "k-async": ddlsim.KAsync(2, placement="colocated"),
    "buffered": ddlsim.FedBuff(2, 2, placement="colocated"),
    "elastic": ddlsim.ElasticAveraging(0.2, 2, placement="colocated"),
    "local": ddlsim.LocalSGD(3),
    "overlap-local": ddlsim.OverlapLocalSGD(2),
    "neighbours": ddlsim.DPSGD(),
    "gossip": ddlsim.GossipSGD(),
    "ad-psgd": ddlsim.ADPSGD(),
}


def some(names: str) -> dict[str, Strategy]:
    """Return the strategies of these names, which are separated by spaces."""
    return {name: STRATEGIES[name] for name in names.split()}
