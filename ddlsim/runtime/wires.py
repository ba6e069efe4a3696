"""Messages from one party to another: between workers and servers, or among peers. Dense, or compressed.

Gradients are compressed as they are. Of models (parameters that a server answers with, or that peers send each other)
the difference to what the receiver holds is compressed, which the sender remembers: what a message leaves out is part
of the next difference, so nothing is lost (Tang et al. 2018, "Communication compression for decentralized training",
arXiv:1803.06443, DCD-PSGD; Yan et al. 2020, "Dual-Way Gradient Sparsification for Asynchronous Distributed Deep
Learning", ICPP, model difference tracking).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddlsim.compression.choice import Compression, fitted
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import Exchanged, exchange, title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.runtime.averaging import diverging
from ddlsim.runtime.codec import Seconds, chosen, cut, known_nbytes, one_model, rounded
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.streams import stream
from ddlsim.workload.model import tensor_shapes
from ddlsim.workload.precision import FP32_NBYTES


@dataclass(frozen=True, eq=False)
class Parcel:
    """What is sent at once: what arrives as `value`, the bytes of each part, the s that its compressing takes a worker
    (to encode what goes up, to decode what comes down)."""

    value: Value[Array]
    sizes: list[float]
    seconds: float = 0.0


@dataclass
class _Way:
    """One direction between two parties: a compressor, its memory, and how often it has encoded.

    n       elements in the model of the clock
    n_here  elements in the model that learns; 0: nothing learns
    held    what the receiver holds, of models
    """

    name: str
    rank: int
    part: int
    n: int
    n_here: int
    sizer: AnyCompressor
    compressor: AnyCompressor
    learner: Learner
    seed: int
    held: Value[Array]
    step: int = 0
    last: Value[object] | None = field(default=None)

    def send_model(self, params: Value[Array]) -> tuple[Value[Array], float]:
        """Return what the receiver holds of a model after this message, and its bytes."""
        difference, nbytes = self.send(params - self.held)
        self.held = self.held + difference
        return self.held, nbytes

    def send(self, vector: Value[Array]) -> tuple[Value[Array], float]:
        """Return what arrives of a vector that is encoded now, and its bytes; its statistics arrive as they are."""
        step, self.step = self.step, self.step + 1
        plane, learns = self.learner.plane, self.n_here > 0
        if self.last is None and learns:
            self.last = plane.constant(self.compressor.init(self.n_here, self.seed))

        def encoded(values: Array, state: object) -> Exchanged[object]:
            with diverging(f"worker {self.rank}: what is sent {self.name} cannot be compressed at step {step}"):
                rng = stream(self.seed, self.rank, f"compression {self.name} {step} {self.part}")
                return exchange(self.compressor, [np.asarray(values, np.float32)], [state], [rng])

        done = plane.apply(encoded, vector, self.last) if self.last is not None else None
        size = known_nbytes(self.sizer, self.n, step)
        if size is not None:
            nbytes = sum(size)
        else:
            assert done is not None  # checked before the run: such compressors need values
            nbytes = self.learner.scalar(lambda: float(done.read().nbytes.sum())) * self.n / self.n_here
        if done is None:
            return vector, nbytes
        self.last = plane.apply(_state, done)
        return plane.apply(_mean, done).carrying(vector), nbytes


def _state(done: Exchanged[object]) -> object:
    return done.states[0]


def _mean(done: Exchanged[object]) -> Array:
    return done.mean


class Wires:
    """What carries vectors, cut in `n_parts` equal ones, between workers and as many servers, or among peers.

    owner   who sends, for messages
    peers   models go from worker to worker; otherwise gradients to servers, or with ``models`` models, and models back

    Raises ConfigError for compression that does not fit.
    """

    def __init__(
        self, setting: Setting, n_parts: int = 1, *, owner: str, peers: bool = False, models: bool = False
    ) -> None:
        self.n_parts = n_parts
        self.learner = setting.learner
        self.seed = setting.seed
        self.choice: Compression | None = None
        self.parts = setting.learner.parts(n_parts)
        if setting.compression is not None:
            self._compress(setting, owner, peers=peers, models=models or peers)

    def _compress(self, setting: Setting, owner: str, *, peers: bool, models: bool) -> None:
        choice = self.choice = chosen(setting, servers=not peers)
        if peers and choice.down is not None:
            raise ConfigError(
                f"compression: down = {title(choice.down)} has no effect with {owner}: its workers send each other "
                "models, there and back the same way; leave it out"
            )
        for differences in (choice.compressor if models else None, choice.down):
            if differences is None or not differences.traits.no_feedback:
                continue
            field = "down = " if differences is choice.down else ""
            raise ConfigError(
                f"compression: {field}{title(differences)}: {owner} sends the difference to what "
                "the receiver holds, with what was left out before; that is error feedback already, and this "
                f"compressor must not have more of it ({differences.traits.no_feedback}); use one such as TopK"
            )
        self.seconds = Seconds(choice)
        workload, task = setting.workers[0].workload, setting.learner.task
        clock = cut(slice(0, rounded(workload.gradient_nbytes)), self.n_parts)
        self.n = [part.stop - part.start for part in clock]
        self._clock = tensor_shapes(workload.model), clock
        self._here = (tensor_shapes(task.network.model) if task is not None else ()), self.parts
        self._ways: dict[tuple[str, int, int], _Way] = {}
        for part in range(self.n_parts):  # what does not fit is said before the run
            fitted(choice.compressor, self._clock[0], clock[part])
        if not one_model(setting) and task is not None:
            setting.notes.append(
                f"compression: the gradient of {task.network.model.name} is compressed; bytes and seconds are those "
                f"of {workload.model.name}"
            )

    # ------------------------------------------------------------ what travels

    def gradient(self, worker: Worker, vector: Value[Array], part: int | None = None, name: str = "up") -> Parcel:
        """Return what arrives of a worker's gradient, whole, or its `part`; ways are told apart by their `name`."""
        return self._packed(name, worker, vector, part, model=False, down=False)

    def model(self, worker: Worker, params: Value[Array], part: int | None = None, name: str = "up") -> Parcel:
        """Return what the receiver of a worker's model holds then, of all of it or of a `part`."""
        return self._packed(name, worker, params, part, model=True, down=False)

    def answer(self, worker: Worker, params: Value[Array], part: int | None = None) -> Parcel:
        """Return what a worker holds after a server's answer: `params`, all of them or a server's `part`."""
        return self._packed("down", worker, params, part, model=True, down=True)

    def server_seconds(self, part: int = 0) -> float:
        """Return the s that a server needs for a push, beside its update."""
        return 0.0 if self.choice is None else self.seconds.server(self.n[part], 1)

    def decode_seconds(self, worker: Worker, parcel: Parcel) -> float:
        """Return the s that a worker needs to decode what a peer has sent."""
        if self.choice is None:
            return 0.0
        sizes = zip(self.n, parcel.sizes, strict=True)
        return sum(self.seconds.decode(worker, self.choice.compressor, n, nbytes) for n, nbytes in sizes)

    # ------------------------------------------------------------ how

    def _packed(
        self, name: str, worker: Worker, vector: Value[Array], part: int | None, *, model: bool, down: bool
    ) -> Parcel:
        choice, parts = self.choice, range(self.n_parts) if part is None else (part,)
        compressor = None if choice is None else choice.down if down else choice.compressor
        if compressor is None:
            n = len(parts)
            dense = worker.workload.gradient_nbytes / self.n_parts
            cut_up = vector if part is None or model or self.n_parts == 1 else vector[self.parts[part]]
            return Parcel(cut_up, [dense] * n if choice is None else [FP32_NBYTES * self.n[i] for i in parts])
        values, sizes, seconds = [], [], 0.0
        for i in parts:
            way = self._way(name, worker.rank, i, compressor)
            piece = vector if part is not None and model else vector[self.parts[i]]
            value, nbytes = way.send_model(piece) if model else way.send(piece)
            values.append(value)
            sizes.append(nbytes)
            if down:
                seconds += self.seconds.decode(worker, compressor, self.n[i], nbytes)
            else:
                seconds += self.seconds.encode(worker, self.n[i], nbytes)
        return Parcel(self.learner.concatenate(values), sizes, seconds)

    def _way(self, name: str, rank: int, part: int, compressor: AnyCompressor) -> _Way:
        if (name, rank, part) not in self._ways:
            (clock, clock_parts), (here, _) = self._clock, self._here
            sizer = fitted(compressor, clock, clock_parts[part])
            learner, mine = self.learner, self.parts[part]
            coder = compressor if learner.task is None else fitted(compressor, here, mine)
            self._ways[name, rank, part] = _Way(
                name, rank, part, self.n[part], mine.stop - mine.start, sizer, coder, learner, self.seed,
                learner.initial[mine],
            )  # fmt: skip
        return self._ways[name, rank, part]
