"""Bytes of activations that are kept until the backward pass.

The output of a layer stays if a backward pass reads it: of the layer itself, as with ReLU, tanh and sigmoid, or of a
layer that takes it, as with convolutions, matrix products, normalisations and pooling. The backward passes of sums,
concatenations, dropout and upsampling read neither. Source: the formulas of PyTorch (tools/autograd/derivatives.yaml);
where ReLU works in place they read the same. For text models they agree with Korthikanti et al. 2022
(arXiv:2205.05198, section 4.1).

Besides, dropout keeps a mask of a byte an element, max pooling the places of its maxima, 8 bytes each (torch.int64),
attention its queries, keys, values, mixed values and softmax outputs and, in models with dropout, the mask and what it
leaves of the softmax outputs, and a loss over tokens the fp32 logits. Custom layers keep what their ``cost`` declares.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ddlsim.workload.layers import LAYER_TYPES, Attention, Dropout, LayerSpec, Slice
from ddlsim.workload.model import Concat, Layer, Leaf, Node, Residual, Side
from ddlsim.workload.precision import FP32_NBYTES

#: layers whose backward pass does not need what went in
_BLIND = (
    "add", "concat", "dropout", "embedding", "embedding_bag", "relu", "sigmoid", "take", "tanh", "tied_embedding",
    "upsample",
)  # fmt: skip
#: those whose backward pass needs what came out, and those that make no tensor of their own
_RESULT, _VIEWS = ("relu", "sigmoid", "tanh"), ("flatten", "slice")
_UNREAD, _READ, _LOSS = 0, 1, 2
#: what becomes of a tensor, or of each of its channels where that differs
_Use = int | npt.NDArray[np.int8]
#: bytes of the place of a maximum
INDEX_NBYTES = 8.0


def with_kept(layers: Sequence[Layer], structure: Sequence[Node]) -> tuple[Layer, ...]:
    """Return layers, whose ``stored_nbytes`` are as declared, with the unit that each belongs to and what they keep."""
    uses = _Uses(layers)
    uses.sequence(structure, _LOSS)
    dropout = any(isinstance(spec, Dropout) and spec.rate > 0.0 for spec in uses.specs.values())
    text = any(layer.type in ("embedding", "patch_embedding") for layer in layers)
    ends = [_end(node) for node in structure if not isinstance(node, Side)]  # a side belongs to what follows
    kept = (
        _kept(layer, uses.by[i], uses.specs.get(i), text and len(layer.out_shape) == 2, dropout)
        for i, layer in enumerate(layers)
    )
    return tuple(replace(layer, unit=bisect.bisect_right(ends, i)) for i, layer in enumerate(kept))


@dataclass
class _Uses:
    """What becomes of each leaf's output, and how each leaf is described."""

    layers: Sequence[Layer]
    by: dict[int, int] = field(default_factory=dict)
    specs: dict[int, LayerSpec] = field(default_factory=dict)

    def sequence(self, nodes: Sequence[Node], after: _Use) -> _Use:
        """Return what the nodes do with their input, when what follows them does `after` with their output."""
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
        branches = (node.body, node.shortcut) if isinstance(node, Residual) else node.branches
        uses: Sequence[_Use] = [_UNREAD] * len(branches)
        if isinstance(node, Concat) and layer.moved_nbytes == 0.0:  # no tensor of its own, so each part has its own use
            uses = self._parts(branches, np.broadcast_to(np.asarray(after, np.int8), layer.out_shape[:1]))
        found = (self.sequence(branch, use) for branch, use in zip(branches, uses, strict=True))
        return functools.reduce(np.maximum, found)

    def _parts(self, branches: Sequence[Sequence[Node]], after: npt.NDArray[np.int8]) -> list[npt.NDArray[np.int8]]:
        """Return what becomes of each branch's output when they are joined without a copy."""
        last = [next((node for node in reversed(branch) if not isinstance(node, Side)), None) for branch in branches]
        widths = [0 if node is None else self.layers[node.index].out_shape[0] for node in last]
        identity = (len(after) - sum(widths)) // max(widths.count(0), 1)
        return np.split(after, np.cumsum([width or identity for width in widths])[:-1])


def _input_use(layer: Layer, spec: LayerSpec, after: _Use) -> _Use:
    """Return what a layer does with its input."""
    if isinstance(spec, Slice):
        use = np.zeros(layer.in_shape[0], np.int8)
        use[spec.first : spec.first + layer.out_shape[0]] = after
        return use
    if layer.type == "flatten":
        return int(np.max(after))
    is_mean = layer.type == "adaptive_avg_pool" and math.prod(layer.out_shape[1:]) == 1  # computed by mean()
    return _UNREAD if layer.type in _BLIND or is_mean else _READ


def _end(node: Node) -> int:
    """Return the number of the layer after a node's last one."""
    if isinstance(node, Side):
        return max(_end(inner) for inner in node.body)
    return node.index + 1


def _kept(layer: Layer, use: int, spec: LayerSpec | None, tokens: bool, dropout: bool) -> Layer:
    """Return a layer, of `tokens` of a text model or of something else, with what it keeps; `dropout`: in the model."""
    if spec is not None and type(spec) not in LAYER_TYPES.values():
        return layer  # a custom one
    n_out = float(math.prod(layer.out_shape))
    inner = max(0.0, layer.stored_nbytes / FP32_NBYTES - n_out)  # beside its output
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
    return replace(
        layer,
        stored_nbytes=FP32_NBYTES * (stored + inner),
        fixed_nbytes=fixed,
        heads=heads,
        head_size=head_size,
        scores=scores,
        causal=attention is not None and attention.causal,
        rotated=0.0 if attention is None else attention.rotated(layer.in_shape),
    )
