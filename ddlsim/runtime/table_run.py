"""Runs of step programs: the kernel executes the tasks, and Python follows step by step."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddlsim.collectives.nccl import MESSAGE_CHANNELS, network_channels
from ddlsim.errors import ConfigError, DeadlockError
from ddlsim.learning import ABSENT, Array, Value
from ddlsim.network.executor import Executor, TaskTable
from ddlsim.network.state import Records
from ddlsim.network.tasks import ASKED, JOIN, MEETING, OPTIONAL, SKIPPED
from ddlsim.plan import plan as pl
from ddlsim.plan import transforms
from ddlsim.plan.folding import Folding
from ddlsim.plan.local_steps import MERGE
from ddlsim.plan.order import Order
from ddlsim.plan.plan import Bools, Chosen, Floats, Ints, Plan
from ddlsim.plan.program import LIVE, LiveSteps, StepProgram
from ddlsim.plan.transforms import DECODE, ENCODE, SUMMING, Task, as_messages, with_parameter_servers
from ddlsim.runtime.bookings import Bookings, Shape
from ddlsim.runtime.context import UNVARIED, RunContext, Worker, slow_rows
from ddlsim.runtime.exchange import Exchange, ExchangeKey, Exchanges, exchange_key
from ddlsim.runtime.loop import after
from ddlsim.workload.compute import Workload
from ddlsim.workload.contention import IN_MACHINE, NO_SLOWDOWN, OTHER, OverlapSlowdown

if TYPE_CHECKING:
    import simpy


def with_slowdowns(
    table: TaskTable, steps: LiveSteps, members: Sequence[Sequence[Worker]], context: RunContext
) -> TaskTable:
    """Add the slow-downs of workers to the tasks of steps; if several apply to a task, the largest factor counts."""
    program, (first, slow) = steps.program, slow_rows(members)
    plan, context.slows = program.template, True
    overlaps = any(worker.overlap_slowdown != NO_SLOWDOWN for workers in members for worker in workers)
    on_device = (plan.kind >= pl.SEND) | plan.on_device
    for slot in range(len(steps.rows) if slow or overlaps else 0):
        rows = program.rows(steps.sources[slot])
        place, busy = plan.rank[rows], np.flatnonzero(on_device[rows])
        for copies, tasks in steps.blocks(table.tasks, slot):
            if slow:
                tasks["slow"] = first[program.ranks[copies]][:, place]
            if overlaps:
                tasks["device"][:, busy] = program.ranks[copies][:, place[busy]]
    if not overlaps:
        return table._replace(slowdowns=slow)
    kinds, contention = np.unique(_channels(steps, members, context), return_inverse=True)
    different = {id(worker.overlap_slowdown): worker.overlap_slowdown for workers in members for worker in workers}
    beside = {key: [slowdown.beside(channels) for channels in kinds.tolist()] for key, slowdown in different.items()}
    factors = [[beside[key] for key in {id(worker.overlap_slowdown) for worker in workers}] for workers in members]
    slower = [list(map(max, *rows)) if len(rows) > 1 else rows[0] for rows in factors]
    return table._replace(slowdowns=slow, slower=slower, contention=contention)


def _channels(steps: LiveSteps, members: Sequence[Sequence[Worker]], context: RunContext) -> Ints:
    """Return how many channels of NCCL the exchange of each key uses between machines, (n_keys,).

    ``IN_MACHINE`` if all its ends are on one machine. ``OTHER`` if it goes through servers, if the slow-downs do not
    depend on the number, or if the key stands for several exchanges, each of them inside one machine.
    """
    program, plan, nodes = steps.program, steps.program.template, context.nodes
    host_of = context.hosts(nodes).tolist()
    hosts = [[host_of[worker.rank] for worker in workers] for workers in members]
    groups, n_groups = [list(group) for group in program.groups], len(program.groups)
    by_kind = all(isinstance(worker.overlap_slowdown, OverlapSlowdown) for workers in members for worker in workers)
    copy, row = (np.concatenate(parts) for parts in zip(*steps.of_keys, strict=True))
    message, served = plan.kind[row] < pl.ALL_REDUCE, plan.kind[row] == pl.PUSH_PULL  # through servers, elsewhere
    end, other = program.ranks[copy, plan.rank[row]], program.ranks[copy, np.where(message, plan.peer[row], 0)]
    group = np.full(len(row), n_groups)
    group[~message] = program.group_of[copy[~message], plan.peer[row[~message]]]

    def together(least: Sequence[int], most: Sequence[int]) -> Bools:
        low, high = np.array(least), np.array(most)
        within = np.array([*(low[ranks].min() == high[ranks].max() for ranks in groups), False])
        between = np.minimum(low[end], low[other]) == np.maximum(high[end], high[other])
        return np.asarray(np.where(message, between, within[group]) & ~served)

    channels = np.full(len(row), OTHER)
    if not by_kind:
        first = [machines[0] for machines in hosts]
        apart = ~together(first, first) & ~served
        channels[apart & message] = MESSAGE_CHANNELS
        numbers, which = np.unique(group[apart & ~message], return_inverse=True)
        used = [_group_channels(context, nodes, [members[rank][0] for rank in groups[i]]) for i in numbers.tolist()]
        channels[apart & ~message] = np.array(used, dtype=np.int64)[which]
    channels[together([min(machines) for machines in hosts], [max(machines) for machines in hosts])] = IN_MACHINE
    of_steps = np.split(channels, np.cumsum([program.n_keys(step) for step in range(steps.shown)])[:-1])
    return np.concatenate([of_steps[step] for step in steps.sources])


def _group_channels(context: RunContext, nodes: Sequence[int], workers: Sequence[Worker]) -> int:
    """Return how many NCCL channels the collectives of a group of workers on several machines use; `nodes` of all."""
    device = workers[0].workload.device
    group_nodes = tuple(nodes[worker.rank] for worker in workers)
    return network_channels(context.cluster, group_nodes, "" if device is None else device.name)


EVALUATION = "evaluation"
#: exchange that a rank waits for before it passes a micro-batch through the first layer
SAMPLES = "input"
#: workloads of all workers -> their step program
Make = Callable[[Sequence[Workload]], StepProgram]


class Models(Protocol):
    """The models that the steps of a run train.

    n_learners  number of contributors of gradients: the ranks 0, 1, ... with their own samples
    overlap     whether workers use models that lack earlier steps
    """

    n_learners: int
    overlap: bool

    def runs(self, run: TableRun) -> None:
        """Set the run that executes the steps."""

    def learn_until(self, step: int) -> None:
        """Apply all steps up to `step`."""


#: (step, parameters before its update) -> parameters that its micro-batches use
Met = Callable[[int, Value[Array]], Value[Array]]


class CommonModel:
    """The parameters that all workers hold, updated from the gradients of one step after the other; the model of the
    run.

    A gradient is computed when its step is applied, or when its value is needed earlier.

    n_learners  number of contributors of gradients: workers, or groups of workers that share a model; None: all workers
    met         maps a step and the parameters before its update to the parameters at which its gradients are computed,
                if steps overlap; by default those before the update
    """

    def __init__(self, context: RunContext, n_learners: int | None = None, met: Met | None = None) -> None:
        self.learner, self._met, self.overlap = context.learner, met, met is not None
        self.n_learners = len(context.workers) if n_learners is None else n_learners
        self.params: Value[Array] = self.learner.initial
        self.state = self.learner.optimizer_state(self.params)
        context.model, context.optimizer = lambda: self.params, lambda: self.state
        self._n_samples = 0
        self._n_steps = 0  # number of updates applied
        self._gradients: dict[int, dict[int, Value[Array]]] = {}

    def runs(self, run: TableRun) -> None:
        """Set the run that executes the steps."""
        self._run = run

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return the gradient of a step that has been begun but not applied."""
        if self.learner.task is None:
            return ABSENT
        gradients = self._gradients.setdefault(step, {})
        if place not in gradients:
            self.learn_until(step - 1)  # every worker's gradient of those steps has begun
            met = self.params if self._met is None else self._met(step, self.params)
            gradients[place] = self.learner.gradient(place, met, self._run.samples(step), self._run.began(step, place))
        return gradients[place]

    def learn_until(self, step: int) -> None:
        """w <- w - eta * (1/N) sum_i g_i, for all steps up to `step`"""
        while self._n_steps <= step:
            gradients = [self.gradient(self._n_steps, place) for place in range(self.n_learners)]
            mean, rate = self._run.exchanges.mean(self._n_steps, gradients), self.learner.rate(self._n_samples)
            self.params, self.state = self.learner.update(self.params, mean, self.state, rate)
            self._n_samples += self._run.samples(self._n_steps) * self.n_learners
            self._gradients.pop(self._n_steps, None)
            self._n_steps += 1


