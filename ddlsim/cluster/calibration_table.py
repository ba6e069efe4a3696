"""The `[calibration]` table of a cluster file, written by ``ddlsim calibrate``. docs/calibration.md describes its keys.

Loading a cluster applies the parameters and keeps the table: runs can use its curves (``cost = "calibrated"``), and
:func:`ddlsim.validation.load_calibration` reads the whole table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, NotNegative, Positive, Share, checked, integer, number, quantity
from ddlsim.cluster.calibrated import PARAMETERS, with_parameters
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.quantity import positive
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.schema import PLAIN, UNIMPORTED
from ddlsim.units import as_number

_Factor = Annotated[float, number(1.0)]
_Time = Annotated[float, quantity("time", zero=True, si=True)]
_Matrix = Sequence[Sequence[float]]
_Bytes = Annotated[int, integer(0, 10**18)]
_Size = Annotated[int, integer(1, 10**18)]


@checked
@dataclass(frozen=True, kw_only=True)
class ParameterTable:
    """One fitted number as text with a unit, with its 95 % confidence interval and the previous value.

    `nbytes`: smallest and largest size used in the fit; `informed`: share of information from measurements. The prior
    is `prior` within a factor of `prior_factor` with probability 2/3; `bounds`: limits of the fit. `scatter`: spread,
    degrees of freedom and absolute scatter (s), if they differ from those of the table.
    """

    name: str
    value: str
    low: str
    high: str
    file: str | None = None
    nbytes: Sequence[_Bytes] = ()
    informed: Share = 1.0
    prior: str | None = None
    prior_factor: _Factor = 1.0
    bounds: Sequence[str] = ()
    scatter: Sequence[NotNegative] = ()


@checked
@dataclass(frozen=True, kw_only=True)
class CurveTable:
    """Deviation of one operation from the simulation on the calibrated cluster, by size."""

    operation: str
    backend: str = ""
    algorithm: Annotated[str, UNIMPORTED] = ""  # an error when it is used, unless code is allowed
    inside: bool = False  # the ranks were on one host
    per_message: NotNegative
    sizes: Sequence[_Size] = ()  # sizes in bytes at which the slope changes
    per_byte: Sequence[NotNegative]
    covariance: _Matrix
    spread: NotNegative
    dof: Positive
    nbytes: Sequence[_Bytes]  # smallest and largest measured size
    ranks: Sequence[int]
    left_out: Sequence[float] = ()  # errors of the curve at sizes left out of the fit


@checked
@dataclass(frozen=True, kw_only=True)
class ComputeTable:
    """Time of a training step in s: c0 + c1 * batch size."""

    model: str
    c0: _Time
    c1: _Time
    covariance: _Matrix
    spread: NotNegative
    dof: Positive
    batch_sizes: Sequence[int]


@checked
@dataclass(frozen=True, kw_only=True)
class JitterTable:
    """Distribution of a factor of the compute time, with its goodness of fit."""

    type: str
    shape: Positive  # coefficient of variation; for a shifted exponential, the mean excess
    base: _Time
    ks: NotNegative
    p_value: NotNegative
    n_samples: Count


@checked
@dataclass(frozen=True, kw_only=True)
class ResidualTable:
    """A measurement used in the fit, and the result of the calibrated simulation."""

    operation: str
    backend: str = ""
    n_ranks: Count
    n_hosts: Count
    nbytes: _Bytes
    measured: _Time
    predicted: _Time
    fitted: bool


@checked
@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """All measurements of messages."""

    residuals: Sequence[ResidualTable] = ()


@checked
@dataclass(frozen=True, kw_only=True)
class CalibrationTable:
    """The whole table."""

    ddlsim: str = ""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    versions: Sequence[str] = ()
    spread: NotNegative = 0.0
    dof: Positive = 1.0
    absolute: _Time = 0.0
    ranks: Sequence[_Size] = (2, 2)
    covariance: _Matrix = ()
    parameters: Sequence[ParameterTable] = ()
    curves: Sequence[CurveTable] = ()
    compute: Sequence[ComputeTable] = ()
    jitter: JitterTable | None = None
    measured: MeasuredTable = MeasuredTable()


def parse_calibration(table: Mapping[str, object]) -> CalibrationTable:
    """Return the checked table. Raises :class:`ConfigError` in one line, naming the field."""
    file = PLAIN.build(CalibrationTable, table, "calibration")
    n = len(file.parameters)
    if file.covariance and (len(file.covariance) != n or any(len(row) != n for row in file.covariance)):
        raise ConfigError(f"calibration.covariance: must have {n} rows and columns, one per parameter; calibrate again")
    if len(file.ranks) != 2 or file.ranks[0] > file.ranks[1]:
        raise ConfigError(f"calibration.ranks = {file.ranks!r}: must be [minimum, maximum]; calibrate again")
    for i, row in enumerate(file.parameters):
        if len(row.scatter) not in (0, 3):
            raise ConfigError(f"calibration.parameters.{i}.scatter: must be three numbers; calibrate again")
        for key, ends in (("nbytes", row.nbytes), ("bounds", row.bounds)):
            if len(ends) not in (0, 2):
                raise ConfigError(f"calibration.parameters.{i}.{key}: must be [minimum, maximum]; calibrate again")
    for i, curve in enumerate(file.curves):
        place, n = f"calibration.curves.{i}", 1 + len(curve.per_byte)
        if len(curve.sizes) + 1 != len(curve.per_byte) or list(curve.sizes) != sorted(set(curve.sizes)):
            raise ConfigError(f"{place}.sizes: must be ascending, with one entry fewer than per_byte; calibrate again")
        if len(curve.left_out) not in (0, len(curve.sizes)):
            raise ConfigError(f"{place}.left_out: must have one number per entry of sizes; calibrate again")
        if len(curve.covariance) != n or any(len(row) != n for row in curve.covariance):
            raise ConfigError(f"{place}.covariance: must have {n} rows and columns; calibrate again")
        for key, values in (("nbytes", curve.nbytes), ("ranks", curve.ranks)):
            if len(values) != 2 or values[0] > values[1]:
                raise ConfigError(f"{place}.{key} = {values!r}: must be [minimum, maximum]; calibrate again")
    return file


def value_of(name: str, text: str, place: str) -> float:
    """Return a parameter's value in SI units. Raises :class:`ConfigError` for an unknown name or unit."""
    if name not in PARAMETERS:
        raise unknown_name("parameter", name, PARAMETERS, place)
    if PARAMETERS[name] != "share":
        return positive(text, PARAMETERS[name], f"{place}: {name}")
    share = as_number(text)
    if share is None or not 0.0 < share < 1.0:
        raise ConfigError(f"{place}: {name} = {shown(text)} must be between 0 and 1, such as '0.022'; calibrate again")
    return share


def apply(cluster: Cluster, table: Mapping[str, object]) -> Cluster:
    """Apply the `[calibration]` table of a cluster's file, and attach the table to the cluster."""
    values: dict[str, float] = {}
    file = parse_calibration(table)
    for i, row in enumerate(file.parameters):
        if row.name in values:
            raise ConfigError(f"calibration.parameters.{i}: {row.name!r} appears twice; remove one of the entries")
        values[row.name] = value_of(row.name, row.value, f"calibration.parameters.{i}")
    return dataclasses.replace(with_parameters(cluster, values), calibration=file)
