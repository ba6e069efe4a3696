"""A whole run: task after task, within the time, without what is in the table already."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.measure.bench import LEAST, Work, measure, prepare
from ddlsim.measure.plan import Task
from ddlsim.measure.steps import Trained
from ddlsim.measure.table import Measurement
from ddlsim.measure.transport import Action, Transport

#: repetitions before those that count
WARM_UP = 2


@dataclass(frozen=True)
class Event:
    """A row was measured, or (row None) the time of a task was up with `n_left` sizes to go."""

    task: Task
    row: Measurement | None
    n_left: int = 0


def run(
    transport: Transport, tasks: Sequence[Task], models: Sequence[Trained], done: Collection[tuple[object, ...]],
    budget: float,
) -> Iterator[Event]:
    """Measure `tasks` in about `budget` seconds; every rank must iterate to the end.

    models  what the tasks of experiment "step" train, by label
    done    keys (:attr:`Measurement.key`) of rows that are not measured again

    What is left of the time is shared evenly among the tasks that are left, and of a task among its sizes,
    after what the larger sizes need at least. A size other than a task's first is left out, with all larger
    ones, when it would not fit. What a size needs is judged by the one before it, in proportion.
    """  # fmt: skip
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
    transport: Transport, task: Task, sizes: Sequence[int], seconds: float,
    step: Callable[[str, int], Action], row: Callable[[Task, int, Sequence[float]], Measurement],
) -> Iterator[Event]:  # fmt: skip
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
