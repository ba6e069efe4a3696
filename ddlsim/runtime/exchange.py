"""Exchanges: a route and a codec turn the vectors of a group's members into one vector that all of them receive.

The *codec* (:mod:`ddlsim.runtime.codec`) determines the encoded bytes and the time of encoding; without a codec vectors
are sent uncompressed. The *route* is one of

:class:`CollectiveExchange`  collectives one after the other, each simulated by a schedule or of known time. The
    compressor determines the collectives of its payloads: the fabric's own algorithm over the payload, once per round
    ("all_reduce"); an all-gather of all payloads, with "hierarchical" only between machines, dense inside
    ("all_gather"); every worker counts the votes for 1/N of the signs, then a ring all-gather of the majority
    ("majority_vote"); a binomial tree, up to rank 0 of the order and down again ("gtopk_tree"). Payloads whose sizes
    depend on values are passed round a ring message by message
:class:`ThroughServers`  pushes to synchronous parameter servers, and pulls from them
:class:`InGroups`  dense inside groups, with another route between groups

**Models, round by round** (:class:`Averaging`). Compressing a model itself would lose most of it. Compressing the
difference to a model that all members hold defers the rest to later rounds. So for models the difference to the mean of
the latest completed round (or to the model derived from it) is encoded, and the result is that model plus the mean of
the differences (Basu et al. 2019, Qsparse-local-SGD, arXiv:1906.02367, algorithm 1). Gradients, and other vectors that
are small by themselves, are encoded directly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from ddlsim.collectives import Collective, Schedule, build, messages, reorder, sequence
from ddlsim.collectives.push_pull import inside
from ddlsim.compression.choice import Tensors
from ddlsim.compression.exchange import shard_sizes, title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.plan.plan import KINDS, Plan
from ddlsim.plan.transforms import Service
from ddlsim.runtime.communicator import Communicator, hierarchical
from ddlsim.runtime.context import Computation, Process, RunContext, Worker
from ddlsim.runtime.costs import Phase
from ddlsim.runtime.fabric import Fabric, algorithm_for, algorithm_name, halves_of
from ddlsim.runtime.loop import after
from ddlsim.workload.precision import FP32_NBYTES

if TYPE_CHECKING:
    import simpy

    from ddlsim.runtime.codec import Codec
    from ddlsim.runtime.server_work import ServerWork
    from ddlsim.runtime.servers import Threads

#: how a part is sent: a single collective, simulated by a "schedule" or of "known" time, or a "process"
Route = Literal["schedule", "known", "process"]
#: (step, place of a member) -> its vector
Vectors = Callable[[int, int], Value[Array]]


class Exchange:
    """Base class of exchanges in which the members of a communicator average their vectors, one part at a time.

    what     name under which the time that a worker waits for the exchange is recorded
    codec    encoding of the vectors; None: vectors are sent uncompressed
    decodes  True: workers decode each part when it arrives; False: workers only wait for the last part
    """

    what: str
    codec: Codec | None = None
    decodes = False

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.loop, self.place = communicator.context.loop, communicator.place

    @property
    def route(self) -> Route:
        """How each part is sent: "schedule", "known" or "process"."""
        return "process"

    @property
    def decides(self) -> bool:
        """Whether the result of the exchange determines in which later steps it takes place."""
        return False

    def arrived(self, worker: Worker, step: int) -> bool:
        """Let a worker use the result of a step.

        Return whether the result determines when later exchanges take place.
        """
        return False

    def encode_seconds(self, worker: Worker, step: int, part: int) -> float:
        """Return the time in s that a worker computes after a part is ready and before it is sent."""
        if self.codec is None:
            return 0.0
        place, seconds = self.place[worker.rank], 0.0
        for piece, n in self._encoded(part, place):
            nbytes = sum(self._nbytes(step, piece, place))
            seconds += self.codec.seconds.encode(worker.workload, n, nbytes)
        return seconds

    def decode_seconds(self, worker: Worker, step: int, part: int) -> float:
        """Return the time in s that a worker computes after the mean of a part has arrived."""
        return 0.0

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        """Send several parts of a worker's vector together, and return the event that occurs when their mean arrives.

        nbytes  total uncompressed size of the parts, in bytes
        """
        raise NotImplementedError

    def phases(self, step: int, parts: Sequence[int], nbytes: float) -> tuple[Phase, ...]:
        """Return the phases of the single collective that carries the parts, if its time is known."""
        raise NotImplementedError

    def calls(self, step: int, parts: Sequence[int], nbytes: float, place: int = 0) -> list[Call]:
        """Return the collectives that a member enters one after another to exchange the parts.

        nbytes  total uncompressed size of the parts, in bytes
        place   index of the member
        """
        raise NotImplementedError

    def service(self, step: int, part: int) -> Service:
        """Return the number of bytes that servers receive and send back for an encoded part."""
        raise NotImplementedError

    @property
    def plan_notes(self) -> list[str]:
        """Notes about decisions that a plan does not specify."""
        return [] if self.codec is None else self.codec.value_notes

    def buffer_nbytes(self, part: int, nbytes: float) -> float:
        """Return the number of bytes that a worker copies into the buffer for a part of `nbytes`, in the first step."""
        if self.codec is None:
            return nbytes
        if not self.codec.sizes_known:
            raise ConfigError(
                f"compression: {title(self.codec.choice.compressor)}: the size of its output depends on the input "
                "values, but tensor fusion requires known sizes; use overlap = 'none', 'layer' or 'ddp', or a "
                "compressor such as TopK"
            )
        return sum(sum(self._nbytes(0, piece, 0)) for piece, _ in self._encoded(part, 0))

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        """Return the vector that every worker receives, given the members' vectors in the order of their indices."""
        return self.communicator.context.learner.mean(vectors) if self.codec is None else self.codec.mean(step)

    def _encoded(self, part: int, place: int) -> Sequence[tuple[int, int]]:
        """Return the pieces that a member encodes for a part, each with its number of elements."""
        assert self.codec is not None
        return [(part, self.codec.pieces[part].n)]

    def _nbytes(self, step: int, piece: int, place: int) -> tuple[float, ...]:
        """Return the bytes of a member's messages for a piece, one per round."""
        assert self.codec is not None
        return self.codec.nbytes(step, piece, place)


