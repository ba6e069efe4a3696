"""What brings a run's workers their samples, where its experiment has an :class:`~ddlsim.workload.input.Input`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.run.copies_share import check_input, takes_samples, with_input
from ddlsim.runtime.feed import Feed
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import INPUT, Recorder
from ddlsim.runtime.servers import memory_nodes
from ddlsim.units import si
from ddlsim.workload.compute import Workload
from ddlsim.workload.copies import Copies
from ddlsim.workload.devices import Device
from ddlsim.workload.input import Input
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.experiment import Experiment


def check_source(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
    """Raise ConfigError for samples that cannot come as the experiment says: from a storage that the cluster does not
    have or that workers cannot read from, or by copies to workers that share a batch."""
    input = experiment.input
    if isinstance(input, Copies):
        check_input(experiment.strategy, len(nodes))
        return
    if input is None or input.storage is None:
        return
    node = storage_node(input.storage, cluster, "input: storage")
    cluster.check_connected([node, *dict.fromkeys(memory_nodes(cluster, list(nodes)))])


def with_copies(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workloads: list[tuple[Workload, Device]]
) -> list[tuple[Workload, Device]]:
    """Return the workloads, which begin with waits for copies where the experiment's input is that."""
    input = experiment.input
    if not isinstance(input, Copies) or not takes_samples(experiment.strategy, len(nodes)):
        return workloads
    return with_input(input, cluster, nodes, workloads, experiment.compute)


def storage_node(name: str, cluster: Cluster, where: str) -> int:
    """Return the node of the storage called `name`. Raises ConfigError, with `where`, for one that can be none."""
    if name not in cluster.node_names:
        if not cluster.storages.size:
            raise ConfigError(
                f"{where} = {name!r}: cluster {cluster.name!r} has no storage; add [[storage]] to its file, or make "
                f"one with ddlsim.cluster.with_storage(cluster, {name!r}, read='2 GB/s')"
            )
        names = [cluster.node_names[each] for each in cluster.storages.tolist()]
        raise unknown_name("storage", name, names, f"{where}: cluster {cluster.name!r}")
    node = cluster.node(name)
    if cluster.node_kind[node] not in ("storage", "host"):
        raise ConfigError(f"{where} = {name!r} is a {cluster.node_kind[node]}; name a storage or a host")
    return node


def feed_of(experiment: Experiment, loop: Loop, cluster: Cluster, nodes: Sequence[int], model: Model) -> Feed | None:
    """Return what brings the workers their samples, None if they are there."""
    input = experiment.input
    if not isinstance(input, Input):
        return None
    first = input.epoch or (0 if experiment.training is None else 1)
    return Feed(input, loop, cluster, nodes, memory_nodes(cluster, list(nodes)), model.input_shape, first)


def feed_notes(experiment: Experiment, recorder: Recorder, seconds: float) -> list[str]:
    """Return what the reader of a result should know of its input."""
    input, notes = experiment.input, []
    if not isinstance(input, Input):
        return []
    waited = max(booked[INPUT] for booked in recorder.seconds) / seconds
    if input.prefetch == 0:
        notes.append("input: prefetch = 0: workers ask for a batch when they need it, so nothing hides what it takes")
    if waited > 0.0 and not si(input.prep_seconds, "time") and input.storage is None:
        notes.append("input: workers wait for the copies of samples from memory to their devices alone")
    if any(cache.nbytes >= (input.n_samples or 0) * input.stored_nbytes for cache in input.levels):
        notes.append(
            "input: a machine's cache has room for the whole data set: later epochs read nothing from the storage"
        )
    if input.levels and input.epoch is None and experiment.training is None:
        notes.append("input: caches are as full as they get; the first epoch, in which they are empty, is epoch = 1")
    return notes
