"""The store of a study: an SQLite file with one row per finished point, under the key of its experiment.

A point is stored in one transaction when it is handed in. A process killed at any moment therefore leaves an intact
file with every point stored so far, thanks to SQLite's write-ahead log (https://www.sqlite.org/wal.html; the file must
be on a local disk). Processes that share a file claim the points that they are about to simulate. A claim ends with the
process that made it: at once if the process was on this machine, else after :data:`LEASE` s.

A store can be opened for reading on read-only media, such as a DVD, a snapshot or another user's folder. SQLite reads a
file with a write-ahead log through a shared-memory index, a file next to it that SQLite must create. If it cannot, a
store with an empty log is read as an immutable file (https://www.sqlite.org/uri.html#uriimmutable), and one that a
killed sweep has left with a log is read from a copy.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, cast

from ddlsim.arguments import NotNegative, Rule, integer, number, one_of
from ddlsim.arguments.annotations import rule_of
from ddlsim.arguments.rules import wrong
from ddlsim.errors import ConfigError, shown
from ddlsim.learning.monitor import Row
from ddlsim.plain import is_unicode
from ddlsim.study.worker import Outcome

#: possible statuses of a point, as in `work`
STATUSES = ("done", "skipped", "failed")
_Status = Annotated[str, one_of(*STATUSES)]
_Setting = Annotated[float, number(infinite=True)] | str | bool
#: a number that may be slightly negative due to rounding; inf: a target that was never reached
_Number, _ToTarget = (Annotated[float, number(-1e-6, infinite=infinite)] for infinite in (False, True))
#: any number, including NaN, for models that have diverged
_Loss = Annotated[float, Rule("a number", lambda value: type(value) in (int, float), plural="numbers")]
#: name in a record -> type, required and optional; other names are numbers
_ALWAYS: dict[str, Any] = {"stop_reason": str, "notes": list[str], "warnings": list[str]}
_ALWAYS["history"] = GenericAlias(list, GenericAlias(tuple, (_Loss,) * len(Row._fields)))
_RECORD = {**_ALWAYS, "loss": _Loss, "n_workers": Annotated[int, integer(1, 2**31 - 1)]}


def _damaged(field: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"the file is damaged: {wrong(value, field, rule)}; restore a copy, or use another file")


def _value(text: object, what: str) -> Any:
    if not isinstance(text, str):
        raise _damaged(what, text, "a string of JSON")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(what, text, "a string of JSON") from None
    if "\\ud" in text.lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise _damaged(what, text, "a string without unpaired surrogates")
    return value


def fields_of(text: object, what: str) -> dict[str, Any]:
    """Return the JSON object in a cell. Raises ConfigError if there is none."""
    value = _value(text, what)
    if not isinstance(value, dict):
        raise _damaged(what, value, "an object")
    return value


def _checked(annotation: Any, value: object, what: str) -> Any:
    """Return a value if an annotation allows it. Raises ConfigError otherwise."""
    try:
        return cast(Rule, rule_of(annotation))(value, what)
    except ConfigError as error:
        raise ConfigError(f"the file is damaged: {error}; restore a copy, or use another file") from None


def paths_in(text: object) -> list[str]:
    """Return the varied paths of a study. Raises ConfigError for invalid text."""
    paths: list[str] = _checked(list[str], _value(text, "axes"), "axes")
    if len(set(paths)) < len(paths):
        raise _damaged("axes", paths, "a list of different strings")
    return paths


def settings_of(text: object, axes: Sequence[str]) -> dict[str, object]:
    """Return a point's value for each of the `axes`. Raises ConfigError for invalid text."""
    settings = fields_of(text, "settings")
    if settings.keys() != set(axes):
        raise _damaged("settings", settings, f"an object with the keys {shown(list(axes))}")
    for path, setting in settings.items():
        _checked(_Setting, setting, f"settings of {shown(path)}")
    return settings


