"""`StepProgram`: one training step, stored once for all ranks that do the same, and repeated during execution."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.network import tasks as ts
from ddlsim.network.executor import TaskTable
from ddlsim.network.state import Records
from ddlsim.plan.bounds import Bound, Carriers, Copies, StepGraph, of_steps, peak_memory
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, RECEIVE, SEND, Bools, Chosen, Every, Floats, Ints, Lane, Part, Plan
from ddlsim.plan.rows import csr, ranges
from ddlsim.workload.compute import Workload

#: Steps that can be in flight. If no rank updates before all have contributed, a third step begins only after all ranks
#: have updated in the first.
LIVE = 3
#: steps of a template: the first, the second, and one that represents all further steps
N_STEPS = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class StepProgram:
    """One training step of all ranks: templates of tasks, and the ranks that execute them.

    A program consists of copies that execute the same tasks, such as the replicas of a model. A copy has *places* 0, 1,
    ..., such as the stages of a pipeline, and each place is filled by one rank. If all workers do the same, each copy
    has a single place.

    templates    plans of the first steps of a copy, one plan per kind of device. The ranks of these plans are places.
                 Tasks depend only on tasks of their own copy. Templates differ only in the durations of tasks and in
                 the memory that tasks hold. Each has at least :data:`N_STEPS` steps, so that the last step has all its
                 dependencies on earlier steps
    ranks        (n_copies, n_places), rank at each place of each copy
    groups       ranks of each communicator
    group_of     (n_copies, n_groups of a template), index in `groups` of each group of a template, for each copy
    template_of  (n_copies, n_places), index of the template of each rank
    batches      (scale, per_copy, later): micro-batch b of a template has the number
                 ``b * scale + copy * per_copy``, plus `later` for each step after the third, if steps overlap
    """

    templates: tuple[Plan, ...]
    ranks: Ints
    groups: tuple[tuple[int, ...], ...]
    group_of: Ints
    template_of: Ints
    batches: tuple[int, int, int] = (1, 0, 0)

    @classmethod
    def of(cls, plan: Plan) -> StepProgram:
        """Return the program in which every rank of a plan of :data:`N_STEPS` steps has its own tasks."""
        ranks = np.arange(plan.n_ranks)[None, :]
        return cls(
            templates=(plan,),
            ranks=ranks,
            groups=plan.groups,
            group_of=np.arange(len(plan.groups))[None, :],
            template_of=np.zeros_like(ranks),
        )

    @classmethod
    def replicated(
        cls,
        workloads: Sequence[Workload],
        make: Callable[[Workload], Plan],
        batches: int,
        families: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> StepProgram:
        """Return the program in which every rank executes one template, with the seconds of its own workload.

        workloads  workload of each rank
        make       function from a workload to the template of one rank
        batches    micro-batches per rank and step
        families   for each group of the template, the groups of ranks; None: one group of all ranks
        """
        n, families = len(workloads), families or [[range(len(workloads))]]
        different = {id(workload): workload for workload in workloads}
        number = {key: i for i, key in enumerate(different)}
        groups, of = list[tuple[int, ...]](), np.zeros((n, len(families)), dtype=np.int64)
        for i, family in enumerate(families):
            for group in family:
                of[list(group), i] = len(groups)
                groups.append(tuple(group))
        return cls(
            templates=tuple(make(workload) for workload in different.values()),
            ranks=np.arange(n)[:, None],
            groups=tuple(groups),
            group_of=of,
            template_of=np.array([[number[id(workload)]] for workload in workloads]),
            batches=(1, batches, 0),
        )

    def map(self, transform: Callable[..., Plan], *sequences: Sequence[Any]) -> StepProgram:
        """Return the program with transformed templates.

        Each template becomes ``transform(template, ...)``, with its elements of `sequences`, as in the
        built-in map. Only a program of one copy may get new groups, which are groups of ranks.
        """
        templates = tuple(transform(*arguments) for arguments in zip(self.templates, *sequences, strict=True))
        groups = templates[0].groups
        if len(groups) == len(self.templates[0].groups):
            return dataclasses.replace(self, templates=templates)
        return dataclasses.replace(self, templates=templates, groups=groups, group_of=np.arange(len(groups))[None, :])

    # ------------------------------------------------------------ unrolling

    @property
    def cycle(self) -> int:
        """Number of steps after which the tasks repeat."""
        first = (cycle.first if isinstance(cycle, Chosen) else cycle for cycle in self.template.cycles)
        return math.lcm(*(n for every in first for n in (every.period, every.unless) if n))

    @property
    def template(self) -> Plan:
        """The tasks of one copy, with the durations on the first kind of device."""
        return self.templates[0]

    @cached_property
    def _bounds(self) -> list[int]:
        """Offsets of the steps of a template."""
        template = self.template
        bounds: list[int] = np.searchsorted(template.step, np.arange(template.n_steps + 1)).tolist()
        return bounds

    def rows(self, step: int) -> slice:
        """Return the rows of a step of the template."""
        return slice(self._bounds[step], self._bounds[step + 1])

    @cached_property
    def _keys(self) -> tuple[Ints, Ints, list[int]]:
        """First key of each task within its step, (n,), -1 if it has none; index of each copy's group among those of a
        template's group, (n_copies, n_groups); number of keys in each step."""
        template, n_copies = self.template, len(self.ranks)
        instance, count = np.zeros_like(self.group_of), np.ones(self.group_of.shape[1], dtype=np.int64)
        for group, of in enumerate(self.group_of.T):
            different, which = np.unique(of, return_inverse=True)
            instance[:, group], count[group] = which.reshape(-1), len(different)
        first = np.full(len(template), -1)
        sizes: list[int] = []
        for begin, end in itertools.pairwise(self._bounds):
            rows = begin + np.flatnonzero(template.key[begin:end] >= 0)
            _, at, which = np.unique(template.key[rows], return_index=True, return_inverse=True)
            width, grouped = np.full(len(at), n_copies), template.kind[rows[at]] >= ALL_REDUCE
            width[grouped] = count[template.peer[rows[at][grouped]]]
            first[rows] = (np.cumsum(width) - width)[which.reshape(-1)]
            sizes.append(int(width.sum()))
        return first, instance, sizes

    def n_keys(self, step: int) -> int:
        """Return the number of keys of a step of the template."""
        return self._keys[2][step]

    def keys_of(self, rows: Ints) -> Ints:
        """Return the keys of rows with keys in every copy, counted from the first of their step, (n_copies, n)."""
        first, instance, _ = self._keys
        number = np.empty((len(self.ranks), len(rows)), dtype=np.int64)
        number[:] = np.arange(len(self.ranks))[:, None]
        grouped = self.template.kind[rows] >= ALL_REDUCE
        number[:, grouped] = instance[:, self.template.peer[rows[grouped]]]
        return first[rows] + number

    def ranks_of(self, rows: Ints | slice) -> Ints:
        """Return the rank that executes each row in every copy, (n_copies, n)."""
        return self.ranks[:, self.template.rank[rows]]

    def of_devices(self, name: str, step: int) -> Floats:
        """Return a column of a step that depends on the device, (n_copies, n), or (1, n) if all devices are alike."""
        rows = self.rows(step)
        columns = np.stack([getattr(template, name)[rows] for template in self.templates])
        if len(columns) > 1:
            columns = columns[self.template_of[:, self.template.rank[rows]], np.arange(columns.shape[1])]
        return columns

    @cached_property
    def place_of(self) -> tuple[Ints, Ints]:
        """Copy to which each rank belongs, and its place in the copy, (n_ranks,) each."""
        copies, places = (np.zeros(self.n_ranks, dtype=np.int64) for _ in range(2))
        copies[self.ranks], places[self.ranks] = np.indices(self.ranks.shape)
        return copies, places

    def unroll(self, steps: int) -> Plan:
        """Return the plan of the first `steps` steps, step by step and copy by copy, for printing, plots and exports.

        Raises ConfigError for fewer than one step.
        """
        plan = self.unroll_all(steps)
        for chosen in (cycle for cycle in plan.cycles if isinstance(cycle, Chosen)):
            note = f"all periods are {chosen.steps[0]} steps here; during the run, later ones are set by {chosen.by}"
            cycles = tuple(cycle.first if cycle is chosen else cycle for cycle in plan.cycles)
            plan = dataclasses.replace(plan, cycles=cycles, notes=(*plan.notes, note))
        return _taking_place(plan)

    def unroll_all(self, steps: int) -> Plan:
        """Return the plan of the first `steps` steps with all tasks, including those that are skipped in a step."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"plan: steps = {steps!r}: must be a positive integer")
        template, every = self.template, LiveSteps(self, steps - 1, repeat=False)
        parts = [self._unrolled(every, step) for step in range(steps)]
        column: dict[str, Any] = {name: np.concatenate([part[name].ravel() for part in parts]) for name in parts[0]}
        lanes = (Lane(int(ranks[lane.rank]), lane.name, lane.queue) for ranks in self.ranks for lane in template.lanes)
        offsets = np.append(0, np.cumsum(column.pop("counts")))
        return dataclasses.replace(template, lanes=tuple(lanes), groups=self.groups, need_offsets=offsets, **column)

    def _unrolled(self, every: LiveSteps, step: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a step, (n_copies, n) each, the number of each row's dependencies, and those."""
        template, n_copies, source = self.template, len(self.ranks), every.sources[step]
        rows, copy = np.arange(len(template))[self.rows(source)], np.arange(n_copies)[:, None]
        kind, peer, batch = template.kind[rows], template.peer[rows], template.batch[rows]
        peers = np.where(peer >= 0, self.ranks[:, np.where(kind < ALL_REDUCE, peer, 0)], -1)
        grouped, keyed = kind >= ALL_REDUCE, template.key[rows] >= 0
        peers[:, grouped] = self.group_of[:, peer[grouped]]
        keys = np.full((n_copies, len(rows)), -1)
        keys[:, keyed] = every.keys[step].start + self.keys_of(rows[keyed])
        scale, per_copy, later = self.batches
        numbers = batch * scale + copy * per_copy + later * max(step - (template.n_steps - 1), 0)
        offsets = template.need_offsets[rows[0] : rows[-1] + 2]
        need = template.needs[offsets[0] : offsets[-1]]
        of = template.step[need]
        begins, width = np.array([(tasks.start, (tasks.stop - tasks.start) // n_copies) for tasks in every.rows]).T
        needed = step - source + of
        columns = {name: getattr(template, name)[rows] for name in COLUMNS} | {
            "lane": copy * len(template.lanes) + template.lane[rows],
            "peer": peers,
            "key": keys,
            "step": np.full(len(rows), step),
            "batch": np.where(batch >= 0, numbers, -1),
            "seconds": self.of_devices("seconds", source),
            "holds": self.of_devices("holds", source),
            "counts": np.diff(offsets),
        }
        columns = {name: np.broadcast_to(values, (n_copies, len(rows))) for name, values in columns.items()}
        return columns | {"needs": begins[needed] + need - np.array(self._bounds)[of] + copy * width[needed]}

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return int(self.ranks.max()) + 1

    @property
    def servers(self) -> tuple[int, ...]:
        """Ranks that are servers."""
        return self.template.servers

    def with_columns(self, **columns: npt.NDArray[Any]) -> StepProgram:
        """Return the program with some columns of its only template replaced, such as seconds, bytes and kinds of work.

        The precedence of tasks must not change.
        """
        program = dataclasses.replace(self, templates=(self.template.with_columns(**columns),))
        vars(program)["graph"] = self.graph
        return program

    def peak_memory(self) -> Floats:
        """Return the peak memory of each rank's tasks in a step, in bytes, (n_ranks,)."""
        first = self.template.step == 0
        held = np.stack([peak_memory(template, first) for template in self.templates])
        peak = np.zeros(self.n_ranks)
        peak[self.ranks] = held[self.template_of, np.arange(self.ranks.shape[1])]
        return peak

    def written_out(self, steps: int) -> StepProgram:
        """Return the program of the first `steps` steps in which every rank has its own tasks."""
        is_written = len(self.ranks) == 1 and not self.template.cycles and self.template.n_steps == steps
        return self if is_written else StepProgram.of(self.unroll(steps))

    # ------------------------------------------------------------ bounds

    @cached_property
    def graph(self) -> StepGraph:
        """The precedence graph of the steps of a template."""
        return StepGraph(self.template)

    @cached_property
    def copies(self) -> Copies:
        """Ranks and groups that the template's ranks and groups represent."""
        instances = [[self.groups[i] for i in np.unique(indices).tolist()] for indices in self.group_of.T]
        return Copies(self.ranks, instances[: len(self.template.groups)])

    def bound(self, begin: int, end: int, carriers: Carriers | None = None, seconds: Floats | None = None) -> Bound:
        """Return lower bounds on the time of the steps `begin` to `end` - 1: see :func:`ddlsim.plan.bounds.of_steps`.

        A program for several kinds of devices, or with tasks that take place only in some steps, is expanded first.
        """
        alike = len(self.templates) == 1 and not self.template.cycles
        return of_steps(self if alike else self.written_out(end), begin, end, carriers, seconds)

    # ------------------------------------------------------------ execution

    def live_steps(self, live: int = LIVE, *, repeat: bool = True) -> LiveSteps:
        """Return the first step (slot 0) and `live` further steps (slots 1 to `live`).

        The further steps repeat cyclically unless `repeat` is False. Raises ConfigError if the steps after the first
        differ.
        """
        steps = LiveSteps(self, live, repeat)
        if repeat:
            self._check_alike(steps.every)
        return steps

    def _check_alike(self, every: TaskTable) -> None:
        """Raise ConfigError unless the template's last step equals the second."""
        template, last = self.template, self.template.n_steps - 1
        columns = [getattr(template, name) for name in ("lane", "kind", "peer", "part", "nbytes", "every")]
        columns += [self._keys[0], *(one.seconds for one in self.templates)]

        def shape(step: int) -> list[npt.NDArray[Any]]:
            rows, tasks = self.rows(step), every.tasks[self.rows(step)]
            after = every.following[tasks["first"][0] : tasks["last"][-1]]
            row, same = np.repeat(np.arange(len(tasks)), tasks["last"] - tasks["first"]), template.step[after] == step
            return [*(column[rows] for column in columns), row[same], after[same] - rows.start]

        if last < N_STEPS - 1 or not all(map(np.array_equal, shape(1), shape(last))):
            raise ConfigError(
                "plan: the steps after the first one differ, so the step program cannot repeat them; all "
                "these steps must have the same keys and rows in the same order"
            )


def _taking_place(plan: Plan) -> Plan:
    """Remove the tasks that do not take place in their steps; their successors inherit their dependencies."""
    left_out = np.zeros(len(plan), dtype=np.bool_)
    for number, cycle in enumerate(plan.cycles, 1):
        steps = np.array([not cycle.includes(step + 1) for step in range(plan.n_steps)])
        left_out |= (plan.every == number) & steps[plan.step]
    if not left_out.any():
        return dataclasses.replace(plan, cycles=(), every=np.zeros(len(plan), dtype=np.int64)) if plan.cycles else plan
    place, previous = (np.cumsum(~left_out) - 1).tolist(), plan.previous.tolist()
    lists, instead = list[list[int]](), dict[int, list[int]]()  # instead of the rows that are left out
    for row in range(len(plan)):
        before = [*plan.needs_of(row), *([previous[row]] if left_out[row] and previous[row] >= 0 else ())]
        needed = list(dict.fromkeys(new for need in before for new in instead.get(need, [place[need]])))
        if left_out[row]:
            instead[row] = needed
        else:
            lists.append(needed)
    keys = np.unique(plan.key[~left_out & (plan.key >= 0)])
    column: dict[str, Any] = {name: getattr(plan, name)[~left_out] for name in COLUMNS}
    column["key"] = np.where(column["key"] >= 0, np.searchsorted(keys, column["key"]), -1)
    column["every"] = np.zeros(len(lists), dtype=np.int64)
    return dataclasses.replace(
        plan,
        cycles=(),
        need_offsets=np.cumsum([0, *map(len, lists)]),
        needs=np.array([need for row_needs in lists for need in row_needs], dtype=np.int64),
        **column,
    )


class Folded(NamedTuple):
    """A function that builds a program whose ranks represent several workers, and the (first) worker of each rank,
    (n_ranks,)."""

    program: Callable[[], StepProgram]
    workers: Ints


@dataclass(frozen=True, eq=False)
class LiveSteps:
    """The first step of a program (slot 0) and those after it (slots 1 to `live`).

    The tasks of a slot are the rows of a step of the template, copy by copy. Nothing is stored for each rank and step.

    live    steps that can be in flight
    repeat  whether the slots after the first one are executed cyclically
    """

    program: StepProgram
    live: int
    repeat: bool

    @cached_property
    def every(self) -> TaskTable:
        """The tasks of the template."""
        return task_table(self.program.template)

    @property
    def shown(self) -> int:
        """Number of steps of the template that slots execute."""
        return min(self.live + 1, self.program.template.n_steps)

    @cached_property
    def sources(self) -> list[int]:
        """The step of the template that each slot executes."""
        return [min(slot, self.shown - 1) for slot in range(self.live + 1)]

    @cached_property
    def rows(self) -> list[slice]:
        """Tasks of each slot."""
        widths = np.diff(self.program._bounds)[self.sources] * len(self.program.ranks)
        return slices(widths.tolist())

    @cached_property
    def keys(self) -> list[slice]:
        """Keys of each slot."""
        return slices([self.program.n_keys(step) for step in self.sources])

    def slot(self, step: int) -> int:
        """Return the slot in which a step is executed."""
        return step if step <= self.live else 1 + (step - 1) % self.live

    def locate(self, tasks: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the slot, copy and template row of each task, (n,) each."""
        begins, firsts, widths = self._places
        slots = np.searchsorted(begins, tasks, side="right") - 1
        copy, row = np.divmod(tasks - begins[slots], widths[slots])
        return slots, copy, row + firsts[slots]

    @cached_property
    def _places(self) -> Ints:
        """First task of each slot, its first row in the template, and the number of rows, (3, n_slots)."""
        rows = [self.program.rows(step) for step in self.sources]
        places = [(tasks.start, row.start, row.stop - row.start) for tasks, row in zip(self.rows, rows, strict=True)]
        return np.array(places).T

    @property
    def plan(self) -> Plan:
        """The plan of the slots that differ, for descriptions of tasks."""
        return self.program.unroll_all(self.shown)

    def describe(self, slot: int, task: int) -> str:
        """Return a description of a task; `task` is counted from the first one of its slot."""
        return self.plan.task(self.rows[self.sources[slot]].start + task)

    @cached_property
    def of_keys(self) -> list[tuple[Ints, Ints]]:
        """A copy and a template row that have each key of a step, (n_keys,) each, for every step of the template."""
        program, (first, _, sizes) = self.program, self.program._keys
        of_keys = []
        for step in range(self.shown):
            rows = program.rows(step).start + np.flatnonzero(first[program.rows(step)] >= 0)
            rows = rows[np.unique(first[rows], return_index=True)[1]]
            copy, row = (np.empty(sizes[step], dtype=np.int64) for _ in range(2))
            keys = program.keys_of(rows)
            copy[keys], row[keys] = np.arange(len(program.ranks))[:, None], rows
            of_keys.append((copy, row))
        return of_keys

    @cached_property
    def key_sizes(self) -> Floats:
        """Bytes of the buffer of each key's collective, (n_keys,)."""
        template = self.program.template
        sizes = [np.where(template.kind[row] >= ALL_REDUCE, template.nbytes[row], 0.0) for _, row in self.of_keys]
        return np.concatenate([sizes[step] for step in self.sources])

    # ------------------------------------------------------------ input of the executor

    @cached_property
    def late(self) -> Bools:
        """Whether no task of its step waits for a collective (an average that overlaps local steps), (n,)."""
        template, tasks = self.program.template, self.every.tasks
        if not template.cycles:
            return np.zeros(len(template), dtype=np.bool_)
        waited = np.zeros(len(template), dtype=np.bool_)
        before = np.repeat(np.arange(len(template)), tasks["last"] - tasks["first"])
        waited[before[template.step[self.every.following] == template.step[before]]] = True
        return np.asarray((template.kind >= ALL_REDUCE) & (template.every > 0) & ~waited)

    @property
    def has_late(self) -> bool:
        """Whether any collective is late."""
        return bool(self.late[: self.program.rows(min(1, self.shown - 1)).stop].any())

    def table(self, kinds: Ints | None = None, seconds: Iterable[Floats] | None = None) -> TaskTable:
        """Return the tasks of all slots.

        kinds    of the template's rows, (1 or n_copies, n), as in :mod:`ddlsim.network.tasks`
        seconds  of each slot's rows, (1 or n_copies, n)
        """
        program, template, every = self.program, self.program.template, self.every
        kinds = every.tasks["kind"][None] if kinds is None else kinds
        seconds = (program.of_devices("seconds", step) for step in self.sources) if seconds is None else seconds
        n_copies, slots = len(program.ranks), range(self.live + 1)
        successors = [self._successors(slot) for slot in slots]
        shared = [self._of_copies(program.rows(step)) for step in range(self.shown)]
        ends = list(itertools.accumulate(n_copies * len(first) for _, first, _ in successors))
        following = np.empty(ends[-1], dtype=np.int64)
        tasks = np.empty(self.rows[-1].stop, dtype=ts.TASK)
        for slot, (offsets, first, width), end, slot_seconds in zip(slots, successors, ends, seconds, strict=True):
            begin = end - n_copies * len(first)
            np.add(first, np.arange(n_copies)[:, None] * width, out=following[begin:end].reshape(n_copies, -1))
            source = self.sources[slot]
            self._fill(tasks, slot, kinds[:, program.rows(source)], slot_seconds, begin + offsets, shared[source])
        queue_of = [template.queue[row] for _, row in self.of_keys]
        return TaskTable(tasks, following, np.concatenate([queue_of[step] for step in self.sources]))

    def _successors(self, slot: int) -> tuple[Ints, Ints, Ints]:
        """Return the offsets of each row's successors among those of a copy, (n + 1,), and the successors in the first
        copy, and how much larger they are in the next one, (n_following,) each."""
        program, step = self.program, self.program.template.step
        # the successors of a step are those of the template's second step
        source = min(slot, 1) if self.repeat else slot
        tasks = self.every.tasks[program.rows(source)]
        after = self.every.following[tasks["first"][0] : tasks["last"][-1]]
        counts, to = tasks["last"] - tasks["first"], slot + step[after] - source
        if not self.repeat:
            kept = to <= self.live
            counts = np.bincount(np.repeat(np.arange(len(tasks)), counts)[kept], minlength=len(tasks))
            after, to = after[kept], to[kept]
        to = np.where(to > self.live, to - self.live, to)
        begins, _, width = self._places
        first = begins[to] + after - np.array(program._bounds)[step[after]]
        return np.append(0, np.cumsum(counts)), first, width[to]

    def _of_copies(self, rows: slice) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the rows of a step that have keys, their keys, the rows that are collectives, and the position of
        their rank in its group: rows (n,), counted from the first one, the others for every copy, (n_copies, n)."""
        program, template, n_places = self.program, self.program.template, self.program.ranks.shape[1]
        keyed = np.flatnonzero(program._keys[0][rows] >= 0)
        grouped = np.flatnonzero(template.kind[rows] >= ALL_REDUCE)
        code = template.peer[rows][grouped] * n_places + template.rank[rows][grouped]
        pairs, which = np.unique(code, return_inverse=True)
        group, place = np.divmod(pairs, n_places)
        at = positions(program.groups, program.group_of[:, group], program.ranks[:, place])[:, which.reshape(-1)]
        return keyed, program.keys_of(rows.start + keyed), grouped, at

    def _fill(
        self, tasks: Records, slot: int, kinds: Ints, seconds: Floats, offsets: Ints, shared: Sequence[Ints]
    ) -> None:
        """Write the tasks of a slot.

        kinds, seconds  (1 or n_copies, n)
        offsets         of the successors of the first copy's rows, (n + 1,)
        shared          keys and positions (:meth:`_of_copies`), equal in all slots that execute this step
        """
        program, source = self.program, self.sources[slot]
        rows, (keyed, keys, grouped, places) = program.rows(source), shared
        base = self.every.tasks[rows].copy()
        base["first"], base["last"] = offsets[:-1], offsets[1:]
        # dependencies of a step that is executed again are those of the template's last step
        again = program.rows(self.shown - 1 if self.repeat and source else source)
        base["waits"] = self.every.tasks["missing"][again]
        follows = min(source, 1) if self.repeat else source
        base["step"] = slot + (self.live + 1) * self.late[program.rows(follows)]
        base["kind"], base["seconds"] = kinds[0], seconds[0]
        of_copies: dict[str, tuple[Ints | slice, Floats | Ints]] = {
            "key": (keyed, self.keys[slot].start + keys),
            "place": (grouped, places),
        }
        for name, values in (("kind", kinds), ("seconds", seconds)):
            if len(values) > 1:
                of_copies[name] = slice(None), values
        plain = np.dtype((np.void, base.dtype.itemsize))  # copied as bytes, not field by field
        size = int(offsets[-1] - offsets[0])
        for copies, block in self.blocks(tasks, slot):
            shift = size * np.arange(len(program.ranks))[copies, None]
            block.view(plain)[:] = base.view(plain)
            block["first"] += shift
            block["last"] += shift
            for name, (where, values) in of_copies.items():
                block[name][:, where] = values[copies]

    def blocks(self, tasks: Records, slot: int) -> Iterator[tuple[slice, Records]]:
        """Yield copies and their tasks in a slot, (n_copies, n), in blocks that fit into the cache."""
        by_copy = tasks[self.rows[slot]].reshape(len(self.program.ranks), -1)
        height = max(1, _BLOCK // max(1, by_copy.shape[1]))
        for begin in range(0, len(by_copy), height):
            yield slice(begin, begin + height), by_copy[begin : begin + height]


#: maximum number of task records that are written at a time
_BLOCK = 1 << 12


# ---------------------------------------------------------------- templates


@dataclass(slots=True)
class Row:
    """A task at one place in one step.

    micro   the micro-batch, -1 if none
    to      message: the place at the other end
    group   collective: the template's group
    number  of the message or collective within the step
    needs   rows of the same step, or (row, number of steps back)
    every   as in a plan
    """

    place: int
    lane: str
    kind: int
    seconds: float = 0.0
    nbytes: float = 0.0
    micro: int = -1
    first: int = 0
    end: int = 0
    part: int = -1
    holds: float = 0.0
    to: int = -1
    group: int = -1
    number: int = -1
    name: int = -1
    needs: list[Any] = field(default_factory=list)
    every: int = 0


class Step(NamedTuple):
    """The rows of one step of a template: columns of :class:`Row`, (n,) each, and "lane", an index into the template's
    lanes; dependencies (row, needed row, number of steps back), (n_needs,) each."""

    columns: dict[str, npt.NDArray[Any]]
    needs: tuple[Ints, Ints, Ints]


_ROW_COLUMNS = (
    "kind", "seconds", "nbytes", "micro", "first", "end", "part", "holds", "to", "group", "number", "name", "every",
)  # fmt: skip


def step_of(rows: Sequence[Row], lanes: dict[tuple[int, str], int]) -> Step:
    """Convert rows to a step; new lanes (place and name) are added to `lanes`."""
    column: dict[str, npt.NDArray[Any]] = {}
    for name in _ROW_COLUMNS:
        column[name] = np.array([getattr(row, name) for row in rows])
    column["lane"] = np.array([lanes.setdefault((row.place, row.lane), len(lanes)) for row in rows], dtype=np.int64)
    needs = [(i, *(need if isinstance(need, tuple) else (need, 0))) for i, row in enumerate(rows) for need in row.needs]
    row, need, back = np.array(needs, dtype=np.int64).reshape(-1, 3).T
    return Step(column, (row, need, back))


def template_of(
    steps: Sequence[Step], lanes: Iterable[tuple[int, str]], *, groups: Sequence[tuple[int, ...]],
    parts: Sequence[Part], n_layers: int, names: tuple[str, ...] = (), delays: tuple[int, ...] = (),
    cycles: tuple[Every | Chosen, ...] = (), servers: Iterable[int] = (), notes: Iterable[str] = (),
) -> Plan:  # fmt: skip
    """Return the template of consecutive steps, without dependencies on steps before the first.

    lanes   place and name of each lane
    groups  places of each group in one copy
    """
    sizes = [len(step.columns["kind"]) for step in steps]
    begins = np.cumsum([0, *sizes])
    column: dict[str, Any] = {}
    for name in (*_ROW_COLUMNS, "lane"):
        column[name] = np.concatenate([step.columns[name] for step in steps])
    keys = [int(step.columns["number"].max(initial=-1)) + 1 for step in steps]
    key_begins = np.repeat(np.cumsum(keys) - keys, sizes)
    rows, needs = [], []
    for i, step in enumerate(steps):
        there = step.needs[2] <= i
        row, need, back = (values[there] for values in step.needs)
        rows.append(begins[i] + row)
        needs.append(begins[i - back] + need)
    offsets, need = csr(np.concatenate(rows), np.concatenate(needs), int(begins[-1]))
    number, group, micro = column.pop("number"), column.pop("group"), column.pop("micro")
    return Plan(
        lanes=tuple(Lane(place, name) for place, name in lanes),
        groups=tuple(groups), parts=tuple(parts), names=names, n_layers=n_layers, delays=delays, cycles=cycles,
        servers=tuple(servers), notes=tuple(dict.fromkeys(notes)),
        step=np.repeat(np.arange(len(steps)), sizes), key=np.where(number >= 0, key_begins + number, -1),
        peer=np.where(group >= 0, group, column.pop("to")), batch=micro, needs=need, need_offsets=offsets,
        **column,
    )  # fmt: skip


# ---------------------------------------------------------------- input of the executor


def task_table(plan: Plan) -> TaskTable:
    """Return the tasks of a plan."""
    first, second = Order(plan).pairs
    is_kept = plan.kind[first] != SEND
    is_kept |= plan.kind[second] != RECEIVE
    is_kept |= plan.key[first] != plan.key[second]  # a receive waits for its message, but not to begin to wait
    first, second = first[is_kept], second[is_kept]
    offsets, following = csr(first, second, len(plan))
    grouped, queue = plan.collectives, plan.queue
    tasks = np.zeros(len(plan), dtype=ts.TASK)
    tasks["kind"] = ts.WORK
    tasks["kind"][plan.kind == SEND], tasks["kind"][plan.kind == RECEIVE] = ts.SEND, ts.RECEIVE
    tasks["kind"][grouped] = np.where(queue[grouped] >= 0, ts.QUEUED, ts.JOIN)
    tasks["seconds"], tasks["key"], tasks["step"] = plan.seconds, plan.key, plan.step
    tasks["start"] = tasks["end"] = np.nan
    tasks["first"], tasks["last"] = offsets[:-1], offsets[1:]
    tasks["missing"] = tasks["waits"] = np.bincount(second, minlength=len(plan))
    tasks["place"][grouped] = positions(plan.groups, plan.peer[grouped], plan.rank[grouped])
    tasks["slow"] = tasks["device"] = tasks["ticket"] = -1
    queue_of = np.full(int(plan.key.max(initial=-1)) + 1, -1)
    queue_of[plan.key[grouped]] = queue[grouped]
    return TaskTable(tasks, following, queue_of)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of the given sizes."""
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def positions(groups: Sequence[Sequence[int]], group: Ints, rank: Ints) -> Ints:
    """Return the position of each rank in its group; `group` contains indices of `groups`."""
    sizes = np.array([len(ranks) for ranks in groups], dtype=np.int64)
    members = np.array([member for ranks in groups for member in ranks], dtype=np.int64)
    width = int(members.max(initial=0)) + 1
    codes = np.repeat(np.arange(len(sizes)), sizes) * width + members
    order = np.argsort(codes)
    return ranges(0 * sizes, sizes)[order[np.searchsorted(codes, group * width + rank, sorter=order)]]


def key_sizes(plan: Plan) -> tuple[Floats, Ints, Ints]:
    """Return the bytes of the buffer, the group and the kind of each key's collective, (n_keys,) each."""
    rows = plan.collectives
    n_keys = int(plan.key.max(initial=-1)) + 1
    sizes, group, kind = np.zeros(n_keys), np.full(n_keys, -1, dtype=np.int64), np.full(n_keys, -1, dtype=np.int64)
    for of_keys, column in ((sizes, plan.nbytes), (group, plan.peer), (kind, plan.kind)):
        of_keys[plan.key[rows]] = column[rows]
    return sizes, group, kind
