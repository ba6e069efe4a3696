"""Optimizers and learning-rate schedules on flat vectors: frozen dataclasses with pure functions.

>>> import numpy as np
>>> from ddlsim.optim import Momentum
>>> rule = Momentum(beta=0.9)
>>> state = rule.init(np.zeros(2))
>>> params, state = rule.update(np.zeros(2), np.ones(2), state, rate=0.1)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
