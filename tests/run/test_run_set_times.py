"""A compute time set by the user stays what it is when a model is split, and no run is faster than its computing."""

import dataclasses

import pytest

import ddlsim
from ddlsim import Affine, ConservationError, Measured, simulate
from ddlsim.cluster import star

FAST = star(4, bandwidth="1 TB/s", latency="1 ns")
DENSE = """title = "one dense layer of 4 MB"
input = [1000]
layers = [{type = "dense", units = 1000, bias = false}]
"""
TABLES = """title = "tables"
input = [4]
layers = [
  {type = "embedding_bag", tables = [1000, 1000, 1000, 1000], dim = 64, pooling = 1},
  {type = "dense", units = 1, bias = false},
]
"""


def model(tmp_path, text):
    path = tmp_path / "model.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("compute", [Affine("0 s", "1.25 ms"), Measured("10 ms", 8)])
@pytest.mark.parametrize("groups", ["balance", {"dense1": 1}, {"dense1": 2}])
def test_hybrid_keeps_the_time(tmp_path, compute, groups):
    """8 samples for each of 4 workers take 10 ms, however the layer is split (2.98 ms by the roofline's ratio)."""
    result = simulate(FAST, model(tmp_path, DENSE), ddlsim.Hybrid(groups), 32, device="v100", compute=compute)
    assert result.step_time == pytest.approx(10e-3, rel=1e-2)
    assert result.efficiency <= 1.0
    assert not [note for note in result.notes if "above 100 %" in note]


@pytest.mark.parametrize("sharding", ["table-wise", "row-wise", "column-wise"])
def test_embedding_parallel_keeps_the_time(tmp_path, sharding):
    """16 samples take 1 ms on each of 4 workers, however the tables are sharded."""
    strategy = ddlsim.EmbeddingParallel(sharding, overlap="none", indices="local")
    compute = Affine("0 s", "62.5 us")
    result = simulate(FAST, model(tmp_path, TABLES), strategy, 64, device="v100", compute=compute)
    assert result.step_time == pytest.approx(1e-3, rel=1e-3)
    assert result.efficiency <= 1.0


def test_more_than_linear_is_explained(tmp_path):
    """By the roofline, a dense layer split over 4 devices reads a quarter of its weights on each."""
    result = simulate(FAST, model(tmp_path, DENSE), ddlsim.Hybrid({"dense1": 1}), 32, device="v100")
    assert result.efficiency > 1.0
    (note,) = [note for note in result.notes if "above 100 %" in note]
    assert "every worker updates, and in split layers reads, only its part of the weights" in note
    assert "above 100 %" in str(result)


def test_sharded_weights_are_not_called_parts_of_layers():
    """FSDP gathers all weights before they are used: a worker updates a shard and reads everything."""
    result = simulate(FAST, "vgg16", ddlsim.FSDP(), 64, device="v100", optimizer="adam")
    notes = [note for note in result.notes if "above 100 %" in note]
    assert notes
    assert "every worker updates a shard of the weights" in notes[0]
    assert "reads" not in notes[0]


def test_sharded_updates_are_explained():
    result = simulate(FAST, "vgg16", ddlsim.ShardedUpdate(), 1, device="v100", optimizer="adam")
    assert result.efficiency > 1.0
    assert [note for note in result.notes if "above 100 %: every worker updates a shard of the weights" in note]


def test_more_than_linear_without_a_cause_is_an_error():
    """A strategy that counts each update twice as many samples as its workers computed."""

    @dataclasses.dataclass(frozen=True)
    class Doubled(ddlsim.AllReduce):
        def start(self, context):
            for worker in context.workers:
                context.loop.env.process(self.work(worker, context))

        def work(self, worker, context):
            while True:
                yield from worker.gradient()
                if worker.rank == 0:
                    context.stop.updated(2 * 4 * worker.samples_per_step)

    with pytest.raises(ConservationError, match="efficiency 2"):
        simulate(FAST, "lenet5", Doubled(), 32, device="v100")
