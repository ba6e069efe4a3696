"""Distributed training algorithms (strategies): frozen dataclasses with a `label` and a `start` method."""

from ddlsim.runtime import RunContext as RunContext, Strategy as Strategy
from ddlsim.runtime.server_work import ServerWork as ServerWork
from ddlsim.strategies.all_reduce import AllReduce as AllReduce, ShardedUpdate as ShardedUpdate
from ddlsim.strategies.asynchronous import AsyncParameterServer as AsyncParameterServer
from ddlsim.strategies.central import (
    ElasticAveraging as ElasticAveraging,
    KAsync as KAsync,
    KBatchAsync as KBatchAsync,
    SoftSync as SoftSync,
    StaleSynchronous as StaleSynchronous,
)
from ddlsim.strategies.embedding_parallel import EmbeddingParallel as EmbeddingParallel
from ddlsim.strategies.expert_parallel import ExpertParallel as ExpertParallel
from ddlsim.strategies.federated import FedAvg as FedAvg, FedBuff as FedBuff
from ddlsim.strategies.fsdp import FSDP as FSDP
from ddlsim.strategies.gossip import (
    ADPSGD as ADPSGD,
    CHOCOSGD as CHOCOSGD,
    DPSGD as DPSGD,
    GossipSGD as GossipSGD,
)
from ddlsim.strategies.hybrid import Distribution as Distribution, Hybrid as Hybrid
from ddlsim.strategies.k_sync import BackupWorkers as BackupWorkers, KBatchSync as KBatchSync, KSync as KSync
from ddlsim.strategies.local_sgd import (
    BMUF as BMUF,
    SPARTA as SPARTA,
    AdaComm as AdaComm,
    CoCoDSGD as CoCoDSGD,
    DaSGD as DaSGD,
    DiLoCo as DiLoCo,
    HierarchicalLocalSGD as HierarchicalLocalSGD,
    LocalSGD as LocalSGD,
    OverlapLocalSGD as OverlapLocalSGD,
    QsparseLocalSGD as QsparseLocalSGD,
    SlowMo as SlowMo,
)
from ddlsim.strategies.overlap import (
    DdpBuckets as DdpBuckets,
    HorovodFusion as HorovodFusion,
    NoOverlap as NoOverlap,
    PerLayer as PerLayer,
    Priority as Priority,
    WhileWaiting as WhileWaiting,
)
from ddlsim.strategies.parallel import Parallel as Parallel
from ddlsim.strategies.parameter_server import ParameterServer as ParameterServer
from ddlsim.strategies.splits import Splits as Splits
from ddlsim.strategies.staleness import (
    DelayCompensation as DelayCompensation,
    ExponentialPenalty as ExponentialPenalty,
    InverseStaleness as InverseStaleness,
    SquareRootStaleness as SquareRootStaleness,
)
from ddlsim.workload.table_placement import HostMemory as HostMemory
