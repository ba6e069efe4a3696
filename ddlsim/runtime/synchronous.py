"""`Synchronous`: the values of a run in which all workers' gradients make one update, whatever carries them."""

from __future__ import annotations

from ddlsim.learning import Array, Value
from ddlsim.plan.plan import Floats
from ddlsim.runtime.setting import Setting


class Synchronous:
    """w <- w - eta (1/N) sum_i g_i(w), when a step of :func:`~ddlsim.runtime.table_run.run_table` has ended."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.learner = setting, setting.learner
        self.params: Value[Array] = self.learner.initial
        self._state = self.learner.optimizer_state(self.params)
        self._n_samples = 0
        setting.model = lambda: self.params

    def follow(self, step: int, begins: Floats) -> None:
        """Make the update of a step, which the workers began at these times (s)."""
        learner, workers = self.learner, self.setting.workers
        gradients = [
            learner.gradient(worker.rank, self.params, worker.samples_per_step, time)
            for worker, time in zip(workers, begins.tolist(), strict=True)
        ]
        rate = learner.rate(self._n_samples)
        self.params, self._state = learner.update(self.params, learner.mean(gradients), self._state, rate)
        self._n_samples += sum(worker.samples_per_step for worker in workers)
