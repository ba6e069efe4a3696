"""How long one collective takes on a cluster, without a training run around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.errors import ConfigError
from ddlsim.strategies import schedule_time
from ddlsim.units import parse

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["collective_time"]


def collective_time(
    cluster: str | Path | nx.Graph[str] | Cluster,
    algorithm: str | Collective | Schedule,
    nbytes: float | str,
    *,
    kind: str = "all_reduce",
    ranks: int | Sequence[int] | None = None,
    rank_order: str = "given",
    entry_times: Sequence[float] | None = None,
) -> float:
    """Return the seconds until the last rank has finished a collective on the otherwise idle cluster.

    algorithm    name, function or "package.module:function" (see :func:`ddlsim.collectives.build`), or a
                 schedule of one's own
    nbytes       buffer per rank, bytes or text such as "100 MB"
    kind         "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "all_to_all", "gather" or
                 "scatter"
    ranks        number of workers, or the places of a sub-group in ``cluster.workers``; None: all workers
    rank_order   "given", or "topology" for an order in which a ring crosses each boundary once
    entry_times  s at which each rank enters; all at 0 by default

    Raises ConfigError for an unknown algorithm, ranks that the cluster does not have, or a negative size.
    """
    loaded = load_cluster(cluster)
    size = parse(nbytes, "bytes", "nbytes") if isinstance(nbytes, str) else float(nbytes)
    if not (math.isfinite(size) and size >= 0.0):
        raise ConfigError(f"nbytes = {nbytes!r}: must be a finite number of bytes, at least 0")
    nodes = loaded.workers[_places(ranks, loaded)]
    if rank_order not in ("given", "topology"):
        raise ConfigError(f"rank_order = {rank_order!r}: must be 'given' or 'topology'")
    order = np.arange(len(nodes)) if rank_order == "given" else loaded.locality_order(nodes)
    if entry_times is not None and len(entry_times) != len(nodes):
        raise ConfigError(f"entry_times has {len(entry_times)} entries for {len(nodes)} ranks; give one per rank")
    if isinstance(algorithm, Schedule):
        schedule = algorithm
        if schedule.n_ranks != len(nodes):
            raise ConfigError(f"the schedule is for {schedule.n_ranks} ranks, not for {len(nodes)}; set ranks")
    else:
        hosts = loaded.host_of[nodes][order].tolist()
        schedule = build(algorithm, len(nodes), size, hosts, kind)
    if len(nodes) > 1:
        loaded.check_connected(nodes)
    return schedule_time(loaded, reorder(schedule, order), nodes.tolist(), size, entry_times)


def _places(ranks: int | Sequence[int] | None, cluster: Cluster) -> list[int]:
    available = len(cluster.workers)
    places = list(range(available)) if ranks is None else list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    if not places or min(places) < 0 or max(places) >= available or len(set(places)) != len(places):
        raise ConfigError(
            f"ranks = {ranks!r}: must be distinct places among the {available} workers of {cluster.name!r}"
        )
    return places
