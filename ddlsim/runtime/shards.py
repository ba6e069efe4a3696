"""Servers that act together: each has an equal part of the parameters; workers push to and pull from all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from ddlsim.learning import Array, Value
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.lane_ops import Op
from ddlsim.runtime.lanes import Lanes
from ddlsim.runtime.servers import WithServers, server_nodes
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker, all_of
from ddlsim.units import si


class Visit(NamedTuple):
    """What a worker has brought, `staleness` updates after it took what it rests on, of `n_samples`."""

    rank: int
    value: Value[Array]
    staleness: int
    n_samples: int


class Visits:
    """Workers that all go round: ``before``, a visit of the servers, ``after``.

    pack     what a worker brings
    update   what is made of `count` visits, in the order in which they have come
    answer   what a worker gets
    held     for whom it waits after its turn: operations of MEET or CLOCK
    steps    of a worker between two visits
    late     visits count even if there has been an update since what they rest on was taken
    counted  an update of the servers is one of the run
    told     the staleness of visits matters
    first    the number, in ``after``, of the operation that all begin with; ``before`` if None

    Values follow if the run has any, sizes if they are not known before (``follows``).
    """

    def __init__(
        self, shards: Shards, before: Sequence[Op], after: Sequence[Op], *, count: int,
        pack: Callable[[Worker], Parcel], update: Callable[[list[Visit]], None], answer: Callable[[Worker], Parcel],
        held: Sequence[Op] = (), steps: int = 1, late: bool = True, counted: bool = True, told: bool = True,
        first: int | None = None,
    ) -> None:  # fmt: skip
        self.pack, self.update, self.answer, self.steps = pack, update, answer, steps
        self.packs, self.follows = shards.wires.choice is not None, follows(shards)
        self.visits: list[Visit] = []
        self.parcels: dict[int, Parcel] = {}
        setting, wires = shards.setting, shards.wires
        packed = [Op(ls.ASK if self.packs else ls.NOTE, follow=self._packed)] if self.follows else []
        ops = [
            *before, *packed,
            Op(ls.WORK, "encode"), Op(ls.TRAVEL, "push"), Op(ls.TURN, "the servers' queue"),
            Op(ls.REST, "decode", lambda _: wires.server_seconds()),
            Op(ls.GATHER if late else ls.GATHER_NEW, "update", lambda _: shards.apply_time, number=count),
            Op(ls.UPDATE, follow=self._updated if self.follows else None, number=counted), Op(ls.RELEASE), *held,
            Op(ls.TAKE, follow=self._taken if self.follows else None, number=self.packs),
            Op(ls.TRAVEL, "pull", number=1), Op(ls.WORK, "decode"), *after,
        ]  # fmt: skip
        worker = setting.workers[0]
        self.lanes = Lanes(
            setting, ops, worker.workload.gradient_nbytes / len(shards.nodes),
            worker.samples_per_step * count * steps,
            servers=[(node, 0.0) for node in shards.nodes], served=self._served if self.follows else None,
            batch=count if told else 0, first=0 if first is None else len(ops) - len(after) + first,
        )  # fmt: skip

    def _packed(self, worker: Worker) -> None:
        parcel = self.parcels[worker.rank] = self.pack(worker)
        if self.packs:
            self.lanes.set_seconds(worker, "encode", parcel.seconds)
            self.lanes.set_sizes(worker, parcel.sizes)

    def _served(self, worker: Worker, server: int, staleness: int, whole: bool) -> None:
        value = self.parcels[worker.rank].value
        self.visits.append(Visit(worker.rank, value, staleness, worker.samples_per_step * self.steps))

    def _updated(self, worker: Worker) -> None:
        visits, self.visits = self.visits, []
        self.update(visits)

    def _taken(self, worker: Worker) -> None:
        parcel = self.answer(worker)
        if self.packs:
            self.lanes.set_seconds(worker, "decode", parcel.seconds)
            for server, nbytes in enumerate(parcel.sizes):
                self.lanes.set_answer(worker, server, nbytes)


def follows(shards: Shards) -> bool:
    """Whether values, or sizes, follow what workers of a run do at its servers."""
    return shards.wires.choice is not None or shards.setting.learner.task is not None


def communicate(worker: Worker, event: simpy.Event, what: str) -> Process:
    """Block the worker until `event`, booked as communication."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, start, what)


def wait(worker: Worker, event: simpy.Event, what: str) -> Process:
    """Block the worker until `event`, booked as waiting for others."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, worker.loop.now, what)


@dataclass
class Shards:
    """Servers with an equal part of the parameters each. One worker at a time has its ``turn`` at them."""

    setting: Setting
    nodes: list[int]
    apply_time: float
    owner: str
    models: bool = False
    turn: simpy.Resource = field(init=False)
    wires: Wires = field(init=False)

    def __post_init__(self) -> None:
        self.turn = simpy.Resource(self.setting.loop.env)
        self.wires = Wires(self.setting, len(self.nodes), owner=self.owner, models=self.models)

    @classmethod
    def of(cls, strategy: WithServers, setting: Setting, *, models: bool = False) -> Shards:
        """Place the strategy's servers, to which workers send gradients or `models`.

        Raises ConfigError if there are not enough machines."""
        nodes = server_nodes(setting.cluster, setting.nodes, strategy.servers, strategy.placement)
        return cls(setting, nodes, si(strategy.apply_time, "time"), type(strategy).__name__, models)

    def up(self, worker: Worker, parcel: Parcel) -> simpy.Event:
        """Send what a worker has packed; the event is when all servers have their part."""
        sends = zip(self.nodes, parcel.sizes, strict=True)
        return all_of(worker.loop, [worker.loop.send(worker.node, node, nbytes) for node, nbytes in sends])

    def down(self, worker: Worker, parcel: Parcel) -> simpy.Event:
        """Send an answer; the event is when the worker has all of it."""
        sends = zip(self.nodes, parcel.sizes, strict=True)
        return all_of(worker.loop, [worker.loop.send(node, worker.node, nbytes) for node, nbytes in sends])

    def push(self, worker: Worker, parcel: Parcel) -> Process:
        """Encode and send what a worker has packed, and wait until all servers have it."""
        yield from worker.compute(parcel.seconds, "encode")
        yield from communicate(worker, self.up(worker, parcel), "push")

    def pull(self, worker: Worker, parcel: Parcel) -> Process:
        """Send an answer to a worker, who waits for it and decodes it."""
        yield from communicate(worker, self.down(worker, parcel), "pull")
        yield from worker.compute(parcel.seconds, "decode")

    def show_update(self, begin: float) -> None:
        """Show an update that began at `begin` and ends now, on every server's track."""
        for i in range(len(self.nodes)):
            self.setting.recorder.background(f"server {i}", "update", begin, self.setting.loop.now)
