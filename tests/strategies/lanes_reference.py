"""Asynchronous servers and gossip as processes of an event loop: what the kernel's lanes must do, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import simpy

from ddlsim.learning import Value, weighted_sum
from ddlsim.runtime.codec import Message, Messages
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies.asynchronous import _Shard
from ddlsim.strategies.gossip import bipartition, mixing_matrix, neighbours
from ddlsim.strategies.staleness import scaling_named
from ddlsim.streams import stream
from ddlsim.units import si


@dataclass
class Server:
    """One shard: applies gradients to its part of the parameters one after the other, first come first served."""

    node: int
    lock: simpy.Resource
    shard: _Shard
    version: int = 0


@dataclass
class Pulled:
    """What a worker holds of a shard: its parameters and their version."""

    params: Value
    version: int


@dataclass
class Push:
    """A gradient of `n_samples` on its way to the servers; it is an update when every shard has applied its part."""

    parts: list
    n_samples: int
    pulled: list
    shards_left: int = field(init=False)
    queued: list = field(init=False)
    answers: list = field(init=False)

    def __post_init__(self):
        self.answers = list(self.parts)
        self.shards_left = len(self.pulled)
        self.queued = [0.0] * len(self.pulled)


def start_downpour(strategy, context):
    """Start a process per worker: AsyncParameterServer.start."""
    env, learner = context.loop.env, context.learner
    nodes = server_nodes(context.cluster, context.nodes, strategy.servers, strategy.placement)
    parts = [learner.initial[part] for part in learner.parts(strategy.servers)]
    scaling = scaling_named(strategy.staleness_scaling)
    servers = [
        Server(
            node, simpy.Resource(env),
            _Shard(params, learner.optimizer_state(params), learner, scaling, strategy.delay_compensation),
        )
        for node, params in zip(nodes, parts, strict=True)
    ]  # fmt: skip
    context.model = lambda: learner.concatenate([server.shard.params for server in servers])
    messages = Messages(context, strategy.servers, owner="AsyncParameterServer")
    for worker in context.workers:
        env.process(downpour(strategy, worker, servers, messages))


def downpour(strategy, worker, servers, messages):
    """Compute a gradient (or several), push it, pull the parameters, for ever."""
    loop = worker.loop
    pulled = [Pulled(server.shard.params, server.version) for server in servers]
    while True:
        gradient = latest = yield from worker.gradient()
        n_samples = worker.samples_per_step
        for _ in range(strategy.accumulate - 1):
            yield from worker.optimizer_step()
            worker.params = worker.params - worker.learner.rate(worker.stop.n_samples) * latest
            worker.end_step()
            latest = yield from worker.gradient()
            gradient, n_samples = gradient + latest, n_samples + worker.samples_per_step
        push = Push([messages.gradient(worker, gradient, i) for i in range(len(servers))], n_samples, pulled)
        yield from worker.compute(sum(part.seconds for part in push.parts), "encode")
        start = loop.now
        shards = [loop.env.process(push_pull(strategy, worker, s, i, push, messages)) for i, s in enumerate(servers)]
        yield from worker.block(loop.env.all_of(shards), "its parameter servers")
        worker.book(start, start + max(push.queued), "push and pull")
        yield from worker.compute(sum(answer.seconds for answer in push.answers), "decode")
        worker.params = worker.learner.concatenate([each.params for each in pulled])
        worker.end_step()


def push_pull(strategy, worker, server, i, push, messages):
    """Push one shard and pull it back."""
    loop, pulled, part = worker.loop, push.pulled[i], push.parts[i]
    yield loop.send(worker.node, server.node, part.sizes[0])
    arrived = loop.now
    with server.lock.request() as turn:
        yield turn
        begin = loop.now
        push.queued[i] = begin - arrived
        if (seconds := si(strategy.apply_time, "time") + messages.server_seconds(i)) > 0.0:
            yield loop.env.timeout(seconds)
        staleness = server.version - pulled.version
        worker.recorder.staleness.append(staleness)
        server.shard.apply(part.value, pulled.params, staleness, worker.stop.n_samples)
        server.version += 1
        answer = push.answers[i] = messages.answer(worker, server.shard.params, i)
        pulled.params, pulled.version = answer.value, server.version
        push.shards_left -= 1
        if push.shards_left == 0:
            worker.stop.updated(push.n_samples)
    worker.recorder.background(f"server {i}", f"update from {worker.name}", begin, loop.now)
    yield loop.send(server.node, worker.node, answer.sizes[0])


# ---------------------------------------------------------------- gossip


@dataclass
class Letter:
    """Parameters under way from one worker to another; ``sent`` (s) is when they left."""

    delivered: simpy.Event
    message: Message | None = None
    sent: float = 0.0


class Neighbours:
    """Workers who send each other their models: in every step, each gets those with a weight in its row."""

    def __init__(self, context, matrix, owner):
        self.context, self.letters = context, {}
        self.messages = Messages(context, owner=owner, peers=True)
        ranks = range(len(matrix))
        self.senders = [[j for j in np.flatnonzero(matrix[i]).tolist() if j != i] for i in ranks]
        self.receivers = [[j for j in np.flatnonzero(matrix[:, i]).tolist() if j != i] for i in ranks]

    def send(self, worker, step, params):
        message, me = self.messages.model(worker, params), worker.rank
        yield from worker.compute(message.seconds, "encode")
        travels = [worker.loop.env.process(self.carry(step, worker, j, message)) for j in self.receivers[me]]
        return message.value, [*travels, *[self.letter(step, j, me).delivered for j in self.senders[me]]]

    def receive(self, worker, step, sent):
        start, me = worker.loop.now, worker.rank
        yield from worker.block(worker.loop.env.all_of(sent[1]), f"its neighbours' parameters of step {step}")
        letters = {j: self.letters.pop((step, j, me)) for j in self.senders[me]}
        worker.book(start, max((letter.sent for letter in letters.values()), default=start), "neighbours")
        messages = {j: letter.message for j, letter in letters.items() if letter.message is not None}
        seconds = sum(self.messages.decode_seconds(worker, each) for each in messages.values())
        yield from worker.compute(seconds, "decode")
        return {me: sent[0]} | {j: message.value for j, message in messages.items()}

    def letter(self, step, src, dst):
        return self.letters.setdefault((step, src, dst), Letter(self.context.loop.env.event()))

    def carry(self, step, worker, dst, message):
        letter = self.letter(step, worker.rank, dst)
        letter.message, letter.sent = message, worker.loop.now
        yield worker.loop.send(worker.node, self.context.workers[dst].node, message.sizes[0])
        letter.delivered.succeed()


def start_dpsgd(strategy, context):
    """Start a process per worker: DPSGD.start."""
    matrix = mixing_matrix("DPSGD", strategy.graph, len(context.workers))
    neighbours = Neighbours(context, matrix, "DPSGD")
    start_replicas(context, lambda replica: dpsgd(replica, matrix, neighbours))


def dpsgd(replica, matrix, neighbours):
    """One worker's life."""
    worker, me = replica.worker, replica.worker.rank
    sources = np.flatnonzero(matrix[me]).tolist()
    weights = matrix[me, sources].tolist()
    while True:
        step, before = replica.step, worker.params
        sent = yield from neighbours.send(worker, step, before)
        gradient = yield from worker.gradient()
        models = yield from neighbours.receive(worker, step, sent)
        yield from worker.optimizer_step()
        params = [before if j == me else models[j] for j in sources]
        mixed = weighted_sum(worker.learner.plane, weights, params)
        worker.params, replica.state = replica.after(mixed, gradient)
        replica.count()
        replica.end_step()


