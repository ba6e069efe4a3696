"""Synchronous SGD of recommendation models whose embedding tables are distributed over the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ddlsim.arguments import Density, checked, one_of, quantity
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError
from ddlsim.plan import StepProgram
from ddlsim.plan.embeddings import embeddings
from ddlsim.plan.program import LIVE
from ddlsim.plan.schedules import Schedules
from ddlsim.readable import count, size
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.exchange import OfGroups
from ddlsim.runtime.fabric import Collectives, RankOrder, algorithm_of
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies.overlap import InOrder, InOrderChoice, overlap_named
from ddlsim.strategies.split_rules import DealtOut, whole_batch
from ddlsim.units import si
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory, holding_of, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES, GRADIENT_TYPES
from ddlsim.workload.stage import Stage
from ddlsim.workload.table_placement import SHARDINGS, Placement, Shard, Space, place, tables_of, work_of
from ddlsim.workload.table_placement import HostMemory as HostMemory

#: number of workers from which the one that computes the bottom MLP for all samples holds no tables (NVIDIA's DLRM)
MIN_WORKERS_DEDICATED_MLP = 5


@checked
@dataclass(frozen=True)
class EmbeddingParallel(DealtOut):
    """Train recommendation models with sharded embedding tables and data-parallel MLPs.

    All-to-alls carry embedding vectors from the tables to the MLPs (Naumov et al. 2019, arXiv:1906.00091, section 4;
    TorchRec: Ivchenko et al. 2022). ``batch_size`` is the global batch size. Numerically, training is equivalent to
    synchronous SGD, regardless of where the tables are stored. The simulation assumes that all rows of a table are
    equally likely to be looked up, and that a worker uses one kernel for the lookups in all of its tables.

    sharding         how tables are sharded: "table-wise", "row-wise" (partial sums are reduce-scattered and gradients
                     all-gathered) or "column-wise"
    data_parallel    tables of at most this size, in bytes or as a string such as "1 MB", are replicated on every worker
                     instead of being sharded, and their gradients are all-reduced. 0: no table is replicated
    host             :class:`~ddlsim.workload.table_placement.HostMemory` for tables that do not fit in device memory;
                     None: tables must fit in device memory
    table_optimizer  optimizer of the tables: "sgd", or "rowwise_adagrad", which stores 4 bytes of state per row
    table_dtype      data type of the tables, such as "fp32" or "fp16"
    indices          how a worker receives the indices to look up in its tables: "exchanged" between workers within the
                     step; "prefetched" during the previous step (TorchRec's TrainPipelineSparseDist); "local": each
                     worker reads those for its own tables (NVIDIA's DLRM)
    bottom_mlp       "data-parallel", or "one rank": the first worker computes the bottom MLP for all samples and, with
                     5 or more workers, holds no tables (NVIDIA's DLRM)
    random_access    memory bandwidth for random rows, as a fraction of the streaming bandwidth; 0.75 is an assumption
    overlap          when the gradients of the MLPs are sent during the backward pass: "ddp", "layer", "none" or
                     DdpBuckets(...)
    algorithm, rank_order
                     algorithm and rank order of the MLPs' all-reduce, as for :class:`~ddlsim.AllReduce`
    """

    sharding: Annotated[str, one_of(*SHARDINGS)] = "table-wise"
    data_parallel: Annotated[float | str, quantity("bytes", "1 MB", zero=True)] = 0.0
    host: HostMemory | None = None
    table_optimizer: Annotated[str, one_of("sgd", "rowwise_adagrad")] = "rowwise_adagrad"
    table_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] = "fp32"
    indices: Annotated[str, one_of("exchanged", "prefetched", "local")] = "exchanged"
    bottom_mlp: Annotated[str, one_of("data-parallel", "one rank")] = "data-parallel"
    random_access: Density = 0.75
    overlap: InOrderChoice = "ddp"
    algorithm: Annotated[str | Collective, algorithm_of("all_reduce")] = "default"
    rank_order: RankOrder = "topology"

    @property
    def label(self) -> str:
        """Label for tables and plots: the sharding of the tables, and the placement of the bottom MLP."""
        more = ", bottom MLP on one rank" if self.bottom_mlp == "one rank" else ""
        return f"embedding parallel ({self.sharding}{more})"

    # ------------------------------------------------------------ placement of tables

    def placement(self, workload: Workload, n_workers: int) -> Placement:
        """Return the placement of the tables on `n_workers` workers.

        Raises ConfigError, with configurations that fit, if a table does not fit in memory.
        """
        outcome = self._place(workload, n_workers)
        if isinstance(outcome, Placement):
            return outcome
        space, model = self._space(workload, n_workers), workload.model
        table, total = tables_of(model)[outcome.table], self._total(workload, space)
        room, remedies = size(max(space.device, 0.0)), self._remedies(workload, n_workers)
        raise ConfigError(
            f"EmbeddingParallel({self.sharding!r}): the tables of {model.name} do not fit on {n_workers} workers: "
            f"there is no room for {size(space.nbytes(outcome))} of table {outcome.table} ({table.rows:,} rows of "
            f"{table.dim} numbers). The tables need {total}, and each worker has {room} left for them; {remedies}"
        )

    def _total(self, workload: Workload, space: Space) -> str:
        return size(sum(t.rows * (t.dim * space.element + space.row) for t in tables_of(workload.model)))

    def _remedies(self, workload: Workload, n_workers: int) -> str:
        """Return the nearest configurations that fit."""

        def fits(n: int, **changes: Any) -> bool:
            return isinstance(dataclasses.replace(self, **changes)._place(workload, n), Placement)

        fit = [f"{sharding!r} fits" for sharding in SHARDINGS if fits(n_workers, sharding=sharding)]
        if self.table_dtype == "fp32" and fits(n_workers, table_dtype="fp16"):
            fit.append("table_dtype='fp16' fits")
        for gigabytes in (64, 256, 1024, 4096) if self.host is None else ():
            if fits(n_workers, host=HostMemory(gigabytes * 1e9)):
                fit.append(f"host=HostMemory('{gigabytes} GB') fits")
                break
        more = next((n for n in (n_workers * 2**i for i in range(1, 8)) if fits(n)), None)
        fit += [] if more is None else [f"{more} workers fit"]
        return ", ".join(fit) if fit else "use devices with more memory, or a smaller batch"

    def _place(self, workload: Workload, n_workers: int) -> Placement | Shard:
        tables = tables_of(workload.model)
        if not tables:
            raise ConfigError(
                f"EmbeddingParallel: the model {workload.model.name!r} has no embedding_bag layers; use AllReduce"
            )
        without = frozenset({0} if self._root is not None and n_workers >= MIN_WORKERS_DEDICATED_MLP else ())
        limit = si(self.data_parallel, "bytes")
        return place(tables, n_workers, self.sharding, self._space(workload, n_workers), limit, without)

    def _space(self, workload: Workload, n_workers: int) -> Space:
        """Return the memory left for tables besides the rest of the model and its activations."""
        element, samples = ELEMENT_NBYTES[workload.precision], workload.batch_size * n_workers
        room = workload.memory_nbytes - self._dense(workload).total
        row = 4.0 if self.table_optimizer == "rowwise_adagrad" else 0.0
        return Space(room, ELEMENT_NBYTES[self.table_dtype], row, element * samples, self.host)

    def _dense(self, workload: Workload) -> Memory:
        """Return the memory of a worker without tables."""
        layers = tuple(
            dataclasses.replace(layer, n_params=0, tensors=()) if layer.type == "embedding_bag" else layer
            for layer in workload.model.layers
        )
        model: Model = dataclasses.replace(workload.model, layers=layers, structure=(), trainable=False)
        return memory_of(model, workload.batch_size, workload.precision, holding_of(workload))

    def collectives(self) -> Collectives:
        """Return the algorithm of the MLPs' all-reduce, by the name of its field."""
        return Collectives({"algorithm": self.algorithm})

    def exchanges_tables(self) -> bool:
        """Return True, because the exchange of table rows is part of the step."""
        return True

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return a worker's stage: the MLPs, its tables, and the lookups in them for all samples."""
        placement, space = self.placement(workload, n_workers), self._space(workload, n_workers)
        dense, shards, copies = self._dense(workload), placement.of(rank), placement.replicated_params
        tables = sum(space.on_device(shard) for shard in shards)
        rows = sum(space.cached(shard) * space.row * shard.rows for shard in shards)
        memory = Memory(
            dense.weights + tables - rows + copies * space.element,
            dense.gradients + copies * space.element,
            dense.optimizer + rows,
            dense.activations,
            dense.buffers + space.sample * sum(shard.columns for shard in shards),
        )
        return Stage(workload, memory=memory)

    # ------------------------------------------------------------ the step

    @property
    def _root(self) -> int | None:
        return 0 if self.bottom_mlp == "one rank" else None

    @property
    def _policy(self) -> InOrder:
        policy = overlap_named(self.overlap)
        assert isinstance(policy, InOrder)
        return policy

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads (:func:`ddlsim.plan.embeddings`)."""
        whole_batch(accumulation, "EmbeddingParallel")
        n, first = len(workloads), workloads[0]
        placement = self.placement(first, n)
        space = self._space(first, n)
        adagrad = self.table_optimizer == "rowwise_adagrad"
        works = [
            work_of(placement, rank, w.batch_size, space, w.memory_bandwidth * self.random_access, adagrad)
            for rank, w in enumerate(workloads)
        ]
        if first.timed:  # sharding moves the tables' part of the time that the user set, and does not change it
            tables = np.array([layer.type == "embedding_bag" for layer in first.model.layers])
            seconds = sum(float((w.forward + w.backward)[tables].sum()) for w in workloads)
            factor = seconds / sum(work.lookup + work.update for work in works)
            works = [
                dataclasses.replace(work, lookup=factor * work.lookup, update=factor * work.update) for work in works
            ]
        gradient = first.gradient_nbytes / sum(
            layer.n_params for layer in first.model.layers if not layer.model_parallel
        )  # in bytes
        return embeddings(
            workloads, works, self._policy.buckets, row_wise=placement.row_wise_columns,
            replicated=gradient * placement.replicated_params, indices=self.indices, bottom_rank=self._root,
        )  # fmt: skip

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError for options that a static step program does not support."""
        workloads = context.workloads
        program, nodes = self.program(workloads, context.workers[0].accumulation), np.array(context.nodes)
        schedules = Schedules(program, self.algorithm, context.cluster, nodes, self.rank_order, context.notes)
        context.notes.append(self._note(workloads[0], len(workloads)))
        # a rank waits for the indices of the step after the next one while others are still in the previous step
        live = LIVE + 1 if self.indices == "prefetched" else LIVE
        exchanges = OfGroups(context, context.workers, program.groups, schedules)
        TableRun(context, program, exchanges, CommonModel(context), live=live)

    def _note(self, workload: Workload, n_workers: int) -> str:
        """Return a note on the memory use of the fullest and the emptiest workers, and their lookups."""
        placement = self.placement(workload, n_workers)
        totals = []
        for rank in range(n_workers):
            memory = self.stage(workload, rank, n_workers).memory
            assert memory is not None
            totals.append(memory.total)
        low, high = int(np.argmin(totals)), int(np.argmax(totals))
        hosted = sum(shard.on_host for shard in placement.shards)
        also = f"; {hosted} table shards are in host memory" if hosted else ""
        also += f"; {len(placement.replicated)} tables are replicated on all workers" if placement.replicated else ""
        return (
            f"memory: from {size(totals[low])} on worker {low} ({count(len(placement.of(low)), 'table shard')}) to "
            f"{size(totals[high])} on worker {high} ({len(placement.of(high))}){also}"
        )
