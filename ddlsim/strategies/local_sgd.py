"""Local SGD: workers make local steps and average their models now and then.

They wait for the average, or compute on while it travels (DaSGD, Overlap-Local-SGD, CoCoD-SGD); then a worker waits
only when an average is late. Optimizer states (momentum) stay with the worker; only parameters are averaged. Forming
averages costs no compute time beyond what the cluster charges for reductions.

With an outer optimizer, what the workers' steps have come to together is a gradient to another rule: with the mean x of
the workers' models and the model w that they had all started from, w - x is the outer gradient. The outer state is the
same everywhere, so it takes no bytes; it is kept in float64. Running statistics of batch normalisation are the mean of
the workers' (momentum could carry a variance below 0).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Decay, Index, NotNegative, Positive, Share, checked, number, one_of, quantity
from ddlsim.compression import Compression, ErrorFeedback, TopK
from ddlsim.compression.contract import AnyCompressor, count
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import State
from ddlsim.optim import Momentum, Optimizer
from ddlsim.plan import Plan, local_steps
from ddlsim.runtime import Outer
from ddlsim.runtime.communicator import communicator
from ddlsim.runtime.exchange import Averaging
from ddlsim.runtime.fabric import WithFabric, cost_said, name_of
from ddlsim.runtime.replica import Periodic, Replica, local_sgd, need_values, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process
from ddlsim.streams import stream
from ddlsim.units import si
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class LocalSGD(Periodic):
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

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads do in `steps` steps.

        Raises ConfigError for a `start_epoch`: a plan does not know when that is.
        """
        if self.start_epoch:
            raise ConfigError(f"plan: LocalSGD: start_epoch = {self.start_epoch:g} is no table; leave it out to see it")
        return local_steps(workloads, self.period, steps, accumulation)

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for a `start_epoch` where there is no data to count epochs of."""
        if self.start_epoch:
            need_values(setting, f"LocalSGD: start_epoch = {self.start_epoch:g}", "epochs are passes over data")
        members = communicator(setting, self)
        average = Averaging(members)
        states: list[State] = []  # of the optimizer, after the latest step that all make together

        def update(mean: Value[Array]) -> Value[Array]:
            first = replicas[0]  # all are alike until they go on by themselves
            params, states[:] = (made := first.after(first.worker.params, mean))[0], [made[1]]
            return params

        together = Averaging(members, update, models=False) if self.start_epoch else None
        replicas = start_replicas(setting, lambda replica: self.work(replica, average, together, states))

    def work(
        self, replica: Replica, average: Averaging, together: Averaging | None, states: Sequence[State]
    ) -> Process:
        """One worker's life."""
        worker = replica.worker
        while together is not None and worker.learner.epoch(replica.n_samples) < self.start_epoch:
            gradient = yield from worker.gradient()
            params = yield from together.mean(worker, replica.step, gradient)
            (state,) = states
            yield from worker.optimizer_step()
            worker.params, replica.state = params, state
            replica.count()
            replica.end_step()
        yield from local_sgd(replica, self.period, average)


