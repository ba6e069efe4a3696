"""The order in which tasks can run: precedence between tasks, and the check for cycles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.network.executor import distinct
from ddlsim.plan.plan import BROADCAST, GATHER, PUSH_PULL, REDUCE, ROOTED, SCATTER, Bools, Ints, Plan
from ddlsim.plan.rows import csr, joined, occurrences

#: number of tasks of a cycle that an error names
N_SHOWN = 6


@dataclass(frozen=True)
class Order:
    """Precedence in a plan whose messages and collectives are complete.

    A task comes after its dependencies and the previous task on its lane, and a receive after its send. The rows of a
    collective are one *event*: none ends before all have started. If bytes only come from a root or only go to it, or
    servers do not wait for each other, each row is an event by itself, and comes after the tasks that must end before
    its bytes can start.
    """

    plan: Plan

    @cached_property
    def event(self) -> Ints:
        """Event of each row, (n,)."""
        plan = self.plan
        event_row = np.arange(len(plan))
        rows = plan.collectives[~np.isin(plan.kind[plan.collectives], ROOTED) & ~self._serves[plan.collectives]]
        if len(rows):
            _, first, which = np.unique(plan.key[rows], return_index=True, return_inverse=True)
            event_row[rows] = rows[first][which]
        return distinct(event_row, len(plan))[1]

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """Rows (before, after), (n_pairs,) each: dependencies, then lanes, then messages."""
        plan = self.plan
        second = np.flatnonzero(plan.previous >= 0)
        send, receive = plan.messages
        before = np.concatenate([plan.needs, plan.previous[second], send])
        return before, np.concatenate([plan.needing, second, receive])

    @cached_property
    def ends_after(self) -> tuple[Ints, Ints]:
        """Rows (before, after), (n_pairs,) each: all pairs, and those in which the second row can start but not end
        before the first has ended, because a member of its collective whose bytes it needs waits for that."""
        plan, (before, after) = self.plan, self.pairs
        rows = plan.rows(*ROOTED, PUSH_PULL)
        if not len(rows):
            return self.pairs
        firsts = np.array([group[0] if group else -1 for group in plan.groups], dtype=np.int64)
        is_first, kind, key = plan.rank[rows] == firsts[plan.peer[rows]], plan.kind[rows], plan.key[rows]
        spreads, serves = np.isin(kind, (BROADCAST, SCATTER)), self._serves[rows]
        waited, waiting = [], []
        for left, right in (
            (spreads & is_first, spreads & ~is_first),  # from a root
            (np.isin(kind, (REDUCE, GATHER)) & ~is_first, np.isin(kind, (REDUCE, GATHER)) & is_first),  # to a root
            ((kind == PUSH_PULL) & ~serves, serves),
            (serves, (kind == PUSH_PULL) & is_first),
        ):
            i, j = joined(key[left], key[right])
            waited.append(rows[left][i])
            waiting.append(rows[right][j])
        i, j = joined(np.concatenate(waited), after)
        return np.concatenate([before, before[j]]), np.concatenate([after, np.concatenate(waiting)[i]])

    @cached_property
    def _serves(self) -> Bools:
        """Whether each row belongs to a server in a push_pull, (n,)."""
        return np.asarray((self.plan.kind == PUSH_PULL) & np.isin(self.plan.rank, self.plan.servers))

    @cached_property
    def following(self) -> tuple[list[int], list[int]]:
        """Successors of each event, as a CSR of plain lists."""
        before, after = (self.event[rows] for rows in self.ends_after)
        offsets, following = csr(before, after, self.n_events)
        return offsets.tolist(), following.tolist()

    @cached_property
    def n_events(self) -> int:
        """Number of events."""
        return int(self.event.max()) + 1 if len(self.plan) else 0

    @cached_property
    def events(self) -> list[int]:
        """All events, topologically sorted. Raises ConfigError, naming the tasks, for a cycle."""
        offsets, following = self.following
        missing = np.bincount(np.array(following, dtype=np.int64), minlength=self.n_events).tolist()
        ready = [event for event in range(self.n_events) if not missing[event]]
        for event in ready:  # grows during the loop
            for after in following[offsets[event] : offsets[event + 1]]:
                missing[after] -= 1
                if not missing[after]:
                    ready.append(after)
        if len(ready) < self.n_events:
            raise ConfigError(self._cycle({event for event in range(self.n_events) if missing[event]}))
        return ready

    def ends(self, seconds: list[float]) -> list[float]:
        """Return when each event ends if it takes ``seconds[event]`` and starts as early as possible, in s."""
        offsets, following = self.following
        end = [0.0] * self.n_events  # the start, until the event is processed
        for event in self.events:
            end[event] += seconds[event]
            for after in following[offsets[event] : offsets[event + 1]]:
                if end[event] > end[after]:
                    end[after] = end[event]
        return end

    @cached_property
    def rows(self) -> Ints:
        """All rows, sorted by the order of their events, (n,)."""
        place = np.empty(self.n_events, dtype=np.int64)
        place[self.events] = np.arange(self.n_events)
        return np.argsort(place[self.event], kind="stable")

    @cached_property
    def _ended(self) -> tuple[Ints, Ints, Ints]:
        """Return what is known to have ended when a row starts.

        Index of each row's lane among those of its rank, (n,); index of each row in its lane, (n,); and for every lane
        of the rank and every row, how many rows of the lane have ended when the row starts, (n_lanes of a rank, n),
        which is meaningless for lanes without an order.
        """
        plan, n = self.plan, len(self.plan)
        local, place = occurrences(plan.lane_rank)[plan.lane], occurrences(plan.lane)
        before, after = self.pairs
        inside = plan.rank[before] == plan.rank[after]
        before, after = before[inside], after[inside]
        rank_of_row = np.empty(n, dtype=np.int64)
        rank_of_row[self.rows] = np.arange(n)
        turn = np.argsort(rank_of_row[after], kind="stable")
        pairs = list(zip(before[turn].tolist(), after[turn].tolist(), strict=True))
        ended = np.zeros((int(local.max(initial=0)) + 1, n), dtype=np.int64)
        for lane in range(len(ended)):
            over, counts = [0] * n, np.where(local == lane, place + 1, 0).tolist()
            for first, second in pairs:
                value = counts[first] or over[first]
                if value > over[second]:
                    over[second] = value
            ended[lane] = over
        return local, place, ended

    def proved(self, before: Ints, after: Ints) -> Bools:
        """Return whether each row of `before` must have ended when that of `after` starts, (n_pairs,).

        It considers dependencies and lanes of one rank; tasks on a lane without an order count only if they are needed
        directly. Between ranks it considers only that a rank has received the messages that it waits for.
        """
        plan, (local, place, ended) = self.plan, self._ended
        listed = (plan.rank[before] == plan.rank[after]) & (plan.queue[before] < 0)
        needed = np.isin(before * len(plan) + after, plan.needs * len(plan) + plan.needing)
        return np.asarray(needed | (listed & (ended[local[before], after] > place[before])))

    def demand(self, before: Ints, after: Ints, why: str) -> None:
        """Raise ConfigError unless each row of `before` must have ended when that of `after` starts."""
        wrong = np.flatnonzero(~self.proved(before, after))
        if len(wrong):
            earlier, later = (self.plan.task(int(rows[wrong[0]])) for rows in (before, after))
            raise ConfigError(f"plan: {later} may start before the end of {earlier}, {why}")

    def _cycle(self, stuck: set[int]) -> str:
        """Return a description of a cycle that names its tasks."""
        plan = self.plan
        before, after = (rows.tolist() for rows in self.ends_after)
        event = self.event.tolist()
        waits: dict[int, tuple[int, int, int]] = {}  # event -> (row, row it waits for, pair)
        for number, (first, second) in enumerate(zip(before, after, strict=True)):
            if event[first] in stuck and event[second] in stuck:
                waits.setdefault(event[second], (second, first, number))
        at, path = next(iter(waits)), []
        while at not in path:
            path.append(at)
            at = event[waits[at][1]]
        cycle = path[path.index(at) :]
        texts = []
        for i, waiting in enumerate(cycle[:N_SHOWN]):
            row, needed, number = waits[waiting]
            n_needs, n_lanes = len(plan.needs), int((plan.previous >= 0).sum())
            why = "which it needs" if number < n_needs else "before it on its lane"
            why = why if number < n_needs + n_lanes else "which sends to it"
            why = why if number < len(self.pairs[0]) else "which comes before another member of its collective"
            entered = waits[cycle[i - 1]][1]  # the row of this event that the previous one waits for
            also = f", like {plan.task(entered)} of the same collective," if entered != row else ""
            texts.append(f"{plan.task(row)}{also} waits for {plan.task(needed)}, {why}")
        more = f"; and {len(cycle) - N_SHOWN} more" if len(cycle) > N_SHOWN else ""
        return f"plan: dependency cycle: {'; '.join(texts)}{more}"
