"""A comparison of measured runs and predictions as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddlsim import printable
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.readable import percent, rate, seconds
from ddlsim.text_tables import aligned
from ddlsim.validation.calibration_text import shown

if TYPE_CHECKING:
    from ddlsim.validation.comparison import Compared, Summary, Validation

#: columns of the table that are words
LEFT = (0, 1, 5)


def text(validation: Validation) -> str:
    """Return a row per run, the errors of fitted and held-out runs, fitted values, and causes of the largest errors."""
    return printable.shown("\n".join([*aligned(cells(validation), LEFT), "", *notes(validation)]))


def cells(validation: Validation) -> list[tuple[str, ...]]:
    """Return a row per run, with a head; the columns :data:`LEFT` hold words."""
    return [("", "run", "measured", "predicted", "error", "interval (95 %)"), *map(_row, validation.rows)]


def notes(validation: Validation) -> list[str]:
    """Return what is said below the rows, a line each."""
    lines = []
    for fitted, what in ((True, f"fitted ({validation.fit_on})"), (False, "held out")):
        summary = validation.summary(fitted=fitted)
        if summary is not None:
            lines.append(f"{what}: {_summary(summary)}")
    said = (note for row in validation.rows if row.interval is not None for note in row.interval.notes)
    lines += dict.fromkeys(said)
    fitted_values = validation.known.fitted
    for name, value in fitted_values.links.items():
        lines.append(f"fitted {name} = {shown(name, value)}" if name in PARAMETERS else f"fitted {name} = {value:.4g}")
    for key, line in fitted_values.compute.items():
        lines.append(f"fitted step of {' '.join(key)} = {seconds(line.c0)} + {seconds(line.c1)} x batch size")
    for key, factor in fitted_values.factors.items():
        lines.append(f"fitted compute time of {' '.join(key)}: {factor:.4g} times that assumed")
    for row in validation.rows:
        if row.causes:
            lines.append(f"{row.label}: off by {100.0 * row.error:+.1f} %; right with {_causes(row)}")
    return lines


def _row(row: Compared) -> tuple[str, ...]:
    interval = "-" if row.interval is None else f"{rate(row.interval.low, '')}to {rate(row.interval.high)}"
    used = "fit" if row.fitted else "held out"
    return used, row.label, rate(row.run.throughput), rate(row.predicted), f"{100.0 * row.error:+.1f} %", interval


def _summary(s: Summary) -> str:
    parts = [
        f"{s.n} runs",
        f"mean absolute error {percent(s.mean_absolute)}",
        f"geometric mean {percent(s.geometric_mean)}",
        f"worst {100.0 * s.worst:+.1f} %",
    ]
    if s.in_interval is not None:
        parts.append(f"{100.0 * s.in_interval:.0f} % in their intervals")
    if s.kendall_tau is not None:
        parts.append(f"order: Kendall tau {s.kendall_tau:.2f}")
    if s.options:
        parts.append(f"faster option right in {s.right} of {s.options} pairs")
    return ", ".join(parts)


def _causes(row: Compared) -> str:
    return ", or ".join(str(cause) for cause in row.causes)
