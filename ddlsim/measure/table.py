"""`Measurement`: one row of the table of measured times, whose format docs/formats/measurements.md describes.

Tables are read strictly: every error names file, line, field, value and remedy.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, TextIO, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from ddlsim.arguments import checked
from ddlsim.arguments.rules import TEXT
from ddlsim.collectives import KINDS
from ddlsim.csv_cells import guarded, unguarded
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.output_files import cannot_be_written, write_text
from ddlsim.plain import decoded, read_bytes
from ddlsim.units import LARGEST, SMALLEST, in_range, parse

T = TypeVar("T")

#: experiment -> what it can time
OPERATIONS = {
    "point_to_point": ("one_way", "both_ways"),
    "collective": KINDS,
    "memory": ("reduction", "copy"),
    "step": ("training",),
}


def _number(dimension: str | None) -> BeforeValidator:
    """Return what turns a cell into a number: plain SI, or where there is a `dimension` text with a unit."""

    def read(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("is no number")
        if not isinstance(value, str):
            return value
        try:
            number = float(value)
        except ValueError:
            if dimension is None:
                raise ValueError("is no number") from None
            number = parse(value, dimension)
        return int(number) if number.is_integer() else number

    return BeforeValidator(read)


def _in_range(number: float) -> float:
    if not in_range(number):
        raise ValueError(f"must be from {SMALLEST:g} to {LARGEST:g}")
    return number


#: more of anything than these is a slip of the keyboard: bytes of a message, and ranks, hosts, repetitions, samples
MAX_NBYTES, MAX_COUNT = 10**18, 10**9

Seconds = Annotated[float, _number("time"), Field(gt=0, allow_inf_nan=False), AfterValidator(_in_range)]
Nbytes = Annotated[int, _number("bytes"), Field(ge=0, le=MAX_NBYTES)]
Count = Annotated[int, _number(None), Field(ge=0, le=MAX_COUNT)]
Some = Annotated[int, _number(None), Field(ge=1, le=MAX_COUNT)]


def _told(kind: type[T]) -> type[T]:
    """Let a row that makes no sense be a ConfigError of one line. (Readers of tables ask pydantic themselves.)"""
    checked_init = kind.__init__

    @functools.wraps(checked_init)
    def init(self: object, *args: object, **kwargs: object) -> None:
        try:
            checked_init(self, *args, **kwargs)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            place = "".join(f": {part}" for part in first["loc"])
            value = "" if cause and not place else f" = {shown(first['input'])}"
            rule = str(cause or first["msg"]).replace("Input should be", "must be")
            raise ConfigError(f"Measurement{place}{value}: {rule}") from None

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


Text = Annotated[str, Strict(), AfterValidator(lambda text: TEXT.keep(text, "text"))]


@_told
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Measurement:
    """One measured time. Everything after `median_s` may be left out where it does not apply or is not known.

    experiment, operation  a key of :data:`OPERATIONS` and one of its values
    n_ranks        ranks that took part (point_to_point: two for each pair that exchanged at the same time;
                   memory and step: that worked at the same time)
    n_hosts        machines that they were on: 1 is all on the same host
    median_s       s, median over the repetitions; a one-way message is half of a ping-pong
    nbytes         bytes of one message, or for a collective the buffer per rank as in
                   :func:`ddlsim.collective_time` (all-gather, gather, scatter: the whole buffer); 0 for a step
    min_s, p25_s, p75_s, max_s   s, the spread over the repetitions, None if it is not known
    n_repetitions  times that the median is over
    backend        what moved the bytes: "mpi", "gloo", "nccl", ... or "" for none
    dtype          type of the elements
    batch_size, model            samples per rank, and what was trained (step), else 0 and ""
    version        of ddlsim and of the backend
    note           anything else, one line

    Raises ConfigError for a row that makes no sense.
    """

    experiment: Text
    operation: Text
    n_ranks: Some
    n_hosts: Some
    median_s: Seconds
    nbytes: Nbytes = 0
    min_s: Seconds | None = None
    max_s: Seconds | None = None
    p25_s: Seconds | None = None
    p75_s: Seconds | None = None
    n_repetitions: Some = 1
    backend: Text = ""
    dtype: Text = "float32"
    batch_size: Count = 0
    model: Text = ""
    version: Text = ""
    note: Text = ""

    @property
    def bandwidth(self) -> float:
        """Bytes of the message or buffer per second of the median time, bytes/s."""
        return self.nbytes / self.median_s

    @property
    def n_pairs(self) -> int:
        """Pairs of ranks that exchanged at the same time (point_to_point only, else 0)."""
        return self.n_ranks // 2 if self.experiment == "point_to_point" else 0

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured, without what came out: rows with equal keys repeat each other."""
        where = (self.n_ranks, self.n_hosts, self.nbytes, self.backend, self.dtype)
        return (self.experiment, self.operation, *where, self.batch_size, self.model)

    @model_validator(mode="after")
    def _consistent(self) -> Measurement:
        if self.experiment not in OPERATIONS:
            raise unknown_name("experiment", self.experiment, OPERATIONS)
        known = OPERATIONS[self.experiment]
        if self.operation not in known:
            raise unknown_name(f"{self.experiment} operation", self.operation, known)
        self._check_size()
        self._check_ranks()
        low, high = -math.inf, math.inf
        for name in ("min_s", "p25_s", "median_s", "p75_s", "max_s"):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} = {value!r}: must be at least the quantile before it; sort the times")
            low = low if value is None else value
        return self

    def _check_size(self) -> None:
        if self.experiment == "step":
            if self.nbytes:
                raise ConfigError(f"nbytes = {self.nbytes}: a step has no message size; leave it out")
            if not self.batch_size or not self.model:
                missing = "model" if self.batch_size else "batch_size"
                raise ConfigError(f"{missing} is missing: a step time needs model and batch_size; add it")
        else:
            if not self.nbytes:
                raise ConfigError(f"nbytes is missing or 0: {self.experiment} needs a size; write it like '1 MB'")
            if self.batch_size or self.model:
                raise ConfigError("batch_size and model are for experiment = step; leave them out")

    def _check_ranks(self) -> None:
        if self.n_hosts > self.n_ranks:
            raise ConfigError(
                f"n_hosts = {self.n_hosts}: {self.n_ranks} ranks cannot be on more hosts than that; correct one"
            )
        if self.experiment == "point_to_point" and self.n_ranks % 2:
            raise ConfigError(f"n_ranks = {self.n_ranks}: point_to_point has two ranks for each pair; make it even")
        if self.experiment == "collective" and self.n_ranks < 2:
            raise ConfigError("n_ranks = 1: a collective needs at least 2 ranks; correct n_ranks")


