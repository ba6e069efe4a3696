"""Recommendation models with embedding tables distributed over the ranks, as a plan: all-to-alls and two MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.data_parallel import each_rank, parts_of
from ddlsim.plan.draft import DraftedSteps, Needs
from ddlsim.plan.plan import Part
from ddlsim.plan.program import StepProgram
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import ELEMENT_NBYTES

if TYPE_CHECKING:
    from ddlsim.workload.table_placement import TableWork


def embeddings(
    workloads: Sequence[Workload],
    works: Sequence[TableWork],
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    row_wise: int = 0,
    replicated: float = 0.0,
    indices: str = "exchanged",
    bottom_rank: int | None = None,
) -> StepProgram:
    """Return the step program for training with distributed embedding tables.

    The schedule is DLRM's (Naumov et al. 2019, arXiv:1906.00091, section 4). A rank sends indices to the ranks that
    hold the tables, looks up rows in its own tables for the samples of all ranks, and sends each rank the vectors for
    that rank's samples. Meanwhile, it computes the layers before the tables (the bottom MLP). Once a rank has received
    all vectors, it runs the forward pass of the remaining layers, then their backward pass down to the tables. It sends
    the gradients of the vectors back while it runs the bottom MLP's backward pass, and while the gradients of both MLPs
    are all-reduced. Finally, the ranks update the rows and the MLPs.

    workloads    workload of each rank
    works        for each rank, times and message sizes of its table lookups and updates
    buckets      function that groups the gradients of the MLPs into buckets
    row_wise     total length of the vectors per sample that come from row-wise sharded tables. Every rank computes a
                 partial sum of these vectors, so a reduce-scatter in the forward pass and an all-gather in the backward
                 pass replace the all-to-alls
    replicated   bytes of the gradients of replicated tables, which are all-reduced
    indices      how ranks receive the indices to look up: "exchanged" in the step; "prefetched" during the previous
                 step; "local": each rank reads the indices for its own tables
    bottom_rank  rank that computes the bottom MLP for all samples. It sends the results in the same all-to-all as the
                 vectors, which it enters after computing them. None: each rank computes the bottom MLP for its own
                 samples

    Each message of an all-to-all carries one rank's vectors for another rank. The messages start together, each on its
    own lane. Lookups and updates of tables take the times of `works`, not those of the tables' layers.

    Raises ConfigError for a model without tables, and for a `bottom_rank` if the model has no bottom MLP.
    """
    by_rank = each_rank(workloads, None)
    model = by_rank[0].model
    tables = [i for i, layer in enumerate(model.layers) if layer.type == "embedding_bag"]
    if not tables:
        raise ConfigError(
            f"plan: model {model.name!r} has no embedding_bag layer; use data parallelism, such as AllReduce()"
        )
    if bottom_rank is not None and not tables[0]:
        raise ConfigError(
            f"plan: bottom_rank = {bottom_rank} has no effect, because {model.name} has no layers before its embedding "
            "tables; remove bottom_rank"
        )
    if bottom_rank is not None and not 0 <= bottom_rank < len(by_rank):
        last = len(by_rank) - 1
        raise ConfigError(f"plan: bottom_rank = {bottom_rank}: must be a rank from 0 to {last}")
    return StepProgram.of(_Steps(by_rank, works, tables, buckets, row_wise, replicated, indices, bottom_rank).plan())


class _Steps(DraftedSteps):
    """lookups, updates  each rank's rows of the previous step"""

    def __init__(
        self, workloads: list[Workload], works: Sequence[TableWork], tables: list[int],
        choose: Callable[[Workload], Sequence[Bucket]], row_wise: int, replicated: float, indices: str,
        root: int | None,
    ) -> None:  # fmt: skip
        self.works, self.row_wise, self.replicated, self.indices, self.root = works, row_wise, replicated, indices, root
        self.lookups: list[int] = []
        self.updates: list[int] = []
        first, cut = workloads[0], tables[0]
        self.cut, offset = cut, 0 if root is None else cut  # bottom MLPs of other ranks are not trained
        top = first if root is None else first.cut(cut, len(first.forward))
        local = list(choose(top))
        buckets = [Bucket(b.nbytes, b.ready_layer + offset, b.first_layer + offset, b.priority + offset) for b in local]
        parts = [Part(p.nbytes, p.first + offset, p.end + offset) for p in parts_of(top, local)]
        if replicated:
            buckets.append(Bucket(replicated, cut, cut, cut))
            parts.append(Part(replicated, cut, tables[-1] + 1))
        bottom = [] if root is None else [Part(float(first.grad_nbytes[:cut].sum()), 0, cut)]
        super().__init__(workloads, buckets, [*parts, *bottom])
        others = np.array([i not in tables for i in range(self.n_layers)])  # tables take the times of `works`
        self.forward, self.backward = [w.forward * others for w in workloads], [w.backward * others for w in workloads]
        self.vector = [ELEMENT_NBYTES[w.precision] for w in workloads]

    def write_step(self) -> None:
        ranks = range(self.n)
        asked = self._indices()
        lookups = [self.draft.work(r, self.works[r].lookup, "lookup", step=self.now, needs=asked[r]) for r in ranks]
        if self.root is None:
            arrived = self._vectors("vectors", lookups)
            for r in ranks if self.cut else ():
                self.add_pass("forward", r, 0, self.cut)
        else:
            bottom, allowed, end = self._bottom_forward(self.root)
            ready = [end if r == self.root else row for r, row in enumerate(lookups)]
            arrived = self._vectors("vectors", ready, allowed)
            arrived = [[*rows, *more] for rows, more in zip(arrived, bottom, strict=True)]
        self.add_passes("forward", self.cut, self.n_layers, arrived)
        back = [row for (row,) in self.add_backward(self.cut, self.n_layers, self.nothing())[0]]
        arrived = self._vectors("gradients", back)
        if self.root is None:
            self.add_backward(0, self.cut, self.nothing())
        else:
            self._bottom_backward(self.root, back)
        for r in ranks:
            self.draft.work(r, self.works[r].update, "sparse update", step=self.now, needs=arrived[r])
        self.lookups, self.updates = lookups, [self._update(r) for r in ranks]

    # ------------------------------------------------------------ compute

    def _bottom_forward(self, root: int) -> tuple[Needs, Needs, int]:
        """Let one rank compute the bottom MLP for all samples; return the rows that deliver its results to each rank,
        those after which each rank may send to it, and its last one."""
        end = [self.add_pass("forward", root, 0, self.cut, of=r) for r in range(self.n)][-1]
        arrived, allowed = self.nothing(), self.nothing()
        for r in range(self.n):
            if r != root:
                allowed[r] = [self._message(root, r, 0.0, "go ahead", [end])]
                arrived[r] = [self._message(root, r, self._bottom_nbytes(r), "bottom", [end], batch=r)]
        return arrived, allowed, end

    def _bottom_backward(self, root: int, ready: Sequence[int]) -> None:
        come = [
            self._message(r, root, self._bottom_nbytes(r), "bottom gradients", [ready[r]], batch=r)
            for r in range(self.n)
            if r != root
        ]
        for r in range(self.n):
            self.add_pass("backward", root, 0, self.cut, come if r == 0 else (), of=r)

    def _bottom_nbytes(self, rank: int) -> float:
        """Return the bytes of the bottom MLP's outputs for a rank's samples."""
        width = float(np.prod(self.workloads[0].model.layers[self.cut - 1].out_shape))
        return self.workloads[rank].batch_size * width * self.vector[rank]

    def _update(self, rank: int) -> int:
        workload, first = self.workloads[rank], 0 if self.root in (None, rank) else self.cut
        total = workload.gradient_nbytes
        share = (float(workload.grad_nbytes[first:].sum()) + self.replicated) / total if total else 0.0
        return self.add_update(rank, share, first)

    # ------------------------------------------------------------ communication

    def _indices(self) -> Needs:
        """Send the indices of samples to the ranks that hold the tables; return the rows that each rank waits for."""
        from ddlsim.workload.table_placement import INDEX_NBYTES

        arrived = self.nothing()
        before = self.updates if self.indices == "exchanged" else self.lookups
        for src in range(self.n) if self.indices != "local" else ():
            for dst in range(self.n):
                nbytes = self.workloads[src].batch_size * self.works[dst].indices * INDEX_NBYTES
                if src != dst and nbytes:
                    arrived[dst].append(self._message(src, dst, nbytes, "indices", before[src : src + 1]))
        return arrived

    def _vectors(self, name: str, ready: Sequence[int], allowed: Sequence[Sequence[int]] = ()) -> Needs:
        """Send vectors from the ranks with the tables to those with the samples, or their gradients back, after the
        rows `ready` and, to the rank of the bottom MLP, after those `allowed`; return the rows that each rank waits
        for."""
        arrived = self.nothing()
        for holder in range(self.n):
            for r in range(self.n):
                nbytes = self.workloads[r].batch_size * self.works[holder].columns * self.vector[r]
                if r != holder and nbytes:
                    src, dst = (holder, r) if name == "vectors" else (r, holder)
                    needs = [ready[src], *(allowed[src] if allowed and dst == self.root else ())]
                    arrived[dst].append(self._message(src, dst, nbytes, name, needs))
        if self.row_wise:
            kind = "reduce_scatter" if name == "vectors" else "all_gather"
            nbytes = sum(w.batch_size * self.row_wise * z for w, z in zip(self.workloads, self.vector, strict=True))
            waits = self.nothing()
            self.exchange(kind, range(self.n), nbytes, [[row] for row in ready], waits, name, name)
            arrived = [[*rows, *more] for rows, more in zip(arrived, waits, strict=True)]
        return arrived

    def _message(self, src: int, dst: int, nbytes: float, name: str, needs: Sequence[int], batch: int = -1) -> int:
        """Add a message; return the row of its receive. Messages to different ranks are sent concurrently."""
        cut, lanes = self.cut if batch >= 0 else 0, (f"{name} to {dst}", name)
        return self.draft.message(
            src, dst, nbytes, name, step=self.now, needs=needs, lanes=lanes, batch=batch, cut=cut
        )[1]
