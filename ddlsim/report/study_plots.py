"""Plots of studies: how it scales, and what can be had for what.

They take a :class:`ddlsim.study.Table`, return the matplotlib axes and write a picture if `path` is given. Every
other field that is varied gives a series; the bars at its points are 95 % intervals over seeds.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.readable import count
from ddlsim.report.drawing import COLOURS, MARKERS, STYLES, apart, drawn, figure, save, wrapped
from ddlsim.report.study_words import equal_in_front, label_of, named, numbers_of, plain, varied
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: series in a legend beyond which the plot says nothing any more
N_SERIES = 24
#: inches that the lower axis is long, about
_WIDTH = 4.0
#: how many times the smallest value the largest one is that calls for a logarithmic axis
N_LOG = 8.0


def scaling(table: Table, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over the number of workers, a line for each combination of the other fields.

    Throughput has the ideal line: proportional from the best with the fewest workers. Raises ConfigError if there
    are fewer than two numbers of workers, or more than :data:`N_SERIES` lines.
    """
    known = table.known(metric)
    counts = sorted(known["n_workers"].unique().tolist())
    if len(counts) < 2:
        raise ConfigError(f"plot_scaling: all configurations have {counts[0]} workers; vary 'workers'")
    groups = _series(known, [axis for axis in table.axes if axis != "workers"])
    axes = _lines(groups, "n_workers", {n: float(n) for n in counts}, metric)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, apart([math.log(n) for n in counts], [str(n) for n in counts], _WIDTH))
    axes.set_xlabel("workers")
    if metric == "throughput":
        first = known.loc[known["n_workers"] == counts[0], metric].max()
        ideal = [first * n / counts[0] for n in counts]
        axes.plot(counts, ideal, color="#999999", linewidth=1.0, linestyle=(0, (1, 1)), label="ideal (linear)")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    return _finished(axes, path, table, metric, legend=len(groups) > 1 or metric == "throughput")


