"""The gradient noise scale, on gradients of known covariance."""

import math

import numpy as np
import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.learning.noise import noise_scale
from ddlsim.nn.network import build_network


def test_the_estimates_are_unbiased():
    """Gradients G + L z / sqrt(b): |G|^2 = 14 and tr(L L^T) by hand; means of 4000 estimates, 4 standard errors."""
    draws, mean, batch_size = np.random.default_rng(5), np.array([1.0, 2.0, 3.0]), 4
    spread = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.0, 1.0, 3.0]])
    trace = 1.0 + (0.25 + 4.0) + (1.0 + 9.0)
    gradients = mean + draws.standard_normal((4000, 5, 3)) @ spread.T / math.sqrt(batch_size)
    found = [noise_scale(group, batch_size) for group in gradients]
    for values, wanted in (([f.gradient_square for f in found], 14.0), ([f.variance for f in found], trace)):
        assert abs(np.mean(values) - wanted) < 4.0 * np.std(values) / math.sqrt(len(values))
    many = noise_scale(gradients.reshape(-1, 3), batch_size)
    assert many.samples == pytest.approx(trace / 14.0, rel=0.05)


def test_equal_gradients_have_no_noise():
    found = noise_scale([np.array([3.0, 4.0], np.float32)] * 3, 8)
    assert (found.gradient_square, found.variance, found.samples) == (25.0, 0.0, 0.0)


def test_without_a_gradient_there_is_only_noise():
    """+g and -g: |G_big|^2 = 0, so |G|^2 is estimated as -25 / 1 and tr(Sigma) as 8 * 2 * 25 / 1."""
    found = noise_scale([np.array([3.0, 4.0]), np.array([-3.0, -4.0])], 8)
    assert (found.gradient_square, found.variance, found.samples) == (-25.0, 400.0, math.inf)


def test_a_networks_noise_is_that_of_its_samples():
    """Against the covariance of the gradients of all 150 samples one by one."""
    data = ddlsim.load_digits().take(np.arange(150))
    network = build_network("digits-cnn", 0)
    each = np.array([
        network.loss_and_gradient(network.initial_params, data.x[i : i + 1], data.labels[i : i + 1])[1]
        for i in range(150)
    ], np.float64)  # fmt: skip
    mean = each.mean(axis=0)
    trace = float(np.square(each - mean).sum() / 150)
    for batch_size in (1, 8):
        found = ddlsim.gradient_noise_scale("digits-cnn", data, batch_size=batch_size, n_batches=600)
        assert found.variance == pytest.approx(trace, rel=0.1)
        assert found.gradient_square == pytest.approx(float(mean @ mean), rel=0.1)


def test_noise_grows_as_a_model_learns():
    training = ddlsim.Training(rate=0.1, updates=150)
    result = ddlsim.simulate("office-1gbe", "digits-cnn", batch_size=16, workers=4, training=training)
    before = ddlsim.gradient_noise_scale("digits-cnn", "digits")
    after = ddlsim.gradient_noise_scale("digits-cnn", "digits", result.params)
    assert 1.0 < before.samples < 0.5 * after.samples
    assert ddlsim.gradient_noise_scale("digits-cnn", "digits", result.params) == after


@pytest.mark.parametrize(("call", "message"), [
    (lambda: noise_scale([np.ones(3)], 8), "got 1 gradients of 8 samples; pass at least 2"),
    (lambda: ddlsim.gradient_noise_scale("digits-cnn", "digits", n_batches=1), "at least 2"),
    (lambda: ddlsim.gradient_noise_scale("digits-cnn", "digits", np.ones(3, np.float32)), "params of shape"),
    (lambda: ddlsim.gradient_noise_scale("lenet5", "digits"), "samples of shape"),
], ids=["one", "one-batch", "params", "data"])  # fmt: skip
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
