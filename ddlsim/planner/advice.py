"""Rules of thumb for the recommended configuration, each compared with the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.plan.bounds import interfaces
from ddlsim.planner import guidelines
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.evaluate import Evaluator, number_of
from ddlsim.planner.recommendation import Guideline
from ddlsim.readable import count, percent, seconds, size, spread
from ddlsim.run.collective import collective_time
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import DEFAULT_DEVICE, prepare
from ddlsim.runtime.fabric import AllReduceAlgorithm
from ddlsim.strategies import AllReduce, LocalSGD, NoOverlap, ParameterServer, contract
from ddlsim.workload.compute import Workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import Layer

#: bandwidth factor and number of local steps in the rules about them
FASTER, LOCAL_STEPS = 4.0, 8
NOT_AVAILABLE = "n/a"
ONE_MACHINE = f"{NOT_AVAILABLE}: one machine"


@dataclass(frozen=True)
class _Case:
    """Inputs of the rules: a configuration on m machines with links of `bandwidth` bytes/s each (None: one machine).

    compute   forward and backward passes of a step on one worker, in s
    update    updating the parameters, in s
    """

    candidate: Candidate
    evaluator: Evaluator
    efficiency: float
    experiment: Experiment
    workload: Workload
    machines: int
    bandwidth: float | None
    compute: float
    update: float

    @property
    def algorithm(self) -> AllReduceAlgorithm:
        """The configuration's all-reduce algorithm, or a ring."""
        return contract.of(self.candidate.experiment.strategy).collectives().algorithms.get("algorithm", "ring")

    @cached_property
    def plain(self) -> Experiment:
        """The configuration with an all-reduce of uncompressed gradients, after the backward pass."""
        return self.candidate.experiment.with_(
            strategy=AllReduce(self.algorithm, NoOverlap()), compression=None, warmup=1, steps=2
        )

    @property
    def busy(self) -> float:
        """Time of a step without communication, in s."""
        return self.compute + self.update

    def simulated(self, run: Experiment, name: str = "step_time") -> tuple[float | None, str]:
        """Run a simulation; return a value of its record (None if it failed) and the error message."""
        outcome = self.evaluator.outcomes([run])[0]
        return number_of(outcome, name), f"{NOT_AVAILABLE}: {outcome.error}"


def advice(candidate: Candidate, efficiency: float, evaluator: Evaluator) -> tuple[Guideline, ...]:
    """Return the rules for a configuration. `efficiency` is the target of the rule on the number of GPUs."""
    experiment = candidate.experiment
    if contract.of(experiment.strategy).shares_batch:  # the rules assume that each worker has the whole model
        return ()
    prepared = prepare(experiment)
    workload = prepared.workloads[0]
    hosts = np.unique(candidate.cluster.host_of[prepared.nodes])
    several = len(hosts) > 1 and int(hosts.min()) >= 0
    machines = interfaces(candidate.cluster)[1]
    bandwidth = float(min(machines.out.rate[hosts].min(), machines.into.rate[hosts].min())) if several else None
    passes = experiment.accumulation * (workload.forward_time + workload.backward_time)
    case = _Case(
        candidate, evaluator, efficiency, prepared.experiment, workload, len(hosts), bandwidth, passes,
        workload.optimizer,
    )  # fmt: skip
    rules = _RULES if candidate.workers > 1 else _RULES[:1]
    return tuple(Guideline(name, source, *rule(case)) for name, source, rule in rules)


def _memory(case: _Case) -> tuple[str, str]:
    cluster = case.candidate.cluster
    device = load_device(case.experiment.device or cluster.device_of[cluster.workers[0]] or DEFAULT_DEVICE)
    most = guidelines.largest_batch(case.workload.model, device, case.workload.precision, case.candidate.workers)
    says = f"up to {most:,} samples on {device.name} ({size(device.memory_nbytes)}); {case.experiment.batch_size} here"
    return says, f"{NOT_AVAILABLE}: memory is not simulated"


