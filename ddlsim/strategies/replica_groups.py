"""How the replicas of a model that is split over workers sum their gradients: stage by stage, on a fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.inserted import SUMMING
from ddlsim.plan.plan import KINDS, SEND, Plan
from ddlsim.runtime.carrier import Carrier, Dense, OfGroups
from ddlsim.runtime.codec import backwards, rounded
from ddlsim.runtime.coded import Coded
from ddlsim.runtime.common_model import Gradients
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.fabric import Fabric
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload


class OfReplicas:
    """What carries the collectives of a pipeline in replicas (:class:`~ddlsim.runtime.carrier.Exchanges`).

    Replicas of a stage sum on a fabric, and what they sum is compressed where the run says so; other groups (the stages
    that share weights) exchange dense gradients by schedules.

    dense      carries all groups by schedules
    replicas   rank r is replica r mod replicas of its stage
    parts      of the flat gradient that are compressed, by the plan's part
    gradients  of a step and a replica
    ages       of each stage, how many updates old the weights are that its gradients are of; () if they are not
    """

    def __init__(
        self, dense: OfGroups, fabric: Fabric, replicas: int, parts: Sequence[slice], gradients: Gradients,
        ages: Sequence[int],
    ) -> None:  # fmt: skip
        self._dense, self._fabric, self._replicas, self._ages = dense, fabric, replicas, ages
        self._parts, self._gradients = parts, gradients
        self._carriers: dict[tuple[int, int], Carrier] = {}
        self._coded: Coded | None = None

    def carrier(self, kind: int, group: int) -> Carrier:
        """Return what carries collectives of a kind in a group."""
        if (kind, group) not in self._carriers:
            self._carriers[kind, group] = self._new(kind, group)
        return self._carriers[kind, group]

    def _new(self, kind: int, group: int) -> Carrier:
        dense, ranks = self._dense, self._dense.groups[group]
        codes = dense.setting.compression is not None and kind in SUMMING
        among_replicas = len({rank // self._replicas for rank in ranks}) == 1
        if not among_replicas or (self._fabric.cost == "simulated" and not codes):
            return dense.carrier(kind, group)
        members = [dense.workers[rank] for rank in ranks]
        communicator = Communicator(dense.setting, self._fabric, members, owner="Parallel")
        if not codes:
            return Dense(communicator, KINDS[kind])
        coded = Coded(communicator, self._parts, self._gradients, KINDS[kind], like=self._coded)
        self._coded = self._coded or coded
        return coded

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return what the gradients of all replicas become, and count how old their weights are."""
        self._dense.setting.recorder.staleness += [min(age, step) for age in self._ages] * len(gradients)
        return (self._coded or self._dense).mean(step, gradients)


def compressible_parts(
    plan: Plan, chunks: Sequence[Chunk], buckets: Callable[[Workload], Sequence[Bucket]], tensor: int,
    compressor: AnyCompressor,
) -> list[slice]:  # fmt: skip
    """Return which elements of the flat gradient each part of a plan is.

    Raises ConfigError where replicas do not sum all of it, bucket by bucket, and for what travels by messages of sizes
    that depend on values.
    """
    if compressor.expected_nbytes(1) is None and len(plan.rows(SEND)):
        raise ConfigError(
            f"compression: Parallel: the size of what {title(compressor)} sends depends on values, so it goes message "
            "by message, which messages between stages cannot tell from theirs; use a compressor of known size such as "
            "TopK, or pipeline=1"
        )
    if tensor > 1:
        raise ConfigError(
            f"compression: Parallel: tensor = {tensor}: members of a tensor group have shares of every tensor, which "
            "are not compressed; leave compression out, or use tensor=1"
        )
    if any(part.tied >= 0 for part in plan.parts):
        raise ConfigError(
            "compression: Parallel: layers that share weights sum their gradients apart, which is not compressed; "
            "leave compression out, or use a model without tied_dense"
        )
    sizes = [rounded(float(np.sum(chunk.workload.tensor_nbytes))) for chunk in chunks]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    left = [
        iter([slice(start + each.start, start + each.stop) for each in backwards(buckets(chunk.workload))])
        if len(chunk.workload.tensor_layer) else iter(()) for chunk, start in zip(chunks, starts, strict=True)
    ]  # fmt: skip
    place = [next(i for i, chunk in enumerate(chunks) if chunk.first <= part.first < chunk.end) for part in plan.parts]
    return [next(left[chunk]) for chunk in place]
