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
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

import ddlsim.compression as compression
import ddlsim.optim as optim
import ddlsim.strategies as strategies
from ddlsim.arguments import checked
from ddlsim.bundled import split_options
from ddlsim.compression.choice import Compression
from ddlsim.errors import ConfigError, DdlsimError, shown, unknown_name
from ddlsim.learning import Dirichlet, Phase, Training
from ddlsim.life import Background, Checkpoints, Elastic, Failures, LinkFault, RandomFaults, SlowDown, Stop
from ddlsim.run.experiment import Experiment
from ddlsim.run.job import Job
from ddlsim.run.strategy_names import STRATEGY_CLASSES
from ddlsim.run.tables import Kinds, build, chosen, refuse_code, schema_of
from ddlsim.run.traced import Traced
from ddlsim.runtime.fabric import Fabric
from ddlsim.strategies import Strategy
from ddlsim.workload import jitter as jitters
from ddlsim.workload.compute import Affine, Measured, PerKernel, Roofline
from ddlsim.workload.contention import OverlapSlowdown
from ddlsim.workload.input import Cache, Copies, Input
from ddlsim.workload.jitter import Spread
from ddlsim.workload.model import load_model
from ddlsim.workload.toml_files import read_toml, validate

STRATEGIES: Mapping[str, type[Strategy]] = {
    name: getattr(strategies, of_class) for name, of_class in STRATEGY_CLASSES.items()
}
OVERLAPS: Kinds = {
    "none": strategies.NoOverlap,
    "layer": strategies.PerLayer,
    "ddp": strategies.DdpBuckets,
    "horovod": strategies.HorovodFusion,
    "priority": strategies.Priority,
    "while-waiting": strategies.WhileWaiting,
}
COMPUTE: Kinds = {
    "measured": Measured, "affine": Affine, "per_kernel": PerKernel, "roofline": Roofline, "traced": Traced,
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
    "staleness_scaling": {
        "inverse": strategies.InverseStaleness,
        "square-root": strategies.SquareRootStaleness,
        "exponential": strategies.ExponentialPenalty,
    },
    "delay_compensation": {"delay-compensation": strategies.DelayCompensation},
    "optimizer": OPTIMIZERS,
    "outer": OPTIMIZERS,
    "rate": SCHEDULES,
    "then": SCHEDULES,
    "sharding": {"dirichlet": Dirichlet},
    "growing_batch": {"growing-batch": optim.GrowingBatch},
    "phases": {"phase": Phase},
    "compute": COMPUTE,
    "compressor": COMPRESSORS,
    "down": COMPRESSORS,
    "inner": COMPRESSORS,
    "cost": {"codec-cost": compression.CodecCost},
    "work": {"server-work": strategies.ServerWork},
    "host": {"host-memory": strategies.HostMemory},
    "groups": {"distribution": strategies.Distribution},
    "cache": {"cache": Cache},
}
#: field of an experiment -> what a table in it may describe
FIELDS: Mapping[str, Kinds] = {
    **PARTS,
    "strategy": {**STRATEGIES, "splits": strategies.Splits},  # of a study, and of a question to `recommend`
    "jitter": JITTER,
    "slow_downs": {"slow-down": SlowDown},
    "faults": {"stop": Stop, "link-fault": LinkFault, "random-faults": RandomFaults},
    "speed": {"spread": Spread},
    "input": {"input": Input, "copies": Copies},
    "failures": {"failures": Failures},
    "checkpoints": {"checkpoints": Checkpoints},
    "elastic": {"elastic": Elastic},
    "beside": {"job": Job, "background": Background},
    "experiment": {"experiment": Experiment},  # of a job
    "overlap_slowdown": {"overlap-slowdown": OverlapSlowdown},
    "training": {"training": Training},
    "compression": COMPRESSORS,
    "fabric": {"fabric": Fabric},
}

#: keys that tell other files -> what these are, and where they go
_OTHER_FILES = {
    "layers": "a model; give it as model, ddlsim run CLUSTER --model FILE",
    "vary": "a study; run it with ddlsim sweep FILE",
    "jobs": "several jobs; run them with ddlsim run FILE, or ddlsim.load_jobs",
}


