"""When a kernel in numba's cache is too old, and what people are told while it is compiled."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import event

from ddlsim import compiler


def source_stamp() -> int:
    """Return a hash of the package's source files, and of the compiler's.

    numba looks only at the file of the function that it has cached, not at those inlined into it; entry points
    refer to this number, so that it becomes part of the key under which they are cached.
    """
    digest = hashlib.sha256()
    for path in [Path(compiler.__file__), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


class _Announcer(event.Listener):
    """Says on stderr that numba compiles the function that takes longest, when it does: not when it is in the cache."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__qualname__ == self.name and multiprocessing.parent_process() is None:
            text = "ddlsim: compiling the event kernel, once; this takes 10 to 20 seconds"
            print(text, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


def announced(function: Callable[..., Any]) -> None:
    """Let the compilation of an entry point be announced to people who wait for it."""
    event.register("numba:compile", _Announcer(function.__qualname__))
