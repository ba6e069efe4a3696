"""The failure timeline of a run: its steps among failures, checkpoints and restarts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import machines_of
from ddlsim.errors import ConfigError, nearest
from ddlsim.reliability import Checkpoints, Failures
from ddlsim.reliability.checkpoints import NO_CHECKPOINTS, Cost
from ddlsim.reliability.failures import units
from ddlsim.reliability.faults import FIRST_FAULTS
from ddlsim.runtime.loop import arrivals
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.compute import Workload
from ddlsim.workload.optimizer_rules import optimizer_nbytes
from ddlsim.workload.precision import ELEMENT_NBYTES
from ddlsim.workload.stage import Stage

if TYPE_CHECKING:
    from ddlsim.reliability import FailureFreeTimeline, FailureTimeline
    from ddlsim.reliability.engine import Windows
    from ddlsim.run.experiment import Experiment
    from ddlsim.run.result import Result

#: default length in s of the failure timelines of timing-only runs without `max_time`
THIRTY_DAYS = 30 * 86_400.0


def has_failure_timeline(experiment: Experiment) -> bool:
    """Return whether the run has failures or checkpoints."""
    return any(part is not None for part in (experiment.failures, experiment.checkpoints, experiment.elastic))


def check_timeline(experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workload: Workload) -> None:
    """Raise ConfigError for failures and checkpoints that the experiment does not support, before it is simulated."""
    failures, elastic, checkpoints = experiment.failures, experiment.elastic, experiment.checkpoints
    if free := contract.of(experiment.strategy).is_asynchronous:
        check_free(experiment)
    if elastic is not None and elastic.min_workers > len(nodes):
        raise ConfigError(
            f"elastic: min_workers = {elastic.min_workers}: must be at most the number of workers, {len(nodes)}"
        )
    if failures is None and elastic is not None:
        raise ConfigError("elastic has no effect without failures; set failures=Failures('50000 h', per='host')")
    if failures is not None:
        if failures.per == "switch" and len(set(cluster.memory_nodes[list(nodes)].tolist())) < 2:
            raise ConfigError("failures: per = 'switch': the run uses a single machine; use 'host' or 'device'")
        if failures.per != "switch":
            failures.events(len(units(failures, cluster, nodes)))  # reads a trace, if there is one
        if failures.never_repairs and elastic is None and not free:
            raise ConfigError(
                "failures: repair = inf: training would wait forever once all spares are in use; set a repair time, "
                "or set elastic=ddlsim.Elastic() to continue with fewer workers"
            )
        if failures.warning is not None and checkpoints is None and elastic is None:
            raise ConfigError(
                f"failures: warning = {failures.warning!r} has no effect without checkpoints or elastic; set "
                "checkpoints, or elastic=ddlsim.Elastic()"
            )
        if elastic is not None and failures.per in ("switch", "job"):
            raise ConfigError(
                f"elastic: failures with per = {failures.per!r} leave no workers to continue; use 'device', "
                "'host' or 'rack', or leave elastic out"
            )
    interval_of(checkpoints, cluster, nodes, workload)


def check_free(experiment: Experiment) -> None:
    """Raise ConfigError for settings that are invalid for workers that do not wait for each other."""
    label, failures = experiment.strategy.label, experiment.failures
    if experiment.checkpoints is not None or experiment.elastic is not None:
        name = "checkpoints" if experiment.checkpoints is not None else "elastic"
        raise ConfigError(
            f"{name}: not supported with {label}, whose workers do not stop for each other: a failed "
            f"worker is missing until it returns, and no worker resumes from a checkpoint; leave {name} "
            "out"
        )
    if failures is not None and failures.warning is not None:
        raise ConfigError(
            f"failures: warning = {failures.warning!r} has no effect with {label}, whose workers do not "
            "stop for each other and save no checkpoint; leave warning out"
        )
    if failures is not None and failures.per in ("switch", "job"):
        raise ConfigError(
            f"failures: per = {failures.per!r}: not supported with {label}, whose workers do not stop for "
            "each other; use 'device', 'host' or 'rack'"
        )


def holds_parts(stages: Sequence[Stage], workloads: Sequence[Workload]) -> bool:
    """Return whether workers shard the model or the optimizer state, so that survivors lack parts of it."""
    return not all(stage.workload is w and stage.state >= 1.0 for stage, w in zip(stages, workloads, strict=True))


def check_replicas(experiment: Experiment, stages: Sequence[Stage], workloads: Sequence[Workload]) -> None:
    """Raise ConfigError for an elastic run that has no state to resume from after a failure."""
    if experiment.checkpoints is None and holds_parts(stages, workloads):
        raise ConfigError(
            f"elastic: workers of {experiment.strategy.label} shard the model or the optimizer state, so state is "
            "lost with a machine; set checkpoints from which the remaining workers can resume"
        )


def copy_seconds(result: Result) -> float:
    """Return the time in s that a joining worker needs to copy weights and optimizer state from another machine."""
    machines = list(dict.fromkeys(result.cluster.memory_nodes[result.nodes].tolist()))
    return _sent(result.cluster, machines[:1], machines[1:2], state_nbytes(result.workloads[0]))


def state_nbytes(workload: Workload) -> float:
    """Return the bytes of a checkpoint: weights and optimizer state, once."""
    element = ELEMENT_NBYTES[workload.precision]
    return workload.model.n_params * (element + optimizer_nbytes(workload.rule or "momentum", element))


def cost_of(checkpoints: Checkpoints, cluster: Cluster, nodes: Sequence[int], workload: Workload) -> Cost:
    """Return the cost of a checkpoint on otherwise idle links; each machine saves an equal share.

    Raises ConfigError for a storage that is not in the cluster.
    """
    nbytes = state_nbytes(workload) if checkpoints.nbytes is None else si(checkpoints.nbytes, "bytes")
    memory = cluster.memory_nodes[list(nodes)].tolist()
    machines = list(dict.fromkeys(memory))
    copied = written = read = 0.0
    if checkpoints.bandwidth is not None:
        written = read = nbytes / si(checkpoints.bandwidth, "bandwidth")
    elif checkpoints.to is not None:
        goals = _goals(checkpoints.to, cluster, machines)
        written = read = _sent(cluster, machines, goals, nbytes / len(machines))
        if cluster.node_kind[goals[0]] == "storage":  # its disks may read faster than they write
            read = _sent(cluster, goals, machines, nbytes / len(machines))
    if checkpoints.asynchronous or checkpoints.to is not None:
        copied = _sent(cluster, list(nodes), memory, nbytes / len(nodes))
    load = copied + read
    if checkpoints.stall is not None:
        copied = si(checkpoints.stall, "time")
        load = read or copied
    if checkpoints.load is not None:
        load = si(checkpoints.load, "time")
    if checkpoints.asynchronous:
        return Cost(copied, written, load, nbytes)
    return Cost(copied + written, 0.0, load, nbytes)


def interval_of(
    checkpoints: Checkpoints | None, cluster: Cluster, nodes: Sequence[int], workload: Workload
) -> tuple[float, Cost]:
    """Return the training time in s between two checkpoints, inf without any, and the cost of one. Raises ConfigError
    if a checkpoint takes longer than the interval."""
    if checkpoints is None:
        return math.inf, NO_CHECKPOINTS
    cost = cost_of(checkpoints, cluster, nodes, workload)
    cost.check(checkpoints.interval)
    return checkpoints.interval, cost


def _goals(to: str, cluster: Cluster, machines: list[int]) -> list[int]:
    if to == "peers":
        if len(machines) < 2:
            raise ConfigError(
                "checkpoints: to = 'peers': the run uses a single machine; set bandwidth, or the name of a node"
            )
        return machines[1:] + machines[:1]
    names = list(cluster.node_names)
    if to not in names:
        hint = nearest(to, names)
        remedy = f"did you mean {hint!r}?" if hint else f"its nodes are {', '.join(names[:5])}, ..."
        raise ConfigError(f"checkpoints: to = {to!r}: must be 'peers' or a node of cluster {cluster.name!r}; {remedy}")
    return [names.index(to)] * len(machines)


def _sent(cluster: Cluster, sources: list[int], targets: list[int], nbytes: float) -> float:
    """Return the arrival time of the last of simultaneous messages of `nbytes` each, in s."""
    cluster.check_connected(sorted({*sources, *targets}))
    return max(arrivals(cluster, [(*ends, nbytes) for ends in zip(sources, targets, strict=True)]), default=0.0)


def failure_timeline_of(
    result: Result, timeline: FailureFreeTimeline | None = None, *, index: int = 0
) -> FailureTimeline:
    """Return the failure timeline of a run, until its target or for its `max_time` (30 days by default).

    timeline  steps of the run, if they are known
    index             number of the random sample

    Raises ConfigError without failures or checkpoints.
    """
    from ddlsim.reliability.engine import Outages, TakeTurns, simulate_failures

    experiment = result.experiment
    if not has_failure_timeline(experiment):
        raise ConfigError(
            "the run has no failures and no checkpoints; set failures=ddlsim.Failures('50000 h'), or checkpoints"
        )
    if result.recorder.down is not None:
        return _timeline_without_waiting(result, index)
    failures = experiment.failures or Failures(math.inf)
    timeline = timeline or timeline_of(result)
    if index and not result.paces.is_steady:
        timeline = replace(timeline, pace=result.paces.of(None, result.undisturbed, timeline.length, index))
    parts = units(failures, result.cluster, result.nodes.tolist(), result.channel_nbytes)
    if experiment.elastic is None:
        return simulate_failures(timeline, failures, parts, timeline.length, seed=experiment.seed, index=index)
    outages = Outages(failures, parts, experiment.seed, index)
    return TakeTurns(result.groups, timeline, outages, timeline.length).run()


# ------------------------------------------------------------ workers that do not wait for each other


def stands_for_more(experiment: Experiment) -> bool:
    """Whether a run of some steps represents a long training, of which only the pace is known."""
    return experiment.training is None and math.isinf(si(experiment.max_time, "time"))


def lifetime(experiment: Experiment) -> float:
    """Return the maximum length of a failure timeline, in s."""
    return THIRTY_DAYS if stands_for_more(experiment) else si(experiment.max_time, "time")


def crashes_of(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], horizon: float = math.inf
) -> list[list[tuple[float, float]]]:
    """Return the crashes of each worker in a run as (start, return) in s, up to the `horizon` (s), its `max_time` or 30
    days; empty without failures of devices or hosts, and for runs that represent a longer training."""
    failures = experiment.failures
    if failures is None or failures.per not in ("device", "host", "rack") or experiment.elastic is not None:
        return []
    if stands_for_more(experiment):
        return [[] for _ in nodes]
    length = min(si(experiment.max_time, "time"), THIRTY_DAYS, horizon)
    return _crashes(failures, cluster, nodes, length, experiment.seed, 0)


def horizon_of_crashes(experiment: Experiment, n_workers: int) -> float:
    """Return the time in s by which about :data:`~ddlsim.reliability.faults.FIRST_FAULTS` crashes are expected; inf if
    that takes more than the 30 days up to which they are sampled."""
    mtbf = None if experiment.failures is None else experiment.failures.mtbf
    horizon = math.inf if mtbf is None else FIRST_FAULTS / n_workers * si(mtbf, "time")
    return horizon if horizon <= THIRTY_DAYS else math.inf


def _crashes(
    failures: Failures, cluster: Cluster, nodes: Sequence[int], length: float, seed: int, index: int
) -> list[list[tuple[float, float]]]:
    """Return when each worker is unavailable: a failed device affects its worker, a host or rack all workers on it."""
    from ddlsim.reliability.engine import Outages, windows

    parts, machine = units(failures, cluster, nodes), machines_of(cluster, nodes)
    if failures.per == "device":
        parts, machine = [[rank] for rank in range(len(nodes))], list(range(len(nodes)))
    out_of_service = windows(Outages(failures, parts, seed, index), max(machine) + 1, length)
    return [out_of_service[number] for number in machine]


def _timeline_without_waiting(result: Result, index: int) -> FailureTimeline:
    """Return the failure timeline of workers that do not wait for each other; times are means over workers.

    It is the run itself, for the simulated time. For runs that represent a longer training, it covers 30 days. In this
    case, a missing worker does not change the pace of the others, unless they wait for it, and a crash loses half a
    gradient, on average, of the affected workers that are computing.
    """
    from ddlsim.reliability.engine import FailureTimeline, seconds_missing

    recorder, experiment, n = result.recorder, result.experiment, result.n_workers
    failures, endless, out_of_service = experiment.failures, stands_for_more(experiment), recorder.down
    assert failures is not None
    assert out_of_service is not None
    end = THIRTY_DAYS if endless else result.simulated_time
    if endless:
        out_of_service = _crashes(failures, result.cluster, result.nodes.tolist(), end, experiment.seed, index)
    elif index:
        raise ConfigError(
            "timelines: the workers of this strategy do not stop for each other, so failures are part of the run "
            "itself; use simulate_seeds"
        )
    crashes = [(start, rank, back) for rank, gaps in enumerate(out_of_service) for start, back in gaps if start < end]
    spent = seconds_missing(failures, [(start, back) for start, _, back in crashes], end)
    if not endless or recorder.with_servers:
        spent["repairing"] += _blocked(result, out_of_service, end)
    means: dict[str, Any] = {kind: seconds / n for kind, seconds in spent.items()}
    lost, per_crash = math.fsum(recorder.lost) / n, math.nan
    if endless:
        per_crash = 0.5 * result.shares["compute"] ** 2 * result.step_time
        lost = len(crashes) * per_crash / n
    useful, timeline = end - lost - sum(means.values()), timeline_of(result)
    steps, samples = len(recorder.updates), None
    if endless:
        working = useful - _waited(result, out_of_service, end) / n
        samples = result.undisturbed.throughput * working * float(timeline.pace.until(end)) / end
        steps = int(samples / result.samples_per_update)
    return FailureTimeline(
        timeline,
        end,
        finished=not endless and result.stop_reason != "max_time",
        useful=useful,
        lost=lost,
        checkpointing=0.0,
        **means,
        steps=steps,
        events=tuple((start, rank, per_crash) for start, rank, _ in sorted(crashes)),
        running_intervals=np.array([[0.0, 0.0, end]]),
        samples=samples,
        out_of_service=np.array([seconds_missing(failures, gaps, end)["repairing"] for gaps in out_of_service]),
    )


def _blocked(result: Result, out_of_service: Sequence[Windows], end: float) -> float:
    """Return the time in s that available workers were blocked by a missing server or too many missing workers."""
    from ddlsim.reliability.engine import covered

    times = [0.0, *(time for time, _ in result.recorder.updates)]
    blocked = [window for rank in result.recorder.with_servers for window in out_of_service[rank]]
    gone = not stands_for_more(result.experiment) and any(gaps and gaps[-1][1] == math.inf for gaps in out_of_service)
    if gone and math.inf not in [back for _, back in blocked] and end - times[-1] > max(np.diff(times)):
        blocked.append((times[-1], math.inf))
    return sum(covered([*gaps, *blocked], end) - covered(gaps, end) for gaps in out_of_service)


def _waited(result: Result, out_of_service: Sequence[Windows], end: float) -> float:
    """Return the total time in s that available workers waited for missing ones, except while a server was missing."""
    from ddlsim.reliability.engine import covered

    recorder = result.recorder
    if not recorder.needed:
        return 0.0
    least = len(out_of_service) - recorder.needed  # number of workers that may be missing
    awaited = [window for gaps in out_of_service for window in gaps if not recorder.lead or window[1] < math.inf]
    edges = sorted([*((start, 1) for start, _ in awaited), *((back, -1) for _, back in awaited)])
    waits, missing, since = [], 0, math.inf
    for time, change in edges:
        if missing <= least < missing + change:
            since = time
        elif missing + change <= least < missing:
            waits.append((min(since + recorder.lead * result.step_time, time), time))
        missing += change
    blocked = [window for rank in recorder.with_servers for window in out_of_service[rank]]
    return sum(covered([*gaps, *blocked, *waits], end) - covered([*gaps, *blocked], end) for gaps in out_of_service)


# ------------------------------------------------------------ the steps of a run


def timeline_of(result: Result) -> FailureFreeTimeline:
    """Return the steps of a run and its checkpoints."""
    from ddlsim.reliability import FailureFreeTimeline
    from ddlsim.run.timed_events import with_epochs

    experiment = result.experiment
    nodes, workload = result.nodes.tolist(), result.workloads[0]
    interval, cost = interval_of(experiment.checkpoints, result.cluster, nodes, workload)
    learns = experiment.training is not None
    length = lifetime(experiment)
    pace = result.paces.of(result, result.undisturbed, length)
    ends, cycle = np.array([time for time, _ in result.undisturbed.recorder.updates]), 0
    if not learns:
        ends, cycle = with_epochs(result.undisturbed, ends)
    return FailureFreeTimeline(ends, cycle, interval, cost, length, pace)


def useful_samples(result: Result, timeline: FailureTimeline) -> float:
    """Return the number of samples in the steps that counted."""
    if timeline.samples is not None:
        return timeline.samples
    counts = np.array([n for _, n in result.recorder.updates], dtype=np.float64)
    if timeline.steps <= len(counts):
        return float(counts[: timeline.steps].sum())
    return float(counts.sum() + (timeline.steps - len(counts)) * result.samples_per_update)


def timeline_notes(experiment: Experiment, *, free: bool) -> Iterator[str]:
    """Yield notes on the limits of a failure timeline; `free`: for workers that do not wait for each other."""
    failures, checkpoints = experiment.failures, experiment.checkpoints
    if failures is not None and checkpoints is None and experiment.elastic is None and not free:
        yield "failures without checkpoints: each failure loses all work so far; set checkpoints"
    if free and failures is not None and stands_for_more(experiment):
        yield (
            "failures: their cost is estimated over a simulated lifetime of 30 days, assuming that the remaining "
            "workers keep their speed while one is down, unless they wait for it; set max_time to simulate the "
            "failures in detail"
        )
    if experiment.elastic is not None:
        equal_shares = "; every worker takes the same whole number of samples of the global batch"
        yield (
            "elastic: the remaining machines continue after a failure; machines with the same speed, links, switch "
            "and number of workers are treated as "
            f"interchangeable{equal_shares if experiment.elastic.batch == 'global' else ''}"
        )
    if checkpoints is not None and checkpoints.asynchronous:
        yield (
            "checkpoints are written in the background, and are assumed not to slow down the messages of the training"
        )
