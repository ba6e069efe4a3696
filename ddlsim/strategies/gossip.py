"""Gossip in step: decentralised SGD over a graph (D-PSGD)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
import simpy

from ddlsim.arguments import by, checked
from ddlsim.learning import Array, Plane, Value
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker, all_of
from ddlsim.strategies.mixing import Graph, Weights, agreement, check_graph, describe, mixing_matrix

__all__ = ["DPSGD", "weighted_sum"]


def weighted_sum(plane: Plane, weights: Sequence[float], values: Sequence[Value[Array]]) -> Value[Array]:
    """Return sum_j weights[j] * values[j] of models, summed in float64 in the order given and rounded once."""

    def add(*arrays: Array) -> Array:
        total = weights[0] * arrays[0].astype(np.float64)
        for weight, array in zip(weights[1:], arrays[1:], strict=True):
            total += weight * array
        return total.astype(arrays[0].dtype)

    return plane.mix(add, *values)


@dataclass
class _Letter:
    """Parameters under way from one worker to another; ``sent`` (s) is when they left."""

    delivered: simpy.Event
    parcel: Parcel | None = None
    sent: float = 0.0


@dataclass
class _Mail:
    """The letters of a run, by step, sender and receiver; whichever of the two comes first makes one."""

    workers: list[Worker]
    letters: dict[tuple[int, int, int], _Letter] = field(default_factory=dict)

    def letter(self, step: int, src: int, dst: int) -> _Letter:
        return self.letters.setdefault((step, src, dst), _Letter(self.workers[src].loop.env.event()))

    def send(self, step: int, src: int, dst: int, parcel: Parcel) -> simpy.Event:
        """Send what a worker has packed; the event returned is its arrival."""
        letter, worker = self.letter(step, src, dst), self.workers[src]
        letter.parcel, letter.sent = parcel, worker.loop.now
        return worker.loop.env.process(self._carry(letter, parcel, worker, self.workers[dst].node))

    def _carry(self, letter: _Letter, parcel: Parcel, worker: Worker, dst: int) -> Process:
        yield worker.loop.send(worker.node, dst, parcel.sizes[0])
        letter.delivered.succeed()

    def take(self, step: int, src: int, dst: int) -> tuple[Parcel, float]:
        """Return what has come, and when it was sent (s)."""
        letter = self.letters.pop((step, src, dst))
        assert letter.parcel is not None
        return letter.parcel, letter.sent


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

    graph: Annotated[
        str | Graph | Weights | Sequence[Sequence[float]] | npt.NDArray[np.float64],
        by(functools.partial(check_graph, weights=True)),
    ] = "ring"

    def _graph(self) -> str | Graph | Weights:
        return check_graph(self.graph, "DPSGD: graph", weights=True)

    @property
    def label(self) -> str:
        """The graph."""
        return f"D-PSGD ({describe(self._graph())})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step of all workers is an update."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers, and note how fast they agree."""
        matrix = mixing_matrix("DPSGD", self._graph(), len(setting.workers))
        if said := agreement(matrix):
            setting.notes.append(said)
        mail = _Mail(setting.workers)
        wires = Wires(setting, owner="DPSGD", peers=True)
        start_replicas(setting, lambda replica: self.work(replica, matrix, mail, wires))

    def work(self, replica: Replica, matrix: npt.NDArray[np.float64], mail: _Mail, wires: Wires) -> Process:
        """One worker's life."""
        worker, me = replica.worker, replica.worker.rank
        sources = np.flatnonzero(matrix[me]).tolist()
        senders = [j for j in sources if j != me]
        receivers = [j for j in np.flatnonzero(matrix[:, me]).tolist() if j != me]
        weights = matrix[me, sources].tolist()
        while True:
            step, before = replica.step, worker.params
            parcel = wires.model(worker, before)
            yield from worker.compute(parcel.seconds, "encode")
            travels = [mail.send(step, me, j, parcel) for j in receivers]
            travels += [mail.letter(step, j, me).delivered for j in senders]
            gradient = yield from worker.gradient()
            start = worker.loop.now
            yield from worker.block(all_of(worker.loop, travels), f"its neighbours' parameters of step {step}")
            letters = {j: mail.take(step, j, me) for j in senders}
            worker.book(start, max((sent for _, sent in letters.values()), default=start), "neighbours")
            yield from worker.compute(sum(wires.decode_seconds(worker, each) for each, _ in letters.values()), "decode")
            yield from worker.optimizer_step()
            params = [before if j == me else letters[j][0].value for j in sources]
            mixed = weighted_sum(worker.learner.plane, weights, params)
            worker.params, replica.state = replica.after(mixed, gradient)
            replica.count()
            replica.end_step()
