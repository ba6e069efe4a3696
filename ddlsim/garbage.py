"""Control of garbage collections around code that creates many long-lived objects."""

import atexit
import gc
import io
import sys
import types
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


def _skip_last_collections() -> None:
    """Let Python exit without traversing all objects, unless finalizers may do more than free memory (open files)."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if hasattr(kind, "__del__") and not _only_frees(kind)}
    streams = [stream for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if stream is not None]
    known = {id(part) for stream in streams for part in (stream, stream.buffer, getattr(stream.buffer, "raw", None))}
    if all(id(one) in known for one in objects if type(one) in kinds):
        gc.freeze()


def _only_frees(kind: type) -> bool:
    return kind in (types.GeneratorType, io.BytesIO) or kind.__module__.partition(".")[0] in ("llvmlite", "numba")


atexit.register(_skip_last_collections)
