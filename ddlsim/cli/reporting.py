"""The command that shows what a study has found: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddlsim.cli.application import app
from ddlsim.cli.output import check_folder, write_file
from ddlsim.errors import ConfigError

if TYPE_CHECKING:
    from ddlsim.run.sensitivity import Sensitivity


@app.command()
def report(
    store: Annotated[Path, typer.Argument(help="The file that a study was run with.", metavar="STORE")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures and all tables.")] = None,
    title: Annotated[str, typer.Option("--title", help="Of the page (default: the model and the cluster).")] = "",
    question: Annotated[str, typer.Option("--question", help="That the study is to answer, below the title.")] = "",
    study: Annotated[
        Path | None, typer.Option("--study", help="Its file (.toml): adds what would help the best, by more runs.")
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="What makes the best: throughput, cost_per_sample, ...")] = "",
) -> None:
    """Show the configurations of a study, the best of them, and what was skipped or has failed.

    Example: ddlsim report study.sqlite --html report.html --question "Is 100 Gbit/s worth it?"
    """
    for option, value in (("--title", title), ("--question", question), ("--study", study), ("--metric", metric)):
        if value and html is None:
            raise ConfigError(f"{option} has no effect without --html: add --html report.html")
    check_folder(html)
    if html is not None and html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {html}: the report is a page; name a file that ends in .html")
    from ddlsim.study import load_table

    table = load_table(store)
    if html is None:
        typer.echo(str(table))
        return
    from ddlsim.report.html import save_html, sensitivities_of_best

    found: list[Sensitivity] = []
    if study is not None:
        from ddlsim.study import load_study

        found = sensitivities_of_best(load_study(study), table, metric)
    write_file(
        html, lambda path: save_html(table, path, title=title, question=question, metric=metric, sensitivities=found)
    )
