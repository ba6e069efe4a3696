"""Bookkeeping of the steps of a plan: seconds, spans and ends of steps of each rank, computed from its columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.network.busy import busy_rows
from ddlsim.network.tasks import SKIPPED
from ddlsim.plan import plan as pl
from ddlsim.plan.folding import Folding, Timeline
from ddlsim.plan.plan import Bools, Floats, Ints, Plan
from ddlsim.plan.program import StepProgram
from ddlsim.plan.rows import ranges
from ddlsim.plan.tensor_ranks import PRODUCT
from ddlsim.runtime import recorder as rc
from ddlsim.runtime.loop import Traffic
from ddlsim.runtime.recorder import Recorder, Spans
from ddlsim.ties import distinct

_NAMES = {pl.FORWARD: "forward", pl.BACKWARD: "backward", pl.UPDATE: "optimizer", pl.COMPUTE: "optimizer"}
Records = npt.NDArray[Any]
Texts = npt.NDArray[np.str_]


#: steps back, what needs, and what is needed, (n_needs,) each; the same in every copy
_Needs = tuple[int, Ints, Ints]


@dataclass(frozen=True, eq=False)
class Shape:
    """The rows of one step of a program, numbered from 0; each copy has them all.

    step  of the template
    said  (kind, group, whether of parts) of a collective -> name of a rank's wait for it
    """

    program: StepProgram
    step: int
    said: Mapping[tuple[int, int, bool], str]

    @property
    def plan(self) -> Plan:
        """The template."""
        return self.program.template

    @cached_property
    def rows(self) -> slice:
        """The rows of the step."""
        return self.program.rows(self.step)

    def _by_steps_back(self, needing: Ints, need: Ints) -> list[_Needs]:
        """Group dependencies by how many steps earlier the needed row is."""
        back = self.step - self.plan.step[need]
        return [(steps, needing[back == steps], need[back == steps]) for steps in distinct(back).tolist()]

    @cached_property
    def device(self) -> Ints:
        """Tasks of the lanes "compute", place by place in their order."""
        rows = np.flatnonzero(self.plan.on_device[self.rows])
        return rows[np.argsort(self.plan.rank[self.rows][rows], kind="stable")]

    @cached_property
    def place(self) -> Ints:
        """Place of each device's task."""
        return self.plan.rank[self.rows][self.device]

    @property
    def rank(self) -> Ints:
        """Rank of each device's task, copy by copy."""
        return self.program.ranks[:, self.place].ravel()

    @cached_property
    def first(self) -> Ints:
        """Index in `device` of the first task of each place, (n_places,)."""
        return np.searchsorted(self.place, np.arange(self.plan.n_ranks))

    def task(self, rank: int, rows: Ints) -> int:
        """Return the task, among those of all copies, that is the row of a rank's place, given those of all places."""
        copy, place = (int(column[rank]) for column in self.program.place_of)
        n: int = self.rows.stop - self.rows.start
        return copy * n + int(rows[place])

    @cached_property
    def micro(self) -> Ints:
        """Index of each row's micro-batch among those of its rank, (n,); for other rows, that of the last one."""
        rank, batch = self.plan.rank[self.rows], self.plan.batch[self.rows]
        of_batch = batch >= 0
        width = int(batch.max(initial=0)) + 1
        pairs, place = np.unique(rank[of_batch] * width + batch[of_batch], return_inverse=True)
        first = np.searchsorted(pairs, np.arange(self.plan.n_ranks) * width)
        last = np.searchsorted(pairs, (1 + np.arange(self.plan.n_ranks)) * width) - first - 1
        micro = np.maximum(last, 0)[rank]
        micro[of_batch] = place.reshape(-1) - first[rank[of_batch]]
        return np.asarray(micro, dtype=np.int64)

    @cached_property
    def begins(self) -> Ints:
        """The row with which each place begins its last micro-batch, (n_places,)."""
        place, kind = self.plan.rank[self.rows], self.plan.kind[self.rows]
        last = np.zeros(self.plan.n_ranks, dtype=np.int64)
        np.maximum.at(last, place, self.micro)
        forward = np.flatnonzero((kind == pl.FORWARD) & (self.micro == last[place]))[::-1]
        begins = np.zeros(self.plan.n_ranks, dtype=np.int64)
        begins[place[forward]] = forward  # the first one of each place, because rows are in reverse order
        return begins

    @cached_property
    def lasts(self) -> Ints:
        """Rows after which a rank's step has ended, because all its weights are updated."""
        kind, part = self.plan.kind[self.rows], self.plan.part[self.rows]
        now_and_then = (self.plan.every[self.rows] > 0) & self.plan.on_device[self.rows]
        gathers = np.isin(kind, (pl.ALL_GATHER, pl.BROADCAST)) & (part >= 0)
        return np.flatnonzero((kind == pl.UPDATE) | now_and_then | gathers)

    @cached_property
    def entering(self) -> list[_Needs]:
        """Dependencies of the rows that enter an exchange: steps back, and rows of the template."""
        kind = self.plan.kind[self.rows]
        rows = self.rows.start + np.flatnonzero((kind >= pl.ALL_REDUCE) | (kind == pl.SEND))
        return self._by_steps_back(*_needs(self.plan, rows))

    @cached_property
    def _awaited(self) -> tuple[Ints, Ints]:
        """Exchanges that devices' tasks depend on, directly or through work on the stream: index of the task in
        `device`, and row of the exchange."""
        rows = self.rows.start + self.device
        row, need = _needs(self.plan, rows)
        place = np.full(self.rows.stop - self.rows.start, -1)
        place[self.device] = np.arange(len(self.device))
        place = place[row - self.rows.start]
        stream = (self.plan.kind[need] < pl.SEND) & ~self.plan.on_device[need]
        counts = self.plan.need_offsets[need[stream] + 1] - self.plan.need_offsets[need[stream]]
        place = np.concatenate([place, np.repeat(place[stream], counts)])
        need = np.concatenate([need, _needs(self.plan, need[stream])[1]])
        exchanged = self.plan.kind[need] >= pl.SEND
        return place[exchanged], need[exchanged]

    @cached_property
    def comes(self) -> list[_Needs]:
        """The same, grouped by steps back: indices in `device`, and rows of the exchanges in the template."""
        return self._by_steps_back(*self._awaited)

    @cached_property
    def names(self) -> Texts:
        """Name of each device's task."""
        rows = self.rows.start + self.device
        named, kind = self.plan.name[rows], self.plan.kind[rows]
        different, which = np.unique(np.where(named >= 0, len(pl.KINDS) + named, kind), return_inverse=True)
        texts = [*(_NAMES.get(number, name) for number, name in enumerate(pl.KINDS)), *self.plan.names]
        return np.array([texts[number] for number in different.tolist()])[which]

    @cached_property
    def samples(self) -> Bools:
        """Whether each device's task waits for samples."""
        return np.asarray(self.names == rc.INPUT)

    @cached_property
    def waits(self) -> Texts:
        """Name of the wait before each device's task, for the last exchange that it needs."""
        place, need = self._awaited
        latest = np.full(len(self.device), -1)
        np.maximum.at(latest, place, need)
        different, which = np.unique(latest, return_inverse=True)
        texts = [
            [self._label(copy, row) if row >= 0 else "message" for row in different.tolist()]
            for copy in range(len(self.program.ranks))
        ]
        return np.array(texts)[:, which.reshape(-1)].ravel()

    def _label(self, copy: int, row: int) -> str:
        plan = self.plan
        if plan.kind[row] < pl.ALL_REDUCE:
            return "message"
        group = int(self.program.group_of[copy, plan.peer[row]])
        return self.said[int(plan.kind[row]), group, bool(plan.part[row] >= 0)]

    @property
    def exchanges(self) -> list[tuple[str, Ints]]:
        """(name, tasks among those of all copies) of each collective, and of all messages together."""
        plan, n = self.plan, self.rows.stop - self.rows.start
        kind, part = plan.kind[self.rows], plan.part[self.rows]
        rows = np.flatnonzero(kind >= pl.ALL_REDUCE)
        several = len(distinct(kind[rows[part[rows] >= 0]])) > 1
        keys = self.program.keys_of(self.rows.start + rows).ravel()
        tasks = self.tasks(rows)
        order = np.argsort(keys, kind="stable")
        named = []
        for key_tasks in np.split(tasks[order], np.flatnonzero(np.diff(keys[order])) + 1):
            if len(key_tasks):
                copy, row = divmod(int(key_tasks[0]), n)
                what = self._label(copy, self.rows.start + row)
                name = f"bucket {part[row]}"
                name = f"{what} of {name}" if several else name
                number = plan.name[self.rows.start + row]
                other = plan.names[number] if number >= 0 else what
                named.append((name if part[row] >= 0 else other, key_tasks))
        messages = self.tasks(np.flatnonzero(kind == pl.SEND))
        return [*named, ("message", messages)] if len(messages) else named

    def tasks(self, rows: Ints) -> Ints:
        """Return the tasks that are some rows, among those of all copies, copy by copy."""
        n = self.rows.stop - self.rows.start
        tasks: Ints = (np.arange(len(self.program.ranks))[:, None] * n + rows).ravel()
        return tasks


