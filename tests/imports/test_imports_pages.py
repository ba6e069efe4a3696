"""The samples on the pages under docs/formats are what they say, and can be read."""

import re
from pathlib import Path

import pytest

from ddlsim.imports import detect_kind, read_any
from ddlsim.imports.detect import KINDS

PAGES = Path(__file__).parents[2] / "docs" / "formats"
SAMPLES = [
    (page, kind, text)
    for page in ("benchmarks.md", "traces.md", "topologies.md")
    for kind, text in re.findall(r"```text ([\w-]+)\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(
    ("page", "kind", "text"), SAMPLES, ids=[f"{page}-{kind}-{i}" for i, (page, kind, _) in enumerate(SAMPLES)]
)
def test_a_sample_is_read(tmp_path, page, kind, text):
    path = tmp_path / "sample"
    path.write_bytes(bytes.fromhex(text) if kind == "chakra" else text.encode())
    assert detect_kind(path) == kind
    assert read_any(path) is not None


def test_every_kind_has_a_sample_and_a_row_in_the_overview():
    assert {kind for _, kind, _ in SAMPLES} == set(KINDS)
    overview = (PAGES / "imports.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in overview for kind in KINDS)
