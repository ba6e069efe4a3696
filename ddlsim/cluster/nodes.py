"""The inside of a machine: a single processor, or GPUs with their links.

The generators place one :class:`Host` or :class:`MultiGpu` at every position of their fabric. Its *ports* are the nodes
to which the network links (kind "nic" on switched fabrics) are attached: one per NIC.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from ddlsim.arguments import Bandwidth, Density, Positive, checked, one_of, quantity
from ddlsim.cluster.details import LinkDetail
from ddlsim.cluster.quantity import Places, Quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si

if TYPE_CHECKING:
    import networkx as nx

#: a link without details
PLAIN_LINK = LinkDetail()

INTERIORS = ("nvswitch", "nvlink_mesh", "hybrid_cube_mesh", "pcie_tree")

#: Bonded NVLinks between the 8 GPUs of a DGX-1 V100: `nvidia-smi topo -m` prints NV1 and NV2 for these pairs.
_SINGLE = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
_DOUBLE = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
HYBRID_CUBE_MESH = dict(sorted({**dict.fromkeys(_SINGLE, 1), **dict.fromkeys(_DOUBLE, 2)}.items()))

Latency = Annotated[Quantity, quantity("time", zero=True)]
Overhead = Latency
Price = Annotated[Quantity, quantity("price", zero=True)]


@checked
@dataclass(frozen=True)
class Host:
    """A machine with a single processor, which is the machine's only endpoint.

    Use :class:`MultiGpu` for machines with GPUs, even for a single GPU.

    device            name of the processor in the device catalogue, or the path to a device file; required to predict
                      compute times
    speed             compute speed relative to the catalogue speed of the device; with 0.5, every computation takes
                      twice as long
    send_overhead     software time in seconds to send a message (o in LogGP, Alexandrov et al. 1995)
    recv_overhead     software time in seconds to receive a message
    reduce_bandwidth  rate in bytes/s at which received data is reduced; None: reduction takes no time
    price             price of the machine, such as "3.06 USD/h"; None: unknown
    device_price      additional price of the device, if it is charged separately from the machine
    """

    device: str | None = None
    speed: Positive = 1.0
    send_overhead: Overhead = 0.0
    recv_overhead: Overhead = 0.0
    reduce_bandwidth: Bandwidth | None = None
    price: Price | None = None
    device_price: Price | None = None


@checked
@dataclass(frozen=True)
class MultiGpu:
    """A machine with several GPUs. All bandwidths are per direction.

    n_gpus            number of GPUs
    inside            topology inside the machine. "nvswitch": every GPU has an NVLink to a single crossbar;
                      "nvlink_mesh": every pair of GPUs has an NVLink; "hybrid_cube_mesh": 8 GPUs as in the DGX-1 V100,
                      with one or two NVLinks between connected pairs; "pcie_tree": no NVLinks
    device            name of the GPU in the device catalogue, or the path to a device file
    cpu               name of the CPU in the device catalogue. The CPU is a "host" node, on which parameter servers can
                      run
    pcie_bandwidth, pcie_latency
                      bandwidth and latency of each PCIe link
    cpu_bandwidth     bandwidth of the links between the PCIe switches and the CPU; None: `pcie_bandwidth`
    nvlink_bandwidth, nvlink_latency, nvlink_efficiency
                      bandwidth and latency of each NVLink, and the fraction of the bandwidth available for payload
    n_pcie_switches   number of PCIe switches, each with one link to the CPU; GPUs are distributed over them in order
    n_nics            number of NICs. A single NIC is attached to the CPU, or to the PCIe switch if there is only one.
                      Several NICs are distributed over the PCIe switches in order: with 32 NICs and 8 switches of one
                      GPU each, every GPU uses four NICs; with 2 NICs and 4 switches, every second switch has one

    The remaining fields are described in :class:`Host` and apply to each GPU. Overheads also apply to the CPU, and
    `price` is the price of the whole machine.
    """

    n_gpus: Places
    inside: Annotated[str, one_of(*INTERIORS)] = "pcie_tree"
    device: str | None = None
    cpu: str | None = None
    pcie_bandwidth: Bandwidth = "12 GB/s"  # PCIe 3.0 x16, payload rate of device-to-host copies
    pcie_latency: Latency = "1 us"
    cpu_bandwidth: Bandwidth | None = None  # PCIe switch to CPU; None: as pcie_bandwidth
    nvlink_bandwidth: Bandwidth | None = None
    nvlink_latency: Latency = "0.7 us"
    nvlink_efficiency: Density = 1.0
    n_pcie_switches: Places = 1
    n_nics: Places = 1
    speed: Positive = 1.0
    send_overhead: Overhead = 0.0
    recv_overhead: Overhead = 0.0
    reduce_bandwidth: Bandwidth | None = None
    price: Price | None = None
    device_price: Price | None = None


Interior: TypeAlias = Host | MultiGpu


class Graph:
    """The graph of a cluster under construction, with a part of the interface of `networkx.MultiDiGraph`, which is slow
    to import.

    graph  attributes of the graph
    nodes  attributes of each node
    adj    attributes of the links by source, destination and key
    pred   the same by destination, source and key
    """

    def __init__(self, **attributes: Any) -> None:
        self.graph = attributes
        self.nodes: dict[str, dict[str, Any]] = {}
        self.adj: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
        self.pred: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}

    def __contains__(self, node: str) -> bool:
        return node in self.nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def add_node(self, node: str, /, **attributes: Any) -> None:
        if node not in self.nodes:
            self.nodes[node], self.adj[node], self.pred[node] = {}, {}, {}
        self.nodes[node].update(attributes)

    def add_edge(self, u: str, v: str, key: int | None = None, /, **attributes: Any) -> None:
        self.add_link(u, v, key, attributes)

    def add_link(self, u: str, v: str, key: int | None, attributes: dict[str, Any]) -> None:
        """Add a link, or change the attributes of the one with this key. Links may share their `attributes`."""
        links = self.adj[u].get(v)
        if links is None:
            links = self.adj[u][v] = self.pred[v][u] = {}
        if key is None:
            key = len(links)
            while key in links:
                key += 1
        links[key] = {**links[key], **attributes} if key in links else attributes

    def number_of_edges(self) -> int:
        return sum(len(links) for ends in self.adj.values() for links in ends.values())

    def edges(self) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
        """Yield (source, destination, key, attributes) of all links, by source in the order of the nodes."""
        for u, ends in self.adj.items():
            for v, links in ends.items():
                for key, attributes in links.items():
                    yield u, v, key, attributes

    def to_networkx(self) -> nx.MultiDiGraph[str]:
        import networkx as nx

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(**self.graph)
        graph.add_nodes_from(self.nodes.items())
        for u, v, key, attributes in self.edges():
            graph.add_edge(u, v, key, **attributes)
        return graph


def connect(
    graph: Graph,
    a: str,
    b: str,
    kind: str,
    bandwidth: float,
    latency: float,
    *,
    efficiency: float = 1.0,
    reverse_bandwidth: float | None = None,
    shared: bool = False,
    detail: LinkDetail = PLAIN_LINK,
) -> None:
    """Add the links a -> b and b -> a; `shared` makes them half duplex."""
    key = None
    if shared:  # the same key in both directions connects them
        key = max(len(graph.adj[u].get(v, ())) for u, v in ((a, b), (b, a)))
    more = kind, latency, efficiency, shared, None if detail is PLAIN_LINK else detail
    graph.add_link(a, b, key, _link_attributes(bandwidth, *more))
    graph.add_link(b, a, key, _link_attributes(bandwidth if reverse_bandwidth is None else reverse_bandwidth, *more))


@functools.lru_cache(maxsize=256, typed=True)
def _link_attributes(
    bandwidth: float, kind: str, latency: float, efficiency: float, shared: bool, detail: LinkDetail | None
) -> dict[str, Any]:
    data: dict[str, Any] = {"bandwidth": bandwidth, "latency": latency, "kind": kind}
    if efficiency != 1:
        data["efficiency"] = efficiency
    if detail is not None:
        data.update(detail.written())
    if shared:
        data["shared"] = True
    return data


def add_host(graph: Graph, name: str, interior: Interior) -> list[str]:
    """Add the machine `name` to the graph and return its ports."""
    if isinstance(interior, MultiGpu):
        return _add_multi_gpu(graph, name, interior)
    graph.add_node(name, kind="host", **_endpoint(interior, name, interior.device))
    return [name]


def size_of(interior: Interior) -> tuple[int, int]:
    """Return the number of nodes and directed links in a machine. Raises ConfigError like :func:`add_host`."""
    if isinstance(interior, Host):
        return 1, 0
    _check(interior)
    n, n_switches = interior.n_gpus, interior.n_pcie_switches
    crossbar = interior.inside == "nvswitch"
    cube, mesh = len(HYBRID_CUBE_MESH), n * (n - 1) // 2
    nvlinks = {"pcie_tree": 0, "nvswitch": n, "hybrid_cube_mesh": cube, "nvlink_mesh": mesh}[interior.inside]
    return n + n_switches + 1 + crossbar, 2 * (n + n_switches + nvlinks)


def _endpoint(interior: Interior, host: str, device: str | None) -> dict[str, Any]:
    data: dict[str, Any] = {"host": host}
    if device is not None:
        data["device"] = device
    if interior.speed != 1:
        data["speed"] = interior.speed
    for field in ("send_overhead", "recv_overhead"):
        seconds = si(getattr(interior, field), "time")
        if seconds:
            data[field] = seconds
    if interior.reduce_bandwidth is not None:
        data["reduce_time"] = 1 / si(interior.reduce_bandwidth, "bandwidth")
    for field in ("price", "device_price"):
        if getattr(interior, field) is not None:
            data[field] = si(getattr(interior, field), "price")
    return data


def _check(host: MultiGpu) -> None:
    if host.inside == "hybrid_cube_mesh" and host.n_gpus != 8:
        raise ConfigError(
            f"host: n_gpus = {host.n_gpus} is incompatible with inside = 'hybrid_cube_mesh', which has 8 GPUs; use "
            "n_gpus = 8"
        )
    if host.inside != "pcie_tree" and host.nvlink_bandwidth is None:
        raise ConfigError(f"host: inside = {host.inside!r} requires nvlink_bandwidth; set a rate such as '25 GB/s'")
    if host.inside == "pcie_tree" and host.nvlink_bandwidth is not None:
        raise ConfigError(
            f"host: nvlink_bandwidth = {host.nvlink_bandwidth!r} has no effect with inside = 'pcie_tree'; "
            f"remove nvlink_bandwidth or choose inside = 'nvlink_mesh'"
        )


def _add_multi_gpu(graph: Graph, name: str, host: MultiGpu) -> list[str]:
    _check(host)
    gpus = [f"{name}.gpu{i}" for i in range(host.n_gpus)]
    switches = [f"{name}.pcie{i}" for i in range(host.n_pcie_switches)]
    cpu = f"{name}.cpu"
    for gpu in gpus:
        graph.add_node(gpu, kind="gpu", **_endpoint(host, name, host.device))
    cpu_data = _endpoint(host, name, host.cpu)
    for key in ("speed", "device_price"):  # these apply to the GPUs
        cpu_data.pop(key, None)
    graph.add_node(cpu, kind="host", **cpu_data)
    for switch in switches:
        graph.add_node(switch, kind="switch", host=name)
    if host.nvlink_bandwidth is not None:  # unless inside is "pcie_tree"
        _add_nvlink(graph, name, host, gpus, si(host.nvlink_bandwidth, "bandwidth"))
    pcie = si(host.pcie_bandwidth, "bandwidth")
    latency = si(host.pcie_latency, "time")
    for i, gpu in enumerate(gpus):
        connect(graph, gpu, switches[i * len(switches) // len(gpus)], "pcie", pcie, latency)
    uplink = pcie if host.cpu_bandwidth is None else si(host.cpu_bandwidth, "bandwidth")
    for switch in switches:
        connect(graph, switch, cpu, "pcie", uplink, latency)
    if host.n_nics == 1:
        return [cpu if len(switches) > 1 else switches[0]]
    return [switches[i * len(switches) // host.n_nics] for i in range(host.n_nics)]


def _add_nvlink(graph: Graph, name: str, host: MultiGpu, gpus: list[str], bandwidth: float) -> None:
    latency, efficiency = si(host.nvlink_latency, "time"), host.nvlink_efficiency
    if host.inside == "nvswitch":
        crossbar = f"{name}.nvswitch"
        graph.add_node(crossbar, kind="switch", host=name)
        for gpu in gpus:
            connect(graph, gpu, crossbar, "nvlink", bandwidth, latency, efficiency=efficiency)
        return
    mesh = dict.fromkeys(itertools.combinations(range(host.n_gpus), 2), 1)
    pairs = HYBRID_CUBE_MESH if host.inside == "hybrid_cube_mesh" else mesh
    for (a, b), n_links in pairs.items():
        connect(graph, gpus[a], gpus[b], "nvlink", n_links * bandwidth, latency, efficiency=efficiency)
