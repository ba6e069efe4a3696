"""A neural network as a sequence of leaf layers with derived sizes and costs.

``load_model("resnet50")`` reads a bundled file, ``load_model("my.toml")`` a custom one, and
``load_model("config.json")`` a file from another tool (:mod:`ddlsim.imports.models`). Parts of a file marked ``option =
"aux"`` are omitted unless requested by name, as in ``load_model("googlenet+aux")``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from ddlsim.arguments import Count, checked
from ddlsim.bundled import loaded_from, split_options
from ddlsim.errors import ConfigError
from ddlsim.readable import count, si, size
from ddlsim.workload.layer_rules import MAX_ELEMENTS, Shape
from ddlsim.workload.layers import LayerSpec


@dataclass(frozen=True)
class Layer:
    """One leaf layer; all sizes are for one sample, and bytes are those of fp32.

    ``flops`` is 2 * ``macs``; ``tensors`` are (parameter tensor name, elements) in declaration order; ``moved_nbytes``
    is the activation traffic of the forward pass; ``stored_nbytes`` is kept until the backward pass (0 for in-place
    layers); ``input_grad`` is false if nothing before the layer has parameters, so that its backward pass computes no
    input gradient; the gradients of a ``model_parallel`` layer are not exchanged between data-parallel workers;
    ``winograd`` layers need fewer multiplications than ``macs`` in fp32; ``window`` is the number of elements of the
    kernel of a convolution or of pooling, 0 for other layers and if unknown.

    ``fixed_nbytes`` are also kept until the backward pass, but do not depend on the precision: masks of dropout, a byte
    per element, and the fp32 logits of a loss over tokens. For attention layers, ``heads`` is the number of heads,
    ``head_size`` their features, ``scores`` the elements of the matrices of all heads, half of them masked if
    ``causal``, and ``rotated`` the elements that rotary positions and norms of queries and keys read and write;
    otherwise all are 0. ``unit`` is the index of the entry at the file's top level (each repetition of a residual
    counts); between two units, only one tensor is alive. ``block`` is the number of the transformer layer that contains
    the layer, from 1; -1 for layers outside of them, and 0 in networks without them.
    """

    name: str
    type: str
    in_shape: Shape
    out_shape: Shape
    n_params: int
    macs: float
    flops: float
    activation_nbytes: float
    tensors: tuple[tuple[str, int], ...]
    moved_nbytes: float = 0.0
    stored_nbytes: float = 0.0
    input_grad: bool = True
    model_parallel: bool = False
    winograd: bool = False
    fixed_nbytes: float = 0.0
    heads: int = 0
    scores: int = 0
    causal: bool = False
    rotated: float = 0.0
    unit: int = 0
    block: int = 0
    head_size: int = 0
    window: int = 0


@dataclass(frozen=True)
class Leaf:
    """A layer to execute: ``spec`` defines the operation, ``Model.layers[index]`` its cost."""

    index: int
    spec: LayerSpec


@dataclass(frozen=True)
class Residual:
    """``body(x) + shortcut(x)``; an empty shortcut is the identity. The sum is leaf layer ``index``."""

    body: tuple[Node, ...]
    shortcut: tuple[Node, ...]
    index: int

    @property
    def branches(self) -> tuple[tuple[Node, ...], ...]:
        return self.body, self.shortcut


@dataclass(frozen=True)
class Concat:
    """The outputs of all branches for the same input, joined along the first dimension by leaf ``index``."""

    branches: tuple[tuple[Node, ...], ...]
    index: int


@dataclass(frozen=True)
class Side:
    """A branch with its own loss; the main path continues with this node's input."""

    body: tuple[Node, ...]


Node = Leaf | Residual | Concat | Side