@checked
@dataclass(frozen=True)
class QsparseLocalSGD(Periodic):
    """Local SGD whose steps travel compressed, with error feedback (Basu et al. 2019, arXiv:1906.02367, algorithm 1):

    x_i <- x_i - eta g_i(x_i)                                   `period` H times, from x_i = x
    q_i = C(m_i + x - x_i);   m_i <- m_i + x - x_i - q_i;   x <- x - (1/N) sum_i q_i

    It is :class:`~ddlsim.LocalSGD` with a compressor of its own, and the same with ``compression=compressor``.

    compressor  C with its memory m_i: the paper's are Top_k or Rand_k, and signs or a quantisation of what is left
    """

    period: Count = 8
    compressor: Annotated[AnyCompressor, "a compressor such as ErrorFeedback(TopK(0.01))"] = ErrorFeedback(TopK(0.01))

    @property
    def label(self) -> str:
        """Period, compressor and algorithm."""
        fabric = f"{name_of(self.algorithm)}{cost_said(self.cost)}"
        return f"Qsparse local SGD ({self.period} steps, {title(self.compressor)}, {fabric})"

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError in a run that says another compression."""
        if setting.compression not in (None, Compression(self.compressor)):
            raise ConfigError(
                f"compression: QsparseLocalSGD says compressor = {title(self.compressor)} already; say it once, or use "
                "LocalSGD with compression"
            )
        setting.compression = Compression(self.compressor)
        average = Averaging(communicator(setting, self))
        start_replicas(setting, lambda replica: local_sgd(replica, self.period, average))


@checked
@dataclass(frozen=True)
class HierarchicalLocalSGD(Periodic):
    """Local SGD with a period for each level (Lin et al. 2020, arXiv:1808.07217, "hierarchical local SGD"):

    x_i <- x_i - eta g_i(x_i)                                    always
    x_i <- the mean of the models in its block                   after every H local steps, `period`
    x_i <- the mean of all models                                after every H^b such block steps, `block_period`

    Blocks average in the place of all, over the links inside them. H^b = 1 is :class:`~ddlsim.LocalSGD`.

    block  "machine": the workers of a machine, or where machines hold one worker each, of an innermost group of the
           network, such as a rack; or the number of workers with neighbouring ranks in a block
    """

    period: Count = 2
    block_period: Count = 4
    block: Annotated[str, one_of("machine", also="a number of workers, ")] | Count = "machine"

    @property
    def label(self) -> str:
        """Both periods and the algorithm."""
        periods = f"{self.period} x {self.block_period} steps"
        return f"hierarchical local SGD ({periods}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def cycle(self) -> int:
        """Steps between two averages over all workers."""
        return self.period * self.block_period

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        members = communicator(setting, self)
        blocks = [members.part(places) for places in members.blocks(self.block)]
        if len(setting.workers) > 1 and len(blocks) in (1, len(setting.workers)):
            setting.notes.append(
                f"{self.label}: {'all workers are in one block' if len(blocks) == 1 else 'every block is one worker'}, "
                "so there is one level only; give block=a number of workers, or use LocalSGD"
            )
        inside = {rank: average for part in blocks for average in [Averaging(part)] for rank in part.place}
        among = Averaging(members)
        start_replicas(setting, lambda replica: self.work(replica, inside[replica.worker.rank], among))

    def work(self, replica: Replica, inside: Averaging, among: Averaging) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            yield from replica.local_step()
            if replica.step % (self.period * self.block_period) == 0:
                worker.params = inside.common = yield from among.mean(worker, replica.step, worker.params)
            elif replica.step % self.period == 0:
                worker.params = yield from inside.mean(worker, replica.step, worker.params)
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

    def adapt(self, mean: Value[Array]) -> Value[Array]:
        """Set how many local steps to make from the mean, and return it."""
        self.n_rounds += 1
        passed = self.setting.loop.now if isinstance(self.strategy.interval, str) else self.n_rounds
        if passed >= self.n_intervals * self.strategy.between():
            self.n_intervals = math.floor(passed / self.strategy.between()) + 1
            ratio = self.setting.learner.evaluate(mean)[0] / max(self.first_loss, sys.float_info.min)
            if math.isfinite(ratio):
                self.period = max(1, math.ceil(math.sqrt(ratio) * self.strategy.period))
        return mean


@checked
@dataclass(frozen=True)
class AdaComm(Periodic):
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

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError without data: the loss decides when workers talk."""
        need_values(setting, "AdaComm", "it averages as often as the loss says")
        first_loss = setting.learner.evaluate(setting.learner.initial)[0]
        rule = _AdaptivePeriod(self, setting, self.period, first_loss)
        members = communicator(setting, self)
        average = Averaging(members, rule.adapt)
        start_replicas(setting, lambda replica: self.work(replica, average, rule))

    def work(self, replica: Replica, average: Averaging, rule: _AdaptivePeriod) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            for left in reversed(range(rule.period)):
                yield from replica.local_step()
                if left == 0:
                    worker.params = yield from average.mean(worker, replica.step, worker.params)
                replica.end_step()


