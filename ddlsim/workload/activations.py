"""Bytes of activations that are kept until the backward pass.

The output of a layer is kept if a backward pass reads it: that of the layer itself, as with ReLU, tanh and sigmoid, or
that of a layer that consumes it, as with convolutions, matrix products, normalisations and pooling. Sums,
concatenations, dropout and upsampling read neither. Source: PyTorch's formulas (tools/autograd/derivatives.yaml);
in-place ReLU reads the same. For text models, the results agree with Korthikanti et al. 2022 (arXiv:2205.05198, section
4.1).

In addition, dropout keeps a mask of one byte per element, max pooling the indices of its maxima (8 bytes each,
torch.int64), and a loss over tokens the fp32 logits. Attention keeps queries, keys, values, mixed values and softmax
outputs and, in models with dropout, the mask and the masked softmax outputs. Custom layers keep what their ``cost``
declares.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.workload.layers import LAYER_TYPES, Attention, Dropout, LayerSpec, Slice
from ddlsim.workload.model import Concat, Layer, Leaf, Node, Side
from ddlsim.workload.precision import FP32_NBYTES
from ddlsim.workload.roles import block_numbers

#: layers whose backward pass does not read their input
_BLIND = (
    "add", "concat", "dropout", "embedding", "embedding_bag", "relu", "sigmoid", "take", "tanh", "tied_embedding",
    "upsample",
)  # fmt: skip
#: layers whose backward pass reads their output, and layers that produce a view instead of a tensor
_RESULT, _VIEWS = ("relu", "sigmoid", "tanh"), ("flatten", "slice")
_UNREAD, _READ, _LOSS = 0, 1, 2
#: use of a tensor, or of each of its channels if they differ
_Use = int | npt.NDArray[np.int8]
#: bytes per index of a maximum
INDEX_NBYTES = 8.0


def with_kept(layers: Sequence[Layer], structure: Sequence[Node]) -> tuple[Layer, ...]:
    """Return layers (with ``stored_nbytes`` as declared) with their unit, their block and the bytes that they keep."""
    uses = _Uses(layers)
    uses.sequence(structure, _LOSS)
    dropout = any(isinstance(spec, Dropout) and spec.rate > 0.0 for spec in uses.specs.values())
    text = any(layer.type in ("embedding", "patch_embedding") for layer in layers)
    ends = [_end(node) for node in structure if not isinstance(node, Side)]  # a side belongs to the next unit
    units = [bisect.bisect_right(ends, i) for i in range(len(layers))]
    kept = [
        _kept(layer, uses.by[i], uses.specs.get(i), text and len(layer.out_shape) == 2, dropout)
        for i, layer in enumerate(layers)
    ]
    types = [layer.type for layer in layers]
    with_heads = {
        unit
        for unit, values, kind in zip(units, kept, types, strict=True)
        if values.get("heads") and kind != "cross_attention"
    }
    numbers = block_numbers(units, with_heads, types)
    return tuple(
        Layer(**vars(layer) | {"unit": unit, "block": number, **values})
        for layer, unit, number, values in zip(layers, units, numbers, kept, strict=True)
    )


@dataclass
class _Uses:
    """Use of each leaf's output, and the specification of each leaf."""

    layers: Sequence[Layer]
    by: dict[int, int] = field(default_factory=dict)
    specs: dict[int, LayerSpec] = field(default_factory=dict)

    def sequence(self, nodes: Sequence[Node], after: _Use) -> _Use:
        """Return the use of the nodes' input, given the use `after` of their output."""
        for node in reversed(nodes):
            after = self._node(node, after)
        return after

    def _node(self, node: Node, after: _Use) -> _Use:
        if isinstance(node, Side):
            return np.maximum(after, np.equal(self.sequence(node.body, _LOSS), _READ))
        layer = self.layers[node.index]
        self.by[node.index] = int(np.max(after))
        if isinstance(node, Leaf):
            self.specs[node.index] = node.spec
            return _input_use(layer, node.spec, after)
        uses: Sequence[_Use] = [_UNREAD] * len(node.branches)
        if isinstance(node, Concat) and layer.moved_nbytes == 0.0:  # a view: each part has its own use
            uses = self._parts(node.branches, np.broadcast_to(np.asarray(after, np.int8), layer.out_shape[:1]))
        input_uses = (self.sequence(branch, use) for branch, use in zip(node.branches, uses, strict=True))
        return functools.reduce(np.maximum, input_uses)

    def _parts(self, branches: Sequence[Sequence[Node]], after: npt.NDArray[np.int8]) -> list[npt.NDArray[np.int8]]:
        """Return the use of each branch's output if the branches are joined without a copy."""
        last = [next((node for node in reversed(branch) if not isinstance(node, Side)), None) for branch in branches]
        widths = [0 if node is None else self.layers[node.index].out_shape[0] for node in last]
        identity = (len(after) - sum(widths)) // max(widths.count(0), 1)
        return np.split(after, np.cumsum([width or identity for width in widths])[:-1])


