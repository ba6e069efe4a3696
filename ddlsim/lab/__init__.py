"""A mini-cluster on one computer: a cluster file becomes network namespaces, in which collectives run over TCP.

The command is ``ddlsim lab my-cluster.toml``; docs/lab.md describes what is built and measured. Names are loaded when
first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
