"""What makes the tasks of a plan slower than their seconds say: at times, and while a device communicates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.network.executor import TaskColumns
from ddlsim.plan.live import LiveSteps
from ddlsim.plan.plan import PUSH_PULL, SEND, Ints
from ddlsim.runtime.bookings import devices
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.workload.contention import NO_SLOWDOWN
from ddlsim.workload.jitter import slow_intervals


def with_slowdowns(
    tasks: TaskColumns, steps: LiveSteps, members: Sequence[Sequence[Worker]], setting: Setting
) -> TaskColumns:
    """Return the tasks of steps with what slows the workers that do them: of several, the largest factors count."""
    rank = steps.plan.rank[steps.row]
    tasks = _with_slow_downs(tasks, rank, members)
    setting.slows = True
    if all(worker.overlap_slowdown == NO_SLOWDOWN for own in members for worker in own):
        return tasks
    plan, exchanges = steps.plan, steps.plan.kind[steps.row] >= SEND
    slower = [
        (max(worker.overlap_slowdown.inside for worker in own), max(worker.overlap_slowdown.between for worker in own))
        for own in members
    ]
    device = np.where(exchanges | devices(plan)[steps.row], rank, -1)
    return tasks._replace(device=device, slower=slower, inside=_inside(tasks, steps, rank, members, setting))


def _inside(
    tasks: TaskColumns, steps: LiveSteps, rank: Ints, members: Sequence[Sequence[Worker]], setting: Setting
) -> Ints:
    """Return 1 for each key of which all ends are on one machine, (n_keys,)."""
    nodes = setting.nodes
    hosts = [setting.hosts([nodes[worker.rank] for worker in own]) for own in members]
    least, most = (np.array([reduce(own) for own in hosts]) for reduce in (np.min, np.max))
    rows = np.flatnonzero(tasks.key >= 0)
    n_keys = len(steps.key_sizes)
    lowest, highest = np.full(n_keys, np.iinfo(np.int64).max), np.full(n_keys, -1)
    np.minimum.at(lowest, tasks.key[rows], least[rank[rows]])
    np.maximum.at(highest, tasks.key[rows], most[rank[rows]])
    served = np.zeros(n_keys, dtype=bool)  # by servers, which are elsewhere
    served[tasks.key[rows][steps.plan.kind[steps.row[rows]] == PUSH_PULL]] = True
    return np.asarray((lowest == highest) & ~served, dtype=np.int64)


def _with_slow_downs(tasks: TaskColumns, rank: Ints, members: Sequence[Sequence[Worker]]) -> TaskColumns:
    """Return the tasks with the transient slow-downs of the workers that do them."""
    first = np.full(len(members), -1, dtype=np.int64)
    entries: list[tuple[float, float]] = []
    for place, own in enumerate(members):
        slowed = [slow_intervals(worker.slow_downs) for worker in own if worker.slow_downs]
        if slowed:
            first[place] = len(entries)
            ends = np.unique([end for intervals in slowed for end, _ in intervals])
            columns = [np.array(intervals).T for intervals in slowed]
            factors = [factor[np.searchsorted(until, ends)] for until, factor in columns]
            entries += zip(ends.tolist(), np.max(factors, axis=0).tolist(), strict=True)
    return tasks._replace(slow=first[rank], slow_downs=entries)
