"""The same study wherever it is simulated, and whatever dies meanwhile."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
from study_parts import BASE, VARY, Kills, Notes

import ddlsim
from ddlsim.study import Study, load_table
from ddlsim.study.content import Digests
from ddlsim.study.executors import open_pool
from ddlsim.study.parcels import Packer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def expected():
    """The table of the study, simulated in this process."""
    return Study(BASE, VARY, seeds=2).run(jobs=1).frame


def same(table, frame):
    pd.testing.assert_frame_equal(table.frame, frame, check_exact=True)


def test_threads_give_the_same_table(expected):
    with ThreadPoolExecutor(3) as executor:
        same(Study(BASE, VARY, seeds=2).run(executor=executor), expected)


def test_processes_give_the_same_table_and_compile_nothing(expected):
    same(Study(BASE, VARY, seeds=2).run(jobs=2), expected)
    digests = Digests()
    pool = open_pool(None, 2, Packer(digests), [BASE, BASE])
    try:
        assert pool._executor.submit(n_compiled, BASE).result() == 0
    finally:
        pool.close(at_once=False)


def n_compiled(experiment):
    """How many kernels a fresh process has to compile because the cache on disk does not have them."""
    from ddlsim.network import kernel

    ddlsim.simulate(experiment)
    entries = (kernel.advance, kernel.join, kernel.send, kernel.send_one)
    assert sum(sum(entry.stats.cache_hits.values()) for entry in entries) > 0
    return sum(sum(entry.stats.cache_misses.values()) for entry in entries)


def test_an_executor_of_the_user_stays_open(expected):
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        same(Study(BASE, VARY, seeds=2).run(executor=executor), expected)
        assert executor.submit(os.getpid).result() != os.getpid()


def test_training_gives_the_same_curves_everywhere():
    training = ddlsim.Training("digits", rate=0.1, updates=30, evaluate_every=10, target_accuracy=0.99)
    base = ddlsim.Experiment(BASE.cluster, "digits-cnn", batch_size=8, training=training)
    study = Study(base, {"workers": [2, 4], "training.rate": [0.05, 0.2]}, seeds=2)
    here, there = study.run(jobs=1), study.run(jobs=2)
    same(there, here.frame)
    pd.testing.assert_frame_equal(there.history, here.history, check_exact=True)
    assert len(here.history) == 8 * 4
    assert (here.frame["accuracy"] > 0.2).all()


def test_dask_goes_on_when_a_worker_is_killed(tmp_path, expected):
    """A real scheduler with two worker processes; one is killed in the middle. Each point is in the table once."""
    distributed = pytest.importorskip("distributed")
    notes = tmp_path / "notes"
    base = BASE.with_(strategy=Notes(notes=str(notes), seconds=0.15))
    study = Study(base, {"workers": [1, 2, 3, 4, 5, 6, 7, 8]}, seeds=2)
    killed = []

    def kill_one(count):
        if count.finished >= 4 and not killed:
            pid = int(notes.read_text().split()[-1])
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        same(Study(BASE, VARY, seeds=2).run(executor=client), expected)
        table = study.run(tmp_path / "study.sqlite", executor=client, progress=kill_one)
    assert killed
    assert table.counts["done"] == 16
    same(table, study.run(jobs=1).frame)


def test_a_point_that_kills_its_process_fails_and_the_others_do_not(tmp_path):
    """Of three strategies, the second one dies once, the third always."""
    killers = [Kills(notes=str(tmp_path / f"{n}"), n_times=n) for n in (1, 1000)]
    frame = Study(BASE, {"strategy": [ddlsim.AllReduce(), *killers]}).run(jobs=2).frame
    assert frame["status"].tolist() == ["done", "done", "failed"]
    assert frame["error"][2] == "its process died each time (out of memory, or killed)"


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from study_parts import BASE, Notes
from ddlsim.study import Study

if __name__ == "__main__":
    base = BASE.with_(strategy=Notes(notes={notes!r}, seconds=0.1))
    Study(base, {{"workers": [1, 2, 3, 4, 5, 6, 7, 8]}}, seeds=4).run(
        {store!r}, jobs=2, progress=lambda count: print(count.finished, flush=True))
"""


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_nothing_finished_is_lost_when_a_process_is_killed(tmp_path, victim):
    store, notes = tmp_path / "study.sqlite", tmp_path / "notes"
    script = SCRIPT.format(here=str(HERE), notes=str(notes), store=str(store))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        finished = next(n for n in map(int, process.stdout) if n >= 6)
        kill_and_check(process, victim, finished, store, notes)


