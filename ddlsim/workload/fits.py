"""Whether a model fits in a device's memory, and which changes would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from ddlsim.arguments import Bytes, Count, checked, integer, one_of
from ddlsim.errors import ConfigError
from ddlsim.readable import size
from ddlsim.text_tables import aligned
from ddlsim.workload.compute import check_products
from ddlsim.workload.devices import Device, DeviceLike, load_device
from ddlsim.workload.memory import RECOMPUTE, Holding, Memory, Precision, memory_of
from ddlsim.workload.model import Model, ModelLike, load_model
from ddlsim.workload.optimizer_rules import OPTIMIZER_RULES
from ddlsim.workload.precision import GRADIENT_TYPES
from ddlsim.workload.products import default_precision, has_kernels
from ddlsim.workload.roles import blocks, can_split, unit_starts
from ddlsim.workload.stacks import Stack, StackLike, default_stack, load_stack

#: maximum numbers of data-parallel ranks and of ranks in a tensor-parallel group (within a machine) in remedies
MOST_SHARDS, MOST_TENSOR, MACHINE = 1024, 8, 8
#: kinds of remedies, in the order in which they are combined
KINDS = ("shards", "flash", "recompute", "zero", "batch_size", "tensor", "pipeline", "offload")
_Changes = Mapping[str, Any]


@dataclass(frozen=True)
class _Case:
    """Arguments of :func:`fits`: a model and how ranks store it."""

    model: Model
    precision: str
    batch_size: int
    pipeline: int
    micro_batches: int | None  # None: enough to fill the pipeline
    interleave: int
    holding: Holding
    device: Device
    stack: Stack | None  # None: the default stack
    flash: bool | None  # None: as in the stack
    gradients: str | None  # None: as in the stack

    def __post_init__(self) -> None:
        """Add the stack's defaults to the description of how ranks store the model."""
        software, flash, changes = self.software, self.flash, dict[str, Any](gradient_dtype=self.gradients)
        changes["flash"] = software.attention_kernel(self.device) is not None if flash is None else flash
        if has_kernels(self.model, self.device, self.precision):
            changes |= {"stack": software}
            changes |= {"gradient_dtype": self.gradients or software.main_gradients}
        object.__setattr__(self, "holding", dataclasses.replace(self.holding, **changes))

    @property
    def software(self) -> Stack:
        """The training software: the given stack, or the default of the corresponding strategy."""
        framework = "FSDP" if self.holding.zero == 3 else "Parallel" if self.holding.tensor * self.pipeline > 1 else ""
        return self.stack or load_stack(default_stack(framework, self.device))

    def memory(self) -> Memory:
        """Return the memory of the stage that needs the most."""
        p, v = self.pipeline, self.interleave
        stages = _stages(self.model, p)
        memories = []
        for i, stage in enumerate(stages):
            live = (p - i) * (1.0 + (p - 1) / (p * v) if v > 1 and i == 0 else 1.0)
            live = min(live, self.micro_batches or math.inf)
            memories.append(
                memory_of(
                    stage, self.batch_size, self.precision, self.holding, batches=live, n_workers=self.holding.shards
                )
            )
        return max(memories, key=lambda memory: memory.total)

    def changed(self, changes: Mapping[str, Any]) -> _Case:
        """Return the case with other values of some arguments of :func:`fits`."""
        mine = {name: value for name, value in changes.items() if name in _MINE}
        others = {name: value for name, value in changes.items() if name not in _MINE}
        return dataclasses.replace(self, holding=dataclasses.replace(self.holding, **others), **mine)


_MINE = ("batch_size", "pipeline", "flash")


@checked
@dataclass(frozen=True)
class Remedy:
    """A change that saves memory.

    change  the change, as arguments of :func:`fits`
    memory  memory of a rank after the change
    saves   bytes saved
    fits    whether the change is sufficient
    """

    change: str
    memory: Memory
    saves: float
    fits: bool


