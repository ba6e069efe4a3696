"""Device memory of a training step, in five categories.

Bytes of activations that a rank keeps per sample and transformer layer until the backward pass, with s tokens, h
features, a heads and fp16 (Korthikanti et al. 2022, arXiv:2205.05198):

    s h (34 + 5 a s/h)             on one rank          s h (10 + 24/t + 5 a s/(h t))   tensor-parallel over t
    s h/t (34 + 5 a s/h)           sequence-parallel    without 5 a s/(h t)             "selective" or flash attention
    2 s h                          "full" (2 s h/t with sequence parallelism, where inputs are split by tokens)

All are computed from what the layers keep (:mod:`ddlsim.workload.activations`), which also covers other layers.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ddlsim.arguments import Bytes, Count, Index, NotNegative, Positive, checked, integer, one_of
from ddlsim.errors import ConfigError
from ddlsim.readable import size
from ddlsim.text_tables import aligned
from ddlsim.units import si
from ddlsim.workload.devices import Device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.optimizer_rules import OPTIMIZER_RULES, optimizer_nbytes
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES, GRADIENT_TYPES, LOW_PRECISIONS
from ddlsim.workload.roles import (
    ATTENTION,
    COLUMN,
    INNER,
    VOCABULARY,
    WHOLE,
    blocks,
    check_split,
    copies,
    kv_heads,
    rank_tensors,
    roles,
    saved_products,
    unit_starts,
    weight_units,
)
from ddlsim.workload.stacks import Stack, load_stack

if TYPE_CHECKING:
    from ddlsim.workload.compute import Workload
    from ddlsim.workload.stage import Stage


#: what is recomputed in the backward pass instead of being kept
RECOMPUTE = ("none", "selective", "dots-saveable", "operators", "full", "early-stop", "segments")


def held_params(model: Model, n_workers: int) -> int:
    """Return the parameters on the fullest device: all but the tables, and its share of these.

    Tables go, the largest first, to the device with the least so far (Graham 1969: at most 4/3 of the optimum).
    """
    held = [0] * n_workers
    tables = [n for layer in model.layers if layer.model_parallel for _, n in layer.tensors]
    for elements in sorted(tables, reverse=True):
        heapq.heapreplace(held, held[0] + elements)
    return model.n_params - sum(tables) + max(held)


def layer_nbytes(
    layer: Layer, precision: str, role: str = "whole", tensor: int = 1, *, sequence: bool = False, scores: bool = True
) -> float:
    """Return the bytes that a layer keeps per sample; without `scores`, attention matrices are excluded."""
    element = ELEMENT_NBYTES[precision] / FP32_NBYTES
    stored, fixed = layer.stored_nbytes, layer.fixed_nbytes
    if layer.scores and not scores:
        stored, fixed = stored - FP32_NBYTES * layer.scores * (2.0 if fixed > 0.0 else 1.0), 0.0
    if role == ATTENTION and (times := copies(layer, tensor)) > 1:  # keys and values are replicated
        context = layer.scores / (layer.heads * layer.out_shape[0])
        stored += (times - 1) * FP32_NBYTES * 2.0 * context * kv_heads(layer) * layer.head_size
    return (stored * element + fixed) / _n_shards(layer, role, tensor, sequence)


def _n_shards(layer: Layer, role: str, tensor: int, sequence: bool) -> int:
    """Return the number of ranks, 1 or `tensor`, over which the kept bytes of a layer are split."""
    split = role in (ATTENTION, COLUMN, INNER) or (role == VOCABULARY and layer.type != "embedding")
    return tensor if split or (sequence and len(layer.out_shape) == 2) else 1


def _kept_inputs(
    layers: Sequence[Layer], kinds: Sequence[str], kept: list[float], dtype: str, shard: tuple[int, bool], stack: Stack
) -> None:
    """Adjust the bytes that layers keep to how a stack keeps the inputs of matrix products.

    ``keeps_low_precision_inputs``: in 8 bits, in addition to 16-bit copies that attention and ReLU keep.
    ``keeps_gathered``: as gathered from a tensor group with sequence parallelism, instead of gathering them again.
    """
    (tensor, sequence), element, inside = shard, ELEMENT_NBYTES[dtype], [layer.block > 0 for layer in layers]
    low = LOW_PRECISIONS[dtype].operand if stack.keeps_low_precision_inputs and dtype in LOW_PRECISIONS else element
    for i, layer in enumerate(layers):
        if layer.heads and inside[i] and low < element:  # its last product keeps a copy of the mixed values
            kept[i] += low * layer.out_shape[0] * layer.heads * layer.head_size / tensor
        if i + 1 == len(layers) or not (layers[i + 1].heads or layers[i + 1].type in ("dense", "swiglu", "tied_dense")):
            continue
        n_out, n_shards = math.prod(layer.out_shape), _n_shards(layer, kinds[i], tensor, sequence)
        operand = low if inside[i] and inside[i + 1] else element
        kept[i] += (operand if layer.type == "relu" and low < element else operand - element) * n_out / n_shards
        if stack.keeps_gathered and sequence and kinds[i] == WHOLE:
            kept[i] += operand * n_out * (1.0 - 1.0 / tensor)


def kept_nbytes(
    layers: Sequence[Layer], precision: str, *, tensor: int = 1, sequence: bool = False, recompute: str = "none",
    flash: bool = False, stack: Stack | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Return the bytes kept per sample from its forward to its backward pass, and those of recomputed activations.

    The second number counts only once, regardless of the number of micro-batches in flight: it is the largest part that
    is recomputed at a time. "selective" recomputes the attention matrices of one layer at a time, "full" transformer
    layers from their inputs, and "segments" segments of layers (:func:`segments`).
    """
    kinds, again = roles(layers), 0.0
    nbytes, bare = (
        [
            layer_nbytes(layer, precision, role, tensor, sequence=sequence, scores=scores)
            for layer, role in zip(layers, kinds, strict=True)
        ]
        for scores in (not flash, False)
    )
    if recompute == "selective":
        again, nbytes = max(map(operator.sub, nbytes, bare), default=0.0), bare
    element = ELEMENT_NBYTES[precision]
    if stack is not None:
        _kept_inputs(layers, kinds, nbytes, precision, (tensor, sequence), stack)
    if recompute in ("operators", "dots-saveable"):
        unread = stack is not None and stack.keeps_unused_outputs
        return _products_nbytes(layers, nbytes, element, tensor, recompute, sequence=sequence, unread=unread)
    stretches = blocks(layers) if recompute in ("full", "early-stop") else []
    last = recompute != "segments"  # a transformer layer's output is read by a normalisation or the next stage
    stretches = stretches if last else segments(layers, nbytes, element)
    kept = sum(nbytes)
    for first, end in stretches:
        stretch = sum(nbytes[first:end])
        checkpoint = element * math.prod(layers[end - 1].out_shape) if last or end < len(layers) else 0.0
        checkpoint /= tensor if sequence else 1
        kept += checkpoint - stretch
        again = max(again, stretch)
    return kept, again


