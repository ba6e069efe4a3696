"""Dense layers, activations, dropout, changes of layout, and the ways to connect layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.nn import dense_kernels, map_kernels, row_kernels
from ddlsim.nn.conv_kernels import plane_size
from ddlsim.nn.pass_state import Array, Buffers, Layer, Pass, PureLayer, Slot


@dataclass
class Dense:
    """y = x W^T + b on the last dimension; W has shape (units, features)."""

    features: int
    units: int
    weight: Slot
    bias: Slot | None
    input_grad: bool
    buffers: Buffers
    x: Array = field(init=False)

    def forward(self, x: Array, run: Pass) -> Array:
        self.x = x.reshape(-1, self.features)
        out = self.buffers.get("out", len(self.x), self.units)
        weight = self.weight.flat(run.params)
        dense_kernels.product_transposed(
            self.x.reshape(-1), weight, out.reshape(-1), len(self.x), self.features, self.units
        )
        if self.bias is not None:
            out += self.bias.of(run.params)
        return out.reshape(len(x), -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        rows, n_samples = dy.reshape(-1, self.units), len(dy)
        product = self.buffers.get("dw", self.units, self.features)
        grads, n = rows.reshape(-1), len(rows)
        dense_kernels.product(
            grads, 1, self.units, self.x.reshape(-1), product.reshape(-1), self.units, n, self.features
        )
        self.weight.of(run.into())[...] += product
        if self.bias is not None:
            self.bias.of(run.into())[...] += rows.sum(axis=0)
        if not self.input_grad:
            return None
        dx = self.buffers.get("dx", len(rows), self.features)
        weight = self.weight.flat(run.params)
        dense_kernels.product(grads, self.units, 1, weight, dx.reshape(-1), n, self.units, self.features)
        return dx.reshape(n_samples, -1)


@dataclass
class Elementwise:
    """ReLU, tanh, sigmoid or GELU. ``in_place`` overwrites the input, which nobody else may need."""

    kind: Literal["relu", "gelu", "tanh", "sigmoid"]
    in_place: bool
    buffers: Buffers
    kept: Array = field(init=False)  # what the derivative is computed from: GELU's input, others' output

    def forward(self, x: Array, run: Pass) -> Array:
        out = x if self.in_place else self.buffers.get("out", *x.shape)
        source, target = x.reshape(-1), out.reshape(-1)
        if self.kind == "relu":
            row_kernels.relu(source, target)
        elif self.kind == "tanh":
            np.tanh(source, out=target)
        elif self.kind == "sigmoid":
            row_kernels.sigmoid(source, target)
        else:
            row_kernels.gelu(source, target)
        self.kept = x if self.kind == "gelu" else out
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        multiply = {
            "relu": row_kernels.relu_gradient,
            "tanh": row_kernels.tanh_gradient,
            "sigmoid": row_kernels.sigmoid_gradient,
            "gelu": row_kernels.gelu_gradient,
        }[self.kind]
        multiply(self.kept.reshape(-1), dy.reshape(-1))
        return dy


def asked_for(rule: PureLayer) -> frozenset[str]:
    """Return which of `train`, `buffers` and `rng` the layer's forward takes."""
    return frozenset({"train", "buffers", "rng"} & inspect.signature(rule.forward).parameters.keys())


