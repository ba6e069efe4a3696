"""A whole run: task after task, within the time, without what is in the table already.

The timing loops: what is timed on each rank, and which of the ranks' times counts.

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

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.measure.plan import Task
from ddlsim.measure.steps import Trained
from ddlsim.measure.table import Measurement
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


#: repetitions before those that count
WARM_UP = 2


@dataclass(frozen=True)
class Event:
    """A row was measured, or (row None) the time of a task was up with `n_left` sizes to go."""

    task: Task
    row: Measurement | None
    n_left: int = 0


def run(
    transport: Transport,
    tasks: Sequence[Task],
    models: Sequence[Trained],
    done: Collection[tuple[object, ...]],
    budget: float,
) -> Iterator[Event]:
    """Measure `tasks` in about `budget` seconds; every rank must iterate to the end.

    models  what the tasks of experiment "step" train, by label
    done    keys (:attr:`Measurement.key`) of rows that are not measured again

    What is left of the time is shared evenly among the tasks that are left, and of a task among its sizes,
    after what the larger sizes need at least. A size other than a task's first is left out, with all larger
    ones, when it would not fit. What a size needs is judged by the one before it, in proportion.
    """
    by_label = {model.label: model for model in models}
    backends = {model.label: model.backend for model in models}
    note = crowding(transport)

    def step(label: str, batch_size: int) -> Action:
        return by_label[label].step(batch_size)

    def row(task: Task, size: int, times: Sequence[float]) -> Measurement:
        backend = backends.get(task.model) or (transport.compute if task.experiment == "memory" else transport.backend)
        return _row(task, size, times, backend, transport.version, note)

    pending = []
    for task in tasks:
        sizes = [size for size in task.sizes if row(task, size, [1.0]).key not in done]
        if sizes:
            pending.append((task, sizes))
    end = time.perf_counter() + budget
    for i, (task, sizes) in enumerate(pending):
        share = (end - time.perf_counter()) / (len(pending) - i)
        yield from _ladder(transport, task, sizes, share, step, row)


def _ladder(
    transport: Transport,
    task: Task,
    sizes: Sequence[int],
    seconds: float,
    step: Callable[[str, int], Action],
    row: Callable[[Task, int, Sequence[float]], Measurement],
) -> Iterator[Event]:
    end, cost, before = time.perf_counter() + seconds, 0.0, sizes[0]
    for i, size in enumerate(sizes):
        left, cost = transport.gather((end - time.perf_counter(), cost))[0]  # one clock decides for all
        if i > 0 and left <= cost * (size / before) * (WARM_UP + LEAST):
            yield Event(task, None, len(sizes) - i)
            return
        least_later = sum(cost * (later / before) * (WARM_UP + LEAST) for later in sizes[i + 1 :])
        share = (left - least_later if least_later < left else left) / (len(sizes) - i)
        timing = measure(transport, task, _prepared(transport, task, size, step), share, left)
        cost, before = timing.cost, size
        yield Event(task, row(task, size, timing.times))


def _prepared(transport: Transport, task: Task, size: int, step: Callable[[str, int], Action]) -> Work | None:
    try:
        return prepare(transport, task, size, step)
    except MemoryError:
        raise ConfigError(f"no memory for {task}, size {size}; give a smaller --max-size or batch") from None


def _row(task: Task, size: int, times: Sequence[float], backend: str, version: str, note: str) -> Measurement:
    least, low, median, high, most = np.quantile(times, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist()
    is_step = task.experiment == "step"
    return Measurement(
        task.experiment, task.operation, task.n_ranks, task.n_hosts, median, nbytes=0 if is_step else size,
        min_s=least, max_s=most, p25_s=low, p75_s=high, n_repetitions=len(times), backend=backend,
        batch_size=size if is_step else 0, model=task.model,
        version=f"ddlsim {ddlsim.__version__}; {version}", note=note,
    )  # fmt: skip


def crowding(transport: Transport) -> str:
    """Return "" or how many ranks share how few cores: their times contain waiting for a core."""
    places = transport.gather((transport.host, os.cpu_count() or 1))
    for host, n_cores in places:
        n_ranks = sum(other == host for other, _ in places)
        if n_ranks > n_cores:
            return f"{n_ranks} ranks on {n_cores} cores"
    return ""
