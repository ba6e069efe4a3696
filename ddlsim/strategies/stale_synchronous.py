"""Stale synchronous parallel: asynchronous SGD in which nobody runs too far ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import by, checked, whole
from ddlsim.errors import ConfigError
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.lane_ops import Op
from ddlsim.runtime.servers import WithServers, note_lock_step
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.center import Center


def _slack(value: object, where: str) -> object:
    if isinstance(value, float) and value == math.inf:
        return value
    try:
        return whole(0)(value, where)
    except ConfigError as error:
        raise ConfigError(f"{error}, or math.inf") from None


@checked
@dataclass(frozen=True)
class StaleSynchronous(WithServers):
    """Stale synchronous parallel (Ho et al. 2013, NIPS, section 2): every gradient is applied when it arrives,
    w <- w - eta g_i, but no worker may run ahead of the slowest by more than `slack` clocks.

    The convention here: worker i's clock is the number of its gradients that have been applied; after each it is
    held, before it pulls, as long as clock_i - min_j clock_j > slack. slack = 0 is a barrier after every step
    (BSP; the N gradients of a step are added, not averaged), slack = math.inf asynchronous SGD.
    """

    slack: Annotated[float, by(_slack)]

    @property
    def label(self) -> str:
        """Its name with the slack."""
        return f"stale synchronous (slack {self.slack})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every gradient is an update."""
        return steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        center = Center.of(self, setting)
        if self.slack > 0:  # with 0 they wait for each other
            note_lock_step(setting)
        center.go(Op(ls.CLOCK, "the slowest worker", number=ls.MANY if math.isinf(self.slack) else int(self.slack)))
