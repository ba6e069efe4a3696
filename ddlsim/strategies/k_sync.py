"""Synchronous SGD that does not wait for the slowest: backup workers, K-sync and K-batch-sync."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import simpy

from ddlsim.arguments import Index, checked
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.readable import count
from ddlsim.runtime import Message, Process, RunContext, Worker
from ddlsim.runtime.lanes import gradient
from ddlsim.runtime.servers import Visit, WithServers, communicate
from ddlsim.strategies.central import UNTIL_APPLIED, CentralModel, OfK

#: a process that returns a gradient, or None if it was interrupted
_Attempt = Generator[simpy.Event, object, Value[Array] | None]


def _attempt(worker: Worker) -> _Attempt:
    """Compute a gradient. If interrupted, book the time spent; the gradient's value is then never computed."""
    try:
        return (yield from worker.gradient())
    except simpy.Interrupt:
        if worker.rank in worker.recorder.open:
            kind, what, start = worker.recorder.open[worker.rank]
            worker.recorder.worker(worker.rank, kind, what, start, worker.loop.now)
        return None


def gradient_unless(worker: Worker, cancelled: simpy.Event) -> _Attempt:
    """Compute a gradient, or stop and return None as soon as `cancelled` occurs."""
    work = worker.loop.env.process(_attempt(worker))
    yield work | cancelled
    if work.is_alive:
        work.interrupt()
        yield work
    return None if cancelled.triggered else work.value


@dataclass
class _Arrival:
    """Arrival of a step's parameters at a worker; ``updated`` is the time of the update in s."""

    event: simpy.Event
    answer: Message | None = None
    updated: float = 0.0


@dataclass
class _Rounds:
    """Steps that use the first gradients to arrive; every update is sent to all workers, which abandon their work."""

    center: CentralModel
    gathered: list[Visit] = field(default_factory=list)
    _arrivals: dict[tuple[int, int], _Arrival] = field(default_factory=dict)

    def arrival(self, worker: Worker, version: int) -> _Arrival:
        """Return the arrival (event and value) of a version's parameters at a worker."""
        return self._arrivals.setdefault((worker.rank, version), _Arrival(worker.loop.env.event()))

    def push(self, worker: Worker, message: Message, version: int) -> simpy.Event:
        """Send a gradient computed with the parameters of `version`; return the event of its arrival."""
        arrived = self.center.servers.up(worker, message)
        visit = Visit(worker.rank, message.value, 0, worker.samples_per_step)
        worker.loop.env.process(self._receive(arrived, visit, version))
        return arrived

    def _receive(self, arrived: simpy.Event, visit: Visit, version: int) -> Process:
        """Receive the gradient unless it is late; update the model once enough have arrived."""
        center, servers = self.center, self.center.servers
        loop = servers.context.loop
        yield arrived
        if (seconds := servers.messages.server_seconds()) > 0.0:
            yield loop.work(seconds)
        if version != center.version or len(self.gathered) == center.count:
            return
        self.gathered.append(visit)
        if len(self.gathered) < center.count:
            return
        begin = loop.now
        if servers.apply_time > 0.0:
            yield loop.work(servers.apply_time)
            servers.record_update(begin)
        first, self.gathered = self.gathered, []
        center.update(first)
        for worker in servers.context.workers:
            loop.env.process(self._send(worker, center.version, center.params))

    def _send(self, worker: Worker, version: int, params: Value[Array]) -> Process:
        arrival = self.arrival(worker, version)
        servers = self.center.servers
        arrival.answer, arrival.updated = servers.messages.answer(worker, params), worker.loop.now
        yield servers.down(worker, arrival.answer)
        arrival.event.succeed()

    def work(self, worker: Worker, *, again: bool) -> Process:
        """Compute and push, once or (`again`) repeatedly, until the next parameters arrive; do so for every version."""
        version = 0
        while True:
            version += 1
            arrival = self.arrival(worker, version)
            fresh = arrival.event
            while not fresh.triggered:
                gradient = yield from gradient_unless(worker, fresh)
                if gradient is not None:
                    message = self.center.servers.messages.gradient(worker, gradient)
                    yield from worker.compute(message.seconds, "encode")
                    arrived = self.push(worker, message, version - 1)
                    yield from communicate(worker, arrived | fresh, "push")
                    if not again:
                        break
            start = worker.loop.now
            yield from worker.block(fresh, f"the parameters of step {version}")
            worker.book(start, arrival.updated, "pull")
            assert arrival.answer is not None
            yield from worker.compute(arrival.answer.seconds, "decode")
            worker.params = arrival.answer.value
            del self._arrivals[worker.rank, version]
            worker.end_step()


