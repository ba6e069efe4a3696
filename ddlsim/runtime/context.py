"""A strategy's view of a run: `RunContext`, workers that compute, and the rule that ends the run; and `Strategy`, the
interface of strategies.

Times come from the workload (seconds per layer), multiplied by the step's jitter factor and stretched by transient
slow-downs. Every second of a worker is booked as compute, communication, waiting or input; the rest of the wall time is
idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.errors import DeadlockError
from ddlsim.learning import ABSENT, Array, DataPlane, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.learning.monitor import Monitor
from ddlsim.network.state import Floats, Ints, Records
from ddlsim.plan import Plan
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING, Recorder
from ddlsim.streams import stream
from ddlsim.workload.compute import Workload
from ddlsim.workload.contention import NO_SLOWDOWN, Contention
from ddlsim.workload.jitter import Jitter, NoJitter, Slow, slow_intervals
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    import simpy

    from ddlsim.runtime.feed import Feed


@dataclass
class RunContext:
    """The context of a run that is about to start, which :meth:`Strategy.start` receives.

    A strategy can append remarks about the result to ``notes``. When it starts, it sets ``model`` to a function that
    returns the current parameters, which become the final model when the run ends. If workers have separate models, the
    strategy also sets ``replicas`` to a function that returns the parameters of every worker, ``steps`` to a function
    that returns the number of local steps of each worker, and ``mixture`` to a string that describes how the final
    model is computed from the workers' models. If there is a single optimizer state, the strategy sets ``optimizer`` to
    a function that returns it.

    cluster          the cluster, including nodes that the run does not use
    loop             simulated clock and network
    workers          the workers, in rank order
    recorder         record of all activities and updates
    stop             rule that ends the run, to which updates are reported
    learner          gradients, updates and evaluations, as lazy values
    seed             seed of all random streams
    compression      compression of exchanges and messages; code that applies it sets ``compresses``
    slows            True if workers compute more slowly while they communicate; set by plans
    devices          records of the devices that communication slows down; set by plans
    counts_calls     True if collectives include the stack's time per call; set by plans and by averaging
    whole            workload that each worker would have with the complete model, for strategies that split the model
    jitter           distribution of a random factor applied to compute times
    crashes          for each worker, the (start, end) of its outages in s; empty if all workers stop together
    machines_crash   whether an outage also affects servers on the worker's machine
    plan             function of a number of steps (None: one cycle of steps) that returns the tasks of all ranks as
                     they are executed without disturbances. The executor of task graphs or of cycles sets it, and
                     strategies that start processes can set it
    shows_plan       True if only the plan is requested and nothing will be executed. Every rank then has its own tasks,
                     and messages whose compressed size depends on values have their uncompressed size
    """

    cluster: Cluster
    loop: Loop
    workers: list[Worker]
    recorder: Recorder
    stop: StopRule
    learner: Learner
    notes: list[str] = field(default_factory=list)
    model: Callable[[], Value[Array]] = lambda: ABSENT
    replicas: Callable[[], Sequence[Value[Array]]] | None = None
    steps: Callable[[], Sequence[int]] | None = None
    optimizer: Callable[[], State] | None = None
    mixture: str = ""
    seed: int = 0
    compression: Compression | None = None
    compresses: bool = False
    slows: bool = False
    devices: list[Records] = field(default_factory=list)
    counts_calls: bool = False
    jitter: Jitter = NoJitter()
    whole: Sequence[Workload] = ()
    crashes: Sequence[Sequence[tuple[float, float]]] = ()
    machines_crash: bool = False
    plan: Callable[[int | None], Plan] | None = None
    shows_plan: bool = False

    @property
    def nodes(self) -> list[int]:
        """Nodes of the workers, in rank order."""
        return [worker.node for worker in self.workers]

    @property
    def workloads(self) -> list[Workload]:
        """Current workloads of the workers, in rank order."""
        return [worker.workload for worker in self.workers]

    @property
    def timed_model(self) -> Model:
        """The model whose computation is timed."""
        return (self.whole[0] if self.whole else self.workers[0].workload).model

    @property
    def learns_timed_model(self) -> bool:
        """Whether the timed model is the trained one, or the run is timing-only."""
        task = self.learner.task
        return task is None or task.network.model.layers == self.timed_model.layers

    def hosts(self, nodes: list[int]) -> Ints:
        """Return the machine of each node. A node outside all machines counts as a machine of its own."""
        index = np.asarray(nodes, dtype=np.int64)
        host = self.cluster.host_of[index]
        return np.where(host >= 0, host, len(self.cluster.host_names) + index)


class Strategy(Protocol):
    """A distributed training algorithm.

    A strategy reports every update by calling ``worker.stop.updated(n_samples)`` with the number of samples that
    contributed to it. It may define the additional methods described in :mod:`ddlsim.strategies.contract`.
    """

    @property
    def label(self) -> str:
        """Short name for tables, such as "all-reduce (ring, ddp)"."""

    def start(self, context: RunContext) -> None:
        """Create the simpy processes of all workers (and servers) of the run."""


# ---------------------------------------------------------------- workers


Process = Generator["simpy.Event", object, None]
#: a process that returns a value
Computation = Generator["simpy.Event", object, Value[Array]]
#: steps per worker after which a run without an update counts as deadlocked
MOST_STEPS = 10_000


#: Factors are sampled in multiples of this number, so that blocks of any size give the same sequence, even where a
#: NumPy function treats the end of an array differently.
BLOCK = 64


class Factors:
    """The jitter factors of a worker's successive (micro-)steps: an endless iterator.

    jitter  distribution of the factors
    source  random stream of the worker
    """

    def __init__(self, jitter: Jitter, source: np.random.Generator) -> None:
        self._jitter, self._source = jitter, source
        self._sampled: Floats = np.empty(0)
        self._n_returned = 0  # of the sampled factors
        # a custom distribution may return another sequence if it samples several blocks at once
        self._at_once = type(jitter) in get_args(Jitter)

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        return float(self.take(1)[0])

    def take(self, n: int) -> Floats:
        """Return the next `n` factors, (n,)."""
        while (missing := n - (len(self._sampled) - self._n_returned)) > 0:
            size = BLOCK * math.ceil(missing / BLOCK) if self._at_once else BLOCK
            ahead = self._sampled[self._n_returned :]
            self._sampled, self._n_returned = np.concatenate([ahead, self._jitter.sample(self._source, size)]), 0
        first = self._n_returned
        self._n_returned += n
        return self._sampled[first : self._n_returned]


#: factors of workers without jitter, which share them
UNVARIED = Factors(NoJitter(), stream(0, 0, "no jitter"))


def factors(jitter: Jitter, seed: int, rank: int) -> Factors:
    """Return the jitter factors of a worker's successive (micro-)steps: `UNVARIED` without jitter."""
    return UNVARIED if isinstance(jitter, NoJitter) else Factors(jitter, stream(seed, rank, "compute"))


