"""Gossip without steps in common, partners drawn at random: AD-PSGD (pairs average) and GoSGD (push-sum)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import simpy

from ddlsim.arguments import by, checked, number
from ddlsim.learning import weighted_sum
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.mixing import Graph, bipartition, check_graph, describe, neighbours
from ddlsim.streams import stream

#: a process that ends with what a partner has sent back
Averaged = Generator[simpy.Event, object, Parcel]
#: a process that ends with the event of a push's arrival
Pushed = Generator[simpy.Event, object, simpy.Process]


@checked
@dataclass(frozen=True)
class ADPSGD:
    """Asynchronous decentralised parallel SGD (Lian et al. 2018, arXiv:1710.06952, algorithm 1): a worker averages
    with one random neighbour j while it computes a gradient, then applies the gradient.

    x_i, x_j <- (x_i + x_j) / 2   at one instant;   x_i <- x_i - eta g_i(x_i as it was when the gradient began)

    The graph must be bipartite, as in the paper: the workers on one side send their parameters and wait for the
    average, those on the other side answer beside their computing, so that no circle of waiting can arise; those
    never wait. Staleness counts the updates that all workers make between a gradient's begin and its use.

    graph  "ring" (of an even number), "bipartite" (every even rank with every odd one), or a networkx graph of ranks
    """

    graph: Annotated[str | Graph, by(check_graph)] = "bipartite"

    @property
    def label(self) -> str:
        """The graph."""
        return f"AD-PSGD ({describe(self.graph)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every local step is an update."""
        return steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for a graph that is not bipartite."""
        near = neighbours("ADPSGD", self.graph, len(setting.workers))
        asks = bipartition("ADPSGD", self.graph, near)

        def work(replica: Replica) -> Process:
            rank = replica.worker.rank
            partners = [setting.workers[j] for j in near[rank]] if asks[rank] else []
            return self.work(replica, partners, wires, stream(setting.seed, rank, "gossip"))

        wires = Wires(setting, owner="ADPSGD", peers=True)
        start_replicas(setting, work)

    def work(self, replica: Replica, partners: list[Worker], wires: Wires, draws: np.random.Generator) -> Process:
        """One worker's life; it asks one of `partners` in every step, if it has any."""
        worker, recorder = replica.worker, replica.worker.recorder
        while True:
            begun = len(recorder.updates)
            averaged: simpy.Process | None = None
            if partners:
                partner = partners[int(draws.integers(len(partners)))]
                parcel = wires.model(worker, worker.params, name=f"to {partner.rank}")
                yield from worker.compute(parcel.seconds, "encode")
                averaged = worker.loop.env.process(self._average(worker, partner, parcel, wires))
            gradient = yield from worker.gradient()
            if averaged is not None and not averaged.processed:
                start = worker.loop.now
                yield from worker.block(averaged, "the average with its neighbour")
                worker.book(start, start, "averaging")
            if averaged is not None:
                back: Parcel = averaged.value  # type: ignore[assignment]  # it has ended
                yield from worker.compute(wires.decode_seconds(worker, back), "decode")
            yield from worker.optimizer_step()
            replica.n_samples = worker.stop.n_samples
            worker.params, replica.state = replica.after(worker.params, gradient)
            replica.count()
            recorder.staleness.append(len(recorder.updates) - begun)
            worker.end_step()
            worker.stop.updated(worker.samples_per_step)

    def _average(self, worker: Worker, partner: Worker, parcel: Parcel, wires: Wires) -> Averaged:
        """Send the parameters, average where they arrive, send the partner's back (compressing them on the way is not
        the partner's own time); return what has come back.

        Nobody else changes the parameters of a worker that asks, so both can have the average at once.
        """
        loop, start, mine = worker.loop, worker.loop.now, worker.params
        yield loop.send(worker.node, partner.node, parcel.sizes[0])
        back, theirs = wires.model(partner, partner.params, name=f"to {worker.rank}"), partner.params
        partner.params = 0.5 * (parcel.value + theirs)
        worker.params = partner.params if back.value is theirs else 0.5 * (mine + back.value)
        if back.seconds > 0.0:
            yield loop.env.timeout(back.seconds)
        yield loop.send(partner.node, worker.node, back.sizes[0])
        worker.recorder.background(f"{worker.name} network", f"average with {partner.name}", start, loop.now)
        return back