@checked
def load_experiment(source: str | Path, *, allow_code: bool = False) -> Experiment:
    """Return the experiment that the TOML file `source` describes.

    A file cannot run code: an algorithm written as "package.module:function" and a ``type`` as "package.module:Name"
    are refused unless `allow_code`. Then every part can be one of yours (docs/write_your_own/README.md).
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
    fields = fields_from(table, path, str(path), allow_code=allow_code, whole=True)
    for field in ("model", "time_model"):  # may have layers of the user's
        if allow_code and isinstance(fields.get(field), Path):
            fields[field] = load_model(fields[field], allow_code=True)  # type: ignore[arg-type]
    try:
        return Experiment(**fields)  # type: ignore[arg-type]
    except DdlsimError as error:
        raise type(error)(f"{path}: {error}") from None


def neighbours(path: Path, field: str, tables: object, cluster: object, *, allow_code: bool) -> list[Job | Background]:
    """Return the jobs and traffic that `tables` of a file describe, the ones with an experiment, that is a file beside
    it or a table, the others without. Experiments that name no cluster have `cluster`."""
    assert isinstance(tables, list)
    made: list[Job | Background] = []
    for i, table in enumerate(tables):
        where, rest = f"{path}: {field}[{i}]", dict(table)
        kind = rest.pop("type", "job" if "experiment" in rest else "background")
        if kind not in FIELDS["beside"]:
            raise unknown_name("type", str(kind), FIELDS["beside"], where)
        if kind == "background":
            if isinstance(rest.get("trace"), str):
                rest["trace"] = str(path.parent / rest["trace"])
            made.append(build(Background, rest, PARTS, where, allow_code=allow_code))
            continue
        what = rest.pop("experiment", None)
        schema = schema_of(Job, {**PARTS, "experiment": {}})
        validate(TypeAdapter(schema), {**rest, "experiment": {}}, where, schema.model_fields)
        if isinstance(what, str):
            experiment = load_experiment(path.parent / what, allow_code=allow_code)
        elif isinstance(what, dict):
            own = {"cluster": cluster, **what} if cluster is not None else what
            experiment = experiment_from(own, path, allow_code=allow_code)
        else:
            raise ConfigError(f"{where}: experiment = {shown(what)}: must be the file of an experiment, or a table")
        try:
            made.append(Job(experiment, **rest))
        except ConfigError as error:
            raise type(error)(f"{where}: {error}") from None
    return made


def fields_from(
    table: Mapping[str, object], path: Path, where: str, *, allow_code: bool = False, whole: bool = False
) -> dict[str, object]:
    """Return what a table says of an experiment's fields: all that have no default, if it is the `whole` of one.

    Names of files in it lie beside `path`; `where` is what errors call it. Raises ConfigError.
    """
    schema = schema_of(Experiment, FIELDS)
    required = {} if whole else {name: "" for name, field in schema.model_fields.items() if field.is_required()}
    validate(TypeAdapter(schema), {**required, **table}, where, schema.model_fields)
    fields = {
        field: value_of(path, field, value, f"{where}: {field}", allow_code=allow_code)
        for field, value in table.items() if field != "beside"
    }  # fmt: skip
    if "beside" in table:
        fields["beside"] = neighbours(path, "beside", table["beside"], table.get("cluster"), allow_code=allow_code)
    return fields


def beside(path: Path, name: str) -> str | Path:
    """Return the file or folder `name` (of a file: with options) beside `path` if there is one, else the name."""
    stem, options = split_options(name, path.parent)
    file = path.parent / stem
    if file.suffix and os.path.isfile(file):
        return Path("+".join((str(file), *options)))
    return path.parent / name if "/" in name and os.path.isdir(path.parent / name) else name


def value_of(path: Path, field: str, value: object, where: str, *, allow_code: bool = False) -> object:
    """Return what `value` stands for in a field of an experiment in the file `path`.

    A table stands for an object, the name of a file or folder beside `path` for that; `allow_code` as for
    :func:`ddlsim.run.tables.build`.
    """
    if isinstance(value, list):
        return tuple(value_of(path, field, v, f"{where}[{i}]", allow_code=allow_code) for i, v in enumerate(value))
    if not allow_code:
        refuse_code(value, where, field.rpartition(".")[2])
    if isinstance(value, str) and field in ("cluster", "model", "time_model", "training.data"):
        return beside(path, value)
    if not isinstance(value, dict):
        return value
    kinds = FIELDS.get(field.rpartition(".")[2])
    if kinds is None:
        raise ConfigError(f"{where} = {shown(value)}: a table cannot stand here; write a number or a text")
    if field == "compute" and isinstance(value.get("path"), str):
        value = {**value, "path": str(path.parent / value["path"])}  # of a trace
    if field == "failures" and isinstance(value.get("trace"), str):
        value = {**value, "trace": str(path.parent / value["trace"])}
    if field == "input":
        value = {"type": "input", **value}
    if field == "training":
        data = value.get("data")
        near = {"data": str(beside(path, data))} if isinstance(data, str) else {}
        return build(Training, {**value, **near}, PARTS, where, allow_code=allow_code)
    if field == "compression" and "compressor" in value:
        return build(Compression, value, PARTS, where, allow_code=allow_code)
    return chosen(value, kinds, PARTS, where, allow_code=allow_code)
