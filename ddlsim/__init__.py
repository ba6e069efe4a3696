"""ddlsim: simulate distributed SGD before renting the cluster.

>>> import ddlsim
>>> result = ddlsim.simulate("cloud-25g-16x8-v100", model="resnet50", batch_size=64, workers=128)
>>> print(result)

Names are loaded when first used, so that importing ddlsim is cheap.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _let_kernels_be_cached() -> None:
    """Give numba a folder where it may write neither beside the package nor in the home folder.

    Without one it refuses to compile. The folder is this process's own: a shared one could be filled by others.
    """
    home = os.path.expanduser("~")
    places = (os.path.dirname(__file__), os.path.join(home, ".cache"), home)
    if "NUMBA_CACHE_DIR" not in os.environ and not any(os.access(place, os.W_OK) for place in places):
        import tempfile

        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddlsim-")


_let_kernels_be_cached()

if TYPE_CHECKING:
    from ddlsim.cluster import Cluster, cluster_names, load_cluster
    from ddlsim.collectives import Round, Schedule, algorithm_names
    from ddlsim.compression import (
        BF16,
        DGC,
        FP16,
        QSGD,
        CodecCost,
        Compression,
        CountSketch,
        ErrorFeedback,
        GTopK,
        MSTopK,
        Natural,
        OneBit,
        PowerSGD,
        RandomK,
        SignSGD,
        TernGrad,
        Threshold,
        TopK,
    )
    from ddlsim.data import (
        DataSet,
        load_data,
        load_digits,
        shapes,
    )
    from ddlsim.errors import ConfigError, ConservationError, DdlsimError, DeadlockError, UnitError
    from ddlsim.learning import (
        Dirichlet,
        Training,
    )
    from ddlsim.learning.noise import gradient_noise_scale
    from ddlsim.nn.network import (
        build_network,
    )
    from ddlsim.optim import (
        LAMB,
        LARS,
        SGD,
        Adam,
        Constant,
        Cosine,
        GrowingBatch,
        Momentum,
        Polynomial,
        Steps,
        WarmUp,
        linear_scaling,
        square_root_scaling,
    )
    from ddlsim.planner import Target, recommend
    from ddlsim.report.compare import compare
    from ddlsim.report.learning import plot_learning
    from ddlsim.run.api import load_experiment, resume, scaling, simulate
    from ddlsim.run.collective import collective_time
    from ddlsim.run.experiment import Experiment
    from ddlsim.run.result import Result
    from ddlsim.run.seeds import Seeds, simulate_seeds
    from ddlsim.run.traced import Traced
    from ddlsim.strategies import (
        ADPSGD,
        BMUF,
        DPSGD,
        AdaComm,
        AllReduce,
        AsyncParameterServer,
        BackupWorkers,
        CoCoDSGD,
        DaSGD,
        DdpBuckets,
        DelayCompensation,
        ElasticAveraging,
        ExponentialPenalty,
        GossipSGD,
        HorovodFusion,
        InverseStaleness,
        KAsync,
        KBatchAsync,
        KBatchSync,
        KSync,
        LocalSGD,
        NoOverlap,
        OverlapLocalSGD,
        ParameterServer,
        PerLayer,
        Priority,
        ServerWork,
        ShardedUpdate,
        SoftSync,
        StaleSynchronous,
    )
    from ddlsim.study import Study
    from ddlsim.validation.calibration import calibrate
    from ddlsim.validation.comparison import validate
    from ddlsim.validation.intervals import predict_interval
    from ddlsim.workload.compute import Affine, Measured, Roofline
    from ddlsim.workload.devices import Device, device_names, load_device
    from ddlsim.workload.jitter import (
        Exponential,
        Gamma,
        Lognormal,
        NoJitter,
        Pareto,
        ShiftedExponential,
        SlowDown,
        Trace,
        Uniform,
    )
    from ddlsim.workload.model import Model, load_model, model_names

_HOMES = {
    "cluster": ("Cluster", "cluster_names", "load_cluster"),
    "collectives": ("Round", "Schedule", "algorithm_names"),
    "compression": (
        "BF16", "DGC", "FP16", "QSGD", "CodecCost", "Compression", "CountSketch",
        "ErrorFeedback", "GTopK", "MSTopK", "Natural", "OneBit", "PowerSGD", "RandomK", "SignSGD", "TernGrad",
        "Threshold", "TopK",
    ),
    "data": ("DataSet", "load_data", "load_digits", "shapes"),
    "learning": ("Dirichlet", "Training"),
    "learning.noise": ("gradient_noise_scale",),
    "nn.network": ("build_network",),
    "optim": (
        "LAMB", "LARS", "SGD", "Adam", "Constant", "Cosine", "GrowingBatch", "Momentum", "Polynomial", "Steps",
        "WarmUp", "linear_scaling", "square_root_scaling",
    ),
    "errors": ("ConfigError", "ConservationError", "DdlsimError", "DeadlockError", "UnitError"),
    "run.api": ("load_experiment", "resume", "scaling", "simulate"),
    "run.collective": ("collective_time",),
    "run.experiment": ("Experiment",),
    "planner": ("Target", "recommend"),
    "report.compare": ("compare",),
    "report.learning": ("plot_learning",),
    "run.result": ("Result",),
    "run.seeds": ("Seeds", "simulate_seeds"),
    "run.traced": ("Traced",),
    "strategies": (
        "ADPSGD", "AdaComm", "AllReduce", "AsyncParameterServer", "BMUF", "BackupWorkers", "CoCoDSGD",
        "DPSGD", "DaSGD", "DdpBuckets", "DelayCompensation", "ElasticAveraging", "ExponentialPenalty",
        "GossipSGD", "HorovodFusion", "InverseStaleness", "KAsync", "KBatchAsync", "KBatchSync", "KSync",
        "LocalSGD", "NoOverlap", "OverlapLocalSGD", "ParameterServer", "PerLayer", "Priority",
        "ServerWork", "ShardedUpdate", "SoftSync", "StaleSynchronous",
    ),
    "study": ("Study",),
    "validation.calibration": ("calibrate",),
    "validation.comparison": ("validate",),
    "validation.intervals": ("predict_interval",),
    "workload.compute": ("Affine", "Measured", "Roofline"),
    "workload.devices": ("Device", "device_names", "load_device"),
    "workload.jitter": (
        "Exponential", "Gamma", "Lognormal", "NoJitter", "Pareto", "ShiftedExponential", "SlowDown", "Trace",
        "Uniform",
    ),
    "workload.model": ("Model", "load_model", "model_names"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ADPSGD",
    "BF16",
    "BMUF",
    "DGC",
    "DPSGD",
    "FP16",
    "LAMB",
    "LARS",
    "QSGD",
    "SGD",
    "AdaComm",
    "Adam",
    "Affine",
    "AllReduce",
    "AsyncParameterServer",
    "BackupWorkers",
    "Cluster",
    "CoCoDSGD",
    "CodecCost",
    "Compression",
    "ConfigError",
    "ConservationError",
    "Constant",
    "Cosine",
    "CountSketch",
    "DaSGD",
    "DataSet",
    "DdlsimError",
    "DdpBuckets",
    "DeadlockError",
    "DelayCompensation",
    "Device",
    "Dirichlet",
    "ElasticAveraging",
    "ErrorFeedback",
    "Experiment",
    "Exponential",
    "ExponentialPenalty",
    "GTopK",
    "Gamma",
    "GossipSGD",
    "GrowingBatch",
    "HorovodFusion",
    "InverseStaleness",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LocalSGD",
    "Lognormal",
    "MSTopK",
    "Measured",
    "Model",
    "Momentum",
    "Natural",
    "NoJitter",
    "NoOverlap",
    "OneBit",
    "OverlapLocalSGD",
    "ParameterServer",
    "Pareto",
    "PerLayer",
    "Polynomial",
    "PowerSGD",
    "Priority",
    "RandomK",
    "Result",
    "Roofline",
    "Round",
    "Schedule",
    "Seeds",
    "ServerWork",
    "ShardedUpdate",
    "ShiftedExponential",
    "SignSGD",
    "SlowDown",
    "SoftSync",
    "StaleSynchronous",
    "Steps",
    "Study",
    "Target",
    "TernGrad",
    "Threshold",
    "TopK",
    "Trace",
    "Traced",
    "Training",
    "Uniform",
    "UnitError",
    "WarmUp",
    "__version__",
    "algorithm_names",
    "build_network",
    "calibrate",
    "cluster_names",
    "collective_time",
    "compare",
    "device_names",
    "gradient_noise_scale",
    "linear_scaling",
    "load_cluster",
    "load_data",
    "load_device",
    "load_digits",
    "load_experiment",
    "load_model",
    "model_names",
    "plot_learning",
    "predict_interval",
    "recommend",
    "resume",
    "scaling",
    "shapes",
    "simulate",
    "simulate_seeds",
    "square_root_scaling",
    "validate",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
