"""Images of another size."""

from __future__ import annotations

import functools

import numpy as np

from ddlsim.data.dataset import Floats


def resize(images: Floats, height: int, width: int) -> Floats:
    """Return images (n, channels, h, w) as (n, channels, height, width), a new array.

    Bilinear, and where images shrink over all pixels that a new one covers, as Pillow's and torchvision's with
    ``antialias``: weights fall linearly from the new pixel's centre.
    """
    rows, columns = _weights(images.shape[2], height), _weights(images.shape[3], width)
    return np.ascontiguousarray(rows @ images @ columns.T)


@functools.lru_cache(maxsize=32)
def _weights(before: int, after: int) -> Floats:
    """Return how much of each old pixel is in each new one, shape (after, before); rows sum to 1."""
    scale = before / after
    reach = max(scale, 1.0)
    centres = (np.arange(after) + 0.5) * scale
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(before) + 0.5 - centres[:, None]) / reach)
    shares: Floats = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    shares.flags.writeable = False
    return shares
