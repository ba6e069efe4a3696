"""HTML representations in notebooks: the rows of the text summaries as tables.

They consist only of text and tables, without colours (so that they are readable in light and dark notebooks), scripts
or external resources. External names are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Sequence

from ddlsim.printable import shown

_LEFT, _RIGHT = "text-align: left", "text-align: right; white-space: nowrap"


def page(title: str, *parts: str) -> str:
    """Return an HTML page with a title and parts made by the functions below; empty parts are omitted. Contents wider
    than the page scroll."""
    return f'<div style="overflow-x: auto"><p><strong>{escaped(title)}</strong></p>{"".join(parts)}</div>'


def labelled(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and texts; a row without a label continues the previous one, and an empty row is
    omitted."""
    merged: list[tuple[str, list[str]]] = []
    for label, text in rows:
        if label or not merged:
            merged.append((label, [text]))
        elif text:
            merged[-1][1].append(text)
    html_rows = (
        f'<tr><th scope="row" style="{_LEFT}; vertical-align: top; white-space: nowrap">{escaped(label)}</th>'
        f'<td style="{_LEFT}">{"<br>".join(map(escaped, texts))}</td></tr>'
        for label, texts in merged
        if label or any(texts)
    )
    return f"<table><tbody>{''.join(html_rows)}</tbody></table>"


def grid(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> str:
    """Return a table with a header, like :func:`ddlsim.text_tables.aligned` for text."""
    head, *body = rows
    style = [_LEFT if i in left else _RIGHT for i in range(len(head))]
    cells = "".join(f'<th scope="col" style="{s}">{escaped(text)}</th>' for s, text in zip(style, head, strict=True))
    cell_rows = (
        "".join(f'<td style="{s}">{escaped(text)}</td>' for s, text in zip(style, row, strict=True)) for row in body
    )
    below = "".join(f"<tr>{line}</tr>" for line in cell_rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{below}</tbody></table>"


def lines(texts: Iterable[str]) -> str:
    """Return lines of text, one below the other; "" if there are none."""
    escaped_texts = [escaped(text) for text in texts]
    return f"<p>{'<br>'.join(escaped_texts)}</p>" if escaped_texts else ""


def folded(label: str, part: str) -> str:
    """Return a part that is expanded by clicking on the label."""
    return f"<details><summary>{escaped(label)}</summary>{part}</details>"


def escaped(text: str) -> str:
    """Escape `text` for HTML: markup and control characters are displayed, not interpreted."""
    return html.escape(shown(text))
