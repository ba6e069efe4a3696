"""Real micro-benchmarks of a cluster, and the table of measurements that they fill.

``mpirun -n 8 python -m ddlsim.measure --out measured/`` runs them; :func:`read_measurements` reads the table,
also one written by hand (docs/formats/measurements.md). Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlsim.measure.reading import read_measurements
    from ddlsim.measure.table import OPERATIONS, Measurement

_HOME = {"Measurement": "table", "OPERATIONS": "table", "read_measurements": "reading"}

__all__ = ["OPERATIONS", "Measurement", "read_measurements"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim.measure' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.measure.{_HOME[name]}"), name)
