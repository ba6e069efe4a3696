"""Random jobs on one random cluster: what they put on it adds up, and comes out the same again."""

import pytest
from draws import slow
from worlds_generator import WITHOUT_STEPS, jobs_world
from worlds_invariants import check_jobs

from ddlsim import Job
from ddlsim.strategies import FSDP, EmbeddingParallel, Hybrid, Parallel


@pytest.mark.parametrize("seed", [0, 2, *(slow(seed) for seed in (1, *range(3, 12)))])
def test_random_jobs_add_up_and_come_out_the_same_again(seed):
    check_jobs(jobs_world(seed))


@pytest.mark.slow
def test_every_kind_of_job_can_be_drawn():
    """Jobs of known costs, split models, shared storages, crashes, and faults of the cluster's links."""
    wanted = {"known", "split", "storage", "crashes", "fault"}
    for seed in range(200):
        drawn = jobs_world(seed)
        for one in [job.experiment for job in drawn.jobs if isinstance(job, Job)]:
            kinds = {
                "known": getattr(one.strategy, "cost", "simulated") != "simulated",
                "split": isinstance(one.strategy, Parallel | FSDP | Hybrid | EmbeddingParallel),
                "storage": one.input is not None,
                "crashes": one.failures is not None and isinstance(one.strategy, WITHOUT_STEPS),
                "fault": bool(drawn.faults),
            }
            wanted -= {kind for kind, there in kinds.items() if there}
        if not wanted:
            return
    assert not wanted
