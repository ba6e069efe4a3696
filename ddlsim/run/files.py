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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ddlsim.errors import ConfigError, DdlsimError, unknown_name
from ddlsim.run.experiment import Experiment
from ddlsim.strategies import (
    AllReduce,
    AsyncParameterServer,
    DdpBuckets,
    HorovodFusion,
    NoOverlap,
    ParameterServer,
    PerLayer,
    Priority,
    Strategy,
)
from ddlsim.strategies.overlap import Overlap
from ddlsim.units import parse
from ddlsim.workload import jitter as jitters
from ddlsim.workload.compute import Affine, Measured, Roofline
from ddlsim.workload.toml_files import read_toml, validate

__all__ = ["load_experiment"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _File(_Table):
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
    strategy: dict[str, object] = {"type": "all-reduce"}
    compute: dict[str, object] | None = None
    jitter: dict[str, object] | None = None
    slow_downs: list[dict[str, object]] = []


class _AllReduce(_Table):
    algorithm: str = "ring"
    overlap: str | dict[str, object] = "ddp"
    rank_order: str | list[int] = "topology"

    def build(self, where: str) -> AllReduce:
        return AllReduce(self.algorithm, _overlap(self.overlap, where), self.rank_order)


class _ParameterServer(_Table):
    servers: int = 1
    placement: str = "own"
    overlap: str | dict[str, object] = "layer"
    local_reduction: bool = False

    def build(self, where: str) -> ParameterServer:
        return ParameterServer(self.servers, self.placement, _overlap(self.overlap, where), self.local_reduction)


class _AsyncParameterServer(_Table):
    servers: int = 1
    placement: str = "own"
    apply_time: str = "0 s"

    def build(self, where: str) -> AsyncParameterServer:
        return AsyncParameterServer(self.servers, self.placement, self.apply_time)


class _Ddp(_Table):
    cap: str = "25 MiB"
    first: str = "1 MiB"


class _Horovod(_Table):
    threshold: str = "128 MiB"
    cycle_time: str = "1 ms"


class _Priority(_Table):
    partition: str = "4 MB"
    in_flight: int = 4


class _Nothing(_Table):
    pass


class _Measured(_Table):
    batch_size: int
    step_time: str | None = None
    throughput: str | None = None


class _Affine(_Table):
    c0: str
    c1: str


class _Roofline(_Table):
    efficiency: float | None = None
    memory_efficiency: float = 0.8


class _Cv(_Table):
    cv: float


class _MeanExtra(_Table):
    mean_extra: float


class _Tail(_Table):
    a: float


class _Range(_Table):
    low: float
    high: float


class _Values(_Table):
    values: list[float]


class _SlowDown(_Table):
    ranks: int | list[int]
    start: str
    duration: str
    factor: float


STRATEGIES: Mapping[str, type[_AllReduce] | type[_ParameterServer] | type[_AsyncParameterServer]] = {
    "all-reduce": _AllReduce,
    "parameter-server": _ParameterServer,
    "async-parameter-server": _AsyncParameterServer,
}
Kinds = Mapping[str, tuple[type[_Table], Callable[..., object]]]
OVERLAPS: Kinds = {
    "none": (_Nothing, NoOverlap),
    "layer": (_Nothing, PerLayer),
    "ddp": (_Ddp, DdpBuckets),
    "horovod": (_Horovod, HorovodFusion),
    "priority": (_Priority, Priority),
}
COMPUTE: Kinds = {
    "measured": (_Measured, Measured),
    "affine": (_Affine, Affine),
    "roofline": (_Roofline, Roofline),
}
JITTER: Kinds = {
    "none": (_Nothing, jitters.NoJitter),
    "lognormal": (_Cv, jitters.Lognormal),
    "gamma": (_Cv, jitters.Gamma),
    "shifted-exponential": (_MeanExtra, jitters.ShiftedExponential),
    "exponential": (_Nothing, jitters.Exponential),
    "pareto": (_Tail, jitters.Pareto),
    "uniform": (_Range, jitters.Uniform),
    "trace": (_Values, jitters.Trace),
}


def load_experiment(source: str | Path, *, allow_code: bool = False) -> Experiment:
    """Return the experiment that the TOML file `source` describes.

    A file cannot run code: an algorithm written as "package.module:function" is refused unless `allow_code`.
    A cluster or model that is the name of a file beside it is read from there. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    table = read_toml(path)
    file = validate(TypeAdapter(_File), table, str(path), _File.model_fields)
    algorithm = file.strategy.get("algorithm")
    if isinstance(algorithm, str) and ":" in algorithm and not allow_code:
        raise ConfigError(
            f"{path}: strategy.algorithm = {algorithm!r} would import code; if you trust the file, use "
            f"load_experiment(path, allow_code=True), or give --algorithm on the command line"
        )
    try:
        return Experiment(
            cluster=_beside(path, file.cluster),
            model=_beside(path, file.model),
            strategy=_strategy(file.strategy, f"{path}: strategy"),
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
            max_time=float("inf") if file.max_time is None else parse(file.max_time, "time"),
            compute=_chosen(file.compute, COMPUTE, f"{path}: compute"),  # type: ignore[arg-type]
            jitter=_chosen(file.jitter or {"type": "none"}, JITTER, f"{path}: jitter"),  # type: ignore[arg-type]
            slow_downs=tuple(
                _slow_down(entry, f"{path}: slow_downs[{i}]") for i, entry in enumerate(file.slow_downs)
            ),
        )
    except DdlsimError as error:
        text = str(error)
        raise type(error)(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _beside(path: Path, name: str) -> str | Path:
    """Return the file `name` beside `path` if there is one, else the name."""
    file = path.parent / name
    return file if file.suffix and file.is_file() else name


def _type_of(table: dict[str, object], known: Mapping[str, object], where: str) -> tuple[str, dict[str, object]]:
    rest = dict(table)
    kind = rest.pop("type", None)
    if kind is None:
        raise ConfigError(f"{where}: key 'type' is missing; add type = one of {', '.join(sorted(known))}")
    if not isinstance(kind, str) or kind not in known:
        raise unknown_name("type", str(kind), known, where)
    return kind, rest


def _strategy(table: dict[str, object], where: str) -> Strategy:
    kind, rest = _type_of(table, STRATEGIES, where)
    schema = STRATEGIES[kind]
    return validate(TypeAdapter(schema), rest, where, schema.model_fields).build(f"{where}.overlap")


def _overlap(value: str | dict[str, object], where: str) -> str | Overlap:
    return value if isinstance(value, str) else _chosen(value, OVERLAPS, where)  # type: ignore[return-value]


def _chosen(table: dict[str, object] | None, kinds: Kinds, where: str) -> object:
    """Return the object that a table with a ``type`` describes."""
    if table is None:
        return None
    kind, rest = _type_of(table, kinds, where)
    schema, make = kinds[kind]
    fields = validate(TypeAdapter(schema), rest, where, schema.model_fields)
    try:
        return make(**fields.model_dump())
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from None


def _slow_down(table: dict[str, object], where: str) -> jitters.SlowDown:
    fields = validate(TypeAdapter(_SlowDown), table, where, _SlowDown.model_fields)
    try:
        return jitters.SlowDown(fields.ranks, fields.start, fields.duration, fields.factor)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from None
