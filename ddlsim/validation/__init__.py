"""Calibrate a cluster from measurements, predict with intervals, compare with measured runs.

Names are loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
