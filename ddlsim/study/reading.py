"""Opening a store to read it, also where nothing can be written: a DVD, a snapshot, somebody else's folder.

A file with a write-ahead log is read through an index in shared memory, a file beside it, which SQLite has to make.
Where it cannot: a store whose log is empty is all in its one file, which nobody can change meanwhile
(https://www.sqlite.org/uri.html#uriimmutable); one that a killed sweep has left with a log is read in a copy.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path


def connected(path: str, timeout: float) -> tuple[sqlite3.Connection, Callable[[], None]]:
    """Return a connection to an existing database that only reads, and what to call when it has been closed.

    timeout  s to wait for a transaction of another process
    """
    try:
        return _opened(path, "mode=rw", timeout), _nothing
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    log = Path(f"{path}-wal")
    if not log.exists() or not log.stat().st_size:
        return _opened(path, "mode=ro&immutable=1", timeout), _nothing
    folder = tempfile.TemporaryDirectory(prefix="ddlsim-")
    try:
        copy = Path(folder.name) / "store.sqlite"
        shutil.copyfile(path, copy)
        shutil.copyfile(log, f"{copy}-wal")
        return _opened(str(copy), "mode=rw", timeout), folder.cleanup
    except BaseException:
        folder.cleanup()
        raise


def _opened(path: str, options: str, timeout: float) -> sqlite3.Connection:
    database = sqlite3.connect(f"{Path(path).absolute().as_uri()}?{options}", timeout, isolation_level=None, uri=True)
    try:
        database.execute("PRAGMA query_only = ON")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        database.close()
        raise
    return database


def _nothing() -> None:
    pass
