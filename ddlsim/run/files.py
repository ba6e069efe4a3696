"""Experiments from TOML files: strict keys, units as text, errors in one line (docs/formats/own_files.md, Experiments).

The keys of a table are the fields of the class that it describes, e.g. :class:`ddlsim.AllReduce`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ddlsim.compression as compression
import ddlsim.optim as optim
import ddlsim.strategies as strategies
from ddlsim.arguments import checked
from ddlsim.bundled import split_options
from ddlsim.cluster import Cluster
from ddlsim.compression.choice import Compression
from ddlsim.compression.contract import Compressor
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError, DdlsimError, unknown_name
from ddlsim.named_code import names_code
from ddlsim.plain import parse_value, read_toml
from ddlsim.reliability import Background
from ddlsim.run.experiment import Experiment, Job
from ddlsim.run.strategy_names import STRATEGY_CLASSES
from ddlsim.run.traced import Traced
from ddlsim.schema import UNTRUSTED, Names, Schema, Source, class_named, refuse_code
from ddlsim.strategies import Strategy
from ddlsim.strategies.overlap import NAMED, Overlap
from ddlsim.strategies.staleness import Scaling
from ddlsim.workload import jitter as jitters
from ddlsim.workload.compute import Affine, Measured, PerKernel, Roofline
from ddlsim.workload.devices import Device
from ddlsim.workload.input import Input
from ddlsim.workload.model import Model, load_model

STRATEGIES: Mapping[str, type[Strategy]] = {
    name: getattr(strategies, of_class) for name, of_class in STRATEGY_CLASSES.items()
}
OVERLAPS: Names = {name: type(policy) for name, policy in NAMED.items()}
COMPUTE: Names = {
    "measured": Measured,
    "affine": Affine,
    "per_kernel": PerKernel,
    "roofline": Roofline,
    "traced": Traced,
}
JITTER: Names = {
    "none": jitters.NoJitter,
    "lognormal": jitters.Lognormal,
    "gamma": jitters.Gamma,
    "shifted-exponential": jitters.ShiftedExponential,
    "exponential": jitters.Exponential,
    "pareto": jitters.Pareto,
    "uniform": jitters.Uniform,
    "trace": jitters.Trace,
}
OPTIMIZERS: Names = {
    "sgd": optim.SGD,
    "momentum": optim.Momentum,
    "adam": optim.Adam,
    "lars": optim.LARS,
    "lamb": optim.LAMB,
}
SCHEDULES: Names = {
    "constant": optim.Constant,
    "steps": optim.Steps,
    "cosine": optim.Cosine,
    "polynomial": optim.Polynomial,
    "warm-up": optim.WarmUp,
}
COMPRESSORS: Names = {
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


@checked
def load_experiment(source: str | Path, *, allow_code: bool = False) -> Experiment:
    """Load an experiment from a TOML file.

    source      path of the file. Relative paths of clusters and models in the file are resolved from the folder that
                contains it
    allow_code  whether the file may refer to custom code: an algorithm as "package.module:function", or a ``type`` as
                "package.module:Name" (docs/write_your_own/README.md). By default, loading a file never runs code

    Raises :class:`~ddlsim.errors.ConfigError` for an invalid file; the message contains the file, field, value and
    rule, and suggests a correction.
    """
    path = Path(source)
    return SCHEMA.structure(Experiment, read_toml(path), str(path), folder=path.parent, allow_code=allow_code)


def strategy_of(
    text: str, where: str, options: Mapping[str, object] | None = None, *, allow_code: bool = False
) -> Strategy:
    """Return the strategy of a text such as ``parallel+tensor=8``, with `options` of the command line.

    where  source of the text, for messages

    Raises ConfigError for unknown names, and for unknown or missing fields of the strategy.
    """
    chosen, sizes = split_options(text)
    if not names_code(chosen) and chosen not in STRATEGIES:
        raise unknown_name("strategy", chosen, STRATEGIES)
    if not allow_code:
        refuse_code(chosen, where)
    make: Any = STRATEGIES[chosen] if chosen in STRATEGIES else class_named(chosen, where)
    fields = dataclasses.fields(make)
    takes = [f.name for f in fields if f.name in ("algorithm", "cost", "overlap", "servers", "placement")]
    for option in options or {}:
        if option not in takes:
            valid = ", ".join(f"--{name}" for name in takes) or "none"
            raise ConfigError(f"--{option} has no effect with {where}; valid options: {valid}")
    parts = (part.partition("=") for part in sizes)
    table = dict(options or {}) | {key: parse_value(value) if value else True for key, _, value in parts}
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in table:
            raise ConfigError(
                f"{where} requires {field.name}; write {where}+{field.name}=..., or in an experiment file strategy = "
                f'{{ type = "{chosen}", {field.name} = ... }}'
            )
    strategy: Strategy = make(**table) if not sizes else SCHEMA.build(make, table, where, Source(allow_code=allow_code))
    return strategy


def read_experiment(value: object, where: str, source: Source = UNTRUSTED) -> Experiment:
    """Return the experiment described by a table, or the one in the file named by a string."""
    if isinstance(value, str):
        path = Path(value) if source.folder is None else source.folder / value
        return load_experiment(path, allow_code=source.allow_code)
    table = with_cluster(cast("Mapping[str, object]", value))
    arguments = SCHEMA.arguments(Experiment, table, where, source, ": ")
    for name in ("model", "time_model"):  # may have custom layers
        if source.allow_code and isinstance(arguments.get(name), Path):
            arguments[name] = load_model(arguments[name], allow_code=True)
    try:
        return Experiment(**arguments)
    except DdlsimError as error:
        raise type(error)(f"{where}: {error}") from None


def with_cluster(table: Mapping[str, object], field: str = "background") -> dict[str, object]:
    """Return a table whose co-located jobs, in `field`, run on its cluster unless they set their own."""
    jobs, cluster = table.get(field), table.get("cluster")
    if not isinstance(jobs, list) or cluster is None:
        return dict(table)
    return {**table, field: [_on(cluster, job) for job in jobs]}


def _on(cluster: object, job: object) -> object:
    if not isinstance(job, Mapping) or not isinstance(job.get("experiment"), Mapping):
        return job
    return {**job, "experiment": {"cluster": cluster, **job["experiment"]}}


def fields_from(table: Mapping[str, object], where: str, source: Source = UNTRUSTED) -> dict[str, Any]:
    """Return the fields of an experiment that a table sets. Raises ConfigError."""
    return SCHEMA.arguments(Experiment, with_cluster(table), where, source, ": ", partial=True)


#: format of experiments and their parts in files
SCHEMA = Schema(
    {
        Strategy: {**STRATEGIES, "splits": strategies.Splits},  # for studies and `recommend`
        Overlap: OVERLAPS,
        **{kind: {name: kind} for name, kind in OVERLAPS.items()},
        Scaling: {
            "inverse": strategies.InverseStaleness,
            "square-root": strategies.SquareRootStaleness,
            "exponential": strategies.ExponentialPenalty,
        },
        **{kind: {name: kind} for name, kind in (*COMPUTE.items(), *JITTER.items())},
        optim.Optimizer: OPTIMIZERS,
        optim.Schedule: SCHEDULES,
        Compressor: COMPRESSORS,
    },
    opaque=(Cluster, Model, DataSet, Device),
    untyped=(Job, Background, Input, Compression),
    fields={(Experiment, "background"): Sequence[Job | Background]},
    readers={Experiment: read_experiment},
    filled_in=("bounds",),  # set by layer-wise optimizers
    short={Compression: lambda choice: choice if choice.down or choice.cost else choice.compressor},
)
