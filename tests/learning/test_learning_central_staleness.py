"""What staleness does to learning: the limit of stability, and the published study of rates, in small."""

import math

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import star
from ddlsim.data import from_arrays

ONE_LAYER = """title = "A line"
trainable = true
input = [1]
layers = [{ type = "dense", units = 1 }]
"""


def run(strategy, n_workers, model, batch_size, training, **more):
    """One-second steps on a network that takes no time."""
    cluster = star(n_workers + 1, bandwidth=1e15, latency=0.0)
    return ddlsim.simulate(
        cluster, model, strategy, batch_size, n_workers, compute=ddlsim.Measured(1.0, batch_size), training=training,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("share", [0.95, 1.05])
def test_the_rate_at_which_a_delay_becomes_unstable(delay, share, tmp_path):
    """w_{t+1} = w_t - eta L w_{t - tau} is stable if and only if eta L < 2 sin(pi / (2 (2 tau + 1))).

    tau + 1 equal workers of an asynchronous server give this delay. The loss is (w x + b - 1)^2 with x = 1, whose
    curvature is 2 (x^2 + 1) = 4 in the direction of the gradient, and 0 across.
    """
    model = tmp_path / "line.toml"
    model.write_text(ONE_LAYER)
    limit = 2.0 * math.sin(math.pi / (2 * (2 * delay + 1))) / 4.0
    n = delay + 1
    data = from_arrays(np.ones((n, 1), np.float32), np.zeros(n, np.int64))
    training = ddlsim.Training(
        data, data, rate=share * limit, loss="mean_squared_error", updates=500, evaluate_every=250
    )
    result = run(ddlsim.AsyncParameterServer(), n, model, 1, training)
    assert set(result.recorder.staleness[n:]) == {delay}
    first, last = result.history["loss"].iloc[[0, -1]]
    assert last < 1e-3 * first if share < 1.0 else last > 1e3 * first


@pytest.mark.slow
def test_many_stale_gradients_need_a_smaller_rate_each():
    """30 learners with batches of 4 (Zhang et al. 2016, section 5: "30-softsync stays at 90 % error" at the rate
    that 1-softsync learns with, alpha_0 / tau repairs it); here the digits, another network and rate."""

    def learned(n, scaling):
        c = 30 // n
        training = ddlsim.Training(rate=0.2, updates=3000 // c, evaluate_every=3000 // c)
        strategy = ddlsim.SoftSync(n, scaling)
        return run(strategy, 30, "digits-cnn", 4, training, jitter=ddlsim.Lognormal(0.05)).accuracy

    assert learned(1, None) > 0.8
    assert learned(30, None) < 0.2
    assert learned(30, "inverse") > 0.8
