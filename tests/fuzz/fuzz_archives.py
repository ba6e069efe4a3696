"""Malformed stores of studies (SQLite) and saved runs (npz): every cell and part replaced, left out, renamed."""

import io
import json
import sqlite3
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from fuzz_mutations import SOURCES, VALUES, Raw, changed, json_text, places

from ddlsim.learning import checkpoint as saved_runs
from ddlsim.learning.values import Replay
from ddlsim.optim import OptimizerState
from ddlsim.study.store import APPLICATION_ID, SCHEMA_VERSION, Member, Store
from ddlsim.study.table import OF_RUNS
from ddlsim.study.worker import Outcome

CELLS = [None, "", "x", b"\0\xff", -1, 10**12, 2**63 - 1, 1.5, float("inf"), "null", "[]", "{}", "1", '"x"', "NaN",
         '{"a": []}', '["a", "a"]', "[" * 5000, '{"a": ' * 5000, "9" * 5000]  # fmt: skip


def store():
    """The bytes of a store with one study of two points and a claim."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        with Store(path) as opened:
            members = [Member("a", {"workers": 2, "x": "1 Gbit/s"}, 0), Member("b", {"workers": 4, "x": "none"}, 0)]
            base = {"cluster": {"name": "c"}, "model": {"name": "m"}, "steps": 2}
            opened.register("study", base, ["workers", "x"], members)
            row = [1.0] * 11
            record = dict.fromkeys(OF_RUNS, 1.0) | {
                "n_workers": 2, "stop_reason": "steps", "notes": ["a note"], "warnings": [], "cost": None, "loss": 0.5,
                "accuracy": 0.5, "updates": 4, "epochs": 1.0, "history": [row, row], "time_to_accuracy": 1.0,
            }  # fmt: skip
            manifest = json.dumps({"cluster": {"name": "c"}, "seed": 0})
            opened.save([("a", manifest, Outcome("done", "", record, 0.1))])
            opened.save([("b", "{}", Outcome("failed", "why", {}, 0.1))])
        db = sqlite3.connect(path)
        db.execute("PRAGMA journal_mode = DELETE")
        db.close()
        return path.read_bytes()


def _tables(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        path.write_bytes(data)
        db = sqlite3.connect(path)
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {}
        for name in names:
            rows = db.execute(f"SELECT * FROM {name}")
            found[name] = ([column[0] for column in rows.description], [list(row) for row in rows])
        db.close()
        return found


def _written(tables, application=APPLICATION_ID, version=SCHEMA_VERSION):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        db = sqlite3.connect(path)
        for name, (columns, rows) in tables.items():
            db.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", rows)
        db.execute(f"PRAGMA application_id = {application}")
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
        db.close()
        return path.read_bytes()


def stores(data):
    """Yield every mutation of a store."""
    tables = _tables(data)

    def with_cell(name, i, j, cell):
        columns, rows = tables[name]
        after = [*rows[:j], [*rows[j][:i], cell, *rows[j][i + 1 :]], *rows[j + 1 :]]
        return _written({**tables, name: (columns, after)})

    for name, (columns, rows) in tables.items():
        yield f"no table {name}", partial(_written, {k: v for k, v in tables.items() if k != name})
        yield f"table {name} twice as long", partial(_written, {**tables, name: (columns, rows * 2)})
        yield f"table {name} empty", partial(_written, {**tables, name: (columns, [])})
        for i, column in enumerate(columns):
            renamed = [*columns[:i], "surprise", *columns[i + 1 :]]
            yield f"{name}.{column} renamed", partial(_written, {**tables, name: (renamed, rows)})
            for j, row in enumerate(rows):
                for cell in [*CELLS, *_json_cells(row[i])]:
                    yield f"{name}.{column}[{j}] = {str(cell)[:60]!r}", partial(with_cell, name, i, j, cell)
    for version in (-1, 0, 2, 2**31 - 1):
        yield f"version {version}", partial(_written, tables, version=version)
    yield "another application", partial(_written, tables, application=1)
    yield "no tables", partial(_written, {})


def _json_cells(text):
    """Return what a cell that holds JSON may hold instead."""
    try:
        tree = json.loads(text)
    except (TypeError, ValueError):
        return
    for path in places(tree):
        for value in [*VALUES[:40], *map(Raw, SOURCES["json"])]:
            yield json_text(changed(tree, path, value))


def saved_run():
    """The bytes of a saved run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        state = OptimizerState((np.ones(3),), 4)
        replay = Replay(9, {0: np.arange(4.0), 1: (1, "a", {"b": [2.5, None]}), 3: state}, frozenset({7}), (0.25, 3.0))
        checkpoint = saved_runs.Checkpoint(replay, (0.5, 0.25), (1.0, 2.0))
        saved_runs.write(path, checkpoint, {"ddlsim": "0.1.0", "seed": 3, "training": {"data": "x"}})
        return path.read_bytes()


def saved_mutations(data):
    """Yield every mutation of a saved run; the digest is that of what it holds, as if somebody had meant it."""
    with np.load(io.BytesIO(data)) as file:
        parts = {name: file[name] for name in file.files if name != "digest"}
    text = json.loads(parts["run"].tobytes())

    def written(parts, *, digest=True):
        if digest:
            parts = {**parts, "digest": np.frombuffer(saved_runs._digest(parts), np.uint8)}
        made = io.BytesIO()
        np.savez(made, **parts)
        return made.getvalue()

    def with_value(path, value):
        source = json_text(changed(text, path, value)).encode("utf-8", "surrogatepass")
        return written({**parts, "run": np.frombuffer(source, np.uint8)})

    yield "no digest", partial(written, parts, digest=False)
    for path in places(text):
        for value in [*VALUES, *map(Raw, SOURCES["json"])]:
            yield f"{'.'.join(map(str, path))} = {str(value)[:40]!r}", partial(with_value, path, value)
    arrays = [np.zeros(0), np.zeros((2, 2)), np.array(1.0), np.array([np.nan]), np.array([np.inf]), np.array([-1.0]),
              np.array([2.0, 1.0]), np.array([1]), np.array(["x"]), np.array([1j]), np.array([True])]  # fmt: skip
    for name in parts:
        yield f"no {name}", partial(written, {k: v for k, v in parts.items() if k != name})
        for array in arrays:
            yield f"{name} = {array!r}", partial(written, {**parts, name: array})
    yield "more", partial(written, {**parts, "array 99": np.zeros(2)})