def _start(context: RunContext, center: CentralModel, *, again: bool) -> None:
    rounds = _Rounds(center)
    center.servers.plan(
        gradient(context),
        [f"an update uses the first {center.count} gradients; the other workers abandon theirs and start again"],
    )
    for worker in context.workers:
        context.loop.env.process(rounds.work(worker, again=again))


def _note_dropped(context: RunContext, label: str, count: int) -> None:
    """Note which samples count if an update uses `count` gradients and drops the others."""
    context.notes.append(
        f"{label}: throughput counts only the samples of the {count} gradients in each update, not those of abandoned "
        "work"
    )


@checked
@dataclass(frozen=True)
class KSync(OfK):
    """K-sync SGD: a step uses the gradients of the k fastest workers (Dutta et al. 2018, arXiv:1803.01113, section 2).

    The server waits for the first k gradients, applies the update ``w <- w - eta (1/k) sum g``, and sends the new
    parameters to all workers. When the parameters arrive, a worker that is still computing abandons its gradient and
    starts a new one. A gradient that is in flight at that time is dropped on arrival. With k equal to the number of
    workers, this is synchronous SGD.

    k   number of gradients per update, each from a different worker
    servers, placement, apply_time
        number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
        apply an update at the same time
    """

    kind = "sync"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per step."""
        return steps

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        self.check_k(context)
        center = CentralModel(self, context, self.k)
        if self.k < len(context.workers):
            _note_dropped(context, self.label, self.k)
        _start(context, center, again=False)


@checked
@dataclass(frozen=True)
class KBatchSync(OfK):
    """K-batch-sync SGD: a step uses the first k gradients to arrive (Dutta et al. 2018, arXiv:1803.01113).

    The server waits for k gradients, several of which may come from the same worker. It applies an update with their
    mean and sends the new parameters to all workers (section 2 of the paper). While a worker waits for the new
    parameters, it computes another gradient with the old ones. Unfinished gradients are cancelled when the new
    parameters arrive.

    k   number of gradients per update
    servers, placement, apply_time
        number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
        apply an update at the same time
    """

    kind = "batch-sync"

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        center = CentralModel(self, context, self.k)
        if len(context.workers) > 1:
            _note_dropped(context, self.label, self.k)
        _start(context, center, again=True)


@checked
@dataclass(frozen=True)
class BackupWorkers(WithServers):
    """Synchronous SGD with backup workers: each step drops the b slowest of N + b gradients.

    See Chen, Pan, Monga, Bengio and Jozefowicz 2016, arXiv:1604.00981, section 3. The first N gradients to arrive are
    used in the update ``w <- w - eta (1/N) sum g``.

    backups  b, the number of backup workers. The run's ``workers`` include them: ``workers`` = N + b
    restart  whether late workers abandon their gradients and receive the new parameters (:class:`KSync` with k = N).
             False: late workers finish and push their gradients, which are dropped, and then pull (the paper's
             algorithms 3 and 4, as in TensorFlow's SyncReplicasOptimizer)
    servers, placement, apply_time
             number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
             apply an update at the same time
    """

    backups: Index
    restart: bool = True

    @property
    def label(self) -> str:
        """Label for tables and plots: number of backup workers."""
        return count(self.backups, "backup worker") + ("" if self.restart else " (stragglers finish)")

    def waits_for_all(self) -> bool:
        """Return whether an update ends the steps of all workers."""
        return self.restart

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        n_needed = len(context.workers) - self.backups
        if n_needed < 1:
            n = len(context.workers)
            why = f"at least one of the {n} workers must not be a backup; use at most {n - 1}"
            why = why if n > 1 else "the only worker must not be a backup; use at least 2 workers"
            raise ConfigError(f"BackupWorkers: backups = {self.backups}: {why}")
        center = CentralModel(self, context, n_needed, drop_late=not self.restart)
        if self.backups > 0:
            _note_dropped(context, self.label, n_needed)
        if self.restart:
            _start(context, center, again=False)
        else:
            center.go(UNTIL_APPLIED)