def _products_nbytes(
    layers: Sequence[Layer], nbytes: Sequence[float], element: float, tensor: int, recompute: str, *, sequence: bool,
    unread: bool,
) -> tuple[float, float]:  # fmt: skip
    """Return the bytes kept per sample, and recomputed at a time, if products are kept (:func:`saved_products`).
    `unread`: a last product that only a sum reads is kept, too."""
    saved, again, kept = saved_products(layers, recompute), 0.0, sum(nbytes)
    by_tokens = tensor if sequence else 1
    for first, end in blocks(layers):
        inside = math.prod(layers[first].in_shape) / by_tokens
        last = max((i for i in range(first, end) if saved[i]), default=first)
        for i in range(first, end):
            layer = layers[i]
            if recompute == "operators":  # the output of attention itself
                inside += layer.out_shape[0] * layer.heads * layer.head_size / tensor
            for j, (width, is_kept) in enumerate(saved[i], start=1):
                sums = j == len(saved[i]) and (i == last or layer.heads > 0)  # over the tensor group
                if is_kept and (unread or layer.heads or not (sums and i == last)):
                    inside += layer.out_shape[0] * width / (by_tokens if sums else tensor)
        kept += element * inside - sum(nbytes[first:end])
        again = max(again, sum(nbytes[first:end]) - element * inside)
    return kept, again


