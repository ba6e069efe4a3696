"""Networks of embedding bags and interactions against their formulas, what is refused, and generated clicks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ddlsim
from ddlsim.data import clicks, load_data
from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network
from ddlsim.workload.model import load_model

BAGS = """
title = "two bags and an interaction"
sources = ["made for this test"]
trainable = true
input = [6]
layers = [
  { type = "embedding_bag", name = "t", dim = 3, pooling = 2, tables = [5, 7] },
  { type = "interaction", dim = 3 },
]
"""


@pytest.fixture
def bags(tmp_path: Path) -> Path:
    path = tmp_path / "bags.toml"
    path.write_text(BAGS)
    return path


def test_bags_and_interaction_are_their_formulas(bags: Path):
    """The last 4 of 6 inputs are 2 rows of each table."""
    network = build_network(bags, 0, np.float64)
    x, _ = network.random_batch(70, np.random.default_rng(1))  # more than a chunk
    tables = network.views(network.initial_params)
    ids = x[:, 2:].astype(int)
    first, second = tables["t.table0"][ids[:, :2]].sum(axis=1), tables["t.table1"][ids[:, 2:]].sum(axis=1)
    expected = np.concatenate([first, (first * second).sum(axis=1, keepdims=True)], axis=1)
    np.testing.assert_allclose(network.predict(network.initial_params, x), expected, rtol=1e-12)


def test_gradients_of_pooled_rows_are_central_differences(bags: Path):
    network = build_network(bags, 0, np.float64, "mean_squared_error")
    rng = np.random.default_rng(2)
    x, _ = network.random_batch(9, rng)
    targets, params = rng.normal(size=(9, 4)), rng.normal(size=network.n_params)
    _, gradient = network.loss_and_gradient(params, x, targets)
    steps = 1e-6 * np.eye(network.n_params)
    ends = [[network.loss_and_gradient(params + sign * h, x, targets)[0] for sign in (1, -1)] for h in steps]
    np.testing.assert_allclose(gradient, [(a - b) / 2e-6 for a, b in ends], atol=1e-7)


def test_tables_start_within_the_root_of_their_rows():
    network = build_network("clicks-dlrm", 0)
    table = network.views(network.initial_params)["branch2.tables.table0"]
    assert table.shape == (60, 8)
    assert 0.9 / np.sqrt(60) < np.abs(table).max() <= 1.0 / np.sqrt(60)
    # by hand: bottom 80 + 136, tables 141 x 8, above them 29 x 32 + 32 and 66
    assert network.n_params == load_model("clicks-dlrm").n_params == 216 + 1128 + 960 + 66


@pytest.mark.parametrize(
    ("inputs", "text"),
    [("[3]", "it looks up 4 ids, but its input, which must end with them,"), ("[2, 4]", "it looks up 4 ids")],
)
def test_inputs_without_ids_are_refused(tmp_path: Path, inputs: str, text: str):
    path = tmp_path / "net.toml"
    path.write_text(BAGS.replace("[6]", inputs))
    with pytest.raises(ConfigError, match=text):
        build_network(path, 0)


def test_ids_beyond_a_table_are_refused(bags: Path):
    network = build_network(bags, 0)
    with pytest.raises(ConfigError, match="layer 't': 5 is not an id; samples must be integers from 0 to 4"):
        network.predict(network.initial_params, np.array([[0, 0, 5, 0, 0, 0]]))


def test_clicks_are_drawn_from_their_seed():
    data, again, other = clicks(500, 1), clicks(500, 1), clicks(500, 2)
    np.testing.assert_array_equal(data.x, again.x)
    np.testing.assert_array_equal(data.labels, again.labels)
    assert (data.x != other.x).any()
    assert 0.4 < data.labels.mean() < 0.6
    assert load_data("clicks").sample_shape == load_model("clicks-dlrm").input_shape
    assert (data.x[:, 4:] == np.floor(data.x[:, 4:])).all()
    assert data.x[:, 4:].max(axis=0).tolist() == [59, 39, 19, 11, 5, 2]


def test_compressed_gradients_of_tables_are_refused():
    with pytest.raises(ConfigError, match=r"do not exchange the gradients of branch2.tables of clicks-dlrm"):
        ddlsim.simulate("office-1gbe", "clicks-dlrm", workers=2, batch_size=8, compression=ddlsim.FP16(),
                        training=ddlsim.Training("clicks", updates=3))  # fmt: skip
