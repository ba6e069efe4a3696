"""Synchronous data-parallel SGD by all-reduce: w <- w - eta * (1/N) sum_i g_i after every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective, Schedule, algorithm_names, build, reorder
from ddlsim.collectives.find import n_segments_for
from ddlsim.errors import ConfigError
from ddlsim.network import Network
from ddlsim.strategies.compressed_all_reduce import CompressedAllReduce
from ddlsim.strategies.group import Carrier, Group
from ddlsim.strategies.overlap import HorovodFusion, Overlap, Priority, buckets_of, overlap_named
from ddlsim.strategies.setting import Setting
from ddlsim.workload.buckets import Bucket

__all__ = ["AllReduce", "schedule_time", "start_group"]

#: algorithms that "auto" does not try: never the fastest, or the same as another at these settings
NOT_TRIED = ("naive_ring", "parameter_server")

#: makes what carries the buckets of a group
NewCarrier = Callable[[Group, Sequence[Bucket]], Carrier]


@dataclass(frozen=True)
class AllReduce:
    """Synchronous SGD: all workers average their gradients in every step.

    algorithm   name of an all-reduce ("ring", "hierarchical", "double_binary_tree", ...), a function
                ``n_ranks -> Schedule``, ``"package.module:function"``, or "auto": the fastest by simulation,
                for each bucket size
    overlap     "none", "layer", "ddp", "horovod", "priority", or a policy with its own settings
    rank_order  "topology" (neighbours in the network are neighbours in the ring, as NCCL arranges them),
                "given" (the cluster's order, as MPI ranks), or the ranks in the order wanted
    """

    algorithm: str | Collective = "ring"
    overlap: str | Overlap = "ddp"
    rank_order: str | Sequence[int] = "topology"
    takes_compression = True

    def __post_init__(self) -> None:
        overlap_named(self.overlap)
        if not (isinstance(self.algorithm, str) or callable(self.algorithm)):
            raise ConfigError(
                f"AllReduce: algorithm = {self.algorithm!r}: must be a name such as 'ring', or a function"
            )
        order = self.rank_order
        named = isinstance(order, str) and order in ("given", "topology")
        if not named and (isinstance(order, str) or not all(isinstance(rank, int | np.integer) for rank in order)):
            raise ConfigError(f"AllReduce: rank_order = {order!r}: must be 'given', 'topology' or a list of ranks")

    @property
    def label(self) -> str:
        """Algorithm and overlap."""
        name = self.algorithm if isinstance(self.algorithm, str) else getattr(self.algorithm, "__name__", "function")
        overlap = self.overlap if isinstance(self.overlap, str) else type(self.overlap).__name__
        return f"all-reduce ({name}, {overlap})"

    def updates(self, steps: int, n_workers: int) -> int:
        """One update a step."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        order = self._order(setting)
        hosts = setting.hosts(setting.nodes)[order]
        known: dict[float, Schedule] = {}

        def schedule(nbytes: float) -> Schedule:
            key = nbytes if self.algorithm == "auto" else float(n_segments_for(nbytes))
            if key not in known:
                algorithm = self.algorithm
                if algorithm == "auto":
                    algorithm = fastest(setting, order, nbytes)
                known[key] = reorder(build(algorithm, len(order), nbytes, hosts.tolist()), order)
            return known[key]

        start_group(setting, overlap_named(self.overlap), schedule, [], self._compressed(setting, schedule, order))

    def _compressed(
        self, setting: Setting, schedule: Callable[[float], Schedule], order: npt.NDArray[np.int64]
    ) -> NewCarrier | None:
        if setting.compression is None:
            return None
        return functools.partial(CompressedAllReduce, setting, self.algorithm, schedule, order)

    def _order(self, setting: Setting) -> npt.NDArray[np.int64]:
        n = len(setting.workers)
        if self.rank_order == "given":
            return np.arange(n)
        if self.rank_order == "topology":
            return setting.cluster.locality_order(setting.nodes)
        order = np.array(self.rank_order, dtype=np.int64)
        if not np.array_equal(np.sort(order), np.arange(n)):
            raise ConfigError(f"AllReduce: rank_order must list each of the ranks 0..{n - 1} once")
        return order


def start_group(
    setting: Setting, overlap: Overlap, schedule: Callable[[float], Schedule], servers: list[int],
    carrier: NewCarrier | None = None,
) -> None:  # fmt: skip
    """Start synchronous workers (with servers behind them) that exchange gradients under `overlap`.

    A `carrier` takes the place of dense collectives by `schedule`.
    """
    nodes = setting.nodes + servers
    group = Group(setting.loop, setting.recorder, nodes, len(setting.workers), schedule, setting.learner)
    setting.model = lambda: group.params
    if carrier is not None:
        if isinstance(overlap, HorovodFusion | Priority):
            raise ConfigError(
                f"overlap = {type(overlap).__name__} fuses or cuts what compression has packed; with compression "
                "use 'none', 'layer' or 'ddp'"
            )
        group.carrier = carrier(group, buckets_of(overlap, setting.workers[0].workload))
    if isinstance(overlap, HorovodFusion | Priority):
        group.coordinator = overlap.coordinator(group)
    for worker in setting.workers:
        setting.loop.env.process(overlap.work(worker, group))


def schedule_time(
    cluster: Cluster,
    schedule: Schedule,
    nodes: Sequence[int],
    nbytes: float,
    entry_times: Sequence[float] | None = None,
) -> float:
    """Return when the last rank has ended a collective over `nbytes` on the otherwise idle cluster, in s.

    ``nodes`` (n_ranks,) is where the ranks are; all enter at 0, or at ``entry_times`` (n_ranks,) s.
    """
    network = Network(cluster)
    number = network.collective(schedule, nodes, nbytes)
    entries = np.zeros(len(nodes)) if entry_times is None else np.asarray(entry_times, dtype=np.float64)
    end = 0.0
    for time in np.unique(entries):
        while (done := network.advance(time)) is not None:
            end = done.time
        ranks = np.flatnonzero(entries == time)
        network.join(np.full(len(ranks), number), ranks, float(time))
    while (done := network.advance()) is not None:
        end = done.time
    return end


def fastest(setting: Setting, order: npt.NDArray[np.int64], nbytes: float) -> str:
    """Return the name of the all-reduce that is fastest for `nbytes` on the idle cluster, and note it."""
    hosts = setting.hosts(setting.nodes)[order].tolist()
    times: dict[str, float] = {}
    for name in algorithm_names():
        if name in NOT_TRIED:
            continue
        try:
            schedule = reorder(build(name, len(order), nbytes, hosts), order)
        except ConfigError:  # not for this number or placement of ranks
            continue
        times[name] = schedule_time(setting.cluster, schedule, setting.nodes, nbytes)
    best = min(times, key=lambda name: (times[name], name))
    setting.notes.append(f"auto: {best} for {nbytes / 1e6:.3g} MB ({times[best] * 1e3:.4g} ms)")
    return best
