"""The calls that people make: `simulate` one run, `resume` a saved one, `scaling` over numbers of workers."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddlsim.arguments import Count, Index, Positive, Seed, checked, quantity
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.learning.monitor import Progress
from ddlsim.run.experiment import (
    CompressionLike,
    ComputeLike,
    Experiment,
    GradientType,
    JitterLike,
    StrategyLike,
    TrainingLike,
)  # fmt: skip
from ddlsim.run.files import load_experiment
from ddlsim.run.result import Result
from ddlsim.run.resume import Saved, load
from ddlsim.run.simulate import run
from ddlsim.strategies import AllReduce
from ddlsim.units import si
from ddlsim.workload.devices import DeviceLike
from ddlsim.workload.jitter import NoJitter, SlowDown
from ddlsim.workload.model import ModelLike

if TYPE_CHECKING:
    pass

__all__ = ["load_experiment", "resume", "scaling", "simulate"]

_DEFAULT_STRATEGY = AllReduce()
_NO_JITTER = NoJitter()
#: real time between two files that a run is saved in
Pause = Annotated[float | str, quantity("time", "5 min", infinite=True)]


@checked
def simulate(
    cluster: ClusterLike | Experiment,
    model: ModelLike = "resnet50",
    strategy: StrategyLike = _DEFAULT_STRATEGY,
    batch_size: Count = 32,
    workers: Count | None = None,
    *,
    steps: Count = 10,
    warmup: Index = 2,
    accumulation: Count = 1,
    precision: str = "fp32",
    gradient_dtype: GradientType = "fp32",
    compute: ComputeLike | None = None,
    device: DeviceLike | None = None,
    jitter: JitterLike = _NO_JITTER,
    slow_downs: SlowDown | Iterable[SlowDown] = (),
    speed: Iterable[Positive] | None = None,
    seed: Seed = 0,
    max_time: Annotated[float | str, quantity("time", "8 h", infinite=True)] = float("inf"),
    training: TrainingLike | None = None,
    time_model: ModelLike | None = None,
    compression: CompressionLike | None = None,
    stability: bool = False,
    progress: bool | Progress | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: Pause = 60.0,
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


@checked
def resume(
    path: str | Path,
    experiment: Experiment,
    *,
    stability: bool = False,
    progress: bool | Progress | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: Pause = 60.0,
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
    every = si(checkpoint_every, "time")
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


@checked
def scaling(experiment: Experiment, workers: Iterable[Count]) -> list[Result]:
    """Simulate the experiment with each number of workers; the cluster is loaded once."""
    loaded = dataclasses.replace(experiment, cluster=load_cluster(experiment.cluster))
    return [run(dataclasses.replace(loaded, workers=n)) for n in workers]
