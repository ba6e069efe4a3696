"""Compression: pieces, and their bytes, seconds and values, independent of the route.

Every bucket (and with several parameter servers, every server's part of it) is a *piece*: a contiguous part of the flat
gradient, compressed separately with its own state on every worker. If the timed model is not the trained one, the
gradient of the trained model is one piece for the values, and the buckets of the timed model are the pieces for bytes
and seconds.

A message from one party to another (:class:`Messages`) is a sum with one member. Gradients are compressed directly.
For models (parameters that a server answers with, or that peers send each other) the difference to the receiver's copy
is compressed, which the sender remembers: whatever a message leaves out is part of the next difference, so nothing is
lost (Tang et al. 2018, "Communication compression for decentralized training", arXiv:1803.06443, DCD-PSGD; Yan et al.
2020, "Dual-Way Gradient Sparsification for Asynchronous Distributed Deep Learning", ICPP, model difference tracking).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ddlsim.compression.choice import Compression, Tensors, fitted
from ddlsim.compression.contract import AnyCompressor, Payload, Vector
from ddlsim.compression.cost import decode_launches, decode_traffic, encode_launches, encode_traffic, sorting
from ddlsim.compression.exchange import exchange, finish, hierarchical_exchange, shard_sizes, title
from ddlsim.compression.payloads import mean
from ddlsim.errors import ConfigError
from ddlsim.learning import ABSENT, Array, Learner, Value
from ddlsim.learning.learner import DivergedError
from ddlsim.runtime.context import RunContext, Worker
from ddlsim.streams import stream
from ddlsim.workload.buckets import Bucket as Bucket
from ddlsim.workload.buckets import rounded
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import tensor_shapes
from ddlsim.workload.precision import FP32_NBYTES

#: (message, next state) of a sender; between machines, its vector before the machine's workers exchange
Encoded: TypeAlias = tuple[Payload | Vector, object]


def chosen(context: RunContext, *, servers: bool) -> Compression:
    """Return a run's compression after the checks that do not depend on the strategy."""
    choice = context.compression
    assert choice is not None
    if context.compresses:
        return choice
    context.compresses = True
    estimate = "their memory traffic" + (" on the workers; the work of servers takes no time" if servers else "")
    time = "as given" if choice.fixed_cost is not None else f"that of {estimate}{_selection(choice)}"
    context.notes.append(f"compression: {choice.label}; time to encode and decode: {time}")
    for compressor in (choice.compressor, *([choice.down] if choice.down is not None else [])):
        if context.learner.task is None and compressor.expected_nbytes(1) is None:
            raise ConfigError(
                f"compression = {title(compressor)}: the size of its output depends on the input values, which a "
                "timing-only run does not have; set training=ddlsim.Training(...), or use a compressor with a known "
                "output size, such as TopK"
            )
    return choice


def _selection(choice: Compression) -> str:
    """Return a description of how the k largest elements are selected; empty if none are."""
    if not choice.compressor.traits.selection:
        return ""
    how = "sorting, as frameworks did up to 2021" if choice.cost == "sort" else "radix selection"
    return f"; the largest elements are found by {how} (cost = {choice.cost or 'radix'!r})"


# ---------------------------------------------------------------- parts of a flat vector


