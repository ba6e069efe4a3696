"""The table on disk: rows are appended as they are measured, so an interrupted run keeps what it has."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.csv_cells import guarded
from ddlsim.errors import ConfigError
from ddlsim.measure.reading import COLUMNS, read_measurements
from ddlsim.measure.table import Measurement
from ddlsim.output_files import cannot_be_written, write_text


def open_table(folder: str | Path) -> tuple[Path, list[Measurement]]:
    """Return the table ``measurements.csv`` in `folder`, made if it is missing, and the rows that it has.

    A last line that an interrupted run did not finish is removed. Raises ConfigError if the folder cannot be
    written, or the table is not one that the benchmarks wrote.
    """
    path, header = Path(folder) / "measurements.csv", _line(list(COLUMNS)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.exists() else b""
        if header.startswith(text):  # new, or interrupted at once
            write_text(path, header.decode())
            return path, []
        if not text.startswith(header):
            raise ConfigError(f"{path}: has other columns than the benchmarks write; choose another --out")
        if not text.endswith(b"\n"):
            write_text(path, _mended(text).decode())
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error}; choose another folder") from None
    return path, read_measurements(path) if path.stat().st_size > len(header) else []


def _mended(text: bytes) -> bytes:
    """Return `text` with its last line ended, or without it if cells are missing."""
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
                    file.truncate(whole)  # no half rows
                raise
    except OSError as error:
        raise ConfigError(f"{cannot_be_written(path, error)}; then start again to go on") from None


@checked
def save_measurements(rows: Sequence[Measurement], path: str | Path) -> None:
    """Write the rows as a table that :func:`read_measurements` reads (``.csv``), in place of what is there."""
    lines = (_line([asdict(row)[name] for name in COLUMNS]) for row in rows)
    write_text(Path(path), _line(list(COLUMNS)) + "".join(lines))


def _line(cells: list[object]) -> str:
    """Return the cells as a line of CSV: empty for what does not apply, times in six digits."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([_cell(cell) for cell in cells])
    return written.getvalue()


def _cell(cell: object) -> object:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return guarded(cell) if isinstance(cell, str) else "" if cell in (None, 0) else cell
