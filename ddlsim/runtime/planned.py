"""Runs whose steps are a plan: the kernel executes it, and Python follows step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import DeadlockError
from ddlsim.learning import Array, Value
from ddlsim.network.executor import Executor, TaskColumns
from ddlsim.network.state import Records
from ddlsim.network.tasks import OPTIONAL
from ddlsim.plan.live import LIVE, N_STEPS, LiveSteps, live_steps, with_evaluations
from ddlsim.plan.norms import NORMS
from ddlsim.plan.order import Order
from ddlsim.plan.plan import UPDATE, Floats, Ints, Plan
from ddlsim.plan.runner import key_sizes
from ddlsim.runtime.bookings import Bookings, Step
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.worker import Worker
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import slow_intervals

__all__ = ["PlannedRun", "planned", "with_slow_downs"]

EVALUATION = "evaluation"
#: (workloads, steps) -> the plan of a strategy
MakePlan = Callable[[Sequence[Workload], int], Plan]


def planned(
    members: Communicator, make: MakePlan, schedules: Mapping[int, Callable[[float], Schedule]]
) -> PlannedRun | None:
    """Let the plans that `make` makes for all workers drive a run; return None, and do nothing, if steps differ.

    schedules  kind of collective -> bytes -> the schedule among the members (and those who stand by)
    """
    setting = members.setting
    if setting.learner.task is not None:
        make = _evaluating(make, setting.workers[0].accumulation > 1)
    steps = live_steps(make([worker.workload for worker in setting.workers], N_STEPS))
    if steps is None:
        return None
    run = PlannedRun(members, make, schedules, steps)
    setting.loop.drive(run)
    setting.model = lambda: run.params
    return run


def _evaluating(make: MakePlan, needing: bool) -> MakePlan:
    """Let a worker evaluate the model before its steps, for as long as somebody asks it to."""

    def make_so(workloads: Sequence[Workload], steps: int) -> Plan:
        return with_evaluations(make(workloads, steps), EVALUATION, needing)

    return make_so


class PlannedRun:
    """Synchronous workers whose steps are a plan's.

    Compute times are the plan's seconds, multiplied by the factor of the worker's (micro-)step. The values follow what
    has happened: all gradients of a step, the mean and the update are made when it has ended.
    """

    def __init__(
        self, members: Communicator, make: MakePlan, schedules: Mapping[int, Callable[[float], Schedule]],
        steps: LiveSteps,
    ) -> None:  # fmt: skip
        self.setting, self.members, self.make, self.schedules, self.steps = (
            members.setting, members, make, schedules, steps,
        )  # fmt: skip
        setting = members.setting
        self.workers, self.learner = setting.workers, setting.learner
        self.params: Value[Array] = self.learner.initial
        self._state = self.learner.optimizer_state(self.params)
        self._n_samples = 0
        self.bookings = Bookings(setting.recorder)
        self._key_kinds = key_sizes(steps.plan)[2]
        self._micro = [self._micro_steps(rows) for rows in steps.rows[:2]]
        last = setting.workers[0].accumulation - 1
        self._shape = [
            Step.of(steps.plan, rows, micro == last) for rows, micro in zip(steps.rows, self._micro, strict=False)
        ]
        workloads = [worker.workload for worker in setting.workers]
        #: by the first worker's workload, which the list holds and so keeps the number of
        self._regimes = {id(workloads[0]): (workloads, [steps.plan.seconds[rows] for rows in steps.rows[:2]])}
        self.done = 0  # steps
        self._ended: set[int] = set()  # slots, of later steps
        self._n_armed = 0
        self._drawn = 0  # samples of each worker in the steps that are armed
        self._armed: dict[int, list[Workload]] = {}  # all workers' in the steps under way
        self._last: dict[int, Floats] = {}  # (n_ranks,) factor of the last micro-step, by step
        self._launched: dict[int, list[list[int]]] = {}  # keys of each buffer, by slot
        tasks = steps.tasks._replace(seconds=np.concatenate([self._arm() for _ in steps.rows]), kind=_kinds(steps))
        self.executor = Executor(
            with_slow_downs(tasks, steps.plan.rank, setting.workers), setting.loop.network, self._collective,
            steps.key_sizes, steps.plan.queues, bystanders=members.n_bystanders,
        )  # fmt: skip

    # ------------------------------------------------------------ running

    def run(self, max_time: float, pause: Callable[[], bool] | None) -> None:
        """Run until the rule that ends the run says so, but not beyond `max_time` (s), nor past where `pause` says so.

        It is asked when a step has ended.
        """
        loop, stop = self.setting.loop, self.setting.stop
        try:
            self._charge()
            while not stop.ended.triggered:
                if pause is not None and pause():
                    break
                slot = self.executor.run(max_time)
                loop.env.pass_time(self.executor.now)
                if slot is None:
                    if not self.executor.under_way:
                        raise self._deadlock()
                    loop.env.pass_time(max_time)
                    return
                self._ended.add(slot)
                while self.steps.slot(self.done) in self._ended and not stop.ended.triggered:
                    self._end_step()
            self.executor.end_instant()
        finally:
            self._close()

    def _end_step(self) -> None:
        """All tasks of a step have ended, and those of all steps before."""
        step, slot = self.done, self.steps.slot(self.done)
        self._ended.discard(slot)
        rows = self.executor.tasks[self.steps.rows[slot]].copy()
        self._learn(step, rows)
        self._book(step, rows)
        samples = self._samples(step)
        self.done += 1
        if slot > 0:  # where the step LIVE steps later is executed
            n_keys = self.steps.keys[-1].stop - self.steps.keys[1].start
            self.executor.arm(slot, self.steps.rows[slot], self.steps.keys[slot], self._arm(), n_keys)
        self._resize()
        self.setting.stop.updated(samples * len(self.workers))
        self._charge()

    def _deadlock(self) -> DeadlockError:
        rows = self.steps.rows[self.steps.slot(self.done)]
        stuck = rows.start + int(np.flatnonzero(np.isnan(self.executor.tasks["end"][rows]))[0])
        _ = Order(self.steps.plan).events  # raises, naming the circle that it is in
        return DeadlockError(f"deadlock at {self.executor.now:.6g} s: {self.steps.plan.task(stuck)} never ends")

    # ------------------------------------------------------------ compute times

    def _shape_of(self, step: int) -> int:
        return min(step, 1)

    def _micro_steps(self, rows: slice) -> Ints:
        """Return the micro-step of each row among those of its rank, which has its factor; the last, if none."""
        n, batch = self.workers[0].accumulation, self.steps.plan.batch[rows]
        micro: Ints = np.where(batch >= 0, batch % n, n - 1)
        return micro

    def _arm(self) -> Floats:
        """Return the seconds of the next step's tasks, with its factors, of what the workers compute then."""
        step, workers = self._n_armed, self.workers
        self._n_armed += 1
        workloads, seconds = self._regime(self.learner.epoch(self._drawn * len(workers)))
        self._armed[step] = workloads
        self._drawn += self._samples(step)
        drawn = np.array([[next(worker.factors) for _ in range(worker.accumulation)] for worker in workers])
        self._last[step] = drawn[:, -1]
        self._last.pop(step - LIVE - 2, None)
        shape = self._shape_of(step)
        factor: Floats = drawn[self.steps.plan.rank[self.steps.rows[shape]], self._micro[shape]]
        return seconds[shape] * factor

    def _regime(self, epoch: float) -> tuple[list[Workload], list[Floats]]:
        """Return all workers' workloads at an epoch, and the seconds of the tasks of a first and a later step."""
        if self.workers[0].workload_at is None:
            return next(iter(self._regimes.values()))
        key = id(self.workers[0].workload_at(epoch))
        if key not in self._regimes:
            workloads = [worker.workload_at(epoch) for worker in self.workers if worker.workload_at is not None]
            plan = self.make(workloads, 2)
            self._regimes[key] = workloads, [plan.seconds[rows] for rows in self.steps.rows[:2]]
        return self._regimes[key]

    def _samples(self, step: int) -> int:
        return self._armed[step][0].batch_size * self.workers[0].accumulation

    def _resize(self) -> None:
        """Let workers have the workload of the step that they are in."""
        if self.workers[0].workload_at is None:
            return
        for worker in self.workers:
            begun = not np.isnan(self._first_task(worker.rank, self.done)["start"])
            worker.use(self._armed[self.done if begun else self.done - 1][worker.rank])

    def _first_task(self, rank: int, step: int) -> Records:
        """Return the first task of a rank's device in a step under way."""
        first = self._shape[self._shape_of(step)].device[rank]
        task: Records = self.executor.tasks[self.steps.rows[self.steps.slot(step)].start + first]
        return task

    def _charge(self) -> None:
        """Let the first worker evaluate, if it owes that, before the next step that it begins."""
        worker = self.workers[0]
        if not worker.owed:
            return
        for step in range(self.done, self.done + LIVE):
            task = self._first_task(worker.rank, step)
            if np.isnan(task["start"]):
                task["seconds"] += worker.owed * (float(self._last[step - 1][worker.rank]) if step else 1.0)
                worker.owed = 0.0
                break

    # ------------------------------------------------------------ what travels

    def _collective(self, keys: list[int]) -> int:
        sizes = self.steps.key_sizes
        nbytes = float(np.cumsum(sizes[keys])[-1])  # one after the other, as buffers are filled
        if self.setting.recorder.keep_spans:
            slot = next(i for i, own in enumerate(self.steps.keys) if keys[0] < own.stop)
            self._launched.setdefault(slot, []).append(keys)
        schedule = self.schedules[int(self._key_kinds[keys[0]])](nbytes)
        return self.setting.loop.collective(schedule, self.members.all_nodes, nbytes)

    # ------------------------------------------------------------ what follows

    def _learn(self, step: int, rows: Records) -> None:
        """w <- w - eta * (1/N) sum_i g_i"""
        learner, samples = self.learner, self._samples(step)
        began = rows["start"][self._shape[self._shape_of(step)].begins]
        gradients = [
            learner.gradient(worker.rank, self.params, samples, time)
            for worker, time in zip(self.workers, began.tolist(), strict=True)
        ]
        rate = learner.rate(self._n_samples)
        self.params, self._state = learner.update(self.params, learner.mean(gradients), self._state, rate)
        self._n_samples += samples * len(self.workers)

    def _book(self, step: int, rows: Records) -> None:
        shape, slot = self._shape[self._shape_of(step)], self.steps.slot(step)
        self.bookings.step(step, shape, rows)
        plan, queued = self.steps.plan, self.steps.plan.queues != ()
        for keys in self._launched.pop(slot, []):
            of_key = plan.key[shape.first + shape.exchanged] == self._key_in_shape(keys[0], step)
            own = shape.exchanged[of_key & ~np.isnan(rows["end"][shape.exchanged])]
            if len(own):
                part = plan.part[shape.first + own[0]]
                name = f"{len(keys)} buckets of step {step}" if queued else f"bucket {part}"
                name = name if part >= 0 else NORMS
                self.bookings.exchange(name, plan.rank[shape.first + own], rows["start"][own], rows["end"][own])

    def _key_in_shape(self, key: int, step: int) -> int:
        keys = self.steps.keys
        return int(key - keys[self.steps.slot(step)].start + keys[self._shape_of(step)].start)

    def _close(self) -> None:
        """Book what workers are in the middle of, and say what they wait for."""
        now = max(self.executor.now, self.setting.loop.network.now)
        self.setting.loop.env.pass_time(now)
        waits: dict[int, str] = {}
        for step in range(self.done, self.done + LIVE):
            slot = self.steps.slot(step)
            shape, rows = self._shape[self._shape_of(step)], self.executor.tasks[self.steps.rows[slot]].copy()
            for ranks, turn, _ in shape.turns:
                for rank, row in zip(ranks.tolist(), turn.tolist(), strict=True):
                    if np.isnan(rows["start"][row]):
                        waits.setdefault(rank, self._missing(step, shape.first + row))
            if np.isnan(rows["start"]).all():
                break
            self._book(step, rows)
            if step == self.done and (self.bookings.step_end[-1] <= now).any():
                self._learn(step, rows)  # somebody has got that far
        self.bookings.close(now, waits)

    def _missing(self, step: int, row: int) -> str:
        """Return what a task waits for, in words."""
        if self.steps.plan.kind[row] == UPDATE:
            return f"the gradients of step {step}"
        if self.workers[0].accumulation > 1:
            return f"the parameters of step {step}"
        return f"the parameters of layer {self.steps.plan.first[row]}"


def _kinds(steps: LiveSteps) -> Ints:
    """Return what the tasks are, where evaluations happen only if they take time."""
    plan, kind = steps.plan, steps.tasks.kind
    names = np.array([name == EVALUATION for name in plan.names] + [False])  # the last for rows without a name
    return np.where(names[plan.name[: len(kind)]], OPTIONAL, kind)


def with_slow_downs(tasks: TaskColumns, rank: Ints, workers: Sequence[Worker]) -> TaskColumns:
    """Return the tasks with the slow-downs of the workers that do them."""
    first = np.full(len(workers), -1, dtype=np.int64)
    entries: list[tuple[float, float]] = []
    for worker in workers:
        if worker.slow_downs:
            first[worker.rank] = len(entries)
            entries += slow_intervals(worker.slow_downs)
    return tasks._replace(slow=first[rank[: len(tasks.kind)]], slow_downs=entries)
