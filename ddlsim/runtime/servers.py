"""Parameter servers: their placement, service times, queues, and update rules.

A server is a queue, a service time and an update rule. Synchronous servers are a route of gradients
(:mod:`ddlsim.runtime.exchange`); their :class:`Threads` take the seconds of a
:class:`~ddlsim.runtime.server_work.ServerWork`. Asynchronous :class:`Servers` each hold an equal part of the
parameters. If an update waits for several gradients, or a worker for others, the servers update together: a gradient
counts once every server has its part, and an update happens on all servers at once (:class:`UpdateRule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import simpy

from ddlsim.arguments import Count, checked, one_of, quantity
from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.network import lanes as ls
from ddlsim.readable import count
from ddlsim.runtime.codec import Message, Messages
from ddlsim.runtime.context import UNVARIED, Process, RunContext, Worker
from ddlsim.runtime.lanes import Cycles, Lanes, Op
from ddlsim.runtime.loop import Loop
from ddlsim.units import si

Placement = Annotated[str, one_of("own", "colocated")]
ApplyTime = Annotated[float | str, quantity("time", "1 ms", zero=True)]


class PlacesServers:
    """Strategies with servers, whose ranks follow those of the workers in plans."""

    servers: int
    placement: str

    def plan_nodes(self, cluster: Cluster, nodes: list[int]) -> list[int]:
        """Return the nodes of the plan's ranks: the workers on these `nodes`, and the servers."""
        return nodes + server_nodes(cluster, nodes, self.servers, self.placement)


class UpdatesServers(PlacesServers):
    """Strategies whose servers need `apply_time` (s) per update."""

    apply_time: float | str


@checked
@dataclass(frozen=True, kw_only=True)
class WithServers(UpdatesServers):
    """Base class with the fields of strategies whose servers update together, as for AsyncParameterServer."""

    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0


def check_layers(kind: str, learner: Learner, servers: int) -> None:
    """Raise ConfigError for an optimizer that needs norms of whole layers if layers are divided among servers."""
    optimizer = learner.task.optimizer if learner.task is not None else None
    if servers > 1 and hasattr(optimizer, "bounds"):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{kind}: servers = {servers}: the optimizer {name} needs the norms of complete layers, but the "
            "parameters are divided among servers without regard to layers; use servers = 1, or SGD, Momentum or Adam"
        )


def note_lock_step(context: RunContext) -> None:
    """Note that asynchronous workers with equal compute times run in lock step: equal flows that start together share
    the links and end together."""
    workers = context.workers
    times = {(w.workload.forward_time, w.workload.backward_time, w.workload.optimizer) for w in workers}
    varied = any(w.factors is not UNVARIED or w.slowdowns for w in workers)
    if len(workers) > 1 and len(times) == 1 and not varied:
        context.notes.append(
            "equal compute times without jitter: workers that start together keep arriving at the server together, "
            "whereas real workers drift apart (set jitter=...)"
        )


