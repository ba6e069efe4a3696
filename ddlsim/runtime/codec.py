"""Compressed gradients in synchronous runs: what is compressed by itself, its bytes, its seconds, its values.

Every bucket (and with several parameter servers, every server's part of it) is a *piece*: a contiguous part of
the flat gradient, compressed by itself with a state of its own on every worker. Where the clock is that of
another model than the one that learns, the gradient of the learning model is one piece for the values, and the
buckets of the other model are the pieces for bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ddlsim.compression.choice import Compression, Tensors, fitted
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.cost import decode_launches, decode_traffic, encode_launches, encode_traffic, sorting
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import ABSENT, Array, Learner, Value
from ddlsim.runtime.averaging import Averaging, Encoded, Outcome, diverging
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker
from ddlsim.streams import stream
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import Model, tensor_shapes
from ddlsim.workload.precision import FP32_NBYTES


def chosen(setting: Setting, *, servers: bool) -> Compression:
    """Return the compression of a run that compresses, after checks that do not depend on the strategy."""
    choice = setting.compression
    assert choice is not None
    if setting.compresses:
        return choice
    setting.compresses = True
    estimate = "their memory traffic" + (" on the workers; the servers' work is free" if servers else "")
    time = "as given" if choice.given is not None else f"that of {estimate}{_selection(choice)}"
    setting.notes.append(f"compression: {choice.label}; the time to encode and decode is {time}")
    for compressor in (choice.compressor, *([choice.down] if choice.down is not None else [])):
        if setting.learner.task is None and compressor.expected_nbytes(1) is None:
            raise ConfigError(
                f"compression = {title(compressor)}: the size of what it sends depends on values, and the run has "
                "none; give it training=ddlsim.Training(...), or a compressor of known size such as TopK"
            )
    return choice


def _selection(choice: Compression) -> str:
    """Return how the k largest elements are found, in words; nothing where none are."""
    if not choice.compressor.traits.selection:
        return ""
    how = "sorting, as frameworks did up to 2021" if choice.cost == "sort" else "radix selection"
    return f"; the largest elements are found by {how} (cost = {choice.cost or 'radix'!r})"


def one_model(setting: Setting) -> bool:
    """Return whether the clock is that of the model that learns (or nothing learns)."""
    task = setting.learner.task
    return task is None or task.network.model.layers == _clock_model(setting).layers


def _clock_model(setting: Setting) -> Model:
    """Return the whole model that takes the time."""
    return (setting.whole[0] if setting.whole else setting.workers[0].workload).model


def rounded(nbytes: float) -> int:
    """Return how many float32 elements a gradient of `nbytes` has."""
    return round(nbytes / FP32_NBYTES)


def backwards(buckets: Sequence[Bucket]) -> list[slice]:
    """Return the elements of the flat gradient that buckets hold, which go from its last tensor to the first."""
    parts, end = [], sum(rounded(bucket.nbytes) for bucket in buckets)
    for bucket in buckets:
        start = end - rounded(bucket.nbytes)
        parts.append(slice(start, end))
        end = start
    return parts


def cut(part: slice, n_parts: int) -> list[slice]:
    """Return contiguous parts of a part, sizes differing by one at most: one for each of several servers."""
    n = part.stop - part.start
    bounds = [part.start + i * n // n_parts for i in range(n_parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


def known_nbytes(compressor: AnyCompressor, n: int, step: int) -> tuple[float, ...] | None:
    """Return the bytes of each round's message at encode number `step`, or None if they depend on values."""
    sizes = compressor.expected_nbytes(n, step)
    return None if sizes is None else tuple(float(size) for size in sizes)


@dataclass(frozen=True, eq=False)
class Piece:
    """n elements that a worker compresses by itself (in the model of the clock), with their compressors."""

    n: int
    compressor: AnyCompressor
    down: AnyCompressor | None


