"""Update rules against sequences worked by hand, and the identities between them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network
from ddlsim.optim import LAMB, LARS, SGD, Adam, Momentum, Optimizer
from ddlsim.optim.rules import bounds_of
from ddlsim.testing import check_optimizer

VECTORS = arrays(np.float64, 6, elements=st.floats(-10, 10).filter(lambda value: abs(value) > 1e-6))
BOUNDS = (0, 2, 6)
RULES = [
    SGD(0.01), Momentum(0.9, weight_decay=0.1), Momentum(0.9, nesterov=True), Adam(weight_decay=0.1),
    LARS(BOUNDS, weight_decay=0.01), LAMB(BOUNDS, weight_decay=0.01),
]  # fmt: skip


def run(rule: Optimizer, params: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    state = rule.init(params)
    for gradient in gradients:
        params, state = rule.update(params, gradient, state, rate)
    assert state.n_updates == len(gradients)
    return params


@given(VECTORS, st.lists(VECTORS, min_size=1, max_size=4))
def test_momentum_zero_is_sgd_bit_for_bit(params, gradients):
    expected = run(SGD(0.1), params, gradients, 0.5)
    for rule in (Momentum(0.0, weight_decay=0.1), Momentum(0.0, nesterov=True, weight_decay=0.1)):
        np.testing.assert_array_equal(run(rule, params, gradients, 0.5), expected)


def test_momentum_by_hand():
    """g = 1 thrice, beta = 1/2: v = 1, 1.5, 1.75; w = 0 - 0.1 * 4.25. Nesterov steps g + v/2: 1.5, 1.75, 1.875."""
    gradients = [np.ones(1)] * 3
    assert run(Momentum(0.5), np.zeros(1), gradients, 0.1) == pytest.approx(-0.425)
    assert run(Momentum(0.5, nesterov=True), np.zeros(1), gradients, 0.1) == pytest.approx(-0.5125)


def test_adam_by_hand():
    """beta1 = beta2 = 1/2, g = 1 then 3: m = .5, 1.75; v = .5, 4.75; corrected by 1/2, then 3/4:
    steps 1 / 1 and (1.75 / .75) / sqrt(4.75 / .75)."""
    got = run(Adam(0.5, 0.5, 0.0), np.zeros(1), [np.ones(1), np.full(1, 3.0)], 0.1)
    assert got == pytest.approx(-0.1 * (1.0 + (1.75 / 0.75) / math.sqrt(4.75 / 0.75)))


def test_weight_decay_is_coupled_in_sgd_and_decoupled_in_adam():
    """w = 2, g = 0, lambda = 0.1, eta = 0.5: both go to 2 - 0.5 * 0.2; with g = 1 Adam's step is 1 + 0.2."""
    start = np.full(1, 2.0)
    assert run(SGD(0.1), start, [np.zeros(1)], 0.5) == pytest.approx(1.9)
    assert run(Adam(weight_decay=0.1), start, [np.zeros(1)], 0.5) == pytest.approx(1.9)
    assert run(Adam(eps=0.0, weight_decay=0.1), start, [np.ones(1)], 0.5) == pytest.approx(1.4)


def test_lars_by_hand():
    """w = (3, 4), g = (0, 2): r = 0.1 * 5 / (2 + 0.2 * 5) = 1/6; step eta r (g + 0.2 w) = eta / 6 (0.6, 2.8).
    The second tensor is 0, so its ratio is 1."""
    rule = LARS((0, 2, 3), beta=0.0, weight_decay=0.2, trust=0.1)
    got = run(rule, np.array([3.0, 4.0, 0.0]), [np.array([0.0, 2.0, 1.0])], 0.6)
    np.testing.assert_allclose(got, [3.0 - 0.06, 4.0 - 0.28, -0.6])


def test_lamb_by_hand():
    """Adam's first step is g / (|g| + eps): (0, 1) for g = (0, 2), eps = 0. With |w| = 5 the step is 5 eta (0, 1).
    Decay 0.1 adds 0.1 w before the norm is taken: u = (0.3, 1.4). The second tensor is 0, so its ratio is 1."""
    start, gradient = np.array([3.0, 4.0, 0.0]), np.array([0.0, 2.0, -1.0])
    got = run(LAMB((0, 2, 3), eps=1e-300), start, [gradient], 0.1)
    np.testing.assert_allclose(got, [3.0, 4.0 - 0.5, 0.1])
    got = run(LAMB((0, 2, 3), eps=1e-300, weight_decay=0.1), start, [gradient], 0.1)
    ratio = 0.1 * 5.0 / math.hypot(0.3, 1.4)
    np.testing.assert_allclose(got, [3.0 - 0.3 * ratio, 4.0 - 1.4 * ratio, 0.1])


