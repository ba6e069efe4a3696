"""Faults that come at random: to which parts of a run and its cluster, and when.

They are drawn up to a time, the horizon. A run that reaches it is simulated again with one that is later; what has been
drawn before stays the same, so nothing depends on where horizons are.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.life import RandomFaults
from ddlsim.life.faults import Fault, LinkFault, Stop
from ddlsim.run.experiment import Experiment
from ddlsim.run.parts import machines_of
from ddlsim.units import si
from ddlsim.workload.jitter import SlowDown

Happening = Fault | SlowDown
#: faults up to the first horizon, on average
MANY = 500
#: faults that are drawn at most
MOST = 20_000
#: number of the first draw for all jobs
OF_ALL = 1_000_000
Made = TypeVar("Made")


class BeyondError(DdlsimError):
    """A run has reached the time up to which its faults are drawn."""


def up_to_its_end(faults: Sequence[RandomFaults], cluster: Cluster, made: Callable[[float], Made]) -> Made:
    """Return what `made(horizon)` returns with the first horizon that it does not reach."""
    horizon = _first(faults, cluster)
    while True:
        try:
            return made(horizon)
        except BeyondError:
            horizon *= 4.0


def horizon_of(faults: Sequence[object], cluster: Cluster, many: int) -> float:
    """Return when about so many random faults have come, in s; inf where nothing is random."""
    random = [fault for fault in faults if isinstance(fault, RandomFaults)]
    return many / MANY * _first(random, cluster)


def random_faults_of(experiment: Experiment) -> list[RandomFaults]:
    """Return the random faults of an experiment and of the jobs beside it."""
    own = [fault for fault in experiment.faults if isinstance(fault, RandomFaults)]
    jobs = [each.experiment for each in experiment.beside if hasattr(each, "experiment")]
    return own + [fault for other in jobs for fault in random_faults_of(other)]


def drawn(
    faults: Iterable[object], cluster: Cluster, nodes: Sequence[int], seed: int, horizon: float, *,
    of_all: bool = False, life: int = 0,
) -> tuple[Happening, ...]:
    """Return what those of the `faults` that are random bring until the `horizon`, by time; worker i is at
    ``nodes[i]``. Those `of_all` jobs are others than those of one with the same seed, as are those of another `life`.

    Raises ConfigError for more than `MOST`."""
    happening: list[Happening] = []
    random = [fault for fault in faults if isinstance(fault, RandomFaults)]
    for number, each in enumerate(random, OF_ALL if of_all else 1000 * life):
        parts = parts_of(each, cluster, nodes)
        for n, (time, part) in enumerate(each.events(len(parts), seed, number)):
            if time >= horizon:
                break
            if n >= MOST:
                raise ConfigError(
                    f"faults: {each} has more than {MOST:,} faults in the first {time:.4g} of {horizon:.4g} s; shorten "
                    "the run's max_time, or increase mtbf"
                )
            happening += [_at(fault, time) for fault in parts[part]]
    return tuple(sorted(happening, key=lambda each: each.start))


def _at(fault: Happening, time: float) -> Happening:
    """Return a fault at another time; `replace` would check each of many anew."""
    other = copy.copy(fault)
    object.__setattr__(other, "start", time)
    return other


def parts_of(faults: RandomFaults, cluster: Cluster, nodes: Sequence[int]) -> list[list[Happening]]:
    """Return what a fault of each part is, at 0 s. Raises ConfigError for a cluster that has no such parts."""
    duration = si(faults.duration, "time")
    if faults.kind == "link":
        factor, reroute, together = faults.factor or 0.0, faults.reroute, _links(faults.per, cluster)
        return [[LinkFault(a, b, 0.0, duration, factor, reroute) for a, b in own] for own in together]
    owner = list(range(len(nodes))) if faults.per == "device" else machines_of(cluster, nodes)
    ranks: list[list[int]] = [[] for _ in range(max(owner) + 1)]
    for rank, machine in enumerate(owner):
        ranks[machine].append(rank)
    if faults.kind == "stop":
        return [[Stop(own, 0.0, duration)] for own in ranks]
    assert faults.factor is not None
    return [[SlowDown(own, 0.0, duration, faults.factor)] for own in ranks]


def _links(per: str, cluster: Cluster) -> list[list[tuple[str, str]]]:
    """Return the pairs of neighbours between which links are down together."""
    host, switch, names = cluster.host_of, cluster.is_fabric_switch, cluster.node_names
    outside = (host[cluster.link_src] != host[cluster.link_dst]) | (host[cluster.link_src] < 0)
    ends = np.sort(np.stack([cluster.link_src, cluster.link_dst], axis=1)[outside], axis=1)
    groups: dict[int, list[tuple[str, str]]] = {}
    for number, (a, b) in enumerate(np.unique(ends, axis=0).tolist()):
        if per == "link":
            owners = [number]
        elif per == "switch":
            owners = [node for node in (a, b) if switch[node]]
        else:
            owners = [host[node] for node in (a, b) if host[node] >= 0]
        for owner in owners:
            groups.setdefault(owner, []).append((names[a], names[b]))
    if not groups:
        which = "switches between its machines" if per == "switch" else "links between its machines"
        raise ConfigError(f"faults: RandomFaults per = {per!r}: cluster {cluster.name!r} has no {which}; leave it out")
    return [groups[owner] for owner in sorted(groups)]


def _first(faults: Sequence[RandomFaults], cluster: Cluster) -> float:
    """Return the first horizon, inf where nothing is random."""
    workers = cluster.workers.tolist()
    rate = math.fsum(fault.rate * len(parts_of(fault, cluster, workers)) for fault in faults)
    return MANY / rate if rate > 0.0 else math.inf


def drawn_notes(faults: Sequence[object], happened: Sequence[Happening], seconds: float) -> tuple[str, ...]:
    """Return how often something came at random in a run of so many s."""
    if not any(isinstance(fault, RandomFaults) for fault in faults):
        return ()
    if not happened:
        return (
            f"faults: none of those that come at random came in the {seconds:.4g} s of the run; let it make more "
            "steps, or learn, to see what they do",
        )
    words = {SlowDown: "slow-down", Stop: "stop", LinkFault: "link fault"}
    counts = Counter(words[type(each)] for each in happened)
    texts = [f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items()]
    return (f"faults: {', '.join(texts)} came at random in the {seconds:.4g} s of the run (Result.drawn_faults)",)
