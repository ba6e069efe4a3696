"""The command that simulates many configurations: `sweep`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddlsim.cli.application import app
from ddlsim.cli.options import AllowCode, Json
from ddlsim.cli.output import check_folder, check_picture, write_file
from ddlsim.errors import ConfigError

if TYPE_CHECKING:
    from ddlsim.study.executors import DaskClient

_FORMATS = (".csv", ".parquet", ".json")


@app.command()
def sweep(
    study: Annotated[Path, typer.Argument(help="A study file (.toml).", metavar="STUDY")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Store that keeps every finished point.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes (default: one for each core).")] = None,
    dask: Annotated[str | None, typer.Option("--dask", help="Address of a Dask scheduler to run on instead.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write all points (csv, parquet, json).")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw throughput over workers (png, pdf, svg).")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Simulate failed points again.")] = False,
    add: Annotated[bool, typer.Option("--add", help="Put the study into a store of another one.")] = False,
    stability: Annotated[
        bool, typer.Option("--stability", help="Three more runs of each point say how stable it is.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Simulate all configurations of a study; with --out, what is there already is not simulated again.

    Example: ddlsim sweep study.toml --out study.sqlite --jobs 2
    """
    from ddlsim.study import load_study

    for path in (out, table):
        check_folder(path)
    check_picture(plot)
    if table is not None and table.suffix not in _FORMATS:
        raise ConfigError(f"--table {table}: cannot write the format {table.suffix!r}; use {', '.join(_FORMATS)}")
    if add and out is None:
        raise ConfigError("--add has no effect without --out")
    if dask is not None and jobs is not None:
        raise ConfigError("--jobs has no effect with --dask: the Dask cluster has its own number of workers")
    loaded = load_study(study, allow_code=allow_code)
    if stability:
        loaded = loaded.with_(stability=True)
    with ExitStack() as stack:
        client = None if dask is None else stack.enter_context(_client(dask))
        found = loaded.run(out, executor=client, jobs=jobs, retry_failed=retry_failed, add=add)
    typer.echo(found.frame.to_json(orient="records", indent=1) if as_json else str(found))
    if table is not None:
        write_file(table, found.save)
    if found.interrupted:
        raise typer.Exit(130)
    if plot is not None:
        write_file(plot, found.plot_scaling)


@contextmanager
def _client(address: str) -> Iterator[DaskClient]:
    """Yield a client of a Dask scheduler."""
    try:
        from distributed import Client
    except ImportError:
        raise ConfigError("--dask needs Dask: pip install 'ddlsim[distributed]'") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dask {address}: no scheduler answers there ({error})") from None
    with client:
        yield client
