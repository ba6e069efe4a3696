"""What no simulation of a configuration can beat, worked out without simulating it, whatever its strategy is called.

**Plans.** A strategy that tells its steps as a table (docs/models/plans.md) cannot be faster than the longest chain of
that table, nor than the bytes of its exchanges cross the interfaces of devices and machines: :mod:`ddlsim.plan.window`.
The work of jitter is that of the factors that the workers will draw. Bytes count where they are sent as the table says:
uncompressed, and with collectives that are simulated. What is compressed is encoded before.

**Computing.** Of a strategy without a plan nothing is known but that every sample that counts has passed forward and
backward through the model, on one worker or several: if it is measured from its begin, it has at most the throughput of
the workers without any communication. Workers may be any number of steps ahead when a later window begins, so nothing
is said of that, nor where compute times vary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.levels import innermost
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.plan.interfaces import Interfaces, interfaces
from ddlsim.plan.plan import COLUMNS, FORWARD
from ddlsim.plan.window import Carriers, window
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.target import Figures
from ddlsim.run.costs import host_price
from ddlsim.run.outcome import alone, is_replicated
from ddlsim.run.plans import encode_seconds, least_seconds
from ddlsim.run.prepare import Placed, Prepared, place, prepare
from ddlsim.strategies import contract
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.memory import check_memory, held_nbytes
from ddlsim.workload.stage import n_copies

#: sums in another order than the simulation's differ in the last bits
ROUNDING = 1e-9


class Fit(NamedTuple):
    """Why a step does not fit the device's memory, empty if it does, and the bytes that the fullest worker needs."""

    warning: str
    held: float


@dataclass(frozen=True)
class Bound:
    """The best that a configuration can do.

    figures   throughput and efficiency that it cannot exceed, costs that it cannot stay below
    limit     what sets the bound: "computing alone", "what computing cannot hide" or "bytes that must travel"
    warning   why the step does not fit the device's memory; empty if it does
    fit       tells that later, where it takes longer than the rest
    """

    figures: Figures
    limit: str
    warning: str = ""
    fit: Callable[[], Fit] | None = None


class _Window(NamedTuple):
    """The micro-batches of the measured steps of a plan, and the s that they take at least, by chains and by bytes."""

    batches: int
    chains: float
    crossing: float


