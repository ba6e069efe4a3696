"""Algorithms of collectives among all workers: checks, schedules in the order of ranks asked for, "auto"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Index, Rule, by, one_of
from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective, Schedule, algorithm_names, build, reorder
from ddlsim.collectives.find import find, n_segments_for
from ddlsim.errors import ConfigError, shown
from ddlsim.network import Network
from ddlsim.runtime.setting import Setting
from ddlsim.ties import tie

__all__ = [
    "AllReduceAlgorithm", "RankOrder", "algorithm_of", "fastest", "name_of", "order_of", "schedule_time",
    "schedules",
]  # fmt: skip

#: algorithms that "auto" does not try: never the fastest, or the same as another at these settings
NOT_TRIED = ("gloo_ring", "naive_ring", "parameter_server")


def algorithm_of(kind: str) -> Rule:
    """Names (looked up at once, so that a wrong one is told before anything runs) and functions."""

    def check(algorithm: object, where: str) -> object:
        if isinstance(algorithm, str) and (algorithm != "auto" or kind != "all_reduce"):
            try:
                find(algorithm, kind)
            except ConfigError as error:
                raise ConfigError(f"{where.partition(':')[0]}: {error}") from None
        elif isinstance(algorithm, type) or not (isinstance(algorithm, str) or callable(algorithm)):
            raise ConfigError(f"{where} = {shown(algorithm)}: must be a name such as 'ring', or a function")
        return algorithm

    return by(check)


#: the order in which the ranks of a collective follow each other
RankOrder = Annotated[str, one_of("given", "topology", also="a list of ranks, ")] | Sequence[Index]
AllReduceAlgorithm = Annotated[str | Collective, algorithm_of("all_reduce")]


def name_of(algorithm: str | Collective) -> str:
    """Return an algorithm's name, for labels."""
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")


def schedules(
    setting: Setting, algorithm: str | Collective, rank_order: str | Sequence[int], kind: str = "all_reduce"
) -> Callable[[float], Schedule]:
    """Return what makes the schedule among all workers for a number of bytes; "auto" is for all-reduces only."""
    order = order_of(setting, rank_order)
    hosts = setting.hosts(setting.nodes)[order].tolist()
    known: dict[float, Schedule] = {}

    def schedule(nbytes: float) -> Schedule:
        automatic = algorithm == "auto" and kind == "all_reduce"
        key = nbytes if automatic else float(n_segments_for(nbytes))
        if key not in known:
            chosen = fastest(setting, order, nbytes) if automatic else algorithm
            known[key] = reorder(build(chosen, len(order), nbytes, hosts, kind), order)
        return known[key]

    return schedule


def order_of(setting: Setting, rank_order: str | Sequence[int]) -> npt.NDArray[np.int64]:
    n = len(setting.workers)
    if rank_order == "given":
        return np.arange(n)
    if rank_order == "topology":
        return setting.cluster.locality_order(setting.nodes)
    order = np.array(rank_order, dtype=np.int64)
    if not np.array_equal(np.sort(order), np.arange(n)):
        raise ConfigError(f"rank_order = {list(rank_order)}: must list each of the ranks 0..{n - 1} once")
    return order


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
    """Return the name of the all-reduce that is fastest for `nbytes` on the idle cluster, and note it.

    Of those that tie with the fastest (:mod:`ddlsim.ties`), that whose name comes first.
    """
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
    least = min(times.values())
    best = min(name for name, seconds in times.items() if tie(seconds, least))
    setting.notes.append(f"auto: {best} for {nbytes / 1e6:.3g} MB ({times[best] * 1e3:.4g} ms)")
    return best