def cut(part: slice, n_parts: int) -> list[slice]:
    """Divide a slice into contiguous slices, one per server, whose sizes differ by at most one."""
    n = part.stop - part.start
    bounds = [part.start + i * n // n_parts for i in range(n_parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


# ---------------------------------------------------------------- seconds


@dataclass(frozen=True)
class Seconds:
    """Seconds of encoding and decoding: set by the user, or memory traffic over bandwidth, or kernel launches."""

    choice: Compression

    def encode(self, workload: Workload, n: int, nbytes: float) -> float:
        """Return the seconds of a worker with this workload to encode n elements to `nbytes`, all rounds."""
        if self.choice.fixed_cost is not None:
            return self.choice.fixed_cost.encode_seconds(n)
        traits, seconds = self.choice.compressor.traits, 0.0
        if self.choice.cost == "sort":
            seconds, traits = sorting(traits, n)
        return seconds + _kernels(workload, encode_traffic(traits, n, nbytes), encode_launches(traits))

    def decode(
        self, workload: Workload, compressor: AnyCompressor, n: int, nbytes: float, n_payloads: int = 1
    ) -> float:
        """Return the seconds of a worker to decode payloads of `nbytes` in total to a mean of n elements."""
        if self.choice.fixed_cost is not None:
            return self.choice.fixed_cost.decode_seconds(n, n_payloads)
        traffic = decode_traffic(compressor.traits, n, nbytes, n_payloads)
        return _kernels(workload, traffic, decode_launches(compressor.traits, n_payloads))

    def server(self, n: int, n_payloads: int) -> float:
        """Return the seconds of a server to decode payloads of n elements each, and to encode the answer."""
        cost = self.choice.fixed_cost
        if cost is None:  # the memory bandwidth of servers is unknown
            return 0.0
        return cost.decode_seconds(n, n_payloads) + (cost.encode_seconds(n) if self.choice.down is not None else 0.0)


def _kernels(workload: Workload, traffic: float, launches: int) -> float:
    """Return the seconds of kernels that move `traffic` bytes in all; long kernels hide the next launch."""
    return max(traffic / workload.memory_bandwidth, launches * workload.launch_time)


# ---------------------------------------------------------------- values


@contextmanager
def _diverging(what: str) -> Iterator[None]:
    """Report a vector that cannot be compressed (not finite, or beyond half precision) as a divergence of the run."""
    try:
        yield
    except ConfigError as error:
        raise DivergedError(f"diverged: {what}: {error}") from None


@dataclass(frozen=True)
class Outcome:
    """mean    (n,) the vector that every receiver ends with
    states  every sender's state
    server  the parameter server's state
    answer  bytes of the server's message to each worker
    """

    mean: Vector
    states: Sequence[object]
    server: object = None
    answer: float = 0.0


@dataclass(frozen=True)
class Coding:
    """Encoding by `n_senders` and combination of their messages into one vector, as pure functions.

    order    senders in the order in which a tree merges them; or machine by machine, `n_local` on each, for exchanges
             that are dense inside machines and compressed between them
             (:func:`~ddlsim.compression.hierarchical_exchange`): a worker then compresses its shard of the machine's
             mean, so the machine's workers exchange before anything is encoded
    served   every sender is alone with a server, which averages what it decodes and answers with `down` (None: dense).
             With error feedback on both sides this is DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957, algorithm 1)
    """

    compressor: AnyCompressor
    n_senders: int
    order: Sequence[int] = ()
    n_local: int = 0
    served: bool = False
    down: AnyCompressor | None = None

    def start(self, n: int, seed: int) -> Outcome:
        """Return the states before the first exchange of n elements."""
        sizes = shard_sizes(n, self.n_local) if self.n_local else [n]
        local = {sender: place % len(sizes) for place, sender in enumerate(self.order or range(self.n_senders))}
        states = [self.compressor.init(sizes[local[sender]], seed) for sender in range(self.n_senders)]
        server = self.down.init(n, seed) if self.served and self.down is not None else None
        return Outcome(np.zeros(n, np.float32), states, server)

    def encode(self, vector: Vector, state: object, rng: np.random.Generator) -> Encoded:
        """Return a sender's message, and its state after it."""
        if self.n_local:
            return vector, state
        message: Encoded = self.compressor.encode(vector, state, rng)
        return message

    def finish(self, encoded: Sequence[Encoded], before: Outcome, rng: Callable[[int], np.random.Generator]) -> Outcome:
        """Return the outcome of all senders' messages; `rng` is the stream of each of them, then the server's."""
        if self.served:
            alone = [finish(self.compressor, [message]) for message in encoded]
            average, states = mean([outcome.mean for outcome in alone]), [outcome.states[0] for outcome in alone]
            if self.down is None:
                return Outcome(average, states, answer=FP32_NBYTES * average.size)
            done = exchange(self.down, [average], [before.server], [rng(self.n_senders)])
            return Outcome(done.mean, states, done.states[0], float(done.nbytes.sum()))
        order = self.order or range(len(encoded))
        ordered = [encoded[sender] for sender in order]
        if self.n_local:
            vectors, before_each = zip(*ordered, strict=True)
            streams = [rng(sender) for sender in order]
            within = hierarchical_exchange(self.compressor, vectors, before_each, streams, self.n_local)
            average, after = within.mean, within.states
        else:
            done = finish(self.compressor, ordered)
            average, after = done.mean, done.states
        by_sender = dict(zip(order, after, strict=True))
        return Outcome(average, [by_sender[sender] for sender in range(len(encoded))])


@dataclass
class _Unit:
    """Values of a part of the trained model's vector; `before` is the outcome of its last exchange."""

    part: slice
    coding: Coding
    before: Value[Outcome]


@dataclass
class _Step:
    encoded: dict[tuple[int, int], Value[Encoded]] = field(default_factory=dict)
    outcome: dict[int, Value[Outcome]] = field(default_factory=dict)
    nbytes: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Piece:
    """n elements of the timed model that a sender compresses together, and their compressors."""

    n: int
    compressor: AnyCompressor
    down: AnyCompressor | None


class Codec:
    """Encoding by some senders in each step: bytes, seconds and values.

    ranks    of the senders
    parts    elements of each piece, in the timed model
    vector   (step, place of a sender among the ranks) -> the vector to encode
    order, n_local, served
             how messages are combined into one vector (:class:`Coding`)
    tensors  (name, shape) of the timed model's tensors in the vector; by default all
    learned  the trained model's tensors, and the part of its vector in the (single) piece; None: whole vectors
    name     of the direction, for streams of random numbers; `number` is that of its first piece
    """

    def __init__(
        self,
        context: RunContext,
        ranks: Sequence[int],
        choice: Compression,
        parts: Sequence[slice],
        vector: Callable[[int, int], Value[Array]],
        *,
        order: Sequence[int] = (),
        n_local: int = 0,
        served: bool = False,
        tensors: Tensors | None = None,
        learned: tuple[Tensors, slice] | None = None,
        name: str = "",
        number: int = 0,
    ) -> None:
        self.choice, self.ranks, self.vector, self.name, self.number = choice, ranks, vector, name, number
        self.seconds = Seconds(choice)
        self.learner: Learner = context.learner
        self.seed, self._shows_plan = context.seed, context.shows_plan
        self.n_senders = len(ranks)
        timed = tensor_shapes(context.timed_model) if tensors is None else tensors
        self.pieces = [Piece(part.stop - part.start, *self._fitted(timed, part)) for part in parts]
        self.by_piece = learned is not None or context.learns_timed_model
        self._steps: dict[int, _Step] = {}
        self._units: list[_Unit] = []
        task = self.learner.task
        if task is None:
            return
        if not self.by_piece:
            trained_model, timed_model = task.network.model.name, context.timed_model.name
            context.notes.append(
                f"compression: the gradient of {trained_model} is compressed as a single vector, but message sizes and "
                f"times are those of the buckets of {timed_model}"
            )
            parts = [slice(0, task.network.n_params)]
        here = timed if self.by_piece else tensor_shapes(task.network.model)
        if learned is not None:
            here, parts = learned[0], [learned[1]]
        for part in parts:
            compressor, down = self._fitted(here, part)
            coding = Coding(compressor, self.n_senders, order, n_local, served, down)
            taken = part if learned is None else slice(0, part.stop - part.start)
            before = self.learner.plane.constant(coding.start(part.stop - part.start, self.seed))
            self._units.append(_Unit(taken, coding, before))

    def _fitted(self, tensors: Tensors, part: slice) -> tuple[AnyCompressor, AnyCompressor | None]:
        down = self.choice.down
        return fitted(self.choice.compressor, tensors, part), None if down is None else fitted(down, tensors, part)

    # ------------------------------------------------------------ bytes

    @property
    def sizes_known(self) -> bool:
        """Whether sizes are independent of values."""
        compressors = (self.pieces[0].compressor, self.pieces[0].down)
        return all(compressor is None or compressor.expected_nbytes(1) is not None for compressor in compressors)

    @property
    def value_notes(self) -> list[str]:
        """Notes for plans about sizes that depend on values."""
        name = title(self.choice.compressor)
        return (
            []
            if self.sizes_known
            else [f"the message sizes of {name} depend on values; here they are those of dense messages"]
        )

    def nbytes(self, step: int, piece: int, place: int) -> tuple[float, ...]:
        """Return the bytes of a sender's messages for a piece, one per round. When only a plan is shown, sizes that
        depend on values are replaced by uncompressed ones."""
        expected = self.pieces[piece].compressor.expected_nbytes(self.pieces[piece].n, step)
        if expected is not None:
            return tuple(float(size) for size in expected)
        if self._shows_plan:
            return (FP32_NBYTES * self.pieces[piece].n,)
        sizes = self._at(step).nbytes
        if (piece, place) not in sizes:
            message = self._encoded(step, piece if self.by_piece else 0, place)
            size: float = self.learner.decision(lambda: _payload_nbytes(message.read()))
            sizes[piece, place] = (size * self._share(piece),)
        return sizes[piece, place]

    def answer_nbytes(self, step: int, piece: int) -> float:
        """Return the bytes of the server's answer to each worker."""
        down, n = self.pieces[piece].down, self.pieces[piece].n
        if down is None:
            sizes = self.pieces[piece].compressor.expected_nbytes(n, step)
            sparse = self.choice.compressor.traits.sparse_answer and sizes is not None
            return 2.0 * sizes[-1] if sparse and sizes is not None else FP32_NBYTES * n
        expected = down.expected_nbytes(n, step)
        if expected is not None:
            return float(sum(expected))
        if self._shows_plan:
            return FP32_NBYTES * n
        outcome = self._outcome(step, piece if self.by_piece else 0)
        size: float = self.learner.decision(lambda: outcome.read().answer)
        return size * self._share(piece)

    def _share(self, piece: int) -> float:
        """Return the size of a piece relative to the unit for which values are computed."""
        part = self._units[piece if self.by_piece else 0].part
        return float(self.pieces[piece].n / max(part.stop - part.start, 1))

    # ------------------------------------------------------------ values

    def mean(self, step: int) -> Value[Array]:
        """Return the vector that all members hold after a step; batch statistics are not compressed."""
        if not self._units:
            return ABSENT
        outcomes = [self._outcome(step, unit) for unit in range(len(self._units))]
        for unit, outcome in zip(self._units, outcomes, strict=True):
            unit.before = outcome
        self._at(step).encoded.clear()  # no more sizes will be requested
        forwards = sorted(range(len(outcomes)), key=lambda i: self._units[i].part.start)
        joined: Value[Array] = self.learner.plane.apply(_joined, *[outcomes[i] for i in forwards])
        return joined.with_statistics_of(*[self.vector(step, place) for place in range(self.n_senders)])

    def _at(self, step: int) -> _Step:
        if step not in self._steps:
            self._steps[step] = _Step()
            self._steps.pop(step - 2, None)  # all members have used its outcome
        return self._steps[step]

    def _encoded(self, step: int, unit: int, place: int) -> Value[Encoded]:
        encoded = self._at(step).encoded
        if (unit, place) not in encoded:
            this = self._units[unit]

            def encode(vector: Array, before: Outcome) -> Encoded:
                part = np.asarray(vector[this.part], np.float32)
                with _diverging(f"worker {self.ranks[place]} cannot compress what it sends {self.name}in step {step}"):
                    return this.coding.encode(part, before.states[place], self._stream(place, step, unit))

            encoded[unit, place] = self.learner.plane.apply(encode, self.vector(step, place), this.before)
        return encoded[unit, place]

    def _outcome(self, step: int, unit: int) -> Value[Outcome]:
        outcomes = self._at(step).outcome
        if unit not in outcomes:
            this = self._units[unit]

            def finished(before: Outcome, *encoded: Encoded) -> Outcome:
                with _diverging(f"what is sent {self.name}in step {step} cannot be decoded or compressed again"):
                    return this.coding.finish(encoded, before, lambda place: self._stream(place, step, unit))

            messages = [self._encoded(step, unit, place) for place in range(self.n_senders)]
            outcomes[unit] = self.learner.plane.apply(finished, this.before, *messages)
        return outcomes[unit]

    def _stream(self, place: int, step: int, unit: int) -> np.random.Generator:
        """Return the random stream of a sender; beyond the last place, that of the server."""
        rank = self.ranks[place] if place < self.n_senders else len(self.ranks)
        return stream(self.seed, rank, f"compression {self.name}{step} {self.number + unit}")


def _payload_nbytes(encoded: Encoded) -> float:
    return float(encoded[0].nbytes)


def _joined(*outcomes: Outcome) -> Array:
    return outcomes[0].mean if len(outcomes) == 1 else np.concatenate([outcome.mean for outcome in outcomes])


# ---------------------------------------------------------------- messages from one party to another


@dataclass(frozen=True, eq=False)
class Message:
    """A message, and the cost of encoding it.

    value    value that the receiver has after decoding
    sizes    size of each part in bytes
    seconds  time in s that a worker takes to encode a message to servers, or to decode a message from servers
    """

    value: Value[Array]
    sizes: list[float]
    seconds: float = 0.0


@dataclass
class _Sender:
    """One party's messages to another: their codec, the number of the next one, and the receiver's copy of a model."""

    codec: Codec
    held: Value[Array]
    vector: Value[Array] = ABSENT
    step: int = 0

    def send(self, vector: Value[Array], *, model: bool) -> tuple[Value[Array], float]:
        """Encode a vector; return the received vector, or the receiver's new copy of a model, and the bytes."""
        self.vector = vector - self.held if model else vector
        nbytes = sum(self.codec.nbytes(self.step, 0, 0))
        arrives = self.codec.mean(self.step)
        self.step += 1
        if not model:
            return arrives, nbytes
        self.held = self.held + arrives
        return self.held, nbytes


class Messages:
    """Messages between workers and servers, or among workers. They are compressed if the run uses compression.

    n_parts  number of servers, each of which stores an equal share of the model
    owner    name of the strategy, for error messages
    peers    True: workers send their models directly to each other; False: workers and servers communicate
    models   what workers send to servers. True: their models; False: gradients. Servers always reply with models

    Raises ConfigError if the compression cannot be used with this strategy or with this number of servers.
    """

    def __init__(
        self, context: RunContext, n_parts: int = 1, *, owner: str, peers: bool = False, models: bool = False
    ) -> None:
        self.context, self.n_parts, self.learner = context, n_parts, context.learner
        self.parts = context.learner.parts(n_parts)
        self.choice: Compression | None = None
        if context.compression is None:
            return
        choice = self.choice = chosen(context, servers=not peers)
        self._check(owner, choice, peers=peers, models=models or peers)
        self.seconds = Seconds(choice)
        workload, task = context.workers[0].workload, context.learner.task
        self._clock = cut(slice(0, rounded(workload.gradient_nbytes)), n_parts)
        self._shapes = tensor_shapes(workload.model), () if task is None else tensor_shapes(task.network.model)
        self._senders: dict[tuple[str, int, int], _Sender] = {}
        for part in self._clock:  # errors are raised before the run
            fitted(choice.compressor, self._shapes[0], part)
        if not context.learns_timed_model and task is not None:
            trained, timed = task.network.model.name, workload.model.name
            context.notes.append(
                f"compression: the gradient of {trained} is compressed, but message sizes and times are those of "
                f"{timed}"
            )

    def _check(self, owner: str, choice: Compression, *, peers: bool, models: bool) -> None:
        if peers and choice.down is not None:
            raise ConfigError(
                f"compression: down = {title(choice.down)} has no effect with {owner}, whose workers send "
                "each other models in both directions; leave 'down' out"
            )
        for differences in (choice.compressor if models else None, choice.down):
            if differences is None or not differences.traits.no_feedback:
                continue
            where = "down = " if differences is choice.down else ""
            raise ConfigError(
                f"compression: {where}{title(differences)}: cannot be used with {owner}, which sends differences from "
                f"the receiver's copy, a form of error feedback ({differences.traits.no_feedback}); use a compressor "
                "such as TopK"
            )

    def gradient(self, worker: Worker, vector: Value[Array], part: int | None = None) -> Message:
        """Return the message that contains a worker's gradient, or one `part` of it."""
        return self._sent("up", worker, vector, part, model=False)

    def model(self, worker: Worker, params: Value[Array], to: int | None = None) -> Message:
        """Return the message that contains a worker's model, addressed to a server or to the worker with rank `to`."""
        return self._sent("up" if to is None else f"to {to}", worker, params, None, model=True)

    def answer(self, worker: Worker, params: Value[Array], part: int | None = None) -> Message:
        """Return a server's reply to a worker, which contains `params` or one `part` of them."""
        return self._sent("down", worker, params, part, model=True)

    def server_seconds(self, part: int = 0) -> float:
        """Return the time in s that a server takes to process a push, excluding the update."""
        return 0.0 if self.choice is None else self.seconds.server(self._n(part), 1)

    def decode_seconds(self, worker: Worker, message: Message) -> float:
        """Return the time in s that a worker takes to decode a peer's message."""
        if self.choice is None:
            return 0.0
        decode, compressor = self.seconds.decode, self.choice.compressor
        return sum(decode(worker.workload, compressor, self._n(i), size) for i, size in enumerate(message.sizes))

    def first_message_cost(self, worker: Worker, part: int = 0, *, down: bool = False) -> tuple[float, float]:
        """Return the size in bytes of the first message with a `part`, and the time in s to encode or decode it.

        down  True: the message from the server; False: the message to the server
        """
        choice, n = self.choice, self._n(part)
        assert choice is not None
        compressor = choice.down if down else choice.compressor
        if compressor is None:
            return FP32_NBYTES * n, 0.0
        nbytes = sum(self._sender("down" if down else "up", worker.rank, part, compressor).codec.nbytes(0, 0, 0))
        if down:
            return nbytes, self.seconds.decode(worker.workload, compressor, n, nbytes)
        return nbytes, self.seconds.encode(worker.workload, n, nbytes)

    @property
    def value_notes(self) -> list[str]:
        """Notes for plans about message sizes that depend on values."""
        assert self.choice is not None
        return self._sender("up", 0, 0, self.choice.compressor).codec.value_notes

    def _n(self, part: int) -> int:
        n: int = self._clock[part].stop - self._clock[part].start
        return n

    def _sent(self, name: str, worker: Worker, vector: Value[Array], part: int | None, *, model: bool) -> Message:
        choice, parts, down = self.choice, range(self.n_parts) if part is None else (part,), name == "down"
        compressor = None if choice is None else choice.down if down else choice.compressor
        if compressor is None:
            dense = worker.workload.gradient_nbytes / self.n_parts
            piece = vector if part is None or model or self.n_parts == 1 else vector[self.parts[part]]
            return Message(piece, [dense if choice is None else FP32_NBYTES * self._n(i) for i in parts])
        values, sizes, seconds = [], [], 0.0
        for i in parts:
            sender = self._sender(name, worker.rank, i, compressor)
            piece = vector if part is not None and model else vector[self.parts[i]]
            value, nbytes = sender.send(piece, model=model)
            values.append(value)
            sizes.append(nbytes)
            if down:
                seconds += self.seconds.decode(worker.workload, compressor, self._n(i), nbytes)
            else:
                seconds += self.seconds.encode(worker.workload, self._n(i), nbytes)
        return Message(self.learner.concatenate(values), sizes, seconds)

    def _sender(self, name: str, rank: int, part: int, compressor: AnyCompressor) -> _Sender:
        key = name, rank, part
        if key not in self._senders:
            assert self.choice is not None
            codec = Codec(
                self.context,
                [rank],
                dataclasses.replace(self.choice, compressor=compressor, down=None),
                [self._clock[part]],
                lambda step, place: self._senders[key].vector,
                tensors=self._shapes[0],
                learned=(self._shapes[1], self.parts[part]),
                name=f"{name} ",
                number=part,
            )
            self._senders[key] = _Sender(codec, self.learner.initial[self.parts[part]])
        return self._senders[key]
