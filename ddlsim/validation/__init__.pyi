"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .calibration import (
    Calibration as Calibration,
    Parameter as Parameter,
    Residual as Residual,
    calibrate as calibrate,
)
from .calibration_file import load_calibration as load_calibration
from .cases import ALGORITHMS as ALGORITHMS
from .comparison import ComparedRun as ComparedRun, Summary as Summary, Validation as Validation, validate as validate
from .compute_fit import ComputeFit as ComputeFit, fit_compute as fit_compute
from .curves import Curve as Curve, Interval as Interval
from .intervals import RunInterval as RunInterval, predict_interval as predict_interval
from .jitter_fit import JitterFit as JitterFit, fit_jitter as fit_jitter
from .run_table import MeasuredRun as MeasuredRun, read_runs as read_runs
from .stack_fit import StackFit as StackFit, calibrate_stack as calibrate_stack
