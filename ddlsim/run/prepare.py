"""Preparation of an experiment: the computation of each worker, its node, and its training."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ddlsim.bundled import loaded_from
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import PER_MESSAGE, Beyond, beyond, deviation
from ddlsim.cluster.catalogue import bundled_name
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.cluster.groups import levels
from ddlsim.collectives import KINDS
from ddlsim.compression import Compression
from ddlsim.compression.choice import PROBES, kept_vectors
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.garbage import postponed
from ddlsim.learning import Phase, Training
from ddlsim.learning.learner import Task
from ddlsim.readable import percent
from ddlsim.reliability.faults import Effect, at_random, effects_of
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import check_replicas, check_timeline, has_failure_timeline
from ddlsim.run.notes import level_notes, spread_notes
from ddlsim.run.strategy_names import STRATEGY_CLASSES
from ddlsim.run.traced import Traced, traced_workload
from ddlsim.runtime.fabric import Collectives, algorithm_for
from ddlsim.runtime.loop import arrivals
from ddlsim.spread import Spread
from ddlsim.strategies import Strategy, contract
from ddlsim.strategies.split_rules import MESH, changes_text, state_of
from ddlsim.workload.compute import Affine, Measured, PerKernel, Roofline, Workload, make_workload
from ddlsim.workload.convolutions import has_convolutions
from ddlsim.workload.devices import Device, DeviceLike, load_device, of_same_chip
from ddlsim.workload.input import Copies
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.memory import Fullest, check_memory, held_nbytes, stage_memory
from ddlsim.workload.model import Model, load_model
from ddlsim.workload.optimizer_rules import rule_of
from ddlsim.workload.precision import FP32_NBYTES, LOW_PRECISIONS
from ddlsim.workload.products import Floats, default_precision, has_kernels
from ddlsim.workload.resized import resized
from ddlsim.workload.stacks import StackLike, default_stack, load_stack
from ddlsim.workload.stage import Stage

if TYPE_CHECKING:
    from ddlsim.cluster.calibration_table import ComputeTable

#: maximum number of variants to try, number of further ones after the first that fits, and number shown
MOST_TRIED, MORE_TRIED, N_NAMED = 32, 3, 2


def what_fits(placed: Placed) -> str:
    """Return text on the nearest variants of the strategy that fit, with the memory of their fullest worker, or on the
    minimum number of workers. Empty if the strategy does not define `lower_memory_variants`.
    """
    experiment, workloads = placed.experiment, placed.workloads
    strategy, n_workers = contract.of(experiment.strategy), len(workloads)
    if not strategy.shares_batch or len({id(workload) for workload in workloads}) > 1:
        return ""
    workload, room = workloads[0], workloads[0].memory_nbytes
    if not strategy.defines("lower_memory_variants"):
        return _fewer_samples(experiment, workloads, room)
    fit: list[tuple[Mapping[str, object], float]] = []
    tries = strategy.lower_memory_variants(workload, experiment.batch(n_workers), n_workers, room)
    left = MOST_TRIED
    for other, changes in itertools.islice(tries, MOST_TRIED):
        left -= 1
        if len(fit) == N_NAMED or left < 0:
            break
        mesh = {name: changes[name] for name in MESH if name in changes}
        if any(fewer.items() <= changes.items() or (mesh and mesh.items() <= fewer.items()) for fewer, _ in fit):
            continue
        try:
            held = _held(placed, other)
        except ConfigError:  # such as tensor groups that share machines with others
            continue
        if held <= room:
            fit.append((changes, held))
            left = min(left, MORE_TRIED)
    if fit:
        texts = [f"{changes_text(changes)} ({held / 1e9:.1f} GB)" for changes, held in fit]
        return f"; the nearest that fit: {'; '.join(texts)}"
    state = state_of(workload).total
    if state > n_workers * room:
        state_text = f"weights, gradients and optimizer alone are {state / 1e9:,.1f} GB"
        least, most = math.ceil(state / room), len(placed.cluster.workers)
        lacks = f", of which the cluster has only {most}" if least > most else ""
        return f"; {state_text}: use {least} workers or more{lacks}"
    return "" if next(tries, None) else f"; no other micro-batch, recomputation or stage fits {n_workers} workers"


def _fewer_samples(experiment: Experiment, workloads: list[Workload], room: float) -> str:
    """Return text on the largest global batch that fits, if a smaller one fits."""
    n_workers, samples = len(workloads), []
    for stage in {id(stage): stage for stage in contract.of(experiment.strategy).stages_of(workloads)}.values():
        fixed, varying = held_nbytes(stage, n_workers)
        samples.append((room - fixed) / max(varying, 1.0) * stage.workload.batch_size)
    largest = math.floor(min(samples))
    return f"; of all workers together batch_size={largest * n_workers}" if largest > 0 else ""


def _held(placed: Placed, other: Strategy) -> float:
    """Return the memory of the fullest worker in bytes under another strategy. Raises ConfigError if workers cannot
    exchange the parts that they share."""
    experiment = placed.experiment.with_(strategy=other)
    strategy, workloads = contract.of(other), _workloads(experiment, placed.cluster, placed.time_model, placed.nodes)
    batches = strategy.micro_batches(experiment.batch(len(workloads)), len(workloads), experiment.accumulation)
    strategy.folded_program(workloads, batches, placed.cluster, placed.nodes)
    return memory_use(experiment, workloads, strategy.stages_of(workloads))[0].needed


#: (batch size, index of the phase)
Regime = tuple[int, int | None]


@dataclass
class Regimes:
    """The computation of all workers for each batch size and phase, built on first use.

    ``stages`` contains those built so far.
    """

    training: Training
    batch_size: int
    make: Callable[[Regime], list[Stage]]
    stages: dict[Regime, list[Stage]] = field(default_factory=dict)

    def at(self, rank: int, epoch: float) -> Workload:
        """Return a worker's workload at an epoch; the same object as long as it does not change."""
        regime = self.training.regime(epoch, self.batch_size)
        if regime not in self.stages:
            self.stages[regime] = self.make(regime)
        return self.stages[regime][rank].workload


