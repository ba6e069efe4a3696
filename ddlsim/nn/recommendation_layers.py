"""Layers of recommendation models: sums of rows of tables, and dot products between features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.nn.pass_state import Array, Buffers, Pass, Slot
from ddlsim.nn.token_layers import whole_ids


@dataclass
class EmbeddingBag:
    """y_t = sum of `pooling` rows of table t, side by side; tables have shape (rows, features). The numbers of these
    rows are the last of a sample, table by table."""

    name: str
    tables: Sequence[Slot]
    pooling: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        d, k = self.tables[0].shape[1], self.pooling
        out = self.buffers.get("out", len(x), len(self.tables) * d)
        first = x.shape[1] - len(self.tables) * k
        self._ids = []
        for t, table in enumerate(self.tables):
            ids = whole_ids(x[:, first + t * k : first + (t + 1) * k], table.shape[0], self.name)
            out[:, t * d : (t + 1) * d] = table.of(run.params)[ids].sum(axis=1)
            self._ids.append(ids)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        d = self.tables[0].shape[1]
        for t, (table, ids) in enumerate(zip(self.tables, self._ids, strict=True)):
            np.add.at(table.of(run.into()), ids, dy[:, None, t * d : (t + 1) * d])
        return None


@dataclass
class Interaction:
    """(x_0, all x_i . x_j with j < i) of the vectors x_i of `features` numbers that a sample is made of (Naumov et al.
    2019, arXiv:1906.00091, section 2.1.3)."""

    features: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        self._vectors = x.reshape(len(x), -1, self.features)
        self._pairs = np.tril_indices(self._vectors.shape[1], -1)
        products = np.einsum("nid,njd->nij", self._vectors, self._vectors)
        out = self.buffers.get("out", len(x), self.features + len(self._pairs[0]))
        out[:, : self.features] = self._vectors[:, 0]
        out[:, self.features :] = products[:, *self._pairs]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        n, count, d = self._vectors.shape
        slopes = np.zeros((n, count, count), dy.dtype)
        slopes[:, *self._pairs] = dy[:, d:]
        dx = self.buffers.get("dx", n, count * d)
        vectors = dx.reshape(n, count, d)
        vectors[...] = np.einsum("nij,njd->nid", slopes + slopes.swapaxes(1, 2), self._vectors)
        vectors[:, 0] += dy[:, :d]
        return dx
