"""The same study wherever it is simulated, and whatever dies meanwhile."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
from study_parts import BASE, VARY, Kills, Notes

import ddlsim
from ddlsim import compiler
from ddlsim.network import kernel
from ddlsim.run import processes
from ddlsim.run.processes import _block_interrupts
from ddlsim.study import Study, load_table
from ddlsim.study.executors import Local

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def expected():
    """The table of the study, simulated in this process."""
    return Study(BASE, VARY, seeds=2).run(jobs=1).frame


def same(table, frame):
    pd.testing.assert_frame_equal(table.frame, frame, check_exact=True)


def test_threads_give_the_same_table_and_stay_open(expected):
    with ThreadPoolExecutor(3) as executor:
        same(Study(BASE, VARY, seeds=2).run(executor=executor), expected)
        assert executor.submit(os.getpid).result() == os.getpid()


def test_processes_give_the_same_tables_and_compile_nothing(expected):
    training = ddlsim.Training("digits", rate=0.1, updates=30, evaluate_every=10, target_accuracy=0.99)
    base = ddlsim.Experiment(BASE.cluster, "digits-cnn", batch_size=8, training=training)
    study = Study(base, {"workers": [2, 4], "training.rate": [0.05, 0.2]}, seeds=2)
    here = study.run(jobs=1)
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        same(Study(BASE, VARY, seeds=2).run(executor=executor), expected)
        there = study.run(executor=executor)
        assert executor.submit(n_compiled, BASE).result() == 0
    same(there, here.frame)
    pd.testing.assert_frame_equal(there.history, here.history, check_exact=True)
    assert len(here.history) == 8 * 4
    assert (here.frame["accuracy"] > 0.2).all()


def n_compiled(experiment):
    """How many kernels a fresh process has to compile because the cache on disk does not have them."""
    ddlsim.simulate(experiment)
    if compiler.LOADS:
        return len(sys.modules.keys() & {"numba"})  # imported to compile
    entries = (kernel.advance, kernel.join, kernel.send_one)
    assert sum(sum(entry.stats.cache_hits.values()) for entry in entries) > 0
    return sum(sum(entry.stats.cache_misses.values()) for entry in entries)


@pytest.mark.posix
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
    same(table, Study(BASE.with_(strategy=Notes(notes=str(notes))), study.vary, seeds=2).run(jobs=1).frame)


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
    base = BASE.with_(strategy=Notes(notes={notes!r}, seconds={seconds}, together=3))
    Study(base, {{"workers": [1, 2, 3, 4, 5, 6, 7, 8]}}, seeds=4).run(
        {store!r}, jobs=2, progress=lambda count: print(count.finished, flush=True))
"""


def start(store, notes, seconds):
    script = SCRIPT.format(here=str(HERE), notes=str(notes), store=str(store), seconds=seconds)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def runs(notes):
    """Return the process of each simulation that has begun."""
    return [int(line.split()[1]) for line in notes.read_text().splitlines()] if notes.exists() else []


