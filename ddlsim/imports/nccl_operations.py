"""What the rows of nccl-tests' tables say of the operation where no line names the program.

busbw / algbw, whether there is a reduction or a root, and how many elements of ``count`` make ``size``
(https://github.com/NVIDIA/nccl-tests, ``src/*.cu``, ``GetCollByteCount``): parts of it, or all.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddlsim.errors import ConfigError
from ddlsim.imports.timing import Timing

#: program -> operation
PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "sendrecv": "p2p",
}  # fmt: skip
#: the second sends every rank another size (rccl-tests, src/alltoallv.cu)
OTHERS = ("hypercube", "alltoallv")
OPERATIONS = tuple(PROGRAMS.values())
#: `count` elements are one rank's part of `size`
_IN_PARTS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
#: type -> bytes
_NBYTES = {"half": 2, "bfloat16": 2, "float": 4, "int": 4, "int32": 4, "uint32": 4}
_NBYTES |= {"double": 8, "int64": 8, "uint64": 8}
#: nccl-tests' names of types -> ours
DTYPES = {"half": "float16", "float": "float32", "double": "float64", "none": ""}


@dataclass(frozen=True)
class Row:
    """One line of the table: the cells before the times, and those of the out-of-place and in-place times."""

    line: int
    words: list[str]
    about: Mapping[str, str]
    times: Mapping[str, Mapping[str, str]]


@dataclass
class Table:
    """One run of a program: what its head said, and its rows."""

    operation: str | None = None
    is_head: bool = False  # the head names the operation, not a command line that may belong to another run
    groups: dict[str, dict[int, str]] = field(default_factory=dict)  # communicator -> rank -> host (-m makes several)
    n_reps: int | None = None
    rows: list[Row] = field(default_factory=list)


def bus_factor(operation: str, n_ranks: int) -> float:
    """Return busbw / algbw (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2.0 * (n_ranks - 1) / n_ranks
    return (n_ranks - 1) / n_ranks if operation in _IN_PARTS else 1.0


def operations_in_name(path: Path, operations: list[str]) -> list[str]:
    """Return which of the operations the file's name says: "nccl_alltoall_16.log"."""
    plain = re.sub(r"[^a-z]", "", path.name.lower())
    programs = {name: program.replace("_", "") for program, name in PROGRAMS.items()}
    said = [name for name in operations if programs[name] in plain]
    return [name for name in said if not any(programs[name] in programs[other] for other in said if other != name)]


def fits(table: Table, operation: str, n_ranks: int) -> bool:
    """Return whether all rows can be of this operation among so many ranks."""
    for row in table.rows:
        redop, root = row.about.get("redop"), row.about.get("root", "-1")
        rooted, reduces = root != "-1", redop not in (None, "", "none")
        if rooted != (operation in ("broadcast", "reduce", "gather", "scatter")):
            return False
        if operation == "p2p" and reduces != ("root" in row.about):  # its row has "sum" since there is one heading
            return False
        if operation != "p2p" and reduces != (operation in ("all_reduce", "reduce_scatter", "reduce")):
            return False
        if ((redop == "") and operation != "all_to_all") or (redop is None and operation == "all_to_all"):
            return False
        last = row.times.get("in-place", {}), row.times.get("out-of-place", {})
        unchecked, checked_ = ((cells.get("#wrong") or cells.get("error")) for cells in last)
        out_alone = unchecked == "N/A" and checked_ not in (None, "N/A")
        no_in_place = operation in ("p2p", "all_to_all")  # (reportErrors = in_place ? 0 : 1)
        if (out_alone and not no_in_place) or (no_in_place and unchecked not in (None, "N/A")):
            return False
        size, count, item = int(row.words[0]), int(row.words[1]), _NBYTES.get(row.words[2], 1)
        parts = n_ranks if operation in _IN_PARTS else 1
        if abs(size - count * item * parts) > 16 * parts:  # parts are whole multiples of 16 bytes
            return False
        factor = bus_factor(operation, n_ranks)
        if not all(is_bus(factor, algbw, busbw) for algbw, busbw in _rates(row)):
            return False
    return True


def _rates(row: Row) -> list[tuple[float, float]]:
    """Return algbw and busbw of a row's variants, without those that are no numbers: the rows' reader tells of them."""
    rates = []
    for cells in row.times.values():
        with contextlib.suppress(ValueError):
            rates.append((float(cells["algbw"]), float(cells["busbw"])))
    return [pair for pair in rates if all(map(math.isfinite, pair))]


def suggested(table: Table) -> list[str]:
    """Return what the rows look like: operations with the ranks that busbw / algbw of the fastest row says."""
    pairs = ((busbw, algbw) for row in table.rows for algbw, busbw in _rates(row))
    busbw, algbw = max(pairs, default=(0.0, 0.0))
    factor = busbw / algbw if algbw > 0 else 1.0
    if not 0 < factor < 2 or factor == 1:
        return []
    n_ranks = round(1 / (1 - factor) if factor < 1 else 2 / (2 - factor))
    return [f"{name} among {n_ranks}" for name in OPERATIONS if fits(table, name, n_ranks)]


def is_bus(factor: float, algbw: float, busbw: float) -> bool:
    # printed with two decimals: half a unit of the last digit on either side, 0.2 % where there are fewer decimals
    return abs(algbw * factor - busbw) <= 0.0051 * (factor + 1) + 0.002 * busbw


def check_bus(timing: Timing, algbw: float, busbw: float) -> None:
    """Refuse a row whose busbw says that operation or ranks are others than assumed."""
    factor = bus_factor(timing.operation, timing.n_ranks)
    if not is_bus(factor, algbw, busbw):
        raise ConfigError(
            f"{timing.place}: busbw = {busbw:g} is not algbw = {algbw:g} times "
            f"{factor:g}, which {timing.operation} among {timing.n_ranks} ranks "
            f"has; give the right operation and n_ranks"
        )
