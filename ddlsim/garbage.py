"""Control of garbage collections around code that creates many long-lived objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
    """Disable garbage collection within the context, or during calls of the decorated function."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def let_age() -> None:
    """Move all objects to the oldest generation, which collections of younger generations skip."""
    if gc.get_freeze_count() == 0:  # otherwise, objects frozen by the application would be thawed
        gc.freeze()
        gc.unfreeze()
