"""Fit a software stack to measured runs on a few devices, to predict larger runs with intervals.

The rates of the hardware and the network are better known than the efficiency of the software that uses them. So the
fit adjusts a few numbers of the stack: `gemm`, the fraction of the matrix-product rate that a step reaches; and, if the
measurements can distinguish them, `elementwise`, the bytes of element-wise kernels, `step_time`, a fixed time per
update, and `call_time`, a fixed time per collective. A number is added if it narrows the prediction interval of a
further run. A fixed time is also added if the squared errors without it, in units of
:data:`~ddlsim.validation.log_fit.NOISE`, are larger by more than 2 (Akaike's criterion): two runs can determine two
numbers but leave no residuals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.imports import KinetoTrace, fastest_over_ranks, read_any, to_measurements
from ddlsim.measure import Measurement
from ddlsim.measure.table import OPERATIONS
from ddlsim.plan import Plan
from ddlsim.readable import count, percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import prepare
from ddlsim.run.seeds import t_quantile
from ddlsim.run.simulate import complete
from ddlsim.strategies import contract
from ddlsim.text_tables import aligned
from ddlsim.validation.calibration import BAD_FIT
from ddlsim.validation.cases import candidates, make_case
from ddlsim.validation.compute_fit import fit_compute
from ddlsim.validation.links import DISTINCT
from ddlsim.validation.log_fit import NOISE, Floats, LogFit, Prior, fit_logs, robust_cost, spread_of
from ddlsim.validation.run_model import strategy_in
from ddlsim.validation.run_table import DEFAULT_STRATEGY, MeasuredRun, read_runs
from ddlsim.validation.sources import read_sources
from ddlsim.workload.model import ModelLike
from ddlsim.workload.stacks import Stack, StackLike, load_stack

COLLECTIVES = OPERATIONS["collective"]
#: a file, or a row of one
Source = str | Path | MeasuredRun | Measurement
#: prior time of a call in s, and its uncertainty as a factor with probability 2/3
CALL, CALL_SD = 10e-6, 3.0

#: fitted values, in this order, each with the standard deviation of its logarithm around the stack's value
FITTED = {"gemm": 0.3, "elementwise": 0.7, "step_time": 5.0, "call_time": 5.0}
#: fixed times in s: initial value for stacks without one, and the step for measuring its effect
FIXED = {"step_time": (1e-3, 1e-3), "call_time": (1e-5, 2e-5)}
#: measurements that determine a value that could not be fitted
REMEDIES = {
    "gemm": "runs of a model with kernel-level timing determine it",
    "elementwise": "three runs, with models of several widths, determine it",
    "step_time": "a run with another batch size or number of micro-batches determines it",
    "call_time": "a run with other buckets determines it, or collectives of two sizes",
}
#: relative step for measuring a value's effect, relative change that ends the search, and maximum number of rounds
STEP, DONE, ROUNDS = 0.02, 1e-3, 6
#: half the width, in the logarithm, of the widest interval of a further run: a factor of a million
MOST_HALF = math.log(1e6)


@dataclass(frozen=True, eq=False)
class StackFit:
    """A fitted software stack, and the runs to which it was fitted.

    stack      the fitted stack
    base       the stack before the fit
    runs       the measured runs
    predicted  simulated throughput of each run with the fitted stack, in samples/s
    fit        fitted values with their uncertainty
    calls      fit of `call_time` to separately measured collectives; None: no collectives were measured separately
    left_out   for each value that was not fitted, the reason: a mapping from names to reasons
    alone      single-worker runs, which determined the compute time of models without kernel-level timing
    warnings   runs that do not fit in memory according to the simulation
    """

    stack: Stack
    base: Stack
    runs: tuple[MeasuredRun, ...]
    predicted: tuple[float, ...]
    fit: LogFit
    calls: LogFit | None
    left_out: Mapping[str, str]
    alone: tuple[MeasuredRun, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Mean of |predicted / measured - 1|; NaN without runs."""
        errors = [abs(p / run.throughput - 1.0) for p, run in zip(self.predicted, self.runs, strict=True)]
        return float(np.mean(errors)) if errors else math.nan

    @property
    def _numbers(self) -> dict[str, tuple[float, float, float]]:
        """Value and 95 % interval of each fitted number."""
        fits = [fit for fit in (self.fit, self.calls) if fit is not None]
        return {name: (value, *fit.interval(name)) for fit in fits for name, value in fit.values.items()}

    def to_dict(self) -> dict[str, object]:
        """Return the fitted values, their 95 % intervals, the spread and all runs as a dictionary of plain values."""
        numbers = {name: {"value": value, "interval": ends} for name, (value, *ends) in self._numbers.items()}
        rows = [
            {"place": run.place, "measured": run.throughput, "predicted": value}
            for run, value in zip(self.runs, self.predicted, strict=True)
        ]
        error = self.error if self.runs else None
        about: dict[str, object] = {"left_out": dict(self.left_out), "spread": self.stack.spread, "error": error}
        about |= {"runs": rows, "single_worker_runs": [run.place for run in self.alone]}
        return {"stack": self.base.name, **numbers, **about, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings]
        for name, ends in self._numbers.items():
            factor, unit = {"step_time": (1e3, " ms"), "call_time": (1e6, " us")}.get(name, (1.0, ""))
            value, low, high, before = (factor * x for x in (*ends, getattr(self.base, name)))
            around = f"(95 %: {low:.3g} to {high:.3g}{unit})"
            lines.append(f"{name} {value:.3g}{unit} {around}, {before:.3g}{unit} in {self.base.name}")
            if name not in FIXED and abs(math.log(value / before)) > 3.0 * FITTED[name]:
                check = "is the throughput that of all workers together, and are device and precision right?"
                lines.insert(0, f"warning: {name} is {value / before:.2g} times that of {self.base.name}; {check}")
        lines += [f"{name} as in {self.base.name}: {why}" for name, why in self.left_out.items()]
        if self.alone:
            lines.append(f"compute time without communication from {count(len(self.alone), 'single-worker run')}")
        if not self.runs:
            return "\n".join(lines)
        error, (low, high) = percent(self.error), self.stack.spread
        further = f"a further run takes {low:.3f} to {high:.3f} times as long (95 %)"
        if high > 10.0:
            further = "these runs hardly limit the time of a further run (95 %: a factor of more than 10); add runs"
        lines.append(f"mean error {error}; {further}")
        if self.error > BAD_FIT:
            lines.insert(0, f"warning: poor fit: mean error {error}; check the runs and the cluster")
        rows = [("run", "measured", "predicted", "error")]
        for run, value in zip(self.runs, self.predicted, strict=True):
            what = f"{run.model or 'run'} on {run.workers}, {run.strategy or 'all-reduce'}, batch {run.batch_size}"
            error = percent(value / run.throughput - 1.0, sign="+")
            rows.append((what, f"{run.throughput:.4g}/s", f"{value:.4g}/s", error))
        return "\n".join([*lines, "", *aligned(rows, left=(0,))])


