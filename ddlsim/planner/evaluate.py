"""Simulation of a search's experiments on all cores. Results do not depend on the number of cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from ddlsim.run.experiment import Experiment
from ddlsim.study.dispatch import Task, dispatch
from ddlsim.study.executors import Pool, open_pool
from ddlsim.study.fingerprint import Digests, key_of, text_of
from ddlsim.study.serialization import Packer
from ddlsim.study.store import Store
from ddlsim.study.worker import DONE, SKIPPED, Outcome

T = TypeVar("T")
D = TypeVar("D")
#: outcome of an experiment that was not simulated because of Ctrl-C
INTERRUPTED = Outcome(SKIPPED, "the search was interrupted")


class Evaluator:
    """Simulates experiments and caches the outcomes. After Ctrl-C, it only returns cached outcomes.

    jobs    number of processes (None: one per core; 1: this process)
    report  called with the number of finished simulations
    n_at_once  largest number of simulations asked for at once, if it is not the first
    """

    def __init__(self, jobs: int | None, report: Callable[[int], None] | None = None, n_at_once: int = 0) -> None:
        self._jobs, self._n_at_once = jobs, n_at_once
        self._report = report
        self._digests = Digests()
        self._store = Store(None)
        self._pool: Pool | None = None
        self.n_done = 0
        self.interrupted = False

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close(at_once=self.interrupted or kind is not None)
        self._store.close()

    def outcomes(self, experiments: Sequence[Experiment], *, stability: bool = False) -> list[Outcome]:
        """Return the outcome of each experiment, :data:`INTERRUPTED` if Ctrl-C came first.

        Clusters and models must have been loaded. With `stability`, records also contain "throughput_spread", the
        stability of the throughput.
        """
        texts = [text_of(experiment, self._digests, stability=stability) for experiment in experiments]
        keys = [key_of(text) for text in texts]
        known = self._store.statuses(keys)
        tasks = {
            key: Task(key, text, experiment, _name(experiment), stability)
            for key, text, experiment in zip(keys, texts, experiments, strict=True)
            if key not in known
        }
        if tasks:
            self.attempt(lambda: self._simulate(experiments, list(tasks.values())), None)
        found = self._store.outcomes(keys)
        return [found.get(key, INTERRUPTED) for key in keys]

    def attempt(self, work: Callable[[], T], default: D) -> T | D:
        """Return the result of `work`, or the default after Ctrl-C, which also ends later work."""
        if self.interrupted:
            return default
        try:
            made = work()
        except KeyboardInterrupt:
            self.interrupted = True
        return default if self.interrupted else made

    def _simulate(self, experiments: Sequence[Experiment], tasks: Sequence[Task]) -> None:
        if self._pool is None:
            self._pool = open_pool(None, self._jobs, Packer(self._digests), experiments, self._n_at_once)
        # the longest ones first, so that all processes finish at about the same time
        order = sorted(tasks, key=lambda task: -(task.experiment.n_workers or 0))
        dispatch(order, self._pool, self._store, self._count)

    def _count(self, ended: dict[str, str]) -> None:
        self.n_done += len(ended)
        if self._report is not None:
            self._report(self.n_done)


def number_of(outcome: Outcome, name: str) -> float | None:
    """Return a number from the record of a simulation; None if it failed or has no such number."""
    value = outcome.record.get(name) if outcome.status == DONE else None
    return float(value) if isinstance(value, int | float) else None


def _name(experiment: Experiment) -> str:
    return f"{experiment.strategy.label}, {experiment.n_workers} workers, batch {experiment.batch_size}"
