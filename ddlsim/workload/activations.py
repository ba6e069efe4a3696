"""The bytes of activations that a rank keeps of one sample until the backward pass, split and recomputed or not.

Transformers by Korthikanti et al. 2022 (arXiv:2205.05198), s tokens, h features, a heads, fp16, for a layer:

    s h (34 + 5 a s/h)             on one rank          s h (10 + 24/t + 5 a s/(h t))   tensor-parallel over t
    s h/t (34 + 5 a s/h)           sequence-parallel    without 5 a s/(h t)             "selective" or flash attention
    2 s h                          "full"

All follow from what the layers keep (:mod:`ddlsim.workload.kept`), for layers of other makes as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ddlsim.workload.model import Layer
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES
from ddlsim.workload.roles import ATTENTION, COLUMN, INNER, VOCABULARY, blocks, copies, kv_heads, roles

#: what is computed again in the backward pass instead of being kept
RECOMPUTE = ("none", "selective", "full", "segments")


def layer_nbytes(
    layer: Layer, precision: str, role: str = "whole", tensor: int = 1, *, sequence: bool = False, scores: bool = True
) -> float:
    """Return the bytes that a layer keeps of a sample; without `scores` nothing of the size of attention's matrix."""
    element = ELEMENT_NBYTES[precision] / FP32_NBYTES
    stored, fixed = layer.stored_nbytes, layer.fixed_nbytes
    if layer.scores and not scores:
        stored, fixed = stored - FP32_NBYTES * layer.scores * (2.0 if fixed > 0.0 else 1.0), 0.0
    if role == ATTENTION and (times := copies(layer, tensor)) > 1:  # keys and values are there so many times
        context = layer.scores / (layer.heads * layer.out_shape[0])
        stored += (times - 1) * FP32_NBYTES * 2.0 * context * kv_heads(layer) * layer.out_shape[1] / layer.heads
    split = role in (ATTENTION, COLUMN, INNER) or (role == VOCABULARY and layer.type != "embedding")
    return (stored * element + fixed) / (tensor if split or (sequence and len(layer.out_shape) == 2) else 1)


def kept_nbytes(
    layers: Sequence[Layer], precision: str, *, tensor: int = 1, sequence: bool = False, recompute: str = "none",
    flash: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Return the bytes kept of a sample from its forward to its backward pass, and those of what is computed again.

    The second number is there at one time only, whatever the micro-batches under way: the largest part that is
    computed again. "selective" leaves out the attention matrices, whose computing again needs no room beside them (as
    the paper has it); "full" recomputes transformer layers from their inputs; "segments", and "full" of networks
    without attention, stretches of layers (:func:`segments`).
    """
    scores = not flash and recompute != "selective"
    nbytes = [
        layer_nbytes(layer, precision, role, tensor, sequence=sequence, scores=scores)
        for layer, role in zip(layers, roles(layers), strict=True)
    ]
    element = ELEMENT_NBYTES[precision]
    stretches = blocks(layers) if recompute == "full" else []
    last = True  # what a transformer layer makes goes into a normalisation or to the next stage
    if recompute == "segments" or (recompute == "full" and not stretches):
        stretches, last = segments(layers, nbytes, element), False
    if not stretches:
        return sum(nbytes), 0.0
    kept, again = sum(nbytes), 0.0
    for first, end in stretches:
        stretch = sum(nbytes[first:end])
        checkpoint = element * math.prod(layers[end - 1].out_shape) if last or end < len(layers) else 0.0
        kept += checkpoint - stretch
        again = max(again, stretch)
    return kept, again


def segments(layers: Sequence[Layer], nbytes: Sequence[float], element: float) -> list[tuple[int, int]]:
    """Return stretches of whole units [first, end) that are computed again, one after the other, from checkpoints.

    nbytes   that each layer keeps
    element  bytes of a number

    Chen et al. 2016 (arXiv:1604.06174), algorithm 3: a stretch ends once it has kept a given number of bytes; of the
    numbers that divide the whole evenly the one is taken with the fewest bytes of checkpoints and largest stretch
    together: for n equal layers some sqrt(n) stretches.
    """
    ends = [i for i in range(1, len(layers)) if layers[i].unit != layers[i - 1].unit] + [len(layers)]
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
