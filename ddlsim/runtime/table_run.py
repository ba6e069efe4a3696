"""Runs whose steps are a plan: the kernel executes it, and Python follows step by step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import ConfigError, DeadlockError
from ddlsim.learning import Array, Value
from ddlsim.network.executor import Executor, TaskColumns
from ddlsim.network.state import Records
from ddlsim.network.tasks import OPTIONAL, SKIPPED
from ddlsim.plan.folding import Folding
from ddlsim.plan.inserted import SUMMING, with_codes, with_evaluations, with_samples
from ddlsim.plan.order import Order
from ddlsim.plan.plan import FORWARD, PUSH_PULL, REDUCE_SCATTER, SEND, Bools, Floats, Ints, Plan
from ddlsim.plan.program import LIVE, LiveSteps, StepProgram
from ddlsim.runtime.bookings import Bookings, Shape, devices
from ddlsim.runtime.common_model import CommonModel, Gradients, Met
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.exchange import Exchange, Exchanges, OfGroups, OfKinds, way_of
from ddlsim.runtime.executed import as_executed
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.travel import SAMPLES, Travel
from ddlsim.runtime.worker import UNVARIED, Worker
from ddlsim.workload.compute import Workload
from ddlsim.workload.contention import NO_SLOWDOWN
from ddlsim.workload.jitter import slow_intervals


def with_slowdowns(
    tasks: TaskColumns, steps: LiveSteps, members: Sequence[Sequence[Worker]], setting: Setting
) -> TaskColumns:
    """Return the tasks of steps with what slows the workers that do them: of several, the largest factors count."""
    rank = steps.plan.rank[steps.row]
    tasks = _with_slow_downs(tasks, rank, members)
    setting.slows = True
    if all(worker.overlap_slowdown == NO_SLOWDOWN for own in members for worker in own):
        return tasks
    plan, exchanges = steps.plan, steps.plan.kind[steps.row] >= SEND
    slower = [
        (max(worker.overlap_slowdown.inside for worker in own), max(worker.overlap_slowdown.between for worker in own))
        for own in members
    ]
    device = np.where(exchanges | devices(plan)[steps.row], rank, -1)
    return tasks._replace(device=device, slower=slower, inside=_inside(tasks, steps, rank, members, setting))


def _inside(
    tasks: TaskColumns, steps: LiveSteps, rank: Ints, members: Sequence[Sequence[Worker]], setting: Setting
) -> Ints:
    """Return 1 for each key of which all ends are on one machine, (n_keys,)."""
    nodes = setting.nodes
    hosts = [setting.hosts([nodes[worker.rank] for worker in own]) for own in members]
    least, most = (np.array([reduce(own) for own in hosts]) for reduce in (np.min, np.max))
    rows = np.flatnonzero(tasks.key >= 0)
    n_keys = len(steps.key_sizes)
    lowest, highest = np.full(n_keys, np.iinfo(np.int64).max), np.full(n_keys, -1)
    np.minimum.at(lowest, tasks.key[rows], least[rank[rows]])
    np.maximum.at(highest, tasks.key[rows], most[rank[rows]])
    served = np.zeros(n_keys, dtype=bool)  # by servers, which are elsewhere
    served[tasks.key[rows][steps.plan.kind[steps.row[rows]] == PUSH_PULL]] = True
    return np.asarray((lowest == highest) & ~served, dtype=np.int64)


def _with_slow_downs(tasks: TaskColumns, rank: Ints, members: Sequence[Sequence[Worker]]) -> TaskColumns:
    """Return the tasks with the transient slow-downs of the workers that do them."""
    first = np.full(len(members), -1, dtype=np.int64)
    entries: list[tuple[float, float]] = []
    for place, own in enumerate(members):
        slowed = [slow_intervals(worker.slow_downs) for worker in own if worker.slow_downs]
        if slowed:
            first[place] = len(entries)
            ends = np.unique([end for intervals in slowed for end, _ in intervals])
            columns = [np.array(intervals).T for intervals in slowed]
            factors = [factor[np.searchsorted(until, ends)] for until, factor in columns]
            entries += zip(ends.tolist(), np.max(factors, axis=0).tolist(), strict=True)
    return tasks._replace(slow=first[rank], slow_downs=entries)


EVALUATION = "evaluation"
#: workloads of all workers -> their step
Make = Callable[[Sequence[Workload]], StepProgram]
#: kind of collective, group, bytes -> its schedule
Schedules = Callable[[int, int, float], Schedule]


class Models(Protocol):
    """What learns from the steps of a run."""

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return the gradient of a step that has been begun."""

    def learn_until(self, step: int) -> None:
        """Take in all steps up to `step`."""


