"""Files of several jobs.

.. code-block:: toml

    cluster = "cloud-25g-16x8-v100"
    queue = true                           # jobs wait for devices, first come, first served

    [[jobs]]
    name = "vision"
    experiment = { model = "resnet50", batch_size = 64, workers = 32 }

    [[jobs]]
    name = "language"
    start = "12 s"
    placement = "spread"
    experiment = "bert.toml"               # a file beside this one

    [[background]]
    source = "h0.cpu"
    target = "h9.cpu"
    rate = "10 Gbit/s"

    [[faults]]
    type = "link-fault"
    source = "h0"
    target = "leaf0"
    start = "20 s"
    duration = "5 s"

The keys of the tables are the fields of :class:`ddlsim.Job`, :class:`ddlsim.Background` and
:class:`ddlsim.LinkFault` (type "random-faults": :class:`ddlsim.RandomFaults`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ddlsim.arguments import checked
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.jobs.jobs import Jobs
from ddlsim.jobs.simulate import FaultLike, simulate_jobs
from ddlsim.life import Background
from ddlsim.run.files import beside, neighbours, value_of
from ddlsim.run.job import Job
from ddlsim.run.tables import Table
from ddlsim.workload.toml_files import read_toml, validate


class _File(Table):
    cluster: str
    jobs: list[dict[str, object]]
    background: list[dict[str, object]] | None = None
    queue: bool = False
    faults: list[dict[str, object]] | None = None


@dataclass(frozen=True)
class JobsFile:
    """What a file of jobs says; :meth:`simulate` it."""

    cluster: ClusterLike
    jobs: tuple[Job | Background, ...]
    queue: bool = False
    faults: tuple[FaultLike, ...] = ()

    @checked
    def simulate(self, *, timeline: bool = False) -> Jobs:
        """Simulate the jobs, as :func:`ddlsim.simulate_jobs`."""
        return simulate_jobs(self.jobs, self.cluster, queue=self.queue, timeline=timeline, faults=self.faults)


@checked
def load_jobs(source: str | Path, *, allow_code: bool = False) -> JobsFile:
    """Return the jobs that the TOML file `source` describes. Raises ConfigError in one line, as
    :func:`ddlsim.load_experiment`, which says what `allow_code` is for."""
    path = Path(source)
    table = read_toml(path)
    told = validate(TypeAdapter(_File), table, str(path), _File.model_fields)
    jobs = neighbours(path, "jobs", table["jobs"], told.cluster, allow_code=allow_code)
    traffic = neighbours(path, "background", table.get("background", []), told.cluster, allow_code=allow_code)
    faults = value_of(path, "faults", table.get("faults", []), f"{path}: faults")
    return JobsFile(beside(path, told.cluster), (*jobs, *traffic), told.queue, faults)  # type: ignore[arg-type]
