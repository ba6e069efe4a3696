"""Cost and energy of a run: docs/studies.md, Cost and energy, has the formulas and their limits.

Interruptible machines (spot instances) have a `discount`, and are also paid for while they are unavailable. Each spare
costs as much as the most expensive machine with workers. Asynchronous workers draw no power while their machine is out
of service, and neither do machines that an elastic group continues without.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster.cluster import Bools, Floats, Ints
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device, load_device

if TYPE_CHECKING:
    from ddlsim.cluster import Cluster
    from ddlsim.run.result import Result


def cost_rate(result: Result) -> float:
    """Return the cost of a run's machines in USD/s. Raises ConfigError, with the remedy, if a price is missing."""
    cluster = result.cluster
    used = np.unique(cluster.host_of[_touched(cluster, result.nodes, result.channel_nbytes)])
    used = used[~np.isin(used, _free_storages(cluster))]
    failures, chosen_device = result.experiment.failures, result.experiment.device
    discount, n_spares = (0.0, 0) if failures is None else (failures.discount, failures.spares)
    total, dearest = 0.0, 0.0
    for host in used[used >= 0].tolist():
        nodes = result.nodes[cluster.host_of[result.nodes] == host]
        share = 1.0 if result.share is None else float(result.share[cluster.host_of == host][0])
        price = host_price(cluster, host, nodes, chosen_device, share)
        total += price * (1.0 - discount) if len(nodes) else price
        if n_spares and len(nodes):
            dearest = max(dearest, host_price(cluster, host, nodes, chosen_device))
    return total + n_spares * dearest * (1.0 - discount)


def _free_storages(cluster: Cluster) -> Ints:
    """Return the machines of storages without a price."""
    storages = cluster.host_of[cluster.storages]
    return storages if cluster.host_price is None else storages[np.isnan(cluster.host_price[storages])]


def cost_assumptions(result: Result) -> list[str]:
    """Return the assumptions that :func:`cost_rate` makes about this run because of unknown prices."""
    cluster = result.cluster
    used = cluster.host_of[_touched(cluster, result.nodes, result.channel_nbytes)]
    return ["storage without price left out"] if np.isin(_free_storages(cluster), used).any() else []


