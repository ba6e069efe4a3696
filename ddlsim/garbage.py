"""Control of garbage collections around code that creates many long-lived objects."""

import atexit
import functools
import gc
import io
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def postponed() -> Iterator[None]:
    """Disable garbage collection within the context, or during calls of the decorated function.

    If modules were imported in the meantime, all objects move to the oldest generation, because most of them remain.
    """
    collecting, n_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > n_modules:
            promote_objects()
        if collecting:
            gc.enable()


def promote_objects() -> None:
    """Move all objects to the oldest generation, which collections of younger generations skip."""
    if gc.get_freeze_count() == 0:  # otherwise, objects frozen by the application would be thawed
        gc.freeze()
        gc.unfreeze()


def _skip_last_collections() -> None:
    """Let Python exit without traversing all objects, unless finalizers may do more than free memory (open files)."""
    objects = gc.get_objects()
    with suppress(Exception):  # an application's classes may not be hashable, and its streams may have no buffer
        has_finalizer = functools.cache(lambda kind: hasattr(kind, "__del__") and not _only_frees(kind))
        streams = [stream for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if stream is not None]
        stream_ids = {id(layer) for file in streams for layer in (file, file.buffer, getattr(file.buffer, "raw", None))}
        finalized = itertools.compress(objects, map(has_finalizer, map(type, objects)))
        if all(id(item) in stream_ids or _has_ended(item) for item in finalized):
            gc.freeze()


def _only_frees(kind: type) -> bool:
    return kind is io.BytesIO or kind.__module__.partition(".")[0] in ("llvmlite", "numba")


def _has_ended(one: object) -> bool:
    """Return whether an object is a generator that has nothing left to do; numba's only yield."""
    return isinstance(one, types.GeneratorType) and not (one.gi_suspended and "/numba/" not in one.gi_code.co_filename)


atexit.register(_skip_last_collections)
