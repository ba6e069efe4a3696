"""What no simulation of a configuration can beat, worked out without simulating it.

**Computing.** Every sample that counts has passed forward and backward on some worker. In a window of K synchronous
steps worker i makes K of them, so the throughput is at most that of the workers without any communication. Workers that
go their own ways may have begun a step before the window: at most one each, so K/(K-1) as much. (Nothing is said where
compute times vary.)

**Bytes.** Let m machines all-reduce S bytes. For every element the sum is complete for the first time at some machine;
by then each of the m-1 others has sent a message with that element, and afterwards has to receive one: 2(m-1) S
bytes leave machines, and enter them (Patarasuk and Yuan 2009, JPDC 69, section 3, for one rank per machine). They pass
the links of the machines, so the exchange takes at least 2(m-1) S over the sum of what these carry outwards, and
inwards. Moreover each machine sends at least S, and receives S: neither side of a cut can do without the other. A
parameter server on a machine receives S/k of all workers elsewhere, and sends as much. These hold for what is sent as
it is (no compression), and where links carry no more than their bandwidth at any time (no token buckets).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.planner.candidates import Candidate, is_synchronous
from ddlsim.planner.target import Figures
from ddlsim.run.costs import host_price
from ddlsim.run.simulate import prepare
from ddlsim.strategies import AllReduce, LocalSGD, ParameterServer
from ddlsim.strategies.servers import server_nodes
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import NoJitter

__all__ = ["Bound", "bound", "machine_rates", "price_rate"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: sums in another order than the simulation's differ in the last bits
ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """The best that a configuration can do.

    figures   throughput and efficiency that it cannot exceed, costs that it cannot stay below
    limit     what sets the bound: "computing alone" or "bytes that must travel"
    warning   why the step does not fit the device's memory; empty if it does
    """

    figures: Figures
    limit: str
    warning: str


def bound(candidate: Candidate, *, priced: bool, samples: float | None) -> Bound:
    """Return the bound of a candidate; cost rates are in USD/s if `priced`, else in devices.

    Raises ConfigError if its parts do not fit together.
    """
    experiment = candidate.experiment
    prepared = prepare(experiment)
    computing = _computing(candidate, prepared.workloads)
    step = _bytes_time(candidate, prepared.nodes, prepared.workloads[0])
    n_samples = float(candidate.workers * experiment.batch_size * experiment.accumulation)
    travelling = n_samples / step if step > 0.0 else np.inf
    throughput = (1.0 + ROUNDING) * min(computing, travelling)
    alone = sum(_alone(candidate, workload) for workload in prepared.workloads)
    rate = price_rate(candidate) if priced else float(candidate.workers)
    total = None if samples is None else samples / throughput
    figures = Figures(throughput, throughput / alone, rate * (1.0 - ROUNDING), total)
    limit = "computing alone" if computing <= travelling else "bytes that must travel"
    return Bound(figures, limit, "; ".join(prepared.warnings))


def price_rate(candidate: Candidate) -> float:
    """Return what the machines with the workers cost in USD/s. Raises ConfigError for one without price."""
    cluster, nodes = candidate.cluster, candidate.cluster.workers[: candidate.workers]
    hosts = np.unique(cluster.host_of[nodes])
    prices = [
        host_price(cluster, host, nodes[cluster.host_of[nodes] == host], candidate.experiment.device)
        for host in hosts[hosts >= 0].tolist()
    ]
    return sum(prices)


def _alone(candidate: Candidate, workload: Workload) -> float:
    """Samples/s of a worker alone, the updates of its parameters included."""
    experiment = candidate.experiment
    seconds = experiment.accumulation * (workload.forward_time + workload.backward_time) + workload.optimizer
    return experiment.batch_size * experiment.accumulation / (seconds * experiment.jitter.mean)


def _computing(candidate: Candidate, workloads: list[Workload]) -> float:
    """Samples/s that the forward and backward passes allow."""
    experiment = candidate.experiment
    if not isinstance(experiment.jitter, NoJitter) or experiment.slow_downs:
        return np.inf
    rate = sum(experiment.batch_size / (w.forward_time + w.backward_time) for w in workloads)
    if is_synchronous(experiment.strategy):
        return rate
    return rate * experiment.steps / (experiment.steps - 1) if experiment.steps > 1 else np.inf


def _bytes_time(candidate: Candidate, nodes: list[int], workload: Workload) -> float:
    """Seconds per step that the bytes of the exchange need at least on the links of the machines."""
    cluster, strategy = candidate.cluster, candidate.experiment.strategy
    if candidate.experiment.compression is not None or cluster.details is not None:
        return 0.0
    nbytes = workload.gradient_nbytes
    host = cluster.host_of[nodes]
    if host.min() < 0:
        return 0.0
    if isinstance(strategy, ParameterServer):
        places = server_nodes(cluster, nodes, strategy.servers, strategy.placement)
        return _server_time(cluster, host, np.asarray(places), nbytes, bool(strategy.local_reduction))
    hosts = np.unique(host)
    if len(hosts) < 2 or not isinstance(strategy, AllReduce | LocalSGD):
        return 0.0
    period = strategy.period if isinstance(strategy, LocalSGD) else 1
    total = 2.0 * (len(hosts) - 1) * nbytes
    seconds = [max(total / rates.sum(), nbytes / rates.min()) for rates in machine_rates(cluster, hosts)]
    return float(max(seconds)) / period


def _server_time(cluster: Cluster, host: Ints, places: Ints, nbytes: float, one_push: bool) -> float:
    """Seconds that the busiest machine needs for what its servers receive, or send."""
    pushing = np.unique(host) if one_push else host
    at = cluster.host_of[places]
    servers = np.unique(at)
    moved = np.array([np.sum(at == h) * np.sum(pushing != h) * nbytes / len(places) for h in servers.tolist()])
    busy = moved > 0.0
    return max(float((moved[busy] / rates[busy]).max(initial=0.0)) for rates in machine_rates(cluster, servers))


def machine_rates(cluster: Cluster, hosts: Ints) -> tuple[Floats, Floats]:
    """Return the bytes/s that can leave each machine, and enter it, over all its links to others, shape (n_hosts,)."""
    source, target = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]

    def rates(own: Ints, other: Ints) -> Floats:
        found = []
        for host in hosts.tolist():
            channels = np.unique(cluster.link_channel[(own == host) & (other != host)])
            found.append(cluster.channel_capacity[channels].sum())
        return np.array(found)

    return rates(source, target), rates(target, source)
