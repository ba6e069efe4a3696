"""The role of each layer when a model is split over t tensor-parallel ranks, as in Megatron-LM.

Shoeybi et al. 2019, arXiv:1909.08053, section 3: of two consecutive dense layers, the first is split by columns and the
second by rows, so that no exchange is needed between them. Attention is split by heads, embedding and output layer by
the vocabulary. All other layers are replicated. If there are fewer heads of keys and values than ranks, each of them is
on all ranks whose queries use it (AWS NeuronX Distributed, GQAQKVColumnParallelLinear; vLLM's Llama). Summing the
gradients of these copies, some megabytes per step, takes no time in the model.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from ddlsim.errors import ConfigError
from ddlsim.workload.model import Layer, Model

WHOLE, COLUMN, INNER, ROW, ATTENTION, VOCABULARY = "whole", "column", "inner", "row", "attention", "vocabulary"
#: layers that mix the features of a token and therefore need all of them
_MIXING = ("attention", "cross_attention", "layer_norm", "rms_norm", "add", "embedding", "swiglu", "tied_dense", "take")
_BY_VOCABULARY = ("embedding", "tied_embedding", "tied_dense")


def roles(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the role of each layer."""
    kinds = [WHOLE] * len(layers)
    for i, layer in enumerate(layers):
        of_tokens = len(layer.out_shape) == 2
        if layer.heads:
            kinds[i] = ATTENTION
        elif layer.type in _BY_VOCABULARY or (layer.type == "dense" and of_tokens and layer.fixed_nbytes > 0.0):
            kinds[i] = VOCABULARY
        elif layer.type in ("dense", "swiglu") and kinds[i] == WHOLE and of_tokens:
            second = _second(layers, i)
            if second is not None:
                kinds[i : second + 1] = [COLUMN, *[INNER] * (second - i - 1), ROW]
    return tuple(kinds)


def unit_starts(layers: Sequence[Layer]) -> list[int]:
    """Return the first layer of each unit; between two units, only one tensor is alive."""
    return [i for i in range(len(layers)) if i == 0 or layers[i].unit != layers[i - 1].unit]


def _second(layers: Sequence[Layer], first: int) -> int | None:
    """Return the next dense layer of the same unit if only element-wise layers are in between."""
    for i in range(first + 1, len(layers)):
        if layers[i].unit != layers[first].unit or layers[i].type in _MIXING:
            return None
        if layers[i].type == "dense":
            return i
    return None


