"""Simulation of a search's experiments on all cores. Results do not depend on the number of cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ddlsim.run.experiment import Experiment
from ddlsim.study.dispatch import Point, Simulations
from ddlsim.study.executors import open_pool
from ddlsim.study.fingerprint import Digests, key_of, text_of
from ddlsim.study.serialization import Packer
from ddlsim.study.store import Store
from ddlsim.study.worker import DONE, SKIPPED, Outcome

T = TypeVar("T")
D = TypeVar("D")
#: outcome of an experiment that was not simulated because of Ctrl-C
INTERRUPTED = Outcome(SKIPPED, "the search was interrupted")


class _Candidate(Point):
    """A point without settings."""

    def __str__(self) -> str:
        assert self.experiment is not None
        experiment = self.experiment
        return f"{experiment.strategy.label}, {experiment.n_workers} workers, batch {experiment.batch_size}"


class Evaluator(Simulations):
    """Simulates experiments and caches the outcomes. After Ctrl-C, it only returns cached outcomes.

    jobs    number of processes (None: one per core; 1: this process)
    report  called with the number of finished simulations
    n_at_once  largest number of simulations asked for at once, if it is not the first
    """

    def __init__(self, jobs: int | None, report: Callable[[int], None] | None = None, n_at_once: int = 0) -> None:
        self._digests = digests = Digests()
        super().__init__(
            Store(None),
            lambda experiments: open_pool(None, jobs, Packer(digests), experiments, n_at_once),
            n_workers=lambda experiment: experiment.n_workers or 0,
            progress=None if report is None else lambda count: report(count.finished),
        )

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self._store.close()

    def outcomes(self, experiments: Sequence[Experiment], *, stability: bool = False) -> list[Outcome]:
        """Return the outcome of each experiment, :data:`INTERRUPTED` if Ctrl-C came first.

        Clusters and models must have been loaded. With `stability`, records also contain "throughput_spread", the
        stability of the throughput.
        """
        texts = [text_of(experiment, self._digests, stability=stability) for experiment in experiments]
        pairs = zip(experiments, texts, strict=True)
        points = [_Candidate({}, experiment.seed, experiment, "", key_of(text), text) for experiment, text in pairs]
        if not self.interrupted:
            self.settle(points, stability=stability)
        outcomes = self._store.outcomes(point.key for point in points)
        return [outcomes.get(point.key, INTERRUPTED) for point in points]

    def attempt(self, work: Callable[[], T], default: D) -> T | D:
        """Return the result of `work`, or the default after Ctrl-C, which also ends later work."""
        if self.interrupted:
            return default
        try:
            result = work()
        except KeyboardInterrupt:
            self.interrupted = True
        return default if self.interrupted else result


def number_of(outcome: Outcome, name: str) -> float | None:
    """Return a number from the record of a simulation; None if it failed or has no such number."""
    value = outcome.record.get(name) if outcome.status == DONE else None
    return float(value) if isinstance(value, int | float) else None