def in_phase(
    make: Callable[[Experiment, Model], Workload], experiment: Experiment, model: Model, phase: Phase
) -> Workload:
    """Return a worker's workload in a phase.

    make  function that returns the workload of a model in an experiment

    A measured step time is multiplied by the ratio of the roofline's times. Raises ConfigError for images that the
    model cannot process.
    """
    if phase.compute is not None:
        experiment = dataclasses.replace(experiment, compute=phase.compute)
    if phase.input_size is None:
        return make(experiment, model)
    other = resized(model, phase.input_size)
    if other is model or phase.compute is not None:
        return make(experiment, other)
    by_roofline = experiment
    if not isinstance(experiment.compute, Roofline):
        by_roofline = dataclasses.replace(experiment, compute=Roofline())
    actual, before, after = make(experiment, model), make(by_roofline, model), make(by_roofline, other)
    measured, expected = (workload.forward_time + workload.backward_time for workload in (actual, before))
    if measured == expected:
        return after
    factor = measured / expected
    ratio = (after.forward_time + after.backward_time) / expected
    basis = f"{actual.basis}, times {ratio:.3g} for images of {phase.input_size} pixels by the roofline"
    forward, backward = after.forward * factor, after.backward * factor
    return dataclasses.replace(after, forward=forward, backward=backward, optimizer=actual.optimizer, basis=basis)


def phase_notes(phases: Sequence[Phase], regimes: Regimes) -> list[str]:
    """Return a line per phase on the computation of its first worker."""
    lines = []
    for number, phase in enumerate(phases):
        workload = regimes.stages[phase.batch or regimes.batch_size, number][0].workload
        size, base = workload.model.input_shape[-1], regimes.stages[regimes.batch_size, None][0].workload
        why = "" if workload.basis == base.basis else f" ({workload.basis})"
        lines.append(
            f"phase {number}: {phase.epochs:g} epochs with samples of size {size}, batch {workload.batch_size}, "
            f"{workload.step_time * 1e3:.4g} ms a step without communication{why}"
        )
    if lines:
        lines.append("speedup and efficiency are relative to one worker with the same batches and images")
    return lines


DEFAULT_DEVICE = "desktop-cpu"


@dataclass(frozen=True)
class Placed:
    """An experiment with its cluster and models, the node and the workload with the full model of each worker, the
    effects of its slow-downs and faults at known times, and notes.

    The `experiment` contains the loaded cluster and models and, if the cluster is calibrated, the compute time that was
    measured on it.
    """

    experiment: Experiment
    cluster: Cluster
    model: Model
    time_model: Model
    nodes: list[int]
    workloads: list[Workload]
    effects: list[Effect]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Prepared(Placed):
    """A placed experiment with the part of the model that the strategy assigns to each worker, and the training.

    ``misfits`` are texts on devices whose memory is too small, ``left_out`` says which parts of the model's work no run
    simulates. ``regimes`` are what workers compute where batches grow or images change.
    """

    task: Task | None
    stages: list[Stage]
    misfits: tuple[str, ...]
    left_out: tuple[str, ...]
    regimes: Regimes | None
    fullest: Fullest | None

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """The misfits, of which the last one names variants that fit. These are searched on first use."""
        if self.fullest is None or not self.misfits:
            return self.misfits
        return (*self.misfits[:-1], self.misfits[-1] + what_fits(self))


