"""Plans as GOAL text, the language of LogGOPSim and ATLAHS.

Hoefler, Siebert and Lumsdaine 2009, "Group Operation Assembly Language"; the grammar is that of txt2bin in
https://github.com/spcl/LogGOPSim.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule
from ddlsim.collectives.schedule import Round
from ddlsim.errors import ConfigError, shown
from ddlsim.imports.text import SourceText, read_text
from ddlsim.output_files import write_text
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.graph import Operation, plan_of_operations
from ddlsim.plan.plan import ALL_REDUCE, COMPUTE, RECEIVE, SEND, Plan
from ddlsim.plan.rows import refuse_needs_across_ranks
from ddlsim.plan.schedules import Schedules

if TYPE_CHECKING:
    import networkx as nx

MAX_RANKS, MAX_MESSAGES, MAX_CPU, LARGEST = 10**6, 2_000_000, 255, 2**62
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = r"[a-zA-Z]\w*"
_OPERATION = re.compile(
    rf"(?:(?P<label>{_LABEL})\s*:\s*)?(?:calc\s+(?P<ns>\d+)|(?P<what>send|recv)\s+(?P<size>\d+)\s*b\s+(?P<way>to|from)\s+"
    r"(?P<peer>-?\d+)(?:\s+tag\s+(?P<tag>-?\d+))?)(?:\s+cpu\s+(?P<cpu>\d+))?(?:\s+nic\s+(?P<nic>\d+))?"
)
_BRACES = re.compile(r"(?<=\{)|(?=\})|(?<=\})")
_REQUIRES = re.compile(rf"(?P<later>{_LABEL})\s+(?P<start>i?)requires\s+(?P<sooner>{_LABEL})")


@checked
def read_goal(path: str | Path) -> Plan:
    """Read a plan from a GOAL file, the input format of LogGOPSim.

    path  path to the GOAL text file

    The durations of ``calc`` operations are in nanoseconds. Each ``cpu`` of a rank runs them one at a time, in the
    order in which they become ready. A send ends when the message is delivered (LogGOPSim's rendezvous protocol), and
    takes no CPU time. The network's routes determine which NIC a message uses; ``nic`` is ignored. If an operation
    ``irequires`` another operation, it waits until the dependencies of the other operation are met.

    Raises ConfigError, with the file and line, for invalid GOAL and for content that a plan cannot represent: receives
    from any rank or with any tag, and ``irequires`` on a ``calc``, which may start later than its dependencies allow.
    """
    source = read_text(path)
    text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), source.text)
    blocks = _Blocks(SourceText(source.path, text))
    return plan_of_operations(*blocks.read())


class _Blocks:
    """The ``rank`` blocks of a file, to be converted to operations."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.operations: list[Operation] = []
        self.n_ranks = 0

    def read(self) -> tuple[list[Operation], int]:
        rank, seen = -1, set[int]()
        labels: dict[str, int] = {}
        later: list[tuple[int, re.Match[str]]] = []
        for number, line in self._statements():
            if rank >= 0 and (match := _REQUIRES.fullmatch(line)):
                later.append((number, match))
            elif rank >= 0 and (match := _OPERATION.fullmatch(line)):
                label = match["label"]
                if label is not None and labels.setdefault(label, len(self.operations)) < len(self.operations):
                    raise self.source.error(number, f"label {label} is used twice; labels must be unique")
                self.operations.append(self._operation(number, rank, match))
            elif match := re.fullmatch(r"num_ranks\s+(\d+)", line):
                self.n_ranks = self._number(number, match[1], "num_ranks", MAX_RANKS)
                if self.n_ranks < 1:
                    raise self.source.error(number, "num_ranks 0: must be at least 1")
            elif match := re.fullmatch(r"rank\s+(\d+)\s*\{", line):
                if rank >= 0:
                    raise self.source.error(number, f"rank {rank} is not closed; add a }} before this line")
                rank = self._rank(number, match[1], "rank")
                if rank in seen:
                    raise self.source.error(number, f"rank {rank} occurs twice; put all its operations into one block")
                seen.add(rank)
                labels, later = {}, []
            elif rank < 0:
                raise self.source.error(number, f"{shown(line)}: expected num_ranks N, or rank N {{")
            elif line == "}":
                self._require(labels, later)
                rank = -1
            else:
                raise self.source.error(
                    number,
                    f"{shown(line)}: is not an operation; expected 'l1: calc 100', 'l2: send 8b to 1 tag 0', 'l3: "
                    "recv 8b from 1 tag 0', or 'l2 requires l1'",
                )
        if rank >= 0:
            raise self.source.error(None, f"ends inside rank {rank}; is the file complete? (a closing }} is missing)")
        if not self.n_ranks:
            raise self.source.error(None, "contains no num_ranks; is it a GOAL file?")
        if not self.operations:
            raise self.source.error(None, "contains no operations; is the file complete?")
        return self.operations, self.n_ranks

    def _statements(self) -> Iterator[tuple[int, str]]:
        """Yield line numbers and statements; braces may share a line with other statements."""
        for number, line in enumerate(self.source.text.splitlines(), start=1):
            for piece in _BRACES.split(line) if "{" in line or "}" in line else (line,):
                if piece.strip():
                    yield number, piece.strip()

    def _number(self, line: int, digits: str, what: str, largest: int = LARGEST) -> int:
        if len(digits) > 20 or int(digits) > largest:
            raise self.source.error(line, f"{what} {shown(digits)}: must be at most {largest}")
        return int(digits)

    def _rank(self, line: int, digits: str, what: str) -> int:
        if not self.n_ranks:
            raise self.source.error(line, "num_ranks must come first")
        rank = self._number(line, digits, what)
        if rank >= self.n_ranks:
            raise self.source.error(line, f"{what} {rank}: must be 0 to {self.n_ranks - 1} (num_ranks)")
        return rank

    def _operation(self, line: int, rank: int, match: re.Match[str]) -> Operation:
        where = f"{self.source.path}:{line}"
        cpu = match["cpu"] or "0"
        if match["ns"] is not None:
            seconds = 1e-9 * self._number(line, match["ns"], "calc")
            return Operation(rank, where, COMPUTE, seconds, lane=f"cpu {self._number(line, cpu, 'cpu')}")
        sends = match["what"] == "send"
        if (match["way"] == "to") != sends:
            raise self.source.error(line, f"{match['what']} ... {match['way']}: write 'send 8b to 1', 'recv 8b from 1'")
        tag = match["tag"] or "0"
        if "-" in match["peer"] or "-" in tag:
            raise self.source.error(line, "a receive of a plan needs a sender and a tag; set both")
        peer = self._rank(line, match["peer"], match["way"])
        if peer == rank:
            raise self.source.error(line, f"rank {rank} {match['what']}s {match['way']} itself; leave it out")
        kind, nbytes = SEND if sends else RECEIVE, float(self._number(line, match["size"], "size"))
        return Operation(rank, where, kind, nbytes=nbytes, peer=peer, tag=self._number(line, tag, "tag"))

    def _require(self, labels: Mapping[str, int], later: list[tuple[int, re.Match[str]]]) -> None:
        """Set the dependencies of a rank's operations."""
        starts: dict[int, list[int]] = {}
        for line, match in later:
            for label in (match["later"], match["sooner"]):
                if label not in labels:
                    raise self.source.error(line, f"label {label} is not defined on this rank")
            second, first = labels[match["later"]], labels[match["sooner"]]
            if not match["start"]:
                self.operations[second].needs.append(first)
            elif self.operations[first].kind == COMPUTE:
                raise self.source.error(
                    line,
                    f"{match['later']} waits for the start of the calc {match['sooner']}; in a plan, "
                    "tasks wait only for the end of others; wait for the requirements of that calc instead",
                )
            else:
                starts.setdefault(second, []).append(first)
        needs = {number: list(self.operations[number].needs) for firsts in starts.values() for number in firsts}
        for second, firsts in starts.items():  # operations that start with others wait for the same dependencies
            reached = list(dict.fromkeys(firsts))
            for first in reached:  # grows during the loop
                self.operations[second].needs += needs[first]
                reached += [operation for operation in starts.get(first, ()) if operation not in reached]


# ---------------------------------------------------------------- writing


def to_goal(
    plan: Plan,
    path: str | Path,
    algorithm: str | Collective | Mapping[str, str | Collective] = "default",
    *,
    cluster: str | Path | nx.Graph[str] | Cluster | None = None,
    nodes: Sequence[int] | None = None,
    rank_order: str | Sequence[int] = "topology",
) -> Path:
    """Write a plan as GOAL text and return the file.

    GOAL has only messages, so each collective is written as the messages of its algorithm.

    algorithm   algorithm of collectives, as for :func:`ddlsim.plan.execute`
    cluster     cluster for which the default algorithms are chosen, as for :func:`ddlsim.plan.execute`. None: rings,
                with members in the order of their groups
    nodes       (n_ranks,) index of each rank's node in the cluster; None: the cluster's first workers
    rank_order  order of a collective's members on the cluster, as for :func:`ddlsim.plan.execute`

    GOAL has whole nanoseconds and whole bytes. Every lane of a rank is a ``cpu``, and messages have one more: on a
    lane's CPU, LogGOPSim would make them wait for its passes. If the latencies of a schedule (``Round.latency``) exceed
    those of the cluster's routes, as NCCL's do, a ``calc`` delays each send by the difference, on a CPU for each lane
    of the schedule. Layers, steps, parts and memory of tasks are lost, and so are the limits of multiprocessors
    (``Round.handled``).

    Raises ConfigError, before writing anything, for plans that GOAL cannot express: dependencies between ranks without
    a message, queues, more than 255 lanes of a rank, and more than two million messages.
    """
    refuse_needs_across_ranks(plan, "to_goal", "GOAL")
    for task in plan.collectives[plan.queue[plan.collectives] >= 0][:1].tolist():
        raise ConfigError(
            f"to_goal: {plan.task(task)} is launched by a queue, and GOAL has no queues; export a plan without queues"
        )
    if cluster is None:
        if nodes is not None:
            raise ConfigError("to_goal: nodes has no effect without a cluster; set cluster, or remove nodes")
        schedules = Schedules(plan, algorithm, rank_order="given" if rank_order == "topology" else rank_order)
    else:
        loaded = load_cluster(cluster)
        schedules = Schedules(plan, algorithm, loaded, nodes_of(plan, loaded, nodes), rank_order)
    write_text(path, "".join(_Text(plan, schedules).lines()))
    return Path(path)


class _Text:
    """The lines of every rank of a plan."""

    def __init__(self, plan: Plan, schedules: Schedules) -> None:
        self.plan, self.schedules = plan, schedules
        self.cpu, self.messages_cpu, next_cpu = _cpus(plan)
        #: (rank, lane of a schedule) -> CPU that delays its sends
        self._delay_cpu = functools.cache(lambda rank, lane: next_cpu(rank))
        #: (key, rank) of a collective -> lanes of its schedule, as rounds of sends and receives, each with its delay
        self.parts: dict[tuple[int, int], dict[int, list[list[tuple[str, int]]]]] = {}
        rows = plan.collectives[np.unique(plan.key[plan.collectives], return_index=True)[1]].tolist()
        row_schedules = [schedules(int(plan.kind[row]), int(plan.peer[row]), float(plan.nbytes[row])) for row in rows]
        n_messages = sum(schedule.n_messages for schedule in row_schedules) + len(plan.rows(SEND))
        if n_messages > MAX_MESSAGES:
            raise ConfigError(
                f"to_goal: the plan has {n_messages:,} messages, more than {MAX_MESSAGES:,}; export fewer "
                "ranks or steps"
            )
        tag = len(plan)
        for row, schedule in zip(rows, row_schedules, strict=True):
            self._write_out(row, schedule, tag)
            tag += schedule.n_messages

    def _write_out(self, row: int, schedule: Schedule, tag: int) -> None:
        """Store the messages of a collective for its ranks, round by round."""
        members, key = self.plan.groups[self.plan.peer[row]], int(self.plan.key[row])
        for lane, rounds in enumerate(schedule.lanes):
            for one in rounds:
                delays = self._delays(one, members)
                for repetition in range(one.repeat):
                    sizes = schedule.message_bytes(float(self.plan.nbytes[row]), one, repetition) + one.header
                    now: dict[int, list[tuple[str, int]]] = {}
                    messages = zip(one.src.tolist(), one.dst.tolist(), sizes.tolist(), delays, strict=True)
                    for src, dst, size, delay in messages:
                        a, b = members[src], members[dst]
                        now.setdefault(a, []).append((self._message(SEND, a, b, size, tag), delay))
                        now.setdefault(b, []).append((self._message(RECEIVE, b, a, size, tag), 0))
                        tag += 1
                    for rank, texts in now.items():
                        self.parts.setdefault((key, rank), {}).setdefault(lane, []).append(texts)

    def _delays(self, one: Round, members: Sequence[int]) -> list[int]:
        """Return by how many ns the latency of each message in a round exceeds that of its route."""
        cluster, nodes = self.schedules.cluster, self.schedules.nodes
        if one.latency is None or cluster is None or nodes is None:
            return [0] * len(one.src)
        there = nodes[np.array(members)]
        routes = cluster.routes(there[one.src], there[one.dst])
        usual = np.bincount(routes.of, routes.share * cluster.link_latency[routes.links], len(routes))
        delays: list[int] = np.rint(1e9 * np.fmax(one.latency - usual, 0.0)).astype(np.int64).tolist()
        return delays

    def lines(self) -> Iterator[str]:
        plan = self.plan
        yield f"num_ranks {plan.n_ranks}\n"
        for rank in range(plan.n_ranks):
            operations = [line for row in np.flatnonzero(plan.rank == rank).tolist() for line in self._row(rank, row)]
            yield f"\nrank {rank} {{\n"
            yield from (f"{label}: {text}\n" for label, text, _ in operations)
            # txt2bin resolves only labels of earlier lines
            yield from (f"{label} requires {end}\n" for label, _, before in operations for end in before)
            yield "}\n"

    def _row(self, rank: int, row: int) -> Iterable[tuple[str, str, list[str]]]:
        """Return label, text and dependencies of a row's operations."""
        plan, kind = self.plan, int(self.plan.kind[row])
        needs = plan.needs_of(row)
        needs += [int(plan.previous[row])] if plan.previous[row] >= 0 else []
        after = list(dict.fromkeys(end for need in needs for end in self._ends(need)))
        if kind in (SEND, RECEIVE):
            text = self._message(kind, rank, int(plan.peer[row]), float(plan.nbytes[row]), int(plan.key[row]))
        else:  # a collective of one rank does nothing
            text = f"calc {round(1e9 * float(plan.seconds[row]))} cpu {self.cpu[int(plan.lane[row])]}"
        lanes = self.parts.get((int(plan.key[row]), rank), {}) if kind >= ALL_REDUCE else {}
        return self._messages(rank, row, lanes, after) if lanes else [(f"l{row}", text, after)]

    def _message(self, kind: int, rank: int, peer: int, nbytes: float, tag: int) -> str:
        """Return one end of a message as text."""
        ends = f"send {round(nbytes)}b to" if kind == SEND else f"recv {round(nbytes)}b from"
        return f"{ends} {peer} tag {tag} cpu {self.messages_cpu[rank]}"

    def _messages(
        self, rank: int, row: int, lanes: dict[int, list[list[tuple[str, int]]]], after: list[str]
    ) -> Iterator[tuple[str, str, list[str]]]:
        """Yield label, text and dependencies of a rank's messages; a round follows the previous one in its lane."""
        for lane, rounds in lanes.items():
            before = after
            for number, messages in enumerate(rounds):
                labels, waited, begun = _labels(row, lane, number, messages), 0, before
                for delay in sorted({delay for _, delay in messages}):
                    if delay:  # one after the other on their CPU
                        name = f"l{row}_{lane}_{number}_after{delay}"
                        yield name, f"calc {delay - waited} cpu {self._delay_cpu(rank, lane)}", begun
                        waited, begun = delay, [name]
                    for label, (text, message_delay) in zip(labels, messages, strict=True):
                        if message_delay == delay:
                            yield label, text, begun
                before = labels

    def _ends(self, row: int) -> list[str]:
        """Return the labels of the operations that end a row."""
        plan = self.plan
        lanes = self.parts.get((int(plan.key[row]), int(plan.rank[row])), {}) if plan.kind[row] >= ALL_REDUCE else {}
        last = [_labels(row, lane, len(rounds) - 1, rounds[-1]) for lane, rounds in lanes.items()]
        return [label for labels in last for label in labels] or [f"l{row}"]


def _cpus(plan: Plan) -> tuple[list[int], list[int], Callable[[int], int]]:
    """Return the CPU of each lane (the one in its name, or an unused one of its rank), of each rank a CPU that no lane
    has, and a function that returns a further one of a rank. txt2bin stores CPUs in a byte."""
    said = [re.fullmatch(r"cpu (\d{1,9})", lane.name) for lane in plan.lanes]
    taken = {(lane.rank, int(match[1])) for lane, match in zip(plan.lanes, said, strict=True) if match}
    free = [0] * plan.n_ranks

    def next_free(rank: int) -> int:
        while (rank, free[rank]) in taken:
            free[rank] += 1
        taken.add((rank, free[rank]))
        if free[rank] > MAX_CPU:
            raise ConfigError(
                f"to_goal: the plan uses CPU {free[rank]}, but LogGOPSim supports only CPUs 0 to {MAX_CPU}; use fewer "
                "lanes per rank"
            )
        return free[rank]

    cpus = [int(match[1]) if match else next_free(lane.rank) for lane, match in zip(plan.lanes, said, strict=True)]
    messages = [next_free(rank) for rank in range(plan.n_ranks)]
    if (most := max(cpus)) > MAX_CPU:
        raise ConfigError(
            f"to_goal: the plan uses CPU {most}, but LogGOPSim supports only CPUs 0 to {MAX_CPU}; use smaller numbers"
        )
    return cpus, messages, next_free


def _labels(row: int, lane: int, number: int, texts: Sequence[object]) -> list[str]:
    return [f"l{row}_{lane}_{number}_{i}" for i in range(len(texts))]
