"""Federated learning: clients that a server asks now and then, who make some steps on data of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Positive, checked, number
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value, weighted_sum
from ddlsim.network import lane_tables as ls
from ddlsim.optim import SGD, Optimizer
from ddlsim.runtime import Outer, Process, Servers, Setting, Worker, local_steps
from ddlsim.runtime.codec import Message
from ddlsim.runtime.lanes import OPTIMIZER, Op, gradient
from ddlsim.runtime.replica import need_values
from ddlsim.runtime.servers import WithServers, communicate, note_lock_step, wait
from ddlsim.strategies.central import CentralModel
from ddlsim.strategies.staleness import ScalingChoice, scaling_named
from ddlsim.streams import stream


@checked
@dataclass(frozen=True)
class FedAvg(WithServers):
    """Federated averaging (McMahan et al. 2017, AISTATS, arXiv:1602.05629, algorithm 1). In every round, of K clients

    S = max(C K, 1) of them, drawn by chance
    w_k <- w, then w_k <- w_k - eta g_k(w_k) as often as said        each k of S
    w <- sum_k (n_k / n) w_k                                         over k of S, n = sum_k n_k

    The clients are the run's workers, n_k the samples of their shards. A round is one update, of the samples of all its
    steps. Clients keep nothing from round to round: the run's optimizer, plain SGD in the paper, starts anew in each.
    With C = 1 and one local step this is synchronous SGD (up to rounding).

    fraction      C
    local_steps   of a client in a round; or
    epochs        passes over its shard, the paper's E
    servers, placement, apply_time
                  as for :class:`~ddlsim.AsyncParameterServer`; models go to and from all servers at once
    """

    fraction: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.1 is a tenth of the clients)")] = 0.1
    local_steps: Count | None = None
    epochs: Positive | None = None

    def __post_init__(self) -> None:
        if (self.local_steps is None) == (self.epochs is None):
            raise ConfigError(
                f"FedAvg: local_steps = {self.local_steps}, epochs = {self.epochs}: say one of them, such as "
                "local_steps=10"
            )

    @property
    def label(self) -> str:
        """Who does how much."""
        work = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.local_steps} steps"
        return f"FedAvg ({self.fraction:.3g} of the clients, {work})"

    def n_drawn(self, n_workers: int) -> int:
        """Return how many of the workers take part in a round."""
        return max(round(self.fraction * n_workers), 1)

    def updates(self, steps: int, n_workers: int) -> int:
        """An update for the local steps of a round."""
        return math.ceil(steps * n_workers / (self.n_drawn(n_workers) * (self.local_steps or 1)))

    def start(self, setting: Setting) -> None:
        """Start all clients. Raises ConfigError for `epochs` where there is no data to count epochs of."""
        if self.epochs is not None:
            need_values(setting, f"FedAvg: epochs = {self.epochs:g}", "epochs are passes over data")
        servers, n_drawn = Servers(self, setting, models=True), self.n_drawn(len(setting.workers))
        rounds, first = _Rounds(servers, n_drawn), setting.workers[0]
        n_steps = self._n_steps(first, setting.learner.n_local(0))
        notes = [f"{n_drawn} clients are drawn for each round, and the update takes the models of all of them"]
        servers.plan([*gradient(setting, None), OPTIMIZER] * n_steps, notes)
        for worker in setting.workers:
            setting.loop.env.process(self.work(worker, rounds))

    def _n_steps(self, worker: Worker, n_local: int) -> int:
        return self.local_steps or math.ceil((self.epochs or 0.0) * n_local / worker.samples_per_step)

    def work(self, worker: Worker, rounds: _Rounds) -> Process:
        """One client's life."""
        n_local = worker.learner.n_local(worker.rank)
        while True:
            yield from rounds.enter(worker)
            n_steps = self._n_steps(worker, n_local)
            yield from local_steps(worker, n_steps)
            yield from rounds.leave(worker, n_local, n_steps * worker.samples_per_step)


class _Rounds:
    """Rounds of `n_drawn` clients each, drawn by chance, all different: :meth:`enter` them, compute, :meth:`leave`.

    A round is an update, when all that were drawn have left it: the model at the ``servers`` (which exchange models)
    is the mean of theirs then, weighted and summed in float64 in the order of the ranks.
    """

    def __init__(self, servers: Servers, n_drawn: int) -> None:
        setting = servers.setting
        self.servers, self.n_drawn, self.params = servers, n_drawn, setting.learner.initial
        self._env, self._draws = setting.loop.env, stream(setting.seed, 0, "rounds")
        self._drawn = [self._env.event() for _ in setting.workers]
        #: by rank: model, weight and samples of those that have left the round
        self._models: dict[int, tuple[Value[Array], float, int]] = {}
        setting.model = lambda: self.params
        self._draw()

    def _draw(self) -> None:
        for rank in sorted(self._draws.choice(len(self._drawn), self.n_drawn, replace=False).tolist()):
            self._drawn[rank].succeed()

    def enter(self, worker: Worker) -> Process:
        """Wait until the client is drawn, and pull the model: it is what the client works with then."""
        yield from wait(worker, self._drawn[worker.rank], "a round that it is drawn for")
        self._drawn[worker.rank] = self._env.event()
        answer = self.servers.messages.answer(worker, self.params)
        yield from self.servers.pull(worker, answer)
        worker.params = answer.value

    def leave(self, worker: Worker, weight: float, n_samples: int) -> Process:
        """Push the client's model, which `n_samples` have gone into; the last one to come makes the update, waits for
        it, and draws the next round."""
        servers = self.servers
        model = servers.messages.model(worker, worker.params)
        yield from servers.push(worker, model)
        with servers.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            yield from communicate(worker, self._env.timeout(servers.messages.server_seconds()), "decode")
            self._models[worker.rank] = model.value, weight, n_samples
            if len(self._models) < self.n_drawn:
                return
            begin = worker.loop.now
            yield from communicate(worker, self._env.timeout(servers.apply_time), "update")
            servers.show_update(begin)
            models, weights, samples = zip(*[self._models[rank] for rank in sorted(self._models)], strict=True)
            self._models, total = {}, sum(weights)
            self.params = weighted_sum(worker.learner.plane, [each / total for each in weights], models)
            worker.stop.updated(sum(samples))
            self._draw()


