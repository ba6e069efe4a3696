"""The page on plans: its Python runs."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_runs(capsys):
    namespace = {"__name__": "planning"}
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(second, "planning.md", "exec"), namespace)
    exec(compile(first, "planning.md", "exec"), namespace)
    plan = namespace["plan"]
    assert plan.meets_target
    assert plan.best_exact.exact
    assert "done in 24 h, the cheapest first" in capsys.readouterr().out
