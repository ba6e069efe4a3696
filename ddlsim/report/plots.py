"""Figures for papers: scaling, breakdown, step times (timelines: :mod:`ddlsim.report.gantt`).

Every function takes results, returns the matplotlib axes and writes a picture if `path` is given (format by its
suffix). Series differ by marker, line style or hatch as well as by colour, so they survive printing in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError
from ddlsim.readable import percent, seconds
from ddlsim.report.drawing import (
    DOTTED,
    described,
    figure,
    saved,
    series_style,
    single,
    time_bars,
    titled,
    worker_axis,
    wrapped,
)
from ddlsim.run.metrics import METRICS
from ddlsim.run.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@checked
def scaling(
    results: Sequence[Result] | Mapping[str, Sequence[Result]], path: str | Path | None = None
) -> tuple[Axes, Axes]:
    """Plot throughput (with the ideal line) and efficiency over the number of workers.

    `results` is a series of results with different numbers of workers, or several series by label.
    """
    if not results or (isinstance(results, Mapping) and not all(results.values())):
        raise ConfigError("scaling: results is empty; pass a result for each number of workers")
    series = results if isinstance(results, Mapping) else {results[0].experiment.strategy.label: results}
    fig = figure(9.0, 3.8)
    left, right = fig.subplots(1, 2)
    first = next(iter(series.values()))
    workers = sorted({r.n_workers for rs in series.values() for r in rs})
    ideal = [first[0].single_throughput * n for n in workers]
    left.plot(workers, ideal, label="ideal (linear)", **DOTTED)
    for i, (label, rs) in enumerate(series.items()):
        style = series_style(i) | {"markersize": 5}
        n = [r.n_workers for r in rs]
        left.plot(n, [r.throughput for r in rs], label=wrapped(label, 34), **style)
        right.plot(n, [100.0 * r.efficiency for r in rs], label=label, **style)
    for axes in (left, right):
        worker_axis(axes, workers, 3.2)
        axes.grid(alpha=0.3)
    left.set(yscale="log", ylabel=METRICS["throughput"].axis)
    left.legend(fontsize=8)
    right.set(ylabel="scaling efficiency (%)", ylim=(0.0, 105.0))
    right.axhline(100.0, **DOTTED)
    titled(fig, described(first[0]))
    return saved(left, path), right


@checked
def breakdown(results: Mapping[str, Result], path: str | Path | None = None) -> Axes:
    """Draw how the workers of each labelled result spent their time, as stacked bars (% of the wall time)."""
    if not results:
        raise ConfigError("breakdown: results is empty; pass a labelled result for each bar")
    fig, axes = single(max(1.5 + 1.3 * len(results), 4.5), 3.8)
    kinds = {kind for result in results.values() for kind in result.shares}
    shares = {kind: np.array([100.0 * r.shares.get(kind, 0.0) for r in results.values()]) for kind in kinds}
    time_bars(axes, shares, 0.65, upright=True)
    for i, result in enumerate(results.values()):
        axes.annotate(percent(result.efficiency), (i, 101.0), ha="center", fontsize=8)
    axes.set_xticks(range(len(results)), [wrapped(label, 16) for label in results], fontsize=8)
    axes.set(ylabel="time of the workers (%)\nefficiency on top", ylim=(0.0, 110.0))
    fig.legend(loc="outside lower center", ncols=2, fontsize=8)
    return saved(axes, path)


@checked
def step_times(result: Result, path: str | Path | None = None) -> Axes:
    """Draw the distribution of the step times, with mean and 95th percentile."""
    fig, axes = single(5.0, 3.4)
    times = 1e3 * result.step_times
    low, high = float(times.min()), float(times.max())
    if high - low < 1e-6 * high:  # without jitter only rounding differs, and no bins fit in between
        low, high = 0.95 * low, 1.05 * high
    axes.hist(times, bins=min(40, max(5, len(times) // 4)), range=(low, high), color="#4477aa", edgecolor="white")
    for value, style, label in ((times.mean(), "-", "mean"), (np.percentile(times, 95), "--", "95 %")):
        axes.axvline(value, color="#222222", linestyle=style, label=f"{label} {seconds(value / 1e3)}")
    axes.set(xlabel="step time (ms)", ylabel="steps")
    axes.legend(fontsize=8)
    titled(fig, described(result))
    return saved(axes, path)
