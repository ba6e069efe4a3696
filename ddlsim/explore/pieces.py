"""Pieces of screens: messages, numbers, tables and bars as HTML, cards that are filled when they are opened.

Colours of text and lines are the page's own, so that all of this is readable in light and in dark.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import panel as pn

from ddlsim.bundled import bundled_files
from ddlsim.printable import shown

#: matplotlib's pictures are black on white, also on a dark page
FRAME = ":host { background: white; border-radius: 6px; }"


def picture(draw: Callable[[], Any], alternative: str) -> pn.pane.PNG:
    """Return the figure that `draw` returns, with a text for who cannot see it."""
    file = io.BytesIO()
    draw().savefig(file, format="png", dpi=110)
    return pn.pane.PNG(
        file.getvalue(), alt_text=alternative, sizing_mode="scale_width", stylesheets=[FRAME], margin=(4, 8), embed=True
    )


#: how folders of uploaded files begin
UPLOADED = "ddlsim-explore-"
STYLE = """
:host { font-size: 14px; line-height: 1.45; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 4px 10px 4px 0; vertical-align: top;
         border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); overflow-wrap: break-word; }
th { font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.w { width: 50%; padding: 7px 0; }
.gain { height: 14px; margin-bottom: 6px; }
.scroll { overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.tile { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: 6px; padding: 8px 12px; }
.tile .v { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
.bar { display: flex; height: 30px; border-radius: 4px; overflow: hidden; }
.bar span { display: block; height: 100%; }
.key { display: inline-block; margin: 6px 16px 0 0; }
.key b[style] { display: inline-block; width: 22px; margin: 0 6px 4px 0; }
.key i, td i.s { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
.error { border-left: 4px solid #cc3344; background: color-mix(in srgb, #cc3344 12%, transparent); padding: 8px 12px;
         overflow-wrap: anywhere; }
.note { border-left: 4px solid #8899aa; padding: 4px 12px; margin: 6px 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid #dd9922; padding: 4px 12px; margin: 6px 0; overflow-wrap: anywhere; }
.busy { padding: 4px 0; }
h2 { font-size: 18px; margin: 10px 0 4px; } h3 { font-size: 15px; margin: 8px 0 4px; }
pre { overflow-x: auto; padding: 10px; border-radius: 6px; margin: 4px 0;
      background: color-mix(in srgb, currentColor 8%, transparent); }
"""


def html(text: str = "", **more: Any) -> pn.pane.HTML:
    """Return a pane of HTML in the house's style."""
    return pn.pane.HTML(text, stylesheets=[STYLE], sizing_mode="stretch_width", margin=(4, 8), **more)


def plain(text: object) -> str:
    """Return text from elsewhere as it may stand in HTML."""
    return escape(shown(str(text)))


def message(text: str) -> pn.pane.HTML:
    """Return a pane with an error of one line, which screen readers read out; empty without one."""
    return html(f'<div class="error" role="alert">{plain(without_content(text))}</div>' if text else "")


def without_content(text: str) -> str:
    """Return an error, cut after the name of a file that it is about: what follows may quote a file that is private.

    Files that come with ddlsim, and those that were uploaded, are quoted.
    """
    ours = {*bundled_files("models").values(), *bundled_files("topologies").values()}
    for part in text.split(": "):
        path = Path(re.sub(r":\d+$", "", part))
        if os.path.isfile(path) and path not in ours and not path.parent.name.startswith(UPLOADED):
            why = "cannot be used here; run the ddlsim command in a terminal to see why"
            return f"{text.partition(part)[0]}{path}: {why}"
    return text


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    """Return labelled numbers side by side."""
    each = (
        f'<div class="tile"><div>{plain(label)}</div><div class="v">{plain(value)}</div></div>'
        for label, value in numbers
    )
    return f'<div class="tiles">{"".join(each)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> str:
    """Return a table of texts; columns from number `numbers` on are aligned as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="n"' if i >= numbers else "" for i in range(len(row)))
        return "".join(f"<{tag}{kind}>{plain(text)}</{tag}>" for text, kind in zip(row, kinds, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def stacked(shares: Mapping[str, float], styles: Mapping[str, tuple[str, str]], write: Callable[[float], str]) -> str:
    """Return shares of 1 as one bar with a legend; `styles` are colours and what people call them."""
    parts = [(*styles[kind], share) for kind, share in shares.items()]
    words = ", ".join(f"{label} {write(share)}" for _, label, share in parts)
    pieces = "".join(
        f'<span style="width:{100.0 * share:.3f}%;background:{colour}" title="{plain(label)}"></span>'
        for colour, label, share in parts
    )
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{plain(label)} <b>{write(share)}</b></span>'
        for colour, label, share in parts
    )
    return f'<div class="bar" role="img" aria-label="{plain(words)}">{pieces}</div><div>{keys}</div>'


def legend(parts: Sequence[tuple[str, str]]) -> str:
    """Return (colour, what it stands for) side by side."""
    keys = (f'<span class="key"><i style="background:{colour}"></i>{plain(label)}</span>' for colour, label in parts)
    return f"<div>{''.join(keys)}</div>"


#: series of bars
COLOURS = ("#4477aa", "#dd7733")


def bars(rows: Sequence[tuple[str, Sequence[float | None]]], series: Sequence[str] = ("",)) -> str:
    """Return (label, gain of each series) as bars from a common line, losses to the left of it.

    Gains are shares of 1. What gains less than 0.05 % in all series is only named.
    """
    shown = [(label, gains) for label, gains in rows if max(abs(gain or 0.0) for gain in gains) >= 0.0005]
    others = [label for label, gains in rows if (label, gains) not in shown]
    numbers = [gain for _, gains in shown for gain in gains if gain is not None]
    least, most = min([0.0, *numbers]), max([1e-9, *numbers])
    scale = 100.0 / (most - least)

    def bar(gain: float, place: int) -> str:
        left, width = scale * (min(gain, 0.0) - least), max(scale * abs(gain), 0.3)
        look = f"margin-left:{left:.2f}%;width:{width:.2f}%;background:{COLOURS[place]}"
        return f'<div class="gain" style="{look}"></div>'

    body = "".join(
        f'<tr><td>{plain(label)}</td><td class="n">{"<br>".join(_gain(gain) for gain in gains)}</td>'
        f'<td class="w">{"".join(bar(gain or 0.0, place) for place, gain in enumerate(gains))}</td></tr>'
        for label, gains in shown
    )
    key = legend(list(zip(COLOURS, series, strict=False))) if len(series) > 1 else ""
    rest = f"<div>Without effect: {plain(', '.join(others))}.</div>" if others else ""
    return f"{key}<table><tbody>{body}</tbody></table>{rest}"


def _gain(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:+.1%}"


def lines(texts: Sequence[str], kind: str) -> str:
    """Return notes or warnings, one below the other."""
    return "".join(f'<div class="{kind}">{plain(text)}</div>' for text in texts)


class LazyCard:
    """A card whose content is made when it is open, and made anew after `stale` then or when it is opened."""

    def __init__(self, title: str, fill: Callable[[], None], *content: Any) -> None:
        self._fill = fill
        self._is_stale = True
        self.card = pn.Card(*content, title=title, collapsed=True, sizing_mode="stretch_width", margin=(6, 4))
        self.card.param.watch(self._look, "collapsed")

    def stale(self) -> None:
        """Say that what is shown does not hold any more."""
        self._is_stale = True
        self._look()

    def _look(self, *_: object) -> None:
        if self._is_stale and not self.card.collapsed:
            self._is_stale = False
            self._fill()
