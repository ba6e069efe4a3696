"""Why a configuration is recommended: what changing one thing of it would mean, among what was simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ddlsim.planner.candidates import Candidate
from ddlsim.planner.preference import SAME, beats_bound, preferred, spread_of
from ddlsim.planner.search import Found
from ddlsim.planner.target import Figures, Target
from ddlsim.readable import percent
from ddlsim.strategies.splits import SIZES

_DIMENSIONS = (
    "cluster", "workers", "strategy", "compression", "batch_size", *(each for each in SIZES if each != "data"),
)  # fmt: skip
_NAMES = {"batch_size": "batch", "micro_batch": "micro-batch"}


def reasons(
    best: Found, found: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]
) -> tuple[str, ...]:
    """Return where the time goes, and for each thing that is varied the best other value with its consequence.

    simulate  tells the figures of a configuration that the search has left out; of splits of a model what a bound
              says of them is told
    """
    lines = []
    if best.shares is not None:
        shares = {name: share for name, share in best.shares.items() if share >= SAME}
        lines.append("time goes to " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    for dimension in _DIMENSIONS:
        near = [other for other in found if _differs_in(best, other, dimension)]
        if best.candidate.sizes:  # whose simulation takes long: what a bound says is enough
            other, figures = _best_known(near, target)
        else:
            other = _best_of(near, target, simulate)
            figures = None if other is None else other.figures
        if other is not None:
            value = other.candidate.settings[dimension]
            name = _NAMES.get(dimension, dimension)
            at_best = " at best" if other.figures is None else ""
            lines.append(f"{name} {value} instead {_consequence(best.figures, figures, target)}{at_best}")
    return tuple(lines)


def _best_known(near: Sequence[Found], target: Target) -> tuple[Found | None, Figures | None]:
    """Return the best of some configurations and its figures, or the best that it can have."""
    ranked = [(other, figures) for other in near if (figures := other.figures or other.bound) is not None]
    return min(ranked, key=lambda pair: (target.rank(pair[1]), pair[0].candidate.number), default=(None, None))


def _best_of(near: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]) -> Found | None:
    """Return the best of some configurations; those that were left out are simulated as long as one may be it."""

    done = [(other, other.figures) for other in near if other.figures is not None]
    open_ = [(target.rank(other.bound), other.candidate) for other in near if other.bound is not None]
    for rank, candidate in sorted(open_, key=lambda item: (item[0], item[1].number)):
        spread = max((spread_of(figures) for _, figures in done), default=0.0)
        if any(beats_bound(target.rank(figures), rank, spread) for _, figures in done):
            continue
        tried = simulate(candidate)
        done += [(tried, tried.figures)] if tried.figures is not None else []
    return next(iter(preferred([other for other, _ in done], target)), None)


def _differs_in(one: Found, other: Found, dimension: str) -> bool:
    a, b = one.candidate.settings, other.candidate.settings
    # one rank alone has no sequence parallelism, one stage no cut
    follow = ("sequence", "stage", "cut", "p2p") if dimension in ("tensor", "pipeline") else ()
    return [name for name in _DIMENSIONS if a.get(name) != b.get(name) and name not in follow] == [dimension]


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
    takes, costs = ("takes", "as long", "longer", "less time"), ("costs", "as much", "more", "less")
    asked, rest = (costs, takes) if target.wants_cheapest else (takes, costs)
    time = best.throughput / other.throughput
    second = time if target.wants_cheapest else time * other.cost_rate / best.cost_rate
    text = _change(its / mine, *asked)
    if abs(its / mine - 1.0) < SAME and math.isfinite(second) and abs(second - 1.0) >= SAME:
        text += f", {_change(second, *rest)}"
    return text


def _change(ratio: float, verb: str, same: str, more: str, less: str) -> str:
    """Say what a ratio means: "takes 3.1 % longer"."""
    change = ratio - 1.0
    if not math.isfinite(change) or abs(change) < SAME:
        return f"{verb} {same}"
    if change < 0.0:
        return f"{verb} {percent(-change)} {less}"
    return f"{verb} {percent(change)} {more}" if change < 0.995 else f"{verb} {ratio:.3g} times {same}"
