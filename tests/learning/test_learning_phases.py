"""Phases of a training run: images, batches and rates of their own, in values and on the clock."""

import dataclasses
import re

import numpy as np
import pytest
from draws import few
from test_learning_conformance import CASES

import ddlsim
from ddlsim import AllReduce, Phase, Training
from ddlsim.data.dataset import resize
from ddlsim.nn.network import build_network
from ddlsim.run.prepare import prepare
from ddlsim.workload.resized import resized

POOLED = """
title = "Small network that pools its images to one pixel"
trainable = true
input = [3, 32, 32]
layers = [
  { type = "conv", channels = 4, kernel = 3, stride = 2, padding = 1 },
  { type = "relu" },
  { type = "residual", body = [{ type = "conv", channels = 4, kernel = 3, padding = 1 }, { type = "relu" }] },
  { type = "concat", branches = [[{ type = "relu" }], [{ type = "max_pool", kernel = 3, stride = 1, padding = 1 }]] },
  { type = "adaptive_avg_pool", size = 1 },
  { type = "flatten" },
  { type = "dense", units = 2 },
]
"""
DATA = ddlsim.shapes(200)
PHASES = (Phase(0.5, 16, 2), Phase(0.5, 24, rate=0.02), Phase(0.5, batch=8))


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "pooled.toml"
    path.write_text(POOLED)
    return ddlsim.load_model(path)


def run(model, strategy, phases=PHASES, *, workers=4, **more):
    training = Training(DATA, phases=phases, evaluate_every=1, held_out=0.2, **more.pop("training", {}))
    return ddlsim.simulate("office-1gbe", model, strategy, 4, workers, training=training, **more)


# ---------------------------------------------------------------- models and images of another size


@pytest.mark.parametrize("size", [64, 96, 288])
@pytest.mark.parametrize("name", ["resnet50", "inception-v3", "googlenet"])
def test_a_resized_model_is_that_of_a_file_with_another_input(name, size, tmp_path):
    """Layer by layer: shapes, operations and bytes."""
    model = ddlsim.load_model(name)
    text = (ddlsim.bundled.bundled_files("models")[name]).read_text()
    own = model.input_shape[-1]
    path = tmp_path / f"{name}.toml"
    path.write_text(text.replace(f"input = [3, {own}, {own}]", f"input = [3, {size}, {size}]", 1))
    try:
        written = ddlsim.load_model(path)
    except ddlsim.ConfigError:  # too small for a kernel
        with pytest.raises(ddlsim.ConfigError, match="input_size"):
            resized(model, size)
        return
    assert resized(model, size).layers == written.layers
    assert resized(model, own) is model


def test_models_that_cannot_be_resized_say_so():
    with pytest.raises(ddlsim.ConfigError, match=r"dense1 of model 'shapes-cnn' would have 4,128 .* instead of 16,416"):
        resized(ddlsim.load_model("shapes-cnn"), 17)
    with pytest.raises(ddlsim.ConfigError, match=r"input_size = 128: applies to images of .*, but the samples of"):
        resized(ddlsim.load_model("bert-base"), 128)


def test_resized_images():
    rng = np.random.default_rng(0)
    images = rng.random((3, 2, 12, 8)).astype(np.float32)
    assert np.allclose(resize(images, 12, 8), images)
    assert np.allclose(resize(np.full_like(images, 7.0), 5, 9), 7.0)
    # halved by hand: triangles that reach two pixels to each side, 1 3 3 1 in eighths, cut off at the border
    line = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8) ** 2
    halved = resize(np.repeat(line, 2, axis=2), 2, 4)[0, 0, 0]
    assert halved[1] == pytest.approx((1 * 1 + 3 * 4 + 3 * 9 + 1 * 16) / 8)
    assert halved[0] == pytest.approx((3 * 0 + 3 * 1 + 1 * 4) / 7)


def test_resized_images_are_pillows():
    image_module = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(1).random((1, 1, 32, 32)).astype(np.float32)
    for size in (14, 20, 45):
        pillow = image_module.fromarray(image[0, 0]).resize((size, size), image_module.Resampling.BILINEAR)
        assert np.allclose(resize(image, size, size)[0, 0], np.asarray(pillow), atol=2e-6)