@dataclass
class Pure:
    """A layer that is written in pure functions of arrays.

    buffers  its running statistics in the state, of which a batch replaces `momentum`
    stream   place of its random stream among those of a pass
    """

    name: str
    rule: PureLayer
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    slots: Mapping[str, Slot]
    buffers: Mapping[str, Slot]
    momentum: float
    stream: int
    kept: object = field(init=False)

    def forward(self, x: Array, run: Pass) -> Array:
        given: dict[str, object] = {"train": run.training, "buffers": None, "rng": None}
        if run.training and "rng" in asked_for(self.rule):
            if not run.streams:
                raise ConfigError(f"rng = None: layer {self.name!r} draws random numbers; pass a numpy Generator")
            given["rng"] = run.streams[self.stream]
        if not run.training and run.state is not None:
            given["buffers"] = {name: slot.of(run.state).copy() for name, slot in self.buffers.items()}
        more: dict[str, Any] = {name: given[name] for name in asked_for(self.rule)}
        args = x.reshape(len(x), *self.in_shape), self._tensors(run.params)
        out, self.kept, *found = cast("tuple[Any, ...]", self.rule.forward(*args, **more))
        self._fits("forward", "outputs", out, (len(x), *self.out_shape))
        if run.training and self.buffers:
            statistics: Mapping[str, Array] = found[0] if found else {}
            if statistics.keys() != self.buffers.keys():
                raise ConfigError(
                    f"layer {self.name!r}: forward must return the batch's {sorted(self.buffers)} as a third value "
                    f"while it trains, not {sorted(statistics)}"
                )
            for name, slot in self.buffers.items():
                self._fits("forward", name, statistics[name], slot.shape)
                if run.state is not None:
                    slot.of(run.state)[...] += self.momentum * (statistics[name] - slot.of(run.state))
        return np.ascontiguousarray(out, x.dtype).reshape(len(x), -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        dx, gradients = self.rule.backward(dy.reshape(len(dy), *self.out_shape), self.kept, self._tensors(run.params))
        self._fits("backward", "the gradient of x", dx, (len(dy), *self.in_shape))
        if gradients.keys() != self.slots.keys():
            raise ConfigError(
                f"layer {self.name!r}: backward returned gradients of {sorted(gradients)}; its tensors are "
                f"{sorted(self.slots)}"
            )
        for name, slot in self.slots.items():
            self._fits("backward", f"the gradient of {name!r}", gradients[name], slot.shape)
            slot.of(run.into())[...] += gradients[name]
        return np.ascontiguousarray(dx, dy.dtype).reshape(len(dy), -1)

    def _tensors(self, params: Array) -> dict[str, Array]:
        return {name: slot.of(params) for name, slot in self.slots.items()}

    def _fits(self, method: str, what: str, array: Array, shape: tuple[int, ...]) -> None:
        if np.shape(array) != shape:
            raise ConfigError(
                f"layer {self.name!r}: {method} returned {what} in shape {np.shape(array)}; must be {shape}"
            )


@dataclass
class Dropout:
    """While training, x * mask / (1 - rate) with mask 0 at `rate` of the elements (Srivastava et al. 2014)."""

    rate: float
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        if not run.training or self.rate == 0.0:
            return x
        if run.rng is None:
            raise ConfigError("rng = None: the network has dropout; pass a numpy Generator to draw masks from")
        self._mask = self.buffers.get("mask", *x.shape)
        draws = run.rng.random(x.shape, dtype=np.float32)
        np.multiply(draws >= self.rate, 1.0 / (1.0 - self.rate), out=self._mask)
        out = self.buffers.get("out", *x.shape)
        np.multiply(x, self._mask, out=out)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        if self.rate > 0.0:
            dy *= self._mask
        return dy


@dataclass
class ToMaps:
    """From samples (n, channels * height * width) to maps (n_blocks, channels * plane)."""

    channels: int
    space: tuple[int, int]
    input_grad: bool
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        out = self.buffers.get("out", run.n_blocks, self.channels * plane_size(self.space))
        map_kernels.to_maps(x.reshape(-1), out.reshape(-1), run.n_samples, self.channels, self.space)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        if not self.input_grad:
            return None
        dx = self.buffers.get("dx", run.n_samples, self.channels * self.space[0] * self.space[1])
        map_kernels.from_maps(dy.reshape(-1), dx.reshape(-1), run.n_samples, self.channels, self.space)
        return dx


@dataclass
class ToRows:
    """From maps to samples, each a row of (channels, height, width) in C order; this is also Flatten."""

    channels: int
    space: tuple[int, int]
    input_grad: bool
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        out = self.buffers.get("out", run.n_samples, self.channels * self.space[0] * self.space[1])
        map_kernels.from_maps(x.reshape(-1), out.reshape(-1), run.n_samples, self.channels, self.space)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        if not self.input_grad:
            return None
        dx = self.buffers.get("dx", run.n_blocks, self.channels * plane_size(self.space))
        map_kernels.to_maps(dy.reshape(-1), dx.reshape(-1), run.n_samples, self.channels, self.space)
        return dx


@dataclass
class Chain:
    """One layer after the other; an empty chain is the identity."""

    layers: Sequence[Layer]

    def all(self) -> Iterator[Layer]:
        """Yield its layers, and those in branches of it."""
        for layer in self.layers:
            yield layer
            for branch in (layer.body, layer.shortcut) if isinstance(layer, Sum) else getattr(layer, "branches", ()):
                yield from branch.all()

    def forward(self, x: Array, run: Pass) -> Array:
        for layer in self.layers:
            x = layer.forward(x, run)
        return x

    def backward(self, dy: Array, run: Pass) -> Array | None:
        gradient: Array | None = dy
        for layer in reversed(self.layers):
            if gradient is None:
                return None
            gradient = layer.backward(gradient, run)
        return gradient


@dataclass
class Sum:
    """body(x) + shortcut(x) (He et al. 2016, section 3.2)."""

    body: Chain
    shortcut: Chain
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        first, second = self.body.forward(x, run), self.shortcut.forward(x, run)
        out = self.buffers.get("out", *first.shape)
        np.add(first, second, out=out)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        copy = self.buffers.get("dy", *dy.shape)
        copy[...] = dy  # a layer may overwrite what it is given
        first, second = self.body.backward(dy, run), self.shortcut.backward(copy, run)
        if first is None or second is None:
            return None
        dx = self.buffers.get("dx", *first.shape)
        np.add(first, second, out=dx)
        return dx


@dataclass
class Join:
    """The outputs of several chains on the same input, side by side."""

    branches: Sequence[Chain]
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        outs = [branch.forward(x, run) for branch in self.branches]
        self._cuts = np.cumsum([0, *(out.shape[1] for out in outs)])
        joined = self.buffers.get("out", len(outs[0]), int(self._cuts[-1]))
        np.concatenate(outs, axis=1, out=joined)
        return joined

    def backward(self, dy: Array, run: Pass) -> Array | None:
        total: Array | None = None
        for i, branch in enumerate(self.branches):
            part = self.buffers.get(f"dy{i}", len(dy), int(self._cuts[i + 1] - self._cuts[i]))
            part[...] = dy[:, self._cuts[i] : self._cuts[i + 1]]
            dx = branch.backward(part, run)
            if dx is None:
                continue
            if total is None:
                total = self.buffers.get("dx", *dx.shape)
                total[...] = dx
            else:
                total += dx
        return total