def _gpus(case: _Case) -> tuple[str, str]:
    """T_C is the time of the global batch on one GPU, T_O that of the update and of sending an all-reduce's bytes."""
    if case.bandwidth is None:
        return f"{NOT_AVAILABLE}: one machine, no network to pay for", NOT_AVAILABLE
    n, efficiency = case.candidate.workers, case.efficiency
    overhead = case.update + guidelines.byteps_time(case.workload.gradient_nbytes, case.machines, 0, case.bandwidth)
    ratio = overhead / (n * case.compute)
    most = guidelines.largest_n_gpus(ratio, efficiency)
    says = (
        f"exchange and update take {spread(ratio)} of the time that one GPU computes for the global batch: efficiency "
        f"{percent(guidelines.scaling_efficiency(ratio, n))} with {n}, {percent(efficiency)} with up to {most:,.0f}"
    )
    step, missing = case.simulated(case.plain)
    if step is None:
        return says, missing
    return says, f"{percent((n * case.compute + overhead) / (n * step))} (all-reduce without overlap)"


def _servers(case: _Case) -> tuple[str, str]:
    if case.bandwidth is None:
        return ONE_MACHINE, NOT_AVAILABLE
    nbytes, n = case.workload.gradient_nbytes, case.candidate.workers
    half, full = (
        guidelines.n_parameter_servers(nbytes, n, case.bandwidth, case.compute, full_duplex=duplex)
        for duplex in (False, True)
    )
    says = f"with {half}, push and pull take no longer than the computing, {seconds(case.compute)}"
    says += f" (with {full} on full-duplex links)" if full != half else ""
    for where in ("own", "colocated"):
        step, missing = case.simulated(case.plain.with_(strategy=ParameterServer(half, where, overlap="none")))
        if step is not None:
            return says, f"with {half} ({where}), push and pull take {seconds(step - case.compute - case.update)}"
    return says, missing


def _medium(case: _Case) -> tuple[str, str]:
    """Effect of faster links between machines on the time of the weights' traffic."""
    step, _ = case.simulated(case.plain)
    if step is None or case.bandwidth is None:
        return NOT_AVAILABLE, NOT_AVAILABLE
    share = guidelines.traffic_share(max(step - case.compute - case.update, 0.0), case.busy)
    gain = guidelines.medium_speedup(share, 1.0, FASTER)
    says = f"transfers take {percent(share)} of the step: {FASTER:g} x bandwidth gives {gain:.3g} x throughput"
    kinds = _kinds_between(case)
    cluster = case.candidate.cluster
    for kind in kinds:
        cluster = cluster.scaled(kind, bandwidth=FASTER)
    now, missing = case.simulated(case.plain.with_(cluster=cluster))
    return says, missing if now is None else f"{step / now:.3g} x with faster {', '.join(kinds)} links"


def _kinds_between(case: _Case) -> list[str]:
    """Return the kinds of links that occur only between machines."""
    cluster = case.candidate.cluster
    source, target = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    outside = (source != target) | (source < 0)
    kinds = np.array(cluster.link_kind)
    return sorted(set(kinds[outside].tolist()) - set(kinds[~outside].tolist()))


