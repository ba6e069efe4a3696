"""What would have to be different for a prediction to be right: compute, latency, bandwidth, or waiting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy.optimize import brentq

from ddlsim.validation.run_model import Fitted, RunModel
from ddlsim.workload.jitter import NoJitter

#: factors beyond this explain nothing that a user could believe
MOST = 4.0
MOST_JITTER = 1.0


@dataclass(frozen=True)
class Cause:
    """The prediction would be right if `what` were changed by `factor` (for waiting: by jitter of this variation)."""

    what: str
    factor: float

    @property
    def size(self) -> float:
        """How large the change is, to order causes: |ln factor|; a variation counts as it is."""
        return self.factor if self.what == "waiting" else abs(math.log(self.factor))

    def __str__(self) -> str:
        if self.what == "waiting":
            return f"steps that scatter by {self.factor:.0%}"
        if self.factor >= 2.0:
            return f"{self.what} x {self.factor:.2g}"
        return f"{self.what} {100.0 * (self.factor - 1.0):+.0f} %"


def causes(run: RunModel, fitted: Fitted, predicted: float) -> list[Cause]:
    """Return single changes that make the predicted seconds of a step the measured ones, the smallest first.

    Each is found by simulating again (compute time, latency and rate of all links up to 4 times as large or small; a
    lognormal scatter of the compute time up to 100 %, for runs that were slower than predicted). Empty where none is
    enough alone.
    """
    goal = run.measured.step_time
    quantities: dict[str, Callable[[float], float]] = {
        "compute time": lambda x: run.step_time(fitted, compute=math.exp(x)),
    }
    if run.link_classes:
        quantities["latency"] = lambda x: run.step_time(fitted, latency=math.exp(x))
        quantities["bandwidth"] = lambda x: run.step_time(fitted, bandwidth=math.exp(-x))
    found: list[Cause] = []
    for what, time in quantities.items():
        change = _root(time, goal, predicted, math.copysign(math.log(MOST), goal - predicted))
        if change is not None:
            found.append(Cause(what, math.exp(-change if what == "bandwidth" else change)))
    if goal > predicted and run.measured.workers > 1 and isinstance(run.experiment.jitter, NoJitter):
        variation = _root(lambda x: run.step_time(fitted, jitter=x), goal, predicted, MOST_JITTER)
        if variation is not None:
            found.append(Cause("waiting", variation))
    return sorted(found, key=lambda cause: cause.size)


def _root(time: Callable[[float], float], goal: float, at_zero: float, end: float) -> float | None:
    """Return x between 0 and `end` at which time(x) is `goal`, or None if even `end` is not enough."""
    sign = math.copysign(1.0, goal - at_zero)
    if sign * (time(end) - goal) < 0.0:
        return None

    def gap(x: float) -> float:
        return (at_zero if x == 0.0 else time(x)) / goal - 1.0

    return float(brentq(gap, 0.0, end, xtol=2e-3, rtol=1e-3))
