"""Optimizers and learning-rate schedules on flat vectors: frozen dataclasses with pure functions.

>>> import numpy as np
>>> from ddlsim.optim import Momentum
>>> rule = Momentum(beta=0.9)
>>> state = rule.init(np.zeros(2))
>>> params, state = rule.update(np.zeros(2), np.ones(2), state, rate=0.1)
"""

from ddlsim.optim.batch_growth import GrowingBatch
from ddlsim.optim.layerwise import LAMB, LARS
from ddlsim.optim.rules import SGD, Adam, Momentum, Optimizer, OptimizerState
from ddlsim.optim.schedules import (
    Constant,
    Cosine,
    Polynomial,
    Schedule,
    Steps,
    WarmUp,
    linear_scaling,
    square_root_scaling,
)

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "Constant",
    "Cosine",
    "GrowingBatch",
    "Momentum",
    "Optimizer",
    "OptimizerState",
    "Polynomial",
    "Schedule",
    "Steps",
    "WarmUp",
    "linear_scaling",
    "square_root_scaling",
]
