"""Contiguous chunks of a model's layers, balanced or as specified, and the data that must cross each cut."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.arguments import Count, Index, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.plan import Floats, Ints
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import layer_nbytes
from ddlsim.workload.model import Concat, Leaf, Model, Node, Residual, Side
from ddlsim.workload.precision import ELEMENT_NBYTES


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of a model: contiguous layers that are computed by the same rank.

    first, end  range of layers, `first` to `end` - 1
    workload    cost of the layers for one micro-batch, as returned by :meth:`Workload.cut`
    enters      bytes of activations that enter the chunk per micro-batch: all tensors that are produced before the
                chunk and used in or after the chunk (for the first chunk, the model's input). Their gradients have the
                same size
    kept        bytes of activations that are stored per micro-batch; None: the sum over the layers
    """

    first: int
    end: int
    workload: Workload
    enters: float
    kept: float | None = None

    @cached_property
    def weight_seconds(self) -> Floats:
        """Part of each layer's backward pass that computes the gradient of its weights, in s, (n_layers,).

        It is the whole pass if the input needs no gradient, else half (:mod:`ddlsim.workload.compute`), with the time
        in which it is added to the gradients of earlier micro-batches.
        """
        layers, added = self.workload.model.layers, self.workload.accumulation_time
        share = [0.0 if not layer.n_params else 0.5 if layer.input_grad else 1.0 for layer in layers]
        return np.asarray(np.array(share) * (self.workload.backward - added) + added, dtype=np.float64)

    @cached_property
    def stored(self) -> Floats:
        """Bytes of activations that each layer stores per micro-batch, (n_layers,), scaled to the total kept."""
        stored = stored_nbytes(self.workload)
        return stored if self.kept is None else stored * (self.kept / max(float(stored.sum()), 1.0))


def stored_nbytes(workload: Workload) -> Floats:
    """Return the bytes of activations that each layer keeps of a (micro-)batch, (n_layers,)."""
    scores = not workload.flash
    sample = np.array([layer_nbytes(layer, workload.precision, scores=scores) for layer in workload.model.layers])
    return np.round(sample * workload.batch_size)


def crossing_nbytes(workload: Workload) -> Floats:
    """Return the number of bytes that would cross a cut before each layer, per (micro-)batch, shape (n_layers,).

    workload  the model, its batch size and its data type

    Every tensor that is produced before a cut and used after it counts once. A tensor that skips layers, such as the
    input of a residual block, counts at every cut that it crosses.
    """
    return np.asarray(_crossing(workload.model) * ELEMENT_NBYTES[workload.precision] * workload.batch_size)


@functools.lru_cache(maxsize=256)
def _crossing(model: Model) -> Floats:
    """Return the number of elements of a sample that would cross a cut before each layer, (n_layers,)."""
    shapes = {i: model.layers[i].out_shape if i >= 0 else model.input_shape for i, _ in _tensors(model)}
    return _over_cuts(model, {i: math.prod(shape) for i, shape in shapes.items()})


def _over_cuts(model: Model, sizes: Mapping[int, float]) -> Floats:
    """Return the sum over the tensors that cross a cut before each layer, by producing layer, (n_layers,)."""
    total = np.zeros(len(model.layers) + 1)
    for layer, used in _tensors(model):
        total[layer + 1] += sizes[layer]
        total[used + 1] -= sizes[layer]
    return np.asarray(np.cumsum(total)[:-1])


def between_blocks(model: Model) -> list[int]:
    """Return the indices of the layers before which the model can be cut with only one tensor crossing the cut.

    No residual connection or parallel branch spans such a cut, so a pipeline stage sends only its last layer's output
    to the next stage. The first layer of the model is not included.
    """
    count = _over_cuts(model, {layer: 1 for layer, _ in _tensors(model)})
    return np.flatnonzero(count == 1)[1:].tolist() if len(model.layers) > 1 else []


def uses_of(model: Model) -> list[tuple[int, int]]:
    """Return (producing layer, using layer) of every use of a tensor; -1 produces the model's input.

    A model without a structure is a chain.
    """
    return _uses(model.structure, -1)[1] if model.structure else [(i - 1, i) for i in range(len(model.layers))]


@functools.lru_cache(maxsize=256)
def _tensors(model: Model) -> list[tuple[int, int]]:
    """Return (layer that produces it, last layer that uses it) of every tensor."""
    last: dict[int, int] = {}
    for layer, used in uses_of(model):
        last[layer] = max(last.get(layer, -1), used)
    return sorted(last.items())


