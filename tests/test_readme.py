"""What the README shows is what happens: its Python runs, its output is the program's, its TOML loads."""

import re
from pathlib import Path

import pytest
from draws import few
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.mark.parametrize("code", few(PYTHON, 2, start=1), ids=range(len(PYTHON)))
def test_python_block_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip()
    _, prints, shown = README.partition(f"{code}```\n\nprints\n\n```\n")
    if prints:
        assert shown.startswith(f"{printed}```")
    if "print(result)" in code:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.png", "timeline.png", "trace.json"]


@pytest.mark.slow
def test_the_first_answer_is_the_command_s():
    line, _, shown = next(text for kind, text in BLOCKS if kind == "console").partition("\n")
    program, *arguments = line.removeprefix("$ ").split()
    assert program == "ddlsim"
    printed = CliRunner().invoke(cli.app, arguments).stdout
    assert printed.startswith(shown.removesuffix("...\n"))


def test_toml_block_is_a_cluster(tmp_path):
    path = tmp_path / "two-racks.toml"
    path.write_text(next(text for kind, text in BLOCKS if kind == "toml"), encoding="utf-8")
    cluster = ddlsim.load_cluster(path)
    assert len(cluster.workers) == 2 * 8 * 8
    assert cluster.title in README


def test_the_accuracy_is_that_of_the_accuracy_page():
    page = (Path(__file__).parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert re.search(r"\d+ of \d+ families of measurements", page)[0] in README
    values, error = re.search(r"([\d,]+) measured values fall .* the mean error is ([\d.]+)%", page).groups()
    assert f"Over {values} published and measured values, predictions have a mean error of {error} %" in README


def test_counts_in_the_table_are_true():
    assert f"{len(ddlsim.cluster_names())} bundled" in README
    assert f"| models | {len(ddlsim.model_names())}:" in README
    assert f"{len(ddlsim.algorithm_names())} all-reduces" in README
