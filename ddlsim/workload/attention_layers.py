"""Layers of transformers: attention in its variants, gated dense layers, RMS normalisation (timing only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import Cost, Shape, Spec, need_tokens, streaming


@dataclass(frozen=True)
class Attention(Spec):
    """Multi-head self-attention with its four projections (Vaswani et al. 2017, section 3.2).

    fused     query, key and value projections are one tensor, as in GPT-2
    kv_heads  heads that keys and values have, each shared by heads / kv_heads queries (grouped-query attention, Ainslie
              et al. 2023, arXiv:2305.13245); None: as many as there are
    rotary    queries and keys are rotated by their position (Su et al. 2021, arXiv:2104.09864), which learns nothing

    Per sample of s tokens and d features, k = d kv_heads / heads of them in keys and values: 2 s d (d + k) MACs in the
    projections and 2 s^2 d in scores and mixing (causal masks save nothing of it: all is computed).
    """

    heads: int
    fused: bool = False
    causal: bool = False
    kv_heads: int | None = None
    bias: bool = True
    rotary: bool = False
    type: Literal["attention"] = "attention"
    positive = ("heads", "kv_heads")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self.heads, self.kv_heads)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        k = _kv_features(d, self.heads, self.kv_heads, in_shape)
        inputs = (("qkv", d + 2 * k),) if self.fused else (("query", d), ("key", k), ("value", k))
        tensors = _projections((*inputs, ("out", d)), d, bias=self.bias)
        n, n_kv, scores = s * d, s * k, self.heads * s * s
        # x to q, k, v: 2 n + 2 kv; scores written, softmax in and out, read again: 4 scores; mix and project: 3 n + kv
        moved, stored = 5.0 * n + 3.0 * n_kv + 4.0 * scores, 3.0 * n + 2.0 * n_kv + scores
        if self.rotary:  # q and k read and written once more, in place
            moved += 2.0 * (n + n_kv)
        return Cost(in_shape, tensors, 2.0 * s * d * (d + k) + 2.0 * s * s * d, moved, stored)


@dataclass(frozen=True)
class CrossAttention(Spec):
    """Attention of the tokens that follow the first ``context`` ones to these (Vaswani et al. 2017, section 3.2.3).

    Its input has what an encoder made in its first ``context`` tokens and the decoder's own tokens after them; it makes
    one output for each of the latter. Of t such tokens, c of context and d features: 2 (t + c) d^2 MACs in the
    projections (k in place of d for keys and values of fewer heads) and 2 t c d in scores and mixing.
    """

    heads: int
    context: int
    kv_heads: int | None = None
    bias: bool = True
    type: Literal["cross_attention"] = "cross_attention"
    positive = ("heads", "kv_heads", "context")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self.heads, self.kv_heads)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        c, d = self.context, in_shape[1]
        t = in_shape[0] - c
        if t < 1:
            raise ConfigError(f"context = {c}: must leave tokens of the {in_shape[0]} of its input that attend to it")
        k = _kv_features(d, self.heads, self.kv_heads, in_shape)
        tensors = _projections((("query", d), ("key", k), ("value", k), ("out", d)), d, bias=self.bias)
        n, n_context, n_kv, scores = t * d, c * d, c * k, self.heads * t * c
        # as self-attention, but that what keys and values are made of is read beside what queries are made of
        moved, stored = 5.0 * n + n_context + 3.0 * n_kv + 4.0 * scores, 3.0 * n + 2.0 * n_kv + scores
        return Cost((t, d), tensors, 2.0 * (t * d * d + c * d * k) + 2.0 * t * c * d, moved, stored)


@dataclass(frozen=True)
class SwiGLU(Spec):
    """silu(x W) * (x V): the gated first half of a feed-forward network (Shazeer 2020, arXiv:2002.05202)."""

    units: int
    bias: bool = False
    type: Literal["swiglu"] = "swiglu"
    positive = ("units",)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        tensors = _projections((("gate", self.units), ("up", self.units)), d, bias=self.bias)
        n_out = float(s * self.units)
        # both products written, read and multiplied; both are kept for the backward pass beside the result
        return Cost((s, self.units), tensors, 2.0 * s * d * self.units, s * d + 5.0 * n_out, 3.0 * n_out)


@dataclass(frozen=True)
class RMSNorm(Spec):
    """Division by the root mean square of the last dimension, with a learned scale (Zhang and Sennrich 2019)."""

    eps: float = 1e-6
    type: Literal["rms_norm"] = "rms_norm"
    fractions = ("eps",)

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[-1]),))


def _check_heads(heads: int, kv_heads: int | None) -> None:
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"kv_heads = {kv_heads}: must divide heads = {heads}")


def _kv_features(features: int, heads: int, kv_heads: int | None, in_shape: Shape) -> int:
    """Return how many features keys and values have together over their heads."""
    if features % heads:
        raise ConfigError(f"heads = {heads} must divide the {features} features of input shape {in_shape}")
    return features // heads * (kv_heads or heads)


def _projections(widths: tuple[tuple[str, int], ...], features: int, *, bias: bool) -> tuple[tuple[str, int], ...]:
    """Return the tensors of dense layers from `features` to each of the widths."""
    return tuple(
        (f"{name}.{part}", width * size)
        for name, width in widths
        for part, size in ((("weight", features), ("bias", 1)) if bias else (("weight", features),))
    )
