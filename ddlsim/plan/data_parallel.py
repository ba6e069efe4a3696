"""Data parallelism as a plan: every rank computes all layers on its own batch, buckets of gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddlsim.errors import ConfigError
from ddlsim.plan.gathered_ahead import gathered_as
from ddlsim.plan.norms import neighbours, with_partial_norms
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.queues import Queue
from ddlsim.plan.repeated import each_rank, parts_of, repeated
from ddlsim.plan.templates import in_order, in_shards, pipelined
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload


def data_parallel(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    steps: int = 1,
    accumulation: int = 1,
    queue: Queue | None = None,
    layer_by_layer: bool = False,
    no_sync: bool = True,
) -> Plan:
    """Return the plan of synchronous data-parallel training, step by step and rank by rank.

    workloads       of each rank; or one for all, with ``n_ranks``
    buckets         which gradients travel together (:mod:`ddlsim.workload.buckets`): ``one_bucket`` after the backward
                    pass, ``per_layer`` (Zhang et al. 2017, Poseidon), ``ddp_buckets`` (Li et al. 2020, PyTorch DDP)
    steps           training steps
    accumulation    micro-batches of each rank in a step; gradients travel during the backward pass of the last
    queue           what decides which ready bucket travels next: ``UrgentQueue`` or ``FusedQueue``; None: they travel
                    in order
    layer_by_layer  each layer is updated when its own gradients have arrived, and the next forward pass goes on as far
                    as layers have been updated (Peng et al. 2019, ByteScheduler); buckets must be of one layer each.
                    Otherwise all layers are updated when all have arrived.
    no_sync         False: gradients are summed after every micro-batch, in order

    A rank has the lanes "compute" and "stream". A bucket enters the stream when the backward pass has gone through its
    layers. In order, its all-reduce begins on a rank when the one before has ended there.
    Layers hold their activations from the forward pass to their backward pass (what each rank holds all the time,
    parameters, gradients and momentum, is not in the plan).

    Raises ConfigError for workloads of different models, and for buckets that leave gradients out or come too early.
    """
    each = each_rank(workloads, n_ranks, steps, accumulation)
    chosen = tuple(buckets(each[0]))
    parts = parts_of(each[0], chosen)
    n_layers = len(each[0].forward)
    if layer_by_layer:
        _check_layer_by_layer(parts, queue)
        templates = [pipelined(chosen, parts, n_layers, accumulation, first=first) for first in (True, False)]
    else:
        templates = [in_order(chosen, n_layers, accumulation, queued=queue is not None, no_sync=no_sync)] * 2
    return repeated(templates, each, chosen, steps, accumulation, queue)


def sharded(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    steps: int = 1,
    accumulation: int = 1,
    overlap: bool = True,
    no_sync: bool = True,
    param_dtype: str | None = None,
) -> Plan:
    """Return the plan of data-parallel training in which each rank updates its share of every bucket (ZeRO stage 1,
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).

    The schedule is that of Megatron-LM's distributed optimizer with ``overlap_grad_reduce`` and
    ``overlap_param_gather`` (NVIDIA, Megatron Core, ``DistributedDataParallel``): buckets are reduce-scattered beside
    the (last) backward pass; when all have arrived, a rank updates its shards; the updated parameters are all-gathered
    bucket by bucket, those near the input first, and the next forward pass goes on as far as they have arrived. Without
    `overlap` it starts when all have. Without `no_sync` buckets are reduce-scattered beside the backward pass of every
    micro-batch, and shares added up (stage 2, which has no room for whole gradients).

    Weights are gathered as numbers of the type `param_dtype`, None: in which they are computed with (DeepSpeed and
    Megatron gather the 16-bit weights that they have made of fp32 ones), whatever the gradients are summed as.

    The other arguments are those of :func:`data_parallel`, and so are lanes and errors. An update takes 1 / n_ranks of
    the optimizer's time; where its rule needs norms of layers (LARS, LAMB), ranks put those of their shares together
    first.
    """
    each = each_rank(workloads, n_ranks, steps, accumulation)
    chosen = tuple(buckets(each[0]))
    firsts = [part.first if overlap else 0 for part in parts_of(each[0], chosen)]
    n_layers = len(each[0].forward)
    templates = [
        in_shards(chosen, firsts, n_layers, accumulation, first=first, no_sync=no_sync) for first in (True, False)
    ]
    plan = gathered_as(repeated(templates, each, chosen, steps, accumulation), each[0], param_dtype)
    return with_partial_norms(plan, each, neighbours(each, len(each)))


def _check_layer_by_layer(parts: Sequence[Part], queue: Queue | None) -> None:
    for i, part in enumerate(parts):
        if part.end > part.first + 1:
            raise ConfigError(
                f"data_parallel: layer_by_layer: bucket {i} is of layers {part.first} to {part.end - 1}; use buckets "
                "of one layer each, such as per_layer"
            )
    if queue is None:
        raise ConfigError("data_parallel: layer_by_layer needs a queue, such as UrgentQueue(in_flight=4)")