def lines(table: Table, field: str, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over a varied field, a line for each combination of the others.

    Numbers and texts with a unit ("25 Gbit/s") stand where they belong, on a logarithmic axis if they are all above 0
    and the largest is :data:`N_LOG` times the smallest; other values beside each other, and no line joins them. Raises
    ConfigError for a field that is not varied, one with a single value, or more than :data:`N_SERIES` lines.
    """
    if field not in table.axes:
        raise unknown_name("varied field", field, table.axes)
    known = table.known(metric)
    values = known[field].drop_duplicates().tolist()
    numbers = numbers_of(values)
    places = {value: float(i) for i, value in enumerate(values)} if numbers is None else numbers
    if len(places) < 2:
        raise ConfigError(f"plot_lines: all configurations have {field} = {next(iter(places))}; vary {field!r}")
    groups = _series(known, [axis for axis in table.axes if axis != field])
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
        shown = apart([math.log(place) for place in at] if is_wide(at) else at, texts, _WIDTH, size=8.0)
        axes.set_xticks(at, [drawn(text) for text in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel(drawn(field + unit))
    if METRICS[metric].unit and is_wide(known[metric].tolist()):  # shares and counts have no unit, and begin at 0
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    return _finished(axes, path, table, metric, legend=len(groups) > 1)


def _lines(
    groups: Mapping[str, pd.DataFrame], column: str, places: Mapping[object, float], metric: str, joined: bool = True
) -> Axes:
    """Draw the rows of each group over the places of what they have in a column, with the intervals over seeds."""
    made = figure(9.5 if len(groups) > 1 else 6.0, max(4.0, 0.6 + 0.24 * (1 + len(groups))))
    axes = made.subplots()
    for i, (label, rows) in enumerate(groups.items()):
        x = rows[column].map(places).to_numpy(float)
        order = np.argsort(x, kind="stable")
        mean = rows[metric].to_numpy(float)
        half = mean - rows[f"{metric}_low"].to_numpy(float)
        axes.errorbar(
            x[order], mean[order], half[order] if np.isfinite(half).any() else None, label=wrapped(label, 44),
            markersize=5, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], capsize=3, elinewidth=0.8,
            linestyle=STYLES[i // len(COLOURS) % len(STYLES)] if joined else "",
        )  # fmt: skip
    axes.minorticks_off()
    return axes


def _finished(axes: Axes, path: str | Path | None, table: Table, metric: str, *, legend: bool) -> Axes:
    """Write the numbers of the upright axis as people do, and the picture."""
    made = axes.get_figure()
    assert isinstance(made, Figure)
    if axes.get_yscale() == "log":
        log_axis(axes.yaxis)
    describe(axes.yaxis, metric)
    axes.grid(alpha=0.3)
    if legend:
        made.legend(loc="outside right upper", fontsize=8)
    save(made, path)
    return axes


def log_axis(axis: Axis) -> None:
    """Make an axis logarithmic, with numbers at 1, 2 and 5 only."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())


def _without_unit(texts: list[str]) -> tuple[list[str], str]:
    """Return texts without the unit that all of them have, and " (unit)"."""
    units = {text.partition(" ")[2] for text in texts}
    if len(units) > 1 or "" in units or not all(text[:1].isdigit() for text in texts):
        return texts, ""
    return [text.partition(" ")[0] for text in texts], f" ({units.pop()})"


def is_wide(values: Sequence[float]) -> bool:
    """Return whether numbers call for a logarithmic axis."""
    return min(values) > 0.0 and max(values) >= N_LOG * min(values)


def pareto(table: Table, x: str, y: str, path: str | Path | None = None) -> Axes:
    """Draw all configurations by two metrics, those that none beats in both joined and numbered from 1 on.

    Raises ConfigError for a metric that no configuration has.
    """
    front, known = table.pareto(x, y), table.known(x, y)
    made = figure(9.5, 4.0)
    axes = made.subplots()
    axes.plot(known[x], known[y], linestyle="", marker="o", markersize=4, color="#bbbbbb", label="beaten by another")
    best = "not beaten (Pareto front)"
    axes.plot(front[x], front[y], label=best, color=COLOURS[0], marker="o", markersize=6, linestyle="--")
    for i, rows in enumerate(equal_in_front(table, x, y)):
        place = float(rows[x].iloc[0]), float(rows[y].iloc[0])
        axes.annotate(str(i + 1), place, textcoords="offset points", xytext=(5, 5), fontsize=8)
        label = f"{i + 1}: {label_of(rows.iloc[0], varied(table))}"
        label += f" and {count(len(rows) - 1, 'other')} equal" if len(rows) > 1 else ""
        axes.plot([], [], linestyle="", label=drawn(textwrap.fill(label, 44)))
    for axis, metric in ((axes.xaxis, x), (axes.yaxis, y)):
        if METRICS[metric].unit and is_wide(known[metric].tolist()):
            log_axis(axis)
    describe(axes.xaxis, x)
    describe(axes.yaxis, y)
    axes.grid(alpha=0.3)
    made.legend(loc="outside right upper", fontsize=8)
    save(made, path)
    return axes


def _series(rows: pd.DataFrame, fields: list[str]) -> dict[str, pd.DataFrame]:
    """Return the rows of each combination of the fields, by a label with those that differ."""
    used = [field for field in fields if rows[field].nunique() > 1]
    if not used:
        return {"": rows}
    groups = {
        ", ".join(named(field, value) for field, value in zip(used, values, strict=True)): part
        for values, part in rows.groupby(used, sort=False)
    }
    if len(groups) > N_SERIES:
        raise ConfigError(
            f"plot: {len(groups)} lines (every combination of {', '.join(used)}) are too many to tell apart; draw a "
            f"study that varies less, or take table.summary"
        )
    return groups


def describe(axis: Axis, metric: str) -> None:
    """Name an axis, and write its numbers as people do: shares in %, what a sample takes for a million of them."""
    factor = METRICS[metric].factor
    axis.set_label_text(METRICS[metric].axis)
    axis.set_major_formatter(lambda value, _: f"{factor * value:,.10g}")
