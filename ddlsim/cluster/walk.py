"""Compiled parts of routing: shortest-path DAGs towards a target, and walks along them.

A DAG is stored as one bit per link ("this link lies on a shortest path to the target"), which keeps tables
of ten thousand targets in memory and leaves the choice among equal links to the policy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["D_MOD_K", "ECMP", "SHORTEST", "grid_walk", "shortest_dags", "walk"]

SHORTEST, ECMP, D_MOD_K = 0, 1, 2

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bits = npt.NDArray[np.uint8]

#: Latency sums of equal paths differ in the last bits by the order of addition; this much is a tie.
_TIE = 1.0 + 1e-12


@njit(cache=True)
def _mix(x: np.uint64) -> np.uint64:
    """Return one step of splitmix64 (Steele, Lea and Flood 2014), a well-mixing 64-bit hash."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def shortest_dags(
    targets: _Ints,
    n_nodes: int,
    link_src: _Ints,
    link_dst: _Ints,
    latency: _Floats,
    out_start: _Ints,
    in_start: _Ints,
    in_links: _Ints,
) -> _Bits:
    """Return for each target the links on its shortest paths (hops, then latency), one bit per link.

    Links are sorted by source; `out_start` (n_nodes + 1,) delimits them, `in_start`, `in_links` list them by
    destination. The result has shape (n_targets, ceil(n_links / 8)).
    """
    n_links = len(link_src)
    dags = np.zeros((len(targets), (n_links + 7) // 8), dtype=np.uint8)
    hops = np.empty(n_nodes, dtype=np.int64)
    delay = np.empty(n_nodes, dtype=np.float64)
    queue = np.empty(n_nodes, dtype=np.int64)
    for row in range(len(targets)):
        hops[:] = -1
        hops[targets[row]] = 0
        delay[targets[row]] = 0.0
        queue[0] = targets[row]
        head, tail = 0, 1
        while head < tail:
            node = queue[head]
            head += 1
            if node != targets[row]:
                # Nodes one hop nearer left the queue before this one, so their delays are final.
                best = np.inf
                for link in range(out_start[node], out_start[node + 1]):
                    if hops[link_dst[link]] == hops[node] - 1:
                        best = min(best, delay[link_dst[link]] + latency[link])
                delay[node] = best
                for link in range(out_start[node], out_start[node + 1]):
                    nearer = link_dst[link]
                    if hops[nearer] == hops[node] - 1 and delay[nearer] + latency[link] <= best * _TIE:
                        dags[row, link >> 3] |= np.uint8(1 << (link & 7))
            for i in range(in_start[node], in_start[node + 1]):
                before = link_src[in_links[i]]
                if hops[before] < 0:
                    hops[before] = hops[node] + 1
                    queue[tail] = before
                    tail += 1
    return dags


@njit(cache=True)
def _pushed(links: _Ints, used: int, link: int) -> _Ints:
    """Return `links` with `link` at place `used`, in a buffer of twice the size if it was full."""
    if used == len(links):
        larger = np.empty(2 * used + 16, dtype=np.int64)
        larger[:used] = links
        links = larger
    links[used] = link
    return links


@njit(cache=True)
def walk(
    src: _Ints,
    dst: _Ints,
    up: _Ints,
    down: _Ints,
    core: _Ints,
    row_of: _Ints,
    dags: _Bits,
    out_start: _Ints,
    link_dst: _Ints,
    link_id: _Ints,
    policy: int,
    port: _Ints,
) -> tuple[_Ints, _Ints, int]:
    """Return `offsets`, `links` of the routes src[i] -> dst[i], and the first i without a route (or -1).

    A node with a single attachment enters and leaves through `up` and `down` (-1 for others) at its `core`
    node; `row_of` says which DAG leads to a core node. Among equal next links: SHORTEST takes the lowest id;
    ECMP takes number hash(src, dst, node) modulo their count; D_MOD_K takes (port[dst] // stride) modulo
    their count and multiplies the stride by it, so that the up ports of a fat tree are the digits of
    `port[dst]` (Zahavi 2012, "Fat-tree routing and node ordering providing contention free traffic").
    """
    offsets = np.zeros(len(src) + 1, dtype=np.int64)
    links = np.empty(6 * len(src) + 16, dtype=np.int64)
    used = 0
    for i in range(len(src)):
        s, d = src[i], dst[i]
        if s != d:
            if up[s] >= 0:
                links = _pushed(links, used, up[s])
                used += 1
            node, target = core[s], core[d]
            row, stride = row_of[target], 1
            while node != target:
                skip = 0
                if policy != SHORTEST:
                    equal = 0
                    for k in range(out_start[node], out_start[node + 1]):
                        equal += (dags[row, k >> 3] >> (k & 7)) & 1
                    if equal > 1 and policy == ECMP:
                        key = _mix(_mix(_mix(np.uint64(s)) + np.uint64(d)) + np.uint64(node))
                        skip = int(key % np.uint64(equal))
                    elif equal > 1:
                        skip = (port[d] // stride) % equal
                        stride *= equal
                k, end = out_start[node], out_start[node + 1]
                while k < end:
                    if (dags[row, k >> 3] >> (k & 7)) & 1:
                        if skip == 0:
                            break
                        skip -= 1
                    k += 1
                if k == end:
                    return offsets, links[:0], i
                links = _pushed(links, used, link_id[k])
                used += 1
                node = link_dst[k]
            if down[d] >= 0:
                links = _pushed(links, used, down[d])
                used += 1
        offsets[i + 1] = used
    return offsets, links[:used].copy(), -1


@njit(cache=True)
def grid_walk(src: _Ints, dst: _Ints, shape: _Ints, next_link: _Ints) -> tuple[_Ints, _Ints]:
    """Return `offsets`, `links` of dimension-order routes on a torus, the shorter way round (+ at a tie).

    Nodes are numbered in row-major order of `shape`; `next_link` (n_nodes, n_dims, 2) is the link from a node
    to its neighbour at +1 and at -1 (modulo the size) in each dimension.
    """
    offsets = np.zeros(len(src) + 1, dtype=np.int64)
    links = np.empty(4 * len(src) + 16, dtype=np.int64)
    used = 0
    for i in range(len(src)):
        node = src[i]
        stride = next_link.shape[0]
        for dim in range(len(shape)):
            size = shape[dim]
            stride //= size
            at, goal = (node // stride) % size, (dst[i] // stride) % size
            ahead = (goal - at) % size
            way, step, n_steps = (0, 1, ahead) if 2 * ahead <= size else (1, size - 1, size - ahead)
            for _ in range(n_steps):
                links = _pushed(links, used, next_link[node, dim, way])
                used += 1
                place = (node // stride) % size
                node += ((place + step) % size - place) * stride
        offsets[i + 1] = used
    return offsets, links[:used].copy()
