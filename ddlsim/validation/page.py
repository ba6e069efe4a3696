"""A comparison of predictions with measured runs as a page of HTML: the summary, the picture, every run."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

import ddlsim
from ddlsim.output_files import write_text
from ddlsim.printable import shown

if TYPE_CHECKING:
    from ddlsim.validation.comparison import Validation

_STYLE = (
    "body { font-family: sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em } "
    "table { border-collapse: collapse } td, th { padding: 0.2em 0.7em; text-align: right } "
    "pre, .rows { overflow-x: auto } img { max-width: 100% }"
)


def save_page(validation: Validation, path: str | Path, title: str) -> None:
    """Write the page; the same comparison gives the same text. Raises ConfigError if the file cannot be written."""
    picture = io.BytesIO()
    drawing = validation.plot().get_figure(root=True)
    assert drawing is not None
    drawing.savefig(picture, format="svg", metadata={"Date": None})
    uri = base64.b64encode(picture.getvalue()).decode()
    rows = validation.table.to_html(index=False, border=0, float_format=lambda value: f"{value:.4g}", na_rep="")
    heading = html.escape(shown(title))
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>",
        f"<pre>{html.escape(shown(str(validation)))}</pre>",
        f'<img alt="Measured against predicted throughput" src="data:image/svg+xml;base64,{uri}">',
        f'<h2>Every run</h2><div class="rows">{rows}</div>',
        f"<footer><small>ddlsim {html.escape(ddlsim.__version__)}</small></footer></body></html>",
    ]
    write_text(Path(path), "\n".join([*parts, ""]))
