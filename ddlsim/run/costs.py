"""What a run costs and what energy it takes.

Paid for is every machine that holds a worker or that the run's traffic touches, for the run's whole time: the
machine's price, and those of the devices in it that workers use. The machine's price may stand in the cluster file or
in :meth:`ddlsim.Cluster.with_costs`; where there is none, the prices of the workers' devices count alone.

Energy is that of the workers' devices (their busy power while they compute, their idle power at all other times) and
of the switches between the machines that the traffic touches. CPUs beside GPUs, memory and cooling are not in it. A
device that communicates draws more than an idle one, so this is a lower bound as far as communication goes; the
datasheet's power, which arithmetic seldom reaches, makes it an upper one as far as computing goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device, load_device

if TYPE_CHECKING:
    from ddlsim.cluster import Cluster
    from ddlsim.run.result import Result

__all__ = ["cost_rate", "energy", "host_price"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def cost_rate(result: Result) -> float:
    """Return what the machines of a run cost, in USD/s. Raises ConfigError, with the remedy, for one without price."""
    cluster = result.cluster
    used = np.unique(cluster.host_of[_touched(result)])
    total = 0.0
    for host in used[used >= 0].tolist():
        nodes = result.nodes[cluster.host_of[result.nodes] == host]
        total += host_price(cluster, host, nodes, result.experiment.device)
    return total


def host_price(cluster: Cluster, host: int, workers: Ints, given: str | Device | None = None) -> float:
    """Return what machine number `host` and the devices of the `workers` (nodes) in it cost, in USD/s.

    Raises ConfigError, with the remedy, where nobody has said; `given` is the device instead of the cluster's own.
    """
    prices = [] if cluster.host_price is None else [float(cluster.host_price[host])]
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


def energy(result: Result) -> float:
    """Return the energy of a run in J. Raises ConfigError, with the remedy, for a power that is not known."""
    cluster = result.cluster
    total = 0.0
    seconds = result.workers["compute"].tolist()
    for node, busy in zip(result.nodes.tolist(), seconds, strict=True):
        device = _device(cluster, node, result.experiment.device)
        if device is None or device.idle_power_w is None:
            name = "None" if device is None else device.name
            raise ConfigError(
                f"energy: the idle power of device {name!r} is not known; give it: "
                f"device=dataclasses.replace(ddlsim.load_device({name!r}), idle_power_w=...), with what its monitoring "
                "tool shows (nvidia-smi, say)"
            )
        total += busy * device.power_w + (result.end_time - busy) * device.idle_power_w
    for switch in np.flatnonzero(_touched(result) & cluster.is_fabric_switch).tolist():
        watts = np.nan if cluster.switch_power is None else cluster.switch_power[switch]
        if np.isnan(watts):
            raise ConfigError(
                f"energy: the power of switch {cluster.node_names[switch]!r} of cluster {cluster.name!r} is not known; "
                "give it: cluster.with_costs(switch_power='150 W'), or switch_power = '150 W' in its file"
            )
        total += float(watts) * result.end_time
    return total


def _touched(result: Result) -> Bools:
    """Return which nodes hold a worker, or are at an end of a link that carried bytes, shape (n_nodes,)."""
    cluster = result.cluster
    touched = np.zeros(cluster.n_nodes, dtype=bool)
    touched[result.nodes] = True
    carried = result.channel_nbytes[cluster.link_channel] > 0.0
    touched[cluster.link_src[carried]] = True
    touched[cluster.link_dst[carried]] = True
    return touched


def _device(cluster: Cluster, node: int, given: str | Device | None) -> Device | None:
    name = given or cluster.device_of[node]
    return None if name is None else load_device(name)
