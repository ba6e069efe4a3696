"""Gantt charts of workers, jobs and lanes of plans.

:func:`bars_of` selects the bars of a run, and :func:`draw` draws any bars. The explorer draws the same bars with pan
and zoom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlsim.arguments import Count, NotNegative, checked
from ddlsim.errors import ConfigError
from ddlsim.plan import KINDS
from ddlsim.readable import count, seconds
from ddlsim.report.drawing import described, drawn, saved, single, some_of, style_legend, time_styles, titled, wrapped
from ddlsim.run.result import Result
from ddlsim.runtime.recorder import TRANSFER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddlsim.plan import Execution


class Bar(NamedTuple):
    """A span of time, `start` to `end` in s, in a row; rows are counted from the top."""

    row: float
    kind: str
    name: str
    start: float
    end: float


class Style(NamedTuple):
    """Look of the bars of a kind; `low` and `high` are their edges, in rows relative to the centre of their row."""

    colour: str
    hatch: str
    label: str
    low: float = -0.36
    high: float = 0.36


_TRANSFERS = Style("#bbccbb", "", "transfer in the background", 0.19, 0.41)
#: kind of task -> (colour, hatch)
STYLES = {
    "forward": ("#88bbee", ""),
    "backward": ("#4477aa", ""),
    "backward_input": ("#66aacc", ""),
    "backward_weight": ("#225588", ""),
    "update": ("#228833", ""),
    "compute": ("#aaaaaa", ""),
    "send": ("#ccbb44", "//"),
    "receive": ("#ddcc88", "\\\\"),
    "all_reduce": ("#ee9944", "//"),
    "reduce_scatter": ("#ee7733", "//"),
    "all_gather": ("#ccaa33", "\\\\"),
    "broadcast": ("#cc6677", "\\\\"),
    "reduce": ("#aa4499", "//"),
    "gather": ("#998833", "//"),
    "scatter": ("#bb8866", "\\\\"),
    "all_to_all": ("#882255", "xx"),
    "push_pull": ("#ee9944", "xx"),
}
#: number of rows between the bands of two jobs
_GAP = 0.6


def tracks(result: Result, n_workers: int) -> list[str]:
    """Return the rows of a run's chart: at most `n_workers` workers, and the servers."""
    servers = {span.track for span in result.recorder.spans if span.track.startswith("server")}
    return [*(f"worker {rank}" for rank in some_of(result.n_workers, n_workers)), *sorted(servers)]


def styles_of(kinds: Iterable[str], *, transfers: bool = True) -> dict[str, Style]:
    """Return the styles of kinds of time; `transfers` in the background are drawn below the worker's bars."""
    edges = (-0.35, 0.15) if transfers else (-0.4, 0.4)
    styles = {kind: Style(*style, *edges) for kind, style in time_styles(list(kinds)).items() if kind != "idle"}
    return {**styles, TRANSFER: _TRANSFERS} if transfers else styles


def bars_of(
    result: Result, rows: Mapping[str, float], begin: float, end: float, *, since: float = 0.0, most: int | None = None
) -> list[Bar]:
    """Return the bars of a run that overlap a window of time: complete ones, even if they begin before it or end later.

    rows   row of each track (a worker or a server); transfers of a worker share its row
    since  start of the run in s
    most   maximum number of bars per kind, the first ones; None: all
    """
    bars: dict[str, list[Bar]] = {}
    for track, kind, name, start, stop in result.recorder.spans:
        row = rows.get(track.removesuffix(" network") if kind == TRANSFER else track)
        if row is not None and start + since < end and stop + since > begin:
            bars.setdefault(kind, []).append(Bar(row, kind, name, start + since, stop + since))
    return [bar for of_kind in bars.values() for bar in of_kind[:most]]


def draw(
    axes: Axes,
    bars: Iterable[Bar],
    styles: Mapping[str, Style],
    ticks: Mapping[float, str],
    window: tuple[float, float],
    *,
    columns: int = 4,
) -> None:
    """Draw bars, row labels, and a legend with `columns` below the figure; `window` is the time shown, in s."""
    pieces: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row, kind, _, start, end in bars:
        pieces.setdefault((kind, row), []).append((start, end - start))
    for kind, style in styles.items():
        look: Any = {"facecolors": style.colour, "hatch": style.hatch, "edgecolor": "white", "linewidth": 0.3}
        for row in dict.fromkeys(row for other, row in pieces if other == kind):
            axes.broken_barh(pieces[kind, row], (row + style.low, style.high - style.low), **look)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xlim(*window)
    axes.set_xlabel("simulated time (s)")
    used = {kind for kind, _ in pieces}
    style_legend(axes.figure, [style[:3] for kind, style in styles.items() if kind in used], columns)