def slow_rows(members: Sequence[Sequence[Worker]]) -> tuple[Ints, list[tuple[float, float]]]:
    """Return the slow-downs of ranks that each represent some workers: the first row of each rank, -1 for none, and the
    rows (until (s), factor) of all ranks. The slowest worker of a rank counts."""
    first, rows = np.full(len(members), -1), list[tuple[float, float]]()
    for rank, workers in enumerate(members):
        slowed = [slow_intervals(worker.slowdowns) for worker in workers if worker.slowdowns]
        if slowed:
            first[rank] = len(rows)
            ends = np.unique([end for intervals in slowed for end, _ in intervals])
            columns = [np.array(intervals).T for intervals in slowed]
            factors = [factor[np.searchsorted(until, ends)] for until, factor in columns]
            rows += zip(ends.tolist(), np.max(factors, axis=0).tolist(), strict=True)
    return first, rows


@dataclass
class StopRule:
    """Ends the run when `n_updates` updates have been applied, by any worker, or when the monitor asks for it.

    A global rule: a count of steps per worker would bias asynchronous runs. ``reason`` is why the run ended.
    """

    loop: Loop
    recorder: Recorder
    n_updates: float
    monitor: Monitor | None = None
    reason: str = ""
    n_samples: int = 0
    #: steps of workers since the last update
    _n_steps: int = 0

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return bool(self.reason)

    def stepped(self) -> None:
        """Count a step of a worker. Raises DeadlockError after `MOST_STEPS` steps per worker without an update."""
        self._n_steps += 1
        if self._n_steps < MOST_STEPS * self.recorder.n_workers:
            return
        steps = [len(ends) for ends in self.recorder.step_end]
        fewest = min(steps)
        last = steps.index(fewest)
        since, *_ = (*(time for time, _ in self.recorder.updates[-1:]), 0.0)
        waits = f" and waits for {self.loop.waiting[name]}" if (name := f"worker {last}") in self.loop.waiting else ""
        raise DeadlockError(
            f"no update since {since:.6g} s, in {self._n_steps} steps of workers: {name} has completed "
            f"{fewest} steps{waits}, others up to {max(steps)}. Report updates with worker.stop.updated, "
            "and let every worker enter the collectives that others wait for"
        )

    def updated(self, n_samples: int) -> None:
        """Count an update made from `n_samples` samples."""
        self._n_steps = 0
        if self.over:
            return
        self.recorder.updates.append((self.loop.now, n_samples))
        self.n_samples += n_samples
        if self.monitor is not None:
            self.reason = self.monitor.updated(self.loop.now - self.loop.start, n_samples)
        elif len(self.recorder.updates) >= self.n_updates:
            self.reason = "steps"
        if self.over and self.loop.has_processes:
            self.loop.until.succeed()

    def counted(self, times: Sequence[float], n_samples: int) -> None:
        """Count updates of a run without a monitor, each from `n_samples` samples, at most the remaining ones."""
        self.recorder.updates += [(time, n_samples) for time in times]
        self.n_samples += n_samples * len(times)
        if times and len(self.recorder.updates) >= self.n_updates:
            self.reason = "steps"
            if self.loop.has_processes:
                self.loop.until.succeed()


