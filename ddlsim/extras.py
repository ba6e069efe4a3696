"""Optional dependencies: errors that name the extra to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from ddlsim.errors import ConfigError

#: package -> (feature that requires it, extra that installs it)
_EXTRAS = {
    "matplotlib": ("draw plots", "plots"),
    "scipy": ("fit or optimise parameters", "fit"),
    "xarray": ("make xarray's data sets", "xarray"),
    "optuna": ("search for configurations", "optuna"),
    "distributed": ("use a Dask cluster", "distributed"),
    "panel": ("start the explorer", "explore"),
}


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a :class:`ConfigError` that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise _missing(package) from None


def check_installed(package: str) -> None:
    """Check that an optional package is installed, without importing it. Raises :class:`ConfigError` if it is not."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package)


def _missing(package: str) -> ConfigError:
    task, extra = _EXTRAS[package]
    return ConfigError(f"cannot {task} without {package}, which is not installed: pip install 'ddlsim[{extra}]'")
