"""What a collective whose time is known puts on which links, and the least time in which they can carry it.

A link cannot carry more than its capacity, so no shortcut may take less than the bytes of any link over its capacity
(`Charge.seconds`). Which bytes a link carries is a matter of the routes:

* those of the collective's own schedule (:func:`by_schedule`), which has one ring, say, and so one network card of
  each machine in use;
* those of a library that spreads its rings or trees over all links, as NCCL's channels do (:func:`spread`). Inside a
  machine, the rings are those of NCCL's search (:mod:`ddlsim.cluster.rings`). Each ring is cut at each of its GPUs in
  turn, so that all of them, and the cards nearest to them, carry the same between machines: of m GPUs each sends 1/m to
  the GPU at its own place in the next machine.

With V bytes over every hop of a ring (2 (n-1)/n of the buffer for an all-reduce), a hop inside a machine of m among
several carries V (m-1)/m of its ring's share, and a machine sends V to the next one. NCCL's trees are a chain through
each machine and a double binary tree over the machines (``src/graph/trees.cc``): S up and S down each chain, S/2 up and
down each edge of the two trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.cluster.rings import channels
from ddlsim.collectives import Schedule
from ddlsim.collectives.nccl_tuner import LAPS
from ddlsim.collectives.trees import double_tree
from ddlsim.network import Network

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Charge:
    """Bytes on every channel, (n_channels,), their sum over the messages (`sent`), the least s that they take, on
    channel `tightest`, and the messages: source and target nodes and bytes of each, (n,)."""

    nbytes: Floats
    sent: float
    seconds: float
    tightest: int
    messages: tuple[Ints, Ints, Floats] = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class Load:
    """Bytes from node to node, to be put on the links of `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._parts: list[tuple[Ints, Ints, Floats]] = []

    @property
    def empty(self) -> bool:
        """Whether nothing has been put on it."""
        return not self._parts

    def add(self, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike) -> None:
        """Send ``nbytes[i]`` from node ``src[i]`` to node ``dst[i]``, (n,)."""
        source, target = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        self._parts.append((source, target, np.broadcast_to(np.asarray(nbytes, dtype=np.float64), source.shape)))

    def charge(self) -> Charge:
        """Return what this puts on the channels; where there are frames, their headers take time as well."""
        cluster = self.cluster
        if self.empty:
            return Charge(np.zeros(cluster.n_channels), 0.0, 0.0, 0)
        source, target, nbytes = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        pairs, which = np.unique(np.stack([source, target]), axis=1, return_inverse=True)
        messages = pairs[0], pairs[1], np.bincount(which.reshape(-1), nbytes).astype(np.float64)
        routes = cluster.split_routes(source, target)
        of = routes.of
        wire = nbytes.copy()
        details = cluster.details
        if details is not None:
            header, payload = np.zeros(len(source)), np.full(len(source), np.inf)
            framed = details.frame_header[routes.links] > 0.0
            np.maximum.at(header, of[framed], details.frame_header[routes.links[framed]])
            np.minimum.at(payload, of[framed], details.frame_payload[routes.links[framed]])
            wire += nbytes * header / payload
        channel = cluster.link_channel[routes.links]
        carried = np.bincount(channel, nbytes[of] * routes.share, cluster.n_channels).astype(np.float64)
        if not len(channel):
            return Charge(carried, float(nbytes.sum()), 0.0, 0, messages)
        crossing = np.bincount(channel, wire[of] * routes.share, cluster.n_channels)
        seconds = crossing / Network(cluster).accounts().capacity
        return Charge(carried, float(nbytes.sum()), float(seconds.max()), int(seconds.argmax()), messages)


def by_schedule(load: Load, schedule: Schedule, nodes: Sequence[int], nbytes: float) -> None:
    """Put on the links what `schedule` over `nbytes` does, rank r being at ``nodes[r]``."""
    place = np.asarray(nodes, dtype=np.int64)
    for round_ in (r for lane in schedule.lanes for r in lane):
        n_distinct = 1 if schedule.chunk_weight is None or round_.shift == 0 else round_.repeat
        for repetition in range(n_distinct):
            size = schedule.message_bytes(nbytes, round_, repetition) + round_.header
            load.add(place[round_.src], place[round_.dst], size * (round_.repeat / n_distinct))


def spread(load: Load, nodes: Sequence[int], nbytes: float, algorithm: str, kind: str = "all_reduce") -> None:
    """Put on the links what NCCL's "ring" or "tree" over `nbytes` among workers at `nodes` does."""
    cluster, place = load.cluster, np.asarray(nodes, dtype=np.int64)
    place = place[cluster.locality_order(place)]
    machine = np.where(cluster.host_of[place] >= 0, cluster.host_of[place], len(cluster.host_names) + place)
    first = np.sort(np.unique(machine, return_index=True)[1])
    machines = np.split(place, first[1:])
    n = len(place)
    tree = algorithm == "tree"
    hop = nbytes if tree else LAPS[kind] * (n - 1) / n * nbytes
    for members in machines:
        m = len(members)
        if m == 1:
            continue
        share = (m - 1) / m if tree or len(machines) > 1 else 1.0
        rings = channels(cluster, tuple(members.tolist())).rings
        for ring in rings:
            here, following = members[ring], members[np.roll(ring, -1)]
            load.add(here, following, hop * share / len(rings))
            if tree:
                load.add(following, here, hop * share / len(rings))
    if len(machines) == 1:
        return
    if tree:
        for parent, depth in double_tree(len(machines)):
            for child in np.flatnonzero(depth).tolist():
                above = int(parent[child])
                for a, b in ((child, above), (above, child)):
                    _between(load, machines[a], machines[b], nbytes / 2.0)
    else:
        for i, members in enumerate(machines):
            _between(load, members, machines[(i + 1) % len(machines)], hop)


def _between(load: Load, source: Ints, target: Ints, nbytes: float) -> None:
    """Send `nbytes` from one machine to another: all GPUs send the same, all receive the same, in order."""
    cuts = np.unique(np.concatenate([np.arange(len(a) + 1) / len(a) for a in (source, target)]))
    middle = (cuts[1:] + cuts[:-1]) / 2.0
    at = [a[(middle * len(a)).astype(np.int64)] for a in (source, target)]
    load.add(at[0], at[1], nbytes * np.diff(cuts))
