"""Output of tables on the terminal and to files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from ddlsim.cli.options import passed
from ddlsim.errors import ConfigError, listed
from ddlsim.extras import check_installed
from ddlsim.output_files import check_place
from ddlsim.printable import shown
from ddlsim.text_tables import aligned

#: common formats that matplotlib writes
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps")


def check_folder(path: Path | None) -> None:
    """Check that output can be written before a long simulation."""
    if path is not None:
        check_place(path)


def check_distinct(*inputs: object, **outputs: Path | None) -> None:
    """Check that no output would overwrite another one or an input; keywords are the names of the options."""
    owners = {os.path.realpath(str(path)): f"the input {path}" for path in inputs}
    for name, path in passed(**outputs).items():
        option = f"--{name.replace('_', '-')}"
        if os.path.exists(path) and not os.path.isfile(path):  # a terminal or a pipe
            continue
        place = os.path.realpath(path)
        if place in owners:
            raise ConfigError(f"{option} {path}: would overwrite {owners[place]}; choose another path")
        owners[place] = f"the output of {option}"


def check_page(path: Path | None) -> None:
    """Check that a report can be written before a long simulation."""
    check_folder(path)
    if path is not None and path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {path}: the report is an HTML page; choose a name that ends in .html")
    if path is not None:
        check_installed("matplotlib")  # a report has figures


def check_picture(path: Path | None) -> None:
    """Check that a figure can be written before a long simulation."""
    check_folder(path)
    if path is not None and path.suffix.lower() not in PICTURES:
        raise ConfigError(f"{path}: unknown image format; choose a name that ends in one of {', '.join(PICTURES)}")
    if path is not None:
        check_installed("matplotlib")


def write_file(path: Path | None, write: Callable[[Path], object]) -> None:
    """Call `write` with the path, if there is one, and report it on stderr; errors become ConfigError.

    If `write` returns a list of files, these are reported, otherwise `path`.
    """
    if path is None:
        return
    try:
        result = write(path)
    except ConfigError:  # its message is complete
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    files = result if isinstance(result, list) and all(isinstance(item, Path) for item in result) else [path]
    typer.echo(shown(f"wrote {listed(files)}"), err=True)


def write_files(*outputs: tuple[Path | None, Callable[[Path], object]]) -> None:
    """Write each file as :func:`write_file` does, also after one that cannot be written; then raise its error."""
    errors: list[ConfigError] = []
    for path, write in outputs:
        try:
            write_file(path, write)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ConfigError("; ".join(map(str, errors)))


def print_table(rows: Sequence[dict[str, object]], as_json: bool) -> None:
    """Print rows as JSON, or as a table of left-aligned text and right-aligned numbers."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    words = ("output", "name", "title", "algorithms")
    left = {
        i
        for i, column in enumerate(rows[0])
        if column in words or not all(str(row[column])[:1].isdigit() for row in rows)
    }
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    typer.echo("\n".join(aligned(cells, left, width=160)))
