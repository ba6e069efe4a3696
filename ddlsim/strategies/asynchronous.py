"""Asynchronous SGD through independent parameter servers (Downpour)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.learning import ABSENT, Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.network import lanes as ls
from ddlsim.runtime import Message, RunContext, Servers, Worker
from ddlsim.runtime.lanes import OPTIMIZER, Lanes, Op, gradient
from ddlsim.runtime.servers import ApplyTime, Placement, UpdatesServers, check_layers, note_lock_step
from ddlsim.strategies.staleness import DelayCompensation, Scaling, ScalingChoice, scaled, scaling_named


@dataclass
class _Shard:
    """A server's part of the parameters, to which it applies gradients."""

    params: Value[Array]
    state: State
    learner: Learner
    scaling: Scaling | None
    compensation: DelayCompensation | None
    mean_square: Value[Array] | None = None

    def apply(self, step: Value[Array], backup: Value[Array], staleness: int, n_samples: float) -> None:
        """w <- w - eta f(tau) g, where g is this shard's part of a gradient, after `n_samples` training samples.

        `backup` is the part of the parameters that the gradient was computed at.
        """
        if self.compensation is not None:
            step, self.mean_square = self.compensation.compensated(step, self.params, backup, self.mean_square)
        step = scaled(step, self.scaling, staleness)
        rate = self.learner.rate(n_samples)
        self.params, self.state = self.learner.update(self.params, step, self.state, rate)


@dataclass
class _Trip:
    """A worker's gradient since its last pull, from `n_samples` samples, and its copy of each shard.

    ``messages`` are the compressed gradients for the servers, ``decoding`` is the time to decode their answers in s.
    """

    pulled: list[Value[Array]]
    gradient: Value[Array] | None = None
    latest: Value[Array] = ABSENT
    n_samples: int = 0
    messages: list[Message] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)


@dataclass
class _Downpour:
    """The values of a run, computed in the order of simulated events."""

    context: RunContext
    shards: list[_Shard]
    servers: Servers
    trips: list[_Trip] = field(init=False)

    def __post_init__(self) -> None:
        self.trips = [_Trip([shard.params for shard in self.shards]) for _ in self.context.workers]

    def go(self, accumulate: int) -> None:
        """Run all workers: compute a gradient (or `accumulate` of them), push it, pull the parameters, repeat."""
        context, workers, servers = self.context, self.context.workers, self.servers
        compute = gradient(context, self.drawn)
        ops = [
            *[*compute, OPTIMIZER, Op(ls.STEP, follow=self.stepped)] * (accumulate - 1),
            *compute,
            *([] if servers.messages.choice is None else [Op(ls.ASK, follow=self.packed)]),
            Op(ls.WORK, "encode"),
            Op(ls.EXCHANGE, "push and pull", waits="its parameter servers"),
            Op(ls.WORK, "decode"),
            Op(ls.STEP, follow=self.pulled),
        ]
        seconds = [servers.apply_time + servers.messages.server_seconds(i) for i in range(len(servers.nodes))]
        self.lanes = Lanes(
            context,
            ops,
            workers[0].workload.gradient_nbytes / len(self.shards),
            workers[0].samples_per_step * accumulate,
            servers.messages,
            servers=list(zip(servers.nodes, seconds, strict=True)),
            served=self.served,
            back=self.back,
        )

    def drawn(self, worker: Worker) -> None:
        """Compute the gradient at the worker's current parameters and add it to those since the last pull."""
        trip = self.trips[worker.rank]
        trip.latest = worker.draw()
        trip.gradient = trip.latest if trip.gradient is None else trip.gradient + trip.latest
        trip.n_samples += worker.samples_per_step

    def back(self, worker: Worker) -> None:
        """Give a recovered worker all shards, and nothing to push."""
        self.trips[worker.rank] = _Trip([shard.params for shard in self.shards])

    def stepped(self, worker: Worker) -> None:
        """w_i <- w_i - eta g"""
        rate = worker.learner.rate(worker.stop.n_samples)
        worker.params = worker.params - rate * self.trips[worker.rank].latest

    def packed(self, worker: Worker) -> None:
        """Encode each shard's part of the gradient."""
        trip = self.trips[worker.rank]
        assert trip.gradient is not None
        trip.messages = [self.servers.messages.gradient(worker, trip.gradient, i) for i in range(len(self.shards))]
        trip.decoding = [0.0] * len(self.shards)
        seconds = sum(message.seconds for message in trip.messages)
        self.lanes.set_message(worker, seconds, [message.sizes[0] for message in trip.messages])

    def served(self, worker: Worker, i: int, staleness: int, complete: bool) -> None:
        """Apply a shard's part of the gradient and answer; the update is complete once every shard has done so."""
        trip, shard = self.trips[worker.rank], self.shards[i]
        assert trip.gradient is not None
        part = trip.messages[i] if trip.messages else self.servers.messages.gradient(worker, trip.gradient, i)
        shard.apply(part.value, trip.pulled[i], staleness, worker.stop.n_samples)
        trip.pulled[i] = shard.params
        if trip.messages:
            answer = self.servers.messages.answer(worker, shard.params, i)
            trip.pulled[i], trip.decoding[i] = answer.value, answer.seconds
            self.lanes.set_seconds(worker, "decode", sum(trip.decoding))
            self.lanes.set_answers(worker, answer.sizes, i)
        if complete:
            worker.stop.updated(trip.n_samples)

    def pulled(self, worker: Worker) -> None:
        """Assemble the parameters from all shards."""
        trip = self.trips[worker.rank]
        trip.gradient, trip.n_samples = None, 0
        worker.params = worker.learner.concatenate(trip.pulled)


