"""Import of existing measurements, traces, logs and topologies. Start with :func:`read_any`.

Every reader is a function of a path that returns frozen dataclasses or a :class:`~ddlsim.cluster.Cluster`, or raises
:class:`~ddlsim.errors.ConfigError` with file, line and reason. The formats are described in docs/formats/. Names are
loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
