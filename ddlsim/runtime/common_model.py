"""The model that synchronous workers have in common: their gradients, and what comes of them step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddlsim.learning import Array, Learner, Value

#: (step, place of who learns) -> its gradient
Gradients = Callable[[int, int], Value[Array]]
#: step, gradients by place -> their mean
Mean = Callable[[int, Sequence[Value[Array]]], Value[Array]]
#: step, parameters before its update -> those that its micro-batches meet
Met = Callable[[int, Value[Array]], Value[Array]]


class CommonModel:
    """Parameters that all hold, made from the gradients of one step after the other.

    A gradient is made when its step is learned from, or when somebody has to know it before.

    n_learners  how many bring gradients: workers, or groups of workers that have a model together
    mean        of gradients
    samples     of each who learns in a step
    began       when the gradient of a step was begun, s
    met         which parameters the gradients of a step are of, given those before its update; by default these
    """

    def __init__(
        self, learner: Learner, n_learners: int, mean: Mean, samples: Callable[[int], int],
        began: Callable[[int, int], float], met: Met | None = None,
    ) -> None:  # fmt: skip
        self.learner, self.n_learners, self.samples, self.began = learner, n_learners, samples, began
        self._mean, self._met = mean, met
        self.params: Value[Array] = learner.initial
        self.state = learner.optimizer_state(self.params)
        self._n_samples = 0
        self._n_steps = 0  # whose update is in the parameters
        self._made: dict[int, dict[int, Value[Array]]] = {}

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return the gradient of a step that has been begun, and that is not in the parameters yet."""
        made = self._made.setdefault(step, {})
        if place not in made:
            self.learn_until(step - 1)  # all have contributed to those
            met = self.params if self._met is None else self._met(step, self.params)
            made[place] = self.learner.gradient(place, met, self.samples(step), self.began(step, place))
        return made[place]

    def learn_until(self, step: int) -> None:
        """w <- w - eta * (1/N) sum_i g_i, for all steps up to `step`"""
        while self._n_steps <= step:
            gradients = [self.gradient(self._n_steps, place) for place in range(self.n_learners)]
            mean, rate = self._mean(self._n_steps, gradients), self.learner.rate(self._n_samples)
            self.params, self.state = self.learner.update(self.params, mean, self.state, rate)
            self._n_samples += self.samples(self._n_steps) * self.n_learners
            del self._made[self._n_steps]
            self._n_steps += 1
