"""Models of workers' own: local steps, and averages that they bring something to and go on with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from ddlsim.collectives import Schedule
from ddlsim.learning import Array, Value
from ddlsim.plan.local_steps import Average, local_steps
from ddlsim.plan.plan import UPDATE, Ints
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.costs import Phase
from ddlsim.runtime.exchange import Call, CollectiveExchange, Exchange, Route, whole
from ddlsim.runtime.replica import Replica, replicas_of
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.table_run import TableRun
from ddlsim.runtime.worker import Worker


@dataclass(eq=False)
class Rule:
    """What workers make of an average.

    average   when it takes place, and among whom
    members   of each of its groups, which exchange on their fabric
    bring     what a worker brings; by default its model
    then      what comes of the mean, once for all of a group; by default the mean
    merge     lets a worker go on with that (None: there was nothing to wait for); by default that is its model
    decides   `then` is called as soon as the mean is there: it chooses the next steps in which the average takes place
    models    models are brought, which are compressed as differences to what all know; otherwise what is brought is
              compressed as it is
    """

    average: Average
    members: Sequence[Communicator]
    bring: Callable[[Replica], Value[Array]] | None = None
    then: Callable[[Value[Array]], Any] | None = None
    merge: Callable[[Replica, Any], None] | None = None
    models: bool = True
    decides: bool = False
    rounds: list[_Rounds] = field(default_factory=list)


class _Rounds(Exchange):
    """The rounds of an average in one group: an exchange that counts the steps in which they take place."""

    def __init__(self, models: OwnModels, number: int, rule: Rule, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._models, self._number, self.rule = models, number, rule
        self._by = CollectiveExchange(communicator, parts=whole(communicator), vectors=self._vector)
        self.what, self.decodes, self.codec = self._by.what, self._by.decodes, self._by.codec
        self.common = models.learner.initial
        #: by round: what all knew when it began, and what was brought
        self._begun: dict[int, tuple[Value[Array], list[Value[Array] | None]]] = {}
        self._results: dict[int, Any] = {}

    def _round(self, step: int) -> int:
        """Return the number of the round of a step, 0-based: how many there were before."""
        return self.rule.average.steps.count(step)

    # ------------------------------------------------------------ values

    def brings(self, step: int, worker: Worker, value: Value[Array]) -> None:
        _, brought = self._begun.setdefault(self._round(step), (self.common, [None] * self.communicator.n_ranks))
        brought[self.communicator.place[worker.rank]] = value

    def result(self, step: int) -> Any:
        """Return what comes of the round of a step."""
        number = self._round(step)
        if number not in self._results:
            common, brought = self._begun[number]
            values = [value for value in brought if value is not None]
            assert len(values) == len(brought), "a collective ended before all ranks had entered it"
            mean = self._by.mean(number, values)
            if self.rule.models:
                if self.codec is not None:
                    learner = self._models.learner
                    mean = learner.plane.apply(np.add, common, mean).carrying(learner.mean(values))
                self.common = mean
            result = mean if self.rule.then is None else self.rule.then(mean)
            if self.rule.models and self.rule.then is not None and isinstance(result, Value):
                self.common = result
            self._results = {number: result, **dict(itertools.islice(self._results.items(), 2))}
            self._begun.pop(number - 2, None)
        return self._results[number]

    def _vector(self, number: int, place: int) -> Value[Array]:
        """Return what a member's part of a round is compressed from."""
        step = self.rule.average.steps.nth(number) - 1
        self._models.bring(self._number, step, self.communicator.workers[place].rank)
        common, brought = self._begun[number]
        value = brought[place]
        assert value is not None
        if not self.rule.models:
            return value
        return self._models.learner.plane.apply(np.subtract, value, common)

    # ------------------------------------------------------------ as an exchange

    @property
    def decides(self) -> bool:
        return self.rule.decides

    def arrived(self, worker: Worker, step: int) -> bool:
        before = self._round(step) in self._results
        self._models.merge(self._number, step, worker.rank)
        return not before

    @property
    def route(self) -> Route:
        return self._by.route

    def encode_seconds(self, worker: Worker, step: int, part: int) -> float:
        return self._by.encode_seconds(worker, self._round(step), 0)

    def decode_seconds(self, worker: Worker, step: int, part: int) -> float:
        return self._by.decode_seconds(worker, self._round(step - self.rule.average.delay), 0)

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        return self._by.carry(worker, self._round(step), [0], nbytes)

    def schedule(self, step: int, parts: Sequence[int], nbytes: float) -> tuple[Schedule, float]:
        return self._by.schedule(self._round(step), [0], nbytes)

    def calls(self, step: int, parts: Sequence[int], nbytes: float, place: int = 0) -> list[Call]:
        return self._by.calls(self._round(step), [0], nbytes, place)

    def phases(self, step: int, parts: Sequence[int], nbytes: float) -> tuple[Phase, ...]:
        return self._by.phases(self._round(step), [0], nbytes)


