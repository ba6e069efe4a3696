"""Local SGD: workers go on alone and average their models now and then, and wait for it.

Optimizer states (momentum) stay with the worker; only parameters are averaged. Forming averages costs no
compute time beyond what the cluster charges for reductions.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Decay, NotNegative, Positive, checked, quantity
from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.runtime.communicator import communicator
from ddlsim.runtime.exchange import Averaging, Exchange, carrier_of
from ddlsim.runtime.fabric import WithFabric, cost_said, name_of
from ddlsim.runtime.replica import Replica, need_values, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process
from ddlsim.units import si

__all__ = ["BMUF", "AdaComm", "LocalSGD"]


@checked
@dataclass(frozen=True)
class LocalSGD(WithFabric):
    """Average the parameters after every `period` local steps (Stich 2019, arXiv:1805.09767, algorithm 1):

    x_i <- x_i - eta g_i(x_i);   every tau steps   x_i <- (1/N) sum_j x_j

    With ``start_epoch`` above 0 workers average gradients in every step until then (post-local SGD, Lin et al.
    2020, arXiv:1808.07217). ``algorithm``, ``rank_order`` and ``cost`` are those of :class:`~ddlsim.AllReduce`.
    """

    period: Count = 8
    start_epoch: NotNegative = 0.0

    @property
    def label(self) -> str:
        """Period and algorithm, and what it costs unless that is simulated."""
        after = f" after epoch {self.start_epoch:g}" if self.start_epoch else ""
        return f"local SGD ({self.period} steps{after}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for a `start_epoch` where there is no data to count epochs of."""
        if self.start_epoch:
            need_values(setting, f"LocalSGD: start_epoch = {self.start_epoch:g}", "epochs are passes over data")
        members = communicator(setting, self)
        average = Averaging(members)

        def update(mean: Value[Array]) -> tuple[Value[Array], State]:
            first = replicas[0]  # all are alike until they go on alone
            return first.after(first.worker.params, mean)

        together = Exchange(members, carrier_of(members), update, models=False) if self.start_epoch else None
        replicas = start_replicas(setting, lambda replica: self.work(replica, average, together))

    def work(
        self, replica: Replica, average: Averaging, together: Exchange[tuple[Value[Array], State]] | None
    ) -> Process:
        """One worker's life."""
        worker = replica.worker
        while together is not None and worker.learner.epoch(replica.n_samples) < self.start_epoch:
            gradient = yield from worker.gradient()
            params, state = yield from together.exchange(worker, replica.step, gradient)
            yield from worker.optimizer_step()
            worker.params, replica.state = params, state
            replica.count()
            replica.end_step()
        first = replica.step
        while True:
            yield from replica.local_step()
            if (replica.step - first) % self.period == 0:
                worker.params = yield from average.mean(worker, replica.step, worker.params)
            replica.end_step()


@dataclass
class _AdaptivePeriod:
    """The rule of :class:`AdaComm`, applied whenever an average is there.

    ``next_time`` (s) or ``next_round`` is when it is applied again.
    """

    strategy: AdaComm
    setting: Setting
    period: int
    first_loss: float
    n_rounds: int = 0
    n_intervals: int = 1

    def average(self, mean: Value[Array]) -> tuple[Value[Array], int]:
        """Return the mean and how many local steps to make with it."""
        self.n_rounds += 1
        passed = self.setting.loop.now if isinstance(self.strategy.interval, str) else self.n_rounds
        if passed >= self.n_intervals * self.strategy.between():
            self.n_intervals = math.floor(passed / self.strategy.between()) + 1
            ratio = self.setting.learner.evaluate(mean)[0] / max(self.first_loss, sys.float_info.min)
            if math.isfinite(ratio):
                self.period = max(1, math.ceil(math.sqrt(ratio) * self.strategy.period))
        return mean, self.period


