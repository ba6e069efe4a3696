"""Executors of a study's points: this process, several processes on this computer, or a user's executor."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Protocol

from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.run.processes import Processes
from ddlsim.study.serialization import Job, Packer
from ddlsim.study.worker import Answer, simulate_all, simulate_some, warm_up

#: interval in s between checks of the number of workers in a Dask cluster
_POLL_INTERVAL = 2.0


class DaskClient(Protocol):
    """The methods of a ``distributed.Client`` that are used."""

    def get_executor(self, **options: object) -> Executor: ...

    def nthreads(self) -> dict[str, int]: ...


class Pool(Protocol):
    """Interface between the dispatcher and an executor."""

    @property
    def n_workers(self) -> int:
        """Number of points that are simulated at the same time."""

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        """Send jobs to a worker, with the parts that it has reported as `missing`."""

    def close(self, *, at_once: bool) -> None:
        """Close resources that were opened here; with `at_once`, without waiting for running work."""
        return


def open_pool(
    executor: Executor | DaskClient | None,
    jobs: int | None,
    packer: Packer,
    experiments: Sequence[Experiment],
    n_at_once: int = 0,
) -> Pool:
    """Return a pool for `executor`, or one of `jobs` processes (None: one per core).

    There are at most as many processes as `experiments`, or as `n_at_once` if more experiments follow. The code that
    `experiments` need is compiled only once.
    """
    if executor is not None:
        if jobs is not None:
            raise ConfigError(
                f"jobs = {jobs!r} has no effect with an executor; remove jobs, and set the number of workers when "
                "creating the executor"
            )
        return _CustomExecutor(executor, packer) if isinstance(executor, Executor) else _Dask(executor, packer)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = n_cores if jobs is None else jobs
    return _Inline() if n == 1 else Local(min(n, max(n_at_once, len(experiments))), packer, experiments)


class _Inline(Pool):
    """This process, which simulates one point at a time."""

    n_workers = 1

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        done: Future[Answer] = Future()
        done.set_result(simulate_all(jobs))
        return done


class Local:
    """Processes on this machine."""

    def __init__(self, n_workers: int, packer: Packer, experiments: Sequence[Experiment]) -> None:
        self.n_workers, self._packer = n_workers, packer
        self._processes = Processes(n_workers, simulate_some, partial(warm_up, experiments))

    def submit(self, jobs: Sequence[Job], missing: Sequence[str] = ()) -> Future[Answer]:
        return self._processes.submit(self._packer.pack(jobs, missing))

    def close(self, *, at_once: bool) -> None:
        self._processes.close(at_once=at_once)


class _CustomExecutor(Pool):
    """A custom executor, which is not closed."""

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


class _Dask(_CustomExecutor):
    """A Dask cluster. Its scheduler reassigns the work of a dead worker to another one."""

    def __init__(self, client: DaskClient, packer: Packer) -> None:
        super().__init__(client.get_executor(pure=False), packer)
        self._client = client
        self._looked, self._n = 0.0, 1

    @property
    def n_workers(self) -> int:
        if time.monotonic() - self._looked > _POLL_INTERVAL:
            with suppress(Exception):  # the scheduler may be gone, which the work will report
                self._n = max(1, sum(self._client.nthreads().values()))
            self._looked = time.monotonic()
        return self._n
