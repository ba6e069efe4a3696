"""K-async and K-batch-async SGD: the server waits for k gradients, and nobody's work is cancelled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.lane_ops import Op
from ddlsim.runtime.servers import WithServers, note_lock_step
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.center import Center

#: a worker waits for the update that its gradient is part of
UNTIL_APPLIED = Op(ls.MEET, "the gradients of others")


@checked
@dataclass(frozen=True)
class OfK(WithServers):
    """A server that makes an update, w <- w - eta (1/k) sum g, of the first k gradients or of those of k learners."""

    k: Count
    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """Its name with the number."""
        return f"{self.k}-{self.kind}"

    def updates(self, steps: int, n_workers: int) -> int:
        """One update for every k gradients."""
        return math.ceil(steps * n_workers / self.k)

    def check_k(self, setting: Setting) -> None:
        """Raise ConfigError if `k` learners are more than there are."""
        n_workers = len(setting.workers)
        if self.k > n_workers:
            name = type(self).__name__
            raise ConfigError(f"{name}: k = {self.k}: there are {n_workers} workers; use at most {n_workers}")


@checked
@dataclass(frozen=True)
class KAsync(OfK):
    """K-async SGD (Dutta et al. 2018, arXiv:1803.01113, section 2): the server waits for k learners,
    w <- w - eta (1/k) sum g, and answers these; the others go on with the parameters that they have.

    k = N is synchronous, k = 1 asynchronous.
    """

    kind = "async"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        self.check_k(setting)
        center = Center.of(self, setting, self.k)
        if self.k < len(setting.workers):  # all of them are a barrier
            note_lock_step(setting)
        center.go(UNTIL_APPLIED)


@checked
@dataclass(frozen=True)
class KBatchAsync(OfK):
    """K-batch-async SGD (Dutta et al. 2018, AISTATS, arXiv:1803.01113, section 2): the server waits for k
    mini-batches from any learners, w <- w - eta (1/k) sum g; a learner that has pushed pulls the parameters that
    are there at once; nobody waits or is cancelled."""

    kind = "batch-async"

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        center = Center.of(self, setting, self.k)
        note_lock_step(setting)
        center.go()
