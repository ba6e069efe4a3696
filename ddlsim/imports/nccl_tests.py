"""nccl-tests (and rccl-tests): the printed table, and the file that ``-J`` writes.

Shape: https://github.com/NVIDIA/nccl-tests, ``src/util.cu`` (table and JSON), ``doc/PERFORMANCE.md`` (algbw and busbw);
tables since 2019 have the same columns, with ``error`` (a deviation) where newer ones count ``#wrong`` values.
``size`` is the whole buffer in bytes, ``time`` microseconds per operation (mean over the iterations),
algbw = size / time, busbw = algbw * factor, for n ranks: all-reduce 2(n-1)/n; all-gather, reduce-scatter, all-to-all,
gather, scatter (n-1)/n; broadcast, reduce, sendrecv 1. GB is 1e9 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.imports.json_values import Node, parse_json
from ddlsim.imports.text import SourceText, nonnegative_number, positive_number, read_text
from ddlsim.imports.timing import Timing

#: program -> operation
_PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "sendrecv": "p2p",
}  # fmt: skip
_OPERATIONS = tuple(_PROGRAMS.values())
_PROGRAM = re.compile(r"\b(\w+)_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)")
_ITERS = re.compile(r"(?<!warmup )\biters: ([0-9]{1,9})\b")
_TYPES = re.compile(
    r"^\s*(\d+)\s+(\d+)\s+(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\w+|fp8\w*|char|byte|none)\b"
)
#: nccl-tests' names of types -> ours
_DTYPES = {"half": "float16", "float": "float32", "double": "float64", "none": ""}


@dataclass(frozen=True)
class _Run:
    """What the head of the output said."""

    operation: str
    n_ranks: int
    n_hosts: int
    n_reps: int | None


@checked
def read_nccl_tests(
    path: str | Path, *, operation: str | None = None, n_ranks: Count | None = None
) -> tuple[Timing, ...]:
    """Return one row for every size, out-of-place and in-place, of the output in the file `path`.

    operation, n_ranks   for output that lost its head: what the program's name and the ``# Rank`` lines would say

    Raises :class:`ConfigError` with file, line and reason: wrong results (``#wrong`` above 0), CPU times (``-C``), a
    row cut by other output, an unknown program, a busbw that does not fit operation and ranks.
    """
    if operation is not None and operation not in _OPERATIONS:
        raise unknown_name("operation", operation, _OPERATIONS, "read_nccl_tests")
    source = read_text(path, log=True)
    if source.text.lstrip().startswith("{"):
        return _read_json(read_text(path) if source.notes else source, operation, n_ranks)
    return _read_table(source, operation, n_ranks)


def bus_factor(operation: str, n_ranks: int) -> float:
    """Return busbw / algbw (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2.0 * (n_ranks - 1) / n_ranks
    return 1.0 if operation in ("broadcast", "reduce", "p2p") else (n_ranks - 1) / n_ranks


# ----------------------------------------------------------------------------------------------------- the table


def _read_table(source: SourceText, operation: str | None, n_ranks: int | None) -> tuple[Timing, ...]:
    groups: dict[str, list[str]] = {}  # communicator -> the host of each rank (-m makes several, side by side)
    columns: list[str] = []
    n_reps: int | None = None
    rows: list[Timing] = []
    for number, line in source.lines():
        if match := _RANK.search(line):
            groups.setdefault(match[2] or "0", []).append(match[3])
        elif "algbw" in line and "size" in line:
            columns = _columns(source, number, line)
        elif match := _ITERS.search(line):
            n_reps = int(match[1])
        elif operation is None and (match := _PROGRAM.search(line)):
            operation = _operation(source, number, match[1])
        elif _TYPES.match(line):
            if not columns:
                raise source.error(number, "has a row but no heading (# size count type ...) above; add the heading")
            run = _Run(_known(source, number, operation), *_ranks(source, n_ranks, groups), n_reps)
            rows += _rows(source, number, line, columns, run)
    if not rows:
        raise source.error(None, "has no row of nccl-tests (size, count, type, ..., busbw); did the run fail?")
    return tuple(rows)


def _columns(source: SourceText, number: int, line: str) -> list[str]:
    columns = line.lstrip("# ").split()
    if "cputime" in columns:
        raise source.error(number, "holds CPU times (cputime); measure again without -C 1")
    starts = [i for i, name in enumerate(columns) if name == "time"]
    if not starts or any(columns[i + 1 : i + 3] != ["algbw", "busbw"] for i in starts):
        raise source.error(number, "is no heading of nccl-tests (size count type ... time algbw busbw); correct it")
    return columns


def _ranks(source: SourceText, n_ranks: int | None, groups: dict[str, list[str]]) -> tuple[int, int]:
    """Return the ranks of a communicator and the hosts that they are on (0: not known)."""
    hosts = next(iter(groups.values()), [])
    if n_ranks is not None:
        return n_ranks, len(set(hosts)) if len(hosts) == n_ranks else 0
    if not hosts:
        raise source.error(None, "does not say how many ranks took part (no '# Rank' lines); give n_ranks")
    return len(hosts), len(set(hosts))


def _operation(source: SourceText, line: int | None, program: str) -> str | None:
    if program in _PROGRAMS:
        return _PROGRAMS[program]
    if program == "hypercube":
        raise source.error(line, "hypercube_perf measures no collective of ddlsim; leave it out")
    return None  # some other program whose name ends alike


def _known(source: SourceText, line: int | None, operation: str | None) -> str:
    if operation is None:
        raise source.error(
            line, "does not say which program ran (no line with all_reduce_perf or the like); give operation"
        )
    return operation


def _rows(source: SourceText, number: int, line: str, columns: list[str], run: _Run) -> Iterator[Timing]:
    words = line.split()
    starts = [i for i, name in enumerate(columns) if name == "time"]
    width = len(columns) - ("timestamp" in columns)
    if len(words) < width:
        raise source.error(
            number, f"has {len(words)} of {width} columns; was other output (NCCL_DEBUG) mixed into the row?"
        )
    for start, variant in zip(starts, ("out-of-place", "in-place"), strict=False):
        cells = dict(zip(columns[start : start + 4], words[start : start + 4], strict=False))
        if cells["time"] == "N/A":  # there is no in-place form of this operation
            continue
        wrong = cells.get("#wrong", "0")
        if wrong not in ("N/A", "0"):
            raise source.error(number, f"{wrong} wrong values ({variant}); the run is not valid, repeat it")
        timing = Timing(
            tool="nccl-tests", operation=run.operation, n_ranks=run.n_ranks, n_hosts=run.n_hosts,
            nbytes=nonnegative_number(source, number, words[0], "size"),
            seconds=positive_number(source, number, cells["time"], "time") * 1e-6,
            n_reps=run.n_reps, dtype=_DTYPES.get(words[2], words[2]), variant=variant,
            place=f"{source.path}:{number}",
        )  # fmt: skip
        algbw, busbw = (nonnegative_number(source, number, cells[name], name) for name in ("algbw", "busbw"))
        _check_bus(timing, algbw, busbw)
        yield timing


def _check_bus(timing: Timing, algbw: float, busbw: float) -> None:
    """Refuse a row whose busbw says that operation or ranks are others than assumed."""
    factor = bus_factor(timing.operation, timing.n_ranks)
    # printed with two decimals: half a unit of the last digit on either side, 0.2 % where there are fewer decimals
    if abs(algbw * factor - busbw) > 0.0051 * (factor + 1) + 0.002 * busbw:
        raise ConfigError(
            f"{timing.place}: busbw = {busbw:g} is not algbw = {algbw:g} times "
            f"{factor:g}, which {timing.operation} among {timing.n_ranks} ranks "
            f"has; give the right operation and n_ranks"
        )


# ------------------------------------------------------------------------------------------------------ the JSON


def _read_json(source: SourceText, operation: str | None, n_ranks: int | None) -> tuple[Timing, ...]:
    root = parse_json(source)
    if operation is None and root.has("args"):
        match = _PROGRAM.search(" ".join(arg.text() for arg in root["args"].items()))
        operation = _operation(source, None, match[1]) if match else None
    operation = _known(source, None, operation)
    n_reps: int | None = None
    groups: dict[str, list[str]] = {}
    if root.has("config"):
        config = root["config"]
        if config.has("iterations"):
            n_reps = config["iterations"].count()
        if config.has("devices"):
            groups = _json_groups(config)
    run = _Run(operation, *_ranks(source, n_ranks, groups), n_reps)
    rows = [timing for result in root["results"].items() for timing in _json_rows(result, run)]
    if not rows:
        raise source.error(None, "has an empty list of results; did the run fail?")
    return tuple(rows)


def _json_groups(config: Node) -> dict[str, list[str]]:
    """Return communicator -> the host of each rank.

    Of a process with several GPUs only the first is listed (util.cu, parseRankInfo): it stands for all of them.
    """
    per_process = 1
    for key in ("nthreads", "ngpus"):
        per_process *= config[key].count() if config.has(key) else 1
    devices = config["devices"].items()
    numbers = [device["rank"].number() for device in devices]
    if per_process > 1 and len(numbers) > 1 and numbers[1] - numbers[0] == 1:
        per_process = 1  # all are listed
    groups: dict[str, list[str]] = {}
    for device in devices:
        group = str(device["group"].number()) if device.has("group") else "0"
        host = device["hostname"].text() if device.has("hostname") else ""
        groups.setdefault(group, []).extend([host] * per_process)
    return groups


def _json_rows(result: Node, run: _Run) -> Iterator[Timing]:
    for key, variant in (("out_of_place", "out-of-place"), ("in_place", "in-place")):
        if not result.has(key):
            continue
        body = result[key]
        if body.has("cpu_time"):
            raise body.error("holds CPU times (cpu_time); measure again without -C 1")
        if body.has("nwrong") and body["nwrong"].number() > 0:
            raise body.error(f"{body['nwrong'].number():g} wrong values; the run is not valid, repeat it")
        seconds, low, high = body["time"].positive() * 1e-6, None, None
        if result.has(f"{key}_per_iter"):  # per-iteration timing: the median is the better figure
            each = result[f"{key}_per_iter"]
            seconds = each["p50_us"].positive() * 1e-6
            low, high = each["min_us"].positive() * 1e-6, each["max_us"].positive() * 1e-6
        timing = Timing(
            tool="nccl-tests", operation=run.operation, n_ranks=run.n_ranks, n_hosts=run.n_hosts,
            nbytes=result["size"].nonnegative(), seconds=seconds, statistic="mean" if low is None else "median",
            min_s=low, max_s=high, n_reps=run.n_reps,
            dtype=_DTYPES.get(result["type"].text(), result["type"].text()), variant=variant, place=body.place,
        )  # fmt: skip
        _check_bus(timing, body["alg_bw"].number(), body["bus_bw"].number())
        yield timing
