"""The table of addresses and lengths through which compiled code reaches a :class:`~ddlsim.network.state.Net`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlsim.network.state import Ints, Net

_N_FIELDS = len(Net._fields)


class Table:
    """Addresses and lengths of the arrays of a `Net`, for :func:`~ddlsim.network.view.attach`.

    Only those of arrays that have been replaced are written again. The last item is the address of the table itself.
    """

    def __init__(self) -> None:
        self.values: Ints = np.zeros(2 * _N_FIELDS + 1, dtype=np.int64)
        self.values[-1] = self.values.ctypes.data
        self._net: tuple[Any, ...] = (None,) * _N_FIELDS

    def of(self, net: Net) -> Ints:
        """Return the table of `net`, shape (2 * fields + 1,); valid as long as `net` lives and is not replaced."""
        if net is not self._net:
            arrays: Sequence[Any] = net
            for place, (array, before) in enumerate(zip(arrays, self._net, strict=True)):
                if array is not before:
                    self.values[2 * place] = array.ctypes.data
                    self.values[2 * place + 1] = len(array)
            self._net = net
        return self.values
