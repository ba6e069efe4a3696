"""Operations of :mod:`ddlsim.nn.simd` for kernels; numba is imported only for compiling."""

from __future__ import annotations

from typing import Any

from ddlsim.compiler import deferred

#: number of elements of a vector
WIDTH = 8


def _operation(name: str) -> Any:
    return deferred("ddlsim.nn.simd", name)


load = _operation("load")
store = _operation("store")
splat = _operation("splat")
zeros = _operation("zeros")
fma = _operation("fma")
add = _operation("add")
maximum = _operation("maximum")
blend_equal = _operation("blend_equal")
total = _operation("total")
