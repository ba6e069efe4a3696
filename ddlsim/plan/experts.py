"""Mixtures of experts distributed over the ranks of a group, as a plan: four all-to-alls per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.errors import ConfigError, listed
from ddlsim.plan.chunks import leaves
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import DraftedSteps, Needs
from ddlsim.plan.program import StepProgram
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload
from ddlsim.workload.layers import MixtureOfExperts
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import ELEMENT_NBYTES


def experts(
    workloads: Sequence[Workload], degree: int, buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets
) -> StepProgram:
    """Return the program of data and expert parallelism: groups of `degree` consecutive ranks divide the experts of
    every layer (Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3).

    A layer of experts sends each rank's tokens to the ranks with their experts, and the results back: two all-to-alls
    in the forward pass, and two for the gradients in the backward pass, for which the rank waits. Each rank receives
    the same number of tokens as it sends. Gradients of replicated layers are all-reduced in buckets during the backward
    pass, those of experts among the ranks that hold the same experts, as soon as the layer's gradients are ready.

    The compute time of experts is that of the workload, for a rank that computes all its tokens itself.

    Raises ConfigError for a model without experts, and if `degree` does not divide the numbers of ranks and experts.
    """
    by_rank = each_rank(workloads, None)
    model, n = by_rank[0].model, len(by_rank)
    sent = experts_in(model)
    if not sent:
        raise ConfigError(
            f"plan: model {model.name!r} has no mixture_of_experts layer; use data parallelism, such as AllReduce()"
        )
    counts = dict.fromkeys(count for count, _ in sent.values())
    valid = [w for w in range(1, n + 1) if all(number % w == 0 for number in (n, *counts))]
    if degree not in valid:
        raise ConfigError(
            f"plan: degree = {degree}: must divide the number of ranks, {n}, and the number of experts of each layer, "
            f"{listed(counts)}; use one of {listed(valid)}"
        )
    steps = _Steps(by_rank, degree, {index: numbers for index, (_, numbers) in sent.items()}, buckets)
    return StepProgram.of(steps.plan())


def experts_in(model: Model) -> dict[int, tuple[int, float]]:
    """Return a model's layers of experts: the number of experts of each, and of values per sample sent to them."""
    specs = {leaf.index: leaf.spec for leaf in leaves(model.structure)}
    shapes = [layer.in_shape for layer in model.layers]
    return {
        index: (spec.experts, spec.rows(shapes[index]) * shapes[index][1])
        for index, spec in specs.items()
        if isinstance(spec, MixtureOfExperts)
    }


def expert_elements(layer: Layer) -> int:
    """Return the number of parameters of a layer's experts, without its router."""
    if layer.type != "mixture_of_experts":
        return 0
    return sum(n for name, n in layer.tensors if not name.startswith("router"))


class _Steps(DraftedSteps):
    def __init__(
        self, works: list[Workload], degree: int, sent: dict[int, float], choose: Callable[[Workload], Sequence[Bucket]]
    ) -> None:
        self.degree, self.sent = degree, sent
        first, n, layers = works[0], len(works), works[0].model.layers
        total = sum(layer.n_params for layer in layers)
        element = first.gradient_nbytes / total  # bytes of a gradient
        self.experts = {i: element * expert_elements(layers[i]) / degree for i in sent}
        names = [(i, name) for i, layer in enumerate(layers) for name, _ in layer.tensors]
        shared = np.array([i not in sent or name.startswith("router") for i, name in names])
        rest = first.grad_nbytes.copy()
        for i, nbytes in self.experts.items():
            rest[i] -= nbytes * degree
        dense = dataclasses.replace(
            first, grad_nbytes=rest, tensor_layer=first.tensor_layer[shared], tensor_nbytes=first.tensor_nbytes[shared]
        )
        self.share = (dense.gradient_nbytes + sum(self.experts.values())) / first.gradient_nbytes
        self.groups = [list(range(g, g + degree)) for g in range(0, n, degree)]
        self.alike = [list(range(place, n, degree)) for place in range(degree)]
        chosen = list(choose(dense))
        super().__init__(works, chosen, parts_of(dense, chosen))

    def write_step(self) -> None:
        waits = self.nothing()
        first = 0
        for layer in sorted(self.sent):
            for begin, end, name in ((first, layer, "dispatch"), (layer, layer + 1, "combine")):
                done = self.add_passes("forward", begin, end, waits) if end > begin else waits
                waits = self._all_to_all(layer, done, name)
            first = layer + 1
        if first < self.n_layers:
            self.add_passes("forward", first, self.n_layers, waits)
            waits = self.nothing()
        end = self.n_layers
        for layer in sorted(self.sent, reverse=True):
            rows, waits = self.add_backward(layer + 1, end, waits)
            waits = self._all_to_all(layer, rows or waits, "combine gradients")
            rows, waits = self.add_backward(layer, layer + 1, waits)
            for members in self.alike if len(self.groups) > 1 and self.experts[layer] else ():
                self.reduce(members, self.experts[layer], rows, lane="experts' stream")
            waits = self._all_to_all(layer, rows, "dispatch gradients")
            end = layer
        self.add_backward(0, end, waits)
        for r in range(self.n):
            self.add_update(r, self.share)

    def _all_to_all(self, layer: int, done: Needs, name: str) -> Needs:
        """Exchange tokens in all groups after each rank's rows `done`; return the rows that each rank waits for."""
        if self.degree == 1:
            return [list(rows) for rows in done]
        waits = self.nothing()
        for group in self.groups:
            workload = self.workloads[group[0]]
            nbytes = workload.batch_size * self.sent[layer] * ELEMENT_NBYTES[workload.precision]
            self.exchange("all_to_all", group, nbytes, done, waits, name, "experts")
        return waits
