"""What rccl-tests write into a file (``-x file -Z json`` or ``csv``): a row for every size and variant.

Shape: https://github.com/ROCm/rccl-tests, ``src/common.cu`` (Reporter): JSON objects, one a line or in a list, or CSV,
whose heading leaves ``nodes`` out in some versions. ``time`` is in microseconds. ``ranks`` are processes, with
``gpusPerRank`` GPUs each; ``nodes`` is the number of groups that ran side by side unless it was built to mean machines,
so machines are known where it is above 1, or where there is one process (``gpus``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from ddlsim.imports.json_values import Node
from ddlsim.imports.nccl_operations import DTYPES, PROGRAMS, bus_factor, check_bus, is_bus
from ddlsim.imports.text import SourceText
from ddlsim.imports.timing import Timing

#: the first line of a CSV
CSV_HEADING = re.compile(r"^\s*(?:numCycle,\s*)?collective,.*\balgbw,\s*busbw\b", re.MULTILINE)
_OPERATIONS = {program.replace("_", ""): operation for program, operation in PROGRAMS.items()}


def csv_rows(source: SourceText) -> Iterator[Node]:
    """Yield the rows of a CSV as JSON would have them."""
    heading: list[str] = []
    for number, line in source.lines():
        cells = next(csv.reader([line], skipinitialspace=True), [])
        if CSV_HEADING.match(line):
            heading = [{"collective": "name"}.get(cell, cell.lstrip("#")) for cell in cells]
        elif heading and line.strip():
            names = list(heading)
            if len(cells) == len(names) + 1 and "nodes" not in names:
                names.insert(names.index("name") + 1, "nodes")
            if len(cells) != len(names):
                raise source.error(number, f"has {len(cells)} cells, the heading {len(heading)}; is the line complete?")
            yield Node(dict(zip(names, cells, strict=True)), f"{source.path}:{number}: ")


def rccl_timing(row: Node, operation: str | None, n_ranks: int | None) -> Timing:
    """Return the timing in a row.

    Raises ConfigError: wrong values, an operation without a counterpart, a bus bandwidth of other ranks.
    """
    if isinstance(row.value, dict):
        row = Node({key.lower(): value for key, value in row.value.items()}, row.place)
    name = row["name"].text()
    named = _OPERATIONS.get(re.sub("[^a-z]", "", name.lower()))
    if operation is None and named is None:
        raise row.error(f"{name} measures no collective of ddlsim; leave it out")
    operation = operation or str(named)
    if row.has("wrong") and row["wrong"].value != "N/A" and row["wrong"].number() > 0:
        raise row.error(f"{row['wrong'].number():g} wrong values; the run is not valid, repeat it")
    micros, algbw, busbw = row["time"].positive(), row["algbw"].nonnegative(), row["busbw"].nonnegative()
    gpus = row["gpusperrank"].count() if row.has("gpusperrank") else row["gpus"].count()
    ranks = [row[key].count() * gpus for key in ("ranks", "rankspernode") if row.has(key)] or [gpus]
    fitting = [n for n in ranks if is_bus(bus_factor(operation, n), algbw, busbw)]
    n = n_ranks or (fitting or ranks)[0]
    n_hosts = row["nodes"].count() if row.has("nodes") else int(row.has("gpus"))
    nbytes = row["size"].nonnegative()
    if n > 1 and abs(algbw * micros * 1e3 / n - nbytes) < 0.01 * nbytes:
        nbytes *= n  # what a rank receives: all that there was to tell of a reduce-scatter until 2025
    timing = Timing(
        tool="nccl-tests", operation=operation, n_ranks=n,
        n_hosts=n_hosts if n == ranks[0] and (n_hosts > 1 or row.has("gpus")) else 0, nbytes=nbytes,
        seconds=micros * 1e-6, dtype=DTYPES.get(row["type"].text(), row["type"].text()),
        variant="in-place" if row["inplace"].number() else "out-of-place", place=row.place.rstrip(": "),
    )  # fmt: skip
    check_bus(timing, algbw, busbw)
    return timing


def is_rccl(document: Node) -> bool:
    """Return whether a JSON value is a row of rccl-tests, or a list of them."""
    first = document.value[0] if isinstance(document.value, list) and document.value else document.value
    return isinstance(first, dict) and "busBw" in first
