"""The trials of a search as points: rounds of them to be simulated, and what their outcomes say about the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.run.metrics import METRICS
from ddlsim.study.designs import Vary
from ddlsim.study.proposals import Proposal, Proposals
from ddlsim.study.running import Point
from ddlsim.study.search import Search
from ddlsim.study.work import DONE, Outcome


@dataclass(frozen=True, eq=False)
class _Trial:
    """A proposal, its points, one per seed, and the values of the metrics for the seeds that are done."""

    proposal: Proposal
    points: list[Point]
    values: list[list[float]] = field(default_factory=list)

    @property
    def means(self) -> list[float]:
        """The means over the seeds, one per metric."""
        return [float(np.mean(column)) for column in zip(*self.values, strict=True)]


class Trials:
    """A search, round after round.

    points_of  the points of a proposed configuration, a seed after the other
    points     of all trials so far, in their order
    """

    def __init__(
        self, search: Search, vary: Vary, n_seeds: int, points_of: Callable[[Mapping[str, object]], list[Point]]
    ) -> None:
        self._search, self._n_seeds, self._points_of = search, n_seeds, points_of
        self._proposals = Proposals(search, vary)
        self._trials: list[_Trial] = []
        self._outcomes: Mapping[str, Outcome] = {}

    @property
    def points(self) -> list[Point]:
        return [point for trial in self._trials for point in trial.points]

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Take what has come of the points of the last round."""
        self._outcomes = outcomes

    def rounds(self) -> Iterator[list[Point]]:
        """Yield points to be simulated; their outcomes are to be taken before the next round.

        Raises ConfigError for a metric that nothing simulated has.
        """
        while proposals := self._proposals.ask():
            batch = [_Trial(proposal, self._points_of(proposal.row)) for proposal in proposals]
            self._trials += batch
            # with pruning a seed after the other, else all at once
            steps = [[i] for i in range(self._n_seeds)] if self._search.prune else [list(range(self._n_seeds))]
            going = batch
            for step in steps:
                yield [trial.points[i] for trial in batch for i in step]
                going = [trial for trial in going if self._goes_on(trial, step)]
            known = [trial for trial in batch if len(trial.values) == self._n_seeds]
            self._refuse_unknown()
            for trial in batch:
                # those that do not fit together, have failed or were given up are told without a value
                self._proposals.tell(trial.proposal, trial.means if trial in known else None)

    def _goes_on(self, trial: _Trial, step: Sequence[int]) -> bool:
        """Note what came of some seeds of a trial; return whether it is worth simulating others."""
        for i in step:
            outcome = self._outcomes[trial.points[i].key]
            values = [outcome.record.get(name) for name in self._search.metrics]
            if outcome.status != DONE or not all(isinstance(v, int | float) and not math.isnan(v) for v in values):
                return False
            trial.values.append([float(v) for v in values])  # type: ignore[arg-type]  # they are numbers
        n = len(trial.values)
        if not self._search.prune:
            return True
        gives_up = self._proposals.gives_up(trial.proposal, trial.means[0], n)  # which later trials are compared with
        if not gives_up or n == self._n_seeds:
            return True
        name = self._search.metrics[0]
        reason = f"given up after {n} of {self._n_seeds} seeds: its {name} is worse than the median so far"
        trial.points[n:] = [point.left_out(reason) for point in trial.points[n:]]
        return False

    def _refuse_unknown(self) -> None:
        """Refuse to go on with a metric that runs do not have."""
        done = [outcome for outcome in self._outcomes.values() if outcome.status == DONE]
        for name in self._search.metrics:
            if done and all(outcome.record.get(name) is None for outcome in done):
                raise ConfigError(f"Search: objective: {name} is not known of any configuration{METRICS[name].remedy}")
