"""*Scaling*: throughput, efficiency and cost over the number of workers, for several strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import panel as pn

from ddlsim.cluster import load_cluster
from ddlsim.errors import DdlsimError
from ddlsim.explore.components import (
    Chart,
    Exports,
    files_of,
    html,
    lines,
    message,
    side_by_side,
    table,
    without_content,
)
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.setup import Setup, chosen_strategies
from ddlsim.plain import whole_numbers
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import STRATEGIES
from ddlsim.run.metrics import METRICS
from ddlsim.study import Study
from ddlsim.study.dispatch import Count
from ddlsim.validation.intervals import predict_interval
from ddlsim.workload.jitter import NoJitter

if TYPE_CHECKING:
    import pandas as pd


#: displayed metrics; cost only if the cluster has prices
SHOWN = ("throughput", "efficiency", "cost_per_sample")
#: maximum number of workers for starting automatically, and simulations per interval of a calibrated point
MOST_WORKERS, N_DRAWS = 128, 10


@dataclass(frozen=True)
class Scaled:
    """Results of the screen.

    summary  a row per strategy and number of workers: `strategy`, `workers`, and each metric's value, low and high
    bands    meaning of low and high; "" if they are unknown
    misfits  reasons for missing points
    """

    study: Study
    summary: pd.DataFrame
    bands: str
    misfits: Sequence[str]


def worker_counts(text: str, cluster: str) -> list[int]:
    """Parse a text such as "1, 2, 4"; an empty text means powers of two up to the cluster's workers, at most 128.

    Raises ConfigError for values that are not positive integers, and for an unknown cluster.
    """
    if not text.strip():
        most = min(len(load_cluster(cluster).workers), MOST_WORKERS)
        return sorted({2**i for i in range(most.bit_length())} | {most})
    return sorted(set(whole_numbers(text, "workers")))


def study_of(setup: Setup, workers: str, others: Sequence[str], n_seeds: int) -> Study:
    """Return the study of the screen: the form's strategy and others over numbers of workers, with several seeds if
    there is jitter. Raises a DdlsimError for invalid settings."""
    base = setup.experiment()
    counts = worker_counts(workers, str(base.cluster))
    jitters = not isinstance(base.jitter, NoJitter)
    strategies = chosen_strategies(setup, others)
    vary: dict[str, Mapping[str, object] | Sequence[object]] = {"strategy": strategies, "workers": counts}
    return Study(base.with_(workers=None), vary, seeds=n_seeds if jitters else 1)


def run_study(study: Study, progress: Progress) -> Scaled:
    """Simulate all points; if only a calibration is uncertain, also simulate samples of it."""
    calibrated = load_cluster(study.base.cluster).calibration is not None
    drawn = calibrated and isinstance(study.base.jitter, NoJitter)

    def report(count: Count) -> None:
        progress.check()
        share = count.finished / count.total
        progress.update(share / (N_DRAWS if drawn else 1), f"{count.finished} of {count.total} points")

    table = study.run(jobs=1, progress=report)
    progress.check()
    summary = table.summary
    misfits = [text for text in dict.fromkeys(table.frame["error"]) if text]
    bands = f"bands: 95 % interval of the mean over {study.seeds} seeds of the jitter" if study.seeds != 1 else ""
    if drawn:
        _draw(study, summary, progress)
        bands = f"bands: 95 % prediction interval from the cluster's calibration, {N_DRAWS} simulations of each point"
    return Scaled(study, summary, bands, misfits)


def _draw(study: Study, summary: pd.DataFrame, progress: Progress) -> None:
    """Set the intervals of all points; those of shares and costs follow from the throughput."""
    experiments: dict[tuple[str, int], Experiment] = {
        (str(point.settings["strategy"]), int(str(point.settings["workers"]))): point.experiment
        for point in study.points
        if point.experiment is not None
    }
    for i, (strategy, workers) in enumerate(zip(summary["strategy"], summary["workers"], strict=True)):
        progress.check()
        progress.update((i + 1) / (len(summary) + 1), f"interval of point {i + 1} of {len(summary)}")
        try:
            interval = predict_interval(experiments[str(strategy), int(workers)], n_draws=N_DRAWS).throughput
        except DdlsimError:
            continue
        low, high = interval.low / interval.value, interval.high / interval.value
        for name in SHOWN:
            ends = (low, high) if METRICS[name].larger_is_better else (1.0 / high, 1.0 / low)
            for end, factor in zip(("low", "high"), ends, strict=True):
                summary.loc[summary.index[i], f"{name}_{end}"] = factor * float(summary[name].iloc[i])


def series(scaled: Scaled, metric: str) -> dict[str, Mapping[str, Sequence[float]]]:
    """Return the points of each strategy as columns of a chart, and "ideal" if it applies to the metric."""
    factor = METRICS[metric].factor
    by_label: dict[str, Mapping[str, Sequence[float]]] = {}
    for label, part in scaled.summary.groupby("strategy", sort=False):
        rows = part[part[metric].map(math.isfinite)].sort_values("workers")
        names = {"value": metric, "low": f"{metric}_low", "high": f"{metric}_high"}
        values = {column: (factor * rows[name]).tolist() for column, name in names.items()}
        by_label[str(label)] = {"workers": rows["workers"].astype(int).tolist(), **values}
    if metric == "throughput" and len(scaled.summary):
        first = scaled.summary[scaled.summary["strategy"] == scaled.summary["strategy"].iloc[0]].sort_values("workers")
        ideal = (first["throughput"] / first["efficiency"]).tolist()
        nothing = [math.nan] * len(ideal)
        workers = first["workers"].astype(int).tolist()
        by_label["ideal"] = {"workers": workers, "value": ideal, "low": nothing, "high": nothing}
    return {label: points for label, points in by_label.items() if points["workers"]}


NAME = "scaling"
TITLE = "Scaling"
#: number of seeds per point with jitter
N_SEEDS = 5
COLUMNS = ("workers", "value", "low", "high")
SURE = "no bands: there is neither jitter (in the form, under More) nor a calibration"


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    return _Screen(setup, jobs).view


class _Screen:
    def __init__(self, setup: Setup, jobs: Jobs) -> None:
        self._setup, self._jobs = setup, jobs
        self._scaled: Scaled | None = None
        wide = {"sizing_mode": "stretch_width"}
        self._workers = pn.widgets.TextInput(label="Numbers of workers", placeholder="1, 2, 4, ... up to 128", **wide)
        self._metric = pn.widgets.Select(
            label="What", options={METRICS[name].heading: name for name in SHOWN}, value="throughput", **wide
        )
        self._seeds = pn.widgets.IntInput(label="Seeds (with jitter)", value=N_SEEDS, start=2, end=100, **wide)
        self._others = pn.widgets.MultiChoice(label="Further strategies", options=sorted(STRATEGIES), value=[], **wide)
        self._chart = Chart(("workers", "workers"), ("value", METRICS["throughput"].axis), COLUMNS)
        self._said, self._about, self._table = message(""), html(css_classes=["about"]), html()
        self._exports = Exports(lambda: files_of(self._study(), NAME))
        for widget in (self._workers, self._seeds, self._others):
            widget.param.watch(lambda _: self._ask(), "value")
        self._metric.param.watch(lambda _: self._draw(), "value")
        self.view = pn.Column(
            side_by_side((self._workers, self._metric, self._seeds), width=220),
            self._others, self._said, jobs.bar(NAME), self._chart.view, self._about, self._table,
            self._exports.card, sizing_mode="stretch_width",
        )  # fmt: skip
        setup.when_shown(NAME, self._ask)

    def _study(self) -> Study:
        return study_of(self._setup, self._workers.value or "", self._others.value, self._seeds.value or N_SEEDS)

    def _ask(self) -> None:
        self._exports.stale()
        self._jobs.ask(NAME, lambda: partial(run_study, self._study()), self._done, self._failed)

    def _done(self, scaled: Scaled) -> None:
        self._said.object = ""
        self._scaled = scaled
        self._draw()

    def _failed(self, text: str) -> None:
        self._scaled = None
        self._said.object = message(text).object
        self._about.object = self._table.object = ""
        self._chart.clear()

    def _draw(self) -> None:
        if self._scaled is None:
            return
        metric = METRICS[self._metric.value]
        shown = series(self._scaled, metric.name)
        ticks = sorted({n for points in shown.values() for n in points["workers"]})
        self._chart.clear(ticks, log_y=metric.name == "throughput")
        self._chart.show(("workers", "workers"), ("value", metric.axis))
        for label, points in shown.items():
            self._chart.put(label, points, plain=label == "ideal")
        unknown = "" if shown else lines([f"{metric.heading}: unknown, because the cluster has no prices"], "note")
        self._about.object = unknown + lines([self._scaled.bands or SURE], "note")
        self._table.object = described(self._scaled)


def described(scaled: Scaled) -> str:
    """Return all values with their intervals as an HTML table, and the reasons for missing ones."""
    has_costs = scaled.summary["cost_per_sample"].notna().any()
    names = ["throughput", "efficiency", "step_time", *(["cost_per_sample"] if has_costs else [])]
    rows = []
    for _, row in scaled.summary.iterrows():
        cells = []
        for name in names:
            write, low, high = METRICS[name].write, row[f"{name}_low"], row[f"{name}_high"]
            sure = not scaled.bands or low != low or name == "step_time"
            cells.append(write(row[name]) if sure else f"{write(row[name])} ({write(low)} to {write(high)})")
        rows.append([str(row["strategy"]), str(int(row["workers"])), *cells])
    heads = ["strategy", "workers", *(METRICS[name].heading for name in names)]
    return table(heads, rows) + lines([without_content(text) for text in scaled.misfits], "warning")