@checked
@dataclass(frozen=True)
class Fit:
    """Result of :func:`fits`: whether a rank has enough memory for its part of a training step.

    question  description of the configuration
    device    name of the device
    capacity  bytes of device memory
    memory    memory that the rank needs, in five categories
    remedies  changes that save memory, best first; empty if it fits
    """

    question: str
    device: str
    capacity: float
    memory: Memory
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the required memory is at most the capacity."""
        return self.memory.total <= self.capacity

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        verb = "fits" if self.fits else "does not fit"
        have, need = size(self.capacity), size(self.memory.total)
        lines = [f"{self.question} {verb} on {self.device}: needs {need} of {have}", "", str(self.memory)]
        if self.remedies:
            rows = [("remedy, best first", "saves", "needs", "")]
            for remedy in self.remedies:
                ends = "fits" if remedy.fits else "not sufficient"
                rows.append((remedy.change, size(remedy.saves), size(remedy.memory.total), ends))
            lines += ["", *aligned(rows, left=(0, 3))]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return all fields as plain values, with sizes in bytes."""
        return {**dataclasses.asdict(self), "fits": self.fits, "total": self.memory.total}


@checked
def fits(
    model: ModelLike, device: DeviceLike, batch_size: Count = 1, precision: Precision | None = None,
    optimizer: Annotated[str, one_of(*OPTIMIZER_RULES)] | None = None, *,
    gradient_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] | None = None, zero: Annotated[int, integer(0, 3)] = 0,
    shards: Count = 1, tensor: Count = 1, sequence: bool = False, pipeline: Count = 1,
    micro_batches: Count | None = None, interleave: Count = 1,
    recompute: Annotated[str, one_of(*RECOMPUTE)] = "none", stack: StackLike | None = None,
    flash: bool | None = None, offload: bool = False, workspace: Bytes | None = None,
) -> Fit:  # fmt: skip
    """Check whether a model can be trained in a device's memory, and suggest remedies if it cannot.

    The result is true if the model fits. It contains the memory use, by category, of the rank that needs the most
    memory.

    model, device  names, files or objects, as for :func:`~ddlsim.load_model` and :func:`~ddlsim.load_device`
    batch_size     samples per micro-batch on each rank
    precision      data type of the computation; None: "bf16" for transformers on devices with measured kernel rates,
                   "tf32" for convolutional networks on devices that have it, otherwise "fp32"
    optimizer      "sgd", "momentum", "adam", "lars" or "lamb"; None: "adam" for transformers on devices with measured
                   kernel rates, otherwise "momentum"
    zero           ZeRO stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights
    shards         number of data-parallel ranks over which ZeRO shards. Embedding tables whose gradients are not
                   exchanged are also distributed over these ranks. With neither, it is the number of ranks for remedies
    tensor, pipeline
                   degree of tensor parallelism, and number of pipeline stages, which have equally many transformer
                   layers
    micro_batches  micro-batches per step; None: enough to fill the pipeline. The first stage stores the activations of
                   up to `pipeline` micro-batches (1F1B schedule), or more with `interleave`
    interleave     model chunks per stage (Narayanan et al. 2021, arXiv:2104.04473)
    stack          name of the training software, which determines the memory of gradients and loss and whether
                   attention is fused, unless `gradient_dtype` and `flash` are set. None: the default stack of FSDP for
                   ZeRO stage 3, or of Megatron-LM for tensor or pipeline parallelism

    :class:`~ddlsim.workload.memory.Holding` describes the other arguments.

    Remedies that are sufficient on their own are listed first, in order of their cost in time: distributed embedding
    tables, flash attention, selective recomputation, ZeRO stages 1 and 2 (no additional communication), a smaller
    micro-batch, full recomputation (a third more work), ZeRO stage 3 (50 % more communication), tensor parallelism,
    pipelines, and optimizer state in host memory. If no single remedy is sufficient, a sufficient combination is listed
    if there is one. The remaining remedies follow, with the largest saving first.

    Raises ConfigError if the model cannot be split in this way.

    >>> import ddlsim
    >>> print(bool(ddlsim.fits("gpt2-xl", "a100-40g", 8, "fp16", "adam")))
    False
    """
    network, machine = load_model(model), load_device(device)
    of_kernels = has_kernels(network, machine, precision or "bf16")
    precision = precision or default_precision(network, machine)
    optimizer = optimizer or ("adam" if of_kernels else "momentum")
    if recompute in ("full", "early-stop") and not blocks(network.layers):
        recompute = "segments"
    holding = Holding(optimizer, None, zero, shards, tensor, sequence, recompute, offload=offload, workspace=workspace)
    software, batches = None if stack is None else load_stack(stack), (pipeline, micro_batches, interleave)
    case = _Case(network, precision, batch_size, *batches, holding, machine, software, flash, gradient_dtype)
    check_products(precision, machine)
    _check_effects(case)
    memory = case.memory()
    question = f"{network.name} with micro-batches of {batch_size} in {precision} with {optimizer}"
    question += f" under {case.software.name}" if of_kernels else ""
    if shards > 1 and not zero and not any(layer.model_parallel for layer in network.layers):
        question += f" (each of {shards} ranks stores all of it: no ZeRO)"
    room = machine.memory_nbytes
    if memory.total <= room:
        return Fit(question, machine.name, room, memory)
    return Fit(question, machine.name, room, memory, tuple(_remedies(case, memory, room)))


