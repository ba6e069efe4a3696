"""A store is read wherever it lies, and left as it is."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from study_parts import BASE

import ddlsim
from ddlsim.study import Study, load_table
from ddlsim.study import store as stores

ROOT = Path(ddlsim.__file__).parents[1]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "study ?#%.sqlite"  # characters that mean something in a URI
    Study(BASE, {"workers": [2, 4]}).run(path, jobs=1)
    return path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def with_log(store, folder):
    """Copy a store so that its last change is in the log only, as after a sweep that was killed."""
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("UPDATE points SET status = 'failed', error = 'from the log'")
        connection.commit()
        assert Path(f"{store}-wal").stat().st_size > 0
        copy = folder / "left.sqlite"
        shutil.copyfile(store, copy)
        shutil.copyfile(f"{store}-wal", f"{copy}-wal")
        connection.execute("UPDATE points SET status = 'done', error = ''")
        connection.commit()
    return copy


def test_reading_leaves_a_store_as_it_is(store):
    before = contents(store.parent)
    assert list(before) == [store.name]
    assert load_table(store).counts["done"] == 2
    assert contents(store.parent) == before


@pytest.fixture
def unwritable(monkeypatch):
    """Let SQLite be able to write nowhere but in temporary folders, as on a file system that is only read."""
    opened, tried = stores._opened, []

    def refuse(path, options, timeout):
        tried.append((path, options))
        if options == "mode=rw" and "ddlsim-" not in path:
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DIRECTORY
            raise error
        return opened(path, options, timeout)

    monkeypatch.setattr(stores, "_opened", refuse)
    return tried


def test_where_nothing_can_be_written_the_one_file_is_read(store, unwritable):
    assert load_table(store).counts["done"] == 2
    assert [options for _, options in unwritable] == ["mode=rw", "mode=ro&immutable=1"]


def test_what_is_in_the_log_is_read_too(store, unwritable, tmp_path):
    left = with_log(store, tmp_path)
    before = contents(tmp_path)
    table = load_table(left)
    assert table.frame["error"].tolist() == ["from the log"] * 2
    assert contents(tmp_path) == before
    assert not Path(unwritable[-1][0]).parent.exists()  # the copy


def test_an_error_that_is_none_of_writing_is_said(store, monkeypatch):
    def refuse(*arguments):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    monkeypatch.setattr(stores, "_opened", refuse)
    with pytest.raises(ddlsim.ConfigError, match="disk I/O error; choose another place"):
        load_table(store)


def test_an_empty_file_is_no_store(tmp_path):
    (tmp_path / "empty.sqlite").write_bytes(b"")
    with pytest.raises(ddlsim.ConfigError, match="is a database, but not the store of a study"):
        load_table(tmp_path / "empty.sqlite")
    assert (tmp_path / "empty.sqlite").read_bytes() == b""


@pytest.mark.slow
def test_report_reads_a_real_file_system_that_cannot_be_written(store, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        shutil.copyfile(store, disk / "study.sqlite")
        with_log(store, disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for name, status in (("study", "2 done"), ("left", "2 failed")):
            done = subprocess.run(
                [sys.executable, "-m", "ddlsim", "report", str(disk / f"{name}.sqlite")], text=True, check=False,
                capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert status in done.stdout
        with pytest.raises(ddlsim.ConfigError, match="copy it to a folder that can be written"):
            Study(BASE, {"workers": [2, 4]}).run(disk / "study.sqlite", jobs=1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said_and_what_is_stored_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        small, large = Study(BASE, {"workers": [2, 4]}), Study(BASE, {"workers": [2, 3, 4, 5]}, seeds=3)
        small.run(disk / "study.sqlite", jobs=1)
        n_free = shutil.disk_usage(disk).free
        (disk / "rest").write_bytes(bytes(max(0, n_free - 48 * 1024)))  # the index of the log takes 32 KiB
        with pytest.raises(ddlsim.ConfigError, match=r"full; free some space, then run the study again"):
            large.run(disk / "study.sqlite", jobs=1)
        (disk / "rest").unlink()
        assert load_table(disk / "study.sqlite").counts["done"] >= 2
        assert large.run(disk / "study.sqlite", jobs=1).counts["done"] == 12
    finally:
        subprocess.run(["umount", str(disk)], check=True)
