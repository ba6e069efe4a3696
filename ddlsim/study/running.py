"""Simulating the points of a study for a store, by a pool that is opened once something has to be simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from ddlsim.run.experiment import Experiment
from ddlsim.study.content import key_of
from ddlsim.study.dispatch import Count, Progress, Task, dispatch
from ddlsim.study.executors import Pool
from ddlsim.study.store import Store
from ddlsim.study.work import DONE, FAILED, SKIPPED, Outcome


@dataclass(frozen=True)
class Point:
    """One experiment of a study.

    settings    dotted path -> value as the table shows it
    seed        of the experiment
    experiment  with cluster, model and data loaded; None if the settings do not fit together
    error       why they do not
    key         under which its result is stored
    text        that the key is the digest of
    """

    settings: Mapping[str, object]
    seed: int
    experiment: Experiment | None
    error: str
    key: str
    text: str

    def left_out(self, reason: str) -> Point:
        """Return the point of a search that is not simulated, under a key of its own: a grid may simulate it."""
        text = json.dumps([self.text, reason])
        return Point(self.settings, self.seed, None, reason, key_of(text), text)


class Simulations:
    """What is to be closed when a study ends; at an error, or Ctrl-C, without waiting for what runs.

    n_workers  number of workers of an experiment
    pool       opens what simulates, when the first experiments are there
    n_points   how many there will be, as far as that is known
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
        """Simulate those points that the store does not have; return whether that came to its end (no Ctrl-C)."""
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
        # the long ones first: the last ones then end at about the same time
        tasks.sort(key=lambda task: -self._n_workers(task.experiment))
        try:
            dispatch(tasks, self._opened([task.experiment for task in tasks]), self._store, self._tell)
        except KeyboardInterrupt:
            self._interrupted = True
        return not self._interrupted

    def _opened(self, experiments: Sequence[Experiment]) -> Pool:
        if self._pool is None:
            self._pool = self._open(experiments)
        return self._pool

    def _tell(self, new: Mapping[str, str]) -> None:
        self._states.update(new)
        if self._progress is not None:
            n = [sum(state == s for state in self._states.values()) for s in (DONE, SKIPPED, FAILED)]
            self._progress(Count(max(self._n_points, len(self._states)), *n))


def _name(point: Point) -> str:
    return ", ".join([*(f"{path} {value}" for path, value in point.settings.items()), f"seed {point.seed}"])
