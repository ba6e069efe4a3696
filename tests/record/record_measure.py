"""What is recorded of a run, and how two records are compared.

Only public results are read, so that what computes them may change: tables, shares, times, parameters.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record_rows import ROWS

import ddlsim

HERE = Path(__file__).parent
RECORD, CHANGES = HERE / "record.jsonl", HERE / "changes.jsonl"
#: relative to the largest value of a field, numbers may differ by
TOLERANCE = 1e-12
#: values up to which an array is recorded in full; of longer ones, sums
FULL = 16
#: significant digits of the values of arrays
DIGITS = 15
#: hexadecimal digits of a hash
HASH = 32
#: recorded for people, and not compared: texts may be reworded
TEXTS = ("message",)

Row = dict[str, Any]
Json = Any


# ------------------------------------------------------------ measuring


def array(values: Iterable[float]) -> Json:
    """Return the values; the one value if all are equal; or, of many, their number, sum of absolute values, maximum and
    two weighted sums.

    The weights are fixed and between -1 and 1, so values that trade places are noticed; the sums are exact to the last
    bit, so that they can be compared as closely as the values.
    """
    flat = [float(value) for value in values]
    if len(flat) > 2 and min(flat) == max(flat):
        return {"n": len(flat), "all": flat[0]}
    if len(flat) <= FULL:
        return [float(f"{value:.{DIGITS}g}") for value in flat]
    return array_sums(flat)


def array_sums(flat: Sequence[float]) -> Json:
    """Return what is recorded of many values."""
    sums = []
    for factor in (2654435761, 2246822519):
        weights = [((i + 1) * factor % 2**32) / 2**31 - 1.0 for i in range(len(flat))]
        sums.append(math.fsum(w * value for w, value in zip(weights, flat, strict=True)))
    return {"n": len(flat), "abs": math.fsum(map(abs, flat)), "max": max(flat), "sums": sums}


def sha256(values: np.ndarray) -> str:
    """Return a hash of the values' bits."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:HASH]


def of_links(links: Any, seconds: float) -> Row:
    """Return bytes and busy seconds of all links."""
    return {
        "link_nbytes": array(links["nbytes"]),
        "link_busy": array(links["busy"] * seconds),
    }


def of_result(result: ddlsim.Result) -> Row:
    """Return what is recorded of a run."""
    ends = result.recorder.step_end
    row: Row = {
        "time": result.simulated_time,
        "throughput": result.throughput,
        "step_time": result.step_time,
        "messages": result.n_messages,
        "nbytes": result.nbytes_sent,
        "updates": array(result.steps["time"]),
        "samples": array(result.steps["samples"]),
        "steps": array(len(own) for own in ends),
        "step_ends": array(end for own in ends for end in own),
        "seconds": {kind: array(values) for kind, values in result.device_seconds.items()},
        "shares": {kind: float(share) for kind, share in result.shares.items()},
        **of_links(result.links, result.simulated_time),
    }
    if result.staleness_histogram:
        row["staleness"] = {str(stale): n for stale, n in result.staleness_histogram.items()}
    if result.memory is not None:
        row["memory"] = [float(value) for value in result.memory[:2]]
    for quantity in ("cost", "energy"):
        if (value := result.known(quantity)) is not None:
            row[quantity] = value
    if result.has_failure_timeline:
        timeline = result.failure_timeline
        row["failure_timeline"] = {
            name: float(getattr(timeline, name))
            for name in ("end", "useful", "lost", "checkpointing", "detecting", "repairing", "restarting", "steps")
        }
        row["goodput"], row["availability"] = result.goodput, result.availability
    if result.experiment.training is not None:
        columns = ("time", "updates", "samples", "train_loss", "loss", "accuracy", "nbytes")
        row["history"] = {
            name: [None if value != value else value for value in result.history[name].tolist()] for name in columns
        }
        row["params"] = sha256(result.params)
        if result.statistics is not None:
            row["statistics"] = sha256(result.statistics)
    return row


def of_jobs(jobs: ddlsim.Jobs) -> Row:
    """Return what is recorded of several jobs."""
    carried = [*jobs.names, *(["background"] if jobs.traffic else [])]
    row: Row = {
        "time": jobs.end_time,
        "goodputs": [float(goodput) for goodput in jobs.goodputs],
        **of_links(jobs.links.assign(nbytes=jobs.links[carried].sum(axis=1)), jobs.end_time),
    }
    for ran in jobs.runs:
        row[f"{ran.name}: start"], row[f"{ran.name}: end"] = ran.start, ran.end
        row |= {f"{ran.name}: {field}": value for field, value in of_result(ran.result).items()}
    return row


def measure(name: str) -> Row:
    """Run the experiment of a row and return what is recorded of it.

    ``refused`` is the class of the error where ddlsim says that it does not run this.
    """
    try:
        outcome = ROWS[name]()
        row = of_jobs(outcome) if isinstance(outcome, ddlsim.Jobs) else of_result(outcome)
    except ddlsim.DdlsimError as error:
        row = {"refused": type(error).__name__, "message": str(error)}
    return json.loads(json.dumps(row))  # lists and texts as they will be read


