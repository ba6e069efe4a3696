"""What collectives cost in a run: simulated message by message, by a measured curve, or as NCCL's tuner expects.

Where the time of a whole collective is known, nothing is left to simulate: it starts when its last rank has joined and
takes that time for all ranks, and the collectives of one communicator run one after the other, as on NCCL's stream.
Stragglers hold it up as ever. It never takes less time than the tightest link on its way needs for its bytes
(:mod:`ddlsim.runtime.charges`). Other jobs, background traffic and faults slow it (:mod:`ddlsim.runtime.known`). What
this leaves out: other traffic of the same run does not slow it, and ranks do not leave at different times.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.cluster.calibration_table import CurveTable
from ddlsim.collectives import Collective, Schedule, build
from ddlsim.collectives.build import forced
from ddlsim.collectives.find import find
from ddlsim.collectives.nccl import bus_bandwidth, nccl_time
from ddlsim.errors import ConfigError
from ddlsim.network import schedule_time
from ddlsim.runtime.charges import Charge, Load, by_schedule, spread
from ddlsim.runtime.curve_cost import curve_seconds, parts_of
from ddlsim.runtime.fabric import name_of
from ddlsim.runtime.known import Known, Messages
from ddlsim.runtime.loop import Traffic
from ddlsim.runtime.setting import Setting

#: our names of what NCCL's tuner chooses among; None: whatever is fastest
_NCCL = {"ring": "ring", "nccl_ring": "ring", "double_binary_tree": "tree", "auto": None, "nccl": None}
#: schedules with as many messages; those of the others are NCCL's own
_SCHEDULE = {"ring": "ring", "tree": "double_binary_tree"}


class Phase(NamedTuple):
    """Collectives of one `kind` over `nbytes` each, side by side; ``groups`` are the nodes of each, by rank."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: float


def known_cost(
    setting: Setting, cost: str, owner: str, algorithm: str | Collective, nodes: Sequence[int], kind: str
) -> Callable[[Phase], Known]:
    """Return what a phase of a `kind` among the workers at `nodes` takes by a measured curve or by NCCL's tuner.

    Raises ConfigError, saying what to measure or to change, where the cluster has no curve for it, and for an
    algorithm that the curve or NCCL does not know.
    """
    where = f"{owner}: cost = {cost!r}"
    if cost == "calibrated":
        return _by_curve(setting, where, algorithm, nodes, kind)
    return _by_nccl(setting, where, algorithm, kind)


def _known(
    setting: Setting, what: str, nbytes: float, seconds: float, charge: Charge, n_messages: int, moving: float
) -> Known:
    """Return a collective that takes `seconds`, or as long as the tightest link needs for what is charged to it.

    Notes it, once for `what`, if that is longer. All links that it uses are busy as long as it runs; those whose
    bandwidth makes it last hold it for the s that are `moving`, inversely proportional to bandwidths.
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
    overhead = max(moving / least - 1.0, 0.0) if least > 0.0 else 0.0
    traffic = Traffic(charge.nbytes, busy, charge.sent, n_messages)
    return Known(cluster, seconds, traffic, (Messages(*charge.messages, overhead),))


def _undisturbed(setting: Setting) -> str:
    """Return what is left out, where that is so."""
    return "" if setting.loop.network.is_shared else "; other traffic does not slow them"


def _schedule(
    setting: Setting, algorithm: str | Collective, group: Sequence[int], nbytes: float, kind: str
) -> Schedule:
    """Return the schedule of a collective among a group, rank r being at ``group[r]``."""
    return build(algorithm, len(group), nbytes, None, kind, (setting.cluster, group))


# ---------------------------------------------------------------- by a measured curve


def _by_curve(
    setting: Setting, where: str, algorithm: str | Collective, nodes: Sequence[int], kind: str
) -> Callable[[Phase], Known]:
    curve = _curve(setting, where, nodes, kind)
    if name_of(algorithm) != curve.algorithm:
        raise ConfigError(
            f"{where}: the curve of {kind} was fitted to {curve.algorithm!r}, not to {name_of(algorithm)!r}; use "
            f"algorithm = {curve.algorithm!r}, or calibrate with --algorithm {kind}={name_of(algorithm)}"
        )
    (least, most), backend = curve.nbytes, f" by {curve.backend}" if curve.backend else ""
    setting.notes.append(
        f"cost = 'calibrated': collectives take the time of the measured curve of {kind}{backend}"
        f"{_undisturbed(setting)}"
    )
    warned: list[str] = []

    def known(phase: Phase) -> Known:
        cluster, nbytes = setting.cluster, phase.nbytes
        if not least <= nbytes <= most and not warned:
            warned.append(f"the curve was measured from {least} to {most} bytes; {nbytes:.0f} lie beyond: extrapolated")
            setting.notes.append(warned[0])
        plans = [_schedule(setting, algorithm, group, nbytes, kind) for group in phase.groups]
        seconds, moving, own, wide = 0.0, 0.0, Load(cluster), Load(cluster)
        for group, plan in zip(phase.groups, plans, strict=True):
            parts = parts_of(lambda c, g=group, p=plan: schedule_time(c, p, g, nbytes), cluster, nbytes)  # type: ignore[misc]
            seconds = max(seconds, curve_seconds(parts, curve.per_message, curve.sizes, curve.per_byte))
            moving = max(moving, curve_seconds(parts, 0.0, curve.sizes, curve.per_byte) - parts.reduction)
            by_schedule(own, plan, group, nbytes)
            if _NCCL.get(curve.algorithm) is not None:
                spread(wide, group, nbytes, str(_NCCL[curve.algorithm]), kind)
        charge = own.charge()
        if charge.seconds > seconds and not wide.empty:  # it must have used more links
            charge = min(charge, wide.charge(), key=lambda c: c.seconds)
        n_messages = sum(plan.n_messages for plan in plans)
        return _known(setting, "cost = 'calibrated'", nbytes, seconds, charge, n_messages, moving)

    return known


def _curve(setting: Setting, where: str, nodes: Sequence[int], kind: str) -> CurveTable:
    """Return the cluster's curve for as many ranks as there are nodes, placed as they are."""
    cluster, n = setting.cluster, len(nodes)
    inside = len(set(setting.hosts(list(nodes)).tolist())) == 1
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


