"""Embeddings and other layers of language and recommendation models (timing only: nothing here executes them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import Cost, Shape, Spec, need_tokens, streaming


@dataclass(frozen=True)
class TiedDense(Spec):
    """Dense layer whose weight is the token embedding, so it owns a bias at most (Press and Wolf 2017)."""

    units: int
    bias: bool = True
    type: Literal["tied_dense"] = "tied_dense"
    positive = ("units",)

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        tensors = (("bias", self.units),) if self.bias else ()
        macs = float(math.prod(in_shape) * self.units)
        return streaming(in_shape, (in_shape[0], self.units), tensors, macs)


@dataclass(frozen=True)
class Embedding(Spec):
    """Token embedding plus, where the counts are not 0, learned position and token-type embeddings."""

    vocabulary: int
    dim: int
    positions: int = 0
    types: int = 0
    type: Literal["embedding"] = "embedding"
    positive, not_negative = ("vocabulary", "dim"), ("positions", "types")

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
class TiedEmbedding(Spec):
    """Token embedding by the table of another layer, so it owns nothing (Press and Wolf 2017)."""

    dim: int
    type: Literal["tied_embedding"] = "tied_embedding"
    positive = ("dim",)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1:
            raise ConfigError(f"needs (tokens,) but gets shape {in_shape}; make it the first layer of its branch")
        n_out = float(in_shape[0] * self.dim)
        return Cost((in_shape[0], self.dim), moved=2.0 * n_out, stored=n_out)


@dataclass(frozen=True)
class EmbeddingBag(Spec):
    """Categorical features of a recommendation model: the sum of `pooling` rows of each table, side by side.

    The tables are model-parallel (each lives on one device), so their gradients are not exchanged between
    data-parallel workers (Naumov et al. 2019, arXiv:1906.00091, section 4).
    """

    tables: tuple[int, ...]  # rows of each table
    dim: int
    pooling: int = 1
    type: Literal["embedding_bag"] = "embedding_bag"
    positive = ("tables", "dim", "pooling")

    def cost(self, in_shape: Shape) -> Cost:
        n_out = len(self.tables) * self.dim
        tensors = tuple((f"table{i}", rows * self.dim) for i, rows in enumerate(self.tables))
        return Cost((n_out,), tensors, moved=(self.pooling + 1.0) * n_out, stored=float(n_out))


@dataclass(frozen=True)
class Interaction(Spec):
    """DLRM's dot products between all pairs of feature vectors, with the first vector kept in front."""

    dim: int
    type: Literal["interaction"] = "interaction"
    positive = ("dim",)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) != 1 or in_shape[0] % self.dim:
            raise ConfigError(f"needs a vector of a multiple of dim = {self.dim} features but gets {in_shape}")
        n_vectors = in_shape[0] // self.dim
        n_pairs = n_vectors * (n_vectors - 1) // 2
        return streaming(in_shape, (self.dim + n_pairs,), macs=float(n_vectors * n_vectors * self.dim))


@dataclass(frozen=True)
class Take(Spec):
    """The first ``count`` tokens (BERT's pooler reads one, its masked-token head the masked positions), or numbers of a
    vector."""

    count: int
    type: Literal["take"] = "take"
    positive = ("count",)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) > 2:
            raise ConfigError(f"needs (tokens, features) or (features,) but gets {in_shape}; put 'flatten' before it")
        if self.count > in_shape[0]:
            what = "tokens" if len(in_shape) == 2 else "numbers"
            raise ConfigError(f"count = {self.count} is above the {in_shape[0]} {what} of its input")
        n_out = float(self.count * math.prod(in_shape[1:]))
        return Cost((self.count, *in_shape[1:]), moved=2.0 * n_out, stored=n_out)


@dataclass(frozen=True)
class Slice(Spec):
    """``count`` channels, tokens or features from number ``first`` on: a view, which moves and keeps no data.

    Together with a ``concat`` that does not copy it carries several tensors through a model: what a decoder needs of
    its encoder, or the two inputs of a cell.
    """

    first: int = 0
    count: int | None = None  # None: all that follow
    type: Literal["slice"] = "slice"
    positive, not_negative = ("count",), ("first",)

    def cost(self, in_shape: Shape) -> Cost:
        count = in_shape[0] - self.first if self.count is None else self.count
        if count < 1 or self.first + count > in_shape[0]:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}: are not among the {in_shape[0]} of {in_shape}"
            )
        return Cost((count, *in_shape[1:]))
