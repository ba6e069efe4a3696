"""From an experiment to a result: `simulate`, `resume` and `scaling`, and `run`, which they call."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np

from ddlsim.arguments import Count, checked, quantity, takes_fields_of
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike, Floats
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError, DdlsimError, NoUpdateError
from ddlsim.learning import DataPlane, Learner
from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.learner import DivergedError, Shift
from ddlsim.learning.monitor import Monitor, Progress
from ddlsim.network import Network
from ddlsim.plan import Plan
from ddlsim.reliability import Effect, RandomFaults, faults
from ddlsim.run import notes
from ddlsim.run.conservation import check_result
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import (
    check_free,
    crashes_of,
    has_failure_timeline,
    lifetime,
    timeline_notes,
)
from ddlsim.run.prepare import Prepared, prepare
from ddlsim.run.result import Result
from ddlsim.run.resume import Interrupt, Saved, SavePoints, load, manifest, saving
from ddlsim.runtime.context import RunContext, StopRule, Worker, factors
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

    given       the experiment as requested
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
        self, prepared: Prepared, given: Experiment, network: Network, *, start: float = 0.0, keep_spans: bool = False,
        progress: Progress | None = None, saved: Saved | None = None, shift: Shift | None = None, endless: bool = False,
        horizon: float = math.inf, shows_plan: bool = False, is_alone: bool = False,
    ) -> None:  # fmt: skip
        self.prepared, self.given, self.experiment = prepared, given, prepared.experiment
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
        crashes = crashes_of(experiment, prepared.cluster, prepared.nodes)
        workers = _workers(prepared, loop, recorder, stop, learner, effects)
        self.context = context = RunContext(
            prepared.cluster, loop, workers, recorder, stop, learner,
            seed=experiment.seed, compression=compression_of(experiment.compression), jitter=experiment.jitter,
            whole=prepared.workloads,
            crashes=[[(start + fall, start + back) for fall, back in own] for own in crashes],
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
        if not context.waits_for_all:
            check_free(experiment)
        if context.compression is not None and not context.compresses:
            raise ConfigError(
                f"compression has no effect with {experiment.strategy.label}, which sends nothing through an "
                "Exchange or Messages (ddlsim.runtime); leave compression out"
            )
        if self.given.overlap_slowdown not in (None, NO_SLOWDOWN) and not context.slows:
            context.notes.append(
                f"overlap_slowdown has no effect with {experiment.strategy.label}, whose workers are "
                "processes that compute at full speed while they communicate"
            )
        workload = context.workers[0].workload
        if (workload.host_time or workload.stack.call_time) and not context.has_fixed_costs:
            counted = {id(each): dataclasses.replace(each, host_time=0.0) for each in self.prepared.workloads}
            workloads = [counted[id(each)] for each in self.prepared.workloads]  # nor in the workers' times alone
            self.prepared = dataclasses.replace(self.prepared, workloads=workloads)
            context.notes.append(
                f"step_time and call_time of stack {workload.stack.name} have no effect with "
                f"{experiment.strategy.label}, because its workers do not run in lockstep"
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
            given=dataclasses.replace(self.given, cluster=prepared.cluster, model=prepared.model),
            wants_stability=stability,
            share=share,
            sampled_faults=tuple(each for each in self._random if each.start < loop.now - loop.start),
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
        happened = [each for each in self._random if each.start < seconds]
        return (
            *prepared.notes,
            *notes.settings_notes(self.given, len(prepared.nodes)),
            *timeline_notes(experiment, free=self.recorder.down is not None),
            *notes.link_notes(prepared.cluster),
            *notes.overlap_notes(self.given.overlap_slowdown, context, prepared.cluster),
            *dict.fromkeys(context.notes),  # parts of a communicator repeat notes
            *notes.feed_notes(experiment, self.recorder, seconds),
            *faults.sampled_notes(experiment.faults, happened, seconds),
            *notes.late_notes((*experiment.faults, *experiment.slowdowns, *experiment.background), lasts),
            *notes.stalled_notes(self.recorder, seconds),
            *notes.uneven_notes(self.recorder),
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
    jobs = [each.experiment for each in experiment.background if hasattr(each, "experiment")]
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

    def made(horizon: float) -> Result:
        together, network = None, None
        known = contract.of(experiment.strategy).collectives().cost != "simulated"
        if experiment.background or (experiment.faults and known):  # faults also slow known costs on a shared network
            from ddlsim.run.concurrent import with_background  # which imports this module

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

    return faults.up_to_its_end(random_faults_of(experiment), prepared.cluster, made)


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
    fields = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(Experiment)}
    if not isinstance(wanted.cluster, Experiment):
        return _run(Experiment(**fields), wanted)
    for field in dataclasses.fields(Experiment):
        if field.name != "cluster" and fields[field.name] != field.default:
            raise ConfigError(
                f"simulate: {field.name} has no effect if an experiment is passed; use "
                f"experiment.with_({field.name}=...)"
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
