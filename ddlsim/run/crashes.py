"""Failures of workers that do not stop for each other: when each of them is not there."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.life import Failures, Life
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import THIRTY_DAYS, machines_of, timeline_of, units
from ddlsim.units import si

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome

Windows = list[tuple[float, float]]


def crashes_of(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> list[Windows]:
    """Return (s, s until which it is not there) of the crashes of each worker, up to `max_time` or 30 days; empty
    without failures of devices or hosts.

    A device takes its worker with it, a host all that are on it. A spare takes the place of what has crashed.
    """
    failures = experiment.failures
    if failures is None or failures.per not in ("device", "host") or experiment.elastic is not None:
        return []
    machine = machines_of(cluster, nodes) if failures.per == "host" else list(range(len(nodes)))
    windows: list[Windows] = [[] for _ in range(max(machine) + 1)]
    ready, restart = [0.0] * failures.spares, si(failures.restart, "time")
    length = min(si(experiment.max_time, "time"), THIRTY_DAYS)
    for failure in failures.events(units(failures, cluster, nodes), experiment.seed):
        if failure.time > length:
            break
        own = windows[failure.unit]
        if own and failure.time < own[-1][1]:
            continue  # it is not there
        back = failure.time + failures.seconds_to_notice
        if failures.takes_machines:
            heapq.heappush(ready, failure.time + failure.repair)
            back = max(back, heapq.heappop(ready))
        own.append((failure.time, back + restart))
    return [windows[own] for own in machine]


def life_of_free(result: Outcome) -> Life:
    """Return the life of workers that do not stop for each other, in which times are means over them: the run itself,
    as long as it has been simulated."""
    recorder, failures, end = result.recorder, result.experiment.failures, result.end_time
    assert recorder.down is not None
    assert failures is not None
    spent = dict.fromkeys(("noticing", "repairing", "restarting"), 0.0)
    for own in recorder.down:
        for start, back in own:
            if start < end:
                _book(spent, failures, start, back, end)
    n = result.n_workers
    means = {kind: seconds / n for kind, seconds in spent.items()}
    lost = math.fsum(recorder.lost) / n
    all_windows = ((start, rank) for rank, own in enumerate(recorder.down) for start, _ in own)
    events = [(start, rank, math.nan) for start, rank in sorted(all_windows) if start < end]
    return Life(
        timeline_of(result), end, result.stop_reason != "max_time", end - lost - sum(means.values()), lost, 0.0,
        means["noticing"], means["repairing"], means["restarting"], len(recorder.updates), tuple(events),
        np.array([[0.0, 0.0, end]]),
    )  # fmt: skip


def _book(spent: dict[str, float], failures: Failures, start: float, back: float, end: float) -> None:
    """Book the times of a crash, as far as they are before the end: it is noticed, repaired, and starts again."""
    edges = [start, start + failures.seconds_to_notice, back - si(failures.restart, "time"), back]
    for kind, first, last in zip(("noticing", "repairing", "restarting"), edges[:-1], edges[1:], strict=True):
        spent[kind] += max(min(last, end) - min(first, end), 0.0)
