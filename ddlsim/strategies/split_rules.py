"""Rules for models that are split over workers: their sizes, the valid sizes nearest to invalid ones, batches and
optimizers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ddlsim.errors import ConfigError, shown
from ddlsim.plan.pipeline_orders import ORDERS, pass_order
from ddlsim.readable import count
from ddlsim.runtime.context import RunContext
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory, holding_of, kept_nbytes, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.optimizer_rules import NORMS, rule_of
from ddlsim.workload.roles import blocks, split_error

if TYPE_CHECKING:
    from ddlsim.strategies.fsdp import FSDP
    from ddlsim.strategies.parallel import Parallel

T = TypeVar("T", "Parallel", "FSDP")
#: number of configurations in an error message
N_NEAR = 3
#: distance of a doubling of each size; tensor and pipeline determine the replicas, so these count less
WEIGHTS = {"tensor": 1.0, "pipeline": 1.0, "data": 0.1, "micro_batch": 0.5, "interleave": 0.5, "batch_size": 0.5}
#: upper limit of the micro-batch sizes that are proposed
MOST_SAMPLES = 1024
MESH = ("tensor", "pipeline", "data")


class Sizes(NamedTuple):
    """The sizes of a split, and the number of samples per update."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    interleave: int
    batch_size: int

    def distance(self, wanted: Sizes) -> float:
        """Return the distance between two splits: the weighted sum of the absolute logarithms of the size ratios."""
        return sum(
            weight * abs(math.log2(getattr(self, name) / getattr(wanted, name))) for name, weight in WEIGHTS.items()
        )

    def unlike(self, wanted: Sizes) -> dict[str, int]:
        """Return the sizes that differ from the wanted ones, by name; if one size of the mesh differs, all of them."""
        names = [name for name in self._fields if getattr(self, name) != getattr(wanted, name)]
        return {
            name: getattr(self, name)
            for name in self._fields
            if name in names or (name in MESH and set(MESH) & set(names))
        }

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


