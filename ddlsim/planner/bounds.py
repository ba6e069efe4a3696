"""Bounds on the figures of a configuration, computed without simulating it, for any strategy.

**Programs.** A strategy with a step program takes at least as long as its critical path, and as long as its bytes need
to cross the interfaces of devices and machines (:mod:`ddlsim.plan.bounds`). With jitter, compute times use the factors
that the simulation samples. Bytes count only if exchanges are uncompressed and their collectives simulated. Compressed
exchanges count their encoding time.

**Computing.** For a strategy without a plan, the bound is the throughput of the workers without communication, because
every counted sample has passed forward and backward through the model. It holds only if the measured window starts with
the run, as workers may be any number of steps ahead when a later window begins, and only if compute times are constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.cluster.groups import innermost
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan, StepProgram
from ddlsim.plan.bounds import Carriers
from ddlsim.plan.plan import ALL_REDUCE, FORWARD, PUSH_PULL, REDUCE_SCATTER
from ddlsim.planner.candidates import Candidate, varies
from ddlsim.planner.target import Figures
from ddlsim.run.costs import host_price
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import Placed, Prepared, memory_use, place, prepare
from ddlsim.run.result import alone, is_replicated
from ddlsim.runtime.codec import Seconds
from ddlsim.runtime.communicator import hierarchical
from ddlsim.runtime.context import factors
from ddlsim.strategies import contract
from ddlsim.workload.buckets import rounded
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.stage import for_each, n_copies

#: tolerance for rounding: the simulation adds in another order
ROUNDING = 1e-9
#: collectives of what is compressed
SUMS = (ALL_REDUCE, REDUCE_SCATTER, PUSH_PULL)


class Fit(NamedTuple):
    """Why a step exceeds the device's memory (empty if it fits), and the largest memory use of a worker, in bytes."""

    warning: str
    held: float


@dataclass(frozen=True)
class Bound:
    """Upper bound on a configuration's performance.

    figures   upper bounds on throughput and efficiency, lower bounds on costs
    limit     origin of the bound: "computing alone", "what computing cannot hide" or "bytes that must travel"
    warning   why the step exceeds the device's memory; empty if it fits
    fit       evaluates the memory later, if that takes longer than the bound
    """

    figures: Figures
    limit: str
    warning: str = ""
    fit: Callable[[], Fit] | None = None


