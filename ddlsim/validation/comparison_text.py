"""Comparison of measured and predicted runs as text, plot and HTML page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddlsim
from ddlsim import printable
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.output_files import write_text
from ddlsim.printable import shown
from ddlsim.readable import count, percent, rate
from ddlsim.run.metrics import METRICS
from ddlsim.text_tables import aligned
from ddlsim.validation.calibration_text import shown as shown_value
from ddlsim.validation.compute_fit import step_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddlsim.validation.comparison import ComparedRun, Summary, Validation


#: left-aligned columns of the table
LEFT = (0, 1, 5)


def text(validation: Validation) -> str:
    """Return a row per run, the errors of fitted and held-out runs, fitted values, and causes of the largest errors."""
    return printable.shown("\n".join([*aligned(cells(validation), LEFT), "", *notes(validation)]))


def cells(validation: Validation) -> list[tuple[str, ...]]:
    """Return a header and one row per run; the columns :data:`LEFT` contain text."""
    declined = [("declined", d.label, rate(d.run.throughput), "-", "-", "-") for d in validation.declined]
    return [("", "run", "measured", "predicted", "error", "interval (95 %)"), *map(_row, validation.rows), *declined]


def notes(validation: Validation) -> list[str]:
    """Return the lines below the table."""
    lines = []
    for fitted, what in ((True, f"fitted ({validation.fit_on})"), (False, "held out")):
        summary = validation.summary(fitted=fitted)
        if summary is not None:
            lines.append(f"{what}: {_summary(summary)}")
    if validation.declined:
        n = len(validation.declined)
        lines.append(f"declined: {n} of {count(n + len(validation.rows), 'run')}, which the errors do not include")
        lines += [f"{declined.label}: {declined.reason}" for declined in validation.declined]
    said = (note for row in validation.rows if row.interval is not None for note in row.interval.notes)
    lines += dict.fromkeys(said)
    fitted_values = validation.known.fitted
    for name, value in fitted_values.links.items():
        lines.append(
            f"fitted {name} = {shown_value(name, value)}" if name in PARAMETERS else f"fitted {name} = {value:.4g}"
        )
    for key, line in fitted_values.compute.items():
        lines.append(f"fitted step of {' '.join(key)} = {step_text(line.c0, line.c1)}")
    for key, factor in fitted_values.factors.items():
        lines.append(f"fitted compute time of {' '.join(key)}: {factor:.4g} times the assumed one")
    for row in validation.rows:
        if row.causes:
            lines.append(
                f"{row.label}: error {percent(row.error, sign='+')}, explained by {', or '.join(map(str, row.causes))}"
            )
    return lines


def _row(row: ComparedRun) -> tuple[str, ...]:
    interval = "-" if row.interval is None else f"{rate(row.interval.low, '')}to {rate(row.interval.high)}"
    used = "fit" if row.fitted else "held out"
    return used, row.label, rate(row.run.throughput), rate(row.predicted), percent(row.error, sign="+"), interval


def _summary(s: Summary) -> str:
    parts = [
        count(s.n, "run"),
        f"mean absolute error {percent(s.mean_absolute)}",
        f"geometric mean {percent(s.geometric_mean)}",
        f"worst {percent(s.worst, sign='+')}",
    ]
    if s.in_interval is not None:
        parts.append(f"{percent(s.in_interval, 0)} in their intervals")
    if s.kendall_tau is not None:
        parts.append(f"order: Kendall tau {s.kendall_tau:.2f}")
    if s.options:
        parts.append(f"faster option right in {s.right} of {s.options} pairs")
    return ", ".join(parts)


# ---------------------------------------------------------------- plot

BAND = 0.10


def measured_against_predicted(validation: Validation, path: str | Path | None = None) -> Axes:
    """Draw one point per run on logarithmic axes: hollow if it was fitted, with intervals, a diagonal and +-10 %."""
    from ddlsim.report.drawing import COLOURS, DOTTED, log_numbers, saved, single, titled

    made, axes = single(5.2, 4.8)
    values = [value for row in validation.rows for value in (row.run.throughput, row.predicted)]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, label="measured = predicted", **DOTTED)
    low, high = ([end * (1.0 + sign * BAND) for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="#dddddd", alpha=0.6, linewidth=0.0, label="within 10 %")
    for fitted, label, marker, face in ((True, "fitted", "s", "none"), (False, "held out", "o", COLOURS[0])):
        rows = [row for row in validation.rows if row.fitted == fitted]
        if not rows:
            continue
        below = [0.0 if row.interval is None else row.predicted - row.interval.low for row in rows]
        above = [0.0 if row.interval is None else row.interval.high - row.predicted for row in rows]
        measured, predicted = zip(*((row.run.throughput, row.predicted) for row in rows), strict=True)
        look: Any = {"markerfacecolor": face, "markersize": 5, "elinewidth": 0.8, "capsize": 2, "label": label}
        axes.errorbar(measured, predicted, yerr=[below, above], fmt=marker, color=COLOURS[0], **look)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        log_numbers(axis, *ends)
    quantity = METRICS["throughput"].axis
    axes.set(xlabel=f"measured {quantity}", ylabel=f"predicted {quantity}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    titled(made, f"Measured and predicted runs on {validation.cluster.name}")
    return saved(axes, path)


# ---------------------------------------------------------------- page

_STYLE = (
    "body { font-family: sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em } "
    "table { border-collapse: collapse } td, th { padding: 0.2em 0.7em; text-align: right } "
    "pre, .rows { overflow-x: auto } img { max-width: 100% }"
)


def save_page(validation: Validation, path: str | Path, title: str) -> None:
    """Write the page; the same comparison gives the same text. Raises ConfigError if the file cannot be written."""
    from ddlsim.report.drawing import svg_uri

    rows = validation.table.to_html(index=False, border=0, float_format=lambda value: f"{value:.4g}", na_rep="")
    heading = html.escape(shown(title))
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>",
        f"<pre>{html.escape(shown(str(validation)))}</pre>",
        f'<img alt="Measured against predicted throughput" src="{svg_uri(validation.plot())}">',
        f'<h2>Every run</h2><div class="rows">{rows}</div>',
        f"<footer><small>ddlsim {html.escape(ddlsim.__version__)}</small></footer></body></html>",
    ]
    write_text(Path(path), "\n".join([*parts, ""]))
