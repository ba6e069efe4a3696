"""The main functions: `simulate` one run, `resume` a saved one, `scaling` over numbers of workers."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddlsim.arguments import Count, checked, quantity, takes_fields_of
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.learning.monitor import Progress
from ddlsim.run.experiment import Experiment
from ddlsim.run.result import Result
from ddlsim.run.resume import Saved, load
from ddlsim.run.simulate import run
from ddlsim.units import si

#: real time between two files that a run is saved in
Interval = Annotated[float | str, quantity("time", "5 min", infinite=True)]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options that do not affect the run."""

    stability: bool = False
    progress: bool | Progress | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: Interval = 60.0


@dataclass(frozen=True)
class _Simulation(Experiment, _Options):
    cluster: ClusterLike | Experiment  # type: ignore[assignment]  # more than in an experiment


@dataclass(frozen=True)
class _Continuation(_Options):
    path: str | Path
    experiment: Experiment


@takes_fields_of(_Simulation)
def simulate(wanted: _Simulation) -> Result:
    """Simulate a training run and return the result.

    Pass either an :class:`~ddlsim.Experiment` or its fields as arguments. The additional arguments are:

    stability         whether to include the stability of the result (:meth:`ddlsim.Result.stability`) in the summary
                      and the JSON output. Computing it takes three more runs, with inputs perturbed by 1e-12. Results
                      of small runs always include it

    The following apply to training runs only:

    progress          whether to show a progress bar, or a function that is called after every update
                      (:data:`ddlsim.learning.monitor.Progress`). By default, a progress bar is shown on a terminal
                      after one second
    checkpoint        file to which the run is saved periodically and at its end, for :func:`ddlsim.resume`
    checkpoint_every  wall-clock time between saves, in seconds or as a string such as "5 min"

    Raises :class:`~ddlsim.errors.ConfigError` for invalid or incompatible fields; the message names the field and
    suggests a correction.
    """
    fields = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(Experiment)}
    if not isinstance(wanted.cluster, Experiment):
        return _run(Experiment(**fields), wanted)
    for field in dataclasses.fields(Experiment):
        if field.name != "cluster" and fields[field.name] != field.default:
            raise ConfigError(
                f"simulate: {field.name} has no effect if an experiment is passed; use "
                f"experiment.with_({field.name}=...)"
            )
    return _run(wanted.cluster, wanted)


@takes_fields_of(_Continuation)
def resume(wanted: _Continuation) -> Result:
    """Resume a run that :meth:`ddlsim.Result.save` saved, and return the result of the complete run.

    path              file with the saved run
    experiment        the saved experiment; only its end (epochs, updates, targets, max_time) may differ
    stability, progress, checkpoint, checkpoint_every
                      options as in :func:`ddlsim.simulate`

    The result is bit-for-bit identical to that of an uninterrupted run. The simulated clock is replayed from the start,
    which is fast; the arithmetic continues where the saved run stopped. Raises ConfigError if the file is damaged, the
    experiment differs, or the saved run has already passed the end of the experiment.
    """
    return _run(wanted.experiment, wanted, load(wanted.path))


def _run(experiment: Experiment, options: _Options, saved: Saved | None = None) -> Result:
    file, every = options.checkpoint, si(options.checkpoint_every, "time")
    go_on = functools.partial(
        run, experiment, saved=saved, checkpoint=file, checkpoint_every=every, stability=options.stability
    )
    progress = options.progress
    if callable(progress):
        result = go_on(progress=progress)
    elif experiment.training is None or not (sys.stderr.isatty() if progress is None else progress):
        result = go_on()
    else:
        from ddlsim.report.progress import bar

        with bar(experiment.training, si(experiment.max_time, "time")) as report:
            result = go_on(progress=report)
    if result.has_failure_timeline and not result.interrupted:
        _ = result.failure_timeline  # raises its errors here instead of when it is printed
    return result


@checked
def scaling(experiment: Experiment, workers: Iterable[Count]) -> list[Result]:
    """Simulate the experiment with each of the given worker counts, and return the results.

    workers  worker counts to simulate. The cluster is loaded only once
    """
    loaded = dataclasses.replace(experiment, cluster=load_cluster(experiment.cluster))
    return [run(dataclasses.replace(loaded, workers=n)) for n in workers]
