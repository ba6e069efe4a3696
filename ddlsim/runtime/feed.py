"""Input of workers: reads from storage and caches, decoding on processors, copies to devices.

A batch passes through stages, each of which serves one request at a time, those with lower batch numbers first:
operations of the storage (shared by all its readers), the answers to a reader (a connection is ordered), a machine's
SSD, its processors, the link to a device. Bytes between nodes are messages on the run's network, where they compete
with those of gradients. A reader requests ``prefetch`` batches ahead: it takes the oldest, and then requests another.
So with stages of s_1, ..., s_k seconds and c of computing, a step takes in the long run

    max(c, s_1, ..., s_k, (s_1 + ... + s_k) / prefetch)        and their sum with prefetch = 0
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import simpy

from ddlsim.cluster import Cluster
from ddlsim.runtime.loop import Loop, after
from ddlsim.units import si
from ddlsim.workload.input import Input, hit_rate

#: bytes of a request, about the length of an NFS READ call (RFC 1813, with the headers of RPC, RFC 5531)
REQUEST_NBYTES = 128.0
Steps = Generator[simpy.Event, object, None]


class Mix:
    """Sources of a machine's samples, as shares: the storage (`remote`), the memory of other machines (`peers`), its
    SSD (`ssd`), and its own memory for the rest; and the share that still needs preparation."""

    def __init__(self, input: Input, decoded: float, machines: int, epoch: int) -> None:
        self.peers = self.ssd = ready = cached = 0.0
        self.peer_nbytes = self.ssd_nbytes = input.stored_nbytes
        self.ssd_rate = 1.0
        for cache in input.levels:
            nbytes = decoded if cache.holds == "decoded" else input.stored_nbytes
            assert input.n_samples is not None  # set by Input
            room = min(1.0, cache.nbytes / (input.n_samples * nbytes))
            if cache.partitioned:
                hits = hit_rate("minio", min(1.0, machines * room), 1, epoch)
                self.peers, self.peer_nbytes = hits * (1.0 - 1.0 / machines), nbytes
            else:
                hits = hit_rate(cache.policy, room, machines, epoch)
            more = max(hits - cached, 0.0)  # samples in a nearer cache are usually in further ones, too
            if cache.on == "ssd":
                self.ssd, self.ssd_nbytes = self.ssd + more, nbytes
                self.ssd_rate = si(cache.read or 0.0, "bandwidth")
            ready += more if cache.holds == "decoded" else 0.0
            cached = max(cached, hits)
        self.remote = 0.0 if input.storage is None else 1.0 - cached
        self.unprepared = 1.0 - ready


class Line:
    """A server for one request at a time, each of known duration, in order of batch numbers over all readers.

    Several jobs that share a network, each with its own loop, can use it. A job that waits while another is served has
    an event at the end of that service, so no loop runs past the start of the next one. A later job's batches are
    numbered from the one in service at its first request; otherwise it would be served exclusively.
    """

    def __init__(self) -> None:
        self._until, self._n, self._batch = -math.inf, 0, 0
        self._first: dict[Loop, int] = {}
        self._serving: Loop | None = None
        self._waiting: list[tuple[int, int, float, Loop, simpy.Event]] = []

    def served(self, loop: Loop, batch: int, seconds: float) -> simpy.Event:
        """Queue a request for batch number `batch`; return the event of its end, `seconds` after its service begins."""
        event = loop.env.event()
        self._n += 1
        batch += self._first.setdefault(loop, self._batch)
        heapq.heappush(self._waiting, (batch, self._n, seconds, loop, event))
        self._look(loop)
        return event

    def _look(self, loop: Loop, _: simpy.Event | None = None) -> None:
        """Begin the next service if the line is free; check again at its end if a request of this loop waits."""
        if self._waiting and self._until <= loop.now:
            self._batch, __, seconds, self._serving, event = heapq.heappop(self._waiting)
            self._until = loop.now + seconds
            self._at_end(self._serving, event)
        if self._serving is not loop and any(waiting[3] is loop for waiting in self._waiting):
            self._at_end(loop, loop.env.event())

    def _at_end(self, loop: Loop, event: simpy.Event) -> None:
        after(event, functools.partial(self._look, loop))
        loop.trigger_at(event, self._until)


@dataclass
class Reader:
    """A worker's path to its batches, as nodes of the cluster, and its open requests, oldest first.

    answers, copies  of the storage and to the device, sent one after the other
    """

    node: int
    memory: int
    answers: simpy.Resource
    copies: simpy.Resource
    asked: deque[simpy.Event] = field(default_factory=deque)
    n_batches: int = 0
    n_samples: int = 0


class Feed:
    """The input of all workers of a run.

    nodes        of the workers, and of the memory of their machines
    input_shape  shape of a sample of the model
    first_epoch  number of the first epoch, which determines cache hits; 0: those of late epochs throughout
    """

    def __init__(
        self, input: Input, loop: Loop, cluster: Cluster, nodes: Sequence[int], memory: Sequence[int],
        input_shape: tuple[int, ...], first_epoch: int,
    ) -> None:  # fmt: skip
        self.input, self.loop, self.first_epoch = input, loop, first_epoch
        self.decoded = input.decoded_nbytes(input_shape)
        in_turn = functools.partial(simpy.Resource, loop.env)
        self.readers = [Reader(*pair, in_turn(), in_turn()) for pair in zip(nodes, memory, strict=True)]
        self.machines = list(dict.fromkeys(memory))
        lines = loop.network.engine.lines  # shared by all jobs on the network
        self.cores = {node: lines.setdefault(("cores", node), Line()) for node in self.machines}
        self.ssds = {node: lines.setdefault(("ssd", node), Line()) for node in self.machines}
        self.storage = -1 if input.storage is None else cluster.node(input.storage)
        self.operations = lines.setdefault(("operations", self.storage), Line())
        self.operation = 0.0 if self.storage < 0 else cluster.operation_seconds(self.storage)
        self.preparing = si(input.prep_seconds, "time") / input.cpu_workers
        self._mixes: dict[int, Mix] = {}

    def take(self, rank: int, n_samples: int) -> simpy.Event | None:
        """Let a worker take its next batch, of `n_samples`; return the event it waits for, None if it need not wait."""
        reader = self.readers[rank]
        while len(reader.asked) < max(self.input.prefetch, 1):
            self._ask(reader, n_samples)
        batch = reader.asked.popleft()
        if batch.triggered:
            if self.input.prefetch:
                self._ask(reader, n_samples)
            return None
        if self.input.prefetch:
            after(batch, lambda _: self._ask(reader, n_samples))
        return batch

    def mix(self, n_before: int) -> Mix:
        """Return the sources of a worker's next samples, after it has requested `n_before` ones."""
        epoch = self.first_epoch
        if epoch and self.input.n_samples is not None:
            epoch += n_before * len(self.readers) // self.input.n_samples
        if epoch not in self._mixes:
            self._mixes[epoch] = Mix(self.input, self.decoded, len(self.machines), epoch)
        return self._mixes[epoch]

    # ------------------------------------------------------------ stages

    def _ask(self, reader: Reader, n_samples: int) -> None:
        there = self.loop.env.event()
        reader.asked.append(there)
        mix = self.mix(reader.n_samples)
        self.loop.env.process(self._bring(reader, reader.n_batches, mix, n_samples, there))
        reader.n_batches += 1
        reader.n_samples += n_samples

    def _bring(self, reader: Reader, batch: int, mix: Mix, n_samples: int, there: simpy.Event) -> Steps:
        """Move a reader's batch number `batch` through all stages."""
        env, loop = self.loop.env, self.loop
        parts: list[simpy.Event] = []
        if mix.remote > 0.0 and self.storage != reader.memory:
            parts.append(env.process(self._read(reader, batch, mix.remote * n_samples)))
        if mix.peers > 0.0:
            nbytes = mix.peers * n_samples * mix.peer_nbytes / (len(self.machines) - 1)
            parts += [loop.send(peer, reader.memory, nbytes) for peer in self.machines if peer != reader.memory]
        if mix.ssd > 0.0:
            seconds = mix.ssd * n_samples * mix.ssd_nbytes / mix.ssd_rate
            parts.append(self.ssds[reader.memory].served(loop, batch, seconds))
        if parts:
            yield env.all_of(parts)
        seconds = mix.unprepared * n_samples * self.preparing
        if seconds > 0.0:
            yield self.cores[reader.memory].served(loop, batch, seconds)
        if reader.node != reader.memory:
            yield from self._send(reader.copies, reader.memory, reader.node, n_samples * self.decoded)
        there.succeed()

    def _read(self, reader: Reader, batch: int, n_samples: float) -> Steps:
        """Read samples from the storage."""
        yield self.loop.send(reader.memory, self.storage, REQUEST_NBYTES)
        if self.operation > 0.0:
            yield self.operations.served(self.loop, batch, n_samples / self.input.read_samples * self.operation)
        yield from self._send(reader.answers, self.storage, reader.memory, n_samples * self.input.stored_nbytes)

    def _send(self, turns: simpy.Resource, source: int, target: int, nbytes: float) -> Steps:
        """Send a message after those before it in `turns` have arrived."""
        with turns.request() as turn:
            yield turn
            yield self.loop.send(source, target, nbytes)
