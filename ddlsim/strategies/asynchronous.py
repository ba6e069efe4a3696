"""Asynchronous SGD through parameter servers (Downpour), each of which acts on its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import simpy

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.runtime.servers import (
    ApplyTime,
    Placement,
    apply_seconds,
    check_layers,
    note_lock_step,
    server_nodes,
)
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.staleness import DelayCompensation, Scaling, ScalingChoice, scaled, scaling_named

__all__ = ["AsyncParameterServer"]


@dataclass
class _Server:
    """One shard: applies gradients to its part of the parameters one after the other, first come first served."""

    node: int
    lock: simpy.Resource
    params: Value[Array]
    state: State
    learner: Learner
    scaling: Scaling | None
    compensation: DelayCompensation | None
    version: int = 0
    mean_square: Value[Array] | None = None

    def apply(self, step: Value[Array], backup: Value[Array], staleness: int, n_samples: float) -> None:
        """w <- w - eta f(tau) g, g being this shard's part of a gradient, after `n_samples` samples learned from.

        `backup` is the part of the parameters that the gradient was computed at.
        """
        if self.compensation is not None:
            step, self.mean_square = self.compensation.compensated(step, self.params, backup, self.mean_square)
        step = scaled(step, self.scaling, staleness)
        rate = self.learner.rate(n_samples)
        self.params, self.state = self.learner.update(self.params, step, self.state, rate)
        self.version += 1


@dataclass
class _Pulled:
    """What a worker holds of a shard: its parameters and their version."""

    params: Value[Array]
    version: int


@dataclass
class _Push:
    """A gradient of `n_samples` on its way to the servers; it is an update when every shard has applied its part.

    ``parts`` are what each server gets of it, ``answers`` what comes back; ``pulled`` is what it was computed with,
    then what the worker holds; ``queued`` the time spent in each server's queue, in s.
    """

    parts: list[Parcel]
    n_samples: int
    pulled: list[_Pulled]
    shards_left: int = field(init=False)
    queued: list[float] = field(init=False)
    answers: list[Parcel] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = list(self.parts)
        self.shards_left = len(self.pulled)
        self.queued = [0.0] * len(self.pulled)


@checked
@dataclass(frozen=True)
class AsyncParameterServer:
    """Asynchronous SGD (Downpour, Dean et al. 2012, section 4.1): the server applies each gradient when it
    arrives, w <- w - eta * g_i(w_{t - tau}), and answers with the parameters; nobody waits for anybody.

    Staleness tau is counted per update: the updates applied to the shard between a worker's pull and its push.

    apply_time          s that a server needs for one update of its shard
    accumulate          mini-batches between two exchanges: the worker goes on by itself, w_i <- w_i - eta g, and
                        pushes the sum of its gradients (the paper's n_fetch = n_push, its algorithm 7.1)
    staleness_scaling   "inverse": gradients are divided by tau > 0 (Zhang et al. 2016); ExponentialPenalty(rho):
                        multiplied with rho^tau (Chan and Lane 2014); or an object with a ``factor(staleness)``
    delay_compensation  DelayCompensation(lambda): corrects gradients for their age (Zheng et al. 2017)
    """

    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0
    accumulate: Count = 1
    staleness_scaling: ScalingChoice = None
    delay_compensation: DelayCompensation | None = None

    def __post_init__(self) -> None:
        if self.delay_compensation is not None and self.accumulate > 1:
            raise ConfigError(
                f"AsyncParameterServer: delay_compensation with accumulate = {self.accumulate}: it corrects one "
                "gradient at the pulled parameters, not a sum along the worker's own steps; use accumulate = 1"
            )

    @property
    def label(self) -> str:
        """Number and place of the servers, and what is not plain."""
        parts = [f"{self.servers} {self.placement}"]
        if self.accumulate > 1:
            parts.append(f"every {self.accumulate}")
        if self.staleness_scaling is not None:
            scaling = self.staleness_scaling
            parts.append(scaling if isinstance(scaling, str) else type(scaling).__name__)
        if self.delay_compensation is not None:
            parts.append("delay compensated")
        return f"asynchronous parameter server ({', '.join(parts)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every push is an update."""
        return math.ceil(steps * n_workers / self.accumulate)

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        env = setting.loop.env
        learner = setting.learner
        check_layers("AsyncParameterServer", learner, self.servers)
        nodes = server_nodes(setting.cluster, setting.nodes, self.servers, self.placement)
        parts = [learner.initial[part] for part in learner.parts(self.servers)]
        scaling = scaling_named(self.staleness_scaling)
        servers = [
            _Server(
                node, simpy.Resource(env), params, learner.optimizer_state(params), learner, scaling,
                self.delay_compensation,
            )
            for node, params in zip(nodes, parts, strict=True)
        ]  # fmt: skip
        setting.model = lambda: learner.concatenate([server.params for server in servers])
        wires = Wires(setting, self.servers, owner="AsyncParameterServer")
        note_lock_step(setting)
        for worker in setting.workers:
            env.process(self.work(worker, servers, wires))

    def work(self, worker: Worker, servers: list[_Server], wires: Wires) -> Process:
        """Compute a gradient (or several), push it, pull the parameters, for ever."""
        loop = worker.loop
        pulled = [_Pulled(server.params, server.version) for server in servers]
        while True:
            gradient = latest = yield from worker.gradient()
            n_samples = worker.samples_per_step
            for _ in range(self.accumulate - 1):
                yield from worker.optimizer_step()
                worker.params = worker.params - worker.learner.rate(worker.stop.n_samples) * latest
                worker.end_step()
                latest = yield from worker.gradient()
                gradient, n_samples = gradient + latest, n_samples + worker.samples_per_step
            push = _Push([wires.gradient(worker, gradient, i) for i in range(len(servers))], n_samples, pulled)
            yield from worker.compute(sum(part.seconds for part in push.parts), "encode")
            start = loop.now
            shards = [loop.env.process(self._push_pull(worker, s, i, push, wires)) for i, s in enumerate(servers)]
            yield from worker.block(loop.env.all_of(shards), "its parameter servers")
            worker.book(start, start + max(push.queued), "push and pull")
            yield from worker.compute(sum(answer.seconds for answer in push.answers), "decode")
            worker.params = worker.learner.concatenate([each.params for each in pulled])
            worker.end_step()

    def _push_pull(self, worker: Worker, server: _Server, shard: int, push: _Push, wires: Wires) -> Process:
        """Push one shard and pull it back."""
        loop, pulled, part = worker.loop, push.pulled[shard], push.parts[shard]
        yield loop.send(worker.node, server.node, part.sizes[0])
        arrived = loop.now
        with server.lock.request() as turn:
            yield turn
            begin = loop.now
            push.queued[shard] = begin - arrived
            if (seconds := apply_seconds(self) + wires.server_seconds(shard)) > 0.0:
                yield loop.env.timeout(seconds)
            staleness = server.version - pulled.version
            worker.recorder.staleness.append(staleness)
            server.apply(part.value, pulled.params, staleness, worker.stop.n_samples)
            answer = push.answers[shard] = wires.answer(worker, server.params, shard)
            pulled.params, pulled.version = answer.value, server.version
            push.shards_left -= 1
            if push.shards_left == 0:
                worker.stop.updated(push.n_samples)
        worker.recorder.background(f"server {shard}", f"update from {worker.name}", begin, loop.now)
        yield loop.send(server.node, worker.node, answer.sizes[0])
