"""Tensor groups in plans: all ranks of a stage, pieces of work, and the collectives between them.

:func:`tensor_ranks` expands a plan with one rank per stage to the t ranks that split the layers of each stage: a pass
becomes pieces of work with collectives between them, a message becomes one per rank with 1/t of the bytes (Narayanan et
al. 2021, arXiv:2104.04473, section 4.1), and replicas exchange gradients in one group per rank of a tensor group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.collectives.build import default_algorithm
from ddlsim.errors import ConfigError
from ddlsim.network import schedule_time
from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.plan import COLUMNS, KINDS, Bools, Floats, Ints, Lane, Plan
from ddlsim.plan.rows import csr, key_ends, ranges
from ddlsim.ties import distinct
from ddlsim.workload.compute import Workload
from ddlsim.workload.tensor_overlap import BULK, PIPELINE, RING_EXCHANGE, OverlappedProduct
from ddlsim.workload.tensor_parallel import Collective as Exchange
from ddlsim.workload.tensor_parallel import Shard

#: work of zero seconds, at the beginning or end of a pass that begins or ends with a collective
SYNCHRONIZE = "synchronize"
#: a chunk of a matrix product that is computed while another chunk is exchanged
PRODUCT = "product"
#: the lanes of a pass: the device, the group's collectives, and messages to and from the neighbours in its ring
LANES = ("compute", "tensor", "tensor to next", "tensor from previous")
#: names of items
NAMES = (SYNCHRONIZE, PRODUCT)


@dataclass(frozen=True)
class Item:
    """A task of a pass, which every rank of the group executes.

    lane    index in :data:`LANES`
    layers  of passes: first and last + 1; (0, 0) for other tasks
    name    index in :data:`NAMES`; -1: that of the pass
    needs   earlier items of the pass that it depends on, besides the previous one on its lane
    """

    lane: int
    kind: int
    seconds: float = 0.0
    nbytes: float = 0.0
    layers: tuple[int, int] = (0, 0)
    name: int = -1
    needs: tuple[int, ...] = ()


# ---------------------------------------------------------------- one pass


class _Pass:
    """The items of a pass through some layers, added in the order of the device's work."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.items: list[Item] = []
        self._device = -1  # the device's latest item
        self._waits: tuple[int, ...] = ()  # items that the device's next one needs
        self._seconds = 0.0  # of work that is not an item yet
        self._layers: list[int] = []

    def _add(self, item: Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def _compute(self, kind: int, seconds: float = 0.0, layers: tuple[int, int] = (0, 0), name: int = -1) -> None:
        self._device = self._add(Item(0, kind, seconds, layers=layers, name=name, needs=self._waits))
        self._waits = ()

    def work(self, layer: int, seconds: float) -> None:
        """Compute a layer. Layers without an exchange between them become one item."""
        self._layers.append(layer)
        self._seconds += seconds

    def flush(self) -> None:
        """Add the pending work as an item, or an item of no work that exchanges can wait for."""
        if self._layers:
            layers = (min(self._layers), max(self._layers) + 1)
            self._compute(self.kind, self._seconds, layers)
        elif self._device < 0 or self._waits:
            self._compute(ps.COMPUTE, name=0)
        self._layers, self._seconds = [], 0.0

    def exchange(self, kind: int, nbytes: float) -> None:
        """Add a collective that the device waits for."""
        if self._layers or self._device < 0:
            self.flush()
        self._waits = (self._add(Item(1, kind, nbytes=nbytes, needs=(self._device,))),)

    def overlap(self, beside: OverlappedProduct, kind: int, nbytes: float) -> None:
        """Compute a product in chunks while a collective is in progress.

        Chunk i of a "ring_exchange" is multiplied when it has arrived; the first one is already on the rank. A chunk of
        a "pipeline" is scattered when it has been multiplied. "bulk" runs as a whole beside the product.
        """
        if self._layers or self._device < 0:
            self.flush()
        n, start = beside.chunks, (self._device, *self._waits)
        arrived = start
        ends: list[int] = []
        for i in range(n):
            if beside.method == BULK:
                ends = [self._add(Item(1, kind, nbytes=nbytes, needs=start))]
            elif beside.method == RING_EXCHANGE and i:
                self._add(Item(2, ps.SEND, nbytes=nbytes / n, needs=arrived))
                arrived = (self._add(Item(3, ps.RECEIVE, nbytes=nbytes / n)),)
                self._waits = arrived
            self._compute(ps.COMPUTE, beside.slowed / n, name=1)
            if beside.method == PIPELINE:
                ends = [self._add(Item(1, kind, nbytes=nbytes / n, needs=(self._device,)))]
        self._waits = tuple(ends)


def _by_layer(shard: Shard) -> dict[tuple[str, int], list[Exchange]]:
    """Return the exchanges of each (phase, layer)."""
    of_layers: dict[tuple[str, int], list[Exchange]] = {}
    for exchange in shard.collectives:
        of_layers.setdefault((exchange.phase, exchange.layer), []).append(exchange)
    return of_layers


def _items(
    workload: Workload,
    exchanges: Mapping[tuple[str, int], Sequence[Exchange]],
    phase: str,
    layers: tuple[int, int],
    kind: int,
    gathers: Mapping[int, float],
) -> list[Item]:
    """Return the items of a pass through the layers first to end - 1.

    Gathers come before a layer's work, sums after it.

    exchanges  (phase, layer) -> exchanges
    kind       of the work
    gathers    layer -> bytes that the group gathers before its work, because it follows a cut
    """
    done = _Pass(kind)
    seconds = workload.forward if phase == "forward" else workload.backward
    span = range(*layers)
    for layer in span if phase == "forward" else reversed(span):
        layer_exchanges = exchanges.get((phase, layer), ())
        if layer in gathers:
            done.exchange(ps.ALL_GATHER, gathers[layer])
        for gathering in (True, False):
            for exchange in layer_exchanges:
                if (exchange.kind == "all_gather") != gathering:
                    continue
                if exchange.beside is None:
                    done.exchange(KINDS.index(exchange.kind), exchange.nbytes)
                else:
                    done.overlap(exchange.beside, KINDS.index(exchange.kind), exchange.nbytes)
            if gathering:
                counted = sum(exchange.beside.counted for exchange in layer_exchanges if exchange.beside is not None)
                done.work(layer, max(float(seconds[layer]) - counted, 0.0))
    done.flush()
    return done.items


# ---------------------------------------------------------------- all passes of a plan


@dataclass(frozen=True, eq=False)
class Passes:
    """The different passes of a plan of groups.

    codes  of the passes (:func:`_codes`), in ascending order
    items  of each of these, by kind of worker: the same but for their seconds
    """

    codes: Ints
    items: Sequence[Sequence[Sequence[Item]]]

    def which(self, plan: Plan) -> Ints:
        """Return which of the passes each row of a plan is, -1 if none, (n,)."""
        codes = _codes(plan)
        return np.where(codes >= 0, np.searchsorted(self.codes, codes), -1)


def _codes(plan: Plan) -> Ints:
    """Return (role, first layer, last + 1) of each pass as one number: forward, backward, or forward again; -1 for
    other tasks, (n,)."""
    again = (plan.kind == ps.COMPUTE) & (plan.end > plan.first)
    role = np.select([plan.kind == ps.FORWARD, plan.kind == ps.BACKWARD, again], [0, 1, 2], -1)
    shape = plan.n_layers + 1
    return np.where(role >= 0, (role * shape + plan.first) * shape + plan.end, -1)


def passes_of(plan: Plan, shards: Sequence[Shard], chunks: Sequence[Chunk], *, gather: bool) -> Passes:
    """Return the passes of a plan of groups.

    shards  of each kind of worker
    chunks  of the model, with the bytes of whole tensors that enter them
    gather  activations are whole on every rank: behind a cut the group gathers what each has received a part of
    """
    entering = {chunk.first: chunk.enters for chunk in chunks[1:]} if gather else {}
    gathers = [entering, {layer - 1: nbytes for layer, nbytes in entering.items()}]
    codes, shape = _codes(plan), plan.n_layers + 1
    different = distinct(codes[codes >= 0])
    items, exchanges = [], [_by_layer(shard) for shard in shards]
    for code in different.tolist():
        role, begin, end = map(int, np.unravel_index(code, (3, shape, shape)))
        phase, kind = ("forward", "backward", "forward")[role], (ps.FORWARD, ps.BACKWARD, ps.COMPUTE)[role]
        pairs = zip(shards, exchanges, strict=True)
        items.append([_items(shard.workload, by, phase, (begin, end), kind, gathers[role % 2]) for shard, by in pairs])
    return Passes(different, items)


def tensor_ranks(
    plans: Sequence[Plan], passes: Passes, tensor: int, kinds: Ints, following: Ints | None = None
) -> Plan:
    """Return the plan of all ranks of tensor groups: rank r of a plan of groups becomes ranks r t to r t + t - 1.

    plans      of the groups, without their exchanges, one for each kind of device, which differ only in seconds
    kinds      (n_groups, t) index in `plans` of each worker
    following  (n_groups, t) the next member in the ring of the group; None: the next one in order
    """
    plan, which = plans[0], passes.which(plans[0])
    flat = [item for by_kind in passes.items for item in by_kind[0]]
    sizes = np.array([len(by_kind[0]) for by_kind in passes.items], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    seconds = np.array([[item.seconds for by_kind in passes.items for item in by_kind[i]] for i in range(len(plans))])
    counts = np.where(which >= 0, sizes[which], 1)
    source = np.repeat(np.arange(len(plan)), counts * tensor)
    starts = np.cumsum(counts * tensor) - counts * tensor  # first row of the first member
    within = np.arange(len(source)) - starts[source]
    member, nth = within // counts[source], within % counts[source]
    inside = which[source] >= 0
    item = np.where(inside, begins[which[source]] + nth, -1)
    group, worker = plan.rank[source], plan.rank[source] * tensor + member
    kind_of_worker = kinds[group, member]

    def chosen(values: Any, otherwise: Any) -> Any:
        """Return the values of items inside passes, and those of the source rows elsewhere."""
        return np.where(inside, np.array(values)[item], otherwise)

    columns: dict[str, Any] = {name: getattr(plan, name)[source] for name in COLUMNS}
    task_lane = np.array([task.lane for task in flat])[item]
    kind = columns["kind"] = chosen([task.kind for task in flat], columns["kind"])
    columns["nbytes"] = chosen([task.nbytes for task in flat], columns["nbytes"])
    named = np.array([task.name for task in flat])[item]
    columns["name"] = np.where(inside & (named >= 0), len(plan.names) + named, columns["name"])
    exchanging = inside & (task_lane > 0)
    columns["name"][exchanging] = columns["batch"][exchanging] = -1
    columns["first"] = chosen([task.layers[0] for task in flat], columns["first"])
    columns["end"] = chosen([task.layers[1] for task in flat], columns["end"])
    every = np.stack([variant.seconds for variant in plans])
    columns["seconds"] = np.where(inside, seconds[kind_of_worker, item], every[kind_of_worker, source])
    holder = np.where(plan.holds[source] > 0.0, nth == 0, nth == counts[source] - 1)  # first item allocates, last frees
    columns["holds"] = np.where(holder, columns["holds"], 0.0)

    lanes = [Lane(lane.rank * tensor + j, lane.name, lane.queue) for lane in plan.lanes for j in range(tensor)]
    columns["lane"] = plan.lane[source] * tensor + member
    for number, name in enumerate(LANES[1:], 1):
        mine = inside & (task_lane == number)
        if mine.any():
            columns["lane"][mine] = len(lanes) + worker[mine]
            lanes += [Lane(rank, name) for rank in range(plan.n_ranks * tensor)]

    n_groups = plan.n_ranks
    if following is None:
        following = np.tile(np.roll(np.arange(tensor), -1), (n_groups, 1))
    before = np.argsort(following, axis=1)
    peer = plan.peer[source]
    peer = np.where(peer >= 0, peer * tensor + member, -1)
    peer = np.where(exchanging & (kind >= ps.ALL_REDUCE), len(plan.groups) * tensor + group, peer)
    peer = np.where(exchanging & (kind == ps.SEND), group * tensor + following[group, member], peer)
    peer = np.where(exchanging & (kind == ps.RECEIVE), group * tensor + before[group, member], peer)
    columns["peer"] = np.where(inside & ~exchanging, -1, peer)
    columns["key"] = _keys(plan, which, flat, sizes, source, member, item, exchanging, kind, before[group, member])
    columns |= _needs(plan, flat, starts, counts, source, item, nth, tensor)
    groups = (
        *(tuple(rank * tensor + j for rank in ranks) for ranks in plan.groups for j in range(tensor)),
        *(tuple(range(rank * tensor, (rank + 1) * tensor)) for rank in range(n_groups)),
    )
    return dataclasses.replace(
        plan, lanes=tuple(lanes), groups=groups, names=(*plan.names, *NAMES), tensor=tensor, **columns
    )


def _keys(
    plan: Plan,
    of_rows: Ints,
    flat: Sequence[Item],
    sizes: Ints,
    source: Ints,
    member: Ints,
    item: Ints,
    exchanging: Bools,
    kind: Ints,
    sender: Ints,
) -> Ints:
    """Return the keys of all rows: in each step those of the plan of groups, for each member, then those of groups.

    of_rows  which pass each row of the plan is, -1 if none
    """
    tensor = int(member.max(initial=0)) + 1
    width = [(tensor if task.kind == ps.SEND else task.kind >= ps.ALL_REDUCE) if task.lane else 0 for task in flat]
    until = np.cumsum([0, *width])
    begins = np.cumsum(sizes) - sizes
    offset = until[:-1].copy()  # a message is received by the item after its send
    for i, task in enumerate(flat):
        if task.lane > 0 and task.kind == ps.RECEIVE:
            offset[i] = offset[i - 1]
    of_pass = np.where(of_rows >= 0, (until[begins + sizes] - until[begins])[of_rows], 0)
    first = np.cumsum(of_pass) - of_pass
    step = plan.step[source]
    per_step = np.concatenate([[0], np.cumsum(np.bincount(plan.step, of_pass, plan.n_steps).astype(np.int64))])
    key = plan.key[source]
    key = np.where(key >= 0, key * tensor + member + per_step[step], -1)
    which = of_rows[source]
    inner = first[source] + key_ends(plan)[step + 1] * tensor + offset[item] - until[begins[which]]
    inner = inner + np.where(kind == ps.SEND, member, np.where(kind == ps.RECEIVE, sender, 0))
    return np.asarray(np.where(exchanging, inner, key), dtype=np.int64)


def _needs(
    plan: Plan, flat: Sequence[Item], starts: Ints, counts: Ints, source: Ints, item: Ints, nth: Ints, tensor: int
) -> dict[str, Ints]:
    """Return the dependencies as a CSR: a pass's first item inherits them, and successors need its last item."""
    row, members = plan.needing, np.arange(tensor)
    outer = (starts[row] + members[:, None] * counts[row]).ravel()
    needed = (starts[plan.needs] + members[:, None] * counts[plan.needs] + counts[plan.needs] - 1).ravel()
    lengths = np.array([len(task.needs) for task in flat], dtype=np.int64)
    every = np.array([need for task in flat for need in task.needs], dtype=np.int64)
    at = np.cumsum(lengths) - lengths
    rows = np.flatnonzero(item >= 0)
    many = lengths[item[rows]]
    inner = np.repeat(rows, many)
    needs = inner - nth[inner] + every[ranges(at[item[rows]], many)]
    offsets, needs = csr(np.concatenate([outer, inner]), np.concatenate([needed, needs]), len(source))
    return {"need_offsets": offsets, "needs": needs}


# ---------------------------------------------------------------- how groups exchange


def check_groups(cluster: Cluster, nodes: Ints, *, inside: bool) -> None:
    """Raise ConfigError for tensor groups that span machines shared with other groups, or that span machines although
    they must be `inside` one (userbuffers). The chips of a torus are machines that are linked directly.

    nodes  (n_groups, t)
    """
    machine = cluster.host_of[nodes]
    machine = np.where(machine >= 0, machine, len(cluster.host_names) + nodes)
    tensor = nodes.shape[1]
    if not (machine != machine[:, :1]).any():
        return
    if any(len(distinct(np.nonzero(machine == number)[0])) > 1 for number in distinct(machine)):
        most = int(np.unique(machine, return_counts=True)[1].min())
        raise ConfigError(
            f"Parallel: tensor = {tensor}: tensor groups would cross machine boundaries unevenly; the "
            f"smallest machine has {most} workers. Use a number that divides the number of workers on every "
            "machine, or is a multiple of it"
        )
    if inside and not cluster.grid:
        raise ConfigError(
            "Parallel: tp_comm_overlap = True: tensor groups must be inside one machine, but groups of "
            f"{tensor} cross machines"
        )


@dataclass(frozen=True, eq=False)
class GroupSchedules:
    """The schedules of collectives in tensor groups.

    nodes      (n_groups, t) nodes of the members
    inside     whether userbuffers are used, which require rings
    algorithm  of the replicas' all-reduces

    If that is one of NCCL's, groups use it, too; otherwise, they use the default, and with userbuffers rings. Where a
    ring is the default, all-reduces across machines are rings or hierarchical, whichever is faster.
    """

    cluster: Cluster
    nodes: Ints
    inside: bool = False
    algorithm: str | Collective = "default"

    def __call__(self, kind: int, group: int, nbytes: float) -> Schedule:
        """Return the schedule of a kind of collective in a group, whose ranks are its members in order."""
        return self._cached(KINDS[kind], group, nbytes)

    @functools.cached_property
    def _cached(self) -> Callable[[str, int, float], Schedule]:
        return functools.cache(self._new)

    def _new(self, kind: str, group: int, nbytes: float) -> Schedule:
        cluster, order = self.cluster, self.order[group]
        places = self.nodes[group][order].tolist()
        by_nccl = isinstance(self.algorithm, str) and self.algorithm.partition("(")[0] == "nccl"
        algorithm = "ring" if self.inside else self.algorithm if by_nccl else "default"
        usual = default_algorithm(cluster, places) if algorithm == "default" else algorithm
        name = algorithm if algorithm in ("ring", "default") or kind == "all_reduce" else "nccl"
        schedule = build(name, len(places), nbytes, None, kind, (cluster, places))
        host = cluster.host_of[places]
        if usual == "ring" and kind == "all_reduce" and (host != host[0]).any():
            schedules = schedule, build("hierarchical", len(places), nbytes, where=(cluster, places))
            schedule = min(schedules, key=lambda candidate: schedule_time(cluster, candidate, places, nbytes))
        return reorder(schedule, order)

    def beside(
        self, n_groups: int, others: Callable[[int, int, float], Schedule]
    ) -> Callable[[int, int, float], Schedule]:
        """Return the schedules for all ranks, in `n_groups` groups; `others` are those of groups before the tensor
        groups."""
        first = n_groups - len(self.nodes)
        return lambda kind, group, nbytes: (
            self(kind, group - first, nbytes) if group >= first else others(kind, group, nbytes)
        )

    @functools.cached_property
    def order(self) -> Ints:
        """(n_groups, t) members of each group in ring order."""
        return _orders(self.cluster, tuple(map(tuple, self.nodes.tolist())))

    @property
    def following(self) -> Ints:
        """(n_groups, t) the next member in the ring of the group."""
        following = np.empty_like(self.order)
        np.put_along_axis(following, self.order, np.roll(self.order, -1, axis=1), axis=1)
        return following


@functools.lru_cache(maxsize=16)
def _orders(cluster: Cluster, nodes: tuple[tuple[int, ...], ...]) -> Ints:
    return np.stack([cluster.locality_order(np.array(group_nodes)) for group_nodes in nodes])


# ---------------------------------------------------------------- seconds on idle links

#: (kind of collective, or :data:`~ddlsim.plan.plan.SEND` for a hop in the ring, total bytes) -> s
Seconds = Callable[[int, float], float]


def timeline(items: Sequence[Item], seconds: Seconds) -> tuple[Floats, Floats]:
    """Return the start and end of each item of a pass, s after the pass begins, if all members act identically."""
    start, end, free = np.zeros(len(items)), np.zeros(len(items)), [0.0] * len(LANES)
    for i, item in enumerate(items):
        start[i] = max([free[item.lane], *(end[need] for need in item.needs)])
        if item.kind == ps.RECEIVE:
            end[i] = max(start[i], end[i - 1])
        else:
            end[i] = start[i] + (item.seconds if item.lane == 0 else seconds(item.kind, item.nbytes))
        free[item.lane] = end[i]
    return start, end


def with_exchanges(shard: Shard, seconds: Seconds) -> Workload:
    """Return the workload of a rank of a tensor group, with the times of exchanges included in those of the layers."""
    work = shard.workload
    by_layer = _by_layer(shard)
    passes = {"forward": work.forward.copy(), "backward": work.backward.copy()}
    more: dict[tuple[object, ...], float] = {}
    for (phase, layer), exchanges in by_layer.items():
        computing = float(passes[phase][layer])
        key = (computing, *((exchange.kind, exchange.nbytes, exchange.beside) for exchange in exchanges))
        if key not in more:
            items = _items(work, by_layer, phase, (layer, layer + 1), ps.COMPUTE, {})
            more[key] = float(timeline(items, seconds)[1].max())
        passes[phase][layer] = more[key]
    return dataclasses.replace(work, forward=passes["forward"], backward=passes["backward"])
