"""Where points are simulated: in this process, in others on this machine, or wherever an executor takes them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol

from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.run.experiment import Experiment
from ddlsim.run.seeds import one_thread_each
from ddlsim.study.parcels import Job, Packer
from ddlsim.study.work import Answer, simulate_all, simulate_some, warm_up

__all__ = ["DaskClient", "Pool", "open_pool"]

#: s between two looks at how many workers a Dask cluster has
_LOOK = 2.0


class DaskClient(Protocol):
    """What is needed of a ``distributed.Client``."""

    def get_executor(self, **options: object) -> Executor: ...

    def nthreads(self) -> dict[str, int]: ...


class Pool(Protocol):
    """What the dispatcher needs of an executor."""

    #: whether :meth:`restart` helps when it has broken
    restarts: bool

    @property
    def n_workers(self) -> int:
        """How many points it simulates at once."""

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        """Let a worker do the jobs; `missing` parts of them have been asked for."""

    def restart(self) -> None:
        """Start again after the executor has broken; what was submitted is lost."""

    def close(self, *, at_once: bool) -> None:
        """End what was started here; with `at_once` without waiting for what runs."""


def open_pool(
    executor: Executor | DaskClient | None, jobs: int | None, packer: Packer, experiments: Sequence[Experiment]
) -> Pool:
    """Return the pool that `executor` is, or else one of `jobs` processes (None: as many as there are cores).

    There are no more processes than `experiments`; what these need is compiled only once.
    """
    if executor is not None:
        if jobs is not None:
            raise ConfigError(f"jobs = {jobs!r} has no effect beside an executor; set how many workers that one has")
        if isinstance(executor, Executor):
            return _Given(executor, packer)
        if hasattr(executor, "get_executor") and hasattr(executor, "nthreads"):
            return _Dask(executor, packer)
        raise ConfigError(
            f"executor = {executor!r}: must be a concurrent.futures.Executor (mpi4py.futures has one, too) or a "
            "distributed.Client"
        )
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise ConfigError(f"jobs = {jobs!r}: must be a whole number of at least 1")
    n = _n_cores() if jobs is None else jobs
    return _Inline() if n == 1 else _Processes(min(n, len(experiments)), packer, experiments)


def _n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Inline:
    """This process, one point after the other."""

    restarts = False
    n_workers = 1

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        done: Future[Answer] = Future()
        done.set_result(simulate_all(jobs))
        return done

    def restart(self) -> None:
        raise AssertionError("this process has not died")

    def close(self, *, at_once: bool) -> None:
        pass


class _Given:
    """An executor of the user's, which stays open."""

    restarts = False

    def __init__(self, executor: Executor, packer: Packer) -> None:
        self._executor = executor
        self._packer = packer

    @property
    def n_workers(self) -> int:
        for name in ("num_workers", "_max_workers"):  # mpi4py; concurrent.futures
            if isinstance(n := getattr(self._executor, name, None), int) and n > 0:
                return n
        return os.cpu_count() or 1

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        return self._executor.submit(simulate_some, self._packer.pack(jobs, missing))

    def restart(self) -> None:
        raise DdlsimError("the executor has broken; give a new one: the study goes on from its store")

    def close(self, *, at_once: bool) -> None:
        pass


class _Dask(_Given):
    """A Dask cluster. Its scheduler gives the work of a dead worker to another one."""

    def __init__(self, client: DaskClient, packer: Packer) -> None:
        super().__init__(client.get_executor(pure=False), packer)
        self._client = client
        self._looked, self._n = 0.0, 1

    @property
    def n_workers(self) -> int:
        if time.monotonic() - self._looked > _LOOK:
            with suppress(Exception):  # a scheduler that has gone: the work will say so
                self._n = max(1, sum(self._client.nthreads().values()))
            self._looked = time.monotonic()
        return self._n


class _Processes:
    """Processes on this machine, started afresh, with one thread each.

    They end with this one, however it ends, and leave Ctrl-C to it.
    """

    restarts = True

    def __init__(self, n_workers: int, packer: Packer, experiments: Sequence[Experiment]) -> None:
        self.n_workers = n_workers
        self._packer = packer
        self._executor, ready = self._started(n_workers)
        warm_up(experiments)  # meanwhile; what has to be compiled is in the cache when they want it
        self._check(ready)

    def _started(self, n: int) -> tuple[ProcessPoolExecutor, Future[int]]:
        """Start `n` processes; others start when they are needed."""
        executor = ProcessPoolExecutor(self.n_workers, multiprocessing.get_context("spawn"), initializer=_begin)
        with one_thread_each(), _deaf_to_ctrl_c():  # every one of these starts a process
            ready = [executor.submit(os.getpid) for _ in range(n)]
        return executor, ready[0]

    @staticmethod
    def _check(ready: Future[int]) -> None:
        try:
            ready.result()
        except BrokenExecutor:
            raise ConfigError(
                "jobs: a process has died as it started. Does your script do its work under if __name__ == "
                "'__main__':? Otherwise use jobs=1, which also shows the error"
            ) from None

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        parcel = self._packer.pack(jobs, missing)
        with one_thread_each(), _deaf_to_ctrl_c():
            return self._executor.submit(simulate_some, parcel)

    def restart(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        self._executor, ready = self._started(1)
        self._check(ready)

    def close(self, *, at_once: bool) -> None:
        if at_once:
            for process in list((self._executor._processes or {}).values()):
                process.terminate()
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach before :func:`_begin` has run; here it is heard a moment later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Run in each process as it starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
