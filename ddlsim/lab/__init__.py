"""A mini-cluster on one machine: a cluster file becomes network namespaces, and collectives run in them over TCP.

``ddlsim lab my-cluster.toml`` is the command; docs/lab.md tells what is built and what is measured. Names are
loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
