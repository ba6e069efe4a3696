"""`simulate_jobs`: several jobs on one clock and one network; also from files (docs/jobs.md, In files).

The keys of the tables ``[[jobs]]``, ``[[background]]`` and ``[[faults]]`` are the fields of :class:`ddlsim.Job`,
:class:`ddlsim.Background` and, by their ``type``, :class:`ddlsim.LinkFault`, :class:`ddlsim.RandomFaults` and
:class:`ddlsim.Pause`. Jobs can also come from a CSV file, ``arrivals = "arrivals.csv"``; the table ``[arriving]``
contains the fields of the experiment that all these jobs have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddlsim.arguments import Count, Seed, checked
from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.jobs.jobs import Jobs, Ran
from ddlsim.plain import read_toml
from ddlsim.reliability import Background, RandomFaults
from ddlsim.reliability.failures import read_rows
from ddlsim.reliability.faults import SharedFault, at_random, up_to_its_end
from ddlsim.run.experiment import Job
from ddlsim.run.files import SCHEMA, with_cluster
from ddlsim.run.notes import late_notes
from ddlsim.run.simulate import Together, random_faults_of
from ddlsim.schema import Source

JobLike = Annotated[
    Job | Background, "a ddlsim.Job or ddlsim.Background object", "ddlsim.Job or ddlsim.Background objects"
]


@checked
def simulate_jobs(
    jobs: Sequence[JobLike],
    cluster: ClusterLike | None = None,
    *,
    queue: bool = False,
    timeline: bool = False,
    faults: Sequence[SharedFault] = (),
) -> Jobs:
    """Simulate several jobs that share a cluster and a clock, until all have ended. Each job can have its own strategy.

    jobs      sequence of :class:`ddlsim.Job` and :class:`ddlsim.Background` objects
    cluster   cluster for all jobs, which replaces the clusters of their experiments; None: the first job's cluster
    queue     True: jobs whose devices are occupied wait (first come, first served); False: occupied devices raise an
              error
    faults    faults of the shared cluster, timed on its clock: slow or dead links (LinkFault, or RandomFaults sampled
              from the first job's seed) and maintenance windows (Pause). Faults of workers belong in the jobs'
              experiments
    timeline  whether to record the activity for :meth:`Jobs.plot_timeline`

    Jobs are assigned devices when they start; jobs that list their devices get exactly those. A job that shares no
    links with other jobs has exactly the same results as when it is simulated on its own. When a job ends, its messages
    in flight are still delivered. On Ctrl-C, the results so far are returned and marked as interrupted.

    Raises :class:`~ddlsim.errors.ConfigError` if a job does not fit on the cluster; the message names the job and
    suggests a correction.
    """
    real_jobs = [job for job in jobs if isinstance(job, Job)]
    if not real_jobs or all(job.endless for job in real_jobs):
        raise ConfigError("simulate_jobs: jobs: must contain at least one ddlsim.Job with endless=False")
    loaded = load_cluster(real_jobs[0].experiment.cluster if cluster is None else cluster)
    loaded = loaded.sampled(real_jobs[0].experiment.seed)
    if cluster is not None:
        real_jobs = [dataclasses.replace(job, experiment=job.experiment.with_(cluster=loaded)) for job in real_jobs]
    names = _names(real_jobs)
    traffic = [flow for flow in jobs if isinstance(flow, Background)]
    random: list[RandomFaults] = at_random(faults)
    if wrong := [fault for fault in faults if isinstance(fault, RandomFaults) and fault.kind != "link"]:
        raise ConfigError(
            f"simulate_jobs: faults: kind = {wrong[0].kind!r} affects workers, not the shared network; "
            "set it in the experiment of a job, Experiment(faults=...), or use kind='link'"
        )

    def simulated(horizon: float) -> Together:
        seed = real_jobs[0].experiment.seed
        together = Together(
            loaded, traffic, queue=queue, keep_spans=timeline, faults=faults, seed=seed, horizon=horizon
        )
        for job, name in zip(real_jobs, names, strict=True):
            together.expect(job, name)
        together.until_all_have_ended()
        return together

    random += [fault for job in real_jobs for fault in random_faults_of(job.experiment)]
    together = up_to_its_end(random, loaded, simulated)
    if not together.interrupted:
        together.check()
    goodputs = tuple(together.goodput(i) for i in range(len(traffic)))
    late = tuple(late_notes((*faults, *traffic), together.network.now))
    ran = []
    begun = [tenant for tenant in together.tenants if tenant.run is not None]
    for tenant, share in zip(begun, together.shares(), strict=True):
        if tenant.result is not None:  # a continuing job may not have arrived before the others ended
            co_located = tuple(name for name in names if name != tenant.name)
            notes = (*tenant.result.notes, *late)
            result = dataclasses.replace(tenant.result, co_located=co_located, share=share, notes=notes)
            times = tenant.came, tenant.start, tenant.end
            ran.append(Ran(tenant.job, tenant.name, tuple(tenant.places), *times, result))
    network = together.network
    links = (network.now, network.channel_nbytes - network.channel_overhead, network.channel_busy)
    return Jobs(tuple(ran), tuple(traffic), goodputs, loaded, *links, together.interrupted)


def _names(jobs: Sequence[Job]) -> list[str]:
    names = [job.name or f"job {number}" for number, job in enumerate(jobs, 1)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"simulate_jobs: two jobs have the name {twice[0]!r}; names must be unique")
    return names


@dataclass(frozen=True)
class JobsFile:
    """The contents of a jobs file: arguments for :func:`ddlsim.simulate_jobs`. Use :meth:`simulate` to run the jobs."""

    cluster: ClusterLike
    jobs: tuple[Job | Background, ...]
    queue: bool = False
    faults: tuple[SharedFault, ...] = ()

    @checked
    def simulate(self, *, timeline: bool = False) -> Jobs:
        """Simulate the jobs; see :func:`ddlsim.simulate_jobs`."""
        return simulate_jobs(self.jobs, self.cluster, queue=self.queue, timeline=timeline, faults=self.faults)


@checked
def load_jobs(source: str | Path, *, allow_code: bool = False) -> JobsFile:
    """Load jobs from a TOML file.

    source      path of the file
    allow_code  whether the file may refer to custom code, as in :func:`ddlsim.load_experiment`

    Raises ConfigError for an invalid file.
    """
    path = Path(source)
    here = Source(path.parent, allow_code)
    table = with_cluster(read_toml(path), "jobs")
    file = SCHEMA.build(_File, table, str(path), here, ": ")
    listed: tuple[Job | Background, ...] = ()
    if file.arrivals is not None:
        rows = _arrivals(path.parent / file.arrivals, {"cluster": file.cluster, **(file.arriving or {})})
        listed = SCHEMA.value(Sequence[Job], rows, f"{path}: {Path(file.arrivals).name}", "", here)  # type: ignore[assignment]
    elif file.arriving is not None:
        raise ConfigError(f"{path}: arriving has no effect without arrivals, a CSV file of jobs; leave arriving out")
    return JobsFile(file.cluster, (*file.jobs, *file.background, *listed), file.queue, tuple(file.faults))


@checked
@dataclass(frozen=True)
class _File:
    cluster: str | Path
    jobs: Sequence[Job | Background] = ()
    background: Sequence[Background | Job] = ()
    queue: bool = False
    faults: Sequence[SharedFault] = ()
    arrivals: str | None = None
    arriving: Mapping[str, object] | None = None


def _arrivals(path: Path, common: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the jobs of a list of arrivals as tables. Raises ConfigError, with the line, for invalid rows."""
    columns: dict[str, object] = {"start_s": float, "seed": Seed | None}
    columns |= dict.fromkeys(("name", "placement", "model"), str | None)
    columns |= dict.fromkeys(("workers", "batch_size", "steps"), Count | None)
    jobs: list[dict[str, object]] = []
    for row in read_rows(path, columns, ("start_s", "workers"), "a list of arrivals", only=True):
        set_here = {name: value for name, value in row.items() if value is not None}
        settings: dict[str, object] = {name: set_here.pop(name) for name in ("name", "placement") if name in set_here}
        start = f"{float(set_here.pop('start_s'))!r} s"
        jobs.append({**settings, "start": start, "experiment": {**common, **set_here}})
    return jobs
