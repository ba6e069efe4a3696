"""What several jobs on one cluster did when: a band for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ddlsim.errors import ConfigError
from ddlsim.readable import seconds
from ddlsim.report.drawing import figure, save, time_styles, titled, wrapped
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
    shown = [
        np.unique(np.linspace(0, result.n_workers - 1, min(n_workers, result.n_workers)).astype(int)).tolist()
        for *_, result in bands
    ]
    made = figure(9.0, 1.8 + 0.24 * sum(map(len, shown)) + 0.2 * len(bands))
    axes = made.subplots()
    kinds = {kind for *_, result in bands for kind in result.shares}
    styles = time_styles(kinds)
    low, ticks, labels = 0.0, [], []
    for (name, begin, result), ranks in zip(bands, shown, strict=True):
        places = {f"worker {rank}": low + _ROW * i for i, rank in enumerate(ranks)}
        for kind, (colour, hatch, _) in styles.items():
            bars: dict[float, list[tuple[float, float]]] = {}
            for span in result.recorder.spans:
                place = places.get(span.track)
                left, right = max(span.start + begin, since), min(span.end + begin, until)
                if span.kind == kind and place is not None and left < right:
                    bars.setdefault(place, []).append((left, right - left))
            for place, pieces in bars.items():
                axes.broken_barh(
                    pieces, (place + 0.1, _ROW - 0.2), facecolors=colour, hatch=hatch, edgecolor="white", linewidth=0.3
                )
        ticks.append(low + _ROW * len(ranks) / 2.0)
        labels.append(f"{wrapped(name, 18)}\n{result.n_workers} workers\n{seconds(result.step_time)} a step")
        axes.axhspan(low - _GAP / 4, low + _ROW * len(ranks) + _GAP / 4, color="#000000", alpha=0.05, linewidth=0)
        low += _ROW * len(ranks) + _GAP
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(low - _GAP / 2, -_GAP / 2)
    axes.set_xlim(since, until)
    axes.set_xlabel("simulated time (s)")
    handles = [
        Patch(facecolor=colour, hatch=2 * hatch, edgecolor="white", label=label)
        for kind, (colour, hatch, label) in styles.items()
        if kind != "idle"
    ]
    made.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    titled(made, f"{len(bands)} jobs on {bands[0][2].cluster.name}")
    save(made, path)
    return axes