@dataclass
class Worker:
    """A worker that computes gradients and records how it spends its time.

    rank          rank of the worker
    node          node of the worker's device in the cluster
    workload      compute times and sizes of a (micro-)step
    factors       random factors applied to the compute times of successive (micro-)steps
    accumulation  number of micro-steps per step
    params        current parameters, shape (n_params,); ABSENT in timing-only runs
    drawn         latest gradient of an asynchronous worker
    workload_at   function that returns the workload at a given epoch, if batch or image sizes change during training.
                  It returns the same object as long as the workload does not change
    feed          source of samples; None: the input is not simulated
    """

    rank: int
    node: int
    loop: Loop
    workload: Workload
    recorder: Recorder
    stop: StopRule
    factors: Factors
    slowdowns: Sequence[Slow] = ()
    accumulation: int = 1
    learner: Learner = field(default_factory=lambda: Learner(DataPlane(), None, 1))
    workload_at: Callable[[float], Workload] | None = None
    params: Value[Array] = ABSENT
    drawn: Value[Array] = ABSENT
    factor: float = 1.0
    overlap_slowdown: Contention = NO_SLOWDOWN
    #: seconds of extra compute, such as an evaluation, to be done before the next step
    owed: float = 0.0
    feed: Feed | None = None

    def __post_init__(self) -> None:
        self.params = self.learner.initial

    def adapt(self) -> bool:
        """Use the workload of the current epoch in the step that begins; return whether it has changed."""
        workload = self.workload if self.workload_at is None else self.workload_at(self.learner.local_epoch(self.rank))
        changes = workload is not self.workload
        self.workload = workload
        return changes

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    @property
    def samples_per_step(self) -> int:
        """Number of samples in one step, including all micro-steps."""
        return self.workload.batch_size * self.accumulation

    # ------------------------------------------------------------ gradients

    def gradient(self) -> Computation:
        """Compute the gradient of the next batch at ``params``.

        Simulated time passes now; the value is computed when it is read.
        """
        yield from self.begin_step()
        value = self.draw()
        yield from self.forward()
        yield from self.backward(len(self.workload.forward), 0)
        return value

    def draw(self) -> Value[Array]:
        """Return the gradient of the next batch at ``params`` without spending simulated time."""
        return self.learner.gradient(self.rank, self.params, self.samples_per_step, self.loop.now)

    # ------------------------------------------------------------ computing

    def compute(self, seconds: float, activity: str) -> Process:
        """Compute for `seconds`, to which jitter and slowdowns are then applied."""
        start = self.loop.now
        duration = seconds * self.factor
        if duration > 0.0:
            self.recorder.begin(self.rank, COMPUTE, activity, start)
            yield self.loop.work(duration, self.slowdowns)
            self.recorder.worker(self.rank, COMPUTE, activity, start, self.loop.now)

    def begin_step(self) -> Process:
        """Let the host work, and sample the jitter of the step. With gradient accumulation, also compute all
        micro-steps except the last."""
        if self.owed:
            seconds, self.owed = self.owed, 0.0
            yield from self.compute(seconds, "evaluation")
        self.adapt()
        for micro_step in range(self.accumulation):
            if micro_step:
                yield from self.forward()
                yield from self.compute(self.workload.backward_time, "backward")
            yield from self.await_batch()
            self.factor = next(self.factors)
            if not micro_step:
                yield from self.compute(self.workload.host_time, "host")

    def await_batch(self) -> Process:
        """Wait for the samples of the next (micro-)step, if the input is simulated."""
        batch = None if self.feed is None else self.feed.take(self.rank, self.workload.batch_size)
        if batch is not None:
            start = self.loop.now
            self.loop.waiting[self.name] = "its next batch"
            self.recorder.begin(self.rank, INPUT, "input", start)
            yield batch
            del self.loop.waiting[self.name]
            self.recorder.worker(self.rank, INPUT, "input", start, self.loop.now)

    def forward(self) -> Process:
        """Compute the forward pass of the step or, with gradient accumulation, of its last micro-step."""
        yield from self.compute(self.workload.forward_time, "forward")

    def backward(self, from_layer: int, to_layer: int) -> Process:
        """Compute the backward pass of the layers `from_layer` - 1 down to `to_layer`."""
        ends = self.workload.backward_until
        later = float(ends[from_layer]) if from_layer < len(ends) else 0.0
        until = float(ends[to_layer]) if to_layer < len(ends) else 0.0
        yield from self.compute(until - later, "backward")

    def optimizer_step(self) -> Process:
        """Spend the time to update the parameters."""
        yield from self.compute(self.workload.optimizer, "optimizer")

    # ------------------------------------------------------------ blocking

    def block(self, event: simpy.Event, activity: str) -> Process:
        """Wait for `event`. The caller then records the time with :meth:`book`."""
        self.loop.waiting[self.name] = activity
        self.recorder.begin(self.rank, COMMUNICATION, activity, self.loop.now)
        yield event
        del self.loop.waiting[self.name]

    def book(self, start: float, others_ready: float, activity: str) -> None:
        """Record the time since `start` (s) as waiting until `others_ready` (s), and as communication from then on."""
        now = self.loop.now
        ready = min(max(others_ready, start), now)
        self.recorder.worker(self.rank, WAITING, activity, start, ready)
        self.recorder.worker(self.rank, COMMUNICATION, activity, ready, now)

    def end_step(self) -> None:
        """Record the end of a step of this worker."""
        self.recorder.step_end[self.rank].append(self.loop.now)
        self.stop.stepped()
