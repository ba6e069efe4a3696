"""Gossip without steps in common, partners drawn at random: AD-PSGD (pairs average) and GoSGD (push-sum)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ddlsim.arguments import by, checked, number
from ddlsim.learning import Array, Value, weighted_sum
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.codec import Message, Messages
from ddlsim.runtime.lane_ops import OPTIMIZER, Op, gradient
from ddlsim.runtime.lanes import Lanes
from ddlsim.runtime.replica import Replica, replicas_of
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.strategies.mixing import Graph, bipartition, check_graph, describe, neighbours
from ddlsim.streams import stream


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
        _Pairs(setting, [partners if asks[rank] else [] for rank, partners in enumerate(near)])


class _Pairs:
    """Workers who ask one of their `partners` for the average in every step, if they have any."""

    def __init__(self, setting: Setting, partners: Sequence[Sequence[int]]) -> None:
        self.setting, self.partners, self.replicas = setting, partners, replicas_of(setting)
        self.messages = Messages(setting, owner="ADPSGD", peers=True)
        self.draws = [stream(setting.seed, worker.rank, "gossip") for worker in setting.workers]
        self.gradients, self.sent = dict[int, Value[Array]](), dict[int, Message]()
        packs = self.messages.choice is not None
        learns = packs or setting.learner.task is not None
        asking = [
            *([Op(ls.ASK if packs else ls.NOTE, follow=self._packed)] if learns else []),
            Op(ls.WORK, "encode"), Op(ls.DISPATCH, "average with", number=1),
        ]  # fmt: skip
        ops = [
            Op(ls.CHOOSE, number=len(asking)), *asking, *gradient(setting, self._drawn if learns else None),
            Op(ls.JOIN, "averaging", waits="the average with its neighbour"),
            *([Op(ls.ASK, follow=self._come)] if packs else []), Op(ls.WORK, "decode"), OPTIMIZER,
            Op(ls.STEP, follow=self._step if learns else None, number=ls.AGED),
        ]  # fmt: skip
        first = setting.workers[0]
        self.lanes = Lanes(
            setting, ops, first.workload.gradient_nbytes, first.samples_per_step, choose=self._choose,
            served=self._average if learns else None, asks=packs, batch=0,
        )  # fmt: skip

    def _choose(self, worker: Worker) -> int:
        partners = self.partners[worker.rank]
        return partners[int(self.draws[worker.rank].integers(len(partners)))] if partners else -1

    def _packed(self, worker: Worker) -> None:
        to = self.lanes.chosen(worker)
        message = self.sent[worker.rank] = self.messages.model(worker, worker.params, to=to)
        if self.messages.choice is not None:
            self.lanes.set_message(worker, message.seconds, message.sizes)

    def _drawn(self, worker: Worker) -> None:
        self.gradients[worker.rank] = worker.draw()

    def _average(self, worker: Worker, rank: int, staleness: int, whole: bool) -> None:
        """Average where the parameters have arrived, and send the partner's back (compressing them on the way is not
        the partner's own time).

        Nobody else changes the parameters of a worker that asks, so both can have the average at once.
        """
        partner, message, mine = self.setting.workers[rank], self.sent[worker.rank], worker.params
        back, theirs = self.messages.model(partner, partner.params, to=worker.rank), partner.params
        partner.params = 0.5 * (message.value + theirs)
        worker.params = partner.params if back.value is theirs else 0.5 * (mine + back.value)
        self.sent[worker.rank] = back
        if self.messages.choice is not None:
            self.lanes.set_service(worker, back.seconds)
            self.lanes.set_answer(worker, 0, back.sizes[0])

    def _come(self, worker: Worker) -> None:
        if (back := self.sent.get(worker.rank)) is not None:
            self.lanes.set_seconds(worker, "decode", self.messages.decode_seconds(worker, back))

    def _step(self, worker: Worker) -> None:
        self.replicas[worker.rank].step_freely(self.gradients[worker.rank])


@dataclass
class _Push:
    """Parameters and their weight on their way."""

    message: Message
    weight: float


@dataclass
class Peer:
    """A worker of :class:`GossipSGD`: the weight of its parameters, and what has come in or is on its way out."""

    replica: Replica
    weight: float
    messages: Messages
    inbox: list[_Push] = field(default_factory=list)
    outgoing: _Push | None = None

    coming: list[_Push] = field(default_factory=list)

    def take(self) -> float:
        """Turn to all that has come in; return the s that decoding it takes."""
        self.coming, self.inbox = self.inbox, []
        return sum(self.messages.decode_seconds(self.replica.worker, push.message) for push in self.coming)

    def merge(self) -> None:
        """x <- (w x + w_s x_s) / (w + w_s);  w <- w + w_s   for all that it has turned to."""
        worker = self.replica.worker
        for push in self.coming:
            total = self.weight + push.weight
            shares = [self.weight / total, push.weight / total]
            worker.params = weighted_sum(worker.learner.plane, shares, [worker.params, push.message.value])
            self.weight = total

    def push(self, rank: int) -> Message:
        """w <- w / 2;  send (x, w), as they are now, to another."""
        self.weight /= 2.0
        message = self.messages.model(self.replica.worker, self.replica.worker.params, to=rank)
        self.outgoing = _Push(message, self.weight)
        return message

    def arrive(self, other: Peer) -> None:
        """What is on its way out reaches another."""
        assert self.outgoing is not None
        other.inbox.append(self.outgoing)
        self.outgoing = None


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
        messages = Messages(setting, owner="GossipSGD", peers=True)
        _Gossip(self, setting, self.peers(setting, messages), neighbours("GossipSGD", self.graph, len(setting.workers)))

    def peers(self, setting: Setting, messages: Messages) -> list[Peer]:
        """Return the workers, who share the weight evenly."""
        return [Peer(replica, 1.0 / len(setting.workers), messages) for replica in replicas_of(setting)]


class _Gossip:
    """Workers who push to one of those `near` them now and then."""

    def __init__(self, rule: GossipSGD, setting: Setting, peers: list[Peer], near: Sequence[Sequence[int]]) -> None:
        self.probability, self.peers, self.near, messages = rule.probability, peers, near, peers[0].messages
        self.draws = [stream(setting.seed, worker.rank, "gossip") for worker in setting.workers]
        self.gradients: dict[int, Value[Array]] = {}
        self.packs = messages.choice is not None
        learns = self.packs or setting.learner.task is not None
        pushing = [
            Op(ls.JOIN, "push", waits="its last push"),
            *([Op(ls.ASK if self.packs else ls.NOTE, follow=self._packed)] if learns else []),
            Op(ls.WORK, "encode"), Op(ls.DISPATCH, "push to"),
        ]  # fmt: skip
        merging = [Op(ls.ASK, follow=self._come), Op(ls.WORK, "decode"), Op(ls.NOTE, follow=self._merge)]
        ops = [
            *(merging if learns else []), *gradient(setting, self._drawn if learns else None), OPTIMIZER,
            Op(ls.STEP, follow=self._step if learns else None, number=ls.EACH),
            Op(ls.CHOOSE, number=len(pushing)), *pushing,
        ]  # fmt: skip
        first = setting.workers[0]
        self.lanes = Lanes(
            setting, ops, first.workload.gradient_nbytes, first.samples_per_step, choose=self._choose,
            served=self._arrived if learns else None, batch=0,
        )  # fmt: skip

    def _choose(self, worker: Worker) -> int:
        near, draws = self.near[worker.rank], self.draws[worker.rank]
        return near[int(draws.integers(len(near)))] if near and draws.random() < self.probability else -1

    def _come(self, worker: Worker) -> None:
        self.lanes.set_seconds(worker, "decode", self.peers[worker.rank].take())

    def _merge(self, worker: Worker) -> None:
        self.peers[worker.rank].merge()

    def _drawn(self, worker: Worker) -> None:
        self.gradients[worker.rank] = worker.draw()

    def _step(self, worker: Worker) -> None:
        self.peers[worker.rank].replica.step_freely(self.gradients[worker.rank])

    def _packed(self, worker: Worker) -> None:
        message = self.peers[worker.rank].push(self.lanes.chosen(worker))
        if self.packs:
            self.lanes.set_message(worker, message.seconds, message.sizes)

    def _arrived(self, worker: Worker, rank: int, staleness: int, whole: bool) -> None:
        self.peers[worker.rank].arrive(self.peers[rank])
