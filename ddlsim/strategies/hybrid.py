"""Hybrid parallelism: each layer is data parallel, model parallel or a mix of both (Das et al. 2016)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ddlsim.arguments import Count, checked, validated_by
from ddlsim.errors import ConfigError
from ddlsim.plan import StepProgram
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.hybrid import Layout, balanced_layout, hybrid, kept_nbytes, layout_of, replicated, splittable
from ddlsim.plan.schedules import Schedules
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.fabric import WithFabric, cost_suffix, fabric_of
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies.overlap import InOrder, NoOverlap, Overlap, WhileWaiting, as_compressed, in_order, overlap_named
from ddlsim.strategies.replica_groups import Elements, OfReplicas
from ddlsim.strategies.split_rules import DealtOut, check_shares, divisors
from ddlsim.workload.buckets import backwards
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import holding_of, memory_of
from ddlsim.workload.precision import ELEMENT_NBYTES
from ddlsim.workload.stage import Stage


@checked
@dataclass(frozen=True)
class Distribution:
    """A split for :class:`~ddlsim.Hybrid` that applies to all layers, as in ``Hybrid(Distribution(data=4, model=16))``.

    It is similar to a distribution in Intel MLSL (Sridharan et al. 2018, arXiv:1801.08030). Layers whose number of
    outputs is smaller than `model` remain data parallel.

    data   number of groups of workers
    model  number of workers per group; each worker computes a part of the outputs of each layer

    The product ``data * model`` must equal the number of workers.
    """

    data: Count
    model: Count

    def groups(self, workload: Workload, n_workers: int) -> dict[str, int]:
        """Return the number of groups by layer name. Raises ConfigError unless `n_workers` is data * model."""
        if self.data * self.model != n_workers:
            near = sorted(sorted(divisors(n_workers), key=lambda m: abs(m - self.model))[:2])
            use = " or ".join(f"data={n_workers // m}, model={m}" for m in near)
            raise ConfigError(
                f"Distribution: data {self.data} x model {self.model} = {self.data * self.model}: must equal the "
                f"number of workers, {n_workers}; use {use}"
            )
        layers = workload.model.layers
        return {layers[i].name: self.data for i, n in splittable(workload.model).items() if n >= self.model}


@checked
@dataclass(frozen=True)
class Hybrid(DealtOut, WithFabric):
    """Data parallelism, model parallelism, or a mix of the two, chosen for each layer.

    See Das et al. 2016, arXiv:1602.06709. For each layer, the N workers form G groups, and each worker of a group
    computes a part of the layer's outputs. G = N is data parallelism; G = 1 is model parallelism. ``batch_size`` is the
    global batch size.

    Dense layers and convolutions outside branches can be split (:mod:`ddlsim.plan.hybrid`). Each group all-gathers the
    inputs of a split layer before its forward pass, and reduce-scatters their gradients after its backward pass. Each
    worker of a group holds a part of the weights. The gradients of that part are all-reduced across groups. Compression
    applies only to layers that are not split, because the parts of split layers are small.

    groups      number of groups G for individual layers, such as ``{"fc6": 1, "fc7": 2}``; G = N for all other layers;
                Distribution(data, model) for the same G in all layers; or "balance" for the numbers that minimise the
                bytes that a worker receives per step
    overlap     when gradients are sent during the backward pass: "layer", "ddp", "none", DdpBuckets(...) or
                WhileWaiting()
    micro_batches
                number of micro-batches that each worker computes, one at a time, before gradients are summed
    algorithm, rank_order, cost
                algorithm, rank order and cost model of the gradients' all-reduces; see :class:`~ddlsim.Fabric`. All
                other exchanges are simulated message by message
    """

    groups: Literal["balance"] | Mapping[str, Count] | Distribution = "balance"
    overlap: Annotated[str | InOrder | WhileWaiting, validated_by(in_order(WhileWaiting))] = "layer"
    micro_batches: Count = 1

    def __hash__(self) -> int:
        groups = tuple(self.groups.items()) if isinstance(self.groups, Mapping) else self.groups
        return hash((groups, self.overlap, self.micro_batches, self.cost))

    @property
    def label(self) -> str:
        """Label for tables and plots: number of groups by layer, and number of micro-batches."""
        more = "" if self.micro_batches == 1 else f", {self.micro_batches} micro-batches"
        more += cost_suffix(self.cost)
        if isinstance(self.groups, str):
            return f"hybrid (balance{more})"
        if isinstance(self.groups, Distribution):
            return f"hybrid (data {self.groups.data}, model {self.groups.model}{more})"
        return f"hybrid ({', '.join(f'{name} {n}' for name, n in self.groups.items())}{more})"

    def scaled_down(self) -> Hybrid:
        """Return an equally exact strategy for two workers and any model."""
        return Hybrid(overlap=self.overlap)

    def layout(self, workload: Workload, n_workers: int) -> Layout:
        """Return the number of groups of each layer for `n_workers` workers.

        Raises ConfigError, with valid values, if `groups` does not fit the model or the number of workers.
        """
        model = workload.model
        if isinstance(self.groups, Distribution):
            return layout_of(model, n_workers, self.groups.groups(workload, n_workers))
        if not isinstance(self.groups, str):
            return layout_of(model, n_workers, self.groups)
        gradient = workload.gradient_nbytes / max(1.0, model.gradient_nbytes(1))
        samples = workload.batch_size * n_workers * self.micro_batches
        return balanced_layout(model, n_workers, samples, ELEMENT_NBYTES[workload.precision], gradient)

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return a worker's stage: its weights, its activations, and the tensors that it gathers."""
        layout, model = self.layout(workload, n_workers), workload.model
        layers = list(model.layers)
        for i in layout.split:
            n_params = round(layers[i].n_params * layout.share(i, rank))
            layers[i] = dataclasses.replace(layers[i], n_params=n_params, tensors=(("own", n_params),))
        local_model = dataclasses.replace(model, layers=tuple(layers), structure=(), trainable=False)
        memory = memory_of(local_model, workload.batch_size, workload.precision, holding_of(workload))
        gathered = float(kept_nbytes(workload, layout).sum() - stored_nbytes(workload).sum())
        return Stage(workload, memory=dataclasses.replace(memory, activations=memory.activations + gathered))

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads (:func:`ddlsim.plan.hybrid.hybrid`)."""
        return self._program(workloads, accumulation, overlap_named(self.overlap))

    def _program(self, workloads: Sequence[Workload], accumulation: int, policy: Overlap) -> StepProgram:
        return hybrid(
            workloads,
            self.layout(workloads[0], len(workloads)),
            policy.buckets,
            accumulation=accumulation,
            at_end=isinstance(policy, NoOverlap),
            blocking=isinstance(policy, WhileWaiting),
        )

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError for a custom optimizer that needs whole layers."""
        check_shares("Hybrid", context)
        workloads = context.workloads
        policy, accumulation = as_compressed(overlap_named(self.overlap), context), context.workers[0].accumulation
        program, layout = self._program(workloads, accumulation, policy), self.layout(workloads[0], len(workloads))
        nodes = np.array(context.nodes)
        schedules = Schedules(program, self.algorithm, context.cluster, nodes, self.rank_order, context.notes)
        layers = workloads[0].model.layers
        if isinstance(self.groups, str):
            groups = [f"{layers[i].name} {layout.groups[i]}" for i in layout.split]
            context.notes.append(
                f"number of groups by layer: {', '.join(groups)}; all other layers are data parallel"
                if groups
                else "groups = 'balance': all layers are data parallel"
            )
        parts, only = list[slice](), None
        if context.compression is not None:
            parts = backwards(policy.buckets(replicated(workloads[0], layout)))
            only = Elements.without(context, layout.split) if layout.split else None
            dense = [layers[i].name for i in layout.split if layout.groups[i] > 1]
            if dense:
                context.notes.append(
                    f"compression: the gradients of split layers ({', '.join(dense)}) stay uncompressed"
                )
        model, args = CommonModel(context), (context, context.workers, program.groups, schedules)
        exchanges = OfReplicas(*args, fabric_of(self), len(workloads), parts, model.gradient, owner="Hybrid", only=only)
        TableRun(context, program, exchanges, model, owner="Hybrid")
