"""Servers that act together as processes of an event loop: what the kernel's lanes must do, to the last bit."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import simpy

from ddlsim.learning import ABSENT, Value, weighted_sum
from ddlsim.runtime import servers as runtime_servers
from ddlsim.runtime import start_replicas
from ddlsim.runtime.replica import Outer
from ddlsim.runtime.servers import communicate
from ddlsim.strategies.staleness import Scaling, scaled, scaling_named
from ddlsim.streams import stream


class Servers(runtime_servers.Servers):
    """Servers that processes visit, one after the other."""

    def __init__(self, strategy, context, **options):
        super().__init__(strategy, context, **options)
        self.turn = simpy.Resource(context.loop.env)

    def push(self, worker, message):
        """Encode and send what a worker has packed, and wait until all servers have it."""
        yield from worker.compute(message.seconds, "encode")
        yield from communicate(worker, self.up(worker, message), "push")

    def pull(self, worker, message):
        """Send an answer to a worker, who waits for it and decodes it."""
        yield from communicate(worker, self.down(worker, message), "pull")
        yield from worker.compute(message.seconds, "decode")


def wait(worker, event, what):
    """Block the worker until `event`, booked as waiting for others."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, worker.loop.now, what)


def local_steps(worker, n_steps):
    """Make so many local steps from ``worker.params`` with a fresh optimizer and the learning rate of now; return the
    gradients."""
    learner, rate = worker.learner, worker.learner.rate(worker.stop.n_samples)
    state, gradients = learner.optimizer_state(worker.params), []
    for _ in range(n_steps):
        gradient = yield from worker.gradient()
        yield from worker.optimizer_step()
        worker.params, state = learner.update(worker.params, gradient, state, rate)
        gradients.append(gradient)
        worker.end_step()
    return gradients


class Gradient(NamedTuple):
    """A gradient of `n_samples` that has arrived, computed by `rank` with parameters `staleness` updates old."""

    rank: int
    value: Value
    staleness: int
    n_samples: int


@dataclass
class Batch:
    """Gradients of one update; when it is ``applied``, ``params`` are those after it, of ``version``."""

    applied: simpy.Event
    gradients: list[Gradient] = field(default_factory=list)
    params: Value = ABSENT
    version: int = 0


@dataclass
class Center:
    """The model at the servers: w <- w - eta * (1/c) sum_l f(tau_l) g_l for every ``count`` = c gradients.

    ``scaling`` is f. With ``drop_late``, gradients that are older than the latest update are thrown away.
    ``move`` makes the next model of that mean, the run's optimizer where there is none. ``version`` counts the updates.
    """

    servers: Servers
    count: int = 1
    scaling: Scaling | None = None
    drop_late: bool = False
    move: object = None
    version: int = 0

    def __post_init__(self):
        context = self.servers.context
        self.params = context.learner.initial
        self._state = context.learner.optimizer_state(self.params)
        self._batch = Batch(context.loop.env.event())
        context.model = lambda: self.params

    @classmethod
    def of(cls, strategy, context, count=1, scaling=None, *, drop_late=False):
        """Place the strategy's servers."""
        return cls(Servers(strategy, context), count, scaling, drop_late)

    def push(self, worker, gradient, version: int, n_samples=None):
        """Send a gradient (of `n_samples`, a step's if nothing is said) computed with the parameters of `version`,
        queue, and make the update if it is the last one that is needed. Return the batch that it is part of, None if
        it was dropped."""
        message = self.servers.messages.gradient(worker, gradient)
        yield from self.servers.push(worker, message)
        with self.servers.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            if (seconds := self.servers.messages.server_seconds()) > 0.0:
                yield from communicate(worker, worker.loop.env.timeout(seconds), "decode")
            staleness = self.version - version
            if self.drop_late and staleness > 0:
                return None
            batch = self._batch
            counts = worker.samples_per_step if n_samples is None else n_samples
            batch.gradients.append(Gradient(worker.rank, message.value, staleness, counts))
            if len(batch.gradients) == self.count:
                yield from self._apply(worker, batch)
        return batch

    def pull(self, worker, params):
        """Send parameters to the worker, which are what it works with then."""
        message = self.servers.messages.answer(worker, params)
        worker.params = message.value
        yield from self.servers.pull(worker, message)

    def _apply(self, worker, batch):
        """Make the update of a complete batch, for which the worker waits."""
        begin = worker.loop.now
        if self.servers.apply_time > 0.0:
            yield from communicate(worker, worker.loop.env.timeout(self.servers.apply_time), "update")
            self.servers.record_update(begin)
        self._batch = Batch(worker.loop.env.event())
        if not self.drop_late:
            worker.recorder.staleness.extend(gradient.staleness for gradient in batch.gradients)
        self.update(batch.gradients)
        batch.params, batch.version = self.params, self.version
        batch.applied.succeed()

    def update(self, gradients):
        """Make an update now. The sum is in the order of the ranks, whoever came first."""
        context = self.servers.context
        learner, stop = context.learner, context.stop
        in_order = sorted(gradients, key=lambda g: g.rank)
        mean = learner.mean([scaled(g.value, self.scaling, g.staleness) for g in in_order])
        if self.move is not None:
            self.params = self.move(mean)
        else:
            self.params, self._state = learner.update(self.params, mean, self._state, learner.rate(stop.n_samples))
        self.version += 1
        stop.updated(sum(g.n_samples for g in gradients))


