"""Where `Parallel` cuts a model, and what a worker computes that has several chunks of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan import Chunk, between_blocks, chunks_at
from ddlsim.plan.chunks import balanced_cuts
from ddlsim.workload.compute import Workload
from ddlsim.workload.roles import blocks


@functools.lru_cache(maxsize=16)
def equal_layers(workload: Workload, chunks: int) -> tuple[int, ...]:
    """Return where a model is cut into chunks of n transformer layers each."""
    ranges = blocks(workload.model.layers)
    if not ranges or len(ranges) % chunks:
        works = [n for n in range(1, len(ranges) + 1) if len(ranges) % n == 0]
        near = " or ".join(str(n) for n in sorted(sorted(works, key=lambda n: abs(n - chunks))[:2]))
        raise ConfigError(
            f"Parallel: cut = 'layers': pipeline x chunks = {chunks}: does not divide the {len(ranges)} transformer "
            f"layers of {workload.model.name}; use {near or 'cut = balanced'}"
        )
    return tuple(first for first, _ in ranges[:: len(ranges) // chunks][1:])


@functools.lru_cache(maxsize=64)
def cut_at(workload: Workload, places: tuple[int, ...]) -> tuple[Chunk, ...]:
    """Return the chunks of a model that is cut before these layers."""
    return chunks_at(workload, places)


def cut_places(
    workload: Workload, stages: int, chunks: int, of_chunks: Sequence[Workload] = ()
) -> tuple[int, ...]:
    """Return where a model is cut into balanced chunks: between blocks if there are enough of them.

    of_chunks  the model as the device of each chunk computes it, where devices differ
    """
    places = _between_blocks(workload)
    at = places if len(places) >= stages * chunks - 1 else None
    return balanced_cuts(workload, stages, chunks, at, of_chunks)


@functools.lru_cache(maxsize=64)
def _between_blocks(workload: Workload) -> tuple[int, ...]:
    return tuple(between_blocks(workload.model))


@functools.lru_cache(maxsize=256)
def joined(chunks: tuple[Chunk, ...]) -> Workload:
    """Return what a worker computes that has several chunks."""
    works = [chunk.workload for chunk in chunks]
    first = works[0]
    if len(works) == 1:
        return first
    starts = np.cumsum([0, *(len(work.forward) for work in works[:-1])])
    name = " and ".join(f"{chunk.first} to {chunk.end - 1}" for chunk in chunks)
    whole = first.model.name.partition(", layers")[0]
    layers = tuple(layer for work in works for layer in work.model.layers)
    return dataclasses.replace(
        first, model=dataclasses.replace(first.model, name=f"{whole}, layers {name}", layers=layers),
        forward=np.concatenate([work.forward for work in works]),
        backward=np.concatenate([work.backward for work in works]), optimizer=sum(work.optimizer for work in works),
        grad_nbytes=np.concatenate([work.grad_nbytes for work in works]),
        tensor_layer=np.concatenate([work.tensor_layer + at for work, at in zip(works, starts, strict=True)]),
        tensor_nbytes=np.concatenate([work.tensor_nbytes for work in works]),
    )  # fmt: skip
