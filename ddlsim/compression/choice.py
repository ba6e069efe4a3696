"""`Compression`: the compressors of a run, for each direction, and their cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np

from ddlsim.arguments import checked, one_of
from ddlsim.compression.contract import AnyCompressor, Compressor, defines, full
from ddlsim.compression.cost import PROFILES, CodecCost
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError, shown

A_COMPRESSOR = "a compressor such as ddlsim.TopK(0.01)"
#: (name, shape) of the tensors of a flat vector, in order
Tensors = Sequence[tuple[str, tuple[int, ...]]]
#: rows and columns of the matrices with which the state of a compressor is examined, one after the other
PROBES = ((24, 26), (64, 64), (1024, 1024))


@checked
@dataclass(frozen=True)
class Compression:
    """Compression settings for a run, as in ``simulate(..., compression=Compression(TopK(0.01), down=FP16()))``.

    compressor  compressor of the workers' gradients
    down        compressor of the parameter servers' replies; None: replies are not compressed and take 4 bytes per
                element
    cost        how encoding and decoding times are estimated: "radix" (the default), "sort", or a :class:`CodecCost`
                that applies to all workers and servers

    With "radix" and "sort", the time on a worker is the time to read and write the bytes or the time to launch the
    kernels, whichever is longer. On servers, encoding and decoding take no time. "radix" assumes that the k largest
    elements are found by radix selection. "sort" assumes that they are found by sorting, as in frameworks until 2021;
    for ``torch.topk``, it uses a time measured on a V100 (:data:`~ddlsim.compression.cost.SORT_V100`).
    """

    compressor: Annotated[AnyCompressor, A_COMPRESSOR]
    down: Annotated[AnyCompressor, A_COMPRESSOR] | None = None
    cost: CodecCost | Annotated[str, one_of(*PROFILES)] | None = None

    @property
    def fixed_cost(self) -> CodecCost | None:
        """The cost if it is set; None if it is estimated."""
        return self.cost if isinstance(self.cost, CodecCost) else None

    @property
    def label(self) -> str:
        """Names of the compressors, such as "ErrorFeedback(TopK), down FP16"."""
        return title(self.compressor) + (f", down {title(self.down)}" if self.down is not None else "")


def compression_of(value: object) -> Compression | None:
    """Convert a compressor to :class:`Compression`; keep None and a Compression. Raises ConfigError."""
    if value is None or isinstance(value, Compression):
        return value
    if isinstance(value, type) or not isinstance(value, Compressor):
        raise ConfigError(
            f"compression = {shown(value)}: must be a compressor such as ddlsim.TopK(0.01), or a ddlsim.Compression"
        )
    return Compression(value)


# ---------------------------------------------------------------- compressors that know the tensors


def fitted(compressor: AnyCompressor, tensors: Tensors, part: slice) -> AnyCompressor:
    """Return `compressor` for the elements ``part`` of the flat vector formed by the `tensors`.

    Only compressors that depend on tensors (PowerSGD) change. Raises ConfigError if the part cuts a tensor.
    """
    if defines(compressor, "with_shapes"):
        return full(compressor).with_shapes(_within(compressor, tensors, part))
    inner = getattr(compressor, "inner", None)
    if inner is None or not dataclasses.is_dataclass(compressor):
        return compressor
    return cast(AnyCompressor, dataclasses.replace(compressor, inner=fitted(inner, tensors, part)))


def kept_vectors(compressor: AnyCompressor) -> int | None:
    """Return how many vectors of the gradient's size a worker keeps between steps, such as a residual; None if this is
    unknown, because the compressor's `init` accepts none of the sizes of `PROBES`."""
    for rows, columns in PROBES:
        n = rows * columns
        try:
            state = fitted(compressor, [("", (rows, columns))], slice(0, n)).init(n)
        except Exception:  # whatever a custom compressor raises
            continue
        return _vectors(state, n, set())
    return None


def _vectors(state: object, n: int, counted: set[int]) -> int:
    """Return how many vectors of n elements there are in a worker's state, without the objects already counted."""
    if id(state) in counted or isinstance(state, type | str | bytes):
        return 0
    counted.add(id(state))
    if isinstance(state, np.ndarray):
        return state.size // n if n in state.shape else 0
    if isinstance(state, Mapping):
        parts = list(state.values())
    elif isinstance(state, tuple | list):
        parts = list(state)
    else:
        slots = [getattr(cls, "__slots__", ()) for cls in type(state).__mro__]
        names = itertools.chain(*((slot,) if isinstance(slot, str) else slot for slot in slots))
        parts = [getattr(state, name, None) for name in names] + list(getattr(state, "__dict__", {}).values())
    return sum(_vectors(part, n, counted) for part in parts)


def _within(compressor: AnyCompressor, tensors: Tensors, part: slice) -> dict[str, tuple[int, ...]]:
    """Return the tensors in a part of the flat vector. Raises ConfigError if the part cuts a tensor."""
    inside: dict[str, tuple[int, ...]] = {}
    end = 0
    for name, shape in tensors:
        start, end = end, end + math.prod(shape)
        if start >= part.start and end <= part.stop:
            inside[name] = shape
        elif start < part.stop and end > part.start:
            raise ConfigError(
                f"compression: {title(compressor)} needs whole tensors, but {name!r} is divided among several servers "
                "or partitions; use one server, or overlap = 'layer'"
            )
    return inside
