"""Strict reader for tables of measurements: every error has the file, line, field, value and remedy."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.measure.table import Measurement
from ddlsim.output_files import cannot_be_written, check_suffix, guarded, unguarded, write_text
from ddlsim.plain import check_separator, csv_rows, decoded, read_bytes
from ddlsim.schema import PLAIN

COLUMNS = tuple(field.name for field in fields(Measurement))
_MISSING = "no such file; create it with python -m ddlsim.measure or by hand"
Rows = Iterator[tuple[int, dict[str, object]]]


@checked
def read_measurements(path: str | Path) -> list[Measurement]:
    """Read measurements, in file order, from a .csv or .jsonl file or from a folder of such files.

    The first line of a CSV file contains the names of the columns. Empty cells count as missing, and lines that start
    with # are comments. A JSON Lines file contains one object per line. Raises :class:`ConfigError` for invalid or
    missing measurements; the message contains the file, line, field and value, and suggests a correction.
    """
    path = Path(path)
    if os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.suffix in _FORMATS)
        if not files:
            raise ConfigError(f"{path}: contains no .csv or .jsonl file; use the folder that was passed as --out")
        return [row for file in files for row in read_measurements(file)]
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: unknown format {path.suffix!r}; measurements must be .csv or .jsonl files")
    rows = [
        PLAIN.build(Measurement, cells, f"{path}: line {line}", joint=": ")
        for line, cells in _FORMATS[path.suffix](path)
    ]
    if not rows:
        raise ConfigError(f"{path}: contains no measurements; add a row, or leave the file out")
    return rows


def _csv_rows(path: Path) -> Rows:
    rows = csv_rows(path, _MISSING)
    for number, header in rows[:1]:
        where = f"{path}: line {number}"
        check_separator(header, where)
        for name in header:
            if name not in COLUMNS:
                raise unknown_name("column", name, COLUMNS, where)
            if header.count(name) > 1:
                raise ConfigError(f"{where}: column {name!r} occurs twice; remove one")
    for number, cells in rows[1:]:
        if len(cells) > len(header):
            what = f"{len(cells)} cells for {len(header)} columns; quote strings that contain commas"
            raise ConfigError(f"{path}: line {number}: {what}")
        yield number, {name: unguarded(cell) for name, cell in zip(header, cells, strict=False) if cell}


def _json_rows(path: Path) -> Rows:
    for number, line in enumerate(io.StringIO(decoded(read_bytes(path, _MISSING), str(path)), newline=""), start=1):
        if not line.strip():
            continue
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
            raise ConfigError(f"{path}: line {number}: invalid JSON ({error}); expected one object per line") from None
        if not isinstance(cells, dict):
            raise ConfigError(f'{path}: line {number}: must be an object such as {{"experiment": ...}}')
        yield number, cells


_FORMATS: dict[str, Callable[[Path], Rows]] = {".csv": _csv_rows, ".jsonl": _json_rows}


def open_table(folder: str | Path) -> tuple[Path, list[Measurement]]:
    """Return the table ``measurements.csv`` in `folder`, created if necessary, and its rows.

    An incomplete last line of an interrupted run is removed. Raises ConfigError if the folder cannot be
    written, or the table is not one that the benchmarks wrote.
    """
    path, header = Path(folder) / "measurements.csv", _line(list(COLUMNS)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.exists() else b""
        if header.startswith(text):  # new, or interrupted immediately
            write_text(path, header.decode())
            return path, []
        if not text.startswith(header):
            raise ConfigError(f"{path}: the columns differ from those that the benchmarks write; choose another --out")
        if not text.endswith(b"\n"):
            write_text(path, _mended(text).decode())
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error}; choose another folder") from None
    return path, read_measurements(path) if path.stat().st_size > len(header) else []


def _mended(text: bytes) -> bytes:
    """Return `text` with its last line terminated, or without it if cells are missing."""
    whole, _, last = text.rpartition(b"\n")
    return (text if last.count(b",") >= len(COLUMNS) - 1 else whole) + b"\n"


def append(path: Path, row: Measurement) -> None:
    """Add `row` to the table. Raises ConfigError if it cannot be written."""
    cells = asdict(row)
    line = _line([cells[name] for name in COLUMNS]).encode()
    try:
        with path.open("ab", buffering=0) as file:
            whole = file.seek(0, io.SEEK_END) if file.seekable() else None
            try:
                while line:
                    line = line[file.write(line) :]
            except BaseException:
                if whole is not None:
                    file.truncate(whole)  # no partial rows
                raise
    except OSError as error:
        problem = cannot_be_written(path, error)
        raise ConfigError(f"{problem}; then run the same command again to resume") from None


@checked
def save_measurements(rows: Sequence[Measurement], path: str | Path) -> None:
    """Write measurements to a ``.csv`` file for :func:`read_measurements`, replacing an existing file."""
    check_suffix(path, ".csv")
    lines = (_line([asdict(row)[name] for name in COLUMNS]) for row in rows)
    write_text(Path(path), _line(list(COLUMNS)) + "".join(lines))


def _line(cells: list[object]) -> str:
    """Return the cells as a line of CSV: empty for missing values, times with six digits."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([_cell(cell) for cell in cells])
    return written.getvalue()


def _cell(cell: object) -> object:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return guarded(cell) if isinstance(cell, str) else "" if cell in (None, 0) else cell
