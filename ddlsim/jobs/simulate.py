"""`simulate_jobs`: one clock and one network for several jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from ddlsim.arguments import checked
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.jobs.jobs import Jobs, Ran
from ddlsim.life import Background, LinkFault, Pause, RandomFaults
from ddlsim.life.faults import Fault, at_random, up_to_its_end
from ddlsim.run.job import Job
from ddlsim.run.notes import late_notes
from ddlsim.run.simulate import random_faults_of
from ddlsim.run.together import Together

FaultLike = Annotated[
    LinkFault | Pause | RandomFaults | Fault,
    "a ddlsim.LinkFault, ddlsim.Pause, ddlsim.RandomFaults or an object with effects",
]
JobLike = Annotated[Job | Background, "a ddlsim.Job or a ddlsim.Background"]


@checked
def simulate_jobs(
    jobs: Sequence[JobLike],
    cluster: ClusterLike | None = None,
    *,
    queue: bool = False,
    timeline: bool = False,
    faults: Sequence[FaultLike] = (),
) -> Jobs:
    """Simulate several jobs, with any strategies, on one cluster with one clock, until all have ended.

    jobs      what runs: :class:`ddlsim.Job` and :class:`ddlsim.Background` traffic
    cluster   where; None: on that of the first job. Experiments made for another one run here all the same
    queue     jobs whose devices are not free wait for them, first come, first served; otherwise that is an error
    faults    links of the cluster that are slow or down, on its clock, also at random, by the seed of the first job,
              and times in which nobody starts anything (Pause); faults of workers stand in their experiments
    timeline  keep what :meth:`Jobs.plot_timeline` draws

    Jobs get devices when they start, those with named places the same as they would alone. Jobs that share no link are,
    bit for bit, what they are alone. When a job ends, what it still has on its way arrives. On Ctrl-C what has been
    simulated so far is returned, marked as interrupted.

    Raises :class:`~ddlsim.errors.ConfigError` for jobs that do not fit, naming the job and the remedy.
    """
    own = [each for each in jobs if isinstance(each, Job)]
    if not own or all(each.goes_on for each in own):
        raise ConfigError("simulate_jobs: jobs has none that ends; give it one ddlsim.Job or more without goes_on")
    loaded = load_cluster(own[0].experiment.cluster if cluster is None else cluster)
    if cluster is not None:
        own = [dataclasses.replace(each, experiment=each.experiment.with_(cluster=loaded)) for each in own]
    names = _names(own)
    traffic = [each for each in jobs if isinstance(each, Background)]
    random: list[RandomFaults] = at_random(faults)
    if wrong := [fault for fault in faults if isinstance(fault, RandomFaults) and fault.kind != "link"]:
        raise ConfigError(
            f"simulate_jobs: faults: kind = {wrong[0].kind!r} happens to workers; give it to their experiments, "
            "Experiment(faults=...), or use kind='link'"
        )

    def made(horizon: float) -> Together:
        together = Together(
            loaded, traffic, queue=queue, keep_spans=timeline, faults=faults, seed=own[0].experiment.seed,
            horizon=horizon,
        )  # fmt: skip
        for job, name in zip(own, names, strict=True):
            together.expect(job, name)
        together.until_all_have_ended()
        return together

    random += [fault for job in own for fault in random_faults_of(job.experiment)]
    together = up_to_its_end(random, loaded, made)
    if not together.interrupted:
        together.check()
    goodputs = tuple(together.goodput(i) for i in range(len(traffic)))
    late = late_notes((*faults, *traffic), together.network.now)
    ran = []
    begun = [tenant for tenant in together.tenants if tenant.run is not None]
    for tenant, share in zip(begun, together.shares(), strict=True):
        if tenant.result is not None:  # one that goes on may not have come before the others ended
            company = tuple(name for name in names if name != tenant.name)
            notes = (*tenant.result.notes, *late)
            result = dataclasses.replace(tenant.result, company=company, share=share, notes=notes)
            times = tenant.came, tenant.start, tenant.end
            ran.append(Ran(tenant.job, tenant.name, tuple(tenant.places), *times, result))
    network = together.network
    return Jobs(
        tuple(ran), tuple(traffic), goodputs, loaded, network.now, network.channel_nbytes - network.channel_overhead,
        network.channel_busy, together.interrupted,
    )  # fmt: skip


def _names(jobs: Sequence[Job]) -> list[str]:
    names = [job.name or f"job {number}" for number, job in enumerate(jobs, 1)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"simulate_jobs: two jobs have the name {name!r}; give each one of its own")
    return names
