"""Placement of embedding tables: which rank stores which part, in which memory, and the cost per step.

The names are those of TorchRec (Ivchenko et al. 2022, RecSys): a table lies whole on one rank ("table-wise"), its
columns or its rows are dealt out ("column-wise", "row-wise"), or every rank has a copy ("data-parallel"). Large tables
can lie in the memory of the host, behind a cache on the device, as on Zion (Mudigere et al. 2022, arXiv:2104.05158).

Embedding tables, model-parallel: how much of them a device holds, and the exchange that runs leave out.

Data-parallel workers share out the tables of a recommendation model, each table whole on one device (Naumov et al.
2019, arXiv:1906.00091, section 4). In the forward pass the holder of a table sends every other worker the vectors that
it has looked up for that worker's samples; in the backward pass it gets their gradients back: two all-to-alls a step.
They are no part of a gradient exchange, and nothing else simulates them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddlsim.arguments import Bandwidth, Bytes, Share, checked
from ddlsim.units import si
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES

if TYPE_CHECKING:
    from ddlsim.workload.compute import Workload


def held_params(model: Model, n_workers: int) -> int:
    """Return the parameters on the fullest device: all but the tables, and its share of these.

    Tables go, the largest first, to the device that holds least so far (Graham 1969: at most 4/3 of the best split).
    """
    held = [0] * n_workers
    tables = [n for layer in model.layers if layer.model_parallel for _, n in layer.tensors]
    for elements in sorted(tables, reverse=True):
        heapq.heapreplace(held, held[0] + elements)
    return model.n_params - sum(tables) + max(held)


def table_exchange_nbytes(model: Model, batch_size: int, n_workers: int, precision: str = "fp32") -> float:
    """Return the bytes that a worker sends to the others in one all-to-all of what its tables answer, on average.

    N workers need B * width numbers each, and (N - 1) / N of them lie with others.
    """
    width = sum(layer.activation_nbytes / FP32_NBYTES for layer in model.layers if layer.model_parallel)
    return ELEMENT_NBYTES[precision] * width * batch_size * (n_workers - 1) / n_workers


def exchange_left_out(workload: Workload, n_workers: int, accumulation: int = 1) -> str | None:
    """Return what to say of a run of `n_workers` whose tables' exchange is not simulated, None if it has none."""
    model = workload.model
    nbytes = accumulation * table_exchange_nbytes(model, workload.batch_size, n_workers, workload.precision)
    if nbytes == 0.0:
        return None
    layers = [layer for layer in model.layers if layer.model_parallel]
    names, n_tables = ", ".join(layer.name for layer in layers), sum(len(layer.tensors) for layer in layers)
    return (
        f"{model.name}: the all-to-all of {names} is not simulated, so steps are too short. With the {n_tables} tables "
        f"distributed over {n_workers} workers, each worker would send about {nbytes / 1e6:.3g} MB of looked-up "
        "vectors "
        "in the forward pass of a step and as many bytes of gradients in the backward pass, in addition to the "
        f"{workload.gradient_nbytes / 1e6:.3g} MB of gradients that are simulated"
    )


SHARDINGS = ("table-wise", "row-wise", "column-wise")
INDEX_NBYTES = 8.0  # of an index: int64
#: row-wise Adagrad reads and writes one fp32 number of each row that it updates
ADAGRAD_TRAFFIC = 8.0


@dataclass(frozen=True)
class Table:
    """An embedding table: `pooling` rows of `dim` numbers are looked up and added for every sample."""

    rows: int
    dim: int
    pooling: int


@dataclass(frozen=True)
class Shard:
    """A part of a table on a rank; `on_host` in the memory of its host."""

    table: int
    rank: int
    rows: int
    columns: int
    on_host: bool = False


@checked
@dataclass(frozen=True)
class HostMemory:
    """Host memory (DDR) that stores the largest embedding tables, with a cache on the device.

    Host memory is used only if the tables do not fit on the device. Every row that is looked up or updated passes
    through the cache.

    capacity           host memory available for tables, in bytes per worker
    bandwidth          rate in bytes/s at which a worker reads and writes rows in host memory
    hit_rate           fraction of lookups that hit the cache, from 0 to 1
    cache_load_factor  size of the cache as a fraction of the size of the tables in host memory (named as in TorchRec)
    """

    capacity: Bytes
    bandwidth: Bandwidth = "12 GB/s"
    hit_rate: Share = 0.9
    cache_load_factor: Share = 0.2


