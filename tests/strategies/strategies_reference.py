"""Textbook timelines of one data-parallel worker, written without the simulator.

All workers are equal, so one timeline stands for all. `exchange(nbytes)` is the collective's closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim import Cluster, load_cluster
from ddlsim.cluster import star
from ddlsim.collectives import cost
from ddlsim.workload.compute import Workload

BANDWIDTH = 1.25e9  # bytes/s
LATENCY = 20e-6  # s of one link; a message crosses two

Exchange = Callable[[float], float]


def uniform_star(n_hosts: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Cluster:
    """Equal machines on one switch."""
    return load_cluster(star(n_hosts, bandwidth=bandwidth, latency=latency))


def ring_time(n: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Exchange:
    """Closed form of a ring all-reduce of n ranks on :func:`uniform_star`."""
    return lambda nbytes: cost.ring(n, nbytes, 2 * latency, 1 / bandwidth)


@dataclass(frozen=True)
class Part:
    """Gradients sent together: ready `ready` s after the backward pass began; needed by `layer`."""

    nbytes: float
    ready: float
    layer: int


def layer_parts(workload: Workload) -> list[Part]:
    """One part per layer with parameters, in the order of the backward pass."""
    ready = 0.0
    parts = []
    for layer in range(len(workload.backward) - 1, -1, -1):
        ready += float(workload.backward[layer])
        nbytes = 4.0 * workload.model.layers[layer].n_params
        if nbytes:
            parts.append(Part(nbytes, ready, layer))
    return parts


def tensor_parts(workload: Workload) -> list[Part]:
    """One part per tensor (weights and biases apart), the last declared first."""
    ready = np.cumsum(workload.backward[::-1])[::-1]
    tensors = [(i, 4.0 * n) for i, layer in enumerate(workload.model.layers) for _, n in layer.tensors]
    return [Part(nbytes, float(ready[layer]), layer) for layer, nbytes in reversed(tensors)]


def bucket_parts(workload: Workload, first: float, cap: float) -> list[Part]:
    """DistributedDataParallel's greedy buckets over single tensors (Li et al. 2020)."""
    parts: list[Part] = []
    size = 0.0
    tensors = tensor_parts(workload)
    for tensor in tensors:
        size += tensor.nbytes
        if size >= (cap if parts else first) or tensor is tensors[-1]:
            parts.append(Part(size, tensor.ready, tensor.layer))
            size = 0.0
    return parts


def wait_free_end(parts: Sequence[Part], backward: float, exchange: Exchange) -> float:
    """When backward pass and exchanges are over, counted from the start of the backward pass.

    start_l = max(r_l, end_(l+1)); end_l = start_l + c_l (Zhang et al. 2017, Poseidon; Shi et al. 2019).
    """
    end = 0.0
    for part in parts:
        end = max(part.ready, end) + exchange(part.nbytes)
    return max(backward, end)


def horovod_ends(workload: Workload, exchange: Exchange, threshold: float, cycle: float, steps: int) -> list[float]:
    """End of every step under tensor fusion: at each tick of `cycle` take all that is ready, cut it in
    buffers of at most `threshold` (one tensor may exceed it), reduce them one after the other."""
    start, ends = 0.0, []
    for _ in range(steps):
        queue = [(start + workload.forward_time + p.ready, p.nbytes) for p in layer_parts(workload)]
        now = 0.0
        while queue:
            now = max(now, queue[0][0])
            now = math.ceil(now / cycle - 1e-9) * cycle
            batch = [p for p in queue if p[0] <= now]
            queue = queue[len(batch) :]
            while batch:
                fused = batch.pop(0)[1]
                while batch and fused + batch[0][1] <= threshold:
                    fused += batch.pop(0)[1]
                now += exchange(fused)
        backward_end = start + workload.forward_time + workload.backward_time
        start = max(backward_end, now) + workload.optimizer
        ends.append(start)
    return ends


def priority_ends(workload: Workload, exchange: Exchange, steps: int) -> list[float]:
    """When each step's last gradient arrives: one wire, never interrupted, of the tensors that are ready the
    one nearest the input first; the forward pass of a layer waits for its gradients of the step before."""
    tensors = list(enumerate(tensor_parts(workload)))
    arrived: dict[int, float] = {}
    wire, now, ends = 0.0, 0.0, []
    for _ in range(steps):
        for layer, seconds in enumerate(workload.forward.tolist()):
            now = max(now, arrived.get(layer, 0.0)) + seconds
        waiting = [(now + t.ready, t.layer, i, t.nbytes) for i, t in tensors]
        while waiting:
            wire = max(wire, min(ready for ready, *_ in waiting))
            urgent = min((t for t in waiting if t[0] <= wire), key=lambda t: t[1:3])
            waiting.remove(urgent)
            wire += exchange(urgent[3])
            arrived[urgent[1]] = wire
        now += workload.backward_time
        ends.append(max(arrived.values()))
    return ends
