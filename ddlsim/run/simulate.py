"""From an experiment to a result: `simulate`, `resume` and `scaling`, `run`, which they call, and several runs on one
network."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np

from ddlsim.arguments import Count, checked, quantity, takes_fields_of
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.cluster import ClusterLike, Floats
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError, DdlsimError, DeadlockError, NoUpdateError, unknown_name
from ddlsim.learning import DataPlane, Learner
from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.learner import DivergedError, Shift
from ddlsim.learning.monitor import Monitor, Progress
from ddlsim.network import Network
from ddlsim.network.engine import WithSources
from ddlsim.plan import Plan
from ddlsim.reliability import Background, Effect, RandomFaults, faults
from ddlsim.reliability.faults import Fault, effects_of, inject, sampled
from ddlsim.run import notes
from ddlsim.run.conservation import check_network, check_result
from ddlsim.run.costs import shares
from ddlsim.run.experiment import Experiment, Job, placed
from ddlsim.run.failure_timeline import (
    crashes_of,
    has_failure_timeline,
    horizon_of_crashes,
    lifetime,
    timeline_notes,
)
from ddlsim.run.prepare import Prepared, prepare
from ddlsim.run.result import Result
from ddlsim.run.resume import Interrupt, Saved, SavePoints, load, manifest, saving
from ddlsim.runtime.context import Process, RunContext, StopRule, Worker, factors
from ddlsim.runtime.loop import Halt, Loop, Traffic
from ddlsim.runtime.recorder import Recorder
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.contention import NO_SLOWDOWN, OverlapSlowdown
from ddlsim.workload.input import Input

T = TypeVar("T")
#: lets a run go on to its end, or until the function asks it to stop
GoOn = Callable[[Halt | None], None]


def _workers(
    prepared: Prepared, loop: Loop, recorder: Recorder, stop: StopRule, learner: Learner, effects: Sequence[Effect]
) -> list[Worker]:
    experiment = prepared.experiment
    regimes, n_workers = prepared.regimes, len(prepared.nodes)
    accumulation = contract.of(experiment.strategy).micro_batches(
        experiment.batch(n_workers), n_workers, experiment.accumulation
    )
    feed = None
    if isinstance(experiment.input, Input):
        from ddlsim.runtime.feed import Feed

        memory, shape = prepared.cluster.memory_nodes[prepared.nodes].tolist(), prepared.time_model.input_shape
        first = experiment.input.epoch or (0 if experiment.training is None else 1)
        feed = Feed(experiment.input, loop, prepared.cluster, prepared.nodes, memory, shape, first)
    workers = []
    for rank, (node, stage) in enumerate(zip(prepared.nodes, prepared.stages, strict=True)):
        jitter = factors(experiment.jitter, experiment.seed, rank)
        slow = faults.slow_intervals_of(effects, rank, loop.start)
        regime = None if regimes is None else functools.partial(regimes.at, rank)
        parts = (loop, stage.workload, recorder, stop, jitter, slow, accumulation, learner, regime)
        slowdown = cast("OverlapSlowdown | None", experiment.overlap_slowdown) or stage.workload.slowdown
        workers.append(Worker(rank, node, *parts, overlap_slowdown=slowdown, feed=feed))
    return workers


def _monitor(
    context: RunContext,
    experiment: Experiment,
    progress: Progress | None,
    saved: Checkpoint | None,
    shift: Shift | None,
) -> Monitor | None:
    """Return the monitor of a training run, after the strategy has set where its model is."""
    training, task = experiment.training, context.learner.task
    if training is None or task is None:
        return None
    charge: Callable[[], None] | None = None
    if training.charge_evaluation:
        first = context.workers[0]

        def charge() -> None:
            first.owed += first.workload.forward_time * task.held_out.n_samples / first.workload.batch_size

    of_run = (context.learner, context.model, lambda: context.loop.nbytes_sent, context.recorder.staleness)
    turn = (None, False) if shift is None else (shift.begin, shift.endless)
    called = (progress, charge, saved)
    return Monitor(training, *of_run, context.replicas, context.steps, *called, context.optimizer, *turn)


def _learner(prepared: Prepared, saved: Saved | None, shift: Shift | None) -> Learner:
    """Return the learner, with the values of the `saved` run if there is one."""
    experiment, task = prepared.experiment, prepared.task
    n_workers = contract.of(experiment.strategy).n_replicas(len(prepared.nodes))
    if saved is None:
        return Learner(DataPlane(), task, n_workers, None if shift is None else shift.begin)
    if task is None:
        raise ConfigError(f"training = None: must be the training of the saved run, {saved.path}")
    saved.check(manifest(experiment, task))
    learner = Learner(DataPlane(saved.checkpoint.replay), task, n_workers)
    learner.losses.extend(saved.checkpoint.losses)
    return learner


class ActiveRun:
    """A run on a `network`, from its setup at `start` (s on the network's clock) to its result.

    requested   the experiment, as the caller set it
    keep_spans  record what a timeline needs
    progress    is called during a training run
    saved       the saved run that it resumes
    shift       part of a training in which groups of workers alternate
    endless     it continues after its steps
    horizon     its own time in s up to which random faults are sampled; reaching it raises BeyondError
    shows_plan  it is set up for its plan, and never executed
    is_alone    True: no other user of the network, at any time
    """

    def __init__(
        self, prepared: Prepared, requested: Experiment, network: Network, *, start: float = 0.0,
        keep_spans: bool = False, progress: Progress | None = None, saved: Saved | None = None, endless: bool = False,
        shift: Shift | None = None, horizon: float = math.inf, shows_plan: bool = False, is_alone: bool = False,
    ) -> None:  # fmt: skip
        self.prepared, self.requested, self.experiment = prepared, requested, prepared.experiment
        experiment = self.experiment
        self.began = time.perf_counter()
        max_time = si(experiment.max_time, "time")
        since = 0.0 if shift is None else shift.since
        until = since + min(horizon, max_time)
        random = faults.sampled(experiment.faults, prepared.cluster, prepared.nodes, experiment.seed, until)
        self._random = faults.left_of(random, since)
        effects = prepared.effects + faults.effects_of(self._random, prepared.cluster, prepared.nodes)
        faults.inject(effects, network, prepared.nodes, start)
        self.loop = loop = Loop(network, start)
        if is_alone:
            loop.disturbances = faults.disturbances_of(effects, prepared.cluster, prepared.nodes, start)
        n_workers = len(prepared.nodes)
        self.recorder = recorder = Recorder(
            n_workers, keep_spans, start=start, stops=faults.stops_of(effects, start), pauses=network.pauses
        )
        n_updates = contract.of(experiment.strategy).updates(sum(experiment.window), n_workers)
        self.stop = stop = StopRule(loop, recorder, math.inf if endless else n_updates)
        learner = _learner(prepared, saved, shift)
        crashes = crashes_of(experiment, prepared.cluster, prepared.nodes, horizon)
        workers = _workers(prepared, loop, recorder, stop, learner, effects)
        self.context = context = RunContext(
            prepared.cluster, loop, workers, recorder, stop, learner,
            seed=experiment.seed, compression=compression_of(experiment.compression), jitter=experiment.jitter,
            whole=prepared.workloads,
            crashes=[[(start + fall, start + back) for fall, back in windows] for windows in crashes],
            machines_crash=experiment.failures is not None and experiment.failures.per != "device",
            shows_plan=shows_plan,
        )  # fmt: skip
        experiment.strategy.start(context)
        self._check()
        self.interrupt = Interrupt()
        report = None if progress is None else self.interrupt.guarded(progress)
        before = saved.checkpoint if saved is not None else None
        self.monitor = stop.monitor = _monitor(context, experiment, report, before, shift)
        #: latest end in s on the network's clock
        self.latest = start + min(max_time, horizon)
        self._cut_short = horizon < max_time
        self.interrupted = self.halfway = False
        self.reason = ""

    def _check(self) -> None:
        """Raise ConfigError for settings without effect under this strategy, or note them."""
        experiment, context = self.experiment, self.context
        if context.compression is not None and not context.compresses:
            raise ConfigError(
                f"compression has no effect with {experiment.strategy.label}, which sends nothing through an "
                "Exchange or Messages (ddlsim.runtime); leave compression out"
            )
        if self.requested.overlap_slowdown not in (None, NO_SLOWDOWN) and not context.slows:
            context.notes.append(
                f"overlap_slowdown has no effect with {experiment.strategy.label}, whose workers are "
                "processes that compute at full speed while they communicate"
            )
        stack = context.workers[0].workload.stack
        if stack.call_time and not context.counts_calls and contract.of(experiment.strategy).collectives().algorithms:
            context.notes.append(
                f"call_time of stack {stack.name} is not included, because {experiment.strategy.label} starts its "
                "collectives from processes; expect longer steps"
            )
        model = self.prepared.model
        tables = ", ".join(layer.name for layer in model.layers if layer.model_parallel)
        if tables and context.compression is not None and context.learner.task is not None:
            raise ConfigError(
                f"compression: workers do not exchange the gradients of {tables} of {model.name}, although "
                "these layers are trained; leave compression out, or train a model without embedding_bag "
                "layers"
            )

    # ------------------------------------------------------------ running

    def alone(self, halt: Halt | None) -> None:
        """Run to the end, or until `halt` stops it, as the only run on the network."""
        self.loop.run(None, self.latest, halt)
        self.check_horizon()

    def check_horizon(self) -> None:
        """Raise BeyondError if the run stopped only at the end of the sampled random faults."""
        if self._cut_short and not self.stop.reason and self.loop.now >= self.latest:
            raise faults.BeyondError(f"random faults are sampled only up to {self.latest} s of simulated time")

    def go(self, go_on: GoOn, checkpoint: str | Path | None, every: float) -> None:
        """Let `go_on` run it to the end; save a training run at `checkpoint` every `every` s. Ctrl-C stops it."""
        monitor, task = self.monitor, self.context.learner.task
        if checkpoint is not None and (monitor is None or task is None):
            raise ConfigError(f"checkpoint = {str(checkpoint)!r} has no effect without training")
        try:
            if monitor is None or task is None:
                go_on(None)
            else:
                save = None if checkpoint is None else saving(checkpoint, self.experiment, task)
                self._learn(SavePoints(monitor, self.interrupt, save, every), go_on)
            self.reason = "interrupted" if self.interrupted else self.stop.reason or "max_time"
        except KeyboardInterrupt:
            self.interrupted, self.reason, self.halfway = True, "interrupted", True
            self.loop.catch_up()
        except DivergedError as error:
            self.reason = str(error)

    def _learn(self, points: SavePoints, go_on: GoOn) -> None:
        """Let the workers train, until they are interrupted."""
        monitor, stop = points.monitor, self.stop
        with self.interrupt.on_ctrl_c():
            monitor.start()
            go_on(points)
        self.interrupted = self.interrupt.wanted and not stop.reason
        if monitor.checkpoint is None:
            monitor.mark("" if self.interrupted else f"max_time = {self.latest!r}")
        if points.save is not None and monitor.checkpoint is not None:
            points.save(monitor.checkpoint)
        if not self.interrupted and not monitor.keeps_latest:
            monitor.finish(stop.loop.now - stop.loop.start)

    def has_ended(self, error: DdlsimError | None, whose: str) -> None:
        """Record the end of the run, by its own rule or with an error. Raises the error, prefixed with `whose`, if the
        run has no result."""
        if error is not None and not isinstance(error, DivergedError):
            raise type(error)(f"{whose}{error}") from None
        if error is None:
            self.check_horizon()
        self.reason = str(error) if error is not None else self.stop.reason or "max_time"

    # ------------------------------------------------------------ the result

    def result(self, *, stability: bool = False, share: Floats | None = None) -> Result:
        """Return the result of a run that has ended, after the conservation checks."""
        loop, recorder, prepared = self.loop, self.recorder, self.prepared
        recorder.close(loop.now)
        if not recorder.updates:
            if self.interrupted:
                raise KeyboardInterrupt
            raise NoUpdateError(
                f"max_time = {self.latest!r} s: the run ends before its first update; increase max_time"
            )
        traffic = loop.traffic()
        result = Result(
            experiment=self.experiment,
            cluster=prepared.cluster,
            workloads=prepared.workloads,
            nodes=np.array(prepared.nodes, dtype=np.int64),
            recorder=recorder,
            simulated_time=loop.now - loop.start,
            channel_nbytes=traffic.nbytes,
            channel_busy=traffic.busy,
            busy=loop.busy_intervals() if recorder.keep_spans else None,
            n_messages=traffic.n_messages,
            nbytes_sent=traffic.sent,
            notes=self._notes(traffic),
            prepared=prepared,
            interrupted=self.interrupted,
            wall_seconds=time.perf_counter() - self.began,
            stop_reason=self.reason,
            monitor=self.monitor,
            given=dataclasses.replace(self.requested, cluster=prepared.cluster, model=prepared.model),
            wants_stability=stability,
            share=share,
            sampled_faults=tuple(fault for fault in self._random if fault.start < loop.now - loop.start),
        )
        if not self.halfway:  # an event interrupted halfway has booked only a part of its time
            check_result(result, loop, self.stop.n_samples)
        if more := tuple(notes.superlinear_notes(result)):
            result = dataclasses.replace(result, notes=(*result.notes, *more))
        return result

    def _notes(self, traffic: Traffic) -> tuple[str, ...]:
        context, prepared, experiment = self.context, self.prepared, self.experiment
        seconds = self.loop.now - self.loop.start
        lasts = lifetime(experiment) if has_failure_timeline(experiment) else seconds
        happened = [fault for fault in self._random if fault.start < seconds]
        return (
            *prepared.notes,
            *notes.settings_notes(self.requested, len(prepared.nodes)),
            *timeline_notes(experiment, free=self.recorder.down is not None),
            *notes.link_notes(prepared.cluster),
            *notes.overlap_notes(self.requested.overlap_slowdown, context, prepared.cluster),
            *dict.fromkeys(context.notes),  # parts of a communicator repeat notes
            *notes.feed_notes(experiment, self.recorder, seconds),
            *faults.sampled_notes(experiment.faults, happened, seconds),
            *notes.late_notes((*experiment.faults, *experiment.slowdowns, *experiment.background), lasts),
            *notes.stalled_notes(self.recorder, seconds),
            *notes.uneven_notes(experiment.strategy, self.recorder),
            *notes.learning_notes(experiment, (prepared.model, prepared.time_model), self.reason, self.monitor),
            *notes.handed_over_notes(context, self.monitor),
            *notes.idle_notes(experiment.strategy, prepared.cluster, prepared.nodes, traffic.nbytes),
            *notes.path_notes(prepared.cluster, self.loop.network.pairs, traffic.nbytes),
        )


def plan_of_run(experiment: Experiment, steps: int | None = None) -> Plan:
    """Return the tasks of a run's ranks in its first `steps` steps (None: in one cycle of steps), without jitter,
    slowdowns, faults and failures.

    The run is set up as for a simulation, and its executor returns the plan. Raises ConfigError for processes without
    one.
    """
    calm = experiment.with_(slowdowns=(), faults=(), failures=None, checkpoints=None, elastic=None, background=())
    prepared = prepare(calm)
    context = ActiveRun(prepared, calm, Network(prepared.cluster), shows_plan=True).context
    if context.plan is not None:
        return context.plan(steps)
    strategy = contract.of(experiment.strategy)
    n_workers = len(prepared.nodes)
    accumulation = strategy.micro_batches(experiment.batch(n_workers), n_workers, experiment.accumulation)
    return strategy.plan(prepared.workloads, 1 if steps is None else steps, accumulation)


def random_faults_of(experiment: Experiment) -> list[RandomFaults]:
    """Return the random faults of an experiment and of its co-located jobs."""
    jobs = [job.experiment for job in experiment.background if isinstance(job, Job)]
    return faults.at_random([*experiment.faults, *(fault for other in jobs for fault in random_faults_of(other))])


def run(
    experiment: Experiment,
    *,
    keep_spans: bool = False,
    progress: Progress | None = None,
    saved: Saved | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 60.0,
    stability: bool = False,
    shift: Shift | None = None,
) -> Result:
    """Simulate an experiment and return its result.

    keep_spans        whether to record the activity of workers, servers and links, for timelines
    progress          function that is called after every update of a training run
    saved             saved run to resume; None: start from the beginning
    checkpoint        file to which the run is saved; None: the run is not saved
    checkpoint_every  wall-clock time between saves, in seconds
    stability         whether to add the stability to the result even if computing it takes a long time
    shift             for elastic training, the part of the run that one group of workers trains: its initial state, its
                      start time, and whether another group follows; None: the complete run

    On Ctrl-C, the result so far is returned, marked as interrupted. Raises :class:`~ddlsim.errors.ConservationError` if
    the bytes, times or updates of the result do not add up (:mod:`ddlsim.run.conservation`).
    """
    prepared = prepare(experiment)

    def result_of(horizon: float) -> Result:
        together, network = None, None
        known_cost = contract.of(experiment.strategy).collectives().cost != "simulated"
        # faults also slow known costs on a shared network
        if experiment.background or (experiment.faults and known_cost):
            together = with_background(
                prepared.experiment, prepared.cluster, prepared.nodes, keep_spans=keep_spans, horizon=horizon
            )
            network = together.network.shared()
        network = network or Network(prepared.cluster, record=keep_spans)
        under_way = ActiveRun(
            prepared,
            experiment,
            network,
            keep_spans=keep_spans,
            progress=progress,
            saved=saved,
            shift=shift,
            horizon=horizon,
            is_alone=not experiment.background,
        )
        go_on = under_way.alone if together is None else functools.partial(together.go_on, "this run", under_way)
        under_way.go(go_on, checkpoint, checkpoint_every)
        if together is not None and not under_way.halfway:
            together.check()
        share = None if together is None else together.shares(under_way)[0]
        return under_way.result(stability=stability, share=share)

    trains = experiment.training is not None and experiment.elastic is None
    crashes = horizon_of_crashes(experiment, len(prepared.nodes)) if trains else math.inf
    return faults.up_to_its_end(random_faults_of(experiment), prepared.cluster, result_of, crashes)


def complete(experiment: Experiment, **options: Any) -> Result:
    """Simulate to the end, with options of :func:`run`. Raises KeyboardInterrupt on Ctrl-C, because the figures of an
    incomplete run must not enter those of others."""
    result = run(experiment, **options)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def until_interrupt(items: Iterable[T]) -> tuple[list[T], bool]:
    """Return the items that are produced until the end or Ctrl-C, and whether it was Ctrl-C.

    Raises KeyboardInterrupt if there is no item yet.
    """
    finished: list[T] = []
    try:
        for item in items:
            finished.append(item)
    except KeyboardInterrupt:
        if not finished:
            raise
        return finished, True
    return finished, False


def clock_of(experiment: Experiment) -> Experiment:
    """Return the experiment without its training, for simulations that need only times."""
    if experiment.training is None:
        return experiment
    model = experiment.model if experiment.time_model is None else experiment.time_model
    return dataclasses.replace(experiment, training=None, time_model=None, model=model)


# ---------------------------------------------------------------- the main functions


#: real time between two files that a run is saved in
Interval = Annotated[float | str, quantity("time", "5 min", infinite=True)]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options that do not affect the run."""

    stability: bool = False
    progress: bool | Progress | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: Interval = 60.0


@dataclass(frozen=True)
class _Simulation(Experiment, _Options):
    cluster: ClusterLike | Experiment  # type: ignore[assignment]  # more than in an experiment


@dataclass(frozen=True)
class _Continuation(_Options):
    path: str | Path
    experiment: Experiment


@takes_fields_of(_Simulation)
def simulate(wanted: _Simulation) -> Result:
    """Simulate a training run and return the result.

    Pass either an :class:`~ddlsim.Experiment` or its fields as arguments. The additional arguments are:

    stability         whether to include the stability of the result (:meth:`ddlsim.Result.stability`) in the summary
                      and the JSON output. Computing it takes three more runs, with inputs perturbed by 1e-12. Results
                      of small runs always include it

    The following apply to training runs only:

    progress          whether to show a progress bar, or a function that is called after every update
                      (:data:`ddlsim.learning.monitor.Progress`). By default, a progress bar is shown on a terminal
                      after one second
    checkpoint        file to which the run is saved periodically and at its end, for :func:`ddlsim.resume`
    checkpoint_every  wall-clock time between saves, in seconds or as a string such as "5 min"

    Raises :class:`~ddlsim.errors.ConfigError` for invalid or incompatible fields; the message names the field and
    suggests a correction.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(Experiment)}
    values = {name: getattr(wanted, name) for name in defaults}
    if not isinstance(wanted.cluster, Experiment):
        return _run(Experiment(**values), wanted)
    for name, default in defaults.items():
        if name != "cluster" and values[name] != default:
            raise ConfigError(
                f"simulate: {name} has no effect if an experiment is passed; use experiment.with_({name}=...)"
            )
    return _run(wanted.cluster, wanted)


@takes_fields_of(_Continuation)
def resume(wanted: _Continuation) -> Result:
    """Resume a run that :meth:`ddlsim.Result.save` saved, and return the result of the complete run.

    path              file with the saved run
    experiment        the saved experiment; only its end (epochs, updates, targets, max_time) may differ
    stability, progress, checkpoint, checkpoint_every
                      options as in :func:`ddlsim.simulate`

    The result is bit-for-bit identical to that of an uninterrupted run. The simulated clock is replayed from the start,
    which is fast; the arithmetic continues where the saved run stopped. Raises ConfigError if the file is damaged, the
    experiment differs, or the saved run has already passed the end of the experiment.
    """
    return _run(wanted.experiment, wanted, load(wanted.path))


def _run(experiment: Experiment, options: _Options, saved: Saved | None = None) -> Result:
    training, progress = experiment.training, options.progress
    shown: AbstractContextManager[Progress | None] = nullcontext(progress if callable(progress) else None)
    if training is not None and not callable(progress) and (sys.stderr.isatty() if progress is None else progress):
        from ddlsim.report.progress import bar

        shown = bar(training, si(experiment.max_time, "time"))
    with shown as report:
        result = run(
            experiment,
            progress=report,
            saved=saved,
            checkpoint=options.checkpoint,
            checkpoint_every=si(options.checkpoint_every, "time"),
            stability=options.stability,
        )
    if result.has_failure_timeline and not result.interrupted:
        try:
            _ = result.failure_timeline  # raises its errors here instead of when it is printed
        except KeyboardInterrupt:
            return dataclasses.replace(result, interrupted=True)
    return result


@checked
def scaling(experiment: Experiment, workers: Iterable[Count]) -> list[Result]:
    """Simulate the experiment with each of the given worker counts, and return the results.

    workers  worker counts to simulate. The cluster is loaded only once

    On Ctrl-C, the results of the counts that were simulated completely are returned.
    """
    loaded = dataclasses.replace(experiment, cluster=load_cluster(experiment.cluster))
    return until_interrupt(complete(dataclasses.replace(loaded, workers=n)) for n in workers)[0]


# ---------------------------------------------------------------- several runs on one network
#
# The run with the earliest event advances, up to the next event of another run. Each run has its own loop, so its
# events keep their own order; runs interact only through the bandwidth of shared channels. Runs that share no channel
# give the same results, bit for bit, as when simulated separately.


#: called when a run has ended, with the error that ended it, if any
Ended = Callable[[DdlsimError | None], None]
#: turns between two checks for a deadlock
TURNS = 1000


@dataclass(frozen=True, eq=False)
class Client:
    """One of the runs.

    name    for messages
    loop    its loop, with its own view of the network
    latest  s at which it ends in any case
    ended   called when it has ended, by its own rule or at `latest`, or with the error that ended it
    halt    called before its time goes on; returns whether it should stop
    """

    name: str
    loop: Loop
    latest: float
    ended: Ended
    halt: Halt | None = None


class SharedClock:
    """Runs the clients on a `network` in turn. Later clients start at times known in advance."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._clients: dict[int, Client] = {}
        self._faces: dict[int, Network] = {network.client: network}
        self._next: dict[int, float] = {}  # s, when each client does something by itself
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._n_coming = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call an action at a time (s), before all other events of that time."""
        heapq.heappush(self._coming, (time, next(self._n_coming), action))

    def add(self, client: Client) -> None:
        """Add a client that begins now."""
        number = client.loop.network.client
        self._clients[number], self._faces[number] = client, client.loop.network
        self._look(number)

    def run(self, done: Callable[[], bool]) -> None:
        """Run all clients until `done` returns true.

        Raises :class:`~ddlsim.errors.DeadlockError` if a client that has not ended has no further events.
        """
        turns = itertools.count(1)
        while not done():
            if next(turns) % TURNS == 0:
                self._look_for_the_stuck()
            coming = self._coming[0][0] if self._coming else np.inf
            waiting = self.network.waiting_clients
            if waiting and waiting[0] not in self._clients:
                self._faces[waiting[0]].advance()  # discards its completions, because its run has ended
            elif waiting:
                self._go(waiting[0], coming)
            elif not self._clients:
                if coming == np.inf:
                    raise DeadlockError("no event is left, but some runs have not ended")
                self.network.advance(coming)
                if not self.network.others_wait:
                    self._begin()
            else:
                number = min(self._next, key=self._next.__getitem__)
                if coming <= self._next[number] and coming <= self.network.now:
                    self._begin()
                else:
                    self._go(number, coming)

    def _look_for_the_stuck(self) -> None:
        """Raise DeadlockError for a client that waits without anything in flight, while others go on."""
        waiting = self.network.waiting_clients
        for number, client in self._clients.items():
            if self._next[number] == np.inf and not self.network.is_under_way(number) and number not in waiting:
                waits = client.loop.who_waits
                raise DeadlockError(
                    f"{client.name}: deadlock at {self.network.now:.6g} s: no event of this run is left, although "
                    f"other runs continue{'; ' * bool(waits)}{waits}"
                )

    def _begin(self) -> None:
        _, _, action = heapq.heappop(self._coming)
        action()

    def _go(self, number: int, coming: float) -> None:
        """Let a client go on, up to the next event of another client."""
        client = self._clients[number]
        self._next[number] = np.inf  # until it is looked at again
        limit = min(*self._next.values(), coming, client.latest)
        if limit == np.inf and len(self._clients) > 1:  # come back some time, to look after the others
            limit = self.network.now + 600.0
        driver, error = client.loop.driver, None
        try:
            driver.go(limit, client.halt)
        except DdlsimError as raised:
            error = raised
        late = client.loop.now >= client.latest and not self.network.others_wait
        if driver.over or error is not None or late:
            del self._clients[number], self._next[number]
            driver.close()
            client.ended(error)
        else:
            self._look(number)

    def _look(self, number: int) -> None:
        client = self._clients[number]
        self._next[number] = min(client.loop.driver.next(), client.latest)


@dataclass(eq=False)
class Tenant:
    """A job: its name and arrival; its nodes, start and end (s), once known."""

    job: Job
    name: str
    came: float
    places: list[int] = field(default_factory=list)
    start: float = math.nan
    end: float = math.nan
    run: ActiveRun | None = None
    result: Result | None = None


class Together:
    """A network shared by several jobs, and their clock, from 0 s on.

    traffic     background traffic on it
    occupied    indices of devices in use
    queue       whether jobs wait until enough devices are free, first come, first served; otherwise this is an error
    keep_spans  whether activities are recorded for timelines
    faults      faults of links on the cluster's clock, random ones included
    seed        seed of the random faults
    horizon     time in s up to which they, and those of jobs, are sampled; a job that reaches it raises BeyondError

    Raises ConfigError for traffic between missing or unconnected nodes.
    """

    def __init__(
        self, cluster: Cluster, traffic: Sequence[Background], *, occupied: Sequence[int] = (), queue: bool = False,
        keep_spans: bool = False, faults: Sequence[Fault | RandomFaults] = (), seed: int = 0,
        horizon: float = math.inf,
    ) -> None:  # fmt: skip
        self.cluster, self.traffic, self.queue, self.keep_spans = cluster, list(traffic), queue, keep_spans
        self.horizon = horizon
        ends = [(_node(cluster, flow.source, flow), _node(cluster, flow.target, flow)) for flow in traffic]
        limits = [flow.limit(_widest(cluster, *pair)) for flow, pair in zip(traffic, ends, strict=True)]
        around = WithSources(cluster, [source for source, _ in ends], limits) if traffic else cluster
        self.network = Network(around, record=keep_spans, n_sources=len(traffic))
        random = sampled(faults, cluster, (), seed, horizon, shared=True)
        inject(effects_of([*faults, *random], cluster, ()), self.network, ())
        self.clock = SharedClock(self.network)
        self.occupied, self.free = occupied, set(range(len(cluster.workers))) - set(occupied)
        self.tenants: list[Tenant] = []
        self._n_left = 0  # jobs without `endless` that have not ended
        self.interrupted = False
        self._waiting: list[Tenant] = []
        self._flows: list[Loop] = []
        for number, (flow, (_, target)) in enumerate(zip(traffic, ends, strict=True)):
            loop = Loop(self.network.shared())
            loop.env.process(_switch(flow, loop, cluster.n_channels + number))
            nbytes = MESSAGE_SECONDS * limits[number]
            loop.env.process(_send(flow, loop, cluster.n_nodes + number, target, nbytes))
            self._flows.append(loop)
            self.clock.add(Client(flow.label, loop, math.inf, _raise))

    # ------------------------------------------------------------ jobs

    def expect(self, job: Job, name: str) -> None:
        """Schedule the arrival of a job at its start.

        Raises ConfigError if it never fits.
        """
        n_devices, wanted = len(self.cluster.workers), job.n_workers(len(self.cluster.workers))
        if (other := load_cluster(job.experiment.cluster).name) != self.cluster.name:
            raise ConfigError(f"job {name!r}: its cluster is {other!r}, but other jobs run on {self.cluster.name!r}")
        if wanted > n_devices:
            raise ConfigError(f"job {name!r}: needs {wanted} devices, but {self.cluster.name!r} has only {n_devices}")
        tenant = Tenant(job, name, si(job.start, "time"))
        self.tenants.append(tenant)
        self._n_left += not job.endless
        self.clock.at(tenant.came, lambda: self._start_waiting(tenant))

    def _start_waiting(self, *more: Tenant) -> None:
        """Start waiting jobs, after them `more`, in order, as long as their devices are free."""
        self._waiting += more
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.pop(0)

    def _start(self, tenant: Tenant) -> bool:
        """Start a job if its devices are free; return whether they are."""
        job, experiment = tenant.job, tenant.job.experiment
        n = job.n_workers(len(self.cluster.workers))
        wanted = list(job.listed)
        if len(self.free) < n or not self.free.issuperset(wanted):
            if not self.queue:
                raise ConfigError(self._occupied(tenant, n, wanted))
            return False
        tenant.places = wanted
        if not wanted:
            assert isinstance(job.placement, str)
            tenant.places = placed(self.cluster, self.free, n, job.placement, experiment.seed)
        self.free.difference_update(tenant.places)
        tenant.start = self.network.now
        requested = experiment.with_(cluster=self.cluster, workers=tenant.places)
        try:
            prepared = prepare(requested)
            tenant.run = ActiveRun(
                prepared,
                requested,
                self.network.shared(),
                start=tenant.start,
                keep_spans=self.keep_spans,
                endless=job.endless,
                horizon=max(self.horizon - tenant.start, 0.0),
            )
        except DdlsimError as error:
            raise type(error)(f"job {tenant.name!r}: {error}") from None
        if has_failure_timeline(experiment) and tenant.run.recorder.down is None:
            raise ConfigError(
                f"job {tenant.name!r}: failures and checkpoints that stop a run are modelled on uncontended step "
                "times, so they cannot be combined with other jobs; leave them out, or use an asynchronous strategy"
            )
        if tenant.run.monitor is not None:
            tenant.run.monitor.start()
        self.begin(tenant.name, tenant.run, lambda error: self._ended(tenant, error))
        return True

    def _ended(self, tenant: Tenant, error: DdlsimError | None) -> None:
        assert tenant.run is not None
        tenant.run.has_ended(error, f"job {tenant.name!r}: ")
        tenant.end = tenant.run.loop.now
        self._n_left -= not tenant.job.endless
        try:
            tenant.result = tenant.run.result()
        except NoUpdateError as error:
            raise NoUpdateError(f"job {tenant.name!r}: {error}") from None
        self.free.update(tenant.places)
        self._start_waiting()

    def _occupied(self, tenant: Tenant, n: int, wanted: Sequence[int]) -> str:
        running = [other for other in self.tenants if other.run is not None and math.isnan(other.end)]
        holders = {f"job {other.name!r}": other.places for other in running} | {"the run itself": self.occupied}
        for holder, places in holders.items():
            if taken := sorted(set(places) & set(wanted)):
                who = f"devices {taken} are occupied by {holder}"
                break
        else:
            who = f"it needs {n} devices, but only {len(self.free)} of {len(self.cluster.workers)} are free"
        queue = "" if self.occupied else ", or set queue=True to let it wait"
        return f"job {tenant.name!r}: at {self.network.now:.6g} s {who}; start it later, place it elsewhere{queue}"

    # ------------------------------------------------------------ running

    def begin(self, name: str, run: ActiveRun, ended: Ended, halt: Halt | None = None) -> None:
        """Add a run that has just been set up; `ended` is called when it has ended."""
        self.clock.add(Client(name, run.loop, run.latest, ended, halt))

    def go_on(self, name: str, run: ActiveRun, halt: Halt | None) -> None:
        """Run a run that has just been set up to its end, or until `halt` stops it, together with all others."""
        ends: list[DdlsimError | None] = []
        self.begin(name, run, ends.append, halt)
        self.clock.run(lambda: bool(ends) or (halt is not None and run.interrupt.wanted))
        if not ends:
            run.loop.driver.close()
        _raise(*ends)
        run.check_horizon()

    def until_all_have_ended(self) -> None:
        """Run until all jobs without `endless` have ended, or until a KeyboardInterrupt; then the others end.

        Raises KeyboardInterrupt if no job has made an update yet.
        """
        try:
            self.clock.run(lambda: self._n_left == 0)
        except KeyboardInterrupt:
            self.interrupted = True
        for tenant in self.tenants:
            if tenant.run is not None and math.isnan(tenant.end):
                self._end(tenant, tenant.run)
        if self.interrupted and all(tenant.result is None for tenant in self.tenants):
            raise KeyboardInterrupt

    def _end(self, tenant: Tenant, run: ActiveRun) -> None:
        """End a job that is still running. A job interrupted before its first update has no result."""
        run.loop.catch_up()
        run.loop.driver.close()
        tenant.end = self.network.now
        run.interrupted = run.halfway = self.interrupted
        run.reason = "interrupted" if self.interrupted else "others have ended"
        if run.recorder.updates:
            tenant.result = run.result()
        elif not self.interrupted:
            raise NoUpdateError(
                f"job {tenant.name!r}: all other jobs ended before its first update; give them more steps"
            )

    # ------------------------------------------------------------ results

    def goodput(self, number: int) -> float:
        """Return the mean bytes/s of a background traffic from its start until now or its end."""
        flow, loop = self.traffic[number], self._flows[number]
        nbytes = float(self.network.traffic_of(loop.network.client)[0][self.cluster.n_channels + number])
        seconds = min(self.network.now, si(flow.end, "time")) - si(flow.start, "time")
        return nbytes / seconds if seconds > 0.0 else 0.0

    def shares(self, *others: ActiveRun) -> list[Floats]:
        """Return the share of each machine and switch that each run pays for: first `others`, then all started jobs."""
        runs = [*others, *(tenant.run for tenant in self.tenants if tenant.run is not None)]
        uses = [(run.loop.start, run.loop.now, run.prepared.nodes, run.loop.traffic().nbytes) for run in runs]
        return shares(self.cluster, uses)

    def check(self) -> None:
        """Raise :class:`~ddlsim.errors.ConservationError` unless the traffic of all jobs on the network adds up."""
        check_network(self.cluster, self.network)


# ---------------------------------------------------------------- background traffic, which sends as fast as it may

#: s that a message takes at the traffic's own rate: so long that the latency between two does not matter
MESSAGE_SECONDS = 60.0


def _switch(background: Background, loop: Loop, channel: int) -> Process:
    """Change the rate of traffic, which its link's `channel` limits, at its times."""
    for (begin, share), (until, _) in itertools.pairwise(itertools.chain(background.shares(), [(math.inf, 0.0)])):
        if begin > loop.now:
            yield loop.at(begin)
        if until > loop.now:
            loop.network.will_change([(loop.now, until, channel, share)])


def _send(background: Background, loop: Loop, source: int, target: int, nbytes: float) -> Process:
    """Send one message after the other, of `nbytes` each."""
    first = next(begin for begin, share in background.shares() if share > 0.0)
    if first > loop.now:
        yield loop.at(first)
    while True:
        yield loop.send(source, target, nbytes)


# ---------------------------------------------------------------- the jobs and the traffic of an experiment


def with_background(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], *, keep_spans: bool, horizon: float
) -> Together:
    """Return the network and clock of an experiment on some nodes, with its co-located jobs and traffic."""
    traffic = [flow for flow in experiment.background if isinstance(flow, Background)]
    place_of = {node: place for place, node in enumerate(cluster.workers.tolist())}
    occupied = [place_of[node] for node in nodes]
    together = Together(cluster, traffic, occupied=occupied, keep_spans=keep_spans, horizon=horizon)
    jobs = [job for job in experiment.background if isinstance(job, Job)]
    for number, job in enumerate(jobs, 2):
        endless = dataclasses.replace(job, endless=True)
        together.expect(endless, job.name or f"job {number}")
    return together


def _raise(error: DdlsimError | None = None) -> None:
    if error is not None:
        raise error


def _node(cluster: Cluster, name: str, traffic: Background) -> int:
    if name not in cluster.node_names:
        raise unknown_name("node", name, cluster.node_names, f"{traffic.label}: cluster {cluster.name!r}")
    node = cluster.node(name)
    if not cluster.is_endpoint[node]:
        raise ConfigError(f"{traffic.label}: {name} is a switch of {cluster.name!r}; traffic must be between endpoints")
    return node


def _widest(cluster: Cluster, source: int, target: int) -> float:
    """Return the bandwidth of the route between two nodes for one message, in bytes/s."""
    routes = cluster.split_routes(np.array([source]), np.array([target]))
    return float(np.min(cluster.channel_capacity[cluster.link_channel[routes.links]] / routes.share))
