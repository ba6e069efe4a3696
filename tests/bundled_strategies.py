"""Bundled strategies, one of each kind, for tests of what holds with every strategy.

Servers are on the machines of workers, so that no cluster is too small.
"""

from __future__ import annotations

import ddlsim
from ddlsim.strategies import Strategy

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
