"""Text summary of a calibration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddlsim import printable
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.readable import count, percent, seconds, si, size
from ddlsim.text_tables import aligned
from ddlsim.validation.compute_fit import step_text

if TYPE_CHECKING:
    from ddlsim.validation.calibration import Calibration, Residual

N_WORST = 3
WARNING = "warning: "


def shown(name: str, value: float) -> str:
    """Return a parameter's value with a unit, as in cluster files."""
    if not math.isfinite(value):
        return "no limit"
    if PARAMETERS[name] == "time":
        return seconds(value)
    if PARAMETERS[name] in ("bytes", "share"):
        return f"{value:.4g}{' B' if PARAMETERS[name] == 'bytes' else ''}"
    return si(8.0 * value, "bit/s") if name != "reduce_bandwidth" else si(value, "B/s")


def summary(calibration: Calibration) -> str:
    """Return warnings, parameters with intervals, residuals, curves, compute times, jitter and notes."""
    _, *parameters = cells(calibration)
    found = [(*others, f"(file: {file})") for *others, file in parameters]
    rows = aligned(found, left=(0, 2, 3), indent=2) if found else []
    return printable.shown("\n".join([*warnings(calibration), title(calibration), *rows, *notes(calibration)]))


def warnings(calibration: Calibration) -> list[str]:
    """Return the most important warnings: contradictory measurements and bad fits."""
    return sorted((note for note in calibration.notes if note.startswith(WARNING)), key=lambda n: "contradict" not in n)


def title(calibration: Calibration) -> str:
    """Return a title that names the cluster and the number of measurements."""
    return f"calibration of {calibration.cluster.name}"


def cells(calibration: Calibration) -> list[tuple[str, str, str, str]]:
    """Return a header and one row per parameter."""
    rows = [("parameter", "value", "interval (95 %)", "file")]
    for p in calibration.parameters:
        value, low, high, file = (shown(p.name, number) for number in (p.value, p.low, p.high, p.file))
        rows.append((p.name, value, f"[{low}, {high}]", file))
    return rows


def notes(calibration: Calibration) -> list[str]:
    """Return residuals, curves, compute times, jitter and notes as indented lines."""
    lines = []
    for fitted, what in ((True, "used in the fit"), (False, "not used in the fit")):
        rows = [r for r in calibration.residuals if r.fitted == fitted]
        if rows:
            mean = sum(abs(r.error) for r in rows) / len(rows)
            worst = sorted(rows, key=lambda r: -abs(r.error))[:N_WORST]
            lines.append(f"  {count(len(rows), 'measurement')} {what}: mean absolute error {percent(mean)}; worst:")
            lines += [f"    {_named(r)}: measured {seconds(r.measured)}, {percent(r.error, sign='+')}" for r in worst]
    for c in calibration.curves:
        factors = ", ".join(f"{f:.3g}" for f in c.per_byte)
        what = f"{c.operation} {c.backend} {'inside a host' if c.inside else 'between hosts'}"
        measured = f"{size(c.nbytes[0])} to {size(c.nbytes[1])}, {_span(c.ranks)} ranks; scatter"
        at = f" from {', '.join(size(s) for s in c.sizes)}" if c.sizes else ""
        if c.plain:
            text = f"{what}: as simulated, measured for {measured}"
        elif c.left_out:
            text = f"curve of {what}: through all {len(c.sizes) + 2} sizes from {measured} between them"
        else:
            text = f"curve of {what}: latency x {c.per_message:.3g}, time of the bytes x {factors}{at}"
            text += f"; valid for {measured}"
        lines.append(f"  {text} {percent(c.spread)}")
    for fit in calibration.compute:
        batches = _span((fit.batch_sizes[0], fit.batch_sizes[-1]))
        lines.append(
            f"  step of {fit.model}: {step_text(fit.c0, fit.c1)}, measured at batch {batches}, "
            f"scatter {percent(fit.spread)}"
        )
    if calibration.jitter is not None:
        lines.append(f"  jitter: {calibration.jitter}")
    lines += [f"  note: {note}" for note in calibration.notes if not note.startswith(WARNING)]
    return lines


def _named(row: Residual) -> str:
    backend = f" {row.backend}" if row.backend else ""
    return f"{row.operation}{backend}, {count(row.n_ranks, 'rank')} on {count(row.n_hosts, 'host')}, {size(row.nbytes)}"


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