def start_choco(strategy, context):
    """Start a process per worker: CHOCOSGD.start."""
    matrix = mixing_matrix("CHOCOSGD", strategy.graph, len(context.workers))
    towards = strategy.gamma * (matrix - np.eye(len(matrix)))
    neighbours = Neighbours(context, matrix, "CHOCOSGD")
    start_replicas(context, lambda replica: choco(replica, towards[replica.worker.rank], neighbours))


def choco(replica, towards, neighbours):
    """One worker's life."""
    worker = replica.worker
    while True:
        yield from replica.local_step()
        sent = yield from neighbours.send(worker, replica.step, worker.params)
        public = yield from neighbours.receive(worker, replica.step, sent)
        weights, models = [1.0, *towards[list(public)].tolist()], [worker.params, *public.values()]
        worker.params = weighted_sum(worker.learner.plane, weights, models)
        replica.end_step()


# ---------------------------------------------------------------- gossip without steps in common


def start_adpsgd(strategy, context):
    """Start a process per worker: ADPSGD.start."""
    near = neighbours("ADPSGD", strategy.graph, len(context.workers))
    asks = bipartition("ADPSGD", strategy.graph, near)
    messages = Messages(context, owner="ADPSGD", peers=True)

    def work(replica):
        rank = replica.worker.rank
        partners = [context.workers[j] for j in near[rank]] if asks[rank] else []
        return adpsgd(replica, partners, messages, stream(context.seed, rank, "gossip"))

    start_replicas(context, work)


