"""`simulate`: from an experiment to a result."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError
from ddlsim.learning import Learner, Phase, Plane, Training
from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.evaluation import DivergedError
from ddlsim.learning.learner import Task
from ddlsim.learning.monitor import Monitor, Progress
from ddlsim.network import Network
from ddlsim.run.calibrated import as_measured, outside
from ddlsim.run.conservation import check_result
from ddlsim.run.copies_share import input_note
from ddlsim.run.crashes import crashes_of
from ddlsim.run.experiment import Experiment
from ddlsim.run.faults import check_faults, let_happen, standstills
from ddlsim.run.feeding import check_source, feed_notes, feed_of, with_copies
from ddlsim.run.lighter import what_fits
from ddlsim.run.living import check_free, check_life, check_replicas, has_life, life_notes
from ddlsim.run.notes import (
    delay_warnings,
    handed_over_notes,
    idle_notes_of,
    learning_notes,
    uneven_notes,
    unsent_warnings,
)
from ddlsim.run.pauses import Interrupt, Pauses
from ddlsim.run.regimes import Regimes, in_phase, phase_notes
from ddlsim.run.result import Result
from ddlsim.run.resume import Saved, manifest, saving
from ddlsim.run.shift import NoUpdateError, Shift
from ddlsim.run.traced import Traced, traced_workload
from ddlsim.runtime.fabric import algorithm_for
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import Recorder
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import StopRule, Worker, factors
from ddlsim.strategies.plans import first_workers, peak_memory, tells_plan
from ddlsim.units import si
from ddlsim.workload.compute import Affine, Measured, PerKernel, Workload, make_workload
from ddlsim.workload.contention import NO_SLOWDOWN, OverlapSlowdown
from ddlsim.workload.devices import Device, load_device
from ddlsim.workload.memory import check_memory, held_nbytes
from ddlsim.workload.model import Model, load_model
from ddlsim.workload.optimizer_rules import rule_of
from ddlsim.workload.products import has_kernels
from ddlsim.workload.stage import Stage, at_once, micro_batches, n_replicas, stages_of
from ddlsim.workload.tables import exchange_left_out

DEFAULT_DEVICE = "desktop-cpu"


@dataclass(frozen=True)
class Prepared:
    """An experiment with its parts loaded: one workload, stage and node per worker, and what they learn, if anything.

    ``workloads`` are of workers that have the whole model, ``stages`` what they have of it under the strategy.

    Where the cluster is calibrated, the `experiment` has the compute time that was measured on it. ``warnings`` are of
    devices whose memory is too small, ``left_out`` says which parts of the model's work no run simulates. ``regimes``
    are what workers compute where batches grow or images change.
    """

    experiment: Experiment
    cluster: Cluster
    model: Model
    time_model: Model
    task: Task | None
    nodes: list[int]
    workloads: list[Workload]
    stages: list[Stage]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    regimes: Regimes | None = None


class Placed(NamedTuple):
    """An experiment with the node, the workload with the whole model and the device of each worker, and notes."""

    experiment: Experiment
    cluster: Cluster
    model: Model
    time_model: Model
    nodes: list[int]
    workloads: list[tuple[Workload, Device]]
    notes: tuple[str, ...]


def place(experiment: Experiment) -> Placed:
    """Load the cluster and the model, place the workers and work out their compute times.

    Raises ConfigError with the field and the remedy if the parts do not fit.
    """
    cluster = load_cluster(experiment.cluster)
    model = load_model(experiment.model)
    time_model = model if experiment.time_model is None else load_model(experiment.time_model)
    given = experiment
    experiment, notes = as_measured(experiment, cluster, time_model.name)
    nodes = _nodes(experiment, cluster)
    n_workers = len(nodes)
    if hasattr(experiment.strategy, "check_sizes"):
        experiment.strategy.check_sizes(time_model, experiment.batch_size, n_workers)
    if n_workers > 1:
        cluster.check_connected(nodes)
    experiment = _with_algorithms(experiment, cluster, nodes)
    for slow in experiment.slow_downs:
        if max(slow.ranks) >= n_workers:
            raise ConfigError(f"slow_downs: rank {max(slow.ranks)} of {slow} is not among the {n_workers} workers")
    check_faults(experiment.faults, cluster, n_workers)
    check_source(experiment, cluster, nodes)
    workloads = _workloads(experiment, cluster, time_model, nodes)
    notes += input_note([workload for workload, _ in workloads])
    if has_life(experiment):
        check_life(experiment, cluster, nodes, workloads[0][0])
        notes += life_notes(experiment)
    for beyond in outside(given, cluster, time_model.name, n_workers):
        notes += beyond.notes
    return Placed(experiment, cluster, model, time_model, nodes, workloads, notes)


def _with_algorithms(experiment: Experiment, cluster: Cluster, nodes: list[int]) -> Experiment:
    """Return the experiment with the algorithms that run where its strategy says "default"."""
    strategy = experiment.strategy
    if not dataclasses.is_dataclass(strategy):
        return experiment
    kinds = {"algorithm": "all_reduce", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}
    at, cost = np.array(nodes)[cluster.locality_order(nodes)].tolist(), getattr(strategy, "cost", "simulated")
    chosen = {
        name: algorithm_for("default", cluster, at, cost, kind) for name, kind in kinds.items()
        if getattr(strategy, name, None) == "default"
    }  # fmt: skip
    return experiment.with_(strategy=dataclasses.replace(strategy, **chosen)) if chosen else experiment


def prepare(experiment: Experiment) -> Prepared:
    """Place the workers, and work out what each of them does under the strategy and learns.

    Raises ConfigError with the field and the remedy if the parts do not fit.
    """
    experiment, cluster, model, time_model, nodes, workloads, notes = place(experiment)
    n_workers = len(nodes)
    stages = stages_of(experiment.strategy, [workload for workload, _ in workloads])
    if experiment.elastic is not None:
        check_replicas(experiment, stages, [workload for workload, _ in workloads])
    phased = experiment.training is not None and bool(experiment.training.phases)
    texts = [] if phased else _memory_warnings(experiment, workloads, stages)
    if texts := list(dict.fromkeys(texts)):
        texts[-1] += what_fits(experiment, cluster, nodes, workloads, lambda strategy: _workloads(
            experiment.with_(strategy=strategy), cluster, time_model, nodes
        ))  # fmt: skip
    made = [workload for workload, _ in workloads]
    task, regimes, training = None, None, experiment.training
    if training is not None:
        task = training.task(model, n_replicas(experiment.strategy, n_workers), experiment.seed, time_model)
        regimes = _regimes(training, experiment, cluster, time_model, nodes, stages, texts)
        if regimes is not None:
            notes = (*notes, *phase_notes(training.phases, regimes))
    devices = sorted({device.name for _, device in workloads})
    if isinstance(experiment.compute, Measured | Affine) and len(devices) > 1 and experiment.speed is None:
        notes = (*notes, f"the compute time given counts for {' and '.join(devices)} alike; give speed=[...] if not so")
    exchanged = getattr(experiment.strategy, "exchanges_tables", False)
    missing = None if exchanged else exchange_left_out(made[0], n_workers, experiment.accumulation)
    return Prepared(
        experiment, cluster, model, time_model, task, nodes, made, stages, tuple(dict.fromkeys(texts)), notes,
        () if missing is None else (missing,), regimes,
    )  # fmt: skip


def _regimes(
    training: Training, experiment: Experiment, cluster: Cluster, model: Model, nodes: list[int], stages: list[Stage],
    warnings: list[str],
) -> Regimes | None:  # fmt: skip
    """Return what workers compute as the run goes on, None if that is always the same; phases are made now, and
    `warnings` added of devices whose memory one does not fit."""
    if training.growing_batch is None and not training.phases:
        return None

    def workloads_in(regime: tuple[int, int | None]) -> list[tuple[Workload, Device]]:
        batch_size, number = regime
        phase = None if number is None else training.phases[number]
        return _workloads(dataclasses.replace(experiment, batch_size=batch_size), cluster, model, nodes, phase)

    def make(regime: tuple[int, int | None]) -> list[Stage]:
        return stages_of(experiment.strategy, [workload for workload, _ in workloads_in(regime)])

    regimes = Regimes(training, experiment.batch_size, make, {(experiment.batch_size, None): stages})
    for number, phase in enumerate(training.phases):
        regime = phase.batch or experiment.batch_size, number
        workloads = workloads_in(regime)
        regimes.stages[regime] = stages_of(experiment.strategy, [workload for workload, _ in workloads])
        warnings += _memory_warnings(experiment, workloads, regimes.stages[regime])
    return regimes


def _memory_warnings(
    experiment: Experiment, workloads: list[tuple[Workload, Device]], stages: list[Stage]
) -> list[str]:
    """Return a line for each device that what it has to hold does not fit; of parts of a model, by the plan if there is
    one."""
    strategy, n_workers = experiment.strategy, len(stages)
    whole = [workload for workload, _ in workloads]
    held: list[float | None] = [None] * n_workers
    parts = any(stage.workload is not workload for stage, workload in zip(stages, whole, strict=True))
    if parts and tells_plan(strategy):
        accumulation = micro_batches(strategy, experiment.batch_size, n_workers, experiment.accumulation)
        peak = peak_memory(strategy, whole, accumulation)
        for rank, worker in enumerate(first_workers(strategy, n_workers)):
            held[worker] = float(peak[rank])
    different = {
        (id(stage), device.name, nbytes): (stage, device, nbytes)
        for stage, (_, device), nbytes in zip(stages, workloads, held, strict=True)
    }
    over = [
        (sum(held_nbytes(stage, n_workers, nbytes)) / device.memory_nbytes, text)
        for stage, device, nbytes in different.values() if (text := check_memory(stage, device, n_workers, nbytes))
    ]  # fmt: skip
    if not parts or not over:
        return [text for _, text in over]
    fullest = max(over, key=operator.itemgetter(0))[1]
    if len(over) == 1:
        return [fullest]
    others = f"{len(over) - 1} other parts of the model do not fit either"
    return [f"{fullest}; {others}; ddlsim.fits says what saves memory"]


def _nodes(experiment: Experiment, cluster: Cluster) -> list[int]:
    """Return the node of each worker."""
    n_devices, wanted = len(cluster.workers), experiment.workers
    if wanted is None:
        wanted = getattr(experiment.strategy, "n_workers", None)
        if wanted is not None and wanted > n_devices and hasattr(experiment.strategy, "check_sizes"):
            wanted = None  # it says what so many devices allow
    if not n_devices:
        raise ConfigError(f"cluster {cluster.name!r} has no device to place a worker on")
    places = range(n_devices if wanted is None else wanted) if wanted is None or isinstance(wanted, int) else wanted
    if max(places) >= n_devices:
        many = f"workers = {wanted}" if isinstance(wanted, int) else f"workers = {list(places)}: place {max(places)}"
        hint = f"use at most {n_devices}" if isinstance(wanted, int) else f"places go from 0 to {n_devices - 1}"
        raise ConfigError(f"{many}: cluster {cluster.name!r} has {n_devices} devices; {hint}")
    nodes: list[int] = cluster.workers[list(places)].tolist()
    return nodes


def _workloads(
    experiment: Experiment, cluster: Cluster, model: Model, nodes: list[int], phase: Phase | None = None
) -> list[tuple[Workload, Device]]:
    """Return each worker's workload (in a phase) and device; equal ones are the same object."""
    speeds = experiment.speeds(len(nodes))
    batch_size = at_once(experiment.strategy, experiment.batch_size, len(nodes))
    made: dict[tuple[str, float], tuple[Workload, Device]] = {}
    result = []
    for node, factor in zip(nodes, speeds, strict=True):
        device = load_device(experiment.device or cluster.device_of[node] or DEFAULT_DEVICE)
        speed = factor * float(cluster.speed[node])
        key = (device.name, speed)
        if key not in made:
            make = functools.partial(_workload, device=device, speed=speed, batch_size=batch_size)
            workload = make(experiment, model) if phase is None else in_phase(make, experiment, model, phase)
            made[key] = workload, device
        result.append(made[key])
    return with_copies(experiment, cluster, nodes, result)


