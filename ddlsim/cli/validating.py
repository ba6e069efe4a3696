"""The command that holds predictions against measured runs: `validate`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from ddlsim.cli import completing
from ddlsim.cli.application import app
from ddlsim.cli.options import Json, Model
from ddlsim.cli.output import check_folder, check_picture, write_file
from ddlsim.errors import ConfigError


@app.command()
def validate(
    runs: Annotated[Path, typer.Argument(help="CSV file of measured runs.", metavar="RUNS")],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", "-c", help="The cluster, best a calibrated file.", autocompletion=completing.clusters
        ),
    ],
    model: Model = None,
    fit_on: Annotated[str | None, typer.Option("--fit-on", help='Fit these runs first, e.g. "workers <= 4".')] = None,
    fit: Annotated[str, typer.Option("--fit", help="What to fit: compute, network, or both.")] = "compute,network",
    tolerance: Annotated[
        str | None, typer.Option("--tolerance", help="Exit code 1 if the mean error of held-out runs is larger: 10%.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw measured against predicted.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write all rows as CSV.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page: summary, picture, every run.")] = None,
    as_json: Json = False,
) -> None:
    """Compare measured training runs with their simulation: errors, order, and where they come from.

    Example: ddlsim validate runs.csv --cluster calibrated.toml --model resnet50 --fit-on "workers <= 4" --tolerance 10%
    """
    check_folder(table)
    check_folder(html)
    if html is not None and html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {html}: the report is a page; name a file that ends in .html")
    check_picture(plot)
    limit = None if tolerance is None else _share(tolerance)
    from ddlsim.validation import validate as compare

    quantities = [name.strip() for name in fit.split(",") if name.strip()]
    found = compare(runs, cluster, model, fit_on=fit_on, fit=quantities)
    if as_json:
        rows = json.loads(found.table.to_json(orient="records"))
        sums = {
            used: None if s is None else vars(s)
            for used, s in (("fit", found.summary(fitted=True)), ("held_out", found.summary(fitted=False)))
        }
        typer.echo(json.dumps({"rows": rows, "summary": sums, "error": found.error}, indent=2))
    else:
        typer.echo(str(found))
    if plot is not None:
        write_file(plot, found.plot)
    if html is not None:
        write_file(html, lambda path: found.save_html(path, f"{runs.name} on {cluster}"))
    if table is not None:
        from ddlsim.report.csv_table import save_csv

        write_file(table, lambda path: save_csv(found.table, path))
    if limit is not None and not found.within(limit):
        typer.echo(f"mean absolute error {found.error:.1%} is beyond the tolerance of {limit:.1%}", err=True)
        raise typer.Exit(1)


def _share(text: str) -> float:
    """Return "10%" or "0.1" as 0.1."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100.0 if percent else 1.0)
    except ValueError:
        value = math.nan
    if rest or not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"--tolerance {text!r}: write a share like 10% or 0.1")
    return value
