"""Pictures of matplotlib on the page: they scale with it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import panel as pn

#: matplotlib's pictures are black on white, also on a dark page
FRAME = ":host { background: white; border-radius: 6px; }"


def picture(draw: Callable[[], Any], alternative: str) -> pn.pane.PNG:
    """Return the figure that `draw` returns, with a text for who cannot see it."""
    file = io.BytesIO()
    draw().savefig(file, format="png", dpi=110)
    return pn.pane.PNG(
        file.getvalue(), alt_text=alternative, sizing_mode="scale_width", stylesheets=[FRAME], margin=(4, 8), embed=True
    )
