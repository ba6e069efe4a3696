"""A study's table as labelled arrays (xarray: Hoyer and Hamman 2017, J. Open Research Software 5(1))."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    import xarray

    from ddlsim.study.table import Table

#: points that the fields' values may have together; a sample, where no two points share a value, soon has more
MAX_CELLS = 1_000_000


def dataset_of(table: Table) -> xarray.Dataset:
    """Return the points of a table as a dataset; see :meth:`ddlsim.study.Table.to_xarray`."""
    try:
        import xarray
    except ImportError:
        raise ConfigError("to_xarray needs xarray: pip install 'ddlsim[xarray]'") from None
    frame = table.frame
    dims = [*table.axes, "seed"]
    values = {name: list(dict.fromkeys(frame[name].tolist())) for name in dims}
    shape = tuple(len(found) for found in values.values())
    if math.prod(shape) > MAX_CELLS:
        sizes = " x ".join(str(n) for n in shape)
        raise ConfigError(
            f"to_xarray: {len(frame)} points in an array of {sizes}, more than {MAX_CELLS:,}: they are a sample, no "
            "grid; use table.frame, or table.frame.to_xarray() for one dimension"
        )
    places = {name: {value: i for i, value in enumerate(found)} for name, found in values.items()}
    at = tuple(np.array([places[name][value] for value in frame[name].tolist()]) for name in dims)
    variables: dict[str, tuple[list[str], object, dict[str, str]]] = {}
    for name in ("n_workers", *(name for name in METRICS if name in frame)):
        array = np.full(shape, np.nan)
        array[at] = frame[name].to_numpy(np.float64, na_value=np.nan)
        metric = METRICS.get(name)
        heading, unit = ("workers", "") if metric is None else (metric.heading, metric.unit)
        variables[name] = dims, array, {"long_name": heading, "units": unit or "1"}
    status = np.full(shape, "missing", dtype="<U7")
    status[at] = frame["status"].to_numpy(str)
    variables["status"] = dims, status, {"long_name": "how a point has ended"}
    coordinates = {name: (name, _coordinate(found)) for name, found in values.items()}
    return xarray.Dataset(variables, coordinates, {"source": f"ddlsim {ddlsim.__version__}"})


def _coordinate(values: Sequence[object]) -> object:
    """Return the values along a dimension as numbers, or as texts where not all of them are."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return np.array(values) if numbers else np.array([str(value) for value in values])
