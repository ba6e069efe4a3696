"""What workers did in the steps of a plan, read from its columns: seconds, spans, ends of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.plan.norms import NORMS
from ddlsim.plan.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    COMPUTE,
    FORWARD,
    KINDS,
    UPDATE,
    Bools,
    Floats,
    Ints,
    Plan,
)  # fmt: skip
from ddlsim.runtime import recorder as rc
from ddlsim.runtime.recorder import Recorder, Spans

__all__ = ["Bookings", "Step"]

_NAMES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "optimizer", COMPUTE: "optimizer"}
Records = npt.NDArray[Any]


class Turn(NamedTuple):
    """The tasks of the same name that the devices of `ranks` do at one place of a step, numbered in it: `rows`.

    They wait for what is ready when ``ready[source]`` (-1: nothing) of this step, or of the one `before`, says so;
    meanwhile the ranks are said to do `what`.
    """

    ranks: Ints
    rows: Ints
    name: str
    source: Ints
    before: Bools
    what: str


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one step of a plan, numbered from 0: who works on what, and what is exchanged.

    turns     of the lanes "compute": the first tasks of the ranks, the second ones, and so on
    device    the first task of each rank's device, (n_ranks,)
    begins    the row with which each rank begins its gradient, (n_ranks,)
    lasts     rows after which a rank's step has ended
    n_sources collectives that somebody waits for
    filled    (collective, row of this step that must end before one of its members can enter), (2, n)
    exchanged rows of collectives
    exchanges (name, rows) of each collective
    """

    plan: Plan
    first: int
    turns: tuple[Turn, ...]
    device: Ints
    begins: Ints
    lasts: Ints
    n_sources: int
    filled: Ints
    exchanged: Ints
    exchanges: tuple[tuple[str, Ints], ...]

    @classmethod
    def of(cls, plan: Plan, rows: slice, last_micro_step: Bools, said: Mapping[int, str]) -> Step:
        """Return the step of these rows, of which some (a mask) are of the last micro-batch.

        said  what a rank is said to do that waits for collectives of a kind
        """
        kind, part, rank = (column[rows] for column in (plan.kind, plan.part, plan.rank))
        exchanged = np.flatnonzero(kind >= ALL_REDUCE)
        forward = np.flatnonzero((kind == FORWARD) & last_micro_step)[::-1]
        begins, device = np.zeros((2, plan.n_ranks), dtype=np.int64)
        begins[rank[forward]] = forward  # the first of each rank, which comes last
        waits = _waits(plan)
        turns = tuple(_turns(plan, rows, waits, said))
        for turn in turns[::-1]:
            device[turn.ranks] = turn.rows
        gathers = np.flatnonzero((kind == ALL_GATHER) & (part >= 0))
        sources = _sources(plan, waits, int(plan.step[rows.start]))
        member = plan.collectives[np.isin(plan.key[plan.collectives], sources)]
        counts = np.diff(plan.need_offsets)[member]
        needs = [plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]] for row in member.tolist()]
        filled = np.stack([
            np.repeat(np.searchsorted(sources, plan.key[member]), counts),
            np.concatenate([plan.needs[:0], *needs]) - rows.start,
        ])  # fmt: skip
        filled = filled[:, filled[1] >= 0]
        key = plan.key[rows][exchanged]
        several = len(np.unique(kind[exchanged[part[exchanged] >= 0]])) > 1
        exchanges = []
        for each in np.unique(key).tolist():
            members = exchanged[key == each]
            name = f"bucket {part[members[0]]}"
            name = f"{said[int(kind[members[0]])]} of {name}" if several else name
            exchanges.append((name if part[members[0]] >= 0 else NORMS, members))
        return cls(
            plan, rows.start, turns, device, begins, gathers if len(gathers) else np.flatnonzero(kind == UPDATE),
            len(sources), filled, exchanged, tuple(exchanges),
        )  # fmt: skip


def _computing(plan: Plan) -> Bools:
    """Return what devices do, (n,)."""
    return np.array([lane.name == "compute" for lane in plan.lanes])[plan.lane]


def _waits(plan: Plan) -> Ints:
    """Return the collective that each task waits for, the last to be ready of those that it waits for: the row of its
    rank, or -1, (n,)."""
    computing = _computing(plan)
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    latest = np.where(plan.kind >= ALL_REDUCE, np.arange(len(plan)), -1)
    waits = np.full(len(plan), -1)
    for _ in range(2):  # also by way of another task of the stream
        np.maximum.at(waits, row, latest[plan.needs])
        streams = ~computing & (plan.kind < ALL_REDUCE)
        latest = np.where(streams, waits, latest)
    return np.where(plan.kind >= ALL_REDUCE, -1, waits)


