"""Layers that a user has written: in model files, in networks, and what is said of those that are wrong."""

from dataclasses import dataclass

import numpy as np
import pytest

import ddlsim
from ddlsim.nn import Cost, streaming
from ddlsim.nn.network import build_network
from ddlsim.testing import check_layer

FILE = """
title = "own"
trainable = true
input = [1, 8, 8]
layers = [
    { type = "conv", channels = 4, kernel = 3 }, { type = "scale", by = 2.0 }, { type = "relu" }, { type = "flatten" },
    { type = "dense", units = 10 },
]
"""


@dataclass(frozen=True)
class Scale:
    """y = by w x, with a number w per channel: the affine half of batch normalisation."""

    by: float = 1.0

    def cost(self, in_shape):
        return streaming(in_shape, in_shape, (("weight", in_shape[0]),))

    def init(self, in_shape, rng):
        return {"weight": rng.uniform(0.5, 1.5, in_shape[0])}

    def forward(self, x, params):
        return self.by * self._wide(params, x) * x, x

    def backward(self, dy, kept, params):
        weight = self.by * (dy * kept).reshape(*dy.shape[:2], -1).sum(axis=(0, 2))
        return self.by * self._wide(params, dy) * dy, {"weight": weight}

    def _wide(self, params, x):
        return params["weight"].reshape(-1, *[1] * (x.ndim - 2))


def load(tmp_path, text=FILE, **options):
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    return ddlsim.load_model(path, **options)


def test_its_gradient_in_a_network_is_that_of_differences(tmp_path):
    network = build_network(load(tmp_path, layers={"scale": Scale}), 1, np.float64)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(18, 1, 8, 8)), rng.integers(0, 10, 18)
    params = network.initial_params + 0.1 * rng.normal(size=network.n_params)
    _, gradient = network.loss_and_gradient(params, x, labels)
    for slot in network.slots:
        direction = np.zeros(network.n_params)
        slot.flat(direction)[:] = rng.normal(size=slot.stop - slot.start)
        ends = [network.loss_and_gradient(params + sign * 1e-6 * direction, x, labels)[0] for sign in (1, -1)]
        assert gradient @ direction == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-5), slot.name


def test_its_tensors_start_as_it_says_by_the_seed(tmp_path):
    model = load(tmp_path, layers={"scale": Scale})
    first, again, other = (build_network(model, seed) for seed in (1, 1, 2))
    weight = first.views(first.initial_params)["Scale1.weight"]
    assert ((weight >= 0.5) & (weight <= 1.5)).all()
    assert first.initial_params.tobytes() == again.initial_params.tobytes()
    assert not np.array_equal(weight, other.views(other.initial_params)["Scale1.weight"])
    assert model.layers[1].n_params == 4


def test_a_bundled_type_is_not_replaced(tmp_path):
    model = load(tmp_path, layers={"scale": Scale, "relu": Scale})
    assert model.layers[2].type == "relu"


class NoDataclass:
    def cost(self, in_shape):
        return Cost(in_shape)


@dataclass(frozen=True)
class TimedOnly:
    by: float = 1.0

    def cost(self, in_shape):
        return Cost(in_shape)


@dataclass(frozen=True)
class Narrow(Scale):
    def cost(self, in_shape):
        if len(in_shape) != 1:
            raise ddlsim.ConfigError(f"needs (features,) but gets {in_shape}")
        return super().cost(in_shape)


@dataclass(frozen=True)
class Lying(Scale):
    def init(self, in_shape, rng):
        return {"weights": np.ones(in_shape[0])}


@pytest.mark.parametrize(
    ("text", "layer", "said"),
    [
        (FILE, NoDataclass, r"load_model: layers\['scale'\] is .* must be a frozen dataclass with a method cost"),
        (FILE.replace("by =", "bye ="), Scale, r"layers\[1\] \(Scale 'Scale1'\): unknown key 'bye'; did you mean 'by'"),
        (FILE.replace("2.0", "true"), Scale, r"layers\[1\] .*by = true: must be a valid number"),
        (FILE.replace('"scale"', '"scales"'), Scale, "unknown layer type 'scales'; did you mean 'scale'"),
        (FILE, Narrow, r"layers\[1\]: Narrow 'Narrow1': needs \(features,\) but gets \(4, 6, 6\)"),
        (FILE.replace('"scale"', '"os:abort"'), Scale, r"layers\[1\]: type = 'os:abort' would import code; if you"),
    ],
)
def test_what_is_wrong_in_a_file(text, layer, said, tmp_path):
    with pytest.raises(ddlsim.ConfigError, match=said):
        load(tmp_path, text, layers={"scale": layer})


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (TimedOnly, "layer 'TimedOnly1' cannot be trained: .* no gradients .no methods forward and"),
        (Lying, "init makes {'weights': 4} elements, cost says {'weight': 4}"),
    ],
)
def test_what_cannot_be_trained(layer, said, tmp_path):
    model = load(tmp_path, layers={"scale": layer})
    assert ddlsim.simulate("office-1gbe", model, batch_size=4, steps=1).step_time > 0.0
    with pytest.raises(ddlsim.ConfigError, match=said):
        build_network(model, 1)


@dataclass(frozen=True)
class Wrong(Scale):
    """A layer with one mistake."""

    what: str = ""

    def forward(self, x, params):
        out, kept = super().forward(x, params)
        if self.what == "shape":
            return out[:, :1], kept
        if self.what == "in place":
            params["weight"] *= 1.0001
        return (out - out.mean(axis=0), kept) if self.what == "batch" else (out, kept)

    def backward(self, dy, kept, params):
        dx, gradients = super().backward(dy, kept, params)
        if self.what == "gradient":
            return 1.001 * dx, gradients
        if self.what == "name":
            return dx, {"w": gradients["weight"]}
        return dx, ({} if self.what == "missing" else gradients)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", r"forward gives \(3, 1, 5\); cost says \(3, 4, 5\) for 3 samples"),
        ("batch", "a sample's output depends on the others"),
        ("gradient", "the gradient of 'x' is .* differences say"),
        ("name", "backward gives the gradient of 'w', which is no tensor of it"),
        ("missing", r"backward gives gradients of \[\], not of \['weight'\]"),
        ("in place", "changes its input or its tensors in place"),
    ],
)
def test_the_check_tells_what_is_wrong(what, said):
    check_layer(Wrong(1.5), (4, 5))
    with pytest.raises(ddlsim.ConfigError, match=said):
        check_layer(Wrong(1.5, what), (4, 5))


@pytest.mark.parametrize("what", ["shape", "name"])
def test_a_run_tells_shapes_and_names_that_are_wrong(what, tmp_path):
    text = FILE.replace("by = 2.0", f"by = 2.0, what = '{what}'")
    network = build_network(load(tmp_path, text, layers={"scale": Wrong}), 1)
    with pytest.raises(ddlsim.ConfigError, match=r"layer 'Wrong1': (forward|backward) returned"):
        network.loss_and_gradient(network.initial_params, np.zeros((2, 1, 8, 8)), np.zeros(2, int))
