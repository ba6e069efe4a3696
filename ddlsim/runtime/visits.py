"""What workers do at servers that act together, in lanes: they push to all, have their turn, wait, and pull."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddlsim.learning import Array, Value
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.lane_ops import Op
from ddlsim.runtime.lanes import Lanes
from ddlsim.runtime.shards import Shards
from ddlsim.runtime.wires import Parcel
from ddlsim.runtime.worker import Worker


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
