"""The calls that people make: `simulate` one run, `resume` a saved one, `scaling` over numbers of workers."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.compression import Compression
from ddlsim.compression.contract import AnyCompressor
from ddlsim.errors import ConfigError
from ddlsim.learning import Training
from ddlsim.learning.monitor import Progress
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import load_experiment
from ddlsim.run.result import Result
from ddlsim.run.resume import Saved, load
from ddlsim.run.simulate import run
from ddlsim.run.traced import Traced
from ddlsim.strategies import AllReduce, Strategy
from ddlsim.units import parse
from ddlsim.workload.compute import Affine, Measured, Roofline
from ddlsim.workload.devices import Device
from ddlsim.workload.jitter import Jitter, NoJitter, SlowDown
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["load_experiment", "resume", "scaling", "simulate"]

_DEFAULT_STRATEGY = AllReduce()
_NO_JITTER = NoJitter()


def simulate(
    cluster: str | Path | nx.Graph[str] | Cluster | Experiment,
    model: str | Path | Model = "resnet50",
    strategy: Strategy = _DEFAULT_STRATEGY,
    batch_size: int = 32,
    workers: int | None = None,
    *,
    steps: int = 10,
    warmup: int = 2,
    accumulation: int = 1,
    precision: str = "fp32",
    gradient_dtype: str = "fp32",
    compute: Measured | Affine | Roofline | Traced | None = None,
    device: str | Device | None = None,
    jitter: Jitter = _NO_JITTER,
    slow_downs: SlowDown | Iterable[SlowDown] = (),
    speed: Iterable[float] | None = None,
    seed: int = 0,
    max_time: float | str = float("inf"),
    training: Training | None = None,
    time_model: str | Path | Model | None = None,
    compression: Compression | AnyCompressor | None = None,
    stability: bool = False,
    progress: bool | Progress | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float | str = 60.0,
) -> Result:
    """Simulate a training run and return what it predicts.

    Takes the fields of :class:`~ddlsim.Experiment`, or an experiment, and

    stability         whether what is printed and written of the result says how stable it is (small runs say it
                      anyway): three more runs with inputs moved by 1e-12, see :meth:`ddlsim.Result.stability`

    For runs that learn:

    progress          show how far it is (default: on a terminal, after a second), or a function that is called
                      after every update (:data:`ddlsim.learning.monitor.Progress`)
    checkpoint        file in which the run is saved as it goes on and at its end, for :func:`ddlsim.resume`
    checkpoint_every  real time between that, in s or as "5 min"

    Raises :class:`~ddlsim.errors.ConfigError` for anything that does not fit, naming the field and the remedy.
    """
    given = Experiment(
        cluster="" if isinstance(cluster, Experiment) else cluster,
        model=model,
        strategy=strategy,
        batch_size=batch_size,
        workers=workers,
        steps=steps,
        warmup=warmup,
        accumulation=accumulation,
        precision=precision,
        gradient_dtype=gradient_dtype,
        compute=compute,
        device=device,
        jitter=jitter,
        slow_downs=slow_downs,  # type: ignore[arg-type]  # an experiment makes tuples of these
        speed=speed,  # type: ignore[arg-type]
        seed=seed,
        max_time=max_time,  # type: ignore[arg-type]
        training=training,
        time_model=time_model,
        compression=compression,
    )
    if not isinstance(cluster, Experiment):
        return _run(given, progress, checkpoint, checkpoint_every, stability=stability)
    default = Experiment(cluster="", model="resnet50")
    for field in dataclasses.fields(Experiment):
        if getattr(given, field.name) != getattr(default, field.name):
            raise ConfigError(
                f"simulate: {field.name} has no effect beside an experiment; use experiment.with_({field.name}=...)"
            )
    return _run(cluster, progress, checkpoint, checkpoint_every, stability=stability)


def resume(
    path: str | Path,
    experiment: Experiment,
    *,
    stability: bool = False,
    progress: bool | Progress | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float | str = 60.0,
) -> Result:
    """Continue the run saved at `path` (:meth:`ddlsim.Result.save`) and return the whole of it, bit for bit what
    it would have been without the break.

    `experiment` is the one that was saved, perhaps with another end: epochs, updates, targets, max_time. The clock
    runs again from the start, which takes little time, the arithmetic from where it was. Raises ConfigError for a
    file that is damaged, an experiment that differs, and an end that the saved run is beyond.
    """
    return _run(experiment, progress, checkpoint, checkpoint_every, load(path), stability=stability)


def _run(
    experiment: Experiment,
    progress: bool | Progress | None,
    checkpoint: str | Path | None,
    checkpoint_every: float | str,
    saved: Saved | None = None,
    *,
    stability: bool = False,
) -> Result:
    if not isinstance(stability, bool):
        raise ConfigError(f"stability = {stability!r}: must be True or False")
    given = checkpoint_every
    every = parse(given, "time", "checkpoint_every") if isinstance(given, str) else float(given)
    if not every > 0.0:
        raise ConfigError(f"checkpoint_every = {checkpoint_every!r}: must be above 0 s")
    go_on = functools.partial(
        run, experiment, saved=saved, checkpoint=checkpoint, checkpoint_every=every, stability=stability
    )
    if callable(progress):
        return go_on(progress=progress)
    if experiment.training is None or not (sys.stderr.isatty() if progress is None else progress):
        return go_on()
    from ddlsim.report.progress import bar

    with bar(experiment.training, experiment.max_time) as report:
        return go_on(progress=report)


def scaling(experiment: Experiment, workers: Iterable[int]) -> list[Result]:
    """Simulate the experiment with each number of workers; the cluster is loaded once."""
    loaded = dataclasses.replace(experiment, cluster=load_cluster(experiment.cluster))
    return [run(dataclasses.replace(loaded, workers=n)) for n in workers]
