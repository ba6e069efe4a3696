"""The command that compiles ahead: `warm-up`."""

from __future__ import annotations

import json

import typer

import ddlsim
from ddlsim.cli.application import app
from ddlsim.cli.options import Json


@app.command("warm-up")
def warm_up(as_json: Json = False) -> None:
    """Compile everything that simulations and learning need, once; say where it is kept.

    Takes about 45 s of CPU time the first time, and 2 s when all is there. Example: ddlsim warm-up
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn("compiling {task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)

            def show(what: str, done: float, total: float) -> None:
                bar.update(task, description=what, completed=done, total=total)

            warmth = ddlsim.warm_up(show)
    else:  # lines on stderr say what is compiled
        warmth = ddlsim.warm_up()
    typer.echo(json.dumps(warmth.to_dict(), indent=2) if as_json else str(warmth))
