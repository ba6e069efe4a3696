"""Names from elsewhere in pictures: as they are written, whatever matplotlib makes of some characters."""

from __future__ import annotations

from ddlsim.printable import shown

__all__ = ["drawn"]


def drawn(text: str) -> str:
    """Return what to hand to matplotlib for `text`: a "$" begins no formula, and no "_" keeps it out of a legend."""
    text = shown(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
