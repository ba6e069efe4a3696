"""Candidate configurations of a search, and the number of steps to simulate for the throughput of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import FP16, Compression, ErrorFeedback, TopK
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError
from ddlsim.plan import KINDS
from ddlsim.printable import shown
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import DEFAULT_DEVICE, with_defaults
from ddlsim.runtime.fabric import algorithm_for
from ddlsim.strategies import AllReduce, LocalSGD, ParameterServer, Splits, Strategy, contract
from ddlsim.strategies.splits import text_of_invalid
from ddlsim.study.changes import labels_of
from ddlsim.workload.compute import make_workload, model_flops_utilisation
from ddlsim.workload.devices import load_device
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.model import load_model

BATCH_SIZES = (32, 64, 128)
COMPRESSIONS: tuple[Compression | None, ...] = (None, Compression(FP16()), Compression(ErrorFeedback(TopK(0.01))))
#: default all-reduce algorithms, and local steps of local SGD
ALGORITHMS = ("default", "hierarchical", "halving_doubling", "double_binary_tree")
LOCAL_STEPS = 8
#: label of parameter servers, one on each machine with workers
SERVER_PER_MACHINE = "parameter server (1 per machine)"
#: simulated (warm-up, measured) steps: identical steps, workers that proceed independently, random times
REGULAR, OWN_WAYS, RANDOM = (1, 2), (2, 8), (2, 10)
#: a model with few layers, for inspecting plans
SMALL = "lenet5"
#: reason for skipping a combination
TOO_MANY = "there are more workers than devices"
#: lowest rank of exchanges that are not exact (see `Nature`)
LEAST_SIMPLE = 3


@dataclass(frozen=True, eq=False)
class Candidate:
    """A configuration: the experiment that measures it, and the values of the searched fields for the table.

    exact        training gives the same result as one worker with the global batch
    simple       rank of the gradient exchange by complexity; smaller is simpler (:class:`Nature`)
    per_machine  one server per machine, regardless of the number of machines
    sizes        sizes of a split of the model (:class:`~ddlsim.Splits`), by name
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
    sizes: Mapping[str, object] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        """Number of samples per update, over all workers."""
        together = contract.of(self.experiment.strategy).shares_batch
        return self.batch_size * (1 if together else self.workers)

    def mfu(self, throughput: float) -> float | None:
        """Return the model FLOPs utilisation at a throughput in samples/s; None if a device's peak is unknown."""
        experiment, nodes = self.experiment, self.cluster.workers[: self.workers].tolist()
        names = [self.cluster.device_of[node] or DEFAULT_DEVICE for node in nodes]
        devices = {name: load_device(experiment.device or name) for name in set(names)}
        model = load_model(experiment.model)
        precision = with_defaults(experiment, model, *devices.values()).precision
        return model_flops_utilisation(model, throughput, [devices[name] for name in names], str(precision))

    @property
    def settings(self) -> dict[str, object]:
        """Values of the searched fields, by name."""
        names = ("workers", "strategy", "compression", "batch_size")
        return {"cluster": self.place, **{name: getattr(self, name) for name in names}, **self.sizes}

    def __str__(self) -> str:
        packed = "" if self.compression == "none" else f", {self.compression}"
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        text = self.strategy
        if self.sizes:
            sizes = self.sizes
            chunks = f" x {sizes['interleave']}" if sizes["interleave"] != 1 else ""
            order = "" if sizes["order"] == "-" else f"{sizes['order']}{chunks}, "
            again = "" if sizes["recompute"] == "none" else f", {sizes['recompute']} recomputation"
            more = (", sequence" if sizes["sequence"] else "") + (f", stage {sizes['stage']}" if sizes["stage"] else "")
            more += "" if sizes["shard"] is None else f" in groups of {sizes['shard']}"
            more += "" if sizes["cut"] in ("-", "balanced") else ", equal layers"
            more += "" if sizes["p2p"] in ("-", "overlapped") else f", p2p {sizes['p2p']}"
            text = (
                f"tensor {sizes['tensor']}, pipeline {sizes['pipeline']}, data {sizes['data']}, {order}"
                f"micro-batches of {sizes['micro_batch']}{again}{more}"
            )
        return shown(f"{workers} of {self.place}, {text}{packed}, batch {self.batch_size}")

    def at(self, workers: int) -> Experiment:
        """Return the experiment with another number of workers."""
        if not self.per_machine:
            return self.experiment.with_(workers=workers)
        return self.experiment.with_(workers=workers, strategy=_server_on_each(self.cluster, workers))


def worker_counts(cluster: Cluster) -> list[int]:
    """Return the powers of two up to the cluster's number of devices, and this number."""
    n = len(cluster.workers)
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def _usual_strategies(cluster: Cluster, n_workers: int) -> list[tuple[Strategy, bool]]:
    """Return the default strategies, each with a flag for one server per machine."""
    if n_workers == 1:
        return [(AllReduce("ring"), False)]
    nodes = cluster.workers[:n_workers]
    at = nodes[cluster.locality_order(nodes)].tolist()
    algorithms = dict.fromkeys(algorithm_for(name, cluster, at) for name in ALGORITHMS)
    strategies: list[tuple[Strategy, bool]] = [(AllReduce(algorithm), False) for algorithm in algorithms]
    local = LocalSGD(LOCAL_STEPS, algorithm="hierarchical")
    return [*strategies, (_server_on_each(cluster, n_workers), True), (local, False)]


def _server_on_each(cluster: Cluster, n_workers: int) -> ParameterServer:
    return ParameterServer(len(np.unique(cluster.host_of[cluster.workers[:n_workers]])), "colocated")


