"""Delivery of samples to a run's workers, for experiments with an :class:`~ddlsim.workload.input.Input`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster
from ddlsim.cluster.machines import memory_nodes
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.runtime.feed import Feed
from ddlsim.runtime.loop import Loop, arrivals
from ddlsim.runtime.recorder import INPUT, Recorder
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.compute import Roofline, Workload
from ddlsim.workload.input import Copies, Input
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.experiment import Experiment


def with_copies(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workloads: list[Workload]
) -> list[Workload]:
    """Return the workloads. If the experiment's input is `Copies`, they include the workers' waiting time when all load
    a batch at the same time.

    A measured step includes the input of a device that uses its machine alone, so only the additional wait counts.
    """
    input = experiment.input
    if not isinstance(input, Copies) or contract.of(experiment.strategy).n_replicas(len(nodes)) != len(nodes):
        return workloads
    sizes = [w.batch_size * input.sample_nbytes(w.model.input_shape) for w in workloads]
    memory, nodes = memory_nodes(cluster, list(nodes)), list(nodes)
    machines: dict[int, list[int]] = {}
    for worker, node in enumerate(memory):
        machines.setdefault(node, []).append(worker)
    firsts = [workers[0] for workers in machines.values()]
    copies = list(zip(memory, nodes, sizes, strict=True))
    together = arrivals(cluster, copies)
    single = dict(zip(firsts, arrivals(cluster, [copies[first] for first in firsts]), strict=True))
    changed: dict[tuple[int, float, float], Workload] = {}
    result = []
    for worker, workload in enumerate(workloads):
        beside = machines[memory[worker]]
        passes = workload.forward_time, workload.backward_time
        n_samples = sum(workloads[other].batch_size for other in beside)
        waits = input.wait(together[worker], n_samples, sum(sizes[other] for other in beside), *passes)
        alone = input.wait(single[beside[0]], workload.batch_size, sizes[worker], *passes)
        measured = workload.known and not isinstance(experiment.compute, Roofline)
        key = id(workload), waits, alone
        if key not in changed:
            forward, stall = workload.forward.copy(), max(waits - alone, 0.0)
            wait = stall if measured else waits
            forward[0] += wait
            changed[key] = dataclasses.replace(workload, forward=forward, wait=wait, stall=stall)
        result.append(changed[key])
    return result


def input_note(workloads: Sequence[Workload]) -> Iterator[str]:
    """Note if devices wait for samples longer than each would by itself."""
    longest = max(workload.stall for workload in workloads)
    if longest > 0.0:
        yield (
            f"input: devices wait up to {longest * 1e3:.3g} ms per step for samples while other devices of their "
            "machine receive theirs; this time is booked as computing"
        )


def check_source(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
    """Raise ConfigError for an invalid input: from a missing or unreachable storage, or copies for workers that share a
    batch."""
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
    """Return the input pipeline of the workers, or None if samples are already on the devices."""
    input = experiment.input
    if not isinstance(input, Input):
        return None
    first = input.epoch or (0 if experiment.training is None else 1)
    return Feed(input, loop, cluster, nodes, memory_nodes(cluster, list(nodes)), model.input_shape, first)


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
