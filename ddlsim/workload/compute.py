"""Compute time of one worker in a step: three sources of the time, and one way to divide it among layers.

The time of a step comes from a measurement (:class:`Measured`), an affine curve over the batch size
(:class:`Affine`), or the roofline of the device (:class:`Roofline`).

**The split.** For each layer the roofline gives a forward time max(FLOPs / achieved FLOP/s, bytes / achieved bytes/s)
(Williams, Waterman, Patterson 2009). The backward pass of a layer with weights computes the gradients of its input and
of its weights, each as expensive as the forward pass. A layer without weights computes only its input's gradient. If
nothing upstream has parameters, there is no input gradient: the first layer with weights costs its forward time once,
and layers before it cost nothing. With Measured and Affine, these times are only weights: they are scaled by one factor
so that forward and backward times add up to the measured step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Density, Index, checked, quantity
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.readable import percent
from ddlsim.units import si
from ddlsim.workload.contention import NO_SLOWDOWN, Contention
from ddlsim.workload.convolutions import convolution_times, has_convolutions
from ddlsim.workload.devices import Curve, Device
from ddlsim.workload.model import Layer, Model, load_model
from ddlsim.workload.optimizer_rules import NORM_LAUNCHES, NORM_TRAFFIC, NORMS, OPTIMIZER_RULES
from ddlsim.workload.precision import (
    ELEMENT_NBYTES,
    GRADIENT_TYPES,
    base_precision,
    has_products,
)
from ddlsim.workload.products import (
    ChannelSlowdown,
    Floats,
    Ints,
    Timing,
    check_kernels,
    has_kernels,
    kernel_times,
    launched,
    roofline_times,
    scaled,
)
from ddlsim.workload.stacks import Stack, StackLike, load_stack


@checked
@dataclass(frozen=True, init=False)
class Measured:
    """Measured step time or throughput of one device, as in ``Measured(step_time="97 ms", batch_size=32)``.

    step_time   measured time of a step, in seconds or as a string such as "97 ms"
    batch_size  number of samples in the measured step; a run with a different batch size raises ConfigError
    throughput  measured throughput in samples per second, instead of `step_time`

    Raises ConfigError unless exactly one of `step_time` and `throughput` is set.
    """

    step_time: float
    batch_size: int

    def __init__(
        self,
        step_time: Annotated[float | str, quantity("time", "97 ms")] | None = None,
        batch_size: Index = 0,
        *,
        throughput: Annotated[float | str, quantity("rate")] | None = None,
    ) -> None:
        if (step_time is None) == (throughput is None):
            raise ConfigError("Measured: set either step_time or throughput, but not both")
        if batch_size < 1:
            raise ConfigError(
                f"Measured: batch_size = {batch_size}: must be at least 1; pass the batch size used in the measurement"
            )
        if step_time is not None:
            seconds = si(step_time, "time")
        else:
            assert throughput is not None
            seconds = batch_size / si(throughput, "rate")
        object.__setattr__(self, "step_time", seconds)
        object.__setattr__(self, "batch_size", batch_size)


#: type of step times
_Part = Annotated[float | str, quantity("time", "2.5 ms", zero=True)]


@checked
@dataclass(frozen=True, init=False)
class Affine:
    """Step time as an affine function of the batch size, as in ``Affine("25.8 ms", "2.51 ms")``.

    c0  step time that does not depend on the batch size, in seconds or as a string such as "25.8 ms"
    c1  additional time per sample, in seconds or as a string such as "2.51 ms"

    The time of a step is ``c0 + c1 * batch_size``. Raises ConfigError if both times are 0.
    """

    c0: float
    c1: float

    def __init__(self, c0: _Part, c1: _Part) -> None:
        object.__setattr__(self, "c0", si(c0, "time"))
        object.__setattr__(self, "c1", si(c1, "time"))
        if self.c0 + self.c1 <= 0.0:
            raise ConfigError("Affine: c0 + c1 must be above 0")

    def step_time(self, batch_size: int) -> float:
        """Return the time of one step, in seconds."""
        return self.c0 + self.c1 * batch_size


@checked
@dataclass(frozen=True)
class Roofline:
    """Roofline compute times: each layer takes the larger of its arithmetic time and its memory time.

    efficiency         achieved fraction of the device's peak FLOP/s; None: the fraction in the device catalogue, which
                       depends on the precision
    memory_efficiency  achieved fraction of the device's peak memory bandwidth. The default of 0.8 is typical of STREAM
                       benchmarks (Deakin et al. 2018, BabelStream: 70 to 92 % on the GPUs in the catalogue)

    On GPUs, a pass takes at least as long as the CPU needs to launch its kernels; the launch time depends on the
    software stack.

    Accuracy: for GPU measurements that were not used to fit the efficiencies, the predicted step time is 0.8 to 1.55
    times the measured step time (too long for VGG-16, too short for Inception-v3). For a 3-D network with a batch size
    of 1 on a KNL node, the predicted speed is 8 times the measured speed. Prefer Measured or Affine if you have a
    measurement.
    """

    efficiency: Density | None = None
    memory_efficiency: Density = 0.8


_PYTORCH = load_stack("pytorch")
#: share of the memory traffic of sums of gradients that adds to the time of matrix products which also compute the sum:
#: measured on an H100, bytes at 0.8 of the memory bandwidth (accuracy/data/accumulation_h100.jsonl)
EXPOSED_TRAFFIC = 0.78


@checked
@dataclass(frozen=True)
class PerKernel:
    """Compute times as sums of kernel times, for transformers and convolutional networks on measured devices.

    See docs/models/compute.md. A run raises ConfigError if the model has neither attention layers nor convolutions, or
    if the catalogue has no kernel rates for the device and precision.
    """


@dataclass(frozen=True, eq=False)
class Workload:
    """The computation of one worker in one step. Arrays over layers are in forward order.

    ``basis`` describes the origin of the times. The exchanged ``tensors`` of the model are listed flat in
    ``tensor_layer`` and ``tensor_nbytes``, in forward declaration order. ``memory_bandwidth`` is the achieved rate,
    ``launch_time`` the minimum time of a kernel. ``rule`` is the optimizer's rule, if set, and ``norms`` the part of
    its time spent on norms of layers. ``device`` computes at the relative ``speed`` with the software ``stack``;
    ``flash``: attention writes no matrices. ``known``: the step time or the efficiency was set or measured. ``timed``:
    the user set the step time, which splitting a layer does not change. ``summed``: layer times are sums of kernel
    times. ``efficiency`` is the share of the device's peak used to divide times among layers. ``wait`` is the part of
    the first layer's forward pass spent waiting for samples, of which ``stall`` is due to other devices of the machine.
    ``host_time`` is the stack's CPU time per update in addition to kernels. ``shard``: number of tensor-parallel ranks
    that share each layer, and whether they also split the sequence. ``adding``: time per gradient byte to accumulate a
    micro-batch, part of ``backward``. ``cut_from``: the whole model, if this is a part of its layers.
    """

    model: Model
    batch_size: int
    precision: str
    basis: str
    forward: Floats  # (n_layers,) s
    backward: Floats  # (n_layers,) s
    optimizer: float  # s; if the measured step includes it, only that of norms
    grad_nbytes: Floats  # (n_layers,) bytes on the wire
    tensor_layer: Ints  # (n_tensors,)
    tensor_nbytes: Floats  # (n_tensors,)
    memory_bandwidth: float  # bytes/s
    launch_time: float  # s per kernel
    rule: str | None = None  # of the optimizer
    norms: float = 0.0  # s
    device: Device | None = None
    speed: float = 1.0
    known: bool = False
    timed: bool = False
    summed: bool = False
    stack: Stack = _PYTORCH
    flash: bool = False
    efficiency: float | None = None
    wait: float = 0.0  # s
    stall: float = 0.0  # s
    host_time: float = 0.0  # s
    shard: tuple[int, bool] = (1, False)
    adding: float = 0.0  # s per byte
    cut_from: Model | None = None

    def gathered_nbytes(self, first: int, end: int, dtype: str | None = None) -> float:
        """Return the average bytes per gathered weight of layers `first` to `end` - 1; `dtype`: None: as computed."""
        layers = self.model.layers[first:end]
        return ELEMENT_NBYTES[dtype] if dtype else self.stack.gathered_nbytes(layers, self.precision)

    @property
    def by_kernel(self) -> bool:
        """Whether the times of layers are those of a transformer's kernels. A part is timed as the whole model is."""
        return self.device is not None and has_kernels(self.cut_from or self.model, self.device, self.precision)

    @property
    def known_stack(self) -> Stack | None:
        """The stack that determines the memory; None if the kernels of the whole model are unknown."""
        return self.stack if self.by_kernel else None

    @property
    def main_gradients(self) -> str | None:
        """Dtype of the gradients that a rank keeps; None: that of the weights."""
        return None if self.known_stack is None else self.stack.main_gradients

    @functools.cached_property
    def slowdown(self) -> Contention:
        """Return the slowdown of the computation during exchanges, for the kernels that its times are sums of."""
        if self.known or not (self.by_kernel or self.summed) or not self.stack.occupies:
            return NO_SLOWDOWN
        tensor, sequence = self.shard
        times = kernel_times if self.by_kernel else convolution_times
        return ChannelSlowdown(self.model, self.timing(tensor, sequence=sequence), times)

    @property
    def accumulation_time(self) -> Floats:
        """Time in which a micro-batch accumulates the gradients of each layer, in s, (n_layers,)."""
        return self.adding * self.grad_nbytes

    @property
    def adds_gradients(self) -> bool:
        """Whether the time of a micro-batch depends on the number of micro-batches that accumulate gradients."""
        return not self.known and self.gradient_nbytes > 0.0

    def accumulating(self, n_batches: float) -> Workload:
        """Return the workload of one of `n_batches` micro-batches, all but the first of which accumulate their
        gradients.

        Every one takes the mean time. A separate kernel reads the new gradients, in the dtype of the weights, and the
        sum, in the dtype in which gradients are kept, and writes the sum (PyTorch,
        torch/csrc/autograd/functions/accumulate_grad.h), unless the stack specifies the traffic. If the products that
        compute the gradients also add them up, they do so without new gradients: they write the sum, and all but those
        of the first micro-batch read it (Transformer Engine, module/linear.py: is_first_microbatch); `EXPOSED_TRAFFIC`
        of these bytes adds to their time. Nothing is added to a measured or configured step time, which includes an
        update of the weights per micro-batch.
        """
        if not self.adds_gradients:
            return self
        gradient, later = ELEMENT_NBYTES[self.precision], 1.0 - 1.0 / max(1.0, n_batches)
        kept = gradient if self.main_gradients is None else ELEMENT_NBYTES[self.main_gradients]
        if self.stack.fuses_accumulation:
            share, nbytes = EXPOSED_TRAFFIC, max(0.0, kept - gradient + later * kept)
        elif self.stack.accumulation_traffic and gradient < ELEMENT_NBYTES["fp32"]:
            first, further = self.stack.accumulation_traffic
            share, nbytes = float(later > 0.0), first + later * (further - first)
        else:
            share, nbytes = later, gradient + 2.0 * kept
        if share * nbytes == 0.0:
            return self
        moved = nbytes * self.model.gradient_nbytes(1) / self.gradient_nbytes
        added = dataclasses.replace(self, adding=share * moved / self.memory_bandwidth)
        return dataclasses.replace(added, backward=self.backward - self.accumulation_time + added.accumulation_time)

    def timing(self, tensor: int = 1, *, sequence: bool = False) -> Timing:
        """Return the parameters that determine the times of layers, on each of `tensor` ranks."""
        assert self.device is not None
        return Timing(self.device, self.stack, self.batch_size, self.precision, self.flash, tensor, sequence)

    @property
    def sharding_copies(self) -> tuple[float, float]:
        """Time per byte of gradients in which fully sharded training copies gathered weights of one byte each, and
        gradients before their reduction, in s. None is added to measured or configured step times."""
        if self.known or not self.by_kernel or self.stack.sharding_copies == "none":
            return 0.0, 0.0
        element, n_params = ELEMENT_NBYTES[self.precision], self.model.gradient_nbytes(1) / self.shard[0]
        reduced = max(1.0, round(self.gradient_nbytes / max(n_params, 1.0)))
        rate = reduced * self.memory_bandwidth
        if self.stack.sharding_copies == "per-parameter":
            return 2.0 / rate, (element + reduced) / rate
        cast = element + reduced if reduced != element else 0.0
        return 0.0, (2.0 * element + cast + 2.0 * reduced) / rate

    @property
    def memory_nbytes(self) -> float:
        """Memory capacity of the device in bytes; infinite if unknown."""
        return self.device.memory_nbytes if self.device is not None else math.inf

    @property
    def forward_time(self) -> float:
        """Seconds of the forward pass."""
        return float(self.forward.sum())

    @property
    def backward_time(self) -> float:
        """Seconds of the backward pass."""
        return float(self.backward.sum())

    @functools.cached_property
    def backward_until(self) -> Floats:
        """Time until the gradient of each layer is ready, from the start of the backward pass, in s, (n_layers,)."""
        return np.cumsum(self.backward[::-1])[::-1]

    @property
    def step_time(self) -> float:
        """Seconds of a step without communication; a measured time includes the host's time."""
        return self.forward_time + self.backward_time + self.optimizer + (0.0 if self.known else self.host_time)

    @property
    def gradient_nbytes(self) -> float:
        """Gradient bytes that the worker exchanges in a step."""
        return float(self.grad_nbytes.sum())

    @checked
    def cut(self, first: Index, end: Count) -> Workload:
        """Return the workload of a worker that has only the layers `first` to `end` - 1.

        Its optimizer takes a share of the time in proportion to its exchanged parameters. Raises ConfigError for an
        invalid range of layers.
        """
        layers = self.model.layers[first:end]
        if not first < end <= len(self.model.layers):
            n_layers = len(self.model.layers)
            raise ConfigError(
                f"cut: first = {first}, end = {end}: must be increasing, and at most {n_layers}, the number of layers "
                f"of {self.model.name}"
            )
        kept = (self.tensor_layer >= first) & (self.tensor_layer < end)
        total, grad_nbytes = self.gradient_nbytes, self.grad_nbytes[first:end]
        name = f"{self.model.name}, layers {first} to {end - 1}"
        return dataclasses.replace(
            self,
            model=dataclasses.replace(
                self.model, name=name, input_shape=layers[0].in_shape, layers=layers, structure=(), trainable=False
            ),
            forward=self.forward[first:end],
            backward=self.backward[first:end],
            cut_from=self.cut_from or self.model,
            wait=0.0 if first else self.wait,
            optimizer=self.optimizer * float(grad_nbytes.sum()) / total if total > 0.0 else 0.0,
            norms=self.norms * float(grad_nbytes.sum()) / total if total > 0.0 else 0.0,
            grad_nbytes=grad_nbytes,
            tensor_layer=self.tensor_layer[kept] - first,
            tensor_nbytes=self.tensor_nbytes[kept],
        )


