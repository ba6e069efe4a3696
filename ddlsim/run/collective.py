"""The time of one collective on a cluster, without a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Index, NotNegative, checked, one_of, quantity
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.collectives import KINDS, Collective, Schedule, build, reorder
from ddlsim.collectives.check import validate
from ddlsim.errors import ConfigError, shown
from ddlsim.network import schedule_time
from ddlsim.units import si


@checked
def collective_time(
    cluster: ClusterLike,
    algorithm: str | Schedule | Collective,
    nbytes: Annotated[float | str, quantity("bytes", zero=True)],
    *,
    kind: Annotated[str, one_of(*KINDS)] = "all_reduce",
    ranks: Count | Sequence[Index] | None = None,
    rank_order: Annotated[str, one_of("given", "topology")] = "given",
    entry_times: Sequence[NotNegative] | None = None,
) -> float:
    """Simulate one collective on an otherwise idle cluster, and return the time in s at which the last rank finishes.

    cluster      bundled name, path, networkx graph or :class:`~ddlsim.Cluster`
    algorithm    name, function or "package.module:function" (see :func:`ddlsim.collectives.build`), or a custom
                 schedule
    nbytes       size of the buffer on each rank, in bytes or as a string such as "100 MB"
    kind         "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "all_to_all", "gather" or
                 "scatter"
    ranks        number of participating workers, or a list of indices into ``cluster.workers``; None: all workers
    rank_order   "given" (the order of the workers), or "topology" (an order in which a ring crosses each uplink only
                 once per direction)
    entry_times  time in s at which each rank enters the collective; None: all ranks enter at 0

    Raises ConfigError for an unknown algorithm, ranks that the cluster does not have, or a negative size.
    """
    loaded = load_cluster(cluster)
    size = si(nbytes, "bytes")
    nodes = loaded.workers[_places(ranks, loaded)]
    order = np.arange(len(nodes)) if rank_order == "given" else loaded.locality_order(nodes)
    if entry_times is not None and len(entry_times) != len(nodes):
        raise ConfigError(f"entry_times has {len(entry_times)} entries for {len(nodes)} ranks; pass one per rank")
    if isinstance(algorithm, Schedule):
        schedule = algorithm
        validate(schedule)
        if schedule.n_ranks != len(nodes):
            n_ranks = schedule.n_ranks
            raise ConfigError(f"the schedule is for {n_ranks} ranks, not for {len(nodes)}; set ranks={n_ranks}")
    else:
        schedule = build(algorithm, len(nodes), size, None, kind, (loaded, nodes[order].tolist()))
    if len(nodes) > 1:
        loaded.check_connected(nodes)
    return schedule_time(loaded, reorder(schedule, order), nodes.tolist(), size, entry_times)


def _places(ranks: int | Sequence[int] | None, cluster: Cluster) -> list[int]:
    available = len(cluster.workers)
    count = available if ranks is None else ranks
    places = list(range(min(count, available + 1))) if isinstance(count, int) else list(count)
    if not places or min(places) < 0 or max(places) >= available or len(set(places)) != len(places):
        raise ConfigError(
            f"ranks = {shown(ranks)}: must be a number of workers up to {available}, or a list of distinct integers "
            f"from 0 to {available - 1}: the indices of workers in cluster {cluster.name!r}"
        )
    return places
