"""What-if studies: many experiments, each simulated once, on all cores or a cluster, with results in a store.

Names are loaded when first used, because worker processes need none of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
