"""The configurations that a plan chooses from, and how long each has to be simulated to know its throughput."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import FP16, Compression, ErrorFeedback, TopK
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError
from ddlsim.plan import KINDS
from ddlsim.printable import shown
from ddlsim.run.experiment import Experiment
from ddlsim.run.simulate import DEFAULT_DEVICE
from ddlsim.strategies import AllReduce, LocalSGD, ParameterServer, Strategy
from ddlsim.strategies.plans import plan_of
from ddlsim.study.labels import labels_of
from ddlsim.workload.compute import make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import load_model

BATCH_SIZES = (32, 64, 128)
COMPRESSIONS: tuple[Compression | None, ...] = (None, Compression(FP16()), Compression(ErrorFeedback(TopK(0.01))))
#: algorithms of all-reduces, and the local steps, that are tried where no strategies are given
ALGORITHMS = ("ring", "hierarchical", "halving_doubling", "double_binary_tree")
LOCAL_STEPS = 8
#: how servers, one with the workers of each machine, are called
EACH = "parameter server (1 per machine)"
#: (warm-up, steps) that are simulated: where every step is like the one before, of workers that go their own ways, and
#: where chance plays a part
REGULAR, OWN_WAYS, RANDOM = (1, 2), (2, 8), (2, 10)
#: a model of few layers, to look at plans
SMALL = "lenet5"
#: how simple a way to exchange gradients is that is not exact
LEAST_SIMPLE = 3


@dataclass(frozen=True, eq=False)
class Candidate:
    """A configuration: the experiment that measures it, and how the table shows what is varied.

    exact        what is learned is what one worker would learn with the global batch
    simple       how simple the exchange of gradients is, the smaller the simpler (:class:`Nature`)
    per_machine  it has a server on each machine, whatever their number
    """

    number: int
    experiment: Experiment
    cluster: Cluster
    place: str
    workers: int
    strategy: str
    compression: str
    batch_size: int
    exact: bool
    simple: int
    per_machine: bool

    @property
    def settings(self) -> dict[str, object]:
        """What is varied, by name."""
        return {
            "cluster": self.place, "workers": self.workers, "strategy": self.strategy,
            "compression": self.compression, "batch_size": self.batch_size,
        }  # fmt: skip

    def __str__(self) -> str:
        packed = "" if self.compression == "none" else f", {self.compression}"
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        return shown(f"{workers} of {self.place}, {self.strategy}{packed}, batch {self.batch_size}")

    def at(self, workers: int) -> Experiment:
        """Return the experiment with another number of workers."""
        if not self.per_machine:
            return self.experiment.with_(workers=workers)
        return self.experiment.with_(workers=workers, strategy=_server_on_each(self.cluster, workers))


def worker_counts(cluster: Cluster) -> list[int]:
    """Return the powers of two up to the cluster's number of devices, and that number."""
    n = len(cluster.workers)
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def _usual_strategies(cluster: Cluster, n_workers: int) -> list[tuple[Strategy, bool]]:
    """Return what is tried where nobody has said, and whether that is a server on each machine."""
    if n_workers == 1:
        return [(AllReduce("ring"), False)]
    found: list[tuple[Strategy, bool]] = [(AllReduce(name), False) for name in ALGORITHMS]
    local = LocalSGD(LOCAL_STEPS, algorithm="hierarchical")
    return [*found, (_server_on_each(cluster, n_workers), True), (local, False)]


def _server_on_each(cluster: Cluster, n_workers: int) -> ParameterServer:
    return ParameterServer(len(np.unique(cluster.host_of[cluster.workers[:n_workers]])), "colocated")