@checked
def calibrate_stack(
    runs: str | Path | Sequence[Source],
    stack: StackLike,
    cluster: ClusterLike | None = None,
    model: ModelLike | None = None,
    *,
    strategy: str | None = None,
    batch_size: Count | None = None,
) -> StackFit:
    """Fit a software stack to measured training runs, traces of a run, and logs of collectives.

    runs        CSV files of runs (docs/validation.md), traces from PyTorch's profiler or in Chakra format, logs of
                collectives (nccl-tests), or rows from any of these
    stack       initial stack, which provides all values that are not fitted
    cluster     cluster used in traces and logs, and in rows that do not specify one; its parameters are not fitted
    model       model used in traces, and in rows that do not specify one
    strategy    strategy used in traces, in the notation of CSV files of runs
    batch_size  batch size used in traces: the global batch size if the strategy splits the model, otherwise the batch
                size per worker; None: the value in the trace

    Models without kernel-level timing also require single-worker runs, which determine their compute time. The fitted
    stack includes the prediction interval for a new run, which is based on the scatter of the fitted runs and Student's
    t distribution, given the number of runs and of fitted values. Raises ConfigError for runs that cannot be simulated,
    and for models whose times do not depend on the stack.
    """
    base = start = load_stack(stack)
    measured, collectives = read_stack_sources(runs, cluster, strategy, batch_size)
    calls = fit_calls(collectives, cluster, base)
    if calls is not None:
        start = _with_numbers(base, calls.names, np.exp(calls.logs))
    experiments = {run: experiment_of(run, start, cluster, model, measured) for run in measured}
    alone = tuple(run for run in measured if experiments[run].workers == 1 and experiments[run].compute is not None)
    measured = [run for run in measured if run not in alone]
    if alone and not measured and calls is None:
        raise ConfigError(
            f"{alone[0].place}: the times of single-worker runs of this model do not depend on the stack; add runs "
            "with several workers"
        )
    fitting = _Fitting([experiments[run] for run in measured], measured, start)
    fit, left_out = fitting.best([name for name in FITTED if calls is None or name != "call_time"])
    fitted = _with_numbers(start, fit.names, np.exp(fit.logs))
    if measured:
        half, workers = min(_half_width(fit), MOST_HALF), [run.workers for run in measured]
        devices = {device.name for run in measured if (device := prepare(experiments[run]).workloads[0].device)}
        fitted = dataclasses.replace(
            fitted,
            fitted_devices=tuple(sorted(devices)),
            title=f"{base.title}, fitted to {len(measured)} runs",
            workers=(min(workers), max(workers)),
            spread=(float(f"{math.exp(-half):.4g}"), round(math.exp(half), 4)),
        )
    predicted = tuple((1.0 / fitting.times(fitted)).tolist())
    warnings = tuple(f"{run.place}: {text}" for run in experiments for text in prepare(experiments[run]).warnings)
    return StackFit(fitted, base, tuple(measured), predicted, fit, calls, left_out, alone, warnings)


