"""A calibration in a cluster file: the file as it was, and below it the `[calibration]` table (docs/calibration.md)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import ddlsim
from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files
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
from ddlsim.output_files import write_text
from ddlsim.plain import decoded, parse_toml, read_bytes
from ddlsim.schema import PLAIN, to_toml, toml_value
from ddlsim.units import quantity_text
from ddlsim.validation.calibration import Calibration, Parameter, Residual
from ddlsim.validation.compute_fit import ComputeFit
from ddlsim.validation.curves import Curve
from ddlsim.validation.jitter_fit import FITTED, JitterFit
from ddlsim.workload.jitter import Gamma, Lognormal, ShiftedExponential

_JITTERS: dict[str, type[Lognormal] | type[Gamma] | type[ShiftedExponential]] = {
    "lognormal": Lognormal,
    "gamma": Gamma,
    "shifted-exponential": ShiftedExponential,
}


def write_calibration(calibration: Calibration, path: Path, source: str | Path) -> None:
    """Write the cluster `source` to `path` with the calibration; an earlier one is replaced.

    TOML files stay as they are otherwise; other files and names with options are written out as TOML.
    Raises ConfigError if the cluster has a `[calibration]` that was not written here.
    """
    bundled = bundled_files("topologies")
    origin = Path(source) if os.path.isfile(source) else bundled.get(str(source), Path(source))
    if origin.suffix == ".toml" and not os.path.exists(origin):
        raise unknown_name("cluster file", str(source), bundled)
    text = decoded(read_bytes(origin), str(source)) if origin.suffix == ".toml" else _written_out(source)
    text = text.partition(MARK)[0].rstrip()
    table = parse_toml(text, str(source))
    if "calibration" in table:
        raise ConfigError(f"{source}: has a [calibration] that was not written by ddlsim calibrate; remove it")
    if "name" not in table:  # the name is that of the file, which changes
        text = f"name = {toml_value(calibration.cluster.name)}\n{text}"
    write_text(path, "\n".join([text, "", MARK, _lines(calibration)]))


def _written_out(source: str | Path) -> str:
    """Return the cluster of a name with options, or of a file of another kind, as TOML without calibration."""
    cluster = load_cluster(source)
    return cluster_toml(cluster.to_graph(), cluster.name, None)


def attached(calibration: Calibration) -> Calibration:
    """Return the calibration with itself in its cluster, as loading its file would have it (without residuals)."""
    table = _table(dataclasses.replace(calibration, residuals=()))
    return dataclasses.replace(calibration, cluster=dataclasses.replace(calibration.cluster, calibration=table))


@checked
def load_calibration(source: str | Path | Cluster) -> Calibration:
    """Return the calibration of a cluster, or of a cluster file (a path or bundled name).

    Raises ConfigError in one line where there is none.
    """
    cluster = load_cluster(source)  # finds what is wrong with a file
    name = cluster.name if isinstance(source, Cluster) else source
    if cluster.calibration is None:
        raise ConfigError(f"{name}: has no [calibration]; write one with ddlsim calibrate")
    try:
        return _calibration(cluster.calibration, cluster)
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from None


def _calibration(table: CalibrationTable, cluster: Cluster) -> Calibration:
    whole = (table.spread, table.dof, table.absolute)
    parameters = [_parameter(p, f"calibration.parameters.{i}", whole) for i, p in enumerate(table.parameters)]
    curves = [
        Curve(
            c.operation, c.backend, c.algorithm, c.inside, c.per_message, tuple(c.sizes), tuple(c.per_byte),
            np.array(c.covariance), c.spread, c.dof, (c.nbytes[0], c.nbytes[1]), (c.ranks[0], c.ranks[1]),
            tuple(c.left_out),
        )
        for c in table.curves
    ]  # fmt: skip
    compute = [
        ComputeFit(
            c.model, c.c0, c.c1, _matrix(c.covariance, 2, f"calibration.compute.{i}"), c.spread, c.dof,
            tuple(c.batch_sizes),
        )
        for i, c in enumerate(table.compute)
    ]  # fmt: skip
    jitter = None
    if table.jitter is not None:
        j = table.jitter
        if j.type not in _JITTERS:
            raise unknown_name("type", j.type, FITTED, "calibration.jitter")
        jitter = JitterFit(_JITTERS[j.type](j.shape), j.base, j.ks, j.p_value, j.n_samples)
    residuals = tuple(
        Residual(r.operation, r.backend, r.n_ranks, r.n_hosts, r.nbytes, r.measured, r.predicted, r.fitted)
        for r in table.measured.residuals
    )
    n = len(parameters)
    return Calibration(
        cluster, tuple(parameters), _matrix(table.covariance, n, "calibration") if n else np.zeros((0, 0)),
        table.spread, table.dof, table.absolute, (table.ranks[0], table.ranks[1]), tuple(curves), tuple(compute),
        jitter, residuals, tuple(table.sources), tuple(table.notes), tuple(table.versions),
    )  # fmt: skip


def _parameter(row: ParameterTable, place: str, whole: tuple[float, float, float]) -> Parameter:
    name = row.name
    absent = math.inf if PARAMETERS[name] == "bandwidth" else 0.0  # files leave out: no latency, speed without limit
    before = absent if row.file is None else value_of(name, row.file, place)
    best, least, most = (value_of(name, text, place) for text in (row.value, row.low, row.high))
    bounds = [value_of(name, text, f"{place}.bounds") for text in row.bounds]
    return Parameter(
        name, best, least, most, before, (row.nbytes[0], row.nbytes[1]) if row.nbytes else (0, 0), row.informed,
        None if row.prior is None else (value_of(name, row.prior, f"{place}.prior"), row.prior_factor),
        (bounds[0], bounds[1]) if bounds else None,
        (row.scatter[0], row.scatter[1], row.scatter[2]) if row.scatter else whole,
    )  # fmt: skip


def _matrix(rows: Sequence[Sequence[float]], n: int, place: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if len(rows) != n or any(len(row) != n for row in rows):
        raise ConfigError(f"{place}.covariance: must have {n} rows and columns; calibrate again")
    return np.array(rows, dtype=np.float64)


# ---------------------------------------------------------------- writing


def _rounded(value: float) -> float:
    """Return a number of six digits."""
    return float(f"{value:.6g}")


def _rows(matrix: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[list[float]]:
    return [[_rounded(each) for each in row] for row in matrix.tolist()]


def _numbers(values: Iterable[float]) -> list[float]:
    return [_rounded(each) for each in values]


def _text(name: str, value: float) -> str:
    """Return the value of a parameter with its unit."""
    dimension = PARAMETERS[name]
    return f"{value:.6g}" if dimension == "share" else quantity_text(_rounded(value), dimension)


def _lines(c: Calibration) -> str:
    """Return a calibration as the `[calibration]` table of a cluster file."""
    return to_toml({"calibration": PLAIN.table(_table(c))}).lstrip()


def _table(c: Calibration) -> CalibrationTable:
    """Return a calibration as its file has it: numbers of six digits."""
    return CalibrationTable(
        ddlsim=ddlsim.__version__,
        sources=c.sources,
        notes=c.notes,
        versions=c.versions,
        spread=_rounded(c.spread),
        dof=_rounded(c.dof),
        absolute=_rounded(c.absolute),
        ranks=c.ranks,
        covariance=_rows(c.covariance),
        parameters=[_parameter_table(p, (c.spread, c.dof, c.absolute)) for p in c.parameters],
        curves=[
            CurveTable(
                operation=curve.operation,
                backend=curve.backend,
                algorithm=curve.algorithm,
                inside=curve.inside,
                per_message=_rounded(curve.per_message),
                sizes=curve.sizes,
                per_byte=_numbers(curve.per_byte),
                covariance=_rows(curve.covariance),
                spread=_rounded(curve.spread),
                dof=_rounded(curve.dof),
                nbytes=curve.nbytes,
                ranks=curve.ranks,
                left_out=_numbers(curve.left_out),
            )
            for curve in c.curves
        ],
        compute=[
            ComputeTable(
                model=fit.model,
                c0=_rounded(fit.c0),
                c1=_rounded(fit.c1),
                covariance=_rows(fit.covariance),
                spread=_rounded(fit.spread),
                dof=_rounded(fit.dof),
                batch_sizes=fit.batch_sizes,
            )
            for fit in c.compute
        ],
        jitter=None if c.jitter is None else _jitter_table(c.jitter),
        measured=MeasuredTable(
            residuals=[
                ResidualTable(
                    operation=r.operation,
                    backend=r.backend,
                    n_ranks=r.n_ranks,
                    n_hosts=r.n_hosts,
                    nbytes=r.nbytes,
                    measured=_rounded(r.measured),
                    predicted=_rounded(r.predicted),
                    fitted=r.fitted,
                )
                for r in c.residuals
            ]
        ),
    )


def _parameter_table(p: Parameter, usual: tuple[float, float, float]) -> ParameterTable:
    return ParameterTable(
        name=p.name,
        value=_text(p.name, p.value),
        low=_text(p.name, p.low),
        high=_text(p.name, p.high),
        file=_text(p.name, p.file) if 0.0 < p.file < math.inf else None,
        nbytes=p.nbytes,
        informed=_rounded(p.informed),
        prior=None if p.prior is None else _text(p.name, p.prior[0]),
        prior_factor=1.0 if p.prior is None else _rounded(p.prior[1]),
        bounds=[_text(p.name, end) for end in p.bounds or ()],
        scatter=() if p.scatter == usual else _numbers(p.scatter),
    )


def _jitter_table(fit: JitterFit) -> JitterTable:
    return JitterTable(
        type=next(name for name, kind in _JITTERS.items() if kind is type(fit.jitter)),
        shape=_rounded(fit.shape),
        base=_rounded(fit.base_s),
        ks=_rounded(fit.ks),
        p_value=_rounded(fit.p_value),
        n_samples=fit.n_samples,
    )