@checked
@dataclass(frozen=True)
class BMUF(Periodic):
    """Blockwise model-update filtering (Chen and Huo 2016, ICASSP): momentum on top of local SGD.

    Every `period` local steps, with the mean x of the workers' models and the global model W:

    G = x - W;   Delta <- eta Delta + zeta G;   W <- W + Delta;   x_i <- W

    eta is ``block_momentum`` (None: 1 - 1/N, which the paper found to work), zeta ``block_rate``. This is the
    paper's classical block momentum.
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

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        outer = Outer(setting.learner, Momentum(self.momentum(len(setting.workers))))
        average = Averaging(communicator(setting, self), lambda mean: outer.towards(mean, self.block_rate))
        start_replicas(setting, lambda replica: local_sgd(replica, self.period, average))


@checked
@dataclass(frozen=True)
class DiLoCo(Periodic):
    """Distributed low-communication training (Douillard et al. 2023, arXiv:2311.08105, algorithm 1):

    theta_i <- InnerOpt(theta_i, g_i(theta_i))                     `period` H times, from theta_i = theta
    Delta = (1/N) sum_i (theta - theta_i);   theta <- OuterOpt(theta, Delta)

    The inner optimizer is the run's, AdamW in the paper: ``Training(optimizer=Adam(weight_decay=0.1))``, whose decay is
    decoupled. It keeps its state. With ``outer=SGD()`` and ``outer_rate=1`` this is :class:`~ddlsim.LocalSGD`, with
    ``outer=Adam()`` FedAdam among all workers.

    period      H, 500 in the paper
    outer       OuterOpt: Nesterov momentum 0.9 in the paper
    outer_rate  its learning rate: 0.7 in the paper
    """

    period: Count = 500
    outer: Annotated[Optimizer, "an object such as Momentum(0.9, nesterov=True)"] = Momentum(0.9, nesterov=True)
    outer_rate: Positive = 0.7

    @property
    def label(self) -> str:
        """Period, outer optimizer and algorithm."""
        outer = type(self.outer).__name__
        return f"DiLoCo ({self.period} steps, outer {outer}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        outer = Outer(setting.learner, self.outer)
        average = Averaging(communicator(setting, self), lambda mean: outer.towards(mean, self.outer_rate))
        start_replicas(setting, lambda replica: local_sgd(replica, self.period, average))


@checked
@dataclass(frozen=True)
class SlowMo(Periodic):
    """Slow momentum (Wang, Tantia, Ballas and Rabbat 2020, arXiv:1910.00643, algorithm 1), with local SGD as its base:

    x_i <- x_i - gamma d_i                          `period` tau times, from x_i = x; d_i of the run's optimizer
    u <- beta u + (x - (1/N) sum_i x_i) / gamma
    x <- x - alpha gamma u

    gamma is the learning rate of the latest local step; where that is 0, the models are averaged only. With beta = 0,
    alpha = 1 and maintained buffers this is :class:`~ddlsim.LocalSGD`.

    period    tau; this and the next two are to be tuned to the task
    momentum  beta, the slow momentum
    slow_rate alpha, the slow learning rate
    buffers   what becomes of the base optimizer's state (line 2) after an average: "maintain" or "reset". To average
              it, the paper's third way, would send it, too, and is not offered
    """

    period: Count = 48
    momentum: Decay = 0.5
    slow_rate: Positive = 1.0
    buffers: Annotated[str, one_of("maintain", "reset")] = "maintain"

    @property
    def label(self) -> str:
        """Period, slow momentum and algorithm."""
        return f"SlowMo ({self.period} steps, {self.momentum:g}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        slow = Outer(setting.learner, Momentum(self.momentum))

        def move(mean: Value[Array]) -> Value[Array]:
            gamma = replicas[0].rate  # all have made as many steps
            return slow.towards(mean, self.slow_rate * gamma, unit=gamma) if gamma else slow.follow(mean)

        average = Averaging(communicator(setting, self), move)
        replicas = start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Averaging) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            yield from replica.local_step()
            if replica.step % self.period == 0:
                worker.params = yield from average.mean(worker, replica.step, worker.params)
                if self.buffers == "reset":
                    replica.forget()
            replica.end_step()


def _continued(mean: Array, params: Array, begun: Array) -> Array:
    """Return mean + (params - begun), rounded once."""
    return (mean + (params.astype(np.float64) - begun)).astype(params.dtype)


@checked
@dataclass(frozen=True)
class DaSGD(Periodic):
    """Local SGD with delayed averaging (Zhou et al. 2020, arXiv:2006.00441): the average of the models is merged
    in `delay` d local steps after the all-reduce began.

    x_i <- x_i - eta g_i(x_i)                      always
    s_i = x_i, all-reduce s                        at steps k with k mod tau = 0
    x_i <- xi x_i + (1 - xi) (1/N) sum_j s_j       at steps k with (k - d) mod tau = 0, s of d steps ago

    `merge` is xi. With d >= 1 one all-reduce is under way beside the computing (d = tau: always); with d = 0 and
    xi = 0 this is :class:`~ddlsim.LocalSGD`, with xi = 1 the workers are independent.
    """

    period: Count = 4
    delay: Index = 1
    merge: Share = 0.5

    def __post_init__(self) -> None:
        if self.delay > self.period:
            raise ConfigError(f"DaSGD: delay = {self.delay!r}: must be a whole number of steps from 0 to the period")

    @property
    def label(self) -> str:
        """Period, delay and algorithm."""
        return f"DaSGD ({self.period} steps, {self.delay} late, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        average = Averaging(communicator(setting, self))
        start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Averaging) -> Process:
        """One worker's life."""
        worker, xi = replica.worker, self.merge
        while True:
            yield from replica.local_step()
            k = replica.step
            if k % self.period == 0 and self.delay == 0:
                yield from average.start(worker, k, worker.params)
            if k > self.delay and (k - self.delay) % self.period == 0:
                mean = yield from average.finish(worker, k - self.delay)
                worker.params = xi * worker.params + (1.0 - xi) * mean
            if k % self.period == 0 and self.delay > 0:
                yield from average.start(worker, k, worker.params)
            replica.end_step()