class Rules:
    """The sizes allowed by a model, a number of workers, and the order and cut of a strategy."""

    def __init__(self, strategy: Parallel, model: Model, n_workers: int) -> None:
        self.strategy, self.model, self.n_workers = strategy, model, n_workers
        table = strategy.order if not isinstance(strategy.order, str) else None
        self.per_stage = 1  # minimum number of chunks
        if isinstance(strategy.order, str) and strategy.order in ORDERS:
            self.per_stage = ORDERS[strategy.order][0]
        self.stages = None if table is None else len(table)  # a custom order fixes the number of stages
        self.batches = None if table is None else 1 + max((entry[2] for passes in table for entry in passes), default=0)
        self.layers = len(blocks(model.layers)) if strategy.cut == "layers" else len(model.layers)
        self.widths = functools.cache(self._width)

    def _width(self, tensor: int) -> str:
        """Return why the layers cannot be split over `tensor` ranks; empty if they can."""
        if tensor > 1 and not any(layer.heads for layer in self.model.layers):
            return f"tensor = {tensor}: {self.model.name} has no attention layers, which tensor parallelism needs"
        return split_error(self.model, tensor)

    def unit(self, sizes: Sizes) -> tuple[int, str]:
        """Return the number of which the samples of an update must be a multiple, and the reason."""
        together, why = sizes.data * sizes.micro_batch, f"data {sizes.data} x micro_batch {sizes.micro_batch}"
        if sizes.interleave > 1 and self.strategy.order == "1f1b" and sizes.pipeline > 1:
            return together * sizes.pipeline, (
                f"{why} x pipeline {sizes.pipeline}, because stages with interleave = {sizes.interleave} take turns of "
                f"{sizes.pipeline} micro-batches"
            )
        return together, why

    def broken(self, sizes: Sizes) -> str:
        """Describe the first rule that the sizes violate; return "" if they are valid."""
        t, p, d = sizes.tensor, sizes.pipeline, sizes.data
        if t * p * d != self.n_workers:
            product = f"pipeline {p} x tensor {t} = {p * t}: must divide"
            if self.strategy.data is not None:
                product = f"data {d} x pipeline {p} x tensor {t} = {d * p * t}: must equal"
            return f"Parallel: {product} the number of workers, {self.n_workers}"
        if self.stages is not None and p != self.stages:
            return f"Parallel: pipeline = {p}: must be {self.stages}, the number of stages in the table of order"
        return self.widths(t) or self._chunks(p, max(self.per_stage, sizes.interleave)) or self._batch(sizes)

    def _chunks(self, pipeline: int, per_stage: int) -> str:
        n, most = pipeline * per_stage, self.layers
        what = f"pipeline = {pipeline}" if per_stage == 1 else f"pipeline {pipeline} x {per_stage} chunks = {n}"
        if self.strategy.cut == "layers" and (not most or most % n):
            if not most:
                return f"Parallel: cut = 'layers': {self.model.name} has no transformer layers; use cut='balanced'"
            return (
                f"Parallel: cut = 'layers' with {what}: the number of chunks must divide the {most} transformer layers "
                f"of {self.model.name}"
            )
        return f"Parallel: {what}: {self.model.name} has only {count(most, 'layer')}" if n > most else ""

    def _batch(self, sizes: Sizes) -> str:
        unit, why = self.unit(sizes)
        if sizes.batch_size % unit:
            return f"batch_size = {sizes.batch_size}: must be a multiple of {unit} ({why})"
        least = unit * sizes.pipeline
        if self.strategy.order == "2bw" and sizes.batch_size < least:
            return (
                f"batch_size = {sizes.batch_size}: must be at least {least} ({why} x pipeline {sizes.pipeline}), "
                "because '2bw' needs a micro-batch for each stage"
            )
        if self.batches is not None and sizes.batch_size != unit * self.batches:
            return (
                f"batch_size = {sizes.batch_size}: must be {unit * self.batches} ({why} x {self.batches} micro-batches "
                "in the table of order)"
            )
        return ""

    def near(self, wanted: Sizes) -> Iterator[Sizes]:
        """Yield valid sizes, the nearest first."""
        valid = {sizes for sizes in self._around(wanted) if not self.broken(sizes)}
        yield from sorted(valid, key=lambda sizes: (round(sizes.distance(wanted), 9), sizes))

    def _around(self, wanted: Sizes) -> Iterator[Sizes]:
        tensors = [t for t in divisors(self.n_workers) if not self.widths(t)]
        chunks = range(1, min(wanted.interleave, self.layers) + 1)
        most = min(wanted.micro_batch, MOST_SAMPLES)
        samples = {wanted.micro_batch, *(n for n in range(1, most + 1) if wanted.micro_batch % n == 0)}
        for tensor in tensors:
            for pipeline in [self.stages] if self.stages is not None else divisors(self.n_workers // tensor):
                data = self.n_workers // (tensor * pipeline)
                for interleave in chunks if pipeline > 1 else [1]:
                    for micro_batch in samples:
                        sizes = Sizes(tensor, pipeline, data, micro_batch, interleave, wanted.batch_size)
                        for batch_size in self._batches(sizes):
                            yield sizes._replace(batch_size=batch_size)

    def _batches(self, sizes: Sizes) -> set[int]:
        unit, _ = self.unit(sizes)
        if self.batches is not None:
            return {unit * self.batches}
        least = unit * sizes.pipeline if self.strategy.order == "2bw" else unit
        below = sizes.batch_size - sizes.batch_size % unit
        return {max(below, least), max(-(-sizes.batch_size // unit) * unit, least)}


def known_order(order: object, where: str) -> object:
    """Return the name of an order, or a table of passes. Raises ConfigError for anything else."""
    if isinstance(order, str):
        if order not in ORDERS:
            pass_order(order, 1, 1, 1)  # raises an error with the known orders
        return order
    stages = cast("Sequence[Sequence[tuple[str, int, int]]]", order)
    for i, passes in enumerate(stages):
        for j, (kind, chunk, micro) in enumerate(passes):
            if kind not in ("F", "B", "W") or min(chunk, micro) < 0:
                raise ConfigError(
                    f"{where}[{i}][{j}] = {(kind, chunk, micro)}: must be ('F', 'B' or 'W', chunk, micro-batch), with "
                    "chunks and micro-batches numbered from 0"
                )
    if not stages or not all(stages):
        raise ConfigError(f"{where} = {shown(order)}: must contain a list of passes for every stage")
    return order


def sizes_wanted(strategy: Parallel, batch_size: int, n_workers: int) -> Sizes:
    """Return the sizes of a strategy, by default with replicas on all workers."""
    inside = strategy.tensor * strategy.pipeline
    data = max(n_workers // inside, 1) if strategy.data is None else strategy.data
    micro_batch = 1 if strategy.order == "pipedream" else strategy.micro_batch or 1  # all samples of the replica
    return Sizes(strategy.tensor, strategy.pipeline, data, micro_batch, strategy.interleave, batch_size)


def check_sizes(strategy: Parallel, model: Model, batch_size: int, n_workers: int) -> None:
    """Raise ConfigError for an invalid combination of sizes, with the numbers and the nearest valid configurations."""
    rules, wanted = Rules(strategy, model, n_workers), sizes_wanted(strategy, batch_size, n_workers)
    broken = rules.broken(wanted)
    if not broken:
        return
    near: list[str] = []
    named = set()
    for sizes in rules.near(wanted):
        changes, mesh = sizes.unlike(wanted), sizes[: len(MESH)]
        if mesh in named:  # with another batch size
            continue
        try:
            with_sizes(strategy, changes)
        except ConfigError:  # such as passes incompatible with tensor groups
            continue
        near.append(", ".join(f"{name}={value}" for name, value in changes.items()))
        named |= {mesh} - {wanted[: len(MESH)]}
        if len(near) == N_NEAR:
            break
    product = wanted.tensor * wanted.pipeline * wanted.data
    near += [f"workers={product}"] if product < n_workers else []
    raise ConfigError(f"{broken}; the nearest valid sizes are {'; '.join(near)}" if near else broken)


def with_sizes(strategy: T, changes: Mapping[str, Any]) -> T:
    """Return a strategy with other sizes, except for the batch size, which belongs to the run."""
    return dataclasses.replace(strategy, **{name: value for name, value in changes.items() if name != "batch_size"})


def divisors(n: int) -> list[int]:
    """Return the divisors of n, in order."""
    return [i for i in range(1, n + 1) if n % i == 0]


# ------------------------------------------------------------ batches and optimizers of split models


class DealtOut:
    """Strategies with a global batch, divided evenly among the workers; a step is an update."""

    micro_batches: int = 1

    def default_batch_size(self, n_workers: int) -> int:
        """Return the batch size with one sample per worker."""
        return n_workers * self.micro_batches

    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Return the samples that a worker computes at once. Raises ConfigError for a batch that cannot be divided
        evenly."""
        n = n_workers * self.micro_batches
        if batch_size % n:
            near = sorted({max(batch_size // n, 1) * n, -(-batch_size // n) * n})
            several = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            raise ConfigError(
                f"batch_size = {batch_size}: must be a multiple of {n} ({n_workers} workers{several}) with "
                f"{type(self).__name__}; use {' or '.join(map(str, near))}"
            )
        return batch_size // n


def whole_batch(accumulation: int, name: str) -> None:
    """Raise ConfigError for an `accumulation`, which the strategy `name` does not support."""
    if accumulation > 1:
        raise ConfigError(f"accumulation = {accumulation}: {name} does not accumulate gradients; use accumulation=1")


def check_shares(name: str, context: RunContext) -> None:
    """Raise ConfigError if the task's optimizer works layer by layer and is not one whose communication is modelled."""
    task = context.learner.task
    if task is not None and hasattr(task.optimizer, "with_bounds") and rule_of(task.optimizer) not in NORMS:
        raise ConfigError(
            f"{name}: the optimizer {type(task.optimizer).__name__} needs whole layers, but each rank holds only parts "
            "of them, and gathering them is not modelled; use AllReduce, or a bundled optimizer such as LAMB()"
        )


# ------------------------------------------------------------ variants with lower memory

#: changed fields of a strategy, by name
Changes = Mapping[str, object]
#: distance of each kind of recomputation; with attention matrices, little work is added, in full a third
AGAIN = {"none": 0.0, "selective": 0.1, "dots-saveable": 0.15, "operators": 0.2}
AGAIN |= {"early-stop": 0.5, "full": 0.5, "stage": 0.6}
#: distance of each ZeRO stage: 1 and 2 add no communication, 3 adds half
SHARED = {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.3}

#: orders in which the first stage holds at least one micro-batch per stage
FILLING = ("gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v")


def lower_memory_parallel(
    strategy: Parallel, workload: Workload, batch_size: int, n_workers: int, room: float
) -> Iterator[tuple[Parallel, Changes]]:
    """Yield strategies that need less memory, each with its changes to `strategy`, for the same batch and workers.

    Their weights, gradients and optimizer state fit in `room` bytes. Strategies with the fewest changes come first.
    """
    state = state_of(workload)
    wanted = sizes_wanted(strategy, batch_size, n_workers)
    attention = any(layer.heads for layer in workload.model.layers)
    named = isinstance(strategy.order, str)
    again = [mode for mode in (("selective", "full") if attention else ("stage",)) if AGAIN[mode] > _cost(strategy)]
    fills = strategy.order in FILLING and "stage" not in (strategy.recompute, *again)
    layers = workload.model.layers

    @functools.cache
    def of_sample(tensor: int, recompute: str) -> float:
        return kept_nbytes(
            layers,
            workload.precision,
            tensor=tensor,
            sequence=strategy.sequence and tensor > 1,
            recompute=recompute,
            flash=workload.flash,
            stack=workload.known_stack,
        )[0]

    def kept(sizes: Sizes, recompute: str) -> float:
        """Return a lower bound on a first stage's activations in bytes: its share of layers, less a fifth for other
        cuts."""
        batches = sizes.batch_size // (sizes.data * sizes.micro_batch)
        under_way = min(1.0, batches / sizes.pipeline)  # micro-batches in flight, of all layers
        return 0.8 * under_way * sizes.micro_batch * of_sample(sizes.tensor, recompute)

    variants: list[tuple[float, float, Sizes, str, dict[str, object]]] = []
    for sizes in Rules(strategy, workload.model, n_workers).near(wanted):
        if sizes.batch_size != batch_size:
            continue
        shards = {strategy.sharded, strategy.sharded or sizes.data > 1}
        for recompute, sharded in itertools.product([strategy.recompute, *again], shards):
            held = state.weights + state.gradients + state.optimizer / (sizes.data if sharded else 1)
            held = state.total / sizes.data if sharded == "full" else held
            held /= sizes.tensor * sizes.pipeline  # average; at least one worker holds this much
            more: dict[str, object] = {"recompute": recompute, "sharded": sharded}
            changes = {name: value for name, value in more.items() if value != vars(strategy)[name]}
            far = sizes.distance(wanted) + AGAIN[recompute] - _cost(strategy) + SHARED[1] * ("sharded" in changes)
            variants.append((round(far, 9), held, sizes, recompute, {**sizes.unlike(wanted), **changes}))
    for _, held, sizes, recompute, changes in sorted(variants, key=lambda variant: variant[0]) if named else []:
        if held <= room and held + (kept(sizes, recompute) if fills else 0.0) <= room:
            yield from _changed(strategy, [changes])


def _changed(strategy: T, variants: Iterable[dict[str, object]]) -> Iterator[tuple[T, Changes]]:
    """Yield the valid variants of a strategy, given their changes."""
    for changes in variants:
        try:
            yield with_sizes(strategy, changes), changes
        except ConfigError:  # such as incompatible passes or overlaps
            continue


def _cost(strategy: Parallel | FSDP) -> float:
    return AGAIN[strategy.recompute]


def lower_memory_fsdp(
    strategy: FSDP, workload: Workload, batch_size: int, n_workers: int, room: float
) -> Iterator[tuple[FSDP, Changes]]:
    """Yield strategies that need less memory for the same batch, with their changes to `strategy`.

    They shard more or keep less, and their sharded state fits in `room` bytes per worker. Strategies with the fewest
    changes come first.
    """
    if state_of(workload).total > room * n_workers:
        return
    attention = any(layer.heads for layer in workload.model.layers)
    largest = strategy.micro_batch or batch_size // n_workers
    again = ["selective", "full"] if attention else []
    halves = [n for n in range(1, largest) if largest % n == 0]
    variants: list[tuple[float, dict[str, object]]] = []
    for stage, recompute, micro_batch, minimal in itertools.product(
        range(strategy.stage, 4),
        [strategy.recompute, *(a for a in again if AGAIN[a] > _cost(strategy))],
        [*halves, largest],
        (False, True),
    ):
        values: dict[str, object] = {"stage": stage, "recompute": recompute}
        changes = {name: value for name, value in values.items() if value != vars(strategy)[name]}
        changes |= {} if micro_batch == largest else {"micro_batch": micro_batch}
        if minimal and strategy.stage == stage == 3:
            changes |= {"prefetch": 0} if strategy.prefetch != 0 else {}
            changes |= {} if strategy.shard is None else {"shard": None, "all_reduce": None}
            changes |= {} if strategy.reshard else {"reshard": True}
        far = SHARED[stage] - SHARED[strategy.stage] + AGAIN[recompute] - _cost(strategy)
        far += 0.5 * (largest / micro_batch - 1.0) / largest + 0.2 * minimal
        if changes:
            variants.append((round(far, 9), changes))
    yield from _changed(strategy, (changes for _, changes in sorted(variants, key=lambda variant: variant[0])))


def state_of(workload: Workload) -> Memory:
    """Return the bytes of the whole model's weights, gradients and optimizer, without activations."""
    memory = memory_of(workload.model, 0, workload.precision, holding_of(workload))
    return dataclasses.replace(memory, activations=0.0, buffers=0.0)


def changes_text(changes: Changes) -> str:
    """Return changes in the syntax of Python arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())
