"""The `[calibration]` table of a cluster file, which ``ddlsim calibrate`` writes: docs/calibration.md tells its keys.

Loading a cluster uses the parameters and keeps the table: runs can ask for its curves (``cost = "calibrated"``), and
:func:`ddlsim.validation.load_calibration` reads all of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ddlsim.cluster import schema
from ddlsim.cluster.calibrated import PARAMETERS, with_parameters
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.quantity import positive
from ddlsim.cluster.schema import Table
from ddlsim.errors import ConfigError, shown, unknown_name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Whole = Annotated[int, Field(ge=1)]


class ParameterTable(_Strict):
    """One fitted number: text with a unit, with its 95 % confidence interval and what the file said before.

    `nbytes` are the least and most that it was fitted to; `informed` is the share that measurements tell;
    the prior is `prior` within a factor of `prior_factor` two times out of three; `bounds` what the fit allowed;
    `scatter` spread, degrees of freedom and absolute scatter (s) of its measurements, where not as those of the table.
    """

    name: str
    value: str
    low: str
    high: str
    file: str | None = None
    nbytes: list[int] = []
    informed: Annotated[float, Field(ge=0, le=1)] = 1.0
    prior: str | None = None
    prior_factor: Annotated[float, Field(ge=1)] = 1.0
    bounds: list[str] = []
    scatter: list[NotNegative] = []


class CurveTable(_Strict):
    """How one operation deviates from the simulation on the calibrated cluster, by size."""

    operation: str
    backend: str = ""
    algorithm: str = ""
    inside: bool = False  # the ranks were on one host
    per_message: NotNegative
    sizes: list[Annotated[int, Field(ge=1)]] = []  # bytes at which the slope changes
    per_byte: list[NotNegative]
    covariance: list[list[float]]
    spread: NotNegative
    dof: Positive
    nbytes: list[int]  # least and most measured
    ranks: list[int]
    left_out: list[float] = []  # what a curve through every size is off where one is left out


class ComputeTable(_Strict):
    """Seconds of a training step: c0 + c1 * batch size."""

    model: str
    c0: schema.Time
    c1: schema.Time
    covariance: list[list[float]]
    spread: NotNegative
    dof: Positive
    batch_sizes: list[int]


class JitterTable(_Strict):
    """The distribution of a factor on the compute time, with its goodness of fit."""

    type: str
    shape: Positive  # coefficient of variation; of a shifted exponential the mean excess
    base: schema.Time
    ks: NotNegative
    p_value: NotNegative
    n_samples: Whole


class ResidualTable(_Strict):
    """One measurement that was used, and what the calibrated simulation says."""

    operation: str
    backend: str = ""
    n_ranks: Whole
    n_hosts: Whole
    nbytes: int
    measured: schema.Time
    predicted: schema.Time
    fitted: bool


class MeasuredTable(_Strict):
    """All measurements of messages."""

    residuals: list[ResidualTable] = []


class CalibrationTable(_Strict):
    """The whole table."""

    ddlsim: str = ""
    sources: list[str] = []
    notes: list[str] = []
    versions: list[str] = []
    spread: NotNegative = 0.0
    dof: Positive = 1.0
    absolute: schema.Time = 0.0
    ranks: list[Annotated[int, Field(ge=1)]] = [2, 2]
    covariance: list[list[float]] = []
    parameters: list[ParameterTable] = []
    curves: list[CurveTable] = []
    compute: list[ComputeTable] = []
    jitter: JitterTable | None = None
    measured: MeasuredTable = MeasuredTable()


def parse_calibration(table: Table) -> CalibrationTable:
    """Return the checked table. Raises :class:`ConfigError` in one line, naming the field."""
    checked = schema.check_table(CalibrationTable, table, "calibration")
    n = len(checked.parameters)
    if checked.covariance and (len(checked.covariance) != n or any(len(row) != n for row in checked.covariance)):
        raise ConfigError(f"calibration.covariance: must have {n} rows and columns, one for each of the parameters")
    if len(checked.ranks) != 2 or checked.ranks[0] > checked.ranks[1]:
        raise ConfigError(f"calibration.ranks = {checked.ranks!r}: must be the least and the most; calibrate again")
    for i, row in enumerate(checked.parameters):
        if len(row.scatter) not in (0, 3):
            raise ConfigError(f"calibration.parameters.{i}.scatter: must be three numbers; calibrate again")
        for key, ends in (("nbytes", row.nbytes), ("bounds", row.bounds)):
            if len(ends) not in (0, 2):
                raise ConfigError(f"calibration.parameters.{i}.{key}: must be the least and the most; calibrate again")
    for i, curve in enumerate(checked.curves):
        _check_curve(curve, f"calibration.curves.{i}")
    return checked


def _check_curve(curve: CurveTable, place: str) -> None:
    if len(curve.sizes) + 1 != len(curve.per_byte) or curve.sizes != sorted(set(curve.sizes)):
        raise ConfigError(f"{place}.sizes: must rise, one fewer than per_byte; calibrate again")
    if len(curve.left_out) not in (0, len(curve.sizes)):
        raise ConfigError(f"{place}.left_out: must have a number for each of the sizes; calibrate again")
    n = 1 + len(curve.per_byte)
    if len(curve.covariance) != n or any(len(row) != n for row in curve.covariance):
        raise ConfigError(f"{place}.covariance: must have {n} rows and columns; calibrate again")
    for key, values in (("nbytes", curve.nbytes), ("ranks", curve.ranks)):
        if len(values) != 2 or values[0] > values[1]:
            raise ConfigError(f"{place}.{key} = {values!r}: must be the least and the most; calibrate again")


def value_of(name: str, text: str, place: str) -> float:
    """Return a parameter's value in SI units. Raises :class:`ConfigError` for an unknown name or unit."""
    if name not in PARAMETERS:
        raise unknown_name("parameter", name, PARAMETERS, place)
    if PARAMETERS[name] != "share":
        return positive(text, PARAMETERS[name], f"{place}: {name}")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        raise ConfigError(f"{place}: {name} = {shown(text)} must be a share in (0, 1), like '0.022'; calibrate again")
    return share


def apply(cluster: Cluster, table: Table) -> Cluster:
    """Return the cluster as the `[calibration]` table of its file says, with that table."""
    found: dict[str, float] = {}
    checked = parse_calibration(table)
    for i, row in enumerate(checked.parameters):
        if row.name in found:
            raise ConfigError(f"calibration.parameters.{i}: {row.name!r} is there twice; remove one")
        found[row.name] = value_of(row.name, row.value, f"calibration.parameters.{i}")
    return dataclasses.replace(with_parameters(cluster, found), calibration=checked)
