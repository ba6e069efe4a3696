"""`StepProgram`: one training step, stored once for all ranks that do the same, and repeated during execution."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.network import tasks
from ddlsim.network.executor import TaskColumns
from ddlsim.plan.bounds import Bound, Carriers, Copies, StepGraph, of_steps, peak_memory
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, RECEIVE, SEND, Chosen, Every, Floats, Ints, Lane, Part, Plan
from ddlsim.plan.queues import Queue
from ddlsim.plan.rows import csr, end_to_end, pairs
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
    batches      (scale, each, later): micro-batch b of a template has the number ``b * scale + copy * each``, plus
                 `later` for each step after the third, if steps overlap
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
        n = len(workloads)
        different = {id(workload): workload for workload in workloads}
        number = {key: i for i, key in enumerate(different)}
        groups = [tuple(group) for family in families or [[range(n)]] for group in family]
        of, begin = np.zeros((n, len(families or [0])), dtype=np.int64), 0
        for i, family in enumerate(families or [[range(n)]]):
            for at, group in enumerate(family, begin):
                of[list(group), i] = at
            begin += len(family)
        return cls(
            templates=tuple(make(workload) for workload in different.values()),
            ranks=np.arange(n)[:, None],
            groups=tuple(groups),
            group_of=of,
            template_of=np.array([[number[id(workload)]] for workload in workloads]),
            batches=(1, batches, 0),
        )

    def map(self, transform: Callable[..., Plan], *each: Sequence[Any]) -> StepProgram:
        """Return the program with transformed templates.

        Each template becomes ``transform(template, ...)``, with its elements of the sequences `each`, as in the
        built-in map. Only a program of one copy may get new groups, which are groups of ranks.
        """
        templates = tuple(transform(*arguments) for arguments in zip(self.templates, *each, strict=True))
        groups = templates[0].groups
        if len(groups) == len(self.templates[0].groups):
            return dataclasses.replace(self, templates=templates)
        return dataclasses.replace(self, templates=templates, groups=groups, group_of=np.arange(len(groups))[None, :])

    # ------------------------------------------------------------ unrolling

    @property
    def cycle(self) -> int:
        """Number of steps after which the tasks repeat."""
        first = (each.first if isinstance(each, Chosen) else each for each in self.template.cycles)
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

    @cached_property
    def _group_of(self) -> Ints:
        """`group_of`, with at least one column."""
        return self.group_of if self.group_of.size else np.zeros((len(self.ranks), 1), dtype=np.int64)

    @cached_property
    def _keys(self) -> tuple[Ints, Ints, list[int]]:
        """First key of each task within its step, (n,); index of each copy's group among those of a template's group,
        (n_copies, n_groups); number of keys in each step."""
        template, n_copies = self.template, len(self.ranks)
        instance = np.zeros_like(self._group_of)
        count = np.ones(instance.shape[1], dtype=np.int64)
        for group, of in enumerate(self._group_of.T):
            different, which = np.unique(of, return_inverse=True)
            instance[:, group], count[group] = which.reshape(-1), len(different)
        first = np.full(len(template), -1)
        sizes: list[int] = []
        for begin, end in itertools.pairwise(self._bounds):
            rows = begin + np.flatnonzero(template.key[begin:end] >= 0)
            _, at, which = np.unique(template.key[rows], return_index=True, return_inverse=True)
            grouped = template.kind[rows[at]] >= ALL_REDUCE
            width = np.where(grouped, count[np.where(grouped, template.peer[rows[at]], 0)], n_copies)
            first[rows] = (np.cumsum(width) - width)[which.reshape(-1)]
            sizes.append(int(width.sum()))
        return first, instance, sizes

    def unroll(self, steps: int) -> Plan:
        """Return the plan of the first `steps` steps, step by step and copy by copy, for printing, plots and exports.

        Raises ConfigError for fewer than one step.
        """
        plan = self.unroll_all(steps)
        for chosen in (each for each in plan.cycles if isinstance(each, Chosen)):
            note = f"all periods are {chosen.steps[0]} steps here; during the run, later ones are set by {chosen.by}"
            cycles = tuple(each.first if each is chosen else each for each in plan.cycles)
            plan = dataclasses.replace(plan, cycles=cycles, notes=(*plan.notes, note))
        return _taking_place(plan)

    def unroll_all(self, steps: int) -> Plan:
        """Return the plan of the first `steps` steps with all tasks, including those that are skipped in a step."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"plan: steps = {steps!r}: must be a positive integer")
        if self._is_written_out and steps <= self.template.n_steps:
            return _first_steps(self.template, self._bounds[: steps + 1])
        template, bounds, n_copies = self.template, self._bounds, len(self.ranks)
        sources = np.minimum(np.arange(steps), template.n_steps - 1)
        widths = np.diff(bounds)[sources]
        begins = np.concatenate([[0], np.cumsum(n_copies * widths)])
        key_begins = np.concatenate([[0], np.cumsum(np.array(self._keys[2])[sources])])
        parts = [self._unrolled(step, int(source), key_begins) for step, source in enumerate(sources)]
        column = {name: end_to_end([part[name] for part in parts]) for name in COLUMNS}
        counts, needs = [], []
        for step, source in enumerate(sources.tolist()):
            offsets = template.need_offsets[bounds[source] : bounds[source + 1] + 1]
            need = template.needs[offsets[0] : offsets[-1]]
            counts.append(np.tile(np.diff(offsets), n_copies))
            of = template.step[need]
            needed = step - (source - of)
            first = begins[needed] + need - np.array(bounds)[of]
            needs.append((first + np.arange(n_copies)[:, None] * widths[needed]).ravel())
        return Plan(
            lanes=tuple(
                Lane(int(own[lane.rank]), lane.name, lane.queue) for own in self.ranks for lane in template.lanes
            ),
            queues=template.queues,
            groups=self.groups,
            parts=template.parts,
            names=template.names,
            n_layers=template.n_layers,
            servers=template.servers,
            delays=template.delays,
            cycles=template.cycles,
            tensor=template.tensor,
            notes=template.notes,
            need_offsets=np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
            needs=np.concatenate(needs),
            **column,
        )

    def _unrolled(self, step: int, source: int, key_begins: Ints) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a step, copy by copy, (n_copies, n) each.

        source      the step of the template that it repeats
        key_begins  first key of each step
        """
        template, rows = self.template, slice(self._bounds[source], self._bounds[source + 1])
        n_copies, n = len(self.ranks), rows.stop - rows.start
        first, instance, _ = self._keys
        copy, kind, peer = np.arange(n_copies)[:, None], template.kind[rows], template.peer[rows]
        grouped = kind >= ALL_REDUCE
        group = np.where(grouped, peer, 0)
        sends = ~grouped & (peer >= 0)
        others = np.where(sends, self.ranks[:, np.where(sends, peer, 0)], peer)
        scale, each, later = self.batches
        batch = template.batch[rows]
        numbers = batch * scale + copy * each + later * max(step - (template.n_steps - 1), 0)
        own = {
            "lane": copy * len(template.lanes) + template.lane[rows],
            "peer": np.where(grouped, self._group_of[:, group], others),
            "key": np.where(
                template.key[rows] >= 0,
                key_begins[step] + first[rows] + np.where(grouped, instance[:, group], copy),
                -1,
            ),
            "step": np.full(n, step),
            "batch": np.where(batch >= 0, numbers, -1),
        }
        if len(self.templates) > 1:
            of = self.template_of[:, template.rank[rows]]
            for name in ("seconds", "holds"):
                own[name] = np.stack([getattr(one, name)[rows] for one in self.templates])[of, np.arange(n)]
        return {
            name: np.broadcast_to(own[name] if name in own else getattr(template, name)[rows], (n_copies, n))
            for name in COLUMNS
        }

    @cached_property
    def _is_written_out(self) -> bool:
        """Whether the template is the plan of all ranks, with the same keys as after unrolling."""
        template, (first, _, sizes) = self.template, self._keys
        key_begins = np.concatenate([[0], np.cumsum(sizes)])
        return (
            len(self.templates) == len(self.ranks) == self.batches[0] == 1
            and np.array_equal(self.ranks[0], np.arange(template.n_ranks))
            and self.groups == template.groups
            and np.array_equal(self.group_of[0], np.arange(len(self.groups)))
            and np.array_equal(np.where(first >= 0, key_begins[template.step] + first, -1), template.key)
        )

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
        instances = [[self.groups[i] for i in np.unique(each).tolist()] for each in self.group_of.T]
        return Copies(self.ranks, instances[: len(self.template.groups)])

    def bound(self, begin: int, end: int, carriers: Carriers | None = None, seconds: Floats | None = None) -> Bound:
        """Return lower bounds on the time of the steps `begin` to `end` - 1: see :func:`ddlsim.plan.bounds.of_steps`.

        A program for several kinds of devices, or with tasks that take place only in some steps, is expanded first.
        """
        alike = len(self.templates) == 1 and not self.template.cycles
        return of_steps(self if alike else self.written_out(end), begin, end, carriers, seconds)

    # ------------------------------------------------------------ execution

    def live_steps(self, live: int = LIVE, *, repeat: bool = True) -> tuple[LiveSteps, TaskColumns]:
        """Return the first step (slot 0) and `live` further steps (slots 1 to `live`), and the tasks of all slots.

        The further steps repeat cyclically unless `repeat` is False. Raises ConfigError if the steps after the first
        differ.
        """
        template, bounds = self.template, np.array(self._bounds)
        every, last = columns(template), template.n_steps - 1 if repeat else live
        if repeat:
            self._check_alike(every)
        elif template.n_steps == live + 1 and self._is_written_out and not template.cycles:
            slots = tuple(slice(a, b) for a, b in itertools.pairwise(bounds.tolist()))
            key_slots = tuple(slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *self._keys[2]]).tolist()))
            own = np.arange(len(template))
            return LiveSteps(template, own, own, slots, key_slots, live, has_late=False), every
        sources = np.minimum(np.arange(live + 1), last)
        begins = np.concatenate([[0], np.cumsum(len(self.ranks) * np.diff(bounds)[sources])])
        key_begins = np.concatenate([[0], np.cumsum(np.array(self._keys[2])[sources])])
        groups = [np.arange(slot, slot + 1) for slot in range(last)] + [np.arange(last, live + 1)]
        parts = [self._slots(slots, every, begins, key_begins, live, repeat=repeat) for slots in groups]
        column: dict[str, Any] = {name: end_to_end([part[name] for part in parts]) for name in parts[0]}
        counts = column.pop("counts")
        tasks = TaskColumns(offsets=np.concatenate([[0], np.cumsum(counts)]), **column)
        shown = min(live, last) + 1
        rows = [np.arange(begins[slot], begins[slot + 1]) for slot in range(shown)]
        source = [np.tile(np.arange(bounds[step], bounds[step + 1]), len(self.ranks)) for step in range(shown)]
        steps = LiveSteps(
            self.unroll_all(shown),
            np.concatenate(source),
            np.concatenate([*rows, np.tile(rows[-1], live + 1 - shown)]),
            tuple(slice(a, b) for a, b in itertools.pairwise(begins.tolist())),
            tuple(slice(a, b) for a, b in itertools.pairwise(key_begins.tolist())),
            live,
            has_late=bool(tasks.step.max(initial=0) > live),
        )
        return steps, tasks

    def _slots(
        self, slots: Ints, every: TaskColumns, begins: Ints, key_begins: Ints, live: int, *, repeat: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of the tasks of identical slots, (n_slots, n_copies, n) each.

        begins, key_begins  offsets of the tasks and keys of the slots
        """
        template, bounds, n_copies = self.template, np.array(self._bounds), len(self.ranks)
        last = template.n_steps - 1
        source = min(int(slots[0]), last)
        row = np.arange(bounds[source], bounds[source + 1])
        slot, copy = slots[:, None, None], np.arange(n_copies)[None, :, None]

        def of_all(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            values = values.astype(np.int32)  # as records of tasks have them
            return np.broadcast_to(values, (len(slots), n_copies, values.shape[-1]))

        # the successors of a step are those of the template's second step
        follows = min(source, 1) if repeat else source
        begin, end = bounds[follows], bounds[follows + 1]
        offsets = every.offsets[begin : end + 1]
        after, counts = every.following[offsets[0] : offsets[-1]], np.diff(offsets)
        ahead = template.step[after] - follows
        if not repeat:
            kept = slots[0] + ahead <= live
            counts = np.bincount(np.repeat(np.arange(len(row)), counts)[kept], minlength=len(row))
            after, ahead = after[kept], ahead[kept]
        to = slot + ahead
        to = np.where(to > live, to - live, to)
        width = np.diff(begins)[to] // n_copies
        following = begins[to] + copy * width + after - bounds[template.step[after]]
        first, instance, _ = self._keys
        where = self.ranks[:, template.rank[row]]
        grouped = template.kind[row] >= ALL_REDUCE
        group = np.where(grouped, template.peer[row], 0)
        instances = np.where(grouped, instance[:, group], copy[0])
        place = np.where(grouped, self._places[self._group_of[:, group], where], 0)
        seconds = np.stack([one.seconds for one in self.templates])[self.template_of[:, template.rank[row]], row]
        waits = every.missing[row - bounds[source] + bounds[last if repeat and source else source]]
        return {
            "kind": of_all(every.kind[row]),
            "seconds": np.broadcast_to(seconds, (len(slots), *seconds.shape)),
            "key": of_all(np.where(template.key[row] >= 0, key_begins[slot] + first[row] + instances, -1)),
            "place": of_all(place),
            "queue": of_all(every.queue[row]),
            "step": of_all(slot + (live + 1) * self._late(every, follows)),
            "missing": of_all(every.missing[row]),
            "waits": of_all(waits),
            "slow": of_all(every.slow[row]),
            "counts": of_all(counts),
            "following": following,
        }

    def _late(self, every: TaskColumns, step: int) -> Ints:
        """Return 1 for collectives that no task of their step waits for (averages that overlap local steps), else 0,
        (n,)."""
        template, (begin, end) = self.template, self._bounds[step : step + 2]
        if not template.cycles:
            return np.zeros(end - begin, dtype=np.int64)
        waited = np.zeros(len(template), dtype=np.bool_)
        before = np.repeat(np.arange(len(template)), np.diff(every.offsets))
        waited[before[template.step[every.following] == template.step[before]]] = True
        late: Ints = ((template.kind >= ALL_REDUCE) & (template.every > 0) & ~waited)[begin:end] * np.int64(1)
        return late

    @cached_property
    def _places(self) -> Ints:
        """Rank of each rank within each group, (n_groups, n_ranks)."""
        places = np.zeros((max(len(self.groups), 1), int(self.ranks.max()) + 1), dtype=np.int64)
        for number, members in enumerate(self.groups):
            places[number, list(members)] = np.arange(len(members))
        return places

    def _check_alike(self, every: TaskColumns) -> None:
        """Raise ConfigError unless the template's last step equals the second."""
        template, bounds, last = self.template, self._bounds, self.template.n_steps - 1
        first, _, _ = self._keys

        def shape(step: int) -> list[npt.NDArray[Any]]:
            own = slice(bounds[step], bounds[step + 1])
            columns_of = [template.lane, template.kind, template.peer, template.part, template.nbytes, template.every]
            return [*(each[own] for each in (*columns_of, first, *(one.seconds for one in self.templates)))]

        def inside(step: int) -> list[Ints]:
            offsets = every.offsets[bounds[step] : bounds[step + 1] + 1]
            row = np.repeat(np.arange(bounds[step + 1] - bounds[step]), np.diff(offsets))
            after = every.following[offsets[0] : offsets[-1]]
            same = template.step[after] == step
            return [row[same], after[same] - bounds[step]]

        if last < N_STEPS - 1 or not all(
            np.array_equal(a, b) for of in (shape, inside) for a, b in zip(of(1), of(last), strict=True)
        ):
            raise ConfigError(
                "plan: the steps after the first one differ, so the step program cannot repeat them; all "
                "these steps must have the same keys and rows in the same order"
            )


def _first_steps(plan: Plan, bounds: Sequence[int]) -> Plan:
    """Return the plan of the first steps; `bounds` are the offsets of their rows."""
    end = bounds[-1]
    if end == len(plan):
        return plan
    column: dict[str, Any] = {name: getattr(plan, name)[:end] for name in COLUMNS}
    offsets = plan.need_offsets[: end + 1]
    return dataclasses.replace(plan, need_offsets=offsets, needs=plan.needs[: offsets[-1]], **column)


def _taking_place(plan: Plan) -> Plan:
    """Remove the tasks that do not take place in their steps; their successors inherit their dependencies."""
    left_out = np.zeros(len(plan), dtype=np.bool_)
    for number, cycle in enumerate(plan.cycles, 1):
        steps = np.array([not cycle.includes(step + 1) for step in range(plan.n_steps)])
        left_out |= (plan.every == number) & steps[plan.step]
    if not left_out.any():
        return dataclasses.replace(plan, cycles=(), every=np.zeros(len(plan), dtype=np.int64)) if plan.cycles else plan
    place = np.cumsum(~left_out) - 1
    offsets, needs, previous = plan.need_offsets.tolist(), plan.needs.tolist(), plan.previous.tolist()
    instead: dict[int, list[int]] = {}

    def needed(row: int) -> list[int]:
        own = needs[offsets[row] : offsets[row + 1]]
        kept: dict[int, None] = {}
        for need in own:
            kept |= dict.fromkeys(instead[need] if left_out[need] else [int(place[need])])
        return list(kept)

    lists = []
    for row in range(len(plan)):
        if left_out[row]:
            before = previous[row]
            lane = [] if before < 0 else instead[before] if left_out[before] else [int(place[before])]
            instead[row] = list(dict.fromkeys([*needed(row), *lane]))
        else:
            lists.append(needed(row))
    keys = np.unique(plan.key[~left_out & (plan.key >= 0)])
    column: dict[str, Any] = {name: getattr(plan, name)[~left_out] for name in COLUMNS}
    column["key"] = np.where(column["key"] >= 0, np.searchsorted(keys, column["key"]), -1)
    column["every"] = np.zeros(len(lists), dtype=np.int64)
    return dataclasses.replace(
        plan,
        cycles=(),
        need_offsets=np.cumsum([0, *map(len, lists)]),
        needs=np.array([need for each in lists for need in each], dtype=np.int64),
        **column,
    )


class Folded(NamedTuple):
    """A function that builds a program whose ranks represent several workers, and the (first) worker of each rank,
    (n_ranks,)."""

    program: Callable[[], StepProgram]
    workers: Ints


@dataclass(frozen=True, eq=False)
class LiveSteps:
    """The first step of a program (slot 0) and those after it (slots 1 to `live`, cyclically).

    plan      of the first steps, with all tasks; later ones equal its last one
    source    the template's row that each row of the plan is, (n,)
    row       the plan's row that each task is, (n_tasks,)
    rows      of the tasks of each slot
    keys      of each slot
    live      steps that can be in flight
    has_late  whether there are tasks that their step does not wait for
    """

    plan: Plan
    source: Ints
    row: Ints
    rows: tuple[slice, ...]
    keys: tuple[slice, ...]
    live: int
    has_late: bool

    def slot(self, step: int) -> int:
        """Return the slot in which a step is executed."""
        return step if step <= self.live else 1 + (step - 1) % self.live

    def slot_of(self, task: int) -> int:
        """Return the slot of a task."""
        return bisect.bisect_right(self.rows, task, key=lambda rows: rows.start) - 1

    @cached_property
    def key_sizes(self) -> Floats:
        """Bytes of the buffer of each key's collective, (n_keys,)."""
        sizes, shown = key_sizes(self.plan)[0], self.plan.n_steps
        return np.concatenate([sizes[self.keys[min(slot, shown - 1)]] for slot in range(self.live + 1)])


# ---------------------------------------------------------------- templates


@dataclass(slots=True)
class Row:
    """A task at one place in one step.

    micro   the micro-batch, -1 if none
    to      message: the place at the other end
    group   collective: the template's group
    number  of the message or collective within the step
    needs   rows of the same step
    before  rows of the previous step, or (row, number of steps back)
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
    needs: list[int] = field(default_factory=list)
    before: Sequence[int | tuple[int, int]] = ()
    every: int = 0


_NONE: Ints = np.empty(0, dtype=np.int64)


class Step(NamedTuple):
    """The rows of one step of a template: columns of :class:`Row`, (n,) each, and "lane", an index into the template's
    lanes; dependencies (row, needed row) within the step, and with the number of steps back, (n_needs,) each."""

    columns: dict[str, npt.NDArray[Any]]
    needs: tuple[Ints, Ints]
    before: tuple[Ints, Ints, Ints] = (_NONE, _NONE, _NONE)


_ROW_COLUMNS = (
    "kind", "seconds", "nbytes", "micro", "first", "end", "part", "holds", "to", "group", "number", "name", "every",
)  # fmt: skip


def pairs_of(lists: Iterable[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return (row, needed row) of all dependencies, given the dependencies of each row."""
    return pairs([(row, need) for row, needs in enumerate(lists) for need in needs])


def step_of(rows: Sequence[Row], lanes: dict[tuple[int, str], int]) -> Step:
    """Convert rows to a step; new lanes (place and name) are added to `lanes`."""
    column: dict[str, npt.NDArray[Any]] = {}
    for name in _ROW_COLUMNS:
        column[name] = np.array([getattr(row, name) for row in rows])
    column["lane"] = np.array([lanes.setdefault((row.place, row.lane), len(lanes)) for row in rows], dtype=np.int64)
    before = [
        (i, *(each if isinstance(each, tuple) else (each, 1))) for i, row in enumerate(rows) for each in row.before
    ]
    row, need, back = np.array(before, dtype=np.int64).reshape(-1, 3).T
    return Step(column, pairs_of(row.needs for row in rows), (row, need, back))


def template_of(
    steps: Sequence[Step], lanes: Iterable[tuple[int, str]], *, groups: Sequence[tuple[int, ...]],
    parts: Sequence[Part], n_layers: int, names: tuple[str, ...] = (), queues: Sequence[Queue] = (),
    queued: str = "", delays: tuple[int, ...] = (), cycles: tuple[Every | Chosen, ...] = (),
    servers: Iterable[int] = (), notes: Iterable[str] = (),
) -> Plan:  # fmt: skip
    """Return the template of consecutive steps.

    lanes   place and name of each lane
    groups  places of each group in one copy
    queued  name of the lane whose collectives the queue launches, if any
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
        after, before, back = step.before
        there = back <= i
        rows += [begins[i] + step.needs[0], begins[i] + after[there]]
        needs += [begins[i] + step.needs[1], begins[i - back[there]] + before[there]]
    offsets, need = csr(np.concatenate(rows), np.concatenate(needs), int(begins[-1]))
    number, group, micro = column.pop("number"), column.pop("group"), column.pop("micro")
    return Plan(
        lanes=tuple(Lane(place, name, 0 if queues and name == queued else -1) for place, name in lanes),
        groups=tuple(groups), parts=tuple(parts), names=names, n_layers=n_layers, queues=tuple(queues), delays=delays,
        cycles=cycles, servers=tuple(servers), notes=tuple(dict.fromkeys(notes)),
        step=np.repeat(np.arange(len(steps)), sizes), key=np.where(number >= 0, key_begins + number, -1),
        peer=np.where(group >= 0, group, column.pop("to")), batch=micro, needs=need, need_offsets=offsets,
        **column,
    )  # fmt: skip


# ---------------------------------------------------------------- what the executor takes


def columns(plan: Plan) -> TaskColumns:
    """Return the tasks of a plan."""
    first, second = Order(plan).pairs
    own = plan.kind[first] != SEND
    own |= plan.kind[second] != RECEIVE
    own |= plan.key[first] != plan.key[second]  # a receive waits for its message, but not to begin to wait
    first, second = first[own], second[own]
    offsets, following = csr(first, second, len(plan))
    missing = np.bincount(second, minlength=len(plan))
    kind = np.full(len(plan), tasks.WORK)
    kind[plan.kind == SEND], kind[plan.kind == RECEIVE] = tasks.SEND, tasks.RECEIVE
    grouped = plan.kind >= ALL_REDUCE
    kind[grouped] = np.where(plan.queue[grouped] >= 0, tasks.QUEUED, tasks.JOIN)
    place = np.zeros((len(plan.groups), plan.n_ranks), dtype=np.int64)
    for number, group in enumerate(plan.groups):
        place[number, list(group)] = np.arange(len(group))
    return TaskColumns(
        kind=kind, seconds=plan.seconds, key=plan.key, queue=plan.queue, step=plan.step, offsets=offsets,
        place=np.where(grouped, place[np.where(grouped, plan.peer, 0), plan.rank], 0) if len(plan.groups) else kind * 0,
        following=following, missing=missing, waits=missing,
        slow=np.full(len(plan), -1),
    )  # fmt: skip


def key_sizes(plan: Plan) -> tuple[Floats, Ints, Ints]:
    """Return the bytes of the buffer, the group and the kind of each key's collective, (n_keys,) each."""
    rows = plan.collectives
    n_keys = int(plan.key.max(initial=-1)) + 1
    sizes, group, kind = np.zeros(n_keys), np.full(n_keys, -1, dtype=np.int64), np.full(n_keys, -1, dtype=np.int64)
    for of_keys, column in ((sizes, plan.nbytes), (group, plan.peer), (kind, plan.kind)):
        of_keys[plan.key[rows]] = column[rows]
    return sizes, group, kind