def place(experiment: Experiment) -> Placed:
    """Load the cluster and the model, place the workers and compute their compute times.

    Raises ConfigError with the field and the remedy if the parts are incompatible.
    """
    loaded = _load(experiment.cluster, experiment.device)
    cluster = loaded_from(loaded.sampled(experiment.seed), loaded)
    model, timed = load_model(experiment.model), experiment.time_model
    timed = None if timed is None else load_model(timed)
    time_model = model if timed is None else timed
    if time_model.n_params == 0:
        raise ConfigError(f"model {time_model.name!r} has no parameters; add a layer to train, such as dense")
    nodes = _nodes(experiment, cluster)
    n_workers, batch_size = len(nodes), experiment.batch(len(nodes))
    # the cluster is not sampled, so that the experiment can be repeated with another seed
    original = experiment = experiment.with_(cluster=loaded, model=model, time_model=timed, batch_size=batch_size)
    experiment, notes = as_measured(experiment, cluster, time_model.name)
    notes += time_model.notes
    contract.of(experiment.strategy).check_sizes(time_model, batch_size, n_workers)
    if n_workers > 1:
        cluster.check_connected(nodes)
    experiment = _with_algorithms(experiment, cluster, nodes)
    different = {cluster.device_of[node]: node for node in reversed(nodes)}
    devices = [_device_at(experiment, cluster, node) for node in reversed(different.values())]
    experiment = with_defaults(experiment, time_model, *devices)
    experiment, slower = _with_pace(experiment, time_model, devices, n_workers)
    notes += (*slower, *level_notes(experiment.strategy, cluster, nodes), *spread_notes(cluster))
    effects = effects_of(experiment.slowdowns, cluster, nodes, "slowdowns")
    effects += effects_of(experiment.faults, cluster, nodes)
    for source in at_random(experiment.faults):
        source.parts(cluster, nodes)
    check_source(experiment, cluster, nodes)
    workloads = _workloads(experiment, cluster, time_model, nodes)
    notes += (*input_note(workloads), *_without_effect(original, workloads[0]))
    if not workloads[0].timed and any(layer.type == "mixture_of_experts" for layer in time_model.layers):
        notes += ("experts receive equally many tokens; uneven routing, which takes longer, is not simulated",)
    if has_failure_timeline(experiment):
        check_timeline(experiment, cluster, nodes, workloads[0])
    for further in outside(original, cluster, time_model.name, n_workers):
        notes += further.notes
    return Placed(experiment, cluster, model, time_model, nodes, workloads, effects, notes)


def _load(source: ClusterLike, device: DeviceLike | None) -> Cluster:
    """Load a cluster, with NVLinks that are at most as fast as :func:`nvlink_limits` permits.

    A bundled cluster is loaded by its name, because the links of a cluster may have the limits of another device.
    """
    cluster = load_cluster(bundled_name(source) or source)
    limits = nvlink_limits(cluster, device)
    if limits is None:
        return cluster
    return loaded_from(cluster.with_links(np.minimum(cluster.link_bandwidth, limits), cluster.link_latency), cluster)


def nvlink_limits(cluster: Cluster, device: DeviceLike | None) -> Floats | None:
    """Return the largest bandwidth of each link in bytes/s, (n_links,); None if devices limit none.

    NVLinks of a bundled cluster are at most as fast as those of the devices at their ends, all of which `device`
    replaces. Links of files and graphs, and those whose bandwidth ``+nvlink_bandwidth=`` sets, have no limit.
    """
    name = bundled_name(cluster)
    if name is None or "+nvlink_bandwidth=" in name:
        return None
    wanted = {label: device or label for label in set(cluster.device_of)}
    most = {label: load_device(chosen).nvlink_bandwidth for label, chosen in wanted.items() if chosen is not None}
    if not any(most.values()):
        return None
    at = np.array([most.get(label) or math.inf for label in cluster.device_of])
    ends = np.minimum(at[cluster.link_src], at[cluster.link_dst])
    return np.where([kind == "nvlink" for kind in cluster.link_kind], ends, math.inf)


