"""Names of the bundled models, listed without loading the models (imports nothing heavy)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ddlsim.bundled import bundled_files
from ddlsim.plain import read_toml


def bundled_names() -> list[str]:
    """Return the sorted names of the bundled models; a file with sizes has one name per size."""
    names: list[str] = []
    for family, path in bundled_files("models").items():
        sizes = sizes_of(path)
        complete = all(key in sizes[""] for table in sizes.values() for key in table)
        names += [f"{family}-{size}" if size else family for size in sizes if size or complete]
    return sorted(names)


@functools.cache
def sizes_of(path: Path) -> Mapping[str, Mapping[str, object]]:
    """Return the sizes of a bundled file by name; ``""`` has the values without a size."""
    table = cast("dict[str, dict[str, dict[str, object]]]", read_toml(path))
    return {"": table.get("parameters", {}), **table.get("sizes", {})}
