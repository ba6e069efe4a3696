"""Mixtures of experts distributed over the ranks of a group, as a plan: four all-to-alls per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.errors import ConfigError, listed
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import Draft
from ddlsim.plan.program import N_STEPS, StepProgram
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload
from ddlsim.workload.layers import MixtureOfExperts
from ddlsim.workload.model import Layer, Leaf, Model, Node, Residual, Side
from ddlsim.workload.precision import ELEMENT_NBYTES


def experts(
    workloads: Sequence[Workload],
    degree: int,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
) -> StepProgram:
    """Return the program of data and expert parallelism: groups of `degree` consecutive ranks divide the experts of
    every layer (Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3).

    A layer of experts sends each rank's tokens to the ranks with their experts, and the results back: two all-to-alls
    in the forward pass, and two for the gradients in the backward pass, for which the rank waits. Each rank receives
    the same number of tokens as it sends. Gradients of replicated layers are all-reduced in buckets during the backward
    pass, those of experts among the ranks that hold the same experts, as soon as the layer's gradients are ready.

    The compute time of experts is that of the workload, for a rank that computes all its tokens itself.

    Raises ConfigError for a model without experts, and for `degree` that do not divide ranks and experts.
    """
    each = each_rank(workloads, None)
    model, n = each[0].model, len(each)
    sent = experts_in(model)
    if not sent:
        raise ConfigError(f"plan: model {model.name!r} has no mixture_of_experts layer; use data_parallel")
    if degree < 1 or n % degree:
        fit = [w for w in range(1, n + 1) if n % w == 0]
        raise ConfigError(f"plan: degree = {degree}: must divide the number of ranks, {n}; use one of {listed(fit)}")
    for index, (count, _) in sent.items():
        if count % degree:
            fit = [w for w in range(1, n + 1) if n % w == 0 and count % w == 0]
            raise ConfigError(
                f"plan: degree = {degree}: must divide the number of experts of {model.layers[index].name}, "
                f"{count}; with {n} ranks, use one of {listed(fit)}"
            )
    draft = _Steps(each, degree, {index: numbers for index, (_, numbers) in sent.items()}, buckets)
    for step in range(N_STEPS):
        draft.step(step)
    return StepProgram.of(draft.draft.plan())


def experts_in(model: Model) -> dict[int, tuple[int, float]]:
    """Return a model's layers of experts: the number of experts of each, and the numbers per sample sent to them."""
    found: dict[int, tuple[int, float]] = {}

    def walk(nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, Leaf):
                if isinstance(node.spec, MixtureOfExperts):
                    shape = model.layers[node.index].in_shape
                    found[node.index] = node.spec.experts, node.spec.rows(shape) * shape[1]
            elif isinstance(node, Residual):
                walk((*node.body, *node.shortcut))
            elif isinstance(node, Side):
                walk(node.body)
            else:
                walk([inner for branch in node.branches for inner in branch])

    walk(model.structure)
    return found


def expert_elements(layer: Layer) -> int:
    """Return the parameters of a layer that are its experts', not its router's."""
    if layer.type != "mixture_of_experts":
        return 0
    return sum(n for name, n in layer.tensors if not name.startswith("router"))


