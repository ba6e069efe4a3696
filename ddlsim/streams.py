"""Independent random streams, addressed by seed, rank and purpose."""

from __future__ import annotations

import hashlib

import numpy as np

from ddlsim.arguments import Index, Seed, checked


@checked
def stream(seed: Seed, rank: Index, purpose: str) -> np.random.Generator:
    """Return the random stream of one worker for one purpose ("compute", "failures", ...).

    Philox keyed by a SeedSequence of (seed, rank, digest of the purpose): independent of call order, process
    and platform. Raises ConfigError for a negative seed or rank.
    """
    digest = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, rank, digest])))
