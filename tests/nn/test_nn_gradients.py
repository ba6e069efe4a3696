"""Gradients of every layer and of composed models against central differences in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draws import slow

from ddlsim.nn.network import Network, build_network

STEP = 1e-6


def write_model(tmp_path: Path, shape: str, layers: str) -> Path:
    path = tmp_path / "net.toml"
    path.write_text(f'title = "test"\ntrainable = true\ninput = {shape}\nlayers = [{layers}]\n')
    return path


def check_gradient(network: Network, n: int, seed: int = 0) -> None:
    """The gradient along random directions, one per tensor and one for all, equals (f(p + h) - f(p - h)) / 2h."""
    rng = np.random.default_rng(seed)
    x, labels = network.random_batch(n, rng)
    if network.loss != "cross_entropy":
        labels = rng.normal(size=(n, network.n_outputs))
    params = network.initial_params + 0.1 * rng.normal(size=network.n_params)

    def loss(p: np.ndarray) -> float:
        return network.loss_and_gradient(p, x, labels, np.random.default_rng(5))[0]

    _, gradient = network.loss_and_gradient(params, x, labels, np.random.default_rng(5))
    for name, (start, stop) in {slot.name: (slot.start, slot.stop) for slot in network.slots}.items():
        direction = np.zeros(network.n_params)
        direction[start:stop] = rng.normal(size=stop - start)
        direction /= np.linalg.norm(direction)
        slope = (loss(params + STEP * direction) - loss(params - STEP * direction)) / (2 * STEP)
        assert gradient @ direction == pytest.approx(slope, rel=2e-5, abs=2e-8), name


def conv(**keys: object) -> str:
    return "{ type = 'conv', " + ", ".join(f"{key} = {str(value).lower()}" for key, value in keys.items()) + " }"


FLAT = "{ type = 'flatten' }, { type = 'dense', units = 3 }"
POINTS = conv(channels=4, kernel=1)
TANH = "{ type = 'tanh' }"
# the dense layer or convolution in front makes the gradient with respect to the layer's input matter
LAYERS = {
    "dense": ("[5]", f"{{ type = 'dense', units = 7 }}, {TANH}, {{ type = 'dense', units = 3, bias = false }}"),
    "dense on tokens": ("[4, 5]", f"{{ type = 'dense', units = 6 }}, {TANH}, {{ type = 'dense', units = 2 }}, {FLAT}"),
    "conv": ("[2, 5, 7]", f"{conv(channels=5, kernel=3)}, {TANH}, {conv(channels=7, kernel=[2, 3])}, {FLAT}"),
    "conv six": ("[3, 6, 6]", f"{conv(channels=6, kernel=3)}, {TANH}, {conv(channels=12, kernel=3)}, {FLAT}"),
    "stride": ("[2, 8, 7]", f"{conv(channels=4, kernel=3, stride=2, padding=1)}, {TANH}, "
               f"{conv(channels=3, kernel=2, stride=[2, 1], padding=[1, 0], bias=False)}, {FLAT}"),
    "stride above kernel": ("[2, 7, 7]", f"{POINTS}, {conv(channels=3, kernel=2, stride=3)}, {FLAT}"),
    "wide padding": ("[2, 3, 3]", f"{POINTS}, {conv(channels=3, kernel=2, padding=3)}, {FLAT}"),
    "groups": ("[4, 5, 5]", f"{conv(channels=8, kernel=3, padding=1, groups=2)}, {TANH}, "
               f"{conv(channels=8, kernel=3, groups=8)}, {FLAT}"),
    "one dimension": ("[3, 9]", f"{conv(channels=5, kernel=3, stride=2)}, {TANH}, {POINTS}, {FLAT}"),
    "max pool": ("[1, 7, 7]", f"{conv(channels=3, kernel=2)}, {{ type = 'max_pool', kernel = 2 }}, {FLAT}"),
    "max pool overlapping": ("[1, 7, 6]", f"{conv(channels=3, kernel=2)}, "
                             f"{{ type = 'max_pool', kernel = 3, stride = 2, padding = 1, ceil_mode = true }}, {FLAT}"),
    "average pool": ("[1, 6, 6]", f"{conv(channels=3, kernel=2)}, "
                     f"{{ type = 'avg_pool', kernel = 3, stride = 2, padding = 1, ceil_mode = true }}, {FLAT}"),
    "average pool without padding": ("[1, 6, 6]", f"{conv(channels=3, kernel=2)}, {{ type = 'avg_pool', kernel = 3, "
                                     f"stride = 2, padding = 1, count_padding = false }}, {FLAT}"),
    "adaptive": ("[1, 7, 8]", f"{conv(channels=3, kernel=2)}, {{ type = 'adaptive_avg_pool', size = [4, 3] }}, {FLAT}"),
    "global": ("[1, 7, 8]", f"{conv(channels=3, kernel=2)}, {{ type = 'adaptive_avg_pool', size = 1 }}, {FLAT}"),
    "batch norm": ("[2, 4, 5]", f"{conv(channels=3, kernel=2, bias=False)}, {{ type = 'batch_norm' }}, {TANH}, {FLAT}"),
    "batch norm of a vector": ("[6]", f"{{ type = 'dense', units = 5 }}, {{ type = 'batch_norm' }}, {TANH}, {FLAT}"),
    "layer norm": ("[6]", f"{{ type = 'dense', units = 5 }}, {{ type = 'layer_norm' }}, {TANH}, {FLAT}"),
    "layer norm of tokens": ("[3, 4]", f"{{ type = 'dense', units = 5 }}, {{ type = 'layer_norm' }}, {TANH}, {FLAT}"),
    "layer norm of maps": ("[2, 4, 5]", f"{conv(channels=3, kernel=2)}, {{ type = 'layer_norm' }}, "
                           f"{conv(channels=2, kernel=2)}, {FLAT}"),
    "residual first": ("[3, 4, 5]", f"{{ type = 'residual', body = [{conv(channels=3, kernel=3, padding=1)}] }}, "
                       f"{TANH}, {FLAT}"),
    "relu": ("[6]", f"{{ type = 'dense', units = 9 }}, {{ type = 'relu' }}, {FLAT}"),
    "relu after tanh": ("[6]", f"{{ type = 'dense', units = 9 }}, {TANH}, {{ type = 'relu' }}, {FLAT}"),
    "gelu": ("[6]", f"{{ type = 'dense', units = 9 }}, {{ type = 'gelu' }}, {FLAT}"),
    "sigmoid": ("[6]", f"{{ type = 'dense', units = 9 }}, {{ type = 'sigmoid' }}, {FLAT}"),
    "dropout": ("[1, 5, 5]", f"{conv(channels=3, kernel=2)}, {{ type = 'dropout', rate = 0.3 }}, {FLAT}"),
    "identity shortcut": ("[3, 4, 4]", f"{conv(channels=3, kernel=1)}, {{ type = 'residual', body = ["
                          f"{{ type = 'relu' }}, {conv(channels=3, kernel=3, padding=1)}, "
                          f"{{ type = 'relu' }}] }}, {FLAT}"),
    "projected shortcut": ("[3, 4, 4]", f"{{ type = 'residual', body = ["
                           f"{conv(channels=4, kernel=3, stride=2, padding=1)}], "
                           f"shortcut = [{conv(channels=4, kernel=1, stride=2)}] }}, {{ type = 'relu' }}, {FLAT}"),
    "concat": ("[2, 4, 4]", f"{conv(channels=3, kernel=1)}, {{ type = 'concat', branches = [[], "
               f"[{conv(channels=2, kernel=1)}, {{ type = 'relu' }}], "
               f"[{{ type = 'max_pool', kernel = 3, stride = 1, padding = 1 }}]] }}, {FLAT}"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n", [slow(3), 18])  # less than one block of lanes, and more
def test_gradient_equals_central_differences(tmp_path: Path, name: str, n: int):
    shape, layers = LAYERS[name]
    check_gradient(build_network(write_model(tmp_path, shape, layers), 1, np.float64), n)


def test_mean_squared_error(tmp_path: Path):
    path = write_model(
        tmp_path, "[4]", "{ type = 'dense', units = 5 }, { type = 'tanh' }, { type = 'dense', units = 2 }"
    )
    check_gradient(build_network(path, 1, np.float64, "mean_squared_error"), 5)


EMBEDDED = "{ type = 'embedding', vocabulary = 7, positions = 9, types = 2, dim = 6 }"
TOKENS = {
    "embedding": f"{EMBEDDED}, {TANH}",
    "attention": f"{EMBEDDED}, {{ type = 'attention', heads = 3 }}",
    "causal attention": f"{EMBEDDED}, {{ type = 'attention', heads = 2, fused = true, causal = true }}, {TANH}",
    "tied output": f"{EMBEDDED}, {TANH}, {{ type = 'tied_dense', units = 7 }}",
    "first tokens": f"{EMBEDDED}, {TANH}, {{ type = 'take', count = 2 }}",
    "one class a sample": f"{EMBEDDED}, {{ type = 'attention', heads = 1 }}, {FLAT}",
}


@pytest.mark.parametrize("name", TOKENS)
def test_layers_of_tokens(tmp_path: Path, name: str):
    check_gradient(build_network(write_model(tmp_path, "[5]", TOKENS[name]), 1, np.float64), 4)


@pytest.mark.parametrize("name", ["lenet5", "digits-cnn", slow("char-transformer"), "clicks-dlrm"])
def test_bundled_models(name: str):
    check_gradient(build_network(name, 1, np.float64), 5)


def test_several_chunks_add_up_to_the_whole():
    """The batch's gradient is the mean of its halves', also where they pass in pieces of another size."""
    network = build_network("digits-cnn", 1, np.float64)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(150, 1, 8, 8)), rng.integers(0, 10, 150)
    loss, gradient = network.loss_and_gradient(network.initial_params, x, labels)
    parts = [
        network.loss_and_gradient(network.initial_params, x[half], labels[half])
        for half in (slice(0, 75), slice(75, 150))
    ]
    assert loss == pytest.approx(np.mean([part[0] for part in parts]), rel=1e-12)
    np.testing.assert_allclose(gradient, (parts[0][1] + parts[1][1]) / 2, rtol=1e-9, atol=1e-12)
