"""`Experiment`: everything that determines a run, frozen; its manifest can be printed and stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.compression.choice import compression_of
from ddlsim.compression.contract import AnyCompressor
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.learning import Training
from ddlsim.run.traced import Traced
from ddlsim.strategies import AllReduce, Strategy
from ddlsim.units import parse
from ddlsim.workload.compute import Affine, Measured, Roofline
from ddlsim.workload.devices import Device
from ddlsim.workload.jitter import Jitter, NoJitter, SlowDown
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Experiment"]


@dataclass(frozen=True)
class Experiment:
    """A training run to be simulated.

    cluster         bundled name, path, networkx graph or :class:`Cluster`
    model           bundled name, path or :class:`Model`
    strategy        how workers exchange gradients
    batch_size      samples per worker and (micro-)step
    workers         number of workers, placed on the cluster's first devices; None: on all of them
    steps           steps per worker that are measured (asynchronous: on average)
    warmup          steps before those, simulated but not measured
    accumulation    micro-steps per exchange
    precision       arithmetic ("fp32", "tf32", "fp16", "bf16")
    gradient_dtype  gradients on the wire ("fp32", "fp16", "bf16")
    compute         where compute time comes from: Measured, Affine, Roofline, Traced; None: the device's measured
                    curve for this model if the catalogue has one, else Roofline
    device          device of all workers, instead of the cluster's own
    jitter          distribution of a factor on every step's compute time
    slow_downs      transient slow-downs of some workers
    speed           permanent compute speed factor per worker (1.0: nominal)
    seed            of all random streams
    max_time        s of simulated time at which the run ends in any case
    training        what the workers learn, and when that is enough (``steps`` has no effect then); None: the run
                    is about time only
    time_model      model whose sizes and compute times the clock uses, where `model` is a small one that learns
    compression     what workers compress gradients with: a compressor such as TopK(0.01), or a Compression
    """

    cluster: str | Path | nx.Graph[str] | Cluster
    model: str | Path | Model
    strategy: Strategy = AllReduce()
    batch_size: int = 32
    workers: int | None = None
    steps: int = 10
    warmup: int = 2
    accumulation: int = 1
    precision: str = "fp32"
    gradient_dtype: str = "fp32"
    compute: Measured | Affine | Roofline | Traced | None = None
    device: str | Device | None = None
    jitter: Jitter = NoJitter()
    slow_downs: tuple[SlowDown, ...] = ()
    speed: tuple[float, ...] | None = None
    seed: int = 0
    max_time: float = math.inf
    training: Training | None = None
    time_model: str | Path | Model | None = None
    compression: Compression | AnyCompressor | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("steps", 1), ("warmup", 0), ("accumulation", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} = {value!r}: must be a whole number of at least {least}")
        workers = self.workers
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise ConfigError(f"workers = {workers!r}: must be a whole number of at least 1")
        if isinstance(self.max_time, str):
            object.__setattr__(self, "max_time", parse(self.max_time, "time", "max_time"))
        if not (isinstance(self.max_time, int | float) and self.max_time > 0.0):
            raise ConfigError(f"max_time = {self.max_time!r}: must be above 0 s")
        _require(self.strategy, ("start", "label", "updates"), "strategy", "ddlsim.AllReduce('ring')")
        _require(self.jitter, ("sample", "mean"), "jitter", "ddlsim.Lognormal(0.1)")
        if self.compute is not None and not isinstance(self.compute, Measured | Affine | Roofline | Traced):
            raise ConfigError(
                f"compute = {self.compute!r}: must be a Measured, Affine, Roofline or Traced, such as "
                "Measured('97 ms', 32)"
            )
        if self.device is not None and not isinstance(self.device, str | Device):
            raise ConfigError(f"device = {self.device!r}: must be a name such as 'v100', or a Device")
        if self.training is not None and not isinstance(self.training, Training):
            raise ConfigError(
                f"training = {self.training!r}: must be a ddlsim.Training, e.g. Training('digits', rate=0.1, epochs=5)"
            )
        if self.training is not None and not self.training.has_end and math.isinf(self.max_time):
            raise ConfigError(
                "training has no end: give it epochs, updates, target_accuracy or target_loss, or the run a max_time"
            )
        if self.training is None and self.time_model is not None:
            raise ConfigError("time_model has no effect without training; give the model that takes the time as model")
        object.__setattr__(self, "compression", compression_of(self.compression))
        self._check_compression()
        object.__setattr__(self, "slow_downs", _slow_downs(self.slow_downs))
        if self.speed is not None:
            object.__setattr__(self, "speed", _factors(self.speed))

    def _check_compression(self) -> None:
        if self.compression is None:
            return
        if not getattr(self.strategy, "takes_compression", False):
            raise ConfigError(
                f"compression has no effect with {self.strategy.label}; AllReduce, ParameterServer and "
                "AsyncParameterServer take it"
            )
        if self.gradient_dtype != "fp32":
            raise ConfigError(
                f"gradient_dtype = {self.gradient_dtype!r} beside compression: compressors take fp32 and say what "
                "travels; leave it out (compression=ddlsim.FP16() halves the bytes)"
            )

    def with_(self, **changes: object) -> Experiment:
        """Return the experiment with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def manifest(self) -> dict[str, object]:
        """Return all fields as plain values, for printing and storing."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _require(value: object, attributes: tuple[str, ...], name: str, example: str) -> None:
    if isinstance(value, type) or not all(hasattr(value, attribute) for attribute in attributes):
        raise ConfigError(f"{name} = {value!r}: must be an object such as {example}")


def _slow_downs(value: SlowDown | Iterable[SlowDown]) -> tuple[SlowDown, ...]:
    found = (value,) if isinstance(value, SlowDown) else tuple(value) if isinstance(value, Iterable) else (value,)
    for i, slow in enumerate(found):
        if not isinstance(slow, SlowDown):
            raise ConfigError(f"slow_downs[{i}] = {slow!r}: must be a SlowDown(ranks, start, duration, factor)")
    return found


def _factors(value: object) -> tuple[float, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        factors = tuple(value)
        if all(isinstance(f, int | float | np.floating | np.integer) and math.isfinite(f) and f > 0 for f in factors):
            return tuple(float(f) for f in factors)
    raise ConfigError(f"speed = {value!r}: must be a list of one factor above 0 per worker")


def _plain(value: object) -> object:
    if isinstance(value, Cluster | Model | Device | DataSet):
        return value.name
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"type": type(value).__name__, **fields}
    return getattr(value, "__name__", str(value))