class _Prepared(NamedTuple):
    """What candidates share that differ in their compression only: the plan, if there is one, and what tells it from
    others."""

    prepared: Prepared
    plan: Plan | None
    content: bytes
    n_batches: int


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of the candidates of one search, which differ in what is varied only; what they share is worked out once.

    priced   cost rates are in USD/s, not in devices
    samples  that a training has to process, where that is known
    """

    priced: bool = False
    samples: float | None = None
    _levels: dict[int, tuple[Cluster, tuple[Interfaces, Interfaces]]] = field(default_factory=dict)
    _seconds: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    _latest: dict[Hashable, dict[int, _Prepared]] = field(default_factory=dict)
    _placed: dict[Hashable, Placed] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Bound:
        """Return the bound of a candidate. Raises ConfigError if its parts do not fit together."""
        told = self._outlook(candidate)
        if told is not None:
            return told
        experiment = candidate.experiment
        shared = self._prepared(candidate)
        prepared = shared.prepared
        limits = {"computing alone": _computing(candidate, prepared)}
        at_a_time, batches = _batches(candidate)
        replicated = is_replicated(prepared.stages, prepared.workloads)
        window = None if shared.plan is None else self._window(candidate, prepared, shared.plan, shared)
        if window is not None:
            n_samples = float(window.batches * at_a_time)
            limits["what computing cannot hide"] = n_samples / window.chains if window.chains > 0.0 else np.inf
            limits["bytes that must travel"] = n_samples / window.crossing if window.crossing > 0.0 else np.inf
            if not replicated:
                copies = n_copies(prepared.stages, prepared.workloads)
                batches = window.batches / experiment.window[1] / copies
        limit = min(limits, key=lambda name: limits[name])
        throughput = (1.0 + ROUNDING) * limits[limit]
        efficiency = np.inf
        if replicated or window is not None:
            efficiency = throughput / sum(alone(experiment, workload, batches) for workload in prepared.workloads)
        return Bound(self._figures(candidate, throughput, efficiency), limit, "; ".join(prepared.warnings))

    def _figures(self, candidate: Candidate, throughput: float, efficiency: float) -> Figures:
        rate = price_rate(candidate) if self.priced else float(candidate.workers)
        total = None if self.samples is None else self.samples / throughput
        return Figures(throughput, efficiency, rate * (1.0 - ROUNDING), total)

    def _outlook(self, candidate: Candidate) -> Bound | None:
        """Return the bound of a strategy that tells it without a plan; None of others and where chance plays a part."""
        experiment, cluster = candidate.experiment, candidate.cluster
        strategy, (warmup, steps) = contract.of(experiment.strategy), experiment.window
        varies = not isinstance(experiment.jitter, NoJitter) or bool(experiment.slow_downs or experiment.faults)
        if varies or not warmup or not strategy.defines("outlook"):
            return None
        at_a_time = strategy.samples_at_once(experiment.batch_size, candidate.workers)
        key = id(cluster), candidate.workers, at_a_time
        if key not in self._placed:
            self._placed[key] = place(experiment)
        placed = self._placed[key]
        batches = strategy.micro_batches(experiment.batch_size, candidate.workers, experiment.accumulation)
        whole = [workload for workload, _ in placed.workloads]
        outlook = strategy.outlook(whole, batches, steps, cluster, placed.nodes, whole=experiment.compression is None)
        if outlook is None:
            return None
        samples = batches * at_a_time * strategy.n_replicas(candidate.workers)
        throughput = (1.0 + ROUNDING) * samples * steps / outlook.seconds
        efficiency = throughput / (len(whole) * alone(placed.experiment, whole[0], float(batches)))
        device = placed.workloads[0][1]

        def fit() -> Fit:
            warning, held = "", 0.0
            for stage, nbytes in outlook.holds():
                warning = warning or check_memory(stage, device, candidate.workers, nbytes) or ""
                held = max(held, sum(held_nbytes(stage, candidate.workers, nbytes)))
            return Fit(warning, held)

        return Bound(self._figures(candidate, throughput, efficiency), outlook.limit, fit=fit)

    def _prepared(self, candidate: Candidate) -> _Prepared:
        """Return what candidates share; those of a strategy and a number of workers come one after the other."""
        experiment = candidate.experiment
        key = id(experiment.strategy), id(candidate.cluster), candidate.workers
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = {}
        sizes = self._latest[key]
        if candidate.batch_size not in sizes:
            prepared = prepare(experiment)
            plan = _plan(candidate, prepared)
            content, n_batches = (b"", 0) if plan is None else (_content(plan), _n_batches(plan, experiment.window[0]))
            sizes[candidate.batch_size] = _Prepared(prepared, plan if n_batches else None, content, n_batches)
        return sizes[candidate.batch_size]

    def _window(self, candidate: Candidate, prepared: Prepared, plan: Plan, shared: _Prepared) -> _Window:
        """Return what a plan says of the measured steps, worked out once for plans that are equal."""
        experiment, cluster = candidate.experiment, candidate.cluster
        strategy = contract.of(experiment.strategy)
        simulated = strategy.collectives().cost == "simulated"
        nodes = np.array(strategy.plan_nodes(cluster, prepared.nodes), dtype=np.int64)
        carriers = None
        if experiment.compression is None and simulated and len(nodes) == plan.n_ranks:
            carriers = Carriers(self._interfaces(cluster), nodes)
        encoding = encode_seconds(plan, experiment, prepared.workloads, innermost(cluster, prepared.nodes))
        seconds = least_seconds(plan, experiment, encoding, candidate.workers)
        begin, end = experiment.window[0], sum(experiment.window)
        content = hashlib.blake2b(shared.content + seconds.tobytes(), digest_size=16)
        if carriers is not None:
            content.update(nodes.tobytes() + repr(id(carriers.levels)).encode())
        key = content.digest() + repr((begin, end)).encode()
        if key not in self._seconds:
            self._seconds[key] = window(plan, begin, end, carriers, seconds)
        return _Window(shared.n_batches, *self._seconds[key])

    def _interfaces(self, cluster: Cluster) -> tuple[Interfaces, Interfaces]:
        if id(cluster) not in self._levels:
            self._levels[id(cluster)] = cluster, interfaces(cluster)
        return self._levels[id(cluster)][1]


def _content(plan: Plan) -> bytes:
    """Return what plans have in common that are equal."""
    content = hashlib.blake2b(repr((plan.lanes, plan.queues, plan.groups, plan.servers)).encode(), digest_size=16)
    for name in (*COLUMNS, "need_offsets", "needs"):
        content.update(getattr(plan, name).tobytes())
    return content.digest()


def price_rate(candidate: Candidate) -> float:
    """Return what the machines with the workers cost in USD/s. Raises ConfigError for one without price."""
    cluster, nodes = candidate.cluster, candidate.cluster.workers[: candidate.workers]
    hosts = np.unique(cluster.host_of[nodes])
    prices = [
        host_price(cluster, host, nodes[cluster.host_of[nodes] == host], candidate.experiment.device)
        for host in hosts[hosts >= 0].tolist()
    ]
    return sum(prices)


def _plan(candidate: Candidate, prepared: Prepared) -> Plan | None:
    """Return the plan of the steps that are simulated, each of which is an update; None if the strategy has none."""
    experiment = candidate.experiment
    strategy, warmup, last = contract.of(experiment.strategy), experiment.window[0], sum(experiment.window)
    if any(strategy.updates(steps, candidate.workers) != steps for steps in (warmup, last)):
        return None
    try:
        plan = strategy.plan(prepared.workloads, last, int(_batches(candidate)[1]))
    except ConfigError:  # without a step program
        return None
    return plan if plan.n_ranks - len(plan.servers) == candidate.workers else None


def _batches(candidate: Candidate) -> tuple[int, float]:
    """Return the samples that a worker computes at once, and how often it does so for an update."""
    experiment, workers = candidate.experiment, candidate.workers
    strategy, batch_size = contract.of(experiment.strategy), experiment.batch_size
    n = strategy.micro_batches(batch_size, workers, experiment.accumulation)
    return strategy.samples_at_once(batch_size, workers), float(n)


def _n_batches(plan: Plan, begin: int) -> int:
    """Return the micro-batches that go forward in the steps from `begin` on."""
    rows = np.flatnonzero((plan.kind == FORWARD) & (plan.step >= begin))
    return len(np.unique(plan.step[rows] * (int(plan.batch.max(initial=0)) + 1) + plan.batch[rows]))


def _computing(candidate: Candidate, prepared: Prepared) -> float:
    """Samples/s that the forward and backward passes allow, of workers that compute what one would alone."""
    experiment = candidate.experiment
    if contract.of(experiment.strategy).shares_batch:  # fewer weights to read, exchanges that count as work
        return np.inf
    if (
        not isinstance(experiment.jitter, NoJitter)
        or experiment.slow_downs
        or experiment.faults
        or experiment.window[0] > 0
    ):
        return np.inf
    return sum(experiment.batch_size / (w.forward_time + w.backward_time) for w in prepared.workloads)