def _with_algorithms(experiment: Experiment, cluster: Cluster, nodes: list[int]) -> Experiment:
    """Replace "default" in the experiment's strategy by the algorithms that it selects."""
    strategy: Any = experiment.strategy
    used, at = contract.of(strategy).collectives(), np.array(nodes)[cluster.locality_order(nodes)].tolist()
    kinds = {"algorithm": "all_reduce", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}
    kinds |= {"algorithm": "reduce_scatter"} if used.in_halves else {}
    chosen: dict[str, Any] = {
        name: algorithm_for("default", cluster, at, used.cost, kind)
        for name, kind in kinds.items()
        if used.algorithms.get(name) == "default"
    }
    if chosen.get("algorithm") == "hierarchical" and not _suits_levels(experiment, used, cluster, at):
        chosen["algorithm"] = "ring"
    return experiment.with_(strategy=dataclasses.replace(strategy, **chosen)) if chosen else experiment


def _suits_levels(experiment: Experiment, used: Collectives, cluster: Cluster, nodes: list[int]) -> bool:
    """Return whether known times and compressed payloads of hierarchical all-reduces are defined for the nodes."""
    choice, gathers, is_fixed = experiment.compression, False, True
    compressor = choice.compressor if used.compressor is None and isinstance(choice, Compression) else used.compressor
    if compressor is not None:
        gathers, is_fixed = compressor.traits.collective == "all_gather", compressor.expected_nbytes(1) is not None
    are_even = not (gathers or used.cost == "nccl") or levels(cluster, tuple(nodes)).places is not None
    return are_even and (is_fixed or not gathers)


@postponed()
def prepare(experiment: Experiment) -> Prepared:
    """Place the workers, and determine their computation under the strategy and their training.

    Raises ConfigError with the field and the remedy if the parts are incompatible.
    """
    placed = place(experiment)
    experiment, workloads, notes = placed.experiment, placed.workloads, list(placed.notes)
    strategy, n_workers = contract.of(experiment.strategy), len(workloads)
    stages = strategy.stages_of(workloads)
    if experiment.elastic is not None:
        check_replicas(experiment, stages, workloads)
    phased = experiment.training is not None and bool(experiment.training.phases)
    fullest, texts = memory_use(experiment, workloads, stages)
    texts = [] if phased else texts
    task, regimes, training = None, None, experiment.training
    if training is not None:
        task = training.task(placed.model, strategy.n_replicas(n_workers), experiment.seed, placed.time_model)
        regimes = _regimes(training, placed, stages, texts)
        if regimes is not None:
            notes += phase_notes(training.phases, regimes)
    devices = sorted({workload.device.name for workload in workloads if workload.device is not None})
    if isinstance(experiment.compute, Measured | Affine) and len(devices) > 1 and experiment.speed is None:
        notes.append(f"the given compute time applies to {' and '.join(devices)} alike; set speed=[...] if they differ")
    missing = None
    if not strategy.exchanges_tables() and any(layer.model_parallel for layer in placed.time_model.layers):
        from ddlsim.workload.table_placement import exchange_left_out

        missing = exchange_left_out(workloads[0], n_workers, experiment.accumulation)
    choice = experiment.compression
    if isinstance(choice, Compression) and kept_vectors(choice.compressor) is None:
        sizes = " or ".join(f"{rows * columns:,}" for rows, columns in PROBES)
        notes.append(
            f"memory: what {type(choice.compressor).__name__} keeps between steps is not counted, because its init "
            f"fails for vectors of {sizes} elements"
        )
    return Prepared(
        **vars(placed) | {"notes": tuple(notes)},
        task=task,
        stages=stages,
        misfits=tuple(dict.fromkeys(texts)),
        left_out=() if missing is None else (missing,),
        regimes=regimes,
        fullest=None if phased else fullest,
    )


def _regimes(training: Training, placed: Placed, stages: list[Stage], warnings: list[str]) -> Regimes | None:
    """Return the workloads over the course of the run, or None if they never change. Phases are built immediately, and
    devices whose memory they exceed are added to `warnings`."""
    if training.growing_batch is None and not training.phases:
        return None
    experiment, stages_of = placed.experiment, contract.of(placed.experiment.strategy).stages_of

    def workloads_in(regime: Regime) -> list[Workload]:
        batch_size, number = regime
        phase = None if number is None else training.phases[number]
        sized = dataclasses.replace(experiment, batch_size=batch_size)
        return _workloads(sized, placed.cluster, placed.time_model, placed.nodes, phase)

    size = experiment.batch(len(stages))
    regimes = Regimes(training, size, lambda regime: stages_of(workloads_in(regime)), {(size, None): stages})
    for number, phase in enumerate(training.phases):
        regime = phase.batch or size, number
        workloads = workloads_in(regime)
        regimes.stages[regime] = stages_of(workloads)
        warnings += memory_use(experiment, workloads, regimes.stages[regime])[1]
    return regimes


