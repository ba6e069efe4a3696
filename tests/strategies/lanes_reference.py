"""Asynchronous servers and gossip as processes of an event loop: what the kernel's lanes must do, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import simpy

from ddlsim.learning import Value, weighted_sum
from ddlsim.runtime.replica import start_replicas
from ddlsim.runtime.servers import apply_seconds, server_nodes
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import all_of
from ddlsim.strategies.asynchronous import _Shard
from ddlsim.strategies.mixing import mixing_matrix
from ddlsim.strategies.staleness import scaling_named


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


def start_downpour(strategy, setting):
    """Start a process per worker: AsyncParameterServer.start."""
    env, learner = setting.loop.env, setting.learner
    nodes = server_nodes(setting.cluster, setting.nodes, strategy.servers, strategy.placement)
    parts = [learner.initial[part] for part in learner.parts(strategy.servers)]
    scaling = scaling_named(strategy.staleness_scaling)
    servers = [
        Server(
            node, simpy.Resource(env),
            _Shard(params, learner.optimizer_state(params), learner, scaling, strategy.delay_compensation),
        )
        for node, params in zip(nodes, parts, strict=True)
    ]  # fmt: skip
    setting.model = lambda: learner.concatenate([server.shard.params for server in servers])
    wires = Wires(setting, strategy.servers, owner="AsyncParameterServer")
    for worker in setting.workers:
        env.process(downpour(strategy, worker, servers, wires))


def downpour(strategy, worker, servers, wires):
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
        push = Push([wires.gradient(worker, gradient, i) for i in range(len(servers))], n_samples, pulled)
        yield from worker.compute(sum(part.seconds for part in push.parts), "encode")
        start = loop.now
        shards = [loop.env.process(push_pull(strategy, worker, s, i, push, wires)) for i, s in enumerate(servers)]
        yield from worker.block(loop.env.all_of(shards), "its parameter servers")
        worker.book(start, start + max(push.queued), "push and pull")
        yield from worker.compute(sum(answer.seconds for answer in push.answers), "decode")
        worker.params = worker.learner.concatenate([each.params for each in pulled])
        worker.end_step()


def push_pull(strategy, worker, server, i, push, wires):
    """Push one shard and pull it back."""
    loop, pulled, part = worker.loop, push.pulled[i], push.parts[i]
    yield loop.send(worker.node, server.node, part.sizes[0])
    arrived = loop.now
    with server.lock.request() as turn:
        yield turn
        begin = loop.now
        push.queued[i] = begin - arrived
        if (seconds := apply_seconds(strategy) + wires.server_seconds(i)) > 0.0:
            yield loop.env.timeout(seconds)
        staleness = server.version - pulled.version
        worker.recorder.staleness.append(staleness)
        server.shard.apply(part.value, pulled.params, staleness, worker.stop.n_samples)
        server.version += 1
        answer = push.answers[i] = wires.answer(worker, server.shard.params, i)
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
    parcel: Parcel | None = None
    sent: float = 0.0


class Neighbours:
    """Workers who send each other their models: in every step, each gets those with a weight in its row."""

    def __init__(self, setting, matrix, owner):
        self.setting, self.letters = setting, {}
        self.wires = Wires(setting, owner=owner, peers=True)
        ranks = range(len(matrix))
        self.senders = [[j for j in np.flatnonzero(matrix[i]).tolist() if j != i] for i in ranks]
        self.receivers = [[j for j in np.flatnonzero(matrix[:, i]).tolist() if j != i] for i in ranks]

    def send(self, worker, step, params):
        parcel, me = self.wires.model(worker, params), worker.rank
        yield from worker.compute(parcel.seconds, "encode")
        travels = [worker.loop.env.process(self.carry(step, worker, j, parcel)) for j in self.receivers[me]]
        return parcel.value, [*travels, *[self.letter(step, j, me).delivered for j in self.senders[me]]]

    def receive(self, worker, step, sent):
        start, me = worker.loop.now, worker.rank
        yield from worker.block(all_of(worker.loop, sent[1]), f"its neighbours' parameters of step {step}")
        letters = {j: self.letters.pop((step, j, me)) for j in self.senders[me]}
        worker.book(start, max((letter.sent for letter in letters.values()), default=start), "neighbours")
        parcels = {j: letter.parcel for j, letter in letters.items() if letter.parcel is not None}
        yield from worker.compute(sum(self.wires.decode_seconds(worker, each) for each in parcels.values()), "decode")
        return {me: sent[0]} | {j: parcel.value for j, parcel in parcels.items()}

    def letter(self, step, src, dst):
        return self.letters.setdefault((step, src, dst), Letter(self.setting.loop.env.event()))

    def carry(self, step, worker, dst, parcel):
        letter = self.letter(step, worker.rank, dst)
        letter.parcel, letter.sent = parcel, worker.loop.now
        yield worker.loop.send(worker.node, self.setting.workers[dst].node, parcel.sizes[0])
        letter.delivered.succeed()


def start_dpsgd(strategy, setting):
    """Start a process per worker: DPSGD.start."""
    matrix = mixing_matrix("DPSGD", strategy.graph, len(setting.workers))
    neighbours = Neighbours(setting, matrix, "DPSGD")
    start_replicas(setting, lambda replica: dpsgd(replica, matrix, neighbours))


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


def start_choco(strategy, setting):
    """Start a process per worker: CHOCOSGD.start."""
    matrix = mixing_matrix("CHOCOSGD", strategy.graph, len(setting.workers))
    towards = strategy.gamma * (matrix - np.eye(len(matrix)))
    neighbours = Neighbours(setting, matrix, "CHOCOSGD")
    start_replicas(setting, lambda replica: choco(replica, towards[replica.worker.rank], neighbours))


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
