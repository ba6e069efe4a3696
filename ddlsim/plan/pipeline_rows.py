"""What the templates of pipelines consist of: rows of a stage, weights that two stages share, and groups of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddlsim.plan.chunks import Chunk
from ddlsim.plan.plan import Ints


@dataclass(slots=True)  # there are hundreds of thousands of them
class Row:
    """A task of one stage.

    micro   the micro-batch, -1 if none
    to      message: the stage at the other end
    group   collective: place in ``Template.groups``
    number  of the message or collective, among those of a replica or, if `shared`, among those of all replicas
    step    of asynchronous pipelines: the step that it is done in
    needs   rows of the same step (of asynchronous pipelines: any), `before` rows of the step before
    """

    stage: int
    lane: str
    kind: int
    seconds: float = 0.0
    nbytes: float = 0.0
    micro: int = -1
    first: int = 0
    end: int = 0
    part: int = -1
    holds: float = 0.0
    to: int = -1
    group: int = -1
    number: int = -1
    shared: bool = False
    step: int = 0
    needs: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


class Tie(NamedTuple):
    """Weights that the first chunk's layer `owner` and the last chunk's layer `user` both use."""

    owner: int
    user: int
    nbytes: float


def tie_of(chunks: Sequence[Chunk]) -> Tie | None:
    """Return the word embedding that a tied output layer uses too, if there is one."""
    layers = [(chunk, i, layer) for chunk in chunks for i, layer in enumerate(chunk.workload.model.layers)]
    for chunk, i, user in layers:
        if user.type != "tied_dense":
            continue
        size = user.in_shape[-1] * user.out_shape[-1]
        for other, j, owner in layers:
            for name, n in owner.tensors:
                if owner.type == "embedding" and n == size:
                    work = other.workload
                    names = [each for each, _ in owner.tensors]
                    nbytes = work.tensor_nbytes[work.tensor_layer == j][names.index(name)]
                    return Tie(other.first + j, chunk.first + i, float(nbytes))
    return None


def groups_of(stages: Sequence[tuple[int, ...]], ranks: Ints) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """Return the groups of a pipeline in replicas, and which of them each of `stages` is, (n_replicas, n).

    stages  one: its replicas; two: of each replica both
    ranks   (n_replicas, n_stages)
    """
    groups: dict[tuple[int, ...], int] = {}
    number = np.zeros((len(ranks), max(len(stages), 1)), dtype=np.int64)
    for nth, own in enumerate(stages):
        for replica in range(len(ranks)):
            members = ranks[:, own[0]] if len(own) == 1 else ranks[replica, list(own)]
            number[replica, nth] = groups.setdefault(tuple(members.tolist()), len(groups))
    return tuple(groups), number
