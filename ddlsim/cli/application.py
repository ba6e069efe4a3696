"""The application that the commands register with, and its entry point."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

import ddlsim
from ddlsim.errors import DdlsimError

__all__ = ["app", "main", "show"]

app = typer.Typer(
    help="Simulate distributed training on a cluster before renting it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
show = typer.Typer(help="Show a topology or a model in detail.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(show, name="show")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(ddlsim.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate distributed training on a cluster before renting it."""


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """Run the command line: errors are one line on stderr and exit code 2, an interrupt is 130."""
    try:
        app()
    except DdlsimError as error:
        _fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)
