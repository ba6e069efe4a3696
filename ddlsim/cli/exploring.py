"""The command that opens a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from ddlsim.cli.application import app
from ddlsim.cli.options import Model


@app.command()
def explore(
    cluster: Annotated[
        str | None, typer.Argument(help="A bundled cluster or a topology file (with +key=value).", metavar="[CLUSTER]")
    ] = None,
    model: Model = None,
    port: Annotated[int, typer.Option("--port", help="Port on this machine (default: one that is free).")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Accept this name of the machine besides localhost (repeatable).")
    ] = None,
) -> None:
    """Look at clusters, runs and comparisons in a browser; needs pip install 'ddlsim[explore]'.

    Example: ddlsim explore cloud-25g-16x8-v100 --model resnet50
    """
    from ddlsim.explore import explore as serve

    serve(cluster, model, port=port, browser=browser, hosts=host or ())
