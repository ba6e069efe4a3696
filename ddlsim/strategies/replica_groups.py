"""Gradient sums over replicas of a split model, for each part of the gradient, on a fabric."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from ddlsim.collectives import Collective
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.plan import KINDS, SEND, Ints, Plan
from ddlsim.plan.transforms import SUMMING
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.exchange import CollectiveExchange, Exchange, OfGroups, Vectors
from ddlsim.runtime.fabric import Fabric
from ddlsim.workload.buckets import Bucket, backwards, rounded
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import tensor_shapes


@dataclass(frozen=True, eq=False)
class OfReplicas(OfGroups):
    """The exchanges of ranks that hold parts of the model (:class:`~ddlsim.runtime.exchange.Exchanges`).

    Ranks with the same part sum its gradients on a fabric, compressed if the run compresses. All other collectives
    (gathered activations and weights, stages that share weights) are uncompressed, by schedules.

    replicas   number of replicas; rank r is replica r mod replicas of its stage
    parts      slices of the flat gradient that are compressed, by the plan's part
    gradients  function of step and replica
    ages       age, in updates, of the weights that each stage's gradients use; () if all are current
    owner      name of the strategy, for messages
    algorithms kind of collective -> its algorithm; by default the fabric's
    only       the elements of the flat gradient that `parts` refers to, and their tensors; None: all
    """

    fabric: Fabric
    replicas: int
    parts: Sequence[slice]
    gradients: Vectors
    ages: Sequence[int] = ()
    _: KW_ONLY
    owner: str = "Parallel"
    algorithms: Mapping[str, str | Collective] = field(default_factory=dict)
    only: Elements | None = None
    _exchanges: dict[tuple[int, int, bool], Exchange] = field(default_factory=dict, init=False)
    #: the exchanges that compress
    _coded: list[CollectiveExchange] = field(default_factory=list, init=False)

    def exchange(self, kind: int, group: int, *, parts: bool) -> Exchange:
        """Return the exchange for collectives of a kind in a group."""
        if (kind, group, parts) not in self._exchanges:
            self._exchanges[kind, group, parts] = self._new(kind, group, parts)
        return self._exchanges[kind, group, parts]

    def _new(self, kind: int, group: int, parts: bool) -> Exchange:
        ranks = self.groups[group]
        codes = self.context.compression is not None and kind in SUMMING
        among_replicas = parts and len({rank // self.replicas for rank in ranks}) == 1
        if not among_replicas or (self.fabric.cost == "simulated" and not codes):
            return super().exchange(kind, group, parts=parts)
        members = [self.workers[rank] for rank in ranks]
        communicator = Communicator(self.context, self.fabric, members, owner=self.owner)
        algorithm = self.algorithms.get(KINDS[kind])
        if not codes:
            return CollectiveExchange(communicator, KINDS[kind], algorithm)
        coded = CollectiveExchange(
            communicator,
            KINDS[kind],
            algorithm,
            parts=self.parts,
            vectors=self._compressed,
            tensors=None if self.only is None else self.only.tensors,
            like=self._coded[0] if self._coded else None,
        )
        self._coded.append(coded)
        return coded

    def _compressed(self, step: int, place: int) -> Value[Array]:
        """Return the compressed elements of a gradient."""
        gradient = self.gradients(step, place)
        return gradient if self.only is None else self.only.of(gradient, self.context.learner)

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return the mean gradient of all replicas, and record the age of their weights."""
        self.context.recorder.staleness += [min(age, step) for age in self.ages] * len(gradients)
        if not self._coded:
            return super().mean(step, gradients)
        coded = self._coded[0].mean(step, gradients)
        if self.only is None:
            return coded
        return self.only.put(coded, super().mean(step, gradients), self.context.learner)


@dataclass(frozen=True)
class Elements:
    """Some elements of a flat gradient: those of ``tensors``, (name, shape), in the timed model. ``which`` contains
    their indices in the learned gradient, (n,); None: all (of another model)."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    which: Ints | None

    @classmethod
    def without(cls, context: RunContext, layers: Collection[int]) -> Elements:
        """Return the elements of all layers except some."""
        model = context.workers[0].workload.model
        kept = [layer for i, layer in enumerate(model.layers) if i not in layers]
        names, tensors = {f"{layer.name}.{name}" for layer in kept for name, _ in layer.tensors}, tensor_shapes(model)
        inside = [name in names for name, _ in tensors]
        elements = np.repeat(inside, [math.prod(shape) for _, shape in tensors])
        which = np.flatnonzero(elements) if context.learns_timed_model else None
        return cls(tuple(itertools.compress(tensors, inside)), which)

    def of(self, gradient: Value[Array], learner: Learner) -> Value[Array]:
        """Return these elements of a gradient."""
        if self.which is None:
            return gradient
        return learner.plane.apply(lambda array: array[self.which], gradient).with_statistics_of(gradient)

    def put(self, elements: Value[Array], gradient: Value[Array], learner: Learner) -> Value[Array]:
        """Return a gradient with these elements replaced."""
        if self.which is None:
            return elements

        def replaced(elements: Array, array: Array) -> Array:
            new = array.copy()
            new[self.which] = elements
            return new

        return learner.plane.apply(replaced, elements, gradient).with_statistics_of(gradient)


def compressible_parts(
    plan: Plan,
    chunks: Sequence[Chunk],
    buckets: Callable[[Workload], Sequence[Bucket]],
    tensor: int,
    compressor: AnyCompressor,
) -> list[slice]:
    """Return the elements of the flat gradient in each part of a plan.

    Raises ConfigError if replicas do not reduce all of it, bucket by bucket, and for compressors whose message sizes
    depend on values.
    """
    if compressor.expected_nbytes(1) is None and len(plan.rows(SEND)):
        raise ConfigError(
            "compression: Parallel with pipeline stages needs messages of known size, but the size of "
            f"{title(compressor)} messages depends on their contents; use a compressor such as TopK, or pipeline=1"
        )
    if tensor > 1:
        raise ConfigError(
            f"compression: Parallel does not support compression with tensor = {tensor}, because ranks hold only "
            "shards of the tensors; remove compression, or use tensor=1"
        )
    if any(part.tied >= 0 for part in plan.parts):
        raise ConfigError(
            "compression: Parallel does not support compression for models whose stages share weights, because the "
            "gradients of the shared weights are summed separately; remove compression, or use a model without "
            "tied_dense"
        )
    sizes = [rounded(float(np.sum(chunk.workload.tensor_nbytes))) for chunk in chunks]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    left = []
    for chunk, start in zip(chunks, starts, strict=True):
        parts = backwards(buckets(chunk.workload)) if len(chunk.workload.tensor_layer) else []
        left.append(iter([slice(start + part.start, start + part.stop) for part in parts]))
    ends = [chunk.end for chunk in chunks]
    return [next(left[bisect.bisect_right(ends, part.first)]) for part in plan.parts]
