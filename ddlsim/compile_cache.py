"""Where compiled code is kept: in numba's cache, which always works.

numba looks for a folder that it may write to: ``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the user's folder
of caches. Where it finds none it refuses to compile; here a folder of this process and its children serves, until the
process ends, and without even that one compiled code is kept in memory.
"""

from __future__ import annotations

import atexit
import glob
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from numba.core import caching, config
from numba.core.runtime.nrt import rtsys

from ddlsim.compile_messages import teller

_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written"
_full: list[OSError] = []  # what has kept compiled code from being written


class Cache(caching.FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache of a function: quicker to load from, and a full disk is no reason to fail."""

    @property
    def function(self) -> Any:
        """What is compiled."""
        return self._py_func

    @property
    def stem(self) -> str:
        """With what the names of its files begin."""
        return str(self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code, if it is there.

        Without numba's refresh before it, which imports everything that numba knows to compile, and scipy's linear
        algebra: half a second for what is compiled already. Whatever does compile refreshes by itself. Of the refresh,
        code that is compiled already needs only numba's runtime, if it counts references.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code; where that fails, it is not kept."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not _full:
                reason = f"{self.cache_path}: {error.strerror or error}"
                warnings.warn(f"compiled code is not kept: {reason}; make room, or {_REMEDY}", stacklevel=2)
            _full.append(error)


def _no_place() -> bool:
    """Whether numba finds no folder that it may write to."""
    try:
        caching.FunctionCache(_no_place)
    except RuntimeError:
        return True
    return False


def _prepare() -> bool:
    """Find a place for compiled code; whether there is one."""
    if not _no_place():
        return True
    teller.remark = f"no folder for compiled code can be written; {_REMEDY}"
    try:
        folder = tempfile.mkdtemp(prefix="ddlsim-")
    except OSError:
        return False
    atexit.register(_remove, folder, os.getpid())
    vars(config)["CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"] = folder
    return True


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


#: whether compiled code can be kept on disk
KEPT = _prepare()


_caches: list[Cache] = []


def keep(dispatcher: Any) -> Any:
    """Let a compiled function be kept in the cache, if there is one; returns it."""
    if KEPT:
        dispatcher._cache = Cache(dispatcher.py_func)
        _caches.append(dispatcher._cache)
    return dispatcher


def files() -> list[Path]:
    """Return the files of the cache that belong to what has been imported: one index per function, and its code."""
    found = (Path(cache.cache_path).glob(f"{glob.escape(cache.stem)}.*") for cache in _caches)
    return sorted({path for paths in found for path in paths})
