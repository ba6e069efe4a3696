"""Which of two configurations is preferred: what was asked decides, and where they tie in that, the rest.

In this order: whether every limit is kept; where not, the worst miss; what was asked for, time or cost; then time,
cost, energy, fewer devices, the simpler way to exchange gradients, and who was named first. Two configurations tie in
one of these where they differ by less than :data:`SAME`, or than they are stable to where that is known and more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlsim.planner.candidates import LEAST_SIMPLE, Candidate
from ddlsim.planner.target import Figures, Target
from ddlsim.ties import in_order, tie

if TYPE_CHECKING:
    from ddlsim.planner.search import Found

#: relative difference that a plan calls "as much" and "as long": no prediction of a few steps is that sure
SAME = 0.0005
#: what decides, in this order, where what was asked ties; and what the worse one is called
_REST = {
    "time": "slower", "cost": "dearer", "energy": "with more energy", "devices": "with more devices",
    "simplicity": "less simple", "order": "named later",
}  # fmt: skip


def levels(
    target: Target, candidate: Candidate, figures: Figures, *, miss: float | None = None, accuracy_miss: float = 0.0
) -> tuple[float, ...]:
    """Return what orders configurations, the smallest first, one after the other.

    miss           worst share by which a limit is missed; None: what the target says
    accuracy_miss  share by which a training misses its accuracy
    """
    worst, asked = target.rank(figures)
    worst = worst if miss is None else miss
    seconds = figures.seconds
    return (
        float(worst > 0.0), 1.0 + worst, asked, accuracy_miss, seconds, seconds * figures.cost_rate,
        math.inf if figures.power is None else seconds * figures.power,
        float(candidate.workers), _simplicity(candidate), float(candidate.number),
    )  # fmt: skip


def _simplicity(candidate: Candidate) -> float:
    """Return a small number for what is simple: an all-reduce, then servers, sharded updates, others; whole gradients
    before compressed ones."""
    return float(candidate.simple + (LEAST_SIMPLE + 1) * (candidate.compression != "none"))


def spread_of(figures: Figures) -> float:
    """Return the relative difference up to which a configuration ties with others."""
    return max(SAME, figures.spread)


def preferred(found: Sequence[Found], target: Target) -> list[Found]:
    """Return simulated configurations in the order of preference, the best first."""
    ordered = sorted(found, key=lambda one: one.candidate.number)
    return in_order(ordered, lambda one: levels(target, one.candidate, _known(one)), lambda one: spread_of(_known(one)))


def _known(found: Found) -> Figures:
    assert found.figures is not None
    return found.figures


def beats_bound(rank: tuple[float, float], bound: tuple[float, float], spread: float) -> bool:
    """Return whether a simulated configuration of this rank (:meth:`Target.rank`) stands before any that is no better
    than one of rank `bound`, whatever else that one does: it is better in what was asked by more than `spread`, the
    largest by which any of those compared may tie."""
    (missed, value), (misses, its) = rank, bound
    if missed > 0.0:
        return 1.0 + missed < (1.0 + misses) * (1.0 - spread)
    return misses > 0.0 or value < its * (1.0 - spread)


def tie_reason(best: Found, found: Sequence[Found], target: Target) -> str:
    """Return why the best is preferred to those that tie with it in what was asked; "" where none does."""
    figures, mine = _known(best), levels(target, best.candidate, _known(best))
    why: Counter[str] = Counter()
    for other in found:
        if other is best or other.figures is None:
            continue
        its, spread = levels(target, other.candidate, other.figures), max(spread_of(figures), spread_of(other.figures))
        differ = [not tie(a, b, spread) for a, b in zip(mine, its, strict=True)]
        if not any(differ[:4]):
            why[_REST[next((name for name, apart in zip(_REST, differ[4:], strict=True) if apart), "order")]] += 1
    if not why:
        return ""
    n = sum(why.values())
    verb = ("costs as much" if target.wants_cheapest else "takes as long") + f" as {n} other{'' if n == 1 else 's'}"
    return f"a tie: {verb} ({', '.join(f'{why[what]} {what}' for what in _REST.values() if what in why)})"
