"""`simulate`: from an experiment to a result."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.network import Network
from ddlsim.run.experiment import Experiment
from ddlsim.run.result import Result
from ddlsim.strategies.loop import Loop
from ddlsim.strategies.recorder import Recorder
from ddlsim.strategies.setting import Setting
from ddlsim.strategies.worker import StopRule, Worker, factors
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.devices import Device, load_device
from ddlsim.workload.memory import check_memory
from ddlsim.workload.model import Model, load_model

__all__ = ["prepare", "run"]

DEFAULT_DEVICE = "desktop-cpu"


@dataclass(frozen=True)
class Prepared:
    """An experiment with its parts loaded: one workload and node per worker."""

    experiment: Experiment
    cluster: Cluster
    model: Model
    nodes: list[int]
    workloads: list[Workload]
    warnings: tuple[str, ...]


def prepare(experiment: Experiment) -> Prepared:
    """Load the cluster and the model, place the workers and work out their compute times.

    Raises ConfigError with the field and the remedy if the parts do not fit.
    """
    cluster = load_cluster(experiment.cluster)
    model = load_model(experiment.model)
    n_workers = experiment.workers if experiment.workers is not None else len(cluster.workers)
    if n_workers > len(cluster.workers):
        raise ConfigError(
            f"workers = {n_workers}: cluster {cluster.name!r} has {len(cluster.workers)} devices; "
            f"use at most {len(cluster.workers)}"
        )
    if n_workers < 1:
        raise ConfigError(f"cluster {cluster.name!r} has no device to place a worker on")
    nodes = cluster.workers[:n_workers].tolist()
    if n_workers > 1:
        cluster.check_connected(nodes)
    for slow in experiment.slow_downs:
        if max(slow.ranks) >= n_workers:
            raise ConfigError(f"slow_downs: rank {max(slow.ranks)} of {slow} is not among the {n_workers} workers")
    workloads = _workloads(experiment, cluster, model, nodes)
    texts = [text for w, d in {id(w): (w, d) for w, d in workloads}.values() if (text := check_memory(w, d))]
    return Prepared(experiment, cluster, model, nodes, [w for w, _ in workloads], tuple(dict.fromkeys(texts)))


def _workloads(
    experiment: Experiment, cluster: Cluster, model: Model, nodes: list[int]
) -> list[tuple[Workload, Device]]:
    """Return each worker's workload and device; equal ones are the same object."""
    speeds = experiment.speed or (1.0,) * len(nodes)
    if len(speeds) != len(nodes):
        raise ConfigError(f"speed has {len(speeds)} factors for {len(nodes)} workers; give one per worker")
    made: dict[tuple[str, float], tuple[Workload, Device]] = {}
    result = []
    for node, factor in zip(nodes, speeds, strict=True):
        device = load_device(experiment.device or cluster.device_of[node] or DEFAULT_DEVICE)
        speed = factor * float(cluster.speed[node])
        key = (device.name, speed)
        if key not in made:
            workload = make_workload(
                model, device, experiment.batch_size, compute=experiment.compute, precision=experiment.precision,
                gradient_dtype=experiment.gradient_dtype, speed=speed,
            )  # fmt: skip
            made[key] = workload, device
        result.append(made[key])
    return result


def run(experiment: Experiment, *, keep_spans: bool = False) -> Result:
    """Simulate the experiment and return its result.

    With ``keep_spans`` everything needed for a timeline is recorded. On KeyboardInterrupt the result of what
    has been simulated so far is returned, marked as interrupted.
    """
    prepared = prepare(experiment)
    started = time.perf_counter()
    network = Network(prepared.cluster, record=keep_spans)
    loop = Loop(network)
    n_workers = len(prepared.nodes)
    recorder = Recorder(n_workers, keep_spans)
    n_updates = experiment.strategy.updates(experiment.steps + experiment.warmup, n_workers)
    stop = StopRule(loop, recorder, n_updates)
    workers = [
        Worker(
            rank, node, loop, workload, recorder, stop, factors(experiment.jitter, experiment.seed, rank),
            experiment.slow_downs, experiment.accumulation,
        )
        for rank, (node, workload) in enumerate(zip(prepared.nodes, prepared.workloads, strict=True))
    ]  # fmt: skip
    setting = Setting(prepared.cluster, loop, workers, recorder, stop)
    experiment.strategy.start(setting)
    interrupted = False
    try:
        loop.run(stop.ended, experiment.max_time)
    except KeyboardInterrupt:
        interrupted = True
    recorder.close(loop.now)
    if not recorder.updates:
        if interrupted:
            raise KeyboardInterrupt
        raise DdlsimError(f"max_time = {experiment.max_time!r} s is over before the first update; allow more time")
    return Result(
        experiment=dataclasses.replace(experiment, cluster=prepared.cluster, model=prepared.model),
        cluster=prepared.cluster,
        workloads=prepared.workloads,
        nodes=np.array(prepared.nodes, dtype=np.int64),
        recorder=recorder,
        end_time=loop.now,
        channel_nbytes=network.channel_nbytes,
        channel_busy=network.channel_busy,
        busy=network.busy_intervals() if keep_spans else None,
        n_messages=network.n_messages,
        notes=tuple(setting.notes),
        warnings=prepared.warnings,
        interrupted=interrupted,
        wall_seconds=time.perf_counter() - started,
    )
