"""Common parts of decentralised strategies.

They are a model per worker, local steps, the count of updates, and a common model with an outer optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.optim import Optimizer, OptimizerState
from ddlsim.optim.rules import with_layers
from ddlsim.plan.local_steps import Average, local_steps
from ddlsim.plan.plan import UPDATE, Ints
from ddlsim.plan.program import StepProgram
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.context import Process, RunContext, Worker
from ddlsim.runtime.costs import Phase
from ddlsim.runtime.exchange import Call, Exchange, Rounds, Route
from ddlsim.runtime.fabric import WithFabric
from ddlsim.runtime.table_run import TableRun
from ddlsim.workload.compute import Workload

if TYPE_CHECKING:
    import simpy


class Periodic(WithFabric):
    """A strategy whose workers average their models every ``period`` local steps."""

    period: int

    def cycle(self) -> int:
        """Return the steps between two averages over all workers."""
        return self.period

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: if messages are compressed, the latest
        average, from which they are differences."""
        return float(compressed)


@dataclass
class Replica:
    """A worker with its own model (``worker.params``) and optimizer state.

    n_workers  number of workers of the run
    ended      number of workers that have completed each step, by step index
    step       number of local steps that this worker has completed
    n_samples  number of samples that all workers together would have processed if each had completed `step` steps. The
               learning rate depends on this number, so it does not depend on the progress of other workers
    rate       learning rate of the latest step
    """

    worker: Worker
    n_workers: int
    ended: Counter[int]
    step: int = 0
    n_samples: int = 0
    #: learning rate of the latest step
    rate: float = 0.0
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the optimizer state, such as momentum."""
        self.state = self.worker.learner.optimizer_state(self.worker.params)

    def after(self, params: Value[Array], gradient: Value[Array]) -> tuple[Value[Array], State]:
        """Return the parameters and the optimizer state after a step from `params`."""
        learner = self.worker.learner
        self.rate = learner.rate(self.n_samples)
        return learner.update(params, gradient, self.state, self.rate)

    def local_step(self) -> Process:
        """Perform a local step, x_i <- x_i - eta g_i(x_i)."""
        worker = self.worker
        gradient = yield from worker.gradient()
        yield from worker.optimizer_step()
        worker.params, self.state = self.after(worker.params, gradient)
        self.count()

    def step_freely(self, gradient: Value[Array]) -> None:
        """Perform a step with the run's current learning rate, in an asynchronous run."""
        self.n_samples = self.worker.stop.n_samples
        self.worker.params, self.state = self.after(self.worker.params, gradient)
        self.count()

    def count(self, samples: int | None = None) -> None:
        """Count a completed step.

        samples  number of samples per worker in this step; None: the current number of samples per step
        """
        self.step += 1
        self.n_samples += (self.worker.samples_per_step if samples is None else samples) * self.n_workers

    def end_step(self) -> None:
        """Record that this worker has ended a synchronous step.

        When the last worker has ended it, the step counts as an update.
        """
        self.worker.end_step()
        self.ended[self.step] += 1
        if self.ended[self.step] == self.n_workers:
            del self.ended[self.step]
            self.worker.stop.updated(self.worker.samples_per_step * self.n_workers)


def replicas_of(context: RunContext) -> list[Replica]:
    """Return the replicas of all workers; the run hands over the mean of their models."""
    workers, learner = context.workers, context.learner
    context.model = lambda: learner.mean([worker.params for worker in workers])
    context.replicas = lambda: [worker.params for worker in workers]
    ended: Counter[int] = Counter()
    replicas = [Replica(worker, len(workers), ended) for worker in workers]
    context.steps = lambda: [replica.step for replica in replicas]
    context.mixture = "the mean of the models of workers"
    return replicas


def start_replicas(context: RunContext, work: Callable[[Replica], Process]) -> list[Replica]:
    """Start the process ``work(replica)`` for every worker, and return the replicas.

    The final model of the run is the mean of all workers' models.
    """
    replicas = replicas_of(context)
    for replica in replicas:
        context.loop.env.process(work(replica))
    return replicas


def need_values(context: RunContext, owner: str, why: str) -> None:
    """Raise ConfigError in a timing-only run, for a strategy that needs values."""
    if context.learner.task is None:
        raise ConfigError(f"{owner}: {why}; set training=ddlsim.Training('digits', ...)")


