"""Weights of which each stage of a pipeline uses a version of its own, as asynchronous pipelines do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ddlsim.learning import Array, Learner, Value


class StashedWeights:
    """The versions of all parameters that stages still use.

    delays  of each stage, how many updates old they are
    slices  of each stage, its part of the parameters
    """

    def __init__(self, learner: Learner, delays: Sequence[int], slices: Sequence[slice]) -> None:
        self._learner, self._delays, self._slices = learner, delays, slices
        self._versions: deque[Value[Array]] = deque(maxlen=max(delays) + 1)
        self._step, self._met = -1, learner.initial

    def at(self, step: int, params: Value[Array]) -> Value[Array]:
        """Return the parameters that micro-batches of a step have met: stage by stage those before the update of the
        step so many updates earlier, or those of the start.

        params  before the update of this step; steps are asked for one after the other, perhaps several times
        """
        if step > self._step:
            self._versions.append(params)
            self._step, self._met = step, self._mixed(step)
        return self._met

    def _mixed(self, step: int) -> Value[Array]:
        met = [self._versions[-1 - min(delay, step)] for delay in self._delays]
        if self._learner.task is None or all(each is met[0] for each in met):
            return met[0]
        slices = self._slices

        def together(*versions: Array) -> Array:
            return np.concatenate([version[own] for version, own in zip(versions, slices, strict=True)])

        return self._learner.plane.apply(together, *met)


def stage_slices(learner: Learner, ends: Sequence[int]) -> list[slice]:
    """Return which of the parameters that are learned belong to each stage.

    ends  (n_stages,) the last layers of stages, plus 1, of the model that takes the time. Where another one learns, a
          stage has the same share of its layers
    """
    if learner.task is None:
        return [slice(0, 0) for _ in ends]
    network = learner.task.network
    until = np.cumsum([0, *(layer.n_params for layer in network.model.layers)])
    n_layers = len(network.model.layers)
    bounds = [0, *(int(until[round(end * n_layers / ends[-1])]) for end in ends)]
    return [slice(first, end) for first, end in pairwise(bounds)]
