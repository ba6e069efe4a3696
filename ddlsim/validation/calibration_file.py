"""A calibration in a cluster file: the file as it was, and below it the `[calibration]` table (docs/calibration.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import ddlsim
from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import PARAMETERS
from ddlsim.cluster.calibration_table import CalibrationTable, ParameterTable, parse_calibration, value_of
from ddlsim.cluster.files import MARK, to_toml
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.output_files import write_text
from ddlsim.plain import decoded, parse_toml, read_bytes
from ddlsim.validation.calibration import Calibration, Parameter, Residual
from ddlsim.validation.compute_fit import ComputeFit
from ddlsim.validation.curves import Curve
from ddlsim.validation.jitter_fit import FITTED, JitterFit
from ddlsim.workload.jitter import Gamma, Lognormal, ShiftedExponential


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
        text = f"name = {_text(calibration.cluster.name)}\n{text}"
    write_text(path, "\n".join([text, "", MARK, *_lines(calibration), ""]))


def _written_out(source: str | Path) -> str:
    """Return the cluster of a name with options, or of a file of another kind, as TOML without calibration."""
    cluster = load_cluster(source)
    return to_toml(cluster.to_graph(), cluster.name, None)


def attached(calibration: Calibration) -> Calibration:
    """Return the calibration with itself in its cluster, as loading its file would have it (without residuals)."""
    text = "\n".join(_lines(dataclasses.replace(calibration, residuals=())))
    table = parse_calibration(tomllib.loads(text)["calibration"])
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
        kinds: dict[str, type[Lognormal] | type[Gamma] | type[ShiftedExponential]] = {
            "lognormal": Lognormal, "gamma": Gamma, "shifted-exponential": ShiftedExponential,
        }  # fmt: skip
        if j.type not in kinds:
            raise unknown_name("type", j.type, FITTED, "calibration.jitter")
        jitter = JitterFit(kinds[j.type](j.shape), j.base, j.ks, j.p_value, j.n_samples)
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


def _matrix(rows: list[list[float]], n: int, place: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if len(rows) != n or any(len(row) != n for row in rows):
        raise ConfigError(f"{place}.covariance: must have {n} rows and columns; calibrate again")
    return np.array(rows, dtype=np.float64)


# ---------------------------------------------------------------- writing


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "inf"


def _numbers(values: Iterable[float]) -> str:
    return f"[{', '.join(map(_number, values))}]"


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a text such as "21.3 us" in the first unit that is not above the value, to six digits."""
    scale, unit = next((u for u in units if value >= u[0]), units[-1])
    return f'"{np.format_float_positional(value / scale, precision=6, fractional=False, trim="-")} {unit}"'


def _time(value: float) -> str:
    return _with_unit(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def _quantity(name: str, value: float) -> str:
    if PARAMETERS[name] == "time":
        return _time(value)
    if PARAMETERS[name] == "bytes":
        return _with_unit(value, ((1.0, "B"),))
    if PARAMETERS[name] == "share":
        return f'"{value:.6g}"'
    if name == "reduce_bandwidth":
        return _with_unit(value, ((1e9, "GB/s"), (1e6, "MB/s")))
    return _with_unit(value, ((1.25e8, "Gbit/s"), (1.25e5, "Mbit/s")))


def _rows(matrix: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return f"[{', '.join(_numbers(row) for row in matrix.tolist())}]"


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _lines(c: Calibration) -> list[str]:
    lines = [
        "[calibration]", f"ddlsim = {_text(ddlsim.__version__)}", f"sources = {_texts(c.sources)}",
        f"notes = {_texts(c.notes)}", f"versions = {_texts(c.versions)}",
        f"spread = {_number(c.spread)}  # of ln(predicted / measured)",
        f"dof = {_number(c.dof)}", f"absolute = {_time(c.absolute)}  # of short times, besides",
        f"ranks = {list(c.ranks)}", f"covariance = {_rows(c.covariance)}  # of the parameters' logarithms",
    ]  # fmt: skip
    for p in c.parameters:
        lines += ["", "[[calibration.parameters]]", f"name = {_text(p.name)}"]
        lines += [f"{key} = {_quantity(p.name, getattr(p, key))}" for key in ("value", "low", "high")]
        if 0.0 < p.file < math.inf:
            lines.append(f"file = {_quantity(p.name, p.file)}")
        lines += [f"nbytes = {list(p.nbytes)}", f"informed = {_number(p.informed)}"]
        if p.prior is not None:
            lines += [f"prior = {_quantity(p.name, p.prior[0])}", f"prior_factor = {_number(p.prior[1])}"]
        if p.bounds is not None:
            lines.append(f"bounds = [{', '.join(_quantity(p.name, end) for end in p.bounds)}]")
        if p.scatter != (c.spread, c.dof, c.absolute):
            lines.append(f"scatter = {_numbers(p.scatter)}  # spread, dof, absolute (s)")
    for curve in c.curves:
        lines += ["", "[[calibration.curves]]"]
        lines += [f"{key} = {_text(getattr(curve, key))}" for key in ("operation", "backend", "algorithm")]
        lines += [
            f"inside = {'true' if curve.inside else 'false'}", f"per_message = {_number(curve.per_message)}",
            f"sizes = {list(curve.sizes)}", f"per_byte = {_numbers(curve.per_byte)}",
            f"covariance = {_rows(curve.covariance)}", f"spread = {_number(curve.spread)}",
            f"dof = {_number(curve.dof)}", f"nbytes = {list(curve.nbytes)}", f"ranks = {list(curve.ranks)}",
            *([f"left_out = {_numbers(curve.left_out)}"] if curve.left_out else []),
        ]  # fmt: skip
    for fit in c.compute:
        lines += [
            "", "[[calibration.compute]]", f"model = {_text(fit.model)}", f"c0 = {_time(fit.c0)}",
            f"c1 = {_time(fit.c1)}  # per sample", f"covariance = {_rows(fit.covariance)}",
            f"spread = {_number(fit.spread)}", f"dof = {_number(fit.dof)}", f"batch_sizes = {list(fit.batch_sizes)}",
        ]  # fmt: skip
    if c.jitter is not None:
        j = c.jitter
        kind = {Lognormal: "lognormal", Gamma: "gamma", ShiftedExponential: "shifted-exponential"}[type(j.jitter)]
        lines += [
            "", "[calibration.jitter]", f"type = {_text(kind)}", f"shape = {_number(j.shape)}",
            f"base = {_time(j.base_s)}", f"ks = {_number(j.ks)}", f"p_value = {_number(j.p_value)}",
            f"n_samples = {j.n_samples}",
        ]  # fmt: skip
    return lines + _residual_lines(c.residuals)


def _residual_lines(residuals: Sequence[Residual]) -> list[str]:
    if not residuals:
        return []
    lines = ["", "[calibration.measured]", "# what was measured, and what the cluster says (curves not applied)"]
    lines.append("residuals = [")
    for r in residuals:
        lines.append(
            f"  {{ operation = {_text(r.operation)}, backend = {_text(r.backend)}, n_ranks = {r.n_ranks}, "
            f"n_hosts = {r.n_hosts}, nbytes = {r.nbytes}, measured = {_time(r.measured)}, "
            f"predicted = {_time(r.predicted)}, fitted = {'true' if r.fitted else 'false'} }},"
        )
    return [*lines, "]"]
