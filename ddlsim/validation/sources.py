"""Measurements from files of any supported format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddlsim.errors import ConfigError
from ddlsim.imports import KinetoTrace, Timing, detect_kind, read_any, to_measurements
from ddlsim.imports.detect import facts_of
from ddlsim.imports.text import LeftOut, read_text
from ddlsim.measure import Measurement, read_measurements

#: custom function that reads measurements from a file
Reader = Callable[[Path], tuple[Timing, ...]]


@dataclass
class Sources:
    """Rows, step times (s) from traces, names of the files, and notes on skipped data."""

    rows: list[Measurement] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_sources(
    items: Sequence[str | Path | Measurement], *, n_hosts: int | None = None, model: str | None = None,
    reader: Reader | None = None, operation: str | None = None, n_ranks: int | None = None,
    version: str | None = None,
) -> Sources:  # fmt: skip
    """Read files and folders (tables of measurements, benchmark output, traces), and append the given rows.

    n_hosts, model, operation, n_ranks, version   values that benchmark output lacks
    reader           function for files that :mod:`ddlsim.imports` does not support

    Raises ConfigError with file, line and reason for an invalid file, for a file that is listed twice, without any
    item, and for a value or a reader that no file needs.
    """
    sources = Sources()
    settings: dict[str, object] = {"operation": operation, "n_ranks": n_ranks, "n_hosts": n_hosts, "model": model}
    settings |= {"reader": reader, "version": version or None}
    names = [name for name, value in settings.items() if value is not None]
    facts: dict[str, object] = {name: settings[name] for name in ("operation", "n_ranks") if name in names}
    used: set[str] = set()
    for item in items:
        if isinstance(item, Measurement):
            sources.rows.append(item)
            continue
        path = Path(item)
        if path in map(Path, sources.sources):
            raise ConfigError(f"{path}: is listed twice, so its measurements would count twice; leave one out")
        sources.sources.append(str(item))
        if not os.path.exists(path):
            raise ConfigError(
                f"{path}: no such file or folder; use a folder written by python -m ddlsim.measure, or a log file"
            )
        if path.is_dir() or path.suffix == ".jsonl" or _is_table(path):
            sources.rows += read_measurements(path)
        else:
            kind = ""
            with suppress(ConfigError):
                kind = detect_kind(path)
            file_facts = {name: value for name, value in facts.items() if kind and name in facts_of(kind)}
            used |= {*file_facts, "n_hosts", "model", "" if kind else "reader"}
            n_before = len(sources.rows)
            _read_other(path, sources, n_hosts, model, None if kind else reader, file_facts, version or "")
            used |= {"version"} if len(sources.rows) > n_before else set()
    for name in (name for name in names if name not in used):
        option = {"n_hosts": "hosts", "n_ranks": "ranks", "version": "software"}.get(name, name)
        why = "ddlsim reads all files" if name == "reader" else "all files already contain this value"
        raise ConfigError(f"calibration: {name} (--{option}) has no effect, because {why}; leave it out")
    if not (sources.rows or sources.step_times):
        raise ConfigError("calibration: no measurements; use a folder written by python -m ddlsim.measure")
    return sources


def _is_table(path: Path) -> bool:
    """Return whether a file is a table of measurements: its first line without # has the column experiment."""
    if path.suffix != ".csv":
        return False
    lines = read_text(path, log=True).text.splitlines()
    head = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    return "experiment" in [cell.strip() for cell in head.split(",")]


def _read_other(
    path: Path, sources: Sources, n_hosts: int | None, model: str | None, reader: Reader | None,
    facts: Mapping[str, object], version: str,
) -> None:  # fmt: skip
    content = read_any(path, facts=facts) if reader is None else reader(path)
    sources.notes += read_text(path, log=True).notes
    if isinstance(content, KinetoTrace):
        sources.step_times += [step.seconds for step in content.steps]
        content = content.collectives
    if not isinstance(content, tuple):
        raise ConfigError(
            f"{path}: is a {type(content).__name__}, which contains nothing to calibrate with; leave the file out"
        )
    left_out, n_before = LeftOut(ConfigError), len(sources.rows)
    for timing in content:
        with left_out:
            sources.rows += to_measurements([timing], n_hosts=n_hosts, model=model, version=version)
    if refused := left_out.errors:
        if len(sources.rows) == n_before and not sources.step_times:
            raise refused[0]
        sources.notes.append(f"{path}: {len(refused)} invalid rows were ignored; first error: {refused[0]}")
