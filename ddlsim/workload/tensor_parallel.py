"""Computation and communication of one of t tensor-parallel ranks, split as in Megatron-LM.

Shoeybi et al. 2019 (arXiv:1909.08053): attention by heads, the next two dense layers by columns and rows, embedding and
output layer by the vocabulary. The outputs of attention and of the second dense layer are partial sums, so there are
two all-reduces of b s h elements in a layer's forward pass and two in its backward pass. With sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198) normalisations, dropout and sums are split by tokens, and each all-reduce
becomes a reduce-scatter and an all-gather, of the same bytes in total; gathered inputs are not kept, so the backward
pass gathers them again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory, holding_of, memory_of
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import ELEMENT_NBYTES, LOW_PRECISIONS
from ddlsim.workload.products import Floats, kernel_times, score_times
from ddlsim.workload.roles import (
    ATTENTION,
    COLUMN,
    INNER,
    ROW,
    VOCABULARY,
    blocks,
    check_split,
    rank_tensors,
    saved_products,
)
from ddlsim.workload.tensor_overlap import LayerOverlaps, OverlappedProduct, layer_overlaps

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
Pass = Literal["forward", "backward"]
_Add = Callable[..., None]


class Collective(NamedTuple):
    """An exchange of the t ranks that hold parts of the same layers.

    kind    "all_reduce", "all_gather" or "reduce_scatter"
    nbytes  size of the complete tensor, which is reduced or gathered
    layer   layer after whose time in the pass it occurs (an all-gather of sequence parallelism: before)
    phase   "forward" or "backward"; recomputation belongs to the backward pass
    beside  the product computed at the same time, in chunks; None: no overlap
    """

    kind: str
    nbytes: float
    layer: int
    phase: Pass
    beside: OverlappedProduct | None = None


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one of `tensor` ranks in a micro-batch.

    workload     its time per layer, forward and backward (including recomputation), and the gradients of its part of
                 the parameters, which data-parallel replicas exchange. Its ``model`` is the complete one
    collectives  exchanges of the ranks, in the order of the passes
    """

    workload: Workload
    tensor: int
    sequence: bool
    recompute: str
    collectives: tuple[Collective, ...]

    @functools.cached_property
    def memory(self) -> Memory:
        """Memory of the rank, for one micro-batch in flight."""
        work = self.workload
        holding = holding_of(work, tensor=self.tensor, sequence=self.sequence, recompute=self.recompute)
        return memory_of(work.model, work.batch_size, work.precision, holding)

    def exchanged(self, phase: Pass) -> float:
        """Return the bytes that a rank sends per pass in rings: 2 (t - 1)/t of an all-reduce, else (t - 1)/t."""
        share = (self.tensor - 1) / self.tensor
        return sum(
            (2.0 if collective.kind == ALL_REDUCE else 1.0) * share * collective.nbytes
            for collective in self.collectives
            if collective.phase == phase
        )


@checked
def tensor_parallel(
    workload: Workload,
    tensor: Count,
    *,
    sequence: bool = False,
    recompute: Annotated[str, one_of("none", "selective", "dots-saveable", "operators", "full", "early-stop")] = "none",
    tp_comm_overlap: bool = False,
) -> Shard:
    """Return the part of one of `tensor` ranks in a workload.

    sequence   sequence parallelism: parts that tensor parallelism does not split are split by tokens
    recompute  what the backward pass recomputes: attention's matrices ("selective"), these and all element-wise
               work of transformer layers ("dots-saveable"), this work and every second product ("operators"), these
               layers ("full", including their two all-reduces), or these without the last product and its sum, which
               nothing reads ("early-stop": PyTorch's checkpoint, use_reentrant=False)
    tp_comm_overlap
               exchanges of sequence parallelism overlap with matrix products, in chunks
               (:mod:`ddlsim.workload.tensor_overlap`)

    If the device's kernel rates are known (:class:`~ddlsim.workload.devices.Kernels`), layers take the time of their
    smaller kernels; times from other sources (set, measured or roofline) change by the same ratio. Otherwise, split
    layers take 1/t of their time, which is too little if small products leave a device idle. Waiting for samples and
    accumulating gradients are neither split nor recomputed. Raises ConfigError for a model without attention, and if
    `tensor` does not divide heads, features or the sequence.
    """
    if tp_comm_overlap and not sequence:
        raise ConfigError("tp_comm_overlap = True: requires sequence parallelism; set sequence=True")
    full, rank = _of_rank(workload, tensor, sequence)
    kinds = workload.model.roles
    split, apart = (ATTENTION, COLUMN, ROW) if tp_comm_overlap else (), LayerOverlaps()
    overlaps = [
        layer_overlaps(full, i, role, rank.forward, tensor) if role in split else apart for i, role in enumerate(kinds)
    ]
    if tp_comm_overlap and full.by_kernel and full.stack.tensor_overlap == "symmetric memory":
        rank = dataclasses.replace(rank, forward=rank.forward + _sums(full, kinds, tensor))
    backward = rank.backward + _again(full, rank.forward, recompute, tensor)
    waiting = np.zeros_like(rank.forward)
    waiting[0] = workload.wait
    rank = dataclasses.replace(rank, forward=rank.forward + waiting, backward=backward + rank.accumulation_time)
    exchanges = _collectives(full, kinds, sequence, recompute, overlaps) if tensor > 1 else ()
    return Shard(rank, tensor, sequence, recompute, exchanges)


