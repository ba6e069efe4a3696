"""How compressed gradients travel between workers: each compressor by the collective that it needs.

``all_reduce``     the strategy's own algorithm, over the payload; once per round of the compressor
``all_gather``     a ring all-gather of everybody's payload; with "hierarchical", only between the machines
``majority_vote``  every worker counts the votes of an N-th of the signs, then a ring all-gather of the majority
``gtopk_tree``     a binomial tree, up to rank 0 of the order and down again
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simpy

from ddlsim.collectives import Collective, Schedule, build, reorder, sequence
from ddlsim.collectives.build import groups_of
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.compression.hierarchy import shard_sizes
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.runtime.compressed import GRADIENT_NBYTES, Codec, backwards, chosen
from ddlsim.runtime.compressed_values import Averaging, Flat, Machines
from ddlsim.runtime.group import Group
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process, Worker
from ddlsim.workload.buckets import Bucket

__all__ = ["CompressedAllReduce"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Leg:
    """A collective on the way of a worker's payload: this worker is rank `place` at ``nodes[place]``.

    ``group`` tells apart those that run side by side.
    """

    schedule: Schedule
    nodes: Sequence[int]
    nbytes: float
    place: int
    group: int = 0


class _Meetings:
    """Collectives: made when the first of their ranks comes, forgotten when all have come."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._open: dict[tuple[int, ...], tuple[int, int]] = {}

    def join(self, key: tuple[int, ...], leg: Leg) -> simpy.Event:
        """Enter a collective; the event returned is that of its end for this rank."""
        if key not in self._open:
            self._open[key] = self.loop.collective(leg.schedule, leg.nodes, leg.nbytes), leg.schedule.n_ranks
        number, n_left = self._open.pop(key)
        if n_left > 1:
            self._open[key] = number, n_left - 1
        return self.loop.join(number, leg.place)


