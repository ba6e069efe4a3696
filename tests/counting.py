"""Work counted instead of timed: a busy machine changes nothing."""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted(function: Callable[[], T]) -> tuple[T, int]:
    """Return what a function returns, and how many calls it made, of Python's functions and of compiled ones."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, calls
