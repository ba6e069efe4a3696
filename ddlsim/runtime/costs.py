"""What collectives cost in a run: simulated message by message, by a measured curve, or as NCCL's tuner expects.

Where the time of a whole collective is known, nothing is left to simulate: it starts when its last rank has joined and
takes that time for all ranks, and the collectives of one group run one after the other, as on NCCL's stream. Stragglers
hold it up as ever. It never takes less time than the tightest link on its way needs for its bytes
(:mod:`ddlsim.runtime.charges`). What this leaves out: other traffic on the same links does not slow it, and ranks do
not leave at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import simpy

from ddlsim.arguments import one_of
from ddlsim.cluster.calibration_table import CurveTable
from ddlsim.collectives import Collective
from ddlsim.collectives.nccl import nccl_time
from ddlsim.errors import ConfigError
from ddlsim.runtime.algorithms import name_of, schedule_time, schedules
from ddlsim.runtime.charges import Charge, by_schedule, spread
from ddlsim.runtime.curve_cost import curve_seconds, parts_of
from ddlsim.runtime.loop import Loop, Traffic
from ddlsim.runtime.setting import Setting

__all__ = ["COSTS", "Cost", "Stream", "stream_of"]

COSTS = ("simulated", "calibrated", "nccl")
Cost = Annotated[str, one_of(*COSTS)]
#: our names of what NCCL's tuner chooses among; None: whatever is fastest
_NCCL = {"ring": "ring", "double_binary_tree": "tree", "auto": None}
_SCHEDULE = {"ring": "ring", "tree": "double_binary_tree"}


@dataclass(frozen=True)
class Known:
    """A collective whose time is known: `seconds`, and the bytes that it puts on the channels."""

    seconds: float
    traffic: Traffic


class Stream:
    """Collectives of one group of ranks, one after the other, that take a known time.

    ``known``  bytes -> what a collective over them takes
    """

    def __init__(self, loop: Loop, n_ranks: int, known: Callable[[float], Known]) -> None:
        self.loop = loop
        self.n_ranks = n_ranks
        self.known = known
        self._known: dict[float, Known] = {}
        self._joined: dict[tuple[int, int], list[simpy.Event]] = {}

    def join(self, operation: tuple[int, int], tensor: int, nbytes: float, rank: int) -> simpy.Event:
        """A rank enters a collective over `nbytes` now; the event returned is triggered when it has ended."""
        event = self.loop.env.event()
        joined = self._joined.setdefault(operation, [])
        joined.append(event)
        if len(joined) == self.n_ranks:
            del self._joined[operation]
            if nbytes not in self._known:
                self._known[nbytes] = self.known(nbytes)
            found = self._known[nbytes]
            end = self.loop.known(found.seconds, found.traffic)
            for each in joined:
                self.loop.trigger_at(each, end)
        return event


def stream_of(
    setting: Setting, owner: str, cost: str, algorithm: str | Collective, rank_order: str | Sequence[int],
    kind: str = "all_reduce",
) -> Stream | None:  # fmt: skip
    """Return the stream on which the workers' collectives of a `kind` run, or None where they are simulated.

    Raises ConfigError, saying what to measure or to change, where the cluster has no curve for them, for an algorithm
    that the curve or NCCL does not know, and beside compression, whose payloads are other collectives.
    """
    if cost == "simulated" or len(setting.workers) == 1:
        return None
    where = f"{owner}: cost = {cost!r}"
    if setting.compression is not None:
        raise ConfigError(f"{where} is that of dense gradients; with compression use cost = 'simulated'")
    make = _by_curve if cost == "calibrated" else _by_nccl
    return Stream(setting.loop, len(setting.workers), make(setting, where, algorithm, rank_order, kind))


def _known(setting: Setting, what: str, nbytes: float, seconds: float, charge: Charge, n_messages: int) -> Known:
    """Return a collective that takes `seconds`, or as long as the tightest link needs for what is charged to it.

    Notes it, once for `what`, if that is longer. All links that it uses are busy as long as it runs.
    """
    cluster, least = setting.cluster, charge.seconds
    if least > seconds * (1.0 + 1e-9) and not any(note.startswith(f"{what}: link ") for note in setting.notes):
        link = int(np.flatnonzero(cluster.link_channel == charge.tightest)[0])
        source, target = (cluster.node_names[ends[link]] for ends in (cluster.link_src, cluster.link_dst))
        setting.notes.append(
            f"{what}: link {source} -> {target} ({cluster.link_kind[link]}) needs {least * 1e3:.4g} ms for its part of "
            f"{nbytes / 1e6:.3g} MB, not {seconds * 1e3:.4g} ms: the link's time counts"
        )
    seconds = max(seconds, least)
    busy = np.where(charge.nbytes > 0.0, seconds, 0.0)
    return Known(seconds, Traffic(charge.nbytes, busy, charge.sent, n_messages))


# ---------------------------------------------------------------- by a measured curve


def _by_curve(
    setting: Setting, where: str, algorithm: str | Collective, rank_order: str | Sequence[int], kind: str
) -> Callable[[float], Known]:
    curve = _curve(setting, where, kind)
    if name_of(algorithm) != curve.algorithm:
        raise ConfigError(
            f"{where}: the curve of {kind} was fitted to {curve.algorithm!r}, not to {name_of(algorithm)!r}; use "
            f"algorithm = {curve.algorithm!r}, or calibrate with --algorithm {kind}={name_of(algorithm)}"
        )
    schedule = schedules(setting, algorithm, rank_order, kind)
    nodes = setting.nodes
    (least, most), backend = curve.nbytes, f" by {curve.backend}" if curve.backend else ""
    setting.notes.append(
        f"cost = 'calibrated': collectives take the time of the measured curve of {kind}{backend}; other traffic does "
        "not slow them"
    )
    warned: list[str] = []

    def known(nbytes: float) -> Known:
        if not least <= nbytes <= most and not warned:
            warned.append(f"the curve was measured from {least} to {most} bytes; {nbytes:.0f} lie beyond: extrapolated")
            setting.notes.append(warned[0])
        plan = schedule(nbytes)
        parts = parts_of(lambda cluster: schedule_time(cluster, plan, nodes, nbytes), setting.cluster, nbytes)
        seconds = curve_seconds(parts, curve.per_message, curve.sizes, curve.per_byte)
        charge = by_schedule(setting.cluster, plan, nodes, nbytes)
        if charge.seconds > seconds and _NCCL.get(curve.algorithm) is not None:  # it must have used more links
            wide = spread(setting.cluster, nodes, nbytes, str(_NCCL[curve.algorithm]), kind)
            charge = min(charge, wide, key=lambda c: c.seconds)
        return _known(setting, "cost = 'calibrated'", nbytes, seconds, charge, plan.n_messages)

    return known


def _curve(setting: Setting, where: str, kind: str) -> CurveTable:
    """Return the cluster's curve for as many ranks as there are workers, placed as they are."""
    cluster, n = setting.cluster, len(setting.workers)
    inside = len(set(setting.hosts(setting.nodes).tolist())) == 1
    place = "inside a host" if inside else "between hosts"
    remedy = (
        f"measure {kind} of at least 3 sizes on {n} ranks {place} (python -m ddlsim.measure --only collective), then "
        "ddlsim calibrate"
    )
    table = cluster.calibration
    if table is None:
        raise ConfigError(f"{where}: cluster {cluster.name!r} is not calibrated; {remedy}")
    own = [c for c in table.curves if (c.operation, c.inside) == (kind, inside)]
    if not own:
        raise ConfigError(f"{where}: cluster {cluster.name!r} has no curve of {kind} {place}; {remedy}")
    fitting = [c for c in own if c.ranks[0] <= n <= c.ranks[1]]
    if not fitting:
        known = ", ".join(f"{c.ranks[0]} to {c.ranks[1]}" for c in own)
        raise ConfigError(
            f"{where}: cluster {cluster.name!r} has curves of {kind} {place} for {known} ranks, not for {n}; {remedy}"
        )
    if len(fitting) > 1:
        backends = " and ".join(sorted(repr(c.backend) for c in fitting))
        raise ConfigError(f"{where}: {kind} was measured by {backends}; calibrate with --backend, for one of them")
    return fitting[0]