@dataclass(frozen=True)
class Seconds:
    """What encoding and decoding take: as given, or their memory traffic over the device's bandwidth, or launches."""

    choice: Compression

    def encode(self, worker: Worker, n: int, nbytes: float) -> float:
        """Return what a worker needs to encode n elements to `nbytes`, all rounds."""
        return encoding(self.choice, worker.workload, n, nbytes)

    def decode(self, worker: Worker, compressor: AnyCompressor, n: int, nbytes: float, n_payloads: int = 1) -> float:
        """Return what a worker needs to decode payloads of `nbytes` in all to a mean of n elements."""
        if self.choice.given is not None:
            return self.choice.given.decode_seconds(n, n_payloads)
        traffic = decode_traffic(compressor.traits, n, nbytes, n_payloads)
        return _kernels(worker.workload, traffic, decode_launches(compressor.traits, n_payloads))

    def server(self, n: int, n_payloads: int) -> float:
        """Return what a server needs to decode payloads of n elements each, and to encode the answer."""
        cost = self.choice.given
        if cost is None:  # nobody knows its memory
            return 0.0
        return cost.decode_seconds(n, n_payloads) + (cost.encode_seconds(n) if self.choice.down is not None else 0.0)


def encoding(choice: Compression, workload: Workload, n: int, nbytes: float) -> float:
    """Return the s that a worker with this workload needs to encode n elements to `nbytes`, all rounds."""
    if choice.given is not None:
        return choice.given.encode_seconds(n)
    traits, seconds = choice.compressor.traits, 0.0
    if choice.cost == "sort":
        seconds, traits = sorting(traits, n)
    return seconds + _kernels(workload, encode_traffic(traits, n, nbytes), encode_launches(traits))


def _kernels(workload: Workload, traffic: float, launches: int) -> float:
    """Return the s of kernels that move `traffic` bytes between them: launches are hidden behind long ones only."""
    return max(traffic / workload.memory_bandwidth, launches * workload.launch_time)


@dataclass
class _Unit:
    """Values of a part of the learning model's gradient, `before` being the outcome of its last exchange."""

    part: slice
    averaging: Averaging
    before: Value[Outcome]


@dataclass
class _Step:
    encoded: dict[tuple[int, int], Value[Encoded]] = field(default_factory=dict)
    outcome: dict[int, Value[Outcome]] = field(default_factory=dict)
    nbytes: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)


