"""Plain-text tables (with rich), wrapped only to fit a terminal.

In a file, a pipe or a notebook lines are as long as their cells need. At a terminal columns of words fold until the
table fits, numbers stay whole; a table that is too wide even so is left as it is. Wide characters count as two columns,
control characters are shown (:mod:`ddlsim.printable`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from ddlsim.printable import shown

if TYPE_CHECKING:
    from rich.table import Table

#: cells that are wider are words that may fold, to this width at least
WORDS = 16
#: of labels before text
LABEL = 13
#: between columns
_GAP = 2
#: more than any table has
_ENDLESS = 1_000_000


def aligned(
    rows: Sequence[Sequence[str]], left: Container[int] = (), *, indent: int = 0, width: int | None = None
) -> list[str]:
    """Return a table as lines, with columns as wide as their widest cell: to the right, those in `left` not.

    rows    cells; the first row are the headings, if there are any
    indent  spaces before each line
    width   that the table must fit in, where there is no terminal (default: any)
    """
    table, room = _table(_GAP), _room(width) - indent
    columns = [[_measured(shown(cell)) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(column) for column in columns]
    folds = [n > WORDS for n in widths]
    least = sum(min(n, WORDS) for n in widths) + _GAP * (len(widths) - 1)
    for i, fold in enumerate(folds):
        table.add_column(justify="left" if i in left else "right", no_wrap=not fold, overflow="fold")
    return _lines(table, rows, room if least <= room else _ENDLESS, indent)


def labelled(rows: Sequence[tuple[str, str]], *, width: int | None = None) -> list[str]:
    """Return lines of a label and a text, which goes on below itself where it is longer than a terminal, or `width`."""
    table = _table(1)
    table.add_column(min_width=LABEL, no_wrap=True)
    table.add_column(overflow="fold")
    room = _room(width)
    return _lines(table, rows, room if room > 2 * LABEL else _ENDLESS, 0)


def _table(gap: int) -> Table:
    from rich.table import Table

    return Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))


def _measured(text: str) -> int:
    """Return how many columns of a terminal the widest line of a cell takes."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _room(width: int | None) -> int:
    """Return how many columns lines may have."""
    try:
        at_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        at_terminal = False
    return shutil.get_terminal_size().columns if at_terminal else width or _ENDLESS


def _lines(table: Table, rows: Sequence[Sequence[str]], width: int, indent: int) -> list[str]:
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    for row in rows:  # a Text is shown as it is: a str may hold what rich takes for markup, "[red]"
        table.add_row(*(Text(shown(cell)) for cell in row))
    file = StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False,
        highlight=False, soft_wrap=False,
    )  # fmt: skip
    console.print(table)
    return [" " * indent + line.rstrip() if line.strip() else "" for line in file.getvalue()[:-1].split("\n")]
