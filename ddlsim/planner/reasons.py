"""Why a configuration is recommended: what changing one thing of it would mean, among what was simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ddlsim.planner.candidates import Candidate
from ddlsim.planner.search import Found
from ddlsim.planner.target import Figures, Target
from ddlsim.report.numbers import percent

__all__ = ["reasons"]

_DIMENSIONS = ("cluster", "workers", "strategy", "compression", "batch_size")
_NAMES = {"batch_size": "batch"}
#: shares below which differences are not worth a word
SAME = 0.0005


def reasons(
    best: Found, found: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]
) -> tuple[str, ...]:
    """Return where the time goes, and for each thing that is varied the best other value with its consequence.

    simulate  tells the figures of a configuration that the search has left out
    """
    lines = []
    if best.shares is not None:
        shares = {name: share for name, share in best.shares.items() if share >= SAME}
        lines.append("time goes to " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    for dimension in _DIMENSIONS:
        near = [other for other in found if _differs_in(best, other, dimension)]
        other = _best_of(near, target, simulate)
        if other is not None:
            value = other.candidate.settings[dimension]
            name = _NAMES.get(dimension, dimension)
            lines.append(f"{name} {value} instead {_consequence(best.figures, other.figures, target)}")
    return tuple(lines)


def _best_of(near: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]) -> Found | None:
    """Return the best of some configurations; those that were left out are simulated as long as one may be it."""

    def rank(figures: Figures | None) -> tuple[float, float]:
        return (math.inf, math.inf) if figures is None else target.rank(figures)

    done = [other for other in near if other.figures is not None]
    for other in sorted((other for other in near if other.bound is not None), key=lambda one: rank(one.bound)):
        if done and min(rank(one.figures) for one in done) <= rank(other.bound):
            break
        tried = simulate(other.candidate)
        done += [tried] if tried.figures is not None else []
    return min(done, key=lambda one: rank(one.figures), default=None)


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
    if target.wants_cheapest:
        text = _change(its / mine, "costs", "as much", "more", "less")
        time = other.throughput / best.throughput
        if abs(its / mine - 1.0) < SAME and abs(time - 1.0) >= SAME:
            text += f", {_change(1.0 / time, 'takes', 'as long', 'longer', 'less time')}"
        return text
    return _change(its / mine, "takes", "as long", "longer", "less time")


def _change(ratio: float, verb: str, same: str, more: str, less: str) -> str:
    """Say what a ratio means: "takes 3.1 % longer"."""
    change = ratio - 1.0
    if not math.isfinite(change) or abs(change) < SAME:
        return f"{verb} {same}"
    if change < 0.0:
        return f"{verb} {percent(-change)} {less}"
    return f"{verb} {percent(change)} {more}" if change < 0.995 else f"{verb} {ratio:.3g} times {same}"
