"""Reader for OSU micro-benchmarks (MPI, including the CUDA, ROCm and NCCL builds), versions 3 to 7.

Format: https://mvapich.cse.ohio-state.edu/benchmarks/. MB/s is 1e6 bytes/s. ``Latency Test`` is one way (half a round
trip); bandwidth tests keep many messages in flight ("stream"); the bidirectional one adds both directions. Sizes of
gather-like and all-to-all operations are those of one rank's part (:class:`Timing` uses full buffers).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.imports.text import LeftOut, SourceText, nonnegative_number, positive_number, read_text
from ddlsim.imports.timing import Timing

_HEADING = re.compile(r"#\s*(?:OSU|OMB-Py)\s+(\S+)\s+(.+?)\s+Test(?:\s+v?([\d.]+))?\s*$")
_PAIRS = re.compile(r"#\s*\[\s*pairs:\s*([0-9]{1,9})\b")
_TITLES = {
    "p2p": "Latency, Multi Latency, Multi-threaded Latency, Multi-process Latency",
    "stream": "Bandwidth, Multiple Bandwidth / Message Rate",
    "bidirectional": "Bi-Directional Bandwidth",
    "all_reduce": "Allreduce Latency",
    "reduce": "Reduce Latency",
    "broadcast": "Broadcast Latency, Bcast Latency",
    "reduce_scatter": "Reduce_scatter Latency",
    "all_gather": "Allgather Latency, Allgatherv Latency",
    "gather": "Gather Latency, Gatherv Latency",
    "scatter": "Scatter Latency, Scatterv Latency",
    "all_to_all": "All-to-All Personalized Exchange Latency, All-to-Allv Personalized Exchange Latency",
    "barrier": "Barrier Latency",
}
_TESTS = {title: operation for operation, titles in _TITLES.items() for title in titles.split(", ")}
_IN_PARTS = ("all_gather", "gather", "scatter", "all_to_all")  # the size is one rank's part of the buffer
#: excludes output after a table, such as the shell's time ("0.12user 0.05system") or a batch system's ("2 nodes")
_ROW = re.compile(r"\s*[0-9][0-9.]*(?:\s+(?:[-+0-9.]|nan|inf)|\s*$)")


@dataclass
class _Section:
    """What the heading lines of the current test contain."""

    title: str
    operation: str
    n_pairs: int = 1
    columns: tuple[str, ...] = ()


@checked
def read_osu(path: str | Path, *, n_ranks: Count | None = None) -> tuple[Timing, ...]:
    """Read OSU benchmark output, and return one row per size. The file may contain several tests.

    n_ranks   number of processes in collective tests, which OSU does not print. Point-to-point tests always have two
              processes per pair.

    Truncated rows and rows with invalid numbers are skipped, and a warning says how many.

    Raises ConfigError, giving the file, line and reason, if a test is unknown or failed its validation, or if `n_ranks`
    is required and missing. Non-blocking tests also raise ConfigError, because their latency includes the overlapped
    computation.
    """
    source = read_text(path, log=True)
    section: _Section | None = None
    rows, left_out = list[Timing](), LeftOut()
    for number, line in source.lines():
        if match := _HEADING.search(line):
            section = _start(source, number, match[1], match[2])
        elif section is None:
            continue
        elif match := _PAIRS.search(line):
            section.n_pairs = int(match[1])
        elif line.startswith("#") and ("(us)" in line or "[us]" in line or "/s" in line):
            columns = re.sub(r"\[(us|MB/s|B)\]", r"(\1)", line.lstrip("# ").strip())  # OMB-Py uses brackets
            section.columns = tuple(re.split(r"\s{2,}", columns))
        elif section.columns and _ROW.match(line):
            with left_out:
                rows.append(_row(source, number, line.split(), section, n_ranks))
    left_out.tell(rows, source, "no rows of an OSU benchmark (# OSU MPI ... Test, # Size ...) found; did the run fail?")
    return tuple(rows)


def _start(source: SourceText, number: int, library: str, title: str) -> _Section:
    title = " ".join(title.split())
    if library.startswith("MPI_"):  # "MPI_Put Latency": one-sided
        reason = "is a one-sided test, which ddlsim does not support; remove its output"
        raise source.error(number, f"{library} {title!r} {reason}")
    if title not in _TESTS:
        if "Non-blocking" in title:
            raise source.error(number, f"{title!r} measures overlap, not a duration; use the blocking test")
        supported = ", ".join(sorted(_TESTS))
        raise source.error(number, f"unknown test {title!r}; remove its output (known: {supported})")
    return _Section(title, _TESTS[title])


def _row(source: SourceText, number: int, words: list[str], section: _Section, n_ranks: int | None) -> Timing:
    columns = section.columns
    if len(words) < len(columns) - ("Iterations" in columns[-1]):
        reason = f"has {len(words)} of {len(columns)} columns; was other output mixed into the row?"
        raise source.entry_error(number, reason)
    if "Fail" in words:
        raise source.error(number, "validation failed; the run is invalid, repeat it")
    cells = dict(zip(columns, words, strict=False))
    ranks = 2 if section.operation in ("p2p", "stream", "bidirectional") else n_ranks
    if ranks is None:
        raise source.error(number, f"OSU does not print the number of processes of {section.title!r}; set n_ranks")
    size = 0.0 if section.operation == "barrier" else nonnegative_number(source, number, words[0], "Size")
    micro: dict[str, float] = {}
    for column in columns:
        kind = next((kind for kind in ("min", "max") if column.lower().startswith(kind)), "avg")
        if column.endswith("(us)") and kind not in micro:
            micro[kind] = positive_number(source, number, cells[column], column) * 1e-6
    rate = next((column for column in columns if column.endswith(("MB/s", "(MB/s)"))), None)
    if rate is not None:  # of all pairs together; "bidirectional": also of both directions
        total = size * section.n_pairs * (2 if section.operation == "bidirectional" else 1)
        micro = {"avg": total / (positive_number(source, number, cells[rate], rate) * 1e6)}
    if "avg" not in micro:
        raise source.error(number, f"none of the columns {', '.join(columns)} contains a latency or a bandwidth")
    repetitions = cells.get("Iterations", "")
    n_reps = int(repetitions) if re.fullmatch("[0-9]{1,9}", repetitions) else None
    nbytes = size * (ranks if section.operation in _IN_PARTS else 1)
    variant = f"{section.n_pairs} pairs" if section.n_pairs > 1 else ""
    low, high, place = micro.get("min"), micro.get("max"), f"{source.path}:{number}"
    timing = Timing("osu", section.operation, ranks, nbytes, micro["avg"], n_reps=n_reps, variant=variant, place=place)
    return replace(timing, min_s=low, max_s=high)
