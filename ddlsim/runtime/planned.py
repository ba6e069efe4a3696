"""Runs whose steps are a plan: the kernel executes it, and Python follows step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.errors import ConfigError, DeadlockError
from ddlsim.network.executor import Executor, TaskColumns
from ddlsim.network.state import Records
from ddlsim.network.tasks import OPTIONAL
from ddlsim.plan.inserted import with_codes, with_evaluations
from ddlsim.plan.live import LIVE, N_STEPS, live_steps
from ddlsim.plan.order import Order
from ddlsim.plan.plan import FORWARD, KINDS, REDUCE_SCATTER, SEND, Bools, Floats, Ints, Plan
from ddlsim.runtime.bookings import Bookings, Step
from ddlsim.runtime.common_model import Carriers, CommonModel
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.travel import Travel
from ddlsim.runtime.worker import Worker
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import slow_intervals

__all__ = ["PlannedRun", "planned", "with_slow_downs"]

EVALUATION = "evaluation"
#: (workloads, steps) -> the plan of a strategy
MakePlan = Callable[[Sequence[Workload], int], Plan]


def planned(members: Communicator, make: MakePlan, carriers: Carriers) -> None:
    """Let the plans that `make` makes for all workers drive a run, and `carriers` what they exchange.

    Raises ConfigError if later steps are not like the second one.
    """
    run = PlannedRun(members, make, carriers)
    members.setting.loop.drive(run)
    members.setting.model = lambda: run.model.params


class PlannedRun:
    """Synchronous workers whose steps are a plan's.

    Compute times are the plan's seconds, multiplied by the factor of the worker's (micro-)step. The values follow what
    has happened: they are made when a step has ended, or when somebody has to know how many bytes they are when
    compressed.
    """

    def __init__(self, members: Communicator, make: MakePlan, carriers: Carriers) -> None:
        self.setting, setting = members.setting, members.setting
        self.workers, self.learner = setting.workers, setting.learner
        self.model = CommonModel(self.learner, self.workers, carriers, self._samples, self._began)
        carried = self.model.carriers
        self._make = make
        workloads = [worker.workload for worker in setting.workers]
        steps = live_steps(self.make(workloads, N_STEPS))
        if steps is None:
            raise ConfigError(
                "plan: steps after the first one differ, so it cannot be gone through over and over; let every step do "
                "the same, with keys and rows in the same order"
            )
        self.steps = steps
        for row in np.flatnonzero((steps.plan.kind >= SEND) & ~np.isin(steps.plan.kind, list(carried))).tolist():
            raise ConfigError(
                f"plan: {steps.plan.task(row)}: a run of {members.owner} has no such exchange; it has "
                f"{' and '.join(KINDS[kind] for kind in carried)}"
            )
        self.travel = Travel(members, carried, steps, self._step_in, lambda step, rank: float(self._last[step][rank]))
        self.bookings = Bookings(setting.recorder)
        self._micro = [self._micro_steps(rows) for rows in steps.rows[:2]]
        last = setting.workers[0].accumulation - 1
        said = {kind: carrier.what for kind, carrier in carried.items()}
        self._shape = [
            Step.of(steps.plan, rows, micro == last, said)
            for rows, micro in zip(steps.rows, self._micro, strict=False)
        ]
        #: by the first worker's workload, which the list holds and so keeps the number of
        self._regimes = {id(workloads[0]): (workloads, self._seconds(steps.plan, steps.rows))}
        self.done = 0  # steps
        self._ended: set[int] = set()  # slots, of later steps
        self._n_armed = 0
        self._drawn = 0  # samples of each worker in the steps that are armed
        self._armed: dict[int, list[Workload]] = {}  # all workers' in the steps under way
        self._last: dict[int, Floats] = {}  # (n_ranks,) factor of the last micro-step, by step
        kind = np.where(_named(steps.plan, EVALUATION)[: len(steps.tasks.kind)], OPTIONAL, self.travel.kinds)
        tasks = steps.tasks._replace(seconds=np.concatenate([self._arm() for _ in steps.rows]), kind=kind)
        self.executor = Executor(
            with_slow_downs(tasks, steps.plan.rank, setting.workers), setting.loop.network, self.travel.collective,
            steps.key_sizes, steps.plan.queues, bystanders=members.n_bystanders, outside=self.travel,
            meets=self.travel.meets,
        )  # fmt: skip
        self.travel.executes(self.executor)

    def make(self, workloads: Sequence[Workload], n_steps: int) -> Plan:
        """Return the plan of steps, with what happens besides: evaluations, encoding and decoding."""
        plan, setting = self._make(workloads, n_steps), self.setting
        if setting.compression is not None:
            summing = self.model.summing
            plan = with_codes(plan, decodes=self.model.carriers[summing].decodes, together=summing == REDUCE_SCATTER)
        if self.learner.task is None:
            return plan
        return with_evaluations(plan, EVALUATION)

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
                while slot is None and self.travel.turn(max_time):
                    slot = self.executor.run(max_time)
                loop.env.pass_time(self.executor.now)
                if slot is None:
                    if not self.travel.under_way:
                        raise self._deadlock()
                    loop.env.pass_time(max_time)
                    return
                self._ended.add(slot)
                while self.steps.slot(self.done) in self._ended and not stop.ended.triggered:
                    self._end_step()
            self.executor.end_instant()
            while self.travel.meets and self.travel.turn(self.executor.now):
                self.executor.end_instant()
        finally:
            self._close()

    def _end_step(self) -> None:
        """All tasks of a step have ended, and those of all steps before."""
        step, slot = self.done, self.steps.slot(self.done)
        self._ended.discard(slot)
        rows = self.executor.tasks[self.steps.rows[slot]].copy()
        self.model.learn_until(step)
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

    def _step_in(self, slot: int) -> int:
        """Return the step under way that is executed in a slot."""
        return next(step for step in range(self.done, self.done + LIVE + 1) if self.steps.slot(step) == slot)

    def _seconds(self, plan: Plan, rows: Sequence[slice]) -> list[Floats]:
        """Return the seconds of the tasks of a first and a later step, NaN where they are asked for."""
        seconds = np.where(self.travel.asked[: len(plan)], np.nan, plan.seconds)
        return [seconds[each] for each in rows[:2]]

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
        shape = min(step, 1)
        factor: Floats = drawn[self.steps.plan.rank[self.steps.rows[shape]], self._micro[shape]]
        return seconds[shape] * factor

    def _regime(self, epoch: float) -> tuple[list[Workload], list[Floats]]:
        """Return all workers' workloads at an epoch, and the seconds of the tasks of a first and a later step."""
        if self.workers[0].workload_at is None:
            return next(iter(self._regimes.values()))
        key = id(self.workers[0].workload_at(epoch))
        if key not in self._regimes:
            workloads = [worker.workload_at(epoch) for worker in self.workers if worker.workload_at is not None]
            self._regimes[key] = workloads, self._seconds(self.make(workloads, 2), self.steps.rows)
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
        first = self._shape[min(step, 1)].device[rank]
        task: Records = self.executor.tasks[self.steps.rows[self.steps.slot(step)].start + first]
        return task

    def _began(self, step: int, place: int) -> float:
        """Return when a worker began the gradient of a step, s."""
        shape, slot = self._shape[min(step, 1)], self.steps.slot(step)
        return float(self.executor.tasks["start"][self.steps.rows[slot].start + shape.begins[place]])

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

    # ------------------------------------------------------------ what follows

    def _book(self, step: int, rows: Records) -> None:
        shape, slot = self._shape[min(step, 1)], self.steps.slot(step)
        self.bookings.step(step, shape, rows)
        if not self.setting.recorder.keep_spans:
            return
        plan, launched = self.steps.plan, self.travel.launched.pop(slot, [])
        if plan.queues == ():
            for name, exchanged in shape.exchanges:
                self.bookings.exchange(name, plan.rank[shape.first + exchanged], rows, exchanged)
            return
        key = plan.key[shape.first + shape.exchanged]
        for keys in launched:
            exchanged = shape.exchanged[key == self._key_in_shape(keys[0], step)]
            name = f"{len(keys)} buckets of step {step}"
            self.bookings.exchange(name, plan.rank[shape.first + exchanged], rows, exchanged)

    def _key_in_shape(self, key: int, step: int) -> int:
        keys = self.steps.keys
        return int(key - keys[self.steps.slot(step)].start + keys[min(step, 1)].start)

    def _close(self) -> None:
        """Book what workers are in the middle of, and say what they wait for."""
        now = max(self.executor.now, self.setting.loop.network.now)
        self.setting.loop.env.pass_time(now)
        waits: dict[int, str] = {}
        for step in range(self.done, self.done + LIVE):
            slot = self.steps.slot(step)
            shape, rows = self._shape[min(step, 1)], self.executor.tasks[self.steps.rows[slot]].copy()
            for ranks, turn, *_ in shape.turns:
                for rank, row in zip(ranks.tolist(), turn.tolist(), strict=True):
                    if np.isnan(rows["start"][row]):
                        waits.setdefault(rank, self._missing(step, shape.first + row))
            if np.isnan(rows["start"]).all():
                break
            self._book(step, rows)
            if step == self.done and (self.bookings.step_end[-1] <= now).any():
                self.model.learn_until(step)  # somebody has got that far
        self.bookings.close(now, waits)

    def _missing(self, step: int, row: int) -> str:
        """Return what a task waits for, in words."""
        if self.steps.plan.kind[row] != FORWARD:
            return f"the gradients of step {step}"
        if self.workers[0].accumulation > 1:
            return f"the parameters of step {step}"
        return f"the parameters of layer {self.steps.plan.first[row]}"


def _named(plan: Plan, name: str) -> Bools:
    """Return which rows have a name."""
    return np.asarray(plan.name == (plan.names.index(name) if name in plan.names else len(plan.names)))


def with_slow_downs(tasks: TaskColumns, rank: Ints, workers: Sequence[Worker]) -> TaskColumns:
    """Return the tasks with the slow-downs of the workers that do them."""
    first = np.full(len(workers), -1, dtype=np.int64)
    entries: list[tuple[float, float]] = []
    for worker in workers:
        if worker.slow_downs:
            first[worker.rank] = len(entries)
            entries += slow_intervals(worker.slow_downs)
    return tasks._replace(slow=first[rank[: len(tasks.kind)]], slow_downs=entries)
