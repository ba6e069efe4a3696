"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .contract import RunContext as RunContext, Strategy as Strategy
from .all_reduce import AllReduce as AllReduce, ShardedUpdate as ShardedUpdate
from .asynchronous import AsyncParameterServer as AsyncParameterServer
from .central import (
    ElasticAveraging as ElasticAveraging,
    KAsync as KAsync,
    KBatchAsync as KBatchAsync,
    SoftSync as SoftSync,
    StaleSynchronous as StaleSynchronous,
)
from .embedding_parallel import EmbeddingParallel as EmbeddingParallel, HostMemory as HostMemory
from .expert_parallel import ExpertParallel as ExpertParallel
from .federated import FedAvg as FedAvg, FedBuff as FedBuff
from .fsdp import FSDP as FSDP
from .gossip import ADPSGD as ADPSGD, CHOCOSGD as CHOCOSGD, DPSGD as DPSGD, GossipSGD as GossipSGD
from .hybrid import Distribution as Distribution, Hybrid as Hybrid
from .k_sync import BackupWorkers as BackupWorkers, KBatchSync as KBatchSync, KSync as KSync
from .local_sgd import (
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
from .overlap import (
    DdpBuckets as DdpBuckets,
    HorovodFusion as HorovodFusion,
    NoOverlap as NoOverlap,
    PerLayer as PerLayer,
    Priority as Priority,
    WhileWaiting as WhileWaiting,
)
from .parallel import Parallel as Parallel
from .parameter_server import ParameterServer as ParameterServer, ServerWork as ServerWork
from .splits import Splits as Splits
from .staleness import (
    DelayCompensation as DelayCompensation,
    ExponentialPenalty as ExponentialPenalty,
    InverseStaleness as InverseStaleness,
    SquareRootStaleness as SquareRootStaleness,
)
