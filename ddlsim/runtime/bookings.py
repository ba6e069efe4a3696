"""What workers did in the steps of a plan, read from its columns: seconds, spans, ends of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, COMPUTE, FORWARD, KINDS, UPDATE, Bools, Floats, Ints, Plan
from ddlsim.runtime import recorder as rc
from ddlsim.runtime.recorder import Recorder, Spans

__all__ = ["Bookings", "Step"]

_NAMES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer", COMPUTE: "optimizer"}
Records = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one step of a plan, numbered from 0: who works on what, and what is exchanged.

    turns     of the lanes "compute", the ranks and rows of the first tasks, of the second ones, and so on, those of the
              same name together
    device    the first task of each rank's device, (n_ranks,)
    begins    the row with which each rank begins its gradient, (n_ranks,)
    updates   rows after which a rank's step has ended
    ready     rows after whose end on all ranks all gradients are ready
    exchanged rows of collectives
    """

    plan: Plan
    first: int
    turns: tuple[tuple[Ints, Ints, str], ...]
    device: Ints
    begins: Ints
    updates: Ints
    ready: Ints
    exchanged: Ints

    @classmethod
    def of(cls, plan: Plan, rows: slice, last_micro_step: Bools) -> Step:
        """Return the step of these rows, of which some (a mask) are of the last micro-batch."""
        kind, part, rank = (column[rows] for column in (plan.kind, plan.part, plan.rank))
        exchanged = np.flatnonzero(kind >= ALL_REDUCE)
        last = exchanged[part[exchanged] == part[exchanged].max(initial=-1)] + rows.start
        ready = [plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]] for row in last.tolist()]
        forward = np.flatnonzero((kind == FORWARD) & last_micro_step)[::-1]
        begins, device = np.zeros((2, plan.n_ranks), dtype=np.int64)
        begins[rank[forward]] = forward  # the first of each rank, which comes last
        turns = tuple(_turns(plan, rows))
        for ranks, first, _ in turns[::-1]:
            device[ranks] = first
        return cls(
            plan, rows.start, turns, device, begins, np.flatnonzero(kind == UPDATE),
            np.concatenate([plan.needs[:0], *ready]) - rows.start, exchanged,
        )  # fmt: skip


def _turns(plan: Plan, rows: slice) -> list[tuple[Ints, Ints, str]]:
    computing = np.array([lane.name == "compute" for lane in plan.lanes])
    device = np.flatnonzero(computing[plan.lane[rows]]) + rows.start
    device = device[np.argsort(plan.lane[device], kind="stable")]
    _, counts = np.unique(plan.lane[device], return_counts=True)
    place = np.arange(len(device)) - np.repeat(np.cumsum(counts) - counts, counts)
    names = np.array([
        plan.names[name] if name >= 0 else _NAMES.get(kind, KINDS[kind])
        for name, kind in zip(plan.name[device].tolist(), plan.kind[device].tolist(), strict=True)
    ])  # fmt: skip
    turns = []
    for k in range(int(counts.max())):
        for name in np.unique(names[place == k]).tolist():
            own = device[(place == k) & (names == name)]
            turns.append((plan.rank[own], own - rows.start, name))
    return turns


class Bookings:
    """Books steps into a recorder, one after the other; what all workers did is added up as arrays.

    A worker computes, or waits for gradients: until all workers' are ready (waiting), and for their bytes from then on
    (communication).
    """

    def __init__(self, recorder: Recorder) -> None:
        n = recorder.n_workers
        self.recorder = recorder
        self.seconds = {kind: np.zeros(n) for kind in (rc.COMPUTE, rc.COMMUNICATION, rc.WAITING)}
        self.booked = np.zeros(n)
        self.step_end: list[Floats] = []
        self.all_ready: list[float] = []  # of each step, when the last worker's gradients were

    def step(self, number: int, step: Step, tasks: Records) -> None:
        """Book what has been done in a step: all of it or, of the last ones of a run, what has ended."""
        start, end = tasks["start"], tasks["end"]
        ready = float(end[step.ready].max(initial=0.0))
        self.all_ready.append(np.inf if np.isnan(ready) else ready)
        for ranks, rows, name in step.turns:
            begun = ~np.isnan(start[rows])
            self._wait(number, ranks[begun], start[rows[begun]])
            over = ~np.isnan(end[rows])
            for rank, row in zip(ranks[begun & ~over].tolist(), rows[begun & ~over].tolist(), strict=True):
                self.recorder.open[rank] = (rc.COMPUTE, name, float(start[row]))
            self._compute(name, ranks[over], start[rows[over]], end[rows[over]])
        last = np.zeros(self.recorder.n_workers)
        np.maximum.at(last, step.plan.rank[step.first + step.updates], np.nan_to_num(end[step.updates], nan=np.inf))
        self.step_end.append(last)

    def exchange(self, name: str, ranks: Ints, start: Floats, end: Floats) -> None:
        """Show what a worker's network did beside its computing, where it has ended."""
        if self.recorder.keep_spans:
            self.recorder.columns.append(Spans(rc.TRANSFER, name, ranks, start, end))

    def close(self, now: float, waits: dict[int, str]) -> None:
        """Hand everything over to the recorder at the end of a run; `waits` says what workers are waiting for."""
        recorder = self.recorder
        for kind, seconds in self.seconds.items():
            for rank, value in enumerate(seconds.tolist()):
                recorder.seconds[rank][kind] += value
        recorder.booked = self.booked.tolist()
        for rank, what in waits.items():
            recorder.open.setdefault(rank, (rc.COMMUNICATION, what, recorder.booked[rank]))
        ends = np.array(self.step_end).reshape(-1, recorder.n_workers)
        for rank, column in enumerate(ends.T):
            recorder.step_end[rank] = column[column <= now].tolist()

    # ------------------------------------------------------------ inside

    def _compute(self, name: str, ranks: Ints, start: Floats, end: Floats) -> None:
        self.seconds[rc.COMPUTE][ranks] += end - start
        self.booked[ranks] = end
        if self.recorder.keep_spans:
            self.recorder.columns.append(Spans(rc.COMPUTE, name, ranks, start, end))

    def _wait(self, number: int, ranks: Ints, until: Floats) -> None:
        """Book the time since the last task as waiting and communication."""
        since = self.booked[ranks]
        ready = np.where(until >= self.all_ready[-1], self.all_ready[-1], self.all_ready[number - 1] if number else 0.0)
        ready = np.minimum(np.maximum(ready, since), until)
        self.seconds[rc.WAITING][ranks] += ready - since
        self.seconds[rc.COMMUNICATION][ranks] += until - ready
        self.booked[ranks] = until
        if self.recorder.keep_spans:
            self.recorder.columns.append(Spans(rc.WAITING, "all-reduce", ranks, since, ready))
            self.recorder.columns.append(Spans(rc.COMMUNICATION, "all-reduce", ranks, ready, until))
