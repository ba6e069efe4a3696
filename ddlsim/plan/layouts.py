"""Layouts of layers over groups of ranks, the exchanges that they require, and the layout with the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plan.plan import Floats
from ddlsim.workload.layers import Conv, Dense
from ddlsim.workload.model import Leaf, Model
from ddlsim.workload.precision import FP32_NBYTES

#: layers that apply the same operation to every output of the previous layer, so they are split like it
FOLLOW = frozenset({
    "relu", "leaky_relu", "gelu", "tanh", "sigmoid", "dropout", "max_pool", "avg_pool", "adaptive_avg_pool", "upsample",
    "flatten",
})  # fmt: skip
#: an exchange: kind of collective, groups, total bytes in each
Move = tuple[str, list[list[int]], float]


@dataclass(frozen=True)
class Layout:
    """The number of groups of ranks that compute each layer (Das et al. 2016, arXiv:1602.06709, section 3.2 and 3.3).

    With G groups of M = n / G consecutive ranks, each group has 1/G of the samples, and each of its ranks computes and
    holds 1/M of the layer's outputs and weights: the same number of multiplications per rank for every G. G = n is data
    parallelism, G = 1 model parallelism. A layer needs all inputs of its group's samples, by an all-gather in the
    group. If the groups of the layer before are larger, an all-to-all first distributes their samples over the smaller
    ones.

    n_ranks  number of ranks
    groups   G of every layer, (n_layers,)
    outputs  number of outputs that can be divided, for split layers; others 0
    follows  whether a layer is split like the one before it, without an exchange
    """

    n_ranks: int
    groups: tuple[int, ...]
    outputs: tuple[int, ...]
    follows: tuple[bool, ...]

    def ways(self, layer: int) -> int:
        """Return the ranks of a group, M."""
        return self.n_ranks // self.groups[layer]

    @cached_property
    def split(self) -> tuple[int, ...]:
        """Layers whose weights are split."""
        return tuple(i for i, n in enumerate(self.outputs) if n and self.ways(i) > 1)

    @property
    def split_end(self) -> bool:
        """Whether the model's outputs are split."""
        return self.ways(len(self.groups) - 1) > 1

    def share(self, layer: int, rank: int) -> float:
        """Return the share of a layer's outputs and weights on a rank."""
        ways, outputs = self.ways(layer), self.outputs[layer]
        if ways == 1 or not outputs:
            return 1.0 / ways
        return (outputs // ways + (rank % ways < outputs % ways)) / outputs

    def members(self, layer: int) -> list[list[int]]:
        """Return the groups of a layer."""
        ways = self.ways(layer)
        return [list(range(first, first + ways)) for first in range(0, self.n_ranks, ways)]

    def alike(self, layer: int) -> list[list[int]]:
        """Return the ranks that hold the same weights of a layer."""
        ways = self.ways(layer)
        return [list(range(place, self.n_ranks, ways)) for place in range(ways)]

    def gathers(self, layer: int) -> bool:
        """Return whether a layer needs inputs from the other ranks of its group."""
        return not self.follows[layer] and self.ways(layer) > 1

    def _dealt(self, layer: int) -> int:
        """Return the number of smaller groups that a group of the previous layer distributes its samples over."""
        before = self.groups[layer - 1] if layer else self.n_ranks
        return 1 if self.follows[layer] else math.lcm(before, self.groups[layer]) // before

    def exchanges(self, layer: int) -> bool:
        """Return whether a layer needs an exchange of its inputs."""
        return self.gathers(layer) or self._dealt(layer) > 1

    def moves(self, layer: int, nbytes: float, *, back: bool = False) -> list[Move]:
        """Return the exchanges before a layer, in order, if its inputs of all samples have `nbytes`; with `back` those
        of their gradients.
        """
        moves: list[Move] = []
        dealt = self._dealt(layer)
        if dealt > 1:
            ways = self.ways(layer - 1)
            apart = ways // dealt
            groups = [
                list(range(first + place, first + ways, apart))
                for first in range(0, self.n_ranks, ways)
                for place in range(apart)
            ]
            moves.append(("all_to_all", groups, nbytes / self.n_ranks))
        if self.gathers(layer):
            kind = "reduce_scatter" if back else "all_gather"
            moves.append((kind, self.members(layer), nbytes / self.groups[layer]))
        return moves[::-1] if back else moves

    def loss_nbytes(self, samples: float) -> float:
        """Return the bytes of an fp32 maximum and an fp32 sum for each sample of a group, of `samples` in all."""
        return 2.0 * FP32_NBYTES * samples / self.groups[-1]

    def received(self, inputs: Sequence[float], weights: Sequence[float], samples: float) -> float:
        """Return the bytes that a rank receives in a step: for each layer that gathers, 2 (M - 1)/M in mb/G of inputs,
        plus those of redistributed samples, and 2 (G - 1)/G w/M of its weights.

        inputs   bytes of every layer's input, for all samples, times the number of its transfers: 2 for a layer with a
                 gradient of its input, else 1
        weights  bytes of every layer's gradients
        """
        total = 0.0
        for i, (nbytes, own) in enumerate(zip(inputs, weights, strict=True)):
            total += sum((1.0 - 1.0 / len(groups[0])) * size for _, groups, size in self.moves(i, nbytes))
            total += 2.0 * (self.groups[i] - 1) * own / self.n_ranks
        last = self.ways(len(self.groups) - 1)
        return total + 2.0 * (1.0 - 1.0 / last) * self.loss_nbytes(samples)


def splittable(model: Model) -> dict[int, int]:
    """Return the layers whose outputs can be split, with the number of outputs: dense layers and convolutions (without
    channel groups) that are not inside a branch."""
    leaves = [node for node in model.structure if isinstance(node, Leaf)]
    return {
        leaf.index: leaf.spec.channels if isinstance(leaf.spec, Conv) else leaf.spec.units
        for leaf in leaves
        if isinstance(leaf.spec, Dense) or (isinstance(leaf.spec, Conv) and leaf.spec.groups == 1)
    }


def layout_of(model: Model, n_ranks: int, groups: Mapping[str, int]) -> Layout:
    """Return the layout with `groups` groups for the named layers, and data parallelism for all others.

    Raises ConfigError, with valid values, for names and numbers that do not fit the model and the ranks.
    """
    can = {model.layers[i].name: (i, n) for i, n in splittable(model).items()}
    chosen: dict[int, int] = {}
    for name, number in groups.items():
        if name not in can:
            if any(layer.name == name for layer in model.layers):
                raise ConfigError(
                    f"groups: layer {name!r} of {model.name} cannot be split; only dense layers and convolutions "
                    f"outside of branches can: {', '.join(can) if can else 'this model has none'}"
                )
            raise unknown_name("layer", name, can, f"groups of {model.name}")
        index, outputs = can[name]
        fit = _possible(n_ranks, outputs)
        if number not in fit:
            near = sorted(fit, key=lambda g: (abs(g - number), g))[:3]
            use = f"use {', '.join(map(str, sorted(near)))}"
            if number < 1 or n_ranks % number:
                raise ConfigError(f"groups[{name!r}] = {number}: must divide the number of workers, {n_ranks}; {use}")
            raise ConfigError(
                f"groups[{name!r}] = {number}: {n_ranks // number} workers cannot share {outputs} outputs; {use}"
            )
        chosen[index] = number
    return _layout(model, n_ranks, chosen)


def balanced_layout(model: Model, n_ranks: int, samples: int, element: float, gradient: float) -> Layout:
    """Return the layout with which a rank receives the fewest bytes per step, over all numbers of groups of all layers,
    by dynamic programming; among equal ones, the one with more groups.

    samples   of all ranks in a step
    element   bytes of an activation
    gradient  bytes of a gradient
    """
    can, follows = splittable(model), _follows(model)
    inputs, weights = sizes(model, samples, element, gradient)
    best: dict[int, tuple[float, dict[int, int]]] = {n_ranks: (0.0, {})}  # by groups of the layer before
    for i in range(len(model.layers)):
        options = _possible(n_ranks, can[i]) if i in can else [n_ranks]
        further: dict[int, tuple[float, dict[int, int]]] = {}
        for before, (cost, chosen) in best.items():
            for g in [before] if follows[i] else options:
                pair = Layout(n_ranks, (before, g), (0, can.get(i, 0)), (False, follows[i]))
                total = cost + pair.received((0.0, inputs[i]), (0.0, weights[i]), samples * (i == len(follows) - 1))
                if g not in further or total < further[g][0]:
                    further[g] = total, {**chosen, **({i: g} if i in can else {})}
        best = further
    least = min(cost for cost, _ in best.values())
    return _layout(model, n_ranks, best[max(g for g, (cost, _) in best.items() if cost <= least)][1])


def sizes(model: Model, samples: float, element: float, gradient: float) -> tuple[Floats, Floats]:
    """Return the bytes of every layer's input times the number of its transfers, and the bytes of its gradients."""
    inputs = [(1 + layer.input_grad) * samples * element * math.prod(layer.in_shape) for layer in model.layers]
    weights = [0.0 if layer.model_parallel else gradient * layer.n_params for layer in model.layers]
    return np.array(inputs), np.array(weights)


def _possible(n_ranks: int, outputs: int) -> list[int]:
    """Return the numbers of groups for which each rank has at least one output, in descending order."""
    return [g for g in range(n_ranks, 0, -1) if n_ranks % g == 0 and n_ranks // g <= outputs]


def _follows(model: Model) -> tuple[bool, ...]:
    """Return whether each layer is split like the one before it."""
    chain = {node.index for node in model.structure if isinstance(node, Leaf)}
    return tuple(i > 0 and i in chain and layer.type in FOLLOW for i, layer in enumerate(model.layers))


def _layout(model: Model, n_ranks: int, chosen: Mapping[int, int]) -> Layout:
    can, follows = splittable(model), _follows(model)
    groups: list[int] = []
    for i, follow in enumerate(follows):
        groups.append(groups[-1] if follow else chosen.get(i, n_ranks))
    return Layout(n_ranks, tuple(groups), tuple(can.get(i, 0) for i in range(len(groups))), follows)
