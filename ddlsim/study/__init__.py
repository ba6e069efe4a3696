"""What-if studies: many experiments, simulated once each, on all cores or a cluster, in a store that survives.

Names are loaded when first used: a worker process needs none of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
