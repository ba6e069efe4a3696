"""Deep Gradient Compression: top-k with momentum correction, factor masking and a sparsity warm-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import Count, Decay, checked
from ddlsim.compression.contract import Traits, Vector, check_gradient, count
from ddlsim.compression.payloads import SparsePayload, scatter
from ddlsim.compression.sparse import SELECT_PASSES, top_k
from ddlsim.errors import ConfigError

#: sparsity of each warm-up stage and after it (Lin et al. 2018, section 3.3: one epoch each)
WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)


@dataclass(frozen=True)
class DGCState:
    """velocity  (n,) the worker's momentum u
    unsent    (n,) the accumulated velocity v that was not sent yet
    step      how often this worker has encoded
    """

    velocity: Vector
    unsent: Vector
    step: int = 0


#: of PaddlePaddle (operators/dgc_op.h, k_select/k_select.cu): u, v, 2 for the threshold from a sample, count, 3 for the
#: prefix sum, write, zero both
KERNELS = 11


@checked
@dataclass(frozen=True)
class DGC:
    """``u <- m u + g; v <- v + u``; send the largest of v and zero both there (Lin et al. 2018, algorithm 4).

    sparsities       share of elements not sent in each stage; the last one stays
    steps_per_stage  encodes per stage: the steps of an epoch in the paper
    momentum         m. It lives here, so the optimizer that applies the mean must have none.
    """

    steps_per_stage: Count
    momentum: Decay = 0.9
    sparsities: tuple[Decay, ...] = WARM_UP
    traits = Traits(
        "all_gather",
        not_summable="workers choose different coordinates, so their values do not line up",
        no_feedback="it keeps what it did not send already; use it as it is",
        encode_passes=5.0 + SELECT_PASSES,  # g, u, v in; u, v out
        encode_kernels=KERNELS,
    )

    def __post_init__(self) -> None:
        if not self.sparsities:
            raise ConfigError("DGC: sparsities = (): must be one or more, each at least 0 and below 1")

    def density(self, step: int) -> float:
        """Return the share of elements that encode number `step` (from 0) sends."""
        stage = min(step // self.steps_per_stage, len(self.sparsities) - 1)
        return 1.0 - self.sparsities[stage]

    def init(self, n: int, seed: int = 0) -> DGCState:
        return DGCState(np.zeros(n, np.float32), np.zeros(n, np.float32))

    def encode(self, gradient: Vector, state: DGCState, rng: np.random.Generator) -> tuple[SparsePayload, DGCState]:
        n = state.unsent.size
        check_gradient(gradient, n)
        velocity = np.float32(self.momentum) * state.velocity + gradient  # momentum correction
        unsent = state.unsent + velocity
        indices = top_k(unsent, count(self.density(state.step), n))
        payload = SparsePayload(n, indices, unsent[indices])
        velocity[indices] = 0.0  # momentum factor masking
        unsent[indices] = 0.0
        return payload, DGCState(velocity, unsent, state.step + 1)

    def decode(self, payload: SparsePayload) -> Vector:
        return scatter(payload.n, payload.indices, payload.values)

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (8 * count(self.density(step), n),)
