"""Notes and warnings of a result: on its model, its training, and workers that never communicate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.cluster.groups import levels
from ddlsim.collectives.nccl_choice import several_ways
from ddlsim.learning.monitor import Monitor
from ddlsim.learning.training import Training
from ddlsim.readable import percent, seconds
from ddlsim.run.experiment import Experiment, Job
from ddlsim.runtime.communicator import hierarchical
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.recorder import INPUT, Recorder
from ddlsim.spread import Spread
from ddlsim.strategies import Strategy, contract
from ddlsim.ties import distinct
from ddlsim.units import si
from ddlsim.workload.contention import NO_SLOWDOWN, OverlapSlowdown
from ddlsim.workload.input import Input
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: limits of path_notes: number of node pairs and links to check; minimum time of a link relative to the busiest one;
#: maximum relative time of another path
MOST_PAIRS, MOST_LINKS, BUSY, LESS = 1024, 16, 0.1, 0.95


def unsent_warnings(n_workers: int, nbytes_sent: float) -> Iterator[str]:
    """Warn if several workers have exchanged nothing, so that only computation determines their speed."""
    if n_workers > 1 and nbytes_sent == 0.0:
        yield (
            f"nothing was sent: the run ended before any of the {n_workers} workers exchanged data, so it says nothing "
            "about the network; simulate more steps than the strategy makes between two exchanges"
        )


def settings_notes(experiment: Experiment, n_workers: int) -> Iterator[str]:
    """Note numbers of steps and a spread that have no effect, and steps that are not a multiple of the cycle."""
    if isinstance(experiment.speed, Spread) and n_workers == 1:
        yield "speed: Spread has no effect on a single worker, whose device is assumed to be an average one"
    if experiment.training is not None and experiment.steps is not None:
        yield f"steps = {experiment.steps} has no effect with training, which determines when the run ends"
    cycle, (warmup, steps) = contract.of(experiment.strategy).cycle_length, experiment.window
    if experiment.training is None and steps % cycle:
        warmup, multiple = cycle * -(-warmup // cycle), cycle * -(-steps // cycle)
        yield (
            f"steps: {steps} measured steps are not a multiple of the {cycle}-step cycle, so throughput and step time "
            f"count too few or too many exchanges; set steps={multiple} and warmup={warmup}, or neither"
        )


def superlinear_causes(result: Result) -> list[str]:
    """Return possible causes of a throughput above the sum of the workers' throughputs with the full model."""
    experiment, workloads = result.experiment, result.workloads
    strategy = contract.of(experiment.strategy)
    stage = strategy.stages_of(workloads)[0]
    causes = []
    if stage.state < 1.0:
        causes.append(
            "every worker updates a shard of the weights, but the baseline's single worker updates all of them, "
            f"{seconds(workloads[0].optimizer)} per step"
        )
    elif strategy.shares_batch and not workloads[0].timed:
        causes.append("every worker updates, and in split layers reads, only its part of the weights")
    if varying := bool(not isinstance(experiment.jitter, NoJitter) or experiment.slowdowns or experiment.faults):
        causes.append("step times are a random sample, and the baseline is their mean; simulate more steps")
    times = np.diff([time for time, _ in result.measured_updates])
    if result.has_own_steps or (not varying and np.ptp(times) > 1e-9 * times.mean()):
        causes.append("updates come in bursts, and the measured steps may end within one; simulate more steps")
    if not result.measured_updates[0][1]:  # the start of the run
        remedy = "increase max_time" if experiment.window[0] else "set warmup=2"
        causes.append(f"the measured steps include the first one, which waits for no earlier step; {remedy}")
    if result.monitor is not None:
        causes.append("the baseline has the batches and images of the run throughout")
    return causes


def superlinear_notes(result: Result) -> Iterator[str]:
    """Note an efficiency above 1."""
    if result.efficiency > 1.0 + 1e-9 and (causes := superlinear_causes(result)):
        yield f"efficiency {percent(result.efficiency)}, above 100 %: {'; '.join(causes)}"


def handed_over_notes(context: RunContext, monitor: Monitor | None) -> Iterator[str]:
    """Note how the final model is combined if workers are at different steps, and the cost of statistics."""
    task = context.learner.task
    if monitor is None or task is None:
        return
    steps = monitor.evaluated_steps
    if steps and min(steps) < max(steps):
        yield (
            f"the final model is {context.mixture}; the workers have completed {min(steps)} to {max(steps)} local steps"
        )
    if task.network.state_slots:
        nbytes = task.network.initial_state.nbytes
        share = nbytes / task.network.initial_params.nbytes
        yield (
            "running statistics of batch normalisation are sent along with the parameters, but their "
            f"{nbytes / 1e3:.4g} kB ({percent(share, 2)} of the parameters) are not counted as bytes sent"
        )


