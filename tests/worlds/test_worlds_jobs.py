"""Random jobs on one random cluster: what they put on it adds up, and comes out the same again."""

import random

import pytest
from worlds_generator import world

import ddlsim
from ddlsim import Background, Job


def seen(result):
    """Return what a run is, as plain numbers."""
    recorder = result.recorder
    return result.end_time, recorder.updates, recorder.seconds, recorder.idle, result.nbytes_sent, result.n_messages


@pytest.mark.parametrize("seed", range(12))
def test_random_jobs_add_up_and_come_out_the_same_again(seed):
    """Several random runs on one random cluster: what they put on it adds up (checked before it returns)."""
    draw = random.Random(f"jobs {seed}")
    jobs, own = [], None
    for number in range(40):
        experiment = world(1000 * seed + number).experiment
        if own is None:
            own = experiment.cluster
            if len(own.workers) < 4 or len(own.workers) > 40:
                own = None
                continue
        n = draw.randint(2, max(2, len(own.workers) // 3))
        job = Job(
            experiment.with_(cluster=own, workers=n, failures=None, checkpoints=None, elastic=None, speed=None,
                             slow_downs=(), faults=(), device=None, input=None),
            f"job {number}", start=draw.choice((0.0, 0.01, 0.1)),
            placement=draw.choice(("packed", "spread", "random")),
        )  # fmt: skip
        try:
            ddlsim.simulate_jobs([job], queue=True)
        except ddlsim.DdlsimError:
            continue  # its parts do not fit together on this cluster
        jobs.append(job)
        if len(jobs) == 3:
            break
    ends = draw.sample([own.node_names[node] for node in own.workers.tolist()], 2)
    traffic = Background(*ends, draw.choice((None, "50 Mbit/s")), on="10 ms", off="5 ms")
    first, again = (ddlsim.simulate_jobs([*jobs, traffic], queue=True) for _ in range(2))
    assert len(first) == len(jobs)
    for one, other in zip(first.runs, again.runs, strict=True):
        assert seen(one.result) == seen(other.result)
    assert first.goodputs == again.goodputs
