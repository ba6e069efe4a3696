"""The timing loops: what is timed on each rank, and which of the ranks' times counts.

No clock is compared with another machine's: every time is a difference of one rank's own monotonic clock.

one_way     half of a ping-pong, as its first rank sees it; several pairs begin together
both_ways   an exchange; the smaller time of the two ranks of a pair (the other's contains waiting for it)
collective  after a barrier, each rank times its own call. No rank can leave an all-reduce, all-gather or
            all-to-all before the last has entered, so the smallest time over the ranks is that of the last to
            enter, which waited for nobody (so for a reduce-scatter). Only some ranks know when a collective
            with a root has ended: there the largest time counts, which is too long by the time between the first
            and the last rank's leaving the barrier (about a latency)
memory,     all ranks at once, as in training; the times of all ranks count
step

The median and the quantiles are over repetitions (and pairs, or ranks for memory and step).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.measure.plan import Task
from ddlsim.measure.transport import ITEM_NBYTES, Action, Transport

#: repetitions of one row; fewer than the least only when the time is up
LEAST, MOST = 5, 500
#: seconds that a burst of small messages should last: far above what reading the clock takes
BURST = 100e-6
MOST_IN_BURST = 100

Times = list[float]
#: a rank may leave these before others have entered
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Timing:
    """`times` (s) that count, and the `cost` of a repetition on this rank (s), with barrier and burst."""

    times: Times
    cost: float


@dataclass(frozen=True)
class Work:
    """What this rank does in a repetition: `ready` untimed after the barrier, then `action`, timed."""

    action: Action
    ready: Action | None = None


def prepare(transport: Transport, task: Task, size: int, step: Callable[[str, int], Action]) -> Work | None:
    """Return this rank's part of `task` at `size`, or None for a rank that only waits.

    `step` makes the training step of a model and batch size.
    """
    n_elements = size // ITEM_NBYTES
    if task.experiment == "collective":
        return Work(transport.collective(task.operation, n_elements))
    if task.experiment == "memory":
        return Work(transport.memory(task.operation, n_elements))
    if task.experiment == "step":
        return Work(step(task.model, size))
    for left, right in task.pairs:
        if transport.rank in (left, right):
            first = transport.rank == left
            peer = right if first else left
            ready = transport.one_way(1, peer, first)  # so that neither begins before the other is there
            if task.operation == "one_way":
                return Work(transport.one_way(n_elements, peer, first), ready)
            return Work(transport.both_ways(n_elements, peer), ready)
    return None


def _sample(transport: Transport, work: Work | None, n_repetitions: int, n_burst: int) -> Times:
    """Return this rank's seconds per call, one for each repetition; empty for a rank that only waits."""
    times = []
    for _ in range(n_repetitions):
        transport.barrier()
        if work is None:
            continue
        if work.ready is not None:
            work.ready()
        start = time.perf_counter()
        for _ in range(n_burst):
            work.action()
        times.append((time.perf_counter() - start) / n_burst)
    return times


def measure(transport: Transport, task: Task, work: Work | None, seconds: float, most_seconds: float) -> Timing:
    """Return the times that count, on every rank: as many repetitions as fit in `seconds`.

    At least five, unless even these would take more than `most_seconds`.
    """
    _sample(transport, work, 1, 1)  # connections, memory, compilation
    start = time.perf_counter()
    single = max(_sample(transport, work, 1, 1), default=0.0)
    n_burst = 1
    if task.experiment == "point_to_point":
        once = max(transport.gather(single))
        n_burst = min(max(int(BURST / max(once, 1e-9)), 1), MOST_IN_BURST)
    # what a repetition costs, barrier included; the ranks must agree on the numbers
    cost = max(transport.gather(time.perf_counter() - start + (n_burst - 1) * single))
    wanted = min(max(int(seconds / cost), LEAST), MOST)
    affordable = max(int(most_seconds / cost), 1)
    n_repetitions = transport.gather(min(wanted, affordable))[0]
    start = time.perf_counter()
    times = transport.gather(_sample(transport, work, n_repetitions, n_burst))
    return Timing(combine(task, times), (time.perf_counter() - start) / n_repetitions)


def combine(task: Task, times: Sequence[Times]) -> Times:
    """Return the times that count, given every rank's, shape (n_ranks, n_repetitions)."""
    if task.operation == "one_way":
        return [half / 2 for left, _ in task.pairs for half in times[left]]
    if task.operation == "both_ways":
        return [min(pair) for left, right in task.pairs for pair in zip(times[left], times[right], strict=True)]
    if task.experiment == "collective":
        counted = np.max if task.operation in ROOTED else np.min
        seconds: Times = counted(np.array(times), axis=0).tolist()
        return seconds
    return [seconds for of_rank in times for seconds in of_rank]