def adpsgd(replica, partners, messages, draws):
    """One worker's life; it asks one of `partners` in every step, if it has any."""
    worker, recorder = replica.worker, replica.worker.recorder
    while True:
        begun = len(recorder.updates)
        averaged = None
        if partners:
            partner = partners[int(draws.integers(len(partners)))]
            message = messages.model(worker, worker.params, to=partner.rank)
            yield from worker.compute(message.seconds, "encode")
            averaged = worker.loop.env.process(average(worker, partner, message, messages))
        gradient = yield from worker.gradient()
        if averaged is not None and not averaged.processed:
            start = worker.loop.now
            yield from worker.block(averaged, "the average with its neighbour")
            worker.book(start, start, "averaging")
        if averaged is not None:
            back = averaged.value
            yield from worker.compute(messages.decode_seconds(worker, back), "decode")
        yield from worker.optimizer_step()
        replica.n_samples = worker.stop.n_samples
        worker.params, replica.state = replica.after(worker.params, gradient)
        replica.count()
        recorder.staleness.append(len(recorder.updates) - begun)
        worker.end_step()
        worker.stop.updated(worker.samples_per_step)


def average(worker, partner, message, messages):
    """Send the parameters, average where they arrive, send the partner's back (compressing them on the way is not
    the partner's own time); return what has come back.

    Nobody else changes the parameters of a worker that asks, so both can have the average at once.
    """
    loop, start, mine = worker.loop, worker.loop.now, worker.params
    yield loop.send(worker.node, partner.node, message.sizes[0])
    back, theirs = messages.model(partner, partner.params, to=worker.rank), partner.params
    partner.params = 0.5 * (message.value + theirs)
    worker.params = partner.params if back.value is theirs else 0.5 * (mine + back.value)
    if back.seconds > 0.0:
        yield loop.env.timeout(back.seconds)
    yield loop.send(partner.node, worker.node, back.sizes[0])
    worker.recorder.background(f"{worker.name} network", f"average with {partner.name}", start, loop.now)
    return back


@dataclass
class Pushed:
    """Parameters and their weight on their way."""

    message: Message
    weight: float


@dataclass
class Peer:
    """A worker of GoSGD: the weight of its parameters, what has come in, what is on its way out."""

    replica: Replica
    weight: float
    messages: Messages
    inbox: list = field(default_factory=list)
    outgoing: object = None

    def merge(self):
        """x <- (w x + w_s x_s) / (w + w_s);  w <- w + w_s   for all that has come in."""
        worker = self.replica.worker
        pushes = list(self.inbox)
        self.inbox.clear()
        seconds = sum(self.messages.decode_seconds(worker, push.message) for push in pushes)
        yield from worker.compute(seconds, "decode")
        for push in pushes:
            total = self.weight + push.weight
            shares = [self.weight / total, push.weight / total]
            worker.params = weighted_sum(worker.learner.plane, shares, [worker.params, push.message.value])
            self.weight = total

    def push(self, other):
        """w <- w / 2;  send (x, w), as they are now, to another. The event returned is their arrival."""
        worker = self.replica.worker
        self.weight /= 2.0
        message = self.messages.model(worker, worker.params, to=other.replica.worker.rank)
        self.outgoing = Pushed(message, self.weight)
        yield from worker.compute(message.seconds, "encode")
        return worker.loop.env.process(self._carry(self.outgoing, other))

    def _carry(self, push: Pushed, other):
        worker, receiver, start = self.replica.worker, other.replica.worker, self.replica.worker.loop.now
        yield worker.loop.send(worker.node, receiver.node, push.message.sizes[0])
        other.inbox.append(push)
        self.outgoing = None
        worker.recorder.background(f"{worker.name} network", f"push to {receiver.name}", start, worker.loop.now)


def start_gossip_sgd(strategy, context):
    """Start a process per worker: GossipSGD.start."""
    n_workers = len(context.workers)
    near = neighbours("GossipSGD", strategy.graph, n_workers)
    peers = []
    messages = Messages(context, owner="GossipSGD", peers=True)

    def work(replica):
        rank = replica.worker.rank
        peers.append(Peer(replica, 1.0 / n_workers, messages))
        return gossip_sgd(strategy, peers[rank], peers, near[rank], stream(context.seed, rank, "gossip"))

    start_replicas(context, work)


def gossip_sgd(strategy, peer, peers, near, draws):
    """One worker's life."""
    replica, worker = peer.replica, peer.replica.worker
    pushed = None
    while True:
        yield from peer.merge()
        gradient = yield from worker.gradient()
        yield from worker.optimizer_step()
        replica.n_samples = worker.stop.n_samples
        worker.params, replica.state = replica.after(worker.params, gradient)
        replica.count()
        worker.end_step()
        worker.stop.updated(worker.samples_per_step)
        if near and draws.random() < strategy.probability:
            if pushed is not None and not pushed.processed:
                start = worker.loop.now
                yield from worker.block(pushed, "its last push")
                worker.book(start, start, "push")
            other = peers[near[int(draws.integers(len(near)))]]
            pushed = yield from peer.push(other)
