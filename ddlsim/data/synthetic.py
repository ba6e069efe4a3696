"""A synthetic two-class image set: discs with stripes against squares with a checkerboard.

It stands in for photographs of two kinds of animals: position, size, colours and orientation vary, so that no
single pixel tells the classes apart, while outline and texture do.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Seed, Share, checked, whole
from ddlsim.data.dataset import DataSet, Floats, Ints
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

MAX_PIXELS = 10**10
_CHUNK = 256  # images of one random stream: the first n images of a seed do not depend on how many follow


@checked
def shapes(
    n_samples: Count, size: Annotated[int, whole(8, 4096)] = 32, difficulty: Share = 0.3, seed: Seed = 0
) -> DataSet:
    """Return `n_samples` colour images, shape (n_samples, 3, size, size), values 0..1, classes in turn.

    Class 0 is a striped disc, class 1 a square with a checkerboard of the same area. `difficulty` from 0 to 1
    raises the noise (deviation 0.02 + 0.5 difficulty) and fades the texture (contrast 1 - difficulty).
    Raises ConfigError for sizes below 8 and difficulties outside 0..1.
    """
    if n_samples * size * size > MAX_PIXELS:
        raise ConfigError(f"shapes: {n_samples} images of {size} x {size} do not fit into memory; make fewer")
    labels = np.arange(n_samples, dtype=np.int64) % 2
    x = np.empty((n_samples, 3, size, size), np.float32)
    for start in range(0, n_samples, _CHUNK):
        part = slice(start, start + _CHUNK)
        draws = stream(seed, start // _CHUNK, "synthetic shapes")
        x[part] = _draw(labels[part], size, difficulty, draws)
    source = "procedural: discs with stripes and squares with checkerboards"
    return DataSet("shapes", x, labels, ("disc", "square"), source)


def _draw(labels: Ints, size: int, difficulty: float, draws: np.random.Generator) -> Floats:
    """Return the images of one chunk. All randomness is drawn for a whole chunk, whatever its length."""
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Floats:
        values = draws.uniform(low, high, (_CHUNK, *shape))[:n].astype(np.float32)
        return values.reshape(n, *shape, *(1,) * (3 - len(shape)))

    radius, angle = uniform(0.22, 0.36), uniform(0.0, math.pi)
    centre_y, centre_x = uniform(0.36, 0.64), uniform(0.36, 0.64)
    frequency, phase = uniform(4.0, 6.0), uniform(0.0, 2.0 * math.pi)
    back, front = uniform(0.0, 1.0, 3), uniform(0.0, 1.0, 3)
    slope = uniform(-0.3, 0.3)
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    y, x = grid[:, None] - centre_y, grid[None, :] - centre_x  # (n, 1, size, 1), (n, 1, 1, size)
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    square = (labels == 1)[:, None, None, None]
    half = radius * np.float32(math.sqrt(math.pi) / 2.0)  # of the square with the area of the disc
    inside = np.where(square, np.maximum(abs(u), abs(v)) < half, u * u + v * v < radius * radius)
    wave_u = np.sin(2.0 * math.pi * frequency * u + phase)
    wave_v = np.sin(2.0 * math.pi * frequency * v + phase)
    texture = np.where(square, np.sign(wave_u * wave_v), np.sign(wave_u)) * 0.35 * (1.0 - difficulty)
    # the object is at least 0.25 lighter or darker than what is behind it, in every channel
    front = np.where(abs(front - back) < 0.25, np.where(back > 0.5, back - 0.4, back + 0.4), front)
    image = np.where(inside, front + texture, back + slope * y)
    noise = draws.standard_normal((_CHUNK, 3, size, size), dtype=np.float32)[:n]
    noisy: Floats = (image + np.float32(0.02 + 0.5 * difficulty) * noise).astype(np.float32)
    return np.clip(noisy, 0.0, 1.0)
