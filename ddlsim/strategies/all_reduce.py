"""Synchronous data-parallel SGD by all-reduce: w <- w - eta * (1/N) sum_i g_i after every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError
from ddlsim.plan import StepProgram, data_parallel
from ddlsim.plan.norms import with_shared_norms
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE
from ddlsim.runtime import Communicator, Exchange, RunContext, communicator
from ddlsim.runtime.codec import backwards
from ddlsim.runtime.exchange import CollectiveExchange, Vectors
from ddlsim.runtime.fabric import (
    AllReduceAlgorithm,
    Cost,
    OnFabric,
    RankOrder,
    algorithm_name,
    algorithm_of,
    cost_suffix,
)
from ddlsim.runtime.table_run import planned
from ddlsim.strategies import contract
from ddlsim.strategies.overlap import Overlap, OverlapChoice, as_compressed, buckets_of, overlap_named
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class AllReduce(OnFabric):
    """Synchronous SGD: all workers average their gradients in every step.

    overlap     when gradients are sent during the backward pass: "none", "layer", "ddp", "horovod", "priority", or a
                policy object such as DdpBuckets("50 MiB")
    algorithm, rank_order, cost
                algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`. They can also be
                set with ``simulate(..., fabric=...)``
    shared_norms
                for LARS and LAMB: all-gather algorithm, such as "bruck" or "ring". Each of N workers then computes the
                norms of only 1/N of the layers, and the workers all-gather the norms. This saves time and gives the
                same values (Shi et al. 2021, arXiv:2010.10458, "parallel tensor operator"). None: every worker computes
                all norms
    no_sync     with gradient accumulation, whether gradients are exchanged only once per update, as in DDP's
                ``no_sync`` context. False: they are exchanged after every micro-step, which gives the same values but
                sends ``accumulation`` times as many bytes
    """

    algorithm: AllReduceAlgorithm = "default"
    overlap: OverlapChoice = "ddp"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"
    shared_norms: Annotated[str | Collective, algorithm_of("all_gather")] | None = None
    no_sync: bool = True

    @property
    def label(self) -> str:
        """Label for tables and plots: algorithm and overlap, and the cost model unless collectives are simulated."""
        overlap = self.overlap if isinstance(self.overlap, str) else type(self.overlap).__name__
        norms = "" if self.shared_norms is None else ", shared norms"
        norms += "" if self.no_sync else ", sums in every micro-step"
        return f"all-reduce ({algorithm_name(self.algorithm)}, {overlap}{norms}{cost_suffix(self.cost)})"

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        members, overlap = communicator(context, self), as_compressed(overlap_named(self.overlap), context)
        parts = backwards(buckets_of(overlap, context.workers[0].workload))

        def sums(gradients: Vectors) -> Exchange:
            return CollectiveExchange(members, parts=parts, vectors=gradients)

        start_group(context, overlap, members, sums, self.shared_norms, no_sync=self.no_sync)

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads, without compression.

        It does not depend on `algorithm`, `rank_order` and `cost`, which decide only how long collectives take.
        """
        shared = self.shared_norms is not None
        overlap = overlap_named(self.overlap)
        return _program(overlap, workloads, accumulation, no_sync=self.no_sync, shared_norms=shared)


def _program(
    overlap: Overlap, workloads: Sequence[Workload], accumulation: int, *, no_sync: bool, shared_norms: bool
) -> StepProgram:
    """Return the program of the policy, or one that exchanges its buckets in order. Raises ConfigError without
    `no_sync` for a policy with its own program."""
    policy = contract.of(overlap)
    if not policy.defines("program"):
        buckets = functools.partial(buckets_of, overlap)
        program = data_parallel(workloads, None, buckets, accumulation=accumulation, no_sync=no_sync)
    elif no_sync:
        program = policy.program(workloads, accumulation)
    else:
        raise ConfigError(
            f"AllReduce: no_sync = False cannot be combined with overlap = {type(overlap).__name__}, which sums "
            "gradients once per step; use overlap='none', 'layer' or 'ddp'"
        )
    if not shared_norms:
        return program
    works = {id(workload): [workload] for workload in workloads}
    return program.map(functools.partial(with_shared_norms, n_ranks=len(workloads)), list(works.values()))


def start_group(
    context: RunContext, overlap: Overlap, members: Communicator, sums: Callable[[Vectors], Exchange],
    shared_norms: str | Collective | None = None, *, no_sync: bool = True,
) -> None:  # fmt: skip
    """Start workers that execute the plan of `overlap` and exchange gradients by the exchanges that `sums` makes.

    `shared_norms` is the all-gather of norms (:class:`AllReduce`).
    """
    accumulation, compresses = context.workers[0].accumulation, context.compression is not None
    if shared_norms is not None and (compresses or not members.simulated):
        raise ConfigError(
            "AllReduce: shared_norms requires uncompressed gradients and cost = 'simulated'; remove shared_norms, or "
            "remove compression and cost"
        )

    if compresses and accumulation > 1 and not no_sync:
        raise ConfigError(
            "AllReduce: with no_sync = False, every micro-step would compress its gradients and add a compression "
            "error; remove no_sync or compression"
        )

    def make(workloads: Sequence[Workload]) -> StepProgram:
        shared = shared_norms is not None
        return _program(overlap, workloads, accumulation, no_sync=no_sync, shared_norms=shared)

    def exchanges(gradients: Vectors) -> dict[int, Exchange]:
        norms = {} if shared_norms is None else {ALL_GATHER: CollectiveExchange(members, "all_gather", shared_norms)}
        return {ALL_REDUCE: sums(gradients), **norms}

    planned(members, make, exchanges)
