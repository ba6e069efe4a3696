"""Distribution of a study's points to worker processes, with storage of their results and recovery from failures."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from ddlsim.errors import DdlsimError
from ddlsim.printable import shown
from ddlsim.run.experiment import Experiment
from ddlsim.run.processes import ProcessDied
from ddlsim.study.executors import Pool
from ddlsim.study.fingerprint import key_of
from ddlsim.study.serialization import Job
from ddlsim.study.store import LEASE, Store
from ddlsim.study.worker import DONE, FAILED, HAND_IN, SKIPPED, Answer, Outcome

#: number of deaths of processes that worked on a point, after which it is sent alone, runs alone, or has failed
_SINGLE, _ALONE, _GUILTY = 1, 2, 4
#: maximum number of points per parcel
_MAX_PARCEL = 256
_DIED = "its process died each time (out of memory, or killed)"
#: maximum number of points named in a line
_NAMED = 3
#: interval in s between checks of other processes' results
_POLL_INTERVAL = 0.25


@dataclass(frozen=True)
class Task:
    """A point to be simulated: its key, the text of which this is the digest, the experiment, its name, and whether to
    measure its stability."""

    key: str
    text: str
    experiment: Experiment
    name: str = ""
    stability: bool = False


@dataclass(frozen=True)
class Count:
    """Progress of a study: the total number of points, and how many of them are done, were skipped, or failed."""

    total: int
    done: int
    skipped: int
    failed: int

    @property
    def finished(self) -> int:
        """Number of points that do not need to be simulated any more."""
        return self.done + self.skipped + self.failed


#: called as points finish
Progress: TypeAlias = Callable[[Count], None]


def dispatch(tasks: Iterable[Task], pool: Pool, store: Store, finished: Callable[[dict[str, str]], None]) -> None:
    """Simulate each task once, and store the outcomes; `finished` is called with keys and their status.

    Points that another process simulates for the same store are waited for. If a process of the pool dies, a line on
    stderr names the points that are retried. Raises DdlsimError if a custom executor breaks; points stored until then
    are kept.
    """
    work = _Dispatcher(pool, store, finished, deque(tasks))
    try:
        work.run()
    finally:
        for future in work.running:
            future.cancel()


class _Dispatcher:
    def __init__(
        self, pool: Pool, store: Store, finished: Callable[[dict[str, str]], None], pending: deque[Task]
    ) -> None:
        self.pool, self.store, self.finished = pool, store, finished
        self.pending = pending
        self.running: dict[Future[Answer], list[Task]] = {}
        #: points that other processes have claimed
        self.elsewhere: list[Task] = []
        self.strikes: Counter[str] = Counter()
        #: wall-clock time per point in the latest parcel, in s
        self.seconds = math.inf
        self.looked = self.renewed = time.monotonic()

    def run(self) -> None:
        while self.pending or self.running or self.elsewhere:
            self.fill()
            if self.running:
                done, _ = wait(self.running, timeout=_POLL_INTERVAL, return_when=FIRST_COMPLETED)
                for future in done:
                    self.take(future)
            else:
                time.sleep(_POLL_INTERVAL if self.elsewhere else 0.0)
            self.look_around()

    def fill(self) -> None:
        """Keep every worker busy, with one further parcel for each."""
        limit = 2 * self.pool.n_workers if self.pool.n_workers > 1 else 1
        while self.pending and len(self.running) < limit:
            alone = self.strikes[self.pending[0].key] >= _ALONE
            if self.running and (alone or any(self.strikes[t[0].key] >= _ALONE for t in self.running.values())):
                return
            self.submit([self.pending.popleft() for _ in range(self.portion())])

    def portion(self) -> int:
        """Return the number of points in the next parcel: enough for the hand-in interval, fewer near the end."""
        fair = math.ceil(len(self.pending) / (2 * self.pool.n_workers))
        n = min(max(1, int(HAND_IN / self.seconds)), fair, _MAX_PARCEL)
        struck = [i for i in range(n) if self.strikes[self.pending[i].key] >= _SINGLE]
        return min([n, *(max(i, 1) for i in struck)])

    def submit(self, tasks: Sequence[Task]) -> None:
        free = set(self.store.claim([task.key for task in tasks]))
        self.elsewhere += [task for task in tasks if task.key not in free]
        if mine := [task for task in tasks if task.key in free]:
            self.send(mine)

    def send(self, tasks: list[Task], missing: Sequence[str] = ()) -> None:
        try:
            self.running[self.pool.submit([Job(task.experiment, task.stability) for task in tasks], missing)] = tasks
        except BrokenExecutor:
            raise _broken() from None
        except DdlsimError:
            raise
        except Exception as error:  # executors may raise anything after a shutdown
            raise DdlsimError(f"the executor accepts no more work ({error}); run the study again to continue") from None

    def take(self, future: Future[Answer]) -> None:
        """Store a worker's outcomes, or handle its failure."""
        tasks = self.running.pop(future)
        try:
            answer = future.result()
        except ProcessDied as death:
            return self.died(tasks, str(death))
        except BrokenExecutor:
            raise _broken() from None
        except CancelledError:
            raise DdlsimError("the executor cancelled its work; run the study again to continue") from None
        except DdlsimError:
            raise
        except Exception as error:  # the worker failed: it died several times, lacks a module, ...
            return self.refused(tasks, error)
        if answer.missing:
            return self.send(tasks, answer.missing)
        outcomes = answer.outcomes
        self.seconds = max(1e-6, sum(outcome.seconds for outcome in outcomes) / len(outcomes))
        self.save(list(zip(tasks, outcomes, strict=False)))
        self.pending.extendleft(reversed(tasks[len(outcomes) :]))
        return None

    def save(self, ended: Sequence[tuple[Task, Outcome]]) -> None:
        self.store.save((task.key, task.text, outcome) for task, outcome in ended)
        self.finished({task.key: outcome.status for task, outcome in ended})

    def died(self, tasks: list[Task], how: str) -> None:
        """Handle a process's death: retry its points in smaller groups, to find one that kills processes, if any."""
        self.strikes.update(task.key for task in tasks)
        guilty = [task for task in tasks if self.strikes[task.key] >= _GUILTY]
        if guilty:
            self.save([(task, Outcome(FAILED, _DIED)) for task in guilty])
        again = [task for task in tasks if task not in guilty]
        if again:
            print(shown(f"a worker process has died ({how}); {_listed(again)}"), file=sys.stderr, flush=True)
        self.pending.extendleft(reversed(again))

    def refused(self, tasks: list[Task], error: Exception) -> None:
        if len(tasks) == 1:
            name = type(error).__name__
            # Dask has then tried it on several workers
            return self.save([(tasks[0], Outcome(FAILED, _DIED if name == "KilledWorker" else f"{name}: {error}"))])
        self.strikes.update(task.key for task in tasks)
        self.pending.extendleft(reversed(tasks))
        return None

    def look_around(self) -> None:
        """Renew our claims, and check for points that other processes have finished or given up."""
        now = time.monotonic()
        if now - self.renewed > LEASE / 4:
            self.store.renew()
            self.renewed = now
        if self.elsewhere and now - self.looked > _POLL_INTERVAL:
            known = self.store.statuses(task.key for task in self.elsewhere)
            self.finished(known)
            rest = [task for task in self.elsewhere if task.key not in known]
            self.elsewhere = []
            self.looked = now
            # still claimed or free again, which the next claim shows
            self.pending.extend(rest) if not self.pending else self.elsewhere.extend(rest)


