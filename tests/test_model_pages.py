"""The cases that docs/models works by hand are what the simulation gives."""

import re
from pathlib import Path

import pytest
from draws import slow

FOLDER = Path(__file__).parents[1] / "docs" / "models"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
#: pages that work a case by hand
WITH_CASES = [
    "asynchronous",
    "collectives",
    "compute",
    "copies",
    "embeddings",
    "experts",
    "federated",
    "gossip",
    "local_sgd",
    "memory",
    "overlap",
    "parameter_servers",
    "plans",
    "splitting",
    "taxonomy",
    "tcp",
    "transport",
    "variability",
]
BLOCKS = {page: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for page, text in PAGES.items()}


@pytest.mark.parametrize("page", WITH_CASES)
def test_every_page_checks_its_case(page):
    assert any("assert " in block for block in BLOCKS[page])


#: the examples of these take as long as those of all others
LONG = {"hybrid", "local_sgd", "plans", "splitting"}


@pytest.mark.parametrize("page", [slow(page) if page in LONG else page for page in sorted(BLOCKS) if BLOCKS[page]])
def test_cases_worked_by_hand_hold(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page}
    for block in BLOCKS[page]:  # later blocks go on from earlier ones
        exec(compile(block, f"{page}.md", "exec"), namespace)
