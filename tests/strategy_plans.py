"""The plans of strategies."""

from __future__ import annotations

from ddlsim.strategies import contract


def plan_of(strategy, workloads, steps=1, accumulation=1):
    """Return what workers with these workloads do in so many steps."""
    return contract.of(strategy).plan(workloads, steps, accumulation)