def _check_effects(case: _Case) -> None:
    """Raise ConfigError for arguments that have no effect on this model or with the other arguments."""
    tensor, recompute = case.holding.tensor, case.holding.recompute
    if case.interleave > 1 and case.pipeline == 1:
        raise ConfigError(f"interleave = {case.interleave}: requires pipeline parallelism; set pipeline=2 or more")
    if case.micro_batches is not None and case.pipeline == 1:
        raise ConfigError(
            f"micro_batches = {case.micro_batches}: has no effect without pipeline parallelism, because micro-batches "
            "then run one after the other; set pipeline=2 or more, or remove micro_batches"
        )
    name, layers = case.model.name, case.model.layers
    fused = case.stack is not None and case.stack.attention_kernel(case.device) is not None
    if (
        case.stack is not None
        and not has_kernels(case.model, case.device, case.precision)
        and not (fused and case.flash is None and any(layer.heads for layer in layers))
    ):
        raise ConfigError(
            f"stack = {case.stack.name!r}: has no effect, because the rates of the kernels of {name} on "
            f"{case.device.name} are unknown; remove stack"
        )
    if case.holding.workspace is not None and not any(layer.type == "conv" for layer in layers):
        raise ConfigError(f"workspace has no effect, because {name} has no convolutions; remove workspace")
    if any(layer.heads for layer in layers):
        return
    if tensor > 1:
        raise ConfigError(
            f"tensor = {tensor}: {name} has no attention layers, which tensor parallelism needs; use tensor=1"
        )
    if recompute in ("selective", "dots-saveable", "operators"):
        raise ConfigError(
            f"recompute = {recompute!r} has no effect, because {name} has no transformer layers; use "
            "recompute='segments'"
        )
    if case.flash is not None:
        raise ConfigError(f"flash = {case.flash} has no effect, because {name} has no attention layers; remove flash")


def _remedies(case: _Case, memory: Memory, room: float) -> Iterator[Remedy]:
    """Yield remedies, best first."""
    tried = [(changes, case.changed(changes).memory()) for _, changes in _options(case, room)]
    enough = [one for one in tried if one[1].total <= room]
    if not enough:
        enough = list(_together(case, room))
    less = sorted((one for one in tried if room < one[1].total < memory.total), key=lambda one: one[1].total)
    for changes, after in (*enough, *less):
        text = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        yield Remedy(text, after, memory.total - after.total, after.total <= room)