def _sources(plan: Plan, waits: Ints, step: int) -> Ints:
    """Return the keys of a step that somebody waits for, in order."""
    sources = np.unique(plan.key[waits[waits >= 0]])
    of_key = np.full(int(plan.key.max(initial=0)) + 1, -1)
    of_key[plan.key[plan.collectives]] = plan.step[plan.collectives]
    return np.asarray(sources[of_key[sources] == step], dtype=np.int64)


def _turns(plan: Plan, rows: slice, waits: Ints, said: Mapping[int, str]) -> list[Turn]:
    device = np.flatnonzero(_computing(plan)[rows]) + rows.start
    device = device[np.argsort(plan.lane[device], kind="stable")]
    _, counts = np.unique(plan.lane[device], return_counts=True)
    place = np.arange(len(device)) - np.repeat(np.cumsum(counts) - counts, counts)
    names = np.array([
        plan.names[name] if name >= 0 else _NAMES.get(kind, KINDS[kind])
        for name, kind in zip(plan.name[device].tolist(), plan.kind[device].tolist(), strict=True)
    ])  # fmt: skip
    step = int(plan.step[rows.start])
    sources = [_sources(plan, waits, step - 1), _sources(plan, waits, step)]
    turns = []
    for k in range(int(counts.max())):
        for name in np.unique(names[place == k]).tolist():
            own = device[(place == k) & (names == name)]
            awaited = waits[own]
            before = (awaited >= 0) & (plan.step[awaited] < step)
            key = plan.key[awaited]
            found = np.where(before, np.searchsorted(sources[0], key), np.searchsorted(sources[1], key))
            what = next((said[int(plan.kind[row])] for row in awaited.tolist() if row >= 0), "")
            turns.append(Turn(plan.rank[own], own - rows.start, name, np.where(awaited >= 0, found, -1), before, what))
    return turns


class Bookings:
    """Books steps into a recorder, one after the other; what all workers did is added up as arrays.

    A worker computes, or waits for a collective: until all workers are ready for it (waiting), and for its bytes from
    then on (communication).
    """

    def __init__(self, recorder: Recorder) -> None:
        n = recorder.n_workers
        self.recorder = recorder
        self.seconds = {kind: np.zeros(n) for kind in (rc.COMPUTE, rc.COMMUNICATION, rc.WAITING)}
        self.booked = np.zeros(n)
        self.step_end: list[Floats] = []
        self._ready = np.zeros(0)  # when all were, for the collectives of the latest step that somebody waits for

    def step(self, number: int, step: Step, tasks: Records) -> None:
        """Book what has been done in a step: all of it or, of the last ones of a run, what has ended."""
        start, end = tasks["start"], tasks["end"]
        ready = np.zeros(step.n_sources)
        np.maximum.at(ready, step.filled[0], np.nan_to_num(end[step.filled[1]], nan=np.inf))
        before, self._ready = np.append(self._ready, 0.0), np.append(ready, 0.0)
        for ranks, rows, name, source, earlier, what in step.turns:
            begun = ~np.isnan(start[rows])
            now, then = self._ready[np.where(earlier, -1, source)], before[np.where(earlier, source, -1)]
            all_ready = np.where(earlier, then, now)
            self._wait(ranks[begun], start[rows[begun]], all_ready[begun], what)
            over = ~np.isnan(end[rows])
            for rank, row in zip(ranks[begun & ~over].tolist(), rows[begun & ~over].tolist(), strict=True):
                self.recorder.open[rank] = (rc.COMPUTE, name, float(start[row]))
            self._compute(name, ranks[over], start[rows[over]], end[rows[over]])
        last = np.zeros(self.recorder.n_workers)
        np.maximum.at(last, step.plan.rank[step.first + step.lasts], np.nan_to_num(end[step.lasts], nan=np.inf))
        self.step_end.append(last)

    def exchange(self, name: str, ranks: Ints, tasks: Records, rows: Ints) -> None:
        """Show what the networks of `ranks` did beside computing, where it has ended."""
        over = ~np.isnan(tasks["end"][rows])
        done = tasks[rows[over]]
        self.recorder.columns.append(Spans(rc.TRANSFER, name, ranks[over], done["start"], done["end"]))

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

    def _wait(self, ranks: Ints, until: Floats, all_ready: Floats, what: str) -> None:
        """Book the time since the last task as waiting and communication."""
        since = self.booked[ranks]
        ready = np.minimum(np.maximum(all_ready, since), until)
        self.seconds[rc.WAITING][ranks] += ready - since
        self.seconds[rc.COMMUNICATION][ranks] += until - ready
        self.booked[ranks] = until
        if self.recorder.keep_spans:
            self.recorder.columns.append(Spans(rc.WAITING, what, ranks, since, ready))
            self.recorder.columns.append(Spans(rc.COMMUNICATION, what, ranks, ready, until))