class CompressedAllReduce:
    """The :class:`~ddlsim.runtime.group.Carrier` of an all-reduce strategy.

    algorithm  the strategy's
    schedule   bytes -> its schedule
    order      ranks in the order of the ring
    """

    def __init__(
        self, setting: Setting, algorithm: str | Collective, schedule: Callable[[float], Schedule], order: Ints,
        group: Group, buckets: Sequence[Bucket],
    ) -> None:  # fmt: skip
        choice = chosen(setting, servers=False)
        if choice.down is not None:
            raise ConfigError(
                f"compression: down = {title(choice.down)} has no effect with AllReduce, whose workers all end with "
                "the mean; leave it out, or use ParameterServer"
            )
        self.loop = setting.loop
        self.group = group
        self.schedule = schedule
        self.order = order
        self.collective = choice.compressor.traits.collective
        self.place = {int(rank): place for place, rank in enumerate(order)}
        self.machines = self._machines(setting, algorithm, choice.compressor)
        self.decodes = choice.compressor.traits.encode_passes > 0.0 or choice.cost is not None
        self.what = "all-reduce" if self.collective == "all_reduce" else self.collective.replace("_", " ")
        self._note(setting, algorithm, choice.compressor)
        self.codec = Codec(setting, choice, backwards(buckets), self._averaging, group.gradient)
        self._meetings = _Meetings(setting.loop)
        self._inbox: dict[tuple[int, ...], simpy.Event] = {}

    def _machines(self, setting: Setting, algorithm: str | Collective, compressor: AnyCompressor) -> list[Ints]:
        """Return the ranks of each machine if only machines exchange compressed gradients."""
        named = isinstance(algorithm, str) and algorithm.split("(")[0].strip() == "hierarchical"
        if not named or self.collective != "all_gather":
            return []
        hosts = setting.hosts(setting.nodes)[self.order].tolist()
        machines = [self.order[members] for members in groups_of(hosts)]
        sizes = sorted({len(members) for members in machines})
        if len(sizes) > 1:
            raise ConfigError(
                f"AllReduce: algorithm = {algorithm!r} with {title(compressor)} needs equally many workers on every "
                f"machine, not {sizes}; use another number of workers, or 'ring'"
            )
        if compressor.expected_nbytes(1) is None:
            raise ConfigError(
                f"AllReduce: algorithm = {algorithm!r} with {title(compressor)}: the size of what it sends depends "
                "on values; use 'ring', or a compressor of known size such as TopK"
            )
        return machines

    def _averaging(self, compressor: AnyCompressor, down: AnyCompressor | None) -> Averaging:
        if self.machines:
            members = tuple(int(rank) for machine in self.machines for rank in machine)
            return Machines(compressor, members, len(self.machines[0]))
        return Flat(compressor, tuple(self.order.tolist()))

    def _note(self, setting: Setting, algorithm: str | Collective, compressor: AnyCompressor) -> None:
        traits = compressor.traits
        if traits.collective == "all_reduce":
            return
        name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")
        way = {
            "all_gather": "a ring all-gather",
            "majority_vote": "a majority vote (shards of bits to their counters, ring all-gather)",
            "gtopk_tree": "a binomial tree that merges on the way",
        }[traits.collective]
        if self.machines:
            text = f"dense inside machines, by {way} between them (HiTopKComm)"
        else:
            text = f"by {way} instead of the all-reduce {name!r}: {traits.not_summable}"
        setting.notes.append(f"compression: {title(compressor)} travels {text}")

    # ------------------------------------------------------------ as a carrier

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        nbytes = sum(self._nbytes(step, index, worker.rank))
        return self.codec.seconds.encode(worker, self._n(index, worker.rank), nbytes)

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        compressor, n = self.codec.pieces[index].compressor, self._n(index, worker.rank)
        n_payloads, nbytes = 1, sum(self._nbytes(step, index, worker.rank))
        if self.collective == "all_gather":
            n_payloads = len(self.machines) or self.group.n_workers
            nbytes *= n_payloads
        if not self._known(index):
            nbytes = sum(sum(self._nbytes(step, index, rank)) for rank in range(n_payloads))
        return self.codec.seconds.decode(worker, compressor, n, nbytes, n_payloads)

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        travel = self._travel if self._known(index) else self._pass_on
        return self.loop.env.process(travel(worker, step, index))

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return self.codec.mean(step)

    def _known(self, index: int) -> bool:
        return self.codec.pieces[index].compressor.expected_nbytes(1) is not None

    def _n(self, index: int, rank: int) -> int:
        """Return how many elements of a bucket a worker encodes."""
        n = self.codec.pieces[index].n
        return self._shards(n)[self._seat(rank)[1]] if self.machines else n

    def _nbytes(self, step: int, index: int, rank: int) -> tuple[float, ...]:
        if not self.machines:
            return self.codec.nbytes(step, index, rank)
        sizes = self.codec.pieces[index].compressor.expected_nbytes(self._n(index, rank), step)
        assert sizes is not None
        return tuple(float(size) for size in sizes)

    # ------------------------------------------------------------ ways

    def _travel(self, worker: Worker, step: int, index: int) -> Process:
        for number, leg in enumerate(self._legs(worker.rank, step, index)):
            yield self._meetings.join((step, index, number, leg.group), leg)

    def _legs(self, rank: int, step: int, index: int) -> list[Leg]:
        sizes, nodes, n_workers = self._nbytes(step, index, rank), self.group.nodes, self.group.n_workers
        if self.collective == "all_reduce":
            return [Leg(self.schedule(nbytes), nodes, nbytes, rank) for nbytes in sizes]
        if self.machines:
            return self._between_machines(rank, index, sizes[0])
        if self.collective == "all_gather":
            return [Leg(self._gather, nodes, n_workers * sizes[0], rank)]
        return [Leg(self._vote if self.collective == "majority_vote" else self._tree, nodes, sizes[0], rank)]

    @functools.cached_property
    def _gather(self) -> Schedule:
        return reorder(build("ring", len(self.order), kind="all_gather"), self.order)

    @functools.cached_property
    def _vote(self) -> Schedule:
        n = len(self.order)
        up, down = build("direct", n, kind="reduce_scatter"), build("ring", n, kind="all_gather")
        return reorder(sequence(up, down, kind="all_reduce"), self.order)

    @functools.cached_property
    def _tree(self) -> Schedule:
        return reorder(build("binomial_tree", len(self.order)), self.order)

    # ------------------------------------------------------------ between machines

    @functools.cached_property
    def _seats(self) -> dict[int, tuple[int, int]]:
        return {int(rank): (m, local) for m, ranks in enumerate(self.machines) for local, rank in enumerate(ranks)}

    def _seat(self, rank: int) -> tuple[int, int]:
        """Return a worker's machine, and its place there."""
        return self._seats[rank]

    @functools.cache  # noqa: B019  # lives as long as the run
    def _shards(self, n: int) -> list[int]:
        return shard_sizes(n, len(self.machines[0]))

    @functools.cache  # noqa: B019
    def _inside(self, n: int, kind: str) -> Schedule:
        schedule = build("ring", len(self.machines[0]), kind=kind)
        sizes = self._shards(n)
        return schedule if sizes[0] == sizes[-1] else dataclasses.replace(schedule, chunk_weight=np.array(sizes, float))

    @functools.cached_property
    def _among(self) -> Schedule:
        return build("ring", len(self.machines), kind="all_gather")

    def _between_machines(self, rank: int, index: int, nbytes: float) -> list[Leg]:
        """Reduce-scatter inside, all-gather of one's shard among the machines, all-gather inside."""
        machine, local = self._seat(rank)
        n = self.codec.pieces[index].n
        inside = [self.group.nodes[each] for each in self.machines[machine]]
        equals = [self.group.nodes[ranks[local]] for ranks in self.machines]
        dense = GRADIENT_NBYTES * n
        return [
            Leg(self._inside(n, "reduce_scatter"), inside, dense, local, machine),
            Leg(self._among, equals, len(self.machines) * nbytes, machine, local),
            Leg(self._inside(n, "all_gather"), inside, dense, local, machine),
        ]

    # ------------------------------------------------------------ payloads whose sizes depend on values

    def _pass_on(self, worker: Worker, step: int, index: int) -> Process:
        """A ring all-gather, message by message: pass on what has come, the own payload first."""
        place, n = self.place[worker.rank], len(self.order)
        right = (place + 1) % n
        target = self.group.nodes[int(self.order[right])]
        for t in range(n - 1):
            owner = int(self.order[(place - t) % n])
            sent = self.loop.send(worker.node, target, sum(self.codec.nbytes(step, index, owner)))
            arrival = self._mail(step, index, t, right)
            assert sent.callbacks is not None
            sent.callbacks.append(functools.partial(_deliver, arrival))
            yield self.loop.env.all_of([sent, self._mail(step, index, t, place)])
            del self._inbox[step, index, t, place]

    def _mail(self, *key: int) -> simpy.Event:
        if key not in self._inbox:
            self._inbox[key] = self.loop.env.event()
        return self._inbox[key]


def _deliver(arrival: simpy.Event, _: simpy.Event) -> None:
    arrival.succeed()
