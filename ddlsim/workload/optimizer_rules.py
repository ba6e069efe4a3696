"""Costs of optimizers: bytes kept and moved per parameter, and kernels per tensor."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerRule(NamedTuple):
    """The costs of an optimizer rule.

    state     fp32 numbers kept per parameter: momentum and, with Adam, the second moment
    traffic   bytes moved per parameter: weight, gradient and state are read, weight and state written. Mixed precision
              moves the same number: gradient and weight have 2 bytes, but the fp32 master is read and written
    launches  kernels per tensor
    """

    state: int
    traffic: float
    launches: int


#: LARS and LAMB read weights and steps again for their norms: bytes per parameter, kernels per tensor
NORMS, NORM_TRAFFIC, NORM_LAUNCHES = ("lars", "lamb"), 8.0, 2
OPTIMIZER_RULES = {
    "sgd": OptimizerRule(0, 12.0, 1),
    "momentum": OptimizerRule(1, 20.0, 1),
    "adam": OptimizerRule(2, 28.0, 1),
    "lars": OptimizerRule(1, 20.0 + NORM_TRAFFIC, 1 + NORM_LAUNCHES),
    "lamb": OptimizerRule(2, 28.0 + NORM_TRAFFIC, 1 + NORM_LAUNCHES),
}


def optimizer_nbytes(rule: str, element: float) -> float:
    """Return the bytes of state per parameter.

    With weights of 2 bytes (`element`), this includes fp32 master weights (Micikevicius et al. 2018, arXiv:1710.03740).
    """
    return 4.0 * OPTIMIZER_RULES[rule].state + (4.0 if element < 4.0 else 0.0)


def rule_of(optimizer: object) -> str | None:
    """Return the rule name of a bundled optimizer (``Adam(...)``: "adam"), or None for custom optimizers."""
    name = type(optimizer).__name__.lower()
    return name if name in OPTIMIZER_RULES and type(optimizer).__module__.startswith("ddlsim.optim.") else None
