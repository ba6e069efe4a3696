"""Algorithms of a plan's collectives, one per kind, and the order of their members; the fastest all-reduce, which
``algorithm="auto"`` selects."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import axes, innermost, levels
from ddlsim.cluster.rings import rings
from ddlsim.collectives import Collective, Schedule, algorithm_names, build, reorder
from ddlsim.collectives.build import default_algorithm, size_class
from ddlsim.collectives.nccl_choice import Choice
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.network import schedule_time
from ddlsim.plan.plan import KINDS, PUSH_PULL, ROOTED, Ints, Plan
from ddlsim.readable import si
from ddlsim.ties import tie

if TYPE_CHECKING:
    from ddlsim.plan.program import StepProgram

#: how collectives run if nothing else is said: in rings and pipelined chains as NCCL, all-to-alls at once
ALGORITHMS: dict[str, str | Collective] = {
    "all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "broadcast": "chain", "reduce": "chain",
    "gather": "direct", "scatter": "direct", "all_to_all": "direct", "push_pull": "direct",
}  # fmt: skip


def _algorithms(algorithm: str | Collective | Mapping[str, str | Collective]) -> dict[str, str | Collective]:
    """Return the algorithm of every kind of collective."""
    chosen = dict(algorithm) if isinstance(algorithm, Mapping) else {"all_reduce": algorithm}
    if isinstance(algorithm, str) and algorithm in ("nccl", "nccl_ring", "torus", "default"):
        chosen |= dict.fromkeys(("reduce_scatter", "all_gather"), algorithm)
    for kind in chosen:
        if kind not in ALGORITHMS:
            raise unknown_name("kind of collective", str(kind), ALGORITHMS, "algorithm")
    push = chosen.get("push_pull", "direct")
    if push not in ("direct", "tree", "star"):
        raise ConfigError(f"algorithm['push_pull'] = {shown(push)}: must be 'direct', 'tree' or 'star'")
    return ALGORITHMS | chosen


def _resolved(
    algorithms: dict[str, str | Collective], plan: Plan | StepProgram, cluster: Cluster | None, nodes: Ints | None
) -> dict[str, str | Collective]:
    """Return the algorithms with "default" resolved for the nodes of all of the plan's workers."""
    if cluster is None or nodes is None or "default" not in algorithms.values():
        return algorithms
    workers = np.delete(nodes, plan.servers)
    at = workers[cluster.locality_order(workers)].tolist()
    return {
        kind: default_algorithm(cluster, at, kind) if algorithm == "default" else algorithm
        for kind, algorithm in algorithms.items()
    }


class MemberSchedules:
    """The schedules of collectives among some ranks.

    order           (n_ranks,) the ranks in ring order
    cluster, nodes  node of each rank; None: machines and neighbours are ignored
    notes           algorithms that "auto" selects are added and, if `of_nccl`, the first choices of NCCL's tuner

    Sizes with the same number of segments, or the same choice of the tuner, share a schedule.
    """

    def __init__(
        self, order: Ints, cluster: Cluster | None, nodes: Sequence[int], notes: list[str], *, of_nccl: bool = False
    ) -> None:
        self.order, self.cluster, self.nodes, self.notes, self.of_nccl = order, cluster, nodes, notes, of_nccl
        self.where = None if cluster is None else (cluster, tuple(nodes[place] for place in order.tolist()))
        self._of_size: dict[tuple[str, str | int, Hashable], Schedule] = {}
        self._of_nbytes: dict[tuple[str, str | int, float], tuple[Schedule, str | Collective]] = {}

    def of(self, kind: str, algorithm: str | Collective, nbytes: float) -> Schedule:
        """Return the schedule of a kind of collective for a number of bytes per rank."""
        named = algorithm if isinstance(algorithm, str) else id(algorithm)  # custom ones may not be hashable
        entry = self._of_nbytes.get((kind, named, nbytes))
        if entry is None:
            entry = self._of_nbytes[kind, named, nbytes] = self._of_bytes(kind, algorithm, nbytes, named), algorithm
        return entry[0]

    def _of_bytes(self, kind: str, algorithm: str | Collective, nbytes: float, named: str | int) -> Schedule:
        automatic = algorithm == "auto" and kind == "all_reduce"
        size = nbytes if automatic else size_class(algorithm, nbytes, kind, self.where)
        key = kind, named, size
        if key not in self._of_size:
            if isinstance(size, Choice) and self.of_nccl:
                said = f"nccl: {size.algorithm} with {size.protocol} for "
                if not any(note.startswith(said) for note in self.notes):
                    self.notes.append(f"{said}{si(nbytes, 'B', 3)}")
            if automatic and self.cluster is not None:
                algorithm = fastest(self.cluster, self.nodes, self.order, nbytes, self.notes)
            make: Callable[..., Schedule] = _built if len(self.order) <= MANY else _built_of_many
            if not isinstance(algorithm, str) or ":" in algorithm:  # custom code may depend on anything
                make = _built.__wrapped__
            self._of_size[key] = make(algorithm, kind, nbytes, self.where, tuple(self.order.tolist()))
        return self._of_size[key]


