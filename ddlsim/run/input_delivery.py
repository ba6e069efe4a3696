"""Delivery of samples to a run's workers, for experiments with an :class:`~ddlsim.workload.input.Input`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster
from ddlsim.cluster.machines import memory_nodes
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.network import Network
from ddlsim.runtime.feed import Feed
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import INPUT, Recorder
from ddlsim.runtime.worker import Process, all_of
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.compute import Roofline, Workload
from ddlsim.workload.devices import Device
from ddlsim.workload.input import Copies, Input
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.experiment import Experiment


def with_input(
    input: Copies,
    cluster: Cluster,
    nodes: Sequence[int],
    workloads: Sequence[tuple[Workload, Device]],
    compute: object,
) -> list[tuple[Workload, Device]]:
    """Return workloads that begin with the workers' waits for input, if all load a batch at the same time.

    compute  source of the compute times. A measured step includes the input of a device that has its machine to itself,
             so only the additional wait counts
    """
    sizes = [w.batch_size * input.sample_nbytes(w.model.input_shape) for w, _ in workloads]
    memory, nodes = memory_nodes(cluster, list(nodes)), list(nodes)
    machines: dict[int, list[int]] = {}
    for worker, node in enumerate(memory):
        machines.setdefault(node, []).append(worker)
    firsts = [workers[0] for workers in machines.values()]
    together = _copied(cluster, memory, nodes, sizes, range(len(nodes)))
    single = dict(zip(firsts, _copied(cluster, memory, nodes, sizes, firsts), strict=True))
    changed: dict[tuple[int, float, float], Workload] = {}
    result = []
    for worker, (workload, device) in enumerate(workloads):
        beside = machines[memory[worker]]
        passes = workload.forward_time, workload.backward_time
        n_samples = sum(workloads[other][0].batch_size for other in beside)
        waits = input.wait(together[worker], n_samples, sum(sizes[other] for other in beside), *passes)
        alone = input.wait(single[beside[0]], workload.batch_size, sizes[worker], *passes)
        measured = workload.known and not isinstance(compute, Roofline)
        key = id(workload), waits, alone
        if key not in changed:
            forward = workload.forward.copy()
            forward[0] += max(waits - alone, 0.0) if measured else waits
            changed[key] = dataclasses.replace(workload, forward=forward, stall=max(waits - alone, 0.0))
        result.append((changed[key], device))
    return result


def _copied(
    cluster: Cluster, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[float], workers: Sequence[int]
) -> list[float]:
    """Return when the copies to these workers have ended that all begin at 0, in s; nothing else uses the links."""
    loop, ends = Loop(Network(cluster)), dict.fromkeys(workers, 0.0)

    def copy(worker: int) -> Process:
        yield loop.send(sources[worker], targets[worker], sizes[worker])
        ends[worker] = loop.now

    copies = [loop.env.process(copy(worker)) for worker in workers if sources[worker] != targets[worker]]
    if copies:
        loop.run(all_of(loop, copies), math.inf)
    return [ends[worker] for worker in workers]


def input_note(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return a note if devices wait for samples longer than each would alone."""
    longest = max(workload.stall for workload in workloads)
    if longest <= 0.0:
        return ()
    return (
        f"input: devices wait up to {longest * 1e3:.3g} ms per step for samples while other devices of their machine "
        "receive theirs; this time is booked as computing",
    )


def check_source(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
    """Raise ConfigError for input that the experiment cannot have: from a missing or unreachable storage, or by copies
    to workers that share a batch."""
    input = experiment.input
    if isinstance(input, Copies):
        strategy = contract.of(experiment.strategy)
        if strategy.n_replicas(len(nodes)) != len(nodes):
            raise ConfigError(
                f"input: not supported with {strategy.name}, in which workers share a batch and only some of "
                "them read samples; leave input out"
            )
        return
    if input is None or input.storage is None:
        return
    node = storage_node(input.storage, cluster, "input: storage")
    cluster.check_connected([node, *dict.fromkeys(memory_nodes(cluster, list(nodes)))])


def with_copies(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workloads: list[tuple[Workload, Device]]
) -> list[tuple[Workload, Device]]:
    """Return the workloads, which begin with waits for copies if the experiment's input is `Copies`."""
    input = experiment.input
    if not isinstance(input, Copies) or contract.of(experiment.strategy).n_replicas(len(nodes)) != len(nodes):
        return workloads
    return with_input(input, cluster, nodes, workloads, experiment.compute)


def storage_node(name: str, cluster: Cluster, where: str) -> int:
    """Return the node of the storage `name`. Raises ConfigError, prefixed with `where`, if there is no such storage."""
    if name not in cluster.node_names:
        if not cluster.storages.size:
            raise ConfigError(
                f"{where} = {name!r}: cluster {cluster.name!r} has no storage; add [[storage]] to its file, "
                f"or use ddlsim.cluster.with_storage(cluster, {name!r}, read='2 GB/s')"
            )
        names = [cluster.node_names[each] for each in cluster.storages.tolist()]
        raise unknown_name("storage", name, names, f"{where}: cluster {cluster.name!r}")
    node = cluster.node(name)
    if cluster.node_kind[node] not in ("storage", "host"):
        kind = cluster.node_kind[node]
        raise ConfigError(f"{where} = {name!r}: must be a storage node or a host, but its kind is {kind}")
    return node


def feed_of(experiment: Experiment, loop: Loop, cluster: Cluster, nodes: Sequence[int], model: Model) -> Feed | None:
    """Return the input pipeline of the workers, None if samples are already on the devices."""
    input = experiment.input
    if not isinstance(input, Input):
        return None
    first = input.epoch or (0 if experiment.training is None else 1)
    return Feed(input, loop, cluster, nodes, memory_nodes(cluster, list(nodes)), model.input_shape, first)


def feed_notes(experiment: Experiment, recorder: Recorder, seconds: float) -> list[str]:
    """Return the notes of a result on its input."""
    input, notes = experiment.input, []
    if not isinstance(input, Input):
        return []
    waited = max(booked[INPUT] for booked in recorder.seconds) / seconds
    if input.prefetch == 0:
        notes.append(
            "input: prefetch = 0: workers request a batch only when they need it, so none of its loading time is hidden"
        )
    if waited > 0.0 and not si(input.prep_seconds, "time") and input.storage is None:
        notes.append("input: workers wait only for the copies of samples from host memory to their devices")
    if any(cache.nbytes >= (input.n_samples or 0) * input.stored_nbytes for cache in input.levels):
        notes.append("input: a machine's cache holds the whole dataset, so later epochs read nothing from storage")
    if input.levels and input.epoch is None and experiment.training is None:
        notes.append(
            "input: caches are in their steady state; set epoch = 1 for the first epoch, in which they are empty"
        )
    return notes
