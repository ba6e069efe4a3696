"""Clusters: machines, links, routing, generators, file formats. Start with :func:`load_cluster`.

Names are loaded when first used, so that importing ddlsim does not import networkx.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
