"""The table of measured times (docs/formats/measurements.md): its rows, and reading and writing of its files.

Every error of reading has the file, line, field, value and remedy.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from ddlsim.arguments import Rule, checked, integer, number
from ddlsim.collectives import KINDS
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.output_files import cannot_be_written, check_suffix, guarded, unguarded, write_text
from ddlsim.plain import check_separator, csv_rows, decoded, read_bytes
from ddlsim.schema import PLAIN
from ddlsim.units import as_number, parse

#: experiment -> its operations
OPERATIONS = {
    "point_to_point": ("one_way", "both_ways"),
    "collective": KINDS,
    "memory": ("reduction", "copy"),
    "step": ("training",),
}


def _cell(rule: Rule, dimension: str = "") -> Rule:
    """Return a rule that also accepts strings: numbers, or quantities if there is a `dimension`; integers stay so."""

    def keep(value: Any, where: str) -> object:
        if isinstance(value, str):
            number = as_number(value)
            if number is None and not dimension:
                raise ConfigError(f"{where} = {shown(value)}: must be {rule.text}")
            number = parse(value, dimension, where) if number is None else number
            value = int(number) if number.is_integer() else number
        return rule(value, where)

    return Rule(rule.text, lambda value: isinstance(value, str) or rule.takes(value), keep)


#: limits above which values are typing errors: bytes of a message, and ranks, hosts, repetitions, samples
MAX_NBYTES, MAX_COUNT = 10**18, 10**9

Seconds = Annotated[float, _cell(number(0.0, above=True, hint=", like 0.0012 or '1.2 ms'"), "time")]
Nbytes = Annotated[int, _cell(integer(0, MAX_NBYTES), "bytes")]
Count = Annotated[int, _cell(integer(0, MAX_COUNT))]
Some = Annotated[int, _cell(integer(1, MAX_COUNT))]


@checked
@dataclass(frozen=True)
class Measurement:
    """A measured time. Fields after `median_s` are optional.

    experiment     kind of measurement: "point_to_point", "collective", "memory" or "step", a key of :data:`OPERATIONS`
    operation      one of the operations that :data:`OPERATIONS` lists for this kind
    n_ranks        number of participating ranks. For point_to_point, this is two per concurrent pair; for memory and
                   step, it is the number of concurrent ranks
    n_hosts        number of machines; 1: all ranks on the same machine
    median_s       median over the repetitions, in s; for a one-way message, half the time of a ping-pong
    nbytes         size in bytes of one message or, for a collective, of the buffer on each rank, as in
                   :func:`ddlsim.collective_time` (for all-gather, gather and scatter, the full buffer); 0 for a step
    min_s, p25_s, p75_s, max_s
                   minimum, quartiles and maximum over the repetitions, in s; None: unknown
    n_repetitions  number of repetitions
    backend        library that moved the bytes: "mpi", "gloo", "nccl", ...; "": none
    dtype          type of the elements
    batch_size     samples per rank, for a step; otherwise 0
    model          name of the trained model, for a step; otherwise ""
    version        versions of ddlsim and of the backend
    note           any other remark, on one line

    Raises ConfigError if the fields contradict each other.
    """

    experiment: str
    operation: str
    n_ranks: Some
    n_hosts: Some
    median_s: Seconds
    nbytes: Nbytes = 0
    min_s: Seconds | None = None
    max_s: Seconds | None = None
    p25_s: Seconds | None = None
    p75_s: Seconds | None = None
    n_repetitions: Some = 1
    backend: str = ""
    dtype: str = "float32"
    batch_size: Count = 0
    model: str = ""
    version: str = ""
    note: str = ""

    @property
    def bandwidth(self) -> float:
        """Size of the message or buffer divided by the median time, in bytes/s."""
        return self.nbytes / self.median_s

    @property
    def n_pairs(self) -> int:
        """Number of pairs of ranks that exchanged messages at the same time, for point_to_point; otherwise 0."""
        return self.n_ranks // 2 if self.experiment == "point_to_point" else 0

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify what was measured, without the times: rows with equal keys are repetitions."""
        where = self.n_ranks, self.n_hosts, self.nbytes
        return (self.experiment, self.operation, *where, self.backend, self.dtype, self.batch_size, self.model)

    def __post_init__(self) -> None:
        if self.experiment not in OPERATIONS:
            raise unknown_name("experiment", self.experiment, OPERATIONS)
        operations = OPERATIONS[self.experiment]
        if self.operation not in operations:
            raise unknown_name(f"{self.experiment} operation", self.operation, operations)
        if self.experiment == "step":
            if self.nbytes:
                raise ConfigError(f"nbytes = {self.nbytes}: a step has no message size; leave nbytes out")
            if not self.batch_size or not self.model:
                missing = "model" if self.batch_size else "batch_size"
                raise ConfigError(f"{missing} is missing; a step requires model and batch_size")
        else:
            if not self.nbytes:
                raise ConfigError(f"nbytes is missing or 0; {self.experiment} requires a size, such as '1 MB'")
            if self.batch_size or self.model:
                raise ConfigError("batch_size and model apply only to experiment = step; leave them out")
        if self.n_hosts > self.n_ranks:
            n_ranks = self.n_ranks
            raise ConfigError(f"n_hosts = {self.n_hosts}: must be at most n_ranks = {n_ranks}; correct one of them")
        if self.experiment == "point_to_point" and self.n_ranks % 2:
            raise ConfigError(f"n_ranks = {self.n_ranks}: must be even, because point_to_point has two ranks per pair")
        if self.experiment == "collective" and self.n_ranks < 2:
            raise ConfigError("n_ranks = 1: a collective requires at least 2 ranks")
        low = 0.0
        for name in ("min_s", "p25_s", "median_s", "p75_s", "max_s"):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} = {value!r}: must be at least the previous quantile; sort the times")
            low = low if value is None else value


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
    for n, header in rows[:1]:
        where = f"{path}: line {n}"
        check_separator(header, where)
        for name in header:
            if name not in COLUMNS:
                raise unknown_name("column", name, COLUMNS, where)
            if header.count(name) > 1:
                raise ConfigError(f"{where}: column {name!r} occurs twice; remove one")
    for n, cells in rows[1:]:
        if len(cells) > len(header):
            what = f"{len(cells)} cells for {len(header)} columns; quote strings that contain commas"
            raise ConfigError(f"{path}: line {n}: {what}")
        yield n, {name: unguarded(cell) for name, cell in zip(header, cells, strict=False) if cell}


