"""Lazy values: what is computed, when, and what a replay needs."""

import gc

import numpy as np
import pytest

from ddlsim.errors import ConfigError
from ddlsim.learning.values import ABSENT, DataPlane


def array(*numbers):
    return np.array(numbers, np.float32)


def test_arithmetic_is_that_of_the_arrays():
    plane = DataPlane()
    w, g = plane.constant(array(1, 2)), plane.constant(array(4, 8))
    np.testing.assert_array_equal((w - 0.5 * g).read(), array(-1, -2))
    np.testing.assert_array_equal((w + g / 2.0)[1:].read(), array(6))


def test_only_what_is_read_is_computed():
    plane, computed = DataPlane(), []

    def traced(name):
        return lambda *inputs: computed.append(name) or array(len(inputs))

    a = plane.apply(traced("a"))
    plane.apply(traced("thrown away"), a)
    b = plane.apply(traced("b"), a, a)
    assert computed == []
    b.read()
    b.read()
    assert computed == ["a", "b"]


def test_a_long_chain_does_not_recurse():
    plane = DataPlane()
    value, one = plane.constant(array(0)), plane.constant(array(1))
    for _ in range(5000):
        value = value + one
    assert value.read()[0] == 5000


@pytest.mark.slow
def test_computed_values_forget_their_inputs():
    plane = DataPlane()
    first = plane.constant(array(1))
    second = first + first
    second.read()
    del first
    gc.collect()
    assert set(plane.snapshot().results) == {1}


def test_a_failed_computation_can_be_tried_again():
    plane, calls = DataPlane(), []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return array(3)

    value = plane.apply(fails_once) + plane.constant(array(1))
    with pytest.raises(KeyboardInterrupt):
        value.read()
    assert value.read()[0] == 4


def run_to(plane, n_steps, computed):
    """A little training: w <- w - g(w), where every third step reads a number to decide how to go on."""

    def gradient(w):
        computed.append(plane.n_values)
        return w / np.float32(3.0)

    w = plane.constant(array(1, 2))
    for step in range(n_steps):
        w = w - plane.apply(gradient, w)
        if step % 3 == 2:
            x = w
            if plane.decision(lambda x=x: float(x.read().sum())) < 1.0:
                w = w + plane.constant(array(1, 1))
    return w


@pytest.mark.parametrize("n_before", [1, 4, 5, 6, 9])
def test_a_replay_goes_on_bit_for_bit_without_computing_again(n_before):
    whole = run_to(DataPlane(), 12, []).read()
    before = DataPlane()
    held = run_to(before, n_before, [])
    snapshot = before.snapshot()
    del held
    computed = []
    again = run_to(DataPlane(snapshot), 12, computed).read()
    assert again.tobytes() == whole.tobytes()
    assert len(computed) <= 12 - n_before + 2  # those that were waiting when it was saved


def test_nothing_comes_of_nothing():
    plane = DataPlane()
    assert (ABSENT - 0.1 * ABSENT)[2:] is ABSENT
    assert plane.apply(lambda a, b: a, plane.constant(array(1)), ABSENT) is ABSENT
    assert plane.constant(array(1)) + ABSENT is ABSENT
    with pytest.raises(ConfigError, match="training=ddlsim"):
        ABSENT.read()
