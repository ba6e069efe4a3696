"""The model that synchronous workers have in common: their gradients, and what comes of them step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddlsim.learning import Array, Learner, Value
from ddlsim.runtime.carrier import Carrier
from ddlsim.runtime.worker import Worker

__all__ = ["Carriers", "CommonModel", "Gradients"]

#: (step, place of a member) -> its gradient
Gradients = Callable[[int, int], Value[Array]]
#: makes what carries the collectives of each kind, those that sum gradients first
Carriers = Callable[[Gradients], Mapping[int, Carrier]]


class CommonModel:
    """Parameters that all `workers` hold, made from the gradients of one step after the other.

    A gradient is made when its step is learned from, or when somebody has to know it before.

    carriers  of what the workers exchange; the first one says what the mean of gradients is
    samples   of each worker in a step
    began     when a worker began its gradient of a step, s
    """

    def __init__(
        self, learner: Learner, workers: Sequence[Worker], carriers: Carriers, samples: Callable[[int], int],
        began: Callable[[int, int], float],
    ) -> None:  # fmt: skip
        self.learner, self.workers, self.samples, self.began = learner, workers, samples, began
        self.params: Value[Array] = learner.initial
        self._state = learner.optimizer_state(self.params)
        self._n_samples = 0
        self._n_steps = 0  # whose update is in the parameters
        self._made: dict[int, dict[int, Value[Array]]] = {}
        self.carriers = carriers(self.gradient)
        self.summing, self._carrier = next(iter(self.carriers.items()))

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return a worker's gradient of a step that it has begun, and that is not in the parameters yet."""
        made = self._made.setdefault(step, {})
        if place not in made:
            self.learn_until(step - 1)  # all have contributed to those
            rank, began = self.workers[place].rank, self.began(step, place)
            made[place] = self.learner.gradient(rank, self.params, self.samples(step), began)
        return made[place]

    def learn_until(self, step: int) -> None:
        """w <- w - eta * (1/N) sum_i g_i, for all steps up to `step`"""
        while self._n_steps <= step:
            gradients = [self.gradient(self._n_steps, place) for place in range(len(self.workers))]
            mean, rate = self._carrier.mean(self._n_steps, gradients), self.learner.rate(self._n_samples)
            self.params, self._state = self.learner.update(self.params, mean, self._state, rate)
            self._n_samples += self.samples(self._n_steps) * len(self.workers)
            del self._made[self._n_steps]
            self._n_steps += 1