def _broken() -> DdlsimError:
    return DdlsimError("a worker of the executor died; run the study again with a new executor")


def _listed(tasks: Sequence[Task]) -> str:
    names = [task.name or task.key for task in tasks]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    points = "1 point" if len(names) == 1 else f"{len(names)} points"
    return f"simulating {points} again: {'; '.join(names[:_NAMED])}{more}"


@dataclass(frozen=True)
class Point:
    """A point of a study: a configuration with a seed.

    settings    values of the varied fields by dotted path, as the table shows them
    seed        seed of the experiment
    experiment  the experiment, with its cluster, model and data loaded; None: the settings cannot be combined
    error       reason why the settings cannot be combined; "": they can be combined
    key         key of the result in the store, a digest of `text`
    text        canonical description of the experiment
    """

    settings: Mapping[str, object]
    seed: int
    experiment: Experiment | None
    error: str
    key: str
    text: str

    def left_out(self, reason: str) -> Point:
        """Return a copy of this point for a search that does not simulate it, with `reason` as its error.

        The copy has a key of its own, because a grid may simulate the original point.
        """
        text = json.dumps([self.text, reason])
        return Point(self.settings, self.seed, None, reason, key_of(text), text)


class Simulations:
    """The pool of a study, as a context manager. After an error or Ctrl-C, it closes without waiting for running work.

    n_workers  number of workers of an experiment
    pool       function that opens the pool for the first experiments
    n_points   total number of points, as far as known
    """

    def __init__(
        self,
        store: Store,
        n_workers: Callable[[Experiment], int],
        pool: Callable[[Sequence[Experiment]], Pool],
        *,
        stability: bool,
        retry_failed: bool,
        progress: Progress | None,
        n_points: int,
    ) -> None:
        self._store, self._n_workers, self._open = store, n_workers, pool
        self._stability, self._retry_failed = stability, retry_failed
        self._progress, self._n_points = progress, n_points
        self._states: dict[str, str] = {}
        self._pool: Pool | None = None
        self._interrupted = False

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close(at_once=self._interrupted or error is not None)

    def settle(self, points: Sequence[Point]) -> bool:
        """Simulate the points that are not in the store; return whether all were finished (no Ctrl-C)."""
        unique = {point.key: point for point in points}
        if self._retry_failed:
            self._store.forget_failed(unique)
        states = self._store.statuses(unique)
        misfits = [p for p in unique.values() if p.experiment is None and p.key not in states]
        if misfits:
            self._store.save((p.key, p.text, Outcome(SKIPPED, p.error)) for p in misfits)
            states |= {p.key: SKIPPED for p in misfits}
        self._tell(states)
        tasks = [
            Task(p.key, p.text, p.experiment, _name(p), self._stability)
            for p in unique.values()
            if p.key not in states and p.experiment is not None
        ]
        if not tasks:
            return True
        # the longest ones first, so that all processes finish at about the same time
        tasks.sort(key=lambda task: -self._n_workers(task.experiment))
        try:
            if self._pool is None:
                self._pool = self._open([task.experiment for task in tasks])
            dispatch(tasks, self._pool, self._store, self._tell)
        except KeyboardInterrupt:
            self._interrupted = True
        return not self._interrupted

    def _tell(self, new: Mapping[str, str]) -> None:
        self._states.update(new)
        if self._progress is not None:
            n = [sum(state == s for state in self._states.values()) for s in (DONE, SKIPPED, FAILED)]
            self._progress(Count(max(self._n_points, len(self._states)), *n))


def _name(point: Point) -> str:
    return ", ".join([*(f"{path} {value}" for path, value in point.settings.items()), f"seed {point.seed}"])