def _uses(nodes: Sequence[Node], tensor: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the tensor (its producing layer) that leaves `nodes` if `tensor` enters, and all uses (producer, user)."""
    uses: list[tuple[int, int]] = []
    for node in nodes:
        if isinstance(node, Leaf):
            uses.append((tensor, node.index))
            tensor = node.index
            continue
        outputs = []
        for branch in _branches(node):
            output, inside = _uses(branch, tensor)
            uses += inside
            outputs.append(output)
        if isinstance(node, Residual | Concat):
            uses += [(output, node.index) for output in outputs]
            tensor = node.index
    return tensor, uses


def leaves(nodes: Sequence[Node]) -> Iterator[Leaf]:
    """Yield all layers of a model's structure, in order."""
    for node in nodes:
        if isinstance(node, Leaf):
            yield node
        else:
            for branch in _branches(node):
                yield from leaves(branch)


def _branches(node: Residual | Concat | Side) -> Iterator[tuple[Node, ...]]:
    if isinstance(node, Concat):
        yield from node.branches
    else:
        yield node.body
    if isinstance(node, Residual):
        yield node.shortcut


@checked
def chunks_at(workload: Workload, cuts: Sequence[Index]) -> tuple[Chunk, ...]:
    """Cut a model before the given layers, and return the chunks between the cuts.

    workload  the model and the compute times of its layers
    cuts      indices of the layers before which the model is cut, in increasing order

    Raises ConfigError if the cuts are not in increasing order or leave a chunk empty.
    """
    n_layers = len(workload.forward)
    ends = [0, *cuts, n_layers]
    for before, cut in itertools.pairwise(ends):
        if not before < cut <= n_layers:
            raise ConfigError(
                f"cuts = {list(cuts)}: must be increasing layer numbers from 1 to {n_layers - 1}; "
                f"{workload.model.name} is cut before each of these layers"
            )
    enters = crossing_nbytes(workload)
    return tuple(
        Chunk(first, end, workload.cut(first, end), float(enters[first])) for first, end in itertools.pairwise(ends)
    )


@checked
def balanced_chunks(
    workload: Workload, stages: Count, chunks: Count = 1, at: Sequence[Index] | None = None
) -> tuple[Chunk, ...]:
    """Split a model into `stages` * `chunks` contiguous chunks so that the slowest chunk is as fast as possible.

    If several splits are equally fast, the function returns the one that sends the fewest bytes across cuts.

    workload  the model and the compute times of its layers
    stages    number of pipeline stages
    chunks    number of chunks per stage
    at        indices of the layers before which the model may be cut; None: all layers

    Raises ConfigError if the model cannot be cut into that many chunks.
    """
    return chunks_at(workload, balanced_cuts(workload, stages, chunks, at))


def balanced_cuts(
    workload: Workload,
    stages: int,
    chunks: int = 1,
    at: Sequence[int] | None = None,
    of_chunks: Sequence[Workload] = (),
) -> tuple[int, ...]:
    """Return the layers before which :func:`balanced_chunks` cuts. Raises ConfigError if there are too few pieces.

    of_chunks  (stages * chunks,) workload of the whole model on the device of each chunk, if devices differ. Speed
               factors are ignored: a straggler does not change the cuts
    """
    n_layers = len(workload.forward)
    allowed = np.array(sorted({0, *(range(n_layers) if at is None else at), n_layers}), dtype=np.int64)
    pieces, n_chunks = len(allowed) - 1, stages * chunks
    if allowed[-1] > n_layers:
        last = allowed[-1]
        raise ConfigError(
            f"balanced: at = {last}: must be below {n_layers}, the number of layers of {workload.model.name}"
        )
    if n_chunks > pieces:
        what = f"stages = {stages}" if chunks == 1 else f"stages {stages} x chunks {chunks} = {n_chunks}"
        raise ConfigError(
            f"balanced: {what}: {workload.model.name} has only {pieces} "
            f"{'layers' if at is None else 'pieces between the layers where it may be cut'}; use at most "
            f"{pieces}"
        )
    return _best_cuts(tuple(of_chunks) or (workload,) * n_chunks, tuple(allowed.tolist()))


@functools.lru_cache(maxsize=1024)
def _best_cuts(of_chunks: tuple[Workload, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cuts. They depend only on the number of chunks: 4 stages of 2 chunks are cut as 8 stages of 1."""
    places = np.array(allowed, dtype=np.int64)
    different = len(set(of_chunks)) > 1
    sums = {work: np.concatenate([[0.0], np.cumsum(work.forward + work.backward)])[places] for work in set(of_chunks)}
    seconds = [sums[work] * work.speed if different else sums[work] for work in of_chunks]
    cuts = _fewest_bytes(seconds, crossing_nbytes(of_chunks[0])[places[:-1]], _slowest(seconds))
    return tuple(places[cuts].tolist())


def _slowest(seconds: Sequence[Floats]) -> float:
    """Return the least possible time of the slowest chunk.

    seconds  per chunk: cumulative seconds of the pieces on its device, (n_pieces + 1,)
    """
    apart = _apart(seconds[0])
    best = apart[:, 0]
    for before, until in itertools.pairwise(seconds):
        apart = apart if until is before else _apart(until)
        best = np.maximum(best, apart).min(axis=1)
    return float(best[-1])


def _apart(until: Floats) -> Floats:
    """Return the time of the pieces between two places, (end, first); inf if there are none."""
    return np.where(np.tri(len(until), k=-1, dtype=np.bool_), until[:, None] - until, np.inf)


def _fewest_bytes(seconds: Sequence[Floats], crossing: Floats, slowest: float) -> Ints:
    """Return the cuts with the fewest crossing bytes such that no chunk exceeds `slowest` (s), (n_chunks - 1,)."""
    n_chunks, places = len(seconds), len(seconds[0])
    limit = slowest * (1.0 + 1e-12)
    cost = np.where(np.arange(places) == 0, 0.0, np.inf)
    chosen = np.zeros((n_chunks + 1, places), dtype=np.int64)
    entering, here = np.append(np.where(np.arange(places - 1) == 0, 0.0, crossing), 0.0), np.arange(places)
    for n, until in enumerate(seconds, 1):
        if n == 1 or until is not seconds[n - 2]:
            earliest = np.searchsorted(until, until - limit)[:, None]  # earliest start of a chunk that ends here
            starts = here[:, None] + np.arange(-(here[:, None] - earliest).max(), 0)
            excluded = starts < earliest
        total = np.where(excluded, np.inf, (cost + entering)[starts])
        best = np.argmin(total, axis=1)
        cost, chosen[n] = total[here, best], starts[here, best]
    cuts, end = [], places - 1
    for n in range(n_chunks, 1, -1):
        end = int(chosen[n, end])
        cuts.append(end)
    return np.array(cuts[::-1], dtype=np.int64)
