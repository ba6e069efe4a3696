"""Where a job goes on a cluster that others use, too."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.run.parts import racks
from ddlsim.streams import stream

PLACEMENTS = ("packed", "spread", "random")


def placed(cluster: Cluster, free: Collection[int], n: int, how: str, seed: int = 0) -> list[int]:
    """Return `n` of the places ``free`` (in ``cluster.workers``), in the order of the job's ranks.

    "packed"  neighbours, on as few switches and machines as can be, and such that few machines are begun
    "spread"  one on each machine, on as many switches as there are, before any gets two
    "random"  drawn

    Ranks follow the order that suits the links (:meth:`ddlsim.Cluster.locality_order`). Raises ConfigError if so many
    are not free.
    """
    if n > len(free):
        raise ConfigError(f"needs {n} devices, but {len(free)} of {cluster.name!r} are free")
    order = cluster.locality_order(cluster.workers).tolist()
    ready = [place for place in order if place in set(free)]
    machine = cluster.host_of[cluster.workers]
    rack_of = racks(cluster)
    n_hosts = len(cluster.host_names)  # a machine on no switch is a rack of its own
    in_rack = np.array([rack_of.get(host, cluster.n_nodes + host) for host in range(n_hosts)])
    switch = np.unique(in_rack, return_inverse=True)[1].reshape(-1)[machine]
    if how == "packed":
        left = np.bincount(machine[ready], minlength=len(cluster.host_names))

        def cost(first: int) -> tuple[int, int, int]:
            own = ready[first : first + n]
            begun = np.bincount(machine[own], minlength=len(left))
            touched = begun > 0
            return len(np.unique(switch[own])), int(touched.sum()), int((left - begun)[touched].sum())

        first = min(range(len(ready) - n + 1), key=cost)
        return ready[first : first + n]
    if how == "random":
        drawn = stream(seed, 0, "placement").permutation(len(ready))[:n]
        return [ready[i] for i in sorted(drawn.tolist())]
    chosen: list[int] = []
    of_machine, of_switch = np.zeros(len(cluster.host_names), dtype=int), np.zeros(int(switch.max()) + 1, dtype=int)
    for _ in range(n):
        left_over = [place for place in ready if place not in chosen]
        place = min(left_over, key=lambda i: (of_machine[machine[i]], of_switch[switch[i]]))
        of_machine[machine[place]] += 1
        of_switch[switch[place]] += 1
        chosen.append(place)
    return [place for place in order if place in set(chosen)]