@checked
@dataclass(frozen=True)
class Model:
    """A neural network: its layers, their costs, and how the layers are connected.

    name, title  short name and description of the model
    input_shape  shape of one sample
    layers       all layers in forward order
    trainable    whether gradients can be computed for every layer type. If not, the model can only be used in
                 timing-only runs
    sources      papers and code on which the model is based
    structure    connections between the layers
    options      optional parts that were included when the model was loaded, and parameters that were set
    notes        assumptions made when the model was imported from another tool. They are copied to the results of
                 simulations
    """

    name: str
    title: str
    input_shape: tuple[Count, ...]
    layers: tuple[Layer, ...]
    trainable: bool
    sources: tuple[str, ...]
    structure: tuple[Node, ...] = ()
    options: tuple[str, ...] = ()  # optional parts that were included, and parameters that were set
    notes: tuple[str, ...] = ()  # assumptions about an imported model, which results repeat

    def __post_init__(self) -> None:
        if not self.input_shape or math.prod(self.input_shape) > MAX_ELEMENTS:
            raise ConfigError(
                f"model {self.name!r}: input_shape = {self.input_shape}: must have at least one dimension and at most "
                f"{MAX_ELEMENTS:.0e} elements"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.input_shape, len(self.layers)))  # the values of all layers take a millisecond

    def __repr__(self) -> str:
        return f"<Model {self.name!r}: {self.n_params:,} parameters, {count(len(self.layers), 'layer')}>"

    def _repr_html_(self) -> str:
        from ddlsim.notebook import folded, grid, lines, page

        layers = count(len(self.layers), "layer")
        return page(title(self), lines([summary(self)]), folded(layers, grid(cells(self), LEFT)))

    @property
    def n_params(self) -> int:
        """Number of learned parameters, without the running statistics of batch normalisation."""
        return sum(layer.n_params for layer in self.layers)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Role of each layer when tensor-parallel ranks split the model (:mod:`ddlsim.workload.roles`)."""
        from ddlsim.workload.roles import roles

        return roles(self.layers)

    @property
    def macs(self) -> float:
        """Multiply-accumulates in the forward pass of one sample."""
        return sum(layer.macs for layer in self.layers)

    @property
    def tokens(self) -> int | None:
        """Tokens per sample for models with attention over embedded tokens; None for other models."""
        embedded = (layer.in_shape[0] for layer in self.layers if layer.type == "embedding")
        return next(embedded, None) if any(layer.heads for layer in self.layers) else None

    @property
    def flops(self) -> float:
        """Floating-point operations in the forward pass of one sample, two per multiply-accumulate."""
        return sum(layer.flops for layer in self.layers)

    @property
    def activation_nbytes(self) -> float:
        """Bytes of fp32 activations of one sample that are kept for the backward pass."""
        return sum(layer.stored_nbytes + layer.fixed_nbytes for layer in self.layers)

    def gradient_nbytes(self, bytes_per_element: int = 4) -> float:
        """Return the bytes of gradients that data-parallel workers exchange per step."""
        return float(bytes_per_element * sum(layer.n_params for layer in self.layers if not layer.model_parallel))


ModelLike = Annotated[str | Path | Model, "the name of a bundled model, a path, a configuration or a Model"]


@checked
def load_model(
    source: ModelLike, *, layers: Mapping[str, type] = MappingProxyType({}), allow_code: bool = False
) -> Model:
    """Load a model by its bundled name or from a file.

    source      a bundled name (see :func:`model_names`), the path to a ``.toml`` file, or a :class:`Model`, which is
                returned unchanged. Append ``+option`` to include the parts of the file marked with that option,
                ``+parameter=value`` to set a parameter of the model, or ``-size`` (``+size`` for a path) to select one
                of its sizes. Other accepted formats are a Hugging Face config.json, Megatron-LM arguments and a table
                of tensors. Each can be given as a path (such as ``"config.json+seq=8192"``) or as a string with its
                contents (:mod:`ddlsim.imports.models`)
    layers      custom layer types: a mapping from type names in the file to classes (docs/write_your_own/layer.md)
    allow_code  whether the file may contain layer types such as ``"package.module:Name"``, which imports and runs that
                module

    Raises :class:`~ddlsim.errors.ConfigError` for an unknown name or option, and for an invalid file.
    """
    if isinstance(source, Model):
        return source
    from ddlsim.workload.model_build import find_model_file, is_foreign, read_bundled, read_model

    stem, options = split_options(str(source))
    if is_foreign(source, stem):
        from ddlsim.imports.models import import_model

        model = import_model(source, stem, options)
    else:
        path, chosen, is_bundled = find_model_file(source, stem, options)
        if is_bundled and not layers:
            model = read_bundled(path, chosen, os.stat(path).st_mtime_ns)
        else:
            model = read_model(path, chosen, layers, allow_code=allow_code)
            if layers or allow_code:
                return model
    return loaded_from(model, source)


def model_names() -> list[str]:
    """Return the sorted names of the bundled models."""
    from ddlsim.workload.model_names import bundled_names

    return bundled_names()


def tensor_shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, shape) of every tensor that data-parallel workers exchange, in forward declaration order.

    A weight is (rows, columns) with one row per output (channel, unit) or per token of an embedding; the columns of a
    convolution are its input channels times its kernel. All other tensors are vectors (elements,).
    """
    return tuple(
        (f"{layer.name}.{name}", _shape(layer, name, n))
        for layer in model.layers
        if not layer.model_parallel
        for name, n in layer.tensors
    )


def _shape(layer: Layer, name: str, n: int) -> tuple[int, ...]:
    if layer.type == "embedding":  # tables of tokens, positions and types
        return n // layer.out_shape[-1], layer.out_shape[-1]
    if not name.endswith("weight"):
        return (n,)
    if layer.type == "conv":
        return layer.out_shape[0], n // layer.out_shape[0]
    if layer.type in ("dense", "patch_embedding"):
        return layer.out_shape[-1], n // layer.out_shape[-1]
    if name == "out.weight":  # heads together can have more features than a token
        return layer.out_shape[-1], n // layer.out_shape[-1]
    if layer.type in ("attention", "cross_attention", "swiglu", "mixture_of_experts"):  # projections of the features
        return n // layer.in_shape[-1], layer.in_shape[-1]
    return (n,)


#: left-aligned columns of the table
LEFT = (0, 1, 2)


def title(model: Model) -> str:
    """Return the model's name, and its title if it has one."""
    return f"{model.name}: {model.title}" if model.title else model.name


def summary(model: Model) -> str:
    """Return a line with parameters, gradients, FLOPs and activations per sample."""
    return (
        f"{model.n_params:,} parameters, {size(model.gradient_nbytes())} of fp32 gradients, "
        f"{si(model.flops, 'FLOP')} forward per sample, activations {size(model.activation_nbytes)} per sample"
    )


def cells(model: Model) -> list[tuple[str, ...]]:
    """Return a header and one row per layer; the columns :data:`LEFT` contain text."""
    head = ("layer", "type", "output", "parameters", "flops", "activation_nbytes")
    rows = []
    for layer in model.layers:
        words = (layer.name, layer.type, " x ".join(map(str, layer.out_shape)))
        rows.append((*words, f"{layer.n_params:,}", si(layer.flops, "FLOP"), size(layer.activation_nbytes)))
    return [head, *rows]
