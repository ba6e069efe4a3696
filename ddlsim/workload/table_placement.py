"""Placement of embedding tables: which rank stores which part, in which memory, and the cost per step.

The names are those of TorchRec (Ivchenko et al. 2022, RecSys): a table is on one rank ("table-wise"), its columns or
rows are distributed ("column-wise", "row-wise"), or every rank has a copy ("data-parallel"). Large tables can be in
host memory, behind a cache on the device, as on Zion (Mudigere et al. 2022, arXiv:2104.05158).

The functions up to :func:`exchange_left_out` concern model-parallel tables and the exchange that runs do not simulate.
Data-parallel workers distribute the tables of a recommendation model, each table on one device (Naumov et al. 2019,
arXiv:1906.00091, section 4). In the forward pass, the rank with a table sends every other worker the vectors looked up
for that worker's samples; in the backward pass, it receives their gradients. These two all-to-alls per step are not
part of a gradient exchange and are not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddlsim.arguments import Bandwidth, Bytes, Share, checked
from ddlsim.readable import size
from ddlsim.units import si
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES

if TYPE_CHECKING:
    from ddlsim.workload.compute import Workload


def table_exchange_nbytes(model: Model, batch_size: int, n_workers: int, precision: str = "fp32") -> float:
    """Return the average bytes that a worker sends to the others in one all-to-all of its tables' vectors.

    N workers need B * width numbers each, (N - 1) / N of which are on other workers.
    """
    width = sum(layer.activation_nbytes / FP32_NBYTES for layer in model.layers if layer.model_parallel)
    return ELEMENT_NBYTES[precision] * width * batch_size * (n_workers - 1) / n_workers


def exchange_left_out(workload: Workload, n_workers: int, accumulation: int = 1) -> str | None:
    """Return a note for runs of `n_workers` whose tables' exchange is not simulated; None if there is no exchange."""
    model = workload.model
    nbytes = accumulation * table_exchange_nbytes(model, workload.batch_size, n_workers, workload.precision)
    if nbytes == 0.0:
        return None
    layers = [layer for layer in model.layers if layer.model_parallel]
    names, n_tables = ", ".join(layer.name for layer in layers), sum(len(layer.tensors) for layer in layers)
    return (
        f"{model.name}: the all-to-all of {names} is not simulated, so steps are too short. With the {n_tables} tables "
        f"distributed over {n_workers} workers, each worker would send about {size(nbytes)} of looked-up "
        "vectors in the forward pass of a step and as many bytes of gradients in the backward pass, in addition to the "
        f"{size(workload.gradient_nbytes)} of gradients that are simulated"
    )


SHARDINGS = ("table-wise", "row-wise", "column-wise")
INDEX_NBYTES = 8.0  # per index: int64
#: row-wise Adagrad reads and writes one fp32 number per updated row
ADAGRAD_TRAFFIC = 8.0


@dataclass(frozen=True)
class Table:
    """An embedding table: `pooling` rows of `dim` numbers are looked up and summed per sample."""

    rows: int
    dim: int
    pooling: int


@dataclass(frozen=True)
class Shard:
    """A part of a table on a rank; `on_host`: in its host's memory."""

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
    """Memory per rank for tables, in bytes.

    device   on the device, for tables and looked-up vectors
    element  per number of a table
    row      of optimizer state per row
    sample   per number looked up for each of the samples (all samples together)
    """

    device: float
    element: float = FP32_NBYTES
    row: float = 0.0
    sample: float = 0.0
    host: HostMemory | None = None

    def nbytes(self, shard: Shard) -> float:
        """Return the bytes of a part of a table, including optimizer state."""
        return shard.rows * (shard.columns * self.element + self.row)

    def cached(self, shard: Shard) -> float:
        """Return the fraction of a part of a table that is on the device."""
        return self.host.cache_load_factor if self.host is not None and shard.on_host else 1.0

    def on_device(self, shard: Shard) -> float:
        """Return the bytes of a part of a table on the device."""
        return self.cached(shard) * self.nbytes(shard)

    @property
    def on_host(self) -> float:
        """Bytes of host memory for tables."""
        return 0.0 if self.host is None else si(self.host.capacity, "bytes")


@dataclass(frozen=True)
class Placement:
    """Location of all tables.

    shards      parts of the distributed tables
    replicated  tables of which every rank has a copy
    """

    tables: tuple[Table, ...]
    n_ranks: int
    sharding: str
    shards: tuple[Shard, ...]
    replicated: tuple[int, ...] = ()

    def of(self, rank: int) -> list[Shard]:
        """Return the parts of distributed tables on a rank."""
        return [shard for shard in self.shards if shard.rank == rank]

    @property
    def replicated_params(self) -> int:
        """Number of parameters in replicated tables."""
        return sum(self.tables[i].rows * self.tables[i].dim for i in self.replicated)

    @property
    def row_wise_columns(self) -> int:
        """Numbers per sample of which every rank has a partial sum, from tables distributed by rows."""
        if self.sharding != "row-wise":
            return 0
        return sum(table.dim for i, table in enumerate(self.tables) if i not in self.replicated)

    def columns(self, rank: int) -> int:
        """Return how many numbers per sample a rank looks up completely."""
        return 0 if self.sharding == "row-wise" else sum(shard.columns for shard in self.of(rank))


def tables_of(model: Model) -> tuple[Table, ...]:
    """Return the embedding tables of a model, in file order."""
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
    """Place the tables; return the part of a table that fits nowhere, if any.

    The largest part is placed first, on the rank with room that has the fewest lookups so far and, among equals, the
    fewest bytes. If no rank has room, the largest table moves to host memory.

    replicate  maximum size in bytes of tables that are replicated
    without    ranks without tables
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
        """Return the number of columns of each part of a table."""
        if self.sharding != "column-wise":
            return [table.dim]
        n_parts = max(w for w in range(1, min(len(self.ranks), table.dim) + 1) if table.dim % w == 0)
        return [table.dim // n_parts] * n_parts

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
    """Work of a rank per step for its tables, for the samples of all ranks.

    lookup, update  time in s
    columns         numbers that it sends to others per sample of theirs
    indices         indices that it receives from others per sample of theirs
    """

    lookup: float
    update: float
    columns: float
    indices: float


def work_of(placement: Placement, rank: int, batch_size: int, space: Space, rate: float, adagrad: bool) -> TableWork:
    """Return a rank's work for its tables in a step.

    batch_size  samples per rank
    rate        bytes/s at which a device reads and writes rows at random
    adagrad     the optimizer also reads and writes one number per row

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
