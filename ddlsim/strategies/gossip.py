"""Gossip in step: decentralised SGD over a graph (D-PSGD, CHOCO-SGD)."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
import simpy

from ddlsim.arguments import by, checked, number
from ddlsim.learning import Array, Value, weighted_sum
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker, all_of
from ddlsim.strategies.mixing import Graph, Weights, agreement, check_graph, describe, mixing_matrix

__all__ = ["CHOCOSGD", "DPSGD"]

#: who takes whose models with which weights
Mixing = Annotated[
    str | Graph | Weights | Sequence[Sequence[float]] | npt.NDArray[np.float64],
    by(functools.partial(check_graph, weights=True)),
]
#: a model as its receivers have it then, and all that its sender waits for
Sent = tuple[Value[Array], list[simpy.Event]]


def checked_graph(graph: Mixing) -> str | Graph | Weights:
    """Return a graph as :data:`Mixing` has checked it."""
    return check_graph(graph, "graph", weights=True)


@dataclass
class _Letter:
    """Parameters under way from one worker to another; ``sent`` (s) is when they left."""

    delivered: simpy.Event
    parcel: Parcel | None = None
    sent: float = 0.0


@dataclass
class Neighbours:
    """Workers who send each other their models: in every step, each worker i gets those with a weight in row i of
    ``matrix``, (N, N). They are compressed if the run compresses."""

    setting: Setting
    matrix: npt.NDArray[np.float64]
    owner: str
    letters: dict[tuple[int, int, int], _Letter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wires = Wires(self.setting, owner=self.owner, peers=True)
        ranks = range(len(self.matrix))
        self.senders = [[j for j in np.flatnonzero(self.matrix[i]).tolist() if j != i] for i in ranks]
        self.receivers = [[j for j in np.flatnonzero(self.matrix[:, i]).tolist() if j != i] for i in ranks]

    def send(self, worker: Worker, step: int, params: Value[Array]) -> Generator[simpy.Event, object, Sent]:
        """Encode a worker's model and send it off; return what :meth:`receive` waits for."""
        parcel, me = self.wires.model(worker, params), worker.rank
        yield from worker.compute(parcel.seconds, "encode")
        travels = [worker.loop.env.process(self._carry(step, worker, j, parcel)) for j in self.receivers[me]]
        return parcel.value, [*travels, *[self._letter(step, j, me).delivered for j in self.senders[me]]]

    def receive(self, worker: Worker, step: int, sent: Sent) -> Generator[simpy.Event, object, dict[int, Value[Array]]]:
        """Wait until all that a worker sends in a step has arrived and all it gets has come; return the models of its
        neighbours, and its own as they have it."""
        start, me = worker.loop.now, worker.rank
        yield from worker.block(all_of(worker.loop, sent[1]), f"its neighbours' parameters of step {step}")
        letters = {j: self.letters.pop((step, j, me)) for j in self.senders[me]}
        worker.book(start, max((letter.sent for letter in letters.values()), default=start), "neighbours")
        parcels = {j: letter.parcel for j, letter in letters.items() if letter.parcel is not None}
        yield from worker.compute(sum(self.wires.decode_seconds(worker, each) for each in parcels.values()), "decode")
        return {me: sent[0]} | {j: parcel.value for j, parcel in parcels.items()}

    def _letter(self, step: int, src: int, dst: int) -> _Letter:
        """Return a letter; whichever of the two comes first makes it."""
        return self.letters.setdefault((step, src, dst), _Letter(self.setting.loop.env.event()))

    def _carry(self, step: int, worker: Worker, dst: int, parcel: Parcel) -> Process:
        letter = self._letter(step, worker.rank, dst)
        letter.parcel, letter.sent = parcel, worker.loop.now
        yield worker.loop.send(worker.node, self.setting.workers[dst].node, parcel.sizes[0])
        letter.delivered.succeed()


@checked
@dataclass(frozen=True)
class DPSGD:
    """Decentralised parallel SGD (Lian et al. 2017, arXiv:1705.09056, algorithm 1): in every step

    x_i <- sum_j W_ij x_j - eta g_i(x_i)

    Only neighbours in the graph talk. Their parameters travel while the gradient is computed, which
    the algorithm allows, so a step takes the longer of the two. A worker is through when all it waits for has come
    and all it sends has arrived.

    graph  "ring" (along the ranks, 1/3 each), "complete", "bipartite", a networkx graph of ranks (with
           Metropolis-Hastings weights), or W itself (N, N): doubly stochastic, row i what worker i takes
    """

    graph: Mixing = "ring"

    @property
    def label(self) -> str:
        """The graph."""
        return f"D-PSGD ({describe(checked_graph(self.graph))})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers, and note how fast they agree."""
        matrix = mixing_matrix("DPSGD", checked_graph(self.graph), len(setting.workers))
        if said := agreement("D-PSGD", matrix):
            setting.notes.append(said)
        neighbours = Neighbours(setting, matrix, "DPSGD")
        start_replicas(setting, lambda replica: self.work(replica, matrix, neighbours))

    def work(self, replica: Replica, matrix: npt.NDArray[np.float64], neighbours: Neighbours) -> Process:
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


@checked
@dataclass(frozen=True)
class CHOCOSGD:
    """Decentralised SGD with compressed communication (Koloskova, Stich and Jaggi 2019, arXiv:1902.00340, algorithm 2):

    x_i <- x_i - eta g_i(x_i)
    q_i = Q(x_i - y_i), sent to the neighbours;   y_j <- y_j + q_j, for oneself and for all neighbours
    x_i <- x_i + gamma sum_j W_ij (y_j - y_i)

    y_i is the public copy of x_i, which all neighbours hold; all start from the initial model (from 0 in the paper). Q
    is the compressor of the run, ``simulate(..., compression=TopK(0.01))``; without one y_i = x_i. What travels depends
    on the gradient, so nothing of it hides behind the computing. The optimizer of the run makes the local steps.

    gamma  consensus step size; 1 for uncompressed messages, smaller the less of them is sent (the paper tunes it: 0.04
           for the largest 1 %, theorem 4 says what is safe)
    graph  as of :class:`~ddlsim.DPSGD`
    """

    gamma: Annotated[float, number(0.0, 1.0, above=True, hint=", e.g. 1.0 without compression")]
    graph: Mixing = "ring"

    @property
    def label(self) -> str:
        """The step size and the graph."""
        return f"CHOCO-SGD ({self.gamma:g}, {describe(checked_graph(self.graph))})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers, and note how fast they agree where nothing is compressed."""
        matrix = mixing_matrix("CHOCOSGD", checked_graph(self.graph), len(setting.workers))
        towards = self.gamma * (matrix - np.eye(len(matrix)))
        if setting.compression is None and (said := agreement("CHOCO-SGD", np.eye(len(matrix)) + towards)):
            setting.notes.append(said)
        neighbours = Neighbours(setting, matrix, "CHOCOSGD")
        start_replicas(setting, lambda replica: self.work(replica, towards[replica.worker.rank], neighbours))

    def work(self, replica: Replica, towards: npt.NDArray[np.float64], neighbours: Neighbours) -> Process:
        """One worker's life."""
        worker = replica.worker
        while True:
            yield from replica.local_step()
            sent = yield from neighbours.send(worker, replica.step, worker.params)
            public = yield from neighbours.receive(worker, replica.step, sent)
            weights, models = [1.0, *towards[list(public)].tolist()], [worker.params, *public.values()]
            worker.params = weighted_sum(worker.learner.plane, weights, models)
            replica.end_step()
