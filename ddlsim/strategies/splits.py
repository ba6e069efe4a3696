"""`Splits`: the search space for splitting a model over workers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ddlsim.arguments import Count, checked, integer, one_of
from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.plan import between_blocks
from ddlsim.plan.pipeline_orders import ORDERS
from ddlsim.runtime.fabric import AllReduceAlgorithm, Fabric, algorithm_name
from ddlsim.strategies.fsdp import FSDP
from ddlsim.strategies.parallel import Parallel, Recomputation
from ddlsim.strategies.split_rules import divisors
from ddlsim.workload.model import Model
from ddlsim.workload.roles import blocks, can_split

#: varied fields, in addition to those of candidates without a split
SIZES = (
    "tensor", "pipeline", "data", "micro_batch", "interleave", "order", "recompute", "sequence", "stage", "shard",
    "cut", "p2p",
)  # fmt: skip
#: default maximum number of chunks per stage
MOST_CHUNKS = 4
#: reasons for invalid combinations
PRODUCT = "tensor x pipeline x data is not the number of workers"
GLOBAL_BATCH = "the batch size is not a multiple of data x micro_batch"
WHOLE = "stage 2 of ZeRO needs tensor = 1 and pipeline = 1"
GROUPS = "shard does not divide the number of workers"


@checked
@dataclass(frozen=True)
class Splits:
    """Search space for the parallelism degrees and other settings of :class:`~ddlsim.Parallel` and FSDP.

    Every combination that is compatible with the number of workers and the batch size is simulated. As for these two
    strategies, ``batch_size`` is the global batch size. Every field except `algorithm` is a sequence of values to try.

    tensor       sizes of tensor groups; None: all numbers that divide both the number of workers per machine and the
                 number of attention heads in the model
    pipeline     numbers of pipeline stages; None: all divisors of the remaining number of workers, up to the number of
                 blocks in the model
    data         numbers of replicas; None: the number that uses all workers
    micro_batch  numbers of samples per micro-batch
    order        orders of forward and backward passes; `interleave` applies only to "1f1b"
    interleave   numbers of model chunks per stage; None: all numbers up to 4 that divide the transformer layers evenly
    recompute    activations to recompute in the backward pass; None: "none", "selective" and "full" if the model has
                 attention, otherwise "none" and "stage"
    sequence     whether tensor groups use sequence parallelism
    stage        ZeRO stages. Replicas shard nothing in stage 0, the optimizer state from stage 1, the gradients from
                 stage 2, and the weights in stage 3. Stage 2 is FSDP and needs tensor = pipeline = 1. Stage 3 of a
                 split model is ``Parallel(sharded="full")``
    shard        sizes of the sharding groups of stage 3 (HYBRID_SHARD); None: one group of all workers
    cut, p2p     where the model is cut into stages, and how stages communicate, as for ``Parallel``
    algorithm    algorithm of the all-reduce over replicas
    """

    tensor: Sequence[Count] | None = None
    pipeline: Sequence[Count] | None = None
    data: Sequence[Count] | None = None
    micro_batch: Sequence[Count] = (1, 2, 4)
    order: Sequence[Annotated[str, one_of(*ORDERS)]] = ("1f1b",)
    interleave: Sequence[Count] | None = None
    recompute: Sequence[Recomputation] | None = None
    sequence: Sequence[bool] = (True,)
    stage: Sequence[Annotated[int, integer(0, 3)]] = (1,)
    shard: Sequence[Count] | None = None
    cut: Sequence[Literal["balanced", "layers"]] = ("balanced",)
    p2p: Sequence[Literal["overlapped", "exchange", "in turns", "in step"]] = ("overlapped",)
    algorithm: AllReduceAlgorithm = "default"

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) is not None and not len(getattr(self, name)):
                raise ConfigError(f"Splits: {name} is empty; add at least one value to try")
        if self.shard is not None and 3 not in self.stage:
            raise ConfigError(
                f"Splits: shard = {list(self.shard)} has no effect without stage 3; add 3 to stage, or remove shard"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: the all-reduce algorithm of all combinations."""
        return f"splits ({algorithm_name(self.algorithm)})"

    def layouts(
        self, cluster: Cluster, model: Model, n_workers: int, batch_size: int, invalid: Counter[str]
    ) -> Iterator[Parallel | FSDP]:
        """Yield each valid strategy once; ``invalid`` counts invalid combinations by reason."""
        done: set[Parallel | FSDP] = set()
        for tensor in self.tensor or _widths(cluster, model, n_workers):
            left = n_workers // tensor
            most = len(blocks(model.layers)) or len(between_blocks(model)) + 1
            for pipeline in self.pipeline or [p for p in divisors(left) if p <= most]:
                data = left // pipeline
                if data * pipeline * tensor != n_workers or (self.data is not None and data not in self.data):
                    invalid[PRODUCT] += 1
                    continue
                for one in self._of_mesh(model, tensor, pipeline, data, batch_size, invalid):
                    if one not in done:
                        done.add(one)
                        yield one

    def _of_mesh(
        self, model: Model, tensor: int, pipeline: int, data: int, batch_size: int, invalid: Counter[str]
    ) -> Iterator[Parallel | FSDP]:
        attention = any(layer.heads for layer in model.layers)
        recompute = self.recompute or (("none", "selective", "full") if attention else ("none", "stage"))
        for micro_batch in self.micro_batch:
            if batch_size % (data * micro_batch):
                invalid[GLOBAL_BATCH] += 1
                continue
            turns = batch_size // (data * micro_batch)
            chunks = self.interleave or _even_chunks(model, pipeline, turns)
            for stage, again in itertools.product(self.stage, recompute):
                split = tensor * pipeline > 1
                if stage == 2 and split:
                    invalid[WHOLE] += 1
                elif stage > 1 and not split:
                    yield from self._sharded(stage, micro_batch, again, data, invalid)
                else:
                    sizes = tensor, pipeline, data, micro_batch
                    yield from self._parallel(sizes, chunks, again, "full" if stage == 3 else stage == 1, invalid)

    def _parallel(
        self,
        sizes: Sequence[int],
        chunks: Sequence[int],
        again: str,
        sharded: bool | Literal["full"],
        invalid: Counter[str],
    ) -> Iterator[Parallel]:
        tensor, pipeline, data, micro_batch = sizes
        for order, interleave, sequence, cut, p2p in itertools.product(
            self.order, chunks, self.sequence, self.cut, self.p2p
        ):
            several = pipeline > 1 and order == "1f1b"
            try:
                yield Parallel(
                    tensor=tensor, pipeline=pipeline, micro_batch=micro_batch, order=order,
                    interleave=interleave if several else 1, sequence=sequence and tensor > 1,
                    recompute=again,  # type: ignore[arg-type]  # one of those
                    sharded=sharded if data > 1 else False, cut=cut if pipeline > 1 else "balanced",
                    p2p=p2p if pipeline > 1 else "overlapped", algorithm=self.algorithm,
                )  # fmt: skip
            except ConfigError as error:
                invalid[str(error)] += 1

    def _sharded(
        self, stage: int, micro_batch: int, again: str, n_workers: int, invalid: Counter[str]
    ) -> Iterator[FSDP]:
        for shard in (self.shard or (None,)) if stage == 3 else (None,):
            if shard is not None and n_workers % shard:
                invalid[GROUPS] += 1
                continue
            try:
                yield FSDP(
                    stage=stage, micro_batch=micro_batch, recompute=again, shard=None if shard == n_workers else shard
                ).on_fabric(Fabric(self.algorithm))
            except ConfigError as error:
                invalid[str(error)] += 1


def text_of_invalid(invalid: Counter[str]) -> str:
    """Return a text with the number of invalid combinations and the reasons."""
    return "; ".join(f"{n} x {reason}" for reason, n in invalid.most_common())


def _widths(cluster: Cluster, model: Model, n_workers: int) -> list[int]:
    """Return the valid sizes of tensor groups inside a machine."""
    workers = cluster.workers[:n_workers]
    hosts = cluster.host_of[workers]
    inside = np.unique(np.where(hosts >= 0, hosts, len(cluster.host_names) + workers), return_counts=True)[1]
    return [t for t in divisors(int(np.gcd.reduce(inside))) if t == 1 or can_split(model, t)]


def _even_chunks(model: Model, pipeline: int, micro_batches: int) -> list[int]:
    """Return the numbers of chunks per stage that divide the transformer layers evenly, and always 1."""
    layers = len(blocks(model.layers))
    several = pipeline > 1 and micro_batches % pipeline == 0
    return [1, *(v for v in range(2, MOST_CHUNKS + 1) if several and layers and layers % (pipeline * v) == 0)]
