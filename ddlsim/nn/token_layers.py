"""Layers of language models: samples are rows of tokens, each token `features` numbers, or one: its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.nn import attention_kernels, dense_kernels
from ddlsim.nn.pass_state import Array, Buffers, Pass, Slot


@dataclass
class Embedding:
    """y = E[token] + P[place] + T[0]; E has shape (vocabulary, features).

    ``places`` and ``kind``, where they are there, have the shapes (positions, features) and (types, features); all
    tokens are of the first type.
    """

    name: str
    tokens: Slot
    places: Slot | None
    kind: Slot | None
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        table = self.tokens.of(run.params)
        self._ids = whole_ids(x, len(table), self.name)
        n, length = x.shape
        out = self.buffers.get("out", n, length * table.shape[1])
        rows = out.reshape(n, length, -1)
        np.take(table, self._ids, axis=0, out=rows)
        if self.places is not None:
            rows += self.places.of(run.params)[:length]
        if self.kind is not None:
            rows += self.kind.of(run.params)[0]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        rows, into = dy.reshape(*self._ids.shape, -1), run.into()
        np.add.at(self.tokens.of(into), self._ids, rows)
        over_samples = rows.sum(axis=0)
        if self.places is not None:
            self.places.of(into)[: len(over_samples)] += over_samples
        if self.kind is not None:
            self.kind.of(into)[0] += over_samples.sum(axis=0)
        return None


def whole_ids(x: Array, vocabulary: int, name: str) -> npt.NDArray[np.int64]:
    """Return `x` as rows of a table of so many. Raises ConfigError for anything else, of the layer `name`."""
    ids = x.astype(np.int64)
    wrong = (ids != x) | (ids < 0) | (ids >= vocabulary)
    if wrong.any():
        raise ConfigError(
            f"layer {name!r}: {x[wrong][0]:g} is no id; samples must be whole numbers from 0 to {vocabulary - 1}"
        )
    return ids


@dataclass
class Attention:
    """Multi-head self-attention with its projections (Vaswani et al. 2017, section 3.2.2): out(attend(qkv(x))).

    weights  of the queries, keys and values: three of shape (features, features), or one of (3 * features, features)
    biases   of these
    """

    features: int
    heads: int
    causal: bool
    weights: Sequence[Slot]
    biases: Sequence[Slot]
    out_weight: Slot
    out_bias: Slot
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        d, n = self.features, len(x)
        self._x = x.reshape(-1, d)
        n_rows = len(self._x)
        rows, part = self.buffers.get("rows", n_rows, 3 * d), 3 * d // len(self.weights)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            projected = self.buffers.get("projected", n_rows, part)
            _project(self._x, weight, bias, projected, run.params)
            rows[:, i * part : (i + 1) * part] = projected
        tokens = n_rows // n
        self._softmax = self.buffers.get("softmax", n * self.heads, tokens * tokens)
        mixed, out = self.buffers.get("mixed", n_rows, d), self.buffers.get("out", n_rows, d)
        attention_kernels.attend(
            rows.reshape(-1), self._softmax.reshape(-1), mixed.reshape(-1), n, tokens, self.heads, d // self.heads,
            self.causal,
        )  # fmt: skip
        self._rows, self._mixed = rows, mixed
        _project(mixed, self.out_weight, self.out_bias, out, run.params)
        return out.reshape(n, -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        d, n, part = self.features, len(dy), 3 * self.features // len(self.weights)
        grads = dy.reshape(-1, d)
        n_rows = len(grads)
        dmixed, drows = self.buffers.get("dmixed", n_rows, d), self.buffers.get("drows", n_rows, 3 * d)
        self._projected_gradient(grads, self._mixed, self.out_weight, self.out_bias, dmixed, run)
        slopes = self.buffers.get("slopes", 1, n_rows // n)
        attention_kernels.attend_gradient(
            self._rows.reshape(-1), self._softmax.reshape(-1), dmixed.reshape(-1), drows.reshape(-1),
            slopes.reshape(-1), n, n_rows // n, self.heads, d // self.heads, self.causal,
        )  # fmt: skip
        dx, share = self.buffers.get("dx", n_rows, d), self.buffers.get("share", n_rows, d)
        dx[...] = 0.0
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            of_part = self.buffers.get("of_part", n_rows, part)
            of_part[...] = drows[:, i * part : (i + 1) * part]
            self._projected_gradient(of_part, self._x, weight, bias, share, run)
            dx += share
        return dx.reshape(n, -1)

    def _projected_gradient(self, dy: Array, x: Array, weight: Slot, bias: Slot, dx: Array, run: Pass) -> None:
        """Add to the gradients of a projection y = x W^T + b, and write that of its input."""
        n, units = dy.shape
        product = self.buffers.get("dw", units, x.shape[1])
        flat = dy.reshape(-1)
        dense_kernels.product(flat, 1, units, x.reshape(-1), product.reshape(-1), units, n, x.shape[1])
        weight.of(run.into())[...] += product
        bias.of(run.into())[...] += dy.sum(axis=0)
        dense_kernels.product(flat, units, 1, weight.flat(run.params), dx.reshape(-1), n, units, x.shape[1])


def _project(x: Array, weight: Slot, bias: Slot, out: Array, params: Array) -> None:
    """Write y = x W^T + b."""
    n, units = out.shape
    dense_kernels.product_transposed(x.reshape(-1), weight.flat(params), out.reshape(-1), n, x.shape[1], units)
    out += bias.of(params)


@dataclass
class TiedDense:
    """y = x E^T (+ b), E being the table of the token embedding, (vocabulary, features) (Press and Wolf 2017)."""

    table: Slot
    bias: Slot | None
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        vocabulary, features = self.table.shape
        self._x = x.reshape(-1, features)
        out = self.buffers.get("out", len(self._x), vocabulary)
        table = self.table.flat(run.params)
        dense_kernels.product_transposed(
            self._x.reshape(-1), table, out.reshape(-1), len(self._x), features, vocabulary
        )
        if self.bias is not None:
            out += self.bias.of(run.params)
        return out.reshape(len(x), -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        vocabulary, features = self.table.shape
        rows = dy.reshape(-1, vocabulary)
        flat, n = rows.reshape(-1), len(rows)
        product, dx = self.buffers.get("dw", vocabulary, features), self.buffers.get("dx", n, features)
        dense_kernels.product(flat, 1, vocabulary, self._x.reshape(-1), product.reshape(-1), vocabulary, n, features)
        self.table.of(run.into())[...] += product
        if self.bias is not None:
            self.bias.of(run.into())[...] += rows.sum(axis=0)
        table = self.table.flat(run.params)
        dense_kernels.product(flat, vocabulary, 1, table, dx.reshape(-1), n, vocabulary, features)
        return dx.reshape(len(dy), -1)


@dataclass
class Take:
    """The first ``kept`` numbers of each sample: those of its first tokens."""

    kept: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        self._size = x.shape[1]
        out = self.buffers.get("out", len(x), self.kept)
        out[...] = x[:, : self.kept]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        dx = self.buffers.get("dx", len(dy), self._size)
        dx[:, : self.kept] = dy
        dx[:, self.kept :] = 0.0
        return dx
