"""`Job`: a run that shares a cluster with other jobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

import numpy as np

from ddlsim.arguments import Index, checked, one_of, quantity, validated_by
from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import rack_of_hosts
from ddlsim.errors import ConfigError, shown
from ddlsim.run.experiment import Experiment, listed_places
from ddlsim.streams import stream
from ddlsim.units import si

PLACEMENTS = ("packed", "spread", "random")


def placed(cluster: Cluster, free: Collection[int], n: int, how: str, seed: int = 0) -> list[int]:
    """Return `n` of the places ``free`` (indices into ``cluster.workers``), in the order of the job's ranks.

    "packed"  neighbouring places, on as few switches and partly used machines as possible
    "spread"  one per machine, on as many switches as possible, before any machine gets two
    "random"  random places

    Ranks follow :meth:`ddlsim.Cluster.locality_order`. Raises ConfigError if fewer than `n` places are free.
    """
    if n > len(free):
        raise ConfigError(f"{n} devices are needed, but only {len(free)} devices of {cluster.name!r} are free")
    order = cluster.locality_order(cluster.workers).tolist()
    ready = [place for place in order if place in set(free)]
    machine = cluster.host_of[cluster.workers]
    rack_of = rack_of_hosts(cluster)
    n_hosts = len(cluster.host_names)  # a machine without a switch is its own rack
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


def machine_names(cluster: Cluster, places: Sequence[int]) -> list[str]:
    """Return the names of the machines with these places (in ``cluster.workers``)."""
    hosts = cluster.host_of[cluster.workers[list(places)]].tolist()
    return [cluster.host_names[host] for host in dict.fromkeys(hosts)]


PlacementLike = (
    Annotated[str, one_of(*PLACEMENTS)]
    | Annotated[Sequence[Index], "a placement or a list of positions such as [0, 1, 2, 3]", validated_by(listed_places)]
)


@checked
@dataclass(frozen=True)
class Job:
    """A training run that shares a cluster with other jobs.

    experiment  the run to simulate; its `workers` field is the number of devices, or a list of devices
    name        name in tables and messages; the default is "job 1", "job 2", and so on
    start       time at which the job arrives, in s on the cluster's clock
    placement   "packed" (neighbouring free devices), "spread" (across machines), "random", or a list of indices into
                ``cluster.workers``. If the experiment lists its devices, keep the default
    endless     True: after its last step, the job continues until all jobs without `endless` have ended, so that its
                traffic is present as long as those jobs run. (A training job still ends when it reaches its target.)

    Raises ConfigError if the experiment has co-located jobs itself, or if both the experiment and `placement` specify
    the devices.
    """

    experiment: Annotated[Experiment, "a ddlsim.Experiment object"]
    name: str = ""
    _: KW_ONLY
    start: Annotated[float | str, quantity("time", "12 s", zero=True)] = 0.0
    placement: PlacementLike = "packed"
    endless: bool = False

    def __post_init__(self) -> None:
        workers = self.experiment.workers
        if self.experiment.background:
            raise ConfigError(
                "Job: the experiment already has co-located jobs; list all jobs instead, and leave background out"
            )
        if isinstance(workers, Sequence) and self.placement != "packed":
            raise ConfigError(
                f"Job: placement = {shown(self.placement)} has no effect with workers = {list(workers)}; set "
                "workers to a number, or leave placement out"
            )

    def phases(self) -> list[tuple[float, float, Job]]:
        """Return (start, end, job) tuples, one for each time span in which the job is present.

        The job in each tuple starts at 0 s and never ends. The list is empty if the job is always present.
        """
        start = si(self.start, "time")
        return [(start, math.inf, replace(self, start=0.0))] if start else []

    @property
    def listed(self) -> tuple[int, ...]:
        """The indices into ``cluster.workers`` that the job lists; empty if it is placed."""
        places = self.experiment.workers if isinstance(self.placement, str) else self.placement
        return () if places is None or isinstance(places, int) else tuple(places)

    def n_workers(self, n_devices: int) -> int:
        """Return the number of devices that the job uses, on a cluster with `n_devices`."""
        if not isinstance(self.placement, str):
            return len(self.placement)
        asked = self.experiment.n_workers
        return n_devices if asked is None else asked
