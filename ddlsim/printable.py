"""Escaping of control characters in text from other sources.

A name from a file may contain escape sequences, which a terminal interprets (colours, the window title, overwriting
earlier output), or marks that reverse the order of the following text (Unicode's bidirectional controls, "Trojan
Source", CVE-2021-42574).
"""

from __future__ import annotations

import re

#: C0 except line feed and tab; DEL and C1; the marks, embeddings, overrides and isolates of Unicode's bidirectional
#: algorithm (UAX 9); line and paragraph separators; byte order mark; lone surrogates
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def shown(text: str) -> str:
    """Return `text` with its control characters as escapes (``\\x1b``, ``\\u202e``), except line feeds and tabs."""
    return _OBEYED.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
