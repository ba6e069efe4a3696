"""How compressed gradients travel through synchronous parameter servers.

Every worker pushes its payload of each server's part of a bucket; the server decodes them all, averages, encodes the
mean with a compressor (and memory) of its own, and answers every worker with that.

A push of a bucket is one collective, and so is the pull. Only where sizes depend on values the messages go one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from ddlsim.collectives import Schedule, messages
from ddlsim.learning import Array, Value
from ddlsim.runtime.averaging import Served
from ddlsim.runtime.carrier import Carrier
from ddlsim.runtime.codec import Codec, backwards, chosen, cut
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.worker import Process, Worker
from ddlsim.workload.buckets import Bucket


@dataclass
class _Mean:
    """The mean of a piece that travels message by message: `ready` when the server has all and has done its work."""

    ready: simpy.Event
    n_arrived: int = 0


@dataclass
class _Exchange:
    """The two collectives of a bucket, and how many workers have not joined them yet."""

    push: int
    pull: int
    n_missing: int


class CodedServers(Carrier):
    """The :class:`~ddlsim.runtime.carrier.Carrier` of synchronous parameter servers at `nodes`."""

    what = "push and pull"
    compresses = True

    def __init__(
        self, communicator: Communicator, nodes: Sequence[int], buckets: Sequence[Bucket],
        vector: Callable[[int, int], Value[Array]],
    ) -> None:  # fmt: skip
        setting = communicator.setting
        choice = chosen(setting, servers=True)
        self.loop, self.communicator = setting.loop, communicator
        self.recorder = setting.recorder
        self.place = communicator.place
        self.n_workers = communicator.n_ranks
        self.nodes = nodes
        self.all_nodes = [*communicator.nodes, *nodes]
        self.decodes = choice.down is not None
        parts = [part for bucket in backwards(buckets) for part in cut(bucket, len(nodes))]
        ranks = [worker.rank for worker in communicator.workers]
        self.codec = Codec(setting, ranks, choice, parts, Served, vector)
        self._locks = [simpy.Resource(setting.loop.env) for _ in nodes]
        self._exchanges: dict[tuple[int, int], _Exchange] = {}
        self._schedules: dict[tuple[bool, tuple[float, ...]], Schedule] = {}
        self._means: dict[tuple[int, int], _Mean] = {}

    # ------------------------------------------------------------ as a carrier

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        seconds = 0.0
        for piece in self._pieces(index):
            nbytes = sum(self.codec.nbytes(step, piece, self.place[worker.rank]))
            seconds += self.codec.seconds.encode(worker, self.codec.pieces[piece].n, nbytes)
        return seconds

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        seconds = 0.0
        for piece in self._pieces(index):
            down, n = self.codec.pieces[piece].down, self.codec.pieces[piece].n
            if down is not None:
                nbytes = self.codec.answer_nbytes(step, piece)
                seconds += self.codec.seconds.decode(worker, down, n, nbytes)
        return seconds

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        first = self.codec.pieces[index * len(self.nodes)]
        if any(each is not None and each.expected_nbytes(1) is None for each in (first.compressor, first.down)):
            env, pieces = self.loop.env, self._pieces(index)
            return env.all_of([env.process(self._push_pull(worker, step, p, s)) for s, p in enumerate(pieces)])
        exchange = self._exchange(step, index)
        exchange.n_missing -= 1
        if exchange.n_missing == 0:
            del self._exchanges[step, index]
        self.loop.join(exchange.push, self.place[worker.rank])
        return self.loop.join(exchange.pull, self.place[worker.rank])

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        return self.codec.mean(step)

    def _pieces(self, index: int) -> range:
        """Return the pieces of a bucket, one per server."""
        return range(index * len(self.nodes), (index + 1) * len(self.nodes))

    # ------------------------------------------------------------ known sizes

    def _exchange(self, step: int, index: int) -> _Exchange:
        if (step, index) not in self._exchanges:
            pieces = self._pieces(index)
            up = tuple(sum(self.codec.nbytes(step, piece, 0)) for piece in pieces)
            down = tuple(self.codec.answer_nbytes(step, piece) for piece in pieces)
            push, pull = self._collective(up, pull=False), self._collective(down, pull=True)
            exchange = self._exchanges[step, index] = _Exchange(push, pull, self.n_workers)
            for server, piece in enumerate(pieces):
                self.loop.env.process(self._answer(exchange, piece, server))
        return self._exchanges[step, index]

    def _collective(self, sizes: tuple[float, ...], *, pull: bool) -> int:
        """Prepare that all workers push their shards of these `sizes` to the servers, or pull them."""
        if (pull, sizes) not in self._schedules:
            n_workers, n_servers = self.n_workers, len(sizes)
            worker, server = (each.ravel() for each in np.indices((n_workers, n_servers)))
            ends = (n_workers + server, worker) if pull else (worker, n_workers + server)
            lane = (messages(*ends, server, reduce=False),)
            self._schedules[pull, sizes] = Schedule(n_workers + n_servers, n_servers, (lane,), np.array(sizes))
        return self.loop.collective(self._schedules[pull, sizes], self.all_nodes, sum(sizes))

    def _answer(self, exchange: _Exchange, piece: int, server: int) -> Process:
        rank = self.n_workers + server
        yield self.loop.join(exchange.push, rank)
        yield from self._work(piece, server)
        self.loop.join(exchange.pull, rank)

    def _work(self, piece: int, server: int) -> Process:
        """Decode, average and encode the answer, one piece after the other."""
        seconds = self.codec.seconds.server(self.codec.pieces[piece].n, self.n_workers)
        if seconds > 0.0:
            with self._locks[server].request() as turn:
                yield turn
                start = self.loop.now
                yield self.loop.env.timeout(seconds)
            self.recorder.background(f"server {server}", f"mean of piece {piece}", start, self.loop.now)

    # ------------------------------------------------------------ sizes that depend on values

    def _push_pull(self, worker: Worker, step: int, piece: int, server: int) -> Process:
        nbytes = sum(self.codec.nbytes(step, piece, self.place[worker.rank]))
        yield self.loop.send(worker.node, self.nodes[server], nbytes)
        mean = self._means.setdefault((step, piece), _Mean(self.loop.env.event()))
        mean.n_arrived += 1
        if mean.n_arrived == self.n_workers:
            del self._means[step, piece]
            self.loop.env.process(self._average(mean, piece, server))
        yield mean.ready
        yield self.loop.send(self.nodes[server], worker.node, self.codec.answer_nbytes(step, piece))

    def _average(self, mean: _Mean, piece: int, server: int) -> Process:
        yield from self._work(piece, server)
        mean.ready.succeed()