def _workload(experiment: Experiment, model: Model, device: Device, speed: float, batch_size: int) -> Workload:
    compute, precision, gradient_dtype = experiment.compute, experiment.precision, experiment.gradient_dtype
    rule = experiment.optimizer if experiment.training is None else rule_of(experiment.training.optimizer)
    if compute is None and hasattr(experiment.strategy, "micro_batch_size"):
        # parts of a model are timed kernel by kernel where that is known, and so is the whole beside them
        compute = PerKernel() if has_kernels(model, device, precision) else None
    if isinstance(compute, Traced):
        return traced_workload(
            compute, model, device, batch_size, precision=precision, gradient_dtype=gradient_dtype, speed=speed,
            optimizer=rule,
        )  # fmt: skip
    return make_workload(
        model, device, batch_size, compute=compute, precision=precision, gradient_dtype=gradient_dtype, speed=speed,
        optimizer=rule,
    )  # fmt: skip


def _workers(prepared: Prepared, loop: Loop, recorder: Recorder, stop: StopRule, learner: Learner) -> list[Worker]:
    experiment = prepared.experiment
    regimes, n_workers = prepared.regimes, len(prepared.nodes)
    accumulation = micro_batches(experiment.strategy, experiment.batch_size, n_workers, experiment.accumulation)
    feed = feed_of(experiment, loop, prepared.cluster, prepared.nodes, prepared.time_model)
    workers = []
    for rank, (node, stage) in enumerate(zip(prepared.nodes, prepared.stages, strict=True)):
        workers.append(
            Worker(
                rank, node, loop, stage.workload, recorder, stop, factors(experiment.jitter, experiment.seed, rank),
                (*experiment.slow_downs, *standstills(experiment.faults)), accumulation, learner,
                None if regimes is None else functools.partial(regimes.at, rank),
                overlap_slowdown=cast("OverlapSlowdown", experiment.overlap_slowdown), feed=feed,
            )
        )  # fmt: skip
    return workers


