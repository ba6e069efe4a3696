"""The page on recommendations: its Python runs."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_runs(capsys):
    namespace = {"__name__": "planning"}
    first, ranges, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(ranges, "planning.md", "exec"), namespace)
    shown = re.search(r"begins with:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out.startswith(shown[1])
    exec(compile(second, "planning.md", "exec"), namespace)
    exec(compile(first, "planning.md", "exec"), namespace)
    recommendation = namespace["recommendation"]
    assert recommendation.meets_target
    assert recommendation.best_exact.exact
    assert "done in 24 h, the cheapest first" in capsys.readouterr().out
