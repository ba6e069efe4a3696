"""How compressed vectors travel between workers: each compressor by the collective that it needs.

``all_reduce``     the fabric's own algorithm, over the payload; once per round of the compressor
``all_gather``     a ring all-gather of everybody's payload; with "hierarchical", only between the machines, or other
                   innermost groups of the network
``majority_vote``  every worker counts the votes of an N-th of the signs, then a ring all-gather of the majority
``gtopk_tree``     a binomial tree, up to rank 0 of the order and down again
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import simpy

from ddlsim.collectives import Collective, Schedule, build, reorder, sequence
from ddlsim.compression.choice import Tensors
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.compression.hierarchy import shard_sizes
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.runtime.averaging import Averaging, Flat, Machines
from ddlsim.runtime.carrier import Carrier, Way
from ddlsim.runtime.codec import Codec, backwards, chosen
from ddlsim.runtime.communicator import Communicator, hierarchical
from ddlsim.runtime.costs import Phase
from ddlsim.runtime.fabric import Fabric, algorithm_for, name_of
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process, Worker
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.precision import FP32_NBYTES


class Coded(Carrier):
    """The :class:`~ddlsim.runtime.carrier.Carrier` of compressed vectors among the members of a communicator.

    buckets  parts of the vector that are compressed by themselves, from its end to its begin, or which ones they are
    vector   what a member (by its place) brings to a step
    kind     "all_reduce", or "reduce_scatter" where a member needs no more than its shard of the mean
    algorithm  of collectives of that kind, the fabric's if nothing is given
    tensors  (name, shape) of those that the vector consists of, all of the model if nothing is given
    like     what carries other parts of the same vectors: their values are made once for both
    """

    def __init__(
        self, communicator: Communicator, buckets: Sequence[Bucket] | Sequence[slice],
        vector: Callable[[int, int], Value[Array]], kind: str = "all_reduce", *,
        algorithm: str | Collective | None = None, tensors: Tensors | None = None, like: Coded | None = None,
    ) -> None:  # fmt: skip
        setting = communicator.setting
        choice = chosen(setting, servers=False)
        if choice.down is not None:
            raise ConfigError(
                f"compression: down = {title(choice.down)} has no effect with {communicator.owner}, whose workers all "
                "end with the mean; leave it out, or use ParameterServer"
            )
        self.loop, self.communicator, self.compresses = setting.loop, communicator, True
        self.kind, self.algorithm = kind, algorithm
        if algorithm is not None:
            self.algorithm = algorithm_for(algorithm, setting.cluster, communicator.at, communicator.fabric.cost, kind)
        self.collective, self.n_rounds = choice.compressor.traits.collective, choice.compressor.traits.n_rounds
        self.machines = self._machines(choice.compressor)
        self.decodes = choice.compressor.traits.encode_passes > 0.0 or choice.given is not None
        self.what = kind.replace("_", "-") if self.collective == "all_reduce" else self.collective.replace("_", " ")
        self._note(setting, choice.compressor)
        self._prepare(choice.compressor)
        ranks = [worker.rank for worker in communicator.workers]
        if like is None:
            parts = [each for each in buckets if isinstance(each, slice)]
            parts = parts or backwards([each for each in buckets if isinstance(each, Bucket)])
            self.codec = Codec(setting, ranks, choice, parts, self._averaging, vector, tensors)
        elif like.machines != self.machines:
            raise ConfigError(
                f"{communicator.owner}: algorithm = {communicator.fabric.algorithm!r} with {title(choice.compressor)}: "
                "the stages' replicas lie on machines in different ways; use 'ring'"
            )
        else:
            self.codec = like.codec
        seats = enumerate(self.machines)
        self._seats = {place: (m, local) for m, places in seats for local, place in enumerate(places)}
        self._inbox: dict[tuple[int, ...], simpy.Event] = {}

    def _machines(self, compressor: AnyCompressor) -> list[list[int]]:
        """Return the places on each machine if only machines exchange compressed vectors."""
        algorithm = self.communicator.fabric.algorithm
        if not hierarchical(algorithm) or self.collective != "all_gather":
            return []
        if compressor.expected_nbytes(1) is None:
            raise ConfigError(
                f"{self.communicator.owner}: algorithm = {algorithm!r} with {title(compressor)}: the size of what it "
                "sends depends on values; use 'ring', or a compressor of known size such as TopK"
            )
        assert self.communicator.nested.size  # says if groups have unequally many
        return [places.tolist() for places in self.communicator.groups]

    def _prepare(self, compressor: AnyCompressor) -> None:
        """Say before the run if payloads travel by collectives whose time is wanted and not known."""
        communicator = self.communicator
        if communicator.simulated:
            return
        if self.collective in ("majority_vote", "gtopk_tree"):
            raise ConfigError(
                f"{communicator.owner}: cost = {communicator.fabric.cost!r} with {title(compressor)}: no library has "
                f"the collective {self.collective!r}, so nobody knows its time; use cost = 'simulated'"
            )
        for kind in ("reduce_scatter", "all_gather") if self.machines else (self._kind,):
            communicator.prepare(kind, self.algorithm if kind == self.kind else None)

    @property
    def _kind(self) -> str:
        """The collective by which payloads travel: of several rounds, all but the last are needed whole."""
        if self.collective != "all_reduce":
            return "all_gather"
        return self.kind if self.n_rounds == 1 else "all_reduce"

    @property
    def _gather(self) -> str:
        """By which algorithm payloads that cannot be summed reach everybody."""
        how = self.algorithm or self.communicator.fabric.algorithm
        return "nccl_ring" if how in ("nccl", "nccl_ring") else "ring"

    def _averaging(self, compressor: AnyCompressor, down: AnyCompressor | None) -> Averaging:
        if self.machines:
            members = tuple(place for places in self.machines for place in places)
            return Machines(compressor, members, len(self.machines[0]))
        return Flat(compressor, tuple(self.communicator.order.tolist()))

    def _note(self, setting: Setting, compressor: AnyCompressor) -> None:
        traits = compressor.traits
        if traits.collective == "all_reduce":
            if self._kind != self.kind:
                note = f"compression: {title(compressor)} travels by all-reduces: others need its first messages whole"
                setting.notes += [note] if note not in setting.notes else []
            return
        back = "" if self.kind == "reduce_scatter" else ", ring all-gather"
        way = {
            "all_gather": "a ring all-gather",
            "majority_vote": f"a majority vote (shards of bits to their counters{back})",
            "gtopk_tree": "a binomial tree that merges on the way",
        }[traits.collective]
        if self.machines:
            text = f"dense inside the innermost groups (machines), by {way} between them (HiTopKComm)"
        else:
            name = name_of(self.algorithm or self.communicator.fabric.algorithm)
            text = f"by {way} instead of the {self.kind.replace('_', '-')} {name!r}: {traits.not_summable}"
        note = f"compression: {title(compressor)} travels {text}"
        setting.notes += [note] if note not in setting.notes else []

    # ------------------------------------------------------------ as a carrier

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        place = self.communicator.place[worker.rank]
        nbytes = sum(self._nbytes(step, index, place))
        return self.codec.seconds.encode(worker, self._n(index, place), nbytes)

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        place = self.communicator.place[worker.rank]
        compressor, n = self.codec.pieces[index].compressor, self._n(index, place)
        n_payloads, nbytes = 1, sum(self._nbytes(step, index, place))
        if self.collective == "all_gather":
            n_payloads = len(self.machines) or self.communicator.n_ranks
            nbytes *= n_payloads
        if not self._known(index):
            nbytes = self._gathered(step, index)
        if self.kind == "reduce_scatter":  # no more than its own shard
            n, nbytes = n // self.communicator.n_ranks, nbytes / self.communicator.n_ranks
        return self.codec.seconds.decode(worker, compressor, n, nbytes, n_payloads)

    @functools.cached_property
    def way(self) -> Way:
        one = self.n_rounds == 1
        if not self.communicator.simulated:
            return "known" if one else "process"
        return "schedule" if one and not self.machines and self._known(0) else "process"

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        communicator, key = self.communicator, (self, step, index)
        if self.way == "known":
            return communicator.take(key, lambda: self.phases(step, index, nbytes))
        if self.way == "schedule":
            schedule, size = self.schedule(step, index, nbytes)
            return communicator.follow(key, worker, size, lambda: schedule)
        return self.loop.env.process(self._travel(worker, step, index))

    def schedule(self, step: int, index: int, nbytes: float) -> tuple[Schedule, float]:
        """Return the one collective of a part, and the bytes of its buffer."""
        (size,) = self._nbytes(step, index, 0)
        if self.collective == "all_reduce":
            return self.communicator.schedule(size, self.kind, self.algorithm), size
        if self.collective == "all_gather":
            size *= self.communicator.n_ranks
            return self.communicator.schedule(size, "all_gather", self._gather), size
        return self._vote if self.collective == "majority_vote" else self._tree, size

    def phases(self, step: int, index: int, nbytes: float) -> tuple[Phase, ...]:
        """Return what the one collective of a part consists of, where its time is known."""
        if self.machines:
            dense, (size,) = FP32_NBYTES * self.codec.pieces[index].n, self._nbytes(step, index, 0)
            between = Phase("all_gather", (), len(self.machines) * size)
            return self.communicator.by_level(dense, np.array(self.machines), between)
        if self.collective == "all_reduce":
            return self.communicator.phases(self._kind, self._nbytes(step, index, 0)[0])
        known = self._known(index)  # otherwise the sum of all sizes, which are known when the last one enters
        n, size = self.communicator.n_ranks, self._nbytes(step, index, 0)[0] if known else 0.0
        return self.communicator.phases("all_gather", n * size if known else self._gathered(step, index))

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        return self.codec.mean(step)

    def _known(self, index: int) -> bool:
        return self.codec.pieces[index].compressor.expected_nbytes(1) is not None

    def _n(self, index: int, place: int) -> int:
        """Return how many elements of a bucket a worker encodes."""
        n = self.codec.pieces[index].n
        return self._shards(n)[self._seats[place][1]] if self.machines else n

    def _nbytes(self, step: int, index: int, place: int) -> tuple[float, ...]:
        if not self.machines:
            return self.codec.nbytes(step, index, place)
        sizes = self.codec.pieces[index].compressor.expected_nbytes(self._n(index, place), step)
        assert sizes is not None
        return tuple(float(size) for size in sizes)

    def _gathered(self, step: int, index: int) -> float:
        """Return the bytes of all members' payloads together."""
        return sum(sum(self._nbytes(step, index, place)) for place in range(self.communicator.n_ranks))

    # ------------------------------------------------------------ ways

    def _travel(self, worker: Worker, step: int, index: int) -> Process:
        communicator, place = self.communicator, self.communicator.place[worker.rank]
        if not self._known(index):
            yield from self._pass_on(worker, step, index)
        elif self.machines:
            yield from self._between_machines(worker, step, index, self._nbytes(step, index, place)[0])
        else:
            gathers = self.collective == "all_gather"
            for number, size in enumerate(self._nbytes(step, index, place)):
                nbytes, key = size * (communicator.n_ranks if gathers else 1), (self, step, index, number)
                yield communicator.enter(key, worker, nbytes, self._kind, self._gather if gathers else None)

    @functools.cached_property
    def _vote(self) -> Schedule:
        n = self.communicator.n_ranks
        up, down = build("direct", n, kind="reduce_scatter"), build("ring", n, kind="all_gather")
        if self.kind == "reduce_scatter":  # who counts keeps what it has counted
            return reorder(up, self.communicator.order)
        return reorder(sequence(up, down, kind="all_reduce"), self.communicator.order)

    @functools.cached_property
    def _tree(self) -> Schedule:
        return reorder(build("binomial_tree", self.communicator.n_ranks), self.communicator.order)

    # ------------------------------------------------------------ between machines

    @functools.cached_property
    def _inside(self) -> list[Communicator]:
        return [self._part(places) for places in self.machines]

    @functools.cached_property
    def _among(self) -> list[Communicator]:
        return [self._part(places) for places in zip(*self.machines, strict=True)]

    def _part(self, places: Sequence[int]) -> Communicator:
        communicator = self.communicator
        workers = [communicator.workers[place] for place in places]
        return Communicator(communicator.setting, Fabric(rank_order="given"), workers, owner=communicator.owner)

    @functools.cache  # noqa: B019  # lives as long as the run
    def _shards(self, n: int) -> list[int]:
        return shard_sizes(n, len(self.machines[0]))

    @functools.cache  # noqa: B019
    def _ring(self, n: int, kind: str) -> Schedule:
        direct = self.communicator.levels.algorithms[0] == "direct"
        schedule = build("direct" if direct else "ring", len(self.machines[0]), kind=kind)
        sizes = self._shards(n)
        return schedule if sizes[0] == sizes[-1] else dataclasses.replace(schedule, chunk_weight=np.array(sizes, float))

    def _between_machines(self, worker: Worker, step: int, index: int, nbytes: float) -> Process:
        """Reduce-scatter inside, all-gather of one's shard among the machines, all-gather inside."""
        communicator = self.communicator
        machine, local = self._seats[communicator.place[worker.rank]]
        n = self.codec.pieces[index].n
        dense, payloads = FP32_NBYTES * n, len(self.machines) * nbytes
        inside, among = self._inside[machine], self._among[local]
        yield inside.follow((step, index, "in"), worker, dense, lambda: self._ring(n, "reduce_scatter"))
        yield among.enter((step, index), worker, payloads, "all_gather", "ring")
        yield inside.follow((step, index, "out"), worker, dense, lambda: self._ring(n, "all_gather"))

    # ------------------------------------------------------------ payloads whose sizes depend on values

    def _pass_on(self, worker: Worker, step: int, index: int) -> Process:
        """A ring all-gather, message by message: pass on what has come, the own payload first."""
        communicator = self.communicator
        order, n = communicator.order, communicator.n_ranks
        seat = int(np.flatnonzero(order == communicator.place[worker.rank])[0])
        right = (seat + 1) % n
        target = communicator.nodes[int(order[right])]
        for t in range(n - 1):
            owner = int(order[(seat - t) % n])
            sent = self.loop.send(worker.node, target, sum(self.codec.nbytes(step, index, owner)))
            arrival = self._mail(step, index, t, right)
            assert sent.callbacks is not None
            sent.callbacks.append(functools.partial(_deliver, arrival))
            yield self.loop.env.all_of([sent, self._mail(step, index, t, seat)])
            del self._inbox[step, index, t, seat]

    def _mail(self, *key: int) -> simpy.Event:
        if key not in self._inbox:
            self._inbox[key] = self.loop.env.event()
        return self._inbox[key]


def _deliver(arrival: simpy.Event, _: simpy.Event) -> None:
    arrival.succeed()
