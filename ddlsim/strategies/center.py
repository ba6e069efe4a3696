"""Servers that act together: one model, updated from whole gradients.

Where an update waits for several gradients, or a worker for others, the shards must agree on what has arrived:
a gradient counts when all servers have their part of it, and an update happens at all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddlsim.learning import Array, Value
from ddlsim.network import lane_tables as ls
from ddlsim.runtime.lane_ops import Op, gradient
from ddlsim.runtime.servers import WithServers, check_layers
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.shards import Shards, Visit, Visits, follows
from ddlsim.runtime.wires import Parcel
from ddlsim.runtime.worker import Worker
from ddlsim.strategies.staleness import Scaling, scaled


@dataclass
class Center:
    """The model at the servers: w <- w - eta * (1/c) sum_l f(tau_l) g_l for every ``count`` = c gradients.

    ``scaling`` is f. With ``drop_late``, gradients that are older than the latest update are thrown away.
    ``move`` makes the next model of that mean, the run's optimizer where there is none. ``version`` counts the updates.
    """

    shards: Shards
    count: int = 1
    scaling: Scaling | None = None
    drop_late: bool = False
    move: Callable[[Value[Array]], Value[Array]] | None = None
    version: int = 0
    gradients: dict[int, Value[Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting = self.shards.setting
        self.params = setting.learner.initial
        self._state = setting.learner.optimizer_state(self.params)
        setting.model = lambda: self.params

    @classmethod
    def of(
        cls, strategy: WithServers, setting: Setting, count: int = 1, scaling: Scaling | None = None, *,
        drop_late: bool = False,
    ) -> Center:  # fmt: skip
        """Place the strategy's servers. Raises ConfigError if there are not enough machines for them, or if the
        optimizer cannot work on parts of the parameters."""
        check_layers(type(strategy).__name__, setting.learner, strategy.servers)
        return cls(Shards.of(strategy, setting), count, scaling, drop_late)

    def go(self, *held: Op) -> None:
        """Let all workers compute a gradient, push it, wait for what is said, and pull the parameters, for ever."""
        compute = gradient(self.shards.setting, self._drawn if follows(self.shards) else None)
        self.visits(compute, [Op(ls.STEP)], lambda worker: self.gradients[worker.rank], held=held)

    def visits(
        self, before: Sequence[Op], after: Sequence[Op], vector: Callable[[Worker], Value[Array]], *,
        held: Sequence[Op] = (), steps: int = 1,
    ) -> None:  # fmt: skip
        """Let all workers go round, and push a `vector` of so many steps between ``before`` and ``after``."""
        wires = self.shards.wires
        Visits(
            self.shards, before, after, count=self.count, update=self.update, answer=self._answer, held=held,
            pack=lambda worker: wires.gradient(worker, vector(worker)), steps=steps, late=not self.drop_late,
            told=not self.drop_late,
        )  # fmt: skip

    def _drawn(self, worker: Worker) -> None:
        self.gradients[worker.rank] = worker.draw()

    def _answer(self, worker: Worker) -> Parcel:
        parcel = self.shards.wires.answer(worker, self.params)
        worker.params = parcel.value
        return parcel

    def update(self, gradients: Sequence[Visit]) -> None:
        """Make an update now. The sum is in the order of the ranks, whoever came first."""
        setting = self.shards.setting
        learner, stop = setting.learner, setting.stop
        in_order = sorted(gradients, key=lambda g: g.rank)
        mean = learner.mean([scaled(g.value, self.scaling, g.staleness) for g in in_order])
        if self.move is not None:
            self.params = self.move(mean)
        else:
            self.params, self._state = learner.update(self.params, mean, self._state, learner.rate(stop.n_samples))
        self.version += 1
        stop.updated(sum(g.n_samples for g in gradients))
