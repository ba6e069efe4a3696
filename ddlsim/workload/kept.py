"""Which activations of a text model stay until the backward pass, byte by byte.

A layer of images or vectors that does not work in place keeps its output. Of text models it is known better what is
kept (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1): an output stays if the backward pass of a layer that
takes it reads it, as those of matrix products, normalisations and non-linearities do, and of sums and dropout do not.
Dropout keeps a mask of a byte an element; attention its queries, keys, values, mixed values and softmax outputs and, in
models with dropout, the mask and what it leaves of the softmax outputs; a loss over tokens the fp32 logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddlsim.workload.layers import LayerSpec
from ddlsim.workload.model import Layer, Leaf, Node, Residual, Side
from ddlsim.workload.precision import FP32_NBYTES

#: layers whose backward pass does not need what went in
_BLIND = (
    "add", "concat", "dropout", "embedding", "embedding_bag", "flatten", "slice", "take", "tied_embedding",
)  # fmt: skip
_READ, _UNREAD, _LOSS = "read", "unread", "loss"


def with_kept(layers: Sequence[Layer], structure: Sequence[Node]) -> tuple[Layer, ...]:
    """Return the layers of a model with the unit that each belongs to and, in text models, with what they keep."""
    uses = _Uses(layers)
    uses.sequence(structure, _LOSS)
    dropout = any(layer.type == "dropout" and _rate(uses.specs, i) > 0.0 for i, layer in enumerate(layers))
    text = any(layer.type == "embedding" for layer in layers)
    kept = list(layers)
    first = unit = 0
    for node in structure:
        end = _end(node)
        if isinstance(node, Side):  # what it hangs on lives on, so it belongs to the next
            continue
        for i in range(first, end):
            kept[i] = replace(layers[i], unit=unit)
            if text and len(layers[i].out_shape) == 2:
                kept[i] = _kept(kept[i], uses.by[i], uses.specs.get(i), dropout)
        first, unit = end, unit + 1
    return tuple(kept[:first]) + tuple(replace(layer, unit=unit) for layer in layers[first:])


@dataclass
class _Uses:
    """What becomes of each leaf's output, and how each leaf is described."""

    layers: Sequence[Layer]
    by: dict[int, str] = field(default_factory=dict)
    specs: dict[int, LayerSpec] = field(default_factory=dict)

    def sequence(self, nodes: Sequence[Node], after: str) -> str:
        """Return what the nodes do with their input, when what follows them does `after` with their output."""
        for node in reversed(nodes):
            after = self._node(node, after)
        return after

    def _node(self, node: Node, after: str) -> str:
        if isinstance(node, Leaf):
            self.by[node.index], self.specs[node.index] = after, node.spec
            return _UNREAD if self.layers[node.index].type in _BLIND else _READ
        if isinstance(node, Side):
            return _READ if self.sequence(node.body, _LOSS) == _READ else after
        self.by[node.index] = after
        branches = (node.body, node.shortcut) if isinstance(node, Residual) else node.branches
        return _READ if _READ in [self.sequence(branch, _UNREAD) for branch in branches] else _UNREAD


def _end(node: Node) -> int:
    """Return the number of the layer after a node's last one."""
    if isinstance(node, Side):
        return max(_end(inner) for inner in node.body)
    return node.index + 1


def _rate(specs: Mapping[int, LayerSpec], index: int) -> float:
    return float(getattr(specs.get(index), "rate", 0.0))


def _kept(layer: Layer, use: str, spec: LayerSpec | None, dropout: bool) -> Layer:
    """Return a layer of tokens with what it keeps."""
    n_out = float(math.prod(layer.out_shape))
    inner = max(0.0, layer.stored_nbytes / FP32_NBYTES - n_out)  # beside its output
    in_place = layer.stored_nbytes == 0.0 and layer.type != "add"
    stored, fixed = (0.0 if in_place or use == _UNREAD else n_out), 0.0
    if use == _LOSS and layer.type in ("dense", "tied_dense"):
        stored, fixed = 0.0, FP32_NBYTES * n_out
    if layer.type == "dropout" and getattr(spec, "rate", 0.0) > 0.0:
        fixed = n_out
    heads = int(getattr(spec, "heads", 0))
    scores = heads * layer.out_shape[0] * int(getattr(spec, "context", layer.in_shape[0]))
    if heads and dropout:
        inner, fixed = inner + scores, float(scores)
    return replace(
        layer, stored_nbytes=FP32_NBYTES * (stored + inner), fixed_nbytes=fixed, heads=heads, scores=scores
    )  # fmt: skip