#: gradients and plan -> what carries its collectives
MakeExchanges = Callable[[Gradients, Plan], Exchanges]


def planned(members: Communicator, make: Make, exchanges: Callable[[Gradients], Mapping[int, Exchange]]) -> None:
    """Let the programs that `make` makes for all workers drive a run, with `exchanges` by the kind of collective, those
    that sum gradients first."""
    setting = members.setting
    setting.loop.drive(
        TableRun(setting, make, lambda gradients, plan: OfKinds(exchanges(gradients)), owner=members.owner)
    )


def run_table(
    setting: Setting, program: StepProgram, schedules: Schedules | None, *, samples: int,
    folding: Folding | None = None, live: int = LIVE, exchanges: MakeExchanges | None = None, met: Met | None = None,
    owner: str = "this strategy", beside_first: int = LIVE,
) -> None:  # fmt: skip
    """Let a program drive a run, over and over, whose collectives go by `schedules` or by `exchanges`.

    samples    of an update: ranks 0, 1, ... learn from so many together
    folding    which workers each rank of the plan stands for, which do the same at the same time; by default rank r is
               worker r
    live       steps of which something can be under way at the same time
    exchanges  of gradients and the plan: what carries its collectives
    met        which parameters the gradients of a step are of (:class:`~ddlsim.runtime.common_model.CommonModel`)
    owner      whose run it is, for messages
    beside_first
               steps in which devices are, or wait for what comes next, until the first one has ended, with it

    Raises ConfigError for batches that change.
    """
    first = setting.workers[0]
    if first.workload_at is not None:
        raise ConfigError(
            "training: growing_batch and phases change the seconds of a step, which this strategy takes from one plan; "
            "run each batch size by itself"
        )
    workers = setting.workers if folding is None else [setting.workers[own[0]] for own in folding.members]
    if exchanges is None:
        assert schedules is not None
        by = schedules
        exchanges = lambda gradients, plan: OfGroups(setting, workers, plan.groups, by)  # noqa: E731
    run = TableRun(
        setting, lambda workloads: program, exchanges, folding=folding,
        n_learners=samples // first.samples_per_step, live=live, met=met, owner=owner, beside_first=beside_first,
    )  # fmt: skip
    setting.loop.drive(run)


def is_one_step(setting: Setting, live: int = LIVE) -> bool:
    """Return whether a run ends with its first step, so that no step is gone through again."""
    return not setting.shows_plan and live == LIVE and setting.stop.n_updates == 1 and setting.learner.task is None