def until_applied(worker, center):
    """Compute, push, wait for the update that the gradient is part of, pull, for ever."""
    version = 0
    while True:
        gradient = yield from worker.gradient()
        batch = yield from center.push(worker, gradient, version)
        if batch is None:  # too late
            params, version = center.params, center.version
        else:
            yield from wait(worker, batch.applied, "the gradients of others")
            params, version = batch.params, batch.version
        yield from center.pull(worker, params)
        worker.end_step()


def freely(worker, center):
    """Compute, push, pull what is there, for ever."""
    version = 0
    while True:
        gradient = yield from worker.gradient()
        yield from center.push(worker, gradient, version)
        version = center.version
        yield from center.pull(worker, center.params)
        worker.end_step()


@dataclass
class Clocks:
    """How many gradients of each worker have been applied, and who waits for the slowest."""

    loop: object
    slack: float
    clock: list
    waiting: list = field(default_factory=list)

    def tick(self, rank: int) -> simpy.Event:
        """Advance a worker's clock; the event returned is when it may go on."""
        self.clock[rank] += 1
        may_go = self.loop.env.event()
        self.waiting.append((rank, may_go))
        slowest = min(self.clock)
        held = []
        for other, event in self.waiting:
            if self.clock[other] - slowest > self.slack:
                held.append((other, event))
            else:
                event.succeed()
        self.waiting = held
        return may_go


@dataclass
class Meeting:
    """Workers whose parameters move the center together, when it ``moved``; ``center`` is what it was before."""

    moved: simpy.Event
    visitors: dict = field(default_factory=dict)
    center: Value = ABSENT


@dataclass
class Spring:
    """The center z at the servers: z <- z + alpha sum_i (x_i - z), over ``n_visitors`` at a time."""

    servers: Servers
    alpha: float
    n_visitors: int
    n_moves: int = 0
    #: moves that the center had made when a worker saw it last
    _seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        context = self.servers.context
        self.center = context.learner.initial
        self._meeting = Meeting(context.loop.env.event())

    def exchange(self, worker):
        """Send x_i, move the center, pull what it was before; return x_i - alpha (x_i - z)."""
        servers = self.servers
        model = servers.messages.model(worker, worker.params)
        yield from servers.push(worker, model)
        with servers.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            if (seconds := servers.messages.server_seconds()) > 0.0:
                yield from communicate(worker, worker.loop.env.timeout(seconds), "decode")
            meeting = self._meeting
            meeting.visitors[worker.rank] = model.value
            if len(meeting.visitors) == self.n_visitors:
                yield from self._move(worker, meeting)
        yield from wait(worker, meeting.moved, "the other workers")
        center = servers.messages.answer(worker, meeting.center)
        yield from servers.pull(worker, center)
        return worker.params - self.alpha * (worker.params - center.value)

    def _move(self, worker, meeting):
        """Move the center, for which the worker waits."""
        begin = worker.loop.now
        if self.servers.apply_time > 0.0:
            yield from communicate(worker, worker.loop.env.timeout(self.servers.apply_time), "update")
            self.servers.record_update(begin)
        mean = worker.learner.mean([meeting.visitors[rank] for rank in sorted(meeting.visitors)])
        meeting.center = self.center
        self.center = self.center + self.alpha * self.n_visitors * (mean - self.center)
        self._meeting = Meeting(worker.loop.env.event())
        meeting.moved.succeed()
        self.n_moves += 1
        if self.n_visitors == 1:
            worker.recorder.staleness.append(self.n_moves - 1 - self._seen.get(worker.rank, 0))
            self._seen[worker.rank] = self.n_moves


def start_k_async(strategy, context):
    """KAsync.start."""
    center = Center.of(strategy, context, strategy.k)
    for worker in context.workers:
        context.loop.env.process(until_applied(worker, center))


def start_k_batch_async(strategy, context):
    """KBatchAsync.start."""
    center = Center.of(strategy, context, strategy.k)
    for worker in context.workers:
        context.loop.env.process(freely(worker, center))


def start_backup_workers(strategy, context):
    """BackupWorkers.start, without restart."""
    center = Center.of(strategy, context, len(context.workers) - strategy.backups, drop_late=True)
    for worker in context.workers:
        context.loop.env.process(until_applied(worker, center))


def start_soft_sync(strategy, context):
    """SoftSync.start."""
    count = len(context.workers) // strategy.n
    center = Center.of(strategy, context, count, scaling_named(strategy.staleness_scaling))
    for worker in context.workers:
        context.loop.env.process(freely(worker, center))


def start_stale_synchronous(strategy, context):
    """StaleSynchronous.start."""
    center = Center.of(strategy, context)
    clocks = Clocks(context.loop, strategy.slack, [0] * len(context.workers))
    for worker in context.workers:
        context.loop.env.process(stale_synchronous(worker, center, clocks))


