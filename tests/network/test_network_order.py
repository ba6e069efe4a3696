"""Messages that end together are handled in the order in which they were issued, however they are listed."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlsim.network import kernel
from ddlsim.network.state import SLOT


@pytest.mark.parametrize("spread", [1, 3, 1000])
@pytest.mark.parametrize("n", [1, 2, 5, 300])
@pytest.mark.parametrize("listed", ["rising", "falling", "mixed"])
def test_messages_are_put_in_the_order_of_their_numbers(n, spread, listed, monkeypatch):
    """With numbers that are dense, and numbers far apart, which would not fit into the scratch space."""
    monkeypatch.setattr(kernel, "_issued_before", getattr(kernel._issued_before, "py_func", kernel._issued_before))
    rng = np.random.default_rng(n + spread)
    slots = np.zeros(2 * n, dtype=SLOT).view(np.recarray)
    slots.sequence = (1 << 40) + rng.permutation(2 * n * spread)[: 2 * n]
    scratch = rng.permutation(2 * n)[:n].astype(np.int32)
    expected = scratch[np.argsort(slots.sequence[scratch])]
    if listed != "mixed":
        scratch[:] = expected if listed == "rising" else expected[::-1]
    net = SimpleNamespace(slots=slots, scratch=scratch, freezing=np.full(2 * n, 7, dtype=np.uint32))
    sort = getattr(kernel.sort_ended, "py_func", kernel.sort_ended)
    sort(net, n)
    assert scratch.tolist() == expected.tolist()
