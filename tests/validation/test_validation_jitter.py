"""Which distribution do step times have, and is it any of the three?"""

import math

import numpy as np
import pytest

from ddlsim.errors import ConfigError
from ddlsim.streams import stream
from ddlsim.validation import fit_jitter
from ddlsim.workload.jitter import Gamma, Lognormal, ShiftedExponential, Uniform


@pytest.mark.parametrize(
    "jitter", [Lognormal(0.6), Gamma(0.7), ShiftedExponential(0.2)], ids=["lognormal", "gamma", "shifted"]
)
def test_the_distribution_drawn_from_is_found(jitter):
    fit = fit_jitter(0.1 * jitter.sample(stream(3, 0, "test"), 500))
    assert type(fit.jitter) is type(jitter)
    shape = "mean_extra" if isinstance(jitter, ShiftedExponential) else "cv"
    assert getattr(fit.jitter, shape) == pytest.approx(getattr(jitter, shape), rel=0.15)
    assert fit.base_s == pytest.approx(0.1, rel=0.1)
    assert fit.p_value > 0.05


def test_none_of_the_three_shows_in_the_goodness_of_fit():
    """Two modes, a fast and a slow step."""
    two = np.repeat([0.1, 0.2], 100)
    fit = fit_jitter(two * Uniform(0.95, 1.05).sample(stream(0, 0, "test"), 200))
    assert fit.p_value < 0.02
    assert "does not fit well" in str(fit)


def test_likelihoods_are_those_of_the_textbook():
    """Maximum likelihood of a lognormal: mean and standard deviation of the logarithms."""
    times = Lognormal(0.8).sample(stream(1, 0, "test"), 300)
    fit = fit_jitter(times)
    assert isinstance(fit.jitter, Lognormal)
    sd = np.log(times).std()
    assert fit.jitter.cv == pytest.approx(math.sqrt(math.exp(sd**2) - 1))
    assert fit.median_factor * fit.base_s == pytest.approx(math.exp(np.log(times).mean()))


@pytest.mark.parametrize("jitter", [Lognormal(0.5), Gamma(0.5), ShiftedExponential(0.5)], ids=["l", "g", "s"])
def test_the_median_factor_is_the_median(jitter):
    from ddlsim.validation.jitter_fit import JitterFit

    drawn = jitter.sample(stream(2, 0, "test"), 40_001)
    assert JitterFit(jitter, 1.0, 0.0, 1.0, 1).median_factor == pytest.approx(np.median(drawn), rel=0.02)


def test_constant_times_have_no_jitter():
    assert fit_jitter([0.1] * 30) is None


def test_too_few_times_and_senseless_ones_are_refused():
    with pytest.raises(ConfigError, match="at least 20"):
        fit_jitter([0.1] * 19)
    with pytest.raises(ConfigError, match="above 0"):
        fit_jitter([0.1] * 19 + [0.0])