class Codec:
    """The pieces of what some workers exchange step after step, and their values.

    ranks      of the workers
    parts      elements of each piece, of the clock's model
    averaging  makes what computes the values of a piece, from its compressors
    vector     what is encoded, of a step and a worker's place among the ranks
    tensors    (name, shape) of those of the clock's model that it consists of, all if nothing is given
    """

    def __init__(
        self, setting: Setting, ranks: Sequence[int], choice: Compression, parts: Sequence[slice],
        averaging: Callable[[AnyCompressor, AnyCompressor | None], Averaging],
        vector: Callable[[int, int], Value[Array]], tensors: Tensors | None = None,
    ) -> None:  # fmt: skip
        self.choice = choice
        self.ranks = ranks
        self.seconds = Seconds(choice)
        self.learner: Learner = setting.learner
        self.seed = setting.seed
        self.n_workers = len(ranks)
        self.vector = vector
        timed = tensor_shapes(_clock_model(setting)) if tensors is None else tensors
        self.pieces = [Piece(part.stop - part.start, *self._fitted(timed, part)) for part in parts]
        self.one_model = one_model(setting)
        self._steps: dict[int, _Step] = {}
        self._units: list[_Unit] = []
        task = self.learner.task
        if task is not None:
            if not self.one_model:
                setting.notes.append(
                    f"compression: the gradient of {task.network.model.name} is compressed as one; bytes and seconds "
                    f"are those of the buckets of {_clock_model(setting).name}"
                )
                parts = [slice(0, task.network.n_params)]
            learned = timed if self.one_model else tensor_shapes(task.network.model)
            self._units = [self._unit(part, averaging(*self._fitted(learned, part))) for part in parts]

    def _fitted(
        self, tensors: Tensors, part: slice
    ) -> tuple[AnyCompressor, AnyCompressor | None]:
        down = self.choice.down
        return fitted(self.choice.compressor, tensors, part), None if down is None else fitted(down, tensors, part)

    def _unit(self, part: slice, averaging: Averaging) -> _Unit:
        n = part.stop - part.start
        return _Unit(part, averaging, self.learner.plane.constant(averaging.start(n, self.n_workers, self.seed)))

    # ------------------------------------------------------------ bytes

    def nbytes(self, step: int, piece: int, place: int) -> tuple[float, ...]:
        """Return the bytes of a worker's messages for a piece, one per round."""
        known = known_nbytes(self.pieces[piece].compressor, self.pieces[piece].n, step)
        if known is not None:
            return known
        sizes = self._at(step).nbytes
        if (piece, place) not in sizes:
            unit = piece if self.one_model else 0
            message = self._encoded(step, unit, place)
            size: float = self.learner.scalar(lambda: _payload_nbytes(message.read()))
            sizes[piece, place] = (size * self._share(piece),)
        return sizes[piece, place]

    def answer_nbytes(self, step: int, piece: int) -> float:
        """Return the bytes of the server's answer to each worker."""
        down, n = self.pieces[piece].down, self.pieces[piece].n
        if down is None:
            sizes = known_nbytes(self.pieces[piece].compressor, n, step)
            sparse = self.choice.compressor.traits.sparse_answer and sizes is not None
            return 2.0 * sizes[-1] if sparse and sizes is not None else FP32_NBYTES * n
        known = known_nbytes(down, n, step)
        if known is not None:
            return sum(known)
        outcome = self._outcome(step, piece if self.one_model else 0)
        size: float = self.learner.scalar(lambda: outcome.read().answer)
        return size * self._share(piece)

    def _share(self, piece: int) -> float:
        """Return how large a piece is, in units of what its values are computed for."""
        part = self._units[piece if self.one_model else 0].part
        return float(self.pieces[piece].n / max(part.stop - part.start, 1))

    # ------------------------------------------------------------ values

    def mean(self, step: int) -> Value[Array]:
        """Return the gradient that every worker ends a step with; statistics of batches are not compressed."""
        if not self._units:
            return ABSENT
        outcomes = [self._outcome(step, unit) for unit in range(len(self._units))]
        for unit, outcome in zip(self._units, outcomes, strict=True):
            unit.before = outcome
        self._at(step).encoded.clear()  # all sizes that anybody will ask for are known
        forwards = sorted(range(len(outcomes)), key=lambda i: self._units[i].part.start)
        joined: Value[Array] = self.learner.plane.apply(_joined, *[outcomes[i] for i in forwards])
        return joined.carrying(*[self.vector(step, place) for place in range(self.n_workers)])

    def _at(self, step: int) -> _Step:
        if step not in self._steps:
            self._steps[step] = _Step()
            self._steps.pop(step - 2, None)  # all have what came of it, or they could not be so far
        return self._steps[step]

    def _encoded(self, step: int, unit: int, place: int) -> Value[Encoded]:
        made = self._at(step).encoded
        if (unit, place) not in made:
            this = self._units[unit]

            def encode(vector: Array, before: Outcome) -> Encoded:
                part = np.asarray(vector[this.part], np.float32)
                with diverging(f"worker {self.ranks[place]} cannot compress what it sends in step {step}"):
                    return this.averaging.encode(part, before.states[place], self._stream(place, step, unit))

            made[unit, place] = self.learner.plane.apply(encode, self.vector(step, place), this.before)
        return made[unit, place]

    def _outcome(self, step: int, unit: int) -> Value[Outcome]:
        made = self._at(step).outcome
        if unit not in made:
            this = self._units[unit]

            def finish(before: Outcome, *encoded: Encoded) -> Outcome:
                rngs = [self._stream(place, step, unit) for place in range(self.n_workers + 1)]
                with diverging(f"the mean of step {step} cannot be compressed"):
                    return this.averaging.finish(encoded, before, rngs)

            messages = [self._encoded(step, unit, place) for place in range(self.n_workers)]
            made[unit] = self.learner.plane.apply(finish, this.before, *messages)
        return made[unit]

    def _stream(self, place: int, step: int, unit: int) -> np.random.Generator:
        """Return the random numbers of a worker; beyond the last place, those of the server."""
        rank = self.ranks[place] if place < self.n_workers else len(self.ranks)
        return stream(self.seed, rank, f"compression {step} {unit}")


def _payload_nbytes(encoded: Encoded) -> float:
    return float(encoded[0].nbytes)


def _joined(*outcomes: Outcome) -> Array:
    return outcomes[0].mean if len(outcomes) == 1 else np.concatenate([outcome.mean for outcome in outcomes])
