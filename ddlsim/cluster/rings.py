"""Node orders with nearby neighbours, and rings over all links between GPUs, as found by NCCL's search.

Machines are visited in the order of a depth-first traversal of a spanning tree of the fabric. In a tree, it passes each
edge once down and once up, so a ring in this order crosses each uplink once per direction. In multi-rooted trees
(leaf-spine, fat tree), a breadth-first spanning tree keeps leaves and pods together. Inside a machine, the GPUs follow
a Hamiltonian cycle of its fastest direct links, if there is one. On tori, the order is a reflected Gray code, in which
successive positions differ by one step in one dimension.

NCCL calls rings channels (``src/graph/search.cc``, version 2.19). Inside a machine, they use disjoint NVLinks. Over
several machines, there is one ring per network interface. It enters a machine at the GPU nearest to the interface and
passes through all GPUs of the machine. Interfaces that are equally near to a GPU carry its ring together; if several
GPUs are equally near to the same number of interfaces, each has a ring. If two GPUs share an interface, the ring enters
and leaves through it. If each GPU has its own, the ring leaves through another interface, and passes through the next
machine in the opposite direction. Messages between machines therefore stay on their rail, and every interface sends and
receives for one ring each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from ddlsim.cluster.cluster import Cluster, Floats, Ints
from ddlsim.cluster.groups import members
from ddlsim.errors import ConfigError

#: above this size, the search for a cycle inside a machine is skipped, and the rank order is kept
_MAX_CYCLE = 16


def locality_order(cluster: Cluster, nodes: Ints) -> Ints:
    """Return a permutation of ``range(len(nodes))``; see the module's docstring. Equal nodes stay in order.

    The result is the traversal or the order of machine numbers, whichever crosses fewer links in total.
    """
    if len(nodes) < 2:
        return np.arange(len(nodes))
    if cluster.grid and cluster.routing == "dimension-order":
        tour = np.zeros(1, dtype=np.int64)
        for size in cluster.grid:  # row-major: later dimensions vary faster
            rows = [tour[i] * size + np.arange(size)[:: -1 if i % 2 else 1] for i in range(len(tour))]
            tour = np.concatenate(rows)
        place = np.empty(len(tour), dtype=np.int64)
        place[tour] = np.arange(len(tour))
        return np.argsort(place[nodes], kind="stable")
    machines, pieces = _by_machine(cluster, nodes)
    place = np.argsort(np.append(cluster.machine_tour, len(cluster.host_names)))
    plain = np.concatenate(pieces)
    touring = np.concatenate([pieces[i] for i in np.argsort(place[machines])])
    if np.array_equal(touring, plain):
        return plain
    return touring if _n_hops(cluster, nodes[touring]) < _n_hops(cluster, nodes[plain]) else plain


def _n_hops(cluster: Cluster, ring: Ints) -> int:
    try:
        return len(cluster.routes(ring, np.roll(ring, -1)).links)
    except ConfigError:
        return int(np.iinfo(np.int64).max)  # some pairs cannot communicate, so no ring is run


def machine_tour(cluster: Cluster) -> Ints:
    """Return the machines in the order of a depth-first traversal of a breadth-first spanning forest."""
    n_hosts, host_of = len(cluster.host_names), cluster.host_of
    # one vertex per machine, and one per fabric switch
    vertex = np.where(host_of >= 0, host_of, n_hosts + np.arange(cluster.n_nodes))
    beside: dict[int, set[int]] = {}
    for a, b in zip(vertex[cluster.link_src].tolist(), vertex[cluster.link_dst].tolist(), strict=True):
        if a != b:
            beside.setdefault(a, set()).add(b)
            beside.setdefault(b, set()).add(a)
    children: dict[int, list[int]] = {}
    seen: set[int] = set()
    tour: list[int] = []
    for root in range(n_hosts):
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for at in queue:
            children[at] = sorted(beside.get(at, set()) - seen)
            seen.update(children[at])
            queue += children[at]
        stack = [root]
        while stack:
            at = stack.pop()
            if at < n_hosts:
                tour.append(at)
            stack.extend(reversed(children[at]))
    return np.array(tour, dtype=np.int64)


def _by_machine(cluster: Cluster, nodes: Ints) -> tuple[Ints, list[Ints]]:
    """Return the machines of nodes in ascending order, and the indices of each one's nodes along fast links; those of
    nodes outside machines are last."""
    host = cluster.host_of[nodes] % (len(cluster.host_names) + 1)  # -1, outside machines, becomes the last number
    order = np.lexsort((nodes, host))
    starts = np.flatnonzero(np.diff(host[order], prepend=-1))
    direct, pieces = cluster.direct_links, []
    for piece in np.split(order, starts[1:]):
        members = nodes[piece].tolist()
        pieces.append(piece[_fast_cycle(tuple(tuple(direct.get((a, b), 0.0) for b in members) for a in members))])
    return host[order[starts]], pieces


def direct_links(cluster: Cluster) -> dict[tuple[int, int], float]:
    """Return the bandwidth of the links between endpoints of one machine."""
    src, dst = cluster.link_src, cluster.link_dst
    within = np.flatnonzero(
        cluster.is_endpoint[src] & cluster.is_endpoint[dst] & (cluster.host_of[src] == cluster.host_of[dst])
    )
    bandwidths: dict[tuple[int, int], float] = {}
    for link in within.tolist():
        pair = int(src[link]), int(dst[link])
        bandwidths[pair] = bandwidths.get(pair, 0.0) + float(cluster.link_bandwidth[link])
    return bandwidths


@functools.lru_cache(maxsize=64)
def _fast_cycle(speeds: tuple[tuple[float, ...], ...]) -> list[int]:
    """Return a Hamiltonian cycle from 0 that maximises the rate of its slowest link, or the rank order."""
    n = len(speeds)
    if 2 < n <= _MAX_CYCLE:
        for slowest in sorted({speed for row in speeds for speed in row if speed > 0}, reverse=True):
            cycle = _cycle(speeds, slowest, [0])
            if cycle:
                return cycle
    return list(range(n))


def _cycle(speeds: tuple[tuple[float, ...], ...], slowest: float, path: list[int]) -> list[int]:
    """Extend `path` to a cycle over links of at least `slowest`; return [] if there is none."""
    if len(path) == len(speeds):
        return path if speeds[path[-1]][path[0]] >= slowest else []
    for after in range(len(speeds)):
        if after not in path and speeds[path[-1]][after] >= slowest:
            cycle = _cycle(speeds, slowest, [*path, after])
            if cycle:
                return cycle
    return []


#: maximum number of rings inside a machine; number of search steps before the best result so far is taken
MOST_RINGS, PATIENCE = 16, 20_000
#: ring rates to search for, as shares of the fastest link's rate, in descending order
SHARES = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8)

Path: TypeAlias = tuple[int, ...]


class Channels(NamedTuple):
    """Concurrent rings over the same ranks, 0 to n - 1.

    rings   orders of the ranks in each ring
    chains  for each ring, the ranks in each machine, starting with the device at the interface
    """

    rings: tuple[Ints, ...]
    chains: tuple[tuple[Ints, ...], ...]


def rings(cluster: Cluster, nodes: tuple[int, ...]) -> tuple[Ints, ...]:
    """Return the rank orders of concurrent rings over ``nodes``, whose own order should be a good ring.

    Each is a permutation of ``range(n)`` and carries an equal share of the bytes. The result is just the given order if
    machines have one device, or one interface and a single path inside, or if trunks make it faster.
    """
    return channels(cluster, nodes).rings


@functools.lru_cache(maxsize=256)
def channels(cluster: Cluster, nodes: tuple[int, ...]) -> Channels:
    """Return the rings over ``nodes``, and the chains inside machines that they consist of."""
    at = np.array(nodes, dtype=np.int64)
    machines = members(cluster, at)
    plain = np.arange(len(nodes))
    if max(map(len, machines)) == 1:
        return Channels((plain,), (tuple(machines),))
    if len(machines) == 1:
        cycles = [] if len(nodes) == 2 else _machines(cluster, [at])[0].cycles()
        orders = tuple(np.array(cycle) for cycle in cycles) or (plain,)
        return Channels(orders, tuple((order,) for order in orders))
    paths, chains, searched = [], [], {}
    for number, inside in enumerate(_machines(cluster, [at[machine] for machine in machines])):
        machine = machines[number]
        if inside.shape not in searched:
            searched[inside.shape] = inside.paths()
        interface = {device: i for i, devices in enumerate(inside.interfaces) for device in devices}
        chains.append([machine[list(path)] for path in searched[inside.shape]])
        paths.append(
            [
                chain[:: -1 if number % 2 and interface[path[0]] != interface[path[-1]] else 1]
                for chain, path in zip(chains[-1], searched[inside.shape], strict=True)
            ]
        )
    orders = tuple(np.concatenate(ring) for ring in zip(*paths, strict=False))  # the fewest of any machine
    if ring_rate(cluster, at, orders) < ring_rate(cluster, at, (plain,)) * (1.0 - 1e-9):
        return Channels((plain,), (tuple(machines),))  # these rings cross trunks too often
    return Channels(orders, tuple(zip(*chains, strict=False)))


def ring_rate(cluster: Cluster, at: Ints, orders: tuple[Ints, ...], capacity: Floats | None = None) -> float:
    """Return the total rate of rings over the nodes ``at[order]`` in bytes/s, inf if they use no link.

    The most heavily used channel limits all rings. `capacity` (n_channels,): channel rates in bytes/s; None: those of
    the cluster.
    """
    capacity = cluster.nominal_capacity if capacity is None else capacity
    ends = (np.concatenate([np.roll(order, shift) for order in orders]) for shift in (0, -1))
    routes = cluster.split_routes(*(at[end] for end in ends))
    uses = np.bincount(cluster.link_channel[routes.links], routes.share, cluster.n_channels)
    return len(orders) * float(np.min(capacity[uses > 0] / uses[uses > 0], initial=np.inf))


def rails(cluster: Cluster, nodes: tuple[int, ...]) -> tuple[Ints, ...] | None:
    """Return the ranks in each machine in the order of their interfaces, equally many per machine.

    None if machines have no NVLinks, or not one interface per device, so that a neighbour's interface is no better.
    """
    at = np.array(nodes, dtype=np.int64)
    machines = members(cluster, at)
    n_local = len(machines[0])
    if len(machines) == 1 or n_local == 1 or any(len(machine) != n_local for machine in machines):
        return None
    ring_channels = channels(cluster, nodes)
    if len(ring_channels.rings) != n_local:
        return None
    pairs = cluster.routes(*(np.concatenate([at[np.roll(machine, i)] for machine in machines]) for i in (0, 1)))
    if any(cluster.link_kind[link] != "nvlink" for link in pairs.links.tolist()):
        return None
    return tuple(np.array([chains[i][0] for chains in ring_channels.chains]) for i in range(len(machines)))


def _machines(cluster: Cluster, machines: list[Ints]) -> list[_Machine]:
    """Return the machines with these devices; the interfaces of each are those to the machine before it."""
    n_devices = [len(devices) for devices in machines]
    routes = cluster.routes(
        np.concatenate([np.repeat(devices, len(devices)) for devices in machines]),
        np.concatenate([np.tile(devices, len(devices)) for devices in machines]),
    )
    paths = iter(_rows(routes.offsets, cluster.link_channel[routes.links]))
    ports: Iterator[tuple[int, ...]] = iter(())
    if len(machines) > 1:
        devices, outside = np.concatenate(machines), [machines[i - 1][0] for i in range(len(machines))]
        exits = cluster.split_routes(devices, np.repeat(outside, n_devices))
        host = np.repeat(cluster.host_of[devices], np.diff(exits.offsets))
        source, target = (cluster.host_of[ends[exits.links]] for ends in (cluster.link_src, cluster.link_dst))
        leaving = (source == host) & (target != host)
        offsets = np.append(0, np.cumsum(leaving))[exits.offsets]
        ports = (tuple(sorted(row)) for row in _rows(offsets, cluster.link_channel[exits.links[leaving]]))
    return [_Machine(cluster, n, list(islice(paths, n * n)), list(islice(ports, n))) for n in n_devices]


def _rows(offsets: Ints, values: Ints) -> list[list[int]]:
    """Return the rows of a CSR."""
    return [values[begin:end].tolist() for begin, end in pairwise(offsets.tolist())]


class _Machine:
    """The devices of a machine, the paths between them and the capacities of their channels, numbered from 0.

    paths  channels of the routes from device i to device j, at i * n + j
    ports  channels of the interfaces nearest to each device; empty if there is no other machine
    """

    def __init__(self, cluster: Cluster, n: int, paths: list[list[int]], ports: list[tuple[int, ...]]) -> None:
        self.n = n
        used = sorted({channel for path in paths for channel in path})
        number = {channel: i for i, channel in enumerate(used)}
        self.capacity = cluster.nominal_capacity[used].tolist()
        numbered = [[number[channel] for channel in path] for path in paths]
        self.between = [numbered[i * n : (i + 1) * n] for i in range(n)]
        #: devices by nearest interfaces, and the rate of these interfaces
        self.interfaces: list[list[int]] = []
        self.outwards = np.inf if ports else 0.0
        for nearest in dict.fromkeys(ports):
            devices = [i for i in range(n) if ports[i] == nearest]
            n_rings = min(len(devices), len(nearest))
            self.interfaces += [part.tolist() for part in np.array_split(devices, n_rings)]
            self.outwards = min(self.outwards, float(cluster.nominal_capacity[list(nearest)].sum()) / n_rings)
        self.steps = 0

    @property
    def shape(self) -> object:
        """Cache key: machines with equal shapes have the same paths."""
        between = tuple(tuple(map(tuple, row)) for row in self.between)
        return between, tuple(self.capacity), tuple(map(tuple, self.interfaces)), self.outwards

    # ------------------------------------------------------------ a single machine

    def cycles(self) -> list[Path]:
        """Return the rings of the machine with the highest total rate; among equal sets, one with few rings."""
        best: list[Path] = []
        rate = 0.0
        fastest = max(self.capacity, default=0.0)
        speeds = {capacity * share for capacity in self.capacity for share in SHARES}
        for speed in sorted((candidate for candidate in speeds if candidate <= fastest), reverse=True):
            if self._at_most(speed) * speed <= rate * (1.0 + 1e-9):
                continue
            cycles = self._most_cycles(speed)
            if len(cycles) * speed > rate * (1.0 + 1e-9):
                best, rate = cycles, len(cycles) * speed
        return best

    def _at_most(self, speed: float) -> int:
        """Return an upper bound on the rings of a rate, which use one channel from and one to each device."""
        ends: list[set[int]] = []
        for i in range(self.n):
            pairs = [(self.between[i][j], self.between[j][i]) for j in range(self.n) if j != i]
            if all(out and back for out, back in pairs):
                ends += [{out[0] for out, _ in pairs}, {back[-1] for _, back in pairs}]
        rings = (sum(int(self.capacity[channel] / speed + 1e-6) for channel in channels) for channels in ends)
        return min(rings, default=MOST_RINGS)

    def _most_cycles(self, speed: float) -> list[Path]:
        # Without the bound, the search would continue until its step limit after finding the maximum.
        enough = min(MOST_RINGS, self._at_most(speed))
        left = list(self.capacity)
        best: list[Path] = []
        chosen: list[Path] = []
        self.steps = 0

        def further() -> bool:
            """Add rings while there are any; return whether the search is over."""
            nonlocal best
            if len(chosen) > len(best):
                best = list(chosen)
            if len(chosen) >= enough:
                return True
            for cycle in self._walks([0], 0, left, speed):
                both = [cycle, (0, *cycle[:0:-1])]  # the reverse ring uses the other direction of the same links
                if not all(self._way_fits(a, b, left, speed) for a, b in pairwise((*both[1], 0))):
                    both.pop()
                self._take(both[1:], left, speed)
                chosen.extend(both)
                if further():
                    return True
                del chosen[-len(both) :]
                self._take(both[1:], left, -speed)
            return self.steps > PATIENCE

        further()
        return best

    # ------------------------------------------------------------ one of several machines

    def paths(self) -> list[Path]:
        """Return the paths through the machine, one per interface, with the highest common rate."""
        if self.n == 1:
            return [(0,)]
        ends = self._ends()
        for share in SHARES:
            left, paths = list(self.capacity), []
            for begin, end in ends:
                self.steps, speed = 0, self.outwards * share
                pairs = (([first], last) for first in begin for last in reversed(end) if first != last)
                path = next((path for pair in pairs for path in self._walks(*pair, left, speed)), None)
                if path is None:
                    break
                paths.append(path)
                self._take([path], left, speed, closed=False)
            else:
                return paths
        return [(b[0], *(i for i in range(self.n) if i not in (b[0], e[-1])), e[-1]) for b, e in ends]

    def _ends(self) -> list[tuple[list[int], list[int]]]:
        """Return the devices at which each ring may enter, and at which it may leave."""
        single = [devices for devices in self.interfaces if len(devices) == 1]
        beside = {}
        for i, entry in enumerate(single):
            partner = i ^ 1 if len(single) % 2 == 0 else (i + 1) % len(single)
            beside[entry[0]] = single[partner]
        if len(single) == 1:
            beside[single[0][0]] = [i for i in range(self.n) if i != single[0][0]]
        return [(devices, devices if len(devices) > 1 else beside[devices[0]]) for devices in self.interfaces]

    # ------------------------------------------------------------ search

    def _walks(self, path: list[int], last: int, left: list[float], speed: float) -> Iterator[Path]:
        """Yield paths over all devices that end at `last` (a ring, if they start there). While a path is yielded, its
        hops are subtracted from `left`, the remaining capacity."""
        here, closed = path[-1], path[0] == last
        n_open = self.n - len(path)
        if not n_open:
            if not closed or self._way_fits(here, last, left, speed):
                if closed:
                    self._add(here, last, left, -speed)
                yield tuple(path)
                if closed:
                    self._add(here, last, left, speed)
            return
        onwards = [i for i in range(self.n) if i not in path and (closed or (i == last) == (n_open == 1))]
        onwards.sort(key=lambda i: (len(self.between[here][i]), -self._room(here, i, left), (i - here) % self.n))
        for i in onwards:
            self.steps += 1
            if self.steps > PATIENCE:
                return
            if self._way_fits(here, i, left, speed):
                self._add(here, i, left, -speed)
                yield from self._walks([*path, i], last, left, speed)
                self._add(here, i, left, speed)

    def _room(self, a: int, b: int, left: list[float]) -> float:
        return min((left[channel] for channel in self.between[a][b]), default=np.inf)

    def _way_fits(self, a: int, b: int, left: list[float], speed: float) -> bool:
        return self._room(a, b, left) >= speed * (1.0 - 1e-9)

    def _add(self, a: int, b: int, left: list[float], speed: float) -> None:
        for channel in self.between[a][b]:
            left[channel] += speed

    def _take(self, paths: list[Path], left: list[float], speed: float, closed: bool = True) -> None:
        for path in paths:
            for a, b in pairwise((*path, path[0]) if closed else path):
                self._add(a, b, left, -speed)