def _check_compressible(model: Model) -> None:
    """Raise ConfigError for embedding tables that learn: what is compressed is what workers exchange, without them."""
    names = ", ".join(layer.name for layer in model.layers if layer.model_parallel)
    if names:
        raise ConfigError(
            f"compression: workers do not exchange the gradients of {names} of {model.name}, which learn all the same; "
            "leave it out, or train a model without embedding_bag layers"
        )


def _monitor(
    setting: Setting, experiment: Experiment, progress: Progress | None, saved: Checkpoint | None, shift: Shift | None
) -> Monitor | None:
    """Return what evaluates a training run, after the strategy has said where its model is."""
    training, task = experiment.training, setting.learner.task
    if training is None or task is None:
        return None
    charge: Callable[[], None] | None = None
    if training.charge_evaluation:
        first = setting.workers[0]

        def charge() -> None:
            first.owed += first.workload.forward_time * task.held_out.n_samples / first.workload.batch_size

    return Monitor(
        training, setting.learner, setting.model, lambda: setting.loop.nbytes_sent, setting.recorder.staleness,
        setting.replicas, setting.steps, progress, charge, saved, setting.optimizer,
        None if shift is None else shift.begin, shift is not None and shift.goes_on,
    )  # fmt: skip


def _learner(prepared: Prepared, loaded: Experiment, saved: Saved | None, shift: Shift | None) -> Learner:
    """Return the learner, which knows the values of the `saved` run where there is one."""
    task, n_workers = prepared.task, n_replicas(loaded.strategy, len(prepared.nodes))
    if saved is None:
        return Learner(Plane(), task, n_workers, None if shift is None else shift.begin)
    if task is None:
        raise ConfigError(f"training = None: give the experiment the training that {saved.path} was saved with")
    saved.check(manifest(loaded, task))
    learner = Learner(Plane(saved.checkpoint.replay), task, n_workers)
    learner.losses.extend(saved.checkpoint.losses)
    return learner


