"""Conditions on rows such as ``workers <= 4 and strategy == all-reduce``: comparisons joined by `and`, nothing else.

What a user types is compared, never evaluated as code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddlsim.errors import ConfigError, shown, unknown_name

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "==": operator.eq, "=": operator.eq, "<": operator.lt,
    ">": operator.gt,
}  # fmt: skip
_COMPARISON = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(?:'([^']*)'|\"([^\"]*)\"|([^\s'\"<>=]+))\s*")

Cell = float | int | str | None


@dataclass(frozen=True)
class Condition:
    """Comparisons (column, operator, value) that all must hold."""

    text: str
    comparisons: tuple[tuple[str, str, float | str], ...]

    def holds(self, row: Mapping[str, Cell]) -> bool:
        """Return whether a row fulfils the condition; an empty cell fulfils only ``!=``."""
        return all(_compare(row[column], sign, value) for column, sign, value in self.comparisons)


def parse_condition(text: str, numbers: Sequence[str], texts: Sequence[str]) -> Condition:
    """Return the condition in `text` on columns that hold `numbers` or `texts`.

    Raises ConfigError for anything but ``column op value`` joined by ``and``, unknown columns, texts that are compared
    by size, and values that are no number where the column holds numbers.
    """
    found: list[tuple[str, str, float | str]] = []
    for part in re.split(r"\band\b", text):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"condition {shown(text)}: {shown(part.strip())} is no comparison; write it like "
                "'workers <= 4 and batch_size == 32'"
            )
        column, sign = match[1], match[2]
        value = next(group for group in match.groups()[2:] if group is not None)
        if column in numbers:
            try:
                found.append((column, sign, float(value)))
            except ValueError:
                raise ConfigError(
                    f"condition {shown(text)}: {column} is a number, not {shown(value)}; correct it"
                ) from None
        elif column in texts:
            if sign not in ("==", "=", "!="):
                raise ConfigError(f"condition {shown(text)}: {column} is a text; compare it by == or !=")
            found.append((column, sign, value))
        else:
            raise unknown_name("column", column, [*numbers, *texts], f"condition {shown(text)}")
    return Condition(text, tuple(found))


def _compare(cell: Cell, sign: str, value: float | str) -> bool:
    if cell is None:
        return sign == "!="
    if isinstance(value, str):
        return (str(cell) == value) == (sign != "!=")
    return _OPERATORS[sign](float(cell), value)
