"""Runs whose steps are any plan that repeats: ranks with parts of a model, groups of several kinds, messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import ConfigError, DdlsimError, DeadlockError
from ddlsim.network.executor import Executor
from ddlsim.network.state import Records
from ddlsim.plan.live import LIVE, MORE_STEPS, LiveSteps, live_steps
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, COMPUTE, KINDS, SEND, UPDATE, Floats, Ints, Plan
from ddlsim.plan.runner import key_sizes
from ddlsim.runtime import recorder as rc
from ddlsim.runtime.planned import with_slow_downs
from ddlsim.runtime.recorder import Spans
from ddlsim.runtime.setting import Setting
from ddlsim.workload.jitter import NoJitter

__all__ = ["TableRun", "run_table"]

#: kind of collective, group, bytes -> its schedule
Schedules = Callable[[int, int, float], Schedule]
#: step, begin of each rank's first task in s -> None: lets the values follow
Follow = Callable[[int, Floats], None]


def run_table(
    setting: Setting, make: Callable[[int], Plan], schedules: Schedules, *, samples: int, follow: Follow,
    members: Sequence[Sequence[int]] | None = None, live: int = LIVE,
) -> None:  # fmt: skip
    """Let a plan drive a run, over and over.

    make       steps -> their plan
    samples    of an update
    follow     is called when all tasks of a step have ended
    members    workers that each rank of the plan stands for, which do the same at the same time; by default rank r is
               worker r
    live       steps of which something can be under way at the same time

    Raises DdlsimError for a plan whose steps after the first are not alike, ConfigError for batches that change.
    """
    if setting.workers[0].workload_at is not None:
        raise ConfigError(
            "training: growing_batch and phases change the seconds of a step, which this strategy takes from one plan; "
            "run each batch size by itself"
        )
    steps = live_steps(make(live + MORE_STEPS), live)
    if steps is None:
        raise DdlsimError("plan: its steps after the first are not alike")
    each = [[rank] for rank in range(len(setting.workers))] if members is None else [list(own) for own in members]
    setting.loop.drive(TableRun(setting, steps, schedules, samples, follow, each))


@dataclass(frozen=True, eq=False)
class _Shape:
    """The rows of a step, numbered from 0.

    device    tasks of the lanes "compute", rank by rank in their order
    rank      of these
    comes     for each need of such a task that is an exchange: the task (place in ``device``) and the key
    entering  for each need of a row that enters an exchange: the key, and the needed row, from the begin of the step
              before on
    """

    plan: Plan
    rows: slice
    before: int

    @cached_property
    def device(self) -> Ints:
        plan = self.plan
        computing = np.array([lane.name == "compute" for lane in plan.lanes])[plan.lane[self.rows]]
        rows = np.flatnonzero(computing)
        return rows[np.argsort(plan.rank[self.rows][rows], kind="stable")]

    @cached_property
    def rank(self) -> Ints:
        return self.plan.rank[self.rows][self.device]

    @cached_property
    def needs(self) -> tuple[Ints, Ints]:
        """All (row of the step, needed row counted from the begin of the step before)."""
        offsets = self.plan.need_offsets[self.rows.start : self.rows.stop + 1]
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return row, self.plan.needs[offsets[0] : offsets[-1]] - (self.rows.start - self.before)

    @cached_property
    def entering(self) -> tuple[Ints, Ints]:
        row, need = self.needs
        kind = self.plan.kind[self.rows][row]
        enters = (kind >= ALL_REDUCE) | (kind == SEND)
        return self.plan.key[self.rows][row[enters]], need[enters]

    @cached_property
    def comes(self) -> tuple[Ints, Ints]:
        row, need = self.needs
        place = np.full(self.rows.stop - self.rows.start, -1)
        place[self.device] = np.arange(len(self.device))
        key = self.plan.key[self.rows.start - self.before + need]
        waits = (place[row] >= 0) & (key >= 0)
        return place[row[waits]], key[waits]


class TableRun:
    """Ranks that do the tasks of a plan. Compute times are the plan's seconds, multiplied by the factor that a worker
    draws for each micro-batch: of several workers that a rank stands for, by the largest."""

    def __init__(
        self, setting: Setting, steps: LiveSteps, schedules: Schedules, samples: int, follow: Follow,
        members: list[list[int]],
    ) -> None:  # fmt: skip
        self.setting, self.steps, self.schedules = setting, steps, schedules
        self.samples, self.follow, self.members = samples, follow, members
        plan = steps.plan
        self.nodes = np.array([setting.workers[own[0]].node for own in members], dtype=np.int64)
        _, self._group, self._kind = key_sizes(plan)
        sizes = [rows.stop - rows.start for rows in steps.rows]
        self._shape = [
            _Shape(plan, rows, before) for rows, before in zip(steps.rows[:3], [0, *sizes[:2]], strict=True)
        ]
        self.done = 0
        self._ended: set[int] = set()
        self._micro = [self._micro_batches(rows) for rows in steps.rows[:2]]
        self._varies = not isinstance(setting.jitter, NoJitter)
        tasks = steps.tasks._replace(seconds=np.concatenate([self._seconds(min(i, 1)) for i in range(len(steps.rows))]))
        workers = [setting.workers[own[0]] for own in members]
        self.executor = Executor(
            with_slow_downs(tasks, plan.rank, workers), setting.loop.network, self._collective, steps.key_sizes,
            plan.queues, self._messages,
        )  # fmt: skip
        n = len(members)
        self._spent = {kind: np.zeros(n) for kind in (rc.COMPUTE, rc.COMMUNICATION, rc.WAITING)}
        self._booked = np.zeros(n)
        self._ends_before = np.zeros(0)
        self._entered = np.zeros(len(self._group))  # s at which the last rank had what it puts into each exchange
        self._step_end: list[Floats] = []

    # ------------------------------------------------------------ running

    def run(self, max_time: float, pause: Callable[[], bool] | None) -> None:
        """Run until the rule that ends the run says so, but not beyond `max_time` (s), nor past where `pause` says so.

        It is asked when a step has ended. Raises ConfigError for evaluations that should take time.
        """
        loop, stop = self.setting.loop, self.setting.stop
        if any(worker.owed for worker in self.setting.workers):  # by the evaluation before the first step
            raise ConfigError("charge_evaluation: evaluations take no time where a plan drives the run; leave it out")
        try:
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
        step, slot = self.done, self.steps.slot(self.done)
        self._ended.discard(slot)
        rows = self.executor.tasks[self.steps.rows[slot]].copy()
        self._book(step, rows)
        self.follow(step, self._begins(step, rows))
        self.done += 1
        if slot > 0:  # where the step so many steps later is executed
            n_keys = self.steps.keys[-1].stop - self.steps.keys[1].start
            self.executor.arm(slot, self.steps.rows[slot], self.steps.keys[slot], self._seconds(1), n_keys)
        self.setting.stop.updated(self.samples)

    def _begins(self, step: int, rows: Records) -> Floats:
        shape = self._shape[min(step, 2)]
        first = shape.device[np.searchsorted(shape.rank, np.arange(len(self.members)))]
        begins: Floats = rows["start"][first]
        return begins

    def _deadlock(self) -> DeadlockError:
        rows = self.steps.rows[self.steps.slot(self.done)]
        stuck = rows.start + int(np.flatnonzero(np.isnan(self.executor.tasks["end"][rows]))[0])
        _ = Order(self.steps.plan).events  # raises, naming the circle that it is in
        return DeadlockError(f"deadlock at {self.executor.now:.6g} s: {self.steps.plan.task(stuck)} never ends")

    # ------------------------------------------------------------ compute times

    def _micro_batches(self, rows: slice) -> Ints:
        """Return the number of each row's micro-batch among those of its rank; of other rows, the last one's."""
        plan = self.steps.plan
        rank, batch = plan.rank[rows], plan.batch[rows]
        of_batch = batch >= 0
        pairs, place = np.unique(np.stack([rank[of_batch], batch[of_batch]]), axis=1, return_inverse=True)
        first = np.searchsorted(pairs[0], np.arange(plan.n_ranks))
        last = np.searchsorted(pairs[0], np.arange(plan.n_ranks), side="right") - first - 1
        micro = np.maximum(last, 0)[rank]
        micro[of_batch] = place.reshape(-1) - first[rank[of_batch]]
        return np.asarray(micro, dtype=np.int64)

    def _seconds(self, shape: int) -> Floats:
        """Return the seconds of the next step's tasks."""
        rows = self.steps.rows[shape]
        seconds = self.steps.plan.seconds[rows]
        if not self._varies:
            return seconds.copy()
        n = int(self._micro[shape].max(initial=0)) + 1
        workers = self.setting.workers
        drawn = [[[next(workers[i].factors) for _ in range(n)] for i in own] for own in self.members]
        largest = np.array([np.max(own, axis=0) for own in drawn])
        return np.asarray(seconds * largest[self.steps.plan.rank[rows], self._micro[shape]], dtype=np.float64)

    # ------------------------------------------------------------ what travels

    def _collective(self, keys: list[int]) -> int:
        nbytes = float(np.cumsum(self.steps.key_sizes[keys])[-1])  # one after the other, as buffers are filled
        group = int(self._group[keys[0]])
        schedule = self.schedules(int(self._kind[keys[0]]), group, nbytes)
        return self.setting.loop.collective(schedule, self.nodes[list(self.steps.plan.groups[group])].tolist(), nbytes)

    def _messages(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        plan = self.steps.plan
        self.setting.loop.nbytes_asked += float(plan.nbytes[rows].sum())
        return self.nodes[plan.rank[rows]], self.nodes[plan.peer[rows]], plan.nbytes[rows]

    # ------------------------------------------------------------ where the time goes

    def _book(self, step: int, rows: Records) -> None:
        """Book a step, all of it or, of the last ones, what has ended: ranks compute; they wait for other ranks until
        what they need has been handed over to the network, and for its bytes from then on."""
        shape = self._shape[min(step, 2)]
        start, end = rows["start"], rows["end"]
        ends = np.concatenate([self._ends_before, end])
        self._ends_before = end
        entered = self._entered  # of the exchanges of this step and the one before
        number = min(step, 2)
        if step > 2:
            entered[self.steps.keys[1]] = entered[self.steps.keys[2]]
        entered[self.steps.keys[number]] = 0.0
        key, need = shape.entering
        np.maximum.at(entered, key, np.nan_to_num(ends[need], nan=np.inf))
        ready = np.zeros(len(shape.device))
        place, key = shape.comes
        np.maximum.at(ready, place, entered[key])
        self._book_device(shape, start[shape.device], end[shape.device], ready)
        plan = self.steps.plan
        updates = np.flatnonzero(plan.kind[shape.rows] == UPDATE)
        last = np.zeros(len(self.members))
        np.maximum.at(last, plan.rank[shape.rows][updates], np.nan_to_num(end[updates], nan=np.inf))
        self._step_end.append(last)

    def _book_device(self, shape: _Shape, start: Floats, end: Floats, ready: Floats) -> None:
        rank, begun, over = shape.rank, ~np.isnan(start), ~np.isnan(end)
        since = np.concatenate([[0.0], end[:-1]])
        first = np.flatnonzero(np.diff(rank, prepend=-1))
        since[first] = self._booked[rank[first]]
        since, until = since[begun], start[begun]
        ready = np.minimum(np.maximum(ready[begun], since), until)
        for kind, who, begins, ends in (
            (rc.WAITING, rank[begun], since, ready), (rc.COMMUNICATION, rank[begun], ready, until),
            (rc.COMPUTE, rank[over], start[over], end[over]),
        ):  # fmt: skip
            np.add.at(self._spent[kind], who, ends - begins)
            np.maximum.at(self._booked, who, ends)
            if self.setting.recorder.keep_spans:
                rows = shape.device[begun if kind != rc.COMPUTE else over]
                self._keep(shape, kind, rows, who, begins, ends)
        for row, own in zip(shape.device[begun & ~over].tolist(), rank[begun & ~over].tolist(), strict=True):
            for worker in self.members[own]:
                began = float(start[shape.device == row][0])
                self.setting.recorder.open[worker] = (rc.COMPUTE, self._name(shape, row), began)

    def _keep(self, shape: _Shape, kind: str, rows: Ints, ranks: Ints, starts: Floats, ends: Floats) -> None:
        """Show what ranks did, on the tracks of all workers that they stand for."""
        names = np.array([self._name(shape, row) if kind == rc.COMPUTE else "communication" for row in rows.tolist()])
        for name in np.unique(names).tolist():
            own = np.flatnonzero(names == name)
            workers = [self.members[rank] for rank in ranks[own].tolist()]
            places = np.repeat(own, [len(each) for each in workers])
            flat = np.array([worker for each in workers for worker in each], dtype=np.int64)
            self.setting.recorder.columns.append(Spans(kind, name, flat, starts[places], ends[places]))

    def _name(self, shape: _Shape, row: int) -> str:
        plan = self.steps.plan
        name, kind = int(plan.name[shape.rows.start + row]), int(plan.kind[shape.rows.start + row])
        if name >= 0:
            return plan.names[name]
        return "optimizer" if kind in (UPDATE, COMPUTE) else KINDS[kind]

    def _close(self) -> None:
        """Book what ranks are in the middle of, and hand all over to the recorder."""
        setting, recorder = self.setting, self.setting.recorder
        now = max(self.executor.now, setting.loop.network.now)
        setting.loop.env.pass_time(now)
        for step in range(self.done, self.done + self.steps.live):
            rows = self.executor.tasks[self.steps.rows[self.steps.slot(step)]].copy()
            if np.isnan(rows["start"]).all():
                break
            self._book(step, rows)
        ends = np.array(self._step_end).reshape(-1, len(self.members))
        for rank, own in enumerate(self.members):
            for worker in own:
                for kind, seconds in self._spent.items():
                    recorder.seconds[worker][kind] += float(seconds[rank])
                recorder.booked[worker] = float(self._booked[rank])
                recorder.open.setdefault(
                    worker, (rc.WAITING, "its next task", recorder.booked[worker])
                )
                recorder.step_end[worker] = ends[:, rank][ends[:, rank] <= now].tolist()
