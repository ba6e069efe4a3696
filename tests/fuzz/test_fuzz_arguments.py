"""The quick part of the fuzz over arguments; ``python tests/fuzz/argument_fuzz.py`` is the whole."""

import inspect
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from draws import seeds

sys.path.insert(0, str(Path(__file__).parent))

from argument_calls import public
from argument_fuzz import call, fuzz, somewhere_else, valid_calls

pytestmark = pytest.mark.posix  # an alarm ends what hangs
#: drawn from about 55,000 attempts
SHARE = 0.005


def test_every_public_callable_has_arguments_for_a_valid_call():
    assert not [name for name, _, make in public() if make is None], "add valid calls to argument_calls.CALLS"


@pytest.mark.slow  # calls all of them, simulations and calibrations included
def test_every_public_callable_has_a_valid_call():
    wrong = {name: what for name, what in valid_calls() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_malformed_arguments_are_refused_in_one_line(seed):
    report = fuzz(share=SHARE, seed=seed)
    assert sum(report.counts.values()) > 150
    assert not report.failures, str(report)


def test_numbers_of_numpy_are_as_good_as_others():
    """Constructors keep them as Python's, so that nothing behind them has to know."""
    with somewhere_else(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, target, make in public():
            if make is None or not inspect.isclass(target):
                continue
            arguments = make()
            numbers = {
                key: np.asarray(value)[()]
                for key, value in arguments.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            if numbers:
                made = call(target, {**arguments, **numbers})
                assert not any(isinstance(getattr(made, key, None), np.generic) for key in numbers), name