@dataclass
class _Push:
    """Parameters and their weight on their way."""

    parcel: Parcel
    weight: float


@dataclass
class Peer:
    """A worker of :class:`GossipSGD`: the weight of its parameters, and what has come in or is on its way out."""

    replica: Replica
    weight: float
    wires: Wires
    inbox: list[_Push] = field(default_factory=list)
    outgoing: _Push | None = None

    def merge(self) -> Process:
        """x <- (w x + w_s x_s) / (w + w_s);  w <- w + w_s   for all that has come in."""
        worker = self.replica.worker
        pushes = list(self.inbox)
        self.inbox.clear()
        for push in pushes:
            yield from worker.compute(self.wires.decode_seconds(worker, push.parcel), "decode")
            total = self.weight + push.weight
            shares = [self.weight / total, push.weight / total]
            worker.params = weighted_sum(worker.learner.plane, shares, [worker.params, push.parcel.value])
            self.weight = total

    def push(self, other: Peer) -> Pushed:
        """w <- w / 2;  send (x, w), as they are now, to another. The event returned is their arrival."""
        worker = self.replica.worker
        self.weight /= 2.0
        parcel = self.wires.model(worker, worker.params, name=f"to {other.replica.worker.rank}")
        self.outgoing = _Push(parcel, self.weight)
        yield from worker.compute(parcel.seconds, "encode")
        return worker.loop.env.process(self._carry(self.outgoing, other))

    def _carry(self, push: _Push, other: Peer) -> Process:
        worker, receiver, start = self.replica.worker, other.replica.worker, self.replica.worker.loop.now
        yield worker.loop.send(worker.node, receiver.node, push.parcel.sizes[0])
        other.inbox.append(push)
        self.outgoing = None
        worker.recorder.background(f"{worker.name} network", f"push to {receiver.name}", start, worker.loop.now)


@checked
@dataclass(frozen=True)
class GossipSGD:
    """GoSGD (Blot et al. 2016, arXiv:1611.09726): sum-weight gossip.

    A worker merges what has come in, makes a local step, and with probability p halves the weight of its
    parameters and sends them, as the step has left them, to a random neighbour. Nobody waits for anybody;
    sum_i w_i x_i is preserved, the pushes under way included. A worker has one push on the wire at a time: it waits
    before the next one.

    graph  "complete" (anybody, as in the paper), "ring", "bipartite", or a networkx graph of ranks
    """

    probability: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.1 is 10 %)")] = 0.1
    graph: Annotated[str | Graph, by(check_graph)] = "complete"

    @property
    def label(self) -> str:
        """Probability and graph."""
        return f"gossip SGD (p = {self.probability:g}, {describe(self.graph)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every local step is an update."""
        return steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        n_workers = len(setting.workers)
        near = neighbours("GossipSGD", self.graph, n_workers)
        peers: list[Peer] = []
        wires = Wires(setting, owner="GossipSGD", peers=True)

        def work(replica: Replica) -> Process:
            rank = replica.worker.rank
            peers.append(Peer(replica, 1.0 / n_workers, wires))
            return self.work(peers[rank], peers, near[rank], stream(setting.seed, rank, "gossip"))

        start_replicas(setting, work)

    def work(self, peer: Peer, peers: list[Peer], near: list[int], draws: np.random.Generator) -> Process:
        """One worker's life."""
        replica, worker = peer.replica, peer.replica.worker
        pushed: simpy.Process | None = None
        while True:
            yield from peer.merge()
            gradient = yield from worker.gradient()
            yield from worker.optimizer_step()
            replica.n_samples = worker.stop.n_samples
            worker.params, replica.state = replica.after(worker.params, gradient)
            replica.count()
            worker.end_step()
            worker.stop.updated(worker.samples_per_step)
            if near and draws.random() < self.probability:
                if pushed is not None and not pushed.processed:
                    start = worker.loop.now
                    yield from worker.block(pushed, "its last push")
                    worker.book(start, start, "push")
                other = peers[near[int(draws.integers(len(near)))]]
                pushed = yield from peer.push(other)
