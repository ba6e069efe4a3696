"""`Rounds`: a server that draws some of the workers, sends them its model, and waits for what they make of it."""

from __future__ import annotations

import simpy

from ddlsim.learning import Array, Value, weighted_sum
from ddlsim.runtime.shards import Shards, communicate, wait
from ddlsim.runtime.worker import Process, Worker
from ddlsim.streams import stream


class Rounds:
    """Rounds of `n_drawn` workers each, drawn by chance, all different: :meth:`enter` them, compute, :meth:`leave`.

    A round is an update, when all that were drawn have left it: the model at the ``servers`` (which exchange models)
    is the mean of theirs then, weighted and summed in float64 in the order of the ranks.

    params  the model, shape (n_params,)
    """

    def __init__(self, servers: Shards, n_drawn: int) -> None:
        setting = servers.setting
        self.servers = servers
        self.n_drawn = n_drawn
        self.params = setting.learner.initial
        self._plane, self._stop, self._env = setting.learner.plane, setting.stop, setting.loop.env
        self._draws = stream(setting.seed, 0, "rounds")
        self._drawn: list[simpy.Event] = [self._env.event() for _ in setting.workers]
        #: by rank: model, weight and samples of those that have left the round
        self._models: dict[int, tuple[Value[Array], float, int]] = {}
        setting.model = lambda: self.params
        self._draw()

    def _draw(self) -> None:
        for rank in sorted(self._draws.choice(len(self._drawn), self.n_drawn, replace=False).tolist()):
            self._drawn[rank].succeed()

    def enter(self, worker: Worker) -> Process:
        """Wait until the worker is drawn, and pull the model: it is what the worker works with then."""
        yield from wait(worker, self._drawn[worker.rank], "a round that it is drawn for")
        self._drawn[worker.rank] = self._env.event()
        answer = self.servers.wires.answer(worker, self.params)
        yield from self.servers.pull(worker, answer)
        worker.params = answer.value

    def leave(self, worker: Worker, weight: float, n_samples: int) -> Process:
        """Push the worker's model, which `n_samples` have gone into; the last one to come ends the round."""
        servers = self.servers
        model = servers.wires.model(worker, worker.params)
        yield from servers.push(worker, model)
        with servers.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            yield from communicate(worker, self._env.timeout(servers.wires.server_seconds()), "decode")
            self._models[worker.rank] = model.value, weight, n_samples
            if len(self._models) == self.n_drawn:
                yield from self._end(worker)

    def _end(self, worker: Worker) -> Process:
        """Make the update, for which the last worker waits, and draw the next round."""
        begin = worker.loop.now
        yield from communicate(worker, self._env.timeout(self.servers.apply_time), "update")
        self.servers.show_update(begin)
        models, weights, samples = zip(*[self._models[rank] for rank in sorted(self._models)], strict=True)
        self._models = {}
        total = sum(weights)
        self.params = weighted_sum(self._plane, [weight / total for weight in weights], models)
        self._stop.updated(sum(samples))
        self._draw()
