"""Executors of a study's points: this process, several processes on this computer, or a user's executor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Protocol

from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.run.processes import Processes
from ddlsim.study.serialization import Packer, Parcel
from ddlsim.study.worker import Answer, simulate_all, simulate_some, warm_up

#: interval in s between checks of the number of workers in a Dask cluster
_POLL_INTERVAL = 2.0


class DaskClient(Protocol):
    """The methods of a ``distributed.Client`` that are used."""

    def get_executor(self, **options: object) -> Executor: ...

    def nthreads(self) -> dict[str, int]: ...


class Pool:
    """This process, which simulates one point at a time; subclasses send points to other processes."""

    @property
    def n_workers(self) -> int:
        """Number of points that are simulated at the same time."""
        return 1

    def submit(
        self, experiments: Sequence[Experiment], missing: Sequence[str] = (), *, stability: bool = False
    ) -> Future[Answer]:
        """Send experiments to a worker, with the parts that it has reported as `missing`."""
        done: Future[Answer] = Future()
        done.set_result(simulate_all(experiments, stability))
        return done

    def close(self, *, at_once: bool) -> None:
        """Close resources that were opened here; with `at_once`, without waiting for running work."""


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
    return Pool() if n == 1 else Local(min(n, max(n_at_once, len(experiments))), packer, experiments)


class _Remote(Pool):
    """Processes to which `send` sends a parcel."""

    def __init__(self, send: Callable[[Parcel], Future[Answer]], packer: Packer) -> None:
        self._send, self._packer = send, packer

    def submit(
        self, experiments: Sequence[Experiment], missing: Sequence[str] = (), *, stability: bool = False
    ) -> Future[Answer]:
        return self._send(self._packer.pack(experiments, missing, stability))


class Local(_Remote):
    """Processes on this machine."""

    def __init__(self, n_workers: int, packer: Packer, experiments: Sequence[Experiment]) -> None:
        self._processes = Processes(n_workers, simulate_some, partial(warm_up, experiments))
        super().__init__(self._processes.submit, packer)

    @property
    def n_workers(self) -> int:
        return self._processes.n_workers

    def close(self, *, at_once: bool) -> None:
        self._processes.close(at_once=at_once)


class _CustomExecutor(_Remote):
    """A custom executor, which is not closed."""

    def __init__(self, executor: Executor, packer: Packer) -> None:
        self._executor = executor
        super().__init__(lambda parcel: executor.submit(simulate_some, parcel), packer)

    @property
    def n_workers(self) -> int:
        for name in ("num_workers", "_max_workers"):  # mpi4py; concurrent.futures
            if isinstance(n := getattr(self._executor, name, None), int) and n > 0:
                return n
        return os.cpu_count() or 1


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
