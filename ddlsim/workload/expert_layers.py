"""Layers whose tokens go to some of many experts (timing only: nothing here executes them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import Cost, Shape, Spec, need_tokens


@dataclass(frozen=True)
class MixtureOfExperts(Spec):
    """A feed-forward network in ``experts`` copies, of which a router chooses ``active`` for each token.

    An expert is silu(x W) * (x V) times a third matrix, ``units`` wide in between (Shazeer 2020, arXiv:2002.05202), or
    without ``gated`` two matrices with a non-linearity. The outputs of a token's experts are added up, weighted by the
    router's softmax (Shazeer et al. 2017, arXiv:1701.06538, section 2; Jiang et al. 2024, Mixtral of experts,
    arXiv:2401.04088, section 2.1). None of the matrices has a bias.

    Experts have ``capacity`` * active places for each token, and compute all of them, taken or not (Fedus et al. 2022,
    Switch Transformers, arXiv:2101.03961, equation 3). With 1 there are as many as tokens need, if these are spread
    evenly or nothing is padded (Gale et al. 2023, MegaBlocks, arXiv:2211.15841).

    Per sample of s tokens and d features, E experts of width f, of which k are active: s d E MACs in the router and
    3 k s d f ``capacity`` in the experts (2 without ``gated``); d E + 3 E d f parameters.
    """

    experts: int
    active: int
    units: int
    gated: bool = True
    capacity: float = 1.0
    type: Literal["mixture_of_experts"] = "mixture_of_experts"
    positive = ("experts", "active", "units")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.experts:
            raise ConfigError(f"active = {self.active}: must be at most experts = {self.experts}")
        if not 0.0 < self.capacity <= self.experts:
            raise ConfigError(f"capacity = {self.capacity}: must be above 0 and at most experts = {self.experts}")

    def rows(self, in_shape: Shape) -> float:
        """Return the places that experts have for the tokens of a sample."""
        return self.capacity * self.active * in_shape[0]

    def cost(self, in_shape: Shape) -> Cost:
        need_tokens(in_shape)
        s, d = in_shape
        names = ("gate", "up", "down") if self.gated else ("up", "down")
        matrices = tuple((f"{name}.weight", self.experts * d * self.units) for name in names)
        rows = self.rows(in_shape)  # of tokens, one for each expert that a token goes to
        macs = float(s * d * self.experts + len(names) * rows * d * self.units)
        # tokens are read, copied to their experts and read there, what comes back is written, read and summed up; in
        # between as in SwiGLU: both products written and read, their product written and read
        inner = 5 if self.gated else 3
        moved = float(2 * s * d + 4 * rows * d + (inner + 1) * rows * self.units + 2 * s * self.experts)
        stored = float(s * d + 2 * rows * d + (inner + 1) // 2 * rows * self.units + s * self.experts)
        return Cost(in_shape, (("router.weight", self.experts * d), *matrices), macs, moved, stored)
