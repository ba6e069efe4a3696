"""Gradient compressors: real payloads, error feedback, and the exchange of payloads between workers.

A compressor is a frozen dataclass with the methods of `contract.Compressor`. `exchange` is the reference for the
values that all workers hold after an exchange; `sent_nbytes` counts the bytes that each of them sends.
Names are loaded when first used, except functions named like their modules.
"""

import lazy_loader

from ddlsim.compression.exchange import exchange as exchange

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
