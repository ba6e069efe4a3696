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

A list of arrivals is a CSV file: ``arrivals = "arrivals.csv"``, with the columns start_s and workers, and any of name,
placement, model, batch_size, steps and seed; what all of its jobs have in common stands in a table ``[arriving]``, the
fields of an experiment.

The keys of the tables are the fields of :class:`ddlsim.Job`, :class:`ddlsim.Background` and
:class:`ddlsim.LinkFault` (type "random-faults": :class:`ddlsim.RandomFaults`).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.jobs.jobs import Jobs
from ddlsim.jobs.simulate import FaultLike, simulate_jobs
from ddlsim.life import Background
from ddlsim.plain import read_toml
from ddlsim.run.files import SCHEMA, with_cluster
from ddlsim.run.job import Job
from ddlsim.schema import Source

#: columns of a list of arrivals that are fields of the experiment, and how they are read
_FIELDS = {"model": str, "workers": int, "batch_size": int, "steps": int, "seed": int}


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
    here = Source(path.parent, allow_code)
    table = with_cluster(read_toml(path), "jobs")
    file = SCHEMA.build(_File, table, str(path), here, ": ")
    listed: tuple[Job | Background, ...] = ()
    if file.arrivals is not None:
        rows = _arrivals(path.parent / file.arrivals, {"cluster": file.cluster, **(file.arriving or {})})
        listed = SCHEMA.value(Sequence[Job], rows, f"{path}: {Path(file.arrivals).name}", "", here)  # type: ignore[assignment]
    elif file.arriving is not None:
        raise ConfigError(f"{path}: arriving has no effect without arrivals, a CSV file of jobs; leave it out")
    return JobsFile(file.cluster, (*file.jobs, *file.background, *listed), file.queue, tuple(file.faults))


@checked
@dataclass(frozen=True)
class _File:
    """The keys of a file."""

    cluster: str | Path
    jobs: Sequence[Job | Background] = ()
    background: Sequence[Background | Job] = ()
    queue: bool = False
    faults: Sequence[FaultLike] = ()
    arrivals: str | None = None
    arriving: Mapping[str, object] | None = None


def _arrivals(path: Path, common: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the jobs of a list of arrivals as tables. Raises ConfigError, with the line, for what cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            for name in ("start_s", "workers"):
                if name not in columns:
                    raise ConfigError(f"{path}: has no column {name!r}; a list of arrivals has start_s and workers")
            for name in columns:
                if name not in {"start_s", "name", "placement", *_FIELDS}:
                    raise unknown_name("column", name, ["start_s", "name", "placement", *_FIELDS], str(path))
            return [_arrival(path, line, row, common) for line, row in enumerate(reader, 2)]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; arrivals is a CSV file of jobs") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file: {error}") from None


def _arrival(path: Path, line: int, row: dict[str, str], common: Mapping[str, object]) -> dict[str, object]:
    experiment = dict(common)
    for name, read in _FIELDS.items():
        if text := (row.get(name) or "").strip():
            if read is int and not text.isdecimal():
                raise ConfigError(f"{path}:{line}: {name} = {shown(text)}: must be a whole number")
            experiment[name] = read(text)
    try:
        start = float(row["start_s"])
    except (TypeError, ValueError):
        raise ConfigError(f"{path}:{line}: start_s = {shown(row['start_s'])}: must be a number of seconds") from None
    told = {name: row[name].strip() for name in ("name", "placement") if (row.get(name) or "").strip()}
    return {**told, "start": f"{start!r} s", "experiment": experiment}
