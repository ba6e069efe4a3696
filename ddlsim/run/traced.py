"""`Traced`: compute times of the layers from a PyTorch profiler trace of one worker's training steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.workload.compute import Roofline, Workload, make_workload
from ddlsim.workload.devices import Device
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.imports import LayerTime


@checked
@dataclass(frozen=True)
class Traced:
    """Layer compute times measured with PyTorch's profiler, as in ``compute=Traced("trace.json")``.

    path        PyTorch profiler (Kineto) trace, ``.json`` or ``.json.gz``, of the same model on the workers' device. It
                must have been recorded with ``with_stack=True``. :func:`ddlsim.imports.profile_workload` describes how
                layers are matched
    batch_size  samples per step in the trace; None: the first dimension of the first module's input, which the trace
                contains if it was recorded with ``record_shapes=True``

    The file is read when the object is created, and its times become part of the experiment. They apply only to the
    batch size of the trace. Roofline times are used for layers that are not modules in PyTorch (additions, attention),
    and for the parameter update, which a trace does not attribute to modules.

    Raises :class:`~ddlsim.errors.ConfigError` if the file is not such a trace.
    """

    path: str | Path
    batch_size: Count | None = None
    layers: tuple[LayerTime, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from ddlsim.imports import read_kineto

        size = self.batch_size
        trace = read_kineto(self.path)
        if not trace.layers:
            raise ConfigError(
                f"{self.path}: the trace contains no layers; record it with torch.profiler.profile(with_stack=True)"
            )
        if size is None and not trace.batch_size:
            raise ConfigError(
                f"{self.path}: the trace contains no batch size; use Traced(path, batch_size=32), or record "
                "it with record_shapes=True"
            )
        object.__setattr__(self, "batch_size", size or trace.batch_size)
        object.__setattr__(self, "layers", trace.layers)


def traced_workload(
    traced: Traced, model: Model, device: Device, batch_size: int, *, speed: float, **options: Any
) -> Workload:
    """Return a worker's workload; options as in :func:`~ddlsim.workload.compute.make_workload`.

    Raises :class:`~ddlsim.errors.ConfigError` for another batch size or model than the trace's.
    """
    from ddlsim.imports import profile_workload

    if batch_size != traced.batch_size:
        raise ConfigError(
            f"{traced.path}: the trace has batch_size = {traced.batch_size}, not {batch_size}; trace that "
            "batch size too, or use Affine(c0, c1)"
        )
    rest = make_workload(model, device, batch_size, compute=Roofline(), speed=speed, **options)
    layers = [replace(t, forward_s=t.forward_s / speed, backward_s=t.backward_s / speed) for t in traced.layers]
    try:
        workload = profile_workload(rest, layers)
    except ConfigError as error:
        raise type(error)(f"{traced.path}: {error}") from None
    basis = f"{workload.basis} in {Path(traced.path).name} at batch {batch_size}; rest: {rest.basis}"
    return replace(workload, timed=True, basis=basis)
