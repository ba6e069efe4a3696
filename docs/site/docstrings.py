"""Our docstrings as Sphinx reads them: plain text with tables of arguments, in which stars and bars mean themselves.

A table of arguments is lines "name   what it is", the second column continued below itself, or the name on a line of
its own and what it is below. Either becomes a definition list. What is indented without being part of a list is a
formula or output, and stays as it is written. Only ````code````, `` `names` `` and roles are markup.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NAMES = r"[`\"*]*[\w.]+[`\"]*(?:, [`\"*]*[\w.]+[`\"]*)*"
ROW = re.compile(rf"({NAMES})(?: {{2,}}(\S.*)|$)")
ITEM = re.compile(r"(?:[-*+]|\d+\.) +\S")
MARKUP = re.compile(r"(``.+?``|(?::\w+)?:?`[^`]+`)")
SPECIAL = re.compile(r"([*|\\]|(?<=\w)_(?!\w)|(?<=\w):(?=\w))")  # the last one is no scheme of an address


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    blocks = _blocks(lines)
    written: list[str] = []
    in_list = False
    for block in blocks:
        formula = " <- " in (text := " ".join(block)) and "`" not in text
        if formula or (block[0].startswith(" ") and not in_list):
            written += ["::", "", *(f"    {line}" for line in block)]
        elif block[0].startswith(">>>"):
            written += block
        else:
            in_list = bool(ITEM.match(block[0])) or (in_list and block[0].startswith(" "))
            written += _block(block)
        written.append("")
    return written


def _blocks(lines: list[str]) -> list[list[str]]:
    """Return the runs of lines without a blank one."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _block(block: list[str]) -> list[str]:
    """Return a paragraph, a list or a table, or one after the other."""
    written: list[str] = []
    n, column = 0, 0
    while n < len(block):
        row = _row(block, n, column)
        if row is None:
            if ITEM.match(block[n]) and written and not ITEM.match(block[n - 1]) and not block[n - 1].startswith(" "):
                written.append("")  # a list needs a blank line before it, which our docstrings leave out
            written.append(_escaped(block[n]))
            n += 1
            continue
        names, said, column = row
        n += 1
        while n < len(block) and _indent(block[n]) >= 4:
            said.append(block[n].strip())
            n += 1
        if written and not written[-1].startswith("    "):
            written.append("")
        written += [", ".join(f"``{name.strip('`')}``" for name in names.split(", "))]
        written += [f"    {_escaped(line)}" for line in said]
        if n < len(block) and _row(block, n, column) is None:
            written.append("")
    return written


def _row(block: list[str], n: int, column: int) -> tuple[str, list[str], int] | None:
    """Return names, what is said beside them and the column where that starts, if the line is a row of a table."""
    line = block[n]
    match = ROW.match(line)
    if match and match[2]:
        return match[1], [match[2]], match.start(2)
    if match and n + 1 < len(block) and _indent(block[n + 1]) >= 4:
        return match[1], [], column
    in_table = column and len(line) > column and line[column - 1] == " " and re.fullmatch(NAMES, line[: column - 1])
    return (line[: column - 1], [line[column:]], column) if in_table else None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escaped(line: str) -> str:
    """Return a line in which only code, names and roles are markup."""
    item = ITEM.match(line)
    start = 1 if item else 0
    parts = MARKUP.split(line[start:])
    return line[:start] + "".join(part if n % 2 else SPECIAL.sub(r"\\\1", part) for n, part in enumerate(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect this to autodoc."""

    def docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
        inherited = what == "data" and "\n".join(lines).strip() == (type(thing).__doc__ or "").strip()
        lines[:] = [] if inherited else as_rst(lines)

    app.connect("autodoc-process-docstring", docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
