"""Image models for a different input size: the same parameters with more or fewer pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ddlsim.errors import ConfigError
from ddlsim.workload.activations import with_kept
from ddlsim.workload.layer_rules import Cost, Shape
from ddlsim.workload.model import Concat, Layer, Leaf, Model, Node, Side
from ddlsim.workload.precision import FP32_NBYTES


def resized(model: Model, size: int) -> Model:
    """Return `model` for square images of `size` x `size` pixels, with the same parameters.

    Raises ConfigError if the model has no image input, or if a layer would not fit or would have other parameters (a
    dense layer after pixels that are not pooled to a fixed number).
    """
    if len(model.input_shape) != 3:
        raise ConfigError(
            f"input_size = {size}: applies to images of channels x height x width, but the samples of model "
            f"{model.name!r} have shape {model.input_shape}; remove input_size"
        )
    shape = (model.input_shape[0], size, size)
    if shape == model.input_shape:
        return model
    layers = list(model.layers)
    _sequence(model, layers, model.structure, shape)
    return replace(model, input_shape=shape, layers=with_kept(layers, model.structure))


def _sequence(model: Model, layers: list[Layer], nodes: Sequence[Node], shape: Shape) -> Shape:
    """Fill in the layers of `nodes` for samples of a `shape`; return their output shape."""
    for node in nodes:
        shape = _node(model, layers, node, shape)
    return shape


def _node(model: Model, layers: list[Layer], node: Node, shape: Shape) -> Shape:
    if isinstance(node, Side):
        _sequence(model, layers, node.body, shape)
        return shape
    layer = layers[node.index]
    if isinstance(node, Leaf):
        try:
            cost = node.spec.cost(shape)
        except ConfigError as error:
            raise ConfigError(f"{_owner(model, shape)}: {layer.name}: {error}") from None
        if cost.tensors != layer.tensors:
            n_params = sum(n for _, n in cost.tensors)
            raise ConfigError(
                f"input_size: layer {layer.name} of model {model.name!r} would have {n_params:,} parameters instead of "
                f"{layer.n_params:,}; use the model's own input size, or a model with a pooling layer with a fixed "
                "output size, such as resnet50"
            )
    else:
        outs = [_sequence(model, layers, branch, shape) for branch in node.branches]
        joins = isinstance(node, Concat)  # along the first dimension
        if len({out[1:] if joins else out for out in outs}) > 1:
            raise ConfigError(
                f"{_owner(model, shape)}: {layer.name}: its branches have different output shapes; use another "
                "input_size"
            )
        shape = (sum(out[0] for out in outs), *outs[0][1:]) if joins else outs[0]
        moved = layer.moved_nbytes / layer.activation_nbytes if joins else 3.0
        cost = Cost(shape, moved=moved * math.prod(shape))
    layers[node.index] = replace(
        layer, in_shape=shape, out_shape=cost.out_shape, macs=cost.macs, flops=2.0 * cost.macs,
        activation_nbytes=FP32_NBYTES * math.prod(cost.out_shape), moved_nbytes=FP32_NBYTES * cost.moved,
        stored_nbytes=FP32_NBYTES * cost.stored, winograd=cost.winograd,
    )  # fmt: skip
    return cost.out_shape


def _owner(model: Model, shape: Shape) -> str:
    return f"input_size: model {model.name!r} with samples of shape {shape}"
