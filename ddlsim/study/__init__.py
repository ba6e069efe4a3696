"""What-if studies: many experiments, simulated once each, on all cores or a cluster, in a store that survives.

Names are loaded when first used: a worker process needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlsim.study.designs import Range
    from ddlsim.study.dispatch import Count
    from ddlsim.study.files import load_study
    from ddlsim.study.study import Point, Study
    from ddlsim.study.table import Table, load_table

__all__ = ["Count", "Point", "Range", "Study", "Table", "load_study", "load_table"]

_HOME = {
    "Count": "dispatch", "Point": "study", "Range": "designs", "Study": "study", "Table": "table",
    "load_study": "files", "load_table": "table",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim.study' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.study.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
