"""Published runs with their software: the rows of five files, out of the box (:mod:`accuracy.judge`).

Rows from which a number of a stack or device was fitted (``FITTED``) are shown and do not count; which number it was is
in the sources of ``stacks.toml`` and ``devices.toml``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from accuracy.judge import Judged, judge, read
from accuracy.judge import Row as Published
from accuracy.rows import Omitted, Row, show

__all__ = ["FILES", "left_out", "rows"]

DATA = Path(__file__).with_name("data") / "published_stacks"
FILES = {
    "megatron_bridge": "megatron_bridge.csv", "torchtitan": "torchtitan.csv", "fms_fsdp": "fms_fsdp.csv",
    "maxtext": "maxtext_tpu.csv", "large_runs": "large_runs.yaml",
}  # fmt: skip
#: which rows of each file a number was fitted to
FITTED: dict[str, Callable[[Published], bool]] = {
    "megatron_bridge": lambda row: (
        row["system"] == "h100" or (row["model"] == "llama-3-8b" and row["precision"] == "fp8-cs")
    ),
    "torchtitan": lambda row: row["tensor"] == 1 and row["sequence"] < 32768,
    "fms_fsdp": lambda row: False,
    "maxtext": lambda row: row["slices"] == 1 and row["model"] in ("maxtext-16b", "maxtext-22b"),
    "large_runs": lambda row: row["machine"] == "h100",
}


@functools.cache
def _judged(name: str) -> tuple[tuple[Published, Judged], ...]:
    path = DATA / FILES[name]
    return tuple(zip(read(path)[1], judge(path), strict=True))


def _what(name: str, row: Published) -> str:
    if name == "maxtext":
        return f"{row['slices']} slices of {row['chips_per_slice']} chips"
    keys = ("precision", "micro_batch", "local_batch", "sequence", "tensor", "pipeline", "recompute", "compile")
    sizes = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in keys if row.get(key) not in (None, "", 1))
    return f"{row['gpus']} GPUs, {sizes}"


def _case(row: Published) -> str:
    """Return system, model and release."""
    parts = (row.get("system") or row.get("machine"), row["model"], row.get("release") or row.get("source"))
    return "_".join(str(part) for part in parts if part)


def rows(name: str) -> list[Row]:
    """Return the rows of a file that are predicted."""
    return [
        Row(_case(row), _what(name, row), each.published, each.predicted, each.unit, FITTED[name](row),
            kind="run/parallel/gpus")
        for row, each in _judged(name)
        if each.predicted is not None
    ]  # fmt: skip


def left_out(name: str) -> list[Omitted]:
    """Return the rows that are not predicted, with the reason."""
    return [Omitted(_case(row), _what(name, row), each.reason) for row, each in _judged(name) if each.predicted is None]


if __name__ == "__main__":
    for name in FILES:
        print(name)
        show(rows(name), left_out(name))
