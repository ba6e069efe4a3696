"""`build`: a checked schedule from an algorithm (a name or a custom function), ranks and bytes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ddlsim.arguments import Index, NotNegative, checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import axes, groups_of, levels, members
from ddlsim.cluster.rings import rails, rings
from ddlsim.collectives.check import check, validate
from ddlsim.collectives.lookup import bound_arguments, called, find, n_segments_for, parameters_of
from ddlsim.collectives.nccl_choice import choose, several_ways, way
from ddlsim.collectives.nccl_tuner import ALGORITHMS, LAPS, PROTOCOLS
from ddlsim.collectives.schedule import KINDS, Collective, Ints, Kind, Ranks, Schedule
from ddlsim.errors import ConfigError, unknown_name

#: custom schedules that move more chunks than this are verified on FEW_RANKS ranks instead
CHECK_LIMIT = 4_000_000
FEW_RANKS = 64
#: parameters of algorithms that are requests for information about the network, and the functions that return it
_OF_NETWORK: dict[str, Callable[[Cluster, tuple[int, ...]], Any]] = {
    "rings": rings,
    "rails": rails,
    "axes": axes,
    "levels": levels,
}


def default_algorithm(cluster: Cluster, nodes: Sequence[int], kind: str = "all_reduce") -> str:
    """Return the algorithm that runs use if none is set: "torus" on tori of TPUs; "nccl" if GPUs have several paths to
    each other; "hierarchical" for all-reduces if machines hold one worker each and levels take less time; or "ring"."""
    return _default_algorithm(cluster, tuple(map(int, nodes)), kind)


@functools.lru_cache(maxsize=1024)
def _default_algorithm(cluster: Cluster, nodes: tuple[int, ...], kind: str) -> str:
    at = np.array(nodes)
    if kind in LAPS and all((cluster.device_of[node] or "").startswith("tpu-") for node in nodes):
        places = axes(cluster, nodes)
        if places is not None and places.ndim > 1:
            return "torus"
    if kind == "all_reduce" and len(members(cluster, at)) == len(at) and levels(cluster, nodes).are_several:
        ring, by_levels = (build(name, len(at), where=(cluster, nodes)) for name in ("ring", "hierarchical"))
        if _link_seconds(cluster, at, by_levels) < _link_seconds(cluster, at, ring) * (1.0 - 1e-9):
            return "hierarchical"
    return "nccl" if several_ways(cluster, nodes) else "ring"


def _link_seconds(cluster: Cluster, at: Ints, schedule: Schedule) -> float:
    """Return the time of a schedule's rounds on the links, one after the other, in s per byte of the buffer."""
    seconds = 0.0
    for r in (r for lane in schedule.lanes for r in lane):
        routes = cluster.routes(at[r.src], at[r.dst])
        nbytes = np.repeat(schedule.message_bytes(1.0, r), np.diff(routes.offsets))
        load = np.bincount(cluster.link_channel[routes.links], nbytes, cluster.n_channels)
        seconds += r.repeat * float((load / cluster.nominal_capacity).max())
    return seconds


def size_class(
    algorithm: str | Collective, nbytes: float, kind: str, where: tuple[Cluster, Sequence[int]] | None
) -> Hashable:
    """Return a key that is equal for sizes with the same schedule."""
    if _takes_bytes(algorithm, kind) if isinstance(algorithm, str) else "nbytes" in parameters_of(algorithm):
        return n_segments_for(nbytes), int(nbytes).bit_length()
    if where is None or len(where[1]) == 1:
        return n_segments_for(nbytes)
    if algorithm == "default":
        algorithm = default_algorithm(*where, kind)
    if not isinstance(algorithm, str) or algorithm.partition("(")[0].strip() != "nccl" or kind not in LAPS:
        return n_segments_for(nbytes)
    return choose(where[0], tuple(where[1]), nbytes, kind, *_forced_by(algorithm, kind))


@functools.lru_cache(maxsize=64)
def _takes_bytes(algorithm: str, kind: str) -> bool:
    """Whether the schedule depends on the size in bytes (only the power of two matters)."""
    return algorithm != "default" and kind in KINDS and "nbytes" in parameters_of(find(algorithm, kind))


@functools.lru_cache(maxsize=64)
def _forced_by(algorithm: str, kind: str) -> tuple[str | None, str | None]:
    return forced(find(algorithm, kind))


def forced(function: Collective) -> tuple[str | None, str | None]:
    """Return the algorithm and the protocol fixed by "nccl(algorithm, protocol)"; None if NCCL's tuner chooses."""
    words = [bound_arguments(function).get(key) for key in ("algorithm", "protocol")]
    for word, names, what in zip(words, (ALGORITHMS, PROTOCOLS), ("algorithm", "protocol"), strict=True):
        if word is not None and word not in names:
            raise unknown_name(f"{what} of NCCL", str(word), names)
    algorithm, protocol = (None if word is None else str(word) for word in words)
    return algorithm, protocol