def blocks(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return [first, end) of each transformer layer, or of the part of it that `layers` contain."""
    numbers = [0, *(layer.block for layer in layers), 0]
    cuts = [i for i, (before, number) in enumerate(pairwise(numbers)) if before != number]
    return [(first, end) for first, end in pairwise(cuts) if layers[first].block > 0]


def block_numbers(units: Sequence[int], with_heads: set[int], types: Sequence[str]) -> list[int]:
    """Return the number of the transformer layer of each layer of a whole model.

    One extends from an attention's unit to the next one's, the last one over as many units as the one before it; the
    layers after it (normalisation, output layer) are in none. Cross-attention belongs to the layer of the attention
    before it.

    units       unit of each layer
    with_heads  units with attention, cross-attention excluded
    types       type of each layer
    """
    starts = sorted(with_heads)
    if not starts:
        return [0] * len(units)
    last_sum = max((unit for unit, kind in zip(units, types, strict=True) if kind == "add"), default=-1)
    width = starts[-1] - starts[-2] if len(starts) > 1 else 1 + max(last_sum - starts[0], 0)
    return [bisect_right(starts, unit) or -1 if unit < starts[-1] + width else -1 for unit in units]


def weight_units(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Return the first layer of each unit whose weights are gathered together: transformer layers, and the layers
    before and after them; in other networks, one unit per block."""
    ranges = blocks(layers)
    begins = [first for first, _ in ranges] + [end for _, end in ranges[-1:]]
    if not any(layer.block for layer in layers):
        begins = [i for i in range(1, len(layers)) if layers[i].unit != layers[i - 1].unit]
    units = [0]
    for begin, end in pairwise((*(begin for begin in begins if begin), len(layers))):
        before, inside = layers[units[-1] : begin], layers[begin:end]
        if all(any(layer.tensors for layer in some) for some in (before, inside)):  # both have weights
            units.append(begin)
    return tuple(units)


def can_split(model: Model, tensor: int) -> bool:
    """Return whether `tensor` ranks can divide the layers of a model with attention evenly."""
    return any(layer.heads for layer in model.layers) and not split_error(model, tensor)


def check_split(model: Model, tensor: int) -> None:
    """Raise ConfigError for heads, or features between two dense layers, that `tensor` ranks cannot divide evenly.

    Mixtures of experts cannot be split, which is also an error.
    """
    if wrong := split_error(model, tensor):
        fit = [t for t in range(1, max(layer.heads or 1 for layer in model.layers) + 1) if not split_error(model, t)]
        near = [*[t for t in fit if t < tensor][-1:], *[t for t in fit if t > tensor][:1]]
        raise ConfigError(f"{wrong}; use tensor={' or '.join(map(str, near))}")


def split_error(model: Model, tensor: int) -> str:
    """Return why `tensor` ranks cannot split a model; empty if they can."""
    for layer, role in zip(model.layers, model.roles, strict=True):
        if tensor > 1 and layer.type == "mixture_of_experts":
            layers = f"layers of type {layer.type!r}, such as {layer.name} of {model.name},"
            return f"tensor = {tensor}: {layers} cannot be split over tensor-parallel ranks"
        n, what = (layer.heads, "heads") if role == ATTENTION else (layer.out_shape[-1], "features")
        if role in (ATTENTION, COLUMN) and n % tensor:
            return f"tensor = {tensor}: does not divide the {n} {what} of {layer.name} of {model.name}"
        kv = kv_heads(layer) if role == ATTENTION else tensor
        if kv % tensor and tensor % kv:
            heads = f"the number of key and value heads, {kv}, of {layer.name} of {model.name}"
            return f"tensor = {tensor}: neither divides nor is a multiple of {heads}"
    return ""


def kv_heads(layer: Layer) -> int:
    """Return the number of heads of an attention layer's keys and values."""
    sizes = dict(layer.tensors)
    full = sizes["out.weight"]  # d x d, of all heads
    key = sizes["key.weight"] if "key.weight" in sizes else (sizes["qkv.weight"] - full) / 2
    return round(layer.heads * key / full)


def copies(layer: Layer, tensor: int) -> int:
    """Return the number of ranks, out of `tensor`, with a copy of each head of keys and values."""
    return max(1, tensor // kv_heads(layer))


def rank_tensors(layer: Layer, role: str, tensor: int) -> tuple[tuple[str, float], ...]:
    """Return the average (name, elements) of a layer's parameter tensors on one of `tensor` ranks."""
    times = copies(layer, tensor) if role == ATTENTION else 1
    if times == 1:
        return _shared_out(layer.tensors, role, tensor)
    kept = {"key": float(times), "value": float(times)}
    kv = 2.0 * kv_heads(layer) / layer.heads  # of keys and values together, in query heads
    kept["qkv"] = (1.0 + times * kv) / (1.0 + kv)
    return tuple(
        (name, n * kept.get(name.partition(".")[0], 1.0) / tensor if _is_split(role, name) else float(n))
        for name, n in layer.tensors
    )


@functools.lru_cache(maxsize=4096)  # planners query the same few kinds of layers millions of times
def _shared_out(tensors: tuple[tuple[str, int], ...], role: str, tensor: int) -> tuple[tuple[str, float], ...]:
    return tuple((name, n / tensor if _is_split(role, name) else float(n)) for name, n in tensors)


def _is_split(role: str, name: str) -> bool:
    if role == ATTENTION:  # scales of normalised queries and keys are small and replicated
        return name != "out.bias" and not name.endswith(".scale")
    if role == ROW:
        return name != "bias"
    return role == COLUMN or (role == VOCABULARY and name not in ("positions", "types"))


def saved_products(layers: Sequence[Layer], recompute: str) -> list[list[tuple[float, bool]]]:
    """Return the output width of each layer's products, and whether it is kept, for a kind of recomputation.

    With "dots-saveable", all products with weights are kept (jax.checkpoint_policies.dots_with_no_batch_dims_saveable).
    With "operators", the first, third, ... product of every transformer layer is kept and the others are recomputed:
    torchtitan's selective activation checkpointing per operator (torchtitan/models/llama3/infra/parallelize.py, "every
    second mm").
    """
    every = 2 if recompute == "operators" else 1
    kept: list[list[tuple[float, bool]]] = [[] for _ in layers]
    for first, end in blocks(layers):
        n = 0
        for i in range(first, end):
            layer = layers[i]
            if not layer.heads and layer.type not in ("dense", "swiglu"):
                continue
            for name, size in layer.tensors:
                if name.endswith("weight"):
                    width = layer.heads * layer.head_size if name.startswith("out.") else layer.in_shape[-1]
                    kept[i].append((size / width, n % every == 0))
                    n += 1
    return kept