def _by_nccl(setting: Setting, where: str, algorithm: str | Collective, kind: str) -> Callable[[Phase], Known]:
    name = name_of(algorithm)
    wanted, protocol = (_NCCL.get(name), None) if "(" not in name else forced(find(name, kind))
    if name.partition("(")[0] not in _NCCL or (wanted is None and "(" in name):
        raise ConfigError(
            f"{where}: NCCL has no {name!r}; use algorithm = 'ring', 'double_binary_tree', or 'auto' for what its "
            "tuner chooses"
        )
    cluster = setting.cluster
    said = f"cost = 'nccl': collectives take the time that NCCL's tuner expects{_undisturbed(setting)}"
    if said not in setting.notes:
        setting.notes.append(said)
    seen: set[tuple[str, str]] = set()

    def known(phase: Phase) -> Known:
        nbytes, seconds, moving, n_messages, load = phase.nbytes, 0.0, 0.0, 0, Load(cluster)
        beside = _side_by_side(setting, phase)
        for group in phase.groups:
            if len(group) == 1:
                continue
            bus = bus_bandwidth(cluster, len(group), group)[0] / beside
            site = functools.partial(nccl_time, cluster, nbytes, kind=kind, nodes=group)
            choice = site(algorithm=wanted, protocol=protocol, bandwidth=bus if beside > 1 else None)
            chosen = functools.partial(site, algorithm=choice.algorithm, protocol=choice.protocol)
            moving = max(moving, 2.0 * (chosen(bandwidth=bus).seconds - chosen(bandwidth=2.0 * bus).seconds))
            if (choice.algorithm, choice.protocol) not in seen:
                seen.add((choice.algorithm, choice.protocol))
                setting.notes.append(f"nccl: {choice.algorithm} by {choice.protocol} for {nbytes / 1e6:.3g} MB")
            name_of_plan = _SCHEDULE.get(choice.algorithm, f"nccl({choice.algorithm})")
            plan = _schedule(setting, name_of_plan, group, nbytes, kind)
            if choice.algorithm in _SCHEDULE:
                spread(load, group, nbytes, choice.algorithm, kind)
            else:
                by_schedule(load, plan, group, nbytes)
            n_messages += plan.n_messages
            seconds = max(seconds, choice.seconds)
        return _known(setting, "cost = 'nccl'", nbytes, seconds, load.charge(), n_messages, moving)

    return known


def _side_by_side(setting: Setting, phase: Phase) -> int:
    """Return how many of a phase's groups share the links of a machine to the others, at most."""
    shared: Counter[int] = Counter()
    for group in phase.groups:
        machines = set(setting.hosts(list(group)).tolist())
        if len(machines) > 1:
            shared.update(machines)
    return max(shared.values(), default=1)
