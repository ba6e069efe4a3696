"""Count-Sketch: a linear summary of the gradient, with which the largest elements of the *sum* can be found."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Density, checked
from ddlsim.compression.contract import Indices, Traits, Vector, check_gradient, count
from ddlsim.compression.cost import SELECT_KERNELS, SELECT_PASSES
from ddlsim.compression.payloads import AlignedPayload, Buffers, mean, scatter
from ddlsim.compression.sparse import top_k


@dataclass(frozen=True)
class SketchPayload(Buffers):
    """The sketch: `table` (rows, columns) float32."""

    table: Vector


@dataclass(frozen=True)
class SketchState:
    """n and the seed of the hash functions, shared by all workers; `pending` (n,) between the two rounds."""

    n: int
    seed: int
    pending: Vector | None = None


@checked
@dataclass(frozen=True)
class CountSketch:
    """Top-k of the summed gradient, selected with a Count-Sketch (Charikar et al. 2002).

    Round 1 sums the workers' sketches. Round 2 sums the exact values of the ``density * n`` elements whose estimates
    have the largest magnitudes. In row r of a sketch, ``sign_r(i) * g_i`` is added to column ``column_r(i)``. The
    estimate of g_i is the median of ``sign_r(i) * table[r, column_r(i)]`` over the rows. Its error is at most
    ``|g| / sqrt(columns)`` with a probability that grows with the number of rows.

    density  fraction of the elements to send in round 2
    rows     number of rows of the sketch
    columns  number of columns of the sketch

    Sketches are linear, so all-reduces (gs-SGD, Dai et al. 2021, arXiv:2108.06004) and parameter servers (Sketched-SGD,
    Ivkin et al. 2019, arXiv:1903.04488) can sum them. Wrap the compressor in ErrorFeedback, as both papers do. A sketch
    covers the whole gradient, so communication cannot overlap the backward pass.
    """

    density: Density
    rows: Count
    columns: Count

    @functools.cached_property
    def traits(self) -> Traits:
        passes = 2.0 * self.rows + SELECT_PASSES  # every row is written, and read for the estimate
        kernels = self.rows + 1 + SELECT_KERNELS
        return Traits(
            "all_reduce",
            n_rounds=2,
            encode_passes=passes,
            encode_kernels=kernels,
            selection="sort",
            whole=True,
            sparse_answer=True,
        )

    def init(self, n: int, seed: int = 0) -> SketchState:
        return SketchState(n, seed)

    def encode(
        self, gradient: Vector, state: SketchState, rng: np.random.Generator
    ) -> tuple[SketchPayload, SketchState]:
        check_gradient(gradient, state.n)
        columns, signs = _hashes(state.n, self.rows, self.columns, state.seed)
        table = [
            np.bincount(column, weights=sign * gradient, minlength=self.columns)
            for column, sign in zip(columns, signs, strict=True)
        ]
        return SketchPayload(np.array(table, np.float32)), SketchState(state.n, state.seed, gradient.copy())

    def estimate(self, sketch: SketchPayload, state: SketchState) -> Vector:
        """Return the estimate, shape (n,), of the sketched vector."""
        columns, signs = _hashes(state.n, self.rows, self.columns, state.seed)
        rows = zip(signs, sketch.table, columns, strict=True)
        return _median([sign * row[column] for sign, row, column in rows])

    def follow_up(
        self, combined: SketchPayload | AlignedPayload, state: SketchState
    ) -> tuple[AlignedPayload, SketchState]:
        assert isinstance(combined, SketchPayload), "the first round sends sketches"
        assert state.pending is not None, "encode comes before follow_up"
        indices = top_k(self.estimate(combined, state), count(self.density, state.n))
        payload = AlignedPayload(state.n, indices, state.pending[indices])
        return payload, SketchState(state.n, state.seed)

    def decode(self, payload: SketchPayload | AlignedPayload) -> Vector:
        assert isinstance(payload, AlignedPayload), "the second round's payload is the one to decode"
        return scatter(payload.n, payload.indices, payload.values)

    def combine(self, payloads: Sequence[SketchPayload | AlignedPayload]) -> SketchPayload | AlignedPayload:
        first = payloads[0]
        if isinstance(first, SketchPayload):
            return SketchPayload(mean([p.table for p in payloads if isinstance(p, SketchPayload)]))
        values = [p.values for p in payloads if isinstance(p, AlignedPayload)]
        return AlignedPayload(first.n, first.indices, mean(values))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (4 * self.rows * self.columns, 4 * count(self.density, n))


def _median(rows: list[Vector]) -> Vector:
    """Return the elementwise median of the rows (for an even number, the mean of the middle two).

    Odd-even transposition sort: for a few rows, much faster than a sort or median along an axis.
    """
    ordered, n = list(rows), len(rows)
    for sweep in range(n):
        for i in range(sweep % 2, n - 1, 2):
            a, b = ordered[i], ordered[i + 1]
            ordered[i], ordered[i + 1] = np.minimum(a, b), np.maximum(a, b)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) * np.float32(0.5)


@functools.lru_cache(maxsize=8)
def _hashes(n: int, rows: int, columns: int, seed: int) -> tuple[Indices, npt.NDArray[np.int8]]:
    """Return the column and the sign of each element in each row, both (rows, n); workers share them."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, rows, columns])))
    column = rng.integers(columns, size=(rows, n), dtype=np.int32)
    sign = (2 * rng.integers(2, size=(rows, n), dtype=np.int8) - 1).astype(np.int8)
    column.flags.writeable = sign.flags.writeable = False
    return column, sign
