"""Data or model parallelism, chosen for each layer, as a plan (Das et al. 2016, arXiv:1602.06709), and the layouts of
layers over groups of ranks, with the exchanges that they require."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import DraftedSteps, Needs
from ddlsim.plan.plan import Floats
from ddlsim.plan.program import StepProgram
from ddlsim.plan.transforms import Together, with_partial_norms
from ddlsim.workload.buckets import Bucket, per_layer
from ddlsim.workload.compute import Workload
from ddlsim.workload.devices import Device
from ddlsim.workload.layers import Conv, Dense
from ddlsim.workload.model import Leaf, Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES, base_precision
from ddlsim.workload.products import roofline_times


def hybrid(
    workloads: Sequence[Workload],
    layout: Layout,
    buckets: Callable[[Workload], Sequence[Bucket]] = per_layer,
    *,
    accumulation: int = 1,
    at_end: bool = False,
    blocking: bool = False,
) -> StepProgram:
    """Return the program of ranks that compute each layer in groups, which divide its outputs.

    A group exchanges the inputs of its samples before the layer (:class:`~ddlsim.plan.hybrid.Layout`), and their
    gradients as soon as the layer has computed them: before the gradients of its weights, which overlap the exchange.
    Gradients of replicated weights are all-reduced in `buckets` during the backward pass. Gradients of split weights
    are all-reduced among the ranks with the same part, as soon as they are ready or, with `at_end`, after the backward
    pass.

    layout        for the number of ranks in `workloads`, each of which describes all outputs of a rank's own samples
    accumulation  number of micro-batches per rank and step, whose gradients are accumulated locally
    blocking      whether computation waits for communication

    With LARS and LAMB, the groups combine the norms of split weights.
    """
    by_rank = each_rank(workloads, None)
    steps = _Steps(by_rank, layout, buckets, at_end or blocking, blocking, accumulation)
    return StepProgram.of(with_partial_norms(steps.plan(), by_rank, *_split_tensors(by_rank[0], layout)))


def replicated(workload: Workload, layout: Layout) -> Workload:
    """Return the workload with the gradients of replicated layers only."""
    rest, shared = workload.grad_nbytes.copy(), ~np.isin(workload.tensor_layer, list(layout.split))
    rest[list(layout.split)] = 0.0
    return dataclasses.replace(
        workload,
        grad_nbytes=rest,
        tensor_layer=workload.tensor_layer[shared],
        tensor_nbytes=workload.tensor_nbytes[shared],
    )


def _split_tensors(workload: Workload, layout: Layout) -> list[list[Together]]:
    """Return the groups that together hold the tensors of split layers, for each group size."""
    rounds = []
    for size in sorted({layout.group_size(i) for i in layout.split}):
        split = [i for i in layout.split if layout.group_size(i) == size]
        n_tensors = int(np.isin(workload.tensor_layer, split).sum())
        rounds.append([Together(group, n_tensors, len(group)) for group in layout.members(split[0])])
    return rounds


def kept_nbytes(workload: Workload, layout: Layout) -> Floats:
    """Return the bytes of each layer that a rank keeps for the backward pass, including gathered inputs of split
    layers, (n_layers,)."""
    gathered = [
        np.prod(layer.in_shape) * (layout.group_size(i) - 1) if layout.gathers(i) else 0
        for i, layer in enumerate(workload.model.layers)
    ]
    element = ELEMENT_NBYTES[workload.precision]
    return stored_nbytes(workload) + element * workload.batch_size * np.array(gathered, dtype=np.float64)


def split_factors(workload: Workload, layout: Layout) -> Floats:
    """Return the factor on a layer's time if a rank computes 1/M of the outputs for M times the samples, (n_layers,):
    the same multiplications, but fewer weights and more inputs to read, by the roofline of the device. The factor is 1
    if the user set the time of the step."""
    model, device, efficiency = workload.model, workload.device, workload.efficiency
    factor = np.ones(len(model.layers))
    if device is None or efficiency is None or workload.timed:
        return factor
    memory = workload.memory_bandwidth / (device.memory_bandwidth * workload.speed)

    def seconds(size: int, device: Device, efficiency: float) -> Floats:
        layers = tuple(
            dataclasses.replace(
                layer,
                flops=layer.flops / size,
                n_params=layer.n_params // size,
                moved_nbytes=layer.moved_nbytes - FP32_NBYTES * float(np.prod(layer.out_shape)) * (1.0 - 1.0 / size),
            )
            for layer in model.layers
        )
        shared = dataclasses.replace(model, layers=layers, structure=(), trainable=False)
        batch = workload.batch_size * size
        return roofline_times(shared, device, batch, base_precision(workload.precision), efficiency, memory)[0]

    unsplit = seconds(1, device, efficiency)
    for size in sorted({layout.group_size(i) for i in layout.split}):
        split = [i for i in layout.split if layout.group_size(i) == size]
        factor[split] = seconds(size, device, efficiency)[split] / unsplit[split]
    return factor


class _Steps(DraftedSteps):
    """passed, updated  each rank's latest backward pass, and its update in the previous step"""

    def __init__(
        self,
        workloads: list[Workload],
        layout: Layout,
        buckets: Callable[[Workload], Sequence[Bucket]],
        at_end: bool,
        blocking: bool,
        n_batches: int,
    ) -> None:
        dense = replicated(workloads[0], layout)
        chosen = list(buckets(dense)) if len(dense.tensor_layer) else []
        super().__init__(workloads, chosen, parts_of(dense, chosen) if chosen else (), n_batches)
        self.layout, self.at_end, self.blocking = layout, at_end, blocking
        self.passed, self.updated = self.nothing(), self.nothing()
        factors = {id(w): split_factors(w, layout) for w in workloads}
        every = range(self.n_layers)
        shares = np.array([[layout.share(i, r) * layout.group_size(i) for i in every] for r in range(self.n)])
        self.forward = [w.forward * factors[id(w)] * shares[r] for r, w in enumerate(workloads)]
        self.backward = [w.backward * factors[id(w)] * shares[r] for r, w in enumerate(workloads)]
        self.held = [self._held(r) for r in range(self.n)]
        self.kept = [kept_nbytes(w, layout) for w in workloads]
        #: first layers of the passes: those before which something is exchanged
        self.starts = [0, *(i for i in range(1, self.n_layers) if layout.exchanges(i))]

    def _held(self, rank: int) -> float:
        """Return the share of all weights that a rank updates."""
        nbytes = self.workloads[rank].grad_nbytes
        total = float(nbytes.sum())
        held = sum(self.layout.share(i, rank) * float(nbytes[i]) for i in range(self.n_layers))
        return held / total if total else 0.0

    def write_step(self) -> None:
        for micro in range(self.n_batches):
            self.micro = micro
            before = self.passed if self.blocking else self.nothing()
            self._micro_batch(before if micro else self.updated)
        self.updated = [[self.add_update(r, self.held[r])] for r in range(self.n)]

    def _micro_batch(self, done: Needs) -> None:
        ends = [*self.starts[1:], self.n_layers]
        for first, end in zip(self.starts, ends, strict=True):
            done = self.add_passes("forward", first, end, self._exchange(first, done))
        needs = self._loss(done)
        for first, end in zip(reversed(self.starts), reversed(ends), strict=True):
            needs = self._back(first, end, needs)
        for layer in reversed(self.layout.split) if self.at_end and self.is_last else ():
            self._sum_split(layer)

    def _back(self, first: int, end: int, needs: Needs) -> Needs:
        """Add a backward pass from layer `end` to `first`, which sends gradients; return what the next pass needs."""
        layer = self.workloads[0].model.layers[first]
        apart = self.layout.exchanges(first) and layer.input_grad and layer.n_params > 0
        for stop in self.stops(first, end, *self.layout.split, first + apart):
            if stop == first and apart:  # half of the time each, see ddlsim.workload.compute
                inputs = self.add_passes("backward_input", stop, end, needs, 0.5)
                self.passed = self.add_passes("backward_weight", stop, end, self.nothing(), 0.5)
            else:
                inputs = self.passed = self.add_passes("backward", stop, end, needs)
            needs, end = self.nothing(), stop
            if stop == first and layer.input_grad:
                needs = self._exchange(first, self.passed if self.blocking else inputs, back=True)
            if self.is_last:
                self.reduce_ready(stop, self.passed)
            if stop in self.layout.split and self.is_last and not self.at_end:
                self._sum_split(stop)
        return needs

    # ------------------------------------------------------------ communication

    def _sum_split(self, layer: int) -> None:
        """Let the ranks that hold the same part of a layer's weights sum its gradients."""
        name = self.workloads[0].model.layers[layer].name
        for members in self.layout.alike(layer):
            if len(members) > 1:
                nbytes = self.layout.share(layer, members[0]) * float(self.workloads[0].grad_nbytes[layer])
                self.reduce(members, nbytes, self.passed, name)

    def _exchange(self, layer: int, done: Needs, *, back: bool = False) -> Needs:
        """Exchange a layer's inputs, or their gradients, within its groups; return the rows that ranks wait for."""
        for kind, groups, nbytes in self.layout.moves(layer, self._numbers(layer), back=back):
            waits = self.nothing()
            for group in groups:
                self.exchange(kind, group, nbytes, done, waits, "activations", "activations")
            done = waits
        return done

    def _numbers(self, layer: int) -> float:
        """Return the bytes of a layer's input, for the samples of all ranks."""
        first = self.workloads[0]
        size = float(np.prod(first.model.layers[layer].in_shape)) * ELEMENT_NBYTES[first.precision]
        return size * sum(w.batch_size for w in self.workloads)

    def _loss(self, done: Needs) -> Needs:
        """Sum what the loss needs from all outputs of a sample (the maximum, and the sum of exponentials), if the last
        layer is split."""
        waits, nbytes = self.nothing(), self.layout.loss_nbytes(sum(w.batch_size for w in self.workloads))
        for group in self.layout.members(self.n_layers - 1) if self.layout.split_end else ():
            self.exchange("all_reduce", group, nbytes, done, waits, "loss", "activations")
        return waits


