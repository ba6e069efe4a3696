"""Prediction intervals of runs, from the uncertainty of the calibration and the jitter of step times."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ddlsim.arguments import Seed, checked, integer, number
from ddlsim.cluster import load_cluster
from ddlsim.cluster.calibrated import Beyond, beyond
from ddlsim.errors import ConfigError
from ddlsim.readable import percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import family, measured_steps, outside
from ddlsim.run.result import Result
from ddlsim.run.seeds import t_quantile
from ddlsim.run.simulate import clock_of, complete
from ddlsim.strategies import contract
from ddlsim.streams import stream
from ddlsim.validation.calibration import Calibration
from ddlsim.validation.calibration_file import load_calibration
from ddlsim.validation.compute_fit import ComputeFit
from ddlsim.validation.curves import Interval
from ddlsim.validation.log_fit import Floats
from ddlsim.workload.compute import Affine, Measured
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import load_model


@dataclass(frozen=True, eq=False)
class RunInterval:
    """A simulated run with prediction intervals for its throughput and step time.

    result       result of the run that was simulated with the calibrated parameters
    throughput   prediction interval for the throughput, in samples/s
    step_time    prediction interval for the step time, in s
    throughputs  (n_draws,) throughput of each simulation with sampled parameters, in samples/s
    """

    result: Result
    throughput: Interval
    step_time: Interval
    throughputs: Floats

    def to_dict(self) -> dict[str, object]:
        """Return both intervals as a dictionary of plain values."""
        intervals = {"throughput": self.throughput, "step_time": self.step_time}
        ends = {name: {"low": t.low, "high": t.high} for name, t in intervals.items()}
        notes = {"notes": list(self.throughput.notes)} if self.throughput.notes else {}
        return {**ends, "level": self.throughput.level, "n_draws": len(self.throughputs), **notes}

    def __str__(self) -> str:
        t, level = self.throughput, percent(self.throughput.level, 0)
        draws = f" ({len(self.throughputs)} draws)" if len(self.throughputs) else ""
        text = f"{t.value:.4g} samples/s, {level} between {t.low:.4g} and {t.high:.4g}{draws}"
        return "; ".join([text, *t.notes])


def calibrated(experiment: Experiment, calibration: Calibration) -> Experiment:
    """Return the experiment with the calibrated cluster and, unless set, the calibrated compute time and jitter."""
    fit = _compute(experiment, calibration)
    jitter, compute = experiment.jitter, experiment.compute
    if isinstance(jitter, NoJitter) and calibration.jitter is not None:
        jitter = calibration.jitter.jitter
    if fit is not None:
        compute = _typical(fit, experiment, calibration)
    return experiment.with_(cluster=calibration.cluster, jitter=jitter, compute=compute)


Draws = Annotated[int, integer(2, 100_000)]
Level = Annotated[float, number(0.0, 1.0, above=True, below=True, hint=", such as 0.95")]


@checked
def predict_interval(
    experiment: Experiment,
    calibration: Calibration | str | Path | None = None,
    *,
    n_draws: Draws = 20,
    level: Level = 0.95,
    seed: Seed = 0,
) -> RunInterval:
    """Compute prediction intervals for throughput and step time from the uncertainty of a calibration.

    The experiment is simulated `n_draws` times with sampled parameters, and the intervals are quantiles of the results.
    Past prediction errors for the same strategy widen each interval at both ends.

    calibration  result of :func:`ddlsim.calibrate`, or a calibrated cluster file; None: the calibration of the
                 experiment's cluster. If the cluster has none, only the jitter is sampled
    n_draws      number of simulations, each with a different seed
    level        probability that the interval contains the measured value
    seed         seed of the samples

    If no measured runs resemble the experiment, the intervals include a note. Raises ConfigError if nothing is
    uncertain, for example for a single worker without jitter or a calibration.
    """
    if isinstance(calibration, str | Path):
        calibration = load_calibration(calibration)
    elif calibration is None:
        calibration = _calibration_of(experiment)
    base = calibrated(experiment, calibration) if calibration is not None else experiment
    result = complete(base)
    random = stream(seed, 0, "calibration")
    varies = calibration is not None or not isinstance(base.jitter, NoJitter)
    draws = [complete(_drawn(base, experiment, calibration, random, i)) for i in range(n_draws if varies else 0)]
    throughputs = np.array([draw.throughput for draw in draws])
    like = family(experiment, load_cluster(base.cluster), _model(experiment), result.n_workers, result.fitted_stack)
    if result.fitted_stack:
        like = with_stack(like, result, base)
    if not draws and not like.slower:
        raise ConfigError(
            "predict_interval: there is no uncertainty to propagate, because the run has one worker with a fixed "
            "compute time and no jitter; set calibration=ddlsim.calibrate(...), use a calibrated cluster file, or "
            "add jitter"
        )
    times = _interval(result.step_time, np.array([draw.step_time for draw in draws]), level, like)
    rates = _interval(1.0 / result.throughput, 1.0 / throughputs, level, like)
    rates = Interval(1.0 / rates.high, result.throughput, 1.0 / rates.low, level, like.notes)
    return RunInterval(result, rates, times, throughputs)


@checked
def interval_of(result: Result, *, n_draws: Draws = 20, level: Level = 0.95, seed: Seed = 0) -> RunInterval:
    """Return the interval of a run that was already simulated; see :meth:`ddlsim.Result.interval`."""
    result.require_single_job("interval")
    experiment = clock_of(result.given if result.given is not None else result.experiment)
    loaded = _calibration_of(experiment)
    calibration = None if loaded is None else dataclasses.replace(loaded, jitter=None)
    return predict_interval(experiment, calibration, n_draws=n_draws, level=level, seed=seed)


def with_stack(like: Beyond, result: Result, experiment: Experiment) -> Beyond:
    """Widen the deviation `like` by the uncertainty of a stack that was fitted to measured runs.

    The run is simulated at both ends of the stack's spread. More workers than in these runs also widen the interval.
    """
    stack, n = result.workloads[0].stack, result.n_workers
    outside = Beyond() if stack.workers is None else beyond(n, stack.workers, "workers")
    ends = []
    for factor in stack.spread:
        speeds = [speed / factor for speed in experiment.speeds(n)]
        ends.append(math.log(complete(experiment.with_(speed=speeds)).step_time / result.step_time))
    further = t_quantile(math.inf) * math.sqrt(outside.variance)
    faster, slower = math.hypot(like.faster, ends[0], further), math.hypot(like.slower, ends[1], further)
    return dataclasses.replace(like, notes=(*like.notes, *outside.notes), faster=faster, slower=slower)


def _calibration_of(experiment: Experiment) -> Calibration | None:
    cluster = load_cluster(experiment.cluster)
    return load_calibration(cluster) if cluster.calibration is not None else None


def _compute(experiment: Experiment, calibration: Calibration) -> ComputeFit | None:
    """Return the measured step times of the timed model, unless the experiment sets its own."""
    measured, _ = measured_steps(experiment, calibration.cluster, _model(experiment))
    return calibration.compute_of(_model(experiment)) if measured is not None else None


def _model(experiment: Experiment) -> str:
    return load_model(experiment.time_model if experiment.time_model is not None else experiment.model).name


def _typical(fit: ComputeFit, experiment: Experiment, calibration: Calibration) -> Affine | Measured:
    """Return the compute time without jitter: measured steps are medians of its product with the jitter's factor."""
    no_jitter = isinstance(experiment.jitter, NoJitter)
    return fit.times(1.0 / calibration.jitter.median_factor if no_jitter and calibration.jitter is not None else 1.0)


