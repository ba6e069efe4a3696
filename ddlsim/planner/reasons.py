"""Why a configuration is recommended: what changing one thing of it would mean, among what was simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddlsim.planner.search import PRUNED, Found
from ddlsim.planner.target import Figures, Target
from ddlsim.report.numbers import percent

__all__ = ["reasons"]

_DIMENSIONS = ("cluster", "workers", "strategy", "compression", "batch_size")
_NAMES = {"batch_size": "batch"}
_OTHER = {"batch_size": "batch", "workers": "number of workers"}
#: shares below which differences are not worth a word
SAME = 0.0005


def reasons(best: Found, found: Sequence[Found], target: Target) -> tuple[str, ...]:
    """Return where the time goes, and for each thing that is varied the best other value with its consequence."""
    lines = []
    if best.shares is not None:
        shares = {name: share for name, share in best.shares.items() if share >= 0.0005}
        lines.append("time goes to " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    for dimension in _DIMENSIONS:
        near = [other for other in found if _differs_in(best, other, dimension)]
        simulated = [other for other in near if other.figures is not None]
        name = _NAMES.get(dimension, dimension)
        if simulated:
            other = min(simulated, key=lambda one: target.rank(one.figures) if one.figures else (math.inf, math.inf))
            value = other.candidate.settings[dimension]
            lines.append(f"{name} {value} instead {_consequence(best.figures, other.figures, target)}")
        elif any(other.status == PRUNED for other in near):
            what = _OTHER.get(dimension, dimension)
            lines.append(f"no other {what} can be better: bounds on the throughput exclude it")
    return tuple(lines)


def _differs_in(one: Found, other: Found, dimension: str) -> bool:
    a, b = one.candidate.settings, other.candidate.settings
    return [name for name in a if a[name] != b[name]] == [dimension]


def _consequence(best: Figures | None, other: Figures | None, target: Target) -> str:
    """Say what it means to take the other one."""
    assert best is not None
    assert other is not None
    (missed, mine), (misses, its) = target.rank(best), target.rank(other)
    if misses > missed:
        worst = max(target.misses(other), key=lambda miss: miss.share)
        return f"misses the {worst.what} by {percent(worst.share)}"
    if missed > misses:  # nearer to the target: a better choice that is listed before
        return f"misses the target by {percent(misses)} only"
    verb, more, less = ("costs", "more", "less") if target.wants_cheapest else ("takes", "longer", "less")
    much = "much" if target.wants_cheapest else "long"
    change = its / mine - 1.0
    if not math.isfinite(change) or abs(change) < SAME:
        return f"{verb} as {much}"
    if change < 0.0:
        return f"{verb} {percent(-change)} {less}"
    return f"{verb} {percent(change)} {more}" if change < 1.0 else f"{verb} {its / mine:.3g} times as {much}"
