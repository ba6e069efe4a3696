"""Experiments from TOML files: strict keys, units as text, errors in one line.

.. code-block:: toml

    cluster = "cloud-25g-16x8-v100"      # bundled, or a path beside this file
    model = "resnet50"
    workers = 128
    batch_size = 64

    [strategy]
    type = "all-reduce"
    algorithm = "ring"
    overlap = { type = "ddp", cap = "25 MiB" }

    [jitter]
    type = "lognormal"
    cv = 0.05

    [training]                           # what the workers learn, if anything; then `model` must be trainable
    data = "digits"
    optimizer = { type = "momentum", beta = 0.9 }
    rate = { type = "cosine", base = 0.1, n_epochs = 10 }
    epochs = 10

    [compression]
    compressor = { type = "error-feedback", inner = { type = "top-k", density = 0.01 } }

The keys of a table are the fields of the class that it describes, e.g. :class:`ddlsim.AllReduce`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter

import ddlsim.compression as compression
import ddlsim.optim as optim
import ddlsim.strategies as strategies
from ddlsim.arguments import checked
from ddlsim.compression.choice import Compression, compression_of
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Dirichlet, Training
from ddlsim.run.experiment import Experiment
from ddlsim.run.tables import Kinds, Table, build, chosen
from ddlsim.run.traced import Traced
from ddlsim.strategies import Strategy
from ddlsim.units import parse
from ddlsim.workload import jitter as jitters
from ddlsim.workload.compute import Affine, Measured, Roofline
from ddlsim.workload.toml_files import read_toml, validate

__all__ = ["COMPUTE", "JITTER", "PARTS", "STRATEGIES", "beside", "compression_from", "experiment_from"]
__all__ += ["compute_from", "load_experiment", "training_from"]


class _File(Table):
    cluster: str
    model: str = "resnet50"
    workers: int | None = None
    batch_size: int = 32
    steps: int = 10
    warmup: int = 2
    accumulation: int = 1
    precision: str = "fp32"
    gradient_dtype: str = "fp32"
    device: str | None = None
    speed: tuple[float, ...] | None = None
    seed: int = 0
    max_time: str | None = None
    time_model: str | None = None
    strategy: dict[str, object] | None = None
    compute: dict[str, object] | None = None
    jitter: dict[str, object] | None = None
    training: dict[str, object] | None = None
    compression: dict[str, object] | None = None
    slow_downs: tuple[dict[str, object], ...] = ()


class _Measured(Table):
    batch_size: int
    step_time: str | None = None
    throughput: str | None = None


class _Affine(Table):
    c0: str
    c1: str


class _SlowDown(Table):
    ranks: int | list[int]
    start: str
    duration: str
    factor: float


STRATEGIES: Mapping[str, type[Strategy]] = {
    "adacomm": strategies.AdaComm,
    "adpsgd": strategies.ADPSGD,
    "all-reduce": strategies.AllReduce,
    "async-parameter-server": strategies.AsyncParameterServer,
    "backup-workers": strategies.BackupWorkers,
    "bmuf": strategies.BMUF,
    "cocod-sgd": strategies.CoCoDSGD,
    "dasgd": strategies.DaSGD,
    "dpsgd": strategies.DPSGD,
    "elastic-averaging": strategies.ElasticAveraging,
    "gossip-sgd": strategies.GossipSGD,
    "k-async": strategies.KAsync,
    "k-batch-async": strategies.KBatchAsync,
    "k-batch-sync": strategies.KBatchSync,
    "k-sync": strategies.KSync,
    "local-sgd": strategies.LocalSGD,
    "overlap-local-sgd": strategies.OverlapLocalSGD,
    "parameter-server": strategies.ParameterServer,
    "sharded-update": strategies.ShardedUpdate,
    "softsync": strategies.SoftSync,
    "stale-synchronous": strategies.StaleSynchronous,
}
OVERLAPS: Kinds = {
    "none": strategies.NoOverlap,
    "layer": strategies.PerLayer,
    "ddp": strategies.DdpBuckets,
    "horovod": strategies.HorovodFusion,
    "priority": strategies.Priority,
}
COMPUTE: Kinds = {
    "measured": (_Measured, Measured), "affine": (_Affine, Affine), "roofline": Roofline, "traced": Traced,
}  # fmt: skip
JITTER: Kinds = {
    "none": jitters.NoJitter,
    "lognormal": jitters.Lognormal,
    "gamma": jitters.Gamma,
    "shifted-exponential": jitters.ShiftedExponential,
    "exponential": jitters.Exponential,
    "pareto": jitters.Pareto,
    "uniform": jitters.Uniform,
    "trace": jitters.Trace,
}
OPTIMIZERS: Kinds = {
    "sgd": optim.SGD,
    "momentum": optim.Momentum,
    "adam": optim.Adam,
    "lars": optim.LARS,
    "lamb": optim.LAMB,
}
SCHEDULES: Kinds = {
    "constant": optim.Constant,
    "steps": optim.Steps,
    "cosine": optim.Cosine,
    "polynomial": optim.Polynomial,
    "warm-up": optim.WarmUp,
}
COMPRESSORS: Kinds = {
    "bf16": compression.BF16,
    "count-sketch": compression.CountSketch,
    "dgc": compression.DGC,
    "error-feedback": compression.ErrorFeedback,
    "fp16": compression.FP16,
    "gtop-k": compression.GTopK,
    "ms-top-k": compression.MSTopK,
    "natural": compression.Natural,
    "none": compression.NoCompression,
    "one-bit": compression.OneBit,
    "power-sgd": compression.PowerSGD,
    "qsgd": compression.QSGD,
    "random-k": compression.RandomK,
    "sign-sgd": compression.SignSGD,
    "tern-grad": compression.TernGrad,
    "threshold": compression.Threshold,
    "top-k": compression.TopK,
}
#: field -> what a table in it may describe
PARTS: Mapping[str, Kinds] = {
    "overlap": OVERLAPS,
    "staleness_scaling": {"inverse": strategies.InverseStaleness, "exponential": strategies.ExponentialPenalty},
    "delay_compensation": {"delay-compensation": strategies.DelayCompensation},
    "optimizer": OPTIMIZERS,
    "rate": SCHEDULES,
    "then": SCHEDULES,
    "sharding": {"dirichlet": Dirichlet},
    "growing_batch": {"growing-batch": optim.GrowingBatch},
    "compressor": COMPRESSORS,
    "down": COMPRESSORS,
    "inner": COMPRESSORS,
    "cost": {"codec-cost": compression.CodecCost},
    "work": {"server-work": strategies.ServerWork},
}


#: keys that tell other files -> what these are, and where they go
_OTHER_FILES = {
    "layers": "a model; give it as model, ddlsim run CLUSTER --model FILE",
    "vary": "a study; run it with ddlsim sweep FILE",
}


@checked
def load_experiment(source: str | Path, *, allow_code: bool = False) -> Experiment:
    """Return the experiment that the TOML file `source` describes.

    A file cannot run code: an algorithm written as "package.module:function" is refused unless `allow_code`.
    A cluster or model that is the name of a file beside it is read from there. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    return experiment_from(read_toml(path), path, allow_code=allow_code)