def _half_width(fit: LogFit) -> float:
    """Return half the width of the 95 % interval of a further run, in the logarithm (Student's t).

    A further run may be an outlier, too, so large errors count in full, unlike in the fit.
    """
    robust, squares = 2.0 * robust_cost(fit.errors), float(np.sum(fit.errors**2))
    spread = fit.spread * (math.sqrt(squares / robust) if fit.names and robust else 1.0)
    return t_quantile(fit.dof) * spread * math.sqrt(1.0 + len(fit.names) / len(fit.errors))


def experiment_of(
    run: MeasuredRun,
    stack: Stack,
    cluster: ClusterLike | None = None,
    model: ModelLike | None = None,
    beside: Sequence[MeasuredRun] = (),
) -> Experiment:
    """Return the experiment that simulates a measured run under a stack, on its own cluster or the one given.

    beside  runs; single-worker runs among them give the compute time of models without kernel-level timing

    Raises ConfigError, with the run's place, for invalid runs, and if times do not depend on the stack.
    """
    chosen, trained = run.cluster or cluster, run.model or model
    try:
        if chosen is None or trained is None:
            missing = "cluster" if chosen is None else "model"
            raise ConfigError(f"column {missing} is missing; add it, or set {missing}=")
        strategy = strategy_in(run, DEFAULT_STRATEGY)
        warmup, steps = contract.of(strategy).whole_cycles(1, 1)
        experiment = Experiment(
            load_cluster(chosen), trained, strategy, run.batch_size, run.workers, steps=steps, warmup=warmup,
            accumulation=run.accumulation, precision=run.precision, gradient_dtype=run.gradient_dtype, stack=stack,
        )  # fmt: skip
        workload = prepare(experiment).workloads[0]
        if workload.by_kernel and not workload.known:
            return experiment
        alone = [other for other in beside if other.workers == 1 and _trained(other) == _trained(run)]
        if not alone:
            raise ConfigError(
                f"{workload.basis}: this time does not depend on the stack; leave the run out, or add single-worker "
                "runs, from which the fixed times of the stack can be derived"
            )
        passes = [other.step_time / other.accumulation for other in alone]
        experiment = experiment.with_(compute=fit_compute("", [other.batch_size for other in alone], passes).compute)
        prepare(experiment)  # raises for another batch size
    except DdlsimError as error:
        raise type(error)(f"{run.place}: {error}") from None
    return experiment


def _trained(run: MeasuredRun) -> tuple[str | None, ...]:
    """Return the properties besides the batch size that determine a run's compute time: model, precision, cluster."""
    return run.model, run.precision, (run.cluster or "").partition("+")[0]


