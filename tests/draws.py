"""Random cases by their seeds, a part of them in every test run."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(quick: int, whole: int) -> list[Any]:
    """Return the seeds 0 to `whole` - 1, of which those from `quick` on are left to the slow tests."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, whole))]