def delay_warnings(training: Training | None, staleness: Sequence[int], reason: str) -> Iterator[str]:
    """Warn, with suggested rates, if a run diverged whose gradients were computed from older parameters.

    On a quadratic, SGD with gradients that are d updates old is stable up to sin(pi / (4 d + 2)) times the rate that is
    stable without delay (Yang et al. 2021, PipeMare, arXiv:1910.05124, lemma 1; they warm up by dividing rates by the
    delay).
    """
    oldest = max(staleness, default=0)
    if training is not None and oldest and reason.startswith("diverged"):
        share = math.sin(math.pi / (4 * oldest + 2))
        rate = f" ({share * training.rate:.2g})" if isinstance(training.rate, int | float) else ""
        yield (
            f"gradients were up to {oldest} updates old. On a quadratic, the largest stable rate is then {share:.2g} "
            f"of that without delay, sin(pi / (4 d + 2)). Try {share:.2g} times the rate{rate}, a rate that starts at "
            f"1 / {oldest} of it (Yang et al. 2021, arXiv:1910.05124), or a synchronous strategy"
        )


def idle_notes(strategy: Strategy, cluster: Cluster, workers: Sequence[int], channel_nbytes: Floats) -> Iterator[str]:
    """Note machines with several devices and interfaces that have used only some of the interfaces."""
    nodes = np.array(workers)
    hosts = distinct(cluster.host_of[nodes])
    several = np.bincount(cluster.host_of[nodes][cluster.host_of[nodes] >= 0], minlength=len(cluster.host_names)) > 1
    source = cluster.host_of[cluster.link_src]
    leaves = (source >= 0) & (cluster.host_of[cluster.link_dst] != source)
    wide = leaves & several[np.maximum(source, 0)]
    if len(hosts) < 2 or not wide.any():
        return
    host_of_channel = np.full(cluster.n_channels, -1)
    host_of_channel[cluster.link_channel[wide]] = source[wide]
    channels = np.flatnonzero(host_of_channel >= 0)
    used = channels[channel_nbytes[channels] > 0.0]
    n_all, n_used = len(channels), len(used)
    if not 0 < n_used < n_all:
        return
    at = nodes[cluster.locality_order(nodes)]
    algorithms = contract.of(strategy).collectives().algorithms.values()
    all_ways = any(algorithm in ("nccl", "nccl_ring") for algorithm in algorithms)  # NCCL would use all of them
    why = (
        "no further ring passes through every machine, because some have fewer interfaces near workers"
        if all_ways or not several_ways(cluster, tuple(at.tolist()))
        else 'NCCL uses every interface that is near a worker, as does algorithm = "nccl"'
    )
    yield f"network interfaces: {n_used} of the {n_all} interfaces of these machines were used; {why}"


def late_notes(events: Iterable[object], end: float) -> Iterator[str]:
    """Note each fault, slowdown, job or background traffic that begins after the `end` (s) of a run."""
    for event in events:
        if si(getattr(event, "start", 0.0), "time") >= end:
            name = f"job {event.name!r}" if isinstance(event, Job) else str(event)
            yield f"{name} begins after the end of the run at {end:.4g} s and has no effect; simulate more steps"


def stalled_notes(recorder: Recorder, seconds: float) -> Iterator[str]:
    """Note if the time without updates at the end of a run is longer than any earlier one."""
    if stalled := recorder.stalled(seconds):
        why = "throughput and step time include that time"
        yield f"stalled: no update in the last {stalled:.4g} of {seconds:.4g} s; {why}"


def overlap_notes(slowdown: object, context: RunContext, cluster: Cluster) -> Iterator[str]:
    """Note an overlap slowdown if no device computed while such communication was in progress."""
    devices = [device["slowed"] for device in context.devices if len(device)]
    if not isinstance(slowdown, OverlapSlowdown) or slowdown == NO_SLOWDOWN or not devices or any(map(np.any, devices)):
        return
    counts = np.bincount(cluster.host_of[list(context.nodes)])
    why = "no worker computed while it communicated" if counts.sum() > 1 else "a single worker does not communicate"
    if counts.sum() == 1 or (slowdown.inside > 1.0 and slowdown.between > 1.0):
        pass
    elif counts.max() == 1 and slowdown.between == 1.0:
        why = "every machine has one worker; set between"
    elif counts.max() == counts.sum() and slowdown.inside == 1.0:
        why = "all workers are on one machine; set inside"
    else:
        kind, other = ("between machines", "inside") if slowdown.inside == 1.0 else ("inside machines", "between")
        why = f"no worker computed during communication {kind}; set {other}"
    beyond = any(worker.workload.slowdown != NO_SLOWDOWN for worker in context.workers)
    yield f"overlap_slowdown has no effect{' except to replace that of the stack' * beyond}: {why}"


def link_notes(cluster: Cluster) -> Iterator[str]:
    """Repeat the notes of a cluster's file on links of unknown width, which affect the run's times."""
    return (note for note in cluster.notes if note.startswith("link_width of "))


def spread_notes(cluster: Cluster) -> Iterator[str]:
    """Note links whose rates vary."""
    if cluster.link_seed is not None and cluster.details is not None and cluster.details.spread.any():
        shares = cluster.channel_capacity / cluster.nominal_capacity
        yield (
            f"unequal links: rates are {shares.min():.3g} to {shares.max():.3g} of the nominal ones, sampled with seed "
            f"{cluster.link_seed}; other seeds have other slow links"
        )


