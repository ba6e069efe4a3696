"""What strategies that share a model out can do about a memory that is too small: the nearest ways to hold less."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddlsim.errors import ConfigError
from ddlsim.strategies.split_rules import Rules, Sizes, sizes_wanted, with_sizes
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Holding, Memory, kept_nbytes, memory_of

if TYPE_CHECKING:
    from ddlsim.strategies.fsdp import FSDP
    from ddlsim.strategies.parallel import Parallel

#: fields of a strategy that are other, by name
Changes = Mapping[str, object]
#: what is computed again instead of kept, and how far away it is: with attention a little work, then a third more
AGAIN = {"none": 0.0, "selective": 0.1, "early-stop": 0.5, "full": 0.5, "stage": 0.6}
#: the same of shares of what replicas hold: no more bytes, then as many, then half as many more
SHARED = {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.3}

#: orders in which the first stage holds a micro-batch for each stage, or more
FILLING = ("gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v")


def lighter_parallel(
    strategy: Parallel, workload: Workload, batch_size: int, n_workers: int, room: float
) -> Iterator[tuple[Parallel, Changes]]:
    """Yield ways to share the same batch out over as many workers whose shares of weights, gradients and optimizer have
    room, and what is other about them, the nearest first."""
    whole = state_of(workload)
    wanted = sizes_wanted(strategy, batch_size, n_workers)
    attention = any(layer.heads for layer in workload.model.layers)
    named = isinstance(strategy.order, str)
    again = [each for each in (("selective", "full") if attention else ("stage",)) if AGAIN[each] > _cost(strategy)]
    fills = strategy.order in FILLING and "stage" not in (strategy.recompute, *again)
    layers = workload.model.layers

    @functools.cache
    def of_sample(tensor: int, recompute: str) -> float:
        return kept_nbytes(
            layers, workload.precision, tensor=tensor, sequence=strategy.sequence and tensor > 1, recompute=recompute,
            flash=workload.flash,
        )[0]  # fmt: skip

    def kept(sizes: Sizes, recompute: str) -> float:
        """Return the bytes of activations of a first stage with its share of layers, less a fifth for another cut."""
        batches = sizes.batch_size // (sizes.data * sizes.micro_batch)
        under_way = min(1.0, batches / sizes.pipeline)  # of the whole model's: as many as there are stages, of each's
        return 0.8 * under_way * sizes.micro_batch * of_sample(sizes.tensor, recompute)

    ways: list[tuple[float, int, dict[str, object]]] = []
    for sizes in Rules(strategy, workload.model, n_workers).near(wanted):
        if sizes.batch_size != batch_size:
            continue
        for recompute, sharded in itertools.product([strategy.recompute, *again], {strategy.sharded, sizes.data > 1}):
            held = whole.weights + whole.gradients + whole.optimizer / (sizes.data if sharded else 1)
            held /= sizes.tensor * sizes.pipeline  # on average: somebody has as much
            if held + (kept(sizes, recompute) if fills else 0.0) > room:
                continue
            more = {"recompute": recompute, "sharded": sharded}
            changes = {name: value for name, value in more.items() if value != vars(strategy)[name]}
            far = sizes.distance(wanted) + AGAIN[recompute] - _cost(strategy) + SHARED[1] * ("sharded" in changes)
            ways.append((round(far, 9), len(ways), {**sizes.unlike(wanted), **changes}))
    for _, _, changes in sorted(ways, key=lambda way: way[:2]) if named else ():
        try:
            yield with_sizes(strategy, changes), changes
        except ConfigError:  # passes that do not go with it
            continue


def _cost(strategy: Parallel | FSDP) -> float:
    return AGAIN[strategy.recompute]


def lighter_fsdp(
    strategy: FSDP, workload: Workload, batch_size: int, n_workers: int, room: float
) -> Iterator[tuple[FSDP, Changes]]:
    """Yield ways to share out more, or to keep less, with the same batch and room for what is shared out, and what is
    other about them, the nearest first."""
    if state_of(workload).total > room * n_workers:
        return
    attention = any(layer.heads for layer in workload.model.layers)
    each = strategy.micro_batch or batch_size // n_workers
    again = ["selective", "full"] if attention else []
    halves = [n for n in range(1, each) if each % n == 0]
    ways: list[tuple[float, int, dict[str, object]]] = []
    for stage, recompute, micro_batch, whole in itertools.product(
        range(strategy.stage, 4), [strategy.recompute, *(a for a in again if AGAIN[a] > _cost(strategy))],
        [*halves, each], (False, True),
    ):  # fmt: skip
        changes: dict[str, object] = {}
        if stage != strategy.stage:
            changes["stage"] = stage
        if recompute != strategy.recompute:
            changes["recompute"] = recompute
        if micro_batch != each:
            changes["micro_batch"] = micro_batch
        if whole and strategy.stage == stage == 3:
            changes |= {"prefetch": 0} if strategy.prefetch != 0 else {}
            changes |= {} if strategy.shard is None else {"shard": None, "all_reduce": None}
            changes |= {} if strategy.reshard else {"reshard": True}
        far = SHARED[stage] - SHARED[strategy.stage] + AGAIN[recompute] - _cost(strategy)
        far += 0.5 * (each / micro_batch - 1.0) / each + 0.2 * whole
        if changes:
            ways.append((round(far, 9), len(ways), changes))
    for _, _, changes in sorted(ways, key=lambda way: way[:2]):
        try:
            yield dataclasses.replace(strategy, **changes), changes  # type: ignore[arg-type]
        except ConfigError:  # overlaps that stage 3 does not have
            continue


def state_of(workload: Workload) -> Memory:
    """Return the bytes of the whole model's weights, gradients and optimizer, without activations."""
    memory = memory_of(workload.model, 0, workload.precision, Holding(workload.rule or "momentum"))
    return dataclasses.replace(memory, activations=0.0, buffers=0.0)


def said(changes: Changes) -> str:
    """Return changes as a person types them."""
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())
