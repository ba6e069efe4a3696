"""The tables of a report: configurations, runs with their manifests, and what was skipped or has failed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.readable import percent, seconds
from ddlsim.report.study_words import label_of, plain, varied
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: columns of :data:`ddlsim.run.metrics.METRICS` that describe single runs, and that means over seeds do not need
_OF_RUNS = ("speedup", "loss", "updates", "epochs", "simulated_time", "energy", "n_messages")
#: columns that are left out where they are 0 everywhere
_OFTEN_ZERO = ("mean_staleness", "idle_share", "waiting_share")
#: configurations that are named for a reason; the table of runs has all
N_NAMED = 6


@dataclass(frozen=True)
class Heading:
    """A column: what it is called, and whether the largest value goes first when it is sorted."""

    text: str
    is_number: bool
    largest_first: bool = False


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, the number to sort by ("": none, goes last; None: the text), and a remark."""

    text: str
    sort: str | None = None
    remark: str = ""
    is_number: bool = True


@dataclass(frozen=True)
class Row:
    """A row: its number from 1 on, its cells, whether it is on the Pareto front, and its manifest."""

    number: int
    cells: Sequence[Cell]
    in_front: bool = False
    manifest: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reason:
    """Why `n` points were skipped or have failed, and the configurations, as far as they are named."""

    status: str
    n: int
    error: str
    named: Sequence[str]
    n_more: int


@dataclass(frozen=True)
class Manifests:
    """What all runs of a study have in common, and the rest by key of the point: dotted field -> value as JSON."""

    common: Mapping[str, str]
    own: Mapping[str, Mapping[str, str]]


def configurations(table: Table, front: Sequence[int]) -> tuple[list[Heading], list[Row]]:
    """Return a row for each configuration that was simulated, with means over seeds and their 95 % intervals.

    front  rows of the summary that are on the Pareto front
    """
    summary = table.summary
    about = varied(table)
    about += [] if "workers" in about else ["n_workers"]
    metrics = [name for name in METRICS if name not in _OF_RUNS and _is_worth(summary, name)]
    headings = [_about_heading(table, name) for name in about] + [_heading(name) for name in metrics]
    rows = []
    for i, (index, row) in enumerate(summary.iterrows()):
        cells = [_about(table, name, row[name]) for name in about] + [_mean(row, name) for name in metrics]
        rows.append(Row(i + 1, cells, in_front=index in front))
    return headings, rows


def runs(table: Table, manifests: Manifests) -> tuple[list[Heading], list[Row]]:
    """Return a row for each point of the study, with its manifest."""
    frame = table.frame
    metrics = [name for name in METRICS if _is_worth(frame, name) and not name.endswith("_share")]
    about = [*varied(table), "seed"]
    headings = [_about_heading(table, name) for name in about]
    headings += [Heading("status", False), *[_heading(name) for name in metrics], Heading("took", True)]
    rows = []
    for i, (member, (_, row)) in enumerate(zip(table.members, frame.iterrows(), strict=True)):
        outcome = table.outcomes.get(member.key)
        took = Cell("–", "") if outcome is None else Cell(seconds(outcome.seconds), repr(outcome.seconds))
        cells = [_about(table, name, row[name]) for name in about]
        cells += [Cell(str(row["status"]), is_number=False), *[_number(row[name], name) for name in metrics], took]
        rows.append(Row(i + 1, cells, manifest=manifests.own[member.key]))
    return headings, rows


def reasons(table: Table) -> list[Reason]:
    """Return why points were skipped or have failed, failures first, the most frequent reason first."""
    frame, fields = table.frame, varied(table)
    found = []
    for status in ("failed", "skipped", "missing"):
        rows = frame[frame["status"] == status]
        by_error = sorted(rows.groupby("error", sort=False), key=lambda item: -len(item[1]))
        for error, part in by_error:
            named = list(dict.fromkeys(label_of(row, fields) for _, row in part.iterrows()))
            found.append(Reason(status, len(part), str(error), named[:N_NAMED], max(0, len(named) - N_NAMED)))
    return found


def manifests_of(table: Table) -> Manifests:
    """Return the manifests of the points of a study, without writing down 500 times what they share.

    Of a point whose experiment the table does not have: the settings and the seed.
    """
    leaves: dict[str, dict[str, str]] = {}
    for member in table.members:
        settings = {**member.settings, "seed": member.seed}
        text = table.experiments.get(member.key)
        fields = json.loads(text) if text else None
        leaves[member.key] = _leaves(fields if isinstance(fields, dict) else settings)
    first = next(iter(leaves.values()), {})
    shared = {path: value for path, value in first.items() if all(own.get(path) == value for own in leaves.values())}
    own = {
        key: {path: value for path, value in found.items() if path not in shared} | {"key": json.dumps(key)}
        for key, found in leaves.items()
    }
    return Manifests(shared, own)


def _leaves(value: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """Return a nested mapping as dotted path -> value."""
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found |= _leaves(inner, f"{where}{name}.")
        else:
            found[where + str(name)] = json.dumps(inner, ensure_ascii=False)
    return found


def _is_worth(rows: pd.DataFrame, name: str) -> bool:
    """Whether a column says anything: there is one, and it has numbers."""
    if name not in rows:
        return False
    values = rows[name].to_numpy(np.float64)
    return not np.isnan(values).all() and not (name in _OFTEN_ZERO and (np.nan_to_num(values) == 0.0).all())


def _heading(metric: str) -> Heading:
    return Heading(METRICS[metric].heading, True, METRICS[metric].larger_is_better)


def _about_heading(table: Table, name: str) -> Heading:
    return Heading("workers" if name == "n_workers" else name, _is_numbers(table, name))


def _is_numbers(table: Table, name: str) -> bool:
    if name not in table.axes:  # n_workers, seed
        return True
    values = [member.settings[name] for member in table.members]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _about(table: Table, name: str, value: object) -> Cell:
    """Return the value of a varied field; what is no number ("25 Gbit/s") is sorted as the design has it."""
    text = plain(value)
    if _is_numbers(table, name):
        return Cell(text, str(value))
    order = list(dict.fromkeys(plain(member.settings[name]) for member in table.members))
    return Cell(text, str(order.index(text)), is_number=text[:1].isdigit())


def _number(value: float, metric: str) -> Cell:
    if math.isnan(value):
        return Cell("–", "")
    return Cell("never", "") if math.isinf(value) else Cell(METRICS[metric].write(value), repr(float(value)))


def _mean(row: pd.Series[float], metric: str) -> Cell:
    """Return a mean over seeds, and half the width of its interval as a share of it."""
    cell = _number(row[metric], metric)
    if math.isinf(row[metric]) and row["n"] > 1:
        return Cell("not by every seed", "")
    half = float(row[f"{metric}_high"]) - float(row[metric])
    if not math.isfinite(half) or half == 0.0 or not row[metric]:
        return cell
    remark = f"± {percent(half / abs(float(row[metric])))}"
    if metric.endswith("_share") or metric in ("efficiency", "accuracy"):
        remark = f"± {100.0 * half:.1f} points"  # a share of a share would be misread
    return Cell(cell.text, cell.sort, remark)
