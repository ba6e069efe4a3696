"""From a model's description to layers that run (imports numba through them)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.nn.conv_layer import Conv2d, Pool2d, adaptive_windows, pool_windows
from ddlsim.nn.layers import Chain, Dense, Dropout, Elementwise, Join, Pure, Sum, ToMaps, ToRows, asked_for
from ddlsim.nn.norm_layer import BatchNorm2d, LayerNorm
from ddlsim.nn.parameters import Parameter, normal, uniform
from ddlsim.nn.pass_state import Array, Buffers, Layer, PureLayer, Slot
from ddlsim.nn.recommendation_layers import EmbeddingBag, Interaction
from ddlsim.nn.token_layers import Attention, Embedding, Take, TiedDense
from ddlsim.workload import layers as specs
from ddlsim.workload.layer_rules import Shape, spread
from ddlsim.workload.model import Concat, Leaf, Model, Node, Residual

_OF_TOKENS = (specs.Embedding, specs.Attention, specs.TiedDense, specs.Take)
_OF_ROWS = (specs.Dense, specs.LayerNorm, specs.Flatten, specs.EmbeddingBag, specs.Interaction, *_OF_TOKENS)
_FRESH = (Conv2d, Dense, BatchNorm2d, Sum)  # their output is theirs alone and they do not look at it again


@dataclass
class _Built:
    """Layers so far, and whether what leaves them is maps (True) or rows."""

    layers: list[Layer]
    maps: bool


@dataclass
class Builder:
    """Walks a model's nodes; collects parameters and running statistics as it meets them."""

    model: Model
    dtype: np.dtype[np.floating]
    parameters: list[Parameter] = field(default_factory=list)
    state: list[Parameter] = field(default_factory=list)
    embedding: Slot | None = None  # the first table of tokens
    ids: list[int] = field(default_factory=list)  # below which the last numbers of a sample are whole
    n_streams: int = 0  # layers of users that draw random numbers

    @property
    def vocabulary(self) -> int:
        """Of how many tokens samples are made; 0 if they are any numbers."""
        return self.embedding.shape[0] if self.embedding is not None else 0

    def whole(self) -> Chain:
        """Return the network, from rows to rows."""
        built = self._chain(self.model.structure, maps=False, follows="")
        last = self.model.layers[-1].out_shape
        self._lay_out(built, False, last, input_grad=True)
        return Chain(built.layers)

    def _chain(self, nodes: Sequence[Node], *, maps: bool, follows: str) -> _Built:
        built = _Built([], maps)
        for i, node in enumerate(nodes):
            after = _activation_after(nodes, i, follows)
            if isinstance(node, Leaf):
                self._leaf(node, built, after)
            elif isinstance(node, Residual):
                body = self._chain(node.body, maps=built.maps, follows=after)
                shortcut = self._chain(node.shortcut, maps=built.maps, follows=after)
                shape = self.model.layers[node.index].out_shape
                for part in (body, shortcut):
                    self._lay_out(part, body.maps, shape, input_grad=True)
                built.layers.append(Sum(Chain(body.layers), Chain(shortcut.layers), self._buffers()))
                built.maps = body.maps
            elif isinstance(node, Concat):
                self._concat(node, built, after)
            else:
                raise ConfigError(
                    f"model {self.model.name!r}: heads with a loss of their own are not trained; "
                    "load the model without its optional parts"
                )
        return built

    def _concat(self, node: Concat, built: _Built, follows: str) -> None:
        branches = [self._chain(branch, maps=built.maps, follows=follows) for branch in node.branches]
        maps = branches[0].maps
        for branch, nodes in zip(branches, node.branches, strict=True):
            shape = self.model.layers[_last_leaf(nodes)].out_shape if nodes else None
            if shape is not None:
                self._lay_out(branch, maps, shape, input_grad=True)
        built.layers.append(Join([Chain(branch.layers) for branch in branches], self._buffers()))
        built.maps = maps

    def _buffers(self) -> Buffers:
        return Buffers(self.dtype)

    def _lay_out(self, built: _Built, maps: bool, shape: Shape, *, input_grad: bool) -> None:
        """Append a change of layout where what leaves `built` is not what the next layer wants."""
        if built.maps == maps:
            return
        channels, space = shape[0], _space(shape)
        kind = ToMaps if maps else ToRows
        built.layers.append(kind(channels, space, input_grad, self._buffers()))
        built.maps = maps

    def _slot(
        self, into: list[Parameter], name: str, shape: tuple[int, ...], value: float | None = None,
        fans: tuple[int, int] = (0, 0), follows: str = "", momentum: float = 0.0,
    ) -> Slot:  # fmt: skip
        start = into[-1].slot.stop if into else 0
        slot = Slot(name, shape, start, start + math.prod(shape))
        into.append(Parameter(slot, value, *fans, follows, momentum))
        return slot

    def _leaf(self, leaf: Leaf, built: _Built, follows: str) -> None:
        layer, spec = self.model.layers[leaf.index], leaf.spec
        shape, name = layer.in_shape, layer.name
        if isinstance(spec, specs.Conv | specs.Pool | specs.AdaptiveAvgPool | specs.BatchNorm):
            if isinstance(spec, specs.BatchNorm) and len(shape) == 1:
                shape = (*shape, 1, 1)
            if len(shape) not in (2, 3):
                raise self._cannot(name, f"{layer.type} on shape {shape}: only one or two spatial dimensions run")
            self._lay_out(built, True, shape, input_grad=layer.input_grad)
        elif isinstance(spec, _OF_ROWS) or _is_pure(spec):
            self._lay_out(built, False, shape, input_grad=layer.input_grad)
        built.layers += self._make(leaf, built, shape, follows)

    def _make(self, leaf: Leaf, built: _Built, shape: Shape, follows: str) -> list[Layer]:
        layer, spec, buffers = self.model.layers[leaf.index], leaf.spec, self._buffers()
        if isinstance(spec, specs.Conv):
            return [self._conv(leaf, spec, shape, follows)]
        if isinstance(spec, specs.Pool | specs.AdaptiveAvgPool):
            return [self._pool(leaf, spec, shape)]
        if isinstance(spec, specs.Dense):
            features = shape[-1]
            fans = (features, spec.units)
            weight = self._slot(self.parameters, f"{layer.name}.weight", (spec.units, features), None, fans, follows)
            bias = self._slot(self.parameters, f"{layer.name}.bias", (spec.units,), 0.0) if spec.bias else None
            return [Dense(features, spec.units, weight, bias, layer.input_grad, buffers)]
        if isinstance(spec, specs.BatchNorm | specs.LayerNorm):
            n = shape[0] if isinstance(spec, specs.BatchNorm) else shape[-1]
            weight = self._slot(self.parameters, f"{layer.name}.weight", (n,), 1.0)
            shift = self._slot(self.parameters, f"{layer.name}.bias", (n,), 0.0)
            if isinstance(spec, specs.LayerNorm):
                return [LayerNorm(n, spec.eps, weight, shift, buffers)]
            mean = self._slot(self.state, f"{layer.name}.running_mean", (n,), 0.0, momentum=spec.momentum)
            variance = self._slot(self.state, f"{layer.name}.running_var", (n,), 1.0, momentum=spec.momentum)
            return [BatchNorm2d(n, _space(shape), spec.eps, spec.momentum, weight, shift, mean, variance, buffers)]
        if isinstance(spec, specs.Activation):
            in_place = spec.type == "relu" and bool(built.layers) and isinstance(built.layers[-1], _FRESH)
            return [Elementwise(spec.type, in_place, buffers)]
        if isinstance(spec, specs.Dropout) and not spec.whole_channels:
            return [Dropout(spec.rate, buffers)]
        if isinstance(spec, specs.Flatten):
            return []
        if isinstance(spec, _OF_TOKENS):
            return [self._of_tokens(leaf, spec, shape)]
        if isinstance(spec, specs.Interaction):
            return [Interaction(spec.dim, buffers)]
        if isinstance(spec, specs.EmbeddingBag):
            return [self._bags(layer.name, spec, shape)]
        if _is_pure(spec):
            return [self._pure(leaf, cast(PureLayer, spec), shape)]
        raise self._cannot(
            layer.name, f"layers of type {layer.type!r} have costs but no gradients (no methods forward and backward)"
        )

    def _of_tokens(
        self, leaf: Leaf, spec: specs.Embedding | specs.Attention | specs.TiedDense | specs.Take, shape: Shape
    ) -> Layer:
        name, buffers = self.model.layers[leaf.index].name, self._buffers()
        if isinstance(spec, specs.Embedding):
            rows = (("tokens", spec.vocabulary), ("positions", spec.positions), ("types", spec.types))
            tokens, places, kind = (self._table(f"{name}.{what}", (n, spec.dim)) for what, n in rows)
            assert tokens is not None
            self.embedding = self.embedding or tokens
            return Embedding(name, tokens, places, kind, buffers)
        if isinstance(spec, specs.Take):
            return Take(spec.count * math.prod(shape[1:]), buffers)
        if isinstance(spec, specs.TiedDense):
            if self.embedding is None or self.embedding.shape != (spec.units, shape[-1]):
                raise self._cannot(name, f"no embedding of {spec.units} tokens and {shape[-1]} features comes before")
            bias = self._slot(self.parameters, f"{name}.bias", (spec.units,), 0.0) if spec.bias else None
            return TiedDense(self.embedding, bias, buffers)
        for key, value in (("kv_heads", spec.kv_heads), ("rotary", spec.rotary), ("bias", not spec.bias)):
            if value:
                raise self._cannot(name, f"attention with {key} set has costs but no gradients; leave it out")
        d = shape[-1]
        projections = ("qkv",) if spec.fused else ("query", "key", "value")
        *first, last = (self._projection(f"{name}.{what}", d, 3 * d if what == "qkv" else d)
                        for what in (*projections, "out"))  # fmt: skip
        weights, biases = [slots[0] for slots in first], [slots[1] for slots in first]
        return Attention(d, spec.heads, spec.causal, weights, biases, *last, buffers)

    def _bags(self, name: str, spec: specs.EmbeddingBag, shape: Shape) -> EmbeddingBag:
        """Return tables whose rows start uniform in +-1 / sqrt(rows), as the DLRM code's do."""
        n_ids = len(spec.tables) * spec.pooling
        if len(shape) != 1 or shape[0] < n_ids:
            raise self._cannot(name, f"it looks up {n_ids} ids, which must be the last of its inputs {shape}")
        slots = []
        for i, rows in enumerate(spec.tables):
            slots.append(self._slot(self.parameters, f"{name}.table{i}", (rows, spec.dim)))
            draw = functools.partial(uniform, (rows, spec.dim))
            self.parameters[-1] = dataclasses.replace(self.parameters[-1], draw=draw)
        self.ids += [rows for rows in spec.tables for _ in range(spec.pooling)]
        return EmbeddingBag(name, slots, spec.pooling, self._buffers())

    def _table(self, name: str, shape: tuple[int, int]) -> Slot | None:
        """Return the slot of an embedding, normal with deviation 0.02 (Radford et al. 2018, GPT, section 4.1)."""
        if not shape[0]:
            return None
        slot = self._slot(self.parameters, name, shape)
        draw = functools.partial(normal, shape)
        self.parameters[-1] = dataclasses.replace(self.parameters[-1], draw=draw)
        return slot

    def _projection(self, name: str, features: int, units: int) -> tuple[Slot, Slot]:
        fans = (features, features)  # of each of the matrices that lie together
        weight = self._slot(self.parameters, f"{name}.weight", (units, features), None, fans)
        return weight, self._slot(self.parameters, f"{name}.bias", (units,), 0.0)

    def _pure(self, leaf: Leaf, rule: PureLayer, shape: Shape) -> Pure:
        """Return a layer that is written in pure functions, and make slots for its tensors."""
        layer = self.model.layers[leaf.index]

        def initial(rng: np.random.Generator) -> dict[str, Array]:
            return dict(rule.init(shape, rng)) if layer.tensors else {}  # type: ignore[attr-defined]

        if layer.tensors and not hasattr(rule, "init"):
            raise self._cannot(layer.name, "it has tensors, but no method init(in_shape, rng) that makes them")
        tensors = initial(np.random.default_rng(0))
        if {name: np.size(array) for name, array in tensors.items()} != dict(layer.tensors):
            sizes = {name: np.size(array) for name, array in tensors.items()}
            raise self._cannot(layer.name, f"init makes {sizes} elements, cost says {dict(layer.tensors)}")
        slots = {}
        for name, _ in layer.tensors:
            slots[name] = self._slot(self.parameters, f"{layer.name}.{name}", np.shape(tensors[name]))
            draw = functools.partial(_drawn, initial, name)
            self.parameters[-1] = dataclasses.replace(self.parameters[-1], draw=draw)
        buffers, momentum = {}, float(getattr(rule, "momentum", 0.1))
        for name, start in (rule.buffers(shape) if hasattr(rule, "buffers") else {}).items():
            buffers[name] = self._slot(self.state, f"{layer.name}.{name}", np.shape(start), momentum=momentum)
            self.state[-1] = dataclasses.replace(self.state[-1], draw=functools.partial(_constant, start))
        self.n_streams += "rng" in asked_for(rule)
        return Pure(layer.name, rule, shape, layer.out_shape, slots, buffers, momentum, self.n_streams - 1)

    def _conv(self, leaf: Leaf, spec: specs.Conv, shape: Shape, follows: str) -> Conv2d:
        layer, n_in = self.model.layers[leaf.index], shape[0] // spec.groups
        kernel = _pair("kernel", spec.kernel, shape, 1)
        fans = (n_in * math.prod(kernel), spec.channels // spec.groups * math.prod(kernel))
        sizes = (spec.channels, n_in, *(kernel if len(shape) == 3 else kernel[1:]))
        weight = self._slot(self.parameters, f"{layer.name}.weight", sizes, None, fans, follows)
        bias = self._slot(self.parameters, f"{layer.name}.bias", (spec.channels,), 0.0) if spec.bias else None
        return Conv2d(
            spec.channels, shape[0], _space(shape), _space(layer.out_shape), kernel,
            _pair("stride", spec.stride, shape, 1), _pair("padding", spec.padding, shape, 0), spec.groups,
            weight, bias, layer.input_grad, self._buffers(),
        )  # fmt: skip

    def _pool(self, leaf: Leaf, spec: specs.Pool | specs.AdaptiveAvgPool, shape: Shape) -> Pool2d:
        layer, space = self.model.layers[leaf.index], _space(shape)
        out = _space(layer.out_shape)
        if isinstance(spec, specs.AdaptiveAvgPool):
            windows = [adaptive_windows(n, o) for n, o in zip(space, out, strict=True)]
        else:
            kernel = _pair("kernel", spec.kernel, shape, 1)
            stride = kernel if spec.stride is None else _pair("stride", spec.stride, shape, 1)
            padding = _pair("padding", spec.padding, shape, 0)
            sizes = zip(space, out, kernel, stride, padding, strict=True)
            windows = [pool_windows(*size, count_padding=spec.count_padding) for size in sizes]
        if any((window.last <= window.first).any() for window in windows):
            raise self._cannot(layer.name, "a window lies wholly in the padding; make padding at most kernel / 2")
        kind: Literal["max", "average"] = "max" if layer.type == "max_pool" else "average"
        return Pool2d(kind, shape[0], space, out, (windows[0], windows[1]), layer.input_grad, self._buffers())

    def _cannot(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"model {self.model.name!r}: layer {name!r} cannot be trained: {why}")


def _is_pure(spec: specs.LayerSpec) -> bool:
    return hasattr(spec, "forward") and hasattr(spec, "backward")


def _drawn(initial: Callable[[np.random.Generator], dict[str, Array]], name: str, rng: np.random.Generator) -> Array:
    return initial(rng)[name]


def _constant(value: Array, rng: np.random.Generator) -> Array:
    return value


def _space(shape: Shape) -> tuple[int, int]:
    """Return (height, width) of a map; missing dimensions have size 1."""
    height, width = (1, 1, *shape[1:])[-2:]
    return height, width


def _pair(key: str, value: int | tuple[int, ...], shape: Shape, missing: int) -> tuple[int, int]:
    values = spread(key, value, len(shape) - 1)
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def _last_leaf(nodes: Sequence[Node]) -> int:
    node = nodes[-1]
    if isinstance(node, Leaf | Residual | Concat):
        return node.index
    return _last_leaf(nodes[:-1])


def _activation_after(nodes: Sequence[Node], i: int, follows: str) -> str:
    """Return the activation that node `i` feeds, looking past layers without weights of a kind to scale."""
    for node in nodes[i + 1 :]:
        if not isinstance(node, Leaf):
            return ""
        if isinstance(node.spec, specs.Activation):
            return node.spec.type
        if isinstance(node.spec, specs.Conv | specs.Dense):
            return ""
    return follows
