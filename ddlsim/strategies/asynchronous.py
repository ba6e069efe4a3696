"""Asynchronous SGD through parameter servers (Downpour)."""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.strategies.checks import quantity
from ddlsim.strategies.servers import check_servers, server_nodes
from ddlsim.strategies.setting import Setting
from ddlsim.strategies.worker import Process, Worker

__all__ = ["AsyncParameterServer"]


@dataclass
class _Server:
    """One shard: applies gradients to its part of the parameters one after the other, first come first served."""

    node: int
    lock: simpy.Resource
    part: slice
    params: Value[Array]
    state: State
    learner: Learner
    version: int = 0

    def apply(self, gradient: Value[Array], n_samples: float) -> None:
        """w <- w - eta * g, for this shard's part of the gradient, after `n_samples` samples learned from."""
        rate = self.learner.rate(n_samples)
        self.params, self.state = self.learner.update(self.params, gradient[self.part], self.state, rate)
        self.version += 1


@dataclass
class _Push:
    """A gradient on its way to the servers; it is an update when every shard has applied its part.

    ``versions`` are those of the shards that it was computed with, then those pulled with ``pulled``; ``queued``
    is the time spent in each server's queue, in s.
    """

    n_shards: int
    gradient: Value[Array]
    versions: list[int]
    pulled: list[Value[Array]]
    shards_left: int = field(init=False)
    queued: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.shards_left = self.n_shards
        self.queued = [0.0] * self.n_shards


@dataclass(frozen=True)
class AsyncParameterServer:
    """Asynchronous SGD (Downpour, Dean et al. 2012, section 4.1): the server applies each gradient when it
    arrives, w <- w - eta * g_i(w_{t - tau}), and answers with the parameters; nobody waits for anybody.

    ``apply_time`` is what a server needs for one update of its shard. Staleness tau is counted per update: the
    updates applied to the shard between a worker's pull and its push.
    """

    servers: int = 1
    placement: str = "own"
    apply_time: float | str = 0.0

    def __post_init__(self) -> None:
        check_servers("AsyncParameterServer", self.servers, self.placement)
        self._apply()

    def _apply(self) -> float:
        return quantity(self.apply_time, "time", "AsyncParameterServer: apply_time", "1 ms", zero=True)

    @property
    def label(self) -> str:
        """Number and place of the servers."""
        return f"asynchronous parameter server ({self.servers} {self.placement})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every gradient is an update."""
        return steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        env = setting.loop.env
        nodes = server_nodes(setting.cluster, setting.nodes, self.servers, self.placement)
        learner = setting.learner
        parts = [(part, learner.initial[part]) for part in learner.parts(self.servers)]
        servers = [
            _Server(node, simpy.Resource(env), part, params, learner.optimizer_state(params), learner)
            for node, (part, params) in zip(nodes, parts, strict=True)
        ]
        setting.model = lambda: learner.concatenate([server.params for server in servers])
        for worker in setting.workers:
            env.process(self.work(worker, servers))

    def work(self, worker: Worker, servers: list[_Server]) -> Process:
        """Compute a gradient, push it, pull the parameters, for ever."""
        loop = worker.loop
        pulled = [server.version for server in servers]
        while True:
            gradient = yield from worker.gradient()
            start = loop.now
            push = _Push(len(servers), gradient, pulled, [server.params for server in servers])
            shards = [loop.env.process(self._push_pull(worker, s, i, push)) for i, s in enumerate(servers)]
            yield from worker.block(loop.env.all_of(shards), "its parameter servers")
            pulled = push.versions
            worker.params = worker.learner.concatenate(push.pulled)
            worker.book(start, start + max(push.queued), "push and pull")
            worker.end_step()

    def _push_pull(self, worker: Worker, server: _Server, shard: int, push: _Push) -> Process:
        """Push one shard and pull it back."""
        loop = worker.loop
        nbytes = worker.workload.gradient_nbytes / self.servers
        yield loop.send(worker.node, server.node, nbytes)
        arrived = loop.now
        with server.lock.request() as turn:
            yield turn
            begin = loop.now
            push.queued[shard] = begin - arrived
            if self._apply() > 0.0:
                yield loop.env.timeout(self._apply())
            worker.recorder.staleness.append(server.version - push.versions[shard])
            server.apply(push.gradient, worker.stop.n_samples)
            push.versions[shard] = server.version
            push.pulled[shard] = server.params
            push.shards_left -= 1
            if push.shards_left == 0:
                worker.stop.updated(worker.samples_per_step)
        worker.recorder.background(f"server {shard}", f"update from {worker.name}", begin, loop.now)
        yield loop.send(server.node, worker.node, nbytes)