# ---------------------------------------------------------------- by NCCL's tuner


def _by_nccl(
    setting: Setting, where: str, algorithm: str | Collective, rank_order: str | Sequence[int], kind: str
) -> Callable[[float], Known]:
    name = name_of(algorithm)
    if name not in _NCCL:
        raise ConfigError(
            f"{where}: NCCL has no {name!r}; use algorithm = 'ring', 'double_binary_tree', or 'auto' for what its "
            "tuner chooses"
        )
    n, cluster = len(setting.workers), setting.cluster
    plans = {ours: schedules(setting, ours, rank_order, kind) for ours in dict.fromkeys(_SCHEDULE.values())}
    setting.notes.append("cost = 'nccl': collectives take the time that NCCL's tuner expects; other traffic does not "
                         "slow them")  # fmt: skip
    seen: set[tuple[str, str]] = set()

    def known(nbytes: float) -> Known:
        choice = nccl_time(cluster, nbytes, kind=kind, ranks=n, algorithm=_NCCL[name])
        if (choice.algorithm, choice.protocol) not in seen:
            seen.add((choice.algorithm, choice.protocol))
            setting.notes.append(f"nccl: {choice.algorithm} by {choice.protocol} for {nbytes / 1e6:.3g} MB")
        charge = spread(cluster, setting.nodes, nbytes, choice.algorithm, kind)
        n_messages = plans[_SCHEDULE[choice.algorithm]](nbytes).n_messages
        return _known(setting, "cost = 'nccl'", nbytes, choice.seconds, charge, n_messages)

    return known
