"""Data or model parallelism, chosen for each layer, as a plan: Das et al. 2016, arXiv:1602.06709."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import DraftedSteps, Needs
from ddlsim.plan.layouts import Layout
from ddlsim.plan.norms import Together, with_partial_norms
from ddlsim.plan.plan import Floats
from ddlsim.plan.program import StepProgram
from ddlsim.workload.buckets import Bucket, per_layer
from ddlsim.workload.compute import Workload
from ddlsim.workload.devices import Device
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

    A group exchanges the inputs of its samples before the layer (:class:`~ddlsim.plan.layouts.Layout`), and their
    gradients as soon as the layer has computed them: before the gradients of its weights, which overlap the exchange.
    Gradients of replicated weights are all-reduced in `buckets` during the backward pass. Gradients of split weights
    are all-reduced among the ranks with the same part, as soon as they are ready or, with `at_end`, after the backward
    pass.

    layout        for the number of ranks in `workloads`, each of which describes all outputs of a rank's own samples
    accumulation  number of micro-batches per rank and step, whose gradients are accumulated locally
    blocking      whether computation waits for communication

    With LARS and LAMB, the groups combine the norms of split weights.
    """
    each = each_rank(workloads, None)
    steps = _Steps(each, layout, buckets, at_end or blocking, blocking, accumulation)
    return StepProgram.of(with_partial_norms(steps.plan(), each, *_split_tensors(each[0], layout)))


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
    for ways in sorted({layout.ways(i) for i in layout.split}):
        own = [i for i in layout.split if layout.ways(i) == ways]
        n_tensors = int(np.isin(workload.tensor_layer, own).sum())
        rounds.append([Together(group, n_tensors, len(group)) for group in layout.members(own[0])])
    return rounds


def kept_nbytes(workload: Workload, layout: Layout) -> Floats:
    """Return the bytes of each layer that a rank keeps for the backward pass, including gathered inputs of split
    layers, (n_layers,)."""
    gathered = [
        np.prod(layer.in_shape) * (layout.ways(i) - 1) if layout.gathers(i) else 0
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

    def seconds(ways: int, device: Device, efficiency: float) -> Floats:
        layers = tuple(
            dataclasses.replace(
                layer,
                flops=layer.flops / ways,
                n_params=layer.n_params // ways,
                moved_nbytes=layer.moved_nbytes - FP32_NBYTES * float(np.prod(layer.out_shape)) * (1.0 - 1.0 / ways),
            )
            for layer in model.layers
        )
        shared = dataclasses.replace(model, layers=layers, structure=(), trainable=False)
        batch = workload.batch_size * ways
        return roofline_times(shared, device, batch, base_precision(workload.precision), efficiency, memory)[0]

    whole = seconds(1, device, efficiency)
    for ways in sorted({layout.ways(i) for i in layout.split}):
        own = [i for i in layout.split if layout.ways(i) == ways]
        factor[own] = seconds(ways, device, efficiency)[own] / whole[own]
    return factor


class _Steps(DraftedSteps):
    """passed, updated  each rank's latest backward pass, and its update in the previous step"""

    def __init__(
        self,
        each: list[Workload],
        layout: Layout,
        buckets: Callable[[Workload], Sequence[Bucket]],
        at_end: bool,
        blocking: bool,
        n_batches: int,
    ) -> None:
        dense = replicated(each[0], layout)
        chosen = list(buckets(dense)) if len(dense.tensor_layer) else []
        super().__init__(each, chosen, parts_of(dense, chosen) if chosen else (), n_batches)
        self.layout, self.at_end, self.blocking = layout, at_end, blocking
        self.passed, self.updated = self.nothing(), self.nothing()
        factors = {id(w): split_factors(w, layout) for w in each}
        every = range(self.n_layers)
        shares = np.array([[layout.share(i, r) * layout.ways(i) for i in every] for r in range(self.n)])
        self.forward = [w.forward * factors[id(w)] * shares[r] for r, w in enumerate(each)]
        self.backward = [w.backward * factors[id(w)] * shares[r] for r, w in enumerate(each)]
        self.held = [self._held(r) for r in range(self.n)]
        self.kept = [kept_nbytes(w, layout) for w in each]
        #: first layers of the passes: those before which something is exchanged
        self.starts = [0, *(i for i in range(1, self.n_layers) if layout.exchanges(i))]

    def _held(self, rank: int) -> float:
        """Return the share of all weights that a rank updates."""
        nbytes = self.each[rank].grad_nbytes
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
        layer = self.each[0].model.layers[first]
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
        name = self.each[0].model.layers[layer].name
        for members in self.layout.alike(layer):
            if len(members) > 1:
                nbytes = self.layout.share(layer, members[0]) * float(self.each[0].grad_nbytes[layer])
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
        first = self.each[0]
        size = float(np.prod(first.model.layers[layer].in_shape)) * ELEMENT_NBYTES[first.precision]
        return size * sum(w.batch_size for w in self.each)

    def _loss(self, done: Needs) -> Needs:
        """Sum what the loss needs from all outputs of a sample (the maximum, and the sum of exponentials), if the last
        layer is split."""
        waits, nbytes = self.nothing(), self.layout.loss_nbytes(sum(w.batch_size for w in self.each))
        for group in self.layout.members(self.n_layers - 1) if self.layout.split_end else ():
            self.exchange("all_reduce", group, nbytes, done, waits, "loss", "activations")
        return waits
