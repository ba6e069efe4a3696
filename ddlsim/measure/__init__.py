"""Micro-benchmarks of a real cluster, and the table of their measurements.

``mpirun -n 8 python -m ddlsim.measure --out measured/`` runs them; :func:`read_measurements` reads the table, including
hand-written ones (docs/formats/measurements.md). Names are loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
