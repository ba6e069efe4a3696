"""Synchronous parameter servers that take time: threads, each of which handles one request after the other.

The model is MXNet's (``src/kvstore/kvstore_dist.h``, ``kvstore_dist_server.h``) on ps-lite (``include/ps/kv_app.h``).
A tensor goes from a device to the memory of its machine, and from there to the servers. A server copies the first push
of its part into a buffer, adds each further one, updates the stored parameters when all have come, and acknowledges the
pushes. When all servers have, the worker asks for the result, which a server copies into every answer; the worker's
machine copies the answers together and hands them to the device. Each of these steps takes a whole part, or tensor, and
waits for the one before: what is not cut up does not overlap with itself. Requests queue for a server's thread while
the network goes on with others. What a request costs is memory traffic over the bandwidth of one core, or of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import simpy

from ddlsim.arguments import Count, checked, number, quantity
from ddlsim.collectives import Schedule
from ddlsim.collectives.push_pull import inside
from ddlsim.runtime.carrier import Dense, Way
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.worker import Process, Worker, all_of
from ddlsim.units import si

#: over the bytes of a tensor
Passes = Annotated[float, number(0.0, hint=" passes, such as 2")]


@checked
@dataclass(frozen=True)
class ServerWork:
    """What a server does with its part of a tensor, in passes: how often it reads or writes all bytes of the part.

    memory       bytes/s that a thread reads and writes: 10 GB/s, about what STREAM (McCalpin 1995) reaches with one
                 thread on a server of the 2010s
    threads      that handle requests, each those of its tensors, and that copy answers together; a tensor belongs to
                 the one that has had the fewest bytes when it first comes (BytePS: GetThreadID in its server)
    together     bytes/s with which pushes and updates are worked on where several cores share each of them (OpenMP), at
                 most the memory's of a socket, such as "60 GB/s"; None: a thread does them like everything else
    first_push   2: a worker's push is read and written to the buffer
    push         3: the buffer and a further worker's push are read, the sum is written
    update       2: the sum is copied over the parameters; 3: SGD; 5: SGD with momentum (two arrays are read and
                 written, one is read)
    pull         2: the parameters are copied into each answer; 0: they are sent as they lie there
    deliver      2: a worker's machine, in one thread of its own, copies the servers' answers together
    whole_below  bytes; a smaller tensor is not cut up but goes whole to one server, each to the next (MXNet:
                 MXNET_KVSTORE_BIGARRAY_BOUND, a million elements, so "4 MB")
    """

    memory: Annotated[float | str, quantity("bandwidth", "10 GB/s")] = "10 GB/s"
    threads: Count = 1
    together: Annotated[float | str, quantity("bandwidth", "60 GB/s")] | None = None
    first_push: Passes = 2.0
    push: Passes = 3.0
    update: Passes = 2.0
    pull: Passes = 2.0
    deliver: Passes = 2.0
    whole_below: Annotated[float | str, quantity("bytes", "4 MB", zero=True)] = 0.0

    def seconds_per_byte(self, *, summing: bool = False) -> float:
        """Return the s that one pass over a byte takes, where it is `summing` what comes with it."""
        shared = self.together if summing and self.together is not None else self.memory
        return 1.0 / si(shared, "bandwidth")

    def bound(self) -> float:
        """Return the bytes from which on tensors are cut up."""
        return si(self.whole_below, "bytes")


#: MXNet's, until 1.4: a thread of ps-lite and the main thread do everything in turn; SGD with momentum, the default of
#: its examples (src/kvstore/kvstore_dist_server.h)
EARLY_MXNET_SERVERS = ServerWork(update=5.0, whole_below="4 MB")
#: MXNet's from 1.5 on: copies between its arrays, sums and updates run on all cores of a socket (ParallelCopy in
#: src/common/utils.h, EvalBinary_ in src/ndarray/ndarray_function-inl.h); answers are still copied by one thread
MXNET_SERVERS = ServerWork(update=5.0, whole_below="4 MB", together="60 GB/s")
#: BytePS's (byteps/server, 0.2): four threads (BYTEPS_SERVER_ENGINE_THREAD), the first push and the answers are not
#: copied, the sum is copied once; workers update, and find answers where they need them (shared memory). Tensors come
#: in slices of BYTEPS_PARTITION_BYTES, 4 MB: Priority("4 MB", ...)
BYTEPS_SERVERS = ServerWork(threads=4, first_push=0.0, update=2.0, pull=0.0, deliver=0.0)
#: TensorFlow's, in a process with 16 cores: every push is copied out of its message (2: TensorFlow issue 6116) and
#: applied by itself (SGD: 3), on as many threads as there are cores (DefaultNumInterOpThreads of
#: tensorflow/core/common_runtime/process_util.cc, unless inter_op_parallelism_threads says otherwise; at most 8 of them
#: read messages, kGrpcWorkerCacheThreadCount of distributed_runtime/rpc/grpc_worker_cache.cc, which is not modelled).
#: Answers are sent as they lie there (EncodeTensorToByteBuffer of grpc_tensor_coding.cc shares a tensor's memory), and
#: copied out of their messages
TENSORFLOW_SERVERS = ServerWork(threads=16, first_push=5.0, push=5.0, update=0.0, pull=0.0)


@dataclass
class _Part:
    """A server's part of a tensor in one step, and the thread that works on it; ``updated`` when all machines' pushes
    are in the parameters."""

    server: int
    thread: simpy.Resource
    nbytes: float
    updated: simpy.Event
    n_pushed: int = 0


@dataclass
class _Exchange:
    """A tensor on its way: the collectives inside the machines, if any, and how many ranks have not entered yet."""

    tensor: int
    nbytes: float
    parts: list[_Part]
    gather: int | None
    scatter: int | None
    n_missing: int


class _Threads:
    """Threads of a server or a machine, among which tensors are shared out as they first come."""

    def __init__(self, env: simpy.Environment, n: int) -> None:
        self._threads, self._loads = [simpy.Resource(env) for _ in range(n)], [0.0] * n
        self._of: dict[int, int] = {}

    def of(self, tensor: int, nbytes: float) -> simpy.Resource:
        """Return the thread to which a tensor belongs."""
        if tensor not in self._of:
            self._of[tensor] = self._loads.index(min(self._loads))
            self._loads[self._of[tensor]] += nbytes
        return self._threads[self._of[tensor]]


class WorkingServers(Dense):
    """Exchanges dense buckets of the members of a `communicator` through servers at `nodes`.

    memory  node of the memory of each worker's machine: the machine's CPU, or the worker where there is no other
    hosts   the machine of each worker, as in :func:`~ddlsim.collectives.push_pull.push_pull`: given, only the first
            worker of each machine pushes and pulls
    """

    def __init__(
        self, communicator: Communicator, nodes: list[int], work: ServerWork, memory: list[int],
        hosts: list[int] | None = None, *, star: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(communicator)
        n, self._loop = communicator.n_ranks, communicator.setting.loop
        self._recorder = communicator.setting.recorder
        self.work, self.memory, self._nodes = work, memory, nodes
        self._exchanges: dict[tuple[int, int], _Exchange] = {}
        self._servers = [_Threads(self._loop.env, work.threads) for _ in nodes]
        self._machines = {node: _Threads(self._loop.env, work.threads) for node in memory}
        leaders, before, after = inside(hosts, n, 1, star=star)
        self._leaders = set(leaders.tolist())
        self._gather, self._scatter = (Schedule(n, 1, (r,)) if r else None for r in (before, after))
        self._pace, self._summing = work.seconds_per_byte(), work.seconds_per_byte(summing=True)

    @property
    def way(self) -> Way:
        return "process"

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        place = self.communicator.place[worker.rank]
        if (step, index) not in self._exchanges:
            self._exchanges[step, index] = self._begun(index, nbytes)
        exchange = self._exchanges[step, index]
        exchange.n_missing -= 1
        if exchange.n_missing == 0:
            del self._exchanges[step, index]
        if place in self._leaders:
            return self._loop.env.process(self._lead(exchange, place))
        assert exchange.gather is not None
        assert exchange.scatter is not None
        self._loop.join(exchange.gather, place)
        return self._loop.join(exchange.scatter, place)

    def _begun(self, tensor: int, nbytes: float) -> _Exchange:
        n, env = len(self._nodes), self._loop.env
        servers = [tensor % n] if nbytes < self.work.bound() else range(n)
        nbytes_each = nbytes / len(servers)
        parts = [
            _Part(server, self._servers[server].of(tensor, nbytes_each), nbytes_each, env.event()) for server in servers
        ]
        gather, scatter = (
            None if schedule is None else self._loop.collective(schedule, self.communicator.nodes, nbytes)
            for schedule in (self._gather, self._scatter)
        )
        return _Exchange(tensor, nbytes, parts, gather, scatter, self.communicator.n_ranks)

    def _lead(self, exchange: _Exchange, place: int) -> Process:
        """Push the machine's sum, and pull when all servers have acknowledged it."""
        node, memory = self.communicator.nodes[place], self.memory[place]
        if exchange.gather is not None:
            yield self._loop.join(exchange.gather, place)
        if memory != node:
            yield self._loop.send(node, memory, exchange.nbytes)
        for half in (self._push, self._pull):
            yield all_of(self._loop, [self._loop.env.process(half(memory, part)) for part in exchange.parts])
        thread = self._machines[memory].of(exchange.tensor, exchange.nbytes)
        yield from self._worked(thread, self.work.deliver * exchange.nbytes * self._pace)
        if memory != node:
            yield self._loop.send(memory, node, exchange.nbytes)
        if exchange.scatter is not None:
            yield self._loop.join(exchange.scatter, place)

    def _push(self, node: int, part: _Part) -> Process:
        server = self._nodes[part.server]
        yield self._loop.send(node, server, part.nbytes)
        part.n_pushed += 1
        last = part.n_pushed == len(self._leaders)
        passes = self.work.first_push if part.n_pushed == 1 else self.work.push
        yield from self._handle(part, "push", (passes + (self.work.update if last else 0.0)) * self._summing)
        if last:
            part.updated.succeed()
        yield part.updated
        yield self._loop.send(server, node, 0.0)

    def _pull(self, node: int, part: _Part) -> Process:
        server = self._nodes[part.server]
        yield self._loop.send(node, server, 0.0)
        yield from self._handle(part, "pull", self.work.pull * self._pace)
        yield self._loop.send(server, node, part.nbytes)

    def _handle(self, part: _Part, what: str, pace: float) -> Process:
        """Let the part's thread work, so many s per byte of the part."""
        seconds = pace * part.nbytes
        yield from self._worked(part.thread, seconds)
        if seconds > 0.0:
            now = self._loop.now
            self._recorder.background(f"server {part.server}", what, now - seconds, now)

    def _worked(self, thread: simpy.Resource, seconds: float) -> Process:
        """Wait for the thread's turn and let it work; it serves in the order of arrival."""
        if seconds > 0.0:
            with thread.request() as turn:
                yield turn
                yield self._loop.env.timeout(seconds)
