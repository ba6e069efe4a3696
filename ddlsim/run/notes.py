"""Notes and warnings of a result: on its model, its training, and workers that never communicate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.cluster.levels import levels
from ddlsim.collectives.nccl_choice import several_ways
from ddlsim.learning.monitor import Monitor
from ddlsim.learning.training import Training
from ddlsim.readable import percent, seconds
from ddlsim.run.experiment import Experiment
from ddlsim.run.job import Job
from ddlsim.runtime.communicator import hierarchical
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.loop import Traffic
from ddlsim.runtime.recorder import Recorder
from ddlsim.strategies import Strategy, contract
from ddlsim.units import si
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import load_model

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome

#: of path_notes: pairs of nodes and links that are looked at; the least s of a link, as a share of the busiest one's;
#: what another path may need of it
MOST_PAIRS, MOST_LINKS, BUSY, LESS = 1024, 16, 0.1, 0.95


def unsent_warnings(n_workers: int, nbytes_sent: float) -> list[str]:
    """Return a warning if several workers have exchanged nothing, so that their speed is that of computation alone."""
    if n_workers == 1 or nbytes_sent > 0.0:
        return []
    return [
        f"nothing was sent: the run ended before any of the {n_workers} workers exchanged data, so it says nothing "
        "about the network; simulate more steps than the strategy makes between two exchanges"
    ]


def window_notes(experiment: Experiment) -> list[str]:
    """Return a note if the measured steps are not a multiple of the strategy's cycle."""
    cycle, (warmup, steps) = contract.of(experiment.strategy).cycle_length, experiment.window
    if experiment.training is not None or steps % cycle == 0:
        return []
    whole = cycle * -(-steps // cycle)
    return [
        f"steps: {steps} measured steps are not a multiple of the {cycle}-step cycle, so throughput and step time "
        f"count too few or too many exchanges; set steps={whole} and warmup={cycle * -(-warmup // cycle)}, or neither"
    ]


def superlinear_causes(result: Outcome) -> list[str]:
    """Return what can make workers faster together than the sum of each alone with the full model."""
    experiment, workloads = result.experiment, result.workloads
    strategy = contract.of(experiment.strategy)
    stage = strategy.stages_of(workloads)[0]
    causes = []
    if stage.state < 1.0:
        causes.append(
            "every worker updates a shard of the weights, but the baseline's single worker updates all of them, "
            f"{seconds(workloads[0].optimizer)} per step"
        )
    if strategy.shares_batch and not workloads[0].timed:
        causes.append("every worker reads and updates only the weights of its part of the layers")
    if not isinstance(experiment.jitter, NoJitter) or experiment.slowdowns or experiment.faults:
        causes.append("step times are a random sample, and the baseline is their mean; simulate more steps")
    times = np.diff([time for time, _ in result.measured_updates])
    if result.recorder.staleness or np.ptp(times) > 1e-9 * times.mean():
        causes.append("updates come in bursts, and the measured steps may end within one; simulate more steps")
    if not experiment.window[0]:
        causes.append("the measured steps include the first one, which waits for no earlier step; set warmup=2")
    if result.monitor is not None:
        causes.append("the baseline has the batches and images of the run throughout")
    return causes


def superlinear_notes(result: Outcome) -> list[str]:
    """Return a note if the efficiency is above 1."""
    causes = superlinear_causes(result) if result.efficiency > 1.0 + 1e-9 else []
    return [f"efficiency {percent(result.efficiency)}, above 100 %: {'; '.join(causes)}"] if causes else []


def handed_over_notes(context: RunContext, monitor: Monitor | None) -> list[str]:
    """Return notes on a training run's model: what it mixes, if workers are at different steps, and the cost of
    statistics."""
    task = context.learner.task
    if monitor is None or task is None:
        return []
    notes, steps = [], monitor.evaluated_steps
    if steps and min(steps) < max(steps):
        notes.append(
            f"the final model is {context.mixture}; the workers have completed {min(steps)} to {max(steps)} local steps"
        )
    if task.network.state_slots:
        nbytes = task.network.initial_state.nbytes
        share = nbytes / task.network.initial_params.nbytes
        notes.append(
            "running statistics of batch normalisation are sent along with the parameters, but their "
            f"{nbytes / 1e3:.4g} kB ({share:.2%} of the parameters) are not counted as bytes sent"
        )
    return notes


def delay_warnings(training: Training | None, staleness: Sequence[int], reason: str) -> list[str]:
    """Return a warning, with rates to try, if a run has diverged whose gradients were computed from older parameters.

    On a quadratic, SGD with gradients that are d updates old is stable up to sin(pi / (4 d + 2)) of the rate that is
    stable without delay (Yang et al. 2021, PipeMare, arXiv:1910.05124, lemma 1; they warm up by dividing rates by the
    delay).
    """
    oldest = max(staleness, default=0)
    if training is None or not oldest or not reason.startswith("diverged"):
        return []
    share = math.sin(math.pi / (4 * oldest + 2))
    rate = f" ({share * training.rate:.2g})" if isinstance(training.rate, int | float) else ""
    return [
        f"gradients were up to {oldest} updates old. On a quadratic, the largest stable rate is then {share:.2g} of "
        f"that without delay, sin(pi / (4 d + 2)). Try {share:.2g} times the rate{rate}, a rate that starts at "
        f"1 / {oldest} of it (Yang et al. 2021, arXiv:1910.05124), or a synchronous strategy"
    ]


def idle_notes(cluster: Cluster, nodes: Ints, channel_nbytes: Floats, all_ways: bool = False) -> list[str]:
    """Return a note if machines with several devices and interfaces have used only some of the interfaces.

    all_ways  the algorithm uses as many as NCCL would
    """
    hosts = np.unique(cluster.host_of[nodes])
    several = np.bincount(cluster.host_of[nodes][cluster.host_of[nodes] >= 0], minlength=len(cluster.host_names)) > 1
    source = cluster.host_of[cluster.link_src]
    leaves = (source >= 0) & (cluster.host_of[cluster.link_dst] != source)
    wide = leaves & several[np.maximum(source, 0)]
    if len(hosts) < 2 or not wide.any():
        return []
    host_of_channel = np.full(cluster.n_channels, -1)
    host_of_channel[cluster.link_channel[wide]] = source[wide]
    channels = np.flatnonzero(host_of_channel >= 0)
    used = channels[channel_nbytes[channels] > 0.0]
    n_all, n_used = len(channels), len(used)
    if not 0 < n_used < n_all:
        return []
    at = nodes[cluster.locality_order(nodes)]
    why = (
        "no further ring passes through every machine, because some have fewer interfaces near workers"
        if all_ways or not several_ways(cluster, tuple(at.tolist()))
        else 'NCCL uses every interface that is near a worker, as does algorithm = "nccl"'
    )
    return [f"network interfaces: {n_used} of the {n_all} interfaces of these machines were used; {why}"]


def late_notes(events: Iterable[object], end: float) -> list[str]:
    """Return a note for each fault, slow-down, job or background traffic that begins after the `end` (s) of a run."""
    late = [each for each in events if si(getattr(each, "start", 0.0), "time") >= end]
    names = [f"job {each.name!r}" if isinstance(each, Job) else str(each) for each in late]
    why = f"begins after the end of the run at {end:.4g} s and has no effect; simulate more steps"
    return [f"{name} {why}" for name in names]


def stalled_notes(recorder: Recorder, seconds: float) -> list[str]:
    """Return a note if a run made no update at its end for longer than ever before."""
    if not (stalled := recorder.stalled(seconds)):
        return []
    return [
        f"stalled: no update in the last {stalled:.4g} of {seconds:.4g} s; throughput and step time include that time"
    ]


def link_notes(cluster: Cluster) -> list[str]:
    """Return the notes of a cluster's file on links of unknown width, which affect the run's times."""
    return [note for note in cluster.notes if note.startswith("link_width of ")]


def spread_notes(cluster: Cluster) -> list[str]:
    """Return a note about links that are not equally fast."""
    if cluster.link_seed is None:
        return []
    shares = cluster.channel_capacity / cluster.nominal_capacity
    return [
        f"unequal links: rates are {shares.min():.3g} to {shares.max():.3g} of the nominal ones, sampled with seed "
        f"{cluster.link_seed}; other seeds have other slow links"
    ]


def path_notes(cluster: Cluster, pairs: Ints, channel_nbytes: Floats) -> list[str]:
    """Return a note if a link was busy while equally short paths carried nothing, and spraying messages over all of
    them would need less of every link; `pairs` (n, 2) are the nodes that the run has routes between."""
    pairs, seconds = pairs[:: len(pairs) // MOST_PAIRS + 1], channel_nbytes / cluster.channel_capacity
    pairs = pairs[(pairs < cluster.n_nodes).all(axis=1)]
    if cluster.routing == "spray" or not len(pairs):
        return []
    usual, spread = (each.split_routes(*pairs.T) for each in (cluster, cluster.with_spraying()))
    used, channel = cluster.link_channel[usual.links], cluster.link_channel[spread.links]
    busy = np.unique(channel[spread.share < 1.0])
    busy = busy[seconds[busy] > BUSY * seconds.max()]
    for link in busy[np.argsort(-seconds[busy], kind="stable")][:MOST_LINKS].tolist():
        crossing = np.isin(spread.of, usual.of[used == link])
        paths = np.unique(channel[crossing & (spread.share < 1.0)])
        idle = paths[channel_nbytes[paths] == 0.0]
        load = np.bincount(channel[crossing], spread.share[crossing], cluster.n_channels) / cluster.channel_capacity
        if len(idle) and load.max() < LESS * usual.share[used == link].sum() / cluster.channel_capacity[link]:
            first = int(np.flatnonzero(cluster.link_channel == link)[0])
            ends = " -> ".join(cluster.node_names[end[first]] for end in (cluster.link_src, cluster.link_dst))
            return [
                f"equal paths: messages over {ends} could take {len(paths)} links of equally short paths, of which "
                f"{len(idle)} carried nothing; routing = 'spray' uses all of them"
            ]
    return []


def level_notes(strategy: Strategy, cluster: Cluster, nodes: Sequence[int]) -> tuple[str, ...]:
    """Return a note if the strategy's all-reduce is hierarchical and the network has no levels among its workers."""
    algorithms = contract.of(strategy).collectives().algorithms.values()
    if len(nodes) == 1 or not any(map(hierarchical, algorithms)) or levels(cluster, tuple(nodes)).are_several:
        return ()
    return (
        f"hierarchical: all {len(nodes)} workers are on one level of the network (one machine, or equal links of one "
        "switch, ring or mesh), so the all-reduce is flat",
    )


def uneven_notes(recorder: Recorder) -> list[str]:
    """Return a note if some of the asynchronous workers make most of the throughput."""
    if not recorder.staleness:
        return []
    steps = [len(ends) for ends in recorder.step_end]
    least, most = min(steps), max(steps)
    if most < 2 * least or most - least < 3:
        return []
    more = "" if least > 2 else " (take more steps)"
    made = f"worker {steps.index(most)} made {most} steps while worker {steps.index(least)} made {least}{more}"
    return [f"{made}: throughput and the trained model mostly reflect the fast workers"]


def learning_notes(experiment: Experiment, reason: str, monitor: Monitor | None) -> list[str]:
    """Return the notes of a training run's result."""
    training = experiment.training
    if training is None or monitor is None:
        return []
    notes = []
    if experiment.time_model is not None:
        trained, timed = (load_model(m).name for m in (experiment.model, experiment.time_model))
        notes.append(f"two models: {trained} is trained, and {timed} determines the simulated times")
    if reason.startswith("diverged"):
        notes.append(reason)
    for name, reached in (("target_accuracy", "target accuracy"), ("target_loss", "target loss")):
        target = getattr(training, name)
        if target is not None and reason != reached and monitor.history:
            best = max(r.accuracy for r in monitor.history) if "acc" in name else min(r.loss for r in monitor.history)
            notes.append(
                f"{name} = {target:g} was not reached; the best value was {best:.4g} "
                f"(the run ended because of: {reason})"
            )
    return notes


def idle_notes_of(strategy: Strategy, cluster: Cluster, nodes: list[int], traffic: Traffic) -> list[str]:
    """Return notes on parts of the cluster that a run's strategy leaves unused."""
    algorithms = contract.of(strategy).collectives().algorithms.values()
    all_ways = not {"nccl", "nccl_ring"}.isdisjoint(algorithms)
    return idle_notes(cluster, np.array(nodes), traffic.nbytes, all_ways)
