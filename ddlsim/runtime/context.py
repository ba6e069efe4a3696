"""`RunContext`: the environment of a strategy in a run; and `Strategy`: the interface of strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.learning import ABSENT, Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.network.state import Ints, Records
from ddlsim.plan import Plan
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import Recorder
from ddlsim.runtime.worker import StopRule, Worker
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import Jitter, NoJitter
from ddlsim.workload.model import Model


@dataclass
class RunContext:
    """The context of a run that is about to start, which :meth:`Strategy.start` receives.

    A strategy can append remarks about the result to ``notes``. When it starts, it sets ``model`` to a function that
    returns the current parameters, which become the final model when the run ends. If workers have separate models, the
    strategy also sets ``replicas`` to a function that returns the parameters of every worker, ``steps`` to a function
    that returns the number of local steps of each worker, and ``mixture`` to a string that describes how the final
    model is computed from the workers' models. If there is a single optimizer state, the strategy sets ``optimizer`` to
    a function that returns it.

    cluster          the cluster, including nodes that the run does not use
    loop             simulated clock and network
    workers          the workers, in rank order
    recorder         record of all activities and updates
    stop             rule that ends the run, to which updates are reported
    learner          gradients, updates and evaluations, as lazy values
    seed             seed of all random streams
    compression      compression of exchanges and messages; code that applies it sets ``compresses``
    slows            True if workers compute more slowly while they communicate; set by plans
    devices          records of the devices that communication slows down; set by plans
    has_fixed_costs  True if steps and collectives include the fixed costs of the stack; set by plans
    whole            workload that each worker would have with the complete model, for strategies that split the model
    jitter           distribution of a random factor applied to compute times
    crashes          for each worker, the (start, end) of its outages in s; empty if all workers stop together
    machines_crash   whether an outage also affects servers on the worker's machine
    waits_for_all    False if no step or round waits for all workers, so that the others continue when one crashes; set
                     by the executor of cycles
    plan             function of a number of steps (None: one cycle of steps) that returns the tasks of all ranks as
                     they are executed without disturbances. The executor of task graphs or of cycles sets it, and
                     strategies that start processes can set it
    shows_plan       True if only the plan is requested and nothing will be executed. Every rank then has its own tasks,
                     and messages whose compressed size depends on values have their uncompressed size
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
    devices: list[Records] = field(default_factory=list)
    has_fixed_costs: bool = False
    jitter: Jitter = NoJitter()
    whole: Sequence[Workload] = ()
    crashes: Sequence[Sequence[tuple[float, float]]] = ()
    machines_crash: bool = False
    waits_for_all: bool = True
    plan: Callable[[int | None], Plan] | None = None
    shows_plan: bool = False

    @property
    def nodes(self) -> list[int]:
        """Nodes of the workers, in rank order."""
        return [worker.node for worker in self.workers]

    @property
    def workloads(self) -> list[Workload]:
        """Current workloads of the workers, in rank order."""
        return [worker.workload for worker in self.workers]

    @property
    def timed_model(self) -> Model:
        """The model whose computation is timed."""
        return (self.whole[0] if self.whole else self.workers[0].workload).model

    @property
    def learns_timed_model(self) -> bool:
        """Whether the timed model is the trained one, or the run is timing-only."""
        task = self.learner.task
        return task is None or task.network.model.layers == self.timed_model.layers

    def hosts(self, nodes: list[int]) -> Ints:
        """Return the machine of each node. A node outside all machines counts as a machine of its own."""
        index = np.asarray(nodes, dtype=np.int64)
        host = self.cluster.host_of[index]
        return np.where(host >= 0, host, len(self.cluster.host_names) + index)


class Strategy(Protocol):
    """A distributed training algorithm.

    A strategy reports every update by calling ``worker.stop.updated(n_samples)`` with the number of samples that
    contributed to it. It may define the additional methods described in :mod:`ddlsim.strategies.contract`.
    """

    @property
    def label(self) -> str:
        """Short name for tables, such as "all-reduce (ring, ddp)"."""

    def start(self, context: RunContext) -> None:
        """Create the simpy processes of all workers (and servers) of the run."""
