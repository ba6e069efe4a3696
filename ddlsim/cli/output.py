"""Output of tables on the terminal and to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from ddlsim.errors import ConfigError, listed
from ddlsim.extras import check_installed
from ddlsim.output_files import check_place
from ddlsim.printable import shown
from ddlsim.text_tables import aligned

#: what matplotlib writes, as far as people ask for it
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps")


def check_folder(path: Path | None) -> None:
    """Find out before a long simulation that its output has nowhere to go."""
    if path is not None:
        check_place(path)


def check_page(path: Path | None) -> None:
    """Find out before a long simulation that its report cannot be written."""
    check_folder(path)
    if path is not None and path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {path}: the report is an HTML page; choose a name that ends in .html")
    if path is not None:
        check_installed("matplotlib")  # a report has pictures


def check_picture(path: Path | None) -> None:
    """Find out before a long simulation that its picture cannot be written."""
    check_folder(path)
    if path is not None and path.suffix.lower() not in PICTURES:
        raise ConfigError(f"{path}: unknown image format; choose a name that ends in one of {', '.join(PICTURES)}")
    if path is not None:
        check_installed("matplotlib")


def write_file(path: Path | None, write: Callable[[Path], object]) -> None:
    """Call `write` with the path, if there is one, and say so on stderr; what cannot be written is a ConfigError.

    If `write` returns a list, it is that of the files it wrote; otherwise it wrote `path`.
    """
    if path is None:
        return
    try:
        result = write(path)
    except ConfigError:  # says itself what is wrong
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    files = result if isinstance(result, list) and all(isinstance(each, Path) for each in result) else [path]
    typer.echo(shown(f"wrote {listed(files)}"), err=True)


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