def candidates(
    base: Experiment,
    clusters: Sequence[Cluster],
    workers: Sequence[int] | None,
    strategies: Sequence[Strategy | Splits] | None,
    compressions: Sequence[Compression | None],
    batch_sizes: Sequence[int],
) -> tuple[list[Candidate], Counter[str]]:
    """Return all valid configurations, and the number of invalid ones by reason, such as too many workers.

    Raises ConfigError for invalid values, and if no configuration is left.
    """
    invalid: Counter[str] = Counter()
    packed, model = [compression_of(compression) for compression in compressions], load_model(base.model)

    def rows() -> Iterator[_Row]:
        for cluster in clusters:
            for n in dict.fromkeys(worker_counts(cluster) if workers is None else workers):
                usual: list[tuple[Any, bool, bool]]  # strategy, one server per machine, no compression
                if strategies is None:  # compression is never combined with averaging by default
                    usual = [(one, on_each, not nature_of(one).exact) for one, on_each in _usual_strategies(cluster, n)]
                else:
                    usual = [(one, False, False) for one in strategies]
                for strategy, on_each, dense in usual:
                    family = contract.of(strategy)
                    split = strategy.label.partition(" ")[2] if family.defines("layouts") else ""
                    some = packed[: 1 if n == 1 or dense else None]  # a single worker sends nothing
                    for compression, batch_size in itertools.product(some, batch_sizes):
                        if n > len(cluster.workers):
                            invalid[TOO_MANY] += 1
                            continue
                        for layout in family.layouts(cluster, model, n, batch_size, invalid):
                            yield _Row(cluster, n, layout, compression, batch_size, on_each, split)

    grid = list(rows())
    if not grid and set(invalid) - {TOO_MANY}:
        raise ConfigError(f"recommend: no configuration is valid: {text_of_invalid(invalid)}")
    if not grid:
        devices = ", ".join(f"{cluster.name!r} has {len(cluster.workers)} devices" for cluster in clusters)
        raise ConfigError(f"recommend: no cluster has enough devices ({devices}); use fewer workers")
    layouts = [f"{row.strategy.label.partition(' (')[0]} {row.split}" if row.split else row.strategy for row in grid]
    labels = labels_of(layouts), labels_of([row.compression for row in grid])
    places = _places(clusters)
    natures: dict[Hashable, Nature] = {}
    valid = []
    for i, (cluster, n, strategy, compression, batch_size, on_each, split) in enumerate(grid):
        key = _key(contract.of(strategy).scaled_down())
        nature = natures[key] = natures[key] if key in natures else nature_of(strategy)
        length = RANDOM if varies(base) else REGULAR if nature.synchronous else OWN_WAYS
        warmup, steps = contract.of(strategy).whole_cycles(*length)
        varied = {"cluster": cluster, "workers": n, "strategy": strategy, "compression": compression}
        experiment = base.with_(**varied, batch_size=batch_size, warmup=warmup, steps=steps)
        names = (SERVER_PER_MACHINE if on_each else str(labels[0][i]), str(labels[1][i]))
        exact, sizes = nature.exact and compression is None, contract.of(strategy).split_sizes(n) if split else {}
        settings = (places[id(cluster)], n, *names, batch_size)
        valid.append(Candidate(i, experiment, cluster, *settings, exact, nature.simple, on_each, sizes))
    return valid, invalid


def _places(clusters: Sequence[Cluster]) -> dict[int, str]:
    """Return a name for each cluster (by id); equal names are numbered."""
    names: dict[int, str] = {}
    for cluster in clusters:
        n = sum(other.name == cluster.name for other in clusters if id(other) in names) + 1
        names[id(cluster)] = cluster.name if n == 1 else f"{cluster.name} ({n})"
    return names


class _Row(NamedTuple):
    """Searched values of a candidate, whether it has a server on each machine, and the part of the label that all
    variants of its split share ("(ring)"); the table lists their sizes separately."""

    cluster: Cluster
    workers: int
    strategy: Strategy
    compression: Compression | None
    batch_size: int
    on_each: bool
    split: str = ""


@dataclass(frozen=True)
class Nature:
    """Properties derived from a strategy's plan (docs/models/plans.md); all False if it has none.

    synchronous  all workers make one step per update, so that a window of updates contains whole steps
    exact        training equals that of one worker with all batches as one: the plan proves that the gradients of all
                 batches are summed before each update
    simple       rank of the gradient exchange by complexity: 0 for all-reduces, then servers, other collectives,
                 inexact exchanges
    """

    synchronous: bool
    exact: bool
    simple: int


def nature_of(strategy: Strategy) -> Nature:
    """Return the properties of a strategy, derived from its plan for two workers and a small model."""
    workload = make_workload(load_model(SMALL), load_device(DEFAULT_DEVICE), 1)
    plan = None
    try:
        plan = contract.of(contract.of(strategy).scaled_down()).plan([workload, workload], 1, 1)
        plan.check()
    except ConfigError:
        return Nature(plan is not None, False, LEAST_SIMPLE)
    kinds = {KINDS[kind] for kind in plan.kind[plan.collectives].tolist()}
    return Nature(True, True, 0 if kinds <= {"all_reduce"} else 1 if plan.servers else 2)


def _key(strategy: Strategy) -> Hashable:
    try:
        return hash(strategy), type(strategy), repr(strategy)
    except TypeError:
        return id(strategy)


def varies(experiment: Experiment) -> bool:
    """Return whether tasks can take other times than in the step program."""
    return not isinstance(experiment.jitter, NoJitter) or bool(experiment.slowdowns or experiment.faults)