class Schedules:
    """The schedule of a kind of collective for a group of a plan and a number of bytes.

    Without a `cluster`, machines and neighbours are ignored. Algorithms that "auto" selects are added to `notes`.
    """

    def __init__(
        self,
        plan: Plan | StepProgram,
        algorithm: str | Collective | Mapping[str, str | Collective],
        cluster: Cluster | None = None,
        nodes: Ints | None = None,
        rank_order: str | Sequence[int] = "given",
        notes: list[str] | None = None,
    ) -> None:
        self.plan, self.cluster, self.nodes = plan, cluster, nodes
        self.notes: list[str] = [] if notes is None else notes
        self.algorithms = _resolved(_algorithms(algorithm), plan, cluster, nodes)
        self.orders = [_wanted(rank_order, plan, group) for group in plan.groups]
        self._members, self._push_pull = functools.cache(self._of_members), functools.cache(self._through_servers)

    def __call__(self, kind: int, group: int, nbytes: float) -> Schedule:
        if kind == PUSH_PULL:
            return self._push_pull(group)
        return self._members(group, kind in ROOTED).of(KINDS[kind], self.algorithms[KINDS[kind]], nbytes)

    def _through_servers(self, group: int) -> Schedule:
        members, algorithm = np.array(self.plan.groups[group]), self.algorithms["push_pull"]
        n_servers = int(np.isin(members, self.plan.servers).sum())
        n, inside = len(members) - n_servers, None
        if algorithm != "direct" and self.cluster is not None and self.nodes is not None:
            inside = innermost(self.cluster, self.nodes[members[:n]].tolist())
        return push_pull(n, n_servers, inside, star=algorithm == "star")

    def _of_members(self, group: int, rooted: bool) -> MemberSchedules:
        """Return the schedules of a group; if `rooted`, its first member stays the root, in any order."""
        order, nodes = self.orders[group], list[int]()
        if self.cluster is not None and self.nodes is not None:
            nodes = self.nodes[np.array(self.plan.groups[group])].tolist()
            order = self.cluster.locality_order(nodes) if isinstance(order, str) else order
        places = np.asarray(order)
        if rooted:
            places = np.roll(places, -int(np.flatnonzero(places == 0)[0]))
        return MemberSchedules(places, self.cluster if nodes else None, nodes, self.notes)


@functools.lru_cache(maxsize=256)
def _built(
    algorithm: str | Collective,
    kind: str,
    nbytes: float,
    where: tuple[Cluster, tuple[int, ...]] | None,
    order: tuple[int, ...],
) -> Schedule:
    """Return the schedule of ranks in this ring `order`, which are at `where` in this order.

    Runs on one cluster share those of bundled algorithms, which depend on nothing else.
    """
    return reorder(build(algorithm, len(order), nbytes, None, kind, where), np.array(order))


MANY = 64  # ranks above which a schedule can take megabytes, so fewer are kept
_built_of_many = functools.lru_cache(maxsize=16)(_built.__wrapped__)


def _wanted(rank_order: str | Sequence[int], plan: Plan | StepProgram, group: tuple[int, ...]) -> str | Ints:
    """Return the order of a group's members: "topology", or their places in the group in the order wanted."""
    if isinstance(rank_order, str):
        if rank_order not in ("topology", "given"):
            raise ConfigError(f"rank_order = {rank_order!r}: must be 'given', 'topology' or a list of ranks")
        return "topology" if rank_order == "topology" else np.arange(len(group))
    if sorted(rank_order) != list(range(plan.n_ranks)):
        last = plan.n_ranks - 1
        raise ConfigError(f"rank_order = {list(rank_order)}: must contain each rank from 0 to {last} once")
    return np.array([group.index(rank) for rank in rank_order if rank in group], dtype=np.int64)


# ---------------------------------------------------------------- the fastest all-reduce

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
    notes.append(f"auto: {best} is the fastest algorithm for {si(nbytes, 'B', 3)} ({times[best] * 1e3:.4g} ms)")
    return best
