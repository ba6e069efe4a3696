"""Measured training runs from a CSV file. docs/validation.md describes the format."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from ddlsim.arguments import Count, Positive, checked
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.plain import check_separator, csv_rows
from ddlsim.run.experiment import StrategyLike
from ddlsim.run.files import strategy_of
from ddlsim.schema import refuse_code
from ddlsim.strategies import AllReduce, contract
from ddlsim.units import as_number, parse
from ddlsim.workload.model import load_model

NUMBERS = ("workers", "batch_size", "accumulation", "nodes", "throughput", "tokens_per_s", "step_time")
TEXTS = ("model", "cluster", "strategy", "algorithm", "overlap", "cost", "precision", "gradient_dtype", "note")
#: columns of which exactly one is required
RATES = ("throughput", "tokens_per_s", "step_time")
COLUMNS = (*NUMBERS, *TEXTS)
#: strategy of rows that specify none
DEFAULT_STRATEGY = AllReduce()
#: "step_time (ms)" or "throughput [images/s]"
_HEAD = re.compile(r"\s*(\w+)\s*(?:\(([^)]*)\)|\[([^\]]*)\])?\s*")


@checked
@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A measured training run.

    batch_size    samples per worker per (micro-)step; if `shared_batch` is True, samples of all workers together
    throughput    throughput of all workers together, in samples/s
    accumulation  micro-steps per step
    nodes         number of machines; None: unknown
    note          remark on the run
    place         location of the run, as "file: line"
    shared_batch  whether `batch_size` is the total over all workers, as for FSDP and Parallel

    All other fields have the same meaning as in experiment files; None means that the CSV file does not contain the
    value.
    """

    workers: Count
    batch_size: Count
    throughput: Positive
    accumulation: Count = 1
    nodes: Count | None = None
    model: str | None = None
    cluster: str | None = None
    strategy: str | None = None
    algorithm: str | None = None
    overlap: str | None = None
    cost: str | None = None
    precision: str | None = None
    gradient_dtype: str | None = None
    note: str = ""
    place: str = "runs"
    shared_batch: bool = False

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes > self.workers:
            raise ConfigError(
                f"{self.place}: nodes = {self.nodes}: must be at most the number of workers, {self.workers}; "
                "correct one of them"
            )

    @property
    def samples(self) -> int:
        """Number of samples per step, over all workers."""
        return (1 if self.shared_batch else self.workers) * self.batch_size * self.accumulation

    @property
    def step_time(self) -> float:
        """Step time in s."""
        return self.samples / self.throughput

    def cells(self) -> dict[str, float | int | str | None]:
        """Return the value of each column, to which conditions are applied."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name in COLUMNS}
        return {**values, "step_time": self.step_time}


@checked
def read_runs(
    path: str | Path, *, allow_code: bool = False, strategy: StrategyLike = DEFAULT_STRATEGY
) -> list[MeasuredRun]:
    """Read measured runs from a CSV file, in the order of its rows.

    strategy    strategy of rows that do not specify one, which determines whether they share a batch
    allow_code  whether the columns algorithm and overlap may contain "package.module:Name", which imports and runs code

    Raises :class:`ConfigError` if the file is invalid. The message contains the file, line, column and value, and
    suggests a correction.
    """
    lines = csv_rows(Path(path), "no such file; expected a CSV file of measured runs")
    if len(lines) == 1:
        what = "has the names of columns, but no run follows; write one run per line below it"
        raise ConfigError(f"{path}: line {lines[0][0]}: {what}")
    if not lines:
        raise ConfigError(f"{path}: contains no measured runs; write a line of column names, then one run per line")
    columns = _columns(lines[0][1], f"{path}: line {lines[0][0]}")
    shared = contract.of(strategy).shares_batch
    runs = [_run(columns, cells, f"{path}: line {number}", shared) for number, cells in lines[1:]]
    for run in () if allow_code else runs:
        refuse_code(run.algorithm, f"{run.place}: column.algorithm")
        refuse_code(run.overlap, f"{run.place}: column.overlap")
    return runs


def _columns(head: list[str], place: str) -> list[tuple[str, str]]:
    columns: list[tuple[str, str]] = []
    check_separator(head, place)
    for text in head:
        match = _HEAD.fullmatch(text)
        if match is None or match[1] not in COLUMNS:
            raise unknown_name("column", match[1] if match else text, COLUMNS, place)
        name, unit = match[1], match[2] or match[3] or ""
        if unit and name not in ("throughput", "step_time"):
            raise ConfigError(f"{place}: column {shown(text)}: {name} takes no unit; remove the unit")
        if any(name == other for other, _ in columns):
            raise ConfigError(f"{place}: column {name!r} occurs twice; remove one")
        columns.append((name, unit))
    names = [name for name, _ in columns]
    for name in ("workers", "batch_size"):
        if name not in names:
            raise ConfigError(f"{place}: column {name!r} is missing; add it")
    if sum(name in names for name in RATES) != 1:
        raise ConfigError(f"{place}: must have exactly one of the columns {', '.join(RATES)}, such as 'step_time (ms)'")
    if "tokens_per_s" in names and "model" not in names:
        raise ConfigError(
            f"{place}: column 'model' is missing; tokens_per_s requires the sequence length of the model; add the "
            "column"
        )
    return columns


def _run(columns: list[tuple[str, str]], cells: list[str], place: str, shared: bool) -> MeasuredRun:
    if len(cells) != len(columns):
        raise ConfigError(
            f"{place}: found {len(cells)} cells for {len(columns)} columns; quote strings that contain commas"
        )
    integers: dict[str, int] = {}
    rates: dict[str, float] = {}
    words: dict[str, str] = {}
    for (name, unit), cell in zip(columns, cells, strict=True):
        where = f"{place}: column {name}"
        if name in RATES:
            rates[name] = _quantity(cell, "samples/s" if name == "tokens_per_s" else unit, name, where)
        elif not cell:
            if name in ("workers", "batch_size"):
                raise ConfigError(f"{where}: is empty; enter an integer")
        elif name in NUMBERS:
            if not re.fullmatch(r"[-+]?[0-9]{1,9}", cell):
                raise ConfigError(f"{where}: {shown(cell)} must be an integer of at most nine digits")
            integers[name] = int(cell)
        else:
            words[name] = cell
    make: Callable[..., MeasuredRun] = MeasuredRun
    settings: Mapping[str, object] = {**integers, **words}
    try:
        if "strategy" in words:
            shared = contract.of(strategy_of(words["strategy"], "column strategy")).shares_batch
        run = make(**settings, throughput=1.0, place=place, shared_batch=shared)
        if "tokens_per_s" in rates:
            if not run.model:
                raise ConfigError(
                    "column model is empty; tokens_per_s requires the sequence length of the model; add the model"
                )
            rates["throughput"] = rates["tokens_per_s"] / load_model(run.model).input_shape[0]
        elif "step_time" in rates:
            rates["throughput"] = run.samples / rates["step_time"]
        return dataclasses.replace(run, throughput=rates["throughput"])
    except ConfigError as error:
        raise ConfigError(f"{place}: {str(error).removeprefix('MeasuredRun: ').removeprefix(f'{place}: ')}") from None


def _quantity(cell: str, unit: str, name: str, where: str) -> float:
    """Return a cell in s or samples/s; the unit is in the cell or in the column's header."""
    dimension = "time" if name == "step_time" else "rate"
    example = "step_time (ms)" if name == "step_time" else "throughput (images/s)"
    if not cell:
        raise ConfigError(f"{where}: is empty; add the measured value, or leave the row out")
    number = as_number(cell)
    if number is not None and not unit:
        remedy = f"add it to the name of the column, such as {example!r}"
        raise ConfigError(f"{where}: {shown(cell)} has no unit; {remedy}")
    value = parse(cell if number is None or not math.isfinite(number) else f"{number!r} {unit}", dimension, where)
    if not value > 0.0:
        raise ConfigError(f"{where}: {shown(cell)}: must be above 0")
    return value
