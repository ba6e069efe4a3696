"""Networks as wholes: they learn, never touch what they are given, and say what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddlsim.data import BatchStream, DataSet, load_digits, shapes, split
from ddlsim.errors import ConfigError
from ddlsim.nn.layers import Conv2d
from ddlsim.nn.map_kernels import LANES, WIDTH, plane_size
from ddlsim.nn.network import Network, build_network
from ddlsim.optim import Adam, Momentum, Optimizer
from ddlsim.workload.model import load_model, model_names
from ddlsim.workload.model_build import find_model_file

SMALL_RESNET = """
title = "two residual blocks"
trainable = true
input = [1, 8, 8]
layers = [
  { type = "conv", channels = 8, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }, { type = "relu" },
  { type = "residual", body = [
    { type = "conv", channels = 8, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }] },
  { type = "relu" },
  { type = "residual", body = [
    { type = "conv", channels = 16, kernel = 3, padding = 1, stride = 2 }], shortcut = [
    { type = "conv", channels = 16, kernel = 1, stride = 2 }] },
  { type = "relu" }, { type = "dropout", rate = 0.1 }, { type = "adaptive_avg_pool", size = 1 },
  { type = "flatten" }, { type = "dense", units = 10 },
]
"""


def train(network: Network, data: DataSet, rule: Optimizer, rate: float, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
    params, state = network.initial_params, network.initial_state.copy()
    memory, batches, rng = rule.init(params), BatchStream(np.arange(data.n_samples), 0), np.random.default_rng(0)
    for step in range(n_steps):
        chosen = batches.batch(step, 32)
        _, gradient = network.loss_and_gradient(params, data.x[chosen], data.labels[chosen], rng, state)
        params, memory = rule.update(params, gradient, memory, rate)
    return params, state


def accuracy(network: Network, params: np.ndarray, state: np.ndarray, data: DataSet) -> float:
    outputs = network.predict(params, data.x, state if len(state) else None)
    return float((outputs.argmax(axis=1) == data.labels).mean())


def test_digits_are_learned_in_ten_passes():
    train_set, held_out = split(load_digits(), 0.2, seed=0)
    network = build_network("digits-cnn", seed=0)
    params, state = train(network, train_set, Momentum(0.9), 0.05, n_steps=450)
    assert accuracy(network, params, state, held_out) > 0.95


def test_a_residual_network_with_batch_norm_and_dropout_learns(tmp_path: Path):
    (tmp_path / "net.toml").write_text(SMALL_RESNET)
    train_set, held_out = split(load_digits(), 0.2, seed=0)
    network = build_network(tmp_path / "net.toml", seed=0)
    params, state = train(network, train_set, Adam(), 0.01, n_steps=400)
    assert accuracy(network, params, state, held_out) > 0.95


@pytest.mark.slow
def test_the_two_synthetic_classes_are_learned():
    train_set, held_out = split(shapes(1000, 32, difficulty=0.1), 200, seed=0)
    network = build_network("cifar-cnn", seed=0)
    params, state = train(network, train_set, Adam(), 0.001, n_steps=150)
    assert accuracy(network, params, state, held_out) > 0.85  # guessing gives 0.5


def test_random_labels_are_memorized_by_lenet5():
    """A network that fits noise has working gradients in every layer; the loss falls far below log 10."""
    rng = np.random.default_rng(0)
    data = DataSet("noise", rng.random((64, 1, 28, 28), np.float32), rng.integers(0, 10, 64), tuple("0123456789"))
    network = build_network("lenet5", seed=0)
    params, _ = train(network, data, Adam(), 0.002, n_steps=200)
    assert network.loss_and_gradient(params, data.x, data.labels)[0] < 0.2


def test_trainable_models_build_with_the_tensors_of_their_files():
    files = {name: find_model_file(name, name, ())[0].read_text(encoding="utf-8") for name in model_names()}
    models = [load_model(name) for name, text in files.items() if "trainable = true" in text]
    small = [model for model in models if model.trainable and model.n_params < 12_000_000]
    assert len(small) > 5
    for model in small:
        network = build_network(model, seed=0)
        assert network.n_params == model.n_params, model.name
        sizes = {f"{layer.name}.{tensor}": n for layer in model.layers for tensor, n in layer.tensors}
        assert {name: view.size for name, view in network.views(network.initial_params).items()} == sizes, model.name


@pytest.mark.slow
def test_resnet18_on_32_x_32_takes_a_step_downhill():
    network = build_network("resnet18-cifar", seed=0)
    data = shapes(4, 32)
    params = network.initial_params
    loss, gradient = network.loss_and_gradient(params, data.x, data.labels)
    new, _ = network.loss_and_gradient(params - 0.01 * gradient, data.x, data.labels)
    assert new < loss


def test_nothing_given_is_changed_and_repeats_are_bit_identical():
    network = build_network("digits-cnn", seed=0)
    digits = load_digits()
    params, x, labels = network.initial_params.copy(), digits.x[:40].copy(), digits.labels[:40].copy()
    kept = params.copy(), x.copy(), labels.copy()
    first = network.loss_and_gradient(params, x, labels)
    network.predict(params, x)
    for array, before in zip((params, x, labels), kept, strict=True):
        np.testing.assert_array_equal(array, before)
        array.setflags(write=False)
    snapshot = first[1].copy()
    again = network.loss_and_gradient(params, x, labels)
    network.loss_and_gradient(params * 2, x, labels)
    np.testing.assert_array_equal(first[1], snapshot)  # a later call leaves an earlier result alone
    np.testing.assert_array_equal(again[1], snapshot)
    assert first[0] == again[0]


def test_initial_parameters_follow_he_and_glorot_and_their_seed():
    """cifar-cnn: ReLU after all but the last layer. He: variance 2 / fan_in; Glorot: 2 / (fan_in + fan_out)."""
    network = build_network("cifar-cnn", seed=1)
    views = network.views(network.initial_params)
    assert views["conv2.weight"].var() == pytest.approx(2 / (32 * 9), rel=0.05)
    assert views["dense1.weight"].var() == pytest.approx(2 / 1024, rel=0.05)
    assert views["dense2.weight"].var() == pytest.approx(2 / (64 + 10), rel=0.15)
    assert abs(views["dense2.weight"]).max() <= np.sqrt(6 / 74)
    assert not views["conv1.bias"].any()
    np.testing.assert_array_equal(build_network("cifar-cnn", 1).initial_params, network.initial_params)
    assert not np.array_equal(build_network("cifar-cnn", 2).initial_params, network.initial_params)
    assert build_network("lenet5", 0).initial_params.dtype == np.float32


def test_running_statistics_by_hand(tmp_path: Path):
    """Momentum 0.1. Channel 0 holds 1, 2, 3, 6 in two samples: mean 3, variance with 3 below it (4 + 1 + 0 + 9) / 3.
    Channel 1 holds 5 everywhere. They begin at 0 and 1, so they become 0.3 and 0.9 + 1.4 / 3, 0.5 and 0.9. Predictions
    use them: with all of the dense layer's weights 1, an input of ones gives the sum of 2 pixels of each channel."""
    layers = '{ type = "batch_norm" }, { type = "flatten" }, { type = "dense", units = 2 }'
    (tmp_path / "net.toml").write_text(f'title = "t"\ntrainable = true\ninput = [2, 1, 2]\nlayers = [{layers}]\n')
    network = build_network(tmp_path / "net.toml", 0, np.float64)
    x = np.array([[[[1.0, 2.0]], [[5.0, 5.0]]], [[[3.0, 6.0]], [[5.0, 5.0]]]])
    params, state = network.initial_params.copy(), network.initial_state.copy()
    network.loss_and_gradient(params, x, np.array([0, 1]), None, state)
    np.testing.assert_allclose(state, [0.3, 0.5, 0.9 + 0.1 * 14 / 3, 0.9], rtol=1e-12)
    dense = {name: view for name, view in network.views(params).items() if view.shape == (2, 4)}
    for view in dense.values():
        view[...] = 1.0
    ones = 2 * (1 - 0.3) / math.sqrt(state[2] + 1e-5) + 2 * (1 - 0.5) / math.sqrt(state[3] + 1e-5)
    assert network.predict(params, np.ones((1, 2, 1, 2)), state)[0] == pytest.approx([ones, ones], rel=1e-9)


