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
from ddlsim.plan.folding import Folding, Timeline
from ddlsim.plan.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    BROADCAST,
    COMPUTE,
    FORWARD,
    KINDS,
    SEND,
    UPDATE,
    Bools,
    Floats,
    Ints,
    Plan,
)
from ddlsim.plan.rows import ranges
from ddlsim.plan.tensor_ranks import PRODUCT
from ddlsim.runtime import recorder as rc
from ddlsim.runtime.loop import Traffic
from ddlsim.runtime.recorder import Recorder, Spans

_NAMES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer", COMPUTE: "optimizer"}
Records = npt.NDArray[Any]
Texts = npt.NDArray[np.str_]


#: steps back, what needs, and what is needed, (n_needs,) each
_Needs = tuple[int, Ints, Ints]


@dataclass(frozen=True, eq=False)
class Shape:
    """The rows of one step of a plan, numbered from 0.

    of_steps  rows of each step of the plan
    of_keys   keys of each step
    step      number of this step
    said      (kind, group, whether of parts) of a collective -> name of a rank's wait for it
    """

    plan: Plan
    of_steps: Sequence[slice]
    of_keys: Sequence[slice]
    step: int
    said: Mapping[tuple[int, int, bool], str]

    @property
    def rows(self) -> slice:
        """The rows of the step."""
        return self.of_steps[self.step]

    def _by_steps_back(self, needing: Ints, need: Ints, begins: Sequence[slice], of: Ints) -> list[_Needs]:
        """Group dependencies by how many steps earlier the needed row is; ``of[need]`` counts from its step's start."""
        back = self.step - self.plan.step[need]
        return [
            (steps, needing[back == steps], of[need[back == steps]] - begins[self.step - steps].start)
            for steps in np.unique(back).tolist()
        ]

    @cached_property
    def device(self) -> Ints:
        """Tasks of the lanes "compute", rank by rank in their order."""
        rows = np.flatnonzero(self.plan.on_device[self.rows])
        return rows[np.argsort(self.plan.rank[self.rows][rows], kind="stable")]

    @cached_property
    def rank(self) -> Ints:
        """Rank of each device's task."""
        return self.plan.rank[self.rows][self.device]

    @cached_property
    def first(self) -> Ints:
        """Index in `device` of the first task of each rank, (n_ranks,)."""
        return np.searchsorted(self.rank, np.arange(self.plan.n_ranks))

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
        """The row with which each rank begins its last micro-batch, (n_ranks,)."""
        rank, kind = self.plan.rank[self.rows], self.plan.kind[self.rows]
        last = np.zeros(self.plan.n_ranks, dtype=np.int64)
        np.maximum.at(last, rank, self.micro)
        forward = np.flatnonzero((kind == FORWARD) & (self.micro == last[rank]))[::-1]
        begins = np.zeros(self.plan.n_ranks, dtype=np.int64)
        begins[rank[forward]] = forward  # the first one of each rank, because rows are in reverse order
        return begins

    @cached_property
    def lasts(self) -> Ints:
        """Rows after which a rank's step has ended, because all its weights are updated."""
        kind, part = self.plan.kind[self.rows], self.plan.part[self.rows]
        now_and_then = (self.plan.every[self.rows] > 0) & self.plan.on_device[self.rows]
        gathers = np.isin(kind, (ALL_GATHER, BROADCAST)) & (part >= 0)
        return np.flatnonzero((kind == UPDATE) | now_and_then | gathers)

    @cached_property
    def entering(self) -> list[_Needs]:
        """Dependencies of the rows that enter an exchange: steps back, keys, and needed rows."""
        rows = np.arange(self.rows.start, self.rows.stop)
        kind = self.plan.kind[rows]
        row, need = _needs(self.plan, rows[(kind >= ALL_REDUCE) | (kind == SEND)])
        key = self.plan.key[row] - self.of_keys[self.step].start
        return self._by_steps_back(key, need, self.of_steps, np.arange(len(self.plan)))

    @cached_property
    def _awaited(self) -> tuple[Ints, Ints]:
        """Exchanges that devices' tasks depend on, directly or through work on the stream: index of the task in
        `device`, and row of the exchange."""
        rows = self.rows.start + self.device
        row, need = _needs(self.plan, rows)
        place = np.full(self.rows.stop - self.rows.start, -1)
        place[self.device] = np.arange(len(self.device))
        place = place[row - self.rows.start]
        stream = (self.plan.kind[need] < SEND) & ~self.plan.on_device[need]
        counts = self.plan.need_offsets[need[stream] + 1] - self.plan.need_offsets[need[stream]]
        place = np.concatenate([place, np.repeat(place[stream], counts)])
        need = np.concatenate([need, _needs(self.plan, need[stream])[1]])
        exchanged = self.plan.kind[need] >= SEND
        return place[exchanged], need[exchanged]

    @cached_property
    def comes(self) -> list[_Needs]:
        """The same, grouped by steps back: indices in `device`, and keys of the exchanges."""
        place, need = self._awaited
        return self._by_steps_back(place, need, self.of_keys, self.plan.key)

    @cached_property
    def names(self) -> Texts:
        """Name of each device's task."""
        rows = self.rows.start + self.device
        named, kind = self.plan.name[rows], self.plan.kind[rows]
        different, which = np.unique(np.where(named >= 0, len(KINDS) + named, kind), return_inverse=True)
        texts = [*(_NAMES.get(number, name) for number, name in enumerate(KINDS)), *self.plan.names]
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
        ways = np.stack([self.plan.kind[latest], self.plan.peer[latest], self.plan.part[latest] >= 0])
        different, which = np.unique(np.where(latest >= 0, ways, -1), axis=1, return_inverse=True)
        texts = [self.said.get((kind, group, bool(parts)), "message") for kind, group, parts in different.T.tolist()]
        return np.array(texts)[which.reshape(-1)]

    @cached_property
    def exchanges(self) -> list[tuple[str, Ints]]:
        """(name, rows) of each collective, and of all messages together."""
        kind, part, key = (column[self.rows] for column in (self.plan.kind, self.plan.part, self.plan.key))
        rows = np.flatnonzero(kind >= ALL_REDUCE)
        several = len(np.unique(kind[rows[part[rows] >= 0]])) > 1
        rows = rows[np.argsort(key[rows], kind="stable")]
        named = []
        for own in np.split(rows, np.flatnonzero(np.diff(key[rows])) + 1):
            if len(own):
                first = self.rows.start + int(own[0])
                what = self.said[int(kind[own[0]]), int(self.plan.peer[first]), bool(part[own[0]] >= 0)]
                name = f"bucket {part[own[0]]}"
                name = f"{what} of {name}" if several else name
                other = self.plan.names[self.plan.name[first]] if self.plan.name[first] >= 0 else what
                named.append((name if part[own[0]] >= 0 else other, own))
        messages = np.flatnonzero(kind == SEND)
        return [*named, ("message", messages)] if len(messages) else named


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
    passes   which of these passes each row is, -1 if none, (n,); with `folding`
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
        for own in members:  # they stand still together
            stops = sorted(stop for worker in own for stop in recorder.stops.get(worker, ()))
            recorder.stops.update({worker: stops for worker in own if stops})
        self.step_end: list[Floats] = []
        #: of the latest steps, the last one first: ends of tasks (s), and for each exchange when all its data was
        #: available (s)
        self._ends: deque[Floats] = deque(maxlen=len(shapes))
        self._entered: deque[Floats] = deque(maxlen=len(shapes))
        self._first = np.array([own[0] for own in members], dtype=np.int64)

    def shape(self, step: int) -> Shape:
        """Return the shape of a step."""
        return self.shapes[min(step, len(self.shapes) - 1)]

    def step(self, number: int, tasks: Records, now: float = np.inf) -> None:
        """Record a step: all of it or, for the last steps of a run, the tasks that have ended by `now`."""
        shape = self.shape(number)
        start, end = tasks["start"], tasks["end"].copy()  # a copy, because the tasks are executed again
        keys = shape.of_keys[shape.step]
        self._ends.appendleft(end)
        self._entered.appendleft(np.zeros(keys.stop - keys.start))
        for back, key, need in shape.entering:
            np.maximum.at(self._entered[0], key, np.nan_to_num(self._ends[back][need], nan=np.inf))
        ready = np.zeros(len(shape.device))
        for back, place, key in shape.comes:
            np.maximum.at(ready, place, self._entered[back][key])
        self._device(shape, start[shape.device], end[shape.device], ready)
        if self.folding is not None and self.passes is not None:
            which = self.passes[shape.rows][shape.device]
            self._passes(self.folding, shape, which, start[shape.device], end[shape.device], now)
        last = np.zeros(len(self.members))
        np.maximum.at(last, shape.plan.rank[shape.rows][shape.lasts], np.nan_to_num(end[shape.lasts], nan=np.inf))
        self.step_end.append(last)

    def _device(self, shape: Shape, start: Floats, end: Floats, ready: Floats) -> None:
        rank, begun, over = shape.rank, ~np.isnan(start), ~np.isnan(end)
        since = np.concatenate([[0.0], end[:-1]])
        ranks = np.unique(rank)
        since[shape.first[ranks]] = self.booked[ranks]
        ready = np.minimum(np.maximum(ready, since), start)
        spans = (
            (rc.WAITING, begun, since, ready),
            (rc.COMMUNICATION, begun, ready, start),
            (rc.COMPUTE, over & ~shape.samples, start, end),
            (rc.INPUT, over & shape.samples, start, end),
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
                    which &= self.passes[shape.rows][shape.device] < 0
                    who, until = rank[which], ends[which]
                names = shape.names if kind in (rc.COMPUTE, rc.INPUT) else shape.waits
                self._keep(kind, names[which], who, begins[which], until)
        for i in np.flatnonzero(begun & ~over).tolist():
            for worker in self.members[rank[i]]:
                kind = rc.INPUT if shape.samples[i] else rc.COMPUTE
                self.recorder.open[worker] = (kind, str(shape.names[i]), float(start[i]))

    def _passes(self, folding: Folding, shape: Shape, which: Ints, start: Floats, end: Floats, now: float) -> None:
        """Book what tensor groups exchange in the passes of a step, whose seconds have been booked as computing."""
        n_passes, rank, begun = len(folding.passes.items), shape.rank, (which >= 0) & ~np.isnan(start)
        number = folding.kind[rank] * n_passes + which  # of the timeline
        apart = np.full(len(self.members), self.recorder.keep_spans)
        apart[rank[begun & np.isnan(end)]] = True  # ranks that are in the middle of a pass
        whole = np.flatnonzero(begun & ~apart[rank])
        # sums of ones are exact in any order; those of seconds are not
        times = np.bincount(rank[whole] * len(self._shares) + number[whole], minlength=len(apart) * len(self._shares))
        self._times += times.reshape(len(apart), -1) @ self._shares
        whole = whole[np.argsort(number[whole].astype(np.min_scalar_type(len(self._shares))), kind="stable")]
        exchanging = np.array([each.exchanging for of_kind in folding.timelines for each in of_kind])[number[whole]]
        np.add.at(self.seconds[rc.COMPUTE], rank[whole], -exchanging)
        np.add.at(self.seconds[rc.COMMUNICATION], rank[whole], exchanging)
        done = begun & apart[rank]
        for each in np.unique(number[done]).tolist():
            kind, of_pass = divmod(each, n_passes)
            timeline, rows = folding.timelines[kind][of_pass], np.flatnonzero(done & (number == each))
            under_way = np.minimum(now - start[rows], timeline.seconds)
            took = np.where(np.isnan(end[rows]), under_way, timeline.seconds)
            self._exchanges(folding, kind, timeline, rank[rows], start[rows], took)
            over = ~np.isnan(end[rows])
            for seconds, sign in ((self.seconds[rc.COMPUTE], -1.0), (self.seconds[rc.COMMUNICATION], 1.0)):
                np.add.at(seconds, rank[rows[over]], sign * timeline.exchanging)
            for i, elapsed in zip(rows[~over].tolist(), took[~over].tolist(), strict=True):
                self._under_way(timeline, int(rank[i]), float(start[i]), elapsed, str(shape.names[i]))
            if self.recorder.keep_spans:
                self._spans(timeline, rank[rows], start[rows], took, shape.names[rows])

    @cached_property
    def _shares(self) -> Floats:
        """How often each exchange happens in each pass that is over, (n_kinds * n_passes, n_exchanges)."""
        assert self.folding is not None
        timelines = [each for of_kind in self.folding.timelines for each in of_kind]
        shares = np.zeros((len(timelines), len(self.folding.exchanges)))
        for own, timeline in zip(shares, timelines, strict=True):
            np.add.at(own, timeline.exchange, timeline.shares(timeline.seconds))
        return shares

    def _exchanges(
        self, folding: Folding, kind: int, timeline: Timeline, ranks: Ints, start: Floats, took: Floats
    ) -> None:
        """Count the exchanges of the same pass of several ranks; `took` is the seconds that each rank was in them."""
        shares = timeline.shares(took[:, None]).T
        each = zip(timeline.exchange.tolist(), timeline.begun, timeline.over, shares, strict=True)
        for exchange, begun, over, share in each:
            np.add.at(self._times[:, exchange], ranks, share)
            if not self.recorder.keep_spans:
                continue
            measure = folding.measures[kind][exchange]
            place = np.searchsorted(folding.local[kind], measure.channels)
            for rank, first, part in zip(ranks.tolist(), (start + begun).tolist(), share.tolist(), strict=True):
                if part > 0.0:
                    self._busy.append(busy_rows(folding.channels[rank][place], first, first + part * measure.busy))
            name = "message" if folding.exchanges[exchange][0] == SEND else KINDS[folding.exchanges[exchange][0]]
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
        for name in np.unique(names).tolist():
            own = np.flatnonzero((names == name) & (ends > starts))
            workers = [self.members[rank] for rank in ranks[own].tolist()]
            places = np.repeat(own, [len(each) for each in workers])
            flat = np.array([worker for each in workers for worker in each], dtype=np.int64)
            self.recorder.keep(Spans(kind, name, flat, starts[places], ends[places]))

    def exchange(self, name: str, ranks: Ints, tasks: Records, rows: Ints) -> None:
        """Show an exchange that has ended on the network tracks of `ranks`."""
        over = ~np.isnan(tasks["end"][rows]) & (tasks["kind"][rows] != SKIPPED)
        done = tasks[rows[over]]
        who = [np.array(self.members[rank], dtype=np.int64) for rank in ranks[over].tolist()]
        times = [np.repeat(done[column], [len(each) for each in who]) for column in ("start", "end")]
        workers = np.concatenate([np.zeros(0, dtype=np.int64), *who])
        self.recorder.columns.append(Spans(rc.TRANSFER, name, workers, *times))

    def close(self, now: float, waits: dict[int, str]) -> None:
        """Pass all records to the recorder at the end of a run; `waits` describes what ranks are waiting for."""
        recorder, ends = self.recorder, np.array(self.step_end).reshape(-1, len(self.members))
        for rank, own in enumerate(self.members):
            step_end = ends[:, rank][ends[:, rank] <= now].tolist()
            for worker in own:
                for kind, seconds in self.seconds.items():
                    recorder.seconds[worker][kind] += float(seconds[rank])
                recorder.booked[worker] = float(self.booked[rank])
                recorder.idle[worker] += float(self.idle[rank])
                if rank in waits:
                    recorder.open.setdefault(worker, (rc.COMMUNICATION, waits[rank], recorder.booked[worker]))
                recorder.step_end[worker] = list(step_end)