def _together(case: _Case, room: float) -> Iterator[tuple[_Changes, Memory]]:
    """Yield a sufficient combination, if any: the best change of each kind, in order, without unnecessary ones."""
    chosen: list[_Changes] = []
    for kind in KINDS:
        now = case.changed(_joined(chosen))
        options = [changes for name, changes in _options(now, room) if name == kind]
        sized = [(changes, now.changed(changes).memory().total) for changes in options]
        better = [one for one in sized if one[1] < now.memory().total]
        if not better:
            continue
        changes, total = next((one for one in better if one[1] <= room), min(better, key=lambda one: one[1]))
        chosen.append(changes)
        if total <= room:
            for changes in list(chosen):
                fewer = [one for one in chosen if one is not changes]
                if case.changed(_joined(fewer)).memory().total <= room:
                    chosen = fewer
            yield _joined(chosen), case.changed(_joined(chosen)).memory()
            return


def _joined(changes: Iterable[_Changes]) -> _Changes:
    return {name: value for part in changes for name, value in part.items()}


def _options(case: _Case, room: float) -> Iterator[tuple[str, _Changes]]:
    """Yield (kind, change), the least costly in time first; for counts, the smallest sufficient one."""
    holding, layers = case.holding, case.model.layers
    attention = any(layer.scores for layer in layers)
    if holding.shards == 1 and any(layer.model_parallel for layer in layers):
        yield from _first(case, room, "shards", [{"shards": n} for n in _doubles(1, MOST_SHARDS)])
    if attention and not holding.flash:
        yield "flash", {"flash": True}
        if holding.recompute == "none":
            yield "recompute", {"recompute": "selective"}
    yield from _sharded(case, room, (1, 2))
    halves = [{"batch_size": case.batch_size >> k} for k in range(1, case.batch_size.bit_length())]
    yield from _first(case, room, "batch_size", halves)
    if holding.recompute in ("none", "selective"):
        yield "recompute", {"recompute": "full" if attention else "segments"}
    yield from _sharded(case, room, (3,))
    widths = [t for t in range(holding.tensor + 1, MOST_TENSOR + 1) if can_split(case.model, t)]
    yield from _first(case, room, "tensor", [{"tensor": t, "sequence": True} for t in widths])
    most = len(blocks(layers)) or 1 + layers[-1].unit
    yield from _first(case, room, "pipeline", [{"pipeline": p} for p in _doubles(case.pipeline, most)])
    if not holding.offload:
        yield "offload", {"offload": True}


def _sharded(case: _Case, room: float, stages: Iterable[int]) -> Iterator[tuple[str, _Changes]]:
    """Yield ZeRO stages over the given ranks or, if there is one, the smallest sufficient number (else a machine)."""
    shards = case.holding.shards
    for stage in stages:
        if stage > case.holding.zero:
            counts = [shards] if shards > 1 else [*_doubles(1, MOST_SHARDS), MACHINE]
            yield from _first(case, room, "zero", [{"zero": stage, "shards": n} for n in counts])


def _first(case: _Case, room: float, kind: str, options: Sequence[_Changes]) -> Iterator[tuple[str, _Changes]]:
    """Yield the first sufficient option, or the last one if none is."""
    enough = (changes for changes in options if case.changed(changes).memory().total <= room)
    if options:
        yield kind, next(enough, options[-1])


def _doubles(n: int, most: int) -> Iterator[int]:
    while (n := 2 * n) <= most:
        yield n


def _stages(model: Model, pipeline: int) -> list[Model]:
    """Split a model into stages of equally many transformer layers (or units, if it has none), as far as possible."""
    if pipeline == 1:
        return [model]
    layers, ranges = model.layers, blocks(model.layers)
    starts = [first for first, _ in ranges] or unit_starts(layers)
    if pipeline > len(starts):
        parts = "transformer layers" if ranges else "layers after which it can be cut"
        raise ConfigError(
            f"pipeline = {pipeline}: {model.name} has only {len(starts)} {parts}; use at most {len(starts)}"
        )
    cuts = [0, *(starts[len(starts) * i // pipeline] for i in range(1, pipeline)), len(layers)]
    return [
        dataclasses.replace(model, layers=layers[first:end], structure=(), trainable=False)
        for first, end in pairwise(cuts)
    ]
