"""Tables of studies that need no simulation: every number follows from the settings by a formula."""

import dataclasses
import itertools
import json

from ddlsim.learning.monitor import Row
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, FAILED, SKIPPED, Outcome

WORKERS = (8, 16, 32, 64)
STRATEGIES = ("ring", "servers")
BANDWIDTHS = ("25 Gbit/s", "100 Gbit/s")


def record(workers, efficiency, seed, cost=3.0):
    """100 samples/s a worker; compute takes the share that is efficient, seeds differ by 1 %."""
    factor = 1.0 + 0.01 * seed
    throughput = 100.0 * workers * efficiency * factor
    return {
        "n_workers": workers, "throughput": throughput, "step_time": 100.0 * workers / throughput,
        "speedup": workers * efficiency, "efficiency": efficiency, "compute_share": efficiency,
        "communication_share": 0.75 * (1.0 - efficiency), "waiting_share": 0.25 * (1.0 - efficiency),
        "idle_share": 0.0, "mean_staleness": 0.0, "nbytes_per_step": 1e8, "simulated_time": 10.0, "n_messages": 100,
        "cost": cost, "energy": None, "cost_per_sample": cost * workers**1.2 / throughput, "energy_per_sample": None,
        "stop_reason": "", "notes": ["a note"], "warnings": [],
    }  # fmt: skip


def efficiency(workers, strategy, bandwidth):
    share = {"ring": 0.1, "servers": 0.2}[strategy] * {"25 Gbit/s": 2.0, "100 Gbit/s": 1.0}[bandwidth]
    return 1.0 / (1.0 + share * workers / 64.0)


def study(n_seeds=2, workers=WORKERS, spoil=True):
    """A grid; with `spoil` 64 workers with servers do not fit, and one seed of another configuration has failed."""
    members, outcomes = [], {}
    for n, strategy, bandwidth in itertools.product(workers, STRATEGIES, BANDWIDTHS):
        settings = {"workers": n, "strategy": strategy, "cluster.nic.bandwidth": bandwidth}
        for seed in range(n_seeds):
            key = f"{n}-{strategy}-{bandwidth}-{seed}"
            members.append(Member(key, settings, seed))
            outcomes[key] = Outcome(DONE, "", record(n, efficiency(n, strategy, bandwidth), seed), 0.25)
            if spoil and (n, strategy) == (64, "servers"):
                outcomes[key] = Outcome(SKIPPED, "workers = 64: <too many> & no room")
    if spoil:
        outcomes["8-ring-25 Gbit/s-1"] = Outcome(FAILED, "ZeroDivisionError: division by zero")
    table = Table(list(settings), members, outcomes)
    return dataclasses.replace(table, experiments=experiments(table))


def experiments(table):
    """The experiment of each point as JSON; the strategy is an object."""
    return {
        m.key: json.dumps({
            "model": {"name": "resnet50", "digest": "abc"}, "cluster": {"name": "rented", "digest": m.key[:4]},
            "batch_size": 32, "workers": m.settings["workers"], "seed": m.seed,
            "strategy": {"type": "Any", "algorithm": m.settings["strategy"]},
        })
        for m in table.members
    }  # fmt: skip


def row(time, accuracy):
    return Row(
        time=time, updates=10, samples=320, epoch=1.0, rate=0.1, train_loss=1.0, loss=1.0, accuracy=accuracy,
        nbytes=1e6, staleness=0.0, consensus=None,
    )  # fmt: skip


def learners():
    """Two strategies with two seeds: accuracy rises on straight lines, by 0.1 and 0.2 a second, and twice as fast."""
    members, outcomes = [], {}
    for strategy, speed in (("slow", 1.0), ("fast", 2.0)):
        for seed in range(2):
            rate = speed * (0.1, 0.2)[seed]
            history = [list(row(float(t), rate * t)) for t in (0, 1, 2 + seed)]
            reached = 0.4 / rate if rate * (2 + seed) >= 0.4 else float("inf")
            found = record(4, 0.5, seed) | {
                "accuracy": rate * (2 + seed), "loss": 1.0, "updates": 10, "epochs": 1.0, "history": history,
                "time_to_accuracy": reached, "cost_to_accuracy": None, "energy_to_accuracy": None,
            }  # fmt: skip
            members.append(Member(f"{strategy}{seed}", {"strategy": strategy}, seed))
            outcomes[f"{strategy}{seed}"] = Outcome(DONE, "", found, 0.25)
    return Table(["strategy"], members, outcomes)
