"""Software stacks: which kernels a training framework runs, and what they cost besides arithmetic.

A device has rates; a stack determines which kernels run and their overheads. The numbers and their sources are in
``stacks.toml`` in this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from ddlsim.arguments import Count, Density, Index, NotNegative, Positive, checked, one_of, quantity
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.output_files import check_suffix, write_text
from ddlsim.plain import read_toml
from ddlsim.schema import PLAIN, to_toml
from ddlsim.workload.contention import IN_MACHINE, OTHER
from ddlsim.workload.devices import Device
from ddlsim.workload.model import Layer
from ddlsim.workload.precision import ELEMENT_NBYTES, GRADIENT_TYPES, LOW_PRECISIONS

_Time = Annotated[float, quantity("time", zero=True, si=True)]
_Type = Annotated[str, one_of(*GRADIENT_TYPES)]
_FILE = Path(__file__).with_name("stacks.toml")


@checked
@dataclass(frozen=True)
class Stack:
    """Costs and properties of the kernels of a training framework, for one release of the framework.

    attention       names of fused attention kernels, in order of preference. On a device that supports none of them,
                    attention matrices are written to memory
    elementwise     memory traffic of normalisations, activations, rotary embeddings and sums, divided by their traffic
                    if each were a single fused kernel
    rotation        the same ratio for rotary embeddings only; None: equal to `elementwise`
    loss_traffic    bytes that the forward and backward passes of the loss move per logit
    gemm            fraction of the device's matrix-product rate that is achieved in a training step
    forward_launch  CPU time in seconds per kernel launched in the forward pass. The launches set a lower bound on the
                    time of a layer
    backward_launch
                    CPU time in seconds to launch the backward kernels that correspond to one forward kernel
    micro_batch_time
                    CPU time in seconds per micro-batch, for loading the batch, the loss and the schedule
    step_time       CPU time in seconds per update that neither kernels nor messages explain. If the step time of a
                    single worker was measured, it already includes this time, and `step_time` is the additional time of
                    an update with several workers
    call_time       time in seconds that a collective takes in addition to its messages: library call, kernel start and
                    end
    rank_delay      delay in seconds between consecutive ranks of a tensor-parallel group when they enter a collective
    channels        number of multiprocessors that the kernels of collectives inside a machine occupy (one block per
                    NCCL channel); 0: collectives occupy none
    network_channels
                    the same number for collectives and messages between machines; None: the number that NCCL chooses
                    for the network interfaces of a group (:func:`ddlsim.collectives.nccl.network_channels`), or 0 if
                    `channels` is 0
    slowdown_scope  whether matrix products slow down during collectives "inside" machines, "between" machines, or
                    "both"
    fused_softmax   scale, mask and softmax are fused into one kernel if micro_batch x heads / tensor is a multiple of
                    this number; 0: they are always fused
    gradient_dtype  data type in which gradients are reduced
    main_gradients  data type in which a rank keeps gradients; None: that of the weights
    fuses_accumulation
                    whether the products that compute gradients add them to those of earlier micro-batches
    accumulation_traffic
                    bytes per parameter that the first and each later micro-batch move to accumulate 16-bit gradients in
                    fp32, if they are not fused; None: gradients are accumulated in the dtype of `main_gradients`
    quantised_weights
                    when weights are quantised: once per "step", or in the forward pass of every "micro-batch"
    gathers_low_precision_weights
                    whether sharded weights are gathered as operands of matrix products, in 8 bits with FP8
    gathers_low_precision_inputs
                    whether tensor groups gather inputs and gradients of outputs in the same way
    slow_accumulation
                    whether FP8 products of the backward pass add up in full precision (torchao's default)
    tensor_overlap  how exchanges of tensor groups overlap with matrix products: as with Transformer Engine's
                    "userbuffers", or with PyTorch's "symmetric memory" (:mod:`ddlsim.workload.tensor_overlap`)
    sharding_copies copies in fully sharded training. "flat": gradients are joined, cast to the dtype of their reduction
                    and divided (FSDP1). "per-parameter": weights are copied out of the gathered buffer, and gradients
                    into the buffer that is reduced (FSDP2). "none": none
    adam_traffic    bytes per parameter that Adam's update moves; 28 in one fused kernel
    replicas_last   whether replicas of sharded weights sum their gradients only after the backward pass
    loss_nbytes     bytes per logit at the memory peak of the loss
    sharded_loss_nbytes
                    bytes per logit at this peak if the vocabulary is split over a tensor group
    loss_reserved   bytes per 16-bit logit that are free at this peak but still reserved by the allocator
    copies_gathered_weights
                    whether weights are gathered into a separate buffer on its own stream and copied from there (FSDP2)
    keeps_low_precision_inputs
                    whether inputs of 8-bit products are kept in 8 bits for the backward pass
    keeps_gathered  whether inputs gathered by a tensor group are kept for the backward pass instead of gathered again
    keeps_outputs   whether pipeline stages keep each output that they send until its backward pass, have a buffer for
                    each gradient received in a step, and keep the output of every micro-batch on the last stage
    memory_format   order of the dimensions of images: "nchw" (PyTorch's default; tensor cores convert tensors around
                    convolutions) or "channels_last"
    tf32_dense      whether precision "tf32" applies to dense layers, too, instead of to convolutions only
    keeps_unused_outputs
                    whether recomputation per operator keeps products that no backward pass reads
    spread          for a stack fitted to measured runs: the shortest and the longest compute time to expect in another
                    run, relative to the prediction (95 % interval)
    workers         smallest and largest number of workers in those runs
    measured_on     number of devices that waited for each other in the measured steps; on more devices, synchronous
                    training waits for a slower one (:class:`~ddlsim.Spread`). None: devices are as fast as each other
    fitted_devices  names of the devices on which rates and overheads were fitted or measured; None: unknown
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
    step_time: _Time = 0.0
    call_time: _Time = 0.0
    rank_delay: _Time = 0.0
    channels: Index = 0
    network_channels: Index | None = None
    slowdown_scope: Annotated[str, one_of("inside", "between", "both")] = "both"
    fused_softmax: Index = 0
    gradient_dtype: _Type = "bf16"
    main_gradients: _Type | None = None
    fuses_accumulation: bool = False
    accumulation_traffic: tuple[NotNegative, NotNegative] | None = None
    quantised_weights: Annotated[str, one_of("step", "micro-batch")] = "step"
    gathers_low_precision_weights: bool = False
    gathers_low_precision_inputs: bool = False
    slow_accumulation: bool = False
    tensor_overlap: Annotated[str, one_of("userbuffers", "symmetric memory")] = "userbuffers"
    sharding_copies: Annotated[str, one_of("none", "flat", "per-parameter")] = "none"
    adam_traffic: Positive = 28.0
    replicas_last: bool = False
    loss_nbytes: Positive = 4.0
    sharded_loss_nbytes: Positive = 4.0
    loss_reserved: NotNegative = 0.0
    copies_gathered_weights: bool = False
    keeps_low_precision_inputs: bool = False
    keeps_gathered: bool = False
    keeps_outputs: bool = False
    keeps_unused_outputs: bool = False
    memory_format: Annotated[str, one_of("nchw", "channels_last")] = "nchw"
    tf32_dense: bool = False
    spread: tuple[Positive, Positive] = (1.0, 1.0)
    workers: tuple[Count, Count] | None = None
    measured_on: Count | None = None
    fitted_devices: tuple[str, ...] | None = None

    def save(self, path: str | Path) -> None:
        """Write the stack to a TOML file that :func:`load_stack` can read."""
        check_suffix(path, ".toml")
        write_text(path, to_toml(PLAIN.unstructure(self, annotation=Stack)))

    @property
    def label(self) -> str:
        """Name of the stack, used as its label in tables."""
        return self.name

    def attention_kernel(self, device: Device) -> str | None:
        """Return the fused attention kernel for a device, or None if attention matrices are written to memory."""
        rates = {} if device.kernels is None else device.kernels.attention
        return next((name for name in self.attention if name in rates), None)

    def gathered_nbytes(self, layers: Sequence[Layer], precision: str) -> float:
        """Return the average bytes per parameter when sharded weights of some layers are gathered.

        Only weights of matrix products of transformer layers are gathered as operands (torchao/float8:
        ``convert_to_float8_training`` replaces linear layers); norms, biases and embeddings keep their dtype.
        """
        element, n_params = ELEMENT_NBYTES[precision], sum(layer.n_params for layer in layers)
        if not self.gathers_low_precision_weights or precision not in LOW_PRECISIONS or not n_params:
            return element
        n_operands = sum(
            n
            for layer in layers
            if layer.block > 0 and (layer.heads or layer.type in ("dense", "swiglu", "mixture_of_experts"))
            for name, n in layer.tensors
            if name.endswith("weight")
        )
        return element + (LOW_PRECISIONS[precision].operand - element) * n_operands / n_params

    @property
    def occupies(self) -> bool:
        """Whether any collectives occupy multiprocessors."""
        return self.channels > 0 or bool(self.network_channels)

    def occupied(self, channels: int) -> int:
        """Return the number of multiprocessors that an exchange occupies.

        channels  NCCL's number of channels between machines; or :data:`~ddlsim.workload.contention.IN_MACHINE`,
                  :data:`~ddlsim.workload.contention.OTHER`
        """
        if self.slowdown_scope not in ("both", "inside" if channels == IN_MACHINE else "between"):
            return 0
        if channels != IN_MACHINE and self.network_channels is not None:
            return self.network_channels
        return self.channels if channels in (IN_MACHINE, OTHER) or not self.channels else channels


StackLike = Annotated[str | Path | Stack, "a name such as 'megatron', a stack file or a Stack object"]


@checked
def load_stack(name: StackLike) -> Stack:
    """Load a software stack by its bundled name or from a file.

    name  a bundled name (see :func:`stack_names`), the path to a file such as ``my-stack.toml``, or a :class:`Stack`,
          which is returned unchanged. A name such as ``"megatron@25.11"`` selects a release; ``"megatron"`` alone
          selects the release to which the stack's parameters were fitted

    Raises :class:`~ddlsim.errors.ConfigError` for an invalid file and for an unknown name or release. The message
    suggests the closest name or lists the available releases.
    """
    if isinstance(name, Stack):
        return name
    path = Path(name)
    if path.suffix == ".toml":
        return _read_stack(path, path.stat().st_mtime_ns if path.is_file() else 0)
    if str(name) not in _tables():
        framework, at, _ = str(name).partition("@")
        if at and framework in _tables():
            releases = ", ".join(release for release in stack_names() if release.partition("@")[0] == framework)
            raise ConfigError(
                f"stack {name!r} is not bundled; the releases are {releases}. To fit another release to measured runs, "
                f"run ddlsim calibrate runs.csv --stack {framework} --out {name}.toml"
            )
        raise unknown_name("stack", str(name), _tables())
    return _bundled(str(name))


@cache
def _read_stack(path: Path, changed: int) -> Stack:
    """Read a stack file; its name is the default name. `changed` (modification time) is part of the cache key."""
    return PLAIN.structure(Stack, {"name": path.stem, **read_toml(path)}, str(path))


def stack_names() -> list[str]:
    """Return the sorted names of the bundled stacks."""
    return sorted(_tables())


def default_stack(strategy: str, device: Device) -> str:
    """Return the name of the default stack for a strategy on a device."""
    usual = {"Parallel": "megatron", "FSDP": "torchtitan"}.get(strategy, "pytorch")
    has_rates = device.kernels is not None and bool(device.kernels.attention)
    if has_rates and load_stack(usual).attention_kernel(device) is None:  # a device with other software, such as a TPU
        return next((name for name in ("maxtext", *_tables()) if _bundled(name).attention_kernel(device)), usual)
    return usual


@cache
def _tables() -> dict[str, Any]:
    return read_toml(_FILE)


@cache
def _bundled(name: str) -> Stack:
    def values(name: str) -> dict[str, Any]:
        table = dict(_tables()[name])
        return (values(table.pop("like")) if "like" in table else {}) | table

    return PLAIN.build(Stack, {"name": name} | values(name), name)
