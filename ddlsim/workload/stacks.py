"""Software stacks: what a training framework makes of a device's kernels.

A device has rates, a stack says which kernels run and what they cost beside their arithmetic. The numbers are in
``stacks.toml`` beside this file, each with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from ddlsim.arguments import Count, Density, Index, Positive, checked, one_of, quantity
from ddlsim.errors import unknown_name
from ddlsim.output_files import write_text
from ddlsim.plain import read_toml
from ddlsim.schema import PLAIN, to_toml
from ddlsim.workload.contention import OverlapSlowdown
from ddlsim.workload.devices import Device
from ddlsim.workload.precision import GRADIENT_TYPES

_Time = Annotated[float, quantity("time", zero=True, si=True)]
_Type = Annotated[str, one_of(*GRADIENT_TYPES)]
_FILE = Path(__file__).with_name("stacks.toml")


@checked
@dataclass(frozen=True)
class Stack:
    """A training framework in a release.

    attention       fused attention kernels in order of preference; a device without any writes attention's matrices
    elementwise     bytes that normalisations, activations, rotations and sums move, relative to one fused kernel for
                    each of them
    rotation        the same of rotary positions, where they are another multiple; None: `elementwise`
    loss_traffic    bytes that the loss moves per logit, forward and backward
    gemm            share of the device's rate of matrix products that remains in a training step
    forward_launch, backward_launch
                    s in which the host launches a kernel of the forward pass, and those of its backward pass; a layer
                    takes at least as long
    micro_batch_time
                    s of the host per micro-batch (batch, loss, schedule)
    rank_delay      s by which each further rank of a tensor-parallel group reaches a collective later
    channels        multiprocessors that the collectives' kernels occupy while they run (NCCL: a block per channel)
    communicates    whether products slow down beside collectives "inside" machines, "between" them, or "both"
    fused_softmax   divisor of micro_batch x heads / tensor for which softmax, mask and scale are one kernel
    gradient_dtype  in which gradients are reduced
    main_gradients  in which a rank keeps gradients; None: as the weights
    quantised_weights
                    "step": weights are quantised once a step; "micro-batch": in every forward pass
    replicas_last   whether replicas of sharded weights sum their gradients after the backward pass only
    gathers_operands
                    whether sharded weights are gathered as operands of matrix products, in 8 bits with FP8
    loss_nbytes     bytes per logit at the peak of the loss
    reserved        bytes that the allocator reserves at the peak per byte in use
    spread          of a stack that was fitted to measured runs: shortest and longest time that another run computes,
                    relative to the prediction (95 %)
    workers         fewest and most workers of those runs
    """

    name: str
    title: str = field(repr=False)
    release: str = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)
    attention: tuple[str, ...] = ()
    elementwise: Positive = 1.0
    rotation: Positive | None = None
    loss_traffic: Positive = 32.0
    gemm: Density = 1.0
    forward_launch: _Time = 0.0
    backward_launch: _Time = 0.0
    micro_batch_time: _Time = 0.0
    rank_delay: _Time = 0.0
    channels: Index = 0
    communicates: Annotated[str, one_of("inside", "between", "both")] = "both"
    fused_softmax: Index = 0
    gradient_dtype: _Type = "bf16"
    main_gradients: _Type | None = None
    quantised_weights: Annotated[str, one_of("step", "micro-batch")] = "step"
    gathers_operands: bool = False
    replicas_last: bool = False
    loss_nbytes: Positive = 4.0
    reserved: Positive = 1.0
    spread: tuple[Positive, Positive] = (1.0, 1.0)
    workers: tuple[Count, Count] | None = None

    def save(self, path: str | Path) -> None:
        """Write a stack file, which :func:`load_stack` reads as the same stack."""
        write_text(path, to_toml(PLAIN.unstructure(self, annotation=Stack)))

    @property
    def label(self) -> str:
        """The name, which stands for it in tables."""
        return self.name

    def attention_kernel(self, device: Device) -> str | None:
        """Return the fused attention kernel that runs on a device, None if matrices are written to memory."""
        known = {} if device.kernels is None else device.kernels.attention
        return next((name for name in self.attention if name in known), None)

    def slowdown(self, device: Device) -> OverlapSlowdown:
        """Return how much slower a device computes beside collectives, whose kernels occupy multiprocessors."""
        units = 0 if device.kernels is None else device.kernels.units
        if not self.channels or units <= self.channels:
            return OverlapSlowdown()
        factor = units / (units - self.channels)
        inside, between = self.communicates != "between", self.communicates != "inside"
        return OverlapSlowdown(factor if inside else 1.0, factor if between else 1.0)


StackLike = Annotated[str | Path | Stack, "a name such as 'megatron', a stack file or a Stack"]


@checked
def load_stack(name: StackLike) -> Stack:
    """Return the bundled stack called `name`, that of a file ``my-stack.toml``, or `name` if it is a stack.

    Raises :class:`~ddlsim.errors.ConfigError` with the nearest name if there is none, and in one line for a file that
    describes no stack.
    """
    if isinstance(name, Stack):
        return name
    path = Path(name)
    if path.suffix == ".toml":
        return _read_stack(path, path.stat().st_mtime_ns if path.is_file() else 0)
    if str(name) not in _stacks():
        raise unknown_name("stack", str(name), _stacks())
    return _stacks()[str(name)]


@cache
def _read_stack(path: Path, changed: int) -> Stack:
    """Return the stack of a file that was `changed` then; it is called after the file unless it has a name."""
    return PLAIN.structure(Stack, {"name": path.stem, **read_toml(path)}, str(path))


def stack_names() -> list[str]:
    """Return the names of the bundled stacks, sorted."""
    return sorted(_stacks())


def default_stack(strategy: str, device: Device) -> str:
    """Return the name of the stack that runs a strategy on a device unless one is set."""
    usual = {"Parallel": "megatron", "FSDP": "torchtitan"}.get(strategy, "pytorch")
    known = device.kernels is not None and bool(device.kernels.attention)
    if known and load_stack(usual).attention_kernel(device) is None:  # a device of other software, such as a TPU
        return next((name for name in ("maxtext", *_stacks()) if _stacks()[name].attention_kernel(device)), usual)
    return usual


@cache
def _stacks() -> Mapping[str, Stack]:
    tables: dict[str, Any] = read_toml(_FILE)

    def values(name: str) -> dict[str, Any]:
        table = dict(tables[name])
        return (values(table.pop("like")) if "like" in table else {}) | table

    return {name: PLAIN.build(Stack, {"name": name} | values(name), name) for name in tables}
