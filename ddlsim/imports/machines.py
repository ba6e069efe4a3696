"""Imported machines, and clusters of several copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddlsim.cluster import Cluster, Host
from ddlsim.cluster.graphs import from_graph
from ddlsim.cluster.nodes import Graph, add_host, connect
from ddlsim.cluster.quantity import Quantity, check_size, nonnegative, positive
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import device_names, load_device


@dataclass
class Machine:
    """The inside of one machine; names are local ("gpu0"), bandwidths are in bytes/s per direction.

    gpus, cpus    endpoints; switches   nodes that only forward: PCIe switches, an NVSwitch, NICs
    links         (a, b, kind, bandwidth, latency), both directions; one_way   the same for a -> b only
    ports         (node, bandwidth) of each cable to the network
    """

    gpus: list[str] = field(default_factory=list)
    cpus: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    links: list[tuple[str, str, str, float, float]] = field(default_factory=list)
    one_way: list[tuple[str, str, str, float, float]] = field(default_factory=list)
    ports: list[tuple[str, float]] = field(default_factory=list)


def assemble(
    source: Path, machines: Sequence[Machine], device: str | None, network_latency: Quantity, notes: Sequence[str] = ()
) -> Cluster:
    """Return the cluster of these machines, node0, node1, ...; if there are several, one switch connects all ports.

    device           key of the device catalogue, for the GPUs
    network_latency  of each link between a port and that switch

    Raises :class:`ConfigError` if there are several machines and one of them has no port.
    """
    graph: Graph = Graph(name=source.stem, sources=[source.name], notes=list(notes))
    latency = nonnegative(network_latency, "time", "network_latency")
    n_nodes = sum(len(machine.gpus) + len(machine.cpus) + len(machine.switches) for machine in machines)
    n_links = sum(2 * len(machine.links) + len(machine.one_way) + 2 * len(machine.ports) for machine in machines)
    check_size(n_nodes, n_links, f"{source}: {len(machines)} machines")
    for i, machine in enumerate(machines):
        host = f"node{i}"
        for gpu in machine.gpus:
            add_host(graph, f"{host}.{gpu}", Host(device=device))
            graph.nodes[f"{host}.{gpu}"].update(kind="gpu", host=host)
        for kind, names in (("host", machine.cpus), ("switch", machine.switches)):
            for name in names:
                graph.add_node(f"{host}.{name}", kind=kind, host=host)
        for a, b, kind, bandwidth, delay in machine.links:
            connect(graph, f"{host}.{a}", f"{host}.{b}", kind, bandwidth, delay)
        for a, b, kind, bandwidth, delay in machine.one_way:
            graph.add_edge(f"{host}.{a}", f"{host}.{b}", bandwidth=bandwidth, latency=delay, kind=kind)
        if len(machines) > 1:
            if not machine.ports:
                raise ConfigError(
                    f"{source}: machines can only be connected if the speed of a NIC is known; set nic_bandwidth "
                    "(--set nic_bandwidth=...), or n_hosts=1"
                )
            graph.add_node("network", kind="switch")
            for port, bandwidth in machine.ports:
                connect(graph, f"{host}.{port}", "network", "nic", bandwidth, latency)
    return named_cluster(graph, source)


def nic_rate(nic_bandwidth: Quantity | None, n_hosts: int, source: Path) -> float | None:
    """Return the bandwidth of NICs in bytes/s, or None. Raises ConfigError if it has no effect on a single machine."""
    if n_hosts == 1 and nic_bandwidth is not None:
        problem = f"nic_bandwidth = {nic_bandwidth!r} has no effect on a single machine"
        raise ConfigError(f"{source}: {problem}; set n_hosts or remove nic_bandwidth")
    return None if nic_bandwidth is None else positive(nic_bandwidth, "bandwidth", "nic_bandwidth")


#: approximate rate of copies over x16 in bytes/s, by PCIe generation (15.75, 31.5 and 63 GB/s raw)
PCIE_BANDWIDTH = {3: 12e9, 4: 25e9, 5: 50e9}


def pcie_rate(pcie_bandwidth: Quantity | None, device: str | None) -> float:
    """Return the bandwidth of PCIe links in bytes/s; the default is that of the device's PCIe generation (or 3)."""
    if pcie_bandwidth is not None:
        return positive(pcie_bandwidth, "bandwidth", "pcie_bandwidth")
    is_known = device is not None and (device in device_names() or device.endswith(".toml"))
    generation = load_device(device).pcie_generation if device is not None and is_known else None
    return PCIE_BANDWIDTH[generation or 3]


def named_cluster(graph: Graph, source: Path) -> Cluster:
    """Return the cluster of a graph; errors also name the file `source`."""
    try:
        return from_graph(graph)
    except ConfigError as error:
        raise type(error)(f"{source}: {error}") from None