def memory_use(experiment: Experiment, workloads: list[Workload], stages: list[Stage]) -> tuple[Fullest, list[str]]:
    """Return the fullest worker, and a line for each device with too little memory. If there is a plan, it determines
    the memory of parts of a model.

    whole  the workload of each worker with the full model
    """
    strategy, n_workers = contract.of(experiment.strategy), len(stages)
    held: list[float | None] = [None] * n_workers
    parts = any(stage.workload is not workload for stage, workload in zip(stages, workloads, strict=True))
    if parts:
        accumulation = strategy.micro_batches(experiment.batch(n_workers), n_workers, experiment.accumulation)
        peaks = strategy.peak_memory(workloads, accumulation)
        held = held if peaks is None else peaks[:n_workers].tolist()
    different = {
        (id(stage), workload.device.name, nbytes): (stage, workload.device, nbytes)
        for stage, workload, nbytes in zip(stages, workloads, held, strict=True)
        if workload.device is not None
    }
    uses = []
    choice = experiment.compression
    n_vectors = strategy.kept_models(n_workers, choice is not None)
    n_vectors += (kept_vectors(choice.compressor) or 0) if isinstance(choice, Compression) else 0
    for stage, device, nbytes in different.values():
        memory = stage_memory(stage, n_workers)
        if n_vectors:
            kept = n_vectors * FP32_NBYTES * stage.workload.model.gradient_nbytes(1)
            memory = dataclasses.replace(memory, buffers=memory.buffers + kept)
            stage = dataclasses.replace(stage, memory=memory)
        fullest = Fullest(sum(held_nbytes(stage, n_workers, nbytes)), device.memory_nbytes, memory.reserved)
        uses.append((fullest, check_memory(stage, device, n_workers, nbytes)))
    fullest, worst = max(uses, key=lambda use: use[0].needed / use[0].capacity)
    over = [text for _, text in uses if text]
    if not parts or not worst or len(over) == 1:
        return fullest, over
    others = f"{len(over) - 1} further parts of the model do not fit, either"
    return fullest, [f"{worst}; {others}; see ddlsim.fits for ways to save memory"]


def _nodes(experiment: Experiment, cluster: Cluster) -> list[int]:
    n_devices, wanted = len(cluster.workers), experiment.workers
    if wanted is None:
        strategy = contract.of(experiment.strategy)
        wanted = strategy.n_workers()
        if wanted is not None and wanted > n_devices and strategy.defines("check_sizes"):
            wanted = None  # check_sizes reports the valid numbers of devices
    if not n_devices:
        raise ConfigError(f"cluster {cluster.name!r} has no device for a worker")
    places = range(n_devices if wanted is None else wanted) if wanted is None or isinstance(wanted, int) else wanted
    if max(places) >= n_devices:
        workers = (
            f"workers = {wanted}" if isinstance(wanted, int) else f"workers = {list(places)}: position {max(places)}"
        )
        hint = f"use at most {n_devices}" if isinstance(wanted, int) else f"positions are 0 to {n_devices - 1}"
        raise ConfigError(f"{workers}: cluster {cluster.name!r} has only {n_devices} devices; {hint}")
    nodes: list[int] = cluster.workers[list(places)].tolist()
    return nodes


def _workloads(
    experiment: Experiment, cluster: Cluster, model: Model, nodes: list[int], phase: Phase | None = None
) -> list[Workload]:
    """Return each worker's workload (in a phase); equal ones are the same object."""
    speeds = experiment.speeds(len(nodes))
    strategy, batch = contract.of(experiment.strategy), experiment.batch(len(nodes))
    batch_size = strategy.samples_at_once(batch, len(nodes))
    n_batches = strategy.micro_batches(batch, len(nodes), experiment.accumulation)
    devices: dict[int, Device] = {}  # by name or object
    workloads: dict[tuple[str, float], Workload] = {}
    result = []
    for node, factor in zip(nodes, speeds, strict=True):
        wanted = experiment.device or cluster.device_of[node] or DEFAULT_DEVICE
        if id(wanted) not in devices:
            devices[id(wanted)] = _device_at(experiment, cluster, node)
        device, speed = devices[id(wanted)], factor * float(cluster.speed[node])
        key = (device.name, speed)
        if key not in workloads:
            make = functools.partial(_workload, device=device, speed=speed, batch_size=batch_size)
            workload = make(experiment, model) if phase is None else in_phase(make, experiment, model, phase)
            n_added = 1 if strategy.accumulates_shards(len(nodes)) else n_batches
            workloads[key] = _of_step(workload, len(nodes) > 1, n_added)
        result.append(workloads[key])
    return with_copies(experiment, cluster, nodes, result)


