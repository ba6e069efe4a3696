"""Reader for nccl-tests and rccl-tests: the printed table, and the files written with ``-J`` and ``-x``.

Format: https://github.com/NVIDIA/nccl-tests, ``src/util.cu`` (table and JSON), ``doc/PERFORMANCE.md`` (algbw and
busbw); tables since 2019 have the same columns, with ``error`` (a deviation) where newer ones count ``#wrong`` values.
``size`` is the full buffer in bytes, ``time`` microseconds per operation (mean over the iterations), GB 1e9 bytes.

Logs often lack the line with the program's name. It is then inferred from busbw / algbw, a reduction or root in the
rows, and whether ``count`` elements are all of ``size`` or a part (``src/*.cu``, ``GetCollByteCount``).

rccl-tests (https://github.com/ROCm/rccl-tests, ``src/common.cu``, Reporter) write JSON objects, one per line or in a
list, or CSV, whose header lacks ``nodes`` in some versions. ``ranks`` are processes with ``gpusPerRank`` GPUs each.
Depending on the build, ``nodes`` is the number of machines or of concurrent groups, so the number of machines is known
only if it is above 1, or if there is one process (``gpus``).
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ddlsim.arguments import Count, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.imports.json_values import Node, documents
from ddlsim.imports.text import LeftOut, SourceText, nonnegative_number, positive_number, read_text, warn
from ddlsim.imports.timing import Timing

#: program -> operation
PROGRAMS = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter")} | {"alltoall": "all_to_all"}
PROGRAMS |= {name: name for name in ("broadcast", "reduce", "gather", "scatter")} | {"sendrecv": "p2p"}
#: alltoallv sends every rank a different size (rccl-tests, src/alltoallv.cu)
UNSUPPORTED = ("hypercube", "alltoallv")
OPERATIONS = tuple(PROGRAMS.values())
#: operations for which `count` elements are one rank's part of `size`
_IN_PARTS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
#: type -> bytes
_NBYTES = {"half": 2, "bfloat16": 2, "float": 4, "int": 4, "int32": 4, "uint32": 4}
_NBYTES |= {"double": 8, "int64": 8, "uint64": 8}
#: nccl-tests' names of types -> ddlsim's
DTYPES = {"half": "float16", "float": "float32", "double": "float64", "none": ""}


@dataclass(frozen=True)
class Row:
    """One row of the table: the cells before the times, and those of the out-of-place and in-place times."""

    line: int
    about: Mapping[str, str]
    times: Mapping[str, Mapping[str, str]]


@dataclass
class Table:
    """One run of a program: the contents of its header, and its rows."""

    operation: str | None = None
    is_head: bool = False  # the header, not a command line of possibly another run, names the operation
    groups: dict[str, dict[int, str]] = field(default_factory=dict)  # communicator -> rank -> host (-m makes several)
    n_reps: int | None = None
    rows: list[Row] = field(default_factory=list)


def bus_factor(operation: str, n_ranks: int) -> float:
    """Return busbw / algbw (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2.0 * (n_ranks - 1) / n_ranks
    return (n_ranks - 1) / n_ranks if operation in _IN_PARTS else 1.0


def operations_in_name(path: Path, operations: list[str]) -> list[str]:
    """Return the operations that occur in the file's name, as in "nccl_alltoall_16.log"."""
    plain = re.sub(r"[^a-z]", "", path.name.lower())
    programs = {name: program.replace("_", "") for program, name in PROGRAMS.items()}
    said = [name for name in operations if programs[name] in plain]
    return [name for name in said if not any(programs[name] in programs[other] for other in said if other != name)]


def fits(table: Table, operation: str, n_ranks: int) -> bool:
    """Return whether all rows are consistent with this operation among `n_ranks` ranks."""
    for row in table.rows:
        redop, root = row.about.get("redop"), row.about.get("root", "-1")
        rooted, reduces = root != "-1", redop not in (None, "", "none")
        reducing = operation in ("all_reduce", "reduce_scatter", "reduce")
        if operation == "p2p":  # its rows have "sum" since tables have one heading
            reducing = "root" in row.about
        if rooted != (operation in ("broadcast", "reduce", "gather", "scatter")) or reduces != reducing:
            return False
        if ((redop == "") and operation != "all_to_all") or (redop is None and operation == "all_to_all"):
            return False
        last = row.times.get("in-place", {}), row.times.get("out-of-place", {})
        unchecked, checked_ = ((cells.get("#wrong") or cells.get("error")) for cells in last)
        out_alone = unchecked == "N/A" and checked_ not in (None, "N/A")
        no_in_place = operation in ("p2p", "all_to_all")  # (reportErrors = in_place ? 0 : 1)
        if (out_alone and not no_in_place) or (no_in_place and unchecked not in (None, "N/A")):
            return False
        nbytes = int(row.about["count"]) * _NBYTES.get(row.about["type"], 1)
        parts, factor = n_ranks if operation in _IN_PARTS else 1, bus_factor(operation, n_ranks)
        if abs(int(row.about["size"]) - nbytes * parts) > 16 * parts:  # parts are whole multiples of 16 bytes
            return False
        if not all(is_bus(factor, algbw, busbw) for algbw, busbw in _rates(row)):
            return False
    return True


def _rates(row: Row) -> list[tuple[float, float]]:
    """Return algbw and busbw of a row's variants, skipping invalid numbers, which the row reader reports."""
    rates = []
    for cells in row.times.values():
        with contextlib.suppress(ValueError):
            rates.append((float(cells["algbw"]), float(cells["busbw"])))
    return [pair for pair in rates if all(map(math.isfinite, pair))]


def suggested(table: Table) -> list[str]:
    """Return operations consistent with the rows, with the ranks that follow from the fastest row's busbw / algbw."""
    pairs = ((busbw, algbw) for row in table.rows for algbw, busbw in _rates(row))
    busbw, algbw = max(pairs, default=(0.0, 0.0))
    factor = busbw / algbw if algbw > 0 else 1.0
    if not 0 < factor < 2 or factor == 1:
        return []
    n_ranks = round(1 / (1 - factor) if factor < 1 else 2 / (2 - factor))
    return [f"{name} among {n_ranks}" for name in OPERATIONS if fits(table, name, n_ranks)]


def is_bus(factor: float, algbw: float, busbw: float) -> bool:
    # tolerance of two printed decimals: half a unit of the last digit, or 0.2 % if there are fewer decimals
    return abs(algbw * factor - busbw) <= 0.0051 * (factor + 1) + 0.002 * busbw


@dataclass(frozen=True)
class _Run:
    """Contents of an output's header."""

    operation: str
    n_ranks: int
    n_hosts: int
    n_reps: int | None = None

    def timing(
        self, nbytes: float, micros: float, rates: Sequence[float], dtype: str, variant: str, place: str
    ) -> Timing:
        """Return the timing of a row with these `rates`, algbw and busbw."""
        operation, n, (algbw, busbw) = self.operation, self.n_ranks, rates
        timing = Timing("nccl-tests", operation, n, nbytes, micros * 1e-6, variant=variant, place=place)
        if not is_bus(factor := bus_factor(operation, n), algbw, busbw):
            raise ConfigError(
                f"{place}: busbw = {busbw:g}: expected {factor:g} times algbw = {algbw:g} for {operation} among {n} "
                "ranks; correct operation or n_ranks"
            )
        return replace(timing, n_hosts=self.n_hosts, n_reps=self.n_reps, dtype=DTYPES.get(dtype, dtype))


#: header of a CSV file
CSV_HEADING = re.compile(r"^\s*(?:numCycle,\s*)?collective,.*\balgbw,\s*busbw\b", re.MULTILINE)
_OPERATIONS = {program.replace("_", ""): operation for program, operation in PROGRAMS.items()}


def csv_rows(source: SourceText) -> Iterator[Node]:
    """Yield the rows of a CSV file in the form of JSON objects."""
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
                raise source.error(
                    number, f"has {len(cells)} cells, but the heading has {len(heading)}; is the line complete?"
                )
            yield Node(dict(zip(names, cells, strict=True)), f"{source.path}:{number}: ")


def rccl_timing(row: Node, operation: str | None, n_ranks: int | None) -> Timing:
    """Return the timing of a row."""
    if isinstance(row.value, dict):
        row = Node({key.lower(): value for key, value in row.value.items()}, row.place)
    name = row["name"].text()
    named = _OPERATIONS.get(re.sub("[^a-z]", "", name.lower()))
    if operation is None and named is None:
        raise row.error(f"{name} has no corresponding collective in ddlsim; remove it")
    operation = operation or str(named)
    if row.has("wrong") and row["wrong"].value != "N/A" and row["wrong"].number() > 0:
        raise row.error(f"{row['wrong'].number():g} wrong values; the run is invalid, repeat it")
    micros, algbw, busbw = row["time"].positive(), row["algbw"].nonnegative(), row["busbw"].nonnegative()
    gpus = row["gpusperrank"].count() if row.has("gpusperrank") else row["gpus"].count()
    ranks = [row[key].count() * gpus for key in ("ranks", "rankspernode") if row.has(key)] or [gpus]
    fitting = [n for n in ranks if is_bus(bus_factor(operation, n), algbw, busbw)]
    n = n_ranks or (fitting or ranks)[0]
    n_hosts = row["nodes"].count() if row.has("nodes") else int(row.has("gpus"))
    nbytes = row["size"].nonnegative()
    if n > 1 and abs(algbw * micros * 1e3 / n - nbytes) < 0.01 * nbytes:
        nbytes *= n  # received bytes, the only ones in the output for reduce-scatters until 2025
    run = _Run(operation, n, n_hosts if n == ranks[0] and (n_hosts > 1 or row.has("gpus")) else 0)
    variant = "in-place" if row["inplace"].number() else "out-of-place"
    return run.timing(nbytes, micros, (algbw, busbw), row["type"].text(), variant, row.place.rstrip(": "))


_PROGRAM = re.compile(r"\b(\w+)_perf\b")
_RANK = re.compile(r"(?:#|^)\s*Rank\s+([0-9]{1,9})\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+\d+\s+)?on\s+(\S+)")
_ITERS = re.compile(r"(?<!warmup )\biters: ([0-9]{1,9})\b")
_TYPES = re.compile(
    r"^\s*([0-9]{1,18})\s+([0-9]{1,18})\s+(?:u?int(?:8|32|64)?|half|float|double|bfloat16|f8e\w+|fp8\w*|char|byte|none)\b"
)

#: minimum of the 32 spaces printed for a variant that was not run (util.cu, writeBenchMarkLineNullBody)
_BLANK = 24


@checked
def read_nccl_tests(
    path: str | Path, *, operation: Annotated[str, one_of(*OPERATIONS)] | None = None, n_ranks: Count | None = None
) -> tuple[Timing, ...]:
    """Read nccl-tests output, and return an out-of-place row and an in-place row for each size.

    operation   the collective, for output without a header (the header contains the name of the test program)
    n_ranks     number of ranks, for output without the header's ``# Rank`` lines

    A file can contain several runs, each with its own header. If the name of the test program is missing, the operation
    is inferred from the rows or, if several operations match them, from the file name. Truncated rows and rows with
    invalid numbers are skipped, and a warning says how many.

    Raises ConfigError for files with wrong results (``#wrong`` above 0), CPU times (``-C``), an unknown test program,
    or no usable row. It is also raised if the operation cannot be inferred, or if a bus bandwidth does not match the
    operation and the number of ranks. The message gives the file, line and reason.
    """
    source = read_text(path, log=True)
    left_out, rows = LeftOut(), list[Timing]()
    if re.match(r"\s*(?:\{|\[\s*\{)", source.text):
        with left_out:
            for document in documents(read_text(path) if source.notes else source):
                rows += _read_json(source, document, operation, n_ranks, left_out)
    elif CSV_HEADING.search(source.text):
        for record in csv_rows(source):
            with left_out:
                rows.append(rccl_timing(record, operation, n_ranks))
    else:
        for table in _tables(source, left_out):
            run = _run(source, table, operation, n_ranks)
            for row in table.rows:
                for variant, cells in row.times.items():
                    with left_out:
                        nbytes = nonnegative_number(source, row.line, row.about["size"], "size")
                        micros = positive_number(source, row.line, cells["time"], "time")
                        rates = [nonnegative_number(source, row.line, cells[key], key) for key in ("algbw", "busbw")]
                        place = f"{source.path}:{row.line}"
                        rows.append(run.timing(nbytes, micros, rates, row.about["type"], variant, place))
    left_out.tell(rows, source, "no rows of nccl-tests (size, count, type, ..., busbw) found; did the run fail?")
    return tuple(rows)


def _tables(source: SourceText, left_out: LeftOut) -> list[Table]:
    """Return the runs in the file; a header after rows starts a new one. Truncated rows are skipped."""
    tables = [Table()]
    columns: list[str] = []
    in_place_only = False
    for number, line in source.lines():
        table = tables[-1]
        programs = {match[1] for match in _PROGRAM.finditer(line) if match[1] in (*PROGRAMS, *UNSUPPORTED)}
        begins = len(programs) == 1 and "concluded" not in line
        rank = _RANK.search(line)
        if table.rows and (begins or rank or re.search(r"\bnThread \d", line)):
            table = Table()
            tables.append(table)
        if rank:
            table.groups.setdefault(rank[2] or "0", {})[int(rank[1])] = rank[3]
        elif "algbw" in line and "size" in line:
            columns = _columns(source, number, line)
        elif re.match(r"\s*#\s+(?:out-of|in)-place", line):
            in_place_only = "out-of-place" not in line  # rccl-tests can omit the others
        elif match := _ITERS.search(line):
            table.n_reps = int(match[1])
        elif begins:
            table.operation, table.is_head = _operation(source, number, programs.pop()), "test starting" in line
        elif _TYPES.match(line):
            if not columns:
                raise source.error(number, "a row without a heading (# size count type ...) above it; add the heading")
            with left_out:
                table.rows.append(_row(source, number, line, columns, in_place_only))
    for table in tables:
        halves = [row.line for row in table.rows if len(row.times) == 1]
        if 0 < len(halves) < len(table.rows):
            warn(
                f"{source.path}:{halves[0]}: {len(halves)} rows contain only the in-place or only the out-of-place "
                "result; is the output truncated?"
            )
    return [table for table in tables if table.rows]


def _columns(source: SourceText, number: int, line: str) -> list[str]:
    columns = line.lstrip("# ").split()
    if "cputime" in columns:
        raise source.error(number, "contains CPU times (cputime); measure again without -C 1")
    starts = [i for i, name in enumerate(columns) if name == "time"]
    if not starts or any(columns[i + 1 : i + 3] != ["algbw", "busbw"] for i in starts):
        raise source.error(number, "not a heading of nccl-tests (size count type ... time algbw busbw); correct it")
    return columns


def _operation(source: SourceText, line: int | None, program: str) -> str:
    if program in UNSUPPORTED:
        raise source.error(line, f"{program}_perf has no corresponding collective in ddlsim; remove its output")
    return PROGRAMS[program]


def _row(source: SourceText, number: int, line: str, columns: list[str], in_place_only: bool) -> Row:
    words = line.split()
    if "redop" in columns:  # all-to-all of 2020 to 2022 leaves the cell blank (alltoall.cu, print_line_header)
        at = columns.index("redop")
        if len(words) > at and re.fullmatch(r"[\d.]+", words[at]):
            words.insert(at, "")
    starts = [i for i, name in enumerate(columns) if name == "time"]
    width = len(columns) - ("timestamp" in columns)
    n_words = len(words) - 2 * ("timestamp" in columns)
    variants = ["in-place"] if in_place_only else ["out-of-place", "in-place"]
    if len(starts) == 2 and n_words == starts[1]:  # one variant only: trace replay leaves the first blank
        gaps = [len(gap) for gap in re.findall(r"\S(\s+)(?=\S)", line)]
        variants = variants[1:] if gaps[len(line.split()) - len(words) + starts[0] - 1] > _BLANK else variants[:1]
    elif len(words) < width:
        reason = f"has {len(words)} of {width} columns; was other output (NCCL_DEBUG) mixed into the row?"
        raise source.entry_error(number, reason)
    times = {
        variant: dict(zip(columns[start : start + 4], words[start : start + 4], strict=False))
        for start, variant in zip(starts, variants, strict=False)
    }
    for variant, cells in times.items():
        wrong = cells.get("#wrong", "0")
        if wrong not in ("N/A", "0"):
            raise source.error(number, f"{wrong} wrong values ({variant}); the run is invalid, repeat it")
    # cells of operations without an in-place form are empty
    times = {variant: cells for variant, cells in times.items() if cells["time"] != "N/A"}
    names = ["size", "count", "type", *columns[3 : starts[0]]]
    return Row(number, dict(zip(names, words, strict=False)), times)


def _run(source: SourceText, table: Table, operation: str | None, n_ranks: int | None) -> _Run:
    """Return the contents of the header, completed from the rows."""
    listed, n_hosts = _listed(table)
    operation = operation or table.operation
    line = table.rows[0].line
    ranks = n_ranks or listed
    if not ranks:
        fitting = suggested(table)
        hint = f" (busbw / algbw is that of {' or '.join(fitting)})" if fitting else ""
        what = f"the number of ranks is unknown, because there are no '# Rank' lines{hint}"
        raise source.error(line, f"{what}; set n_ranks (--ranks)")
    if operation is not None and operation == table.operation and not (table.is_head or fits(table, operation, ranks)):
        operation = None  # documents show commands, and the output of one of them
    if operation is None:
        fitting = [name for name in OPERATIONS if fits(table, name, ranks)]
        if len(fitting) > 1 and len(named := operations_in_name(source.path, fitting)) == 1:
            operations, assumed = " and ".join(fitting), named[0]
            warn(f"{source.path}: the rows are consistent with {operations}; assuming {assumed}, as in the file's name")
            fitting = named
        if len(fitting) != 1:
            operations = " and ".join(fitting) if fitting else f"no operation among {ranks} ranks"
            what = f"the name of the program is missing, and the rows are consistent with {operations}"
            raise source.error(line, f"{what}; set operation (--operation)")
        operation = fitting[0]
    return _Run(operation, ranks, n_hosts if ranks == listed else 0, table.n_reps)


def _listed(table: Table) -> tuple[int, int]:
    """Return the number of ranks in a communicator and their hosts (0: unknown), from the ``# Rank`` lines.

    Shortened lists are extrapolated: ranks 0, 7, 8 and 15 mean 16 ranks, on two hosts if the gaps are inside hosts.
    """
    if len(table.groups) != 1:
        hosts = next(iter(table.groups.values()), {})
        return len(hosts), len(set(hosts.values()))
    host_of = next(iter(table.groups.values()))
    ranks = sorted(host_of)
    n_ranks = ranks[-1] + 1
    gaps = [(a, b) for a, b in zip([-1, *ranks], ranks, strict=False) if b > a + 1]
    inside = all(a >= 0 and host_of[a] == host_of[b] for a, b in gaps)
    return n_ranks, len(set(host_of.values())) if inside else 0


def _read_json(
    source: SourceText, root: Node, operation: str | None, n_ranks: int | None, left_out: LeftOut
) -> list[Timing]:
    """Return the timings of a run, or of rccl-tests' rows."""
    rows, listed = list[Timing](), root.items() if isinstance(root.value, list) and root.value else [root]
    if isinstance(listed[0].value, dict) and "busBw" in listed[0].value:
        for row in listed:
            with left_out:
                rows.append(rccl_timing(row, operation, n_ranks))
        return rows
    if operation is None and root.has("args"):
        match = _PROGRAM.search(" ".join(arg.text() for arg in root["args"].items()))
        operation = _operation(source, None, match[1]) if match and match[1] in PROGRAMS else None
    if operation is None:
        what = "the name of the program (args with all_reduce_perf or similar) is missing"
        raise source.error(None, f"{what}; set operation")
    config = root["config"] if root.has("config") else Node({}, root.place)
    n_reps = config["iterations"].count() if config.has("iterations") else None
    hosts = _json_hosts(config) if config.has("devices") else []
    if not (n_ranks or hosts):
        raise source.error(None, "the number of ranks (config.devices) is missing; set n_ranks (--ranks)")
    n_hosts = len(set(hosts)) if n_ranks in (None, len(hosts)) else 0
    run = _Run(operation, n_ranks or len(hosts), n_hosts, n_reps)
    for result in root["results"].items():
        for key, variant in (("out_of_place", "out-of-place"), ("in_place", "in-place")):
            if result.has(key):
                with left_out:
                    rows.append(_json_row(result, key, variant, run))
    if not rows:
        left_out.tell(rows, source, "the list of results is empty; did the run fail?")
    return rows


def _json_hosts(config: Node) -> list[str]:
    """Return the host of each rank of the first communicator.

    If a process has several GPUs, only the first is listed (util.cu, parseRankInfo) and represents all of them.
    """
    per_process = 1
    for key in ("nthreads", "ngpus"):
        per_process *= config[key].count() if config.has(key) else 1
    devices = config["devices"].items()
    numbers = [device["rank"].number() for device in devices]
    if per_process > 1 and len(numbers) > 1 and numbers[1] - numbers[0] == 1:
        per_process = 1  # all are listed
    groups = [device["group"].number() if device.has("group") else 0.0 for device in devices]
    hosts = [device["hostname"].text() if device.has("hostname") else "" for device in devices]
    return [host for group, host in zip(groups, hosts, strict=True) if group == groups[0] for _ in range(per_process)]


def _json_row(result: Node, key: str, variant: str, run: _Run) -> Timing:
    body = result[key]
    if body.has("cpu_time"):
        raise body.error("contains CPU times (cpu_time); measure again without -C 1")
    if body.has("nwrong") and body["nwrong"].number() > 0:
        raise body.error(f"{body['nwrong'].number():g} wrong values; the run is invalid, repeat it")
    micros, nbytes, dtype = body["time"].positive(), result["size"].nonnegative(), result["type"].text()
    rates = body["alg_bw"].number(), body["bus_bw"].number()
    timing = run.timing(nbytes, micros, rates, dtype, variant, body.place)
    if not result.has(f"{key}_per_iter"):
        return timing
    per_iteration = result[f"{key}_per_iter"]  # with per-iteration timing, use the median
    median, low, high = (per_iteration[name].positive() * 1e-6 for name in ("p50_us", "min_us", "max_us"))
    return replace(timing, seconds=median, statistic="median", min_s=low, max_s=high)
