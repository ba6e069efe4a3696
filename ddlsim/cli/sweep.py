"""The `sweep` command, which simulates many configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddlsim.cli.application import app
from ddlsim.cli.options import AllowCode, Json, arg, opt
from ddlsim.cli.output import check_distinct, check_folder, check_page, check_picture, write_file
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.output_files import json_rows, write_text
from ddlsim.printable import shown

if TYPE_CHECKING:
    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.executors import DaskClient


@app.command()
def report(
    store: Annotated[Path, arg("File in which the study is stored.")],
    html: Annotated[Path | None, opt("Write an HTML page with plots and all tables.")] = None,
    title: Annotated[str, opt("Title of the page (default: the model and the cluster).")] = "",
    question: Annotated[str, opt("Question that the study answers, shown below the title.")] = "",
    study: Annotated[
        Path | None, opt("Study file (.toml), for simulating possible improvements of the best configuration.")
    ] = None,
    metric: Annotated[str, opt("Metric that defines the best configuration: throughput, cost_per_sample, ...")] = "",
    allow_code: AllowCode = False,
) -> None:
    """Report the configurations of a study.

    Shows the best configurations, and those that were skipped or failed.

    Example: ddlsim report study.sqlite --html report.html --question "Is 100 Gbit/s worth it?"
    """
    for option, value in (("--title", title), ("--question", question), ("--study", study), ("--metric", metric)):
        if value and html is None:
            raise ConfigError(f"{option} has no effect without --html; add --html report.html")
    check_page(html)
    from ddlsim.study import load_table
    from ddlsim.study.store import Store

    table = load_table(store)
    with Store(store, only_read=True) as opened:
        if (n := len(opened.studies())) > 1:
            typer.echo(shown(f"note: {store} contains {n} studies; the report shows the one that ran last"), err=True)
    if html is None:
        typer.echo(str(table))
        return
    from ddlsim.report.html import html_report, sensitivities_of_best

    sensitivities: list[Sensitivity] = []
    if study is not None:
        from ddlsim.study import load_study

        sensitivities = sensitivities_of_best(load_study(study, allow_code=allow_code), table, metric)
    text = html_report(table, title=title, question=question, metric=metric, sensitivities=sensitivities)
    write_file(html, lambda path: write_text(path, text))


_FORMATS = (".csv", ".parquet", ".json")


@app.command()
def sweep(
    study: Annotated[Path, arg("Study file (.toml).")],
    out: Annotated[Path | None, opt("File that stores every finished configuration.", "--out", "-o")] = None,
    jobs: Annotated[int | None, opt("Number of processes (default: one per core).", "--jobs", "-j")] = None,
    dask: Annotated[str | None, opt("Address of a Dask scheduler on whose workers to run the simulations.")] = None,
    table: Annotated[Path | None, opt("Write all configurations (csv, parquet, json).")] = None,
    plot: Annotated[Path | None, opt("Plot throughput against the number of workers (png, pdf, svg).")] = None,
    retry_failed: Annotated[bool, opt("Simulate failed configurations again.", "--retry-failed")] = False,
    add: Annotated[bool, opt("Add the study to a file that contains another study.", "--add")] = False,
    stability: Annotated[
        bool, opt("Run each configuration three more times, to report its stability.", "--stability")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Simulate all configurations of a study.

    With --out, configurations that are already stored are not simulated again.

    Example: ddlsim sweep study.toml --out study.sqlite --jobs 2
    """
    from ddlsim.study import load_study

    for path in (out, table):
        check_folder(path)
    check_picture(plot)
    check_distinct(study, out=out, table=table, plot=plot)
    if table is not None and table.suffix not in _FORMATS:
        raise ConfigError(f"--table {table}: cannot write {table.suffix!r} files; use {', '.join(_FORMATS)}")
    if add and out is None:
        raise ConfigError("--add has no effect without --out; add --out FILE")
    if dask is not None and jobs is not None:
        raise ConfigError(
            "--jobs has no effect with --dask, because the Dask cluster sets the number of workers; leave --jobs out"
        )
    loaded = load_study(study, allow_code=allow_code)
    if stability:
        loaded = loaded.with_(stability=True)
    with ExitStack() as stack:
        client = None if dask is None else stack.enter_context(_client(dask))
        results = loaded.run(out, executor=client, jobs=jobs, retry_failed=retry_failed, add=add)
    typer.echo(json.dumps(json_rows(results.frame), indent=1) if as_json else str(results))
    write_file(table, results.save)
    if results.interrupted:
        raise typer.Exit(130)
    if not results.counts["done"]:
        raise ConfigError(f"{study}: no configuration could be simulated, for the reasons above; correct the study")
    write_file(plot, results.plot_scaling)


@contextmanager
def _client(address: str) -> Iterator[DaskClient]:
    with needs("distributed"):
        from distributed import Client
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dask {address}: no Dask scheduler responds at this address ({error})") from None
    with client:
        yield client
