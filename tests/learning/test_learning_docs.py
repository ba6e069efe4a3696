"""The page on training runs says what happens: its Python runs, its file loads and trains."""

import re
from pathlib import Path

import pytest

import ddlsim

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "training"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):  # later blocks go on from earlier ones
        exec(compile(block, "training.md", "exec"), namespace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compared.png", "learning.png", "run.npz"]
    assert namespace["several"].time_to_accuracy(0.9).n == 3
    printed = capsys.readouterr().out
    assert "3 seeds of all-reduce" in printed
    assert re.search(r"batches of about \d+ samples", printed)


def test_the_file_loads_and_trains(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "training.toml"
    path.write_text(text, encoding="utf-8")
    result = ddlsim.simulate(ddlsim.load_experiment(path))
    assert result.stop_reason in ("target accuracy", "epochs")
    assert result.accuracy > 0.9
