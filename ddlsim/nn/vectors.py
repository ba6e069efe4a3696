"""Vectors for kernels: :mod:`ddlsim.nn.simd`, which imports numba, is imported only for compiling."""

from __future__ import annotations

from ddlsim.compiler import deferred

#: number of elements of a vector
WIDTH = 8
#: columns of a tile that has one, or the halves of the lanes
ONE, HALVES = (0,), (0, WIDTH)
simd = deferred("ddlsim.nn.simd")