def kill_and_check(process, victim, finished, store, notes):
    workers = {int(line.split()[1]) for line in notes.read_text().splitlines()}
    assert len(workers) == 2
    if victim == "worker":
        os.kill(min(workers), signal.SIGKILL)
        process.stdout.read()
        assert process.wait() == 0
        assert load_table(store).counts["done"] == 32
        assert len(notes.read_text().splitlines()) <= 32 + 8  # at most what was under way is done again
        return
    process.kill()
    process.wait()
    connection = sqlite3.connect(store)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    before = {key for (key,) in connection.execute("SELECT key FROM points WHERE status = 'done'")}
    connection.close()
    assert finished <= len(before) < 32
    deadline = time.monotonic() + 10.0
    while any(running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(pid) for pid in workers)
    notes.unlink()
    base = BASE.with_(strategy=Notes(notes=str(notes), seconds=0.1))
    study = Study(base, {"workers": [1, 2, 3, 4, 5, 6, 7, 8]}, seeds=4)
    table = study.run(store, jobs=1)
    assert table.counts["done"] == 32
    assert len(notes.read_text().splitlines()) == 32 - len(before)


def test_two_processes_share_the_work_of_a_store(tmp_path):
    store, notes = tmp_path / "study.sqlite", tmp_path / "notes"
    script = SCRIPT.format(here=str(HERE), notes=str(notes), store=str(store))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) for _ in "ab"]
    for process in both:
        process.communicate()
        assert process.returncode == 0
    assert load_table(store).counts["done"] == 32
    lines = notes.read_text().splitlines()
    assert len(lines) == 32  # each point once
    assert len({line.split()[1] for line in lines}) == 4


def test_an_interrupt_leaves_a_table_of_what_is_done(tmp_path):
    def stop(count):
        if count.finished >= 3:
            raise KeyboardInterrupt

    study = Study(BASE, VARY, seeds=2)
    table = study.run(tmp_path / "study.sqlite", jobs=1, progress=stop)
    assert table.interrupted
    assert table.counts["done"] >= 3
    assert table.counts["missing"] > 0
    assert "interrupted: run it again to go on" in str(table)
    assert study.run(tmp_path / "study.sqlite", jobs=1).counts["done"] == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jobs": 0}, "jobs = 0: must be a whole number of at least 1"),
        ({"executor": "dask"}, "executor = 'dask': must be a concurrent.futures.Executor"),
        ({"executor": ThreadPoolExecutor(1), "jobs": 2}, "jobs = 2 has no effect beside an executor"),
    ],
    ids=["jobs", "executor", "both"],
)
def test_unusable_executors(arguments, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        Study(BASE, {"workers": [2]}).run(**arguments)


def test_what_cannot_be_sent_is_refused_but_simulated_here():
    from ddlsim.collectives import all_reduce

    study = Study(BASE, {"workers": [2, 3], "strategy": [ddlsim.AllReduce(lambda n: all_reduce.ring(n))]})
    with pytest.raises(ddlsim.ConfigError, match=r"cannot be sent to other processes .* use jobs=1"):
        study.run(jobs=2)
    assert study.run(jobs=1).counts["done"] == 2


def test_mpi_gives_the_same_table(tmp_path, expected):
    """A manager and two workers under mpiexec: python -m mpi4py.futures."""
    pytest.importorskip("mpi4py")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from mpi4py.futures import MPIPoolExecutor\nfrom study_parts import BASE, VARY\n"
        "from ddlsim.study import Study\n"
        "if __name__ == '__main__':\n    with MPIPoolExecutor() as executor:\n"
        f"        Study(BASE, VARY, seeds=2).run(executor=executor).save({str(tmp_path / 'table.json')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [str(mpiexec), "-n", "3", sys.executable, "-m", "mpi4py.futures", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    there = json.loads((tmp_path / "table.json").read_text())
    assert [row["throughput"] for row in there] == pytest.approx(expected["throughput"].tolist(), rel=1e-9)
