"""Simulations that somebody outside of them may end: whatever runs within `watched`, in all the ways that runs go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Check = Callable[[], None]


def _nobody() -> None:
    pass


_CHECK: ContextVar[Check] = ContextVar("check", default=_nobody)


@contextmanager
def watched(check: Check) -> Iterator[None]:
    """Let every simulation that begins within call `check` now and then while its clock goes on; what that raises ends
    it, without a result.

    A BaseException passes what handles the mistakes of single runs. Work in other processes is not watched.
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def watch() -> Check:
    """Return what a simulation that begins here calls."""
    return _CHECK.get()
