"""Common parts of decentralised strategies.

They are a model per worker, local steps, the count of updates, and a common model with an outer optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.optim import Optimizer, OptimizerState
from ddlsim.optim.rules import with_layers
from ddlsim.runtime.context import Process, RunContext, Worker
from ddlsim.runtime.fabric import WithFabric


class Periodic(WithFabric):
    """A strategy whose workers average their models every ``period`` local steps."""

    period: int

    def cycle(self) -> int:
        """Return the steps between two averages over all workers."""
        return self.period

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: if messages are compressed, the latest
        average, from which they are differences."""
        return float(compressed)


@dataclass
class Replica:
    """A worker with its own model (``worker.params``) and optimizer state.

    n_workers  number of workers of the run
    ended      number of workers that have completed each step, by step index
    step       number of local steps that this worker has completed
    n_samples  number of samples that all workers together would have processed if each had completed `step` steps. The
               learning rate depends on this number, so it does not depend on the progress of other workers
    rate       learning rate of the latest step
    """

    worker: Worker
    n_workers: int
    ended: Counter[int]
    step: int = 0
    n_samples: int = 0
    #: learning rate of the latest step
    rate: float = 0.0
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the optimizer state, such as momentum."""
        self.state = self.worker.learner.optimizer_state(self.worker.params)

    def after(self, params: Value[Array], gradient: Value[Array]) -> tuple[Value[Array], State]:
        """Return the parameters and the optimizer state after a step from `params`."""
        learner = self.worker.learner
        self.rate = learner.rate(self.n_samples)
        return learner.update(params, gradient, self.state, self.rate)

    def local_step(self) -> Process:
        """Perform a local step, x_i <- x_i - eta g_i(x_i)."""
        worker = self.worker
        gradient = yield from worker.gradient()
        yield from worker.optimizer_step()
        worker.params, self.state = self.after(worker.params, gradient)
        self.count()

    def step_freely(self, gradient: Value[Array]) -> None:
        """Perform a step with the run's current learning rate, in an asynchronous run."""
        self.n_samples = self.worker.stop.n_samples
        self.worker.params, self.state = self.after(self.worker.params, gradient)
        self.count()

    def count(self, samples: int | None = None) -> None:
        """Count a completed step.

        samples  number of samples per worker in this step; None: the current number of samples per step
        """
        self.step += 1
        self.n_samples += (self.worker.samples_per_step if samples is None else samples) * self.n_workers

    def end_step(self) -> None:
        """Record that this worker has ended a synchronous step.

        When the last worker has ended it, the step counts as an update.
        """
        self.worker.end_step()
        self.ended[self.step] += 1
        if self.ended[self.step] == self.n_workers:
            del self.ended[self.step]
            self.worker.stop.updated(self.worker.samples_per_step * self.n_workers)


def replicas_of(context: RunContext) -> list[Replica]:
    """Return the replicas of all workers; the run hands over the mean of their models."""
    workers, learner = context.workers, context.learner
    context.model = lambda: learner.mean([worker.params for worker in workers])
    context.replicas = lambda: [worker.params for worker in workers]
    ended: Counter[int] = Counter()
    replicas = [Replica(worker, len(workers), ended) for worker in workers]
    context.steps = lambda: [replica.step for replica in replicas]
    context.mixture = "the mean of the models of workers"
    return replicas


def start_replicas(context: RunContext, work: Callable[[Replica], Process]) -> list[Replica]:
    """Start the process ``work(replica)`` for every worker, and return the replicas.

    The final model of the run is the mean of all workers' models.
    """
    replicas = replicas_of(context)
    for replica in replicas:
        context.loop.env.process(work(replica))
    return replicas


def need_values(context: RunContext, owner: str, why: str) -> None:
    """Raise ConfigError in a timing-only run, for a strategy that needs values."""
    if context.learner.task is None:
        raise ConfigError(f"{owner}: {why}; set training=ddlsim.Training('digits', ...)")


class Outer:
    """A global model that an outer optimizer updates, while the optimizer of the run performs the workers' local steps.

    optimizer  the outer optimizer
    params     the current global model w, shape (n_params,). It starts as the initial model of the run

    The outer gradient is the workers' mean model update, w - mean_i(x_i), possibly compressed (Reddi et al. 2021,
    "Adaptive Federated Optimization", arXiv:2003.00295, algorithm 1). The outer optimizer computes in float64, and w is
    then rounded to the dtype of the parameters. The running statistics of batch-norm layers are averaged instead,
    because momentum could make a variance negative.
    """

    def __init__(self, learner: Learner, optimizer: Optimizer) -> None:
        slots = () if learner.task is None else learner.task.network.slots
        self.plane = learner.plane
        self.optimizer = with_layers(optimizer, slots)
        self.params = learner.initial
        self._state: State = self.plane.apply(lambda w: self.optimizer.init(w.astype(np.float64)), self.params)

    def towards(self, mean: Value[Array], rate: float, unit: float = 1.0) -> Value[Array]:
        """Perform an outer step with learning rate `rate` and the gradient (w - mean) / unit, and return the new w.

        The running statistics of the new w are those of `mean`.
        """

        def away(params: Array, mean: Array) -> Array:
            return (params.astype(np.float64) - mean) / unit

        self.params = self.step(self.plane.apply(away, self.params, mean), rate).with_statistics_of(mean)
        return self.params

    def follow(self, mean: Value[Array]) -> Value[Array]:
        """Set w to `mean`, and return it."""
        self.params = mean
        return mean

    def step(self, gradient: Value[Array], rate: float) -> Value[Array]:
        """Perform an outer step with learning rate `rate`, and return the new w.

        Its running statistics are updated with those of the batches from which the gradient was computed.
        """

        def moved(params: Array, gradient: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
            wide = params.astype(np.float64), gradient.astype(np.float64)
            after, state = self.optimizer.update(*wide, state, rate)
            return after.astype(params.dtype), state

        statistics = self.params.statistics
        if statistics is not None:
            statistics = self.plane.merge_statistics(statistics, gradient.batch_statistics)
        done = self.plane.apply(moved, self.params, gradient, self._state)
        self.params = self.plane.apply(lambda pair: pair[0], done, statistics=statistics)
        self._state = self.plane.apply(lambda pair: pair[1], done)
        return self.params
