"""Embedding tables: who holds them, and what runs leave out is said."""

import pytest

import ddlsim
from ddlsim.cluster import MultiGpu, star
from ddlsim.workload.memory import held_params, memory_of
from ddlsim.workload.model import load_model
from ddlsim.workload.table_placement import table_exchange_nbytes

RECOMMENDER = """
title = "two features of 8 numbers from five tables"
sources = ["made for this test"]
trainable = false
input = [4]
layers = [
  { type = "concat", branches = [
    [{ type = "dense", units = 8 }],
    [{ type = "embedding_bag", dim = 8, tables = [1000, 700, 600, 500, 400] }],
  ] },
  { type = "dense", units = 1 },
]
"""
DENSE = 4 * 8 + 8 + 6 * 8 + 1


@pytest.fixture
def recommender(tmp_path):
    path = tmp_path / "recommender.toml"
    path.write_text(RECOMMENDER)
    return path


@pytest.mark.parametrize(
    ("n_workers", "rows"),
    [(1, 3200), (2, 1700), (3, 1100), (4, 1000), (9, 1000)],
)
def test_tables_are_shared_out_whole(recommender, n_workers, rows):
    """The largest first, to whom holds least: 1000 + 500 | 700 + 600 + 400; 1000 | 700 + 400 | 600 + 500; ..."""
    model = load_model(recommender)
    assert held_params(model, n_workers) == DENSE + 8 * rows
    kept = 4.0 * sum(layer.stored_nbytes for layer in model.layers) / 4.0
    assert memory_of(model, 16, n_workers=n_workers).total == 12 * (DENSE + 8 * rows) + 16 * kept


def test_the_rows_that_others_hold_are_exchanged(recommender):
    """A batch of 16 needs 16 * 5 * 8 numbers, and of four workers three hold 3/4 of them."""
    model = load_model(recommender)
    assert table_exchange_nbytes(model, 16, 4) == 4 * 16 * 40 * 3 / 4
    assert table_exchange_nbytes(model, 16, 4, "fp16") == 2 * 16 * 40 * 3 / 4
    assert table_exchange_nbytes(model, 16, 1) == 0.0
    assert table_exchange_nbytes(load_model("bert-base"), 16, 4) == 0.0


def test_a_run_says_that_the_exchange_of_tables_is_left_out(recommender):
    """4 micro-steps of 1000 samples each: 4 * 4 * 1000 * 40 * 3/4 = 0.48 MB, each way."""
    result = ddlsim.simulate("office-1gbe", recommender, batch_size=1000, workers=4, accumulation=4, steps=2)
    assert result.warnings == (
        "recommender: the all-to-all of branch2.embedding_bag1 is not simulated, so steps are too short. With the 5 "
        "tables distributed over 4 workers, each worker would send about 480 kB of looked-up vectors in the forward "
        "pass of a step and as many bytes of gradients in the backward pass, in addition to the 356 B of "
        "gradients that are simulated",
    )
    assert "warning       recommender: the all-to-all of branch2.embedding_bag1 is not simulated" in str(result)
    assert result.to_dict()["warnings"] == list(result.warnings)


def test_nothing_is_said_where_nothing_is_left_out(recommender):
    assert ddlsim.simulate("office-1gbe", recommender, workers=1, steps=2).warnings == ()
    assert ddlsim.simulate("office-1gbe", "bert-base", batch_size=1, workers=2, steps=1, warmup=0).warnings == ()


def test_dlrm_fits_where_its_tables_are_shared_out():
    """540 million parameters, all but 0.5 million in tables, are 6.5 GB with gradient and momentum, and 1.2 million
    samples 11.6 GB: too much for the 17.2 GB of one device, not for four, which hold 10.1 million rows at most."""
    cluster = star(4, bandwidth="10 Gbit/s", latency="10 us", host=MultiGpu(n_gpus=1, device="p100"))

    def warnings(workers):
        return ddlsim.simulate(cluster, "dlrm", batch_size=1_200_000, workers=workers, steps=1, warmup=0).warnings

    (alone,) = warnings(1)
    assert "needs about 18.1 GB, but p100 has 17.2 GB" in alone
    (together,) = warnings(4)
    assert "is not simulated" in together
    largest = int(alone.rsplit(" ", 1)[1])
    assert memory_of(load_model("dlrm"), largest).total <= 16 * 2**30 < memory_of(load_model("dlrm"), largest + 1).total


def test_a_memory_warning_says_that_tables_are_shared_out():
    cluster = star(2, bandwidth="10 Gbit/s", latency="10 us", host=MultiGpu(n_gpus=1, device="p100"))
    too_much = ddlsim.simulate(cluster, "dlrm", batch_size=2 * 10**6, steps=1, warmup=0).warnings[0]
    assert "needs about 22.7 GB with its embedding tables distributed over 2 workers, but p100 has 17.2 GB" in too_much