@checked
@dataclass(frozen=True)
class FedBuff(WithServers):
    """Buffered asynchronous aggregation (Nguyen et al. 2022, AISTATS, arXiv:2106.06639, algorithms 1 and 2):

    w_k <- w, then w_k <- w_k - eta g_k(w_k), `local_steps` times; the client sends Delta_k = w - w_k
    w <- ServerOpt(w, (1/K) sum_k Delta_k / sqrt(1 + tau_k))       at the server, as soon as K of them have come

    Nobody waits for anybody: a client that has sent its Delta takes the model that is there and goes on (which is a new
    client in its place; the workers are as many as train at the same time). Staleness tau is the number of updates
    between the pull and the push. Clients keep nothing from round to round, as those of :class:`~ddlsim.FedAvg`.

    local_steps        of a client, the paper's Q
    buffer             K; 10 in the paper
    staleness_scaling  "square-root" is the paper's; None, "inverse" and others as AsyncParameterServer's
    outer, outer_rate  ServerOpt and its learning rate eta_g: w <- w - eta_g Delta in the algorithm, Momentum(0.3) in
                       experiments
    servers, placement, apply_time
                       as for :class:`~ddlsim.AsyncParameterServer`; an update is made by all servers at once
    """

    local_steps: Count
    buffer: Count = 10
    staleness_scaling: ScalingChoice = "square-root"
    outer: Annotated[Optimizer, "an object such as Momentum(0.3)"] = SGD()
    outer_rate: Positive = 1.0

    @property
    def label(self) -> str:
        """Steps and buffer."""
        return f"FedBuff ({self.local_steps} steps, buffer of {self.buffer})"

    def updates(self, steps: int, n_workers: int) -> int:
        """An update for every full buffer."""
        return math.ceil(steps * n_workers / (self.buffer * self.local_steps))

    def start(self, setting: Setting) -> None:
        """Start all clients."""
        outer, scaling = Outer(setting.learner, self.outer), scaling_named(self.staleness_scaling)
        buffer = _Buffer(self, setting, self.buffer, scaling, move=lambda delta: outer.step(delta, self.outer_rate))
        follows = buffer.servers.follows
        note_lock_step(setting)
        clients = buffer.clients = [_Client(worker) for worker in setting.workers]

        def after(follow: Callable[[_Client], None]) -> Callable[[Worker], None] | None:
            return (lambda worker: follow(clients[worker.rank])) if follows else None

        begin = [Op(ls.NOTE, follow=after(_Client.begin))] if follows else []
        step = [*gradient(setting, after(_Client.draw)), OPTIMIZER, Op(ls.STEP, follow=after(_Client.step))]
        buffer.serve([*begin, *step * self.local_steps], [], steps=self.local_steps)


class _Buffer(CentralModel):
    """The model at the servers, to which ``clients`` bring how far they have gone."""

    clients: Sequence[_Client] = ()

    def pack(self, worker: Worker) -> Message:
        self.gradients[worker.rank] = self.clients[worker.rank].delta()
        return super().pack(worker)


class _Client:
    """What a client of :class:`FedBuff` does between two visits."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.begin()

    def begin(self) -> None:
        """Start a fresh optimizer with the learning rate of now."""
        worker, learner = self.worker, self.worker.learner
        self.begun, self.gradients = worker.params, list[Value[Array]]()
        self.rate, self.state = learner.rate(worker.stop.n_samples), learner.optimizer_state(worker.params)

    def draw(self) -> None:
        """The gradient is that of the parameters which the client has now."""
        self.gradients.append(self.worker.draw())

    def step(self) -> None:
        """w_k <- w_k - eta g_k(w_k)"""
        worker = self.worker
        worker.params, self.state = worker.learner.update(worker.params, self.gradients[-1], self.state, self.rate)

    def delta(self) -> Value[Array]:
        """Return w - w_k."""
        plane = self.worker.learner.plane
        return plane.apply(np.subtract, self.begun, self.worker.params).carrying(*self.gradients)