def stale_synchronous(worker, center, clocks):
    """Compute, push, wait for the slowest if too far ahead, pull, for ever."""
    version = 0
    while True:
        gradient = yield from worker.gradient()
        yield from center.push(worker, gradient, version)
        if not (may_go := clocks.tick(worker.rank)).triggered:
            yield from wait(worker, may_go, "the slowest worker")
        version = center.version
        yield from center.pull(worker, center.params)
        worker.end_step()


def start_fed_buff(strategy, context):
    """FedBuff.start."""
    outer, scaling = Outer(context.learner, strategy.outer), scaling_named(strategy.staleness_scaling)
    center = Center(
        Servers(strategy, context), strategy.buffer, scaling,
        move=lambda delta: outer.step(delta, strategy.outer_rate),
    )  # fmt: skip
    for worker in context.workers:
        context.loop.env.process(fed_buff(strategy, worker, center))


def fed_buff(strategy, worker, center):
    """One client's life."""
    version, plane = 0, worker.learner.plane
    while True:
        begun = worker.params
        gradients = yield from local_steps(worker, strategy.local_steps)
        delta = plane.apply(np.subtract, begun, worker.params).with_statistics_of(*gradients)
        yield from center.push(worker, delta, version, strategy.local_steps * worker.samples_per_step)
        version = center.version
        yield from center.pull(worker, center.params)


def start_elastic(strategy, context):
    """ElasticAveraging.start."""
    n_visitors = len(context.workers) if strategy.synchronous else 1
    spring = Spring(Servers(strategy, context, models=True), strategy.alpha, n_visitors)
    start_replicas(context, lambda replica: elastic(strategy, replica, spring))
    context.model = lambda: spring.center


def elastic(strategy, replica, spring):
    """Make local steps; in every `period`-th, pull the center and be pulled by it."""
    worker = replica.worker
    while True:
        moved = worker.params
        if replica.step > 0 and replica.step % strategy.period == 0:
            moved = yield from spring.exchange(worker)
        gradient = yield from worker.gradient()  # at x_i before it was moved
        yield from worker.optimizer_step()
        worker.params, replica.state = replica.after(moved, gradient)
        replica.count()
        if strategy.synchronous:
            replica.end_step()
        else:
            worker.end_step()
            worker.stop.updated(worker.samples_per_step)


def start_fed_avg(strategy, context):
    """FedAvg.start."""
    rounds = Rounds(Servers(strategy, context, models=True), strategy.n_sampled(len(context.workers)))
    for worker in context.workers:
        context.loop.env.process(fed_avg(strategy, worker, rounds))


def fed_avg(strategy, worker, rounds):
    """Wait for a round, pull, make local steps, push, for ever."""
    n_local = worker.learner.n_local(worker.rank)
    while True:
        yield from rounds.enter(worker)
        n_steps = strategy.steps_of(worker)
        yield from local_steps(worker, n_steps)
        yield from rounds.leave(worker, n_local, n_steps * worker.samples_per_step)


class Rounds:
    """Rounds of `n_drawn` clients each, sampled at random, all different."""

    def __init__(self, servers, n_sampled):
        context = servers.context
        self.servers, self.n_sampled, self.params = servers, n_sampled, context.learner.initial
        self.env, self.draws = context.loop.env, stream(context.seed, 0, "rounds")
        self.drawn = [self.env.event() for _ in context.workers]
        self.models = {}  # by rank: model, weight and samples of those that have left the round
        context.model = lambda: self.params
        self.draw()

    def draw(self):
        for rank in sorted(self.draws.choice(len(self.drawn), self.n_sampled, replace=False).tolist()):
            self.drawn[rank].succeed()

    def enter(self, worker):
        """Wait until the client is drawn, and pull the model: it is what the client works with then."""
        yield from wait(worker, self.drawn[worker.rank], "a round that samples it")
        self.drawn[worker.rank] = self.env.event()
        answer = self.servers.messages.answer(worker, self.params)
        yield from self.servers.pull(worker, answer)
        worker.params = answer.value

    def leave(self, worker, weight, n_samples):
        """Push the client's model; the last one to come makes the update, waits for it, and draws the next round."""
        servers = self.servers
        model = servers.messages.model(worker, worker.params)
        yield from servers.push(worker, model)
        with servers.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            yield from communicate(worker, worker.loop.work(servers.messages.server_seconds()), "decode")
            self.models[worker.rank] = model.value, weight, n_samples
            if len(self.models) < self.n_sampled:
                return
            begin = worker.loop.now
            yield from communicate(worker, worker.loop.work(servers.apply_time), "update")
            servers.record_update(begin)
            models, weights, samples = zip(*[self.models[rank] for rank in sorted(self.models)], strict=True)
            self.models, total = {}, sum(weights)
            self.params = weighted_sum(worker.learner.plane, [each / total for each in weights], models)
            worker.stop.updated(sum(samples))
            self.draw()