@checked
def timeline(
    result: Result,
    path: str | Path | None = None,
    *,
    start: NotNegative | None = None,
    end: NotNegative | None = None,
    n_workers: Count = 16,
) -> Axes:
    """Plot the timeline of the workers and servers between `start` and `end`, in s; two steps by default.

    The result must be traced (``result.traced``). At most `n_workers` evenly spread workers are drawn.
    """
    begin, stop = window(result, start, end)
    if not begin < stop or (start is not None and start >= result.simulated_time):
        raise ConfigError(
            f"timeline: start = {begin:.6g}, end = {stop:.6g}: start must be before end and before the end of the run, "
            f"{result.simulated_time:.6g} s"
        )
    rows = tracks(result, n_workers)
    fig, axes = single(9.0, 1.6 + 0.28 * len(rows))
    bars = bars_of(result, {track: float(i) for i, track in enumerate(rows)}, begin, stop)
    draw(axes, bars, styles_of(result.shares), dict(enumerate(rows)), (begin, stop))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    titled(fig, f"{described(result)}: {result.experiment.strategy.label}")
    return saved(axes, path)


def window(result: Result, start: float | None = None, end: float | None = None) -> tuple[float, float]:
    """Return the start and end of the time shown, in s: by default two steps, without the first one."""
    times = [0.0, *(t for t, _ in result.recorder.updates)]
    steps = max(1, len(times) - 1)
    per_step = max(1, round(result.updates_per_step))
    first = min(per_step, steps - 1) if steps > per_step else 0
    begin = times[first] if start is None else start
    stop = times[min(first + 2 * per_step, steps)] if end is None else end
    return begin, max(stop, begin + 1e-12)


def jobs_timeline(
    bands: Sequence[tuple[str, float, Result]],
    path: str | Path | None = None,
    *,
    start: float | None = None,
    end: float | None = None,
    n_workers: int = 4,
) -> Axes:
    """Draw the activity of each job's workers between `start` and `end` (s) in a band; by default four steps of the
    slowest job, starting when all jobs are running.

    bands  name, start (s) and result of each job, with its spans; at most `n_workers` evenly spread workers are drawn

    Raises ConfigError for a window without activity.
    """
    last = max(begin + result.simulated_time for _, begin, result in bands)
    since = max(begin for _, begin, _ in bands) if start is None else start
    until = min(last, since + 4.0 * max(result.step_time for *_, result in bands)) if end is None else end
    if not since < min(until, last):
        raise ConfigError(
            f"plot_timeline: start = {since:.6g}, end = {until:.6g}: start must be before end and before the end of "
            f"the last job, {last:.6g} s"
        )
    bars, ticks, low = list[Bar](), dict[float, str](), 0.0
    shown = [some_of(result.n_workers, n_workers) for *_, result in bands]
    fig, axes = single(9.0, 1.8 + 0.24 * sum(map(len, shown)) + 0.2 * len(bands))
    for (name, begin, result), ranks in zip(bands, shown, strict=True):
        rows = {f"worker {rank}": low + i + 0.5 for i, rank in enumerate(ranks)}
        bars += bars_of(result, rows, since, until, since=begin)
        ticks[low + len(ranks) / 2.0] = (
            f"{wrapped(name, 18)}\n{result.n_workers} workers\n{seconds(result.step_time)} a step"
        )
        axes.axhspan(low - _GAP / 4, low + len(ranks) + _GAP / 4, color="#000000", alpha=0.05, linewidth=0)
        low += len(ranks) + _GAP
    kinds = {kind for *_, result in bands for kind in result.shares}
    draw(axes, bars, styles_of(kinds, transfers=False), ticks, (since, until))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(low - _GAP / 2, -_GAP / 2)
    titled(fig, f"{count(len(bands), 'job')} on {bands[0][2].cluster.name}")
    return saved(axes, path)


def gantt(execution: Execution, path: str | Path | None = None, *, n_ranks: int = 8) -> Axes:
    """Draw the lanes of at most `n_ranks` evenly spread ranks, and write the figure to `path` if given.

    Raises ConfigError for a plan without tasks.
    """
    plan = execution.plan
    if not len(plan):
        raise ConfigError("plot: the plan has no tasks, so there is nothing to draw")
    ranks = some_of(plan.n_ranks, n_ranks)
    lanes = [i for i in np.argsort(plan.lane_rank, kind="stable").tolist() if plan.lane_rank[i] in ranks]
    place = {lane: float(row) for row, lane in enumerate(lanes)}
    takes_time = execution.end > execution.start
    rows = np.flatnonzero(takes_time & np.isin(plan.lane, lanes))
    columns = (column[rows].tolist() for column in (plan.lane, plan.kind, execution.start, execution.end))
    bars = [Bar(place[lane], KINDS[kind], "", begin, end) for lane, kind, begin, end in zip(*columns, strict=True)]
    present = [KINDS[number] for number in np.unique(plan.kind[takes_time])]
    styles = {kind: Style(*STYLES[kind], kind.replace("_", "-")) for kind in present}
    names = {place[lane]: drawn(f"rank {plan.lanes[lane].rank} {plan.lanes[lane].name}") for lane in lanes}
    _, axes = single(9.0, 1.5 + 0.25 * len(lanes))
    draw(axes, bars, styles, names, (0.0, max(execution.seconds, 1e-12)), columns=min(len(styles), 8))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_title(f"{len(plan):,} tasks of {plan.n_ranks} ranks: {execution.seconds:.4g} s", fontsize=9)
    return saved(axes, path)
