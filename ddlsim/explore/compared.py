"""Strategies beside the form's."""

from __future__ import annotations

from collections.abc import Sequence

from ddlsim.explore.setup import Setup, beginnings
from ddlsim.run.files import PARTS, STRATEGIES
from ddlsim.run.tables import build
from ddlsim.strategies import Strategy


def chosen_strategies(setup: Setup, others: Sequence[str]) -> dict[str, Strategy]:
    """Return the form's strategy, and others as they begin, by label. Raises a DdlsimError for what makes no sense."""
    own = setup.experiment().strategy
    found: dict[str, Strategy] = {own.label: own}
    for name in others:
        made: Strategy = build(STRATEGIES[name], beginnings(name, STRATEGIES), PARTS, name)
        if made != own:
            found[made.label if made.label not in found else f"{made.label} ({name})"] = made
    return found