def test_settings_that_are_not_given_are_the_papers():
    """No decay anywhere; Adam, algorithm 1: 0.9, 0.999, 1e-8; LAMB, section 4: 0.9, 0.999, 1e-6; LARS, algorithm 1 and
    section 5: momentum 0.9, trust 0.001; momentum 0.9, not Nesterov's."""
    assert SGD() == SGD(weight_decay=0.0)
    assert Momentum() == Momentum(0.9, False, 0.0)
    assert Adam() == Adam(0.9, 0.999, 1e-8, 0.0)
    assert LAMB() == LAMB((), 0.9, 0.999, 1e-6, 0.0)
    assert LARS() == LARS((), 0.9, 0.0, 0.001)


@given(VECTORS, VECTORS)
def test_lars_does_not_see_the_scale_of_a_tensors_gradient(params, gradient):
    scale = np.repeat([1e3, 1e-2], [2, 4])
    rule = LARS(BOUNDS)
    np.testing.assert_allclose(
        run(rule, params, [gradient * scale], 1.0), run(rule, params, [gradient], 1.0), rtol=1e-9
    )


@given(VECTORS, VECTORS)
def test_lamb_moves_each_tensor_by_rate_times_its_norm(params, gradient):
    moved = run(LAMB(BOUNDS), params, [gradient], 0.01) - params
    for start, stop in ((0, 2), (2, 6)):
        assert np.linalg.norm(moved[start:stop]) == pytest.approx(0.01 * np.linalg.norm(params[start:stop]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_are_pure_keep_float32_and_descend(rule: Optimizer):
    """On f = |w - 1|^2 / 2 the loss falls, nothing is changed in place and a repeated run gives the same bits."""
    params = np.linspace(2.0, 3.0, 6, dtype=np.float32)
    state = rule.init(params)
    params.setflags(write=False)
    for moment in state.moments:
        moment.setflags(write=False)
    gradient = params - 1
    gradient.setflags(write=False)
    new, _ = rule.update(params, gradient, state, 0.01)
    again, _ = rule.update(params, gradient, state, 0.01)
    assert new.dtype == np.float32
    np.testing.assert_array_equal(new, again)
    assert ((new - 1) ** 2).sum() < ((params - 1) ** 2).sum()


def test_momentum_converges_on_a_quadratic_and_not_beyond_its_limit():
    """Heavy ball on L w^2 / 2 is stable iff eta L < 2 (1 + beta)."""
    for rate, stable in ((3.7, True), (3.9, False)):
        rule, w = Momentum(0.9), np.ones(1)
        state = rule.init(w)
        for _ in range(2000):
            w, state = rule.update(w, w, state, rate)
            if abs(w[0]) > 1e6:
                break
        assert (abs(w[0]) < 1e-6) == stable


def test_bounds_come_from_a_network():
    network = build_network("digits-cnn", 0)
    bounds = bounds_of(network.slots)
    assert bounds == (0, 72, 80, 80 + 1152, 80 + 1168, 80 + 1168 + 640, 1898)
    LARS(bounds).init(network.initial_params)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Momentum(1.0), "Momentum: beta = 1.0"),
        (lambda: SGD(-1.0), "SGD: weight_decay = -1.0"),
        (lambda: Adam(beta2=float("nan")), "Adam: beta2 = nan"),
        (lambda: LARS((0, 2, 2)), "LARS: bounds"),
        (lambda: LAMB((0, 4)).init(np.zeros(5)), "LAMB: bounds end at 4"),
    ],
)
def test_bad_settings_are_named(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_keep_the_contract_that_users_are_held_to(rule):
    check_optimizer(rule)


@dataclasses.dataclass(frozen=True)
class Wrong(Momentum):
    """A rule with one mistake."""

    mistake: str = ""

    def update(self, params, gradient, state, rate):
        if self.mistake == "in place":
            gradient += params
        if self.mistake == "float64":
            rate = np.full(params.shape, rate)
        after, new = super().update(params, gradient, state, rate)
        if self.mistake == "moves":
            after = after - after.dtype.type(0.1) * params
        return after, dataclasses.replace(new, n_updates=0) if self.mistake == "count" else new


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("in place", "modifies an argument in place; return new arrays"),
        ("float64", "parameters of type float32 become float64"),
        ("moves", "the first update changes the parameters although the learning rate is 0"),
        ("count", "n_updates is 0 after 1 updates"),
    ],
)
def test_the_contract_tells_what_is_wrong(mistake, said):
    check_optimizer(Wrong())
    with pytest.raises(ConfigError, match=f"Wrong: {said}"):
        check_optimizer(Wrong(mistake=mistake))
