"""Federated learning: servers combine models that sampled clients have trained on their own data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Positive, checked, number
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value, weighted_sum
from ddlsim.network import lanes as ls
from ddlsim.optim import SGD, Optimizer
from ddlsim.runtime import Message, Outer, RunContext, Servers, Worker
from ddlsim.runtime.lanes import OPTIMIZER, Op, gradient, repeated
from ddlsim.runtime.replica import need_values
from ddlsim.runtime.servers import UpdateRule, Visit, WithServers, note_lock_step
from ddlsim.strategies.central import CentralModel
from ddlsim.strategies.staleness import ScalingChoice, scaling_named
from ddlsim.streams import stream


@checked
@dataclass(frozen=True)
class FedAvg(WithServers):
    """Federated averaging (McMahan et al. 2017, AISTATS, arXiv:1602.05629, algorithm 1).

    In every round, the server samples a fraction C of the K clients, but at least one client. The sampled clients train
    the current model w on their own data. The next model is the mean of their models w_k, weighted by each client's
    number of samples n_k:

    w_k <- w;   w_k <- w_k - eta g_k(w_k) for each local step;   w <- sum_k (n_k / n) w_k with n = sum_k n_k

    Each worker is a client, and n_k is the size of its shard of the data set. Clients keep no state between rounds, so
    the run's optimizer (plain SGD in the paper) is reset in each round. A round counts as one update, with the samples
    of all local steps. With C = 1 and one local step, this is synchronous SGD, up to rounding. Set either `local_steps`
    or `epochs`.

    fraction      C, the fraction of clients that are sampled in each round
    local_steps   number of local steps that a client takes per round
    epochs        number of passes that a client makes over its shard per round, the paper's E
    servers, placement, apply_time
                  number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`.
                  Clients exchange models with all servers at the same time

    Raises ConfigError unless exactly one of `local_steps` and `epochs` is set.
    """

    fraction: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.1 is a tenth of the clients)")] = 0.1
    local_steps: Count | None = None
    epochs: Positive | None = None

    def __post_init__(self) -> None:
        if (self.local_steps is None) == (self.epochs is None):
            raise ConfigError(
                f"FedAvg: local_steps = {self.local_steps}, epochs = {self.epochs}: set exactly one of them, such as "
                "local_steps=10"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: share of clients per round, and their local work."""
        work = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.local_steps} steps"
        return f"FedAvg ({self.fraction:.3g} of the clients, {work})"

    def n_sampled(self, n_workers: int) -> int:
        """Return the number of clients per round."""
        return max(round(self.fraction * n_workers), 1)

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per round."""
        return math.ceil(steps * n_workers / (self.n_sampled(n_workers) * (self.local_steps or 1)))

    def waits_for_all(self) -> bool:
        """Return True: a round ends for all clients together."""
        return True

    def start(self, context: RunContext) -> None:
        """Start all clients. Raises ConfigError for `epochs` in a timing-only run, which has no data."""
        if self.epochs is not None:
            need_values(context, f"FedAvg: epochs = {self.epochs:g}", "epochs are passes over data")
        _Rounds(self, context).go()

    def steps_of(self, worker: Worker) -> int:
        """Return a client's steps in a round that begins now."""
        n_local = worker.learner.n_local(worker.rank)
        return self.local_steps or math.ceil((self.epochs or 0.0) * n_local / worker.samples_per_step)


class _Rounds(UpdateRule):
    """The model at the servers, in rounds of `count` clients each, sampled at random, all different.

    A round ends with an update when all its clients have pushed their models: the new model is the mean of theirs,
    weighted by the samples of their shards and summed in float64 in rank order.
    """

    told = False
    decides = True  # an update samples the clients of the next round

    def __init__(self, strategy: FedAvg, context: RunContext) -> None:
        super().__init__(Servers(strategy, context, models=True))
        self.count, self.params = strategy.n_sampled(len(context.workers)), context.learner.initial
        self.notes = [f"each round samples {self.count} clients, and its update averages all of their models"]
        self._strategy, self._draws = strategy, stream(context.seed, 0, "rounds")
        self._clients = [_Client(worker) for worker in context.workers]
        self._n_steps = [strategy.steps_of(worker) for worker in context.workers]
        context.model = lambda: self.params

    def go(self) -> None:
        """Run the clients: wait for a round, pull the model, make local steps, push the result, repeat."""
        step = local_step(self.servers.context, self._clients)
        steps = repeated(step, lambda worker: self._n_steps[worker.rank])
        invited = Op(ls.MEET, "a round that samples it", number=1)
        self.serve([Op(ls.NOTE, follow=self._begin), *steps], [], [invited], first=invited)
        self._draw(now=True)

    def _begin(self, worker: Worker) -> None:
        self._clients[worker.rank].begin()
        self._n_steps[worker.rank] = self._strategy.steps_of(worker)
        self.lanes.set_rounds(worker, self._n_steps[worker.rank])

    def _draw(self, *, now: bool = False) -> None:
        ranks = self._draws.choice(len(self._clients), self.count, replace=False)
        self.lanes.invite(ranks.tolist(), now=now)

    def samples(self, worker: Worker) -> int:
        return self._n_steps[worker.rank] * worker.samples_per_step

    def pack(self, worker: Worker) -> Message:
        self._clients[worker.rank].gradients.clear()  # they are part of the model now
        return self.servers.messages.model(worker, worker.params)

    def answer(self, worker: Worker) -> Message:
        message = self.servers.messages.answer(worker, self.params)
        worker.params = message.value
        return message

    def update(self, visits: Sequence[Visit]) -> None:
        learner, stop = self.servers.context.learner, self.servers.context.stop
        in_order = sorted(visits, key=lambda visit: visit.rank)
        weights = [float(learner.n_local(visit.rank)) for visit in in_order]
        total = sum(weights)
        shares = [weight / total for weight in weights]
        self.params = weighted_sum(learner.plane, shares, [visit.value for visit in in_order])
        stop.updated(sum(visit.n_samples for visit in visits))
        self._draw()


@checked
@dataclass(frozen=True)
class FedBuff(WithServers):
    """FedBuff: asynchronous federated learning with buffered aggregation (Nguyen et al. 2022, arXiv:2106.06639).

    A client pulls the current model w, takes `local_steps` local steps, and sends the difference Delta_k = w - w_k. As
    soon as the server's buffer holds K differences, the server updates the model (algorithms 1 and 2):

    w_k <- w;   w_k <- w_k - eta g_k(w_k) for each local step
    w <- ServerOpt(w, (1/K) sum_k Delta_k / sqrt(1 + tau_k))

    Clients do not wait for each other. After a worker has sent its difference, it pulls the current model and becomes
    the next client, so there are as many concurrent clients as workers. The staleness tau_k is the number of updates
    between a client's pull and its push. Clients keep no state between rounds, as in :class:`~ddlsim.FedAvg`.

    local_steps        number of local steps that a client takes, the paper's Q
    buffer             K, the number of differences per update; 10 in the paper
    staleness_scaling  how stale differences are scaled: "square-root", as in the paper; None: not at all; or another
                       choice listed for :class:`~ddlsim.AsyncParameterServer`
    outer, outer_rate  optimizer of the server (ServerOpt) and its learning rate eta_g. By default, the update is
                       w <- w - eta_g Delta, as in the paper's algorithm; the paper's experiments use Momentum(0.3)
    servers, placement, apply_time
                       number, placement and update time of the servers, as for AsyncParameterServer. All servers apply
                       an update at the same time
    """

    local_steps: Count
    buffer: Count = 10
    staleness_scaling: ScalingChoice = "square-root"
    outer: Annotated[Optimizer, "an optimizer such as Momentum(0.3)"] = SGD()
    outer_rate: Positive = 1.0

    @property
    def label(self) -> str:
        """Label for tables and plots: local steps and buffer size."""
        return f"FedBuff ({self.local_steps} steps, buffer of {self.buffer})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per full buffer."""
        return math.ceil(steps * n_workers / (self.buffer * self.local_steps))

    def waits_for_all(self) -> bool:
        """Return False."""
        return False

    def cycle(self) -> int:
        """Return the number of local steps between two visits of the servers."""
        return self.local_steps

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: the one that the client began with."""
        return 1.0

    def start(self, context: RunContext) -> None:
        """Start all clients."""
        outer, scaling = Outer(context.learner, self.outer), scaling_named(self.staleness_scaling)
        buffer = _Buffer(self, context, self.buffer, scaling, move=lambda delta: outer.step(delta, self.outer_rate))
        note_lock_step(context)
        clients = buffer.clients = [_Client(worker) for worker in context.workers]
        begin = Op(ls.NOTE, follow=lambda worker: clients[worker.rank].begin())
        steps = repeated(local_step(context, clients), lambda _: self.local_steps)
        buffer.serve([begin, *steps], [], steps=self.local_steps)


class _Buffer(CentralModel):
    """The model at the servers, to which ``clients`` send their model updates."""

    clients: Sequence[_Client] = ()

    def pack(self, worker: Worker) -> Message:
        return self.servers.messages.gradient(worker, self.clients[worker.rank].delta())


class _Client:
    """State of a client between two visits to the servers."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.begin()

    def begin(self) -> None:
        """Start a fresh optimizer with the current learning rate."""
        worker, learner = self.worker, self.worker.learner
        self.begun, self.gradients = worker.params, list[Value[Array]]()
        self.rate, self.state = learner.rate(worker.stop.n_samples), learner.optimizer_state(worker.params)

    def draw(self) -> None:
        """Compute the gradient at the client's current parameters."""
        self.gradients.append(self.worker.draw())

    def step(self) -> None:
        """w_k <- w_k - eta g_k(w_k)"""
        worker = self.worker
        worker.params, self.state = worker.learner.update(worker.params, self.gradients[-1], self.state, self.rate)

    def delta(self) -> Value[Array]:
        """Return w - w_k."""
        plane = self.worker.learner.plane
        return plane.apply(np.subtract, self.begun, self.worker.params).with_statistics_of(*self.gradients)


def local_step(context: RunContext, clients: Sequence[_Client]) -> list[Op]:
    """Return the operations of a local step of clients."""
    drawn = gradient(context, lambda worker: clients[worker.rank].draw())
    return [*drawn, OPTIMIZER, Op(ls.STEP, follow=lambda worker: clients[worker.rank].step())]