def _needs(plan: Plan, rows: Ints) -> tuple[Ints, Ints]:
    """Return all (row, row that it needs) of some rows."""
    first = plan.need_offsets[rows]
    counts = plan.need_offsets[rows + 1] - first
    return np.repeat(rows, counts), plan.needs[ranges(first, counts)]


class Bookings:
    """Records steps, one after the other.

    A rank computes, or waits for an exchange. The wait is recorded as waiting until all members have handed their data
    to the network, and as communication from then on.

    members  the workers that each rank represents, which act identically
    shapes   of the first steps; the last one also describes all further ones
    start    s at which they begin
    folding  the contents of passes whose rank stands for several workers
    passes   which of these passes each row of the template is, -1 if none, (n,); with `folding`
    """

    def __init__(
        self, recorder: Recorder, members: Sequence[Sequence[int]], shapes: Sequence[Shape], start: float = 0.0, *,
        folding: Folding | None = None, passes: Ints | None = None,
    ) -> None:  # fmt: skip
        n = len(members)
        self.folding, self.passes = folding, passes
        #: how often each exchange of each rank's tensor group has happened, and when it kept channels busy
        self._times = np.zeros((n, 0 if folding is None else len(folding.exchanges)))
        self._busy = [busy_rows(np.zeros(0, dtype=np.int64), 0.0, 0.0)]
        self.recorder, self.members, self.shapes = recorder, members, shapes
        self.seconds = {kind: np.zeros(n) for kind in (rc.COMPUTE, rc.COMMUNICATION, rc.WAITING, rc.INPUT)}
        self.booked, self.idle = np.full(n, start), np.zeros(n)
        for workers in members:  # they stand still together
            stops = sorted(stop for worker in workers for stop in recorder.stops.get(worker, ()))
            recorder.stops.update({worker: stops for worker in workers if stops})
        self.step_end: list[Floats] = []
        #: of the latest steps, the last one first: ends of tasks (s), and for each exchange when all its data was
        #: available (s)
        self._ends: deque[Floats] = deque(maxlen=len(shapes))
        self._entered: deque[Floats] = deque(maxlen=len(shapes))
        self._first = np.array([workers[0] for workers in members], dtype=np.int64)

    def shape(self, step: int) -> Shape:
        """Return the shape of a step."""
        return self.shapes[min(step, len(self.shapes) - 1)]

    def step(self, number: int, tasks: Records, now: float = np.inf) -> None:
        """Record a step: all of it or, for the last steps of a run, the tasks that have ended by `now`."""
        shape, program = self.shape(number), self.shape(number).program
        tasks = tasks.reshape(len(program.ranks), -1)
        start, end = tasks["start"], tasks["end"].copy()  # a copy, because the tasks are executed again
        self._ends.appendleft(end)
        entered = np.zeros(program.n_keys(shape.step))
        self._entered.appendleft(entered)
        for back, row, need in shape.entering:
            ends = self._ends[back][:, need - program.rows(shape.step - back).start]
            arrived = np.nan_to_num(ends, nan=np.inf)
            np.maximum.at(entered, program.keys_of(row).ravel(), arrived.ravel())
        ready = np.zeros((len(program.ranks), len(shape.device)))
        for back, place, row in shape.comes:
            at = np.arange(len(program.ranks))[:, None] * len(shape.device) + place
            np.maximum.at(ready.ravel(), at.ravel(), self._entered[back][program.keys_of(row)].ravel())
        self._device(shape, start[:, shape.device], end[:, shape.device], ready)
        if self.folding is not None and self.passes is not None:
            which = np.tile(self.passes[shape.rows][shape.device], len(program.ranks))
            self._passes(self.folding, shape, which, start[:, shape.device].ravel(), end[:, shape.device].ravel(), now)
        last = np.zeros(len(self.members))
        updated = program.ranks_of(shape.rows.start + shape.lasts)
        np.maximum.at(last, updated.ravel(), np.nan_to_num(end[:, shape.lasts], nan=np.inf).ravel())
        self.step_end.append(last)

    def _device(self, shape: Shape, start: Floats, end: Floats, ready: Floats) -> None:
        """Record what devices did; start, end (of their tasks) and ready (n_copies, n), s."""
        ranks, places = shape.program.ranks, distinct(shape.place)
        since = np.concatenate([np.zeros((len(ranks), 1)), end[:, :-1]], axis=1)
        since[:, shape.first[places]] = self.booked[ranks[:, places]]
        ready = np.minimum(np.maximum(ready, since), start).ravel()
        rank, since, start, end = shape.rank, since.ravel(), start.ravel(), end.ravel()
        begun, over, samples = ~np.isnan(start), ~np.isnan(end), np.tile(shape.samples, len(ranks))
        spans = (
            (rc.WAITING, begun, since, ready),
            (rc.COMMUNICATION, begun, ready, start),
            (rc.COMPUTE, over & ~samples, start, end),
            (rc.INPUT, over & samples, start, end),
        )
        for kind, which, begins, ends in spans:
            who, until = rank[which], ends[which]
            stood = until - begins[which]  # except in the parts
            for part, place, first, last in self.recorder.parts(kind, self._first[who], begins[which], until):
                np.add.at(self.seconds[part], who[place], last - first)
                np.subtract.at(stood, place, last - first)
            if kind == rc.COMPUTE and self.recorder.stops:
                np.add.at(self.idle, who, stood)
            np.maximum.at(self.booked, who, until)
            if self.recorder.keep_spans:
                if kind == rc.COMPUTE and self.passes is not None:
                    which &= np.tile(self.passes[shape.rows][shape.device] < 0, len(ranks))
                    who, until = rank[which], ends[which]
                names = np.tile(shape.names, len(ranks)) if kind in (rc.COMPUTE, rc.INPUT) else shape.waits
                self._keep(kind, names[which], who, begins[which], until)
        for i in np.flatnonzero(begun & ~over).tolist():
            for worker in self.members[rank[i]]:
                kind, name = rc.INPUT if samples[i] else rc.COMPUTE, str(shape.names[i % len(shape.names)])
                self.recorder.open[worker] = (kind, name, float(start[i]))

    def _passes(self, folding: Folding, shape: Shape, which: Ints, start: Floats, end: Floats, now: float) -> None:
        """Book what tensor groups exchange in the passes of a step, whose seconds have been booked as computing."""
        n_passes, rank, begun = len(folding.passes.items), shape.rank, (which >= 0) & ~np.isnan(start)
        n_tasks = len(shape.device)  # of each copy
        number = folding.kind[rank] * n_passes + which  # of the timeline
        apart = np.full(len(self.members), self.recorder.keep_spans)
        apart[rank[begun & np.isnan(end)]] = True  # ranks that are in the middle of a pass
        ended = np.flatnonzero(begun & ~apart[rank])
        # sums of ones are exact in any order; those of seconds are not
        times = np.bincount(rank[ended] * len(self._shares) + number[ended], minlength=len(apart) * len(self._shares))
        self._times += times.reshape(len(apart), -1) @ self._shares
        ended = ended[np.argsort(number[ended].astype(np.min_scalar_type(len(self._shares))), kind="stable")]
        exchanging = np.array([timeline.exchanging for timelines in folding.timelines for timeline in timelines])
        exchanging = exchanging[number[ended]]
        np.add.at(self.seconds[rc.COMPUTE], rank[ended], -exchanging)
        np.add.at(self.seconds[rc.COMMUNICATION], rank[ended], exchanging)
        done = begun & apart[rank]
        for index in distinct(number[done]).tolist():
            kind, of_pass = divmod(index, n_passes)
            timeline, rows = folding.timelines[kind][of_pass], np.flatnonzero(done & (number == index))
            under_way = np.minimum(now - start[rows], timeline.seconds)
            took = np.where(np.isnan(end[rows]), under_way, timeline.seconds)
            self._exchanges(folding, kind, timeline, rank[rows], start[rows], took)
            over = ~np.isnan(end[rows])
            for seconds, sign in ((self.seconds[rc.COMPUTE], -1.0), (self.seconds[rc.COMMUNICATION], 1.0)):
                np.add.at(seconds, rank[rows[over]], sign * timeline.exchanging)
            for i, elapsed in zip(rows[~over].tolist(), took[~over].tolist(), strict=True):
                self._under_way(timeline, int(rank[i]), float(start[i]), elapsed, str(shape.names[i % n_tasks]))
            if self.recorder.keep_spans:
                self._spans(timeline, rank[rows], start[rows], took, shape.names[rows % n_tasks])

    @cached_property
    def _shares(self) -> Floats:
        """How often each exchange happens in each pass that is over, (n_kinds * n_passes, n_exchanges)."""
        assert self.folding is not None
        timelines = [timeline for of_kind in self.folding.timelines for timeline in of_kind]
        shares = np.zeros((len(timelines), len(self.folding.exchanges)))
        for row, timeline in zip(shares, timelines, strict=True):
            np.add.at(row, timeline.exchange, timeline.shares(timeline.seconds))
        return shares

    def _exchanges(
        self, folding: Folding, kind: int, timeline: Timeline, ranks: Ints, start: Floats, took: Floats
    ) -> None:
        """Count the exchanges of the same pass of several ranks; `took` is the seconds that each rank was in them."""
        shares = timeline.shares(took[:, None]).T
        exchanges = zip(timeline.exchange.tolist(), timeline.begun, timeline.over, shares, strict=True)
        for exchange, begun, over, share in exchanges:
            np.add.at(self._times[:, exchange], ranks, share)
            if not self.recorder.keep_spans:
                continue
            measure = folding.measures[kind][exchange]
            place = np.searchsorted(folding.local[kind], measure.channels)
            for rank, first, part in zip(ranks.tolist(), (start + begun).tolist(), share.tolist(), strict=True):
                if part > 0.0:
                    self._busy.append(busy_rows(folding.channels[rank][place], first, first + part * measure.busy))
            name = "message" if folding.exchanges[exchange][0] == pl.SEND else pl.KINDS[folding.exchanges[exchange][0]]
            who = folding.members[ranks[took >= over]]
            begins = np.repeat(start[took >= over], who.shape[1])
            self.recorder.columns.append(
                Spans(rc.TRANSFER, name.replace("_", "-"), who.ravel(), begins + begun, begins + over)
            )

    def _under_way(self, timeline: Timeline, rank: int, start: float, elapsed: float, name: str) -> None:
        """Record the completed part of a pass that a rank entered `elapsed` s ago, and its current activity."""
        over, begun = timeline.ends <= elapsed, timeline.starts <= elapsed
        until = float(timeline.ends[over].max(initial=0.0))
        computing = float((timeline.ends - timeline.starts)[over].sum())
        kind = rc.COMMUNICATION
        if (begun & ~over).any():
            kind, until = rc.COMPUTE, float(timeline.starts[begun & ~over][0])
        self.seconds[rc.COMPUTE][rank] += computing
        self.seconds[rc.COMMUNICATION][rank] += until - computing
        self.booked[rank] = start + until
        for worker in self.members[rank]:
            self.recorder.open[worker] = (kind, name if kind == rc.COMPUTE else "exchange", start + until)

    def _spans(self, timeline: Timeline, ranks: Ints, start: Floats, took: Floats, names: Texts) -> None:
        """Show the activities of devices within passes: they computed, and waited for exchanges."""
        since = np.concatenate([[0.0], timeline.ends[:-1]])
        for before, first, last, is_product in zip(
            since.tolist(), timeline.starts.tolist(), timeline.ends.tolist(), timeline.products, strict=True
        ):
            what = np.full(len(names), PRODUCT) if is_product else names
            begun, over = took >= first, took >= last
            exchange = np.full(int(begun.sum()), "exchange")
            self._keep(rc.COMMUNICATION, exchange, ranks[begun], start[begun] + before, start[begun] + first)
            self._keep(rc.COMPUTE, what[over], ranks[over], start[over] + first, start[over] + last)

    def exchanged(self, n_channels: int) -> tuple[Traffic, Records]:
        """Return the traffic within tensor groups that are executed as one rank, and the busy intervals of channels."""
        assert self.folding is not None
        return Traffic(*self.folding.traffic(self._times, n_channels)), np.concatenate(self._busy)

    def _keep(self, kind: str, names: Texts, ranks: Ints, starts: Floats, ends: Floats) -> None:
        """Show spans of ranks on the tracks of all workers that they represent."""
        for name in distinct(names).tolist():
            rows = np.flatnonzero((names == name) & (ends > starts))
            workers = [self.members[rank] for rank in ranks[rows].tolist()]
            places = np.repeat(rows, [len(group) for group in workers])
            flat = np.array([worker for group in workers for worker in group], dtype=np.int64)
            self.recorder.keep(Spans(kind, name, flat, starts[places], ends[places]))

    def exchange(self, name: str, ranks: Ints, tasks: Records, rows: Ints) -> None:
        """Show an exchange that has ended on the network tracks of `ranks`."""
        over = ~np.isnan(tasks["end"][rows]) & (tasks["kind"][rows] != SKIPPED)
        done = tasks[rows[over]]
        who = [np.array(self.members[rank], dtype=np.int64) for rank in ranks[over].tolist()]
        times = [np.repeat(done[column], [len(group) for group in who]) for column in ("start", "end")]
        workers = np.concatenate([np.zeros(0, dtype=np.int64), *who])
        self.recorder.columns.append(Spans(rc.TRANSFER, name, workers, *times))

    def close(self, now: float, waits: dict[int, str]) -> None:
        """Pass all records to the recorder at the end of a run; `waits` describes what ranks are waiting for."""
        recorder, ends = self.recorder, np.array(self.step_end).reshape(-1, len(self.members))
        for rank, workers in enumerate(self.members):
            step_end = ends[:, rank][ends[:, rank] <= now].tolist()
            for worker in workers:
                for kind, seconds in self.seconds.items():
                    recorder.seconds[worker][kind] += float(seconds[rank])
                recorder.booked[worker] = float(self.booked[rank])
                recorder.idle[worker] += float(self.idle[rank])
                if rank in waits:
                    recorder.open.setdefault(worker, (rc.COMMUNICATION, waits[rank], recorder.booked[worker]))
                recorder.step_end[worker] = list(step_end)