def segments(layers: Sequence[Layer], nbytes: Sequence[float], element: float) -> list[tuple[int, int]]:
    """Return segments of whole units [first, end) that are recomputed one after the other from checkpoints.

    nbytes   bytes that each layer keeps
    element  bytes per number

    Chen et al. 2016 (arXiv:1604.06174), algorithm 3: a segment ends once it keeps a given number of bytes. Of the even
    divisors of the total, the one with the smallest sum of checkpoints and largest segment is chosen. For n equal
    layers, this makes about sqrt(n) segments.
    """
    ends = [*unit_starts(layers)[1:], len(layers)]
    before = [0.0, *accumulate(nbytes)]
    best: tuple[float, list[tuple[int, int]]] = (math.inf, [])
    for n in range(1, min(len(ends), 4 * math.isqrt(len(ends)) + 1) + 1):
        cuts = [0]
        for end in ends:
            if end == len(layers) or before[end] - before[cuts[-1]] >= before[-1] / n * (1.0 - 1e-12):
                cuts.append(end)
        stretches = list(pairwise(cuts))
        checkpoints = sum(element * math.prod(layers[end - 1].out_shape) for _, end in stretches[:-1])
        most = checkpoints + max(before[end] - before[first] for first, end in stretches)
        best = min(best, (most, stretches))
    return best[1]


Precision = Annotated[str, one_of(*ELEMENT_NBYTES)]


@checked
@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank in a step by category, in bytes.

    weights      parameters, in the precision of the computation
    gradients    one number per parameter
    optimizer    momentum, second moments, and fp32 master weights if weights have 2 bytes
    activations  kept from the forward to the backward pass, of all micro-batches in flight
    buffers      temporary: gathered weights of ZeRO stage 3, recomputed activations, workspaces
    reserved     not in the total: free blocks that PyTorch's allocator holds at the peak but cannot use, because they
                 are too small or belong to another stream

    Memory of the framework and the communication library is not included (0.5 to 2 GB on a GPU).
    """

    weights: NotNegative
    gradients: NotNegative
    optimizer: NotNegative
    activations: NotNegative
    buffers: NotNegative = 0.0
    reserved: NotNegative = 0.0

    @property
    def total(self) -> float:
        """Sum of all categories in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def __str__(self) -> str:
        return "\n".join(aligned(self._rows(), left=(0,)))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled, page

        return page("Memory of a rank", labelled(self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        names = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
        return [(name, size(getattr(self, name))) for name in names]


@checked
@dataclass(frozen=True)
class Holding:
    """How a rank stores the model that it trains. Names as in Megatron-LM, DeepSpeed and PyTorch.

    optimizer       "sgd", "momentum", "adam", "lars" or "lamb"
    gradient_dtype  data type of stored gradients; None: that of the weights. Megatron-LM stores fp32 gradients with
                    fp16 weights, which makes 18 bytes per parameter with Adam.
    zero            ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054): 1 shards the optimizer state over `shards`
                    ranks, 2 also the gradients, 3 also the weights (PyTorch's FSDP)
    shards          ranks over which ZeRO shards
    tensor          ranks over which a layer is split (Shoeybi et al. 2019, arXiv:1909.08053)
    sequence        sequence parallelism: what tensor parallelism does not split is split by tokens
    recompute       what is recomputed instead of kept: "none", "selective" (attention matrices), "dots-saveable"
                    (attention and the element-wise operations of transformer layers), "operators" (every second product
                    and the element-wise operations), "full" (transformer layers), "early-stop" (as "full", except for
                    their last product, which keeps nothing) or "segments" (about sqrt(n) segments of n layers)
    flash           attention does not write its matrices to memory (Dao et al. 2022, arXiv:2205.14135)
    stack           software, which determines the memory of the loss and how inputs of products and gathered weights
                    are stored; None: eager PyTorch's loss, and what the layers' formulas read
    offload         the optimizer state is in host memory (Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840)
    workspace       limit in bytes for the workspace of a convolution, which needs as much as a matrix product of all
                    its windows (im2col: Chellapilla, Puri and Simard 2006)
    gathered        for stage 3, the number of units (transformer layers) that are gathered at the same time. Weights
                    outside transformer layers stay gathered from the forward to the backward pass, as in FSDP's root
                    unit. 0: all stay gathered
    units           first layer of each unit; None: transformer layers, or blocks in other networks
    param_dtype     data type of gathered weights; None: that of the computation
    """

    optimizer: Annotated[str, one_of(*OPTIMIZER_RULES)] = "momentum"
    gradient_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] | None = None
    zero: Annotated[int, integer(0, 3)] = 0
    shards: Count = 1
    tensor: Count = 1
    sequence: bool = False
    recompute: Annotated[str, one_of(*RECOMPUTE)] = "none"
    flash: bool = False
    stack: Stack | None = None
    offload: bool = False
    workspace: Bytes | None = None
    gathered: Index = 2
    units: tuple[Index, ...] | None = None
    param_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] | None = None

    def __post_init__(self) -> None:
        if self.zero and self.shards == 1:
            raise ConfigError(f"zero = {self.zero}: has no effect with shards = 1; set shards=2 or more, or zero=0")
        if self.sequence and self.tensor == 1:
            raise ConfigError("sequence = True: requires tensor parallelism; set tensor=2 or more")