def _helpers(case: _Case) -> tuple[str, str]:
    if case.bandwidth is None:
        return ONE_MACHINE, NOT_AVAILABLE
    nbytes, m = case.workload.gradient_nbytes, case.machines
    times = [guidelines.byteps_time(nbytes, m, k, case.bandwidth) for k in (0, m // 2, m)]
    says = f"an exchange takes {seconds(times[0])} without helpers, {seconds(times[1])} with {m // 2}, "
    says += f"{seconds(times[2])} with {m}"
    step, missing = case.simulated(case.plain)
    if step is None:
        return says, missing
    helped = ParameterServer(m, "own", overlap="none", local_reduction=True)  # k = m: one server per helper
    now, _ = case.simulated(case.plain.with_(strategy=helped))
    others = f"{NOT_AVAILABLE} with helpers: the cluster has too few other machines"
    if now is not None:
        others = f"{seconds(now - case.busy)} with {count(m, 'server')} on other machines"
    return says, f"{seconds(step - case.busy)} without helpers, {others}"


def _local(case: _Case) -> tuple[str, str]:
    step, missing = case.simulated(case.plain)
    if step is None:
        return NOT_AVAILABLE, missing
    gain = guidelines.local_sgd_speedup(max(step - case.busy, 0.0) / case.busy, LOCAL_STEPS)
    local = LocalSGD(LOCAL_STEPS, algorithm=case.algorithm)
    now, missing = case.simulated(case.plain.with_(strategy=local, warmup=LOCAL_STEPS, steps=LOCAL_STEPS))
    return f"{gain:.3g} x throughput", missing if now is None else f"{step / now:.3g} x throughput"


def _balance(case: _Case) -> tuple[str, str]:
    """FLOPs per gradient byte of the model, compared with the machine's FLOPs per byte."""
    workload = case.workload
    flops = 3.0 * workload.model.flops * workload.batch_size * case.candidate.experiment.accumulation
    ratio = flops / workload.gradient_nbytes
    if case.bandwidth is None:
        return f"{ratio:,.0f} FLOPs per byte of gradient", ONE_MACHINE
    # a ring moves 2 (m-1)/m bytes per byte of gradient in each direction, once for all devices of a machine
    needed = 2.0 * (case.machines - 1) / case.machines * flops / case.compute / case.bandwidth
    verdict = "can hide all communication" if ratio >= needed else "cannot hide all communication"
    says = f"{ratio:,.0f} FLOPs per byte of gradient against {needed:,.0f} at balance: computation {verdict}"
    share, missing = case.simulated(case.candidate.experiment, "communication_share")
    return says, missing if share is None else f"exposed communication takes {percent(share)} of the time"


def _partition(case: _Case) -> tuple[str, str]:
    """Data, model or hybrid parallelism for the layer with the most weights."""
    layers = [layer for layer in case.workload.model.layers if layer.type in ("conv", "dense")]
    if not layers:
        return f"{NOT_AVAILABLE}: no dense or convolutional layer", NOT_AVAILABLE
    n, batch = case.candidate.workers, case.candidate.batch_size * case.candidate.workers
    layer = max(layers, key=lambda one: one.n_params)
    groups = guidelines.hybrid_groups(layer.n_params, _inputs(layer), batch, n)
    fewer = sum(
        guidelines.model_parallel_nbytes(_inputs(one), batch)
        < guidelines.data_parallel_nbytes(one.n_params, overlap=False)
        for one in layers
    )
    best = f"{groups:.3g} groups of {n / groups:.3g} workers"
    if groups in (1.0, n):
        best = f"{'data' if groups == n else 'model'} parallelism"
    says = (
        f"{fewer} of {count(len(layers), 'layer')} {'moves' if fewer == 1 else 'move'} fewer bytes with model than "
        f"with data parallelism; the largest ({layer.name}) moves the fewest with {best}"
    )
    return says, _exchanges(case, layer, batch)


#: name, source and function of each rule; only the first one applies to single workers, too
_RULES: tuple[tuple[str, str, Callable[[_Case], tuple[str, str]]], ...] = (
    ("mini-batch and memory", "Zou et al. 2017", _memory),
    ("number of GPUs", "Zou et al. 2017", _gpus),
    ("number of parameter servers", "Zou et al. 2017", _servers),
    ("faster network", "Wang et al. 2019 (PAI)", _medium),
    ("machines with CPUs as helpers", "Jiang et al. 2020 (BytePS)", _helpers),
    (f"averaging every {LOCAL_STEPS} steps", "Wang and Joshi 2019", _local),
    ("computation against communication", "Das et al. 2016", _balance),
    ("data, model or hybrid parallelism", "Das et al. 2016", _partition),
)


def _exchanges(case: _Case, layer: Layer, batch_size: int) -> str:
    """Describe the time of a layer's ring exchanges: its gradients, or its inputs and their gradients."""
    weights = guidelines.data_parallel_nbytes(layer.n_params)
    inputs = guidelines.model_parallel_nbytes(_inputs(layer), batch_size) / 2.0

    def ring(kind: str, nbytes: float) -> float:
        return collective_time(
            case.candidate.cluster, "ring", nbytes, kind=kind, ranks=case.candidate.workers, rank_order="topology"
        )

    copied, shared = ring("all_reduce", weights), ring("all_gather", inputs) + ring("reduce_scatter", inputs)
    return f"its exchange takes {seconds(copied)} with data parallelism, {seconds(shared)} with model parallelism"


def _inputs(layer: Layer) -> float:
    return float(np.prod(layer.in_shape))
