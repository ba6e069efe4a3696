"""Shape and cost rules shared by the layer types."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddlsim.errors import ConfigError

Shape = tuple[int, ...]
MAX_SIZE = 10**9  # per number; products of a few still fit a float
Size = int | tuple[int, ...]
MAX_DIMS = 6  # of a layer's input
#: elements of one sample at any layer, and parameters of a model. The limit is far above the largest models (an hour of
#: 4K video has 2e12 pixel values, the largest published models have 1e13 parameters), so it detects typing errors
MAX_ELEMENTS, MAX_PARAMETERS = 10**13, 10**14


@dataclass(frozen=True)
class Cost:
    """Cost of a layer for one sample, as returned by custom layer types.

    out_shape  shape of the output
    tensors    (name, number of elements) of each parameter tensor, in declaration order
    macs       number of multiply-accumulate operations in the forward pass
    moved      number of elements read and written in the forward pass, not counting parameters
    stored     number of elements kept for the backward pass; 0 for in-place layers
    winograd   whether fp32 libraries compute this convolution with Winograd's minimal filtering algorithm
    window     number of elements of the kernel of a convolution or of pooling; 0 for other layers
    """

    out_shape: Shape
    tensors: tuple[tuple[str, int], ...] = ()
    macs: float = 0.0
    moved: float = 0.0
    stored: float = 0.0
    winograd: bool = False
    window: int = 0


def streaming(in_shape: Shape, out_shape: Shape, tensors: tuple[tuple[str, int], ...] = (), macs: float = 0.0) -> Cost:
    """Return the cost of a layer that reads its input once and writes an output that is kept for the backward pass.

    in_shape   shape of the layer's input for one sample
    out_shape  shape of the layer's output for one sample
    tensors    (name, number of elements) of each parameter tensor
    macs       number of multiply-accumulate operations in the forward pass
    """
    n_in, n_out = math.prod(in_shape), math.prod(out_shape)
    return Cost(out_shape, tensors, macs, float(n_in + n_out), float(n_out))


class Spec:
    """Base of the bundled layers. Files that describe them are checked against the annotations of their fields."""


def spread(key: str, value: Size, n_dims: int) -> Shape:
    """Return `value` for each of `n_dims` spatial dimensions."""
    if isinstance(value, int):
        return (value,) * n_dims
    if len(value) != n_dims:
        values = list(value)
        raise ConfigError(
            f"{key} = {values}: got {len(values)} numbers, expected one for each of the {n_dims} spatial dimensions"
        )
    return value


def need_map(in_shape: Shape) -> None:
    if len(in_shape) < 2:
        raise ConfigError(
            f"the input must have shape (channels, height, width), not {in_shape}; move the layer before 'flatten'"
        )


def need_tokens(in_shape: Shape) -> None:
    if len(in_shape) != 2:
        raise ConfigError(
            f"the input must have shape (tokens, features), not {in_shape}; add an 'embedding' before this layer"
        )


def windows(space: Shape, kernel: Shape, stride: Shape, padding: Shape, *, ceil_mode: bool) -> Shape:
    """Return the number of windows along each dimension (torch.nn.MaxPool2d, "Shape" and ``ceil_mode``)."""
    out = []
    for n, k, s, p in zip(space, kernel, stride, padding, strict=True):
        if n + 2 * p < k:
            raise ConfigError(
                f"kernel {kernel} is larger than the input {space} with padding {padding}; use a smaller kernel"
            )
        count = (n + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (count - 1) * s >= n + p:  # the last window must not start in the right padding
            count -= 1
        out.append(count)
    return tuple(out)
