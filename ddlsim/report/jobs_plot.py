"""What several jobs on one cluster did when: a band for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from ddlsim.errors import ConfigError
from ddlsim.readable import seconds
from ddlsim.report.drawing import save, single, some_of, span_bars, style_legend, time_styles, titled, wrapped
from ddlsim.run.result import Result

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
