"""Failures of workers that do not stop for each other: when each of them is not there."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.life import Failures, Life
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import THIRTY_DAYS, timeline_of
from ddlsim.run.parts import machines_of, machines_taken
from ddlsim.units import si

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome

Windows = list[tuple[float, float]]


def stands_for_more(experiment: Experiment) -> bool:
    """Whether a run of some steps stands for a long training, in which nothing but its pace is known."""
    return experiment.training is None and math.isinf(si(experiment.max_time, "time"))


def crashes_of(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> list[Windows]:
    """Return (s, s until which it is not there) of the crashes of each worker in a run, up to its `max_time` or 30
    days; empty without failures of devices or hosts. A run that stands for more has none."""
    failures = experiment.failures
    if failures is None or failures.per not in ("device", "host", "rack") or experiment.elastic is not None:
        return []
    if stands_for_more(experiment):
        return [[] for _ in nodes]
    length = min(si(experiment.max_time, "time"), THIRTY_DAYS)
    return _windows(failures, cluster, nodes, length, experiment.seed, 0)


def _windows(
    failures: Failures, cluster: Cluster, nodes: Sequence[int], length: float, seed: int, life: int
) -> list[Windows]:
    """Return the crashes of each worker up to `length` s: a device takes its worker with it, a host or a rack all that
    are on it, and a spare takes the place of what has crashed."""
    if failures.per == "device":
        machine = list(range(len(nodes)))  # which has a worker
        taken = [[each] for each in machine]
    else:
        machine, taken = machines_of(cluster, nodes), machines_taken(failures, cluster, nodes)
    windows: list[Windows] = [[] for _ in range(max(machine) + 1)]
    ready, restart = [0.0] * failures.spares, si(failures.restart, "time")
    for failure in failures.events(len(taken), seed, life):
        if failure.time > length:
            break
        for own in [windows[each] for each in taken[failure.unit]]:
            if own and failure.time < own[-1][1]:
                continue  # it is not there
            back = failure.time + failures.seconds_to_notice
            if failures.takes_machines:
                heapq.heappush(ready, failure.time + failure.repair)
                back = max(back, heapq.heappop(ready))
            own.append((failure.time, back + restart))
    return [windows[own] for own in machine]


def life_of_free(result: Outcome, life: int = 0) -> Life:
    """Return the life of workers that do not stop for each other, in which times are means over them.

    It is the run itself, as long as it has been simulated. A run that stands for more goes on for 30 days: there a
    worker that is missing leaves the pace of the others as it is, and a crash takes half a gradient, on average, of
    those who are computing.
    """
    recorder, experiment, n = result.recorder, result.experiment, result.n_workers
    failures, goes_on = experiment.failures, stands_for_more(experiment)
    assert failures is not None
    end, windows = _away(result, life)
    if life and not goes_on:
        raise ConfigError(
            "lives: where workers do not stop for each other, failures are part of the run; use simulate_seeds"
        )
    spent = dict.fromkeys(("noticing", "repairing", "restarting"), 0.0)
    crashes = [(start, rank, back) for rank, own in enumerate(windows) for start, back in own if start < end]
    for start, _, back in crashes:
        _book(spent, failures, start, back, end)
    if not goes_on or recorder.with_servers:
        spent["repairing"] += _blocked(result, windows, end)
    means = {kind: seconds / n for kind, seconds in spent.items()}
    lost = math.fsum(recorder.lost) / n
    steps, samples = len(recorder.updates), None
    each = math.nan
    if goes_on:
        each = 0.5 * result.shares["compute"] ** 2 * result.step_time
        lost = len(crashes) * each / n
    useful = end - lost - sum(means.values())
    timeline = timeline_of(result)
    if goes_on:
        samples = result.undisturbed.throughput * useful * float(timeline.pace.until(end)) / end
        steps = int(samples / result.samples_per_update)
    events = tuple((start, rank, each) for start, rank, _ in sorted(crashes))
    return Life(
        timeline, end, not goes_on and result.stop_reason != "max_time", useful, lost, 0.0,
        means["noticing"], means["repairing"], means["restarting"], steps, events, np.array([[0.0, 0.0, end]]), samples,
    )  # fmt: skip


def _away(result: Outcome, life: int = 0) -> tuple[float, Sequence[Sequence[tuple[float, float]]]]:
    """Return the end of a life (s), and when each worker is not there in it."""
    experiment, failures, down = result.experiment, result.experiment.failures, result.recorder.down
    assert failures is not None
    assert down is not None
    if not stands_for_more(experiment):
        return result.simulated_time, down
    nodes = result.nodes.tolist()
    return THIRTY_DAYS, _windows(failures, result.cluster, nodes, THIRTY_DAYS, experiment.seed, life)


def _blocked(result: Outcome, windows: Sequence[Sequence[tuple[float, float]]], end: float) -> float:
    """Return for how long workers that were there could not go on, because a server or too many others were not, s."""
    times = [0.0, *(time for time, _ in result.recorder.updates)]
    blocked = [window for rank in result.recorder.with_servers for window in windows[rank]]
    gone = not stands_for_more(result.experiment) and any(own and own[-1][1] == math.inf for own in windows)
    if gone and math.inf not in [back for _, back in blocked] and end - times[-1] > max(np.diff(times)):
        blocked.append((times[-1], math.inf))
    return sum(_covered([*own, *blocked], end) - _covered(own, end) for own in windows)


def _covered(windows: Sequence[tuple[float, float]], end: float) -> float:
    """Return how much of the time up to `end` the windows cover, s."""
    covered = until = 0.0
    for start, back in sorted(windows):
        covered += max(min(back, end) - max(start, until), 0.0)
        until = max(until, min(back, end))
    return covered


def seconds_away(result: Outcome) -> list[float]:
    """Return how long the machine of each worker is out of service in a run's life, s."""
    assert result.experiment.failures is not None
    (end, windows), away = _away(result), []
    for own in windows:
        spent = dict.fromkeys(("noticing", "repairing", "restarting"), 0.0)
        for start, back in own:
            _book(spent, result.experiment.failures, start, back, end)
        away.append(spent["repairing"])
    return away


def _book(spent: dict[str, float], failures: Failures, start: float, back: float, end: float) -> None:
    """Book the times of a crash, as far as they are before the end: it is noticed, repaired, and starts again."""
    edges = [start, start + failures.seconds_to_notice, back - si(failures.restart, "time"), back]
    for kind, first, last in zip(("noticing", "repairing", "restarting"), edges[:-1], edges[1:], strict=True):
        spent[kind] += max(min(last, end) - min(first, end), 0.0)