COLUMNS = tuple(field.name for field in fields(Measurement))
#: what to write into a cell that cannot be used
_REMEDIES = {"nbytes": "write bytes like 1048576 or '1 MiB'", "_s": "write seconds like 0.0012 or '1.2 ms'"}

Rows = Iterator[tuple[int, dict[str, object]]]


@checked
def read_measurements(path: str | Path) -> list[Measurement]:
    """Return the measurements in `path`, in order: a .csv or .jsonl file, or a folder of such files.

    A CSV file has the names of the columns in its first line; empty cells count as left out, lines that begin
    with # are comments. A JSON Lines file has one object per line. Raises :class:`ConfigError` in one line
    with file, line, field, value and remedy; also for a file without any measurement.
    """
    path = Path(path)
    if os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.suffix in _FORMATS)
        if not files:
            raise ConfigError(f"{path}: holds no .csv or .jsonl file; name the folder that was given as --out")
        return [row for file in files for row in read_measurements(file)]
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: unknown format {path.suffix!r}; measurements are in .csv or .jsonl files")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [_measurement(cells, f"{path}: line {line}") for line, cells in _FORMATS[path.suffix](file, path)]
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write it with python -m ddlsim.measure or by hand") from None
    except UnicodeDecodeError:
        decoded(read_bytes(path), str(path))  # raises, with line and byte
        raise
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}; is it the right file?") from None
    if not rows:
        raise ConfigError(f"{path}: holds no measurement; add a row, or leave the file out")
    return rows


def _csv_rows(file: TextIO, path: Path) -> Rows:
    reader = csv.reader(file, strict=True)
    header: list[str] | None = None
    for cells in reader:
        if not any(cell.strip() for cell in cells) or cells[0].startswith("#"):
            continue
        where = f"{path}: line {reader.line_num}"
        cells = [cell.strip() for cell in cells]
        if header is None:
            header = _checked_header(cells, where)
            continue
        if len(cells) > len(header):
            raise ConfigError(
                f"{where}: {len(cells)} cells for {len(header)} columns; put quotes round text that has commas"
            )
        yield reader.line_num, {name: unguarded(cell) for name, cell in zip(header, cells, strict=False) if cell}


def _checked_header(names: list[str], where: str) -> list[str]:
    for name in names:
        if name not in COLUMNS:
            raise unknown_name("column", name, COLUMNS, where)
        if names.count(name) > 1:
            raise ConfigError(f"{where}: column {name!r} is there twice; remove one")
    return names


def _json_rows(file: TextIO, path: Path) -> Rows:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
            raise ConfigError(f"{path}: line {number}: not valid JSON: {error}; one object on each line") from None
        if not isinstance(cells, dict):
            raise ConfigError(f'{path}: line {number}: is no object; write one like {{"experiment": ...}}')
        yield number, cells


_FORMATS: dict[str, Callable[[TextIO, Path], Rows]] = {".csv": _csv_rows, ".jsonl": _json_rows}


@cache
def _adapter() -> TypeAdapter[Measurement]:
    return TypeAdapter(Measurement)


def _measurement(cells: dict[str, object], where: str) -> Measurement:
    try:
        return _adapter().validate_python(cells)
    except ValidationError as error:
        raise _one_line(error.errors(), where) from None


def _one_line(errors: list[ErrorDetails], where: str) -> ConfigError:
    """Return the most telling of the errors: an unknown name explains a missing one, not the reverse."""
    error = min(errors, key=lambda e: e["type"] != "unexpected_keyword_argument")
    field = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "unexpected_keyword_argument":
        return unknown_name("column", field, COLUMNS, where)
    if error["type"] == "missing":
        return ConfigError(f"{where}: {field} is missing; add it")
    cause = error.get("ctx", {}).get("error")
    if not field:  # a rule between fields: its text names them
        return ConfigError(f"{where}: {cause}")
    rule = str(cause or error["msg"]).removeprefix("Input ").replace("should be", "must be")
    value = error["input"]
    if shown(value) in rule:  # the text is that of the unit parser, remedy included
        return ConfigError(f"{where}: {field}: {rule}")
    suffix = "_s" if field.endswith("_s") else field
    remedy = _REMEDIES.get(suffix, f"correct {field}")
    return ConfigError(f"{where}: {field} = {shown(value)}: {rule}; {remedy}")


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