def path_notes(cluster: Cluster, pairs: Ints, channel_nbytes: Floats) -> Iterator[str]:
    """Note a link that was busy while equally short paths were unused, if spraying messages over all of them would
    reduce the maximum load; `pairs` (n, 2) are the nodes between which the run has routes."""
    pairs, seconds = pairs[:: len(pairs) // MOST_PAIRS + 1], channel_nbytes / cluster.channel_capacity
    pairs = pairs[(pairs < cluster.n_nodes).all(axis=1)]
    if cluster.routing == "spray" or not len(pairs):
        return
    usual, spread = (network.split_routes(*pairs.T) for network in (cluster, cluster.with_spraying()))
    used, channel = cluster.link_channel[usual.links], cluster.link_channel[spread.links]
    busy = distinct(channel[spread.share < 1.0])
    busy = busy[seconds[busy] > BUSY * seconds.max()]
    for link in busy[np.argsort(-seconds[busy], kind="stable")][:MOST_LINKS].tolist():
        crossing = np.isin(spread.of, usual.of[used == link])
        paths = distinct(channel[crossing & (spread.share < 1.0)])
        idle = paths[channel_nbytes[paths] == 0.0]
        load = np.bincount(channel[crossing], spread.share[crossing], cluster.n_channels) / cluster.channel_capacity
        if len(idle) and load.max() < LESS * usual.share[used == link].sum() / cluster.channel_capacity[link]:
            first = int(np.flatnonzero(cluster.link_channel == link)[0])
            ends = " -> ".join(cluster.node_names[end[first]] for end in (cluster.link_src, cluster.link_dst))
            yield (
                f"equal paths: messages over {ends} could take {len(paths)} links of equally short paths, of which "
                f"{len(idle)} carried nothing; routing = 'spray' uses all of them"
            )
            return


def level_notes(strategy: Strategy, cluster: Cluster, nodes: Sequence[int]) -> Iterator[str]:
    """Note a hierarchical all-reduce on a network without levels among the workers."""
    algorithms = contract.of(strategy).collectives().algorithms.values()
    if len(nodes) > 1 and any(map(hierarchical, algorithms)) and not levels(cluster, tuple(nodes)).are_several:
        yield (
            f"hierarchical: all {len(nodes)} workers are on one level of the network (one machine, or equal links of "
            "one switch, ring or mesh), so the all-reduce is flat"
        )


def uneven_notes(strategy: Strategy, recorder: Recorder) -> Iterator[str]:
    """Note if a few asynchronous workers contribute most of the throughput."""
    is_asynchronous = recorder.staleness or contract.of(strategy).is_asynchronous
    steps = [len(ends) for ends in recorder.step_end]
    least, most = min(steps), max(steps)
    if is_asynchronous and most >= 2 * least and most - least >= 3:
        more = "" if least > 2 else " (take more steps)"
        text = f"worker {steps.index(most)} made {most} steps while worker {steps.index(least)} made {least}{more}"
        yield f"{text}: throughput and the trained model mostly reflect the fast workers"


def learning_notes(
    experiment: Experiment, models: tuple[Model, Model], reason: str, monitor: Monitor | None
) -> Iterator[str]:
    """Note what determines a training run's times, and how it ended; `models`: the trained one, and the timed one."""
    training = experiment.training
    if training is None or monitor is None:
        return
    if experiment.time_model is not None:
        yield f"two models: {models[0].name} is trained, and {models[1].name} determines the simulated times"
    last, batch = monitor.history[-1] if monitor.history else None, experiment.batch_size or 0
    if last is not None and batch * last.epoch > last.samples:
        yield f"batch_size = {batch} exceeds the training set of {last.samples / last.epoch:,.0f} samples, which repeat"
    if reason.startswith("diverged"):
        yield reason
    for name, reached in (("target_accuracy", "target accuracy"), ("target_loss", "target loss")):
        target = getattr(training, name)
        if target is not None and reason != reached and monitor.history:
            best = max(r.accuracy for r in monitor.history) if "acc" in name else min(r.loss for r in monitor.history)
            yield (
                f"{name} = {target:g} was not reached; the best value was {best:.4g} "
                f"(the run ended because of: {reason})"
            )


def feed_notes(experiment: Experiment, recorder: Recorder, seconds: float) -> Iterator[str]:
    """Note how long workers wait for input."""
    input = experiment.input
    if not isinstance(input, Input):
        return
    waited = max(booked[INPUT] for booked in recorder.seconds) / seconds
    if input.prefetch == 0:
        yield (
            "input: prefetch = 0: workers request a batch only when they need it, so none of its loading time is hidden"
        )
    if waited > 0.0 and not si(input.prep_seconds, "time") and input.storage is None:
        yield "input: workers wait only for the copies of samples from host memory to their devices"
    if any(cache.nbytes >= (input.n_samples or 0) * input.stored_nbytes for cache in input.levels):
        yield "input: a machine's cache holds the whole dataset, so later epochs read nothing from storage"
    if input.levels and input.epoch is None and experiment.training is None:
        yield "input: caches are in their steady state; set epoch = 1 for the first epoch, in which they are empty"