def checked_record(text: object) -> dict[str, object]:
    """Return the numbers of a result. Raises ConfigError, naming the invalid one."""
    record = fields_of(text, "record")
    for name, value in record.items():
        if value is not None or name in _ALWAYS:
            usual = _ToTarget if name.endswith("_to_accuracy") else _Number
            _checked(_RECORD.get(name, usual), value, f"record: {shown(name)}")
    return record


def connected(path: str, timeout: float) -> tuple[sqlite3.Connection, Callable[[], None]]:
    """Return a read-only connection to an existing database, and a function to call after closing it.

    timeout  time in s to wait for another process's transaction
    """
    try:
        return _opened(path, "mode=rw", timeout), lambda: None
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    log = Path(f"{path}-wal")
    if not log.exists() or not log.stat().st_size:
        return _opened(path, "mode=ro&immutable=1", timeout), lambda: None
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
    database = sqlite3.connect(
        f"{Path(path).absolute().as_uri()}?{options}", timeout=timeout, isolation_level=None, uri=True
    )
    try:
        database.execute("PRAGMA query_only = ON")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        database.close()
        raise
    return database


#: "ddls" in the file's header identifies our files (PRAGMA application_id)
APPLICATION_ID = 0x64646C73
#: version of the tables below (PRAGMA user_version); other versions are rejected
SCHEMA_VERSION = 2
#: time in s after which a claim expires unless renewed
LEASE = 60.0
#: time in s that a transaction waits for another process's transaction
BUSY = 60.0
#: maximum number of variables in a statement that all builds of SQLite allow
_MAX_VARIABLES = 500
_ELSEWHERE = "copy it to a folder that can be written, or give another file"
#: SQLite error -> remedy
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space, then run the study again: what is stored stays",
    sqlite3.SQLITE_CANTOPEN: _ELSEWHERE,
    sqlite3.SQLITE_READONLY: _ELSEWHERE,
    sqlite3.SQLITE_BUSY: "another process has been writing for long; try again",
}

_TABLES = """
CREATE TABLE studies (
    study TEXT PRIMARY KEY,      -- digest of the next two
    base TEXT NOT NULL,          -- manifest of the base experiment, JSON
    axes TEXT NOT NULL,          -- what is varied: the dotted paths, JSON
    created REAL NOT NULL        -- seconds since 1970
);
CREATE TABLE members (
    study TEXT NOT NULL,
    position INTEGER NOT NULL,   -- in the order of the design
    key TEXT NOT NULL,           -- of the point
    settings TEXT NOT NULL,      -- dotted path -> value as the table shows it, JSON
    seed INTEGER NOT NULL,
    PRIMARY KEY (study, position)
);
CREATE TABLE points (
    key TEXT PRIMARY KEY,        -- digest of the next one
    experiment TEXT NOT NULL,    -- canonical JSON: all fields, digests of contents, version of ddlsim
    status TEXT NOT NULL,        -- done, skipped or failed
    error TEXT NOT NULL,
    record TEXT NOT NULL,        -- numbers of the result, JSON
    seconds REAL NOT NULL,       -- real time that it took
    finished REAL NOT NULL       -- seconds since 1970
);
CREATE TABLE claims (
    key TEXT PRIMARY KEY,
    owner TEXT NOT NULL,         -- machine and process that simulate the point
    until REAL NOT NULL          -- seconds since 1970
);
"""


@dataclass(frozen=True)
class Member:
    """A point of a study: the key of its result, and its description in the table."""

    key: str
    settings: Mapping[str, object]
    seed: int