def _drawn(
    base: Experiment, experiment: Experiment, calibration: Calibration | None, random: np.random.Generator, i: int
) -> Experiment:
    drawn = dataclasses.replace(base, seed=experiment.seed + i)
    if calibration is None:
        return drawn
    curves = contract.of(base.strategy).collectives().cost == "calibrated"
    cluster = load_cluster(calibration.cluster)
    workers = experiment.workers if experiment.workers is not None else len(cluster.workers)
    n_workers = workers if isinstance(workers, int) else len(workers)
    links, batch = outside(experiment, cluster, _model(experiment), n_workers)
    drawn = dataclasses.replace(drawn, cluster=calibration.sampled(random, curves=curves, outside=links))
    fit = _compute(experiment, calibration)
    if fit is None:
        return drawn
    factor = math.exp(math.sqrt(batch.variance) * random.standard_normal()) if batch.variance else 1.0
    drawn_fit = fit.sampled(random)
    drawn_fit = dataclasses.replace(drawn_fit, c0=factor * drawn_fit.c0, c1=factor * drawn_fit.c1)
    return dataclasses.replace(drawn, compute=_typical(drawn_fit, experiment, calibration))


def _interval(value: float, draws: Floats, level: float, like: Beyond) -> Interval:
    """Return the interval of a time: quantiles of the samples, widened by the deviation of similar runs."""
    low, high = np.quantile([value, *draws] if not len(draws) else draws, [0.5 - level / 2, 0.5 + level / 2]).tolist()
    scale = t_quantile(math.inf, level) / t_quantile(math.inf)
    like = dataclasses.replace(like, faster=scale * like.faster, slower=scale * like.slower)
    ends = like.around(value, math.log(value / min(low, value)), math.log(max(high, value) / value))
    return Interval(ends[0], value, ends[1], level, like.notes)
