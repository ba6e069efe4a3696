"""n-softsync: the server waits for some gradients, whoever they are from; no worker waits for another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.runtime.servers import WithServers, note_lock_step
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.center import Center
from ddlsim.strategies.staleness import ScalingChoice, scaling_named


@checked
@dataclass(frozen=True)
class SoftSync(WithServers):
    """n-softsync (Zhang, Gupta, Lian and Liu 2016, arXiv:1511.05950, section 3): the server waits for
    c = floor(N/n) gradients from any workers, then

        w <- w - (1/c) sum_l alpha(tau_l) g_l,    alpha(tau) = alpha_0 / tau for tau > 0, else alpha_0.

    A worker that has pushed pulls the parameters that are there and goes on; n = N is asynchronous SGD. Staleness
    tau is the number of updates between the pull and the push; it is n in the mean, nearly.
    (The paper's hardsync, which waits for everybody, is :class:`~ddlsim.ParameterServer`.)

    staleness_scaling   "inverse" is the paper's alpha(tau); None keeps alpha_0; else as AsyncParameterServer's
    servers, placement, apply_time
                        as for :class:`~ddlsim.AsyncParameterServer`; an update is made by all servers at once
    """

    n: Count
    staleness_scaling: ScalingChoice = "inverse"

    @property
    def label(self) -> str:
        """The n of its name, and the scaling."""
        scaling = self.staleness_scaling
        name = scaling if isinstance(scaling, str) else "constant rate" if scaling is None else type(scaling).__name__
        return f"{self.n}-softsync ({name})"

    def _count(self, n_workers: int) -> int:
        if self.n > n_workers:
            raise ConfigError(f"SoftSync: n = {self.n}: there are {n_workers} workers; use at most {n_workers}")
        return n_workers // self.n

    def updates(self, steps: int, n_workers: int) -> int:
        """One update for every c gradients."""
        return math.ceil(steps * n_workers / self._count(n_workers))

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        scaling = scaling_named(self.staleness_scaling)
        center = Center.of(self, setting, self._count(len(setting.workers)), scaling)
        note_lock_step(setting)
        center.go()