def server_nodes(cluster: Cluster, workers: list[int], n_servers: int, placement: str) -> list[int]:
    """Return the host nodes of `n_servers` servers.

    "own": machines without a worker, the first ones after them. "colocated": spread evenly over the workers'
    machines. Raises ConfigError if the cluster does not have enough machines.
    """
    busy = sorted({int(cluster.host_of[node]) for node in workers})
    host_node = {int(cluster.host_of[node]): int(node) for node in cluster.servers}
    if placement == "colocated":
        places = [host_node[host] for host in busy if host in host_node]
        where = "with workers"
    else:
        places = [node for host, node in sorted(host_node.items()) if host not in busy]
        where = "without workers"
    if n_servers > len(places):
        remedy = "fewer servers, fewer workers, or placement 'colocated'" if placement == "own" else "fewer servers"
        raise ConfigError(
            f"servers = {n_servers}, placement = {placement!r}: cluster {cluster.name!r} "
            f"has {count(len(places), 'machine') if places else 'no machines'} {where}; use {remedy}"
        )
    spread = [places[i * len(places) // n_servers] for i in range(n_servers)]
    return spread if placement == "colocated" else places[:n_servers]


class Threads:
    """Threads of a server or a machine, each of which serves requests in order of arrival. A tensor is assigned to a
    thread at its first request."""

    def __init__(self, loop: Loop, n: int = 1) -> None:
        self._loop, self._threads = loop, [simpy.Resource(loop.env) for _ in range(n)]
        self._loads, self._of = [0.0] * n, dict[tuple[int, int], int]()

    def of(self, tensor: tuple[int, int], nbytes: float) -> simpy.Resource:
        """Return the thread of (the share of) a tensor of `nbytes`."""
        if tensor not in self._of:
            self._of[tensor] = self._loads.index(min(self._loads))
            self._loads[self._of[tensor]] += nbytes
        return self._threads[self._of[tensor]]

    def work(self, thread: simpy.Resource, seconds: float, show: Callable[[float, float], None]) -> Process:
        """Wait for a thread, then occupy it for `seconds`; `show` receives the start and end (s)."""
        if seconds > 0.0:
            with thread.request() as turn:
                yield turn
                begin = self._loop.now
                yield self._loop.work(seconds)
            show(begin, self._loop.now)


class Servers:
    """The parameter servers of a strategy, each of which stores an equal part of the parameters.

    strategy    strategy that determines the number of servers, their placement, and their time per update
    models      True: workers send models to the servers; False: workers send gradients
    messages    encoder of the messages between workers and servers
    apply_time  time to apply an update, in seconds

    Raises ConfigError if the cluster does not have enough machines.
    """

    def __init__(self, strategy: UpdatesServers, context: RunContext, *, models: bool = False) -> None:
        self.context = context
        self.nodes = server_nodes(context.cluster, context.nodes, strategy.servers, strategy.placement)
        self.apply_time = si(strategy.apply_time, "time")
        self.messages = Messages(context, len(self.nodes), owner=type(strategy).__name__, models=models)

    def plan(self, ops: Sequence[Op], notes: Sequence[str]) -> None:
        """Set the plan (``RunContext.plan``) of a strategy that starts worker processes.

        ops    operations of one cycle, before the push and pull
        notes  notes about the decisions of the processes
        """
        context, n = self.context, len(self.nodes)
        ops = [*ops, Op(ls.WORK, "encode"), Op(ls.EXCHANGE, "push and pull"), Op(ls.WORK, "decode")]
        seconds = [self.apply_time + self.messages.server_seconds(i) for i in range(n)]
        nbytes = context.workers[0].workload.gradient_nbytes / n
        context.plan = Cycles(context.workers, ops, nbytes, self.messages, servers=seconds, notes=notes).plan

    def up(self, worker: Worker, message: Message) -> simpy.Event:
        """Send a worker's encoded message to the servers, and return the event that all servers have received it."""
        sends = zip(self.nodes, message.sizes, strict=True)
        return worker.loop.env.all_of([worker.loop.send(worker.node, node, nbytes) for node, nbytes in sends])

    def down(self, worker: Worker, message: Message) -> simpy.Event:
        """Send the servers' reply to a worker, and return the event that the worker has received all of it."""
        sends = zip(self.nodes, message.sizes, strict=True)
        return worker.loop.env.all_of([worker.loop.send(node, worker.node, nbytes) for node, nbytes in sends])

    def record_update(self, begin: float) -> None:
        """Record an update that began at `begin` (s) and ends now, on every server's track of the timeline."""
        for i in range(len(self.nodes)):
            self.context.recorder.background(f"server {i}", "update", begin, self.context.loop.now)


def communicate(worker: Worker, event: simpy.Event, what: str) -> Process:
    """Block the worker until `event`, and record the time as communication."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, start, what)


class Visit(NamedTuple):
    """A worker's contribution of `n_samples` samples; `staleness`: number of updates since its pull."""

    rank: int
    value: Value[Array]
    staleness: int
    n_samples: int


class UpdateRule:
    """The update rule of a strategy's servers. All workers repeat: work, visit the servers, work.

    count    number of visits per update, in order of arrival
    late     whether visits count if there has been an update since their pull
    counted  whether an update of the servers is an update of the run
    told     whether the staleness of visits is recorded
    decides  whether updates decide on the course of the run
    notes    decisions that the plan of a cycle does not specify
    """

    count = 1
    notes: Sequence[str] = ()
    late = counted = told = True
    decides = False

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._visits: list[Visit] = []
        self._sent: dict[int, Message] = {}

    def pack(self, worker: Worker) -> Message:
        """Return a worker's message to the servers."""
        raise NotImplementedError

    def update(self, visits: Sequence[Visit]) -> None:
        """Update the model from `count` visits now."""
        raise NotImplementedError

    def answer(self, worker: Worker) -> Message:
        """Return the servers' answer to a worker."""
        raise NotImplementedError

    def samples(self, worker: Worker) -> int:
        """Return the number of samples in a worker's contribution."""
        return worker.samples_per_step * self._steps

    def serve(
        self,
        before: Sequence[Op],
        after: Sequence[Op],
        held: Sequence[Op] = (),
        steps: int = 1,
        first: Op | None = None,
    ) -> None:
        """Let all workers repeat: the operations ``before`` a visit, the visit, the operations ``after`` it.

        held   operations MEET or CLOCK, by which a worker waits after its turn
        steps  steps of a worker between two visits
        first  the operation that all begin with; None: the first one

        Values are computed in training runs, sizes if they depend on values.
        """
        servers, self._steps = self.servers, steps
        packs = servers.messages.choice is not None
        kind = ls.CONTRIBUTE if self.late else ls.CONTRIBUTE_FRESH
        contribute = Op(kind, "update", lambda _: servers.apply_time, number=self.count)
        ops = [
            *before,
            Op(ls.ASK if packs else ls.NOTE, follow=self._packed),
            Op(ls.WORK, "encode"),
            Op(ls.TRAVEL, "push"),
            Op(ls.TURN, "the servers' queue"),
            Op(ls.DELAY, "decode", lambda _: servers.messages.server_seconds()),
            contribute,
            Op(ls.UPDATE, follow=self._updated, number=self.counted),
            Op(ls.RELEASE),
            *held,
            Op(ls.TAKE, follow=self._taken, number=packs),
            Op(ls.TRAVEL, "pull", number=1),
            Op(ls.WORK, "decode"),
            *after,
        ]
        worker = servers.context.workers[0]
        self.lanes = Lanes(
            servers.context,
            ops,
            worker.workload.gradient_nbytes / len(servers.nodes),
            worker.samples_per_step * self.count * steps,
            servers.messages,
            servers=[(node, 0.0) for node in servers.nodes],
            served=self._served,
            batch=self.count if self.told else 0,
            first=first,
            notes=self.notes,
            decides=self.decides,
        )

    def _packed(self, worker: Worker) -> None:
        message = self._sent[worker.rank] = self.pack(worker)
        self.lanes.set_message(worker, message.seconds, message.sizes)

    def _served(self, worker: Worker, server: int, staleness: int, is_update: bool) -> None:
        self._visits.append(Visit(worker.rank, self._sent[worker.rank].value, staleness, self.samples(worker)))

    def _updated(self, worker: Worker) -> None:
        visits, self._visits = self._visits, []
        self.update(visits)

    def _taken(self, worker: Worker) -> None:
        message = self.answer(worker)
        self.lanes.set_seconds(worker, "decode", message.seconds)
        self.lanes.set_answers(worker, message.sizes)