# ---------------------------------------------------------------- collectives


class Call(NamedTuple):
    """A collective of a `kind` over `nbytes` that a member enters, with an `algorithm` (None: the fabric's) or a
    `schedule`."""

    communicator: Communicator
    kind: str
    nbytes: float
    algorithm: str | Collective | None = None
    schedule: Schedule | None = None

    def planned(self) -> Schedule:
        """Return the schedule of the collective."""
        return self.schedule or self.communicator.schedule(self.nbytes, self.kind, self.algorithm)

    def enter(self, key: Hashable, worker: Worker) -> simpy.Event:
        """Let a member enter the collective now; return the event of its end for this member."""
        if self.schedule is not None:
            return self.communicator.follow(key, worker, self.nbytes, self.planned)
        return self.communicator.enter(key, worker, self.nbytes, self.kind, self.algorithm)


class CollectiveExchange(Exchange):
    """An :class:`Exchange` by collectives of a `kind`: "all_reduce", or "reduce_scatter" if a member needs only its
    shard of the mean; or of another kind, which is not compressed.

    algorithm  of collectives of that kind; by default the fabric's
    schedule   bytes -> the schedule of vectors, instead of an algorithm
    parts      elements of the flat vector that are compressed separately, if the run compresses
    vectors    a member's vector in a step, if it may be compressed
    tensors    (name, shape) of the tensors in the vector; by default all of the model
    like       the exchange of other parts of the same vectors, which shares their values

    Raises ConfigError for compression that does not fit.
    """

    def __init__(
        self,
        communicator: Communicator,
        kind: str = "all_reduce",
        algorithm: str | Collective | None = None,
        *,
        schedule: Callable[[float], Schedule] | None = None,
        parts: Sequence[slice] = (),
        vectors: Vectors | None = None,
        tensors: Tensors | None = None,
        like: CollectiveExchange | None = None,
    ) -> None:
        super().__init__(communicator)
        self.kind, self.algorithm, self._schedule = kind, algorithm, schedule
        self.what = kind.replace("_", "-")
        context = communicator.context
        self.machines: list[list[int]] = []
        self._ring = functools.cache(self._in_ring)
        self._inbox: dict[Hashable, simpy.Event] = {}
        if context.compression is not None and vectors is not None:
            self._encode(context, parts, vectors, tensors, like)
        elif schedule is None:
            communicator.prepare(kind, algorithm)

    def _encode(
        self,
        context: RunContext,
        parts: Sequence[slice],
        vectors: Vectors,
        tensors: Tensors | None,
        like: CollectiveExchange | None,
    ) -> None:
        from ddlsim.runtime.codec import Codec, chosen

        communicator, choice = self.communicator, chosen(context, servers=False)
        compressor, traits = choice.compressor, choice.compressor.traits
        if choice.down is not None:
            raise ConfigError(
                f"compression: down = {title(choice.down)} has no effect with {communicator.owner}, where all "
                "workers receive the mean; leave 'down' out, or use ParameterServer"
            )
        if self.algorithm is not None:
            fabric = communicator.fabric
            self.algorithm = algorithm_for(self.algorithm, context.cluster, communicator.at, fabric.cost, self.kind)
        self.collective, self.n_rounds = traits.collective, traits.n_rounds
        self._sizes_known = compressor.expected_nbytes(1) is not None
        if hierarchical(communicator.fabric.algorithm) and self.collective == "all_gather":
            if not self._sizes_known:
                raise ConfigError(
                    f"{communicator.owner}: algorithm = {communicator.fabric.algorithm!r} with {title(compressor)}: "
                    "the size of its output depends on the input values; use 'ring', or a compressor with a known "
                    "output size, such as TopK"
                )
            assert communicator.nested.size  # raises if groups differ in size
            self.machines = [places.tolist() for places in communicator.groups]
        self.decodes = traits.encode_passes > 0.0 or choice.fixed_cost is not None
        if self.collective != "all_reduce":
            self.what = self.collective.replace("_", " ")
        self._note(context, title(compressor), traits.not_summable)
        if not communicator.simulated:
            self._prepare(title(compressor))
        if like is None:
            order = communicator.order.tolist() if self.collective == "gtopk_tree" else ()
            self.codec = Codec(
                context,
                [worker.rank for worker in communicator.workers],
                choice,
                parts,
                vectors,
                order=[place for places in self.machines for place in places] or order,
                n_local=len(self.machines[0]) if self.machines else 0,
                tensors=tensors,
            )
        elif like.machines != self.machines:
            raise ConfigError(
                f"{communicator.owner}: algorithm = {communicator.fabric.algorithm!r} with "
                f"{title(compressor)}: not supported if stages differ in how their replicas are distributed over "
                "machines; use 'ring'"
            )
        else:
            self.codec = like.codec

    def _prepare(self, name: str) -> None:
        """Check before the run that the cost model covers the collectives that carry payloads."""
        communicator = self.communicator
        if self.collective in ("majority_vote", "gtopk_tree"):
            raise ConfigError(
                f"{communicator.owner}: cost = {communicator.fabric.cost!r} with {name}: no library provides "
                f"the collective {self.collective!r}, so its time is unknown; use cost = 'simulated'"
            )
        for kind in ("reduce_scatter", "all_gather") if self.machines else (self._payload_kind,):
            communicator.prepare(kind, self.algorithm if kind == self.kind else None)

    def _note(self, context: RunContext, name: str, not_summable: str) -> None:
        if self.collective == "all_reduce":
            if self._payload_kind == self.kind:
                return
            text = "with all-reduces: other collectives need its first messages complete"
        else:
            back = "" if self.kind == "reduce_scatter" else ", ring all-gather"
            how = {
                "all_gather": "a ring all-gather",
                "majority_vote": f"a majority vote (shards of bits sent to their counters{back})",
                "gtopk_tree": "a binomial tree that merges on the way",
            }[self.collective]
            algorithm = algorithm_name(self.algorithm or self.communicator.fabric.algorithm)
            text = f"by {how} instead of the {self.kind.replace('_', '-')} {algorithm!r}: {not_summable}"
            if self.machines:
                text = f"dense inside the innermost groups (machines), by {how} between them (HiTopKComm)"
        note = f"compression: {name} travels {text}"
        context.notes += [note] if note not in context.notes else []

    @property
    def _payload_kind(self) -> str:
        """Kind of the collectives of payloads; with several rounds, all-reduces, as earlier ones must be complete."""
        if self.collective != "all_reduce":
            return "all_gather"
        return self.kind if self.n_rounds == 1 else "all_reduce"

    # ------------------------------------------------------------ seconds and bytes

    def decode_seconds(self, worker: Worker, step: int, part: int) -> float:
        if self.codec is None:
            return 0.0
        place = self.place[worker.rank]
        ((_, n),), compressor = self._encoded(part, place), self.codec.pieces[part].compressor
        n_payloads, nbytes = 1, sum(self._nbytes(step, part, place))
        if self.collective == "all_gather":
            n_payloads = len(self.machines) or self.communicator.n_ranks
            nbytes *= n_payloads
        if not self._sizes_known:
            nbytes = self._gathered(step, [part])
        if self.kind == "reduce_scatter":  # only the member's shard
            n, nbytes = n // self.communicator.n_ranks, nbytes / self.communicator.n_ranks
        return self.codec.seconds.decode(worker.workload, compressor, n, nbytes, n_payloads)

    def _encoded(self, part: int, place: int) -> Sequence[tuple[int, int]]:
        assert self.codec is not None
        n = self.codec.pieces[part].n
        return [(part, self._shards((part,))[self._seats[place][1]] if self.machines else n)]

    def _nbytes(self, step: int, piece: int, place: int) -> tuple[float, ...]:
        if not self.machines:
            return super()._nbytes(step, piece, place)
        assert self.codec is not None
        ((_, n),) = self._encoded(piece, place)
        sizes = self.codec.pieces[piece].compressor.expected_nbytes(n, step)
        assert sizes is not None
        return tuple(float(size) for size in sizes)

    def _sizes(self, step: int, parts: Sequence[int], place: int) -> list[float]:
        """Return the bytes of a member's message in each round, for parts that are sent together."""
        return [sum(sizes) for sizes in zip(*(self._nbytes(step, part, place) for part in parts), strict=True)]

    def _gathered(self, step: int, parts: Sequence[int]) -> float:
        """Return the total bytes of all members' payloads."""
        return sum(sum(self._sizes(step, parts, place)) for place in range(self.communicator.n_ranks))

    # ------------------------------------------------------------ the route

    @property
    def route(self) -> Route:
        if self.codec is None:
            return "schedule" if self._schedule is not None or self.communicator.simulated else "known"
        if not self.communicator.simulated:
            return "known" if self.n_rounds == 1 else "process"
        return "schedule" if self.n_rounds == 1 and not self.machines and self._sizes_known else "process"

    def calls(self, step: int, parts: Sequence[int], nbytes: float, place: int = 0) -> list[Call]:
        """Return the collectives that a member enters in turn, for parts with `nbytes` uncompressed bytes."""
        communicator, n = self.communicator, self.communicator.n_ranks
        if self.codec is None:
            schedule = None if self._schedule is None else self._schedule(nbytes)
            return [Call(communicator, self.kind, nbytes, self.algorithm, schedule)]
        sizes = self._sizes(step, parts, place)
        if self.machines:
            machine, local = self._seats[place]
            dense = FP32_NBYTES * sum(self.codec.pieces[part].n for part in parts)
            within = self._within[machine]
            return [
                Call(within, "reduce_scatter", dense, None, self._in_shards("reduce_scatter", parts)),
                Call(self._between[local], "all_gather", len(self.machines) * sizes[0], "ring"),
                Call(within, "all_gather", dense, None, self._in_shards("all_gather", parts)),
            ]
        if self.collective == "all_reduce":
            algorithm = self.algorithm if self._payload_kind == self.kind else None
            return [Call(communicator, self._payload_kind, size, algorithm) for size in sizes]
        if self.collective == "all_gather":
            how = self.algorithm or communicator.fabric.algorithm
            gather = "nccl_ring" if how in ("nccl", "nccl_ring") else "ring"
            return [Call(communicator, "all_gather", n * size, gather) for size in sizes]
        return [Call(communicator, self.kind, sizes[0], None, self._merging)]

    def phases(self, step: int, parts: Sequence[int], nbytes: float) -> tuple[Phase, ...]:
        if self.machines:
            first, between, _ = self.calls(step, parts, nbytes)
            return self.communicator.by_level(
                first.nbytes, np.array(self.machines), Phase("all_gather", (), between.nbytes)
            )
        if (
            self.codec is not None and self.collective == "all_gather" and not self._sizes_known
        ):  # the sum of all sizes is known once the last member enters
            return self.communicator.phases("all_gather", self._gathered(step, parts))
        (call,) = self.calls(step, parts, nbytes)
        return self.communicator.phases(call.kind, call.nbytes, call.algorithm)

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        key = (self, step, *parts)
        if self.route == "known":
            return self.communicator.take(key, lambda: self.phases(step, parts, nbytes))
        if self.route == "schedule":
            (call,) = self.calls(step, parts, nbytes)
            return self.communicator.follow(key, worker, call.nbytes, call.planned)
        if self.codec is not None and not self._sizes_known:
            return self.loop.env.process(self._pass_on(worker, step, parts))
        return self.loop.env.process(self._enter_all(worker, step, parts, nbytes))

    def _enter_all(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> Process:
        for number, call in enumerate(self.calls(step, parts, nbytes, self.place[worker.rank])):
            yield call.enter((self, step, *parts, number), worker)

    @functools.cached_property
    def _merging(self) -> Schedule:
        """The schedule of payloads that are merged on the way: by votes, or along a tree."""
        n, order = self.communicator.n_ranks, self.communicator.order
        if self.collective == "gtopk_tree":
            return reorder(build("binomial_tree", n), order)
        up, down = build("direct", n, kind="reduce_scatter"), build("ring", n, kind="all_gather")
        if self.kind == "reduce_scatter":  # a member keeps the votes that it has counted
            return reorder(up, order)
        return reorder(sequence(up, down, kind="all_reduce"), order)

    # ------------------------------------------------------------ between machines

    @functools.cached_property
    def _seats(self) -> dict[int, tuple[int, int]]:
        """Machine and local rank of each member."""
        return _seats(self.machines)

    @functools.cached_property
    def _within(self) -> list[Communicator]:
        return [self.communicator.part(places, Fabric(rank_order="given")) for places in self.machines]

    @functools.cached_property
    def _between(self) -> list[Communicator]:
        across = zip(*self.machines, strict=True)
        return [self.communicator.part(places, Fabric(rank_order="given")) for places in across]

    def _shards(self, parts: Sequence[int]) -> list[int]:
        """Return the number of elements of the parts that each worker of a machine holds."""
        assert self.codec is not None
        sizes = [shard_sizes(self.codec.pieces[part].n, len(self.machines[0])) for part in parts]
        return np.sum(sizes, axis=0).tolist()  # type: ignore[no-any-return]

    def _in_shards(self, kind: str, parts: Sequence[int]) -> Schedule:
        return self._ring(kind, tuple(self._shards(parts)))

    def _in_ring(self, kind: str, sizes: tuple[int, ...]) -> Schedule:
        direct = self.communicator.levels.algorithms[0] == "direct"
        schedule = build("direct" if direct else "ring", len(sizes), kind=kind)
        equal = sizes[0] == sizes[-1]
        return schedule if equal else dataclasses.replace(schedule, chunk_weight=np.array(sizes, float))

    # ------------------------------------------------------------ payloads whose sizes depend on values

    def _pass_on(self, worker: Worker, step: int, parts: Sequence[int]) -> Process:
        """Ring all-gather, message by message: send the own payload, then forward the received ones."""
        communicator = self.communicator
        order, n = communicator.order.tolist(), communicator.n_ranks
        seat = order.index(self.place[worker.rank])
        right = (seat + 1) % n
        for t in range(n - 1):
            nbytes = sum(self._sizes(step, parts, order[(seat - t) % n]))
            sent = self.loop.send(worker.node, communicator.nodes[order[right]], nbytes)
            arrival = self._mail(step, *parts, t, right)
            after(sent, lambda _, arrival=arrival: arrival.succeed())  # type: ignore[misc]
            yield self.loop.env.all_of([sent, self._mail(step, *parts, t, seat)])
            del self._inbox[step, *parts, t, seat]

    def _mail(self, *key: int) -> simpy.Event:
        if key not in self._inbox:
            self._inbox[key] = self.loop.env.event()
        return self._inbox[key]


def _seats(groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Return the group of each member, and its index in the group."""
    return {place: (number, local) for number, group in enumerate(groups) for local, place in enumerate(group)}


# ---------------------------------------------------------------- servers


@dataclass
class _Share:
    """A server's share of a part in one step; ``updated`` is triggered when the server has processed all pushes."""

    server: int
    nbytes: float
    updated: simpy.Event
    thread: simpy.Resource
    n_pushed: int = 0


@dataclass
class _Visit:
    """A part in flight: its first and last collective (without codec: in machines), and the number of missing ranks."""

    before: int | None
    after: int | None
    n_missing: int
    shares: list[_Share] = field(default_factory=list)


class ThroughServers(Exchange):
    """An :class:`Exchange` through synchronous servers at `nodes`, whose work takes time.

    With compression, every worker pushes its payload of each server's share of a part; the server decodes all payloads,
    averages them, encodes the mean with its own compressor (and memory), and answers every worker with the result. The
    pushes of a part form one collective, and so do the pulls; only messages whose sizes depend on values are sent one
    by one. Without compression, a server does the `work` on its share; each thread handles one request after the other.

    parts    elements of the flat vector that are compressed separately
    memory   node of the memory of each worker's machine: the machine's CPU, or the worker if there is none
    hosts    the machine of each worker, as in :func:`~ddlsim.collectives.push_pull.push_pull`; if given, only the first
             worker of each machine pushes and pulls
    like     the exchange of other shares of the same vectors through the same threads
    """

    def __init__(
        self,
        communicator: Communicator,
        nodes: Sequence[int],
        parts: Sequence[slice],
        vectors: Vectors,
        *,
        work: ServerWork | None = None,
        memory: Sequence[int] = (),
        hosts: list[int] | None = None,
        star: bool = False,
        like: ThroughServers | None = None,
    ) -> None:
        from ddlsim.runtime.codec import Codec, chosen, cut
        from ddlsim.runtime.server_work import ServerWork
        from ddlsim.runtime.servers import Threads

        super().__init__(communicator)
        context, n = communicator.context, communicator.n_ranks
        self.nodes, self.recorder, self.work, self.memory = nodes, context.recorder, work or ServerWork(), memory
        self.what = "all-reduce"
        if context.compression is not None:
            self.what, choice = "push and pull", chosen(context, servers=True)
            self.decodes = choice.down is not None
            shares = [share for part in parts for share in cut(part, len(nodes))]
            ranks = [worker.rank for worker in communicator.workers]
            self.codec = Codec(context, ranks, choice, shares, vectors, served=True)
        n_threads = self.work.threads if self.codec is None else 1
        threads = [Threads(self.loop, n_threads) for _ in nodes]
        self._threads: list[Threads] = threads if like is None else like._threads
        self._copying: dict[int, Threads] = {} if like is None else like._copying
        for node in memory:
            self._copying.setdefault(node, Threads(self.loop, self.work.threads))
        self._number: int = 0 if like is None else like._number + 1
        self._visits: dict[tuple[int, ...], _Visit] = {}
        leaders, before, behind = inside(hosts, n, 1, star=star)
        self._leaders = set(leaders.tolist())
        self._inside = [Schedule(n, 1, (rounds,)) if rounds else None for rounds in (before, behind)]
        self._schedules: dict[tuple[bool, tuple[float, ...]], Schedule] = {}

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        place, key = self.place[worker.rank], (step, *parts)
        if key not in self._visits:
            self._visits[key] = self._begun(step, parts, nbytes)
        visit = self._visits[key]
        visit.n_missing -= 1
        if visit.n_missing == 0:
            del self._visits[key]
        if self.codec is not None and not self.codec.sizes_known:
            env = self.loop.env
            return env.all_of([env.process(self._message(worker, step, parts, share)) for share in visit.shares])
        if self.codec is None and place in self._leaders:
            return self.loop.env.process(self._lead(visit, parts[0], place, nbytes))
        assert visit.before is not None
        assert visit.after is not None
        self.loop.join(visit.before, place)
        return self.loop.join(visit.after, place)

    def _begun(self, step: int, parts: Sequence[int], nbytes: float) -> _Visit:
        n, n_ranks, loop = len(self.nodes), self.communicator.n_ranks, self.loop
        if self.codec is None:
            servers = [parts[0] % n] if nbytes < self.work.bound() else range(n)
            shares = [self._share(server, parts[0], nbytes / len(servers)) for server in servers]
            nodes = self.communicator.nodes
            before, behind = (None if s is None else loop.collective(s, nodes, nbytes) for s in self._inside)
            return _Visit(before, behind, n_ranks, shares)
        if not self.codec.sizes_known:
            return _Visit(None, None, n_ranks, [self._share(server, 0, 0.0) for server in range(n)])
        up, down = (
            [self._sum(step, parts, server, size) for server in range(n)] for size in (self._push, self._answer)
        )
        visit = _Visit(self._collective(up, pull=False), self._collective(down, pull=True), n_ranks)
        for server in range(n):
            loop.env.process(self._serve_all(visit, parts, server))
        return visit

    def _share(self, server: int, tensor: int, nbytes: float) -> _Share:
        thread = self._threads[server].of((tensor, self._number), nbytes)
        return _Share(server, nbytes, self.loop.env.event(), thread)

    def _handle(self, thread: simpy.Resource, server: int, what: str, seconds: float) -> Process:
        """Let a server's thread process a request."""
        show = functools.partial(self.recorder.background, f"server {server}", what)
        yield from self._threads[server].work(thread, seconds, show)

    # ------------------------------------------------------------ encoded

    def decode_seconds(self, worker: Worker, step: int, part: int) -> float:
        seconds = 0.0
        for piece, n in [] if self.codec is None else self._encoded(part, 0):
            assert self.codec is not None
            if (down := self.codec.pieces[piece].down) is not None:
                nbytes = self.codec.answer_nbytes(step, piece)
                seconds += self.codec.seconds.decode(worker.workload, down, n, nbytes)
        return seconds

    def _encoded(self, part: int, place: int) -> Sequence[tuple[int, int]]:
        assert self.codec is not None
        n = len(self.nodes)
        return [(piece, self.codec.pieces[piece].n) for piece in range(part * n, (part + 1) * n)]

    def _sum(self, step: int, parts: Sequence[int], server: int, size: Callable[[int, int, int], float]) -> float:
        """Return the bytes of a server's share of parts that are sent together."""
        return sum(size(step, part * len(self.nodes) + server, 0) for part in parts)

    def service(self, step: int, part: int) -> Service:
        servers = range(len(self.nodes))
        pushed, pulled = (
            sum(self._sum(step, [part], server, size) for server in servers) for size in (self._push, self._answer)
        )
        return Service(pushed, pulled, [self._mean_seconds(part, server) for server in servers])

    @property
    def plan_notes(self) -> list[str]:
        working = ["threads of servers process what arrives (ServerWork), which takes time in addition to these tasks"]
        return [*super().plan_notes, *(working if self.codec is None else [])]

    def _push(self, step: int, piece: int, place: int) -> float:
        return sum(self._nbytes(step, piece, place))

    def _answer(self, step: int, piece: int, place: int) -> float:
        assert self.codec is not None
        return self.codec.answer_nbytes(step, piece)

    def _collective(self, sizes: Sequence[float], *, pull: bool) -> int:
        """Prepare the collective in which all workers push shares of these `sizes` to the servers, or pull them."""
        key = pull, tuple(sizes)
        if key not in self._schedules:
            n_workers, n_servers = self.communicator.n_ranks, len(sizes)
            worker, server = (index.ravel() for index in np.indices((n_workers, n_servers)))
            ends = (n_workers + server, worker) if pull else (worker, n_workers + server)
            lane = (messages(*ends, server, reduce=False),)
            self._schedules[key] = Schedule(n_workers + n_servers, n_servers, (lane,), np.array(sizes))
        return self.loop.collective(self._schedules[key], [*self.communicator.nodes, *self.nodes], sum(sizes))

    def _serve_all(self, visit: _Visit, parts: Sequence[int], server: int) -> Process:
        assert visit.before is not None
        assert visit.after is not None
        rank = self.communicator.n_ranks + server
        yield self.loop.join(visit.before, rank)
        yield from self._average(parts, server)
        self.loop.join(visit.after, rank)

    def _average(self, parts: Sequence[int], server: int) -> Process:
        """Decode, average and encode one piece after the other."""
        for part in parts:
            what, seconds = f"mean of piece {part * len(self.nodes) + server}", self._mean_seconds(part, server)
            yield from self._handle(self._threads[server].of((0, 0), 0.0), server, what, seconds)

    def _mean_seconds(self, part: int, server: int) -> float:
        assert self.codec is not None
        piece = self.codec.pieces[part * len(self.nodes) + server]
        return self.codec.seconds.server(piece.n, self.communicator.n_ranks)

    def _message(self, worker: Worker, step: int, parts: Sequence[int], share: _Share) -> Process:
        """Push and pull a share whose size depends on values."""
        server, node = share.server, self.nodes[share.server]
        place = self.place[worker.rank]
        pieces = [part * len(self.nodes) + server for part in parts]
        yield self.loop.send(worker.node, node, sum(self._push(step, piece, place) for piece in pieces))
        share.n_pushed += 1
        if share.n_pushed == self.communicator.n_ranks:
            self.loop.env.process(self._ready(parts, share))
        yield share.updated
        yield self.loop.send(node, worker.node, sum(self._answer(step, piece, place) for piece in pieces))

    def _ready(self, parts: Sequence[int], share: _Share) -> Process:
        yield from self._average(parts, share.server)
        share.updated.succeed()

    # ------------------------------------------------------------ dense

    def _lead(self, visit: _Visit, tensor: int, place: int, nbytes: float) -> Process:
        """Push the machine's sum, and pull the result when all servers have acknowledged it."""
        node, memory = self.communicator.nodes[place], self.memory[place]
        if visit.before is not None:
            yield self.loop.join(visit.before, place)
        if memory != node:
            yield self.loop.send(node, memory, nbytes)
        for half in (self._push_share, self._pull_share):
            yield self.loop.env.all_of([self.loop.env.process(half(memory, share)) for share in visit.shares])
        seconds = self.work.deliver * nbytes * self.work.seconds_per_byte()
        copying = self._copying[memory]
        yield from copying.work(copying.of((tensor, self._number), nbytes), seconds, lambda begin, end: None)
        if memory != node:
            yield self.loop.send(memory, node, nbytes)
        if visit.after is not None:
            yield self.loop.join(visit.after, place)

    def _push_share(self, node: int, share: _Share) -> Process:
        server, work = self.nodes[share.server], self.work
        yield self.loop.send(node, server, share.nbytes)
        share.n_pushed += 1
        last = share.n_pushed == len(self._leaders)
        passes = (work.first_push if share.n_pushed == 1 else work.push) + (work.update if last else 0.0)
        seconds = passes * work.seconds_per_byte(summing=True) * share.nbytes
        yield from self._handle(share.thread, share.server, "push", seconds)
        if last:
            share.updated.succeed()
        yield share.updated
        yield self.loop.send(server, node, 0.0)

    def _pull_share(self, node: int, share: _Share) -> Process:
        server = self.nodes[share.server]
        yield self.loop.send(node, server, 0.0)
        seconds = self.work.pull * self.work.seconds_per_byte() * share.nbytes
        yield from self._handle(share.thread, share.server, "pull", seconds)
        yield self.loop.send(server, node, share.nbytes)


class InGroups(Exchange):
    """An :class:`Exchange` of uncompressed vectors in two levels: the members of each group reduce-scatter on a
    `fabric`, exchange their shards `between` the groups, and all-gather in the group.

    groups   places of the members of each group; all groups have the same size
    between  (places of members with the same index in their groups, previous exchange or None) -> their exchange
    """

    def __init__(
        self,
        communicator: Communicator,
        groups: Sequence[Sequence[int]],
        fabric: Fabric,
        between: Callable[[Sequence[int], Exchange | None], Exchange],
    ) -> None:
        super().__init__(communicator)
        if len({len(places) for places in groups}) > 1:
            raise ConfigError(
                f"{communicator.owner}: fabric = {fabric} inside machines needs the same number of workers on "
                f"each machine, not {sorted({len(places) for places in groups})}; use another number of "
                "workers, or leave fabric out"
            )
        self.what = "all-reduce"
        self._halves = halves_of(fabric, communicator.owner)
        self._within = [communicator.part(places, fabric) for places in groups]
        for kind, algorithm in zip(("reduce_scatter", "all_gather"), self._halves, strict=True):
            self._within[0].prepare(kind, algorithm)
        self._between: list[Exchange] = []
        for places in zip(*groups, strict=True):
            self._between.append(between(places, self._between[-1] if self._between else None))
        self._seats = _seats(groups)

    def carry(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> simpy.Event:
        return self.loop.env.process(self._in_turn(worker, step, parts, nbytes))

    def _in_turn(self, worker: Worker, step: int, parts: Sequence[int], nbytes: float) -> Process:
        group, local = self._seats[self.place[worker.rank]]
        within, (scatter, gather) = self._within[group], self._halves
        yield Call(within, "reduce_scatter", nbytes, scatter).enter((step, *parts, "scatter"), worker)
        yield self._between[local].carry(worker, step, parts, nbytes / within.n_ranks)
        yield Call(within, "all_gather", nbytes, gather).enter((step, *parts, "gather"), worker)


# ---------------------------------------------------------------- the collectives of a plan


#: key of an exchange: kind of collective, group, whether it carries parts of the gradients
ExchangeKey = tuple[int, int, bool]


def exchange_key(plan: Plan, row: int) -> ExchangeKey:
    """Return the key of the exchange of a plan's collective."""
    return int(plan.kind[row]), int(plan.peer[row]), bool(plan.part[row] >= 0)


class Exchanges(Protocol):
    """The exchanges of a plan's collectives."""

    def exchange(self, kind: int, group: int, *, parts: bool) -> Exchange | None:
        """Return the exchange by collectives of a kind (:data:`ddlsim.plan.KINDS`) in a group, for `parts` of the
        gradients (and of the weights made from them) or for anything else; None if there is none."""

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return the mean gradient, given the gradients of all contributors in order."""


@dataclass(frozen=True, eq=False)
class OfKinds:
    """:class:`Exchanges` with one exchange per kind of collective; the first one sums gradients."""

    exchanges: Mapping[int, Exchange]

    def exchange(self, kind: int, group: int, *, parts: bool) -> Exchange | None:
        return self.exchanges.get(kind)

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return next(iter(self.exchanges.values())).mean(step, gradients)


@dataclass(frozen=True, eq=False)
class OfGroups:
    """:class:`Exchanges` within groups of the ranks of a plan, uncompressed and simulated.

    workers    the worker of each rank, or the first of those that it represents
    schedules  (kind of collective, group, bytes) -> its schedule
    """

    context: RunContext
    workers: Sequence[Worker]
    groups: Sequence[Sequence[int]]
    schedules: Callable[[int, int, float], Schedule]

    def exchange(self, kind: int, group: int, *, parts: bool) -> Exchange:
        members = [self.workers[rank] for rank in self.groups[group]]
        communicator = Communicator(self.context, Fabric("ring", "given"), members)  # the schedules are given
        return CollectiveExchange(communicator, KINDS[kind], schedule=functools.partial(self.schedules, kind, group))

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return self.context.learner.mean(gradients)


# ---------------------------------------------------------------- whole vectors, round after round


def single_part(communicator: Communicator) -> list[slice]:
    """Return the single part of vectors with the size of the parameters."""
    return [slice(0, round(communicator.workers[0].workload.gradient_nbytes / FP32_NBYTES))]


@dataclass
class _Round:
    """One exchange: the common model at its start, the members' vectors, its result, and how many members have taken
    that; for processes, the event of each member's arrival, and when the last member entered (s)."""

    common: Value[Array]
    brought: list[Value[Array] | None]
    result: Any = None
    n_done: int = 0
    arrived: dict[int, simpy.Event] = field(default_factory=dict)
    last_ready: float = 0.0


class Rounds:
    """The values of averages among the members of a communicator, round by round, numbered from 0. They are compressed
    if the run uses compression.

    then    computes the result from the mean, once for all members; by default the mean. For models, the next round
            compresses differences from it
    models  True: compress differences from the previous round's result; False: compress vectors directly
    by      (attribute) the exchange that carries the vectors
    common  (attribute) the model that all members hold: the initial one, then the latest result
    """

    def __init__(
        self, communicator: Communicator, then: Callable[[Value[Array]], Any] | None = None, *, models: bool = True
    ) -> None:
        self.communicator, self.learner = communicator, communicator.context.learner
        self.then, self.models = then, models
        self.by = CollectiveExchange(communicator, parts=single_part(communicator), vectors=self._vector)
        self.common = self.learner.initial
        self._rounds: dict[int, _Round] = {}

    def bring(self, number: int, worker: Worker, value: Value[Array]) -> _Round:
        """Add a member's vector to a round."""
        if number not in self._rounds:
            self._rounds[number] = _Round(self.common, [None] * self.communicator.n_ranks)
        current = self._rounds[number]
        current.brought[self.communicator.place[worker.rank]] = value
        return current

    def result(self, number: int) -> Any:
        """Return the result of a round. Each member must call this exactly once."""
        current = self._rounds[number]
        if current.n_done == 0:
            current.result = self._result(number, current)
        current.n_done += 1
        if current.n_done == len(current.brought):
            del self._rounds[number]
        return current.result

    def _result(self, number: int, current: _Round) -> Any:
        values = [value for value in current.brought if value is not None]
        assert len(values) == len(current.brought), "a collective ended before all ranks had entered it"
        mean = self.by.mean(number, values)
        if self.models:
            if self.by.codec is not None:
                mean = self.learner.plane.apply(np.add, current.common, mean).with_statistics_of(
                    self.learner.mean(values)
                )
            self.common = mean
        result = mean if self.then is None else self.then(mean)
        if self.models and isinstance(result, Value):
            self.common = result
        return result

    def _vector(self, number: int, place: int) -> Value[Array]:
        """Return the vector that a member compresses in a round."""
        current = self._rounds[number]
        value = current.brought[place]
        assert value is not None
        return self.learner.plane.apply(np.subtract, value, current.common) if self.models else value


class Averaging(Rounds):
    """An all-reduce that gives each member the mean of all members' vectors, once per round.

    communicator  the group of workers
    then          function that is applied to the mean in each round; None: the result is the mean itself
    models        True: the vectors are models. If the run uses compression, the difference between each model and the
                  previous result is encoded. False: the vectors themselves are encoded
    share         size of a vector, as a fraction of the size of all parameters

    Members either wait for the all-reduce (:meth:`mean`) or compute while it runs (:meth:`start` and :meth:`finish`).
    """

    def __init__(
        self,
        communicator: Communicator,
        then: Callable[[Value[Array]], Value[Array]] | None = None,
        *,
        models: bool = True,
        share: float = 1.0,
    ) -> None:
        super().__init__(communicator, then, models=models)
        self.share, self._n_rounds = share, 0
        self._numbers: dict[object, int] = {}
        context = communicator.context
        context.counts_calls = True
        self._call = context.workers[0].workload.stack.call_time * (communicator.n_ranks > 1)

    def start(self, worker: Worker, key: object, value: Value[Array]) -> Process:
        """Enter round `key` with the vector `value`. The all-reduce runs in the background.

        All members must enter the rounds in the same order.
        """
        if key not in self._numbers:
            self._numbers[key] = self._n_rounds
            self._n_rounds += 1
        number = self._numbers[key]
        current = self.bring(number, worker, value)
        yield from worker.compute(self.by.encode_seconds(worker, number, 0), "encode")
        current.last_ready = worker.loop.now
        place = self.communicator.place[worker.rank]
        current.arrived[place] = worker.loop.env.process(self._transfer(worker, number))

    def finish(self, worker: Worker, key: object) -> Computation:
        """Wait until round `key` has ended for this worker, and return the result.

        The time until the last worker enters the round is recorded as waiting, the rest as communication.
        """
        number, start = self._numbers[key], worker.loop.now
        current = self._rounds[number]
        arrived = current.arrived[self.communicator.place[worker.rank]]
        if not arrived.processed:
            yield from worker.block(arrived, f"the {self.by.what} of step {key}")
            worker.book(start, current.last_ready, self.by.what)
        yield from worker.compute(self.by.decode_seconds(worker, number, 0), "decode")
        result: Value[Array] = self.result(number)
        if number not in self._rounds:
            del self._numbers[key]
        return result

    def mean(self, worker: Worker, key: object, value: Value[Array]) -> Computation:
        """Enter round `key` with the vector `value`, wait until the round has ended, and return the result."""
        yield from self.start(worker, key, value)
        return (yield from self.finish(worker, key))

    def _transfer(self, worker: Worker, number: int) -> Process:
        start = worker.loop.now
        if self._call:
            yield worker.loop.work(self._call)
        yield self.by.carry(worker, number, [0], self.share * worker.workload.gradient_nbytes)
        worker.recorder.background(f"{worker.name} network", self.by.what, start, worker.loop.now)
