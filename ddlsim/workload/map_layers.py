"""Layers of segmentation networks (timing only: nothing here executes them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddlsim.errors import ConfigError
from ddlsim.workload.layer_rules import Cost, Shape, Spec, need_map, streaming


@dataclass(frozen=True)
class InstanceNorm(Spec):
    """Normalisation of each channel of each sample, without parameters (Ulyanov, Vedaldi and Lempitsky 2016)."""

    eps: float = 1e-5
    type: Literal["instance_norm"] = "instance_norm"
    fractions = ("eps",)

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class LeakyReLU(Spec):
    """x, and ``slope`` x where that is negative (Maas, Hannun and Ng 2013), not in place."""

    slope: float = 0.01
    type: Literal["leaky_relu"] = "leaky_relu"

    def __post_init__(self) -> None:
        if not 0.0 <= self.slope < 1.0:
            raise ConfigError(f"slope = {self.slope}: must be in [0, 1)")

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class Upsample(Spec):
    """Every pixel ``scale`` times in each spatial dimension (nearest neighbour, as in torch.nn.Upsample)."""

    scale: int
    type: Literal["upsample"] = "upsample"
    positive = ("scale",)

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, (in_shape[0], *(self.scale * size for size in in_shape[1:])))