# ---------------------------------------------------------------- layouts


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

    def group_size(self, layer: int) -> int:
        """Return the ranks of a group, M."""
        return self.n_ranks // self.groups[layer]

    @cached_property
    def split(self) -> tuple[int, ...]:
        """Layers whose weights are split."""
        return tuple(i for i, n in enumerate(self.outputs) if n and self.group_size(i) > 1)

    @property
    def split_end(self) -> bool:
        """Whether the model's outputs are split."""
        return self.group_size(len(self.groups) - 1) > 1

    def share(self, layer: int, rank: int) -> float:
        """Return the share of a layer's outputs and weights on a rank."""
        size, outputs = self.group_size(layer), self.outputs[layer]
        if size == 1 or not outputs:
            return 1.0 / size
        return (outputs // size + (rank % size < outputs % size)) / outputs

    def members(self, layer: int) -> list[list[int]]:
        """Return the groups of a layer."""
        size = self.group_size(layer)
        return [list(range(first, first + size)) for first in range(0, self.n_ranks, size)]

    def alike(self, layer: int) -> list[list[int]]:
        """Return the ranks that hold the same weights of a layer."""
        size = self.group_size(layer)
        return [list(range(place, self.n_ranks, size)) for place in range(size)]

    def gathers(self, layer: int) -> bool:
        """Return whether a layer needs inputs from the other ranks of its group."""
        return not self.follows[layer] and self.group_size(layer) > 1

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
            size = self.group_size(layer - 1)
            apart = size // dealt
            groups = [
                list(range(first + place, first + size, apart))
                for first in range(0, self.n_ranks, size)
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
        for i, (nbytes, weight_nbytes) in enumerate(zip(inputs, weights, strict=True)):
            total += sum((1.0 - 1.0 / len(groups[0])) * size for _, groups, size in self.moves(i, nbytes))
            total += 2.0 * (self.groups[i] - 1) * weight_nbytes / self.n_ranks
        last = self.group_size(len(self.groups) - 1)
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
