"""Postponed garbage collections, for code that creates many objects which stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
    """Collect no garbage within the context, or the decorated function."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def let_age() -> None:
    """Move all objects to the oldest generation, which the next young collections skip."""
    if gc.get_freeze_count() == 0:  # otherwise, objects frozen by the application would be thawed
        gc.freeze()
        gc.unfreeze()