@checked
@dataclass(frozen=True)
class AdaComm(WithFabric):
    """Local SGD that averages more often as the loss falls (Wang and Joshi 2019, arXiv:1810.08313, section 4):

    tau_l = ceil( sqrt(F_l / F_0) tau_0 )

    F_0 is the loss of the initial model, F_l that of the average at the start of interval l. An interval is a
    number of averaging rounds, or simulated time such as "60 s" (it ends with the first average after it). The
    losses are those of the held-out samples, whose evaluation takes no time here.
    """

    period: Count = 16
    interval: Count | Annotated[str, quantity("time", "60 s")] = 10

    def between(self) -> float:
        """Return the interval: rounds, or s."""
        return si(self.interval, "time")

    @property
    def label(self) -> str:
        """First period and algorithm."""
        return f"AdaComm (from {self.period} steps, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError without data: the loss decides when workers talk."""
        need_values(setting, "AdaComm", "it averages as often as the loss says")
        first_loss = setting.learner.evaluate(setting.learner.initial)[0]
        rule = _AdaptivePeriod(self, setting, self.period, first_loss)
        members = communicator(setting, self)
        average = Exchange(members, carrier_of(members), rule.average, models=True)
        start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Exchange[tuple[Value[Array], int]]) -> Process:
        """One worker's life."""
        worker, period = replica.worker, self.period
        while True:
            for left in reversed(range(period)):
                yield from replica.local_step()
                if left == 0:
                    worker.params, period = yield from average.exchange(worker, replica.step, worker.params)
                replica.end_step()


@dataclass
class _Block:
    """The global model W_g of :class:`BMUF` and the momentum Delta of its moves."""

    strategy: BMUF
    learner: Learner
    params: Value[Array]
    delta: Value[Array]

    def filtered(self, mean: Value[Array]) -> Value[Array]:
        """Return the next global model."""
        plane, strategy = self.learner.plane, self.strategy
        momentum, rate = strategy.momentum(self.learner.n_workers), strategy.block_rate

        def move(mean: Array, params: Array, delta: Array) -> Array:
            return momentum * delta + rate * (mean.astype(np.float64) - params)

        def moved(params: Array, delta: Array) -> Array:
            return (params + delta).astype(params.dtype)

        self.delta = plane.apply(move, mean, self.params, self.delta)
        self.params = plane.apply(moved, self.params, self.delta).carrying(mean)
        return self.params


@checked
@dataclass(frozen=True)
class BMUF(WithFabric):
    """Blockwise model-update filtering (Chen and Huo 2016, ICASSP): momentum on top of local SGD.

    Every `period` local steps, with the mean x of the workers' models and the global model W:

    G = x - W;   Delta <- eta Delta + zeta G;   W <- W + Delta;   x_i <- W

    eta is ``block_momentum`` (None: 1 - 1/N, which the paper found to work), zeta ``block_rate``. This is the
    paper's classical block momentum; Delta is kept in float64. Running statistics of batch normalisation have no
    momentum (it could carry a variance below 0): W has the mean of the workers'.
    """

    period: Count = 8
    block_momentum: Decay | None = None
    block_rate: Positive = 1.0

    def momentum(self, n_workers: int) -> float:
        """Return the block momentum among `n_workers`."""
        return 1.0 - 1.0 / n_workers if self.block_momentum is None else self.block_momentum

    @property
    def label(self) -> str:
        """Period and algorithm."""
        return f"BMUF ({self.period} steps, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        learner = setting.learner
        still = learner.plane.apply(lambda params: np.zeros(params.shape), learner.initial)
        block = _Block(self, learner, learner.initial, still)
        members = communicator(setting, self)
        average = Exchange(members, carrier_of(members), block.filtered, models=True)
        start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Exchange[Value[Array]]) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            yield from replica.local_step()
            if replica.step % self.period == 0:
                worker.params = yield from average.exchange(worker, replica.step, worker.params)
            replica.end_step()
