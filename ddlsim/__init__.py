"""ddlsim: simulate distributed SGD before renting the cluster.

>>> import ddlsim
>>> result = ddlsim.simulate("cloud-25g-16x8-v100", model="resnet50", batch_size=64, workers=128)
>>> print(result)

Names are loaded when first used, so that importing ddlsim is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ddlsim.cluster import Cluster, cluster_names, load_cluster
    from ddlsim.collectives import Round, Schedule, algorithm_names
    from ddlsim.errors import ConfigError, DdlsimError, DeadlockError, UnitError
    from ddlsim.run.api import load_experiment, scaling, simulate
    from ddlsim.run.collective import collective_time
    from ddlsim.run.experiment import Experiment
    from ddlsim.run.result import Result
    from ddlsim.strategies import (
        AllReduce,
        AsyncParameterServer,
        DdpBuckets,
        HorovodFusion,
        NoOverlap,
        ParameterServer,
        PerLayer,
        Priority,
    )
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
    "errors": ("ConfigError", "DdlsimError", "DeadlockError", "UnitError"),
    "run.api": ("load_experiment", "scaling", "simulate"),
    "run.collective": ("collective_time",),
    "run.experiment": ("Experiment",),
    "run.result": ("Result",),
    "strategies": (
        "AllReduce", "AsyncParameterServer", "DdpBuckets", "HorovodFusion", "NoOverlap", "ParameterServer",
        "PerLayer", "Priority",
    ),
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
    "Affine",
    "AllReduce",
    "AsyncParameterServer",
    "Cluster",
    "ConfigError",
    "DdlsimError",
    "DdpBuckets",
    "DeadlockError",
    "Device",
    "Experiment",
    "Exponential",
    "Gamma",
    "HorovodFusion",
    "Lognormal",
    "Measured",
    "Model",
    "NoJitter",
    "NoOverlap",
    "ParameterServer",
    "Pareto",
    "PerLayer",
    "Priority",
    "Result",
    "Roofline",
    "Round",
    "Schedule",
    "ShiftedExponential",
    "SlowDown",
    "Trace",
    "Uniform",
    "UnitError",
    "__version__",
    "algorithm_names",
    "cluster_names",
    "collective_time",
    "device_names",
    "load_cluster",
    "load_device",
    "load_experiment",
    "load_model",
    "model_names",
    "scaling",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