@dataclass
class _Steps:
    """Steps, written down one after the other."""

    each: list[Workload]
    degree: int
    sent: dict[int, float]
    chosen: Callable[[Workload], Sequence[Bucket]]
    updates: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        first, n = self.each[0], len(self.each)
        layers = first.model.layers
        total = sum(layer.n_params for layer in layers)
        element = first.gradient_nbytes / total  # bytes of a gradient
        self.experts = {i: element * expert_elements(layers[i]) / self.degree for i in self.sent}
        names = [(i, name) for i, layer in enumerate(layers) for name, _ in layer.tensors]
        shared = np.array([i not in self.sent or name.startswith("router") for i, name in names])
        rest = first.grad_nbytes.copy()
        for i, nbytes in self.experts.items():
            rest[i] -= nbytes * self.degree
        dense = dataclasses.replace(
            first, grad_nbytes=rest, tensor_layer=first.tensor_layer[shared], tensor_nbytes=first.tensor_nbytes[shared]
        )
        self.buckets = list(self.chosen(dense))
        self.share = (dense.gradient_nbytes + sum(self.experts.values())) / first.gradient_nbytes
        self.draft = Draft(len(layers), parts_of(dense, self.buckets))
        self.groups = [list(range(g, g + self.degree)) for g in range(0, n, self.degree)]
        self.alike = [list(range(place, n, self.degree)) for place in range(self.degree)]

    def step(self, step: int) -> None:
        n, n_layers = len(self.each), len(self.each[0].forward)
        waits: list[list[int]] = [[] for _ in range(n)]
        first = 0
        for layer in sorted(self.sent):
            for begin, end, name in ((first, layer, "dispatch"), (layer, layer + 1, "combine")):
                done = [[row] for row in self._pass(step, "forward", begin, end, waits)] if end > begin else waits
                waits = self._all_to_all(step, layer, done, name)
            first = layer + 1
        if first < n_layers:
            self._pass(step, "forward", first, n_layers, waits)
            waits = [[] for _ in range(n)]
        sums: list[list[int]] = [[] for _ in range(n)]
        end = n_layers
        for layer in sorted(self.sent, reverse=True):
            rows, waits = self._back(step, end, layer + 1, waits, sums)
            waits = self._all_to_all(step, layer, [[row] for row in rows] if rows else waits, "combine gradients")
            rows, waits = self._back(step, layer + 1, layer, waits, sums)
            if len(self.groups) > 1 and self.experts[layer]:
                for members in self.alike:
                    ready = [[rows[r]] for r in members]
                    self._reduce(members, self.experts[layer], ready, sums, step=step, lane="experts' stream")
            waits = self._all_to_all(step, layer, [[row] for row in rows], "dispatch gradients")
            end = layer
        self._back(step, end, 0, waits, sums)
        for r, workload in enumerate(self.each):
            self.draft.work(
                r, self.share * workload.optimizer, kind="update", layers=(0, n_layers), step=step, needs=sums[r]
            )

    def _pass(self, step: int, kind: str, first: int, end: int, waits: Sequence[Sequence[int]]) -> list[int]:
        rows = []
        for r, workload in enumerate(self.each):
            times = workload.forward if kind == "forward" else workload.backward
            kept = float(stored_nbytes(workload)[first:end].sum())
            rows.append(
                self.draft.work(
                    r, float(times[first:end].sum()), kind=kind, batch=r, layers=(first, end), step=step,
                    needs=waits[r], holds=kept if kind == "forward" else -kept,
                )
            )  # fmt: skip
        return rows

    def _back(
        self, step: int, end: int, first: int, waits: list[list[int]], sums: list[list[int]]
    ) -> tuple[list[int], list[list[int]]]:
        """Go back from layer `end` to `first`, and let buckets leave on the way; return the last rows, and what is
        still to be waited for."""
        rows: list[int] = []
        if end <= first:
            return rows, waits
        stops = {b.ready_layer for b in self.buckets if first <= b.ready_layer < end} | {first}
        for stop in sorted(stops, reverse=True):
            rows, end = self._pass(step, "backward", stop, end, waits), stop
            waits = [[] for _ in self.each]
            for part, bucket in enumerate(self.buckets):
                if bucket.ready_layer == stop:
                    ready = [[row] for row in rows]
                    self._reduce(range(len(self.each)), bucket.nbytes, ready, sums, step=step, part=part)
        return rows, waits

    def _reduce(
        self, members: Sequence[int], nbytes: float, ready: list[list[int]], sums: list[list[int]], *, step: int,
        part: int = -1, lane: str = "stream",
    ) -> None:  # fmt: skip
        rows = self.draft.all_reduce(members, nbytes, ready, step=step, part=part, lane=lane)
        for r, row in zip(members, rows, strict=True):
            sums[r].append(row)

    def _all_to_all(self, step: int, layer: int, done: Sequence[Sequence[int]], name: str) -> list[list[int]]:
        """Exchange tokens in all groups when the rows of each rank have ended; return what it waits for then."""
        waits: list[list[int]] = [[] for _ in self.each] if self.degree > 1 else [list(rows) for rows in done]
        for group in self.groups if self.degree > 1 else ():
            workload = self.each[group[0]]
            nbytes = workload.batch_size * self.sent[layer] * ELEMENT_NBYTES[workload.precision]
            needs = [done[r] for r in group]
            arrived = self.draft.collective("all_to_all", group, nbytes, needs, name, step=step, lane="experts")
            for r, row in zip(group, arrived, strict=True):
                waits[r] = [row]
        return waits