def disturbed(setting: Setting) -> str:
    """Return what keeps equal workers from doing the same at the same times, or links from being theirs alone; "" if
    nothing does."""
    loop, workers = setting.loop, setting.workers
    reasons = {
        "every rank is to be shown": setting.shows_plan,
        "others use the network": loop.network.is_shared,
        "faults change links": loop.network.changes,
        "workers stand still": any(setting.recorder.stops.values()) or any(setting.crashes),
        "compute times vary": any(worker.factors is not UNVARIED or worker.slow_downs for worker in workers),
        "overlap_slowdown": any(worker.overlap_slowdown != NO_SLOWDOWN for worker in workers),
        "workers read samples": workers[0].feed is not None,
        "workers learn": setting.learner.task is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class TableRun:
    """Ranks that do the tasks of a plan, step after step.

    Compute times are the plan's seconds, multiplied by the factor that a worker draws for each micro-batch: of several
    that a rank stands for, by the largest. The values follow what has happened: they are made when a step has ended, or
    when somebody has to know how many bytes they are when compressed.

    exchanges   of gradients and the plan: what carries its collectives
    folding     which workers each rank stands for; by default rank r is worker r
    n_learners  ranks 0, 1, ... that learn from samples of their own; by default all
    live        steps of which something can be under way at the same time
    met         which parameters the gradients of a step are of, where steps overlap
    owner       whose run it is, for messages
    beside_first
                steps in which devices are, or wait for what comes next, until the first one has ended, with it
    models      what learns; by default a model that all workers have in common
    """

    def __init__(
        self, setting: Setting, make: Make, exchanges: MakeExchanges, *,
        folding: Folding | None = None, n_learners: int | None = None, live: int = LIVE,
        met: Met | None = None, owner: str = "this strategy", beside_first: int = LIVE, models: Models | None = None,
    ) -> None:  # fmt: skip
        self.setting, self.learner, self._make = setting, setting.learner, make
        self.members: list[list[int]] = (
            [[worker.rank] for worker in setting.workers] if folding is None else folding.members.tolist()
        )
        if folding is not None:
            setting.loop.stand_for(folding.copies, folding.shared)
        self.workers = [setting.workers[own[0]] for own in self.members]
        self.n_learners = len(self.members) if n_learners is None else n_learners
        workloads = [worker.workload for worker in setting.workers]
        self._overlap = met is not None or models is not None
        self.model: Models = models if models is not None else self._common_model(met)
        once = is_one_step(setting, live)
        program = make(workloads)
        self.exchanges = exchanges(self.model.gradient, program.unroll_all(1))
        program = self._program = self._with_more(program)
        setting.plan = self.plan
        self.steps = steps = program.live_steps(beside_first - 1, repeat=False) if once else program.live_steps(live)
        self._last: dict[int, Floats] = {}  # (n_ranks,) factor of the last micro-step, by step
        self.travel = Travel(setting, self.workers, self.exchanges, steps, owner, self._step_in,
                             lambda step, rank: float(self._last[step][rank]))  # fmt: skip
        said = {pair: exchange.what for pair, exchange in self.travel.exchanges.items()}
        shapes = [Shape(steps.plan, steps.rows, steps.keys, step, said) for step in range(steps.plan.n_steps)]
        self.bookings = Bookings(setting.recorder, self.members, shapes, setting.loop.now, folding=folding)
        #: by the first worker's workload, which the list holds and so keeps the number of
        self._regimes = {id(workloads[0]): (workloads, self._seconds(steps.plan))}
        self._exchanging = None if folding is None else folding.exchanging(steps.plan)
        self._varies = any(worker.factors is not UNVARIED for worker in setting.workers)
        self.done = 0  # steps
        self._ended: set[int] = set()  # slots, of later steps
        self._refused: dict[int, ConfigError] = {}  # why a step cannot be executed
        self._late = [steps.has_late] * len(steps.rows)  # whether tasks that a slot's step does not wait for are left
        self._in_slot = list(range(len(steps.rows)))  # the step that is executed in each
        self._waiting: deque[int] = deque()  # slots whose steps have ended
        self._n_armed = 0
        self._drawn = 0  # samples of each who learns in the steps that are armed
        self._armed: dict[int, list[Workload]] = {}  # all workers' in the steps under way
        kind = np.where(_named(steps.plan, EVALUATION)[steps.row], OPTIONAL, self.travel.kinds)
        self._kinds = [kind[own] for own in steps.rows[:2]]
        tasks = steps.tasks._replace(seconds=np.concatenate([self._arm() for _ in steps.rows]), kind=kind)
        each = [[setting.workers[i] for i in own] for own in self.members]
        self.executor = Executor(
            with_slowdowns(tasks, steps, each, setting), setting.loop.network, self.travel.collective,
            self.travel.buffer_nbytes, steps.plan.queues, self.travel.messages,
            bystanders=self.travel.n_bystanders, outside=self.travel, meets=self.travel.meets, start=setting.loop.now,
        )  # fmt: skip
        for step, own in enumerate(steps.rows if steps.plan.cycles else ()):
            self.executor.tasks["kind"][own] = self._kind(step)
        self.travel.executes(self.executor)

    def _common_model(self, met: Met | None) -> CommonModel:
        """Return the model that all workers have in common, which the run then hands over."""
        model = CommonModel(
            self.learner, self.n_learners, lambda step, gradients: self.exchanges.mean(step, gradients), self.samples,
            self.began, met,
        )  # fmt: skip
        self.setting.model, self.setting.optimizer = lambda: model.params, lambda: model.state
        return model

    def _kind(self, step: int) -> Ints:
        """Return what the tasks of a step are for the executor."""
        kind, plan = self._kinds[min(step, 1)], self.steps.plan
        if not plan.cycles:
            return kind
        left_out = np.array([False, *(not cycle.includes(step + 1) for cycle in plan.cycles)])
        return np.where(left_out[plan.every[self.steps.rows[min(step, 1)]]], SKIPPED, kind)

    def plan(self, steps: int | None) -> Plan:
        """Return the first steps, or one cycle of them, as they are executed."""
        plan = self._program.unroll(self._program.cycle if steps is None else steps)

        def exchange(kind: int, group: int, parts: bool) -> Exchange:
            return self.travel.exchanges[kind, group, parts]

        return as_executed(plan, exchange, self.workers)

    def tasks_of(self, step: int) -> Records:
        """Return the tasks of a step in flight."""
        tasks: Records = self.executor.tasks[self.steps.rows[self.steps.slot(step)]]
        return tasks

    def _with_more(self, program: StepProgram) -> StepProgram:
        """Return the program with what happens besides: evaluations, encoding and decoding."""
        if self.setting.compression is not None and not program.template.cycles:
            plan = program.unroll(1)
            sums = plan.collectives[np.isin(plan.kind[plan.collectives], SUMMING) & (plan.part[plan.collectives] >= 0)]
            for row in sums[:1].tolist():
                kind, group, parts = way_of(plan, row)
                exchange = self.exchanges.exchange(kind, group, parts=parts)
                if exchange is not None:
                    together = kind == REDUCE_SCATTER
                    program = program.map(functools.partial(with_codes, decodes=exchange.decodes, together=together))
        if self.learner.task is not None:
            program = program.map(functools.partial(with_evaluations, name=EVALUATION))
        return program if self.workers[0].feed is None else program.map(functools.partial(with_samples, name=SAMPLES))

    # ------------------------------------------------------------ running

    @property
    def over(self) -> bool:
        return self.setting.stop.ended.triggered

    def next(self) -> float:
        return self.executor.next()

    def go(self, limit: float, pause: Callable[[], bool] | None) -> None:
        """Go on as :class:`~ddlsim.runtime.loop.Driver` says; `pause` is asked when a step has ended."""
        loop, stop = self.setting.loop, self.setting.stop
        self._charge()
        while not stop.ended.triggered:
            loop.check()
            if pause is not None and pause():
                break
            slot = self.executor.run(limit)
            while slot is None and not loop.network.waiting_parties and self.travel.turn(limit):
                slot = self.executor.run(limit)
            loop.env.pass_time(self.executor.now)
            if slot is None:
                if not self.travel.under_way:
                    raise self._deadlock()
                if not loop.network.waiting_parties:
                    loop.env.pass_time(limit)
                return
            if slot > self.steps.live:
                self._late_ended(slot - self.steps.live - 1)
                continue
            self._ended.add(slot)
            while self.steps.slot(self.done) in self._ended and not stop.ended.triggered:
                self._end_step()
        self.executor.end_instant()
        while self.travel.meets and self.travel.turn(self.executor.now):
            self.executor.end_instant()

    def _end_step(self) -> None:
        """All tasks of a step have ended, and those of all steps before."""
        step, slot = self.done, self.steps.slot(self.done)
        if step in self._refused:
            raise self._refused[step]
        self._ended.discard(slot)
        rows = self.executor.tasks[self.steps.rows[slot]]
        self.model.learn_until(step)
        self._book(step, rows)
        samples = self.samples(step)
        self.done += 1
        if slot > 0:
            self._waiting.append(slot)
            self._arm_waiting()
        self._resize()
        self.setting.stop.updated(samples * self.n_learners)
        self._charge()

    def _arm_waiting(self) -> None:
        """Let slots whose tasks have all ended be executed as later steps, in their order."""
        while self._waiting and not self._late[self._waiting[0]]:
            slot = self._waiting.popleft()
            n_keys = self.steps.keys[-1].stop - self.steps.keys[1].start
            kind = self._kind(self._n_armed)
            self._late[slot], self._in_slot[slot] = self.steps.has_late, self._n_armed
            self.executor.arm(self.steps.rows[slot], self.steps.keys[slot], self._arm(), kind, n_keys)

    def _late_ended(self, slot: int) -> None:
        """The tasks of a slot that its step does not wait for have ended, too."""
        self._late[slot] = False
        self._arm_waiting()

    def _deadlock(self) -> DeadlockError:
        rows = self.steps.rows[self.steps.slot(self.done)]
        stuck = rows.start + int(np.flatnonzero(np.isnan(self.executor.tasks["end"][rows]))[0])
        _ = Order(self.steps.plan).events  # raises, naming the circle that it is in
        task = self.steps.plan.task(int(self.steps.row[stuck]))
        return DeadlockError(f"deadlock at {self.executor.now:.6g} s: {task} never ends")

    # ------------------------------------------------------------ compute times

    def _step_in(self, slot: int) -> int:
        """Return the step that is executed in a slot."""
        return self._in_slot[slot]

    def _seconds(self, plan: Plan) -> list[Floats]:
        """Return the seconds of the tasks of a first and a later step, NaN where they are asked for."""
        seconds = np.where(self.travel.asked[: len(plan)], np.nan, plan.seconds)
        return [seconds[each] for each in self.steps.rows[:2]]

    def _arm(self) -> Floats:
        """Return the seconds of the next step's tasks, with its factors, of what the workers compute then."""
        step = self._n_armed
        self._n_armed += 1
        try:
            workloads, seconds = self._regime(self.learner.epoch(self._drawn * self.n_learners))
        except ConfigError as error:  # of a step that the run may never come to
            self._refused.setdefault(step, error)
            workloads, seconds = next(reversed(self._regimes.values()))
        self._armed[step] = workloads
        self._drawn += self.samples(step)
        shape = self.bookings.shape(min(step, 1))
        if not self._varies:
            self._last[step] = np.ones(len(self.members))
            return seconds[min(step, 1)].copy()
        n = int(shape.micro.max(initial=0)) + 1
        drawn = [[[next(self.setting.workers[i].factors) for _ in range(n)] for i in own] for own in self.members]
        largest = np.array([np.max(own, axis=0) for own in drawn])
        self._last[step] = largest[:, -1]
        self._last.pop(step - self.steps.live - 2, None)
        factor: Floats = largest[shape.plan.rank[shape.rows], shape.micro]
        exchanging = 0.0 if self._exchanging is None else self._exchanging[shape.rows]
        return (seconds[min(step, 1)] - exchanging) * factor + exchanging

    def _regime(self, epoch: float) -> tuple[list[Workload], list[Floats]]:
        """Return all workers' workloads at an epoch, and the seconds of the tasks of a first and a later step."""
        workers = self.setting.workers
        if workers[0].workload_at is None:
            return next(iter(self._regimes.values()))
        key = id(workers[0].workload_at(epoch))
        if key not in self._regimes:
            workloads = [worker.workload_at(epoch) for worker in workers if worker.workload_at is not None]
            self._regimes[key] = workloads, self._seconds(self._with_more(self._make(workloads)).unroll_all(2))
        return self._regimes[key]

    def samples(self, step: int) -> int:
        return self._armed[step][0].batch_size * self.setting.workers[0].accumulation

    def _resize(self) -> None:
        """Let workers have the workload of the step that they are in."""
        if self.workers[0].workload_at is None:
            return
        for rank, own in enumerate(self.members):
            begun = not np.isnan(self._first_task(rank, self.done)["start"])
            for worker in own:
                self.setting.workers[worker].use(self._armed[self.done if begun else self.done - 1][worker])

    def _first_task(self, rank: int, step: int) -> Records:
        """Return the first task of a rank's device in a step under way."""
        shape = self.bookings.shape(step)
        row = self.steps.rows[self.steps.slot(step)].start + shape.device[shape.first[rank]]
        task: Records = self.executor.tasks[row]
        return task

    def began(self, step: int, place: int) -> float:
        """Return when one who learns began the gradient of a step, s."""
        rank = place * self.steps.plan.tensor
        row = self.steps.rows[self.steps.slot(step)].start + self.bookings.shape(step).begins[rank]
        return float(self.executor.tasks["start"][row])

    def _charge(self) -> None:
        """Let the first worker evaluate, if it owes that, before the next step that it begins."""
        worker = self.setting.workers[0]
        if not worker.owed:
            return
        for step in range(self.done, self.done + self.steps.live):
            task = self._first_task(0, step)
            if np.isnan(task["start"]):
                task["seconds"] += worker.owed * (float(self._last[step - 1][0]) if step else 1.0)
                worker.owed = 0.0
                break

    # ------------------------------------------------------------ what follows

    def _book(self, step: int, rows: Records, now: float = np.inf) -> None:
        self.bookings.step(step, rows, now)
        if not self.setting.recorder.keep_spans:
            return
        shape, plan, slot = self.bookings.shape(step), self.steps.plan, self.steps.slot(step)
        launched, rank = self.travel.launched.pop(slot, []), plan.rank[shape.rows]
        if plan.queues == ():
            for name, exchanged in shape.exchanges:
                self.bookings.exchange(name, rank[exchanged], rows, exchanged)
            return
        key = plan.key[shape.rows]
        for keys in launched:
            of_step = self.steps.keys[shape.step]
            exchanged = np.flatnonzero(key == keys[0] - self.steps.keys[slot].start + of_step.start)
            self.bookings.exchange(f"{len(keys)} buckets of step {step}", rank[exchanged], rows, exchanged)

    def close(self) -> None:
        """Book what ranks are in the middle of, and say what they wait for."""
        now = max(self.executor.now, self.setting.loop.network.now)
        self.setting.loop.env.pass_time(now)
        self.setting.loop.nbytes_asked += self.executor.nbytes_sent
        waits: dict[int, str] = {}
        for step in range(self.done, self.done + self.steps.live):
            shape, rows = self.bookings.shape(step), self.executor.tasks[self.steps.rows[self.steps.slot(step)]]
            left = np.flatnonzero(np.isnan(rows["start"][shape.device]))
            ranks, first = np.unique(shape.rank[left], return_index=True)
            for rank, place in zip(ranks.tolist(), left[first].tolist(), strict=True):
                waits.setdefault(rank, self._missing(step, shape.rows.start + int(shape.device[place])))
            if np.isnan(rows["start"]).all():
                break
            self._book(step, rows, now)
            if step == self.done and not self._overlap and (self.bookings.step_end[-1] <= now).any():
                self.model.learn_until(step)  # somebody has got that far
        self.bookings.close(now, waits)
        if self.bookings.folding is not None:
            self.setting.loop.book(*self.bookings.exchanged(self.setting.loop.network.n_channels))

    def _missing(self, step: int, row: int) -> str:
        """Return what a task waits for, in words."""
        plan = self.steps.plan
        if plan.every[row]:
            return f"the average of step {step + 1}"
        if self.steps.plan.kind[row] != FORWARD:
            return f"the gradients of step {step}"
        if self.workers[0].accumulation > 1:
            return f"the parameters of step {step}"
        return f"the parameters of layer {self.steps.plan.first[row]}"


def _named(plan: Plan, name: str) -> Bools:
    """Return which rows have a name."""
    return np.asarray(plan.name == (plan.names.index(name) if name in plan.names else len(plan.names)))
