"""Fit a software stack to measured runs of a few devices, to predict larger ones with an interval.

Of what makes a step, the hardware's rates and the network are known better than what software makes of them. So a stack
is fitted by at most two of its numbers: `gemm`, the share of the rate of matrix products that is left in a step; and
`elementwise`, the bytes of element-wise kernels, if there are more runs than numbers and that narrows the interval of a
further run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.readable import percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import prepare
from ddlsim.run.simulate import complete
from ddlsim.strategies import contract
from ddlsim.text_tables import aligned
from ddlsim.validation.log_fit import Floats, LogFit, Prior, fit_logs, t_quantile
from ddlsim.validation.run_model import DEFAULT_STRATEGY, strategy_in
from ddlsim.validation.run_table import MeasuredRun, read_runs
from ddlsim.workload.model import ModelLike
from ddlsim.workload.stacks import Stack, StackLike, load_stack

#: numbers that are fitted, in this order: two times out of three they are within a factor of exp(this) of the stack's
FITTED = {"gemm": 0.3, "elementwise": 0.7}
#: relative change of a number by which its effect is measured, change that ends the search, and rounds at most
STEP, DONE, ROUNDS = 0.02, 1e-3, 6


@dataclass(frozen=True, eq=False)
class StackFit:
    """A fitted `stack`, the runs and their simulated throughput (samples/s), and `fit`, with what it is sure of."""

    stack: Stack
    base: Stack
    runs: tuple[MeasuredRun, ...]
    predicted: tuple[float, ...]
    fit: LogFit

    @property
    def error(self) -> float:
        """Mean of |predicted / measured - 1|."""
        return float(np.mean([abs(p / run.throughput - 1.0) for p, run in zip(self.predicted, self.runs, strict=True)]))

    def to_dict(self) -> dict[str, object]:
        """Return the fitted numbers with their intervals (95 %), the spread, and each run, as plain values."""
        numbers = {name: {"value": v, "interval": self.fit.interval(name)} for name, v in self.fit.values.items()}
        rows = [
            {"place": run.place, "measured": run.throughput, "predicted": value}
            for run, value in zip(self.runs, self.predicted, strict=True)
        ]
        return {"stack": self.base.name, **numbers, "spread": self.stack.spread, "error": self.error, "runs": rows}

    def __str__(self) -> str:
        lines = []
        for name, value in self.fit.values.items():
            low, high = self.fit.interval(name)
            before = f"{getattr(self.base, name):.3g} in {self.base.name}"
            lines.append(f"{name} {value:.3g} (95 %: {low:.3g} to {high:.3g}), {before}")
        kept = [name for name in FITTED if name not in self.fit.names]
        lines += [f"{name} as in {self.base.name}: these runs do not tell it" for name in kept]
        low, high = self.stack.spread
        lines.append(
            f"mean error {percent(self.error)}; another run computes {low:.3f} to {high:.3f} times as long, 95 %"
        )
        rows = [("run", "measured", "predicted", "error")]
        for run, value in zip(self.runs, self.predicted, strict=True):
            what = f"{run.model or ''} on {run.workers}, {run.strategy or 'all-reduce'}, batch {run.batch_size}"
            rows.append((what, f"{run.throughput:.4g}/s", f"{value:.4g}/s", f"{value / run.throughput - 1.0:+.1%}"))
        return "\n".join([*lines, "", *aligned(rows, left=(0,))])


@checked
def calibrate_stack(
    runs: str | Path | Sequence[MeasuredRun],
    stack: StackLike,
    cluster: ClusterLike | None = None,
    model: ModelLike | None = None,
) -> StackFit:
    """Fit a stack to measured runs.

    runs     CSV file (docs/validation.md), or rows
    stack    where the fit starts, and what it keeps of the rest
    cluster  of rows without one; it counts as known
    model    of rows without one

    The fitted stack has the interval of a further run: the scatter of the fitted runs, by Student's t for their number
    and that of the fitted values.
    Raises ConfigError for runs that cannot be simulated, and for models that the stack does not time.
    """
    measured = read_runs(runs) if isinstance(runs, str | Path) else list(runs)
    base = load_stack(stack)
    experiments = [experiment_of(run, base, cluster, model) for run in measured]
    seconds = np.array([1.0 / run.throughput for run in measured])
    fit = _fitted(experiments, seconds, base, tuple(FITTED)[:1])
    for n in range(2, min(len(FITTED), len(measured) - 1) + 1):
        more = _fitted(experiments, seconds, base, tuple(FITTED)[:n])
        fit = min(fit, more, key=_half_width)
    half = _half_width(fit)
    workers = [run.workers for run in measured]
    fitted = dataclasses.replace(
        _with_numbers(base, fit.names, np.exp(fit.logs).round(4)),
        title=f"{base.title}, fitted to {len(measured)} runs",
        spread=(round(math.exp(-half), 4), round(math.exp(half), 4)),
        workers=(min(workers), max(workers)),
    )
    predicted = [1.0 / time for time in _times(experiments, fitted)]
    return StackFit(fitted, base, tuple(measured), tuple(predicted), fit)


def _half_width(fit: LogFit) -> float:
    """Return half the width of the interval of a further run, in the logarithm (Student's t, 95 %)."""
    return t_quantile(fit.dof) * fit.spread * math.sqrt(1.0 + len(fit.names) / len(fit.errors))


def experiment_of(
    run: MeasuredRun, stack: Stack, cluster: ClusterLike | None = None, model: ModelLike | None = None
) -> Experiment:
    """Return the experiment that simulates a measured run under a stack, on its own cluster or the one given.

    Raises ConfigError, with the run's place, for what does not fit, and where the stack does not count.
    """
    chosen, trained = run.cluster or cluster, run.model or model
    try:
        if chosen is None or trained is None:
            missing = "cluster" if chosen is None else "model"
            raise ConfigError(f"column {missing}: is missing; add it, or give {missing}=")
        strategy = strategy_in(run, DEFAULT_STRATEGY)
        warmup, steps = contract.of(strategy).whole_cycles(1, 1)
        experiment = Experiment(
            load_cluster(chosen), trained, strategy, run.batch_size, run.workers, steps=steps, warmup=warmup,
            accumulation=run.accumulation, precision=run.precision, gradient_dtype=run.gradient_dtype, stack=stack,
        )  # fmt: skip
        workload = prepare(experiment).workloads[0]
    except DdlsimError as error:
        raise type(error)(f"{run.place}: {error}") from None
    if not workload.by_kernel or workload.known:
        raise ConfigError(f"{run.place}: {workload.basis}: this does not depend on a stack; leave the run out")
    return experiment


def _with_numbers(stack: Stack, names: Sequence[str], values: Floats) -> Stack:
    changes: dict[str, Any] = dict(zip(names, values.tolist(), strict=True))
    return dataclasses.replace(stack, **changes)


def _times(experiments: Sequence[Experiment], stack: Stack) -> Floats:
    """Return the simulated seconds of a sample."""
    return np.array([1.0 / complete(experiment.with_(stack=stack)).throughput for experiment in experiments])


def _fitted(experiments: Sequence[Experiment], seconds: Floats, base: Stack, names: tuple[str, ...]) -> LogFit:
    """Return the fit of some numbers of a stack.

    A layer's time is linear in 1/gemm and in elementwise where neither the host nor the network limits it. So the
    simulated times are taken as linear in these around each estimate, and simulated again at the next one.
    """
    priors = [Prior(getattr(base, name), FITTED[name]) for name in names]
    point = np.array([prior.value for prior in priors])

    def simulated(values: Floats) -> Floats:
        return _times(experiments, _with_numbers(base, names, values))

    def coordinates(values: Floats) -> Floats:
        return np.array([1.0 / v if name == "gemm" else v for name, v in zip(names, values, strict=True)])

    for _ in range(ROUNDS):
        here, begin, slopes = simulated(point), coordinates(point), []
        for i in range(len(names)):
            moved = point.copy()
            moved[i] *= 1.0 - STEP
            slopes.append((simulated(moved) - here) / (coordinates(moved) - begin)[i])
        predict = functools.partial(_linear, coordinates, here, begin, np.array(slopes))
        fit = fit_logs(predict, seconds, names, point.tolist(), priors, {"gemm": 1.0})
        values = np.exp(fit.logs)
        if np.abs(values / point - 1.0).max() < DONE:
            break
        point = values
    return fit


def _linear(
    coordinates: Callable[[Floats], Floats], here: Floats, begin: Floats, slopes: Floats, values: Floats
) -> Floats:
    return np.maximum(here + (coordinates(values) - begin) @ slopes, 1e-3 * here)
