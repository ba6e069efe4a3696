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
        (FILE, NoDataclass, r"load_model: layers\['scale'\] is .* must be a frozen dataclass with a cost"),
        (FILE.replace("by =", "bye ="), Scale, r"layers\[1\] \(Scale 'Scale1'\): unknown key 'bye'; did you mean 'by'"),
        (FILE.replace("2.0", "true"), Scale, r"layers\[1\] .*by = True: must be a finite number"),
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
        (TimedOnly, "layer 'TimedOnly1' cannot be trained: .* no gradient .no methods forward and"),
        (Lying, "init returns {'weights': 4} elements, but cost declares {'weight': 4}"),
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
        ("shape", r"for 3 samples, forward returns \(3, 1, 5\), but cost declares \(3, 4, 5\)"),
        ("batch", "the output for a sample depends on the other samples"),
        ("gradient", "the gradient of 'x' is .* finite differences give"),
        ("name", "backward returns a gradient of 'w', which is not a tensor of the layer"),
        ("missing", r"backward returns gradients of \[\], not of \['weight'\]"),
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


# ---------------------------------------------------------------- train, buffers, rng


@dataclass(frozen=True)
class Normed:
    """Batch normalisation of (channels, height, width), as torch.nn.BatchNorm2d without an affine half."""

    eps: float = 1e-5
    momentum: float = 0.1

    def cost(self, in_shape):
        return streaming(in_shape, in_shape, ())

    def buffers(self, in_shape):
        return {"running_mean": np.zeros(in_shape[0]), "running_var": np.ones(in_shape[0])}

    def forward(self, x, params, *, train, buffers):
        if not train:
            mean, variance = (buffers[name][:, None, None] for name in ("running_mean", "running_var"))
            return (x - mean) / np.sqrt(variance + self.eps), None
        mean, variance = x.mean(axis=(0, 2, 3), keepdims=True), x.var(axis=(0, 2, 3), keepdims=True)
        inverse, count = 1.0 / np.sqrt(variance + self.eps), x.size // x.shape[1]
        batch = {"running_mean": mean.ravel(), "running_var": variance.ravel() * count / (count - 1)}
        return (x - mean) * inverse, ((x - mean) * inverse, inverse), batch

    def backward(self, dy, kept, params):
        unit, inverse = kept
        middle, along = (each.mean(axis=(0, 2, 3), keepdims=True) for each in (dy, dy * unit))
        return inverse * (dy - middle - unit * along), {}


@dataclass(frozen=True)
class Drops:
    """Dropout."""

    rate: float = 0.5

    def cost(self, in_shape):
        return streaming(in_shape, in_shape, ())

    def forward(self, x, params, rng, train):
        mask = (rng.random(x.shape) >= self.rate) / (1.0 - self.rate) if train else 1.0
        return x * mask, mask

    def backward(self, dy, kept, params):
        return dy * kept, {}


def normed(name):
    entry = '{ type = "normed" }' if name == "own" else '{ type = "batch_norm" }'
    return FILE.replace('{ type = "scale", by = 2.0 }', entry)


def test_layers_with_buffers_and_randomness_keep_the_rules():
    check_layer(Normed(), (3, 2, 4))
    check_layer(Drops(), (5,))


def test_an_own_batch_norm_is_the_bundled_one(tmp_path):
    """Trains on statistics of batches and is evaluated by running ones, alone and with several workers."""
    models = [load(tmp_path, normed(name), layers={"normed": Normed}) for name in ("own", "bundled")]
    networks = [build_network(model, 1, np.float64) for model in models]
    x, labels = np.random.default_rng(0).normal(1.0, 3.0, (18, 1, 8, 8)), np.arange(18) % 10
    found = []
    for network in networks:
        params, state = network.initial_params.copy(), network.initial_state.copy()
        for name, tensor in network.views(params).items():
            if "batch_norm" not in name:
                tensor[...] = np.random.default_rng(len(name)).normal(size=tensor.shape)
        names = [slot.name for slot in network.slots if "batch_norm" not in slot.name]
        losses = []
        for _ in range(3):
            loss, gradient = network.loss_and_gradient(params, x, labels, state=state)
            losses.append(loss)
        tensors = network.views(gradient)
        found.append((losses, [tensors[name] for name in names], state, network.predict(params, x, state)))
    (losses, gradients, state, outputs), (losses_, gradients_, state_, outputs_) = found
    assert losses == pytest.approx(losses_, rel=1e-12)
    assert all(np.allclose(a, b, rtol=1e-9) for a, b in zip(gradients, gradients_, strict=True))
    assert np.allclose(state, state_, rtol=1e-12)
    assert np.allclose(outputs, outputs_, rtol=1e-9)
    params = networks[0].initial_params
    assert networks[0].predict(params, x[:1], state) == pytest.approx(networks[0].predict(params, x, state)[:1])
    training = ddlsim.Training("digits", rate=1e-9, updates=40, evaluate_every=20)  # all that moves are the statistics
    for strategy in (ddlsim.AllReduce(), ddlsim.AsyncParameterServer()):
        own, bundled = (
            ddlsim.simulate("office-1gbe", model, strategy, 16, 4, training=training, seed=1).history.loss.tolist()
            for model in models
        )
        assert own == pytest.approx(bundled, rel=1e-4)
        assert own[-1] != pytest.approx(own[0], rel=1e-3)