@functools.lru_cache(maxsize=256)  # ways to recompute share it
def _of_rank(workload: Workload, tensor: int, sequence: bool) -> tuple[Workload, Workload]:
    """Return a workload without waiting and accumulation, and that of one of its `tensor` ranks without recomputation.
    Raises ConfigError if it cannot be split."""
    model = workload.model
    if tensor > 1 and not any(layer.heads for layer in model.layers):
        raise ConfigError(
            f"tensor = {tensor}: tensor parallelism requires attention layers, but {model.name} has none; set tensor=1"
        )
    if sequence and tensor == 1:
        raise ConfigError("sequence = True: requires tensor parallelism; set tensor=2 or more")
    check_split(model, tensor)
    tokens = next((layer.out_shape[0] for layer in model.layers if layer.heads), tensor)
    if sequence and tokens % tensor:
        raise ConfigError(f"sequence = True: {tokens} tokens cannot be divided evenly among tensor = {tensor} ranks")
    kinds, waiting = model.roles, np.zeros_like(workload.forward)
    waiting[0] = workload.wait
    workload = dataclasses.replace(
        workload, forward=workload.forward - waiting, backward=workload.backward - workload.accumulation_time
    )
    if workload.by_kernel:
        forward, backward = _kernel_seconds(workload, tensor, sequence)
    else:
        share = _shares(model, kinds, tensor, sequence)
        forward, backward = workload.forward * share, workload.backward * share
    tensors = [
        [] if layer.model_parallel else [n for _, n in rank_tensors(layer, role, tensor)]
        for layer, role in zip(model.layers, kinds, strict=True)
    ]
    flat = [n for sizes in tensors for n in sizes]
    element = workload.gradient_nbytes / max(1.0, model.gradient_nbytes(1))
    rank = dataclasses.replace(
        workload,
        forward=forward,
        backward=backward,
        optimizer=workload.optimizer * sum(flat) / max(1.0, model.gradient_nbytes(1)),
        grad_nbytes=element * np.array([sum(sizes) for sizes in tensors]),
        tensor_nbytes=element * np.array(flat),
        shard=(tensor, sequence),
    )
    return workload, rank


def _kernel_seconds(workload: Workload, tensor: int, sequence: bool) -> tuple[Floats, Floats]:
    """Return forward and backward times in s by kernel; times from other sources are scaled by the kernels' ratio."""
    split = kernel_times(workload.model, workload.timing(tensor, sequence=sequence))
    if workload.summed:
        return split[0] / workload.speed, split[1] / workload.speed
    full = kernel_times(workload.model, workload.timing())
    forward, backward = (
        seconds * np.divide(part, total, out=np.ones_like(part), where=total > 0.0)
        for seconds, part, total in zip((workload.forward, workload.backward), split, full, strict=True)
    )
    return forward, backward


def _shares(model: Model, kinds: tuple[str, ...], tensor: int, sequence: bool) -> Floats:
    """Return a rank's share of each layer's time if kernel rates are unknown."""
    split = [
        role in (ATTENTION, COLUMN, INNER, ROW)
        or (role == VOCABULARY and not layer.type.endswith("embedding"))
        or (sequence and len(layer.out_shape) == 2)
        for layer, role in zip(model.layers, kinds, strict=True)
    ]
    return np.where(split, 1.0 / tensor, 1.0)


def _again(workload: Workload, forward: Floats, recompute: str, tensor: int) -> Floats:
    """Return the time of each layer's recomputation in the backward pass, in s."""
    again = np.zeros_like(forward)
    if recompute in ("full", "early-stop"):
        for first, end in blocks(workload.model.layers):
            end = _last_product(workload.model.layers, first, end) if recompute == "early-stop" else end
            again[first:end] = forward[first:end]
    elif recompute == "selective":
        again = _scores_again(workload, forward, tensor)
    elif recompute in ("operators", "dots-saveable"):
        layers, core = workload.model.layers, _scores_again(workload, forward, tensor)
        kept = saved_products(layers, recompute)
        for first, end in blocks(layers):
            for i in range(first, end):
                total = sum(width for width, _ in kept[i])
                repeated = sum(width for width, saved in kept[i] if not saved)
                again[i] = (forward[i] - core[i]) * (repeated / total if total else 1.0)
                again[i] += core[i] * (recompute == "dots-saveable")
    return again


