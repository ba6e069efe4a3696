"""Layers of language and recommendation models (timing only: nothing here executes them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import STRICT, Cost, Shape, at_least, need_tokens, streaming

__all__ = ["Attention", "Embedding", "EmbeddingBag", "Interaction", "Take", "TiedDense"]


@dataclass(frozen=True)
class TiedDense:
    """Dense layer whose weight is the token embedding, so it owns a bias at most (Press and Wolf 2017)."""

    units: int
    bias: bool = True
    type: Literal["tied_dense"] = "tied_dense"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, units=self.units)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        tensors = (("bias", self.units),) if self.bias else ()
        macs = float(math.prod(in_shape) * self.units)
        return streaming(in_shape, (in_shape[0], self.units), tensors, macs)


@dataclass(frozen=True)
class Embedding:
    """Token embedding plus, where the counts are not 0, learned position and token-type embeddings."""

    vocabulary: int
    dim: int
    positions: int = 0
    types: int = 0
    type: Literal["embedding"] = "embedding"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, vocabulary=self.vocabulary, dim=self.dim)
        at_least(0, positions=self.positions, types=self.types)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1:
            raise ConfigError(f"needs (tokens,) but gets shape {in_shape}; make it the first layer")
        if self.positions and in_shape[0] > self.positions:
            raise ConfigError(f"positions = {self.positions} is below the {in_shape[0]} tokens of the input")
        tables = (("tokens", self.vocabulary), ("positions", self.positions), ("types", self.types))
        tensors = tuple((name, rows * self.dim) for name, rows in tables if rows)
        n_out = float(in_shape[0] * self.dim)
        return Cost((in_shape[0], self.dim), tensors, moved=(len(tensors) + 1) * n_out, stored=n_out)


@dataclass(frozen=True)
class EmbeddingBag:
    """Categorical features of a recommendation model: one row looked up in each table, side by side.

    The tables are model-parallel (each lives on one device), so their gradients are not exchanged between
    data-parallel workers (Naumov et al. 2019, arXiv:1906.00091, section 4).
    """

    tables: tuple[int, ...]  # rows of each table
    dim: int
    type: Literal["embedding_bag"] = "embedding_bag"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, tables=self.tables, dim=self.dim)

    def cost(self, in_shape: Shape) -> Cost:
        n_out = len(self.tables) * self.dim
        tensors = tuple((f"table{i}", rows * self.dim) for i, rows in enumerate(self.tables))
        return Cost((n_out,), tensors, moved=2.0 * n_out, stored=float(n_out))


@dataclass(frozen=True)
class Interaction:
    """DLRM's dot products between all pairs of feature vectors, with the first vector kept in front."""

    dim: int
    type: Literal["interaction"] = "interaction"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, dim=self.dim)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1 or in_shape[0] % self.dim:
            raise ConfigError(
                f"needs a vector of a multiple of dim = {self.dim} features but gets {in_shape}"
            )
        n_vectors = in_shape[0] // self.dim
        n_pairs = n_vectors * (n_vectors - 1) // 2
        return streaming(in_shape, (self.dim + n_pairs,), macs=float(n_vectors * n_vectors * self.dim))


@dataclass(frozen=True)
class Attention:
    """Multi-head self-attention with its four projections (Vaswani et al. 2017, section 3.2).

    ``fused`` keeps query, key and value projections in one tensor, as GPT-2 does. Per sample of s tokens and
    d features: 4 s d^2 MACs in the projections and 2 s^2 d in scores and mixing.
    """

    heads: int
    fused: bool = False
    causal: bool = False
    type: Literal["attention"] = "attention"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, heads=self.heads)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        if d % self.heads:
            raise ConfigError(f"heads = {self.heads} must divide the {d} features of input shape {in_shape}")
        inputs = (("qkv", 3),) if self.fused else (("query", 1), ("key", 1), ("value", 1))
        tensors: list[tuple[str, int]] = []
        for name, width in (*inputs, ("out", 1)):
            tensors += [(f"{name}.weight", width * d * d), (f"{name}.bias", width * d)]
        n, scores = s * d, self.heads * s * s
        # x to q, k, v: 4n; scores written, softmax in and out, read again: 4 scores; mix and project: 4n
        moved, stored = 8.0 * n + 4.0 * scores, 5.0 * n + scores
        return Cost(in_shape, tuple(tensors), 4.0 * s * d * d + 2.0 * s * s * d, moved, stored)


@dataclass(frozen=True)
class Take:
    """The first ``count`` tokens (BERT's pooler reads one, its masked-token head the masked positions)."""

    count: int
    type: Literal["take"] = "take"
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    def __post_init__(self) -> None:
        at_least(1, count=self.count)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        if self.count > in_shape[0]:
            raise ConfigError(f"count = {self.count} is above the {in_shape[0]} tokens of its input")
        n_out = float(self.count * in_shape[1])
        return Cost((self.count, in_shape[1]), moved=2.0 * n_out, stored=n_out)
