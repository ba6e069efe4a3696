"""Reader for CSV tables of training throughput, as in papers: long (a throughput column) or wide (one per series).

docs/formats/benchmarks.md shows both shapes. Throughputs are those of all ranks together. Separators are ",", ";" and
tab. Lines that begin with # are skipped, and so are cells that are empty, "-" or "nan".
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.imports.text import LeftOut, SourceText, positive_number, read_text
from ddlsim.imports.timing import Timing
from ddlsim.units import as_number

_RANKS = re.compile(r"n|n?ranks|(?:n|num)?(?:gpus|workers)|gpucount|worldsize")
_BATCH = ("batch", "batchsize", "perworkerbatch", "batchpergpu", "batchsizepergpu", "localbatch")
_RATES = re.compile(
    r"throughput|speed|(?:total)?(?:images|imgs?|samples|sequences|examples|tokens)(?:/|per)(?:s|sec|second)"
)
_UNITS = re.compile(r"\((?:images|imgs?|samples|sequences|tokens)?/?\w*\)")
#: numeric columns that are not throughputs: labels and other quantities
_LABELS = re.compile(r"(?:n|num)?(?:nodes|hosts|machines|servers)|seed|run|repetition")
_QUANTITIES = re.compile(r".*(?:seconds|time|latency|duration|bytes|size|bandwidth|busbw|algbw)|s|ms|us")
_NOTHING = ("", "-", "nan", "n/a", "oom")


def _plain(name: str) -> str:
    """Return a column's name without spaces, underscores and units, as in "Throughput (img/s)" -> "throughput"."""
    return _UNITS.sub("", re.sub(r"[\s_-]", "", name.strip().lower()).lstrip("#"))


def _rows(source: SourceText) -> list[tuple[int, list[str]]]:
    """Return (line, cells) of every row that is not a comment, starting with the header."""
    lines = enumerate(source.text.splitlines(), start=1)
    kept = [(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not kept:
        raise source.error(None, "is empty; is it the right file?")
    delimiter = max(",;\t", key=kept[0][1].count)
    try:
        cells = csv.reader([line for _, line in kept], delimiter=delimiter, strict=True)
        return [(number, [cell.strip() for cell in row]) for (number, _), row in zip(kept, cells, strict=True)]
    except (csv.Error, ValueError) as error:
        raise source.error(None, f"not a table with one row per line: {error}; correct the quotes") from None


#: what is wrong with a table that ends with its heading
NO_ROWS = "has the names of columns, but no row follows; write one row per line below it"


def is_throughput_table(source: SourceText) -> bool:
    """Return whether the first row is a header with ranks and at least one more column."""
    heading = [_plain(name) for name in _rows(source)[0][1]]
    return len(heading) > 1 and any(map(_RANKS.fullmatch, heading))


@checked
def read_throughput(path: str | Path, *, batch_size: Count | None = None) -> tuple[Timing, ...]:
    """Read a table of throughputs, and convert each to the duration of one step of ``ranks * batch_size`` samples.

    batch_size   samples per rank per step, for tables without a batch-size column. If neither the table nor this
                 argument specifies the batch size, the duration of a single sample is returned (``n_samples`` = 1),
                 which corresponds to the same throughput.

    Cells that are not numbers and rows with the wrong number of cells are skipped, and a warning says how many.

    Raises ConfigError, giving the file, line and reason, if the table has no usable throughput or no column for the
    number of ranks, or if both the table and `batch_size` specify the batch size.
    """
    source = read_text(path, log=True)
    (head_line, heading), *rows = _rows(source)
    if not rows:
        raise source.error(head_line, NO_ROWS)
    plain = [_plain(name) for name in heading]
    ranks = [i for i, name in enumerate(plain) if _RANKS.fullmatch(name)]
    if len(ranks) != 1:
        raise source.error(head_line, f"needs one column of ranks, named like 'gpus' or 'workers', not {len(ranks)}")
    batches = [i for i, name in enumerate(plain) if name in _BATCH]
    if batches and batch_size is not None:
        raise source.error(head_line, f"the table has the column {heading[batches[0]]!r}; remove batch_size")
    rates = [i for i, name in enumerate(plain) if _RATES.fullmatch(name)]
    others = [i for i, name in enumerate(plain) if i not in (*ranks, *batches) and not _LABELS.fullmatch(name)]
    for i in others if not rates else ():
        if _QUANTITIES.fullmatch(plain[i]):
            hint = "name the column of throughputs, such as 'images/s', or write times as a table of measurements"
            raise source.error(head_line, f"the column {heading[i]!r} is not a throughput; {hint}")
    numeric = {i for _, cells in rows for i, cell in enumerate(cells) if as_number(cell) is not None}
    series = rates or [i for i in others if i in numeric]
    labels = [i for i in range(len(heading)) if i not in (*ranks, *batches, *series)]
    steps, left_out = list[Timing](), LeftOut()
    for number, cells in rows:
        for i in series if cells != heading else ():  # a file may contain several tables
            with left_out:
                if len(cells) != len(heading):
                    reason = f"has {len(cells)} cells, but the heading has {len(heading)}; correct the row"
                    raise source.entry_error(number, reason)
                if cells[i].lower() in _NOTHING:
                    continue
                n_ranks = _integer(source, number, cells[ranks[0]], heading[ranks[0]])
                batch = _integer(source, number, cells[batches[0]], heading[batches[0]]) if batches else batch_size
                samples = float(n_ranks * batch) if batch else 1.0
                words = [cells[i] for i in labels if cells[i]]
                rate = positive_number(source, number, cells[i], heading[i])
                variant, at = " ".join(words + ([heading[i]] if len(series) > 1 else [])), f"{source.path}:{number}"
                seconds = samples / rate
                steps.append(Timing("table", "step", n_ranks, 0, seconds, n_samples=samples, variant=variant, place=at))
    left_out.tell(steps, source, "the table has a heading but no throughput; add rows")
    return tuple(steps)


def _integer(source: SourceText, line: int, cell: str, column: str) -> int:
    value = positive_number(source, line, cell, column)
    if value != int(value) or value > 1e9:
        raise source.entry_error(line, f"{column} = {cell!r} must be an integer of at most 1e9")
    return int(value)