def experiment_from(table: dict[str, object], path: Path, *, allow_code: bool = False) -> Experiment:
    """Return the experiment that a table of the file `path` describes; see :func:`load_experiment`."""
    for key, remedy in _OTHER_FILES.items():
        if key in table:
            raise ConfigError(f"{path}: has the key {key!r}, so it is no experiment but {remedy}")
    file = validate(TypeAdapter(_File), table, str(path), _File.model_fields)
    strategy = file.strategy or {"type": "all-reduce"}
    for name, value in strategy.items():
        if isinstance(value, str) and ":" in value and not allow_code:
            raise ConfigError(
                f"{path}: strategy.{name} = {value!r} would import code; if you trust the file, use "
                f"load_experiment(path, allow_code=True), or give --algorithm on the command line"
            )
    try:
        return Experiment(
            cluster=beside(path, file.cluster),
            model=beside(path, file.model),
            strategy=chosen(strategy, STRATEGIES, PARTS, f"{path}: strategy"),  # type: ignore[arg-type]
            workers=file.workers,
            batch_size=file.batch_size,
            steps=file.steps,
            warmup=file.warmup,
            accumulation=file.accumulation,
            precision=file.precision,
            gradient_dtype=file.gradient_dtype,
            device=file.device,
            speed=file.speed,
            seed=file.seed,
            max_time=float("inf") if file.max_time is None else parse(file.max_time, "time", "max_time"),
            time_model=None if file.time_model is None else beside(path, file.time_model),
            training=training_from(path, file.training, f"{path}: training"),
            compression=compression_from(file.compression, f"{path}: compression"),
            compute=compute_from(path, file.compute, f"{path}: compute"),  # type: ignore[arg-type]
            jitter=_chosen(file.jitter, JITTER, f"{path}: jitter") or jitters.NoJitter(),  # type: ignore[arg-type]
            slow_downs=tuple(_slow_downs(file.slow_downs, f"{path}: slow_downs")),
        )
    except DdlsimError as error:
        text = str(error)
        raise type(error)(text if text.startswith(str(path)) else f"{path}: {text}") from None


def beside(path: Path, name: str) -> str | Path:
    """Return the file or folder `name` beside `path` if there is one, else the name."""
    file = path.parent / name
    return file if (file.suffix and os.path.isfile(file)) or ("/" in name and os.path.isdir(file)) else name


def _chosen(table: Mapping[str, object] | None, kinds: Kinds, where: str) -> object:
    return None if table is None else chosen(table, kinds, PARTS, where)


def training_from(path: Path, table: Mapping[str, object] | None, where: str) -> Training | None:
    """Return what the table of the file `path` describes."""
    if table is None:
        return None
    data = table.get("data")
    near = {"data": str(beside(path, data))} if isinstance(data, str) else {}
    return build(Training, {**table, **near}, PARTS, where)


def compute_from(path: Path, table: Mapping[str, object] | None, where: str) -> object:
    """Return what the table of the file `path` describes; a trace's path is relative to the file."""
    trace = None if table is None else table.get("path")
    if table is None or not isinstance(trace, str):
        return _chosen(table, COMPUTE, where)
    return _chosen({**table, "path": str(path.parent / trace)}, COMPUTE, where)


def compression_from(table: Mapping[str, object] | None, where: str) -> Compression | None:
    """Return what the table describes: a compressor, or with the key "compressor" more than that."""
    if table is not None and "compressor" in table:
        return build(Compression, table, PARTS, where)
    return compression_of(_chosen(table, COMPRESSORS, where))


def _slow_downs(tables: tuple[dict[str, object], ...], where: str) -> Iterator[jitters.SlowDown]:
    kinds: Kinds = {"slow-down": (_SlowDown, jitters.SlowDown)}
    for i, table in enumerate(tables):
        yield cast(jitters.SlowDown, chosen(table, kinds, {}, f"{where}[{i}]"))
