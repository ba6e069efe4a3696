"""Data or model parallelism, chosen for each layer, as a plan: Das et al. 2016, arXiv:1602.06709."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import Draft
from ddlsim.plan.layouts import Layout
from ddlsim.plan.norms import Together, with_partial_norms
from ddlsim.plan.plan import Floats
from ddlsim.plan.program import N_STEPS, StepProgram
from ddlsim.workload.buckets import Bucket, per_layer
from ddlsim.workload.compute import Workload
from ddlsim.workload.devices import Device
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES
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
    Gradients of replicated weights are all-reduced in `buckets` during the backward pass, those of parts of weights
    among the ranks that hold the same part, as soon as the layer's are ready; with `at_end` after the backward pass.

    layout        for the number of ranks in `workloads`, each of which describes all outputs of a rank's own samples
    accumulation  micro-batches of each rank in a step, whose gradients are accumulated locally
    blocking      communication does not overlap computation

    With LARS and LAMB, the groups combine the norms of split weights.
    """
    each = each_rank(workloads, None, accumulation)
    draft = _Steps(each, layout, buckets, at_end or blocking, blocking, accumulation)
    for step in range(N_STEPS):
        draft.step(step)
    return StepProgram.of(with_partial_norms(draft.draft.plan(), each, *_split_tensors(each[0], layout)))


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
    """Return the groups that together hold the tensors of split layers, for each size of groups."""
    rounds = []
    for ways in sorted({layout.ways(i) for i in layout.split}):
        own = [i for i in layout.split if layout.ways(i) == ways]
        n_tensors = int(np.isin(workload.tensor_layer, own).sum())
        rounds.append([Together(group, n_tensors, len(group)) for group in layout.members(own[0])])
    return rounds


def kept_nbytes(workload: Workload, layout: Layout) -> Floats:
    """Return the bytes that a rank keeps of each layer for the backward pass, including gathered inputs of split
    layers, (n_layers,)."""
    gathered = [
        np.prod(layer.in_shape) * (layout.ways(i) - 1) if layout.gathers(i) else 0
        for i, layer in enumerate(workload.model.layers)
    ]
    element = ELEMENT_NBYTES[workload.precision]
    return stored_nbytes(workload) + element * workload.batch_size * np.array(gathered, dtype=np.float64)


def split_factors(workload: Workload, layout: Layout) -> Floats:
    """Return the factor on a layer's time if a rank computes 1/M of the outputs for M times the samples, (n_layers,):
    the same multiplications, fewer weights and more inputs to read, by the roofline of the device. The factor is 1 if
    the user set the time of the step.
    """
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
        return roofline_times(shared, device, batch, workload.precision, efficiency, memory)[0]

    whole = seconds(1, device, efficiency)
    for ways in sorted({layout.ways(i) for i in layout.split}):
        own = [i for i in layout.split if layout.ways(i) == ways]
        factor[own] = seconds(ways, device, efficiency)[own] / whole[own]
    return factor


