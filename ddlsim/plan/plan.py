"""`Plan`: the task graph of training steps, one row per task. Pure data, without clock, network or values.

**When a task runs.** A lane executes one task at a time, in the order of its rows. A task starts when the one before it
on its lane and all its dependencies have ended. A lane with a queue has no order: its tasks start when their
dependencies have ended, and its collectives when the queue also launches them. Work takes its seconds. The rows of a
collective, one per member, start independently; each ends when the collective ends for that member. A message flows
when its send starts; the send ends at the delivery, and so does the receive, unless it starts later.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.readable import count
from ddlsim.text_tables import aligned

if TYPE_CHECKING:
    import matplotlib.axes
    import networkx as nx

    from ddlsim.cluster import Cluster
    from ddlsim.collectives import Collective
    from ddlsim.plan.bounds import Cut
    from ddlsim.plan.execute import Execution
    from ddlsim.plan.queues import Queue

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: the columns of a plan with one entry per row
COLUMNS = (
    "lane", "kind", "name", "seconds", "nbytes", "peer", "key", "step", "batch", "first", "end", "part", "holds",
    "every",
)  # fmt: skip
#: kinds of tasks; ``Plan.kind`` contains indices in this list. Those from all_reduce on are collectives
KINDS = (
    "forward", "backward", "update", "compute", "backward_input", "backward_weight", "send", "receive",
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "push_pull",
)  # fmt: skip
(
    FORWARD, BACKWARD, UPDATE, COMPUTE, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND, RECEIVE,
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, PUSH_PULL,
) = range(len(KINDS))  # fmt: skip
#: rows of a plan's table that are printed, and columns of that that contain words
_N_ROWS, _LEFT = 24, (1, 2)
#: collectives from or to the first member of their group, which the other members need not wait for
ROOTED = (BROADCAST, REDUCE, GATHER, SCATTER)


class Lane(NamedTuple):
    """A resource that executes the tasks of a rank one at a time, such as the rank's device or a communication stream.

    rank   rank to which the resource belongs
    name   name of the resource, such as "compute" or "stream"
    queue  index in ``Plan.queues`` of the queue that decides when the lane's collectives start. -1: no queue; tasks run
           in the order of their rows in the plan
    """

    rank: int
    name: str
    queue: int = -1


class Part(NamedTuple):
    """A part of a model's gradients that is reduced over the ranks as one unit.

    nbytes      size of the gradients in bytes
    first, end  range of layers, `first` to `end` - 1, to which the gradients belong. The part may contain only some of
                the tensors of these layers
    tied        index of another layer that shares these weights, whose gradient is added to the sum; -1: none
    """

    nbytes: float
    first: int
    end: int
    tied: int = -1


class Every(NamedTuple):
    """Steps in which a task takes place, counted from 1: those from `begin` to `end` whose number is `offset` modulo
    `period`, except multiples of `unless` (0: no exception)."""

    period: int
    offset: int = 0
    begin: int = 1
    end: float = math.inf
    unless: int = 0

    def includes(self, step: int) -> bool:
        """Return whether the task takes place in a step."""
        inside = self.begin <= step <= self.end and (step - self.offset) % self.period == 0
        return inside and not (self.unless and step % self.unless == 0)

    def count(self, step: int) -> int:
        """Return the number of steps 1, 2, ..., `step` in which the task takes place."""
        last = int(min(step, self.end))
        n = _n_congruent(self.begin, last, self.offset, self.period)
        if not self.unless:
            return n
        common = math.lcm(self.period, self.unless)
        left_out = [residue for residue in range(0, common, self.unless) if (residue - self.offset) % self.period == 0]
        return n - sum(_n_congruent(self.begin, last, residue, common) for residue in left_out)

    def nth(self, number: int) -> int:
        """Return the step in which the task takes place for the `number`-th time, from 1."""
        return bisect.bisect_left(range(1 << 62), number, key=self.count)


@dataclass(frozen=True, eq=False)
class Chosen:
    """Steps in which a task takes place, in order. The run chooses each of them while it executes earlier steps.

    period  largest distance between two of the steps for which the ranks cannot drift too far apart
    by      what the choice depends on
    """

    steps: list[int]
    period: int
    by: str

    @property
    def first(self) -> Every:
        """The steps if the first period is never changed."""
        return Every(self.steps[0])

    def includes(self, step: int) -> bool:
        """Return whether the task takes place in a step."""
        return self.count(step) > self.count(step - 1)

    def count(self, step: int) -> int:
        """Return the number of steps up to `step` in which the task takes place."""
        return bisect.bisect_right(self.steps, step)

    def nth(self, number: int) -> int:
        """Return the step in which the task takes place for the `number`-th time, from 1."""
        return self.steps[number - 1]


def _n_congruent(first: int, last: int, rest: int, modulus: int) -> int:
    """Return how many of the numbers `first`, ..., `last` are `rest` modulo `modulus`."""
    return max(0, (last - rest) // modulus - (first - 1 - rest) // modulus)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """The task graph of the ranks 0..n_ranks-1, stored as columns with one row per task.

    Columns have the shape (n,) for n tasks, unless noted otherwise. They refer to these tables:

    lanes         lanes that execute the tasks, indexed by the column ``lane``
    queues        queues that decide when the collectives of a lane start, indexed by ``Lane.queue``
                  (:mod:`ddlsim.plan.queues`)
    groups        ranks of each communicator, indexed by the column ``peer`` of collectives. The first member is the
                  root of a broadcast, reduce, gather or scatter; member i owns block i of scattered data
    parts         gradients that are reduced as one unit, indexed by the column ``part``
    names         names of tasks, indexed by the column ``name``
    n_layers      number of layers in the model; layers are numbered 0..n_layers-1 in forward order
    servers       ranks that are parameter servers. In the group of a push_pull, the servers are the last members; the
                  other members push gradients and pull the sums. Server i stores the i-th part of the bytes
    cycles        sets of steps, indexed by ``every`` - 1
    delays        (n_layers,) for asynchronous pipelines, whose micro-batches are in several steps at once: the age, in
                  updates, of the weights that a micro-batch uses on a layer, forward and backward, relative to the
                  weights that its gradient updates. Batches are then numbered over all steps; a pass belongs to the
                  step in which its rank executes it, its gradient to that of its backward pass; and the backward passes
                  of the last micro-batches may be missing. (): steps begin with the updated weights, and end with all
                  micro-batches
    tensor        number of ranks that split every layer: rank r computes part r mod tensor of each of its layers, and
                  the rules for a model hold for each of these parts
    notes         one line for each aspect that the plan leaves open, such as decisions taken during a run

    The columns are:

    lane          index of the lane that executes the task; the rows of a lane are in the order of execution
    kind          index in :data:`KINDS`. Passes are forward, backward, and backward for the gradient of the input only
                  or of the weights only
    name          index of the task's name; -1: the task has no name
    seconds       uncontended duration in seconds of work (passes, updates, other computation); 0 for other kinds
    nbytes        bytes of a message, or of a collective's whole buffer: the output of an all-gather, the input of a
                  reduce-scatter
    peer          send: the receiving rank; receive: the sending rank; collective: its group; others: -1
    key           number below n that a send shares with its receive, and that the rows of a collective share; others:
                  -1
    step          number of the training step
    batch         passes, and other work on a micro-batch: its number among those of all ranks; messages: that of the
                  tensors that they carry over a cut between layers; all-gathers of sharded weights: that of the pass
                  that they are for; others: -1
    first, end    passes (also recomputed ones), update: the layers `first` to `end` - 1; messages with a micro-batch:
                  both are the layer after the cut; others: 0 and 0
    part          collective: the gradients that it sums, or whose updated weights it distributes; -1 if none
    holds         bytes of memory that the rank allocates at the start of the task (above 0) or frees at its end (below
                  0)
    every         in templates of programs: 0 for a task of every step; otherwise the task takes place only in the steps
                  ``cycles[every - 1]``; zeros by default
    need_offsets  (n + 1,): row i starts after the rows ``needs[need_offsets[i]:need_offsets[i + 1]]`` have ended
    needs         (n_needs,) rows

    Raises ConfigError for columns of other shapes and for invalid indices. :meth:`check` checks all other rules.
    """

    lanes: tuple[Lane, ...]
    queues: tuple[Queue, ...] = ()
    groups: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    names: tuple[str, ...]
    n_layers: int
    servers: tuple[int, ...] = ()
    delays: tuple[int, ...] = ()
    cycles: tuple[Every | Chosen, ...] = ()
    tensor: int = 1
    notes: tuple[str, ...] = ()
    lane: Ints
    kind: Ints
    name: Ints
    seconds: Floats
    nbytes: Floats
    peer: Ints
    key: Ints
    step: Ints
    batch: Ints
    first: Ints
    end: Ints
    part: Ints
    holds: Floats
    every: Ints = ()  # type: ignore[assignment]  # zeros
    need_offsets: Ints
    needs: Ints

    def __post_init__(self) -> None:
        n = len(self.lane)
        if not len(self.every):
            object.__setattr__(self, "every", np.zeros(n, dtype=np.int64))
        for name in (*COLUMNS, "need_offsets", "needs"):
            dtype = np.float64 if name in ("seconds", "nbytes", "holds") else np.int64
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            expected = {"need_offsets": (n + 1,), "needs": (int(self.need_offsets[-1]),)}.get(name, (n,))
            if column.shape != expected:
                raise ConfigError(f"plan: {name} has shape {column.shape}; expected {expected}")
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._check_ranges()

    def _check_ranges(self) -> None:
        n, grouped = len(self), self.kind >= ALL_REDUCE
        for lane in self.lanes:
            if lane.rank < 0 or not -1 <= lane.queue < len(self.queues):
                raise ConfigError(f"plan: {lane}: its rank must be at least 0 and its queue below {len(self.queues)}")
        limits: list[tuple[str, npt.NDArray[np.number], float, float | Ints]] = [
            ("lane", self.lane, 0, len(self.lanes)), ("kind", self.kind, 0, len(KINDS)),
            ("name", self.name, -1, len(self.names)), ("seconds", self.seconds, 0.0, np.inf),
            ("nbytes", self.nbytes, 0.0, np.inf),
            ("holds", self.holds, -np.inf, np.inf), ("key", self.key, -1, n), ("step", self.step, 0, n),
            ("batch", self.batch, -1, n),
            ("first", self.first, 0, self.n_layers + 1), ("end", self.end, 0, self.n_layers + 1),
            ("part", self.part, -1, len(self.parts)), ("every", self.every, 0, len(self.cycles) + 1),
            ("peer", self.peer, -1, np.where(grouped, len(self.groups), self.n_ranks)),
        ]  # fmt: skip
        for name, column, low, high in limits:
            bad = np.flatnonzero(~((column >= low) & (column < high)))
            if len(bad):
                row, value = bad[0], column[bad[0]]
                raise ConfigError(f"plan: {name}[{row}] = {value} is out of range")
        bad = np.flatnonzero((self.needs < 0) | (self.needs >= n))
        if len(bad):
            i, row = bad[0], self.needs[bad[0]]
            raise ConfigError(f"plan: needs[{i}] = {row}: must be a row from 0 to {n - 1}")
        for i, group in enumerate(self.groups):
            if len(set(group)) != len(group) or not all(0 <= rank < self.n_ranks for rank in group):
                raise ConfigError(f"plan: groups[{i}] = {group}: must list distinct ranks below {self.n_ranks}")
        if not set(self.servers) <= set(range(self.n_ranks)):
            raise ConfigError(f"plan: servers = {self.servers}: must be ranks below {self.n_ranks}")
        if self.tensor < 1 or self.n_ranks % self.tensor:
            raise ConfigError(f"plan: tensor = {self.tensor}: must divide the number of ranks, {self.n_ranks}")
        if self.delays and (len(self.delays) != self.n_layers or min(self.delays) < 0):
            raise ConfigError(f"plan: delays = {self.delays}: must have one non-negative number per layer")

    def with_columns(self, **columns: npt.NDArray[Any]) -> Plan:
        """Return the plan with some columns replaced by others of the same shape, unchecked."""
        plan = copy.copy(self)
        vars(plan).update(columns)
        return plan

    def __len__(self) -> int:
        return len(self.lane)

    def __eq__(self, other: object) -> bool:
        """Return whether another plan has the same tasks."""
        if not isinstance(other, Plan):
            return NotImplemented
        fields = [field.name for field in dataclasses.fields(self)]
        pairs = ((getattr(self, name), getattr(other, name)) for name in fields)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.lanes, self.groups, self.parts, len(self)))

    def __repr__(self) -> str:
        return f"<Plan: {len(self)} tasks on {len(self.lanes)} lanes of {self.n_ranks} ranks, {self.n_steps} steps>"

    # ------------------------------------------------------------ what follows from the columns

    @cached_property
    def lane_rank(self) -> Ints:
        """Rank of each lane, (n_lanes,)."""
        return np.array([lane.rank for lane in self.lanes], dtype=np.int64)

    @cached_property
    def rank(self) -> Ints:
        """Rank of each task, (n,)."""
        return self.lane_rank[self.lane]

    @cached_property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return max((lane.rank for lane in self.lanes), default=-1) + 1

    @cached_property
    def n_steps(self) -> int:
        """Number of training steps."""
        return int(self.step.max()) + 1 if len(self) else 0

    @cached_property
    def queue(self) -> Ints:
        """Queue of each task's lane, -1 if it has none, (n,)."""
        return np.array([lane.queue for lane in self.lanes], dtype=np.int64)[self.lane]

    @cached_property
    def previous(self) -> Ints:
        """Previous row on the same lane, (n,); -1 for the first row, and on lanes without an order."""
        order = np.argsort(self.lane, kind="stable")
        before = np.full(len(self), -1, dtype=np.int64)
        same = (self.lane[order[1:]] == self.lane[order[:-1]]) & (self.queue[order[1:]] < 0)
        before[order[1:][same]] = order[:-1][same]
        return before

    @cached_property
    def on_device(self) -> Bools:
        """Whether each task is executed by its rank's device, on a lane "compute", (n,)."""
        return np.array([lane.name == "compute" for lane in self.lanes], dtype=np.bool_)[self.lane]

    @property
    def needing(self) -> Ints:
        """The row that needs each of `needs`, (n_needs,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.need_offsets))

    def needs_of(self, row: int) -> list[int]:
        """Return the rows that a row needs."""
        needed: list[int] = self.needs[self.need_offsets[row] : self.need_offsets[row + 1]].tolist()
        return needed

    def rows(self, *kinds: int) -> Ints:
        """Return the rows of these kinds, in order."""
        return np.flatnonzero(np.isin(self.kind, kinds))

    @cached_property
    def collectives(self) -> Ints:
        """Rows of collectives, in order."""
        return np.flatnonzero(self.kind >= ALL_REDUCE)

    @cached_property
    def messages(self) -> tuple[Ints, Ints]:
        """Rows of sends and of receives, sorted by key: the i-th send belongs to the i-th receive."""
        send, receive = (
            rows[np.argsort(self.key[rows], kind="stable")] for rows in (self.rows(SEND), self.rows(RECEIVE))
        )
        return send, receive

    # ------------------------------------------------------------ as text

    def _what(self, row: int) -> str:
        """Return a description of a task: "backward of layers 3..7, batch 0, step 2"."""
        kind, name = int(self.kind[row]), int(self.name[row])
        text = self.names[name] if name >= 0 else KINDS[kind].replace("_", "-")
        passes = kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        if passes or kind == UPDATE:
            first, last = int(self.first[row]), int(self.end[row]) - 1
            text += f" of layer {first}" if first == last else f" of layers {first}..{last}"
        if kind in (SEND, RECEIVE):
            text += f" {'to' if kind == SEND else 'from'} rank {self.peer[row]}"
            if self.batch[row] >= 0:
                text += f" over the cut before layer {self.first[row]}"
        gathers = kind >= ALL_REDUCE and self.part[row] >= 0
        text += f" of part {self.part[row]}" if gathers else ""
        if passes or (self.batch[row] >= 0 and (gathers or kind in (SEND, RECEIVE))):
            text += f", batch {self.batch[row]}"
        return f"{text}, step {self.step[row]}"

    def task(self, row: int) -> str:
        """Return a description of a task, with its row and lane."""
        lane = self.lanes[self.lane[row]]
        return f"row {row} (rank {lane.rank} {lane.name}: {self._what(row)})"

    def __str__(self) -> str:
        return "\n".join([*self._summary(), "", *aligned(self._cells(), _LEFT), *self._more()])

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        title, lanes = self._summary()
        return page(title, lines([lanes]), grid(self._cells(), _LEFT), lines(self._more()))

    def _cells(self) -> list[list[str]]:
        """Return the first rows as cells, below a header; the columns :data:`_LEFT` contain words."""
        cells = [["row", "lane", "task", "ms", "MB", "needs", "holds MB"]]
        for row in range(min(_N_ROWS, len(self))):
            lane, needs = self.lanes[self.lane[row]], self.needs_of(row)
            shown = " ".join(map(str, needs[:4])) + (f" +{len(needs) - 4}" if len(needs) > 4 else "")
            numbers = 1e3 * self.seconds[row], self.nbytes[row] / 1e6, self.holds[row] / 1e6
            seconds, nbytes, holds = ("" if value == 0.0 else f"{value:.4g}" for value in numbers)
            cells.append([str(row), f"{lane.rank} {lane.name}", self._what(row), seconds, nbytes, shown, holds])
        return cells

    def _more(self) -> list[str]:
        """Return a line about the rows that are not shown, if any, and the notes."""
        rest = [f"... and {len(self) - _N_ROWS} more"] if len(self) > _N_ROWS else []
        return [*rest, *(f"note: {note}" for note in self.notes)]

    def _summary(self) -> tuple[str, str]:
        """Return the totals of a plan in two lines: its tasks and its lanes."""
        kinds = Counter(KINDS[kind].replace("_", "-") for kind in sorted(self.kind.tolist()))
        lanes = Counter[str]()
        for lane, n in zip(self.lanes, np.bincount(self.lane, minlength=len(self.lanes)).tolist(), strict=True):
            lanes[lane.name] += n
        tasks = ", ".join(f"{n} {name}" for name, n in kinds.items()) or "nothing"
        ranks, steps = count(self.n_ranks, "rank"), count(self.n_steps, "step")
        on = ", ".join(f"{n} on {name!r}" for name, n in lanes.items()) or "none"
        return f"{count(len(self), 'task')} of {ranks} in {steps}: {tasks}", f"lanes: {on}"

    # ------------------------------------------------------------ what can be done with it

    def check(self) -> None:
        """Check the plan: see :func:`ddlsim.plan.check.check`. Raises ConfigError, naming the task."""
        from ddlsim.plan.check import check

        check(self)

    def critical_path(self, min_seconds: float | Floats = 0.0) -> float:
        """Return the length of the critical path in seconds: see :func:`ddlsim.plan.bounds.critical_path`."""
        from ddlsim.plan.bounds import critical_path

        return critical_path(self, min_seconds)

    def cut(self, cluster: Cluster, nodes: Sequence[int] | None = None) -> Cut:
        """Return a lower bound from the bytes that cross an interface: see :func:`ddlsim.plan.bounds.cut`."""
        from ddlsim.plan.bounds import cut

        return cut(self, cluster, nodes)

    def peak_memory(self) -> Floats:
        """Return the peak memory of each rank's tasks, in bytes, (n_ranks,)."""
        from ddlsim.plan.bounds import peak_memory

        return peak_memory(self)

    def plot(self, path: str | Path | None = None, *, n_ranks: int = 4) -> matplotlib.axes.Axes:
        """Draw the dependency graph of at most `n_ranks` ranks, and write it to `path` if given."""
        from ddlsim.report.plan_graph import graph

        return graph(self, path, n_ranks=n_ranks)

    def to_chakra(self, path: str | Path) -> list[Path]:
        """Write Chakra execution traces, one file per rank: see :func:`ddlsim.plan.chakra.to_chakra`."""
        from ddlsim.plan.chakra import to_chakra

        return to_chakra(self, path)

    def to_goal(
        self,
        path: str | Path,
        algorithm: str | Collective | Mapping[str, str | Collective] = "default",
        *,
        cluster: str | Path | nx.Graph[str] | Cluster | None = None,
        nodes: Sequence[int] | None = None,
        rank_order: str | Sequence[int] = "topology",
    ) -> Path:
        """Write GOAL text, with collectives as messages: see :func:`ddlsim.plan.goal.to_goal`."""
        from ddlsim.plan.goal import to_goal

        return to_goal(self, path, algorithm, cluster=cluster, nodes=nodes, rank_order=rank_order)

    def execute(
        self,
        cluster: str | Path | nx.Graph[str] | Cluster,
        algorithm: str | Collective | Mapping[str, str | Collective] = "default",
        *,
        nodes: Sequence[int] | None = None,
        rank_order: str | Sequence[int] = "topology",
    ) -> Execution:
        """Return the start and end of each task: see :func:`ddlsim.plan.execute.execute`."""
        from ddlsim.plan.execute import execute

        return execute(self, cluster, algorithm, nodes=nodes, rank_order=rank_order)
