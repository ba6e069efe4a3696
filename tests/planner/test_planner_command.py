"""`ddlsim recommend`: the plan as text, JSON and CSV; errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from ddlsim.cli import app
from ddlsim.errors import ConfigError


def call(*options: str) -> Result:
    return CliRunner().invoke(app, ["recommend", *options])


def test_the_command_prints_a_plan_and_writes_the_table(tmp_path: Path) -> None:
    table = tmp_path / "plan.csv"
    done = call("office-1gbe", "-m", "lenet5", "-n", "2,4", "-b", "32", "-j", "1", "--best", "2", "--csv", str(table))
    assert done.exit_code == 0, done.output
    assert "target        the fastest first" in done.output
    assert set(pd.read_csv(table)["workers"]) == {2, 4}


def test_json() -> None:
    options = ["-m", "lenet5", "-n", "4", "-b", "32", "-j", "1", "--deadline", "1 h", "--samples", "1e6", "--json"]
    done = call("office-1gbe", *options)
    values = json.loads(done.output)
    assert values["cost_unit"] == "device-hours"
    best = values["choices"][0]
    assert best["time"] == pytest.approx(1e6 / best["throughput"])


def test_prices_are_given_once_or_for_each_cluster() -> None:
    options = ["office-1gbe", "-m", "lenet5", "-n", "2", "-b", "32", "-j", "1", "--price", "3.6 USD/h", "--json"]
    values = json.loads(call(*options).output)
    assert values["cost_unit"] == "USD"
    best = values["choices"][0]
    assert best["cost"] == pytest.approx(2 * 0.001 * 1e6 / best["throughput"])  # of a million samples


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["office-1gbe", "-n", "2;4"],
            "--workers = '2;4': must be integers of at least 1, separated by commas, such as 8,16,32",
        ),
        (["office-1gbe", "-n", "2,,4"], "--workers = '2,,4': must be integers of at least 1, separated by commas"),
        (["office-1gbe", "-n", "2,4,"], "--workers = '2,4,': must be integers of at least 1, separated by commas"),
        (["office-1gbe", "--deadline", "1 h"], "a deadline or a budget requires the length of the training"),
        (["office-1gbe", "-m", "resnet5"], "did you mean 'resnet50'"),
        (["office-1gbe", "--price", "1 USD/h", "--price", "2 USD/h"], "--price is set 2 times for 1 cluster;"),
        (["office-1gbe", "--price", "1 W"], "'1 W' is a power, not a price"),
    ],
    ids=["workers", "empty", "end", "samples", "model", "prices", "price"],
)
def test_errors(options: list[str], text: str) -> None:
    done = call(*options)
    assert isinstance(done.exception, ConfigError)
    assert text in str(done.exception)
