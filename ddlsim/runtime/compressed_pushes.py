"""What asynchronous workers push to parameter servers and pull from them: dense, or compressed.

Up travels the gradient. Down travel the parameters; compressed, their difference to what that worker holds, which the
server remembers: what an answer leaves out is part of the next difference, so nothing is lost (Yan et al. 2020,
"Dual-Way Gradient Sparsification for Asynchronous Distributed Deep Learning", ICPP, model difference tracking).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ddlsim.compression.choice import Compression, Tensors, fitted
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import Exchange, exchange, title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.runtime.compressed import GRADIENT_NBYTES, Seconds, chosen, cut, known_nbytes, one_model, rounded
from ddlsim.runtime.compressed_values import diverging
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.workload.jitter import stream
from ddlsim.workload.tensors import tensor_shapes

__all__ = ["Message", "Pushes", "pushes_of"]


class Message(NamedTuple):
    """What arrives as `value`, of `nbytes` on the way."""

    value: Value[Array]
    nbytes: float


class Pushes(Protocol):
    """How gradients and parameters travel between asynchronous workers and their servers (shards)."""

    def up(self, worker: Worker, shard: int, gradient: Value[Array]) -> Message:
        """Return what a server gets of its part of a gradient."""

    def down(self, worker: Worker, shard: int, params: Value[Array], held: Value[Array]) -> Message:
        """Return what a worker that holds `held` of a server's parameters, now `params`, holds afterwards."""

    def encode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        """Return the seconds that a worker computes before it pushes these."""

    def decode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        """Return the seconds that a worker computes after it has pulled these."""

    def server_seconds(self, shard: int) -> float:
        """Return the seconds that a server needs for a push, beside its update."""


def pushes_of(setting: Setting, n_servers: int) -> Pushes:
    """Return how the run's gradients and parameters travel, shared out evenly over servers."""
    if setting.compression is None:
        return _Dense(setting.learner.parts(n_servers))
    return _Compressed(setting, n_servers)


@dataclass(frozen=True)
class _Dense:
    parts: list[slice]

    def up(self, worker: Worker, shard: int, gradient: Value[Array]) -> Message:
        return Message(gradient[self.parts[shard]], worker.workload.gradient_nbytes / len(self.parts))

    def down(self, worker: Worker, shard: int, params: Value[Array], held: Value[Array]) -> Message:
        return Message(params, worker.workload.gradient_nbytes / len(self.parts))

    def encode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        return 0.0

    def decode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        return 0.0

    def server_seconds(self, shard: int) -> float:
        return 0.0


@dataclass
class _Way:
    """One direction between a worker and a server: a compressor, its memory, and how often it has encoded.

    n       elements in the model of the clock
    n_here  elements in the model that learns; 0: nothing learns
    """

    name: str
    rank: int
    shard: int
    n: int
    n_here: int
    sizer: AnyCompressor
    compressor: AnyCompressor
    learner: Learner
    seed: int
    step: int = 0
    last: Value[object] | None = field(default=None)

    def send(self, vector: Value[Array]) -> Message:
        """Return what arrives of a vector that is encoded now; its statistics arrive as they are."""
        step, self.step = self.step, self.step + 1
        plane, learns = self.learner.plane, self.n_here > 0
        if self.last is None and learns:
            self.last = plane.constant(self.compressor.init(self.n_here, self.seed))

        def encoded(values: Array, state: object) -> Exchange[object]:
            with diverging(f"worker {self.rank}: what is sent {self.name} cannot be compressed at step {step}"):
                rng = stream(self.seed, self.rank, f"compression {self.name} {step} {self.shard}")
                return exchange(self.compressor, [np.asarray(values, np.float32)], [state], [rng])

        done = plane.apply(encoded, vector, self.last) if self.last is not None else None
        known = known_nbytes(self.sizer, self.n, step)
        if known is not None:
            nbytes = sum(known)
        else:
            assert done is not None  # checked before the run: such compressors need values
            nbytes = self.learner.scalar(lambda: float(done.read().nbytes.sum())) * self.n / self.n_here
        if done is None:
            return Message(vector, nbytes)
        self.last = plane.apply(_state, done)
        return Message(plane.apply(_mean, done).carrying(vector), nbytes)


def _state(done: Exchange[object]) -> object:
    return done.states[0]


def _mean(done: Exchange[object]) -> Array:
    return done.mean


class _Compressed:
    def __init__(self, setting: Setting, n_servers: int) -> None:
        self.choice = chosen(setting, servers=True)
        self._check(self.choice)
        self.learner = setting.learner
        self.seed = setting.seed
        self.seconds = Seconds(self.choice)
        workload, task = setting.workers[0].workload, setting.learner.task
        self.parts = setting.learner.parts(n_servers)
        clock = cut(slice(0, rounded(workload.gradient_nbytes)), n_servers)
        self.n = [part.stop - part.start for part in clock]
        self._clock = (tensor_shapes(workload.model), clock)
        self._here = (tensor_shapes(task.network.model) if task is not None else (), self.parts)
        self._ways: dict[tuple[str, int, int], _Way] = {}
        for shard in range(n_servers):  # what does not fit is said before the run
            self._fitted(self._clock, shard, self.choice.compressor)
        if not one_model(setting) and task is not None:
            setting.notes.append(
                f"compression: the gradient of {task.network.model.name} is compressed; bytes and seconds are those "
                f"of {workload.model.name}"
            )

    @staticmethod
    def _check(choice: Compression) -> None:
        down = choice.down
        if down is not None and down.traits.no_feedback:
            raise ConfigError(
                f"compression: down = {title(down)}: AsyncParameterServer sends the difference to what the worker "
                "holds, with what was left out before; that is error feedback already, and this compressor must not "
                f"have more of it ({down.traits.no_feedback}); use one such as TopK"
            )

    @staticmethod
    def _fitted(where: tuple[Tensors, list[slice]], shard: int, compressor: AnyCompressor) -> AnyCompressor:
        tensors, parts = where
        return fitted(compressor, tensors, parts[shard])

    def _way(self, name: str, rank: int, shard: int, compressor: AnyCompressor) -> _Way:
        if (name, rank, shard) not in self._ways:
            sizer = self._fitted(self._clock, shard, compressor)
            here = compressor if self.learner.task is None else self._fitted(self._here, shard, compressor)
            n_here = self.parts[shard].stop - self.parts[shard].start
            self._ways[name, rank, shard] = _Way(
                name, rank, shard, self.n[shard], n_here, sizer, here, self.learner, self.seed
            )
        return self._ways[name, rank, shard]

    def up(self, worker: Worker, shard: int, gradient: Value[Array]) -> Message:
        return self._way("up", worker.rank, shard, self.choice.compressor).send(gradient[self.parts[shard]])

    def down(self, worker: Worker, shard: int, params: Value[Array], held: Value[Array]) -> Message:
        if self.choice.down is None:
            return Message(params, GRADIENT_NBYTES * self.n[shard])
        difference, nbytes = self._way("down", worker.rank, shard, self.choice.down).send(params - held)
        return Message(held + difference, nbytes)

    def encode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        return sum(self.seconds.encode(worker, n, m.nbytes) for n, m in zip(self.n, messages, strict=True))

    def decode_seconds(self, worker: Worker, messages: list[Message]) -> float:
        down = self.choice.down
        if down is None:
            return 0.0
        return sum(self.seconds.decode(worker, down, n, m.nbytes) for n, m in zip(self.n, messages, strict=True))

    def server_seconds(self, shard: int) -> float:
        return self.seconds.server(self.n[shard], 1)
