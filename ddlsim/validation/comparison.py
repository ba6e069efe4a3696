"""`validate`: compare measured runs with their simulation, and find the causes of differences.

Conditions on rows, such as ``workers <= 4 and strategy == all-reduce``, are comparisons joined by `and`. User input is
compared, never evaluated as code.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import ddlsim
from ddlsim import printable
from ddlsim.arguments import Index, NotNegative, checked, one_of
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.extras import needs
from ddlsim.output_files import write_text
from ddlsim.readable import count, percent, rate
from ddlsim.run.experiment import Experiment, StrategyLike
from ddlsim.run.metrics import METRICS
from ddlsim.text_tables import aligned
from ddlsim.units import as_number
from ddlsim.validation.calibration import Calibration
from ddlsim.validation.calibration import shown as shown_parameter
from ddlsim.validation.calibration_file import load_calibration
from ddlsim.validation.compute_fit import step_text
from ddlsim.validation.curves import Interval
from ddlsim.validation.run_fit import FITTABLE, Knowledge, fit_runs, interval_of
from ddlsim.validation.run_model import Fitted, RunModel, make_run_model
from ddlsim.validation.run_table import NUMBERS, TEXTS, MeasuredRun, read_runs
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import ModelLike, load_model

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd

# ---------------------------------------------------------------- attribution

#: largest factor that is a credible explanation
MOST = 4.0
MOST_JITTER = 1.0


@dataclass(frozen=True)
class Cause:
    """A possible cause of an error: changing `what` by `factor` would correct it (waiting: jitter with this CV)."""

    what: str
    factor: float

    @property
    def size(self) -> float:
        """Magnitude of the change, for ordering causes: |ln factor|; for a variation, its value."""
        return self.factor if self.what == "waiting" else abs(math.log(self.factor))

    def __str__(self) -> str:
        if self.what == "waiting":
            return f"jitter of {percent(self.factor, 0)}"
        if self.factor >= 2.0:
            return f"{self.what} x {self.factor:.2g}"
        return f"{self.what} {percent(self.factor - 1.0, 0, '+')}"


def causes(run: RunModel, fitted: Fitted, predicted: float) -> list[Cause]:
    """Return single changes that make the predicted step time equal to the measured one, the smallest first.

    They are found by simulation: compute time, latency and bandwidth of all links changed by up to a factor of 4, and,
    if the run was slower than predicted, a lognormal scatter of the compute time up to 100 %. Empty if no single change
    suffices.
    """
    goal = run.measured.step_time
    end = math.copysign(math.log(MOST), goal - predicted)
    changes: list[Cause] = []
    for what, name, sign in (("compute time", "compute", 1), ("latency", "latency", 1), ("bandwidth", "bandwidth", -1)):
        if name == "compute" or run.link_classes:
            change = _root(lambda x: run.step_time(fitted, **{name: math.exp(sign * x)}), goal, predicted, end)  # noqa: B023
            changes += [] if change is None else [Cause(what, math.exp(sign * change))]
    if goal > predicted and run.measured.workers > 1 and isinstance(run.experiment.jitter, NoJitter):
        variation = _root(lambda x: run.step_time(fitted, jitter=x), goal, predicted, MOST_JITTER)
        if variation is not None:
            changes.append(Cause("waiting", variation))
    return sorted(changes, key=lambda cause: cause.size)


def _root(time: Callable[[float], float], goal: float, at_zero: float, end: float) -> float | None:
    """Return x between 0 and `end` at which time(x) is `goal`, or None if even `end` is not enough."""
    with needs("scipy"):
        from scipy.optimize import brentq

    sign = math.copysign(1.0, goal - at_zero)
    if sign * (time(end) - goal) < 0.0:
        return None

    def gap(x: float) -> float:
        return (at_zero if x == 0.0 else time(x)) / goal - 1.0

    return float(brentq(gap, 0.0, end, xtol=2e-3, rtol=1e-3))


# ---------------------------------------------------------------- comparison

_OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "!=": operator.ne}
_OPERATORS |= {"==": operator.eq, "=": operator.eq, "<": operator.lt, ">": operator.gt}
_COMPARISON = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(?:'([^']*)'|\"([^\"]*)\"|([^\s'\"<>=]+))\s*")

Cell = float | int | str | None


@dataclass(frozen=True)
class Condition:
    """Comparisons (column, operator, value) that must all hold."""

    comparisons: tuple[tuple[str, str, float | str], ...]

    def holds(self, row: Mapping[str, Cell]) -> bool:
        """Return whether a row satisfies the condition; an empty cell satisfies only ``!=``."""
        return all(_compare(row[column], sign, value) for column, sign, value in self.comparisons)


def parse_condition(text: str, numbers: Sequence[str], texts: Sequence[str]) -> Condition:
    """Parse a condition on columns with `numbers` or `texts`, such as ``workers <= 4 and strategy == all-reduce``.

    Raises ConfigError for anything but ``column op value`` joined by ``and``, unknown columns, ordering of texts, and
    values that are not numbers in numeric columns.
    """
    comparisons: list[tuple[str, str, float | str]] = []
    for part in re.split(r"\band\b", text):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"condition {shown(text)}: {shown(part.strip())} is not a comparison; expected a condition such as "
                "'workers <= 4 and batch_size == 32'"
            )
        column, sign = match[1], match[2]
        value = next(group for group in match.groups()[2:] if group is not None)
        if column in numbers:
            if (number := as_number(value)) is None:
                raise ConfigError(f"condition {shown(text)}: {column} is a number, but {shown(value)} is not")
            comparisons.append((column, sign, number))
        elif column in texts:
            if sign not in ("==", "=", "!="):
                raise ConfigError(
                    f"condition {shown(text)}: {column} is a string, which can only be compared with == or !="
                )
            comparisons.append((column, sign, value))
        else:
            raise unknown_name("column", column, [*numbers, *texts], f"condition {shown(text)}")
    return Condition(tuple(comparisons))


def _compare(cell: Cell, sign: str, value: float | str) -> bool:
    if cell is None:
        return sign == "!="
    if isinstance(value, str):
        return (str(cell) == value) == (sign != "!=")
    return _OPERATORS[sign](float(cell), value)


#: relative error above which causes are searched for
N_EXPLAINED, WORTH_EXPLAINING = 3, 0.03


@dataclass(frozen=True)
class ComparedRun:
    """A measured run and its prediction.

    run        the measured run
    label      name of the run in tables and plots
    predicted  predicted throughput in samples/s
    interval   prediction interval for the throughput; None: the uncertainty is unknown
    fitted     whether the run was used in the fit
    causes     possible causes of a large error: single parameter changes that would each correct it, with the smallest
               change first
    """

    run: MeasuredRun
    label: str
    predicted: float
    interval: Interval | None
    fitted: bool
    causes: tuple[Cause, ...] = ()

    @property
    def error(self) -> float:
        """Relative error: predicted over measured throughput, minus 1."""
        return self.predicted / self.run.throughput - 1.0


@dataclass(frozen=True)
class DeclinedRun:
    """A measured run without a prediction, because the simulation says that it is impossible.

    run     the measured run
    label   name of the run in tables
    reason  why the run is impossible, such as too little device memory
    """

    run: MeasuredRun
    label: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """Error statistics of `n` predicted runs.

    mean_absolute   mean of |predicted / measured - 1|
    geometric_mean  exp(mean of |ln(predicted / measured)|) - 1
    worst           largest error by magnitude
    in_interval     fraction of measured values that fall within their prediction intervals; None: there are no
                    intervals
    kendall_tau     rank correlation between predicted and measured throughputs: 1 if the order is the same, -1 if it is
                    reversed; None for a single run
    options         number of pairs of runs that differ only in strategy, algorithm or overlap
    right           number of these pairs for which the faster run is predicted correctly
    """

    n: int
    mean_absolute: float
    geometric_mean: float
    worst: float
    in_interval: float | None
    kendall_tau: float | None
    options: int
    right: int


#: left-aligned columns of the table of runs, and half the width of the band in its plot
LEFT, BAND = (0, 1, 5), 0.10
_STYLE = (
    "body { font-family: sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em } "
    "table { border-collapse: collapse } td, th { padding: 0.2em 0.7em; text-align: right } "
    "pre, .rows { overflow-x: auto } img { max-width: 100% }"
)


@dataclass(frozen=True, eq=False)
class Validation:
    """Measured runs and their predictions, in the order of the measurements. Printing the object shows a summary.

    cluster   cluster on which the runs were simulated
    rows      the runs with their predictions
    known     fitted values and their uncertainty, on which the predictions are based
    fit_on    condition that selects the runs for the fit; None: no fit
    declined  runs that the simulation says are impossible; the errors do not include them
    """

    cluster: Cluster
    rows: tuple[ComparedRun, ...]
    known: Knowledge
    fit_on: str | None = None
    declined: tuple[DeclinedRun, ...] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per run, declined runs last.

        Columns: the columns of the file, measured, predicted, error, low, high (throughputs in samples/s), used ("fit",
        "held out" or "declined"), notes (the reason of a declined run), cause.
        """
        import pandas as pd

        rows: list[dict[str, object]] = []
        for row in self.rows:
            cells = row.run.cells()
            cells.pop("throughput")
            interval = row.interval or Interval(math.nan, math.nan, math.nan)
            numbers = {"measured": row.run.throughput, "predicted": row.predicted, "error": row.error}
            ends = {"low": interval.low, "high": interval.high, "used": "fit" if row.fitted else "held out"}
            texts = {"notes": "; ".join(interval.notes), "cause": "; or ".join(map(str, row.causes))}
            rows.append({"place": row.run.place, "run": row.label, **cells, **numbers, **ends, **texts})
        for declined in self.declined:
            cells = declined.run.cells()
            cells |= {"measured": cells.pop("throughput"), "used": "declined", "notes": declined.reason, "cause": ""}
            rows.append({"place": declined.run.place, "run": declined.label, **cells})
        return pd.DataFrame(rows)

    @checked
    def summary(self, *, fitted: bool) -> Summary | None:
        """Return the error statistics of the fitted or of the held-out runs; None if there are none."""
        rows = [row for row in self.rows if row.fitted == fitted]
        return _summary(rows) if rows else None

    @property
    def error(self) -> float:
        """Mean absolute error of the held-out runs, or of all runs if none are held out."""
        summary = self.summary(fitted=False) or self.summary(fitted=True)
        assert summary is not None  # at least one run exists
        return summary.mean_absolute

    @checked
    def within(self, tolerance: NotNegative) -> bool:
        """Return whether the mean absolute error of the held-out runs is at most `tolerance` (0.1 means 10 %)."""
        return self.error <= tolerance

    @checked
    def plot(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Plot predicted against measured throughput, with the line of equality."""
        from ddlsim.report.drawing import COLOURS, DOTTED, log_numbers, saved, single, titled

        figure, axes = single(5.2, 4.8)
        values = [value for row in self.rows for value in (row.run.throughput, row.predicted)]
        ends = [0.8 * min(values), 1.25 * max(values)]
        axes.plot(ends, ends, label="measured = predicted", **DOTTED)
        low, high = ([end * (1.0 + sign * BAND) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color="#dddddd", alpha=0.6, linewidth=0.0, label="within 10 %")
        for fitted, label, marker, face in ((True, "fitted", "s", "none"), (False, "held out", "o", COLOURS[0])):
            rows = [row for row in self.rows if row.fitted == fitted]
            if not rows:
                continue
            below = [0.0 if row.interval is None else row.predicted - row.interval.low for row in rows]
            above = [0.0 if row.interval is None else row.interval.high - row.predicted for row in rows]
            measured, predicted = zip(*((row.run.throughput, row.predicted) for row in rows), strict=True)
            look: Any = {"markerfacecolor": face, "markersize": 5, "elinewidth": 0.8, "capsize": 2, "label": label}
            axes.errorbar(measured, predicted, yerr=[below, above], fmt=marker, color=COLOURS[0], **look)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            log_numbers(axis, *ends)
        quantity = METRICS["throughput"].axis
        axes.set(xlabel=f"measured {quantity}", ylabel=f"predicted {quantity}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        titled(figure, f"Measured and predicted runs on {self.cluster.name}")
        return saved(axes, path)

    @checked
    def save_html(self, path: str | Path, title: str = "Measured and predicted runs") -> None:
        """Write an HTML page with the summary, the plot and all runs. Raises ConfigError if it cannot be written."""
        from ddlsim.report.drawing import svg_uri

        rows = self.table.to_html(index=False, border=0, float_format=lambda value: f"{value:.4g}", na_rep="")
        heading = html.escape(printable.shown(title))
        parts = [
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>",
            f"<pre>{html.escape(printable.shown(str(self)))}</pre>",
            f'<img alt="Measured against predicted throughput" src="{svg_uri(self.plot())}">',
            f'<h2>Every run</h2><div class="rows">{rows}</div>',
            f"<footer><small>ddlsim {html.escape(ddlsim.__version__)}</small></footer></body></html>",
        ]
        write_text(Path(path), "\n".join([*parts, ""]))

    def __str__(self) -> str:
        return printable.shown("\n".join([*aligned(self._cells(), LEFT), "", *self._notes()]))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        return page("Measured and predicted runs", grid(self._cells(), LEFT), lines(self._notes()))

    def _cells(self) -> list[tuple[str, ...]]:
        """Return a header and one row per run; the columns :data:`LEFT` contain text."""
        declined = [("declined", d.label, rate(d.run.throughput), "-", "-", "-") for d in self.declined]
        return [("", "run", "measured", "predicted", "error", "interval (95 %)"), *map(_row, self.rows), *declined]

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        lines = []
        for fitted, what in ((True, f"fitted ({self.fit_on})"), (False, "held out")):
            summary = self.summary(fitted=fitted)
            if summary is not None:
                lines.append(f"{what}: {_text_of(summary)}")
        if self.declined:
            n = len(self.declined)
            lines.append(f"declined: {n} of {count(n + len(self.rows), 'run')}, which the errors do not include")
            lines += [f"{declined.label}: {declined.reason}" for declined in self.declined]
        notes = (note for row in self.rows if row.interval is not None for note in row.interval.notes)
        lines += dict.fromkeys(notes)
        fitted_values = self.known.fitted
        for name, value in fitted_values.links.items():
            text = shown_parameter(name, value) if name in PARAMETERS else f"{value:.4g}"
            lines.append(f"fitted {name} = {text}")
        for key, line in fitted_values.compute.items():
            lines.append(f"fitted step of {' '.join(key)} = {step_text(line.c0, line.c1)}")
        for key, factor in fitted_values.factors.items():
            lines.append(f"fitted compute time of {' '.join(key)}: {factor:.4g} times the assumed one")
        for row in self.rows:
            if row.causes:
                error, why = percent(row.error, sign="+"), ", or ".join(map(str, row.causes))
                lines.append(f"{row.label}: error {error}, explained by {why}")
        return lines


#: fields of a base that have no effect -> why, and what to do
UNUSED = {
    name: f"each run has its own; set it in the runs' column {name}"
    for name in ("workers", "batch_size", "accumulation")
}
UNUSED |= dict.fromkeys(("steps", "warmup"), "the number of simulated steps is fixed; leave it out")
_UNDISTURBED = "the throughput without failures is compared; leave it out"
UNUSED |= dict.fromkeys(("failures", "checkpoints", "elastic"), _UNDISTURBED)


@checked
def validate(
    runs: str | Path | Sequence[MeasuredRun],
    cluster: ClusterLike,
    model: ModelLike | None = None,
    *,
    fit_on: str | None = None,
    fit: Sequence[Annotated[str, one_of(*FITTABLE)]] = FITTABLE,
    strategy: StrategyLike | None = None,
    base: Experiment | None = None,
    calibration: Calibration | None = None,
    explain: Index = N_EXPLAINED,
) -> Validation:
    """Simulate measured training runs, and compare the predictions with the measurements.

    runs         CSV file with one run per row (docs/validation.md describes its columns), or the rows themselves
    cluster      cluster on which the runs were measured; a calibrated cluster also provides step times, jitter and
                 uncertainty
    model        model for rows that do not specify one
    fit_on       condition that selects the runs for the fit, such as "workers <= 4"; the other runs are held out. None:
                 no fit
    fit          quantities to fit: "compute", "network" or both
    strategy     strategy for rows that do not specify one; None: that of `base`. Its settings are also the defaults for
                 settings that a row leaves empty
    base         experiment with all other settings: stack, device, optimizer, ..., and the precision of rows that do
                 not specify one. By default, step times of a calibrated cluster are in fp32, and other runs have the
                 precision of :func:`ddlsim.simulate`. Its cluster and model are not used, and it must not set training,
                 workers, batch_size, accumulation, steps, warmup, failures, checkpoints or elastic
    calibration  calibration of the cluster, if the cluster file contains none
    explain      maximum number of runs for which further simulations search for likely causes of the error. The runs
                 with the largest errors are selected, if these exceed 3 %

    Runs that cannot be simulated, such as those that do not fit in device memory according to the simulation, are
    listed as declined, with the reason; the fit and the errors do not include them.

    Raises ConfigError, giving the file, line and column, for invalid units, names and values. Also raises ConfigError
    for runs with more workers than the cluster has, and if no run can be simulated.
    """
    condition = None if fit_on is None else parse_condition(fit_on, NUMBERS, TEXTS)
    loaded = load_cluster(cluster)
    prior = calibration
    if prior is None and isinstance(cluster, str | Path) and loaded.calibration is not None:
        prior = load_calibration(cluster)
    used = loaded if calibration is None else calibration.cluster
    base = base or Experiment(used)
    if base.training is not None:
        raise ConfigError("validate: base must not contain training settings; leave training out")
    for name, remedy in UNUSED.items():
        if getattr(base, name) != getattr(Experiment(used), name):
            raise ConfigError(f"validate: base.{name} = {shown(getattr(base, name))} has no effect, because {remedy}")
    base = base if strategy is None else base.with_(strategy=strategy)
    measured = read_runs(runs, strategy=base.strategy) if isinstance(runs, str | Path) else list(runs)
    if not measured:
        raise ConfigError("validate: runs is empty; pass at least one measured run")
    default = None if model is None else load_model(model)
    every = [make_run_model(row, used, default, base, prior) for row in measured]
    chosen = [m for m in every if condition is not None and condition.holds(m.measured.cells())]
    if condition is not None and not chosen:
        raise ConfigError(f"fit_on = {fit_on!r}: no run satisfies this condition; change it, or leave fit_on out")
    before = {m: _step_time(m, Fitted()) for m in every if m in chosen or condition is None}
    knowledge = fit_runs([m for m in chosen if isinstance(before[m], float)], prior, fit)
    times = before if condition is None else {m: _step_time(m, knowledge.fitted) for m in every}
    steps = {m: time for m, time in times.items() if isinstance(time, float)}
    models = list(steps)
    declined = tuple(DeclinedRun(m.measured, m.label, str(times[m])) for m in every if m not in steps)
    if not steps:
        raise ConfigError(f"validate: none of {count(len(every), 'run')} can be simulated: {declined[0].reason}")
    if condition is not None and not any(m in steps for m in chosen):
        raise ConfigError(f"fit_on = {fit_on!r}: no run that satisfies this condition can be simulated; change it")
    rows = [_compared(m, steps[m], m in chosen, knowledge) for m in models]
    order = sorted(range(len(rows)), key=lambda i: -abs(math.log(rows[i].predicted / rows[i].run.throughput)))
    for i in order[:explain]:
        if abs(rows[i].error) > WORTH_EXPLAINING:
            changes = tuple(causes(models[i], knowledge.fitted, steps[models[i]]))
            rows[i] = dataclasses.replace(rows[i], causes=changes)
    return Validation(used, tuple(rows), knowledge, fit_on, declined)


def _step_time(model: RunModel, fitted: Fitted) -> float | str:
    """Return the simulated step time of a run in s, or why it cannot be simulated."""
    if model.excess:
        return f"{model.measured.place}: {model.excess}"
    try:
        return model.step_time(fitted)
    except ConfigError as error:  # such as an algorithm that does not support this number of ranks
        return str(error)


def _compared(model: RunModel, step_time: float, fitted: bool, knowledge: Knowledge) -> ComparedRun:
    run, samples = model.measured, model.measured.samples
    rate, interval = samples / step_time, None
    if (times := interval_of(model, knowledge, step_time)) is not None:
        interval = Interval(samples / times.high, rate, samples / times.low, notes=times.notes)
    return ComparedRun(run, model.label, rate, interval, fitted)


def _summary(rows: Sequence[ComparedRun]) -> Summary:
    with needs("scipy"):
        from scipy.stats import kendalltau

    errors = (ratios := np.array([row.predicted / row.run.throughput for row in rows])) - 1.0
    with_interval = [row for row in rows if row.interval is not None]
    inside = sum(row.interval is not None and row.run.throughput in row.interval for row in with_interval)
    tau = math.nan
    if len(rows) > 1:
        tau = float(kendalltau([row.run.throughput for row in rows], [row.predicted for row in rows]).statistic)
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if _options(a.run, b.run)]
    right = sum((a.run.throughput - b.run.throughput) * (a.predicted - b.predicted) > 0.0 for a, b in pairs)
    geometric, worst = math.expm1(float(np.abs(np.log(ratios)).mean())), float(errors[np.abs(errors).argmax()])
    share, agreement = inside / len(with_interval) if with_interval else None, None if math.isnan(tau) else tau
    return Summary(len(rows), float(np.abs(errors).mean()), geometric, worst, share, agreement, len(pairs), right)


def _options(a: MeasuredRun, b: MeasuredRun) -> bool:
    """Return whether two runs differ only in how gradients are exchanged."""
    same = ("workers", "batch_size", "accumulation", "nodes", "model", "precision")
    if any(getattr(a, name) != getattr(b, name) for name in same) or a.throughput == b.throughput:
        return False
    return any(getattr(a, name) != getattr(b, name) for name in ("strategy", "algorithm", "overlap"))


def _row(row: ComparedRun) -> tuple[str, ...]:
    interval = "-" if row.interval is None else f"{rate(row.interval.low, '')}to {rate(row.interval.high)}"
    used = "fit" if row.fitted else "held out"
    return used, row.label, rate(row.run.throughput), rate(row.predicted), percent(row.error, sign="+"), interval


def _text_of(s: Summary) -> str:
    parts = [
        count(s.n, "run"),
        f"mean absolute error {percent(s.mean_absolute)}",
        f"geometric mean {percent(s.geometric_mean)}",
        f"worst {percent(s.worst, sign='+')}",
    ]
    if s.in_interval is not None:
        parts.append(f"{percent(s.in_interval, 0)} in their intervals")
    if s.kendall_tau is not None:
        parts.append(f"order: Kendall tau {s.kendall_tau:.2f}")
    if s.options:
        parts.append(f"faster option right in {s.right} of {s.options} pairs")
    return ", ".join(parts)