def test_dropout_needs_a_stream_and_leaves_predictions_alone(tmp_path: Path):
    (tmp_path / "net.toml").write_text(SMALL_RESNET)
    network = build_network(tmp_path / "net.toml", seed=0)
    x, labels = load_digits().x[:8], load_digits().labels[:8]
    with pytest.raises(ConfigError, match="rng = None"):
        network.loss_and_gradient(network.initial_params, x, labels)
    with pytest.raises(ConfigError, match="state = None"):
        network.predict(network.initial_params, x)
    losses = {
        network.loss_and_gradient(network.initial_params, x, labels, np.random.default_rng(seed))[0]
        for seed in (0, 0, 1)
    }
    assert len(losses) == 2
    outputs = [network.predict(network.initial_params, x, network.initial_state) for _ in range(2)]
    np.testing.assert_array_equal(*outputs)


def test_a_diverged_network_reports_nan():
    network = build_network("digits-cnn", seed=0)
    digits = load_digits()
    loss, _ = network.loss_and_gradient(np.full(network.n_params, np.nan, np.float32), digits.x[:4], digits.labels[:4])
    assert np.isnan(loss)


def test_bad_input_is_named():
    network = build_network("digits-cnn", seed=0)
    params, x, labels = network.initial_params, load_digits().x[:4], load_digits().labels[:4]
    for arguments, words in (
        ((params[1:], x, labels), r"params of shape \(1897,\)"),
        ((params.astype(float), x, labels), "type float64"),
        ((params, x[:, :, :5], labels), r"samples of shape \(4, 1, 5, 8\).*expected \(n, 1, 8, 8\)"),
        ((params, x[:0], labels[:0]), "n at least 1"),
        ((params, x, labels[:2]), "do not match 4 samples"),
        ((params, x, labels + 8), "label 1[0-7] is not one of the network's classes, 0 to 9"),
        ((params, x, labels.astype(float)), "integer labels"),
    ):
        with pytest.raises(ConfigError, match=words):
            network.loss_and_gradient(*arguments)
    with pytest.raises(ConfigError, match="float32 or float64"):
        build_network("digits-cnn", 0, np.float16)
    with pytest.raises(ConfigError, match="did you mean 'cross_entropy'"):
        build_network("digits-cnn", 0, loss="crossentropy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'dlrm'.*cannot be trained"):
        build_network(replace(load_model("dlrm")), 0)
    with pytest.raises(ConfigError, match=r"'amoebanet-d'.*layer 'stem2.*slice1' cannot be trained"):
        build_network("amoebanet-d", 0)
    with pytest.raises(ConfigError, match="auxiliary heads with their own loss"):
        build_network("googlenet+aux", 0)


