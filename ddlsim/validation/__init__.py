"""Calibrate a cluster from measurements, predict with intervals, compare with measured runs.

Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlsim.collectives.nccl import NcclTime, nccl_time
    from ddlsim.validation.calibration import Calibration, Parameter, Residual, calibrate
    from ddlsim.validation.calibration_file import load_calibration
    from ddlsim.validation.cases import ALGORITHMS
    from ddlsim.validation.comparison import Compared, Summary, Validation, validate
    from ddlsim.validation.compute_fit import ComputeFit, fit_compute
    from ddlsim.validation.curves import Curve, Interval
    from ddlsim.validation.intervals import RunInterval, predict_interval
    from ddlsim.validation.jitter_fit import JitterFit, fit_jitter
    from ddlsim.validation.run_table import MeasuredRun, read_runs

_HOME = {
    "ALGORITHMS": "cases", "Calibration": "calibration", "ComputeFit": "compute_fit", "Curve": "curves",
    "Interval": "curves", "JitterFit": "jitter_fit", "Parameter": "calibration", "Residual": "calibration",
    "RunInterval": "intervals", "calibrate": "calibration", "fit_compute": "compute_fit", "fit_jitter": "jitter_fit",
    "load_calibration": "calibration_file", "predict_interval": "intervals", "Compared": "comparison",
    "MeasuredRun": "run_table", "Summary": "comparison", "Validation": "comparison",
    "read_runs": "run_table", "validate": "comparison",
}  # fmt: skip

__all__ = [
    "ALGORITHMS", "Calibration", "Compared", "ComputeFit", "Curve", "Interval", "JitterFit", "MeasuredRun", "NcclTime",
    "Parameter", "Residual", "RunInterval", "Summary", "Validation", "calibrate", "fit_compute", "fit_jitter",
    "load_calibration", "nccl_time", "predict_interval", "read_runs", "validate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("NcclTime", "nccl_time"):
        return getattr(importlib.import_module("ddlsim.collectives.nccl"), name)
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim.validation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.validation.{_HOME[name]}"), name)
