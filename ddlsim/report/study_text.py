"""A study as text: its configurations as a table, and what was skipped or has failed, with the reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim import printable
from ddlsim.readable import count, percent
from ddlsim.report.study_changes import change_lines, cost_line
from ddlsim.report.study_words import plain, varied
from ddlsim.run.metrics import METRICS, Metric
from ddlsim.text_tables import aligned

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: rows that are shown; the frame has all
N_ROWS = 40
N_REASONS = 5
#: metrics that are shown
_COLUMNS = (
    "throughput", "throughput_spread", "goodput", "efficiency", "input_share", "step_time", "accuracy",
    "time_to_accuracy", "cost_to_accuracy", "cost_per_sample", "energy_per_sample", "cost",
)  # fmt: skip


def study_text(table: Table) -> str:
    """Return what ``print(table)`` shows: a line per configuration with means over the seeds."""
    return printable.shown("\n".join([*aligned(study_cells(table)), *study_notes(table)]))


def study_cells(table: Table) -> list[list[str]]:
    """Return a head, and a row per configuration (the first 40) with means over the seeds; of a search, the best
    first."""
    summary, shown, axes = table.summary, _shown(table), _axes(table)
    lines = [[*axes, *(metric.column[0] for metric in shown)]]
    if _is_ranked(table):
        summary = _best_first(table)
    for _, row in summary.head(N_ROWS).iterrows():
        cells = [row[axis] for axis in axes]
        lines.append(
            [f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells]
            + [_with_interval(row, metric.name, metric.column[1]) for metric in shown]
        )
    return lines


def study_notes(table: Table) -> list[str]:
    """Return what is to be said below the rows of :func:`study_cells`, a line each."""
    summary, axes, text = table.summary, _axes(table), list[str]()
    seeds = summary["n"].max() if len(summary) else 0
    fixed = [f"{axis} {plain(table.members[0].settings[axis])}" for axis in table.axes if axis not in axes]
    if len(summary) > N_ROWS:
        text.append(f"... and {len(summary) - N_ROWS} more")
    if _is_ranked(table):
        several = "those that no other one beats first" if len(table.objectives) > 1 else "the best first"
        text.append(f"searched for {' and '.join(table.objectives)}; {several}")
    if fixed:
        text.append(f"everywhere: {', '.join(fixed)}")
    if seeds > 1:
        text.append(f"means over {seeds} seeds, +- 95 % intervals (Student's t)")
        text += _nothing_random(table)
    if METRICS["energy_per_sample"] in _shown(table):
        notes = (note for outcome in table.outcomes.values() for note in _notes(outcome.record.get("notes")))
        text += dict.fromkeys(note for note in notes if note.startswith("energy: "))
    text += [*change_lines(table), *filter(None, [cost_line(table)])]
    return [*text, *_ends(table)]


def _axes(table: Table) -> list[str]:
    """Return the fields that are shown: those that differ."""
    return varied(table) or ["n_workers"]


def _shown(table: Table) -> list[Metric]:
    """Return the metrics that are shown."""
    summary = table.summary
    columns = dict.fromkeys([*_COLUMNS, *table.objectives])
    if "updates" not in summary:  # what a few steps cost says nothing
        columns.pop("cost", None)
    return [METRICS[name] for name in columns if name in summary and summary[name].notna().any()]


def _is_ranked(table: Table) -> bool:
    """Return whether a search has found anything, so that there is a best."""
    return any(np.isfinite(table.summary[name]).any() for name in table.objectives)


def _best_first(table: Table) -> pd.DataFrame:
    """Return the summary of a search: those on the Pareto front of several metrics before the others."""
    summary, metrics = table.summary, list(table.objectives)
    order = table.best(metrics[0], len(summary)).index.tolist()
    front = table.pareto(*metrics).index.tolist() if len(metrics) > 1 else []
    return summary.loc[list(dict.fromkeys([*front, *order, *summary.index]))]


def _nothing_random(table: Table) -> list[str]:
    """Return a remark if seeds made no difference anywhere: then an interval of 0 % is no sign of certainty."""
    summary = table.summary
    several = summary[summary["n"] > 1]
    names = [name.removesuffix("_high") for name in summary.columns if str(name).endswith("_high")]
    half = several[[f"{name}_high" for name in names]].to_numpy() - several[names].to_numpy()
    if not len(several) or (abs(half) > 1e-12 * abs(several[names].to_numpy())).any():
        return []
    return ["all seeds gave the same: nothing in these runs is random; one seed is enough, or give jitter=..."]


def _notes(found: object) -> list[str]:
    return [str(note) for note in found] if isinstance(found, list | tuple) else []


def _with_interval(row: pd.Series[Any], name: str, write: Callable[[float], str]) -> str:
    mean, high = row[name], row[f"{name}_high"]
    if math.isnan(mean):
        return "-"
    missed = int(row["n"] - row["n_reached"]) if METRICS[name].kind == "target" else 0
    reached = f" ({int(row['n'] - missed)} of {int(row['n'])} seeds)" if missed and row["n"] > 1 else ""
    if math.isinf(mean):
        return f"never{reached}"
    if reached:
        return f"median {write(mean)}{reached}"
    return write(mean) if math.isnan(high) else f"{write(mean)} +-{percent((high - mean) / abs(mean)) if mean else ''}"


def _ends(table: Table) -> list[str]:
    """Return how many points there are of each status, why the skipped and failed ones are, and warnings of others."""
    counts = {status: n for status, n in table.counts.items() if n}
    lines = [", ".join(f"{n} {status}" for status, n in counts.items()) + " of " + count(len(table.members), "point")]
    if table.interrupted:
        lines[0] += "; interrupted: run it again to go on"
    for status, column, word in (
        ("skipped", "error", "skipped"),
        ("failed", "error", "failed"),
        ("done", "warnings", "warning of"),
    ):
        reasons = Counter(filter(None, table.frame.loc[table.frame["status"] == status, column]))
        lines += [f"{word} {n}: {reason}" for reason, n in reasons.most_common(N_REASONS)]
        if len(reasons) > N_REASONS:
            lines.append(f"... and {len(reasons) - N_REASONS} more reasons; see the column {column} of the frame")
    return lines
