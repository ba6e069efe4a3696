"""What workers do in lanes, as operations, and the tables that compiled code works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.network import lane_tables as ls
from ddlsim.network.calendar import EVENT, N_CALENDAR, SEQUENCE
from ddlsim.network.devices import SLOW
from ddlsim.network.state import Floats
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.workload.jitter import slow_intervals

LOG_ROWS = 4096
#: what follows an operation, where something does
Follow = Callable[[Worker], None]
#: (s, s until which it is not there) of the crashes of each worker, by time; the end of the last one may be inf
Crashes = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, eq=False)
class Op:
    """What workers do in their cycles.

    kind     (:mod:`ddlsim.network.lane_tables`)
    name     of work and of waiting, in timelines
    seconds  of a worker's work, or of a rest
    follow   what Python does when it is written down
    waits    what a worker waits for, in words, in which {begun} and {ended} are the numbers of its step from 0 and 1;
             its name if nothing is said
    number   as the kind says
    redo     whether it is part of a gradient, which a crash undoes
    """

    kind: int
    name: str = ""
    seconds: Callable[[Worker], float] | None = None
    follow: Follow | None = None
    waits: str = ""
    number: int = 0
    redo: bool = False


OPTIMIZER = Op(ls.WORK, "optimizer", lambda worker: worker.workload.optimizer)


def seconds_of(workers: Sequence[Worker], ops: Sequence[Op]) -> Floats:
    """Return the undisturbed s of each worker's operations, (n_workers, n_ops)."""
    return np.array([[op.seconds(worker) if op.seconds is not None else 0.0 for op in ops] for worker in workers])


def gradient(setting: Setting, drawn: Follow | None) -> list[Op]:
    """Return the operations of :meth:`Worker.gradient`: `drawn` follows when its parameters are read."""
    first = setting.workers[0]
    forward = Op(ls.WORK, "forward", lambda worker: worker.workload.forward_time, redo=True)
    early = Op(ls.WORK, "backward", lambda worker: worker.workload.backward_time, redo=True)
    late = Op(ls.WORK, "backward", lambda worker: float(worker.backward_until[0]), redo=True)
    ops = [Op(ls.OWED, "evaluation", redo=True)] if setting.learner.task is not None else []
    if first.workload_at is not None:
        ops.append(Op(ls.RESIZE, redo=True))
    batch = [Op(ls.DRAW, redo=True)]
    if first.feed is not None:
        batch.insert(0, Op(ls.FETCH, "input", waits="its next batch", redo=True))
    ops += [*batch, forward, early] * (first.accumulation - 1) + batch
    if drawn is not None:
        ops.append(Op(ls.NOTE, follow=drawn, redo=True))
    return [*ops, forward, late]


def _begins(ops: Sequence[Op]) -> list[int]:
    """Return the number of the operation with which the gradient begins that each is part of; -1 of none."""
    begins: list[int] = []
    for number, op in enumerate(ops):
        goes_on = number > 0 and ops[number - 1].redo
        begins.append((begins[-1] if goes_on else number) if op.redo else -1)
    return begins


def tables_of(
    workers: Sequence[Worker], ops: Sequence[Op], ends: Sequence[Sequence[int]], depth: int, crashes: Crashes = (),
    start: float = 0.0,
) -> ls.Tables:  # fmt: skip
    """Return the tables of workers that begin at `start` (s), each with ways to its `ends`; no servers yet."""
    n, n_ways = len(workers), sum(len(each) for each in ends)
    table = np.zeros(len(ops), dtype=ls.OP)
    table["kind"], table["number"] = [op.kind for op in ops], [op.number for op in ops]
    table["redo"] = _begins(ops)
    ways = np.zeros(n_ways, dtype=ls.WAY)
    last = np.cumsum([len(each) for each in ends])
    ways["actor"] = np.repeat(np.arange(n), [len(each) for each in ends])
    ways["end"] = [end for each in ends for end in each]
    ways["next"] = -1
    actors = np.zeros(n, dtype=ls.ACTOR)
    actors["factor"], actors["left"], actors["slow"] = 1.0, -1, -1
    actors["cursor"] = actors["drawn"] = ls.BLOCK
    actors["first"], actors["last"] = last - [len(each) for each in ends], last
    arrivals = np.argsort(ways["end"], kind="stable")
    actors["first_in"] = np.searchsorted(ways["end"][arrivals], np.arange(n))
    actors["last_in"] = np.searchsorted(ways["end"][arrivals], np.arange(n), side="right")
    slow: list[tuple[float, float]] = []
    for worker in workers:
        if worker.slow_downs:
            actors["slow"][worker.rank] = len(slow)
            slow += slow_intervals(worker.slow_downs)
    actors["crash"] = -1
    down: list[tuple[float, float]] = []
    for rank, own in enumerate(crashes):
        if own:
            actors["crash"][rank] = len(down)
            down += [*own, (np.inf, np.inf)]
    counts = np.zeros(ls.N_COUNTS, dtype=np.int64)
    counts[ls.FAILING] = bool(down)
    counts[ls.DEPTH], counts[ls.BEHIND] = depth, n
    counts[[ls.PENDING, ls.RESUMED, ls.MEETING, ls.HELD, ls.ASKING]] = -1
    happen = [(own[0][0], ls.FALLS + 16 * rank) for rank, own in enumerate(crashes) if own]
    happen += [(own[-1][0], ls.GONE + 16 * rank) for rank, own in enumerate(crashes) if own and own[-1][1] == np.inf]
    calendar = np.zeros(2 * (2 * n + 3 * n_ways) + 16 + len(happen), dtype=EVENT)
    calendar["sequence"][:n], calendar["item"][:n] = np.arange(n), ls.START + 16 * np.arange(n)
    calendar["time"][:n] = actors["start"] = start
    for place, (time, item) in enumerate(sorted(happen), n):  # a sorted list is a heap
        calendar[place] = time, place, item
    counts[N_CALENDAR] = counts[SEQUENCE] = n + len(happen)
    reals = np.zeros(ls.N_REALS)
    reals[ls.NOW], reals[ls.QUIET] = start, -np.inf
    return ls.Tables(
        counts=counts, reals=reals, ops=table, seconds=seconds_of(workers, ops).reshape(-1), actors=actors, ways=ways,
        servers=np.zeros(0, dtype=ls.SERVER), arrivals=arrivals.astype(np.int64), posted=np.zeros(n_ways * depth),
        factors=np.zeros(n * ls.BLOCK), choices=np.zeros(n * ls.BLOCK, dtype=ls.CHOICE),
        slow=np.array(slow, dtype=SLOW), crashes=np.array(down, dtype=ls.CRASH), calendar=calendar,
        sends=np.zeros(n_ways + 1, dtype=np.int64), log=np.zeros(max(LOG_ROWS, 4 * len(ops)), dtype=ls.ROW),
    )  # fmt: skip
