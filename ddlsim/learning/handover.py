"""What a group of workers takes over from one that has trained before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddlsim.learning.values import Array
from ddlsim.optim import OptimizerState

if TYPE_CHECKING:
    from ddlsim.learning.monitor import Row


@dataclass(frozen=True, eq=False)
class Handover:
    """A training as it stands, for another group of workers that goes on with it.

    params, statistics  shape (n_params,), (n_state,) or None
    state               of the optimizer; None where workers have several: it begins anew
    n_updates, n_samples, nbytes, time
                        made, learned from, sent, and passed (s) so far
    history             its evaluations
    rate_factor         by which the learning rate is multiplied from now on
    """

    params: Array
    statistics: Array | None
    state: OptimizerState | None
    n_updates: int
    n_samples: int
    nbytes: float
    time: float
    history: tuple[Row, ...]
    rate_factor: float = 1.0


class Shift(NamedTuple):
    """A part of a training in which groups of workers take turns: what the group begins with, whether another one goes
    on after it, and when on the clock it begins, s."""

    begin: Handover | None
    goes_on: bool
    since: float = 0.0
