"""What one rank of data parallelism does in a step: a few rows, which `data_parallel` repeats for ranks and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, BACKWARD, COMPUTE, FORWARD, REDUCE_SCATTER, UPDATE, Part
from ddlsim.workload.buckets import Bucket


class Row(NamedTuple):
    """A task of one rank in one step.

    ``micro`` is the micro-batch within the step, ``stream`` whether the communication stream does it. ``needs`` are
    rows of the same rank and step, ``updates`` rows of its step before: of the updates (or of the all-gathers of what
    was updated), the nth.
    """

    kind: int
    stream: bool = False
    micro: int = -1
    first: int = 0
    end: int = 0
    part: int = -1
    needs: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()


def in_order(
    buckets: Sequence[Bucket], n_layers: int, accumulation: int, *, queued: bool, no_sync: bool = True
) -> list[Row]:
    """Return the rows of a step that updates all layers at its end, when its last bucket has arrived.

    With `queued` that can be any of them. Without `no_sync` buckets are summed beside the backward pass of every
    micro-batch, and the next pass waits for them, as at the end of each backward pass of PyTorch's DDP.
    """
    rows: list[Row] = []
    waits: tuple[int, ...] = ()
    for micro in range(accumulation - 1):
        rows.append(Row(FORWARD, micro=micro, end=n_layers, needs=waits))
        if no_sync:
            rows.append(Row(BACKWARD, micro=micro, end=n_layers))
        else:
            waits = (_backward(rows, buckets, n_layers, micro, of=micro)[-1],)
    rows.append(Row(FORWARD, micro=accumulation - 1, end=n_layers, needs=waits))
    sums = _backward(rows, buckets, n_layers, accumulation - 1)
    rows.append(Row(UPDATE, end=n_layers, needs=tuple(sums) if queued else (sums[-1],)))
    return rows


def pipelined(
    buckets: Sequence[Bucket], parts: Sequence[Part], n_layers: int, accumulation: int, *, first: bool
) -> list[Row]:
    """Return the rows of a step in which each layer is updated as soon as its own gradients have arrived.

    The next forward pass goes on as layers are updated; its rank then spends the optimizer's time. Before the `first`
    step there is nothing to wait for.
    """
    updated = sorted({part.first for part in parts})
    everything = () if first else tuple(range(len(updated)))
    rows: list[Row] = []
    for micro in range(accumulation - 1):
        rows += [Row(FORWARD, micro=micro, end=n_layers, updates=everything), Row(BACKWARD, micro=micro, end=n_layers)]
    last = accumulation - 1
    if first:
        rows.append(Row(FORWARD, micro=last, end=n_layers))
    else:
        if updated[0] > 0:
            rows.append(Row(FORWARD, micro=last, end=updated[0]))
        for nth, (layer, end) in enumerate(zip(updated, [*updated[1:], n_layers], strict=True)):
            rows.append(Row(FORWARD, micro=last, first=layer, end=end, updates=(nth,)))
        rows.append(Row(COMPUTE))
    sums = _backward(rows, buckets, n_layers, last)
    for layer in updated:
        needs = tuple(row for row, part in zip(sums, parts, strict=True) if part.first == layer)
        rows.append(Row(UPDATE, stream=True, first=layer, end=layer + 1, needs=needs))
    return rows


def in_shards(
    buckets: Sequence[Bucket], firsts: Sequence[int], n_layers: int, accumulation: int, *, first: bool, no_sync: bool
) -> list[Row]:
    """Return the rows of a step that updates shards and gathers them, bucket by bucket, beside the next forward pass.

    That needs a bucket from layer ``firsts[bucket]`` on. Without `no_sync` buckets are scattered after each
    micro-batch.
    """
    rows: list[Row] = []
    for micro in range(accumulation):
        begins = [0] if first or micro else sorted({0, *firsts})
        for layer, end in zip(begins, [*begins[1:], n_layers], strict=True):
            waits = () if first or micro else [i for i, needed in enumerate(firsts[::-1]) if needed == layer]
            rows.append(Row(FORWARD, micro=micro, first=layer, end=end, updates=tuple(waits)))
        if micro < accumulation - 1 and no_sync:
            rows.append(Row(BACKWARD, micro=micro, end=n_layers))
        elif micro < accumulation - 1:
            _backward(rows, buckets, n_layers, micro, kind=REDUCE_SCATTER, of=micro)
    sums = _backward(rows, buckets, n_layers, accumulation - 1, kind=REDUCE_SCATTER)
    rows.append(Row(UPDATE, end=n_layers, needs=(sums[-1],)))
    update = len(rows) - 1
    rows += [Row(ALL_GATHER, stream=True, part=part, needs=(update,)) for part in reversed(range(len(buckets)))]
    return rows


def _backward(
    rows: list[Row], buckets: Sequence[Bucket], n_layers: int, micro: int, kind: int = ALL_REDUCE, of: int = -1
) -> list[int]:
    """Append a backward pass, beside which each bucket leaves when it is ready; return the rows of their sums, which
    are those `of` a micro-batch, or of what is left of the step (-1)."""
    latest, layer = len(rows) - 1, n_layers  # the backward pass has come down to `layer`
    sums = []
    for part, bucket in enumerate(buckets):
        if bucket.ready_layer > layer:
            raise ConfigError(
                f"plan: bucket {part} is ready at layer {bucket.ready_layer}, those before it at layer "
                f"{layer}; list buckets as they become ready"
            )
        if bucket.ready_layer < layer:
            rows.append(Row(BACKWARD, micro=micro, first=bucket.ready_layer, end=layer))
            latest, layer = len(rows) - 1, bucket.ready_layer
        sums.append(len(rows))
        rows.append(Row(kind, stream=True, micro=of, part=part, needs=(latest,)))
    if layer > 0:
        rows.append(Row(BACKWARD, micro=micro, end=layer))
    return sums