def is_one_step(context: RunContext, live: int = LIVE) -> bool:
    """Return whether a run ends with its first step."""
    return not context.shows_plan and live == LIVE and context.stop.n_updates == 1 and context.learner.task is None


def disturbed(context: RunContext) -> str:
    """Return why equal workers may behave differently, or why other traffic uses their links; "" if neither happens."""
    loop, workers = context.loop, context.workers
    reasons = {
        "every rank is to be shown": context.shows_plan,
        "others use the network": loop.network.is_shared,
        "faults change links": loop.network.changes,
        "pauses": len(loop.network.pauses) > 0,
        "workers stand still": any(context.recorder.stops.values()) or any(context.crashes),
        "compute times vary": any(worker.factors is not UNVARIED or worker.slowdowns for worker in workers),
        "overlap_slowdown": any(worker.overlap_slowdown != NO_SLOWDOWN for worker in workers),
        "workers read samples": workers[0].feed is not None,
        "workers learn": context.learner.task is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class TableRun:
    """Execution of a step program, step after step, until the run ends; it becomes the driver of the run.

    Compute times are the plan's, multiplied by a factor that is drawn for each worker and micro-batch; a rank that
    represents several workers uses the largest factor. Values follow the clock: they are computed when a step has
    ended, or when the size of a compressed message depends on them.

    exchanges   of the program's collectives
    model       the trained models
    make        returns the program for other workloads of the workers; None: the program cannot change
    folding     the workers that each rank represents, which act identically; by default rank r is worker r
    live        number of steps that can be in flight
    owner       name of the strategy, for messages
    beside_first
                number of steps, including the first, that devices may have entered before the first one has ended

    Raises ConfigError for batches that change, without `make`.
    """

    def __init__(
        self, context: RunContext, program: StepProgram, exchanges: Exchanges, model: Models, make: Make | None = None,
        *, folding: Folding | None = None, live: int = LIVE, owner: str = "this strategy", beside_first: int = LIVE,
    ) -> None:  # fmt: skip
        if make is None and context.workers[0].workload_at is not None:
            raise ConfigError(
                "training: growing_batch and phases change the step time, but this strategy executes one "
                "plan for the whole run; simulate each batch size separately"
            )
        self.context, self.learner, self._make = context, context.learner, make
        self.exchanges, self.model = exchanges, model
        self.members: list[list[int]] = (
            [[worker.rank] for worker in context.workers] if folding is None else folding.members.tolist()
        )
        if folding is not None:
            context.loop.stand_for(folding.copies, folding.shared)
        self.workers = [context.workers[indices[0]] for indices in self.members]
        program = self._program = self._with_more(program)
        context.plan = self.plan
        once = is_one_step(context, live)
        self.steps = steps = program.live_steps(beside_first - 1, repeat=False) if once else program.live_steps(live)
        self._last: dict[int, Floats] = {}  # (n_ranks,) factor of the last micro-step, by step
        self.calls = calls = Calls(self, owner)
        said = {way: exchange.what for way, exchange in calls.exchanges.items()}
        shapes = [Shape(program, step, said) for step in range(steps.shown)]
        passes = None if folding is None else folding.passes.which(program.template)
        self.bookings = Bookings(
            context.recorder, self.members, shapes, context.loop.now, folding=folding, passes=passes
        )
        #: by the first worker's workload, which the list holds and so keeps the number of
        workloads = context.workloads
        self._regimes = {id(workloads[0]): (workloads, self._seconds(program))}
        self._exchanging = None
        if folding is not None and passes is not None:
            self._exchanging = [
                folding.exchanging(program.ranks_of(shape.rows), passes[shape.rows]) for shape in shapes[:2]
            ]
        self._varies = any(worker.factors is not UNVARIED for worker in context.workers)
        self.done = 0  # completed steps
        self._ended: set[int] = set()  # slots whose steps have ended out of order
        self._refused: dict[int, ConfigError] = {}  # steps that cannot be executed, and why
        self._late = [steps.has_late] * len(steps.rows)  # per slot: whether late tasks are left
        self.step_in = list(range(len(steps.rows)))  # per slot: the step that it executes
        self._waiting: deque[int] = deque()  # slots whose steps have been completed, to be armed again
        self._n_armed = 0
        self._drawn = 0  # samples of each contributor in all armed steps
        self._armed: dict[int, list[Workload]] = {}  # workloads of all workers in the armed steps
        self._kinds = [calls.kinds[:, shape.rows] for shape in shapes[:2]]
        table = steps.table(calls.kinds, (self._arm() for _ in steps.rows))
        members = [[context.workers[i] for i in indices] for indices in self.members]
        self.executor = Executor(
            with_slowdowns(table, steps, members, context), context.loop.network, calls.collective, calls.buffer_nbytes,
            program.template.queues, calls.messages, bystanders=calls.n_bystanders, outside=calls, meets=calls.meets,
            start=context.loop.now,
        )  # fmt: skip
        if program.template.cycles:
            self.set_kinds(range(self._n_armed))
        model.runs(self)
        context.devices.append(self.executor.tables.devices)
        context.loop.driver = self

    def _kind(self, step: int) -> Ints:
        """Return the kinds of a step's tasks (:mod:`ddlsim.network.tasks`), SKIPPED for averages in other steps, (1 or
        n_copies, n)."""
        kind, plan = self._kinds[min(step, 1)], self._program.template
        if not plan.cycles:
            return kind
        left_out = np.array([False, *(not cycle.includes(step + 1) for cycle in plan.cycles)])
        return np.where(left_out[plan.every[self.bookings.shape(min(step, 1)).rows]], SKIPPED, kind)

    def set_kinds(self, steps: Iterable[int]) -> None:
        """Update the kinds of the tasks in those `steps` that no rank has begun."""
        for step in steps:
            if not self.done <= step < self._n_armed:
                continue
            tasks = self.tasks_of(step)
            if np.isnan(tasks["start"]).all():
                tasks.reshape(len(self._program.ranks), -1)["kind"] = self._kind(step)

    def plan(self, steps: int | None) -> Plan:
        """Return the plan of the first steps as they are executed, of one cycle by default."""
        plan = self._program.unroll(self._program.cycle if steps is None else steps)
        return as_executed(plan, self.calls.exchanges, self.workers)

    def tasks_of(self, step: int) -> Records:
        """Return the tasks of a step in flight."""
        tasks: Records = self.executor.tasks[self.steps.rows[self.steps.slot(step)]]
        return tasks

    def _with_more(self, program: StepProgram) -> StepProgram:
        """Add tasks for evaluations, encoding and decoding, samples, and fixed costs of the software."""
        self.context.counts_calls = True
        first, several = self.workers[0].workload, len(self.context.workers) > 1
        step, call = first.host_time, first.stack.call_time * several
        if step or call:
            program = program.map(functools.partial(transforms.with_fixed_costs, step=step, call=call))
        if call and program.template.queues:
            what = f"call_time of stack {first.stack.name} does not delay collectives launched by a queue"
            self.context.notes.append(what)
        if self.context.compression is not None and not program.template.cycles:
            plan = program.template
            sums = np.flatnonzero(np.isin(plan.kind, SUMMING) & (plan.part >= 0))
            for row in sums[:1].tolist():
                kind, group = int(plan.kind[row]), int(program.group_of[0, plan.peer[row]])
                exchange = self.exchanges.exchange(kind, group, parts=True)
                if exchange is not None:
                    decodes, together = exchange.decodes, kind == pl.REDUCE_SCATTER
                    program = program.map(functools.partial(transforms.with_codes, decodes=decodes, together=together))
        if self.learner.task is not None:
            program = program.map(functools.partial(transforms.with_evaluations, name=EVALUATION))
        if self.workers[0].feed is not None:
            program = program.map(functools.partial(transforms.with_samples, name=SAMPLES))
        return program

    # ------------------------------------------------------------ running

    @property
    def over(self) -> bool:
        return self.context.stop.over

    def next(self) -> float:
        return self.executor.next()

    def go(self, limit: float, halt: Callable[[], bool] | None) -> None:
        """Go on as :class:`~ddlsim.runtime.loop.Driver` says; `halt` is asked when a step has ended."""
        loop, stop = self.context.loop, self.context.stop
        self._charge()
        while not stop.over:
            loop.check()
            if halt is not None and halt():
                break
            slot = self.executor.run(limit)
            while slot is None and not loop.network.others_wait and self.calls.turn(limit):
                slot = self.executor.run(limit)
            loop.pass_time(self.executor.now)
            if slot is None:
                if not self.executor.under_way and self.calls.next() == np.inf:
                    raise self._deadlock()
                if not loop.network.others_wait:
                    loop.pass_time(limit)
                return
            if slot > self.steps.live:  # tasks that its step does not wait for have ended
                self._late[slot - self.steps.live - 1] = False
                self._arm_waiting()
                continue
            self._ended.add(slot)
            while self.steps.slot(self.done) in self._ended and not stop.over:
                self._end_step()
        self.executor.end_instant()
        while self.calls.meets and self.calls.turn(self.executor.now):
            self.executor.end_instant()

    def _end_step(self) -> None:
        """Complete the next step: all its tasks have ended, and so have those of earlier steps."""
        step, slot = self.done, self.steps.slot(self.done)
        if step in self._refused:
            raise self._refused[step]
        self._ended.discard(slot)
        self.model.learn_until(step)
        self._book(step, self.tasks_of(step))
        samples = self.samples(step)
        self.done += 1
        if slot > 0:
            self._waiting.append(slot)
            self._arm_waiting()
        self._resize()
        self.context.stop.updated(samples * self.model.n_learners)
        self._charge()

    def _arm_waiting(self) -> None:
        """Reuse slots whose tasks have all ended for the next steps, in order."""
        while self._waiting and not self._late[self._waiting[0]]:
            slot = self._waiting.popleft()
            n_keys = self.steps.keys[-1].stop - self.steps.keys[1].start
            kind = self._kind(self._n_armed)
            self._late[slot], self.step_in[slot] = self.steps.has_late, self._n_armed
            self.executor.arm(self.steps.rows[slot], self.steps.keys[slot], self._arm(), kind, n_keys)

    def _deadlock(self) -> DeadlockError:
        rows = self.steps.rows[self.steps.slot(self.done)]
        stuck = int(np.flatnonzero(np.isnan(self.executor.tasks["end"][rows]))[0])
        _ = Order(self.steps.plan).events  # raises, naming the cycle that contains the task
        task = self.steps.describe(self.steps.slot(self.done), stuck)
        return DeadlockError(f"deadlock at {self.executor.now:.6g} s: {task} never finishes")

    # ------------------------------------------------------------ compute times

    def factor(self, step: int, rank: int) -> float:
        """Return the factor of a rank's compute times in the last micro-step of a step."""
        return float(self._last[step][rank])

    def _seconds(self, program: StepProgram) -> list[Floats]:
        """Return the seconds of the tasks of a first and a later step, (1 or n_copies, n) each; NaN if known only when
        a task starts."""
        seconds = [(program.of_devices("seconds", step), self.calls.asked[:, program.rows(step)]) for step in range(2)]
        return [np.where(asked, np.nan, values) if asked.any() else values for values, asked in seconds]

    def _arm(self) -> Floats:
        """Return the durations of the next step's tasks in s, for its workloads and with its factors, (1 or n_copies,
        n)."""
        step = self._n_armed
        self._n_armed += 1
        try:
            workloads, seconds = self._regime(self.learner.epoch(self._drawn * self.model.n_learners))
        except ConfigError as error:  # raised only if the run reaches this step
            self._refused.setdefault(step, error)
            workloads, seconds = next(reversed(self._regimes.values()))
        self._armed[step] = workloads
        self._drawn += self.samples(step)
        shape = self.bookings.shape(min(step, 1))
        if not self._varies:
            self._last[step] = np.ones(len(self.members))
            return seconds[min(step, 1)]
        n = int(shape.micro.max(initial=0)) + 1
        factors = np.concatenate([self.context.workers[i].factors.take(n) for indices in self.members for i in indices])
        sizes = np.array([len(indices) for indices in self.members])
        largest = np.maximum.reduceat(factors.reshape(-1, n), np.cumsum(sizes) - sizes)
        self._last[step] = largest[:, -1]
        self._last.pop(step - self.steps.live - 2, None)
        factor: Floats = largest[self._program.ranks_of(shape.rows), shape.micro]
        if self._exchanging is None:
            return seconds[min(step, 1)] * factor
        exchanging = self._exchanging[min(step, 1)]
        return (seconds[min(step, 1)] - exchanging) * factor + exchanging

    def _regime(self, epoch: float) -> tuple[list[Workload], list[Floats]]:
        """Return all workers' workloads at an epoch, and the seconds of the tasks of a first and a later step."""
        workers = self.context.workers
        if self._make is None or workers[0].workload_at is None:
            return next(iter(self._regimes.values()))
        key = id(workers[0].workload_at(epoch))
        if key not in self._regimes:
            workloads = [worker.workload_at(epoch) for worker in workers if worker.workload_at is not None]
            self._regimes[key] = workloads, self._seconds(self._with_more(self._make(workloads)))
        return self._regimes[key]

    def workload(self, step: int, rank: int) -> Workload:
        """Return the workload of a rank's first worker in a step."""
        return self._armed[step][self.members[rank][0]]

    def samples(self, step: int) -> int:
        """Return the number of samples of each contributor in a step."""
        return self._armed[step][0].batch_size * self.context.workers[0].accumulation

    def _resize(self) -> None:
        """Set the workers' workloads to those of the steps that they are in."""
        if self.workers[0].workload_at is None:
            return
        for rank, workers in enumerate(self.members):
            begun = not np.isnan(self._first_task(rank, self.done)["start"])
            for worker in workers:
                self.context.workers[worker].workload = self._armed[self.done if begun else self.done - 1][worker]

    def _first_task(self, rank: int, step: int) -> Records:
        """Return the first task of a rank's device in a step in flight."""
        shape = self.bookings.shape(step)
        task: Records = self.tasks_of(step)[shape.task(rank, shape.device[shape.first])]
        return task

    def began(self, step: int, place: int) -> float:
        """Return when a contributor began the gradient of a step, s."""
        shape, rank = self.bookings.shape(step), place * self._program.template.tensor
        return float(self.tasks_of(step)["start"][shape.task(rank, shape.begins)])

    def _charge(self) -> None:
        """Add the first worker's pending evaluation, if any, to the next step that it begins."""
        worker = self.context.workers[0]
        if not worker.owed:
            return
        for step in range(self.done, self.done + self.steps.live):
            task = self._first_task(0, step)
            if np.isnan(task["start"]):
                task["seconds"] += worker.owed * (self.factor(step - 1, 0) if step else 1.0)
                worker.owed = 0.0
                break

    # ------------------------------------------------------------ what follows

    def _book(self, step: int, rows: Records, now: float = np.inf) -> None:
        self.bookings.step(step, rows, now)
        if not self.context.recorder.keep_spans:
            return
        shape, program, slot = self.bookings.shape(step), self._program, self.steps.slot(step)
        launched, rank = self.calls.launched.pop(slot, []), program.ranks_of(shape.rows).ravel()
        if program.template.queues == ():
            for name, exchanged in shape.exchanges:
                self.bookings.exchange(name, rank[exchanged], rows, exchanged)
            return
        keyed = np.flatnonzero(program.template.key[shape.rows] >= 0)
        key, tasks = program.keys_of(shape.rows.start + keyed).ravel(), shape.tasks(keyed)
        for keys in launched:
            exchanged = tasks[key == keys[0] - self.steps.keys[slot].start]
            self.bookings.exchange(f"{len(keys)} buckets of step {step}", rank[exchanged], rows, exchanged)

    def close(self) -> None:
        """Book unfinished tasks, report what ranks wait for, and release the tasks, which are large. Called once."""
        now = max(self.executor.now, self.context.loop.network.now)
        self.context.loop.pass_time(now)
        self.context.loop.nbytes_asked += self.executor.nbytes_sent
        waits: dict[int, str] = {}
        if not self.over:  # a rank may be past the last step that all ranks have ended
            self.model.learn_until(self.done - 1)
        for step in range(self.done, self.done + self.steps.live):
            shape, rows = self.bookings.shape(step), self.tasks_of(step)
            left = np.flatnonzero(np.isnan(rows["start"][shape.tasks(shape.device)]))
            ranks, first = np.unique(shape.rank[left], return_index=True)
            for rank, place in zip(ranks.tolist(), (left[first] % len(shape.device)).tolist(), strict=True):
                waits.setdefault(rank, self._missing(step, shape.rows.start + int(shape.device[place])))
            if np.isnan(rows["start"]).all():
                break
            self._book(step, rows, now)
            if step == self.done and not self.model.overlap and (self.bookings.step_end[-1] <= now).any():
                self.model.learn_until(step)  # a rank has finished this step
        self.bookings.close(now, waits)
        if self.bookings.folding is not None:
            self.context.loop.book(*self.bookings.exchanged(self.context.loop.network.n_channels))
        # a run and its context refer to each other, so the rest is freed only when Python looks for such cycles
        del self.executor, self.calls, self.steps, self.bookings

    def _missing(self, step: int, row: int) -> str:
        """Describe what a task waits for."""
        plan = self._program.template
        if plan.every[row]:
            return f"the average of step {step + 1}"
        if plan.kind[row] != pl.FORWARD:
            return f"the gradients of step {step}"
        if self.workers[0].accumulation > 1:
            return f"the parameters of step {step}"
        return f"the parameters of layer {plan.first[row]}"


class Calls:
    """Callbacks from the tasks of a run to Python while the kernel executes them
    (:class:`~ddlsim.network.executor.Executor`): for collectives of known time, or executed by processes; for the time
    of encoding and decoding, which can depend on values; for samples; and for averages that decide on later ones.

    Raises ConfigError for a collective without an exchange.
    """

    def __init__(self, run: TableRun, owner: str) -> None:
        self.run, self.context, self.loop, self.steps = run, run.context, run.context.loop, run.steps
        self.nodes = np.array([worker.node for worker in run.workers], dtype=np.int64)
        self.launched: dict[int, list[list[int]]] = {}  # keys of each launched buffer, per slot
        self.program = program = self.steps.program
        self.plan = plan = program.template
        rows = plan.collectives[plan.collectives < program.rows(self.steps.shown - 1).stop]
        codes = (plan.kind[rows] * len(plan.groups) + plan.peer[rows]) * 2 + (plan.part[rows] >= 0)
        _, first, which = np.unique(codes, return_index=True, return_inverse=True)
        firsts = rows[first].tolist()  # a row of each different collective of the template
        self.exchanges: dict[ExchangeKey, Exchange] = {}
        new = [
            (int(plan.step[row]), int(copy), row)
            for row in firsts
            for copy in np.unique(program.group_of[:, plan.peer[row]], return_index=True)[1]
        ]
        for _, copy, row in sorted(new):
            self.exchanges[self._key_of(copy, row)] = self._exchange(copy, row, owner)
        copies = range(len(program.ranks))
        of_copies = [[self.exchanges[self._key_of(copy, row)].route for row in firsts] for copy in copies]
        routes = np.array(of_copies, dtype=np.str_)
        routes = routes[:1] if (routes == routes[:1]).all() else routes
        timed, process = (np.zeros((len(routes), len(plan)), dtype=np.bool_) for _ in range(2))
        timed[:, rows], process[:, rows] = (routes == "known")[:, which], (routes == "process")[:, which]
        #: whether some collectives are not simulated by schedules, so that `meet` executes what queues launch
        self.meets = bool((routes != "schedule").any())
        #: ranks without tasks in every collective
        self.n_bystanders = max((exchange.communicator.n_bystanders for exchange in self.exchanges.values()), default=0)
        #: row of the template that sums a part, by place and part
        self._summing = _summing(plan)
        self.coding, self.sampling = _named(plan, ENCODE, DECODE), _named(plan, SAMPLES)
        self.deciding = _named(plan, MERGE)
        for row in np.flatnonzero(self.deciding).tolist():
            self.deciding[row] = self._sum(0, row).decides
        #: whether Python determines the duration of each row when it begins, (1 or n_copies, n)
        self.asked = self.coding | self.sampling | self.deciding | (process & (plan.queue < 0))
        #: what the rows of the template are for the executor, (1 or n_copies, n)
        self.kinds = np.where(timed & (self.steps.every.tasks["kind"] == JOIN), MEETING, self.steps.every.tasks["kind"])
        self.kinds[self.asked] = ASKED
        self.kinds[:, _named(plan, EVALUATION)] = OPTIONAL
        self._brought: dict[tuple[int, int, int], tuple[int, simpy.Event | None]] = {}

    def _key_of(self, copy: int, row: int) -> ExchangeKey:
        """Return the key of the exchange of a collective."""
        kind, group, parts = exchange_key(self.plan, row)
        return kind, int(self.program.group_of[copy, group]), parts

    def _sum(self, copy: int, row: int) -> Exchange:
        """Return the exchange that sums the part of a row."""
        summing = self._summing[int(self.plan.rank[row]), int(self.plan.part[row])]
        return self.exchanges[self._key_of(copy, summing)]

    def _exchange(self, copy: int, row: int, owner: str) -> Exchange:
        """Return the exchange of a collective."""
        exchanges, (kind, group, parts) = self.run.exchanges, self._key_of(copy, row)
        exchange = exchanges.exchange(kind, group, parts=parts)
        if exchange is None:
            every = [exchanges.exchange(other, group, parts=parts) for other in range(len(pl.KINDS))]
            names = " and ".join(name for name, other in zip(pl.KINDS, every, strict=True) if other is not None)
            rows = self.program.rows(step := int(self.plan.step[row]))
            task = self.steps.describe(step, copy * (rows.stop - rows.start) + row - rows.start)
            raise ConfigError(f"plan: {task}: {owner} does not support this collective in a run; supported: {names}")
        return exchange

    @functools.cached_property
    def buffer_nbytes(self) -> Floats:
        """Bytes of the buffer of each key, (n_keys,), as queues see it: encoded, if the run compresses."""
        sizes, plan = self.steps.key_sizes, self.plan
        if self.context.compression is None or not plan.queues:
            return sizes
        sizes = sizes.copy()
        for step, keys in zip(self.steps.sources, self.steps.keys, strict=True):
            copies, rows = self.steps.of_keys[step]
            for i in np.flatnonzero(np.isin(plan.kind[rows], SUMMING) & (plan.part[rows] >= 0)).tolist():
                exchange, part = self.exchanges[self._key_of(int(copies[i]), int(rows[i]))], int(plan.part[rows[i]])
                sizes[keys.start + i] = exchange.buffer_nbytes(part, float(sizes[keys.start + i]))
        return sizes

    # ------------------------------------------------------------ collectives and messages

    def collective(self, keys: list[int]) -> int:
        """Prepare a collective, simulated by a schedule, that carries `keys`; return its id."""
        exchange, step, parts, nbytes = self._carried(keys)
        (call,) = exchange.calls(step, parts, nbytes)
        return self.loop.collective(call.planned(), exchange.communicator.all_nodes, call.nbytes)

    def messages(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        """Return the source nodes, target nodes and bytes of messages."""
        (_, copies, rows), ranks = self.steps.locate(rows), self.program.ranks
        sources, targets = ranks[copies, self.plan.rank[rows]], ranks[copies, self.plan.peer[rows]]
        return self.nodes[sources], self.nodes[targets], self.plan.nbytes[rows]

    def meet(self, keys: list[int], queue: int) -> None:
        """Execute collectives that all members have entered, launched together by `queue` (-1: none)."""
        executor = self.run.executor
        self.loop.pass_time(executor.now)
        exchange, step, parts, nbytes = self._carried(keys)
        members = [executor.members(key) for key in keys]
        if exchange.route == "known":
            finished = self.loop.env.event()

            def ended(end: float) -> None:
                executor.end(np.concatenate(members), end)
                if queue >= 0:
                    self.loop.trigger_at(finished, end)

            exchange.communicator.run(exchange.phases(step, parts, nbytes), ended)
        else:
            ends = [exchange.carry(worker, step, parts, nbytes) for worker in exchange.communicator.workers]
            for place, arrival in enumerate(ends):
                self._end_after(arrival, [int(rows[place]) for rows in members])
            finished = self.loop.env.all_of(ends)
        if queue >= 0:
            after(finished, lambda _: executor.dispatchers[queue].ended(executor.now))

    def _carried(self, keys: list[int]) -> tuple[Exchange, int, list[int], float]:
        """Return the exchange of `keys` as one, its step, their parts, and their bytes."""
        slot = bisect.bisect_right(self.steps.keys, keys[0], key=lambda keys: keys.start) - 1
        copies, of_keys = self.steps.of_keys[self.steps.sources[slot]]
        at = [key - self.steps.keys[slot].start for key in keys]
        if self.context.recorder.keep_spans and self.plan.queues:
            self.launched.setdefault(slot, []).append(keys)
        nbytes = float(self.steps.key_sizes[keys[0]])
        for key in keys[1:]:  # one after the other, as buffers are filled
            nbytes += float(self.steps.key_sizes[key])
        exchange = self.exchanges[self._key_of(int(copies[at[0]]), int(of_keys[at[0]]))]
        return exchange, self.run.step_in[slot], self.plan.part[of_keys[at]].tolist(), nbytes

    def begins(self, task: int) -> float:
        """Return the duration in s of a task of kind ASKED that begins, or infinity if :meth:`Executor.end` ends it."""
        plan, run = self.plan, self.run
        slot, copy, row = (int(index[0]) for index in self.steps.locate(np.array([task])))
        step, part = run.step_in[slot], int(plan.part[row])
        rank = int(self.program.ranks[copy, plan.rank[row]])
        worker = run.workers[rank]
        self.loop.pass_time(run.executor.now)
        if self.coding[row]:
            exchange, factor = self._sum(copy, row), run.factor(step, rank)
            if plan.names[plan.name[row]] == ENCODE:
                return exchange.encode_seconds(worker, step, part) * factor
            if plan.queues:  # may belong to the previous step
                step += int(plan.step[plan.needs[plan.need_offsets[row]]]) - int(plan.step[row])
            return exchange.decode_seconds(worker, step, part) * factor
        if self.deciding[row]:
            if self._sum(copy, row).arrived(worker, step):
                run.set_kinds(cycle.steps[-1] - 1 for cycle in plan.cycles if isinstance(cycle, Chosen))
            return 0.0
        if self.sampling[row]:
            event = self._samples(step, copy, row)
            if event is None or event.triggered:
                return 0.0
        else:
            event = self.exchanges[self._key_of(copy, row)].carry(worker, step, [part], float(plan.nbytes[row]))
        self._end_after(event, [task])
        return float("inf")

    def _end_after(self, event: simpy.Event, tasks: list[int]) -> None:
        """End tasks when an event occurs."""
        executor = self.run.executor
        after(event, lambda _: executor.end(tasks, executor.now))

    # ------------------------------------------------------------ samples

    def _samples(self, step: int, copy: int, row: int) -> simpy.Event | None:
        """Return the event of a rank's next samples, None if they are available. The first of the ranks that share a
        micro-batch reads it."""
        batch, places = self._batches[row]
        left, event = self._brought.pop((step, copy, batch), (len(places), None))
        if left == len(places):
            worker = self.run.workers[reader := int(self.program.ranks[copy, places].min())]
            assert worker.feed is not None
            event = worker.feed.take(worker.rank, self.run.workload(step, reader).batch_size)
        if left > 1:
            self._brought[step, copy, batch] = left - 1, event
        return event

    @functools.cached_property
    def _batches(self) -> dict[int, tuple[int, Ints]]:
        """For each row that waits for samples: its micro-batch, and the places of the ranks that share it."""
        plan = self.plan
        passes = np.flatnonzero((plan.kind == pl.FORWARD) & (plan.first == 0))
        batch = dict(zip(plan.previous[passes].tolist(), plan.batch[passes].tolist(), strict=True))
        groups: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(self.sampling).tolist():
            groups.setdefault((int(plan.step[row]), batch.get(row, -1)), []).append(row)
        return {row: (number, plan.rank[rows]) for (_, number), rows in groups.items() for row in rows}

    # ------------------------------------------------------------ processes

    def next(self) -> float:
        """Return the time of the next event of processes, s; tasks do not run beyond it."""
        return self.run.executor.now if self.loop.asks else self.loop.peek()

    def completed(self, ids: Ints, ranks: Ints) -> None:
        """The network has completed messages, or collectives on ranks, that belong to no task, (n,)."""
        self.loop.pass_time(self.run.executor.now)
        self.loop.complete(ids, ranks, self.run.executor.now)

    def turn(self, limit: float) -> bool:
        """Process all events of the next instant up to `limit` (s); return whether there were any."""
        now = self.next()
        if now > limit or now == np.inf:
            return False
        self.run.executor.reach(now)
        self.loop.turn(now)
        return True


def _summing(plan: Plan) -> dict[tuple[int, int], int]:
    """Return the row that sums a part, by rank and part."""
    rows = np.flatnonzero(np.isin(plan.kind, SUMMING) & (plan.part >= 0))[::-1].tolist()
    return dict(zip(zip(plan.rank[rows].tolist(), plan.part[rows].tolist(), strict=True), rows, strict=True))


def _named(plan: Plan, *names: str) -> Bools:
    return np.isin(plan.name, [number for number, name in enumerate(plan.names) if name in names])


def as_executed(plan: Plan, of_keys: Mapping[ExchangeKey, Exchange], workers: Sequence[Worker]) -> Plan:
    """Return a plan with the tasks that its exchanges, `of_keys`, add.

    workers  the worker of each rank

    An encoded collective becomes the collectives that its codec needs, one task each. A sum through servers becomes a
    push-pull, or messages if the encoded answer has another size.
    """
    exchanges = {row: of_keys[exchange_key(plan, row)] for row in plan.collectives.tolist()}
    different = list(dict.fromkeys(exchanges.values()))
    plan = _with_seconds(plan, exchanges, workers)
    notes = dict.fromkeys([*plan.notes, *(note for exchange in different for note in exchange.plan_notes)])
    plan = dataclasses.replace(plan, notes=tuple(notes))
    coded = {row: exchange for row, exchange in exchanges.items() if exchange.codec is not None}
    n_servers = max((exchange.communicator.n_bystanders for exchange in different), default=0)
    if not n_servers:
        return _in_calls(plan, coded, workers)
    services = {
        int(plan.key[row]): exchange.service(int(plan.step[row]), int(plan.part[row]))
        for row, exchange in coded.items()
    }
    plan = with_parameter_servers(plan, n_servers)
    return as_messages(plan, services) if services else plan


def _with_seconds(plan: Plan, exchanges: Mapping[int, Exchange], workers: Sequence[Worker]) -> Plan:
    """Set the durations of encoding and decoding in a plan."""
    coding = _named(plan, ENCODE, DECODE)
    if not coding.any():
        return plan
    summing, seconds = _summing(plan), plan.seconds.copy()
    for row in np.flatnonzero(coding).tolist():
        rank, part = int(plan.rank[row]), int(plan.part[row])
        exchange = exchanges[summing[rank, part]]
        of = exchange.encode_seconds if plan.names[plan.name[row]] == ENCODE else exchange.decode_seconds
        seconds[row] = of(workers[rank], int(plan.step[row]), part)
    return dataclasses.replace(plan, seconds=seconds)


def _in_calls(plan: Plan, coded: Mapping[int, Exchange], workers: Sequence[Worker]) -> Plan:
    """Replace each encoded collective of a plan by those that its codec needs."""
    groups = {group: number for number, group in enumerate(plan.groups)}
    keys: dict[tuple[int, int, int], int] = {}
    tasks: dict[int, list[Task]] = {}
    for row, exchange in coded.items():
        place = exchange.place[workers[plan.rank[row]].rank]
        calls = exchange.calls(int(plan.step[row]), [int(plan.part[row])], float(plan.nbytes[row]), place)
        tasks[row] = []
        for number, call in enumerate(calls):
            kind, members = pl.KINDS.index(call.kind), plan.groups[plan.peer[row]]
            if len(call.communicator.workers) < len(members):
                members = tuple(members[exchange.place[worker.rank]] for worker in call.communicator.workers)
            group = groups.setdefault(members, len(groups))
            key = keys.setdefault((int(plan.key[row]), number, group), len(plan) + len(keys))
            is_sum = kind in SUMMING and number == len(calls) - 1
            columns = {"kind": kind, "nbytes": call.nbytes, "peer": group, "key": key}
            columns["part"] = int(plan.part[row]) if is_sum else -1
            tasks[row].append(Task(columns, [number - 1] if number else ()))
    return transforms.expanded(plan, tasks, groups=tuple(groups)) if tasks else plan