class Store:
    """An open store. Raises ConfigError, naming the file, for all errors in it."""

    def __init__(self, path: str | Path | None, *, only_read: bool = False) -> None:
        """Open the store at `path`, creating it if necessary; None: a temporary one in memory.

        With `only_read`, it must exist, nothing is claimed or changed in it, and it may be on read-only media
        (:func:`ddlsim.study.store.connected`).
        """
        self.path = ":memory:" if path is None else str(path)
        self._only_read = only_read
        self._close: Callable[[], None] = lambda: None
        self._owner = f"{platform.node()} {os.getpid()} {uuid.uuid4().hex}"
        if path is not None and not os.path.isdir(Path(path).parent):
            folder = str(Path(path).parent)
            raise ConfigError(f"{path}: cannot be written, because the folder {folder!r} does not exist; create it")
        with self._named():
            if only_read:
                self._db, self._close = connected(self.path, BUSY)
            else:
                self._db = sqlite3.connect(self.path, timeout=BUSY, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._db.close()
            self._close()
            raise

    def _open(self) -> None:
        with self._named():
            application = self._number("PRAGMA application_id")
            if application != APPLICATION_ID:
                if self._only_read or self._number("SELECT count(*) FROM sqlite_master"):
                    raise ConfigError(f"{self.path} is a database, but not the store of a study; use another file")
                self._make()
            version = self._number("PRAGMA user_version")
            if version != SCHEMA_VERSION:
                raise ConfigError(
                    f"{self.path} has version {version} of the format, but this ddlsim reads version "
                    f"{SCHEMA_VERSION}; read it with the version that wrote it, or use another file"
                )
            damage = " ".join(str(self._db.execute("PRAGMA quick_check(1)").fetchone()[0]).split())
            if damage != "ok":
                raise ConfigError(f"{self.path}: the file is damaged ({damage}); restore a copy, or use another file")
            if not self._only_read:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")

    def _make(self) -> None:
        with self._writing():
            if self._number("PRAGMA application_id") == APPLICATION_ID:
                return  # another process was faster
            for statement in _TABLES.split(";\n"):
                if statement.strip():
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")

    def close(self) -> None:
        """Release all claims, and close the file."""
        try:
            if not self._only_read:
                self.release()
        finally:
            self._db.close()
            self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def register(self, study: str, base: Mapping[str, object], axes: Sequence[str], members: list[Member]) -> None:
        """Record the points of a study, replacing those recorded before."""
        rows = [(study, i, m.key, json.dumps(dict(m.settings)), m.seed) for i, m in enumerate(members)]
        with self._writing():
            # the latest study goes last, even if it was there before
            self._db.execute("DELETE FROM studies WHERE study = ?", (study,))
            self._db.execute("DELETE FROM members WHERE study = ?", (study,))
            texts = (json.dumps(dict(base), sort_keys=True), json.dumps(list(axes)))
            self._db.execute("INSERT INTO studies VALUES (?, ?, ?, ?)", (study, *texts, time.time()))
            self._db.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?)", rows)

    def studies(self) -> list[tuple[str, dict[str, object], list[str]]]:
        """Return digest, base manifest and varied paths of each study; the one that ran last comes last."""
        with self._named():
            rows = self._db.execute("SELECT study, base, axes FROM studies ORDER BY created, rowid").fetchall()
            return [(study, fields_of(base, "base"), paths_in(axes)) for study, base, axes in rows]

    def members(self, study: str, axes: Sequence[str]) -> list[Member]:
        """Return the points of a study that varies `axes`, in the order of its design."""
        query = "SELECT key, settings, seed FROM members WHERE study = ? ORDER BY position"
        with self._named():
            rows = self._db.execute(query, (study,)).fetchall()
            if not rows:
                raise ConfigError("the file is damaged: the study has no points; restore a copy, or use another file")
            return [
                Member(str(key), settings_of(settings, axes), int(_checked(NotNegative, seed, "seed")))
                for key, settings, seed in rows
            ]

    def save(self, points: Iterable[tuple[str, str, Outcome]]) -> None:
        """Store finished points (key, experiment, outcome), all or none, and end their claims.

        Points that are already stored are kept, unless they had failed.
        """
        rows = [(k, text, o.status, o.error, json.dumps(o.record), o.seconds, time.time()) for k, text, o in points]
        with self._writing():
            self._db.executemany(
                "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "status = excluded.status, error = excluded.error, record = excluded.record, "
                "seconds = excluded.seconds, finished = excluded.finished WHERE points.status = 'failed'",
                rows,
            )
            self._db.executemany("DELETE FROM claims WHERE key = ?", [(row[0],) for row in rows])

    def outcomes(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Return the outcomes of those points that are stored."""
        query = "SELECT key, status, error, record, seconds FROM points WHERE key IN ({})"
        with self._named():
            return {
                key: Outcome(
                    _checked(_Status, s, "status"), str(e), checked_record(r), _checked(NotNegative, t, "seconds")
                )
                for key, s, e, r, t in self._select(query, keys)
            }

    def experiments(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the experiments of stored points, as manifests in JSON."""
        with self._named():
            rows = self._select("SELECT key, experiment FROM points WHERE key IN ({})", keys)
            for _, text in rows:
                fields_of(text, "experiment")
        return dict(rows)

    def statuses(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the status of those points that are stored."""
        with self._named():
            rows = self._select("SELECT key, status FROM points WHERE key IN ({})", keys)
            return {key: _checked(_Status, status, "status") for key, status in rows}

    def forget_failed(self, keys: Iterable[str]) -> None:
        """Remove failed points, so that they are simulated again."""
        with self._writing():
            self._db.executemany("DELETE FROM points WHERE status = 'failed' AND key = ?", [(k,) for k in keys])

    def claim(self, keys: Sequence[str]) -> list[str]:
        """Claim the points that are neither stored nor claimed by others, and return their keys."""
        with self._writing():
            taken = set(self.statuses(keys))
            for key, owner, until in self._select("SELECT key, owner, until FROM claims WHERE key IN ({})", keys):
                if owner != self._owner and self._alive(owner, until):
                    taken.add(key)
            free = [key for key in keys if key not in taken]
            rows = [(key, self._owner, time.time() + LEASE) for key in free]
            self._db.executemany("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", rows)
        return free

    def renew(self) -> None:
        """Renew all claims."""
        with self._writing():
            self._db.execute("UPDATE claims SET until = ? WHERE owner = ?", (time.time() + LEASE, self._owner))

    def release(self) -> None:
        """Release all claims."""
        with self._writing():
            self._db.execute("DELETE FROM claims WHERE owner = ?", (self._owner,))

    def _alive(self, owner: str, until: float) -> bool:
        machine, process, *_ = [*str(owner).rsplit(" ", 2), ""]
        if machine == platform.node() and process.isascii() and process.isdecimal() and not _is_running(int(process)):
            return False
        return isinstance(until, float) and until > time.time()

    def _select(self, query: str, keys: Iterable[str]) -> list[Any]:
        """Return the rows of a query (tuples) for the given keys."""
        wanted = list(keys)
        rows: list[Any] = []
        with self._named():
            for i in range(0, len(wanted), _MAX_VARIABLES):
                part = wanted[i : i + _MAX_VARIABLES]
                rows += self._db.execute(query.format(",".join("?" * len(part))), part).fetchall()
        return rows

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction: all that is written in it becomes visible at once, or nothing."""
        with self._named():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Prefix errors with the file's name, unless they already contain it."""
        try:
            yield
        except ConfigError as error:
            raise error if str(error).startswith(self.path) else ConfigError(f"{self.path}: {error}") from None
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0)  # Python's own errors for invalid text have no code
            remedy = _REMEDIES.get(code & 0xFF, "choose another place")
            raise ConfigError(f"{self.path}: the store cannot be read or written: {error}; {remedy}") from None
        except UnicodeDecodeError:  # SQLite's message contains the damaged text
            raise ConfigError(f"{self.path}: the file is damaged; restore a copy, or use another file") from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self.path}: not the store of a study, or a damaged one ({error}); use another file"
            ) from None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):  # OverflowError: not a valid process id
        return False
    return True