@dataclass(frozen=True)
class Space:
    """The room that every rank has for tables, in bytes.

    device   on the device, for tables and what is looked up in them
    element  of a number of a table
    row      of what the optimizer keeps for each row
    sample   of what is kept for each number that is looked up for a sample (of each number that all samples need)
    """

    device: float
    element: float = FP32_NBYTES
    row: float = 0.0
    sample: float = 0.0
    host: HostMemory | None = None

    def nbytes(self, shard: Shard) -> float:
        """Return the bytes of a part of a table, optimizer's state included."""
        return shard.rows * (shard.columns * self.element + self.row)

    def cached(self, shard: Shard) -> float:
        """Return the share of these that is on the device."""
        return self.host.cache_load_factor if self.host is not None and shard.on_host else 1.0

    def on_device(self, shard: Shard) -> float:
        """Return the bytes of these that are on the device."""
        return self.cached(shard) * self.nbytes(shard)

    @property
    def on_host(self) -> float:
        """Bytes of the host."""
        return 0.0 if self.host is None else si(self.host.capacity, "bytes")


@dataclass(frozen=True)
class Placement:
    """Where all tables are.

    shards      of the tables that are dealt out
    replicated  tables of which every rank has a copy
    """

    tables: tuple[Table, ...]
    n_ranks: int
    sharding: str
    shards: tuple[Shard, ...]
    replicated: tuple[int, ...] = ()

    def of(self, rank: int) -> list[Shard]:
        """Return what a rank holds of tables that are dealt out."""
        return [shard for shard in self.shards if shard.rank == rank]

    @property
    def replicated_params(self) -> int:
        """Parameters of which every rank has a copy."""
        return sum(self.tables[i].rows * self.tables[i].dim for i in self.replicated)

    @property
    def row_wise_columns(self) -> int:
        """Numbers of a sample of which every rank has a part of the sum: of tables that are dealt out by rows."""
        if self.sharding != "row-wise":
            return 0
        return sum(table.dim for i, table in enumerate(self.tables) if i not in self.replicated)

    def columns(self, rank: int) -> int:
        """Return how many numbers of a sample a rank looks up whole."""
        return 0 if self.sharding == "row-wise" else sum(shard.columns for shard in self.of(rank))