# ------------------------------------------------------------ comparing


def numbers(value: Json) -> list[float]:
    """Return all numbers in a value."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return []
    if isinstance(value, Mapping):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, Sequence):
        return [number for each in value for number in numbers(each)]
    return [value]


def spelled_out(value: Json) -> Json:
    """Return a value with arrays of equal numbers as lists, which later numbers may be that are almost equal."""
    if isinstance(value, Mapping) and value.keys() == {"n", "all"}:
        return [value["all"]] * value["n"] if value["n"] <= FULL else array_sums([value["all"]] * value["n"])
    if isinstance(value, Mapping):
        return {name: spelled_out(each) for name, each in value.items()}
    return value


def same(old: Json, new: Json, slack: float) -> bool:
    """Return whether two values have the same form, the same texts, and numbers that differ by `slack` at most."""
    if isinstance(old, Mapping):
        return isinstance(new, Mapping) and old.keys() == new.keys() and all(same(old[k], new[k], slack) for k in old)
    if isinstance(old, list):
        equal_length = isinstance(new, list) and len(old) == len(new)
        return equal_length and all(same(a, b, slack) for a, b in zip(old, new, strict=True))
    if isinstance(old, str | None) or isinstance(new, str | list | Mapping | None):
        return old == new
    return old == new or abs(old - new) <= slack


def field_same(old: Json, new: Json) -> bool:
    """Return whether a field is what it was, to 1e-12 of its largest number.

    The columns of a history, whose units differ, are compared one by one.
    """
    old, new = spelled_out(old), spelled_out(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping) and "loss" in old and old.keys() == new.keys():
        return all(field_same(old[name], new[name]) for name in old)
    slack = TOLERANCE * max((abs(number) for number in numbers(old) if math.isfinite(number)), default=0.0)
    return same(old, new, slack)


def different(old: Row, new: Row) -> list[str]:
    """Return the names of the fields that differ; one that only one of the rows has differs."""
    names = [*old, *(name for name in new if name not in old)]
    return [name for name in names if name not in TEXTS and not field_same(old.get(name), new.get(name))]


def explained(field: str, old: Json, new: Json) -> str:
    """Return one line for a person: what was, what is, and by how much."""
    before, after = numbers(old), numbers(new)
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    text = f"{field}: {shortened(old)} -> {shortened(new)}"
    if len(before) == len(after) and pairs and before:
        scale = max(map(abs, before)) or 1.0
        text += f"  ({len(pairs)} of {len(before)} numbers, by up to {max(abs(b - a) for a, b in pairs) / scale:.2g})"
    return text


def shortened(value: Json) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:150]} ... ({len(text)} characters)"


# ------------------------------------------------------------ files


def read_record() -> dict[str, Row]:
    """Return the rows as they were at the start."""
    with RECORD.open(encoding="utf-8") as file:
        return {name: row for name, row in map(json.loads, file)}  # noqa: C416


def read_changes() -> dict[str, dict[str, Any]]:
    """Return row -> {"reason", "fields": {name: new value, or null where there is none any more}}."""
    if not CHANGES.exists():
        return {}
    with CHANGES.open(encoding="utf-8") as file:
        return {entry.pop("row"): entry for entry in map(json.loads, file)}


def write_changes(changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the list of changes, one row a line."""
    lines = [json.dumps({"row": name, **changes[name]}) for name in ROWS if name in changes]
    if not lines:
        CHANGES.unlink(missing_ok=True)
        return
    CHANGES.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def expected(name: str, record: Mapping[str, Row], changes: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return what a row must be today: as recorded, but for what is listed as changed.

    Of a row that is newer than the record, everything is listed.

    Raises AssertionError for a change that is none.
    """
    row = dict(record.get(name, {}))
    if name in changes:
        fields = changes[name]["fields"]
        for field, value in fields.items():
            assert field in TEXTS or not field_same(row.get(field), value), (
                f"{name}: {field} is listed as changed, but has the recorded value; take it from {CHANGES.name}"
            )
        row |= fields
        row = {field: value for field, value in row.items() if value is not None}
    return row


def differences(name: str, record: Mapping[str, Row], changes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Run a row and return what differs from what it must be, a line for each field."""
    wanted, found = expected(name, record, changes), measure(name)
    lines = [explained(field, wanted.get(field), found.get(field)) for field in different(wanted, found)]
    if lines and "refused" in found and "refused" not in wanted:
        lines.append(f"it says: {found['message']}")
    return lines


@functools.cache
def files() -> tuple[dict[str, Row], dict[str, dict[str, Any]]]:
    """Return the record and the changes, read once in a process."""
    return read_record(), read_changes()


def compared(name: str) -> list[str]:
    """Return what differs in a row, as lines, or the one that says what went wrong with it."""
    try:
        return differences(name, *files())
    except Exception as error:  # whatever it is, the other rows shall be compared as well
        return [f"{type(error).__name__}: {error}"]


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of the rows that a pattern such as ``"faults/*"`` fits, or that contain it."""
    return [
        name for name in ROWS if not patterns or any(fnmatch.fnmatch(name, each) or each in name for each in patterns)
    ]
