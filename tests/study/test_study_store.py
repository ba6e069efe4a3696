"""The store: what survives, what is simulated again, what is refused; and the tables that come out."""

import math
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import scipy
from study_parts import BASE, VARY, Notes, Raises

import ddlsim
from ddlsim.study import Study, load_table
from ddlsim.study.store import SCHEMA_VERSION, Member, Store
from ddlsim.study.table import Table
from ddlsim.study.worker import Outcome


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "notes"


@pytest.fixture
def noted(notes):
    """A base experiment that counts how often it is simulated."""
    return BASE.with_(strategy=Notes(notes=str(notes)))


def simulated(notes):
    """Return the numbers of workers that have been simulated since the last look."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return [int(line.split()[0]) for line in lines]


# ---------------------------------------------------------------- what is simulated again


def test_what_is_stored_is_not_simulated_again(tmp_path, noted, notes):
    store = tmp_path / "study.sqlite"
    first = Study(noted, {"workers": [2, 3]}).run(store, jobs=1)
    assert sorted(simulated(notes)) == [2, 3]
    again = Study(noted, {"workers": [2, 3]}).run(store, jobs=1)
    assert simulated(notes) == []
    pd.testing.assert_frame_equal(again.frame, first.frame, check_exact=True)
    Study(noted, {"workers": [3, 4]}, seeds=2).run(store, jobs=1)  # new: 3 with seed 1, and 4
    assert sorted(simulated(notes)) == [3, 4, 4]
    assert load_table(store).frame["workers"].tolist() == [3, 3, 4, 4]


def test_equal_points_are_simulated_once(noted, notes):
    table = Study(noted, {"workers": [2, 3], "speed": [None, [1.0, 1.0]]}).run(jobs=1)
    assert table.frame["status"].tolist() == ["done", "done", "done", "skipped"]
    simulated(notes)
    Study(noted, {"workers": [2], "cluster.nic.bandwidth": ["8 Gbit/s", "1 GB/s"]}).run(jobs=1)
    assert simulated(notes) == [2]


def test_changed_data_are_other_points(tmp_path, noted, notes):
    data = ddlsim.load_digits()
    for part in (data, data.take(np.arange(1000)), data):
        base = noted.with_(model="digits-cnn", training=ddlsim.Training(part, updates=2))
        Study(base, {"workers": [2]}).run(tmp_path / "study.sqlite", jobs=1, add=True)
    assert simulated(notes) == [2, 2]


def test_another_version_of_ddlsim_starts_anew(tmp_path, noted, notes, monkeypatch):
    Study(noted, {"workers": [2]}).run(tmp_path / "study.sqlite", jobs=1)
    monkeypatch.setattr(ddlsim, "__version__", "99.0")
    Study(noted, {"workers": [2]}).run(tmp_path / "study.sqlite", jobs=1)
    assert simulated(notes) == [2, 2]


def test_failed_points_keep_their_error_and_stop_nothing(tmp_path, notes):
    store = tmp_path / "study.sqlite"
    vary = {"strategy": [Raises(), Notes(notes=str(notes))], "workers": [2, 3]}
    frame = Study(BASE, vary).run(store, jobs=1).frame
    assert frame["status"].tolist() == ["failed", "failed", "done", "done"]
    assert frame["error"][0].startswith("ZeroDivisionError: no such luck (in start, line ")
    assert math.isnan(frame["throughput"][0])
    simulated(notes)
    with Store(store) as opened:
        finished = opened._db.execute("SELECT key, finished FROM points WHERE status = 'failed'").fetchall()
    table = Study(BASE, vary).run(store, jobs=1, retry_failed=True)
    assert simulated(notes) == []
    assert table.counts == {"done": 2, "skipped": 0, "failed": 2, "missing": 0}
    with Store(store) as opened:
        again = opened._db.execute("SELECT key, finished FROM points WHERE status = 'failed'").fetchall()
    assert [key for key, _ in again] == [key for key, _ in finished]
    assert all(b[1] > a[1] for a, b in zip(finished, again, strict=True))
    assert "failed 2: ZeroDivisionError" in str(table)


# ---------------------------------------------------------------- files that cannot be used


def test_a_store_of_another_study_is_refused(tmp_path):
    store = tmp_path / "study.sqlite"
    Study(BASE, {"workers": [2]}).run(store, jobs=1)
    other = Study(BASE.with_(steps=3), {"workers": [2]})
    with pytest.raises(
        ddlsim.ConfigError, match=r"another study, whose base experiment has steps = 2 instead of 3; .* add=True"
    ):
        other.run(store, jobs=1)
    assert other.run(store, jobs=1, add=True).counts["done"] == 1
    assert Study(BASE, {"workers": [2, 3]}).run(store, jobs=1).counts["done"] == 2


def older(path):
    with_version(path, SCHEMA_VERSION - 1)


def newer(path):
    with_version(path, SCHEMA_VERSION + 1)


def with_version(path, version):
    Study(BASE, {"workers": [2]}).run(path, jobs=1)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def foreign(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()


def damaged(path):
    Study(BASE, {"workers": [1, 2, 3, 4]}, seeds=8).run(path, jobs=1)
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096):
        data[4096 * page + 8 : 4096 * page + 200] = b"\xff" * 192
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (older, f"has version {SCHEMA_VERSION - 1} of the format, but this ddlsim reads version {SCHEMA_VERSION}"),
        (newer, f"has version {SCHEMA_VERSION + 1} of the format, but this ddlsim reads version {SCHEMA_VERSION}"),
        (foreign, "is a database, but not the store of a study"),
        (damaged, "damaged"),
        (
            lambda path: path.write_text("not a database, but long enough to be one\n" * 99),
            "not the store of a study, or a damaged one",
        ),
        (lambda path: path.mkdir(), "the store cannot be read or written"),
    ],
    ids=["older", "newer", "foreign", "damaged", "text", "folder"],
)
def test_files_that_are_no_stores(tmp_path, make, message):
    path = tmp_path / "study.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ddlsim.ConfigError) as error:
        Study(BASE, {"workers": [2]}).run(path, jobs=1)
    assert str(error.value).startswith(f"{path}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert before == (path.read_bytes() if path.is_file() else b"")


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(ddlsim.ConfigError, match=r"because the folder .* does not exist"):
        Study(BASE, {"workers": [2]}).run(tmp_path / "nowhere" / "study.sqlite")
    with pytest.raises(ddlsim.ConfigError, match="no such file"):
        load_table(tmp_path / "study.sqlite")
    Store(tmp_path / "empty.sqlite").close()
    with pytest.raises(ddlsim.ConfigError, match="contains no study yet"):
        load_table(tmp_path / "empty.sqlite")


@pytest.mark.parametrize(("table", "column", "cell", "words"), [
    ("studies", "axes", '{"a": 1}', "axes = {'a': 1}: must be a list of strings"),
    ("studies", "axes", "null", "axes = None: must be"),
    ("studies", "base", "[]", r"base = \[\]: must be an object"),
    ("members", "settings", "[1]", "settings = .*: must be an object"),
    ("members", "settings", '{"workers": []}', "settings of 'workers' = .*: must be a number, a string"),
    ("members", "settings", "{}", "settings = {}: must be an object with the keys"),
    ("members", "seed", "x", "seed = 'x': must be a finite, non-negative number"),
    ("points", "status", "fine", "status = 'fine': must be 'done', 'skipped' or 'failed'"),
    ("points", "record", "[" * 5000, "record = .*: must be a string of JSON"),
    ("points", "record", '{"throughput": NaN}', "record: 'throughput' = nan: must be finite"),
    ("points", "record", '{"throughput": -1}', "record: 'throughput' = -1: must be finite and at least -1e-06"),
    ("points", "record", '{"n_workers": 1.5}', "record: 'n_workers' = 1.5: must be a positive integer"),
    ("points", "record", '{"notes": [1]}', r"record: 'notes'\[0] = 1: must be a string"),
    ("points", "record", '{"history": [[1, 2]]}', r"record: 'history'\[0] = .*: must be a list of 11 numbers"),
])  # fmt: skip
def test_cells_of_the_wrong_kind_are_named(table, column, cell, words, tmp_path):
    path = tmp_path / "study.sqlite"
    with Store(path) as store:
        store.register("study", {"steps": 1}, ["workers"], [Member("a", {"workers": 2}, 0)])
        store.save([("a", "{}", Outcome("done", record={"throughput": 1.0}))])
        store._db.execute(f"UPDATE {table} SET {column} = ?", (cell,))
    with pytest.raises(ddlsim.ConfigError, match=f"study.sqlite: the file is damaged: {words}"):
        load_table(path)


# ---------------------------------------------------------------- sharing


def test_claims_keep_others_off_until_they_end(tmp_path):
    path = tmp_path / "study.sqlite"
    with Store(path) as one, Store(path) as two:
        assert one.claim(["a", "b"]) == ["a", "b"]
        assert one.claim(["a"]) == ["a"]
        assert two.claim(["a", "b", "c"]) == ["c"]
        one.save([("a", "text of a", Outcome("done", record={"time_to_accuracy": math.inf}))])
        assert two.claim(["a", "b"]) == []
        one.release()
        assert two.claim(["a", "b"]) == ["b"]
        assert two.outcomes(["a", "b"])["a"].record == {"time_to_accuracy": math.inf}


@pytest.mark.slow
def test_claims_of_dead_processes_are_void(tmp_path):
    path = tmp_path / "study.sqlite"
    script = f"from ddlsim.study.store import Store; import os; s = Store({str(path)!r}); s.claim(['a']); os._exit(0)"
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
    with Store(path) as store:
        assert store._db.execute("SELECT count(*) FROM claims").fetchone() == (1,)
        assert store.claim(["a"]) == ["a"]


def test_a_finished_point_is_not_overwritten(tmp_path):
    with Store(tmp_path / "study.sqlite") as store:
        store.save([("a", "", Outcome("failed", "first"))])
        store.save([("a", "", Outcome("done", record={"n": 1}))])
        store.save([("a", "", Outcome("failed", "late"))])
        assert store.outcomes(["a"])["a"].record == {"n": 1}


# ---------------------------------------------------------------- tables


def test_the_table_says_what_the_results_say():
    study = Study(BASE, VARY, seeds=2)
    frame = study.run(jobs=1).frame
    for point, (_, row) in zip(study.points, frame.iterrows(), strict=True):
        result = ddlsim.simulate(point.experiment)
        assert row["throughput"] == result.throughput
        assert row["efficiency"] == result.efficiency
        assert row["communication_share"] == result.shares["communication"]
        assert row["seed"] == point.seed
        assert row["n_workers"] == row["workers"] == result.n_workers


def test_means_have_student_t_intervals():
    table = Study(BASE, {"workers": [2, 4]}, seeds=4).run(jobs=1)
    for i, workers in enumerate((2, 4)):
        values = table.frame.loc[table.frame["workers"] == workers, "throughput"]
        low, high = scipy.stats.t.interval(0.95, 3, values.mean(), scipy.stats.sem(values))
        row = table.summary.iloc[i]
        assert (row["n"], row["throughput"]) == (4, pytest.approx(values.mean()))
        assert (row["throughput_low"], row["throughput_high"]) == (pytest.approx(low), pytest.approx(high))


def made(rows, axes=("workers",)):
    """A table of made-up numbers: {axis: value, metric: number}."""
    from ddlsim.study.store import Member

    members = [Member(str(i), {axis: row[axis] for axis in axes}, 0) for i, row in enumerate(rows)]
    records = ({k: v for k, v in row.items() if k not in axes} for row in rows)
    outcomes = {str(i): Outcome("done", record={"n_workers": 1, **r}) for i, r in enumerate(records)}
    return Table(list(axes), members, outcomes)


def test_the_front_has_what_none_beats():
    """(throughput, cost): 1 and 2 are on the front; 3 costs more than 2 for less; 4 equals 2; 5 has no price."""
    rows = [(10.0, 1.0), (30.0, 2.0), (20.0, 2.5), (30.0, 2.0), (99.0, None)]
    table = made([{"workers": i + 1, "throughput": t, "cost": c} for i, (t, c) in enumerate(rows)])
    assert table.pareto("throughput", "cost")["workers"].tolist() == [2, 4, 1]
    assert table.pareto("cost", "throughput")["workers"].tolist() == [1, 2, 4]
    assert table.best("throughput", 2)["workers"].tolist() == [5, 2]
    assert table.best("cost")["workers"].tolist() == [1]


def test_a_target_that_is_never_reached_is_not_among_the_best():
    table = made([{"workers": w, "time_to_accuracy": t} for w, t in ((1, math.inf), (2, 5.0), (3, 7.0))])
    assert table.best("time_to_accuracy", 5)["workers"].tolist() == [2, 3]
    assert "never" in str(table)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.best("throughputt"), "did you mean 'throughput'?"),
        (lambda t: t.best("cost"), r"no configuration has a known cost.*cluster.with_costs\(price="),
        (lambda t: t.best("accuracy"), "set training in the base experiment"),
        (lambda t: t.pareto("cost"), "needs at least two metrics"),
        (lambda t: t.save("table.xlsx"), "unknown format '.xlsx'"),
        (lambda t: t.plot_scaling(), "vary 'workers'"),
    ],
    ids=["name", "price", "training", "one", "format", "scaling"],
)
def test_questions_that_have_no_answer(ask, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        ask(made([{"workers": 4, "throughput": 1.0}]))


def test_a_study_is_asked_after_it_has_run():
    study = Study(BASE, {"workers": [2, 4]})
    with pytest.raises(ddlsim.ConfigError, match="the study has not been run"):
        study.best()
    study.run(jobs=1)
    assert study.best()["workers"].tolist() == [4]


@pytest.mark.parametrize("suffix", [".csv", pytest.param(".parquet", marks=pytest.mark.slow), ".json"])
def test_tables_are_written_and_read_back(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pip install 'ddlsim[parquet]'")
    table = Study(BASE, VARY).run(jobs=1)
    path = tmp_path / f"table{suffix}"
    table.save(path)
    read = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".json": pd.read_json}[suffix](path)
    assert read["throughput"].tolist() == pytest.approx(table.frame["throughput"].tolist(), rel=1e-9)
    assert read["strategy"].tolist() == table.frame["strategy"].tolist()


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    cluster = BASE.cluster.with_costs(price="1 USD/h")
    study = Study(BASE.with_(cluster=cluster), VARY, seeds=2)
    study.run(jobs=1)
    lines = study.plot_scaling(tmp_path / "scaling.png").get_lines()
    assert [float(y) for y in lines[-1].get_ydata()] == pytest.approx(
        [study.best("throughput", 12).query("workers == 2")["throughput"].max() * n / 2 for n in (2, 4)]
    )
    study.plot_scaling(tmp_path / "efficiency.png", metric="efficiency")
    study.plot_pareto("throughput", "cost_per_sample", tmp_path / "pareto.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("scaling", "efficiency", "pareto"))
