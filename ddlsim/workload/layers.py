"""The layer types of a model file: what each takes, makes, learns and costs.

One frozen dataclass per type. Its fields are the keys of the file (and all that an implementation needs to
execute the layer); its method ``cost(in_shape)`` derives shape, parameters, multiply-accumulates and memory
traffic for one sample. Shapes exclude the batch: images are (channels, height, width), volumes (channels,
depth, height, width), text is (tokens,) and then (tokens, features), anything else a vector (features,).

The rules are those of ``torch.nn`` (documentation of Conv2d, MaxPool2d, BatchNorm2d, MultiheadAttention ...),
so that shapes and parameter counts agree with the published ones to the last digit. A multiply-accumulate is
counted for convolutions, dense layers, attention and interactions only, as torchvision and most papers do;
element-wise work shows up as memory traffic, which is what limits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from ddlsim.errors import ConfigError
from ddlsim.workload.attention_layers import (
    Attention as Attention,
    CrossAttention as CrossAttention,
    RMSNorm as RMSNorm,
    SwiGLU as SwiGLU,
)
from ddlsim.workload.expert_layers import MixtureOfExperts as MixtureOfExperts
from ddlsim.workload.layer_rules import Cost as Cost, Shape as Shape, Size, Spec, need_map, spread, streaming, windows
from ddlsim.workload.token_layers import (
    Embedding as Embedding,
    EmbeddingBag as EmbeddingBag,
    Interaction as Interaction,
    Slice as Slice,
    Take as Take,
    TiedDense as TiedDense,
    TiedEmbedding as TiedEmbedding,
)
from typing import Literal, Protocol


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


@dataclass(frozen=True)
class Conv(Spec):
    """Convolution over any number of spatial dimensions (cross-correlation, zero padding)."""

    channels: int
    kernel: Size
    stride: Size = 1
    padding: Size = 0
    groups: int = 1
    bias: bool = True
    type: Literal["conv"] = "conv"
    positive, not_negative = ("channels", "kernel", "stride", "groups"), ("padding",)

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        n_in, space = in_shape[0], in_shape[1:]
        if n_in % self.groups or self.channels % self.groups:
            raise ConfigError(f"groups = {self.groups} must divide {n_in} input channels and {self.channels}")
        kernel = spread("kernel", self.kernel, len(space))
        stride = spread("stride", self.stride, len(space))
        padding = spread("padding", self.padding, len(space))
        out_space = windows(space, kernel, stride, padding, ceil_mode=False)
        n_weights = self.channels * (n_in // self.groups) * math.prod(kernel)
        tensors = (("weight", n_weights),) + ((("bias", self.channels),) if self.bias else ())
        cost = streaming(in_shape, (self.channels, *out_space), tensors, float(n_weights * math.prod(out_space)))
        # Lavin and Gray 2016: 3x3 convolutions of stride 1; libraries leave grouped ones alone
        return replace(cost, winograd=kernel == (3, 3) and stride == (1, 1) and self.groups == 1)


@dataclass(frozen=True)
class Pool(Spec):
    """Max or average pooling; ``count_padding`` includes the zeros of the padding in an average."""

    type: Literal["max_pool", "avg_pool"]
    kernel: Size
    stride: Size | None = None  # None: the kernel
    padding: Size = 0
    ceil_mode: bool = False
    count_padding: bool = True
    positive, not_negative = ("kernel", "stride"), ("padding",)

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        space = in_shape[1:]
        kernel = spread("kernel", self.kernel, len(space))
        stride = kernel if self.stride is None else spread("stride", self.stride, len(space))
        padding = spread("padding", self.padding, len(space))
        out_space = windows(space, kernel, stride, padding, ceil_mode=self.ceil_mode)
        return streaming(in_shape, (in_shape[0], *out_space))


@dataclass(frozen=True)
class AdaptiveAvgPool(Spec):
    """Average pooling to a fixed spatial size (``size = 1`` is global average pooling)."""

    size: Size
    type: Literal["adaptive_avg_pool"] = "adaptive_avg_pool"
    positive = ("size",)

    def cost(self, in_shape: Shape) -> Cost:
        need_map(in_shape)
        return streaming(in_shape, (in_shape[0], *spread("size", self.size, len(in_shape) - 1)))


@dataclass(frozen=True)
class Dense(Spec):
    """Affine map of the last dimension (of a vector, or of every token)."""

    units: int
    bias: bool = True
    type: Literal["dense"] = "dense"
    positive = ("units",)

    def cost(self, in_shape: Shape) -> Cost:
        if len(in_shape) > 2:
            raise ConfigError(f"needs (features,) or (tokens, features) but gets {in_shape}; put 'flatten' before it")
        n_weights = in_shape[-1] * self.units
        tensors = (("weight", n_weights),) + ((("bias", self.units),) if self.bias else ())
        n_tokens = math.prod(in_shape[:-1])
        return streaming(in_shape, (*in_shape[:-1], self.units), tensors, float(n_tokens * n_weights))


@dataclass(frozen=True)
class BatchNorm(Spec):
    """Batch normalisation per channel with learned scale and shift (Ioffe and Szegedy 2015)."""

    eps: float = 1e-5
    momentum: float = 0.1  # weight of the new batch in the running statistics
    type: Literal["batch_norm"] = "batch_norm"
    fractions = ("eps", "momentum")

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[0]), ("bias", in_shape[0])))


@dataclass(frozen=True)
class LayerNorm(Spec):
    """Layer normalisation of the last dimension with learned scale and shift (Ba, Kiros and Hinton 2016)."""

    eps: float = 1e-5
    type: Literal["layer_norm"] = "layer_norm"
    fractions = ("eps",)

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape, (("weight", in_shape[-1]), ("bias", in_shape[-1])))


@dataclass(frozen=True)
class Activation(Spec):
    """Element-wise non-linearity. ReLU works in place."""

    type: Literal["relu", "gelu", "tanh", "sigmoid"]

    def cost(self, in_shape: Shape) -> Cost:
        n = float(math.prod(in_shape))
        return Cost(in_shape, moved=2.0 * n, stored=0.0 if self.type == "relu" else n)


@dataclass(frozen=True)
class Dropout(Spec):
    """Sets each element to zero with probability ``rate`` while training, or ``whole_channels`` (timing only)."""

    rate: float = 0.5
    whole_channels: bool = False  # torch.nn.Dropout2d
    type: Literal["dropout"] = "dropout"

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise ConfigError(f"rate = {self.rate}: must be in [0, 1)")

    def cost(self, in_shape: Shape) -> Cost:
        return streaming(in_shape, in_shape)


@dataclass(frozen=True)
class Flatten(Spec):
    """A vector of all elements; moves no data."""

    type: Literal["flatten"] = "flatten"

    def cost(self, in_shape: Shape) -> Cost:
        return Cost((math.prod(in_shape),))


class LayerSpec(Protocol):
    """A layer of a model: a frozen dataclass, whose fields are the keys of the file."""

    def cost(self, in_shape: Shape) -> Cost:
        """Return what it makes of one sample of this shape. Raises ConfigError for a shape that does not fit."""


#: ``type`` in a file -> the dataclass that describes it
LAYER_TYPES: dict[str, type[LayerSpec]] = {
    "conv": Conv, "max_pool": Pool, "avg_pool": Pool, "adaptive_avg_pool": AdaptiveAvgPool, "upsample": Upsample,
    "dense": Dense, "tied_dense": TiedDense, "swiglu": SwiGLU, "batch_norm": BatchNorm, "layer_norm": LayerNorm,
    "instance_norm": InstanceNorm, "rms_norm": RMSNorm, "relu": Activation, "leaky_relu": LeakyReLU,
    "gelu": Activation, "tanh": Activation, "sigmoid": Activation, "dropout": Dropout, "flatten": Flatten,
    "embedding": Embedding, "tied_embedding": TiedEmbedding, "embedding_bag": EmbeddingBag,
    "interaction": Interaction, "attention": Attention, "cross_attention": CrossAttention, "take": Take,
    "slice": Slice, "mixture_of_experts": MixtureOfExperts,
}  # fmt: skip
