"""Compiled parts of routing: shortest-path DAGs to a destination, and walks along them.

A DAG is stored as one bit per link ("this link lies on a shortest path to the target"), so tables of ten thousand
targets fit in memory, and the policy chooses among equal links.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import called, entry

SHORTEST, ECMP, D_MOD_K = 0, 1, 2

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bits = npt.NDArray[np.uint64]

#: Relative tolerance for ties: sums of equal paths differ by rounding.
_TIE = 1.0 + 1e-12


@called
def _mix(x: np.uint64) -> np.uint64:
    """Return one step of splitmix64 (Steele, Lea and Flood 2014), a well-mixing 64-bit hash."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@called
def _cost(costs: _Floats, link_costs: _Floats, link: int, nearer: int, i: int) -> float:
    """Return cost number `i` of the path over `link`, which leads to the node `nearer`."""
    cost, rest = link_costs[link, i], costs[nearer, i]
    return float(max(cost, rest) if i == 1 else cost + rest)


@entry
def mark_shortest(
    dags: _Bits,
    hops: _Ints,
    costs: _Floats,
    queue: _Ints,
    shortest: _Ints,
    targets: _Ints,
    rows: _Ints,
    opened: tuple[_Ints, _Ints],
    initial_hops: _Ints,
    machines: tuple[_Ints, _Ints],
    link_dst: _Ints,
    link_costs: _Floats,
    out_start: _Ints,
    in_start: _Ints,
    in_src: _Ints,
) -> None:
    """Set the bits of the links on the shortest paths to each target in row `rows[i]` of `dags`.

    ``initial_hops`` is -1, or more than any distance for nodes to skip. Nodes of the machines that `opened` lists for a
    target are not skipped. `opened` is a CSR, like `machines`, which lists the nodes of each machine.

    Paths are compared by number of hops, then by number of forwarding endpoints, bandwidth of the narrowest link,
    latency, and total time per byte. The last four are the columns of `link_costs` (n_links, 4): 1 if an endpoint
    follows, s per byte, s, and s per byte. (Hops, then the narrowest link: widest-shortest paths, RFC 2676, section 2.)

    Links are sorted by source; `out_start` (n_nodes + 1,) delimits them, `in_start` and `in_src` list the sources by
    destination. `dags` has shape (n_rows, ceil(n_links / 64)); `hops`, `queue` (n_nodes,), `costs` (n_nodes, 4) and
    `shortest` (n_links,) are scratch space.
    """
    for number in range(targets.size):
        target, row = targets[number], rows[number]
        for node in range(hops.size):
            hops[node] = initial_hops[node]
        for i in range(opened[0][number], opened[0][number + 1]):
            machine = opened[1][i]
            for j in range(machines[0][machine], machines[0][machine + 1]):
                hops[machines[1][j]] = -1
        hops[target] = 0
        costs[target, :] = 0.0
        queue[0] = target
        head, tail = 0, 1
        while head < tail:
            node = queue[head]
            head += 1
            if node != target:
                # Nodes one hop closer left the queue before this one, so their costs are final.
                n = 0
                for link in range(out_start[node], out_start[node + 1]):
                    if hops[link_dst[link]] == hops[node] - 1:
                        shortest[n] = link
                        n += 1
                if n == 1:  # the usual case: nothing to choose
                    for i in range(4):
                        costs[node, i] = _cost(costs, link_costs, shortest[0], link_dst[shortest[0]], i)
                for i in range(4 if n > 1 else 0):  # each criterion breaks ties of the previous ones
                    best = np.inf
                    for j in range(n):
                        best = min(best, _cost(costs, link_costs, shortest[j], link_dst[shortest[j]], i))
                    costs[node, i] = best
                    ties = 0
                    for j in range(n):
                        link = shortest[j]
                        if _cost(costs, link_costs, link, link_dst[link], i) <= best * _TIE:
                            shortest[ties] = link
                            ties += 1
                    n = ties
                for j in range(n):
                    link = shortest[j]
                    dags[row, link >> 6] |= np.uint64(1) << np.uint64(link & 63)
            for i in range(in_start[node], in_start[node + 1]):
                before = in_src[i]
                if hops[before] < 0:
                    hops[before] = hops[node] + 1
                    queue[tail] = before
                    tail += 1


@called
def _marked(dags: _Bits, row: int, start: int, end: int) -> np.uint64:
    """Return bits start .. end - 1 (1 to 64 of them) of a row as a number; bit `start` becomes the lowest."""
    at, shift = start >> 6, start & 63
    word: np.uint64 = dags[row, at] >> np.uint64(shift)
    if shift + end - start > 64:
        word |= dags[row, at + 1] << np.uint64(64 - shift)
    return word & (~np.uint64(0) >> np.uint64(64 - (end - start)))


