"""How the kernel is compiled: what is inlined, what is cached on disk, and when a cached kernel is too old."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numba as nb
from numba.core import event

__all__ = ["announced", "called", "entry", "inlined", "merged", "source_stamp"]

#: A compiled function takes a view of a `Net` and numbers; numba infers the types.
_Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

#: The kernel never allocates, so it needs no reference counting (nrt).
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}

#: What only compiled code calls needs no way in from Python, which would take two fifths of the compile time.
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

#: For the parts of the kernel: inlined, so that the addresses of the arrays (ddlsim.network.view) stay in registers.
inlined: _Decorator = nb.njit(forceinline=True, **_INNER)

#: For parts that are called in one place: their code becomes part of their caller's before it is compiled.
#: (Not for all of those: numba looks through the whole caller for each of them.)
merged: _Decorator = nb.njit(inline="always", **_OPTIONS)

#: For hot loops over a few arrays: called, so that they have the processor's registers for themselves. (Without
#: the option, it would be taken over from the caller.)
called: _Decorator = nb.njit(forceinline=False, **_INNER)

#: For what Python calls.
entry: _Decorator = nb.njit(cache=True, **_OPTIONS)


def source_stamp() -> int:
    """Return a hash of the package's source files.

    numba looks only at the file of the function that it has cached, not at those inlined into it; entry points
    refer to this number, so that it becomes part of the key under which they are cached.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


class _Announcer(event.Listener):
    """Says on stderr that numba compiles the function that takes longest, when it does: not when it is in the cache."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__qualname__ == self.name and multiprocessing.parent_process() is None:
            text = "ddlsim: compiling the event kernel, once; this takes about half a minute"
            print(text, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


def announced(function: Callable[..., Any]) -> None:
    """Let the compilation of an entry point be announced to people who wait for it."""
    event.register("numba:compile", _Announcer(function.__qualname__))