def test_one_step_by_hand(tmp_path: Path):
    """w = (1, 2), x = (3, -1), t = 0: y = 1, loss 1, gradient 2 (y - t) x = (6, -2)."""
    (tmp_path / "net.toml").write_text(
        'title = "one unit"\ntrainable = true\ninput = [2]\nlayers = [{ type = "dense", units = 1, bias = false }]\n'
    )
    network = build_network(tmp_path / "net.toml", 0, loss="mean_squared_error")
    loss, gradient = network.loss_and_gradient(np.array([1, 2], np.float32), [[3, -1]], [[0]])
    assert loss == 1.0
    assert gradient.tolist() == [6.0, -2.0]


@pytest.mark.parametrize("key", ["kv_heads = 2", "rotary = true", "bias = false"])
def test_attention_of_other_kinds_is_refused(tmp_path, key: str):
    path = tmp_path / "mine.toml"
    attention = f'{{ type = "attention", heads = 4, {key} }}'
    layers = f'[{{ type = "embedding", vocabulary = 5, dim = 8 }}, {attention}]'
    path.write_text(f'title = "Mine"\ninput = [4]\ntrainable = true\nlayers = {layers}\n')
    with pytest.raises(ConfigError, match=f"attention with {key.split()[0]} set has a cost but no gradient"):
        build_network(str(path), 0)


@pytest.mark.parametrize("n", [1, 4, 8, 9, 16, 24, 25])
def test_convolutions_compute_no_half_block_that_holds_no_samples(n):
    """Sixteen samples lie side by side in a block: of batches up to 8, and of the last 8 of 24, half is left out."""
    network, rng = build_network("cifar-cnn", 0), np.random.default_rng(0)
    x, labels = network.random_batch(n, rng)
    convolutions = [layer for layer in network._chain.all() if isinstance(layer, Conv2d)]
    loss, gradient = network.loss_and_gradient(network.initial_params, x, labels)
    for layer in convolutions:
        blocks = layer.x.shape[0], layer.channels, -1, LANES
        lanes = layer.buffers.get("out", layer.x.shape[0], layer.channels * plane_size(layer.out_space)).reshape(blocks)
        computed = np.abs(lanes[-1]).reshape(-1, LANES).sum(axis=0) > 0.0
        held = (n - 1) % LANES + 1
        assert computed[:held].all()
        assert computed[WIDTH:].any() == (held > WIDTH)
    each = [network.loss_and_gradient(network.initial_params, x[i : i + 1], labels[i : i + 1]) for i in range(n)]
    assert loss == pytest.approx(sum(one for one, _ in each) / n, rel=1e-5)
    assert np.allclose(gradient, sum(one for _, one in each) / n, rtol=1e-3, atol=1e-6)