class Outer:
    """A global model that an outer optimizer updates, while the optimizer of the run performs the workers' local steps.

    optimizer  the outer optimizer
    params     the current global model w, shape (n_params,). It starts as the initial model of the run

    The outer gradient is the workers' mean model update, w - mean_i(x_i), possibly compressed (Reddi et al. 2021,
    "Adaptive Federated Optimization", arXiv:2003.00295, algorithm 1). The outer optimizer computes in float64, and w is
    then rounded to the dtype of the parameters. The running statistics of batch-norm layers are averaged instead,
    because momentum could make a variance negative.
    """

    def __init__(self, learner: Learner, optimizer: Optimizer) -> None:
        slots = () if learner.task is None else learner.task.network.slots
        self.plane = learner.plane
        self.optimizer = with_layers(optimizer, slots)
        self.params = learner.initial
        self._state: State = self.plane.apply(lambda w: self.optimizer.init(w.astype(np.float64)), self.params)

    def towards(self, mean: Value[Array], rate: float, unit: float = 1.0) -> Value[Array]:
        """Perform an outer step with learning rate `rate` and the gradient (w - mean) / unit, and return the new w.

        The running statistics of the new w are those of `mean`.
        """

        def away(params: Array, mean: Array) -> Array:
            return (params.astype(np.float64) - mean) / unit

        self.params = self.step(self.plane.apply(away, self.params, mean), rate).with_statistics_of(mean)
        return self.params

    def follow(self, mean: Value[Array]) -> Value[Array]:
        """Set w to `mean`, and return it."""
        self.params = mean
        return mean

    def step(self, gradient: Value[Array], rate: float) -> Value[Array]:
        """Perform an outer step with learning rate `rate`, and return the new w.

        Its running statistics are updated with those of the batches from which the gradient was computed.
        """

        def moved(params: Array, gradient: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
            wide = params.astype(np.float64), gradient.astype(np.float64)
            after, state = self.optimizer.update(*wide, state, rate)
            return after.astype(params.dtype), state

        statistics = self.params.statistics
        if statistics is not None:
            statistics = self.plane.merge_statistics(statistics, gradient.batch_statistics)
        done = self.plane.apply(moved, self.params, gradient, self._state)
        self.params = self.plane.apply(lambda pair: pair[0], done, statistics=statistics)
        self._state = self.plane.apply(lambda pair: pair[1], done)
        return self.params


# ---------------------------------------------------------------- local steps and averages


#: Bound on the tasks of the steps in flight. Workers that never average could be any number of steps apart.
MOST_TASKS = 1_000_000
#: number of steps by which workers can always be apart
MIN_LEAD = 1000


@dataclass(eq=False)
class Rule:
    """How workers use an average.

    average   its steps and groups
    members   of each of its groups, which exchange on their fabric
    bring     returns a worker's contribution; by default its model
    then      computes the result from the mean, once for each group; by default the mean
    merge     called for a worker with the result (None: no exchange); by default the result becomes its model
    decides   call `then` as soon as the mean is available: it chooses the next steps of the average
    models    True: contributions are models, compressed as differences from the model that all hold; False: they are
              compressed directly
    """

    average: Average
    members: Sequence[Communicator]
    bring: Callable[[Replica], Value[Array]] | None = None
    then: Callable[[Value[Array]], Any] | None = None
    merge: Callable[[Replica, Any], None] | None = None
    models: bool = True
    decides: bool = False
    rounds: list[_Rounds] = field(default_factory=list)


class _Rounds(Exchange, Rounds):
    """The rounds of an average in one group: an exchange that translates steps into numbers of rounds."""

    def __init__(self, models: OwnModels, number: int, rule: Rule, communicator: Communicator) -> None:
        Exchange.__init__(self, communicator)
        Rounds.__init__(self, communicator, rule.then, models=rule.models)
        self._own_models, self._number, self.rule = models, number, rule
        self.what, self.decodes, self.codec = self.by.what, self.by.decodes, self.by.codec

    def round(self, step: int) -> int:
        """Return the number of the round of a step: the number of earlier rounds."""
        return self.rule.average.steps.count(step)

    def _vector(self, number: int, place: int) -> Value[Array]:
        step = self.rule.average.steps.nth(number + 1) - 1
        self._own_models.bring(self._number, step, self.communicator.workers[place].rank)
        return super()._vector(number, place)

    # ------------------------------------------------------------ as an exchange

    @property
    def decides(self) -> bool:
        return self.rule.decides

    def arrived(self, worker: Worker, step: int) -> bool:
        current = self._rounds.get(self.round(step))
        self._own_models.merge(self._number, step, worker.rank)
        return current is None or current.n_done == 1

    @property
    def route(self) -> Route:
        return self.by.route

    def encode_seconds(self, worker: Worker, step: int, part: int) -> float:
        return self.by.encode_seconds(worker, self.round(step), 0)

    def decode_seconds(self, worker: Worker, step: int, part: int) -> float:
        return self.by.decode_seconds(worker, self.round(step - self.rule.average.delay), 0)

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        return self.by.carry(worker, self.round(step), [0], nbytes)

    def calls(self, step: int, parts: Sequence[int], nbytes: float, place: int = 0) -> list[Call]:
        return self.by.calls(self.round(step), [0], nbytes, place)

    def phases(self, step: int, parts: Sequence[int], nbytes: float) -> tuple[Phase, ...]:
        return self.by.phases(self.round(step), [0], nbytes)


class OwnModels:
    """The models of all workers, computed in the order in which the tasks of a program are executed.

    A worker makes a local step when its update has ended; the rules determine its contributions to averages and the use
    of their results.
    """

    overlap = True

    def __init__(self, context: RunContext, rules: Sequence[Rule]) -> None:
        self.context, self.learner, self.rules = context, context.learner, rules
        self.replicas = replicas_of(context)
        self.n_learners = len(self.replicas)
        for number, rule in enumerate(rules):
            rule.rounds = [_Rounds(self, number, rule, members) for members in rule.members]
        self._round_of = [
            {worker.rank: rounds for rounds in rule.rounds for worker in rounds.communicator.workers} for rule in rules
        ]
        self._done = [0] * len(self.replicas)  # operations completed by each worker, over all steps
        self._gradients: list[Value[Array] | None] = [None] * len(self.replicas)
        self._follows = self.learner.task is not None or context.compression is not None
        self._operations = self._of_step()

    def _of_step(self) -> list[tuple[str, int]]:
        """A worker's operations in a step, with their averages, in the order of the program's tasks."""
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
        """Set the run that executes the tasks."""
        self._run = run
        shape = run.bookings.shape(1)
        merges = [("merge", i) for kind, i in self._operations if kind == "merge"]
        updates = shape.tasks(np.flatnonzero(shape.plan.kind[shape.rows] == UPDATE))
        by_worker = updates.reshape(len(self.replicas), -1)  # per worker, in the order of its tasks
        ends = [operation for operation in self._operations if operation[0] in ("merge", "update")]
        assert by_worker.shape[1] == len(ends) == len(merges) + 1
        self._ends: list[tuple[int, Ints]] = [
            (1 + self._operations.index(operation), by_worker[:, place]) for place, operation in enumerate(ends)
        ]

    def learn_until(self, step: int) -> None:
        """Update models after the end of a step, including completed operations of later steps."""
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
        """Add a worker's contribution to an average in a step, unless it has already been added."""
        self._until("bring", number, step, rank)

    def merge(self, number: int, step: int, rank: int) -> None:
        """Let a worker use the average of a step, unless it has already done so."""
        self._until("merge", number, step, rank)

    def _until(self, operation: str, number: int, step: int, rank: int) -> None:
        self._advance(rank, step * len(self._operations) + self._operations.index((operation, number)) + 1)

    # ------------------------------------------------------------ values

    def _advance(self, rank: int, until: int) -> None:
        """Let a worker execute all operations before `until`, counted over all steps."""
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
            replica.count(self._run.samples(step))
        else:
            rule, rounds = self.rules[number], self._round_of[number][rank]
            if operation == "bring" and rule.average.steps.includes(step + 1):
                value = self._gradients[rank] if rule.average.gradients else worker.params
                value = value if rule.bring is None else rule.bring(replica)
                assert value is not None
                rounds.bring(rounds.round(step), worker, value)
            elif operation == "merge" and rule.average.merges.includes(step + 1):
                result: Any = None
                if rule.average.arrivals.includes(step + 1):
                    of = step - rule.average.delay
                    for member in rounds.communicator.workers:
                        self.bring(number, of, member.rank)
                    result = rounds.result(rounds.round(of))
                if rule.average.gradients:
                    worker.params, replica.state = result
                    self._gradients[rank] = None  # it is included in the parameters
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
        raise AssertionError("every worker has its own model")


def run_local_steps(context: RunContext, rules: Sequence[Rule], *, owner: str) -> list[Replica]:
    """Let all workers make local steps and average by the rules; return their models."""
    models = OwnModels(context, rules)
    averages = [rule.average for rule in rules]
    accumulation = context.workers[0].accumulation
    codes = context.compression is not None
    apart = max([2, *(average.delay + average.steps.period for average in averages)]) + 2
    n_tasks = len(models.replicas) * (2 * accumulation + 1 + 4 * len(averages))  # upper bound per step
    live = min(apart, max(MIN_LEAD, MOST_TASKS // n_tasks))

    def make(workloads: Sequence[Workload]) -> StepProgram:
        return local_steps(workloads, averages, accumulation, codes=codes)

    exchanges = _ByGroup([rounds for rule in rules for rounds in rule.rounds])
    TableRun(context, make(context.workloads), exchanges, models, make, live=live, owner=owner)
    return models.replicas
