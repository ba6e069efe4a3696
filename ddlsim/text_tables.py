"""Plain-text tables (with rich), wrapped only to fit a terminal.

In a file, a pipe or a notebook, lines are as long as necessary. In a terminal, text columns are wrapped until the table
fits, but numbers are not; a table that is still too wide is left as it is. Wide characters count as two columns, and
control characters are escaped (:mod:`ddlsim.printable`).
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from ddlsim.printable import shown

if TYPE_CHECKING:
    from rich.table import Table

#: minimum width of wrapped cells
WORDS = 16
#: width of labels before text
LABEL = 13
#: spaces between columns
_GAP = 2
#: wider than any table
_ENDLESS = 1_000_000


def aligned(
    rows: Sequence[Sequence[str]], left: Container[int] = (), *, indent: int = 0, width: int | None = None
) -> list[str]:
    """Return a table as lines, with columns as wide as their widest cell, right-aligned except those in `left`.

    rows    cells; the first row contains the headings, if there are any
    indent  spaces before each line
    width   maximum width without a terminal (default: unlimited)
    """
    table, room = _table(_GAP), _room(width) - indent
    columns = [[_measured(shown(cell)) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(column) for column in columns]
    folds = [n > WORDS for n in widths]
    least = sum(min(n, WORDS) for n in widths) + _GAP * (len(widths) - 1)
    for i, fold in enumerate(folds):
        table.add_column(justify="left" if i in left else "right", no_wrap=not fold, overflow="fold")
    return _lines(table, rows, room if least <= room else _ENDLESS, indent)


def labelled(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines of a label and a text, which is wrapped with an indent if it exceeds the terminal."""
    table = _table(1)
    table.add_column(min_width=LABEL, no_wrap=True)
    table.add_column(overflow="fold")
    room = _room(None)
    return _lines(table, rows, room if room > 2 * LABEL else _ENDLESS, 0)


def _table(gap: int) -> Table:
    from rich.table import Table

    return Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))


def _measured(text: str) -> int:
    """Return the terminal width of the widest line in a cell."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _room(width: int | None) -> int:
    """Return the maximum width of lines."""
    import shutil  # slow to import, and only printed tables need it

    try:
        at_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # missing or closed
        at_terminal = False
    return shutil.get_terminal_size().columns if at_terminal else width or _ENDLESS


def _lines(table: Table, rows: Sequence[Sequence[str]], width: int, indent: int) -> list[str]:
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    for row in rows:  # a Text is not parsed, while a str may contain rich's markup, such as "[red]"
        table.add_row(*(Text(shown(cell)) for cell in row))
    file = StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False,
        highlight=False, soft_wrap=False,
    )  # fmt: skip
    console.print(table)
    return [" " * indent + line.rstrip() if line.strip() else "" for line in file.getvalue()[:-1].split("\n")]
