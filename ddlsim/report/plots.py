"""Plots worth putting in a paper: scaling, timelines of a run and of several jobs, breakdown, step times.

Every function takes results, returns the matplotlib axes and writes a picture if `path` is given (format by its
suffix). Series differ by marker, line style or hatch as well as by colour, so they survive printing in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from ddlsim.arguments import Count, NotNegative, checked
from ddlsim.errors import ConfigError
from ddlsim.readable import percent, seconds
from ddlsim.report.drawing import (
    apart,
    figure,
    save,
    series_style,
    single,
    some_of,
    span_bars,
    style_legend,
    time_styles,
    titled,
    wrapped,
)
from ddlsim.run.metrics import METRICS
from ddlsim.run.result import Result
from ddlsim.runtime.recorder import TRANSFER

TRANSFER_STYLE = ("#bbccbb", "", "transfer in the background")


@checked
def scaling(
    results: Sequence[Result] | Mapping[str, Sequence[Result]], path: str | Path | None = None
) -> tuple[Axes, Axes]:
    """Draw throughput (with the ideal line) and efficiency against the number of workers.

    `results` is a series of results with different numbers of workers, or several series by label.
    """
    if not results or (isinstance(results, Mapping) and not all(results.values())):
        raise ConfigError("scaling: results is empty; give a result for each number of workers")
    series = results if isinstance(results, Mapping) else {results[0].experiment.strategy.label: results}
    made = figure(9.0, 3.8)
    left, right = made.subplots(1, 2)
    first = next(iter(series.values()))
    workers = sorted({r.n_workers for rs in series.values() for r in rs})
    ideal = [first[0].single_throughput * n for n in workers]
    left.plot(workers, ideal, color="#999999", linewidth=1.0, linestyle=(0, (1, 1)), label="ideal (linear)")
    for i, (label, rs) in enumerate(series.items()):
        style = series_style(i) | {"markersize": 5}
        n = [r.n_workers for r in rs]
        left.plot(n, [r.throughput for r in rs], label=wrapped(label, 34), **style)
        right.plot(n, [100.0 * r.efficiency for r in rs], label=label, **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, apart([math.log(n) for n in workers], [str(n) for n in workers], 3.2))
        axes.minorticks_off()
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
    left.set_yscale("log", base=10)
    left.set_ylabel(METRICS["throughput"].axis)
    left.legend(fontsize=8)
    right.set_ylabel("scaling efficiency (%)")
    right.set_ylim(0.0, 105.0)
    right.axhline(100.0, color="#999999", linewidth=1.0, linestyle=(0, (1, 1)))
    titled(made, _title(first[0]))
    save(made, path)
    return left, right


def _title(result: Result) -> str:
    experiment = result.experiment
    return f"{result.workloads[0].model.name}, batch {experiment.batch_size} per worker, on {result.cluster.name}"


@checked
def timeline(
    result: Result,
    path: str | Path | None = None,
    *,
    start: NotNegative | None = None,
    end: NotNegative | None = None,
    n_workers: Count = 16,
) -> Axes:
    """Draw what the workers (and servers) did between `start` and `end`, in s; by default two steps.

    The result must have been recorded (``result.traced``). At most `n_workers` workers are drawn, evenly
    spread.
    """
    begin, stop = _window(result, start, end)
    if not begin < stop or (start is not None and start >= result.simulated_time):
        raise ConfigError(
            f"timeline: start = {begin:.6g}, end = {stop:.6g}: must be in order and begin within the run's "
            f"{result.simulated_time:.6g} s"
        )
    rows = [f"worker {rank}" for rank in some_of(result.n_workers, n_workers)]
    rows += sorted({s.track for s in result.recorder.spans if s.track.startswith("server")})
    made, axes = single(9.0, 1.6 + 0.28 * len(rows))
    styles = {**time_styles(result.shares), TRANSFER: TRANSFER_STYLE}
    for kind, style in styles.items():
        height, offset = (0.22, 0.3) if kind == TRANSFER else (0.5, -0.1)
        lows = {track + part: i + offset - height / 2 for i, track in enumerate(rows) for part in ("", " network")}
        span_bars(axes, result.recorder.spans, kind, lows, height, style, (begin, stop))
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(begin, stop)
    axes.set_xlabel("simulated time (s)")
    style_legend(made, [style for kind, style in styles.items() if kind != "idle"])
    titled(made, f"{_title(result)}: {result.experiment.strategy.label}")
    save(made, path)
    return axes


def _window(result: Result, start: float | None, end: float | None) -> tuple[float, float]:
    times = [0.0, *(t for t, _ in result.recorder.updates)]
    steps = max(1, len(times) - 1)
    per_step = max(1, round(result.updates_per_step))
    first = min(per_step, steps - 1) if steps > per_step else 0
    begin = times[first] if start is None else start
    stop = times[min(first + 2 * per_step, steps)] if end is None else end
    return begin, max(stop, begin + 1e-12)


@checked
def breakdown(results: Mapping[str, Result], path: str | Path | None = None) -> Axes:
    """Draw how the workers of each labelled result spent their time, as stacked bars (% of the wall time)."""
    made, axes = single(max(1.5 + 1.3 * len(results), 4.5), 3.8)
    bottom = np.zeros(len(results))
    at = np.arange(len(results))
    kinds = {kind for result in results.values() for kind in result.shares}
    for kind, (colour, hatch, label) in time_styles(kinds).items():
        height = np.array([100.0 * r.shares.get(kind, 0.0) for r in results.values()])
        axes.bar(at, height, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=label, width=0.65)
        bottom += height
    for i, result in enumerate(results.values()):
        axes.annotate(percent(result.efficiency), (i, 101.0), ha="center", fontsize=8)
    axes.set_xticks(at, [wrapped(label, 16) for label in results], fontsize=8)
    axes.set_ylabel("time of the workers (%)\nefficiency on top")
    axes.set_ylim(0.0, 110.0)
    made.legend(loc="outside lower center", ncols=2, fontsize=8)
    save(made, path)
    return axes


@checked
def step_times(result: Result, path: str | Path | None = None) -> Axes:
    """Draw the distribution of the step times, with mean and 95th percentile."""
    made, axes = single(5.0, 3.4)
    times = 1e3 * result.step_times
    low, high = float(times.min()), float(times.max())
    if high - low < 1e-6 * high:  # without jitter only rounding differs, and no bins fit in between
        low, high = 0.95 * low, 1.05 * high
    axes.hist(times, bins=min(40, max(5, len(times) // 4)), range=(low, high), color="#4477aa", edgecolor="white")
    for value, style, label in ((times.mean(), "-", "mean"), (np.percentile(times, 95), "--", "95 %")):
        axes.axvline(value, color="#222222", linestyle=style, label=f"{label} {seconds(value / 1e3)}")
    axes.set_xlabel("step time (ms)")
    axes.set_ylabel("steps")
    axes.legend(fontsize=8)
    titled(made, _title(result))
    save(made, path)
    return axes


#: rows of a band, and between two bands
_ROW, _GAP = 1.0, 0.6


def jobs_timeline(
    bands: Sequence[tuple[str, float, Result]],
    path: str | Path | None = None,
    *,
    start: float | None = None,
    end: float | None = None,
    n_workers: int = 4,
) -> Axes:
    """Draw what the workers of each job did between `start` and `end` (s); by default four steps of the slowest job,
    from where the last one begins.

    bands  name, start (s) and result of each job, with its spans; at most `n_workers` of its workers are drawn, evenly
           spread

    Raises ConfigError for a window in which nothing happens.
    """
    last = max(begin + result.simulated_time for _, begin, result in bands)
    since = max(begin for _, begin, _ in bands) if start is None else start
    until = min(last, since + 4.0 * max(result.step_time for *_, result in bands)) if end is None else end
    if not since < min(until, last):
        raise ConfigError(
            f"plot_timeline: start = {since:.6g}, end = {until:.6g}: must be in order and begin within {last:.6g} s"
        )
    shown = [some_of(result.n_workers, n_workers) for *_, result in bands]
    made, axes = single(9.0, 1.8 + 0.24 * sum(map(len, shown)) + 0.2 * len(bands))
    kinds = {kind for *_, result in bands for kind in result.shares}
    styles = time_styles(kinds)
    low, ticks, labels = 0.0, [], []
    for (name, begin, result), ranks in zip(bands, shown, strict=True):
        lows = {f"worker {rank}": low + _ROW * i + 0.1 for i, rank in enumerate(ranks)}
        for kind, style in styles.items():
            span_bars(axes, result.recorder.spans, kind, lows, _ROW - 0.2, style, (since, until), begin)
        ticks.append(low + _ROW * len(ranks) / 2.0)
        labels.append(f"{wrapped(name, 18)}\n{result.n_workers} workers\n{seconds(result.step_time)} a step")
        axes.axhspan(low - _GAP / 4, low + _ROW * len(ranks) + _GAP / 4, color="#000000", alpha=0.05, linewidth=0)
        low += _ROW * len(ranks) + _GAP
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(low - _GAP / 2, -_GAP / 2)
    axes.set_xlim(since, until)
    axes.set_xlabel("simulated time (s)")
    style_legend(made, [style for kind, style in styles.items() if kind != "idle"])
    titled(made, f"{len(bands)} jobs on {bands[0][2].cluster.name}")
    save(made, path)
    return axes