def _json_rows(path: Path) -> Rows:
    for n, line in enumerate(io.StringIO(decoded(read_bytes(path, _MISSING), str(path)), newline=""), start=1):
        if not line.strip():
            continue
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
            raise ConfigError(f"{path}: line {n}: invalid JSON ({error}); expected one object per line") from None
        if not isinstance(cells, dict):
            raise ConfigError(f'{path}: line {n}: must be an object such as {{"experiment": ...}}')
        yield n, cells


_FORMATS: dict[str, Callable[[Path], Rows]] = {".csv": _csv_rows, ".jsonl": _json_rows}


def open_table(folder: str | Path) -> tuple[Path, list[Measurement]]:
    """Return the table ``measurements.csv`` in `folder`, created if necessary, and its rows.

    An incomplete last line of an interrupted run is removed. Raises ConfigError if the folder cannot be
    written, or the table is not one that the benchmarks wrote.
    """
    path, header = Path(folder) / "measurements.csv", _line(COLUMNS).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.exists() else b""
        if header.startswith(text):  # new, or interrupted immediately
            write_text(path, header.decode())
            return path, []
        if not text.startswith(header):
            raise ConfigError(f"{path}: the columns differ from those that the benchmarks write; choose another --out")
        if not text.endswith(b"\n"):  # the last line lacks its end or, if cells are missing, is removed
            complete, _, last = text.rpartition(b"\n")
            write_text(path, (text if last.count(b",") >= len(COLUMNS) - 1 else complete).decode() + "\n")
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error}; choose another folder") from None
    return path, read_measurements(path) if path.stat().st_size > len(header) else []


def append(path: Path, row: Measurement) -> None:
    """Add `row` to the table. Raises ConfigError if it cannot be written."""
    line = _line(asdict(row).values()).encode()
    try:
        with path.open("ab", buffering=0) as file:
            end = file.seek(0, io.SEEK_END) if file.seekable() else None
            try:
                while line:
                    line = line[file.write(line) :]
            except BaseException:
                if end is not None:
                    file.truncate(end)  # no partial rows
                raise
    except OSError as error:
        problem = cannot_be_written(path, error)
        raise ConfigError(f"{problem}; then run the same command again to resume") from None


@checked
def save_measurements(rows: Sequence[Measurement], path: str | Path) -> None:
    """Write measurements to a ``.csv`` file for :func:`read_measurements`, replacing an existing file."""
    check_suffix(path, ".csv")
    write_text(Path(path), "".join([_line(COLUMNS), *(_line(asdict(row).values()) for row in rows)]))


def _line(cells: Iterable[object]) -> str:
    """Return the cells as a line of CSV: empty for missing values, times with six digits."""

    def text(cell: object) -> object:
        if isinstance(cell, float):
            return f"{cell:.6g}"
        return guarded(cell) if isinstance(cell, str) else cell or ""

    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(map(text, cells))
    return written.getvalue()
