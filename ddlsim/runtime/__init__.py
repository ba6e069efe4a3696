"""Building blocks of strategies: the event loop, workers, communicators, and exchanges of bytes and values.

Names are loaded when first used, except functions named like their modules.
"""

import lazy_loader

from ddlsim.runtime.communicator import communicator as communicator

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