def candidates(
    base: Experiment,
    clusters: Sequence[Cluster],
    workers: Sequence[int] | None,
    strategies: Sequence[Strategy] | None,
    compressions: Sequence[Compression | None],
    batch_sizes: Sequence[int],
) -> tuple[list[Candidate], int]:
    """Return all configurations that make sense, and how many do not: more workers than a cluster has.

    Raises ConfigError for values that are none, and if nothing is left.
    """
    rows = list(_rows(clusters, workers, strategies, compressions, batch_sizes))
    made = [row for row in rows if row[1] <= len(row[0].workers)]
    if not made:
        devices = ", ".join(f"{cluster.name!r} has {len(cluster.workers)} devices" for cluster in clusters)
        raise ConfigError(
            f"recommend: no configuration fits together ({devices}); give fewer workers"
        )
    labels = labels_of([row[2] for row in made]), labels_of([row[3] for row in made])
    places = _places(clusters)
    natures: dict[Hashable, Nature] = {}
    found = []
    for i, (cluster, n, strategy, compression, batch_size, each) in enumerate(made):
        key = _key(strategy)
        nature = natures[key] = natures[key] if key in natures else nature_of(strategy)
        warmup, steps = _length(base, strategy, nature.synchronous)
        experiment = base.with_(
            cluster=cluster, workers=n, strategy=strategy, compression=compression, batch_size=batch_size,
            warmup=warmup, steps=steps,
        )  # fmt: skip
        found.append(
            Candidate(
                i, experiment, cluster, places[id(cluster)], n, EACH if each else str(labels[0][i]), str(labels[1][i]),
                batch_size, nature.exact and compression is None, nature.simple, each,
            )
        )  # fmt: skip
    return found, len(rows) - len(made)


def _places(clusters: Sequence[Cluster]) -> dict[int, str]:
    """Return a name for each cluster (by id); those that have the same one are numbered."""
    found: dict[int, str] = {}
    for cluster in clusters:
        n = sum(other.name == cluster.name for other in clusters if id(other) in found) + 1
        found[id(cluster)] = cluster.name if n == 1 else f"{cluster.name} ({n})"
    return found


_Row = tuple[Cluster, int, Strategy, Compression | None, int, bool]


def _rows(
    clusters: Sequence[Cluster],
    workers: Sequence[int] | None,
    strategies: Sequence[Strategy] | None,
    compressions: Sequence[Compression | None],
    batch_sizes: Sequence[int],
) -> Iterator[_Row]:
    packed = [compression_of(compression) for compression in compressions]
    for cluster in clusters:
        for n in dict.fromkeys(worker_counts(cluster) if workers is None else workers):
            usual = _usual_strategies(cluster, n) if strategies is None else [(one, False) for one in strategies]
            for strategy, each in usual:
                # one worker sends nothing; compressing and averaging seldom cost accuracy: both only where asked for
                alone = n == 1 or (strategies is None and not nature_of(strategy).exact)
                for compression in packed[:1] if alone else packed:
                    for batch_size in batch_sizes:
                        yield cluster, n, strategy, compression, batch_size, each


@dataclass(frozen=True)
class Nature:
    """What follows from a strategy's plan (docs/models/plans.md); all is False where it has none.

    synchronous  all workers make a step between two updates, so that a window of updates holds whole steps
    exact        workers learn together what one would learn alone with their batches as one: the plan proves that where
                 parameters are updated, the gradients of all batches have been summed
    simple       how simple the exchange of gradients is: 0 for all-reduces, then servers, other collectives, what is
                 not exact
    """

    synchronous: bool
    exact: bool
    simple: int


def nature_of(strategy: Strategy) -> Nature:
    """Return what is known of a strategy, by its plan for two small workers."""
    workload = make_workload(load_model(SMALL), load_device(DEFAULT_DEVICE), 1)
    synchronous = False
    try:
        plan = plan_of(strategy, [workload, workload])
        synchronous = True
        plan.check()
    except ConfigError:
        return Nature(synchronous, False, LEAST_SIMPLE)
    kinds = {KINDS[kind] for kind in plan.kind[plan.collectives].tolist()}
    return Nature(True, True, 0 if kinds <= {"all_reduce"} else 1 if plan.servers else 2)


def _key(strategy: Strategy) -> Hashable:
    """Return what equal strategies have in common."""
    try:
        return hash(strategy), type(strategy), repr(strategy)
    except TypeError:
        return id(strategy)


def _length(base: Experiment, strategy: Strategy, synchronous: bool) -> tuple[int, int]:
    """Return warm-up and steps of a simulation: whole periods of strategies that talk now and then."""
    if not isinstance(base.jitter, NoJitter) or base.slow_downs:
        warmup, steps = RANDOM
    else:
        warmup, steps = REGULAR if synchronous else OWN_WAYS
    period = int(getattr(strategy, "period", 1))
    return period * -(-warmup // period), period * -(-steps // period)