@called
def _ones(word: np.uint64) -> int:
    """Return the number of set bits in `word` (Warren 2012, Hacker's Delight, section 5-1)."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@called
def _choice(dags: _Bits, row: int, start: int, end: int, skip: int) -> int:
    """Return the index of the set bit among start .. end - 1 that follows `skip` others, or -1."""
    for first in range(start, end, 64):
        word = _marked(dags, row, first, min(first + 64, end))
        rest = word
        for _ in range(skip):
            rest &= rest - np.uint64(1)  # clears the lowest set bit
        if rest != 0:
            place: int = first + _ones(~rest & (rest - np.uint64(1)))
            return place
        skip -= _ones(word)
    return -1


@called
def _n_marked(dags: _Bits, row: int, start: int, end: int) -> int:
    """Return the number of set bits among start .. end - 1 of a row."""
    n = 0
    for first in range(start, end, 64):
        n += _ones(_marked(dags, row, first, min(first + 64, end)))
    return n


@called
def _hashed(s: int, d: int, node: int, flow: int, equal: int) -> int:
    """Return which of `equal` links flow number `flow` from `s` to `d` takes at a node (ECMP)."""
    key = _mix(_mix(_mix(np.uint64(s)) + np.uint64(d)) + np.uint64(node))
    if flow > 0:
        key = _mix(key + np.uint64(flow))
    return int(key % np.uint64(equal))


@entry
def walk(
    src: _Ints, dst: _Ints, up: _Ints, down: _Ints, core: _Ints, row_of: _Ints, dags: _Bits, out_start: _Ints,
    link_dst: _Ints, link_id: _Ints, policy: int, port: _Ints, flows: _Ints, n_flows: _Ints, host: _Ints, ends: _Ints,
    room: tuple[_Ints, _Ints, _Ints, _Floats, _Floats], n_done: int, offsets: _Ints, links: _Ints, shares: _Floats,
) -> tuple[int, bool]:  # fmt: skip
    """Write the routes src[i] -> dst[i] from i = `n_done` on to `offsets` and `links`, with each link's share of the
    bytes.

    Returns the number of finished routes, and whether the next one does not exist (otherwise `links` is full or all are
    done). A node with a single attachment enters and leaves through the links `up` and `down` (-1 for others) at its
    `core` node; `row_of` is the row of a core node's DAG. If ``n_flows[i]`` is 0, each node divides its bytes evenly
    among its equal next links. Otherwise, this number of flows, from ``flows[i]`` on, carry equal parts and take one of
    these links: SHORTEST the lowest id; ECMP index hash(src, dst, node, flow) modulo their count; D_MOD_K divides
    `port[dst]` by their count, takes the remainder and continues with the quotient, so that the up ports of a fat tree
    are the digits of `port[dst]` (Zahavi 2012, "Fat-tree routing and node ordering providing contention free traffic").
    Nodes of the end machines `ends` (n_routes, 2; -2: none) always divide their traffic evenly among equal next links,
    and parts on different links also choose different links further on. `host` (n_nodes,) contains the nodes' machines.
    `room` is scratch space: (n_nodes,) three times, zeros (n_nodes,), zeros (n_links,).
    """
    queue, digits, branch, amount, load = room
    for i in range(n_done, len(src)):
        s, d = src[i], dst[i]
        used = offsets[i]
        if s != d:
            if used + len(load) + 2 > len(links):
                return i, False
            if up[s] >= 0:
                links[used], shares[used] = up[s], 1.0
                used += 1
            first, target = used, core[d]
            row = row_of[target]
            for flow in range(flows[i], flows[i] + max(n_flows[i], 1)):
                queue[0], digits[core[s]], branch[core[s]] = core[s], port[d], 0
                amount[core[s]] = 1.0 / max(n_flows[i], 1)
                head, tail = 0, int(core[s] != target)
                while head < tail:  # nodes are in order of their hops, so all of a node's bytes have arrived
                    node = queue[head]
                    head += 1
                    begin, end = out_start[node], out_start[node + 1]
                    equal = _n_marked(dags, row, begin, end)
                    skip, n = 0, equal
                    higher = digits[node]
                    following = link_dst[_choice(dags, row, begin, end, 0)] if equal > 1 else node
                    at_port = host[node] == ends[i, 0] or host[node] == ends[i, 1] or host[following] == ends[i, 1]
                    if n_flows[i] > 0 and not (equal > 1 and at_port):
                        n = min(equal, 1)
                        if policy == ECMP and equal > 1:
                            skip = _hashed(s, d, node, flow, equal)
                        elif policy == D_MOD_K and equal > 1:
                            higher, skip = divmod(digits[node], equal)
                        skip = (skip + branch[node]) % max(equal, 1)
                    part = amount[node] / max(n, 1)
                    amount[node] = 0.0
                    if n == 0:
                        return i, True
                    for j in range(skip, skip + n):
                        k = _choice(dags, row, begin, end, j)
                        if load[k] == 0.0:
                            links[used] = k
                            used += 1
                        load[k] += part
                        if amount[link_dst[k]] == 0.0 and link_dst[k] != target:
                            queue[tail], digits[link_dst[k]], branch[link_dst[k]] = link_dst[k], higher, branch[node]
                            if n > 1:
                                branch[link_dst[k]] += j
                            tail += 1
                        amount[link_dst[k]] += part
                amount[target] = 0.0
            for h in range(first, used):
                shares[h], load[links[h]] = load[links[h]], 0.0
                links[h] = link_id[links[h]]
            if down[d] >= 0:
                links[used], shares[used] = down[d], 1.0
                used += 1
        offsets[i + 1] = used
    return len(src), False


@entry
def grid_walk(src: _Ints, dst: _Ints, shape: _Ints, next_link: _Ints, offsets: _Ints, links: _Ints) -> int:
    """Write dimension-order routes on a torus to `offsets` and `links`, in the shorter direction (+ at a tie).

    Nodes are numbered in row-major order of `shape`; `next_link` (n_nodes, n_dims, 2) is the link from a node to its
    neighbour at +1 and at -1 (modulo the size) in each dimension.

    Returns the number of links. If `links` is too short, the remaining ones are not written.
    """
    offsets[0] = 0
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
                if used < len(links):
                    links[used] = next_link[node, dim, way]
                used += 1
                place = (node // stride) % size
                node += ((place + step) % size - place) * stride
        offsets[i + 1] = used
    return used
