"""The configurations that a plan chooses from, and how long each has to be simulated to know its throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import FP16, Compression, ErrorFeedback, TopK
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError
from ddlsim.printable import shown
from ddlsim.run.experiment import Experiment
from ddlsim.strategies import AllReduce, LocalSGD, ParameterServer, ShardedUpdate, Strategy
from ddlsim.study.labels import labels_of
from ddlsim.workload.jitter import NoJitter

__all__ = ["BATCH_SIZES", "COMPRESSIONS", "Candidate", "candidates", "is_exact", "is_synchronous", "worker_counts"]

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


@dataclass(frozen=True, eq=False)
class Candidate:
    """A configuration: the experiment that measures it, and how the table shows what is varied.

    exact        what is learned is what one worker would learn with the global batch
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


def _usual_strategies(cluster: Cluster, n_workers: int) -> list[Strategy]:
    """Return what is tried where nobody has said."""
    if n_workers == 1:
        return [AllReduce("ring")]
    found: list[Strategy] = [AllReduce(name) for name in ALGORITHMS]
    return [*found, _server_on_each(cluster, n_workers), LocalSGD(LOCAL_STEPS, algorithm="hierarchical")]


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
    """Return all configurations that make sense, and how many do not: strategies that do not compress, and more
    workers than a cluster has.

    Raises ConfigError for values that are none, and if nothing is left.
    """
    rows = list(_rows(clusters, workers, strategies, compressions, batch_sizes))
    made = [row for row in rows if row[1] <= len(row[0].workers)]
    if not made:
        devices = ", ".join(f"{cluster.name!r} has {len(cluster.workers)} devices" for cluster in clusters)
        raise ConfigError(
            f"recommend: no configuration fits together ({devices}); give fewer workers, or strategies that compress"
        )
    labels = labels_of([row[2] for row in made]), labels_of([row[3] for row in made])
    places = _places(clusters)
    found = []
    for i, (cluster, n, strategy, compression, batch_size) in enumerate(made):
        warmup, steps = _length(base, strategy)
        experiment = base.with_(
            cluster=cluster, workers=n, strategy=strategy, compression=compression, batch_size=batch_size,
            warmup=warmup, steps=steps,
        )  # fmt: skip
        each = strategies is None and isinstance(strategy, ParameterServer)
        found.append(
            Candidate(
                i, experiment, cluster, places[id(cluster)], n, EACH if each else str(labels[0][i]), str(labels[1][i]),
                batch_size, is_exact(strategy) and compression is None, each,
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


_Row = tuple[Cluster, int, Strategy, Compression | None, int]


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
            tried = _usual_strategies(cluster, n) if strategies is None else strategies
            for strategy in tried:
                for compression in packed if n > 1 else packed[:1]:  # one worker sends nothing
                    for batch_size in batch_sizes:
                        yield cluster, n, strategy, compression, batch_size


def is_exact(strategy: Strategy) -> bool:
    """Return whether the workers learn together what one would learn alone with their batches as one."""
    return isinstance(strategy, AllReduce | ParameterServer | ShardedUpdate)


def is_synchronous(strategy: Strategy) -> bool:
    """Return whether all workers make a step between two updates, so that a window of updates holds whole steps."""
    return is_exact(strategy) or isinstance(strategy, LocalSGD)


def _length(base: Experiment, strategy: Strategy) -> tuple[int, int]:
    """Return warm-up and steps of a simulation: whole periods of strategies that talk now and then."""
    if not isinstance(base.jitter, NoJitter) or base.slow_downs:
        warmup, steps = RANDOM
    else:
        warmup, steps = REGULAR if is_synchronous(strategy) else OWN_WAYS
    period = int(getattr(strategy, "period", 1))
    return period * -(-warmup // period), period * -(-steps // period)
