"""What a run costs and what energy it takes.

Paid for is every machine that holds a worker or that the run's traffic touches, for the run's whole time: the
machine's price, and those of the devices in it that workers use. The machine's price may stand in the cluster file or
in :meth:`ddlsim.Cluster.with_costs`, or be a cloud's (:func:`priced`); where there is none, the prices of the workers'
devices count alone. Storages without a price of their own cost nothing. Machines with workers that may be taken away
(spot instances) have their `discount`; they are paid for also while they are away. Each spare costs as much as the
dearest machine with workers. Jobs that use a machine or a switch at the same time share its price and power
(:func:`shares`).

Energy is that of the workers' devices (their busy power while they compute, their idle power at all other times) and
of the switches between the machines that the traffic touches. A device of unknown idle power is assumed to
draw its datasheet's power all the time, an upper bound; switches of unknown power are left out
(:func:`energy_assumptions` says which of these hold). Asynchronous workers draw nothing while their machine is out of
service. CPUs beside GPUs, memory and cooling are not in it. A device that
communicates draws more than an idle one, so with a given idle power this is a lower bound as far as communication goes;
the datasheet's power, which arithmetic seldom reaches, makes it an upper one as far as computing goes. Machines that
are out of service while an elastic group goes on without them draw nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device, load_device

if TYPE_CHECKING:
    from ddlsim.cluster import Cluster
    from ddlsim.run.outcome import Outcome

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def cost_rate(result: Outcome) -> float:
    """Return what the machines of a run cost, in USD/s. Raises ConfigError, with the remedy, for one without price."""
    cluster = result.cluster
    used = np.unique(cluster.host_of[_touched(cluster, result.nodes, result.channel_nbytes)])
    storages = cluster.host_of[cluster.storages]
    free = storages if cluster.host_price is None else storages[np.isnan(cluster.host_price[storages])]
    used = used[~np.isin(used, free)]
    failures, given = result.experiment.failures, result.experiment.device
    discount, n_spares = (0.0, 0) if failures is None else (failures.discount, failures.spares)
    total, dearest = 0.0, 0.0
    for host in used[used >= 0].tolist():
        nodes = result.nodes[cluster.host_of[result.nodes] == host]
        share = 1.0 if result.share is None else float(result.share[cluster.host_of == host][0])
        price = host_price(cluster, host, nodes, given, share)
        total += price * (1.0 - discount) if len(nodes) else price
        if n_spares and len(nodes):
            dearest = max(dearest, host_price(cluster, host, nodes, given))
    return total + n_spares * dearest * (1.0 - discount)


def shares(cluster: Cluster, runs: Sequence[tuple[float, float, Sequence[int], Floats]]) -> list[Floats]:
    """Return which share of each node's machine, or of a switch, each run bears while it runs, each (n_nodes,): by the
    number of its workers on the machine, or equal parts where its bytes only pass.

    runs  start and end (s), nodes of the workers, and bytes on each channel, of each run
    """
    inside = cluster.host_of >= 0
    weights = []
    for *_, nodes, nbytes in runs:
        weight = _touched(cluster, nodes, nbytes).astype(np.float64)
        machines = np.bincount(cluster.host_of[list(nodes)], minlength=len(cluster.host_names)).astype(np.float64)
        np.maximum.at(machines, cluster.host_of[inside], weight[inside])
        weight[inside] = machines[cluster.host_of[inside]]
        weights.append(weight)
    borne = np.zeros((len(runs), cluster.n_nodes))
    for first, last in itertools.pairwise(sorted({edge for run in runs for edge in run[:2]})):
        there = [i for i, (start, end, *_) in enumerate(runs) if start <= first and last <= end]
        total = sum((weights[i] for i in there), np.zeros(cluster.n_nodes))
        for i in there:
            borne[i] += weights[i] / np.maximum(total, 1.0) * (last - first)
    return [seconds / max(end - start, 1e-300) for seconds, (start, end, *_) in zip(borne, runs, strict=True)]


def priced(cluster: Cluster, price: float | str) -> Cluster:
    """Return the cluster with this price of every machine, "3.06 USD/h", or what a cloud, "aws", asks for its devices.

    Raises ConfigError for a device that the cloud does not have, or that the cluster does not name.
    """
    if not (isinstance(price, str) and price.isidentifier()):
        return cluster.with_costs(price=price)
    devices = [_device(cluster, node, None) for node in cluster.workers.tolist()]
    if None in devices:
        raise ConfigError(
            f"price: cluster {cluster.name!r} does not name its devices, so what {price!r} asks is not known; give a "
            "price, '3.06 USD/h'"
        )
    hosts = cluster.host_of[cluster.workers]
    prices = np.full(len(cluster.host_names), np.nan)
    prices[hosts] = 0.0
    np.add.at(prices, hosts, [device.price_in(price) for device in devices if device is not None])
    return dataclasses.replace(cluster, host_price=prices)


def host_price(
    cluster: Cluster, host: int, workers: Ints, given: str | Path | Device | None = None, share: float = 1.0
) -> float:
    """Return what a `share` of machine number `host` and the devices of the `workers` (nodes) in it cost, in USD/s.

    Raises ConfigError, with the remedy, if the price is unknown; `given` is the device instead of the cluster's own.
    """
    prices = [] if cluster.host_price is None else [share * float(cluster.host_price[host])]
    if cluster.device_price is not None:
        prices += cluster.device_price[workers].tolist()
    stated = [price for price in prices if price == price]
    if stated:
        return sum(stated)
    devices = [_device(cluster, node, given) for node in workers.tolist()]
    known = [device.price for device in devices if device is not None and device.price is not None]
    if not devices or len(known) < len(devices):
        raise ConfigError(
            f"cost: machine {cluster.host_names[host]!r} of cluster {cluster.name!r} has no price; give one: "
            "cluster.with_costs(price='3.06 USD/h'), or price = '3.06 USD/h' in [host] of its file"
        )
    return sum(known)


def energy(result: Outcome) -> float:
    """Return the energy of a run in J. Raises ConfigError, with the remedy, where workers have no known device."""
    cluster, elapsed, total = result.cluster, result.end_time, 0.0
    away = result.life.away if result.has_life else None  # machines that are out of service draw nothing
    there = np.full(result.n_workers, elapsed) if away is None else elapsed - away
    for node, busy, present in zip(result.nodes.tolist(), _computed(result).tolist(), there.tolist(), strict=True):
        device = _device(cluster, node, result.experiment.device)
        if device is None:
            raise ConfigError(
                f"energy: the devices of cluster {cluster.name!r}'s workers are unknown; set one, such as "
                "device='v100' in the experiment, or device = 'v100' in [host] of the cluster's file"
            )
        idle = device.power_w if device.idle_power_w is None else device.idle_power_w
        total += busy * device.power_w + (present - busy) * idle
    return total + float(np.nansum(_switch_watts(result))) * elapsed


def _computed(result: Outcome) -> Floats:
    """Return the s that each worker computes, also for what a failure takes back, (n_workers,)."""
    free = result.recorder.down is not None and result.end_time == result.simulated_time
    if free or not result.has_life:
        return result.device_seconds["compute"]
    life, pace = result.life, result.life.timeline.pace
    trained = life.useful + life.lost
    if life.computed is not None:
        return life.computed
    if pace.busy is None:  # devices compute as in the run while steps are made
        return np.asarray(trained / result.simulated_time * result.device_seconds["compute"])
    ends = pace.when(pace.until(life.stretches[:, 0]) + life.stretches[:, 2] - life.stretches[:, 1])
    each = [pace.computed(start, end) for start, end in zip(life.stretches[:, 0], ends.tolist(), strict=True)]
    return np.asarray(np.sum(each, axis=0) * trained / (trained + life.saving))


def energy_assumptions(result: Outcome) -> list[str]:
    """Return what :func:`energy` has assumed about this run where powers are not known; empty if all are."""
    devices = {
        device.name: device
        for node in result.nodes.tolist()
        if (device := _device(result.cluster, node, result.experiment.device)) is not None
    }
    unknown = [
        f"{name} at the datasheet's {device.power_w:g} W throughout"
        for name, device in devices.items()
        if device.idle_power_w is None
    ]
    return [*unknown, *(["switches left out"] if np.isnan(_switch_watts(result)).any() else [])]


def _switch_watts(result: Outcome) -> Floats:
    """Return the run's share of what each switch between machines that its traffic touches draws, NaN where that is not
    known."""
    cluster = result.cluster
    switches = np.flatnonzero(_touched(cluster, result.nodes, result.channel_nbytes) & cluster.is_fabric_switch)
    if cluster.switch_power is None:
        return np.full(len(switches), np.nan)
    return cluster.switch_power[switches] * (1.0 if result.share is None else result.share[switches])


def _touched(cluster: Cluster, nodes: Sequence[int] | Ints, nbytes: Floats) -> Bools:
    """Return which nodes hold a worker, or are at an end of a link that carried bytes, shape (n_nodes,)."""
    touched = np.zeros(cluster.n_nodes, dtype=bool)
    touched[list(nodes)] = True
    carried = nbytes[cluster.link_channel] > 0.0
    touched[cluster.link_src[carried]] = True
    touched[cluster.link_dst[carried]] = True
    return touched


def _device(cluster: Cluster, node: int, given: str | Path | Device | None) -> Device | None:
    name = given or cluster.device_of[node]
    return None if name is None else load_device(name)
