"""The fastest all-reduce for a number of bytes, which ``algorithm="auto"`` selects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from ddlsim.cluster import Cluster
from ddlsim.cluster.levels import axes, levels
from ddlsim.cluster.rings import rings
from ddlsim.collectives import algorithm_names, build, reorder
from ddlsim.errors import ConfigError
from ddlsim.network import schedule_time
from ddlsim.network.state import Ints
from ddlsim.ties import tie

#: algorithms that "auto" does not try: those that are never the fastest, duplicate another at these settings, or
#: (NCCL's) include protocol latencies that the others lack
NOT_TRIED = ("gloo_ring", "naive_ring", "nccl", "open_mpi", "parameter_server")


def fastest(cluster: Cluster, nodes: Sequence[int], order: Ints, nbytes: float, notes: list[str]) -> str:
    """Return the name of the fastest all-reduce for `nbytes` on the idle cluster, and note it.

    ``order`` contains the ranks in ring order. Hierarchical all-reduces are tried with other algorithms at one level
    after the other, and with fewer levels. Among ties (:mod:`ddlsim.ties`), the first name wins.
    """
    times: dict[str, float] = {}
    at = tuple(nodes[place] for place in order.tolist())

    def time(name: str) -> float:
        with contextlib.suppress(ConfigError):  # unsuitable for this number or placement of ranks
            schedule = reorder(build(name, len(order), nbytes, where=(cluster, at)), order)
            times[name] = schedule_time(cluster, schedule, nodes, nbytes)
        return times.get(name, math.inf)

    like_any_ring = {"nccl_ring"} if len(rings(cluster, at)) == 1 else set()
    like_any_ring |= {"torus"} if axes(cluster, at) is None else set()
    for name in algorithm_names():
        if name not in NOT_TRIED and name not in like_any_ring:
            time(name)
    chosen = list(levels(cluster, at).algorithms) if levels(cluster, at).are_several else []
    least = times.get("hierarchical", math.inf)
    for level, usual in enumerate(chosen):
        for other in (name for name in ("halving_doubling", "ring") if name != usual):
            variant = [*chosen[:level], other, *chosen[level + 1 :]]
            if (seconds := time(f"hierarchical({', '.join(variant)})")) < least:
                chosen, least = variant, seconds
    for n_levels in range(2, len(chosen)):
        time(f"hierarchical({', '.join(chosen[:n_levels])})")
    least = min(times.values())
    best = min(name for name, seconds in times.items() if tie(seconds, least))
    megabytes, milliseconds = nbytes / 1e6, times[best] * 1e3
    notes.append(f"auto: {best} is the fastest algorithm for {megabytes:.3g} MB ({milliseconds:.4g} ms)")
    return best
