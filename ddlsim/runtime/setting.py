"""`Setting`: the environment of a strategy in a run; and `Strategy`: the interface of strategies."""

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
    """A run about to start. Strategies add notes for the reader of the result to ``notes``.

    At its start, a strategy sets ``model`` to a function that returns the parameters to hand over if the run ended now.
    If workers have separate models, it also sets ``replicas`` to a function that returns all their parameters,
    ``steps`` to one that returns the local steps of each, and ``mixture`` to one that returns the model in terms of
    them. If there is a single optimizer state, ``optimizer`` is a function that returns it.

    seed            seed of all random streams
    compression     compression of exchanges and messages, which set ``compresses``
    slows           set by plans whose workers are slower while they communicate
    has_fixed_costs set by plans whose steps and collectives have the fixed costs of the stack
    whole           workloads of the workers if each had the whole model
    jitter          NoJitter without random compute times
    crashes         outages (s, s) of each worker, if workers do not stop for each other; with ``machines_crash`` those
                    of everything on its machine
    plan            function that returns the tasks of ranks in a number of steps (None: in one cycle of steps) as
                    executed, without disturbances. The executor of tasks, or of cycles of operations, sets it, and
                    processes may
    shows_plan      nothing will be executed: every rank has its own tasks, and sizes that depend on values are dense
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
    has_fixed_costs: bool = False
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
        """Return the machine of each node; a node outside a machine counts as one."""
        index = np.asarray(nodes, dtype=np.int64)
        host = self.cluster.host_of[index]
        return np.where(host >= 0, host, len(self.cluster.host_names) + index)


class Strategy(Protocol):
    """A distributed training algorithm.

    :mod:`ddlsim.strategies.contract` lists further methods that it may define. Report each update with its samples:
    ``worker.stop.updated(n_samples)``.
    """

    @property
    def label(self) -> str:
        """Short name for tables, such as "all-reduce (ring, ddp)"."""

    def start(self, setting: Setting) -> None:
        """Create the simpy processes of all workers (and servers)."""
