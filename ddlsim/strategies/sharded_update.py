"""Synchronous SGD in which every worker updates its share of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.exchange import Averaging, Exchange
from ddlsim.runtime.fabric import Cost, Fabric, RankOrder, algorithm_of, cost_said, name_of
from ddlsim.runtime.group import Dense
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process

__all__ = ["ShardedUpdate"]


@checked
@dataclass(frozen=True)
class ShardedUpdate:
    """Reduce-scatter the gradients, update the own shard of the parameters, all-gather the updated shards.

    The "distributed weight update" of Intel MLSL (Sridharan et al. 2018, arXiv:1801.08030) and stage 1 of ZeRO
    (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1): the bytes of a ring all-reduce, 1/N of the
    optimizer's time and state, and the values of synchronous SGD. Gradients travel after the backward pass.

    reduce_scatter, all_gather  names of such collectives, or functions ``n_ranks -> Schedule``
    rank_order, cost            as for :class:`~ddlsim.AllReduce`; measured or NCCL's times of both collectives

    Rules that need whole layers (LARS, LAMB) do not fit: their norms would have to be exchanged too.
    """

    reduce_scatter: Annotated[str | Collective, algorithm_of("reduce_scatter")] = "ring"
    all_gather: Annotated[str | Collective, algorithm_of("all_gather")] = "ring"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"

    @property
    def label(self) -> str:
        """The algorithms, and what they cost unless that is simulated."""
        return f"sharded update ({name_of(self.reduce_scatter)}, {name_of(self.all_gather)}{cost_said(self.cost)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """One update a step."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for an optimizer that is not element-wise."""
        learner = setting.learner
        if learner.task is not None and hasattr(learner.task.optimizer, "with_bounds"):
            raise ConfigError(
                f"ShardedUpdate: optimizer = {type(learner.task.optimizer).__name__} needs whole layers; use "
                "AllReduce, or an element-wise optimizer such as Momentum(0.9)"
            )
        members = Communicator(setting, Fabric("ring", self.rank_order, self.cost), owner="ShardedUpdate")
        scatter = Averaging(members, models=False, kind="reduce_scatter", algorithm=self.reduce_scatter)
        shards_together = Dense(members, "all_gather", self.all_gather)
        gather = Exchange(members, lambda _: shards_together, _itself, models=False, combine=learner.concatenate)
        shards = learner.parts(len(setting.workers))
        start_replicas(setting, lambda replica: self.work(replica, shards[replica.worker.rank], scatter, gather))
        setting.model, setting.replicas, setting.steps = lambda: setting.workers[0].params, None, None  # all are alike

    def work(
        self, replica: Replica, shard: slice, scatter: Averaging, gather: Exchange[Value[Array]]
    ) -> Process:
        """One worker's life; it keeps the optimizer state of its shard only."""
        worker = replica.worker
        replica.state = worker.learner.optimizer_state(worker.params[shard])
        while True:
            gradient = yield from worker.gradient()
            mean = yield from scatter.exchange(worker, replica.step, gradient)
            yield from worker.compute(worker.workload.optimizer / replica.n_workers, "optimizer")
            updated, replica.state = replica.after(worker.params[shard], mean[shard])
            worker.params = yield from gather.exchange(worker, replica.step, updated)
            replica.count()
            replica.end_step()


def _itself(params: Value[Array]) -> Value[Array]:
    return params