class _Prepared(NamedTuple):
    """Data shared by candidates that differ only in compression: their step program (if any), the number of
    micro-batches in the measured steps, and by number of steps the program with all ranks written out."""

    prepared: Prepared
    program: StepProgram | None
    n_batches: int
    written_out: dict[int, StepProgram]


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of the candidates of one search. Work that several candidates share is done once.

    priced   cost rates are in USD/s instead of numbers of devices
    samples  number of samples in the complete training run; None: unknown
    """

    priced: bool = False
    samples: float | None = None
    _latest: dict[Hashable, dict[int, _Prepared]] = field(default_factory=dict)
    _placed: dict[Hashable, Placed] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Bound:
        """Return the bound of a candidate. Raises ConfigError if its parts do not fit together."""
        folded = self._folded(candidate)
        if folded is not None:
            return folded
        experiment = candidate.experiment
        shared = self._prepared(candidate)
        prepared = shared.prepared
        limits = {"computing alone": _computing(candidate, prepared)}
        at_a_time, batches = _batches(candidate)
        replicated = is_replicated(prepared.stages, prepared.workloads)
        if shared.program is not None:
            chains, crossing = _bound(candidate, shared, shared.program)
            limits |= _limits(float(shared.n_batches * at_a_time), chains, crossing)
            if not replicated:
                copies = n_copies(prepared.stages, prepared.workloads)
                batches = shared.n_batches / experiment.window[1] / copies
        together = 0.0
        if replicated or shared.program is not None:
            together = sum(alone(experiment, workload, batches, candidate.workers) for workload in prepared.workloads)
        return self._bound(candidate, limits, together, "; ".join(prepared.misfits))

    def _bound(self, candidate: Candidate, limits: dict[str, float], together: float, *memory: Any) -> Bound:
        """Return the bound with these limits (samples/s); workers without communication reach `together` (0: unknown).
        `memory` are the last fields of :class:`Bound`."""
        limit = min(limits, key=lambda name: limits[name])
        throughput = (1.0 + ROUNDING) * limits[limit]
        rate = price_rate(candidate) if self.priced else float(candidate.workers)
        total = None if self.samples is None else self.samples / throughput
        efficiency = throughput / together if together else np.inf
        return Bound(Figures(throughput, efficiency, rate * (1.0 - ROUNDING), total), limit, *memory)

    def _folded(self, candidate: Candidate) -> Bound | None:
        """Return the bound of a strategy with a folded program; None if it has none or if times are random."""
        experiment = candidate.experiment
        strategy, (warmup, steps) = contract.of(experiment.strategy), experiment.window
        if varies(experiment) or not warmup or not strategy.defines("folded_program"):
            return None
        at_a_time = strategy.samples_at_once(candidate.batch_size, candidate.workers)
        batches = strategy.micro_batches(candidate.batch_size, candidate.workers, experiment.accumulation)
        key: Hashable = (id(candidate.cluster), candidate.workers, at_a_time)
        if key in self._placed and self._placed[key].workloads[0].adds_gradients:
            key = key, 1 if strategy.accumulates_shards(candidate.workers) else batches
        if key not in self._placed:
            self._placed[key] = place(experiment)
        placed = self._placed[key]
        cluster = placed.cluster  # includes the sampled link speeds
        workloads = placed.workloads
        folded = strategy.folded_program(workloads, batches, cluster, placed.nodes)
        if folded is None:
            return None
        carriers = None
        if experiment.compression is None:
            carriers = Carriers(cluster, np.array(placed.nodes)[folded.workers], together=True)
        bound = folded.program().bound(warmup, warmup + steps, carriers)
        limits = _limits(float(batches * at_a_time * strategy.n_replicas(candidate.workers) * steps), *bound)

        def fit() -> Fit:
            fullest, warnings = memory_use(experiment, workloads, strategy.stages_of(workloads))
            return Fit(warnings[0] if warnings else "", fullest.needed)

        together = len(workloads) * alone(experiment, workloads[0], float(batches), candidate.workers)
        return self._bound(candidate, limits, together, "", fit)

    def _prepared(self, candidate: Candidate) -> _Prepared:
        """Return the shared data of candidates. Only the latest strategy, cluster and number of workers are cached."""
        experiment = candidate.experiment
        key = id(experiment.strategy), id(candidate.cluster), candidate.workers
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = {}
        sizes = self._latest[key]
        if candidate.batch_size not in sizes:
            prepared = prepare(experiment)
            program = _program(candidate, prepared)
            n_batches = 0 if program is None else _n_batches(program, experiment)
            sizes[candidate.batch_size] = _Prepared(prepared, program if n_batches else None, n_batches, {})
        return sizes[candidate.batch_size]


def _limits(samples: float, chains: float, crossing: float) -> dict[str, float]:
    """Convert lower bounds on the time of the measured steps (s) to upper bounds on the throughput (samples/s)."""
    return {
        "what computing cannot hide": samples / chains if chains > 0.0 else np.inf,
        "bytes that must travel": samples / crossing if crossing > 0.0 else np.inf,
    }


def _bound(candidate: Candidate, shared: _Prepared, program: StepProgram) -> tuple[float, float]:
    """Return lower bounds on the time of the measured steps in s, from the critical path and from the bytes."""
    experiment, prepared = candidate.experiment, shared.prepared
    cluster = prepared.cluster  # includes the sampled link speeds
    strategy, (warmup, steps) = contract.of(experiment.strategy), experiment.window
    simulated = strategy.collectives().cost == "simulated"
    nodes = np.array(strategy.plan_nodes(cluster, prepared.nodes), dtype=np.int64)
    carriers, seconds = None, None
    if experiment.compression is None and simulated and len(nodes) == program.n_ranks:
        carriers = Carriers(cluster, nodes, bool(experiment.faults))
    if varies(experiment) or experiment.compression is not None:
        if warmup + steps not in shared.written_out:
            shared.written_out[warmup + steps] = program.written_out(warmup + steps)
        program = shared.written_out[warmup + steps]
        encoding = encode_seconds(program.template, experiment, prepared.workloads, innermost(cluster, prepared.nodes))
        seconds = least_seconds(program.template, experiment, encoding, candidate.workers)
    return program.bound(warmup, warmup + steps, carriers, seconds)


def price_rate(candidate: Candidate) -> float:
    """Return the price of the machines with the workers in USD/s. Raises ConfigError if one has no price."""
    cluster, nodes = candidate.cluster, candidate.cluster.workers[: candidate.workers]
    hosts = np.unique(cluster.host_of[nodes])
    prices = [
        host_price(cluster, host, nodes[cluster.host_of[nodes] == host], candidate.experiment.device)
        for host in hosts[hosts >= 0].tolist()
    ]
    return sum(prices)


def _program(candidate: Candidate, prepared: Prepared) -> StepProgram | None:
    """Return the program of the simulated steps; None if the strategy has none, or if a step is not one update."""
    experiment = candidate.experiment
    strategy, warmup, last = contract.of(experiment.strategy), experiment.window[0], sum(experiment.window)
    if any(strategy.updates(steps, candidate.workers) != steps for steps in (warmup, last)):
        return None
    batches = int(_batches(candidate)[1])
    try:
        if strategy.defines("plan"):
            program = StepProgram.of(strategy.plan(prepared.workloads, last, batches))
        else:
            program = strategy.program(prepared.workloads, batches)
    except ConfigError:  # no step program
        return None
    return program if program.n_ranks - len(program.template.servers) == candidate.workers else None


def _batches(candidate: Candidate) -> tuple[int, float]:
    """Return the number of samples per micro-batch, and the number of micro-batches per update."""
    experiment, workers = candidate.experiment, candidate.workers
    strategy, batch_size = contract.of(experiment.strategy), candidate.batch_size
    n = strategy.micro_batches(batch_size, workers, experiment.accumulation)
    return strategy.samples_at_once(batch_size, workers), float(n)


def _n_batches(program: StepProgram, experiment: Experiment) -> int:
    """Return the number of forward micro-batches in the measured steps."""
    template, begin = program.template, experiment.window[0]
    forward, n = template.kind == FORWARD, 0
    for step in range(begin, sum(experiment.window)):
        here = forward & (template.step == min(step, template.n_steps - 1))
        n += len(np.unique(template.batch[here])) * len(program.ranks)
    return n


def _computing(candidate: Candidate, prepared: Prepared) -> float:
    """Upper bound on the throughput from forward and backward passes alone, in samples/s; inf if it may not hold."""
    experiment = candidate.experiment
    if contract.of(experiment.strategy).shares_batch:  # workers read fewer weights, and exchanges count as work
        return np.inf
    if varies(experiment) or experiment.window[0] > 0:
        return np.inf
    return sum(candidate.batch_size / (w.forward_time + w.backward_time) for w in prepared.workloads)


# ---------------------------------------------------------------- the times of a plan's tasks in a run


def encode_seconds(
    plan: Plan, experiment: Experiment, workloads: Sequence[Workload], hosts: Sequence[int] | Ints
) -> Floats:
    """Return the s of encoding that each task takes besides in a run that compresses, at least, (n,): a part that is
    summed is encoded with the last task that its sum needs of the device.

    hosts  (n_workers,) the machine of each worker, or its innermost group in the network: where gradients are
           compressed between machines only, every worker of a machine encodes its share
    """
    seconds = np.zeros(len(plan))
    choice = compression_of(experiment.compression)
    if choice is None:
        return seconds
    sums = np.flatnonzero(np.isin(plan.kind, SUMS) & (plan.part >= 0) & ~np.isin(plan.rank, plan.servers))
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    computing = plan.on_device
    last = np.full(len(plan), -1)
    of_device = computing[plan.needs]
    np.maximum.at(last, row[of_device], plan.needs[of_device])
    sums = sums[last[sums] >= 0]
    share, strategy = 1, contract.of(experiment.strategy)
    fabric = strategy.collectives().fabric
    shared = not plan.servers if fabric is None else hierarchical(fabric.algorithm)
    if shared and choice.compressor.traits.collective == "all_gather":
        share = int(np.unique(hosts, return_counts=True)[1].max())
    pieces, encode = max(len(plan.servers), 1), Seconds(choice).encode

    def encoded(workload: Workload) -> list[float]:
        return [pieces * encode(workload, rounded(part.nbytes) // (share * pieces), 0.0) for part in plan.parts]

    least = np.array(for_each(workloads, encoded))
    np.add.at(seconds, last[sums], least[plan.rank[sums], plan.part[sums]])
    return seconds


def least_seconds(plan: Plan, experiment: Experiment, besides: Floats, n_workers: int) -> Floats:
    """Return a lower bound on the seconds of each task, its work and `besides`, in a run of `n_workers`, with the
    factors that they draw, (n,).

    Of slow-downs only those count that are none. A worker draws a factor for every micro-batch; where one begins before
    another has ended, as in pipelines, that of the micro-batch counts for its passes, and for all else the least of the
    step.
    """
    seconds = math.prod(min(slow.factor, 1.0) for slow in experiment.slowdowns) * (plan.seconds + besides)
    if isinstance(experiment.jitter, NoJitter):
        return seconds
    width = int(plan.batch.max(initial=0)) + 1
    mark = np.where(plan.batch >= 0, plan.step * width + plan.batch, -1)
    by_rank = np.argsort(plan.rank, kind="stable")
    rank_rows = np.split(by_rank, np.flatnonzero(np.diff(plan.rank[by_rank])) + 1)
    steps = int(plan.step.max(initial=-1)) + 1
    per_step = max(len(np.unique(mark[rows][mark[rows] >= 0])) for rows in rank_rows) // max(steps, 1)
    for rows in rank_rows:
        rank = int(plan.rank[rows[0]])
        drawn = factors(experiment.jitter, experiment.seed, rank).take(steps * per_step)
        marks = mark[rows]
        current = marks[np.maximum.accumulate(np.where(marks >= 0, np.arange(len(rows)), 0))]
        begins = np.flatnonzero(np.diff(current, prepend=-1) != 0)
        batches = np.unique(marks[marks >= 0])
        if len(batches) == len(begins) == steps * per_step:  # one after the other
            nth = np.searchsorted(begins, np.arange(len(rows)), side="right") - 1
            seconds[rows] *= drawn[nth]
        elif len(batches) == steps * per_step:
            least = drawn.reshape(steps, per_step).min(axis=1)[plan.step[rows]]
            seconds[rows] *= np.where(marks >= 0, drawn[np.searchsorted(batches, marks)], least)
        else:
            seconds[rows] *= min(1.0, float(drawn.min(initial=1.0)))
    return seconds
