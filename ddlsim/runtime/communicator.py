"""`Communicator`: workers that execute collectives together. All collectives of processes go through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster.groups import Levels, levels
from ddlsim.collectives import Collective, Schedule
from ddlsim.errors import ConfigError, DeadlockError
from ddlsim.network.state import Ints
from ddlsim.plan.schedules import MemberSchedules
from ddlsim.runtime.context import RunContext, Worker
from ddlsim.runtime.costs import KnownCost, Phase, known_cost
from ddlsim.runtime.fabric import Fabric, OnFabric, fabric_of, with_algorithm

if TYPE_CHECKING:
    import simpy

#: limit on the collectives that wait for members at a time: those of a thousand tensors in some steps
MOST_OPEN = 4096


@dataclass
class _Operation:
    """A collective in progress: its id in the network or, if its time is known, the members that have entered it."""

    number: int | None
    n_missing: int
    joined: list[simpy.Event] = field(default_factory=list)


class Communicator:
    """A group of workers that execute collectives together, like a process group in PyTorch.

    context     context of the run
    fabric      algorithm, rank order and cost of the collectives
    workers     the members of the group. A member's rank in collectives is its index in this sequence. None: all
                workers of the run
    bystanders  nodes of additional ranks, such as parameter servers. They join every collective automatically, and
                their ranks follow those of the members
    owner       name of the strategy, for error messages

    Raises ConfigError if the fabric cannot be used for these members.
    """

    def __init__(
        self, context: RunContext, fabric: Fabric, workers: Sequence[Worker] | None = None, *,
        bystanders: Sequence[int] = (), owner: str = "Fabric",
    ) -> None:  # fmt: skip
        self.context = context
        self.owner = owner
        self.workers = list(context.workers if workers is None else workers)
        self.n_ranks = len(self.workers)
        self.nodes = [worker.node for worker in self.workers]
        self.place = {worker.rank: place for place, worker in enumerate(self.workers)}
        self.order = self._ordered(fabric.rank_order)
        self.fabric = with_algorithm(fabric, context.cluster, self.at)
        self.n_bystanders = len(bystanders)
        #: of the members, then of the bystanders
        self.all_nodes = np.array([*self.nodes, *bystanders], dtype=np.int64)
        self._open: dict[Hashable, _Operation] = {}
        self._entered = [0] * self.n_ranks  # collectives entered by each member
        self._schedules = MemberSchedules(self.order, context.cluster, self.nodes, context.notes, of_nccl=True)
        self._costs: dict[tuple[str, str | Collective], Callable[[Phase], KnownCost]] = {}
        self._totals: dict[tuple[Phase, ...], KnownCost] = {}
        self._stream_end = 0.0

    def _ordered(self, rank_order: str | Sequence[int]) -> Ints:
        """Return the indices of the members in ring order."""
        if isinstance(rank_order, str):
            if rank_order == "given":
                return np.arange(self.n_ranks)
            return self.context.cluster.locality_order(self.nodes)
        n_workers = len(self.context.workers)
        if not np.array_equal(np.sort(np.asarray(rank_order, dtype=np.int64)), np.arange(n_workers)):
            last = n_workers - 1
            raise ConfigError(f"rank_order = {list(rank_order)}: must contain each rank from 0 to {last} once")
        return np.array([self.place[rank] for rank in rank_order if rank in self.place], dtype=np.int64)

    # ------------------------------------------------------------ who is where

    @functools.cached_property
    def levels(self) -> Levels:
        """The network levels among the members, in ring order."""
        return levels(self.context.cluster, self.at)

    @functools.cached_property
    def groups(self) -> list[Ints]:
        """Indices of the members in each group of the innermost network level, such as each machine."""
        return [self.order[members] for members in self.levels.groups[0]]

    @functools.cached_property
    def at(self) -> tuple[int, ...]:
        """Nodes of the members, in ring order."""
        return tuple(int(self.nodes[place]) for place in self.order.tolist())

    def blocks(self, size: int | str) -> list[list[int]]:
        """Divide the members into blocks, and return the indices of the members in each block.

        size  number of consecutive members per block, or "machine" for one block per group of the innermost network
              level
        """
        if isinstance(size, str):
            return [places.tolist() for places in self.groups]
        return [list(range(self.n_ranks))[first : first + size] for first in range(0, self.n_ranks, size)]

    def part(self, places: Sequence[int], fabric: Fabric | None = None, bystanders: Sequence[int] = ()) -> Communicator:
        """Return a communicator for some of the members.

        places      indices of the members
        fabric      fabric of the new communicator; None: the same fabric
        bystanders  nodes of additional ranks, as for :class:`Communicator`
        """
        members = [self.workers[place] for place in places]
        return Communicator(self.context, fabric or self.fabric, members, bystanders=bystanders, owner=self.owner)

    @property
    def simulated(self) -> bool:
        """Whether collectives are simulated message by message. Otherwise, a cost model determines their time."""
        return self.fabric.cost == "simulated" or self.n_ranks == 1

    # ------------------------------------------------------------ schedules

    def schedule(self, nbytes: float, kind: str = "all_reduce", algorithm: str | Collective | None = None) -> Schedule:
        """Return the schedule of a collective over `nbytes`.

        algorithm  algorithm of the collective; None: the algorithm of the fabric
        """
        return self._schedules.of(kind, self.fabric.algorithm if algorithm is None else algorithm, nbytes)

    # ------------------------------------------------------------ collectives

    def prepare(self, kind: str, algorithm: str | Collective | None = None) -> None:
        """Check, before the run starts, that the cost model covers collectives of this `kind`.

        algorithm  algorithm of the collectives; None: the algorithm of the fabric

        Raises ConfigError if the cost model does not cover them.
        """
        if self.simulated:
            return
        for phase in self.phases(kind, 1.0, algorithm):
            self._cost(phase)

    def _cost(self, phase: Phase) -> Callable[[Phase], KnownCost]:
        """Return the cost of collectives of the phase's kind and algorithm."""
        chosen = phase.algorithm or ("auto" if phase.kind == "all_reduce" else "ring")
        if (phase.kind, chosen) not in self._costs:
            cost = known_cost(self.context, self.fabric.cost, self.owner, chosen, phase.groups[0], phase.kind)
            self._costs[phase.kind, chosen] = cost
        return self._costs[phase.kind, chosen]

    def enter(
        self,
        key: Hashable,
        worker: Worker,
        nbytes: float,
        kind: str = "all_reduce",
        algorithm: str | Collective | None = None,
    ) -> simpy.Event:
        """Let a worker enter a collective now, and return the event that occurs when the worker has finished it.

        key        identifies the collective: all members that pass the same key enter the same collective. When all
                   members have entered it, the key may be used again
        nbytes     size of the buffer on each member, in bytes
        kind       the collective, such as "all_reduce"
        algorithm  algorithm of the collective; None: the algorithm of the fabric
        """
        if self.simulated:
            return self.follow(key, worker, nbytes, lambda: self.schedule(nbytes, kind, algorithm))
        return self.take(key, lambda: self.phases(kind, nbytes, algorithm), worker)

    def follow(self, key: Hashable, worker: Worker, nbytes: float, schedule: Callable[[], Schedule]) -> simpy.Event:
        """Let a worker enter a collective with the given `schedule`, which is simulated message by message.

        The arguments and the result are otherwise those of :meth:`enter`.
        """
        loop = self.context.loop

        def begun() -> int:
            number = loop.collective(schedule(), self.all_nodes, nbytes)
            for bystander in range(self.n_ranks, len(self.all_nodes)):
                loop.join(number, bystander)
            return number

        operation = self._joined(key, worker, begun)
        assert operation.number is not None
        return loop.join(operation.number, self.place[worker.rank])

    def _joined(self, key: Hashable, worker: Worker | None, begun: Callable[[], int | None]) -> _Operation:
        """Count a member that enters a collective; the first one creates it."""
        if worker is not None:
            self._entered[self.place[worker.rank]] += 1
        if key not in self._open:
            self._check_open()
            self._open[key] = _Operation(begun(), self.n_ranks)
        operation = self._open[key]
        operation.n_missing -= 1
        if not operation.n_missing:
            del self._open[key]
        return operation

    def take(self, key: Hashable, phases: Callable[[], tuple[Phase, ...]], worker: Worker | None = None) -> simpy.Event:
        """Let a worker enter a collective whose time is known, and which consists of consecutive `phases`.

        The collective starts when all members have entered it and all previous ones have ended. It ends for all members
        at the same time.
        """
        loop, operation = self.context.loop, self._joined(key, worker, lambda: None)
        event = loop.env.event()
        operation.joined.append(event)
        if not operation.n_missing:

            def ended(end: float) -> None:
                for waiting in operation.joined:
                    loop.trigger_at(waiting, end)

            self.run(phases(), ended)
        return event

    def run(self, phases: tuple[Phase, ...], ended: Callable[[float], None]) -> None:
        """Let all members enter a collective of known time now.

        `ended` is called with the end time in s, now or later.
        """
        loop, cost = self.context.loop, self._known_of(phases)
        start = max(loop.now, self._stream_end)
        if loop.network.is_shared:
            channels = np.flatnonzero(cost.traffic.busy).tolist()
            nodes = {node for phase in phases for group in phase.groups for node in group}
            if cost.is_disturbed(loop, start, [self, *channels], set(channels), nodes):
                cost.run(loop, start, [self, *channels], ended)
                return
        self._stream_end = loop.run_known(start, cost.seconds, cost.traffic)
        ended(self._stream_end)

    def _check_open(self) -> None:
        """Raise DeadlockError if :data:`MOST_OPEN` collectives wait for the same member."""
        if len(self._open) < MOST_OPEN:
            return
        last, first = min(range(self.n_ranks), key=self._entered.__getitem__), next(iter(self._open.values()))
        raise DeadlockError(
            f"{self.owner}: {MOST_OPEN} collectives are open at {self.context.loop.now:.6g} s. "
            f"{first.n_missing} of {self.n_ranks} workers have not entered the first of them: "
            f"{self.workers[last].name} has entered {self._entered[last]} collectives, others up to "
            f"{max(self._entered)}. Every member must enter every collective, or wait for one before the "
            "next"
        )

    def _known_of(self, phases: tuple[Phase, ...]) -> KnownCost:
        if phases not in self._totals:
            total = KnownCost.none(self.context.cluster)
            for phase in phases:
                total = total.then(self._cost(phase)(phase))
            busy = np.where(total.traffic.busy > 0.0, total.seconds, 0.0)  # occupied until its last phase ends
            self._totals[phases] = replace(total, traffic=total.traffic._replace(busy=busy))
        return self._totals[phases]

    def phases(self, kind: str, nbytes: float, algorithm: str | Collective | None = None) -> tuple[Phase, ...]:
        """Return the phases of a collective whose time is known.

        algorithm  algorithm of the collective; None: the algorithm of the fabric
        """
        if self._by_level(kind, algorithm):
            n_named = str(self.fabric.algorithm).count(",") + 1  # unnamed levels are merged
            inner = self.nested.shape[1:] if n_named == 1 else self.nested.shape[1:][1 - n_named :]
            return self.by_level(nbytes, self.nested.reshape(-1, *inner), kind=kind)
        chosen = self.fabric.algorithm if algorithm is None and kind == "all_reduce" else algorithm
        return (Phase(kind, (tuple(self.nodes[place] for place in self.order.tolist()),), nbytes, chosen),)

    def by_level(
        self, nbytes: float, nested: Ints, between: Phase | None = None, kind: str = "all_reduce"
    ) -> tuple[Phase, ...]:
        """Return the phases of a hierarchical collective over `nbytes`.

        nested   indices of the members, with one axis per network level
        between  phase that replaces the all-reduce between the outermost groups; None: an all-reduce

        At every level, starting with the innermost one, the members of a group reduce-scatter their data. Between the
        outermost groups, the members with the same part all-reduce it. All-gathers then distribute the result inside
        the groups. A reduce-scatter consists of the reduce-scatters only, an all-gather of the corresponding
        all-gathers.
        """
        nodes, phases = np.array(self.nodes)[nested], []
        for axis in range(nested.ndim - 1, -1, -1):
            groups = tuple(map(tuple, np.moveaxis(nodes, axis, -1).reshape(-1, nested.shape[axis]).tolist()))
            phases.append(Phase("reduce_scatter", groups, nbytes))
            nbytes /= nested.shape[axis]
        if kind != "all_reduce":
            in_order = phases if kind == "reduce_scatter" else reversed(phases)
            return tuple(phase._replace(kind=kind) for phase in in_order if len(phase.groups[0]) > 1)
        *inner, across = phases
        across = across._replace(kind="all_reduce") if between is None else between._replace(groups=across.groups)
        outwards = [phase._replace(kind="all_gather") for phase in reversed(inner)]
        return tuple(phase for phase in (*inner, across, *outwards) if len(phase.groups[0]) > 1)

    def _by_level(self, kind: str, algorithm: str | Collective | None) -> bool:
        """Return whether collectives of a kind and of known time are executed level by level."""
        chosen = self.fabric.algorithm if kind == "all_reduce" else algorithm
        return self.fabric.cost == "nccl" and hierarchical(chosen) and self.nested.size > 0

    @functools.cached_property
    def nested(self) -> Ints:
        """Indices of the members, with one axis per network level.

        Raises ConfigError if innermost groups differ in size.
        """
        if self.levels.places is None:
            on_machines = len(self.groups) == len(set(self.context.hosts(self.nodes).tolist()))
            raise ConfigError(
                f"{self.owner}: a hierarchical algorithm needs the same number of workers "
                f"{'on every machine' if on_machines else 'in every innermost group of the network'}, not "
                f"{sorted(set(map(len, self.groups)))}; use another number of workers, or 'ring'"
            )
        return self.order[self.levels.places]


def communicator(context: RunContext, strategy: OnFabric) -> Communicator:
    """Return a communicator of all workers, which executes collectives as specified by the strategy's fabric."""
    return Communicator(context, fabric_of(strategy), owner=type(strategy).__name__)


def hierarchical(algorithm: object) -> bool:
    """Return whether an algorithm works level by level."""
    return isinstance(algorithm, str) and algorithm.split("(")[0].strip() == "hierarchical"
