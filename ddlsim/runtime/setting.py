"""What a strategy gets to start with, and what it must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.learning import ABSENT, Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.plan import Plan
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import Recorder
from ddlsim.runtime.worker import StopRule, Worker
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import Jitter, NoJitter


@dataclass
class Setting:
    """A run about to start. Strategies put remarks for the reader of the result into ``notes``.

    When it starts, a strategy sets ``model`` to what tells the parameters that would be handed over if the run ended
    now, and where workers have models of their own ``replicas`` to what tells all their parameters, ``steps`` to what
    tells the local steps that each has made, and ``mixture`` to what the model is in terms of them; where there is one
    state of the optimizer, ``optimizer`` to what tells that. ``seed`` is that of all random streams. What is sent by
    exchanges and messages is compressed if ``compression`` is given; they say so in ``compresses``, and plans in
    ``slows`` that workers are slower while they communicate. ``whole`` are the workloads of the workers if each had
    the whole model. Where compute times do not vary by chance, ``jitter`` is NoJitter. ``crashes`` are the times
    (s) from when until when each worker would not be there, if workers do not stop for each other, and with
    ``machines_crash`` all else on its machine.

    ``plan`` tells what ranks do in a number of steps (None: in one cycle of steps) as it is executed, without
    disturbances; what executes tasks, or cycles of operations, sets it, and processes may. With ``shows_plan`` nothing
    will be executed: every rank has tasks of its own, and sizes that depend on values are dense.
    """

    cluster: Cluster
    loop: Loop
    workers: list[Worker]
    recorder: Recorder
    stop: StopRule
    learner: Learner
    notes: list[str] = field(default_factory=list)
    model: Callable[[], Value[Array]] = lambda: ABSENT
    replicas: Callable[[], Sequence[Value[Array]]] | None = None
    steps: Callable[[], Sequence[int]] | None = None
    optimizer: Callable[[], State] | None = None
    mixture: str = ""
    seed: int = 0
    compression: Compression | None = None
    compresses: bool = False
    slows: bool = False
    jitter: Jitter = NoJitter()
    whole: Sequence[Workload] = ()
    crashes: Sequence[Sequence[tuple[float, float]]] = ()
    machines_crash: bool = False
    plan: Callable[[int | None], Plan] | None = None
    shows_plan: bool = False

    @property
    def nodes(self) -> list[int]:
        """Nodes of the workers, in rank order."""
        return [worker.node for worker in self.workers]

    def hosts(self, nodes: list[int]) -> npt.NDArray[np.int64]:
        """Return the machine that each node sits in; a node outside any is a machine of its own."""
        index = np.asarray(nodes, dtype=np.int64)
        host = self.cluster.host_of[index]
        return np.where(host >= 0, host, len(self.cluster.host_names) + index)


class Strategy(Protocol):
    """A distributed training algorithm. :mod:`ddlsim.strategies.contract` has the methods that it may define beside
    these. An update carries its samples: ``worker.stop.updated(n_samples)``."""

    @property
    def label(self) -> str:
        """A short name for tables, e.g. "all-reduce (ring, ddp)"."""

    def start(self, setting: Setting) -> None:
        """Create the simpy processes of all workers (and servers)."""