@checked
@dataclass(frozen=True)
class OverlapLocalSGD(Periodic):
    """Overlap-Local-SGD (Wang, Liang and Joshi 2020, arXiv:2002.09539): every `period` steps the models are
    pulled towards an anchor z, which is the average of one period before and has arrived meanwhile.

    x_i <- (1 - alpha) x_i + alpha z
    v <- beta v + (1/N) sum_i x_i - z;   z <- z + v      by an all-reduce that takes until the next pull

    `momentum` is beta; the first z is the initial model. As in the authors' code each worker keeps its own
    part v_i = beta v_i + x_i - z and the all-reduce carries z + v_i. Running statistics of batch normalisation have no
    momentum (it could carry a variance below 0): those of z are the mean of the workers'.
    """

    period: Count = 4
    alpha: Share = 0.6
    momentum: Decay = 0.7

    @property
    def label(self) -> str:
        """Period and algorithm."""
        return f"overlap local SGD ({self.period} steps, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        average = Averaging(communicator(setting, self))
        start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Averaging) -> Process:
        """One worker's life."""
        worker, tau, alpha = replica.worker, self.period, self.alpha
        anchor = worker.params
        velocity: Value[Array] | None = None
        while True:
            yield from replica.local_step()
            k = replica.step
            if k % tau == 0:
                if k > tau:
                    anchor = yield from average.finish(worker, k - tau)
                worker.params = (1.0 - alpha) * worker.params + alpha * anchor
                ahead = worker.learner.plane.apply(np.subtract, worker.params, anchor)
                velocity = ahead if velocity is None else self.momentum * velocity + ahead
                yield from average.start(worker, k, (anchor + velocity).carrying(worker.params))
            replica.end_step()