def shares(cluster: Cluster, runs: Sequence[tuple[float, float, Sequence[int], Floats]]) -> list[Floats]:
    """Return the share of each node's machine or switch that each run pays for while it runs, each (n_nodes,): in
    proportion to its workers on the machine, or in equal parts if runs only send bytes through it.

    runs  start and end (s), nodes of the workers, and bytes on each channel, for each run
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
    """Return the cluster with a price per machine, "3.06 USD/h", or the prices of a cloud, "aws", for its devices.

    Raises ConfigError for a device that the cloud does not offer, or if the cluster names no devices.
    """
    if not (isinstance(price, str) and price.isidentifier()):
        return cluster.with_costs(price=price)
    devices = [_device(cluster, node, None) for node in cluster.workers.tolist()]
    if None in devices:
        raise ConfigError(
            f"price: cluster {cluster.name!r} does not specify its devices, so the price at {price!r} is "
            "unknown; set a price such as '3.06 USD/h'"
        )
    hosts = cluster.host_of[cluster.workers]
    prices = np.full(len(cluster.host_names), np.nan)
    prices[hosts] = 0.0
    np.add.at(prices, hosts, [device.price_in(price) for device in devices if device is not None])
    return dataclasses.replace(cluster, host_price=prices)


def host_price(
    cluster: Cluster, host: int, workers: Ints, chosen_device: str | Path | Device | None = None, share: float = 1.0
) -> float:
    """Return the cost of a `share` of machine number `host`, and of the devices of the `workers` (nodes) in it, in
    USD/s.

    Raises ConfigError, with the remedy, if the price is unknown; `chosen_device` replaces the cluster's.
    """
    prices = [] if cluster.host_price is None else [share * float(cluster.host_price[host])]
    if cluster.device_price is not None:
        prices += cluster.device_price[workers].tolist()
    stated = [price for price in prices if price == price]
    if stated:
        return sum(stated)
    devices = [_device(cluster, node, chosen_device) for node in workers.tolist()]
    device_prices = [device.price for device in devices if device is not None and device.price is not None]
    if not devices or len(device_prices) < len(devices):
        raise ConfigError(
            f"cost: machine {cluster.host_names[host]!r} of cluster {cluster.name!r} has no price; set "
            "one: cluster.with_costs(price='3.06 USD/h'), or price = '3.06 USD/h' in [host] of its file"
        )
    return sum(device_prices)


def energy(result: Result) -> float:
    """Return the energy of a run in J. Raises ConfigError, with the remedy, if a device or its power is unknown."""
    cluster, elapsed, total = result.cluster, result.end_time, 0.0
    there = np.full(result.n_workers, elapsed)
    if result.has_failure_timeline and result.failure_timeline.out_of_service is not None:
        there -= result.failure_timeline.out_of_service  # machines that are out of service draw no power
    for node, busy, present in zip(result.nodes.tolist(), _computed(result).tolist(), there.tolist(), strict=True):
        device = _device(cluster, node, result.experiment.device)
        if device is None:
            raise ConfigError(
                f"energy: the workers' devices in cluster {cluster.name!r} are unknown; for example, set device='v100' "
                "in the experiment, or device = 'v100' in [host] of the cluster file"
            )
        if not device.power_w:  # as in a file of ddlsim.measure on a device that does not report it
            raise ConfigError(f"energy: the power of device {device.name!r} is unknown; set power_w in its file")
        idle = device.power_w if device.idle_power_w is None else device.idle_power_w
        total += busy * device.power_w + (present - busy) * idle
    return total + float(np.nansum(_switch_watts(result))) * elapsed


def _computed(result: Result) -> Floats:
    """Return the compute time of each worker in s, including work lost in failures, (n_workers,)."""
    free = result.recorder.down is not None and result.end_time == result.simulated_time
    if free or not result.has_failure_timeline:
        return result.device_seconds["compute"]
    timeline, pace = result.failure_timeline, result.failure_timeline.timeline.pace
    trained = timeline.useful + timeline.lost
    if timeline.computed is not None:
        return timeline.computed
    if pace.busy is None:  # devices compute as in the run while training progresses
        return np.asarray(trained / result.simulated_time * result.device_seconds["compute"])
    starts, froms, tos = timeline.running_intervals.T
    ends = pace.when(pace.until(starts) + tos - froms)
    seconds = [pace.computed(start, end) for start, end in zip(starts, ends.tolist(), strict=True)]
    return np.asarray(np.sum(seconds, axis=0) * trained / (trained + timeline.checkpointing))


def energy_assumptions(result: Result) -> list[str]:
    """Return the assumptions that :func:`energy` makes about this run because of unknown powers; empty if all are
    known."""
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


def _switch_watts(result: Result) -> Floats:
    """Return the run's share of the power of each switch between machines with its traffic, in W, NaN if unknown."""
    cluster = result.cluster
    switches = np.flatnonzero(_touched(cluster, result.nodes, result.channel_nbytes) & cluster.is_fabric_switch)
    if cluster.switch_power is None:
        return np.full(len(switches), np.nan)
    return cluster.switch_power[switches] * (1.0 if result.share is None else result.share[switches])


def _touched(cluster: Cluster, nodes: Sequence[int] | Ints, nbytes: Floats) -> Bools:
    """Whether each node has a worker, or is at an end of a link that carried bytes, shape (n_nodes,)."""
    touched = np.zeros(cluster.n_nodes, dtype=bool)
    touched[list(nodes)] = True
    carried = nbytes[cluster.link_channel] > 0.0
    touched[cluster.link_src[carried]] = True
    touched[cluster.link_dst[carried]] = True
    return touched


def _device(cluster: Cluster, node: int, chosen_device: str | Path | Device | None) -> Device | None:
    name = chosen_device or cluster.device_of[node]
    return None if name is None else load_device(name)