def _pauses(
    monitor: Monitor | None, interrupt: Interrupt, loaded: Experiment, path: str | Path | None, every: float
) -> Pauses | None:
    """Return what lets a training run stop, and saves it at `path`, before its clock goes on."""
    if monitor is None or monitor.learner.task is None:
        if path is not None:
            raise ConfigError(f"checkpoint = {str(path)!r} has no effect without training")
        return None
    return Pauses(monitor, interrupt, None if path is None else saving(path, loaded, monitor.learner.task), every)


def _learn(monitor: Monitor, pauses: Pauses, stop: StopRule, max_time: float) -> bool:
    """Let the workers train; return whether they were interrupted."""
    with pauses.interrupt.on_ctrl_c():
        monitor.start()
        stop.loop.run(stop.ended, max_time, pauses)
    interrupted = pauses.interrupt.wanted and not stop.reason
    if monitor.checkpoint is None:
        monitor.mark("" if interrupted else f"max_time = {max_time!r}")
    if pauses.save is not None and monitor.checkpoint is not None:
        pauses.save(monitor.checkpoint)
    if not interrupted and not monitor.keeps_latest:
        monitor.finish(stop.loop.now)
    return interrupted


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
    """Simulate the experiment and return its result.

    With ``keep_spans`` everything needed for a timeline is recorded; ``progress`` is called as a training run
    goes on; a ``saved`` one is continued; every ``checkpoint_every`` s of real time it is saved at ``checkpoint``.
    With ``stability`` the result says how stable it is, also where that takes long. A ``shift`` is a part of a training
    in which groups of workers take turns.
    On Ctrl-C the result of what has been simulated so far is returned, marked as interrupted.

    Raises :class:`~ddlsim.errors.ConservationError` if the result does not add up (:mod:`ddlsim.run.conservation`).
    """
    prepared = prepare(experiment)
    given, experiment = experiment, prepared.experiment
    loaded = dataclasses.replace(experiment, cluster=prepared.cluster, model=prepared.model)
    started = time.perf_counter()
    network = Network(prepared.cluster, record=keep_spans)
    let_happen(experiment.faults, network, prepared.cluster, prepared.nodes)
    loop = Loop(network)
    n_workers = len(prepared.nodes)
    recorder = Recorder(n_workers, keep_spans)
    stop = StopRule(loop, recorder, experiment.strategy.updates(experiment.steps + experiment.warmup, n_workers))
    learner = _learner(prepared, loaded, saved, shift)
    workers = _workers(prepared, loop, recorder, stop, learner)
    setting = Setting(
        prepared.cluster, loop, workers, recorder, stop, learner, seed=experiment.seed,
        compression=compression_of(experiment.compression), jitter=experiment.jitter, whole=prepared.workloads,
        crashes=crashes_of(experiment, prepared.cluster, prepared.nodes),
    )  # fmt: skip
    experiment.strategy.start(setting)
    if recorder.down is not None:
        check_free(experiment)
    if setting.compression is not None and not setting.compresses:
        raise ConfigError(
            f"compression has no effect with {experiment.strategy.label}: nothing that it sends goes through an "
            "Exchange or Wires (ddlsim.runtime), which compress; leave it out"
        )
    if experiment.overlap_slowdown != NO_SLOWDOWN and not setting.slows:
        setting.notes.append(
            f"overlap_slowdown: workers of {experiment.strategy.label} compute at full speed, also where they "
            "communicate meanwhile; only those whose steps are a plan are slower then"
        )
    if setting.compression is not None and learner.task is not None:
        _check_compressible(prepared.model)
    interrupt = Interrupt()
    report = None if progress is None else interrupt.guarded(progress)
    before = saved.checkpoint if saved is not None else None
    monitor = stop.monitor = _monitor(setting, experiment, report, before, shift)
    pauses = _pauses(monitor, interrupt, loaded, checkpoint, checkpoint_every)
    interrupted, reason, halfway = False, "", False
    max_time = si(experiment.max_time, "time")
    try:
        if monitor is None or pauses is None:
            loop.run(stop.ended, max_time)
        else:
            interrupted = _learn(monitor, pauses, stop, max_time)
        reason = "interrupted" if interrupted else stop.reason or "max_time"
    except KeyboardInterrupt:
        interrupted, reason, halfway = True, "interrupted", True
        loop.catch_up()
    except DivergedError as error:
        reason = str(error)
    recorder.close(loop.now)
    if not recorder.updates:
        if interrupted:
            raise KeyboardInterrupt
        raise NoUpdateError(f"max_time = {max_time!r} s is over before the first update; allow more time")
    accounts = network.accounts()
    traffic = loop.traffic(accounts)
    result = Result(
        experiment=loaded,
        cluster=prepared.cluster,
        workloads=prepared.workloads,
        nodes=np.array(prepared.nodes, dtype=np.int64),
        recorder=recorder,
        end_time=loop.now,
        channel_nbytes=traffic.nbytes,
        channel_busy=traffic.busy,
        busy=loop.busy_intervals() if keep_spans else None,
        n_messages=traffic.n_messages,
        nbytes_sent=traffic.sent,
        notes=(
            *prepared.notes,
            *dict.fromkeys(setting.notes),  # parts of a communicator say the same
            *feed_notes(experiment, recorder, loop.now),
            *uneven_notes(recorder),
            *learning_notes(experiment, reason, monitor),
            *handed_over_notes(setting, monitor),
            *idle_notes_of(prepared.experiment.strategy, prepared.cluster, prepared.nodes, traffic),
        ),
        warnings=(
            *prepared.warnings,
            *prepared.left_out,
            *unsent_warnings(n_workers, traffic.sent),
            *delay_warnings(experiment.training, recorder.staleness, reason),
        ),
        interrupted=interrupted,
        wall_seconds=time.perf_counter() - started,
        stop_reason=reason,
        monitor=monitor,
        given=dataclasses.replace(given, cluster=prepared.cluster, model=prepared.model),
        wants_stability=stability,
    )
    if not halfway:  # where somebody stopped it in the middle of an event, that is booked in parts only
        check_result(result, loop, accounts, stop.n_samples)
    return result
