"""A model in words: what it is in two lines, and its layers as a table."""

from __future__ import annotations

from ddlsim.readable import si, size
from ddlsim.workload.model import Model

#: columns of the table that are words
LEFT = (0, 1, 2)


def title(model: Model) -> str:
    """Return the model's name, with its title if it has one."""
    return f"{model.name}: {model.title}" if model.title else model.name


def summary(model: Model) -> str:
    """Return its size: parameters, gradients, work and activations of a sample."""
    return (
        f"{model.n_params:,} parameters, {size(model.gradient_nbytes())} of fp32 gradients, "
        f"{si(model.flops, 'FLOP')} forward per sample, activations {size(model.activation_nbytes)} per sample"
    )


def cells(model: Model) -> list[tuple[str, ...]]:
    """Return a row per layer, with a head; the columns :data:`LEFT` hold words."""
    head = ("layer", "type", "output", "parameters", "flops", "activation_nbytes")
    rows = (
        (layer.name, layer.type, " x ".join(map(str, layer.out_shape)), f"{layer.n_params:,}", si(layer.flops, "FLOP"),
         size(layer.activation_nbytes))
        for layer in model.layers
    )  # fmt: skip
    return [head, *rows]