@checked
@dataclass(frozen=True)
class CoCoDSGD(Periodic):
    """Computation and communication decoupled SGD (Shen et al. 2019, IJCAI, algorithm 1): the models are averaged
    while the workers make the next `period` local steps, and the steps are added to the average.

    s_i = x_i, all-reduce s;   tau local steps;   x_i <- (1/N) sum_j s_j + (x_i - s_i)
    """

    period: Count = 4

    @property
    def label(self) -> str:
        """Period and algorithm."""
        return f"CoCoD-SGD ({self.period} steps, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        average = Averaging(communicator(setting, self))
        start_replicas(setting, lambda replica: self.work(replica, average))

    def work(self, replica: Replica, average: Averaging) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            first, begun = replica.step, worker.params
            yield from average.start(worker, first, begun)
            for left in reversed(range(self.period)):
                yield from replica.local_step()
                if left == 0:
                    mean = yield from average.finish(worker, first)
                    worker.params = worker.learner.plane.mix(_continued, mean, worker.params, begun)
                replica.end_step()


Indices = Value[npt.NDArray[np.int64]]


def _put(params: Array, indices: npt.NDArray[np.int64], values: Array) -> Array:
    mixed = params.copy()
    mixed[indices] = values
    return mixed


@checked
@dataclass(frozen=True)
class SPARTA(WithFabric):
    """Sparse parameter averaging (Exo Labs 2025, "SPARTA"; ``SPARTAStrategy`` of exogym): in every step

    x_i <- x_i - eta g_i(x_i)
    x_i[S] <- (1/N) sum_j x_j[S]        S: the share p of all parameters, drawn anew, the same on all workers

    S follows from a seed that all have, so only values travel: p times the bytes of the parameters. Running statistics
    of batch normalisation stay with their workers. With p = 1 this is :class:`~ddlsim.LocalSGD` with period 1.

    p  share of the parameters; the authors' default. round(p n) of n of them, at least 1, are drawn without replacement
       (exogym draws each for itself)
    """

    p: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.005 is half a percent)")] = 0.005

    @property
    def label(self) -> str:
        """Share and algorithm."""
        return f"SPARTA ({100 * self.p:g} %, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError in a run that compresses."""
        if setting.compression is not None:
            raise ConfigError(
                "compression: SPARTA sends other parameters in every step, which are no small differences to anything; "
                "leave it out and lower p, or use LocalSGD(1) with compression"
            )

        @lru_cache(maxsize=2)  # nobody is more than a step ahead
        def drawn(step: int) -> Indices:
            draws = stream(setting.seed, 0, f"SPARTA {step}")
            return plane.apply(lambda x: np.sort(draws.choice(x.size, count(self.p, x.size), replace=False)), initial)

        plane, initial = setting.learner.plane, setting.learner.initial
        average = Averaging(communicator(setting, self), models=False, share=self.p)
        start_replicas(setting, lambda replica: self.work(replica, drawn, average))

    def work(self, replica: Replica, drawn: Callable[[int], Indices], average: Averaging) -> Process:
        """One worker's life."""
        worker, plane = replica.worker, replica.worker.learner.plane
        while True:
            yield from replica.local_step()
            indices = drawn(replica.step)
            part = plane.apply(np.take, worker.params, indices)
            mean = yield from average.mean(worker, replica.step, part)
            worker.params = plane.apply(_put, worker.params, indices, mean).carrying(worker.params)
            replica.end_step()