def _input_use(layer: Layer, spec: LayerSpec, after: _Use) -> _Use:
    """Return the use of a layer's input."""
    if isinstance(spec, Slice):
        use = np.zeros(layer.in_shape[0], np.int8)
        use[spec.first : spec.first + layer.out_shape[0]] = after
        return use
    if layer.type == "flatten":
        return int(np.max(after))
    is_mean = layer.type == "adaptive_avg_pool" and math.prod(layer.out_shape[1:]) == 1  # computed by mean()
    return _UNREAD if layer.type in _BLIND or is_mean else _READ


def _end(node: Node) -> int:
    """Return the index of the layer after a node's last one."""
    if isinstance(node, Side):
        return max(_end(inner) for inner in node.body)
    return node.index + 1


def _kept(layer: Layer, use: int, spec: LayerSpec | None, tokens: bool, dropout: bool) -> dict[str, Any]:
    """Return the fields of a layer with the bytes that it keeps. `tokens`: text; `dropout`: the model has dropout."""
    if spec is not None and type(spec) not in LAYER_TYPES.values():
        return {}  # custom layer
    n_out = float(math.prod(layer.out_shape))
    inner = max(0.0, layer.stored_nbytes / FP32_NBYTES - n_out)  # without its output
    is_view = layer.type in _VIEWS or (layer.type == "concat" and layer.moved_nbytes == 0.0)
    is_read = use != _UNREAD or (layer.type in _RESULT and layer.input_grad)
    stored, fixed = (n_out if is_read and not is_view else 0.0), 0.0
    if tokens and use == _LOSS and layer.type in ("dense", "tied_dense"):
        stored, fixed = 0.0, FP32_NBYTES * n_out
    if isinstance(spec, Dropout) and layer.input_grad and spec.rate > 0.0:
        inner, fixed = (layer.out_shape[0], 0.0) if spec.whole_channels else (inner, n_out)
    if layer.type == "max_pool" and layer.input_grad:
        fixed = INDEX_NBYTES * n_out
    heads = int(getattr(spec, "heads", 0)) if tokens else 0
    head_size = heads and (getattr(spec, "head_size", None) or layer.in_shape[-1] // heads)
    scores = heads * layer.out_shape[0] * int(getattr(spec, "context", layer.in_shape[0]))
    if heads and dropout:
        inner, fixed = inner + scores, float(scores)
    attention = spec if isinstance(spec, Attention) and heads else None
    return {
        "stored_nbytes": FP32_NBYTES * (stored + inner),
        "fixed_nbytes": fixed,
        "heads": heads,
        "head_size": head_size,
        "scores": scores,
        "causal": attention is not None and attention.causal,
        "rotated": 0.0 if attention is None else attention.rotated(layer.in_shape),
    }