@dataclass
class _Steps:
    """Steps, written down one after the other. Lists over ranks hold rows of the current step."""

    each: list[Workload]
    layout: Layout
    chosen: Callable[[Workload], Sequence[Bucket]]
    at_end: bool
    blocking: bool
    n_batches: int
    micro: int = 0
    sums: list[list[int]] = field(default_factory=list)
    passed: list[list[int]] = field(default_factory=list)  # the latest backward passes
    updated: list[list[int]] = field(default_factory=list)  # of the step before

    def __post_init__(self) -> None:
        first, layout = self.each[0], self.layout
        self.n, self.n_layers = len(self.each), len(first.forward)
        dense = replicated(first, layout)
        self.buckets = list(self.chosen(dense)) if len(dense.tensor_layer) else []
        self.draft = Draft(self.n_layers, parts_of(dense, self.buckets) if self.buckets else ())
        factors = {id(w): split_factors(w, layout) for w in self.each}
        every = range(self.n_layers)
        shares = np.array([[layout.share(i, r) * layout.ways(i) for i in every] for r in range(self.n)])
        self.forward = [w.forward * factors[id(w)] * shares[r] for r, w in enumerate(self.each)]
        self.backward = [w.backward * factors[id(w)] * shares[r] for r, w in enumerate(self.each)]
        self.held = [self._held(r) for r in range(self.n)]
        self.kept = [kept_nbytes(w, layout) for w in self.each]
        #: layers before which something is exchanged, between which passes are one task
        self.starts = [0, *(i for i in range(1, self.n_layers) if layout.exchanges(i))]

    def _held(self, rank: int) -> float:
        """Return the share of all weights that a rank updates."""
        nbytes = self.each[rank].grad_nbytes
        total = float(nbytes.sum())
        held = sum(self.layout.share(i, rank) * float(nbytes[i]) for i in range(self.n_layers))
        return held / total if total else 0.0

    def step(self, step: int) -> None:
        self.sums = [[] for _ in range(self.n)]
        for micro in range(self.n_batches):
            self.micro = micro
            nothing: list[list[int]] = [[] for _ in range(self.n)]
            before = self.updated if step else nothing
            self._micro_batch(step, before if not micro else self.passed if self.blocking else nothing)
        self.updated = [
            [
                self.draft.work(
                    r,
                    self.held[r] * workload.optimizer,
                    kind="update",
                    layers=(0, self.n_layers),
                    step=step,
                    needs=self.sums[r],
                )
            ]
            for r, workload in enumerate(self.each)
        ]

    @property
    def _last(self) -> bool:
        """Whether gradients are complete after the current micro-batch."""
        return self.micro == self.n_batches - 1

    def _micro_batch(self, step: int, done: list[list[int]]) -> None:
        ends = [*self.starts[1:], self.n_layers]
        for first, end in zip(self.starts, ends, strict=True):
            needs = self._exchange(step, first, done)
            done = [[row] for row in self._pass(step, "forward", first, end, needs)]
        needs = self._loss(step, done)
        for first, end in zip(reversed(self.starts), reversed(ends), strict=True):
            needs = self._back(step, first, end, needs)
        for layer in reversed(self.layout.split) if self.at_end and self._last else ():
            self._sum_split(step, layer, self.passed)

    # ------------------------------------------------------------ compute

    def _pass(
        self, step: int, kind: str, first: int, end: int, needs: Sequence[Sequence[int]], part: float = 1.0
    ) -> list[int]:
        """Let all ranks do a pass through some layers, or `part` of its time; return its rows."""
        times = self.forward if kind == "forward" else self.backward
        sign = {"forward": 1.0, "backward_input": 0.0}.get(kind, -1.0)
        return [
            self.draft.work(
                r, part * float(times[r][first:end].sum()), kind=kind, batch=r * self.n_batches + self.micro,
                layers=(first, end), step=step, needs=needs[r], holds=sign * float(self.kept[r][first:end].sum()),
            )
            for r in range(self.n)
        ]  # fmt: skip

    def _back(self, step: int, first: int, end: int, needs: list[list[int]]) -> list[list[int]]:
        """Go back from layer `end` to `first`, and let gradients leave on the way; return what is to be waited for."""
        layer = self.each[0].model.layers[first]
        apart = self.layout.exchanges(first) and layer.input_grad and layer.n_params > 0
        stops = {b.ready_layer for b in self.buckets} | set(self.layout.split) | {first + apart, first}
        for stop in sorted((s for s in stops if first <= s < end), reverse=True):
            if stop == first and apart:  # half of the time each, see ddlsim.workload.compute
                inputs = [[row] for row in self._pass(step, "backward_input", stop, end, needs, 0.5)]
                rows = self._pass(step, "backward_weight", stop, end, [[] for _ in inputs], 0.5)
            else:
                rows = self._pass(step, "backward", stop, end, needs)
                inputs = [[row] for row in rows]
            needs, end, self.passed = [[] for _ in rows], stop, [[row] for row in rows]
            if stop == first and layer.input_grad:
                needs = self._exchange(step, first, self.passed if self.blocking else inputs, back=True)
            for part, bucket in enumerate(self.buckets) if self._last else ():
                if bucket.ready_layer == stop:
                    rows = self.draft.all_reduce(range(self.n), bucket.nbytes, self.passed, step=step, part=part)
                    self._add(range(self.n), rows)
            if stop in self.layout.split and self._last and not self.at_end:
                self._sum_split(step, stop, self.passed)
        return needs

    # ------------------------------------------------------------ what travels

    def _add(self, members: Sequence[int], rows: Sequence[int]) -> None:
        for r, row in zip(members, rows, strict=True):
            self.sums[r].append(row)

    def _sum_split(self, step: int, layer: int, done: Sequence[Sequence[int]]) -> None:
        """Let the ranks that hold the same part of a layer's weights sum its gradients."""
        name = self.each[0].model.layers[layer].name
        for members in self.layout.alike(layer):
            if len(members) > 1:
                nbytes = self.layout.share(layer, members[0]) * float(self.each[0].grad_nbytes[layer])
                rows = self.draft.all_reduce(members, nbytes, [done[r] for r in members], name, step=step)
                self._add(members, rows)

    def _exchange(self, step: int, layer: int, done: list[list[int]], *, back: bool = False) -> list[list[int]]:
        """Exchange what a layer needs of its group's samples, or the gradients of that; return what each waits for."""
        for kind, groups, nbytes in self.layout.moves(layer, self._numbers(layer), back=back):
            waits: list[list[int]] = [[] for _ in range(self.n)]
            for group in groups:
                needs = [done[r] for r in group]
                rows = self.draft.collective(kind, group, nbytes, needs, "activations", step=step, lane="activations")
                for r, row in zip(group, rows, strict=True):
                    waits[r] = [row]
            done = waits
        return done

    def _numbers(self, layer: int) -> float:
        """Return the bytes of a layer's input, of the samples of all ranks."""
        first = self.each[0]
        size = float(np.prod(first.model.layers[layer].in_shape)) * ELEMENT_NBYTES[first.precision]
        return size * sum(w.batch_size for w in self.each)

    def _loss(self, step: int, done: list[list[int]]) -> list[list[int]]:
        """Sum what the loss needs of all outputs of a sample, where the last layer is split: the largest one, and the
        sum of exponentials."""
        if not self.layout.split_end:
            return [[] for _ in range(self.n)]
        samples = sum(w.batch_size for w in self.each)
        waits: list[list[int]] = [[] for _ in range(self.n)]
        for group in self.layout.members(self.n_layers - 1):
            nbytes = self.layout.loss_nbytes(samples)
            rows = self.draft.all_reduce(group, nbytes, [done[r] for r in group], "loss", step=step, lane="activations")
            for r, row in zip(group, rows, strict=True):
                waits[r] = [row]
        return waits
