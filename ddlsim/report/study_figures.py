"""Figures of a study: bars, heat maps, scatter plots, learning curves, and the figures of its HTML report."""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster.cluster import Floats
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.extras import needs
from ddlsim.readable import count, in_words, percent, seconds, si, size
from ddlsim.report import study_labels as labels
from ddlsim.report.drawing import (
    COLOURS,
    DOTTED,
    STYLES,
    drawn,
    figure,
    learning_curve,
    named_rows,
    noted,
    saved,
    series_style,
    single,
    spaced_labels,
    svg_uri,
    time_bars,
    titled,
    within_percent,
    worker_axis,
    wrapped,
)
from ddlsim.report.study_labels import label_of, plain, values_of, varied
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import mean_line
from ddlsim.units import DIMENSIONS, dimension_of

with needs("matplotlib"):
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.table import Table


#: maximum number of series in a legend
N_SERIES = 24
#: approximate length of the horizontal axis in inches
_WIDTH = 4.0
#: gain of throughput that rounds to 0.00 %
_NO_GAIN = 5e-5
#: minimum ratio of the largest to the smallest value for a logarithmic axis
N_LOG = 8.0


def scaling(table: Table, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over the number of workers, one line per combination of the other fields.

    For throughput, a dotted line shows linear scaling from the best configuration with the fewest workers. Raises
    ConfigError if there are fewer than two numbers of workers, or more than :data:`N_SERIES` lines.
    """
    rows = table.known(metric)
    counts = sorted(rows["n_workers"].unique().tolist())
    if len(counts) < 2:
        raise ConfigError(f"plot_scaling: all configurations have {counts[0]} workers; vary 'workers'")
    groups = _series(rows, [axis for axis in table.axes if axis != "workers"])
    axes, is_rate = _lines(groups, "n_workers", {n: float(n) for n in counts}, metric), metric == "throughput"
    worker_axis(axes, counts, _WIDTH)
    if is_rate:
        first = rows.loc[rows["n_workers"] == counts[0], metric].max()
        ideal = [first * n / counts[0] for n in counts]
        axes.plot(counts, ideal, label="ideal (linear)", **DOTTED)
    _scale(axes.yaxis, metric, is_rate)
    return _finished(axes, path, legend=len(groups) > 1 or is_rate)


def lines(table: Table, field: str, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over a varied field, one line per combination of the other fields.

    Numbers and texts with a unit ("25 Gbit/s") are on a numeric axis, logarithmic if all are above 0 and the largest
    is at least :data:`N_LOG` times the smallest; other values are categories, not connected by lines. Raises
    ConfigError for a field that is not varied, one with a single value, or more than :data:`N_SERIES` lines.
    """
    if field not in table.axes:
        raise unknown_name("varied field", field, table.axes)
    rows = table.known(metric)
    values = rows[field].drop_duplicates().tolist()
    numbers = labels.numbers_of(values)
    places = {value: float(i) for i, value in enumerate(values)} if numbers is None else numbers
    if len(places) < 2:
        value = next(iter(places))
        raise ConfigError(f"plot_lines: all configurations have {field} = {value}; vary {field!r}")
    groups = _series(rows, [axis for axis in table.axes if axis != field])
    axes = _lines(groups, field, places, metric, joined=numbers is not None)
    if numbers is None:
        axes.set_xlim(-0.5, len(values) - 0.5)
    elif is_wide(list(places.values())):
        axes.set_xscale("log")
    texts, unit = _without_unit([plain(value) for value in places])
    if numbers is None:
        letters = int(_WIDTH * 72.0 / (0.6 * 8.0) / len(values))
        axes.set_xticks(range(len(values)), [wrapped(text, letters - 1) for text in texts], fontsize=8)
    else:
        at = list(places.values())
        shown = spaced_labels([math.log(place) for place in at] if is_wide(at) else at, texts, _WIDTH, size=8.0)
        axes.set_xticks(at, [drawn(text) for text in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel(drawn(labels.label_of_axis(field, table.axes, unit)))
    _scale(axes.yaxis, metric, _is_logarithmic(rows, metric))
    return _finished(axes, path, legend=len(groups) > 1)


def _lines(
    groups: Mapping[str, pd.DataFrame], column: str, places: Mapping[object, float], metric: str, joined: bool = True
) -> Axes:
    """Draw the rows of each group at the `places` of their values in a column, with intervals over seeds."""
    _, axes = single(9.5 if len(groups) > 1 else 6.0, max(4.0, 0.6 + 0.24 * (1 + len(groups))))
    for i, (label, rows) in enumerate(groups.items()):
        x = rows[column].map(places).to_numpy(float)
        order = np.argsort(x, kind="stable")
        mean = rows[metric].to_numpy(float)
        half = mean - rows[f"{metric}_low"].to_numpy(float)
        bars = half[order] if np.isfinite(half).any() else None
        style = series_style(i) | {"linestyle": STYLES[i // len(COLOURS) % len(STYLES)] if joined else ""}
        style |= {"markersize": 5, "capsize": 3, "elinewidth": 0.8}
        axes.errorbar(x[order], mean[order], bars, label=wrapped(label, 44), **style)
    axes.minorticks_off()
    return axes


def _finished(axes: Axes, path: str | Path | None, *, legend: bool = True) -> Axes:
    """Add grid lines and a legend beside the axes, and write the figure."""
    axes.grid(alpha=0.3)
    if legend and isinstance(axes.figure, Figure):
        axes.figure.legend(loc="outside right upper", fontsize=8)
    return saved(axes, path)


def _is_logarithmic(rows: pd.DataFrame, metric: str) -> bool:
    """Return whether the axis of a metric is logarithmic; axes of shares and counts are linear from 0."""
    return bool(METRICS[metric].unit) and is_wide(rows[metric].tolist())


def _scale(axis: Axis, metric: str, log: bool) -> None:
    """Make a vertical axis start at 0, or logarithmic, and describe it."""
    if log:
        log_axis(axis)
    else:
        axis.axes.set_ylim(bottom=0.0)
    describe(axis, metric)


def log_axis(axis: Axis) -> None:
    """Make an axis logarithmic, with numbers at 1, 2 and 5 only."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())


def _without_unit(texts: list[str]) -> tuple[list[str], str]:
    """Return texts without their common unit, and the unit."""
    units = {text.partition(" ")[2] for text in texts}
    if len(units) > 1 or "" in units or not all(text[:1].isdigit() for text in texts):
        return texts, ""
    return [text.partition(" ")[0] for text in texts], units.pop()


def is_wide(values: Sequence[float]) -> bool:
    """Return whether numbers require a logarithmic axis."""
    return min(values) > 0.0 and max(values) >= N_LOG * min(values)


def pareto(table: Table, x: str, y: str, path: str | Path | None = None) -> Axes:
    """Draw all configurations by two metrics, with the Pareto front connected and numbered from 1.

    Raises ConfigError for a metric that no configuration has.
    """
    front, rows = table.pareto(x, y), table.known(x, y)
    _, axes = single(9.5, 4.0)
    axes.plot(rows[x], rows[y], linestyle="", marker="o", markersize=4, color="#bbbbbb", label="dominated")
    best = "Pareto front"
    axes.plot(front[x], front[y], label=best, color=COLOURS[0], marker="o", markersize=6, linestyle="--")
    for i, group in enumerate(labels.equal_in_front(table, x, y)):
        place = float(group[x].iloc[0]), float(group[y].iloc[0])
        axes.annotate(str(i + 1), place, textcoords="offset points", xytext=(5, 5), fontsize=8)
        label = f"{i + 1}: {label_of(group.iloc[0], varied(table))}"
        label += f" and {count(len(group) - 1, 'other')} equal" if len(group) > 1 else ""
        axes.plot([], [], linestyle="", label=drawn(textwrap.fill(label, 44)))
    for axis, metric in ((axes.xaxis, x), (axes.yaxis, y)):
        if _is_logarithmic(rows, metric):
            log_axis(axis)
        describe(axis, metric)
    return _finished(axes, path)


def _series(rows: pd.DataFrame, fields: list[str]) -> dict[str, pd.DataFrame]:
    """Return the rows of each combination of the fields, with a label of those that differ."""
    used = [field for field in fields if rows[field].nunique() > 1]
    if not used:
        return {"": rows}
    groups = {
        ", ".join(labels.named(field, value) for field, value in zip(used, values, strict=True)): part
        for values, part in rows.groupby(used, sort=False)
    }
    if len(groups) > N_SERIES:
        n_lines, names = len(groups), ", ".join(used)
        raise ConfigError(
            f"plot: {n_lines} lines, one per combination of {names}, are too many to distinguish; plot a smaller "
            "study, or use table.summary"
        )
    return groups


def describe(axis: Axis, metric: str) -> None:
    """Label an axis and format its numbers: shares in %, metrics per sample for a million of them."""
    factor = METRICS[metric].factor
    axis.set_label_text(METRICS[metric].axis)
    axis.set_major_formatter(lambda value, _: f"{factor * value:,.10g}")


#: maximum number of values of a field in a readable heat map
N_CELLS = 16
#: maximum numbers of bars and of lines for the best configurations
N_BARS = 16
N_LINES = 8


def heat_map(table: Table, x: str, y: str, path: str | Path | None = None, *, metric: str = "efficiency") -> Axes:
    """Draw a metric over two varied fields; if other fields vary too, each cell has its best configuration.

    Cells without a value (skipped, failed, a target not reached) are hatched. Raises ConfigError for a field that
    is not varied or has more than :data:`N_CELLS` values.
    """
    columns, rows = _values(table, x), _values(table, y)
    ranked = table.best(metric, n=len(table.members))  # best first
    cells = np.full((len(rows), len(columns)), np.nan)
    for column, row, value in zip(ranked[x].map(plain), ranked[y].map(plain), ranked[metric], strict=True):
        at = rows.index(row), columns.index(column)
        if math.isnan(cells[at]):
            cells[at] = value
    fig, axes = single(2.0 + 0.72 * max(len(columns), 4), 1.5 + 0.42 * max(len(rows), 3))
    axes.patch.set(hatch="///", facecolor="#ffffff", edgecolor="#bbbbbb")
    axes.pcolormesh(cells, cmap="cividis", edgecolors="white", linewidth=1.0)
    unit = _write_cells(axes, cells, metric)
    axes.set_xticks(np.arange(len(columns)) + 0.5, [drawn(textwrap.fill(text, 14)) for text in columns], fontsize=8)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [drawn(textwrap.fill(text, 22)) for text in rows], fontsize=8)
    axes.tick_params(length=0)
    axes.set(xlabel=drawn(labels.label_of_axis(x, table.axes)), ylabel=drawn(labels.label_of_axis(y, table.axes)))
    title = METRICS[metric].heading + (f" ({unit})" if unit else "")
    others = [labels.label_of_axis(axis, table.axes) for axis in varied(table) if axis not in (x, y)]
    title += f", the best over {', '.join(others)}" if others else ""
    title += "; hatched: no value" if np.isnan(cells).any() else ""
    titled(fig, title)
    return saved(axes, path)


def _values(table: Table, axis: str) -> list[str]:
    """Return the values of a field as texts: numbers in ascending order, others in design order."""
    if axis not in table.axes:
        raise unknown_name("varied field", axis, table.axes)
    values = [member.settings[axis] for member in table.members]
    numbers = sorted(value for value in values if isinstance(value, int | float))
    texts = list(dict.fromkeys(plain(value) for value in (numbers if len(numbers) == len(values) else values)))
    if len(texts) > N_CELLS:
        n_values = len(texts)
        raise ConfigError(f"heat map: {axis} has {n_values} values, above the limit of {N_CELLS}; vary fewer values")
    return texts


def _write_cells(axes: Axes, cells: Floats, metric: str) -> str:
    """Write the numbers into the cells, and return their unit if it is the same in all."""
    texts = {place: METRICS[metric].write(value) for place, value in np.ndenumerate(cells) if not math.isnan(value)}
    units = {text.partition(" ")[2] for text in texts.values()}
    low, high = np.nanmin(cells), np.nanmax(cells)
    for (row, column), text in texts.items():
        number, _, unit = text.partition(" ")
        dark = high > low and (cells[row, column] - low) / (high - low) < 0.55
        place, colour = (column + 0.5, row + 0.5), "white" if dark else "black"
        text = number if len(units) == 1 else f"{number}\n{unit}"
        axes.annotate(text, place, ha="center", va="center", fontsize=8, color=colour)
    return units.pop() if len(units) == 1 else ""


def breakdown(table: Table, path: str | Path | None = None, *, metric: str = "throughput", n: int = N_BARS) -> Axes:
    """Draw the shares of the workers' time as bars, for the `n` best configurations by `metric`."""
    best = table.best(metric, n=n)
    fields = varied(table)
    fig, axes = single(8.0, 1.5 + 0.42 * len(best))
    kinds = [name.removesuffix("_share") for name in best.columns if name.endswith("_share")]
    shares = {kind: 100.0 * np.nan_to_num(best[f"{kind}_share"].to_numpy(np.float64)) for kind in kinds}
    time_bars(axes, shares, 0.7, upright=False)
    for i, value in enumerate(best[metric]):
        axes.annotate(METRICS[metric].write(value), (101.5, i), va="center", fontsize=8, annotation_clip=False)
    named_rows(axes, [wrapped(label_of(row, fields), 44, 2) for _, row in best.iterrows()])
    axes.set(xlim=(0.0, 100.0), xlabel="time of the workers (%)")
    axes.set_title(f"{METRICS[metric].heading} on the right", fontsize=9, loc="right")
    fig.legend(loc="outside lower center", ncols=4, fontsize=8)
    return saved(axes, path)


def one_change(table: Table, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw how `metric` changes with each single field of the best configuration, the widest range on top.

    Each dot is a configuration of the study that differs from the best in this field only. Raises ConfigError if
    there is none, or if the best value is 0.
    """
    rows, best = table.known(metric), table.best(metric).iloc[0]
    if best[metric] == 0.0:
        raise ConfigError(f"one change: the best {metric} is 0, so relative changes are undefined")
    bars: list[tuple[str, list[tuple[float, str]]]] = []
    for field in varied(table):
        variants = labels.rows_of(table, rows, best, besides=field)
        changes = [(100.0 * (row[metric] / best[metric] - 1.0), plain(row[field])) for _, row in variants.iterrows()]
        if len(changes) > 1:
            bars.append((field, sorted(changes)))
    if not bars:
        raise ConfigError("one change: no configuration of the study differs from the best one in a single field")
    bars.sort(key=lambda item: item[1][0][0] - item[1][-1][0])
    fig, axes = single(8.0, 1.3 + 0.5 * len(bars))
    for i, (_, changes) in enumerate(bars):
        (low, low_text), (high, high_text) = changes[0], changes[-1]
        axes.barh(i, high - low, left=low, color="#cfdceb", edgecolor=COLOURS[0], height=0.45)
        axes.plot([x for x, _ in changes], [i] * len(changes), linestyle="", marker="o", markersize=4, color="#223344")
        for x, text, side, offset in ((low, low_text, "right", -6), (high, high_text, "left", 6)):
            noted(axes, wrapped(text, 30, lines=1), (x, i), (offset, 0), ha=side, va="center")
    axes.axvline(0.0, color="#222222", linewidth=1.0)
    named_rows(axes, [drawn(labels.label_of_axis(field, table.axes)) for field, _ in bars])
    left, right = min(c[0][0] for _, c in bars), max(c[-1][0] for _, c in bars)
    space = 0.6 * max(right - left, 1e-6)  # for the labels next to the bars
    axes.set(
        xlim=(left - space, right + space), xlabel=f"{METRICS[metric].heading} relative to the best configuration (%)"
    )
    axes.set_xticks([tick for tick in axes.get_xticks() if left <= tick <= right])
    titled(fig, f"best: {label_of(best, varied(table))}")
    axes.grid(alpha=0.3, axis="x")
    return saved(axes, path)


def tornado(sensitivities: Sequence[Sensitivity], path: str | Path | None = None, *, title: str = "") -> Axes:
    """Draw the gain from making each part of a run 10 % better (:meth:`ddlsim.Result.sensitivities`).

    Parts without an effect (a gain that rounds to 0.00 %) have no bar; the label of the axis lists them.
    """
    if not sensitivities:
        raise ConfigError("tornado: sensitivities is empty; pass result.sensitivities() of a completed run")
    names = [f"{'-' if 'latency' in s.what else '+'}{percent(s.change, 0)} {_part(s.what)}" for s in sensitivities]
    without = [_part(s.what) for s in sensitivities if abs(s.gain) < _NO_GAIN]
    effects = [(name, 100.0 * s.gain) for name, s in zip(names, sensitivities, strict=True) if abs(s.gain) >= _NO_GAIN]
    gains = [gain for _, gain in effects]
    fig, axes = single(8.0, 1.3 + 0.36 * len(gains))
    axes.barh(range(len(gains)), gains, color=COLOURS[0], edgecolor="white", height=0.6)
    for i, gain in enumerate(gains):
        side, away = ("right", -5) if gain < 0.0 else ("left", 5)
        noted(axes, f"{gain:+.2f} %", (gain, i), (away, 0), ha=side, va="center")
    axes.axvline(0.0, color="#222222", linewidth=1.0)
    named_rows(axes, [drawn(name) for name, _ in effects])
    axes.margins(x=0.2)
    axes.set_xlabel(
        "change in throughput (%)" + ("\n" + wrapped(f"no effect: {', '.join(without)}", 80) if without else "")
    )
    if title:
        titled(fig, title)
    axes.grid(alpha=0.3, axis="x")
    return saved(axes, path)


def _part(what: str) -> str:
    """Return a part of a run as a label: "NIC bandwidth" for "bandwidth of nic"."""
    quantity, _, kind = what.rpartition(" of ")
    return in_words(f"{kind} {quantity}" if quantity in ("bandwidth", "latency") else what)


def learning(table: Table, path: str | Path | None = None, *, n: int = N_LINES) -> Axes:
    """Draw held-out accuracy over simulated time, one line for each of the `n` best configurations.

    They are ranked by time to the target accuracy, if there is one, then by accuracy. With several seeds a line is
    the mean up to the end of the shortest run, with a band for its 95 % interval (Student's t). Raises ConfigError
    for timing-only studies.
    """
    history = table.history
    if history.empty:
        raise ConfigError(
            "learning curves: the runs of this study are timing-only; set training in the base experiment"
        )
    best = table.best("accuracy", n=len(table.members))
    if "time_to_accuracy" in best:  # those that never reach the target remain sorted by accuracy
        best = best.sort_values("time_to_accuracy", kind="stable")
    _, axes = single(8.0, 4.0)
    for i, (_, settings) in enumerate(best.head(n).iterrows()):
        seeds = (part[["time", "accuracy"]] for _, part in labels.rows_of(table, history, settings).groupby("seed"))
        at, mean, half, _ = mean_line([part.to_numpy(np.float64).T * [[1.0], [100.0]] for part in seeds], 0.95)
        label = drawn(textwrap.fill(label_of(settings, varied(table)), 34))
        learning_curve(axes, i, label, at, mean, half)
    axes.set(xlabel="simulated time", ylabel="held-out accuracy (%)")
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.set_xlim(left=0.0)
    within_percent(axes)
    return _finished(axes, path)


#: maximum number of panels, and of readable tick labels on an axis
N_PANELS, N_TEXTS = 6, 8
#: format of the numbers of texts with a unit
_WRITE: dict[str, Callable[[float], str]] = {
    "": lambda number: f"{number:g}",
    **{name: functools.partial(si, unit=unit) for name, (unit, _, _) in DIMENSIONS.items()},
    "bandwidth": functools.partial(si, unit="bit/s"),
    "time": seconds,
    "bytes": size,
}


def scatter(table: Table, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over each varied field, one panel per field and one dot per configuration.

    The title of a panel is Spearman's rank correlation rho of field and metric (1: the metric always rises with the
    field, 0: no trend). Panels are sorted by the absolute value of rho, at most :data:`N_PANELS`; fields without an
    order (such as strategies) come last, without rho. Returns the first panel. Raises ConfigError if nothing is
    varied, and for a metric that no configuration has.
    """
    rows = table.known(metric)
    fields = [field for field in varied(table) if rows[field].map(plain).nunique() > 1]
    if not fields:
        raise ConfigError("scatter: all configurations with a result are equal; vary at least one field")
    rho = {field: _correlation(rows, field, metric) for field in fields}
    order = sorted(fields, key=lambda field: -1.0 if math.isnan(rho[field]) else abs(rho[field]), reverse=True)
    order = order[:N_PANELS]
    n_columns = min(3, len(order))
    n_rows = math.ceil(len(order) / n_columns)
    fig = figure(3.1 * n_columns + 0.6, 2.6 * n_rows + 0.4)
    panels = fig.subplots(n_rows, n_columns, squeeze=False, sharey=True).ravel()
    for axes, field in zip(panels, order, strict=False):
        _panel(axes, rows, field, metric)
        axes.set_xlabel(drawn(labels.label_of_axis(field, table.axes)), fontsize=8)
        text = "" if math.isnan(rho[field]) else f"rho = {rho[field]:+.2f}".replace("-", "\N{MINUS SIGN}")
        axes.set_title(text, fontsize=8)
    for axes in panels[len(order) :]:
        axes.set_axis_off()
    first = panels[0]
    _scale(first.yaxis, metric, _is_logarithmic(rows, metric))
    for axes in panels[n_columns::n_columns]:
        describe(axes.yaxis, metric)
    assert isinstance(first, Axes)
    return saved(first, path)


def _correlation(rows: pd.DataFrame, field: str, metric: str) -> float:
    """Return Spearman's rank correlation; NaN if the values have no order or do not differ."""
    places = labels.numbers_of(rows[field].drop_duplicates().tolist())
    if places is None or rows[metric].nunique() < 2:
        return math.nan
    return float(np.corrcoef(rows[field].map(places).rank(), rows[metric].rank())[0, 1])


def _panel(axes: Axes, rows: pd.DataFrame, field: str, metric: str) -> None:
    values = rows[field].drop_duplicates().tolist()
    places = labels.numbers_of(values)
    if places is None:  # categories, evenly spaced
        texts = list(dict.fromkeys(map(plain, values)))
        x = rows[field].map(plain).map(texts.index)
        shown = [wrapped(text, 22, 1) if len(texts) <= N_TEXTS else "" for text in texts]
        axes.set_xticks(range(len(texts)), shown, fontsize=7, rotation=30, ha="right")
        axes.set_xlim(-0.5, len(texts) - 0.5)
    else:
        dimension = dimension_of(values[0]) if isinstance(values[0], str) else ""
        factor = 8.0 if dimension == "bandwidth" else 1.0  # ticks at whole bit/s
        x = factor * rows[field].map(places)
        write = _WRITE[dimension]
        if is_wide(list(places.values())):
            log_axis(axes.xaxis)
            wide = max(places.values()) > 30.0 * min(places.values())
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0)))
        if len(places) <= N_TEXTS:
            axes.set_xticks([factor * place for place in places.values()], [drawn(plain(value)) for value in places])
        else:
            axes.xaxis.set_major_formatter(lambda number, _: write(number))
        axes.tick_params(labelsize=8)
    axes.plot(x, rows[metric], linestyle="", marker="o", markersize=4, color=COLOURS[0], alpha=0.6)
    axes.grid(alpha=0.3)


#: maximum number of bars of a breakdown that fits on a screen
_N_BARS = 12


@dataclass(frozen=True)
class Picture:
    """A figure of the HTML report: title, caption (one sentence), data URI, width in CSS pixels."""

    title: str
    caption: str
    uri: str
    width: int


def pictures(table: Table, metric: str, sensitivities: Sequence[Sensitivity], best: str) -> Iterator[Picture]:
    """Yield the figures of a study for which it has data.

    metric         metric that ranks configurations
    sensitivities  those of the best configuration, whose label is `best`; may be empty
    """
    if not labels.is_known(table, metric):  # nothing has finished
        return
    yield from _scaling(table, metric)
    yield from _heat_maps(table, metric)
    front, heading = labels.front_of(table), METRICS[metric].heading
    if front is not None and len(table.known(*front)) > 1:
        x, y = (METRICS[name].heading for name in front)
        caption = f"Every configuration by {x} and {y}; the dashed line is the Pareto front."
        yield _picture(f"{x.capitalize()} against {y}", caption, pareto(table, *front))
    if any(table.summary[field].map(plain).nunique() > N_CELLS for field in varied(table)):  # a random sample
        caption = (
            f"Every configuration, {heading} over each field; rho is Spearman's rank correlation, by whose absolute "
            "value the panels are sorted."
        )
        yield _picture(f"{heading.capitalize()} over each field", caption, scatter(table, metric=metric))
    which = "Every configuration" if len(table.known(metric)) <= _N_BARS else f"The {_N_BARS} best configurations"
    caption = f"{which} by {heading}, the best on top, with the shares of their workers' time."
    yield _picture("Time breakdown", caption, breakdown(table, metric=metric, n=_N_BARS))
    with suppress(ConfigError):  # random samples have no two configurations that differ in one field
        changes = one_change(table, metric=metric)
        caption = f"{heading.capitalize()} if a single field of the best configuration is changed."
        yield _picture("Effects of single changes", caption, changes)
    if sensitivities:
        caption = f"The best configuration ({best}) simulated again, each time with one part 10 % better."
        yield _picture("Sensitivity", caption, tornado(sensitivities))
    if not table.history.empty:
        caption = f"Accuracy of the best configurations ({N_LINES} at most); bands are 95 % intervals over seeds."
        yield _picture("Learning curves", caption, learning(table))


def _scaling(table: Table, metric: str) -> Iterator[Picture]:
    if table.summary["n_workers"].nunique() < 2:
        return
    few, fixed = _few_lines(table, metric)
    if few.summary["n_workers"].nunique() < 2:
        return
    where = f" Other fields have their best values: {fixed}." if fixed else ""
    for name in ("throughput", "efficiency"):
        heading = METRICS[name].heading
        caption = f"{heading.capitalize()} over the number of workers; bars are 95 % intervals over seeds.{where}"
        yield _picture(f"Scaling: {heading}", caption, scaling(few, metric=name))


def _few_lines(table: Table, metric: str) -> tuple[Table, str]:
    """Return the part of a study with few enough lines, and text on the fixed values of the least important fields."""
    best, n_lines, fixed = table.best(metric).iloc[0], 1, {}
    for field in _by_spread(table, metric):
        n_values = len(values_of(table, field))
        if field == "workers":
            continue
        if n_lines * n_values <= N_LINES:
            n_lines *= n_values
        else:
            fixed[field] = best[field]
    members = [m for m in table.members if all(m.settings[field] == value for field, value in fixed.items())]
    words = ", ".join(f"{field} {plain(value)}" for field, value in fixed.items())
    return dataclasses.replace(table, members=members), words


def _by_spread(table: Table, metric: str) -> list[str]:
    """Return the varied fields, sorted by the spread of the best metric over their values."""
    ranked = table.best(metric, n=len(table.members))  # the first row of each value is its best

    def spread(field: str) -> float:
        tops = ranked.groupby(field, sort=False)[metric].first()
        return math.log(tops.max() / tops.min()) if tops.min() > 0.0 else float(tops.max() - tops.min())

    return sorted(varied(table), key=spread, reverse=True)


def _heat_maps(table: Table, metric: str) -> Iterator[Picture]:
    """Yield heat maps over the two most important fields; random samples have none."""
    for name in dict.fromkeys(("efficiency", metric)):
        fields = [field for field in _by_spread(table, name) if len(values_of(table, field)) <= N_CELLS][:2]
        if len(fields) == 2:
            x, y = sorted(fields, key=lambda field: field != "workers")
            heading = METRICS[name].heading
            caption = (
                f"The two fields with the largest effect on {heading}; if others vary too, each cell has its best "
                "configuration."
            )
            yield _picture(f"{heading.capitalize()} by {x} and {y}", caption, heat_map(table, x, y, metric=name))


def _picture(title: str, caption: str, axes: Axes) -> Picture:
    fig = axes.get_figure(root=True)
    assert fig is not None
    return Picture(title, caption, svg_uri(axes), round(96.0 * fig.get_figwidth()))
