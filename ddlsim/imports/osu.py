"""OSU micro-benchmarks (MPI, also the CUDA, ROCm and NCCL builds).

Shape: https://mvapich.cse.ohio-state.edu/benchmarks/ and the output that versions 3 to 7 print::

    # OSU MPI Allreduce Latency Test v5.8
    # Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
    4                      12.45             11.90             13.01        1000

MB/s is 1e6 bytes/s. ``Latency Test`` is one way (half a round trip); bandwidth tests keep many messages on the way
("stream"); the bidirectional one adds both directions. Sizes of gather-like and all-to-all operations are those of one
rank's part and are multiplied by the ranks here (:class:`Timing` counts whole buffers).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.imports.text import LeftOut, SourceText, nonnegative_number, positive_number, read_text
from ddlsim.imports.timing import Timing

_HEADING = re.compile(r"#\s*(?:OSU|OMB-Py)\s+(\S+)\s+(.+?)\s+Test(?:\s+v?([\d.]+))?\s*$")
_PAIRS = re.compile(r"#\s*\[\s*pairs:\s*([0-9]{1,9})\b")
#: test -> (operation, whether the size is one rank's part of the buffer)
_TESTS = {
    "Latency": ("p2p", False), "Multi Latency": ("p2p", False), "Multi-threaded Latency": ("p2p", False),
    "Multi-process Latency": ("p2p", False),
    "Bandwidth": ("stream", False), "Bi-Directional Bandwidth": ("bidirectional", False),
    "Multiple Bandwidth / Message Rate": ("stream", False),
    "Allreduce Latency": ("all_reduce", False), "Reduce Latency": ("reduce", False),
    "Broadcast Latency": ("broadcast", False), "Bcast Latency": ("broadcast", False),
    "Reduce_scatter Latency": ("reduce_scatter", False),
    "Allgather Latency": ("all_gather", True), "Allgatherv Latency": ("all_gather", True),
    "Gather Latency": ("gather", True), "Scatter Latency": ("scatter", True), "Gatherv Latency": ("gather", True),
    "Scatterv Latency": ("scatter", True), "All-to-All Personalized Exchange Latency": ("all_to_all", True),
    "All-to-Allv Personalized Exchange Latency": ("all_to_all", True), "Barrier Latency": ("barrier", False),
}  # fmt: skip
#: not what the shell's time ("0.12user 0.05system") or a batch system ("2 nodes") says behind a table
_ROW = re.compile(r"\s*[0-9][0-9.]*(?:\s+(?:[-+0-9.]|nan|inf)|\s*$)")


@dataclass
class _Section:
    """What the heading lines of the test being read said."""

    title: str
    operation: str
    is_part: bool
    n_pairs: int = 1
    columns: tuple[str, ...] = ()


@checked
def read_osu(path: str | Path, *, n_ranks: Count | None = None) -> tuple[Timing, ...]:
    """Return one row for every size; the file may hold several tests.

    n_ranks   processes of the collectives, which OSU does not print (point-to-point tests have two per pair)

    Rows that are cut, or have a value that is no number, are left out with a warning that counts them. Raises
    ConfigError with file, line and reason: an unknown test, a failed validation, a missing n_ranks, non-blocking tests
    (their latency includes the computation they overlap).
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
            columns = re.sub(r"\[(us|MB/s|B)\]", r"(\1)", line.lstrip("# ").strip())  # OMB-Py has brackets
            section.columns = tuple(re.split(r"\s{2,}", columns))
        elif section.columns and _ROW.match(line):
            with left_out:
                rows.append(_row(source, number, line.split(), section, n_ranks))
    left_out.tell(rows)
    if not rows:
        raise source.error(None, "has no row of an OSU benchmark (# OSU MPI ... Test, # Size ...); did the run fail?")
    return tuple(rows)


def _start(source: SourceText, number: int, library: str, title: str) -> _Section:
    title = " ".join(title.split())
    if library.startswith("MPI_"):  # "MPI_Put Latency": the other side does not take part
        raise source.error(number, f"{library} {title!r} is a one-sided test, which has no counterpart; leave it out")
    if title not in _TESTS:
        if "Non-blocking" in title:
            raise source.error(number, f"{title!r} measures overlap, not a duration; use the blocking test")
        known = ", ".join(sorted(_TESTS))
        raise source.error(number, f"the test {title!r} is not known; leave it out (known: {known})")
    return _Section(title, *_TESTS[title])


def _row(source: SourceText, number: int, words: list[str], section: _Section, n_ranks: int | None) -> Timing:
    columns = section.columns
    if len(words) < len(columns) - ("Iterations" in columns[-1]):
        raise source.entry_error(
            number, f"has {len(words)} of {len(columns)} columns; was other output mixed into the row?"
        )
    if "Fail" in words:
        raise source.error(number, "failed its validation; the run is not valid, repeat it")
    cells = dict(zip(columns, words, strict=False))
    if section.operation in ("p2p", "stream", "bidirectional"):
        ranks = 2
    elif n_ranks is None:
        raise source.error(number, f"OSU does not print how many processes ran {section.title!r}; give n_ranks")
    else:
        ranks = n_ranks
    size = 0.0 if section.operation == "barrier" else nonnegative_number(source, number, words[0], "Size")
    micro = {
        name: positive_number(source, number, cells[column], column) * 1e-6
        for name, column in _time_columns(columns).items()
    }
    rate = next((column for column in columns if column.endswith(("MB/s", "(MB/s)"))), None)
    if rate is not None:  # all pairs together; "bidirectional" also both directions
        total = size * section.n_pairs * (2 if section.operation == "bidirectional" else 1)
        micro = {"avg": total / (positive_number(source, number, cells[rate], rate) * 1e6)}
    if "avg" not in micro:
        raise source.error(number, f"none of the columns {', '.join(columns)} holds a latency or a bandwidth")
    return Timing(
        tool="osu", operation=section.operation, n_ranks=ranks, nbytes=size * (ranks if section.is_part else 1),
        seconds=micro["avg"], min_s=micro.get("min"), max_s=micro.get("max"),
        n_reps=int(cells["Iterations"]) if re.fullmatch("[0-9]{1,9}", cells.get("Iterations", "")) else None,
        variant=f"{section.n_pairs} pairs" if section.n_pairs > 1 else "", place=f"{source.path}:{number}",
    )  # fmt: skip


def _time_columns(columns: tuple[str, ...]) -> dict[str, str]:
    """Return "avg", "min", "max" -> the column in microseconds."""
    found: dict[str, str] = {}
    for column in columns:
        if column.endswith("(us)"):
            kind = next((kind for kind in ("min", "max") if column.lower().startswith(kind)), "avg")
            found.setdefault(kind, column)
    return found
