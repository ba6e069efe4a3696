"""Trainable networks of models: from flat parameters to the loss and its flat gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Seed, checked, validated_by
from ddlsim.errors import ConfigError, shown
from ddlsim.nn import Loss, row_kernels
from ddlsim.nn import layers as nn
from ddlsim.nn.layer_rules import held_to_rules
from ddlsim.nn.layers import Array, Buffers, Layer, Pass, PureLayer, Slot
from ddlsim.streams import stream
from ddlsim.workload import layers as specs
from ddlsim.workload.layer_rules import Shape, spread
from ddlsim.workload.model import Concat, Leaf, Model, ModelLike, Node, Residual, load_model

_OF_TOKENS = (specs.Embedding, specs.Attention, specs.TiedDense, specs.Take)
_OF_ROWS = (specs.Dense, specs.LayerNorm, specs.Flatten, specs.EmbeddingBag, specs.Interaction, *_OF_TOKENS)
_FRESH = (nn.Conv2d, nn.Dense, nn.BatchNorm2d, nn.Sum)  # their output is a new array that they do not read again


@dataclass
class _Built:
    """Layers so far, and whether their output has the layout of maps (True) or of rows."""

    layers: list[Layer]
    maps: bool


@dataclass
class Builder:
    """Walks a model's nodes, and collects their parameters and running statistics."""

    model: Model
    dtype: np.dtype[np.floating]
    parameters: list[Parameter] = field(default_factory=list)
    state: list[Parameter] = field(default_factory=list)
    embedding: Slot | None = None  # the first table of tokens
    ids: list[int] = field(default_factory=list)  # upper limits of the integers at the end of a sample
    n_streams: int = 0  # custom layers that use random numbers

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 0 if samples are arbitrary numbers."""
        return self.embedding.shape[0] if self.embedding is not None else 0

    def build(self) -> nn.Chain:
        """Return the whole network, with rows as input and output."""
        built = self._chain(self.model.structure, maps=False, follows="")
        self._lay_out(built, False, self.model.layers[-1].out_shape, input_grad=True)
        return nn.Chain(built.layers)

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
                built.layers.append(nn.Sum(nn.Chain(body.layers), nn.Chain(shortcut.layers), Buffers(self.dtype)))
                built.maps = body.maps
            elif isinstance(node, Concat):
                self._concat(node, built, after)
            else:
                raise ConfigError(
                    f"model {self.model.name!r}: auxiliary heads with their own loss cannot be trained; load the model "
                    "without its optional parts"
                )
        return built

    def _concat(self, node: Concat, built: _Built, follows: str) -> None:
        branches = [self._chain(branch, maps=built.maps, follows=follows) for branch in node.branches]
        built.maps = branches[0].maps
        for branch, nodes in zip(branches, node.branches, strict=True):
            if nodes:
                self._lay_out(branch, built.maps, self.model.layers[_last_leaf(nodes)].out_shape, input_grad=True)
        built.layers.append(nn.Join([nn.Chain(branch.layers) for branch in branches], Buffers(self.dtype)))

    def _lay_out(self, built: _Built, maps: bool, shape: Shape, *, input_grad: bool) -> None:
        """Append a change of layout if `built` has another one than `maps`."""
        if built.maps != maps:
            built.layers.append(nn.Relayout(maps, shape[0], _space(shape), input_grad, Buffers(self.dtype)))
            built.maps = maps

    def _slot(self, into: list[Parameter], name: str, shape: tuple[int, ...], *start_values: Any, **more: Any) -> Slot:
        """Append a tensor; `start_values` and `more` are the fields of :class:`Parameter` after its slot."""
        start = into[-1].slot.stop if into else 0
        slot = Slot(name, shape, start, start + math.prod(shape))
        into.append(Parameter(slot, *(start_values or (None,)), **more))
        return slot

    def _leaf(self, leaf: Leaf, built: _Built, follows: str) -> None:
        layer, spec = self.model.layers[leaf.index], leaf.spec
        shape, name = layer.in_shape, layer.name
        if isinstance(spec, specs.Conv | specs.Pool | specs.AdaptiveAvgPool | specs.BatchNorm):
            if isinstance(spec, specs.BatchNorm) and len(shape) == 1:
                shape = (*shape, 1, 1)
            if len(shape) not in (2, 3):
                raise self._cannot(
                    name, f"{layer.type} supports one or two spatial dimensions, but its input has shape {shape}"
                )
            self._lay_out(built, True, shape, input_grad=layer.input_grad)
        elif isinstance(spec, _OF_ROWS) or _is_pure(spec):
            self._lay_out(built, False, shape, input_grad=layer.input_grad)
        built.layers += self._make(leaf, built, shape, follows)

    def _make(self, leaf: Leaf, built: _Built, shape: Shape, follows: str) -> list[Layer]:
        layer, spec, buffers = self.model.layers[leaf.index], leaf.spec, Buffers(self.dtype)
        if isinstance(spec, specs.Conv):
            return [self._conv(leaf, spec, shape, follows)]
        if isinstance(spec, specs.Pool | specs.AdaptiveAvgPool):
            return [self._pool(leaf, spec, shape)]
        if isinstance(spec, specs.Dense):
            features = shape[-1]
            fans = (features, spec.units)
            weight = self._slot(self.parameters, f"{layer.name}.weight", (spec.units, features), None, *fans, follows)
            bias = self._slot(self.parameters, f"{layer.name}.bias", (spec.units,), 0.0) if spec.bias else None
            return [nn.Dense(features, spec.units, weight, bias, layer.input_grad, buffers)]
        if isinstance(spec, specs.BatchNorm | specs.LayerNorm):
            n = shape[0] if isinstance(spec, specs.BatchNorm) else shape[-1]
            weight = self._slot(self.parameters, f"{layer.name}.weight", (n,), 1.0)
            shift = self._slot(self.parameters, f"{layer.name}.bias", (n,), 0.0)
            if isinstance(spec, specs.LayerNorm):
                return [nn.LayerNorm(n, spec.eps, weight, shift, buffers)]
            mean = self._slot(self.state, f"{layer.name}.running_mean", (n,), 0.0, momentum=spec.momentum)
            variance = self._slot(self.state, f"{layer.name}.running_var", (n,), 1.0, momentum=spec.momentum)
            return [nn.BatchNorm2d(n, _space(shape), spec.eps, spec.momentum, weight, shift, mean, variance, buffers)]
        if isinstance(spec, specs.Activation) and spec.type != "squared_relu":
            in_place = spec.type == "relu" and bool(built.layers) and isinstance(built.layers[-1], _FRESH)
            return [nn.Elementwise(spec.type, in_place, buffers)]
        if isinstance(spec, specs.Dropout) and not spec.whole_channels:
            return [nn.Dropout(spec.rate, buffers)]
        if isinstance(spec, specs.Flatten):
            return []
        if isinstance(spec, _OF_TOKENS):
            return [self._of_tokens(leaf, spec, shape)]
        if isinstance(spec, specs.Interaction):
            return [nn.Interaction(spec.dim, buffers)]
        if isinstance(spec, specs.EmbeddingBag):
            return [self._bags(layer.name, spec, shape)]
        if _is_pure(spec):
            return [self._pure(leaf, cast(PureLayer, spec), shape)]
        reason = f"layers of type {layer.type!r} have a cost but no gradient (no methods forward and backward)"
        raise self._cannot(layer.name, reason)

    def _of_tokens(
        self, leaf: Leaf, spec: specs.Embedding | specs.Attention | specs.TiedDense | specs.Take, shape: Shape
    ) -> Layer:
        name, buffers = self.model.layers[leaf.index].name, Buffers(self.dtype)
        if isinstance(spec, specs.Embedding):
            rows = (("tokens", spec.vocabulary), ("positions", spec.positions), ("types", spec.types))
            tokens, places, kind = (self._table(f"{name}.{what}", (n, spec.dim)) for what, n in rows)
            assert tokens is not None
            self.embedding = self.embedding or tokens
            return nn.Embedding(name, tokens, places, kind, buffers)
        if isinstance(spec, specs.Take):
            return nn.Take(spec.count * math.prod(shape[1:]), buffers)
        if isinstance(spec, specs.TiedDense):
            if self.embedding is None or self.embedding.shape != (spec.units, shape[-1]):
                reason = f"it needs an earlier embedding of {spec.units} tokens and {shape[-1]} features"
                raise self._cannot(name, reason)
            bias = self._slot(self.parameters, f"{name}.bias", (spec.units,), 0.0) if spec.bias else None
            return nn.Dense(shape[-1], spec.units, self.embedding, bias, True, buffers)
        trained = specs.Attention(spec.heads, spec.fused, spec.causal)
        for key in ("kv_heads", "head_size", "rotary", "qk_norm", "out_bias", "bias"):
            if getattr(spec, key) != getattr(trained, key):
                raise self._cannot(name, f"attention with {key} set has a cost but no gradient; remove {key}")
        d = shape[-1]
        projections = ("qkv",) if spec.fused else ("query", "key", "value")
        *first, last = (
            self._projection(f"{name}.{what}", d, 3 * d if what == "qkv" else d) for what in (*projections, "out")
        )
        weights, biases = [slots[0] for slots in first], [slots[1] for slots in first]
        return nn.Attention(d, spec.heads, spec.causal, weights, biases, *last, buffers)

    def _bags(self, name: str, spec: specs.EmbeddingBag, shape: Shape) -> nn.EmbeddingBag:
        """Return tables with rows initialised uniformly in +-1 / sqrt(rows), as in the DLRM code."""
        n_ids = len(spec.tables) * spec.pooling
        if len(shape) != 1 or shape[0] < n_ids:
            reason = f"it looks up {n_ids} ids, but its input, which must end with them, has shape {shape}"
            raise self._cannot(name, reason)
        slots = []
        for i, rows in enumerate(spec.tables):
            bound = 1.0 / math.sqrt(rows)
            draw = functools.partial(np.random.Generator.uniform, low=-bound, high=bound, size=(rows, spec.dim))
            slots.append(self._slot(self.parameters, f"{name}.table{i}", (rows, spec.dim), draw=draw))
        self.ids += [rows for rows in spec.tables for _ in range(spec.pooling)]
        return nn.EmbeddingBag(name, slots, spec.pooling, Buffers(self.dtype))

    def _table(self, name: str, shape: tuple[int, int]) -> Slot | None:
        """Return an embedding's slot, initialised normally with deviation 0.02 (Radford et al. 2018, section 4.1)."""
        if not shape[0]:
            return None
        return self._slot(self.parameters, name, shape, draw=lambda rng: 0.02 * rng.standard_normal(shape))

    def _projection(self, name: str, features: int, units: int) -> tuple[Slot, Slot]:
        fans = (features, features)  # of each of the stacked matrices
        weight = self._slot(self.parameters, f"{name}.weight", (units, features), None, *fans)
        return weight, self._slot(self.parameters, f"{name}.bias", (units,), 0.0)

    def _pure(self, leaf: Leaf, rule: PureLayer, shape: Shape) -> nn.Pure:
        """Return a layer of pure functions, and create slots for its tensors."""
        layer = self.model.layers[leaf.index]

        def initial(rng: np.random.Generator) -> dict[str, Array]:
            return dict(rule.init(shape, rng)) if layer.tensors else {}  # type: ignore[attr-defined]

        if layer.tensors and not hasattr(rule, "init"):
            raise self._cannot(layer.name, "it has tensors, but no method init(in_shape, rng) that returns them")
        tensors = initial(np.random.default_rng(0))
        if {name: np.size(array) for name, array in tensors.items()} != dict(layer.tensors):
            sizes = {name: np.size(array) for name, array in tensors.items()}
            raise self._cannot(layer.name, f"init returns {sizes} elements, but cost declares {dict(layer.tensors)}")
        slots = {}
        for name, _ in layer.tensors:
            where = self.parameters, f"{layer.name}.{name}", np.shape(tensors[name])
            slots[name] = self._slot(*where, draw=lambda rng, name=name: initial(rng)[name])
        buffers, momentum = {}, float(getattr(rule, "momentum", 0.1))
        for name, start in (rule.buffers(shape) if hasattr(rule, "buffers") else {}).items():
            where = self.state, f"{layer.name}.{name}", np.shape(start)
            buffers[name] = self._slot(*where, momentum=momentum, draw=lambda rng, start=start: start)
        self.n_streams += "rng" in nn.asked_for(rule)
        return nn.Pure(layer.name, rule, shape, layer.out_shape, slots, buffers, momentum, self.n_streams - 1)

    def _conv(self, leaf: Leaf, spec: specs.Conv, shape: Shape, follows: str) -> nn.Conv2d:
        layer, n_in = self.model.layers[leaf.index], shape[0] // spec.groups
        kernel = _pair("kernel", spec.kernel, shape, 1)
        fans = (n_in * math.prod(kernel), spec.channels // spec.groups * math.prod(kernel))
        sizes = (spec.channels, n_in, *(kernel if len(shape) == 3 else kernel[1:]))
        weight = self._slot(self.parameters, f"{layer.name}.weight", sizes, None, *fans, follows)
        bias = self._slot(self.parameters, f"{layer.name}.bias", (spec.channels,), 0.0) if spec.bias else None
        stride, padding = _pair("stride", spec.stride, shape, 1), _pair("padding", spec.padding, shape, 0)
        spaces = _space(shape), _space(layer.out_shape)
        n, groups, buffers = spec.channels, spec.groups, Buffers(self.dtype)
        windows = kernel, stride, padding
        return nn.Conv2d(n, shape[0], *spaces, *windows, groups, weight, bias, layer.input_grad, buffers)

    def _pool(self, leaf: Leaf, spec: specs.Pool | specs.AdaptiveAvgPool, shape: Shape) -> nn.Pool2d:
        layer, space = self.model.layers[leaf.index], _space(shape)
        out = _space(layer.out_shape)
        if isinstance(spec, specs.AdaptiveAvgPool):
            windows = [nn.adaptive_windows(n, o) for n, o in zip(space, out, strict=True)]
        else:
            kernel = _pair("kernel", spec.kernel, shape, 1)
            stride = kernel if spec.stride is None else _pair("stride", spec.stride, shape, 1)
            padding = _pair("padding", spec.padding, shape, 0)
            sizes = zip(space, out, kernel, stride, padding, strict=True)
            windows = [nn.pool_windows(*size, count_padding=spec.count_padding) for size in sizes]
        if any((window.last <= window.first).any() for window in windows):
            raise self._cannot(layer.name, "a window contains only padding; set padding to at most kernel / 2")
        kind: Literal["max", "average"] = "max" if layer.type == "max_pool" else "average"
        return nn.Pool2d(kind, shape[0], space, out, (windows[0], windows[1]), layer.input_grad, Buffers(self.dtype))

    def _cannot(self, name: str, reason: str) -> ConfigError:
        return ConfigError(f"model {self.model.name!r}: layer {name!r} cannot be trained: {reason}")


def _is_pure(spec: specs.LayerSpec) -> bool:
    return hasattr(spec, "forward") and hasattr(spec, "backward")


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
    """Return the activation that follows node `i`, skipping layers whose weights need no scaling."""
    for node in nodes[i + 1 :]:
        if not isinstance(node, Leaf):
            return ""
        if isinstance(node.spec, specs.Activation):
            return node.spec.type
        if isinstance(node.spec, specs.Conv | specs.Dense):
            return ""
    return follows


@dataclass(frozen=True)
class Parameter:
    """A trained tensor and its initialisation: constant ``value``, or random from its fans and the next activation.

    ``follows`` is the activation after the tensor's layer ("" for none), ``momentum`` the weight of a new batch for a
    running statistic; ``draw`` creates the tensor if the layer defines its own initialisation.
    """

    slot: Slot
    value: float | None
    fan_in: int = 0
    fan_out: int = 0
    follows: str = ""
    momentum: float = 0.0
    draw: Callable[[np.random.Generator], Array] | None = None


def initial_values(parameters: Sequence[Parameter], seed: int, dtype: np.dtype[np.floating]) -> Array:
    """Return the initial values of all tensors, flat and read-only, each from its own random stream."""
    flat = np.empty(parameters[-1].slot.stop if parameters else 0, dtype)
    for parameter in parameters:
        into = parameter.slot.flat(flat)
        if parameter.value is not None:
            into[:] = parameter.value
            continue
        draws = stream(seed, 0, f"initial {parameter.slot.name}")
        if parameter.draw is not None:
            into[:] = np.ravel(parameter.draw(draws))
        elif parameter.follows in ("relu", "gelu"):
            into[:] = draws.standard_normal(len(into)) * math.sqrt(2.0 / parameter.fan_in)
        else:
            bound = math.sqrt(6.0 / (parameter.fan_in + parameter.fan_out))
            into[:] = draws.uniform(-bound, bound, len(into))
    flat.setflags(write=False)
    return flat


Labels = npt.NDArray[np.int64] | Array


def each_label(out_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a sample's labels: () or, for outputs (tokens, classes), one label per token."""
    return out_shape[:1] if len(out_shape) == 2 else ()


#: number of samples per pass: activations should fit the second-level cache, and memory is bounded for any batch size.
#: Batch normalisation needs the whole batch at once.
_CHUNK = 64


_Numbers = TypeVar("_Numbers", bound=npt.NDArray[np.generic])


@dataclass(frozen=True, eq=False)
class Network:
    """A trainable network, made by :func:`build_network`.

    ``slots`` describe the tensors in the flat vector of ``n_params`` parameters, ``state_slots`` those in the vector of
    running statistics. A network contains working arrays, so each thread needs its own.
    """

    model: Model
    loss: Loss
    dtype: np.dtype[np.floating]
    slots: tuple[Slot, ...]
    state_slots: tuple[Slot, ...]
    initial_params: Array  # (n_params,), read-only
    initial_state: Array  # running means 0 and variances 1, read-only
    state_keep: Array  # (n_state,), 1 - momentum: share of the running statistics kept per batch, read-only
    vocabulary: int  # samples are integers below it; 0: arbitrary numbers
    ids: tuple[int, ...]  # upper limits of the integers at the end of a sample
    n_streams: int  # custom layers that use random numbers, each from its own stream
    _chain: nn.Chain
    _buffers: Buffers

    @property
    def n_params(self) -> int:
        """Number of parameters, the length of the flat vector."""
        return len(self.initial_params)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: (classes,), or (tokens, classes)."""
        return self.model.layers[-1].out_shape

    @property
    def n_outputs(self) -> int:
        """Number of outputs for one sample."""
        return math.prod(self.out_shape)

    @property
    def n_classes(self) -> int:
        """Number of classes, for a sample or for each of its tokens."""
        return self.out_shape[-1] if len(self.out_shape) == 2 else self.n_outputs

    def random_batch(self, n: int, rng: np.random.Generator) -> tuple[Array, npt.NDArray[np.int64]]:
        """Return `n` random samples (standard normal numbers, tokens, ids) and random classes."""
        shape = (n, *self.model.input_shape)
        if self.vocabulary:
            x = rng.integers(self.vocabulary, size=shape).astype(self.dtype)
        else:
            x = rng.standard_normal(shape, self.dtype)
        for place, rows in enumerate(reversed(self.ids), start=1):
            x[:, -place] = rng.integers(rows, size=n)
        return x, rng.integers(self.n_classes, size=(n, *each_label(self.out_shape)))

    def check_layers(self) -> None:
        """Raise ConfigError if a custom layer fails the checks of :func:`ddlsim.testing.check_layer`."""
        for layer in self._chain.all():
            if isinstance(layer, nn.Pure):
                try:
                    held_to_rules(layer.rule, layer.in_shape)
                except ConfigError as error:
                    raise ConfigError(f"model {self.model.name!r}: layer {layer.name!r}: {error}") from None

    def views(self, params: Array) -> dict[str, Array]:
        """Return the named tensors of a flat vector (parameters or gradient) as views, in order."""
        return {slot.name: slot.of(params) for slot in self.slots}

    def loss_and_gradient(
        self,
        params: Array,
        x: npt.ArrayLike,
        labels: npt.ArrayLike,
        rng: np.random.Generator | None = None,
        state: Array | None = None,
    ) -> tuple[float, Array]:
        """Return the mean loss over a batch and its gradient, a new vector of shape (n_params,).

        params  (n_params,) parameters, which are not changed
        x       (n, *model.input_shape) samples
        labels  (n,) classes; (n, tokens) for outputs of shape (tokens, classes); (n, n_outputs) targets for the mean
                squared error
        rng     random generator of dropout masks and custom layers; required if the network has any of these
        state   (n_state,) running statistics of batch normalisation, updated in place; None: do not update any

        Raises ConfigError for arrays with the wrong shape or type.
        """
        self._check_vector("params", params, self.n_params)
        if state is not None:
            self._check_vector("state", state, len(self.initial_state))
        batch = self._samples(x)
        n = len(batch)
        wanted = _writable(self._labels(labels, n))
        gradient, loss, params = np.zeros(self.n_params, self.dtype), 0.0, self._copied(params)
        for part in self._parts(n, at_once=bool(self.state_slots)):
            streams = () if rng is None or not self.n_streams else rng.spawn(self.n_streams)
            run = Pass(params, len(batch[part]), True, gradient, state, rng, streams)
            outputs = self._chain.forward(batch[part], run)
            share, slope = self._loss(outputs, wanted[part], n)
            self._chain.backward(slope, run)
            loss += share
        return loss, gradient

    def predict(self, params: Array, x: npt.ArrayLike, state: Array | None = None) -> Array:
        """Return the outputs (logits), a new array of shape (n, n_outputs), without dropout.

        params  (n_params,) parameters
        x       (n, *input_shape) samples
        state   (n_state,) running statistics; required for networks with batch normalisation
        """
        self._check_vector("params", params, self.n_params)
        if state is None and self.state_slots:
            raise ConfigError("state = None, but batch normalisation needs running statistics; pass them as state")
        if state is not None:
            self._check_vector("state", state, len(self.initial_state))
        batch = self._samples(x)
        outputs, params = np.empty((len(batch), self.n_outputs), self.dtype), self._copied(params)
        for part in self._parts(len(batch), at_once=False):
            run = Pass(params, len(batch[part]), False, np.empty(0, self.dtype), state)
            outputs[part] = self._chain.forward(batch[part], run)
        return outputs

    def _labels(self, labels: npt.ArrayLike, n: int) -> Labels:
        """Return labels as classes, int64, or as targets (n, n_outputs) for the squared error.

        Classes are (n,), or (n, tokens) if outputs are (tokens, classes).
        """
        array, n_outputs = np.asarray(labels), self.n_outputs
        if array.shape[:1] != (n,):
            raise ConfigError(f"labels of shape {array.shape} do not match {n} samples; pass one per sample")
        if self.loss == "mean_squared_error":
            if array.size != n * n_outputs:
                raise ConfigError(
                    f"targets of shape {array.shape} do not match {n_outputs} outputs; expected ({n}, {n_outputs})"
                )
            return np.ascontiguousarray(array, self.dtype).reshape(n, n_outputs)
        shape = (n, *each_label(self.out_shape))
        if array.shape != shape or array.dtype.kind not in "iu":
            raise ConfigError(
                f"cross-entropy needs integer labels of shape {shape}, got shape {array.shape} and type {array.dtype}"
            )
        if array.min() < 0 or array.max() >= self.n_classes:
            bad = int(array.min() if array.min() < 0 else array.max())
            raise ConfigError(f"label {bad} is not one of the network's classes, 0 to {self.n_classes - 1}")
        return array.astype(np.int64, copy=False)

    def _loss(self, outputs: Array, labels: Labels, n_total: int) -> tuple[float, Array]:
        """Return the samples' part of the mean loss over `n_total` samples, and its gradient, shape of `outputs`.

        Cross-entropy: -log softmax(outputs)[label], averaged over the tokens if each has a label. Squared error: the
        mean over the outputs of (output - target)^2.
        """
        gradient = self._buffers.get("gradient", *outputs.shape)
        if self.loss == "cross_entropy":
            flat = labels.reshape(-1)
            n_total *= len(flat) // len(outputs)
            rows, slopes = (array.reshape(len(flat), -1) for array in (outputs, gradient))
            total = row_kernels.cross_entropy(rows, flat, slopes, n_total)  # type: ignore[arg-type,unused-ignore]
        else:
            total = row_kernels.squared_error(outputs, labels, gradient, n_total)  # type: ignore[arg-type,unused-ignore]
        return total / n_total, gradient

    def _samples(self, x: npt.ArrayLike) -> Array:
        array = np.ascontiguousarray(x, self.dtype)
        if array.ndim == 0 or array.shape[1:] != self.model.input_shape or not len(array):
            shape = ", ".join(map(str, self.model.input_shape))
            raise ConfigError(
                f"samples of shape {array.shape} do not match the model {self.model.name!r}; expected (n, {shape}) "
                "with n at least 1"
            )
        return _writable(array.reshape(len(array), -1))

    def _copied(self, params: Array) -> Array:
        """Return a copy of `params`, so that compiled code receives a single array type."""
        copy = self._buffers.get("params", 1, self.n_params).reshape(-1)
        copy[:] = params
        return copy

    def _check_vector(self, name: str, vector: Array, size: int) -> None:
        if vector.shape != (size,) or vector.dtype != self.dtype:
            raise ConfigError(
                f"{name} of shape {vector.shape} and type {vector.dtype} does not match the model {self.model.name!r}; "
                f"expected shape ({size},) and type {self.dtype}"
            )

    def _parts(self, n: int, *, at_once: bool) -> Iterator[slice]:
        step = n if at_once else _CHUNK
        return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _float_type(value: Any, where: str) -> np.dtype[np.floating]:
    try:
        kind = np.dtype(value) if isinstance(value, str | type | np.dtype) else None
    except (TypeError, ValueError):
        kind = None
    for allowed in (np.dtype(np.float32), np.dtype(np.float64)):
        if kind is not None and kind == allowed:
            return allowed
    raise ConfigError(f"{where} = {shown(value)}: must be float32 or float64")


@checked
def build_network(
    model: ModelLike,
    seed: Seed,
    dtype: Annotated[npt.DTypeLike, validated_by(_float_type)] = np.float32,
    loss: Loss = "cross_entropy",
) -> Network:
    """Build a trainable network from a model, with random initial parameters.

    model  name of a bundled model, path of a model file, or :class:`Model`
    seed   seed of the initial parameters; each tensor has its own random stream
    dtype  data type of parameters and activations: float32 or float64
    loss   "cross_entropy" or "mean_squared_error"

    Weights before ReLU or GELU are normally distributed with variance 2 / fan_in (He et al. 2015, arXiv:1502.01852,
    equation 10). Other weights are uniformly distributed with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010,
    equation 16). Biases are 0. Raises ConfigError for a model that cannot be trained, and for an invalid `dtype` or
    `loss`.
    """
    kind = cast("np.dtype[np.floating]", np.dtype(dtype))  # one of the two, see _float_type
    description = load_model(model)
    builder = Builder(description, kind)
    chain = builder.build()
    params, state = (initial_values(tensors, seed, kind) for tensors in (builder.parameters, builder.state))
    slots, state_slots = (tuple(p.slot for p in tensors) for tensors in (builder.parameters, builder.state))
    shares = (np.full(math.prod(p.slot.shape), 1.0 - p.momentum) for p in builder.state)
    kept = np.concatenate([np.empty(0), *shares]).astype(kind)
    kept.setflags(write=False)
    start, limits = (params, state, kept), (builder.vocabulary, tuple(builder.ids), builder.n_streams)
    return Network(description, loss, kind, slots, state_slots, *start, *limits, chain, Buffers(kind))


def _writable(array: _Numbers) -> _Numbers:
    """Return `array`, or a copy if it is read-only, which compiled code treats as another type."""
    return array if array.flags.writeable else array.copy()
