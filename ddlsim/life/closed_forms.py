"""How often to save: what theory says for failures that come at random (exponential, of the job as a whole)."""

from __future__ import annotations

import math

from ddlsim.arguments import NotNegative, Positive, checked


@checked
def young_interval(mtbf: Positive, cost: Positive) -> float:
    """Return sqrt(2 C M), the s of work between checkpoints that cost C s where the job fails every M s.

    The first-order optimum (Young 1974, A first order approximation to the optimum checkpoint interval, CACM 17).
    """
    return math.sqrt(2.0 * cost * mtbf)


@checked
def daly_interval(mtbf: Positive, cost: Positive) -> float:
    """Return the s of work between checkpoints that cost C s where the job fails every M s, of higher order.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C for C < 2M, M from there on (Daly 2006, A higher order estimate of
    the optimum checkpoint interval for restart dumps, FGCS 22, eq. 37).
    """
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = math.sqrt(cost / (2.0 * mtbf))
    return math.sqrt(2.0 * cost * mtbf) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost


@checked
def daly_time(work: Positive, interval: Positive, cost: NotNegative, restart: NotNegative, mtbf: Positive) -> float:
    """Return the expected s for `work` s of training: M e^(R/M) (e^((W+C)/M) - 1) T/W (Daly 2006, eq. 20).

    W is the `interval` between checkpoints, C the `cost` of one, R the `restart` after a failure, M the job's `mtbf`.
    What no number can hold is inf.
    """
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) * work / interval
    except OverflowError:
        return math.inf
