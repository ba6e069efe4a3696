"""What devices wait for their samples, which machines bring to all of theirs at the same time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.network import Network
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.servers import memory_nodes
from ddlsim.runtime.worker import Process, all_of
from ddlsim.workload.compute import Roofline, Workload
from ddlsim.workload.copies import Copies
from ddlsim.workload.devices import Device
from ddlsim.workload.stage import n_replicas


def takes_samples(strategy: object, n_workers: int) -> bool:
    """Return whether every worker takes samples of its own."""
    return n_replicas(strategy, n_workers) == n_workers


def check_input(strategy: object, n_workers: int) -> None:
    """Raise ConfigError where not every worker takes samples of its own."""
    if not takes_samples(strategy, n_workers):
        raise ConfigError(
            f"input: with {type(strategy).__name__} workers share a batch, and only some of them read samples; it is "
            "for workers with batches of their own: leave it out"
        )


def with_input(
    input: Copies, cluster: Cluster, nodes: Sequence[int], workloads: Sequence[tuple[Workload, Device]],
    compute: object,
) -> list[tuple[Workload, Device]]:  # fmt: skip
    """Return workloads that begin with what the workers, all with a batch at the same time, wait for it.

    compute  where compute times come from. A step that was measured has the input of a device alone in its machine in
             it, so only what others add counts
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
    """Return a line where devices wait for samples longer than each would alone."""
    longest = max(workload.stall for workload in workloads)
    if longest <= 0.0:
        return ()
    return (
        f"input: devices wait up to {longest * 1e3:.3g} ms a step for samples because others of their machine take "
        "theirs; that is booked as computing",
    )
