"""Latency, bandwidth and overhead of the links for which the simulation takes as long as what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.calibrated import current_parameters, with_parameters
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.validation.cases import Case
from ddlsim.validation.log_fit import Floats, LogFit, Prior, fit_logs

#: how far off the cluster file may be: two times out of three within a factor of exp(sd)
LATENCY_SD = 1.5
BANDWIDTH_SD = 0.7
#: a message's latency where the file has none, s
TYPICAL_LATENCY = 10e-6
#: a column of the Jacobian counts as told apart from the others if this share of it is its own
DISTINCT = 0.1


@dataclass(frozen=True)
class LinkRow:
    """A measurement and what it is on the cluster; `link_class` is "between" or "inside" (hosts)."""

    row: Measurement
    case: Case

    @property
    def link_class(self) -> str:
        return "inside" if self.row.n_hosts == 1 else "between"


def fit_links(cluster: Cluster, rows: Sequence[LinkRow]) -> tuple[LogFit, list[str]]:
    """Return the fit of the parameters (:data:`ddlsim.cluster.calibrated.PARAMETERS`) that `rows` tell, and notes.

    Raises ConfigError, saying what to measure, where latency cannot be told from bandwidth.
    """
    _check_sizes(rows)
    given = current_parameters(cluster)
    names, start, priors = [], [], []
    for link_class in dict.fromkeys(row.link_class for row in rows):
        own = sorted((r for r in rows if r.link_class == link_class), key=lambda r: r.row.nbytes)
        least, ratio = own[0].row.median_s, own[-1].case.seconds(cluster) / own[-1].row.median_s
        for quantity, sd in (("latency", LATENCY_SD), ("bandwidth", BANDWIDTH_SD)):
            name = f"{link_class}.{quantity}"
            if name not in given:
                raise ConfigError(
                    f"cluster {cluster.name!r} has no links {link_class} hosts that two workers use, but there are "
                    "measurements of them; describe these links, or leave the measurements out"
                )
            value = given[name] or TYPICAL_LATENCY
            names.append(name)
            priors.append(Prior(value, sd if given[name] else 2 * sd))
            # near the solution, or the search may start where the parameter has no effect
            start.append(min(value, 0.5 * least) if quantity == "latency" else value * ratio)
    measured = np.array([r.row.median_s for r in rows])
    notes: list[str] = []
    overhead = given["overhead"] or 0.1 * min(start[::2])
    if _tells_overhead(cluster, rows, names, start, overhead):
        names.append("overhead")
        start.append(overhead)
        priors.append(Prior(overhead, LATENCY_SD if given["overhead"] else 2 * LATENCY_SD))
    else:
        notes.append(
            f"overhead per message left at {given['overhead'] * 1e6:.4g} us as in the file, the rest is latency: only "
            "several messages at once tell them apart (name the algorithm of a measured all-to-all)"
        )
    fit = fit_logs(lambda values: _times(cluster, rows, names, values), measured, names, start, priors)
    return fit, notes + _uninformed(fit)


def _check_sizes(rows: Sequence[LinkRow]) -> None:
    for link_class in dict.fromkeys(row.link_class for row in rows):
        own = [row.row for row in rows if row.link_class == link_class]
        if len({row.nbytes for row in own}) < 2:
            hosts = "between hosts" if link_class == "between" else "inside a host"
            raise ConfigError(
                f"calibration: links {hosts}: bandwidth cannot be told from latency by one size "
                f"({own[0].operation} of {own[0].nbytes} bytes): measure one_way at >= 2 sizes, such as 8 B and 16 MiB"
            )


def _times(cluster: Cluster, rows: Sequence[LinkRow], names: Sequence[str], values: Floats) -> Floats:
    changed = with_parameters(cluster, dict(zip(names, values.tolist(), strict=True)))
    return np.array([row.case.seconds(changed) for row in rows])


def _tells_overhead(
    cluster: Cluster, rows: Sequence[LinkRow], names: Sequence[str], start: Sequence[float], overhead: float
) -> bool:
    """Return whether the measurements change with the overhead in another way than with latency and bandwidth."""
    if len(rows) <= len(names):
        return False
    step = 1e-3
    everything = [*names, "overhead"]
    begin = np.log([*start, overhead])
    base = np.log(_times(cluster, rows, everything, np.exp(begin)))
    columns = []
    for i in range(len(begin)):
        moved = begin.copy()
        moved[i] += step
        columns.append((np.log(_times(cluster, rows, everything, np.exp(moved))) - base) / step)
    others, own = np.stack(columns[:-1], axis=1), columns[-1]
    rest = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
    length = float(np.linalg.norm(own))
    return length > 0.0 and float(np.linalg.norm(rest)) > DISTINCT * length


def _uninformed(fit: LogFit) -> list[str]:
    """Return a note for each parameter that rests on the cluster file more than on measurements."""
    remedies = {"latency": "measure small messages (8 B)", "bandwidth": "measure large messages (16 MiB)"}
    notes = []
    for (name, value), ends in zip(fit.values.items(), fit.bounds, strict=True):
        if value < 1.01 * ends[0] or value > 0.99 * ends[1]:
            notes.append(f"{name} ended at the bound of its search: the cluster file is too far from what was measured")
    for name, share in zip(fit.names, fit.informed.tolist(), strict=True):
        if share < 0.5:
            remedy = remedies.get(name.partition(".")[2], "measure several pairs at once")
            notes.append(f"{name} rests on the cluster file: the measurements hardly tell it; {remedy}")
    return notes