def holding_of(workload: Workload, **fields: Any) -> Holding:
    """Return how a rank stores the model of a workload, with the fields that its strategy sets.

    The optimizer, the attention kernel, the stack and the dtype of gradients are the workload's.
    """
    return Holding(
        optimizer=workload.rule or "momentum",
        flash=workload.flash,
        stack=workload.known_stack,
        gradient_dtype=workload.main_gradients,
        **fields,
    )


@checked
def memory_of(
    model: Model, batch_size: Index, precision: Precision = "fp32", holding: Holding = Holding(), *,
    batches: Positive = 1.0, n_workers: Count = 1,
) -> Memory:  # fmt: skip
    """Return the memory of a rank that trains `model` (or a part of one) with micro-batches of `batch_size` samples.

    batches    micro-batches whose activations are kept at the same time. With 1F1B and p stages, the first stage keeps
               p; with v chunks per stage, p (1 + (p - 1)/(p v)) (Narayanan et al. 2021, arXiv:2104.04473).
    n_workers  workers over which embedding tables are distributed if their gradients are not exchanged
               (:mod:`ddlsim.workload.table_placement`); the result is for the worker with the most memory

    Raises ConfigError for heads or features that cannot be divided among tensor-parallel ranks.
    """
    check_split(model, holding.tensor)
    element, layers = ELEMENT_NBYTES[precision], model.layers
    kinds = model.roles
    tables = sum(layer.n_params for layer in layers if layer.model_parallel)
    tables_here = held_params(model, n_workers) - (model.n_params - tables)
    sizes = [
        0.0 if layer.model_parallel else sum(n for _, n in rank_tensors(layer, role, holding.tensor))
        for layer, role in zip(layers, kinds, strict=True)
    ]
    if not any(layer.type == "embedding" for layer in layers):
        for i, layer in enumerate(layers):
            if layer.type == "tied_dense":  # a copy, because the tied embedding is on another stage
                sizes[i] += layer.in_shape[-1] * layer.out_shape[-1] / holding.tensor
    shared = sum(sizes)
    gradient = element if holding.gradient_dtype is None else ELEMENT_NBYTES[holding.gradient_dtype]
    state = 0.0 if holding.offload else optimizer_nbytes(holding.optimizer, element)

    def share(stage: int) -> float:
        return tables_here + shared / (holding.shards if holding.zero >= stage else 1)

    tensor, sequence, recompute, stack = holding.tensor, holding.sequence, holding.recompute, holding.stack
    kept, again = kept_nbytes(
        layers, precision, tensor=tensor, sequence=sequence, recompute=recompute, flash=holding.flash, stack=stack
    )
    logits = max((layer.fixed_nbytes for layer in layers if layer.type in ("dense", "tied_dense")), default=0.0)
    logits *= batch_size / FP32_NBYTES / tensor
    software, gathered = stack or load_stack("pytorch"), 0.0
    loss = software.loss_nbytes if tensor == 1 else software.sharded_loss_nbytes
    reserved = 0.0 if stack is None or element == FP32_NBYTES else stack.loss_reserved * logits
    if holding.zero == 3 and holding.shards > 1:
        gathered, at_once = _gathered_nbytes(layers, sizes, precision, holding)
        reserved += at_once if stack is not None and stack.copies_gathered_weights else 0.0
    held = element * share(3), gradient * share(2), state * share(1)
    rest = gathered + max(again * batch_size, (loss - FP32_NBYTES) * logits)
    rest += _workspace(layers, batch_size, element, holding.workspace)
    return Memory(*held, batches * batch_size * kept, rest, reserved)


