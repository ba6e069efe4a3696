"""What goes on beside the tasks of planned steps: carriers that know the time of a collective, or are processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import simpy

from ddlsim.network import tasks
from ddlsim.network.executor import Executor
from ddlsim.plan.inserted import DECODE, ENCODE
from ddlsim.plan.live import LiveSteps
from ddlsim.plan.plan import ALL_REDUCE, Bools, Ints
from ddlsim.runtime.carrier import Carrier, Dense
from ddlsim.runtime.coded import Coded
from ddlsim.runtime.communicator import Communicator

__all__ = ["Travel"]


class Travel:
    """What goes on outside the tasks of steps (:class:`~ddlsim.network.executor.Outside`): collectives of known time,
    those that go by processes, and the seconds of encoding and decoding, which can depend on values.

    carriers  by the kind of collective
    step_in   the step that is executed in a slot, and the factor of a rank's compute times there
    """

    def __init__(
        self, members: Communicator, carriers: Mapping[int, Carrier], steps: LiveSteps,
        step_in: Callable[[int], int], factor: Callable[[int, int], float],
    ) -> None:  # fmt: skip
        self.members, self.carriers, self.steps = members, carriers, steps
        self.loop, self.step_in, self.factor = members.setting.loop, step_in, factor
        self.launched: dict[int, list[list[int]]] = {}  # keys of each buffer, by slot
        plan = steps.plan
        rows = plan.collectives
        n_keys = len(steps.key_sizes)
        self._row = np.zeros(int(plan.key.max(initial=-1)) + 1, dtype=np.int64)  # one of each key
        self._row[plan.key[rows]] = rows
        self._row = self._row[:n_keys]
        self.decoding = plan.names.index(DECODE) if DECODE in plan.names else -1
        (self.summing, *_) = [kind for kind in carriers if kind in plan.kind] or [ALL_REDUCE]

    @functools.cached_property
    def kinds(self) -> Ints:
        """What the tasks are for the executor."""
        plan, kind = self.steps.plan, self.steps.tasks.kind.copy()
        known = [collective for collective, carrier in self.carriers.items() if carrier.way == "known"]
        kind[np.isin(plan.kind[: len(kind)], known) & (kind == tasks.JOIN)] = tasks.MEETING
        kind[self.asked[: len(kind)]] = tasks.ASKED
        return kind

    @functools.cached_property
    def asked(self) -> Bools:
        """Which rows of the plan take as long as somebody says when they begin."""
        plan = self.steps.plan
        processes = [collective for collective, carrier in self.carriers.items() if carrier.way == "process"]
        return self.coding | (np.isin(plan.kind, processes) & (plan.queue < 0))

    @functools.cached_property
    def coding(self) -> Bools:
        """Which rows of the plan encode or decode."""
        plan = self.steps.plan
        names = np.array([name in (ENCODE, DECODE) for name in plan.names] + [False])  # the last for those without
        return names[plan.name]

    @property
    def meets(self) -> bool:
        """Whether what queues launch does not go by schedules."""
        return any(carrier.way != "schedule" for carrier in self.carriers.values())

    def executes(self, executor: Executor) -> None:
        """Remember who executes the tasks."""
        self.executor = executor

    # ------------------------------------------------------------ collectives

    def collective(self, keys: list[int]) -> int:
        """Prepare a collective, simulated by a schedule, that carries `keys`; return its id."""
        carrier, step, part, nbytes = self._carried(keys)
        assert isinstance(carrier, Dense | Coded)  # others go by processes
        schedule, size = carrier.schedule(step, part, nbytes)
        return self.loop.collective(schedule, self.members.all_nodes, size)

    def meet(self, keys: list[int], queue: int) -> None:
        self.loop.env.pass_time(self.executor.now)
        carrier, step, part, nbytes = self._carried(keys)
        members = [self.executor.members(key) for key in keys]
        if carrier.way == "known":
            assert isinstance(carrier, Dense | Coded)
            end = self.members.run(carrier.phases(step, part, nbytes))
            self.executor.end(np.concatenate(members), end)
            finished = self.loop.env.event()
            if queue >= 0:
                self.loop.trigger_at(finished, end)
        else:
            ends = [carrier.carry(worker, step, part, nbytes) for worker in self.members.workers]
            for place, arrival in enumerate(ends):
                _after(arrival, functools.partial(self._end, [int(rows[place]) for rows in members]))
            finished = self.loop.env.all_of(ends)
        if queue >= 0:
            _after(finished, lambda _: self.executor.dispatchers[queue].ended(self.executor.now))

    def begins(self, row: int) -> float:
        plan = self.steps.plan
        step, part, rank = self.step_in(int(plan.step[row])), int(plan.part[row]), int(plan.rank[row])
        worker, coding = self.members.workers[rank], self.coding[row]
        carrier = self.carriers[self.summing if coding else int(plan.kind[row])]
        self.loop.env.pass_time(self.executor.now)
        if coding:
            decodes = plan.name[row] == self.decoding
            seconds = (carrier.decode_seconds if decodes else carrier.encode_seconds)(worker, step, part)
            return seconds * self.factor(step, rank)
        _after(carrier.carry(worker, step, part, float(plan.nbytes[row])), functools.partial(self._end, [row]))
        return float("inf")

    def _end(self, rows: list[int], _: simpy.Event) -> None:
        self.executor.end(rows, self.executor.now)

    def _carried(self, keys: list[int]) -> tuple[Carrier, int, int, float]:
        """Return who carries `keys` as one, in which step, as which part, and their bytes."""
        plan, row = self.steps.plan, int(self._row[keys[0]])
        if self.members.setting.recorder.keep_spans:
            self.launched.setdefault(int(plan.step[row]), []).append(keys)
        nbytes = float(np.cumsum(self.steps.key_sizes[keys])[-1])  # one after the other, as buffers are filled
        return self.carriers[int(plan.kind[row])], self.step_in(int(plan.step[row])), int(plan.part[row]), nbytes

    # ------------------------------------------------------------ processes

    def next(self) -> float:
        return self.executor.now if self.loop.asks else self.loop.env.peek()

    def completed(self, ids: Ints, ranks: Ints) -> None:
        self.loop.env.pass_time(self.executor.now)
        for number, rank in zip(ids.tolist(), ranks.tolist(), strict=True):
            self.loop.complete(number, rank, self.executor.now)

    @property
    def under_way(self) -> bool:
        """Whether anything is left to happen."""
        return self.executor.under_way or self.next() < np.inf

    def turn(self, limit: float) -> bool:
        """Let processes do all that comes next at one instant, up to `limit` (s); return whether there was anything."""
        env, now = self.loop.env, self.next()
        if now > limit or now == np.inf:
            return False
        self.executor.reach(now)
        while env.peek() == now:
            env.step()
        self.loop.start_queued()
        return True


def _after(event: simpy.Event, callback: Callable[[simpy.Event], None]) -> None:
    assert event.callbacks is not None
    event.callbacks.append(callback)
