"""Networks of tokens: attention against its formula, losses of tokens, what is refused, and that they learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ddlsim
from ddlsim.data import DataSet, load_data, sentences, split
from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(x: np.ndarray, tensors: dict[str, np.ndarray], heads: int, *, causal: bool) -> np.ndarray:
    """Vaswani et al. 2017, equation 1, written with whole arrays; x (n, tokens, d)."""
    n, tokens, d = x.shape
    parts = [x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in ("query", "key", "value")]
    q, k, v = (part.reshape(n, tokens, heads, -1).swapaxes(1, 2) for part in parts)
    scores = q @ k.swapaxes(2, 3) / np.sqrt(d // heads)
    if causal:
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    mixed = (softmax(scores) @ v).swapaxes(1, 2).reshape(n, tokens, d)
    return mixed @ tensors["out.weight"].T + tensors["out.bias"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_is_its_formula(tmp_path: Path, causal: bool, fused: bool):
    flags = f"fused = {str(fused).lower()}, causal = {str(causal).lower()}"
    path = tmp_path / "net.toml"
    path.write_text(
        'title = "test"\ntrainable = true\ninput = [5]\nlayers = [\n'
        "{ type = 'embedding', name = 'e', vocabulary = 9, dim = 8 },\n"
        f"{{ type = 'attention', name = 'a', heads = 2, {flags} }} ]\n"
    )
    network = build_network(path, 3, np.float64)
    params = network.initial_params + np.random.default_rng(1).normal(size=network.n_params)
    ids = np.random.default_rng(2).integers(9, size=(3, 5))
    views = network.views(params)
    tensors = {name.removeprefix("a."): array for name, array in views.items() if name.startswith("a.")}
    if fused:
        for kind in ("weight", "bias"):
            parts = np.split(tensors.pop(f"qkv.{kind}"), 3)
            tensors |= {f"{name}.{kind}": part for name, part in zip(("query", "key", "value"), parts, strict=True)}
    expected = attention(views["e.tokens"][ids], tensors, 2, causal=causal)
    np.testing.assert_allclose(network.predict(params, ids).reshape(3, 5, 8), expected, rtol=1e-11)


def test_a_token_does_not_see_those_that_come_later():
    network = build_network("char-transformer", 0, np.float64)
    x, _ = network.random_batch(2, np.random.default_rng(0))
    other = x.copy()
    other[:, 20:] = (other[:, 20:] + 1) % network.vocabulary
    first, second = (network.predict(network.initial_params, ids).reshape(2, 32, -1) for ids in (x, other))
    np.testing.assert_array_equal(first[:, :20], second[:, :20])
    assert (first[:, 20:] != second[:, 20:]).any()


def test_loss_of_tokens_is_the_mean_over_all_of_them():
    network = build_network("char-transformer", 0, np.float64)
    x, labels = network.random_batch(70, np.random.default_rng(0))  # more than one chunk
    loss, gradient = network.loss_and_gradient(network.initial_params, x, labels)
    p = softmax(network.predict(network.initial_params, x).reshape(-1, 28))
    assert loss == pytest.approx(-np.log(p[np.arange(70 * 32), labels.reshape(-1)]).mean(), rel=1e-12)
    halves = [network.loss_and_gradient(network.initial_params, x[i::2], labels[i::2])[1] for i in (0, 1)]
    np.testing.assert_allclose(gradient, (halves[0] + halves[1]) / 2, rtol=1e-8, atol=1e-12)


def test_parameters_lie_as_the_model_counts_them():
    network = build_network("char-transformer", 0)
    sizes = [n for layer in network.model.layers for _, n in layer.tensors]
    assert [slot.stop - slot.start for slot in network.slots] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ddlsim.AllReduce(), ddlsim.AsyncParameterServer()])
def test_a_transformer_learns(strategy):
    training = ddlsim.Training("sentences", optimizer=ddlsim.Adam(), rate=0.003, updates=60, evaluate_every=60)
    result = ddlsim.simulate("office-1gbe", "char-transformer", strategy, workers=2, batch_size=16, training=training)
    losses = result.history.loss
    assert losses.iloc[0] > 3.3  # log(28) = 3.33: it knows nothing
    assert losses.iloc[-1] < 2.6
    assert result.history.accuracy.iloc[-1] > 0.25  # the most frequent character is 18 %


def test_sentences():
    data = sentences(100, 16, seed=1)
    assert data.x.shape == data.labels.shape == (100, 16)
    np.testing.assert_array_equal(data.x.reshape(-1)[1:], data.labels.reshape(-1)[:-1])
    text = "".join(data.class_names[i] for i in data.labels.reshape(-1))
    assert text.count(". ") > 20
    np.testing.assert_array_equal(sentences(40, 16, seed=1).x, data.x[:40])
    assert (sentences(100, 16, seed=2).x != data.x).any()
    train, held_out = split(data, 0.2, 0)
    assert train.labels.shape == (80, 16)
    assert held_out.labels.shape == (20, 16)


def training(data: DataSet | str, **options: object) -> ddlsim.Training:
    return ddlsim.Training(data, updates=1, **options)


@pytest.mark.parametrize(
    ("model", "chosen", "says"),
    [
        ("digits-cnn", training("sentences"), "samples of shape"),
        ("char-transformer", training("digits"), "samples of shape"),
        ("char-transformer", training("sentences", sharding="by_class"), "sharding = 'by_class'"),
        ("char-transformer", training("sentences", loss="mean_squared_error"), "use 'cross_entropy'"),
    ],
)
def test_what_does_not_fit_is_said(model: str, chosen: ddlsim.Training, says: str):
    with pytest.raises(ConfigError, match=says):
        ddlsim.simulate("office-1gbe", model, workers=2, batch_size=4, training=chosen)


def test_samples_that_are_no_tokens():
    network = build_network("char-transformer", 0)
    with pytest.raises(ConfigError, match="28 is not an id; samples must be integers from 0 to 27"):
        network.predict(network.initial_params, np.full((1, 32), 28.0))
    with pytest.raises(ConfigError, match=r"0\.5 is not an id"):
        network.predict(network.initial_params, np.full((1, 32), 0.5))
    with pytest.raises(ConfigError, match=r"needs integer labels of shape \(1, 32\)"):
        network.loss_and_gradient(network.initial_params, np.zeros((1, 32)), [3])


def test_labels_of_tokens_need_one_for_each():
    images = load_data("digits")
    with pytest.raises(ConfigError, match="do not match"):
        DataSet("x", images.x, np.zeros((len(images.x), 3), np.int64), images.class_names)


def test_an_output_tied_to_no_embedding_is_refused(tmp_path: Path):
    path = tmp_path / "net.toml"
    path.write_text(
        'title = "test"\ntrainable = true\ninput = [5]\nlayers = [\n'
        "{ type = 'embedding', vocabulary = 9, dim = 8 }, { type = 'tied_dense', name = 'head', units = 7 } ]\n"
    )
    with pytest.raises(
        ConfigError, match="layer 'head' cannot be trained: it needs an earlier embedding of 7 tokens and 8 features"
    ):
        build_network(path, 0)
