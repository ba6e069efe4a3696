"""The fixed sample of mutants: its rows name lines and tests that exist, so that none is left out unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("resource")  # Unix

from tests.mutation.__main__ import replaced

ROOT = Path(__file__).parents[1]
SAMPLE = json.loads((ROOT / "tests" / "mutation" / "sample.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: f"{row['module']}: {row['before']}")
def test_every_mutant_can_be_made(row: dict[str, str | list[str]]) -> None:
    source = (ROOT / str(row["module"])).read_text(encoding="utf-8")
    assert replaced(source, row["before"], row["after"]) is not None, "write the row anew, for the code that moved"
    missing = [test for test in row["tests"] if not (ROOT / test.partition("::")[0]).exists()]
    assert not missing
