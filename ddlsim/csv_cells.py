"""Cells of CSV files that no spreadsheet takes for a formula.

A text that begins with one of ``= + - @`` or with white space of the first kind (tabulator, line ends) is run by
spreadsheets when the file is opened (OWASP, "CSV Injection"): such cells begin with an apostrophe. Numbers stay as they
are. Control characters are written out as everywhere (:mod:`ddlsim.printable`).
"""

from __future__ import annotations

import re

from ddlsim.printable import shown

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")


def guarded(text: str) -> str:
    """Return what to write for `text`, so that no program takes it for a formula."""
    text = shown(text)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def unguarded(cell: str) -> str:
    """Return the text that :func:`guarded` has made `cell` from (its control characters stay written out)."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text[:1] in "+-"