def test_an_own_dropout_drops_while_it_trains_only_with_a_stream_per_layer(tmp_path):
    text = FILE.replace('{ type = "scale", by = 2.0 }', '{ type = "drops" }, { type = "drops", rate = 0.25 }')
    network = build_network(load(tmp_path, text, layers={"drops": Drops}), 1, np.float64)
    x, labels, params = np.ones((8, 1, 8, 8)), np.zeros(8, int), network.initial_params
    assert np.array_equal(network.predict(params, x), network.predict(params, x))
    plain = build_network(load(tmp_path, FILE, layers={"scale": Scale}), 1, np.float64)
    assert plain.n_streams == 0
    losses = [network.loss_and_gradient(params, x, labels, np.random.default_rng(s))[0] for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    drops = [layer for layer in network._chain.all() if getattr(layer, "rule", None)]
    assert [layer.stream for layer in drops] == [0, 1]
    assert not np.array_equal(drops[0].kept > 0.0, drops[1].kept > 0.0)
    with pytest.raises(ddlsim.ConfigError, match=r"rng = None, but the layer 'Drops1' needs random numbers"):
        network.loss_and_gradient(params, x, labels)


def test_workers_with_an_own_dropout_draw_masks_of_their_own(tmp_path):
    text = FILE.replace('{ type = "scale", by = 2.0 }', '{ type = "drops" }')
    model = load(tmp_path, text, layers={"drops": Drops})
    training = ddlsim.Training("digits", rate=0.05, updates=4, evaluate_every=1)
    batched, alone = (
        ddlsim.simulate("office-1gbe", model, batch_size=8, workers=2, seed=1, training=each)
        for each in (training, ddlsim.Training("digits", rate=0.05, updates=4, evaluate_every=1, batching=False))
    )
    assert batched.history.loss.tolist() == alone.history.loss.tolist()


@dataclass(frozen=True)
class Forgets(Drops):
    """A batch norm that knows nothing of training: it has the statistics of whatever it is given."""

    def forward(self, x, params):
        return x - x.mean(axis=0), 1.0

    def backward(self, dy, kept, params):
        return dy - dy.mean(axis=0), {}


@dataclass(frozen=True)
class Unseeded(Drops):
    def forward(self, x, params):
        return super().forward(x, params, np.random.default_rng(), True)


@dataclass(frozen=True)
class Ignores(Normed):
    def forward(self, x, params, *, train, buffers):
        out, kept, batch = super().forward(x, params, train=True, buffers=None)
        return (out, kept, batch) if train else (out, kept)


@dataclass(frozen=True)
class Silent(Normed):
    def forward(self, x, params, *, train, buffers):
        return super().forward(x, params, train=train, buffers=buffers)[:2]


@dataclass(frozen=True)
class Deaf(Normed):
    def forward(self, x, params):
        return x, None


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Forgets, "the output for a sample depends on the other samples; add buffers for the statistics of a batch"),
        (Ignores, "the output for a sample depends on the other samples; use buffers if train is False"),
        (Unseeded, "its outputs differ from call to call; in training, draw from forward's parameter rng"),
        (Silent, r"forward must return the batch's \['running_mean', 'running_var'\] as a third value"),
        (Deaf, "has buffers; its forward must take train and buffers"),
        (Wrong, "the gradient of 'x' is"),
    ],
)
def test_a_simulation_refuses_what_the_check_finds(layer, said, tmp_path):
    entry = "{ type = 'wrong', what = 'gradient' }" if layer is Wrong else '{ type = "wrong" }'
    model = load(tmp_path, FILE.replace('{ type = "scale", by = 2.0 }', entry), layers={"wrong": layer})
    with pytest.raises(ddlsim.ConfigError, match=said):
        ddlsim.simulate("office-1gbe", model, batch_size=4, workers=2, training=ddlsim.Training("digits", updates=1))
    with pytest.raises(ddlsim.ConfigError, match=said):
        check_layer(Wrong(1.0, "gradient") if layer is Wrong else layer(), (4, 6, 6))
