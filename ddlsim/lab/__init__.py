"""A mini-cluster of one's own: a cluster file becomes network namespaces, and collectives run in them over TCP.

``ddlsim lab my-cluster.toml`` is the command; docs/lab.md tells what is built and what is measured. Names are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlsim.lab.executor import LabError
    from ddlsim.lab.fabric import plan
    from ddlsim.lab.laboratory import Comparison, compare
    from ddlsim.lab.namespaces import check_computer, clean
    from ddlsim.lab.operations import parse_operations

_HOME = {
    "Comparison": "laboratory", "LabError": "executor", "check_computer": "namespaces", "clean": "namespaces",
    "compare": "laboratory", "parse_operations": "operations", "plan": "fabric",
}  # fmt: skip

__all__ = ["Comparison", "LabError", "check_computer", "clean", "compare", "parse_operations", "plan"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.lab.{_HOME[name]}"), name)
