"""Gradient buckets: which parameter tensors are sent together, and when they are ready.

The backward pass goes through the layers from last to first; a bucket is ready when the gradients of all its
tensors are. All functions return the buckets in the order in which they become ready and cover every exchanged gradient
byte once. They use only the flat tensors of a :class:`~ddlsim.workload.compute.Workload`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import FP32_NBYTES
from ddlsim.workload.roles import weight_units


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of a gradient that are sent together.

    nbytes       size of the bucket in bytes
    ready_layer  index of the layer whose backward pass computes the last gradient in the bucket
    first_layer  index of the bucket's layer that is closest to the input. The next forward pass cannot compute that
                 layer before the bucket has arrived
    priority     sending priority: buckets with lower numbers are sent first

    If buckets contain only whole tensors, ``ready_layer == first_layer == priority``, because the backward pass reaches
    the layer closest to the input last.
    """

    nbytes: float
    ready_layer: int
    first_layer: int
    priority: int


def rounded(nbytes: float) -> int:
    """Return the number of float32 elements in a gradient of `nbytes`."""
    return round(nbytes / FP32_NBYTES)


def backwards(buckets: Sequence[Bucket]) -> list[slice]:
    """Return the slices of the flat gradient that buckets hold; buckets begin with its last tensor."""
    ends = [rounded(nbytes) for nbytes in np.cumsum([0.0, *(bucket.nbytes for bucket in buckets)]).tolist()]
    return [slice(ends[-1] - end, ends[-1] - start) for start, end in pairwise(ends)]


def _bucket(nbytes: float, layer: int) -> Bucket:
    return Bucket(nbytes, ready_layer=layer, first_layer=layer, priority=layer)


def _backward_tensors(workload: Workload) -> list[tuple[int, float]]:
    """Return the (layer, bytes) of every tensor in reverse order of declaration."""
    layers, nbytes = workload.tensor_layer.tolist(), workload.tensor_nbytes.tolist()
    return list(zip(reversed(layers), reversed(nbytes), strict=True))


def per_layer(workload: Workload) -> tuple[Bucket, ...]:
    """Return a bucket per layer with parameters (wait-free backpropagation, Zhang et al. 2017, Poseidon)."""
    nbytes = workload.grad_nbytes.tolist()
    return tuple(_bucket(nbytes[i], i) for i in range(len(nbytes) - 1, -1, -1) if nbytes[i] > 0.0)


def per_unit(workload: Workload) -> tuple[Bucket, ...]:
    """Return a bucket per unit of FSDP: transformer layers, and the layers before and after them."""
    firsts = [*weight_units(workload.model.layers), len(workload.grad_nbytes)]
    units = [(first, float(workload.grad_nbytes[first:end].sum())) for first, end in pairwise(firsts)]
    return tuple(_bucket(nbytes, first) for first, nbytes in reversed(units) if nbytes > 0.0)


def one_bucket(workload: Workload) -> tuple[Bucket, ...]:
    """Return all gradients as one bucket: nothing is sent before the backward pass ends."""
    return (_bucket(workload.gradient_nbytes, int(workload.tensor_layer.min())),)


def ddp_buckets(workload: Workload, cap_nbytes: float = 25 * 2**20, first_nbytes: float = 2**20) -> tuple[Bucket, ...]:
    """Return PyTorch DistributedDataParallel's buckets (Li et al. 2020, VLDB 13(12), section 3.2.3).

    Tensors join in the order in which their gradients become ready, which is the reverse of their
    declaration; a bucket is closed as soon as its size reaches its cap (so it may exceed it by most of a
    tensor), the first by `first_nbytes`, the others by `cap_nbytes`
    (``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp).
    """
    if not (cap_nbytes > 0.0 and first_nbytes > 0.0):
        raise ConfigError(f"cap_nbytes = {cap_nbytes!r}, first_nbytes = {first_nbytes!r}: both must be above 0")
    buckets: list[Bucket] = []
    size, first = 0.0, 0
    for layer, nbytes in _backward_tensors(workload):
        size += nbytes
        first = layer
        if size >= (cap_nbytes if buckets else first_nbytes):
            buckets.append(_bucket(size, first))
            size = 0.0
    if size > 0.0:
        buckets.append(_bucket(size, first))
    return tuple(buckets)


def megatron_buckets(workload: Workload, replicas: int) -> tuple[Bucket, ...]:
    """Return Megatron Core's buckets: like DDP's, but closed at 40 million parameters, or at a million per replica if
    that is more, because larger rings need larger buckets (megatron/core/distributed/distributed_data_parallel.py).
    """
    element = workload.gradient_nbytes / max(1.0, workload.model.gradient_nbytes(1))
    cap = element * max(40e6, 1e6 * replicas)
    return ddp_buckets(workload, cap_nbytes=cap, first_nbytes=cap)


def partitioned(workload: Workload, partition_nbytes: float) -> tuple[Bucket, ...]:
    """Return the tensors cut into equal slices of at most `partition_nbytes`, with the layer as priority.

    Small slices let an urgent tensor (near the input) overtake a large one that is already being sent:
    Jayarajan et al. 2019, P3, arXiv:1905.03960; Peng et al. 2019, ByteScheduler, section 4.
    """
    if not partition_nbytes > 0.0:
        raise ConfigError(f"partition_nbytes = {partition_nbytes!r}: must be above 0")
    slices: list[Bucket] = []
    for layer, nbytes in _backward_tensors(workload):
        n_slices = max(1, math.ceil(nbytes / partition_nbytes))
        slices += [_bucket(nbytes / n_slices, layer)] * n_slices
    return tuple(slices)