def check_products(precision: str, device: Device) -> None:
    """Raise ConfigError for an unknown precision, and for one that the device lacks."""
    if precision not in ELEMENT_NBYTES:
        raise unknown_name("precision", precision, ELEMENT_NBYTES)
    if not has_products(precision, device.peak_flops):
        names = ", ".join(name for name in ELEMENT_NBYTES if has_products(name, device.peak_flops))
        raise ConfigError(
            f"precision: {device.name} does not support matrix products in {precision}; supported: {names}"
        )


def make_workload(
    model: Model,
    device: Device,
    batch_size: int,
    *,
    compute: Measured | Affine | Roofline | PerKernel | None = None,
    precision: str = "fp32",
    gradient_dtype: str = "fp32",
    speed: float = 1.0,
    optimizer: str | None = None,
    stack: StackLike = "pytorch",
    flash: bool | None = None,
) -> Workload:
    """Return the workload of a worker on `device` for steps of `batch_size` samples.

    Without `compute`, times come from the device catalogue's measured curve for this model and precision if there is
    one, else from the roofline, to which the time of the `optimizer`'s rule ("sgd", "momentum", "adam", "lars", "lamb")
    is added; None: momentum SGD in one fused kernel. A measured step includes the update, except for the norms of LARS
    and LAMB, which no single-device benchmark includes. `speed` divides every time (0.5 is half the speed). `stack` is
    the software. `flash`: whether attention avoids writing its matrices; None: as the stack does on this device.

    Raises :class:`~ddlsim.errors.ConfigError` for a precision that the device lacks, an unknown rule, a batch size
    below 1 or different from the measured one, and a speed that is not positive.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}: must be at least 1")
    if not (math.isfinite(speed) and speed > 0.0):
        raise ConfigError(f"speed = {speed!r}: must be finite and above 0")
    check_products(precision, device)
    if gradient_dtype not in GRADIENT_TYPES:
        raise unknown_name("gradient_dtype", gradient_dtype, GRADIENT_TYPES)
    if optimizer is not None and optimizer not in OPTIMIZER_RULES:
        raise unknown_name("optimizer", optimizer, OPTIMIZER_RULES)
    roofline = compute if isinstance(compute, Roofline) else Roofline()
    efficiency = roofline.efficiency or device.efficiency[base_precision(precision)]
    software = load_stack(stack)
    fused = software.attention_kernel(device) is not None if flash is None else flash
    timing = Timing(device, software, batch_size, precision, fused)
    if isinstance(compute, PerKernel):
        if has_convolutions(model, device, precision):
            forward, backward = convolution_times(model, timing)
        else:
            check_kernels(model, device, precision)
            forward, backward = kernel_times(model, timing)
    else:
        forward, backward = roofline_times(
            model, device, batch_size, base_precision(precision), efficiency, roofline.memory_efficiency
        )
    total, basis = _step_time(model, device, batch_size, compute, precision, software)
    norms = _update_time(model, device, roofline, NORM_TRAFFIC, NORM_LAUNCHES) if optimizer in NORMS else 0.0
    if total is None:
        rule = OPTIMIZER_RULES[optimizer or "momentum"]
        traffic = software.adam_traffic if optimizer == "adam" else rule.traffic
        update = _update_time(model, device, roofline, traffic, 0.0 if optimizer is None else rule.launches)
        if device.launch_time > 0.0 and not isinstance(compute, PerKernel):  # a GPU
            forward, backward = launched(model, timing, (forward, backward))
    else:
        update = norms
        basis += f"; plus {norms * 1e3:.3g} ms for the norms of {optimizer}" if norms > 0.0 else ""
        forward, backward = scaled(forward, backward, total)
    exchanged = [0 if layer.model_parallel else layer.n_params for layer in model.layers]
    tensors = [(i, n) for i, layer in enumerate(model.layers) if exchanged[i] for _, n in layer.tensors]
    element = ELEMENT_NBYTES[gradient_dtype]
    return Workload(
        model, batch_size, precision, basis, forward / speed, backward / speed, update / speed,
        grad_nbytes=element * np.array(exchanged, dtype=np.float64),
        tensor_layer=np.array([i for i, _ in tensors], dtype=np.int64),
        tensor_nbytes=element * np.array([n for _, n in tensors], dtype=np.float64),
        memory_bandwidth=device.memory_bandwidth * roofline.memory_efficiency * speed,
        launch_time=device.launch_time / speed, rule=optimizer, norms=norms / speed, device=device, speed=speed,
        known=total is not None or (isinstance(compute, Roofline) and compute.efficiency is not None),
        timed=isinstance(compute, Measured | Affine), summed=isinstance(compute, PerKernel), stack=software,
        flash=fused, efficiency=efficiency,
    )  # fmt: skip


def model_flops_utilisation(model: Model, throughput: float, devices: Sequence[Device], precision: str) -> float | None:
    """Return the share of their peak FLOP/s that `devices` use at a throughput (samples/s); None if a peak is unknown.

    Forward and backward passes count once (3 times the FLOPs of the forward pass), recomputation does not: the model
    FLOPs utilisation of Chowdhery et al. 2022 (arXiv:2204.02311, appendix B). Attention is counted in full, also where
    its kernels skip the half that a causal mask hides, so long sequences may come close to 1.
    """
    peaks = [device.peak_flops.get(base_precision(precision), math.nan) for device in devices]
    share = 3.0 * model.flops * throughput / sum(peaks)
    return share if math.isfinite(share) and share > 0.0 else None


def _update_time(model: Model, device: Device, roofline: Roofline, traffic: float, launches: float) -> float:
    """Return the time in s of kernels that pass over all dense parameters, limited by memory and launches.

    traffic   bytes moved per parameter
    launches  number of kernels per tensor
    """
    dense = [layer for layer in model.layers if not layer.model_parallel]
    moved = traffic * sum(layer.n_params for layer in dense)
    n_kernels = launches * sum(len(layer.tensors) for layer in dense)
    return moved / (device.memory_bandwidth * roofline.memory_efficiency) + n_kernels * device.launch_time


def _step_time(
    model: Model,
    device: Device,
    batch_size: int,
    compute: Measured | Affine | Roofline | PerKernel | None,
    precision: str,
    stack: Stack,
) -> tuple[float | None, str]:
    """Return the step time in s (None: the roofline determines it) and a description of its origin."""
    if isinstance(compute, Measured):
        if compute.batch_size != batch_size:
            raise ConfigError(
                f"the step was measured with batch_size = {compute.batch_size}, not {batch_size}; measure "
                "that batch size too, or use Affine(c0, c1)"
            )
        return compute.step_time, f"measured step of {compute.step_time * 1e3:.6g} ms with batch size {batch_size}"
    if isinstance(compute, Affine):
        return compute.step_time(batch_size), f"given {_affine_text(compute)}"
    curve = _measured_curve(model, device, precision) if compute is None else None
    if curve is not None:
        affine = fit_affine(curve.batch_size, curve.throughput)
        rows = zip(curve.batch_size, curve.throughput, strict=True)
        error = max(abs(affine.step_time(batch) * throughput / batch - 1.0) for batch, throughput in rows)
        return affine.step_time(batch_size), (
            f"{_affine_text(affine)}, within {percent(error)} of {curve.source}, "
            f"batch sizes {min(curve.batch_size)} to {max(curve.batch_size)}"
        )
    if isinstance(compute, PerKernel):
        assert device.kernels is not None
        convolution = device.kernels.convolution if has_convolutions(model, device, precision) else None
        source = device.kernels.source if convolution is None else convolution.source
        return None, f"kernels of {device.name} under {stack.title} ({source})"
    efficiency = compute.efficiency if compute is not None else None
    precision = base_precision(precision)
    where = "as given" if efficiency is not None else device.efficiency_basis
    fraction = efficiency if efficiency is not None else device.efficiency[precision]
    return None, f"roofline of {device.name} at {fraction:.3g} of its {precision} peak ({where})"


def _affine_text(affine: Affine) -> str:
    return f"{affine.c0 * 1e3:.4g} ms + {affine.c1 * 1e3:.4g} ms x batch size"


def _measured_curve(model: Model, device: Device, precision: str) -> Curve | None:
    """Return the measured curve for exactly this model (not for another file's model of the same name)."""
    of_name = (curve for curve in device.curves if (curve.model, curve.precision) == (model.name, precision))
    curve = next(of_name, None)
    return None if curve is None or _layers(curve.model) != model.layers else curve


@functools.cache
def _layers(name: str) -> tuple[Layer, ...]:
    """Return the layers of a bundled model, cached because a study compares them thousands of times."""
    return load_model(name).layers


def fit_affine(batch_size: Sequence[int], throughput: Sequence[float]) -> Affine:
    """Return the line c0 + c1 * batch through the step times batch / throughput.

    Least squares of the relative errors (each row divided by its step time), with neither coefficient
    negative. `batch_size` and `throughput` (samples/s) are equally long, at least two points.
    """
    batch = np.asarray(batch_size, dtype=np.float64)
    step_time = batch / np.asarray(throughput, dtype=np.float64)
    rows = np.stack([1.0 / step_time, batch / step_time], axis=1)
    c0, c1 = np.linalg.lstsq(rows, np.ones(len(batch)), rcond=None)[0]
    if c0 < 0.0:  # through the origin instead
        c0, c1 = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    return Affine(float(c0), max(float(c1), 0.0))