def _with_numbers(stack: Stack, names: Sequence[str], values: Floats) -> Stack:
    changes: dict[str, Any] = {name: float(f"{value:.4g}") for name, value in zip(names, values, strict=True)}
    return dataclasses.replace(stack, **changes)


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Experiments that simulate measured runs, for fitting some values of the stack `base`."""

    experiments: Sequence[Experiment]
    runs: Sequence[MeasuredRun]
    base: Stack

    def times(self, stack: Stack) -> Floats:
        """Return the simulated times per sample, in s."""
        return np.array([1.0 / complete(experiment.with_(stack=stack)).throughput for experiment in self.experiments])

    @functools.cached_property
    def seconds(self) -> Floats:
        """The measured times per sample, in s."""
        return np.array([1.0 / run.throughput for run in self.runs])

    def best(self, names: Sequence[str]) -> tuple[LogFit, dict[str, str]]:
        """Return the fit of the values that the measurements determine and require, and why others are omitted."""
        errors, empty = np.log(self.times(self.base) / self.seconds), np.empty(0)
        scatter = spread_of(float(np.sum(errors**2)), len(errors), 0)
        fit = LogFit((), empty, np.empty((0, 0)), *scatter, errors, empty, (), ())
        reasons = {name: REMEDIES[name] for name in names}
        while self.runs:
            point = {name: fit.values.get(name, self._prior(name).value) for name in names}
            columns = dict(zip(names, self._slopes(names, np.array(list(point.values())))[2], strict=True))
            usable = [name for name in names if name not in fit.names and self._tells(name, columns, fit.names)]
            reasons = {
                name: "these runs do not need it" if name in usable else REMEDIES[name]
                for name in names
                if name not in fit.names
            }
            tried = [self._fitted((*fit.names, name)) for name in (usable[:1] if usable[:1] == ["gemm"] else usable)]
            better = [trial for trial in tried if trial.names == ("gemm",) or _is_better(trial, fit)]
            if not better:
                break
            fit = min(better, key=_half_width)
        return fit, reasons

    def _tells(self, name: str, columns: Mapping[str, Floats], others: Sequence[str]) -> bool:
        """Return whether a value affects the measurements differently from `others` or, without any, from the device's
        speed."""
        effect = columns[name] / self.seconds
        if not effect.any() or len(others) + (name == "elementwise") >= len(effect):
            return False
        speed = [self.seconds] if name in FIXED else []
        beside = np.array([columns[other] for other in others] or speed or [0.0 * effect]) / self.seconds
        rest = effect - beside.T @ np.linalg.lstsq(beside.T, effect, rcond=None)[0]
        return float(np.linalg.norm(rest)) > DISTINCT * float(np.linalg.norm(effect))

    def _prior(self, name: str) -> Prior:
        return Prior(getattr(self.base, name) or FIXED[name][0], FITTED[name])

    def _slopes(self, names: Sequence[str], point: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the simulated times per sample, the coordinates of the values, and the derivatives of the times with
        respect to each, (n, n_runs).

        A layer's time is linear in 1/gemm and in the other values unless the host or the network limits it.
        """
        here, begin, rows = self.times(_with_numbers(self.base, names, point)), _coordinates(names, point), []
        for i, name in enumerate(names):
            moved = point.copy()
            moved[i] += max(STEP * point[i], FIXED[name][1]) if name in FIXED else -STEP * point[i]
            change = (_coordinates(names, moved) - begin)[i]
            rows.append((self.times(_with_numbers(self.base, names, moved)) - here) / change)
        return here, begin, np.array(rows)

    def _fitted(self, names: tuple[str, ...]) -> LogFit:
        """Fit some values: simulated times are linearised around each estimate, and simulated again at the next one."""
        priors = [self._prior(name) for name in names]
        point = np.array([prior.value for prior in priors])
        for _ in range(ROUNDS):
            here, begin, slopes = self._slopes(names, point)
            # a small fixed time has no effect in the logarithm, so the search starts at the linear solution
            change = np.linalg.lstsq((slopes / self.seconds).T, 1.0 - here / self.seconds, rcond=None)[0]
            start = _coordinates(names, begin + change)

            def predict(values: Floats, here: Floats = here, begin: Floats = begin, slopes: Floats = slopes) -> Floats:
                return np.maximum(here + (_coordinates(names, values) - begin) @ slopes, 1e-3 * here)

            start = np.where(start > 0.0, start, point).tolist()
            fit = fit_logs(predict, self.seconds, names, start, priors, {"gemm": 1.0})
            values = np.exp(fit.logs)
            if np.abs(values / point - 1.0).max() < DONE:
                break
            point = values
        return fit


def _is_better(more: LogFit, less: LogFit) -> bool:
    """Return whether one more value narrows the interval of a further run, or is a fixed time that reduces errors."""
    squares = [float(np.sum(fit.errors**2)) / NOISE**2 for fit in (more, less)]
    return _half_width(more) < _half_width(less) or (more.names[-1] in FIXED and squares[0] + 2.0 < squares[1])


