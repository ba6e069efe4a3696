"""What carries vectors of many workers so that they become one: their mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import simpy

from ddlsim.collectives import Collective, Schedule
from ddlsim.learning import Array, Value
from ddlsim.plan.plan import KINDS
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.costs import Phase
from ddlsim.runtime.fabric import Fabric
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker

Way = Literal["schedule", "known", "process"]


class Carrier:
    """How vectors of all members, in parts, become their mean: a base class, by default of dense vectors."""

    #: the members
    communicator: Communicator
    #: what a worker is said to do while it waits for them
    what: str
    #: whether parts are compressed
    compresses = False
    #: whether workers decode parts as they arrive; otherwise they wait for the last one only
    decodes: bool = False

    @property
    def way(self) -> Way:
        """What a part travels by: one collective, simulated by a "schedule" or of "known" time, or a "process"."""
        return "process"

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a part is ready, before it leaves."""
        return 0.0

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        """Let a worker's part of `nbytes` leave now; return the event of the mean's arrival."""
        raise NotImplementedError

    def schedule(self, step: int, index: int, nbytes: float) -> tuple[Schedule, float]:
        """Return the collective of a part of `nbytes`, and the bytes of its buffer, where it goes by a schedule."""
        raise NotImplementedError

    def phases(self, step: int, index: int, nbytes: float) -> tuple[Phase, ...]:
        """Return what the collective of a part of `nbytes` consists of, where its time is known."""
        raise NotImplementedError

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a part's mean has arrived."""
        return 0.0

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        """Return what every worker ends with, given what all have brought, by place."""
        return self.communicator.setting.learner.mean(vectors)


class Exchanges(Protocol):
    """What carries the collectives of a plan."""

    def carrier(self, kind: int, group: int, *, parts: bool) -> Carrier | None:
        """Return what carries collectives of a kind (:data:`ddlsim.plan.KINDS`) in a group, of `parts` of the gradients
        (and of the weights made from them) or of anything else; None if nothing does."""

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return what the gradients of all who learn become, by place."""


@dataclass(frozen=True, eq=False)
class OfKinds:
    """:class:`Exchanges` of a carrier for each kind of collective; the first one sums gradients."""

    carriers: Mapping[int, Carrier]

    def carrier(self, kind: int, group: int, *, parts: bool) -> Carrier | None:
        return self.carriers.get(kind)

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return next(iter(self.carriers.values())).mean(step, gradients)


@dataclass(eq=False)
class Dense(Carrier):
    """Vectors travel as they are: by collectives of a `kind`, by the fabric's algorithm or another one, or by
    `schedules` of a number of bytes."""

    communicator: Communicator
    kind: str = "all_reduce"
    algorithm: str | Collective | None = None
    schedules: Callable[[float], Schedule] | None = None

    def __post_init__(self) -> None:
        self.what = self.kind.replace("_", "-")
        if self.schedules is None:
            self.communicator.prepare(self.kind, self.algorithm)

    @property
    def way(self) -> Way:
        return "schedule" if self.schedules is not None or self.communicator.simulated else "known"

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        communicator, key = self.communicator, (self, step, index)
        if self.way == "known":
            return communicator.take(key, lambda: self.phases(step, index, nbytes))
        return communicator.follow(key, worker, nbytes, lambda: self.schedule(step, index, nbytes)[0])

    def schedule(self, step: int, index: int, nbytes: float) -> tuple[Schedule, float]:
        if self.schedules is not None:
            return self.schedules(nbytes), nbytes
        return self.communicator.schedule(nbytes, self.kind, self.algorithm), nbytes

    def phases(self, step: int, index: int, nbytes: float) -> tuple[Phase, ...]:
        return self.communicator.phases(self.kind, nbytes)


@dataclass(frozen=True, eq=False)
class OfGroups:
    """:class:`Exchanges` in several groups of the ranks of a plan, dense and simulated.

    workers    that the ranks are, or the first of those that each stands for
    schedules  kind of collective, group, bytes -> its schedule
    """

    setting: Setting
    workers: Sequence[Worker]
    groups: Sequence[Sequence[int]]
    schedules: Callable[[int, int, float], Schedule]

    def carrier(self, kind: int, group: int, *, parts: bool) -> Carrier:
        members = [self.workers[rank] for rank in self.groups[group]]
        communicator = Communicator(self.setting, Fabric(rank_order="given"), members)
        return Dense(communicator, KINDS[kind], schedules=functools.partial(self.schedules, kind, group))

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return self.setting.learner.mean(gradients)
