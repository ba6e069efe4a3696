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
from typing import Self, TypeAlias

from ddlsim.errors import DdlsimError
from ddlsim.printable import shown
from ddlsim.readable import count
from ddlsim.run.experiment import Experiment
from ddlsim.run.processes import ProcessDied
from ddlsim.study.executors import Pool
from ddlsim.study.fingerprint import key_of
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

    def __str__(self) -> str:
        return ", ".join([*(f"{path} {value}" for path, value in self.settings.items()), f"seed {self.seed}"])

    def left_out(self, reason: str) -> Point:
        """Return a copy of this point for a search that does not simulate it, with `reason` as its error.

        The copy has a key of its own, because a grid may simulate the original point.
        """
        text = json.dumps([self.text, reason])
        return Point(self.settings, self.seed, None, reason, key_of(text), text)


class _Dispatcher:
    """Sends points to the pool until all are stored, and recovers from failures of its processes.

    Points that another process simulates for the same store are waited for. If a process of the pool dies, a line on
    stderr names the points that are retried. Raises DdlsimError if a custom executor breaks; points stored until then
    are kept.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        finished: Callable[[Mapping[str, str]], None],
        points: Iterable[Point],
        stability: bool,
    ) -> None:
        self.pool, self.store, self.finished, self.stability = pool, store, finished, stability
        self.pending = deque(points)
        self.running: dict[Future[Answer], list[Point]] = {}
        #: points that other processes have claimed
        self.elsewhere: list[Point] = []
        self.strikes: Counter[str] = Counter()
        #: wall-clock time per point in the latest parcel, in s
        self.seconds = math.inf
        self.looked = self.renewed = time.monotonic()

    def run(self) -> None:
        try:
            while self.pending or self.running or self.elsewhere:
                self.fill()
                if self.running:
                    done, _ = wait(self.running, timeout=_POLL_INTERVAL, return_when=FIRST_COMPLETED)
                    for future in done:
                        self.take(future)
                else:
                    time.sleep(_POLL_INTERVAL if self.elsewhere else 0.0)
                self.look_around()
        finally:
            for future in self.running:
                future.cancel()

    def fill(self) -> None:
        """Keep every worker busy, with one further parcel for each."""
        limit = 2 * self.pool.n_workers if self.pool.n_workers > 1 else 1
        while self.pending and len(self.running) < limit:
            alone = self.strikes[self.pending[0].key] >= _ALONE
            if self.running and (alone or any(self.strikes[sent[0].key] >= _ALONE for sent in self.running.values())):
                return
            self.submit([self.pending.popleft() for _ in range(self.portion())])

    def portion(self) -> int:
        """Return the number of points in the next parcel: enough for the hand-in interval, fewer near the end."""
        fair = math.ceil(len(self.pending) / (2 * self.pool.n_workers))
        n = min(max(1, int(HAND_IN / self.seconds)), fair, _MAX_PARCEL)
        struck = [i for i in range(n) if self.strikes[self.pending[i].key] >= _SINGLE]
        return min([n, *(max(i, 1) for i in struck)])

    def submit(self, points: Sequence[Point]) -> None:
        free = set(self.store.claim([point.key for point in points]))
        self.elsewhere += [point for point in points if point.key not in free]
        if mine := [point for point in points if point.key in free]:
            self.send(mine)

    def send(self, points: list[Point], missing: Sequence[str] = ()) -> None:
        try:
            experiments = [point.experiment for point in points if point.experiment is not None]
            self.running[self.pool.submit(experiments, missing, stability=self.stability)] = points
        except BrokenExecutor:
            raise _broken() from None
        except DdlsimError:
            raise
        except Exception as error:  # executors may raise anything after a shutdown
            raise DdlsimError(f"the executor accepts no more work ({error}); run the study again to continue") from None

    def take(self, future: Future[Answer]) -> None:
        """Store a worker's outcomes, or handle its failure."""
        points = self.running.pop(future)
        try:
            answer = future.result()
        except ProcessDied as death:
            return self.died(points, str(death))
        except BrokenExecutor:
            raise _broken() from None
        except CancelledError:
            raise DdlsimError("the executor cancelled its work; run the study again to continue") from None
        except DdlsimError:
            raise
        except Exception as error:  # the worker failed: it died several times, lacks a module, ...
            return self.refused(points, error)
        if answer.missing:
            return self.send(points, answer.missing)
        outcomes = answer.outcomes
        self.seconds = max(1e-6, sum(outcome.seconds for outcome in outcomes) / len(outcomes))
        self.save(list(zip(points, outcomes, strict=False)))
        self.pending.extendleft(reversed(points[len(outcomes) :]))
        return None

    def save(self, ended: Sequence[tuple[Point, Outcome]]) -> None:
        self.store.save((point.key, point.text, outcome) for point, outcome in ended)
        self.finished({point.key: outcome.status for point, outcome in ended})

    def died(self, points: list[Point], how: str) -> None:
        """Handle a process's death: retry its points in smaller groups, to find one that kills processes, if any."""
        self.strikes.update(point.key for point in points)
        guilty = [point for point in points if self.strikes[point.key] >= _GUILTY]
        if guilty:
            self.save([(point, Outcome(FAILED, _DIED)) for point in guilty])
        again = [point for point in points if point not in guilty]
        if again:
            named = "; ".join(map(str, again[:_NAMED]))
            named += f" and {len(again) - _NAMED} more" if len(again) > _NAMED else ""
            text = f"a worker process has died ({how}); simulating {count(len(again), 'point')} again: {named}"
            print(shown(text), file=sys.stderr, flush=True)
        self.pending.extendleft(reversed(again))

    def refused(self, points: list[Point], error: Exception) -> None:
        if len(points) == 1:
            name = type(error).__name__
            # Dask has then tried it on several workers
            return self.save([(points[0], Outcome(FAILED, _DIED if name == "KilledWorker" else f"{name}: {error}"))])
        self.strikes.update(point.key for point in points)
        self.pending.extendleft(reversed(points))
        return None

    def look_around(self) -> None:
        """Renew our claims, and check for points that other processes have finished or given up."""
        now = time.monotonic()
        if now - self.renewed > LEASE / 4:
            self.store.renew()
            self.renewed = now
        if self.elsewhere and now - self.looked > _POLL_INTERVAL:
            statuses = self.store.statuses(point.key for point in self.elsewhere)
            self.finished(statuses)
            rest = [point for point in self.elsewhere if point.key not in statuses]
            self.elsewhere = []
            self.looked = now
            # still claimed or free again, which the next claim shows
            self.pending.extend(rest) if not self.pending else self.elsewhere.extend(rest)