@checked
def build(
    algorithm: str | Collective,
    n_ranks: Ranks,
    nbytes: NotNegative = 25 * 2**20,
    hosts: Sequence[Index] | None = None,
    kind: Kind = "all_reduce",
    where: tuple[Cluster, Sequence[Index]] | None = None,
) -> Schedule:
    """Build the schedule of a collective on `n_ranks` ranks.

    algorithm  a function, its path as ``"package.module:function"``, or a name (see
               :func:`ddlsim.collectives.lookup.algorithm_names`), optionally with arguments, as in
               ``"parameter_server(4)"`` or ``"hierarchical(ring, halving_doubling)"``
    nbytes     size of the buffer on each rank, in bytes. Algorithms with a parameter `nbytes` receive this size; all
               sizes between two consecutive powers of two share a schedule. Algorithms with a parameter `n_segments`
               receive the number of 512 KiB segments.
    hosts      (n_ranks,) the machine of each rank. Algorithms with a parameter `groups` receive the ranks of each
               machine.
    kind       the collective that the schedule implements, such as "all_reduce"
    where      tuple of the cluster and the node of each rank. Algorithms request information about the network with
               parameters of these names: `levels` (groups of ranks at every network level,
               :mod:`ddlsim.cluster.groups`), `rings` (ring orders that use all links,
               :func:`ddlsim.cluster.rings.rings`), `way` (the choice of NCCL's tuner,
               :func:`ddlsim.collectives.nccl_choice.way`), `rails` (ranks by network interface of their machine,
               :func:`ddlsim.cluster.rings.rails`) and `axes` (ranks by position on tori,
               :func:`ddlsim.cluster.groups.axes`).

    "default" selects "torus", "nccl", "hierarchical" or "ring" (see :func:`default_algorithm`).

    The schedule of a custom function is verified with :func:`ddlsim.collectives.check.check` before it is used. If it
    moves more than 4 million chunks, the function's schedule for 64 ranks is verified instead.

    Raises ConfigError, giving the algorithm and the reason, if no schedule can be built.
    """
    if hosts is not None and len(hosts) != n_ranks:
        raise ConfigError(f"hosts has {len(hosts)} entries for {n_ranks} ranks; pass one per rank")
    if algorithm == "default":
        algorithm = "ring" if where is None else default_algorithm(*where, kind)
    function = find(algorithm, kind)
    name = algorithm if isinstance(algorithm, str) else getattr(function, "__name__", repr(function))
    schedule = _call(function, name, n_ranks, nbytes, hosts, where, kind)
    if (isinstance(algorithm, str) and ":" not in algorithm) or _is_builtin(function):
        return schedule
    if not _prove(schedule, name, n_ranks, kind):
        small = _call(function, name, FEW_RANKS, nbytes, None if hosts is None else hosts[:FEW_RANKS])
        _prove(small, name, FEW_RANKS, kind)
    return schedule


def _call(
    function: Collective,
    name: str,
    n_ranks: int,
    nbytes: float,
    hosts: Sequence[int] | None,
    where: tuple[Cluster, Sequence[int]] | None = None,
    kind: str = "all_reduce",
) -> Schedule:
    """Call a collective algorithm with the size and the network information that its parameters request."""
    parameters = parameters_of(function)
    wanted = set(parameters) - set(bound_arguments(function))
    more: dict[str, Any] = {}
    if where is not None:
        cluster, nodes = where[0], tuple(map(int, where[1]))
        more |= {name: of_network(cluster, nodes) for name, of_network in _OF_NETWORK.items() if name in wanted}
        if "way" in wanted and n_ranks > 1:
            more["way"] = way(cluster, nodes, nbytes, kind, *forced(function))
    if "nbytes" in wanted:
        more["nbytes"] = nbytes
    if "n_segments" in wanted:
        more["n_segments"] = n_segments_for(nbytes)
    if "groups" in wanted and (hosts is not None or where is not None):
        more["groups"] = groups_of(np.array(hosts)) if where is None else tuple(members(where[0], np.array(where[1])))
    elif "groups" in wanted and parameters["groups"].default is inspect.Parameter.empty:
        raise ConfigError(f"collective {name!r} requires the machine of each rank; pass hosts")
    try:
        return called(function, n_ranks, **more)
    except TypeError as error:
        if _is_builtin(function):
            raise
        raise ConfigError(f"collective {name!r} must be callable as function(n_ranks) -> Schedule: {error}") from error


def _is_builtin(function: Collective) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("ddlsim.")


def _prove(schedule: Schedule, name: str, n_ranks: int, kind: str) -> bool:
    """Verify the result of a custom algorithm; return False if it is too large to be replayed."""
    where = f"collective {name!r} for {n_ranks} ranks"
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"{where} returned a {type(schedule).__name__}; expected a Schedule")
    if (schedule.n_ranks, schedule.kind) != (n_ranks, kind):
        raise ConfigError(
            f"{where} returned a schedule for {schedule.n_ranks} ranks of kind {schedule.kind!r}; expected {kind!r} "
            f"for {n_ranks} ranks"
        )
    try:
        validate(schedule)
        moves = sum(r.repeat * int(r.count.sum()) for lane in schedule.lanes for r in lane)
        replayable = moves <= CHECK_LIMIT
        if replayable:
            check(schedule)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return replayable
