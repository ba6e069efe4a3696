"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .cluster import (
    Cluster as Cluster,
    Endpoints as Endpoints,
    cluster_names as cluster_names,
    load_cluster as load_cluster,
)
from .collectives import Round as Round, Schedule as Schedule, algorithm_names as algorithm_names
from .compression import (
    BF16 as BF16,
    DGC as DGC,
    FP16 as FP16,
    QSGD as QSGD,
    CodecCost as CodecCost,
    Compression as Compression,
    CountSketch as CountSketch,
    ErrorFeedback as ErrorFeedback,
    GTopK as GTopK,
    MSTopK as MSTopK,
    Natural as Natural,
    OneBit as OneBit,
    PowerSGD as PowerSGD,
    RandomK as RandomK,
    SignSGD as SignSGD,
    TernGrad as TernGrad,
    Threshold as Threshold,
    TopK as TopK,
)
from .data import DataSet as DataSet, load_data as load_data, load_digits as load_digits, shapes as shapes
from .errors import (
    ConfigError as ConfigError,
    ConservationError as ConservationError,
    DdlsimError as DdlsimError,
    DeadlockError as DeadlockError,
    UnitError as UnitError,
)
from .learning import Dirichlet as Dirichlet, Phase as Phase, Training as Training
from .learning.noise import gradient_noise_scale as gradient_noise_scale
from .jobs import (
    Jobs as Jobs,
    Placements as Placements,
    load_jobs as load_jobs,
    place as place,
    simulate_jobs as simulate_jobs,
)
from .reliability import (
    Background as Background,
    Checkpoints as Checkpoints,
    Elastic as Elastic,
    Failures as Failures,
    FailureTimeline as FailureTimeline,
    LinkFault as LinkFault,
    Pause as Pause,
    RandomFaults as RandomFaults,
    Slowdown as Slowdown,
    Stop as Stop,
    daly_interval as daly_interval,
    daly_time as daly_time,
    young_interval as young_interval,
)
from .nn.network import build_network as build_network
from .optim import (
    LAMB as LAMB,
    LARS as LARS,
    SGD as SGD,
    Adam as Adam,
    Constant as Constant,
    Cosine as Cosine,
    GrowingBatch as GrowingBatch,
    Momentum as Momentum,
    Polynomial as Polynomial,
    Steps as Steps,
    WarmUp as WarmUp,
    linear_scaling as linear_scaling,
    square_root_scaling as square_root_scaling,
)
from .planner import Target as Target, recommend as recommend
from .report.compare import compare as compare
from .report.learning import plot_learning as plot_learning
from .run.checkpoint_intervals import best_checkpoint_interval as best_checkpoint_interval
from .run.simulate import resume as resume, scaling as scaling, simulate as simulate
from .run.collective import collective_time as collective_time
from .run.experiment import Experiment as Experiment, Job as Job
from .run.files import load_experiment as load_experiment
from .run.result import Result as Result
from .run.seeds import Seeds as Seeds, simulate_seeds as simulate_seeds
from .run.traced import Traced as Traced
from .run.warm_up import warm_up as warm_up
from .runtime.fabric import Fabric as Fabric, WithFabric as WithFabric
from .strategies import (
    ADPSGD as ADPSGD,
    BMUF as BMUF,
    CHOCOSGD as CHOCOSGD,
    DPSGD as DPSGD,
    FSDP as FSDP,
    SPARTA as SPARTA,
    AdaComm as AdaComm,
    AllReduce as AllReduce,
    AsyncParameterServer as AsyncParameterServer,
    BackupWorkers as BackupWorkers,
    CoCoDSGD as CoCoDSGD,
    DaSGD as DaSGD,
    DdpBuckets as DdpBuckets,
    DelayCompensation as DelayCompensation,
    DiLoCo as DiLoCo,
    Distribution as Distribution,
    ElasticAveraging as ElasticAveraging,
    EmbeddingParallel as EmbeddingParallel,
    ExpertParallel as ExpertParallel,
    ExponentialPenalty as ExponentialPenalty,
    FedAvg as FedAvg,
    FedBuff as FedBuff,
    GossipSGD as GossipSGD,
    HierarchicalLocalSGD as HierarchicalLocalSGD,
    HorovodFusion as HorovodFusion,
    HostMemory as HostMemory,
    Hybrid as Hybrid,
    InverseStaleness as InverseStaleness,
    KAsync as KAsync,
    KBatchAsync as KBatchAsync,
    KBatchSync as KBatchSync,
    KSync as KSync,
    LocalSGD as LocalSGD,
    NoOverlap as NoOverlap,
    OverlapLocalSGD as OverlapLocalSGD,
    Parallel as Parallel,
    ParameterServer as ParameterServer,
    PerLayer as PerLayer,
    Priority as Priority,
    QsparseLocalSGD as QsparseLocalSGD,
    ServerWork as ServerWork,
    ShardedUpdate as ShardedUpdate,
    SlowMo as SlowMo,
    SoftSync as SoftSync,
    Splits as Splits,
    SquareRootStaleness as SquareRootStaleness,
    StaleSynchronous as StaleSynchronous,
    WhileWaiting as WhileWaiting,
)
from .study import Study as Study
from .validation.calibration import calibrate as calibrate
from .validation.comparison import validate as validate
from .validation.intervals import predict_interval as predict_interval
from .workload.compute import (
    Affine as Affine,
    Measured as Measured,
    PerKernel as PerKernel,
    Roofline as Roofline,
)
from .workload.contention import OverlapSlowdown as OverlapSlowdown
from .workload.fits import fits as fits
from .workload.input import (
    Cache as Cache,
    Copies as Copies,
    Input as Input,
    minio_cache as minio_cache,
    multi_level_cache as multi_level_cache,
    partitioned_cache as partitioned_cache,
)
from .workload.devices import Device as Device, device_names as device_names, load_device as load_device
from .workload.stacks import Stack as Stack, load_stack as load_stack, stack_names as stack_names
from .workload.jitter import (
    Exponential as Exponential,
    Gamma as Gamma,
    Lognormal as Lognormal,
    NoJitter as NoJitter,
    Pareto as Pareto,
    ShiftedExponential as ShiftedExponential,
    Trace as Trace,
    Uniform as Uniform,
)
from .spread import Spread as Spread
from .workload.model import Model as Model, load_model as load_model, model_names as model_names

__version__: str
