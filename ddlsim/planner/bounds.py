"""What no simulation of a configuration can beat, worked out without simulating it.

**Computing.** Every sample that counts has passed forward and backward on some worker. In a window of K synchronous
steps worker i makes K of them, so the throughput is at most that of the workers without any communication. Workers that
go their own ways may have begun a step before the window: at most one each, so K/(K-1) as much. (Nothing is said where
compute times vary.)

**Steps.** Let equal workers take synchronous steps, A being the last that ends step s, at time T. Step s+1 ends for
all of them no sooner than A has made it: forward and backward passes, encoding, decoding, the update. Moreover nobody
has the mean of a bucket before A, at T + f + b_k, has its part of it; what is ready from then on has yet to leave A's
machine, at least once whatever the algorithm (with servers, as far as they are on other machines), and the update comes
after it. So a step takes at least f + b_k + S_k/B + u, for the bytes S_k of bucket k and all later ones.

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
from ddlsim.compression.choice import compression_of
from ddlsim.compression.cost import decode_traffic, encode_traffic
from ddlsim.planner.candidates import Candidate, is_synchronous
from ddlsim.planner.target import Figures
from ddlsim.run.costs import host_price
from ddlsim.run.simulate import prepare
from ddlsim.runtime.codec import rounded
from ddlsim.runtime.fabric import name_of
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies import AllReduce, LocalSGD, ParameterServer
from ddlsim.strategies.overlap import DdpBuckets, NoOverlap, PerLayer, buckets_of, overlap_named
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
    limit     what sets the bound: "computing alone", "what computing cannot hide" or "bytes that must travel"
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
    n_samples = float(candidate.workers * experiment.batch_size * experiment.accumulation)

    def at_most(seconds: float) -> float:
        return n_samples / seconds if seconds > 0.0 else np.inf

    limits = {
        "computing alone": _computing(candidate, prepared.workloads),
        "what computing cannot hide": at_most(_step_time(candidate, prepared.nodes, prepared.workloads)),
        "bytes that must travel": at_most(_bytes_time(candidate, prepared.nodes, prepared.workloads[0])),
    }
    limit = min(limits, key=lambda name: limits[name])
    throughput = (1.0 + ROUNDING) * limits[limit]
    alone = sum(_alone(candidate, workload) for workload in prepared.workloads)
    rate = price_rate(candidate) if priced else float(candidate.workers)
    total = None if samples is None else samples / throughput
    figures = Figures(throughput, throughput / alone, rate * (1.0 - ROUNDING), total)
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


def _step_time(candidate: Candidate, nodes: list[int], workloads: list[Workload]) -> float:
    """Seconds that a synchronous step takes at least, of equal workers; 0 where nothing is known."""
    experiment, workload = candidate.experiment, workloads[0]
    strategy = experiment.strategy
    vary = not isinstance(experiment.jitter, NoJitter) or experiment.slow_downs
    if vary or any(other is not workload for other in workloads):
        return 0.0
    passes = experiment.accumulation * (workload.forward_time + workload.backward_time)
    if isinstance(strategy, LocalSGD):
        return passes + workload.optimizer
    overlap = overlap_named(strategy.overlap) if isinstance(strategy, AllReduce | ParameterServer) else None
    if not isinstance(overlap, NoOverlap | PerLayer | DdpBuckets):
        return 0.0
    rate = _leaving(candidate, nodes)
    until = np.cumsum(workload.backward[::-1])[::-1]  # s of the backward pass until a layer is done
    exposed, left = passes, workload.gradient_nbytes
    for bucket in buckets_of(overlap, workload):
        ready = passes - workload.backward_time + float(until[bucket.ready_layer])
        exposed = max(exposed, ready + left * rate)
        left -= bucket.nbytes
    return exposed + _packing(candidate, nodes, workload) + workload.optimizer


def _leaving(candidate: Candidate, nodes: list[int]) -> float:
    """Seconds that a byte of every worker's gradient needs at least to leave its machine; 0: it may stay there."""
    cluster, strategy = candidate.cluster, candidate.experiment.strategy
    host = cluster.host_of[nodes]
    hosts = np.unique(host)
    if not _travels_as_it_is(candidate) or hosts.min() < 0:
        return 0.0
    share = float(len(hosts) > 1)
    if isinstance(strategy, ParameterServer):
        places = cluster.host_of[server_nodes(cluster, nodes, strategy.servers, strategy.placement)]
        share = min(float(np.mean(places != each)) for each in hosts.tolist())
    rates = machine_rates(cluster, hosts)[0]
    return share / float(rates.max()) if share > 0.0 else 0.0


def _packing(candidate: Candidate, nodes: list[int], workload: Workload) -> float:
    """Seconds that a worker needs at least to encode its gradient and decode the mean, by their memory traffic."""
    choice, strategy = compression_of(candidate.experiment.compression), candidate.experiment.strategy
    if choice is None or choice.cost is not None:
        return 0.0
    n, traits = rounded(workload.gradient_nbytes), choice.compressor.traits
    if isinstance(strategy, ParameterServer):
        return encode_traffic(traits, n, 0.0) / workload.memory_bandwidth
    if isinstance(strategy, AllReduce) and name_of(strategy.algorithm).startswith("hierarchical"):
        n //= int(np.unique(candidate.cluster.host_of[nodes], return_counts=True)[1].max())  # a share of a machine's
    return (encode_traffic(traits, n, 0.0) + decode_traffic(traits, n, 0.0)) / workload.memory_bandwidth


def _travels_as_it_is(candidate: Candidate) -> bool:
    """Whether gradients go uncompressed, at the rate of the links and no other."""
    experiment = candidate.experiment
    simulated = getattr(experiment.strategy, "cost", "simulated") == "simulated"
    return experiment.compression is None and candidate.cluster.details is None and simulated


def _bytes_time(candidate: Candidate, nodes: list[int], workload: Workload) -> float:
    """Seconds per step that the bytes of the exchange need at least on the links of the machines."""
    cluster, strategy = candidate.cluster, candidate.experiment.strategy
    if not _travels_as_it_is(candidate):
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
