"""Training steps that are written task by task, for every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddlsim.plan.draft import Draft
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.program import N_STEPS
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload

#: per rank: rows that its next task needs
Needs = list[list[int]]


class DraftedSteps:
    """Steps, written one after the other.

    each     workload of each rank
    buckets  that all ranks sum; bucket i is part i of the plan
    now      the current step
    sums     per rank: the rows that sum gradients in the current step
    """

    def __init__(self, each: list[Workload], buckets: Iterable[Bucket], parts: Iterable[Part]) -> None:
        self.each, self.buckets, self.now = each, list(buckets), 0
        self.n, self.n_layers = len(each), len(each[0].forward)
        self.draft, self.sums = Draft(self.n_layers, parts), self.nothing()

    def plan(self) -> Plan:
        """Return the plan of the first steps."""
        for now in range(N_STEPS):
            self.now, self.sums = now, self.nothing()
            self.write_step()
        return self.draft.plan()

    def write_step(self) -> None:
        """Add the tasks of the current step."""
        raise NotImplementedError

    def nothing(self) -> Needs:
        """Return empty dependencies for all ranks."""
        return [[] for _ in range(self.n)]

    def add_pass(
        self,
        kind: str,
        rank: int,
        layers: tuple[int, int],
        seconds: float,
        needs: Iterable[int],
        batch: int,
        kept: float,
    ) -> int:
        """Add a pass of a micro-batch through some layers, which store `kept` bytes until their backward pass."""
        holds = {"forward": kept, "backward_input": 0.0}.get(kind, -kept)
        return self.draft.work(
            rank, seconds, kind=kind, batch=batch, layers=layers, step=self.now, needs=needs, holds=holds
        )

    def add_update(self, rank: int, share: float, first: int = 0) -> int:
        """Add a rank's update of the layers from `first` on, which takes a share of the optimizer's time."""
        seconds, layers = share * self.each[rank].optimizer, (first, self.n_layers)
        return self.draft.work(rank, seconds, kind="update", layers=layers, step=self.now, needs=self.sums[rank])

    def exchange(
        self, kind: str, group: Sequence[int], nbytes: float, done: Needs, waits: Needs, name: str, lane: str
    ) -> None:
        """Add a collective of a group after the rows `done`; its members then wait for it."""
        needs = [done[r] for r in group]
        rows = self.draft.collective(kind, group, nbytes, needs, name, step=self.now, lane=lane)
        for r, row in zip(group, rows, strict=True):
            waits[r] = [row]

    def reduce(
        self, group: Sequence[int], nbytes: float, done: Needs, name: str = "", *, part: int = -1, lane: str = "stream"
    ) -> None:
        """Add the sum of gradients over a group after the rows `done`."""
        needs = [done[r] for r in group]
        rows = self.draft.all_reduce(group, nbytes, needs, name, step=self.now, part=part, lane=lane)
        for r, row in zip(group, rows, strict=True):
            self.sums[r].append(row)

    def reduce_ready(self, layer: int, done: Needs) -> None:
        """Add the sums of the buckets that are ready when backward passes have reached a layer."""
        for part, bucket in enumerate(self.buckets):
            if bucket.ready_layer == layer:
                self.reduce(range(self.n), bucket.nbytes, done, part=part)

    def stops(self, first: int, end: int, *more: int) -> list[int]:
        """Return the layers at which backward passes from layer `end` to `first` are split for gradients, in order."""
        layers = {bucket.ready_layer for bucket in self.buckets} | {first, *more}
        return sorted((layer for layer in layers if first <= layer < end), reverse=True)