def _broken() -> DdlsimError:
    return DdlsimError("a worker of the executor died; run the study again with a new executor")


class Simulations:
    """Simulates points with one pool, as a context manager. After an error or Ctrl-C, it closes without waiting for
    running work.

    pool       function that opens the pool for the first experiments
    n_workers  number of workers of an experiment
    n_points   total number of points, as far as known
    """

    def __init__(
        self,
        store: Store,
        pool: Callable[[Sequence[Experiment]], Pool],
        *,
        n_workers: Callable[[Experiment], int],
        progress: Progress | None,
        n_points: int = 0,
        retry_failed: bool = False,
    ) -> None:
        self._store, self._open, self._n_workers = store, pool, n_workers
        self._retry_failed, self._progress, self._n_points = retry_failed, progress, n_points
        self._states: dict[str, str] = {}
        self._pool: Pool | None = None
        self.interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.close(at_once=self.interrupted or kind is not None)

    def settle(self, points: Sequence[Point], *, stability: bool) -> bool:
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
        # the longest ones first, so that all processes finish at about the same time
        sizes = {p.key: self._n_workers(p.experiment) for p in unique.values() if p.experiment and p.key not in states}
        new = [unique[key] for key in sorted(sizes, key=lambda key: -sizes[key])]
        try:
            if new and self._pool is None:
                self._pool = self._open([point.experiment for point in new if point.experiment])
            if new and self._pool is not None:
                _Dispatcher(self._pool, self._store, self._tell, new, stability).run()
        except KeyboardInterrupt:
            self.interrupted = True
        return not self.interrupted

    def _tell(self, new: Mapping[str, str]) -> None:
        self._states.update(new)
        if self._progress is not None:
            n = [sum(state == s for state in self._states.values()) for s in (DONE, SKIPPED, FAILED)]
            self._progress(Count(max(self._n_points, len(self._states)), *n))
