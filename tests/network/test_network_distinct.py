"""Numbers are told apart without sorting, as ``np.unique`` does."""

import numpy as np
import pytest

from ddlsim.network import executor
from ddlsim.network.executor import distinct


@pytest.mark.parametrize("most", [executor.MOST_PLACES, 1])
def test_as_numpy_does(most, monkeypatch):
    monkeypatch.setattr(executor, "MOST_PLACES", most)
    rng = np.random.default_rng(0)
    for below, n in ((1, 3), (7, 0), (50, 20), (1000, 5000)):
        numbers = rng.integers(0, below, n)
        for mine, numpys in zip(distinct(numbers, below), np.unique(numbers, return_inverse=True), strict=True):
            np.testing.assert_array_equal(mine, numpys)