@functools.lru_cache(maxsize=64)
def _of_step(workload: Workload, several: bool, n_batches: int) -> Workload:
    """Return a worker's workload with what its host takes in each step, of one of `n_batches` micro-batches."""
    if several or not workload.known:
        workload = dataclasses.replace(workload, host_time=workload.stack.step_time)
    return workload.accumulating(n_batches)


def _device_at(experiment: Experiment, cluster: Cluster, node: int) -> Device:
    """Return the device of a worker on a node."""
    return load_device(experiment.device or cluster.device_of[node] or DEFAULT_DEVICE)


def with_defaults(experiment: Experiment, model: Model, *devices: Device) -> Experiment:
    """Return the experiment with the default stack, precision, gradient dtype and optimizer filled in.

    For transformers on devices with known kernels, these follow common practice, otherwise momentum and fp32, or TF32
    for convolutional networks. The stack is that of the first device.
    """
    stack = load_stack(experiment.stack or default_stack(type(experiment.strategy).__name__, devices[0]))
    by_kernel = all(has_kernels(model, device, experiment.precision or "bf16") for device in devices)
    trains = experiment.training is not None
    choices: dict[str, Any] = {
        "stack": stack,
        "precision": "fp32" if trains else default_precision(model, *devices),
        "gradient_dtype": stack.gradient_dtype if by_kernel and experiment.compression is None else "fp32",
        "optimizer": "adam" if by_kernel and not trains else None,
    }
    return experiment.with_(**{name: value for name, value in choices.items() if getattr(experiment, name) is None})


def _with_pace(
    experiment: Experiment, model: Model, devices: list[Device], n: int
) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment at the pace of the slowest of n devices if its stack was measured on fewer, and a note."""
    stack, precision = load_stack(cast(StackLike, experiment.stack)), str(experiment.precision)
    applies = experiment.speed is None and isinstance(experiment.compute, PerKernel | None)
    applies = applies and all(has_kernels(model, device, precision) for device in devices)
    if not applies or contract.of(experiment.strategy).is_asynchronous or n <= (stack.measured_on or n):
        return experiment, ()
    pace = Spread(measured_on=stack.measured_on)
    slower = percent(pace.relative_times(n)[0] - 1.0)
    note = (
        f"the slowest of {n:,} devices is assumed to be {slower} slower than the slowest of the {stack.measured_on} on "
        f"which stack {stack.name} was measured; set speed=Spread(0) (--spread 0) for equal devices"
    )
    return experiment.with_(speed=pace), (note,)


def _without_effect(experiment: Experiment, workload: Workload) -> Iterator[str]:
    """Note a stack on devices that it was not fitted on, and settings of kernels that do not affect any time."""
    model, stack, device = workload.model, workload.stack, workload.device
    fitted = stack.fitted_devices
    roofline = isinstance(experiment.compute, Roofline)
    kernels = workload.by_kernel and not workload.known and not roofline
    fixed = workload.host_time or stack.call_time
    depends = fixed or (not workload.known and (workload.by_kernel or workload.launch_time))
    if experiment.stack is not None and not depends:
        yield f"stack has no effect on the simulated times: {workload.basis}"
    elif experiment.stack is not None and not workload.by_kernel and not workload.summed and not workload.known:
        yield f"of the stack, launches and fixed times count, not the rates of kernels or the memory: {workload.basis}"
    if kernels and device and fitted is not None and not of_same_chip(device, fitted):
        origin = f"fitted only on {', '.join(fitted)}" if fitted else "not fitted on any device"
        yield f"stack {stack.name} was {origin}: its overheads on {device.name} are assumptions"
    if kernels and device and experiment.flash is None and stack.attention and not workload.flash:
        where = f"no fused kernel of stack {stack.name} is known on {device.name}"
        yield f"attention stores its matrices in memory: {where}; set flash=True to assume a fused kernel"
    if experiment.flash is not None and not any(layer.heads for layer in model.layers):
        yield f"flash has no effect: {model.name} has no attention"
    elif experiment.flash is not None and not kernels:
        yield f"flash affects only memory, not the simulated times: {workload.basis}"
    if experiment.precision in LOW_PRECISIONS and not kernels and (roofline or not workload.known):
        yield f"{experiment.precision} is simulated at the speed of bf16: {workload.basis}"


class _Same(NamedTuple):
    """An object as a key, equal to that of the same object only."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


