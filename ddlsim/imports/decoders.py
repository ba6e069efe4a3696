"""Language models that are stacks of equal decoder layers, of the kinds in ``decoder.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ddlsim.plain import read_toml

FILE = Path(__file__).parent / "decoder.toml"


class Read(NamedTuple):
    """The table of a model file, converted from another tool's format.

    reads   maximum sequence length of the model in tokens; 0: that in the table
    window  maximum number of tokens that some layers attend to; 0: all
    """

    table: dict[str, Any]
    kind: str
    reads: int = 0
    window: int = 0


def kinds() -> list[str]:
    """Return the kinds of decoders."""
    table: dict[str, Any] = read_toml(FILE)
    return sorted(table["sizes"])


def decoder_table(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model file of decoders without its parameters, and the default parameters of a kind."""
    table: dict[str, Any] = read_toml(FILE)
    return table, {**table.pop("parameters"), **table.pop("sizes")[kind]}