def _gathered_nbytes(
    layers: Sequence[Layer], sizes: Sequence[float], precision: str, holding: Holding
) -> tuple[float, float]:
    """Return the bytes of weights that stay gathered, and the largest bytes gathered at a time: of layers outside
    transformer layers, and of two transformer layers.

    sizes  number of parameters of each layer
    """
    ranges = blocks(layers) if holding.units is None else []
    firsts = [*(weight_units(layers) if holding.units is None else holding.units), len(layers)]
    element, stack = ELEMENT_NBYTES[holding.param_dtype or precision], holding.stack
    nbytes = [element * size for size in sizes]
    if stack is not None and holding.param_dtype is None:
        nbytes = [stack.gathered_nbytes([layer], precision) * n for layer, n in zip(layers, sizes, strict=True)]
    inside = [sum(nbytes[first:end]) for first, end in ranges]
    every = [sum(nbytes[first:end]) for first, end in pairwise(firsts)]
    root = sum(inside) and sum(nbytes) - sum(inside)
    units, total = inside or every, root + sum(inside or every)
    held, at_once = (min(total, root + n * max(units, default=0.0)) for n in (holding.gathered, holding.gathered or 2))
    return held if holding.gathered else total, at_once


def _workspace(layers: Sequence[Layer], batch_size: int, element: float, limit: float | str | None) -> float:
    """Return the largest workspace of a convolution in bytes: its windows (im2col), up to the limit."""
    if limit is None:
        return 0.0
    windows = (
        math.prod(layer.out_shape[1:]) * next(n for name, n in layer.tensors if name == "weight") / layer.out_shape[0]
        for layer in layers
        if layer.type == "conv"
    )
    return min(si(limit, "bytes"), element * batch_size * max(windows, default=0.0))


def held_nbytes(stage: Stage, n_workers: int = 1, activations: float | None = None) -> tuple[float, float]:
    """Return the bytes that one of `n_workers` holds of parameters, gradients, optimizer and buffers, and of
    activations, which a plan may know better."""
    one = stage_memory(stage, n_workers)
    fixed = one.weights + one.gradients + one.optimizer + one.buffers
    return fixed, one.activations if activations is None else activations


def stage_memory(stage: Stage, n_workers: int = 1) -> Memory:
    """Return the memory of one of `n_workers` with this stage: as its strategy states it, or that of its workload."""
    workload = stage.workload
    if stage.memory is not None:
        return stage.memory
    one = memory_of(
        workload.model,
        workload.batch_size,
        workload.precision,
        holding_of(workload),
        batches=stage.batches,
        n_workers=n_workers,
    )
    return dataclasses.replace(one, optimizer=stage.state * one.optimizer)


class Fullest(NamedTuple):
    """The worker that uses the largest share of its device's memory: bytes needed, available, and reserved by the
    allocator beyond those needed."""

    needed: float
    capacity: float
    reserved: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.needed <= self.capacity


def check_memory(stage: Stage, device: Device, n_workers: int = 1, activations: float | None = None) -> str | None:
    """Return None if one of `n_workers` fits into `device`'s memory, else a line with the numbers and the largest batch
    size that fits.

    activations  maximum bytes of its activations, if a plan determines them
    """
    workload = stage.workload
    model, precision = workload.model, workload.precision
    fixed, varying = held_nbytes(stage, n_workers, activations)
    needed = fixed + varying
    if needed <= device.memory_nbytes:
        return None
    per_sample = varying / workload.batch_size
    largest = math.floor((device.memory_nbytes - fixed) / per_sample) if per_sample > 0.0 else 0
    remedy = f"the largest batch that fits is {largest}" if largest > 0 else "no batch fits (see ddlsim fits)"
    need, have = needed / 1e9, device.memory_nbytes / 1e9
    apart = held_params(model, n_workers) < model.n_params
    shared = f" with its embedding tables distributed over {n_workers} workers" if apart else ""
    several = f"{stage.batches} x " if stage.batches > 1 else ""
    return (
        f"{model.name} with batch size {several}{workload.batch_size} in {precision} needs about "
        f"{need:,.1f} GB{shared}, but {device.name} has {have:.1f} GB; {remedy}"
    )
