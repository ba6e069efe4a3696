"""Data sets for training: loading, splitting, sharding over workers, and the order of samples.

>>> from ddlsim.data import load_digits, split
>>> train, held_out = split(load_digits(), held_out=0.2, seed=0)
>>> train.sample_shape, train.n_classes
((1, 8, 8), 10)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