def _coordinates(names: Sequence[str], values: Floats) -> Floats:
    return np.array([1.0 / v if name == "gemm" else v for name, v in zip(names, values, strict=True)])


# ---------------------------------------------------------------- input of a fit


def read_stack_sources(
    sources: str | Path | Sequence[Source], cluster: ClusterLike | None, strategy: str | None, batch_size: int | None
) -> tuple[list[MeasuredRun], list[Measurement]]:
    """Return the runs and the collectives of files and rows; all traces of PyTorch's profiler belong to one run.

    Raises ConfigError for invalid files, incomplete traces, and for a strategy or a batch size without any trace.
    """
    machine = None if cluster is None else load_cluster(cluster)
    alone = 1 if machine is not None and len(machine.host_names) == 1 else None
    runs: list[MeasuredRun] = []
    collectives: list[Measurement] = []
    kineto: dict[str, KinetoTrace] = {}
    traced: dict[str, tuple[int, float, int]] = {}  # ranks, s per step, samples per rank (0: unknown)
    for source in [sources] if isinstance(sources, str | Path) else sources:
        if isinstance(source, MeasuredRun):
            runs.append(source)
        elif isinstance(source, Measurement):
            collectives.append(source)
        elif Path(source).suffix == ".csv":
            runs += read_runs(source)
        elif isinstance(content := read_any(source), KinetoTrace):
            kineto[str(source)] = content
        elif not isinstance(content, Plan):
            collectives += read_sources([source], n_hosts=alone).rows
        elif machine is None:
            raise ConfigError(f"{source}: contains communication, which requires a cluster; set cluster=")
        else:
            traced[str(source)] = content.n_ranks, content.execute(machine).seconds / content.n_steps, 0
    for path, first in list(kineto.items())[:1]:
        steps = [step.seconds for trace in kineto.values() for step in trace.steps]
        if not steps:
            raise ConfigError(f"{path}: contains no ProfilerStep; trace with torch.profiler.profile(schedule=...)")
        traced[path] = first.n_ranks, float(np.median(steps)), first.batch_size
        if len(kineto) == first.n_ranks > 1 and machine is not None:  # otherwise times include waiting for other ranks
            widest = int(np.bincount(machine.host_of[machine.workers]).max())
            timings = [t for t in fastest_over_ranks(list(kineto.values())) if t.nbytes and t.operation in COLLECTIVES]
            collectives += [m for t in timings for m in to_measurements([t], n_hosts=-(-t.n_ranks // widest))]
    if not traced and (strategy is not None or batch_size is not None):
        raise ConfigError(
            "strategy and batch_size apply only to traces, but no trace was given; remove them (for runs, they are "
            "read from the columns of the same names)"
        )
    for place, (n_ranks, seconds, samples) in traced.items():
        if not samples and batch_size is None:
            raise ConfigError(f"{place}: contains no batch size; set it (--batch), or trace with record_shapes=True")
        run = MeasuredRun(workers=n_ranks, batch_size=1, throughput=1.0, strategy=strategy, place=place)
        shared = contract.of(strategy_in(run, DEFAULT_STRATEGY)).shares_batch
        run = dataclasses.replace(
            run, batch_size=batch_size or samples * (n_ranks if shared else 1), shared_batch=shared
        )
        runs.append(dataclasses.replace(run, throughput=run.samples / seconds))
    return runs, [row for row in collectives if row.experiment == "collective"]


def fit_calls(rows: Sequence[Measurement], cluster: ClusterLike | None, stack: Stack) -> LogFit | None:
    """Return the fit of the time per call, in addition to simulated collectives; None for fewer than two sizes, which
    cannot distinguish a fixed time from slower links.

    Raises ConfigError without a cluster, or if the cluster is too small.
    """
    if len({row.nbytes for row in rows}) < 2:
        return None
    if cluster is None:
        raise ConfigError("calibrate --stack: set cluster= to the cluster on which the collectives were measured")
    loaded, measured = load_cluster(cluster), np.array([row.median_s for row in rows])
    cases = [make_case(row, loaded, {row.operation: candidates(row, None)[0]}) for row in rows]
    simulated, prior = np.array([case.seconds(loaded) for case in cases]), Prior(stack.call_time or CALL, CALL_SD)
    return fit_logs(lambda values: simulated + values[0], measured, ["call_time"], [prior.value], [prior])
