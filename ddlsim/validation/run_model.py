"""Simulation of a measured run: its experiment, its placement, and a few adjustable factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import current_parameters, with_parameters
from ddlsim.cluster.groups import workers_by_machine
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import strategy_of
from ddlsim.run.prepare import prepare
from ddlsim.run.simulate import complete
from ddlsim.strategies import Strategy, contract
from ddlsim.validation.calibration import Calibration
from ddlsim.validation.run_table import MeasuredRun
from ddlsim.workload.compute import Affine
from ddlsim.workload.jitter import Lognormal, NoJitter
from ddlsim.workload.model import Model, load_model

#: key of compute times: model, precision
ComputeKey = tuple[str, str]
STEPS, WARMUP = 4, 1
JITTER_STEPS = 40


@dataclass(frozen=True)
class Fitted:
    """Results of a fit: parameters of links (s, bytes/s), step times, and factors of the compute time."""

    links: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[ComputeKey, Affine] = field(default_factory=dict)
    factors: Mapping[ComputeKey, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RunModel:
    """A measured run, its experiment (on its part of the cluster), and the classes of links that it uses.

    excess  why the run does not fit in memory, according to the simulation; empty if it fits
    """

    measured: MeasuredRun
    experiment: Experiment
    cluster: Cluster
    key: ComputeKey
    link_classes: tuple[str, ...]
    excess: str = ""

    @property
    def label(self) -> str:
        """Name of the run in tables and plots."""
        return f"{self.key[0]}, {self.measured.workers} x {self.measured.batch_size}, {self.experiment.strategy.label}"

    def step_time(
        self, fitted: Fitted, *, compute: float = 1.0, latency: float = 1.0, bandwidth: float = 1.0,
        jitter: float | None = None,
    ) -> float:  # fmt: skip
        """Return the simulated time in s for the samples of a measured step.

        compute, latency, bandwidth   factors of the compute time, of latencies and overheads, of the links' bandwidths
        jitter                        coefficient of variation of the compute time, instead of the experiment's
        """
        current = current_parameters(self.cluster)  # a part of the cluster may lack a class of links
        links = {name: value for name, value in fitted.links.items() if name in current}
        cluster = with_parameters(self.cluster, links)
        if latency != 1.0 or bandwidth != 1.0:
            cluster = dataclasses.replace(
                cluster,
                link_latency=latency * cluster.link_latency,
                send_overhead=latency * cluster.send_overhead,
                recv_overhead=latency * cluster.recv_overhead,
                link_bandwidth=bandwidth * cluster.link_bandwidth,
            )
        changes: dict[str, object] = {"cluster": cluster}
        if self.key in fitted.compute:
            changes["compute"] = fitted.compute[self.key]
        factor = compute * fitted.factors.get(self.key, 1.0)
        if factor != 1.0:
            changes["speed"] = tuple(speed / factor for speed in self.experiment.speeds(self.measured.workers))
        if jitter is not None:
            changes["jitter"] = Lognormal(jitter) if jitter else NoJitter()
        if not isinstance(changes.get("jitter", self.experiment.jitter), NoJitter):
            _, changes["steps"] = contract.of(self.experiment.strategy).whole_cycles(0, JITTER_STEPS)
        try:
            result = complete(self.experiment.with_(**changes))
        except DdlsimError as error:  # such as an algorithm that does not support this number of ranks
            raise type(error)(f"{self.measured.place}: {error}") from None
        return self.measured.samples / result.throughput

    @property
    def parameters(self) -> dict[str, float]:
        """Parameters of the links before any fit, for the classes that the run uses."""
        current = current_parameters(self.cluster)
        names = [f"{c}.{quantity}" for c in self.link_classes for quantity in ("latency", "bandwidth")]
        return {name: current[name] for name in names if name in current and math.isfinite(current[name])}


def make_run_model(
    measured: MeasuredRun, cluster: Cluster, model: Model | None, base: Experiment, calibration: Calibration | None
) -> RunModel:
    """Return the simulation of a measured run, with the settings of `base` that the run does not give.

    Raises ConfigError with the run's place for invalid names, workers or nodes.
    """
    try:
        loaded = load_model(measured.model) if measured.model else model
        if loaded is None:
            raise ConfigError("column model is missing; add it, or set model=")
        placed, nodes = _placed(load_cluster(measured.cluster) if measured.cluster else cluster, measured)
        fit, precision = None, measured.precision or base.precision
        # step times are measured in fp32
        if calibration is not None and precision in (None, "fp32") and base.compute is None and base.device is None:
            fit = calibration.compute_of(loaded.name)
        measured_jitter = None if calibration is None else calibration.jitter
        factor = 1.0 if measured_jitter is None else 1.0 / measured_jitter.median_factor
        rule = strategy_in(measured, base.strategy)
        if contract.of(rule).shares_batch != measured.shared_batch:
            raise ConfigError(
                f"shared_batch = {measured.shared_batch}: the batch_size of {contract.of(rule).name} is "
                f"{'that of each worker' if measured.shared_batch else 'the total of all workers'}; correct one of them"
            )
        warmup, steps = contract.of(rule).whole_cycles(WARMUP, STEPS)
        experiment = base.with_(
            cluster=placed,
            model=loaded,
            strategy=rule,
            batch_size=measured.batch_size,
            workers=measured.workers,
            steps=steps,
            warmup=warmup,
            accumulation=measured.accumulation,
            precision=precision if fit is None else "fp32",
            gradient_dtype=measured.gradient_dtype or base.gradient_dtype,
            compute=base.compute if fit is None else fit.times(factor),
            jitter=base.jitter if measured_jitter is None else measured_jitter.jitter,
        )
        prepared = prepare(experiment)
        experiment = experiment.with_(precision=prepared.experiment.precision, speed=prepared.experiment.speed)
    except DdlsimError as error:
        raise type(error)(f"{measured.place}: {error}") from None
    hosts = set(placed.host_of[nodes].tolist())
    classes = [("between", len(hosts) > 1), ("inside", len(hosts) < len(nodes))]
    used = tuple(name for name, there in classes if there)
    key, excess = (loaded.name, str(experiment.precision)), "; ".join(prepared.warnings)
    return RunModel(measured, experiment, placed, key, used, excess)


def strategy_in(measured: MeasuredRun, default: Strategy) -> Strategy:
    """Return the strategy in the run's columns; empty ones take the default's values."""
    cells = {name: getattr(measured, name) for name in ("algorithm", "overlap", "cost")}
    options = {name: value for name, value in cells.items() if value is not None}
    base = default
    if measured.strategy is not None:
        try:
            named = strategy_of(measured.strategy, measured.strategy)
        except ConfigError as error:
            raise ConfigError(f"column strategy: {error}") from None
        base = default if type(named) is type(default) and named == type(named)() else named
    names: set[str] = {f.name for f in dataclasses.fields(base)} if dataclasses.is_dataclass(base) else set()
    for name in options:
        if name not in names:
            raise ConfigError(f"column {name}: {type(base).__name__} has no setting of this name; leave the cell empty")
    return dataclasses.replace(base, **options) if dataclasses.is_dataclass(base) else base


def _placed(cluster: Cluster, measured: MeasuredRun) -> tuple[Cluster, list[int]]:
    """Return the cluster with the run's workers first, and these workers' nodes."""
    available = cluster.workers.tolist()
    if measured.workers > len(available):
        raise ConfigError(
            f"column workers: the run used {measured.workers} workers, but cluster {cluster.name!r} has only "
            f"{len(available)} devices"
        )
    first = available[: measured.workers]
    if measured.nodes is None or len(set(cluster.host_of[first].tolist())) == measured.nodes:
        return cluster, first
    per_host = -(-measured.workers // measured.nodes)
    wide = [nodes for nodes in workers_by_machine(cluster) if len(nodes) >= per_host][: measured.nodes]
    if len(wide) < measured.nodes:
        raise ConfigError(
            f"column nodes: {measured.workers} workers on {measured.nodes} nodes require {per_host} "
            f"workers per node, but cluster {cluster.name!r} has only {len(wide)} nodes with that many devices"
        )
    chosen = [node for nodes in wide for node in nodes[:per_host]][: measured.workers]
    graph = cluster.to_graph()
    graph.remove_nodes_from([cluster.node_names[node] for node in set(available) - set(chosen)])
    smaller = dataclasses.replace(Cluster.from_graph(graph, cluster.name), calibration=cluster.calibration)
    return smaller, np.asarray(smaller.workers).tolist()