@checked
@dataclass(frozen=True)
class AsyncParameterServer(UpdatesServers):
    """Asynchronous SGD through parameter servers (Downpour SGD, Dean et al. 2012, section 4.1).

    A server applies each gradient as soon as it arrives, ``w <- w - eta * g_i(w_{t - tau})``, and replies with its
    parameters. Workers do not wait for each other. The staleness tau of a gradient is the number of updates that the
    server applied between the worker's pull and its push.

    servers             number of parameter servers, each with an equal shard of the parameters
    placement           where servers run: on their "own" machines, or "colocated" with the workers
    apply_time          time that a server takes to apply one update to its shard, in seconds or as a string ("1 ms")
    accumulate          number of mini-batches between two exchanges with the servers. For each mini-batch, the worker
                        takes a local step ``w_i <- w_i - eta g``; it then pushes the sum of the gradients
                        (n_fetch = n_push in algorithm 7.1 of the paper)
    staleness_scaling   how the learning rate is reduced for stale gradients: "inverse" divides it by tau for tau > 0
                        (Zhang et al. 2016), "square-root" divides it by sqrt(1 + tau), and ExponentialPenalty(rho)
                        multiplies it by rho^tau (Chan and Lane 2014). Any object with a method ``factor(staleness)`` is
                        accepted. None: no scaling
    delay_compensation  DelayCompensation(lambda) corrects gradients for the updates that they missed (Zheng et al.
                        2017); None: no correction

    Raises ConfigError if `delay_compensation` is combined with `accumulate` > 1.
    """

    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0
    accumulate: Count = 1
    staleness_scaling: ScalingChoice = None
    delay_compensation: DelayCompensation | None = None

    def __post_init__(self) -> None:
        if self.delay_compensation is not None and self.accumulate > 1:
            raise ConfigError(
                f"AsyncParameterServer: delay_compensation cannot be combined with accumulate = {self.accumulate}, "
                "because it corrects a single gradient at the pulled parameters, not a sum over local steps; use "
                "accumulate = 1"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: number and placement of the servers, and the options in use."""
        parts = [f"{self.servers} {self.placement}"]
        if self.accumulate > 1:
            parts.append(f"every {self.accumulate}")
        if self.staleness_scaling is not None:
            scaling = self.staleness_scaling
            parts.append(scaling if isinstance(scaling, str) else type(scaling).__name__)
        if self.delay_compensation is not None:
            parts.append("delay compensated")
        return f"asynchronous parameter server ({', '.join(parts)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per push."""
        return math.ceil(steps * n_workers / self.accumulate)

    def waits_for_all(self) -> bool:
        """Return False."""
        return False

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        learner = context.learner
        check_layers("AsyncParameterServer", learner, self.servers)
        parts = [learner.initial[part] for part in learner.parts(self.servers)]
        scaling = scaling_named(self.staleness_scaling)
        shards = [
            _Shard(params, learner.optimizer_state(params), learner, scaling, self.delay_compensation)
            for params in parts
        ]
        context.model = lambda: learner.concatenate([shard.params for shard in shards])
        servers = Servers(self, context)
        note_lock_step(context)
        _Downpour(context, shards, servers).go(self.accumulate)
