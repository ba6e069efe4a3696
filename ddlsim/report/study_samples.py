"""What a sampled study says: a metric over each field that was drawn, the field that matters most first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ddlsim.errors import ConfigError, UnitError
from ddlsim.readable import seconds, si, size
from ddlsim.report.drawing import COLOURS, drawn, figure, save
from ddlsim.report.study_plots import describe, is_wide, log_axis
from ddlsim.report.study_words import numbers_of, plain, varied
from ddlsim.run.metrics import METRICS
from ddlsim.units import DIMENSIONS, parse

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: panels, and texts beside each other on an axis, that can be read
N_PANELS, N_TEXTS = 6, 8
#: how the numbers behind texts with a unit are written
_WRITE: dict[str, Callable[[float], str]] = {
    "": lambda number: f"{number:g}",
    "bandwidth": functools.partial(si, unit="bit/s"), "time": seconds, "bytes": size,
    **{name: functools.partial(si, unit=unit) for name, (unit, _, _) in DIMENSIONS.items()
       if name not in ("bandwidth", "time", "bytes")},
}  # fmt: skip


def scatter(table: Table, path: str | Path | None = None, *, metric: str = "throughput") -> Axes:
    """Draw a metric over each varied field, a panel each, a dot for each configuration.

    Above each panel stands Spearman's rank correlation rho of field and metric (1: the metric always rises with the
    field, 0: no trend), by whose size the panels are in order, :data:`N_PANELS` at most; fields whose values have no
    order (strategies) go last and have none. Returns the first panel. Raises ConfigError if nothing is varied, and for
    a metric that no configuration has.
    """
    known = table.known(metric)
    fields = [field for field in varied(table) if known[field].map(plain).nunique() > 1]
    if not fields:
        raise ConfigError("scatter: all configurations with a result are the same; vary a field")
    rho = {field: _correlation(known, field, metric) for field in fields}
    order = sorted(fields, key=lambda field: -1.0 if math.isnan(rho[field]) else abs(rho[field]), reverse=True)
    order = order[:N_PANELS]
    n_columns = min(3, len(order))
    n_rows = math.ceil(len(order) / n_columns)
    made = figure(3.1 * n_columns + 0.6, 2.6 * n_rows + 0.4)
    panels = made.subplots(n_rows, n_columns, squeeze=False, sharey=True).ravel()
    for axes, field in zip(panels, order, strict=False):
        _panel(axes, known, field, metric)
        text = "" if math.isnan(rho[field]) else f"rho = {rho[field]:+.2f}".replace("-", "\N{MINUS SIGN}")
        axes.set_title(text, fontsize=8)
    for axes in panels[len(order) :]:
        axes.set_axis_off()
    first = panels[0]
    if METRICS[metric].unit and is_wide(known[metric].tolist()):
        log_axis(first.yaxis)
    else:
        first.set_ylim(bottom=0.0)
    for axes in panels[::n_columns]:
        describe(axes.yaxis, metric)
    save(made, path)
    assert isinstance(first, Axes)
    return first


def _correlation(rows: pd.DataFrame, field: str, metric: str) -> float:
    """Return Spearman's rank correlation, NaN where the values of the field have no order or nothing differs."""
    places = numbers_of(rows[field].drop_duplicates().tolist())
    if places is None or rows[metric].nunique() < 2:
        return math.nan
    return float(np.corrcoef(rows[field].map(places).rank(), rows[metric].rank())[0, 1])


def _panel(axes: Axes, rows: pd.DataFrame, field: str, metric: str) -> None:
    values = rows[field].drop_duplicates().tolist()
    places = numbers_of(values)
    if places is None:  # texts: beside each other
        texts = list(dict.fromkeys(map(plain, values)))
        x = rows[field].map(plain).map(texts.index)
        shown = [_short(text) if len(texts) <= N_TEXTS else "" for text in texts]
        axes.set_xticks(range(len(texts)), [drawn(text) for text in shown], fontsize=7, rotation=30, ha="right")
        axes.set_xlim(-0.5, len(texts) - 0.5)
    else:
        dimension = _dimension(values[0])
        factor = 8.0 if dimension == "bandwidth" else 1.0  # so that ticks stand at whole bit/s
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
    axes.set_xlabel(drawn(field), fontsize=8)
    axes.grid(alpha=0.3)


def _dimension(value: object) -> str:
    """Return what a text with a unit is, "bandwidth" for "25 Gbit/s"; "" for a number."""
    for dimension in DIMENSIONS if isinstance(value, str) else ():
        try:
            parse(value, dimension)
        except UnitError:
            continue
        return dimension
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 22 else f"{text[:20]}..."
