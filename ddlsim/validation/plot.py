"""Measured against predicted throughput, in the style of the other plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlsim.report.drawing import COLOURS, figure, log_numbers, save, titled
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddlsim.validation.comparison import Validation

BAND = 0.10


def measured_against_predicted(validation: Validation, path: str | Path | None = None) -> Axes:
    """Draw one point per run on logarithmic axes: hollow where it was fitted, with intervals, a diagonal and +-10 %."""
    made = figure(5.2, 4.8)
    axes = made.subplots()
    values = [value for row in validation.rows for value in (row.run.throughput, row.predicted)]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color="#999999", linewidth=1.0, linestyle=(0, (1, 1)), label="measured = predicted")
    low, high = ([end * (1.0 + sign * BAND) for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="#dddddd", alpha=0.6, linewidth=0.0, label="within 10 %")
    for fitted, label, marker, face in ((True, "fitted", "s", "none"), (False, "held out", "o", COLOURS[0])):
        rows = [row for row in validation.rows if row.fitted == fitted]
        if not rows:
            continue
        bars = [row.interval for row in rows]
        below = [0.0 if bar is None else row.predicted - bar.low for row, bar in zip(rows, bars, strict=True)]
        above = [0.0 if bar is None else bar.high - row.predicted for row, bar in zip(rows, bars, strict=True)]
        axes.errorbar(
            [row.run.throughput for row in rows], [row.predicted for row in rows], yerr=[below, above], fmt=marker,
            color=COLOURS[0], markerfacecolor=face, markersize=5, elinewidth=0.8, capsize=2, label=label,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    for axis in (axes.xaxis, axes.yaxis):
        log_numbers(axis, *ends)
    axes.set_aspect("equal")
    axes.set_xlabel(f"measured {METRICS['throughput'].axis}")
    axes.set_ylabel(f"predicted {METRICS['throughput'].axis}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    titled(made, f"Measured and predicted runs on {validation.cluster.name}")
    save(made, path)
    return axes
