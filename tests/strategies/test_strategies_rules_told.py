"""`check_strategy` tells which rule a user's strategy breaks."""

import itertools
from dataclasses import dataclass

import pytest

import ddlsim
from ddlsim.runtime import Averaging, communicator, start_replicas
from ddlsim.testing import check_strategy

CHANCE = itertools.count(1)


@dataclass(frozen=True)
class Own(ddlsim.WithFabric):
    """Averages models in every step; or with a mistake."""

    mistake: str = ""
    label = "own"

    def updates(self, steps, n_workers):
        return steps * n_workers if self.mistake == "updates" else steps

    def start(self, context):
        average = Averaging(communicator(context, self))
        factor = 1.0 if self.mistake != "chance" else 1.0 / next(CHANCE)
        start_replicas(context, lambda replica: self.work(replica, average, factor))

    def work(self, replica, average, factor):
        worker = replica.worker
        while True:
            gradient = yield from worker.gradient()
            yield from worker.optimizer_step()
            if self.mistake in ("half", "chance"):
                gradient = gradient * (0.5 * factor)
            worker.params, replica.state = replica.after(worker.params, gradient)
            replica.count()
            worker.params = yield from average.mean(worker, replica.step, worker.params)
            replica.end_step()


def test_one_that_keeps_the_rules_passes():
    check_strategy(Own(), n_workers=3)
    check_strategy(Own("half"), n_workers=2, alone=False)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("updates", r"Own: updates\(4, 2\) is 8, but .* use 112 samples; 4 steps of 2 workers"),
        ("chance", "Own: two runs with the same seed differ; draw from ddlsim's streams"),
        ("half", "Own: with one worker, it differs from plain SGD"),
    ],
)
def test_what_is_broken_is_told(mistake, said):
    with pytest.raises(ddlsim.ConfigError, match=said):
        check_strategy(Own(mistake), n_workers=2)
