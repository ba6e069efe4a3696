"""How long a collective takes on a cluster where nothing else happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.collectives import Schedule
from ddlsim.network.network import Network


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