class OwnModels:
    """The models of all workers, which follow what has happened in the steps of a program.

    A worker makes a local step when its update has ended; what it then brings, and goes on with, follows as the rules
    say.
    """

    def __init__(self, setting: Setting, rules: Sequence[Rule]) -> None:
        self.setting, self.learner, self.rules = setting, setting.learner, rules
        self.replicas = replicas_of(setting)
        for number, rule in enumerate(rules):
            rule.rounds = [_Rounds(self, number, rule, members) for members in rule.members]
        self._round_of = [
            {worker.rank: each for each in rule.rounds for worker in each.communicator.workers} for rule in rules
        ]
        self._done = [0] * len(self.replicas)  # operations of each worker, of all steps
        self._gradients: list[Value[Array] | None] = [None] * len(self.replicas)
        self._follows = self.learner.task is not None or setting.compression is not None
        self._operations = self._of_step()

    def _of_step(self) -> list[tuple[str, int]]:
        """Return what a worker does in a step, and with which average, in the order of the program's tasks."""
        after = [i for i, rule in enumerate(self.rules) if not rule.average.gradients]
        operations = [("bring", i) for i in after if self.rules[i].average.at_begin] + [("gradient", -1)]
        for i in sorted(set(range(len(self.rules))) - set(after)):
            operations += [("bring", i), ("merge", i)]
        operations.append(("update", -1))
        for i in after:
            brings = [] if self.rules[i].average.at_begin else [("bring", i)]
            merges = [("merge", i)]
            operations += merges + brings if self.rules[i].average.delay else brings + merges
        return operations

    # ------------------------------------------------------------ what a run asks for

    def runs(self, run: TableRun) -> None:
        """Remember who executes the tasks."""
        self._run = run
        plan, rows = run.steps.plan, run.steps.rows[1]
        merges = [("merge", i) for kind, i in self._operations if kind == "merge"]
        updates = np.flatnonzero(plan.kind[rows] == UPDATE)
        each = updates.reshape(len(self.replicas), -1)  # of each worker, in the order of its tasks
        ends = [operation for operation in self._operations if operation[0] in ("merge", "update")]
        assert each.shape[1] == len(ends) == len(merges) + 1
        self._ends: list[tuple[int, Ints]] = [
            (1 + self._operations.index(operation), each[:, place]) for place, operation in enumerate(ends)
        ]

    def learn_until(self, step: int) -> None:
        """Let models be what they are now that a step has ended, and others have begun."""
        if not self._follows:
            return
        width = len(self._operations)
        reached = np.full(len(self.replicas), (step + 1) * width)
        for later in range(step + 1, step + 1 + self._run.steps.live):
            tasks = self._run.tasks_of(later)
            ended = [(n, ~np.isnan(tasks["end"][rows])) for n, rows in self._ends]
            for n, which in ended:
                reached[which] = later * width + n
            if not ended[0][1].any():
                break
        for rank, until in enumerate(reached.tolist()):
            self._advance(rank, until)

    def bring(self, number: int, step: int, rank: int) -> None:
        """Let a worker bring what it brings to an average in a step, if it has not yet."""
        self._until("bring", number, step, rank)

    def merge(self, number: int, step: int, rank: int) -> None:
        """Let a worker go on with an average of a step, if it has not yet."""
        self._until("merge", number, step, rank)

    def _until(self, operation: str, number: int, step: int, rank: int) -> None:
        self._advance(rank, step * len(self._operations) + self._operations.index((operation, number)) + 1)

    def gradient(self, step: int, place: int) -> Value[Array]:
        raise AssertionError("workers with models of their own bring what their rules say")

    # ------------------------------------------------------------ values

    def _advance(self, rank: int, until: int) -> None:
        """Let a worker do what comes before the operation `until`, of all steps."""
        width = len(self._operations)
        while self._done[rank] < until:
            step, at = divmod(self._done[rank], width)
            self._done[rank] += 1
            self._do(self.replicas[rank], step, *self._operations[at])

    def _do(self, replica: Replica, step: int, operation: str, number: int) -> None:
        worker = replica.worker
        rank = worker.rank
        if operation == "gradient":
            began = self._run.began(step, rank)
            self._gradients[rank] = self.learner.gradient(rank, worker.params, self._run.samples(step), began)
        elif operation == "update":
            gradient = self._gradients[rank]
            if gradient is not None:
                worker.params, replica.state = replica.after(worker.params, gradient)
            replica.count()
        else:
            rule, rounds = self.rules[number], self._round_of[number][rank]
            if operation == "bring" and rule.average.steps.includes(step + 1):
                value = self._gradients[rank] if rule.average.gradients else worker.params
                value = value if rule.bring is None else rule.bring(replica)
                assert value is not None
                rounds.brings(step, worker, value)
            elif operation == "merge" and rule.average.merges.includes(step + 1):
                result: Any = None
                if rule.average.arrivals.includes(step + 1):
                    of = step - rule.average.delay
                    for member in rounds.communicator.workers:
                        self.bring(number, of, member.rank)
                    result = rounds.result(of)
                if rule.average.gradients:
                    worker.params, replica.state = result
                    self._gradients[rank] = None  # it is in the parameters
                elif rule.merge is None:
                    worker.params = result
                else:
                    rule.merge(replica, result)


@dataclass(frozen=True, eq=False)
class _ByGroup:
    """The exchange of each group (:class:`~ddlsim.runtime.exchange.Exchanges`)."""

    rounds: Sequence[_Rounds]

    def exchange(self, kind: int, group: int, *, parts: bool) -> Exchange:
        return self.rounds[group]

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        raise AssertionError("every worker has a model of its own")


def run_local_steps(setting: Setting, rules: Sequence[Rule], *, owner: str) -> list[Replica]:
    """Let all workers make local steps, and average as the rules say; return their models."""
    models = OwnModels(setting, rules)
    averages = [rule.average for rule in rules]
    accumulation = setting.workers[0].accumulation
    codes = setting.compression is not None
    live = max([2, *(each.delay + each.steps.period for each in averages)]) + 2
    run = TableRun(
        setting, lambda workloads: local_steps(workloads, averages, accumulation, codes=codes),
        lambda gradients, plan: _ByGroup([each for rule in rules for each in rule.rounds]), live=live, models=models,
        owner=owner,
    )  # fmt: skip
    models.runs(run)
    setting.loop.drive(run)
    return models.replicas