def tables_of(model: Model) -> tuple[Table, ...]:
    """Return the embedding tables of a model, in the order of the file."""
    tables = []
    for layer in model.layers:
        if layer.type == "embedding_bag":
            dim = layer.out_shape[0] // len(layer.tensors)
            pooling = round(layer.moved_nbytes / (FP32_NBYTES * layer.out_shape[0])) - 1  # rows read, sums written
            tables += [Table(n // dim, dim, pooling) for _, n in layer.tensors]
    return tuple(tables)


def place(
    tables: Sequence[Table],
    n_ranks: int,
    sharding: str,
    space: Space,
    replicate: float = 0.0,
    without: frozenset[int] = frozenset(),
) -> Placement | Shard:
    """Return where the tables are, or the part of a table that fits nowhere.

    The largest part goes first, to the rank with the fewest lookups so far, and of these to the one with the fewest
    bytes, of those that have room. Where there is none, the largest table moves to the host.

    replicate  bytes up to which every rank has a copy of a table
    without    ranks that hold no tables
    """
    copies = tuple(i for i, t in enumerate(tables) if t.rows * t.dim * space.element <= replicate)
    room = space.device - sum(tables[i].rows * tables[i].dim for i in copies) * space.element
    left = Space(room, space.element, space.row, space.sample, space.host)
    split = [i for i in range(len(tables)) if i not in copies]
    split.sort(key=lambda i: -tables[i].rows * tables[i].dim)
    ranks = [rank for rank in range(n_ranks) if rank not in without]
    for n_hosted in range(len(split) + 1 if space.host is not None else 1):
        placed = _Placing(tables, ranks, sharding, left, frozenset(split[:n_hosted]))
        failed = placed.all_of(split)
        if failed is None:
            return Placement(tuple(tables), n_ranks, sharding, tuple(placed.shards), copies)
    assert failed is not None
    return failed


@dataclass
class _Placing:
    tables: Sequence[Table]
    ranks: Sequence[int]
    sharding: str
    space: Space
    hosted: frozenset[int]
    shards: list[Shard] = field(default_factory=list)
    device: dict[int, float] = field(default_factory=dict)
    host: dict[int, float] = field(default_factory=dict)
    lookups: dict[int, float] = field(default_factory=dict)

    def all_of(self, order: Sequence[int]) -> Shard | None:
        for i in order:
            for columns in self._widths(self.tables[i]):
                shard = self._one(i, columns) if self.sharding != "row-wise" else self._rows(i)
                if shard is not None:
                    return shard
        return None

    def _widths(self, table: Table) -> list[int]:
        """Return the columns of each part of a table."""
        if self.sharding != "column-wise":
            return [table.dim]
        ways = max(w for w in range(1, min(len(self.ranks), table.dim) + 1) if table.dim % w == 0)
        return [table.dim // ways] * ways

    def _one(self, i: int, columns: int) -> Shard | None:
        for rank in sorted(self.ranks, key=lambda r: (self.lookups.get(r, 0.0), self.device.get(r, 0.0), r)):
            shard = Shard(i, rank, self.tables[i].rows, columns, i in self.hosted)
            if self._fits(shard):
                self._put(shard)
                return None
        return shard

    def _rows(self, i: int) -> Shard | None:
        n, rows = len(self.ranks), self.tables[i].rows
        for place, rank in enumerate(self.ranks):
            share = rows * (place + 1) // n - rows * place // n
            shard = Shard(i, rank, share, self.tables[i].dim, i in self.hosted)
            if not self._fits(shard):
                return shard
            self._put(shard)
        return None

    def _fits(self, shard: Shard) -> bool:
        device = self.device.get(shard.rank, 0.0) + self._on_device(shard)
        host = self.host.get(shard.rank, 0.0) + self.space.nbytes(shard)
        return device <= self.space.device and (not shard.on_host or host <= self.space.on_host)

    def _put(self, shard: Shard) -> None:
        self.shards.append(shard)
        self.device[shard.rank] = self.device.get(shard.rank, 0.0) + self._on_device(shard)
        self.lookups[shard.rank] = self.lookups.get(shard.rank, 0.0) + shard.columns * self.tables[shard.table].pooling
        if shard.on_host:
            self.host[shard.rank] = self.host.get(shard.rank, 0.0) + self.space.nbytes(shard)

    def _on_device(self, shard: Shard) -> float:
        return self.space.on_device(shard) + shard.columns * self.space.sample


@dataclass(frozen=True)
class TableWork:
    """What a rank does for the tables that it holds, for the samples of all ranks in a step.

    lookup, update  s
    columns         numbers that it sends to others for each of their samples
    indices         that it gets from others for each of their samples
    """

    lookup: float
    update: float
    columns: float
    indices: float


def work_of(placement: Placement, rank: int, batch_size: int, space: Space, rate: float, adagrad: bool) -> TableWork:
    """Return what a rank does for its tables in a step.

    batch_size  samples of each rank
    rate        bytes/s at which a device reads and writes rows at random
    adagrad     the optimizer keeps a number for each row, which is read and written as well

    A lookup reads a row; its update reads and writes it, and reads the gradient of the sum that it is part of. Rows of
    a table are equally likely to be looked up.
    """
    tables, samples = placement.tables, batch_size * placement.n_ranks
    host = space.host
    slowness = 0.0 if host is None else host.hit_rate / rate + (1.0 - host.hit_rate) / si(host.bandwidth, "bandwidth")
    lookup, update, indices = 0.0, 0.0, {}
    for shard in placement.of(rank):
        table = tables[shard.table]
        seconds = slowness if shard.on_host else 1.0 / rate
        n_rows = samples * table.pooling * shard.rows / table.rows
        nbytes = n_rows * shard.columns * space.element
        lookup += nbytes * seconds
        update += ((2.0 + 1.0 / table.pooling) * nbytes + (ADAGRAD_TRAFFIC * n_rows if adagrad else 0.0)) * seconds
        indices[shard.table] = table.pooling * shard.rows / table.rows
    copies = sum(tables[i].pooling * tables[i].dim for i in placement.replicated)
    lookup += batch_size * copies * space.element / rate
    return TableWork(lookup, update, float(placement.columns(rank)), sum(indices.values()))