@functools.lru_cache(maxsize=64)
def _by_kernel(model: _Same, device: _Same, batch_size: int, *, stack: _Same, **options: Any) -> Workload:
    """Return the workload of a device whose kernels are known; configurations that share it share what follows from
    it."""
    options["stack"] = stack.value
    return make_workload(model.value, device.value, batch_size, compute=PerKernel(), **options)


def _workload(experiment: Experiment, model: Model, device: Device, speed: float, batch_size: int) -> Workload:
    compute = experiment.compute
    rule = experiment.optimizer if experiment.training is None else rule_of(experiment.training.optimizer)
    options: dict[str, Any] = {"speed": speed, "optimizer": rule}
    options |= {name: getattr(experiment, name) for name in ("precision", "gradient_dtype", "stack", "flash")}
    precision = str(experiment.precision)
    if compute is None and (has_kernels(model, device, precision) or has_convolutions(model, device, precision)):
        return _by_kernel(_Same(model), _Same(device), batch_size, **options | {"stack": _Same(experiment.stack)})
    if isinstance(compute, Traced):
        return traced_workload(compute, model, device, batch_size, **options)
    return make_workload(model, device, batch_size, compute=compute, **options)


# ---------------------------------------------------------------- how samples reach the workers


def with_copies(
    experiment: Experiment, cluster: Cluster, nodes: Sequence[int], workloads: list[Workload]
) -> list[Workload]:
    """Return the workloads. If the experiment's input is `Copies`, they include the workers' waiting time when all load
    a batch at the same time.

    A measured step includes the input of a device that uses its machine alone, so only the additional wait counts.
    """
    input = experiment.input
    if not isinstance(input, Copies) or contract.of(experiment.strategy).n_replicas(len(nodes)) != len(nodes):
        return workloads
    sizes = [w.batch_size * input.sample_nbytes(w.model.input_shape) for w in workloads]
    memory, nodes = cluster.memory_nodes[list(nodes)].tolist(), list(nodes)
    machines: dict[int, list[int]] = {}
    for worker, node in enumerate(memory):
        machines.setdefault(node, []).append(worker)
    firsts = [workers[0] for workers in machines.values()]
    copies = list(zip(memory, nodes, sizes, strict=True))
    together = arrivals(cluster, copies)
    single = dict(zip(firsts, arrivals(cluster, [copies[first] for first in firsts]), strict=True))
    changed: dict[tuple[int, float, float], Workload] = {}
    result = []
    for worker, workload in enumerate(workloads):
        beside = machines[memory[worker]]
        passes = workload.forward_time, workload.backward_time
        n_samples = sum(workloads[other].batch_size for other in beside)
        arrival, nbytes = single[beside[0]], sum(sizes[other] for other in beside)
        waits = input.wait(together[worker], arrival, n_samples, nbytes, passes)
        alone = input.wait(arrival, arrival, workload.batch_size, sizes[worker], passes)
        measured = workload.known and not isinstance(experiment.compute, Roofline)
        key = id(workload), waits, alone
        if key not in changed:
            forward, stall = workload.forward.copy(), max(waits - alone, 0.0)
            wait = stall if measured else waits
            forward[0] += wait
            changed[key] = dataclasses.replace(workload, forward=forward, wait=wait, stall=stall)
        result.append(changed[key])
    return result


def input_note(workloads: Sequence[Workload]) -> Iterator[str]:
    """Note if devices wait for samples longer than each would by itself."""
    longest = max(workload.stall for workload in workloads)
    if longest > 0.0:
        yield (
            f"input: devices wait up to {longest * 1e3:.3g} ms per step for samples while other devices of their "
            "machine receive theirs; this time is booked as computing"
        )


