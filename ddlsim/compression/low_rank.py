"""PowerSGD: low-rank approximations of the matrices of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.compression.contract import Traits, Vector, check_gradient
from ddlsim.compression.payloads import Buffers, mean
from ddlsim.errors import ConfigError
from ddlsim.nn import row_kernels


@dataclass(frozen=True)
class LowRankPayload(Buffers):
    """Round 1: `sent` contains the left factors P. Round 2: `sent` contains the right factors Q, then the vectors.

    left  () in round 1; in round 2 the orthonormal left factors, which every worker computes from round 1 and which are
          therefore not sent (agreed)
    """

    sent: Vector
    left: tuple[Vector, ...]


@dataclass(frozen=True)
class PowerSGDState:
    """right    one (columns, rank) float32 per matrix: the Q with which the next exchange starts
    pending  (n,) the gradient between the two rounds"""

    right: tuple[Vector, ...]
    pending: Vector | None = None


@dataclass(frozen=True)
class _Matrix:
    """Position of a matrix in the flat gradient."""

    start: int
    rows: Count
    columns: Count
    rank: Count

    def of(self, flat: Vector) -> Vector:
        return flat[self.start : self.start + self.rows * self.columns]

    def times(self, flat: Vector, q: Vector) -> Vector:
        out = np.empty((self.rows, self.rank), np.float32)
        arrays = self.of(flat), self.columns, 1, q.reshape(-1), out.reshape(-1)
        row_kernels.product(*arrays, self.rows, self.columns, self.rank)
        return out

    def transposed_times(self, flat: Vector, p: Vector) -> Vector:
        out = np.empty((self.columns, self.rank), np.float32)
        arrays = self.of(flat), 1, self.columns, p.reshape(-1), out.reshape(-1)
        row_kernels.product(*arrays, self.columns, self.rows, self.rank)
        return out


@checked
@dataclass(frozen=True)
class PowerSGD:
    """PowerSGD compression: send low-rank factors of each matrix of the gradient (Vogels et al. 2019, algorithm 1).

    Each exchange performs one step of subspace iteration on each matrix M, starting from the Q of the previous
    exchange: ``P = M Q``, all-reduce P, orthonormalise P, ``Q = M^T P``, all-reduce Q. The result is ``P Q^T``.
    Payloads can be all-reduced, because the compressor is linear. It is biased, so wrap it in ErrorFeedback.

    rank    r, the rank of the factors. Matrices with fewer than r rows or columns have factors of lower rank
    shapes  shape of every tensor by name, in the order of the flat gradient; set automatically at the start of a run
            (``with_shapes``). As in the paper, a tensor with two or more axes is treated as a matrix with shape[0]
            rows. Other tensors are sent uncompressed in round 2
    """

    rank: Count
    shapes: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    traits = Traits("all_reduce", n_rounds=2, encode_kernels=3)  # M Q, orthogonalise, M^T P: matrices as a batch

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> PowerSGD:
        """Return the compressor for tensors of these shapes. Raises ConfigError if it already has shapes."""
        if self.shapes:
            raise ConfigError(
                "PowerSGD: shapes has no effect in a run, which takes the shapes from its model; remove shapes, as in "
                "PowerSGD(rank)"
            )
        return replace(self, shapes=shapes)

    def init(self, n: int, seed: int = 0) -> PowerSGDState:
        total = sum(math.prod(shape) for shape in self.shapes.values())
        if total != n:
            raise ConfigError(
                f"PowerSGD: the shapes have {total} elements, but the gradient has {n}; list the shapes of all tensors "
                "in the order in which the flat vector stores them"
            )
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, self.rank])))
        draws = [rng.standard_normal((m.columns, m.rank)).astype(np.float32) for m in self._matrices()]
        return PowerSGDState(tuple(draws))

    def encode(
        self, gradient: Vector, state: PowerSGDState, rng: np.random.Generator
    ) -> tuple[LowRankPayload, PowerSGDState]:
        check_gradient(gradient, self._n())
        factors = [m.times(gradient, q) for m, q in zip(self._matrices(), state.right, strict=True)]
        return LowRankPayload(_flat(factors), ()), PowerSGDState(state.right, gradient.copy())

    def follow_up(self, combined: LowRankPayload, state: PowerSGDState) -> tuple[LowRankPayload, PowerSGDState]:
        assert state.pending is not None, "encode comes before follow_up"
        matrices = self._matrices()
        factors = _split(combined.sent, [(m.rows, m.rank) for m in matrices])
        left = tuple(_orthonormal(factor) for factor in factors)
        right = [m.transposed_times(state.pending, p) for m, p in zip(matrices, left, strict=True)]
        vectors = [state.pending[start:stop] for start, stop in self._vectors()]
        return LowRankPayload(_flat(right + vectors), left), PowerSGDState(state.right)

    def decode(self, payload: LowRankPayload) -> Vector:
        out = np.empty(self._n(), np.float32)
        matrices, vectors = self._matrices(), self._vectors()
        shapes = [(m.columns, m.rank) for m in matrices] + [(stop - start,) for start, stop in vectors]
        parts = _split(payload.sent, shapes)
        for m, p, q in zip(matrices, payload.left, parts, strict=False):
            row_kernels.product_transposed(*(a.reshape(-1) for a in (p, q, m.of(out))), m.rows, m.rank, m.columns)
        for (start, stop), values in zip(vectors, parts[len(matrices) :], strict=True):
            out[start:stop] = values
        return out

    def combine(self, payloads: Sequence[LowRankPayload]) -> LowRankPayload:
        return LowRankPayload(mean([payload.sent for payload in payloads]), payloads[0].left)

    def settle(self, payload: LowRankPayload, mean: Vector, state: PowerSGDState) -> PowerSGDState:
        """Return the state whose Q is the mean Q, orthonormalised (only its span matters).

        The mean is ``P Q^T`` with orthonormal P, so ``mean^T P`` is the mean Q. Where the mean Q is zero,
        the old Q is kept, because a zero Q would suppress all later gradients.
        """
        right = []
        for m, p, old in zip(self._matrices(), payload.left, state.right, strict=True):
            q = m.transposed_times(mean, p)
            right.append(_orthonormal(q, old) if q.any() else old)
        return PowerSGDState(tuple(right))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        matrices = self._matrices()
        vector_elements = sum(stop - start for start, stop in self._vectors())
        first = sum(m.rows * m.rank for m in matrices)
        return (4 * first, 4 * (sum(m.columns * m.rank for m in matrices) + vector_elements))

    def _n(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def _matrices(self) -> list[_Matrix]:
        matrices, start = [], 0
        for shape in self.shapes.values():
            size = math.prod(shape)
            if len(shape) >= 2:
                rows, columns = shape[0], size // shape[0]
                matrices.append(_Matrix(start, rows, columns, min(self.rank, rows, columns)))
            start += size
        return matrices

    def _vectors(self) -> list[tuple[int, int]]:
        vectors, start = [], 0
        for shape in self.shapes.values():
            size = math.prod(shape)
            if len(shape) < 2:
                vectors.append((start, start + size))
            start += size
        return vectors


def _orthonormal(factor: Vector, spare: Vector | None = None) -> Vector:
    """Return an orthonormal basis of the columns (Gram-Schmidt, repeated once against rounding).

    A column that depends on earlier ones is replaced by the same column of `spare` or, if that depends on them, too, by
    zeros. LAPACK is not used, because its results depend on the processor.
    """
    basis = np.zeros(factor.shape)
    for k in range(factor.shape[1]):
        for source in (factor, spare):
            column = np.zeros(len(factor)) if source is None else source[:, k].astype(np.float64)
            length = np.sqrt((column * column).sum())
            for j in (*range(k), *range(k)):
                column -= (basis[:, j] * column).sum() * basis[:, j]
            rest = np.sqrt((column * column).sum())
            if rest > 1e-6 * length:  # otherwise rounding of float32
                basis[:, k] = column / rest
                break
    return basis.astype(np.float32)


def _flat(arrays: Sequence[Vector]) -> Vector:
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0, np.float32)


def _split(flat: Vector, shapes: Sequence[tuple[int, ...]]) -> list[Vector]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return (
        [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)] if shapes else []
    )
