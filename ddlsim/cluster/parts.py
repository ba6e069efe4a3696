"""What the topology generators share: checked links, oversubscribed trunks, the machines at their places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import networkx as nx

from ddlsim.cluster.nodes import Graph, Host, Interior, add_host, connect, size_of
from ddlsim.cluster.quantity import Quantity, check_size, fraction, nonnegative, positive
from ddlsim.errors import ConfigError

#: the nodes of a machine to which its NICs attach
Ports: TypeAlias = list[str]

#: the machine that stands at each place when nothing else is asked for
PLAIN = Host()


@dataclass(frozen=True)
class Link:
    """A checked pair of links: SI floats."""

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    reverse_bandwidth: float | None = None
    shared: bool = False

    def join(self, graph: Graph, a: str, b: str, kind: str) -> None:
        """Add the pair between `a` and `b`."""
        connect(
            graph, a, b, kind, self.bandwidth, self.latency,
            efficiency=self.efficiency, reverse_bandwidth=self.reverse_bandwidth, shared=self.shared,
        )  # fmt: skip


def checked_link(
    bandwidth: Quantity,
    latency: Quantity,
    efficiency: float = 1.0,
    reverse_bandwidth: Quantity | None = None,
    shared: bool = False,
    what: str = "",
) -> Link:
    if shared and reverse_bandwidth is not None:
        raise ConfigError(f"reverse_bandwidth = {reverse_bandwidth!r} has no effect on a shared link; remove one")
    return Link(
        positive(bandwidth, "bandwidth", f"{what}bandwidth"),
        nonnegative(latency, "time", f"{what}latency"),
        fraction(efficiency, "efficiency"),
        None if reverse_bandwidth is None else positive(reverse_bandwidth, "bandwidth", "reverse_bandwidth"),
        shared,
    )


def trunk_of(link: Link, bandwidth: Quantity | None, latency: Quantity | None, what: str = "trunk_") -> Link:
    """Return the link between switches: what is not given is as on the machines' links."""
    return Link(
        link.bandwidth if bandwidth is None else positive(bandwidth, "bandwidth", f"{what}bandwidth"),
        link.latency if latency is None else nonnegative(latency, "time", f"{what}latency"),
        link.efficiency,
    )


def oversubscribed(
    link: Link, n_down: int, n_up: int, oversubscription: float, bandwidth: Quantity | None, latency: Quantity | None
) -> Link:
    """Return the trunk of a switch with `n_down` links to machines and `n_up` trunks."""
    factor = positive(oversubscription, None, "oversubscription")
    if bandwidth is not None and factor != 1:
        raise ConfigError(
            f"oversubscription = {oversubscription!r} and trunk_bandwidth = {bandwidth!r} "
            f"say the same thing twice; remove one"
        )
    trunk = trunk_of(link, bandwidth, latency)
    return trunk if bandwidth is not None else replace(trunk, bandwidth=link.bandwidth * n_down / (n_up * factor))


def start(
    kind: str, routing: str, n_hosts: int, host: Interior, *, n_switches: int = 0, n_links: int = 0
) -> tuple[Graph, list[Ports]]:
    """Return a graph with the machines h0, h1, ... in it, and their ports.

    Raises ConfigError if these and `n_switches` and `n_links` more are too many to be built.
    """
    nodes, links = size_of(host)
    check_size(n_hosts * nodes + n_switches, n_hosts * links + n_links, f"{kind} of {n_hosts} machines")
    graph: Graph = nx.MultiDiGraph(name=f"{kind}-{n_hosts}", routing=routing)
    return graph, [add_host(graph, f"h{i}", host) for i in range(n_hosts)]


def add_switch(graph: Graph, name: str) -> str:
    graph.add_node(name, kind="switch")
    return name