def check_source(experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
    """Raise ConfigError for an invalid input: from a missing or unreachable storage, or copies for workers that share a
    batch."""
    input = experiment.input
    if isinstance(input, Copies):
        strategy = contract.of(experiment.strategy)
        if strategy.n_replicas(len(nodes)) != len(nodes):
            raise ConfigError(
                f"input: not supported with {strategy.name}, in which workers share a batch and only some of "
                "them read samples; leave input out"
            )
        return
    if input is None or input.storage is None:
        return
    node = storage_node(input.storage, cluster, "input: storage")
    cluster.check_connected([node, *dict.fromkeys(cluster.memory_nodes[list(nodes)].tolist())])


def storage_node(name: str, cluster: Cluster, where: str) -> int:
    """Return the node of the storage `name`. Raises ConfigError, prefixed with `where`, if there is no such storage."""
    if name not in cluster.node_names:
        if not cluster.storages.size:
            raise ConfigError(
                f"{where} = {name!r}: cluster {cluster.name!r} has no storage; add [[storage]] to its file, "
                f"or use ddlsim.cluster.with_storage(cluster, {name!r}, read='2 GB/s')"
            )
        names = [cluster.node_names[storage] for storage in cluster.storages.tolist()]
        raise unknown_name("storage", name, names, f"{where}: cluster {cluster.name!r}")
    node = cluster.node(name)
    if cluster.node_kind[node] not in ("storage", "host"):
        kind = cluster.node_kind[node]
        raise ConfigError(f"{where} = {name!r}: must be a storage node or a host, but its kind is {kind}")
    return node


# ---------------------------------------------------------------- compute times measured on a calibrated cluster


def measured_steps(experiment: Experiment, cluster: Cluster, model: str) -> tuple[ComputeTable | None, str]:
    """Return the calibrated step times for this experiment's `model` on `cluster`, or the reason why there are none.

    They require equal devices in fp32, and apply to one batch size only if a single one was measured. Experiments that
    set their compute time or device do not use them. The reason is "" if nothing was measured.
    """
    table = cluster.calibration
    measured = next((fit for fit in table.compute if fit.model == model), None) if table is not None else None
    if measured is None or experiment.compute is not None or experiment.device is not None:
        return None, ""
    if experiment.precision not in (None, "fp32"):
        return None, f"the measured step times of {model} are not used: they are for fp32, not {experiment.precision}"
    if len({cluster.device_of[node] for node in cluster.workers.tolist()}) > 1:
        return None, f"the measured step times of {model} are not used: their device is unknown"
    if len(measured.batch_sizes) == 1 and measured.batch_sizes[0] != experiment.batch(1):
        return (
            None,
            f"the measured step times of {model} are not used: they are for batch size {measured.batch_sizes[0]} only",
        )
    return measured, ""


def outside(experiment: Experiment, cluster: Cluster, model: str, n_workers: int) -> tuple[Beyond, Beyond]:
    """Return how far a run extrapolates from the calibration of `cluster`: its links, and its compute time."""
    table = cluster.calibration
    links = compute = Beyond()
    if table is None:
        return links, compute
    if n_workers > 1 and any("." in parameter.name for parameter in table.parameters):
        links = beyond(n_workers, [*table.ranks, *(n for curve in table.curves for n in curve.ranks)], "workers")
        if not any(curve.operation in KINDS for curve in table.curves):
            links += Beyond(0.0, ("extrapolated: only messages were measured, no collectives",), PER_MESSAGE)
    measured, _ = measured_steps(experiment, cluster, model)
    if measured is not None:
        compute = beyond(experiment.batch(n_workers), measured.batch_sizes, f"samples of {model}")
    return links, compute


def family(experiment: Experiment, cluster: Cluster, model: str, n_workers: int, fitted_stack: bool = False) -> Beyond:
    """Return the prediction errors of measured runs similar to this one; none for a single worker.

    fitted_stack  whether the compute time comes from a stack that was fitted to measured runs
    """
    measured = measured_steps(experiment, cluster, model)[0] is not None
    is_timed = experiment.compute is not None or measured or fitted_stack
    if n_workers == 1 and is_timed:
        return Beyond()
    names = [name for name, of_class in STRATEGY_CLASSES.items() if of_class == type(experiment.strategy).__name__]
    name = names[0] if names else experiment.strategy.label
    return deviation(f"run/{name}" if is_timed else "run/unmeasured compute time")


def as_measured(experiment: Experiment, cluster: Cluster, model: str) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment with the compute time that was measured on `cluster`, if any, and notes for the reader."""
    measured, reason = measured_steps(experiment, cluster, model)
    notes = [reason] if reason else []
    table = cluster.calibration
    if table is not None and table.jitter is not None and isinstance(experiment.jitter, NoJitter):
        notes.append(
            f"the calibration contains step-time jitter ({table.jitter.type}, {table.jitter.shape:.3g}), but this run "
            "has no jitter; set jitter, or use ddlsim.predict_interval"
        )
    if measured is None:
        return experiment, tuple(notes)
    sizes = measured.batch_sizes
    notes.append(f"compute time of {model}: measured on this cluster, for batch sizes {min(sizes)} to {max(sizes)}")
    if len(sizes) == 1:
        step: Affine | Measured = Measured(measured.c0 + measured.c1 * sizes[0], sizes[0])
    else:
        step = Affine(measured.c0, measured.c1)
    return dataclasses.replace(experiment, compute=step), tuple(notes)