@pytest.mark.posix
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_nothing_finished_is_lost_when_processes_are_killed(tmp_path):
    """Two studies share a store. One is killed; then the workers of the other, which simulates what is left: also what
    the first one had claimed, and again only what was under way in the killed ones."""
    store, notes, others = (tmp_path / name for name in ("study.sqlite", "notes", "others"))
    with start(store, notes, 0.1) as killed, start(store, notes, 0.1) as other:
        deadline = time.monotonic() + 240.0
        while len(set(runs(notes))) < 3 or load_table(store).counts["done"] < 4:  # both have begun
            assert time.monotonic() < deadline
            time.sleep(0.05)
        finished, workers = load_table(store).counts["done"], set(runs(notes))
        killed.kill()
        killed.wait()
        shutil.copytree(tmp_path, others, ignore=shutil.ignore_patterns("others"))
        for pid in workers:
            if parent(pid) == other.pid:
                os.kill(pid, signal.SIGKILL)
        _, errors = other.communicate()
    assert other.returncode == 0
    for line in errors.splitlines():  # and nothing else is on the screen
        assert re.match(
            r"a worker process has died \(killed by SIGKILL\); simulating .* again: workers \d, seed \d", line
        )
    assert errors.count("\n") >= 1
    with closing(sqlite3.connect(others / store.name)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        before = connection.execute("SELECT count(*) FROM points WHERE status = 'done'").fetchone()[0]
    assert finished <= before < 32
    assert load_table(store).counts["done"] == 32
    assert len(set(runs(notes)) - workers) >= 1
    assert len(runs(notes)) <= 32 + 8
    deadline = time.monotonic() + 60.0
    while any(running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(pid) for pid in workers)


@pytest.fixture
def packer():
    from ddlsim.study.fingerprint import Digests
    from ddlsim.study.serialization import Packer

    return Packer(Digests())


def test_processes_killed_as_they_start_are_started_again(packer, monkeypatch):
    """The first two of them die before they are ready; that is not what a script without a main guard looks like."""
    begun = []
    start = processes._start

    def killed(*arguments):
        worker = start(*arguments)
        begun.append(worker.process)
        if len(begun) <= 2:
            worker.process.kill()
        return worker

    monkeypatch.setattr(processes, "_start", killed)
    pool = Local(1, packer, [BASE])
    try:
        assert len(begun) == 3
        (outcome,) = pool.submit([BASE.with_(workers=2)]).result(timeout=120).outcomes
        assert outcome.status == "done"
    finally:
        pool.close(at_once=False)
    assert [process.exitcode for process in begun] == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_processes_that_are_always_killed_end_it_with_a_reason(packer, monkeypatch):
    start = processes._start

    def killed(*arguments):
        worker = start(*arguments)
        worker.process.kill()
        return worker

    monkeypatch.setattr(processes, "_start", killed)
    with pytest.raises(ddlsim.DdlsimError, match="processes are killed during their start"):
        Local(2, packer, [BASE])


@pytest.mark.posix
def test_a_killed_process_takes_only_its_own_work_with_it(packer, tmp_path):
    slow = [BASE.with_(workers=2, strategy=Notes(notes=str(tmp_path / f"{i}"), seconds=2.0)) for i in range(2)]
    pool = Local(2, packer, slow)
    try:
        futures = [pool.submit([experiment]) for experiment in slow]
        deadline = time.monotonic() + 120.0
        while not (tmp_path / "0").exists() and not (futures[0].done() and futures[0].result().missing):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if (tmp_path / "0").exists():
            os.kill(runs(tmp_path / "0")[0], signal.SIGKILL)
            with pytest.raises(processes.ProcessDied, match="killed by SIGKILL"):
                futures[0].result(timeout=120)
        answer = futures[1].result(timeout=120)
        assert answer.missing or answer.outcomes[0].status == "done"
    finally:
        pool.close(at_once=True)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[3])
    except FileNotFoundError:
        return 0


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupt_leaves_a_table_of_what_is_done(tmp_path):
    def stop(count):
        if count.finished >= 3:
            raise KeyboardInterrupt

    study = Study(BASE, VARY, seeds=2)
    table = study.run(tmp_path / "study.sqlite", jobs=1, progress=stop)
    assert table.interrupted
    assert table.counts["done"] >= 3
    assert table.counts["missing"] > 0
    assert "interrupted: run the study again to continue" in str(table)
    assert study.run(tmp_path / "study.sqlite", jobs=1).counts["done"] == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jobs": 0}, "jobs = 0: must be a positive integer"),
        ({"executor": "dask"}, "executor = 'dask': must be a concurrent.futures.Executor"),
        ({"executor": ThreadPoolExecutor(1), "jobs": 2}, "jobs = 2 has no effect with an executor"),
    ],
    ids=["jobs", "executor", "both"],
)
def test_unusable_executors(arguments, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        Study(BASE, {"workers": [2]}).run(**arguments)


def test_what_cannot_be_sent_is_refused_but_simulated_here():
    from ddlsim.collectives import all_reduce

    study = Study(BASE, {"workers": [2, 3], "strategy": [ddlsim.AllReduce(lambda n: all_reduce.ring(n))]})
    refused = pytest.raises(ddlsim.ConfigError, match=r"cannot be sent to other processes .* use jobs=1")
    with ThreadPoolExecutor(2) as executor, refused:
        study.run(executor=executor)
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


def test_processes_start_deaf_to_ctrl_c():
    """Otherwise it would end them, with tracebacks, before they can leave it to the process that starts them."""
    ask = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"

    def blocked():
        return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()

    with _block_interrupts():
        assert blocked() == "True"
    assert blocked() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("call", [
    'Study(base, {"workers": [2, 4]}).run(jobs=2)',
    'simulate_seeds(base.with_(model="digits-cnn", training=ddlsim.Training("digits", updates=1)), 2, processes=2)',
])  # fmt: skip
def test_a_script_without_a_main_guard_is_told_so(call, tmp_path):
    """Its processes import it, and would start processes in turn: an error in one of those, not a wait for ever."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        f'import ddlsim\nbase = ddlsim.Experiment("office-1gbe", "lenet5", steps=1, warmup=0)\nddlsim.{call}\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "make sure that your script runs its code under \"if __name__ == '__main__'\"" in last
