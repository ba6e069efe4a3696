"""`Draft`: build a plan task by task; and steps of training that are written down in this way, for every rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, KINDS, RECEIVE, SEND, Lane, Part, Plan
from ddlsim.plan.program import N_STEPS
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload

#: of each rank, rows that its next task needs
Needs = list[list[int]]


class Draft:
    """A plan under construction: add tasks one by one, then call :meth:`plan`.

    n_layers  number of layers in the model; 0 for plans without a model
    parts     groups of gradients; the gradients of a group are reduced over the ranks as one unit
    servers   ranks that are parameter servers
    delays    staleness of each layer's weights, as a number of updates; only for plans whose steps overlap

    >>> from ddlsim.plan import Draft
    >>> draft = Draft()
    >>> ready = draft.work(0, 0.003, "load")
    >>> draft.message(0, 1, 1e6, needs=[ready])
    (1, 2)
    >>> len(draft.plan())
    3
    """

    def __init__(
        self, n_layers: int = 0, parts: Iterable[Part] = (), servers: Iterable[int] = (), delays: Iterable[int] = ()
    ) -> None:
        self.n_layers = n_layers
        self.servers, self.delays = tuple(servers), tuple(delays)
        self.parts = tuple(parts)
        self._lanes: dict[Lane, int] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._names: dict[str, int] = {}
        self._rows: list[tuple[float, ...]] = []
        self._needs: list[tuple[int, ...]] = []
        self._n_keys = 0

    def work(
        self, rank: int, seconds: float, name: str = "", *, kind: str = "compute", lane: str = "compute", step: int = 0,
        batch: int = -1, layers: tuple[int, int] = (0, 0), needs: Iterable[int] = (), holds: float = 0.0,
    ) -> int:  # fmt: skip
        """Add work on a rank, and return its row.

        A pass or an update covers the layers ``layers[0]`` to ``layers[1] - 1``.
        """
        if kind not in KINDS[:SEND]:
            raise unknown_name("kind of work", kind, KINDS[:SEND])
        number = KINDS.index(kind)
        return self._add(
            rank, lane, number, name, needs, seconds=seconds, step=step, batch=batch, layers=layers, holds=holds
        )

    def message(
        self, src: int, dst: int, nbytes: float, name: str = "", *, step: int = 0, needs: Iterable[int] = (),
        lanes: tuple[str, str] = ("stream", "stream"), batch: int = -1, cut: int = 0,
    ) -> tuple[int, int]:  # fmt: skip
        """Add a message between ranks, and return the rows of its send and its receive.

        The message is sent when the rows in `needs` have ended. With `cut`, it carries the tensors of a micro-batch
        that cross the cut before that layer: activations in the forward pass, gradients in the backward pass.
        """
        key, layers = self._new_key(), (cut, cut)
        send = self._add(
            src, lanes[0], SEND, name, needs, nbytes=nbytes, peer=dst, key=key, step=step, batch=batch, layers=layers
        )
        receive = self._add(
            dst, lanes[1], RECEIVE, name, (), nbytes=nbytes, peer=src, key=key, step=step, batch=batch, layers=layers
        )
        return send, receive

    def collective(
        self, kind: str, group: Sequence[int], nbytes: float, needs: Sequence[Iterable[int]] = (), name: str = "", *,
        step: int = 0, part: int = -1, lane: str = "stream", batch: int = -1,
    ) -> list[int]:  # fmt: skip
        """Add a collective of a group of ranks, and return its rows.

        Member i enters the collective when the rows in ``needs[i]`` have ended. `part` is the index of the gradients
        that it sums, or whose updated weights it distributes; `batch`: for only this micro-batch.
        """
        if kind not in KINDS[ALL_REDUCE:]:
            raise unknown_name("kind of collective", kind, KINDS[ALL_REDUCE:])
        members = tuple(group)
        if needs and len(needs) != len(members):
            raise ConfigError(
                f"needs: has {len(needs)} entries for a group of {len(members)} ranks; provide one per member"
            )
        key, number = self._new_key(), self._groups.setdefault(members, len(self._groups))
        return [
            self._add(
                rank, lane, KINDS.index(kind), name, needs[i] if needs else (), nbytes=nbytes, peer=number,
                key=key, step=step, part=part, batch=batch,
            )
            for i, rank in enumerate(members)
        ]  # fmt: skip

    #: :meth:`collective` of this kind
    all_reduce = functools.partialmethod(collective, "all_reduce")

    def plan(self) -> Plan:
        """Return the plan so far, unchecked."""
        names = [name for name in COLUMNS if name != "every"]
        columns = np.array(self._rows, dtype=np.float64).reshape(len(self._rows), len(names)).T
        lengths = [len(needs) for needs in self._needs]
        return Plan(
            lanes=tuple(self._lanes), groups=tuple(self._groups), parts=self.parts, names=tuple(self._names),
            n_layers=self.n_layers, servers=self.servers, delays=self.delays, need_offsets=np.cumsum([0, *lengths]),
            needs=np.array([row for needs in self._needs for row in needs], dtype=np.int64),
            **dict(zip(names, columns, strict=True)),  # type: ignore[arg-type]  # the plan converts them
        )  # fmt: skip

    def _new_key(self) -> int:
        self._n_keys += 1
        return self._n_keys - 1

    def _add(
        self, rank: int, lane: str, kind: int, name: str, needs: Iterable[int], *, seconds: float = 0.0,
        nbytes: float = 0.0, peer: int = -1, key: int = -1, step: int = 0, batch: int = -1,
        layers: tuple[int, int] = (0, 0), part: int = -1, holds: float = 0.0,
    ) -> int:  # fmt: skip
        place = self._lanes.setdefault(Lane(rank, lane), len(self._lanes))
        called = self._names.setdefault(name, len(self._names)) if name else -1
        row = (place, kind, called, seconds, nbytes, peer, key, step, batch, *layers, part, holds)
        self._rows.append(row)
        self._needs.append(tuple(needs))
        return len(self._rows) - 1


class DraftedSteps:
    """Steps, written down one after the other.

    each               workload of each rank
    buckets            that all ranks sum; bucket i is part i of the plan
    forward, backward  seconds of each layer, by rank
    kept               bytes of activations of each layer that a rank's micro-batch stores, by rank
    n_batches          micro-batches of a rank and step
    now, micro         the current step and micro-batch
    sums               of each rank, the rows that sum gradients in the current step
    """

    def __init__(
        self, workloads: list[Workload], buckets: Iterable[Bucket], parts: Iterable[Part], n_batches: int = 1
    ) -> None:
        self.workloads, self.buckets, self.n_batches, self.now, self.micro = workloads, list(buckets), n_batches, 0, 0
        self.n, self.n_layers = len(workloads), len(workloads[0].forward)
        self.draft, self.sums = Draft(self.n_layers, parts), self.nothing()
        self.forward, self.backward = [w.forward for w in workloads], [w.backward for w in workloads]
        self.kept = [stored_nbytes(w) for w in workloads]

    def plan(self) -> Plan:
        """Return the plan of the first steps."""
        for now in range(N_STEPS):
            self.now, self.sums = now, self.nothing()
            self.write_step()
        return self.draft.plan()

    def write_step(self) -> None:
        """Add the tasks of the current step."""
        raise NotImplementedError

    @property
    def is_last(self) -> bool:
        """Whether gradients are complete after the current micro-batch."""
        return self.micro == self.n_batches - 1

    def nothing(self) -> Needs:
        """Return that no rank has to wait."""
        return [[] for _ in range(self.n)]

    def add_pass(
        self, kind: str, rank: int, first: int, end: int, needs: Iterable[int] = (), *, of: int = -1, part: float = 1.0
    ) -> int:
        """Add a pass of a rank through the layers `first` to `end` - 1, or `part` of its time, with its own micro-batch
        or that `of` another rank."""
        owner = rank if of < 0 else of
        kept = float(self.kept[owner][first:end].sum())
        return self.draft.work(
            rank, part * self.seconds(kind, rank, first, end), kind=kind, batch=owner * self.n_batches + self.micro,
            layers=(first, end), step=self.now, needs=needs,
            holds={"forward": kept, "backward_input": 0.0}.get(kind, -kept),
        )  # fmt: skip

    def seconds(self, kind: str, rank: int, first: int, end: int) -> float:
        """Return the seconds of a rank's pass through the layers `first` to `end` - 1."""
        return float((self.forward if kind == "forward" else self.backward)[rank][first:end].sum())

    def add_passes(self, kind: str, first: int, end: int, needs: Needs, part: float = 1.0) -> Needs:
        """Add a pass of every rank; return its rows."""
        return [[self.add_pass(kind, rank, first, end, needs[rank], part=part)] for rank in range(self.n)]

    def add_update(self, rank: int, share: float, first: int = 0) -> int:
        """Add a rank's update of the layers from `first` on, a share of the optimizer's time."""
        seconds, layers = share * self.workloads[rank].optimizer, (first, self.n_layers)
        return self.draft.work(rank, seconds, kind="update", layers=layers, step=self.now, needs=self.sums[rank])

    def exchange(
        self, kind: str, group: Sequence[int], nbytes: float, done: Needs, waits: Needs, name: str, lane: str,
        part: int = -1, batch: int = -1,
    ) -> None:  # fmt: skip
        """Add a collective of a group after the rows `done`, and add its rows to those that its members wait for."""
        needs, more = [done[r] for r in group], {"step": self.now, "part": part, "batch": batch}
        rows = self.draft.collective(kind, group, nbytes, needs, name, lane=lane, **more)
        for r, row in zip(group, rows, strict=True):
            waits[r].append(row)

    def reduce(
        self, group: Sequence[int], nbytes: float, done: Needs, name: str = "", *, part: int = -1, lane: str = "stream"
    ) -> None:
        """Add the sum of gradients over a group after the rows `done`."""
        self.exchange("all_reduce", group, nbytes, done, self.sums, name, lane, part)

    def reduce_ready(self, layer: int, done: Needs) -> None:
        """Add the sums of the buckets that are ready when backward passes have come down to a layer."""
        for part, bucket in enumerate(self.buckets):
            if bucket.ready_layer == layer:
                self.reduce(range(self.n), bucket.nbytes, done, part=part)

    def stops(self, first: int, end: int, *more: int) -> list[int]:
        """Return the layers at which backward passes from layer `end` to `first` pause for gradients, in order."""
        layers = {bucket.ready_layer for bucket in self.buckets} | {first, *more}
        return sorted((layer for layer in layers if first <= layer < end), reverse=True)

    def add_backward(self, first: int, end: int, waits: Needs) -> tuple[Needs, Needs]:
        """Add a backward pass from layer `end` to `first`, which sends buckets; return its last rows, and those that
        are still to be waited for."""
        rows: Needs = []
        for stop in self.stops(first, end):
            rows, end, waits = self.add_passes("backward", stop, end, waits), stop, self.nothing()
            self.reduce_ready(stop, rows)
        return rows, waits
