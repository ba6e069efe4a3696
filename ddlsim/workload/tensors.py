"""The shapes of a model's tensors, for algorithms that look at matrices."""

from __future__ import annotations

from ddlsim.workload.model import Layer, Model


def tensor_shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, shape) of every tensor that data-parallel workers exchange, in forward declaration order.

    A weight is (rows, columns) with a row per output (channel, unit), or per token of an embedding; a
    convolution's columns are its input channels times its kernel. Everything else is a vector (elements,).
    """
    return tuple(
        (f"{layer.name}.{name}", _shape(layer, name, n))
        for layer in model.layers
        if not layer.model_parallel
        for name, n in layer.tensors
    )


def _shape(layer: Layer, name: str, n: int) -> tuple[int, ...]:
    if layer.type == "embedding":  # tables of tokens, positions, types
        return n // layer.out_shape[-1], layer.out_shape[-1]
    if not name.endswith("weight"):
        return (n,)
    if layer.type == "conv":
        return layer.out_shape[0], n // layer.out_shape[0]
    if layer.type == "dense":
        return layer.out_shape[-1], n // layer.out_shape[-1]
    if layer.type in ("attention", "cross_attention", "swiglu", "mixture_of_experts"):  # projections of the features
        return n // layer.in_shape[-1], layer.in_shape[-1]
    return (n,)
