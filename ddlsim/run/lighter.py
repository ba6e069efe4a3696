"""What would fit instead of a plan that does not fit the devices' memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.strategies import Strategy
from ddlsim.strategies.lighter import said, state_of
from ddlsim.strategies.split_rules import MESH
from ddlsim.workload.compute import Workload
from ddlsim.workload.devices import Device
from ddlsim.workload.memory import held_nbytes
from ddlsim.workload.stage import Stage, micro_batches, shares_batch, stages_of

#: ways that are looked at, further ones once one is there, and those that are named
MOST_TRIED, MORE_TRIED, N_NAMED = 32, 3, 2
Workloads = list[tuple[Workload, Device]]


def what_fits(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workloads: Workloads,
    workloads_of: Callable[[Strategy], Workloads],
) -> str:  # fmt: skip
    """Return the nearest ways of the same strategy that fit, with the bytes that the fullest worker then needs, or how
    many workers it takes at least; empty where a strategy has no method `lighter` that says what to try.

    workloads_of  what workers compute under another strategy
    """
    strategy, n_workers = experiment.strategy, len(workloads)
    if not shares_batch(strategy) or len({id(workload) for workload, _ in workloads}) > 1:
        return ""
    workload, device = workloads[0]
    room = device.memory_nbytes
    if not hasattr(strategy, "lighter"):
        return _fewer_samples(experiment, [workload for workload, _ in workloads], room)
    fit: list[tuple[Mapping[str, object], float]] = []
    tries = strategy.lighter(workload, experiment.batch_size, n_workers, room)
    left = MOST_TRIED
    for other, changes in itertools.islice(tries, MOST_TRIED):
        left -= 1
        if len(fit) == N_NAMED or left < 0:
            break
        mesh = {name: changes[name] for name in MESH if name in changes}
        if any(fewer.items() <= changes.items() or (mesh and mesh.items() <= fewer.items()) for fewer, _ in fit):
            continue
        try:
            whole = [workload for workload, _ in workloads_of(other)]
            held = _held(experiment.with_(strategy=other), cluster, nodes, whole)
        except ConfigError:  # tensor groups that share machines with others, say
            continue
        if held <= room:
            fit.append((changes, held))
            left = min(left, MORE_TRIED)
    if fit:
        return f"; the nearest that fit: {'; '.join(f'{said(changes)} ({held / 1e9:.1f} GB)' for changes, held in fit)}"
    state = state_of(workload).total
    if state > n_workers * room:
        state_text = f"weights, gradients and optimizer alone are {state / 1e9:.1f} GB"
        return f"; {state_text}: use {math.ceil(state / room)} workers or more"
    return "" if next(tries, None) else f"; no other micro-batch, recomputation or stage fits {n_workers} workers"


def _fewer_samples(experiment: Experiment, whole: list[Workload], room: float) -> str:
    """Return the largest batch of all workers together that fits, where there is a smaller one that does."""
    n_workers, samples = len(whole), []
    for stage in {id(stage): stage for stage in stages_of(experiment.strategy, whole)}.values():
        fixed, varying = held_nbytes(stage, n_workers)
        samples.append((room - fixed) / max(varying, 1.0) * stage.workload.batch_size)
    largest = math.floor(min(samples))
    return f"; of all workers together batch_size={largest * n_workers}" if largest > 0 else ""


def _held(experiment: Experiment, cluster: Cluster, nodes: Sequence[int], whole: list[Workload]) -> float:
    """Return the bytes that the fullest worker needs."""
    strategy, n_workers = experiment.strategy, len(whole)
    batches = micro_batches(strategy, experiment.batch_size, n_workers, experiment.accumulation)
    tell = getattr(strategy, "outlook", None)
    outlook = None if tell is None else tell(whole, batches, 1, cluster, list(nodes), whole=False)
    holds: list[tuple[Stage, float | None]]
    if outlook is None:
        holds = [(stage, None) for stage in {id(stage): stage for stage in stages_of(strategy, whole)}.values()]
    else:
        holds = list(outlook.holds())
    return max(sum(held_nbytes(stage, n_workers, nbytes)) for stage, nbytes in holds)
