"""Neural networks in NumPy: real losses and gradients of the models that the simulator has costs for.

>>> from ddlsim.nn.network import build_network
>>> build_network("lenet5", seed=0).n_params
61706

A custom layer is a frozen dataclass with ``cost`` (see :class:`Cost`), ``init``, ``forward`` and ``backward``.
"""

from typing import Literal

from ddlsim.workload.layer_rules import Cost as Cost, streaming as streaming

Loss = Literal["cross_entropy", "mean_squared_error"]
