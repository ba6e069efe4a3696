"""Calibrations in cluster files: the original file, followed by a `[calibration]` table (docs/calibration.md)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

import ddlsim
from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files, relative_name
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.cluster.calibration_table import (
    CalibrationTable,
    ComputeTable,
    CurveTable,
    JitterTable,
    MeasuredTable,
    ParameterTable,
    ResidualTable,
    value_of,
)
from ddlsim.cluster.files import MARK, cluster_toml
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.output_files import check_suffix, write_text
from ddlsim.plain import decoded, parse_toml, read_bytes
from ddlsim.schema import PLAIN, to_toml, toml_value
from ddlsim.units import quantity_text
from ddlsim.validation.calibration import Calibration, Parameter, Residual
from ddlsim.validation.compute_fit import ComputeFit
from ddlsim.validation.curves import Curve
from ddlsim.validation.jitter_fit import FITTED, JitterFit

T = TypeVar("T")


def write_calibration(calibration: Calibration, path: Path, source: str | Path) -> None:
    """Write the cluster `source` to `path` with the calibration, replacing an earlier one.

    Otherwise, TOML files are not changed; other files and names with options are written as TOML. Raises ConfigError if
    the cluster has a `[calibration]` that was not written by this function.
    """
    check_suffix(path, ".toml")
    bundled = bundled_files("topologies")
    origin = Path(source) if os.path.isfile(source) else bundled.get(str(source), Path(source))
    if origin.suffix == ".toml" and not os.path.exists(origin):
        raise unknown_name("cluster file", str(source), bundled)
    if origin.suffix == ".toml":
        text = decoded(read_bytes(origin), str(source))
    else:  # a name with options, or a file of another kind
        text = cluster_toml(load_cluster(source), path.parent)
    text = text.partition(MARK)[0].rstrip()
    table = parse_toml(text, str(source))
    if "calibration" in table:
        raise ConfigError(
            f"{source}: contains a [calibration] table that was not written by ddlsim calibrate; remove the table"
        )
    if origin.suffix == ".toml":
        text = _moved(text, table, origin.parent, path.parent)
    if "name" not in table:  # the default is the file's name, which changes
        text = f"name = {toml_value(calibration.cluster.name)}\n{text}"
    written = to_toml({"calibration": PLAIN.table(_table(calibration))}).lstrip()
    write_text(path, "\n".join([text, "", MARK, written]))


def _moved(text: str, table: Mapping[str, Any], old: Path, new: Path) -> str:
    """Return the text of a cluster file moved from folder `old` to `new`, with adjusted paths of device files."""
    hosts = [table.get("host"), *(host for key in ("hosts", "nodes") for host in table.get(key, ()))]
    for name in {str(host["device"]) for host in hosts if isinstance(host, Mapping) and "device" in host}:
        if name.endswith(".toml") and not os.path.isabs(name) and (old / name).is_file():
            there = toml_value(relative_name(old / name, new)).replace("\\", r"\\")
            text = re.sub(rf"""(\bdevice\s*=\s*)(["']){re.escape(name)}\2""", rf"\g<1>{there}", text)
    return text


def attached(calibration: Calibration) -> Calibration:
    """Return the calibration with itself attached to its cluster, as if loaded from a file (without residuals)."""
    table = _table(dataclasses.replace(calibration, residuals=()))
    return dataclasses.replace(calibration, cluster=dataclasses.replace(calibration.cluster, calibration=table))


@checked
def load_calibration(source: str | Path | Cluster) -> Calibration:
    """Load the calibration stored in `source`: a cluster, or the path or bundled name of a cluster file.

    Raises ConfigError if the cluster has no calibration.
    """
    cluster = load_cluster(source)  # reports errors in the file
    name = cluster.name if isinstance(source, Cluster) else source
    if cluster.calibration is None:
        raise ConfigError(f"{name}: contains no [calibration] table; create one with ddlsim calibrate")
    try:
        return _calibration(cluster.calibration, cluster)
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from None


def _calibration(table: CalibrationTable, cluster: Cluster) -> Calibration:
    usual = (table.spread, table.dof, table.absolute)
    parameters = [_parameter(p, f"calibration.parameters.{i}", usual) for i, p in enumerate(table.parameters)]
    jitter = None
    if (j := table.jitter) is not None:
        if j.type not in FITTED:
            raise unknown_name("type", j.type, FITTED, "calibration.jitter")
        jitter = JitterFit(FITTED[j.type][0](j.shape), j.base, j.ks, j.p_value, j.n_samples)
    compute = [_object(ComputeFit, row, 2, f"calibration.compute.{i}") for i, row in enumerate(table.compute)]
    return _object(
        Calibration,
        table,
        len(parameters),
        "calibration",
        cluster=cluster,
        parameters=tuple(parameters),
        curves=tuple(_object(Curve, row, 1 + len(row.per_byte), "calibration.curves") for row in table.curves),
        compute=tuple(compute),
        jitter=jitter,
        residuals=tuple(_object(Residual, row, 0, "") for row in table.measured.residuals),
    )


def _object(kind: type[T], row: object, n: int, place: str, **more: object) -> T:
    """Build an object from a row of the file: lists become tuples, and the covariance an (n, n) array."""
    arguments = dict(more)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in more:
            value = getattr(row, field.name)
            arguments[field.name] = tuple(value) if isinstance(value, list | tuple) else value
    if "covariance" in arguments:
        rows = cast("tuple[Sequence[float], ...]", arguments["covariance"])
        if len(rows) != n or any(len(numbers) != n for numbers in rows):
            raise ConfigError(f"{place}.covariance: must have {n} rows and columns; calibrate again")
        arguments["covariance"] = np.array(rows, dtype=np.float64).reshape(n, n)
    return kind(**arguments)


def _parameter(row: ParameterTable, place: str, usual: tuple[float, float, float]) -> Parameter:
    name = row.name
    absent = math.inf if PARAMETERS[name] == "bandwidth" else 0.0  # omitted in files: zero latency, unlimited bandwidth
    before = absent if row.file is None else value_of(name, row.file, place)
    best, least, most = (value_of(name, text, place) for text in (row.value, row.low, row.high))
    prior = None if row.prior is None else (value_of(name, row.prior, f"{place}.prior"), row.prior_factor)
    bounds: Any = tuple(value_of(name, text, f"{place}.bounds") for text in row.bounds) or None
    nbytes: Any = tuple(row.nbytes) or (0, 0)
    scatter: Any = tuple(row.scatter) or usual
    return Parameter(name, best, least, most, before, nbytes, row.informed, prior, bounds, scatter)


# ---------------------------------------------------------------- writing


def _rounded(value: Any) -> Any:
    """Return numbers rounded to six digits; arrays and tuples become lists."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return [_rounded(element) for element in value] if isinstance(value, list | tuple) else value


def _text(name: str, value: float) -> str:
    dimension = PARAMETERS[name]
    return f"{value:.6g}" if dimension == "share" else quantity_text(_rounded(value), dimension)


def _row(kind: type[T], part: object, **more: object) -> T:
    """Return the row of the file for a part of a calibration."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in more]  # type: ignore[arg-type]
    return kind(**{name: _rounded(getattr(part, name)) for name in names}, **more)


def _table(c: Calibration) -> CalibrationTable:
    jitter = None
    if c.jitter is not None:
        kind = next(name for name, (kind, _) in FITTED.items() if kind is type(c.jitter.jitter))
        jitter = _row(JitterTable, c.jitter, type=kind, base=_rounded(c.jitter.base_s))
    return _row(
        CalibrationTable,
        c,
        ddlsim=ddlsim.__version__,
        parameters=[_parameter_table(p, (c.spread, c.dof, c.absolute)) for p in c.parameters],
        curves=[_row(CurveTable, curve) for curve in c.curves],
        compute=[_row(ComputeTable, fit) for fit in c.compute],
        jitter=jitter,
        measured=MeasuredTable(residuals=[_row(ResidualTable, residual) for residual in c.residuals]),
    )


def _parameter_table(p: Parameter, usual: tuple[float, float, float]) -> ParameterTable:
    return _row(
        ParameterTable,
        p,
        **{name: _text(p.name, getattr(p, name)) for name in ("value", "low", "high")},
        file=_text(p.name, p.file) if 0.0 < p.file < math.inf else None,
        prior=None if p.prior is None else _text(p.name, p.prior[0]),
        prior_factor=1.0 if p.prior is None else _rounded(p.prior[1]),
        bounds=[_text(p.name, end) for end in p.bounds or ()],
        scatter=() if p.scatter == usual else _rounded(p.scatter),
    )