# ---------------------------------------------------------------- the clock


@pytest.mark.parametrize("strategy", few([
    AllReduce(), AllReduce(overlap="none"), AllReduce(overlap="horovod"), AllReduce(overlap="priority"),
    ddlsim.ParameterServer(), ddlsim.ShardedUpdate(overlap="layer"), ddlsim.LocalSGD(1),
], 3), ids=lambda s: s.label)  # fmt: skip
def test_steps_of_each_phase_take_the_time_of_a_run_of_its_own(strategy, pooled):
    """In the middle of a phase, updates are as far apart as in a run with that model, images and batch alone."""
    result = run(pooled, strategy, (Phase(0.5, 16, 2), Phase(0.5, 24, 4), Phase(0.5, 32, 8)), workers=2)
    times, samples = (np.array(column) for column in zip(*result.recorder.updates, strict=True))
    for size, batch in ((16, 2), (24, 4), (32, 8)):
        data = dataclasses.replace(DATA, x=resize(DATA.x, size, size))
        training = Training(data, updates=6, evaluate_every=100)
        alone = ddlsim.simulate("office-1gbe", resized(pooled, size), strategy, batch, 2, training=training)
        apart = np.diff(times[samples == 2 * batch])
        expected = np.diff([time for time, _ in alone.recorder.updates])
        assert len(apart) > 3
        assert apart[len(apart) // 2] == pytest.approx(expected[-1], rel=1e-9)


#: a model that is split has one plan, so one batch (test_strategies_tables.py)
SPLIT = ddlsim.Parallel | ddlsim.FSDP | ddlsim.Hybrid
WHOLE = [case for case in CASES if not isinstance(case.strategy, SPLIT)]


@pytest.mark.parametrize("case", few(WHOLE, 8), ids=str)
def test_every_strategy_follows_phases(case, pooled):
    """Both batches occur, in their order; the accounts of the run add up, which every run checks."""
    phases = (Phase(1.0, 16, 2), Phase(2.0, 24, 4))
    result = run(pooled, case.strategy, phases, workers=case.n_workers)
    samples = [n for _, n in result.recorder.updates]
    assert max(samples) > min(samples)
    assert result.history["epoch"].iloc[-1] >= 3.0 - 1e-9
    assert np.isfinite(result.history["loss"]).all()


def test_a_measured_step_is_scaled_by_the_roofline(pooled):
    experiment = ddlsim.Experiment(
        "office-1gbe",
        pooled,
        batch_size=4,
        workers=1,
        compute=ddlsim.Measured("40 ms", 4),
        training=Training(DATA, phases=(Phase(1, 16), Phase(1, 32), Phase(1, 24, compute=ddlsim.Measured("9 ms", 4)))),
    )
    regimes = prepare(experiment).regimes
    passes = [regimes.stages[4, i][0].workload for i in range(3)]
    roofline = ddlsim.Roofline()
    by = [
        prepare(ddlsim.Experiment("office-1gbe", resized(pooled, size), batch_size=4, compute=roofline, workers=1))
        for size in (16, 32)
    ]
    small, large = (each.workloads[0].forward_time + each.workloads[0].backward_time for each in by)
    assert [each.step_time for each in passes] == pytest.approx([0.04 * small / large, 0.04, 0.009], rel=1e-12)
    assert "times" in passes[0].basis


def test_what_does_not_fit_a_phase_is_told_before_the_run(pooled):
    with pytest.raises(ddlsim.ConfigError, match="measured with batch_size = 4, not 2"):
        run(pooled, AllReduce(), compute=ddlsim.Measured("1 ms", 4))
    with pytest.raises(ddlsim.ConfigError, match="growing_batch cannot be combined with phases"):
        Training(phases=(Phase(1),), growing_batch=ddlsim.GrowingBatch(8, (1.0,)))
    with pytest.raises(ddlsim.ConfigError, match=r"epochs = 0"):
        Phase(0)
    with pytest.raises(ddlsim.ConfigError, match=re.escape("would have")):
        ddlsim.simulate("office-1gbe", "shapes-cnn", training=Training("shapes", phases=(Phase(1, 16),)))


@pytest.mark.slow
def test_memory_is_looked_at_for_every_phase():
    phases = (Phase(1, 96, 64), Phase(1, 512, 256))
    experiment = ddlsim.Experiment("dgx1-v100", "resnet50", workers=1, training=Training(
        ddlsim.data.from_arrays(np.zeros((8, 3, 224, 224), np.float32), np.zeros(8, np.int64)), phases=phases
    ))  # fmt: skip
    warnings = prepare(experiment).warnings
    assert len(warnings) == 1
    assert "batch size 256" in warnings[0]


# ---------------------------------------------------------------- values


def test_values_are_those_of_resized_samples(pooled):
    """One worker, plain SGD: w <- w - eta g(resized samples), by hand."""
    phases = (Phase(0.05, 16, 2, 0.1), Phase(0.05, 20, 4, 0.05))
    result = run(pooled, AllReduce(), phases, workers=1)
    experiment = result.experiment
    task = prepare(experiment).task
    params, taken = task.network.initial_params, 0
    for size, batch, rate, updates in ((16, 2, 0.1, 4), (20, 4, 0.05, 2)):
        network = build_network(resized(pooled, size), 0)
        for _ in range(updates):
            indices = task.shards[0].indices(taken, batch)
            taken += batch
            x = resize(task.train.x[indices], size, size)
            _, gradient = network.loss_and_gradient(params, x, task.train.labels[indices])
            params = params - rate * gradient
    assert [n for _, n in result.recorder.updates] == [2] * 4 + [4] * 2
    assert np.array_equal(result.params, params)
    assert result.history["rate"].iloc[1] == 0.1


def test_with_two_models_images_shrink_in_proportion(pooled):
    training = Training(DATA, phases=(Phase(1, 112), Phase(1, 224)), evaluate_every=100)
    experiment = ddlsim.Experiment("dgx1-v100", pooled, time_model="resnet50", training=training, workers=2)
    prepared = prepare(experiment)
    assert [network.model.input_shape for network in prepared.task.networks] == [(3, 16, 16), (3, 32, 32)]
    assert prepared.regimes.stages[32, 0][0].workload.model.input_shape == (3, 112, 112)
    notes = ddlsim.simulate(experiment).notes
    assert any(note.startswith("phase 0: 1 epochs with samples of size 112, batch 32") for note in notes)
    assert any(
        note.startswith("speedup and efficiency are relative to one worker with the same batches") for note in notes
    )


def test_a_run_in_phases_can_be_continued(pooled, tmp_path):
    whole = run(pooled, AllReduce(), training={"optimizer": ddlsim.Momentum(0.9)})
    first = run(pooled, AllReduce(), training={"optimizer": ddlsim.Momentum(0.9), "updates": 25})
    first.save(tmp_path / "run.npz")
    assert ddlsim.resume(tmp_path / "run.npz", whole.experiment).history.equals(whole.history)


def test_phases_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("""
cluster = "office-1gbe"
model = "resnet18"
[training]
epochs = 4
phases = [
  { epochs = 1, input_size = 96, batch = 16, rate = { type = "polynomial", base = 0.4, n_epochs = 1, power = 1 } },
  { epochs = 2.5, rate = 0.1, compute = { type = "affine", c0 = "2 ms", c1 = "1 ms" } },
]
""")
    training = ddlsim.load_experiment(path).training
    assert training.phases == (
        Phase(1.0, 96, 16, ddlsim.Polynomial(0.4, 1.0, 1.0)),
        Phase(2.5, rate=0.1, compute=ddlsim.Affine("2 ms", "1 ms")),
    )
    assert training.last_epoch == 4.0
    rates = [training.schedule.rate(epoch) for epoch in (0.0, 0.5, 1.0, 3.9)]
    assert rates == pytest.approx([0.4, 0.2, 0.1, 0.1])
    path.write_text(path.read_text().replace("input_size = 96", 'input_size = "96"'))
    with pytest.raises(ddlsim.ConfigError, match=r"training\.phases\[0\].*input_size"):
        ddlsim.load_experiment(path)