def _sums(workload: Workload, kinds: Sequence[str], tensor: int) -> Floats:
    """Return the time in which a rank sums the ranks' parts of each layer's output, which it has received, in s."""
    nbytes = (1.0 + 1.0 / tensor) * ELEMENT_NBYTES[workload.precision] * workload.batch_size
    outputs = [
        math.prod(layer.out_shape) if role in (ATTENTION, ROW) else 0
        for layer, role in zip(workload.model.layers, kinds, strict=True)
    ]
    seconds: Floats = nbytes * np.array(outputs) / workload.memory_bandwidth
    return seconds


def _last_product(layers: Sequence[Layer], first: int, end: int) -> int:
    """Return the last layer of a transformer layer that is not a sum."""
    return max(i for i in range(first, end) if layers[i].type != "add")


def _scores_again(workload: Workload, forward: Floats, tensor: int) -> Floats:
    """Return the time of each layer's attention matrices, their softmax and the mixing of values, in s."""
    model = workload.model
    if not workload.by_kernel:
        share = [_core_flops(layer) / layer.flops if layer.heads else 0.0 for layer in model.layers]
        again: Floats = forward * np.array(share)
        return again
    seconds = score_times(model, workload.timing(tensor)) / workload.speed
    if not workload.summed:
        full, _ = kernel_times(model, workload.timing())
        seconds *= workload.speed * np.divide(workload.forward, full, out=np.ones_like(full), where=full > 0.0)
    return seconds


def _core_flops(layer: Layer) -> float:
    """Return the FLOPs per sample of attention's matrices and of mixing the values: 4 s^2 h."""
    return 4.0 * layer.scores * layer.head_size


def _collectives(
    workload: Workload, kinds: tuple[str, ...], sequence: bool, recompute: str, overlaps: Sequence[LayerOverlaps]
) -> tuple[Collective, ...]:
    """Return the exchanges of the forward pass, layer by layer, then those of the backward pass in reverse order."""
    layers, element, batch = workload.model.layers, ELEMENT_NBYTES[workload.precision], workload.batch_size
    gathered = element
    if workload.stack.gathers_low_precision_inputs and workload.precision in LOW_PRECISIONS and workload.by_kernel:
        gathered = LOW_PRECISIONS[workload.precision].operand
    again, stops = np.zeros(len(layers), dtype=np.bool_), set[int]()
    for first, end in blocks(layers):
        again[first:end] = recompute in ("full", "early-stop")
        stops |= {_last_product(layers, first, end)} if recompute == "early-stop" else set()
    kept = workload.stack.keeps_gathered and workload.by_kernel
    forward: list[Collective] = []
    backward: list[Collective] = []

    def add(phase: Pass, kind: str, nbytes: float, layer: int, beside: OverlappedProduct | None = None) -> None:
        (forward if phase == "forward" else backward).append(Collective(kind, nbytes, layer, phase, beside))

    for i, (layer, role) in enumerate(zip(layers, kinds, strict=True)):
        entering = element * batch * math.prod(layer.in_shape)
        leaving = element * batch * math.prod(layer.out_shape)
        opens = role in (ATTENTION, COLUMN)  # every rank needs the complete input, and its gradient is a sum over ranks
        closes = role in (ATTENTION, ROW)  # the output is a sum over the ranks
        phases: tuple[Pass, ...] = ("forward", "backward") if again[i] and i not in stops else ("forward",)
        if opens and sequence:
            for phase in phases:
                add(phase, ALL_GATHER, gathered / element * entering, i, overlaps[i].enters)
            if not again[i] and not kept:
                add("backward", ALL_GATHER, gathered / element * entering, i, overlaps[i].again)
        for phase in phases if closes else ():
            add(phase, REDUCE_SCATTER if sequence else ALL_REDUCE, leaving, i, overlaps[i].leaves)
        if closes and sequence:
            add("backward", ALL_GATHER, gathered / element * leaving, i, overlaps[i].leaves_gradient)
        if opens:
            add("backward", REDUCE_SCATTER if sequence else ALL_REDUCE, entering, i, overlaps[i].enters_gradient)
        if role == VOCABULARY and layer.type.endswith("embedding"):
            add("forward", REDUCE_SCATTER if sequence else ALL_REDUCE, leaving, i)
            if sequence:
                add("backward", ALL_GATHER, leaving, i)
        elif role == VOCABULARY:
            _loss(add, layer, i, entering, batch, sequence)
    return (*forward, *sorted(backward, key=lambda collective: -collective.layer))


def _loss(add: _Add, layer: Layer, i: int, entering: float, batch: int, sequence: bool) -> None:
    """Add the output layer's exchanges: its input, the input's gradient, maximum and sum of exponentials in fp32."""
    if sequence:
        add("forward", ALL_GATHER, entering, i)
    for _ in range(2):
        add("forward", ALL_REDUCE, 4.0 * batch * layer.out_shape[0], i)
    add("backward", REDUCE_SCATTER if sequence else ALL_REDUCE, entering, i)
