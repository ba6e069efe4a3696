"""The distributed training algorithms. A strategy is a frozen dataclass with `label`, `updates` and `start`."""

from ddlsim.runtime import Setting, Strategy
from ddlsim.runtime.server_work import ServerWork
from ddlsim.strategies.all_reduce import AllReduce
from ddlsim.strategies.asynchronous import AsyncParameterServer
from ddlsim.strategies.asynchronous_gossip import ADPSGD, GossipSGD
from ddlsim.strategies.delayed_averaging import CoCoDSGD, DaSGD, OverlapLocalSGD
from ddlsim.strategies.elastic import ElasticAveraging
from ddlsim.strategies.embedding_parallel import EmbeddingParallel
from ddlsim.strategies.expert_parallel import ExpertParallel
from ddlsim.strategies.federated import FedAvg, FedBuff
from ddlsim.strategies.gossip import CHOCOSGD, DPSGD
from ddlsim.strategies.k_async import KAsync, KBatchAsync
from ddlsim.strategies.k_sync import BackupWorkers, KBatchSync, KSync
from ddlsim.strategies.local_sgd import AdaComm, HierarchicalLocalSGD, LocalSGD, QsparseLocalSGD
from ddlsim.strategies.outer import BMUF, DiLoCo, SlowMo
from ddlsim.strategies.overlap import DdpBuckets, HorovodFusion, NoOverlap, PerLayer, Priority
from ddlsim.strategies.parallel import Parallel
from ddlsim.strategies.parameter_server import ParameterServer
from ddlsim.strategies.sharded_update import ShardedUpdate
from ddlsim.strategies.soft_sync import SoftSync
from ddlsim.strategies.sparse_averaging import SPARTA
from ddlsim.strategies.stale_synchronous import StaleSynchronous
from ddlsim.strategies.staleness import (
    DelayCompensation,
    ExponentialPenalty,
    InverseStaleness,
    SquareRootStaleness,
)
from ddlsim.workload.table_placement import HostMemory

__all__ = [
    "ADPSGD",
    "BMUF",
    "CHOCOSGD",
    "DPSGD",
    "SPARTA",
    "AdaComm",
    "AllReduce",
    "AsyncParameterServer",
    "BackupWorkers",
    "CoCoDSGD",
    "DaSGD",
    "DdpBuckets",
    "DelayCompensation",
    "DiLoCo",
    "ElasticAveraging",
    "EmbeddingParallel",
    "ExpertParallel",
    "ExponentialPenalty",
    "FedAvg",
    "FedBuff",
    "GossipSGD",
    "HierarchicalLocalSGD",
    "HorovodFusion",
    "HostMemory",
    "InverseStaleness",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LocalSGD",
    "NoOverlap",
    "OverlapLocalSGD",
    "Parallel",
    "ParameterServer",
    "PerLayer",
    "Priority",
    "QsparseLocalSGD",
    "ServerWork",
    "Setting",
    "ShardedUpdate",
    "SlowMo",
    "SoftSync",
    "SquareRootStaleness",
    "StaleSynchronous",
    "Strategy",
]
