"""Failures of parts of a cluster, and the recovery of a run from them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np

from ddlsim.arguments import Count, Index, NotNegative, Positive, Rule, Seed, Share, checked, number, one_of, quantity
from ddlsim.arguments.annotations import rule_of
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats
from ddlsim.cluster.groups import machines_of, ranks_of_parts
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import check_separator
from ddlsim.reliability.faults import recurring
from ddlsim.units import si


def read_rows(
    path: Path, columns: Mapping[str, Any], needed: Sequence[str], what: str, *, only: bool = False
) -> list[dict[str, Any]]:
    """Return the cells of each row of a CSV file by column; None for empty cells and missing columns.

    columns  name -> annotation of its values (:mod:`ddlsim.arguments`); ``str | None`` for texts
    needed   required columns
    what     description of the file, for errors
    only     whether other columns raise ConfigError

    Raises ConfigError, with the line, for invalid content.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            there = reader.fieldnames or ()
            check_separator(there, str(path))
            if missing := [name for name in needed if name not in there]:
                raise ConfigError(f"{path}: column {missing[0]!r} is missing; {what} needs {' and '.join(needed)}")
            if only and (unknown := [name for name in there if name not in columns]):
                raise unknown_name("column", unknown[0], columns, str(path))
            rules = {name: (cast(Rule, rule_of(kind)), kind == str | None) for name, kind in columns.items()}
            return [
                {
                    name: rule(_cell(cells.get(name), is_text=is_text), f"{path}:{line}: {name}")
                    for name, (rule, is_text) in rules.items()
                }
                for line, cells in enumerate(reader, 2)
            ]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; set the path of {what}, a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file: {error}") from None


def _cell(text: str | None, *, is_text: bool) -> str | float | None:
    """Return a cell as a number if it is one, and None if it is empty."""
    for kind in () if is_text else (int, float):
        with suppress(TypeError, ValueError):
            return kind(text)  # type: ignore[arg-type]
    return (text or "").strip() or None


#: time after which a hanging collective is aborted, in s: PyTorch's for NCCL (``default_pg_nccl_timeout``)
COLLECTIVE_TIMEOUT = 600.0
#: maximum number of sampled failures
MOST = 1_000_000
#: failing parts that take no machine out of service
_SOFTWARE = "job"

Time = Annotated[float | str, quantity("time", "20 min", zero=True)]


class Failure(NamedTuple):
    """A failure of a part: time in s, number of the part, time until it is repaired in s."""

    time: float
    unit: int
    repair: float


@checked
@dataclass(frozen=True)
class Failures:
    """Crashes and hangs from which a run has to recover.

    Synchronous training resumes from its latest checkpoint or, with :class:`ddlsim.Elastic`, continues with the
    surviving workers. In asynchronous training, the other workers continue: a worker that crashes loses the gradient it
    was computing, and pulls the current model when it is back.

    mtbf     mean time between failures of a single unit (see `per`), in s or as a string such as "50000 h"
    per      the unit that fails: "device"; "host" (one machine); "rack" (all machines of a rack at once, for example
             because its switch or power feed fails); "switch" (a switch between machines; the machines keep their
             state); or "job" (a software failure; no hardware is repaired)
    kind     "crash": the failure is detected at once, and the machine is out of service until it is repaired. "hang":
             the other workers wait until their timeout expires, and the job then restarts on the same machines
    shape    shape of the Weibull distribution of times between failures: 1 is exponential; below 1, early failures are
             more frequent (0.7 to 0.8 for large systems at LANL; Schroeder and Gibson 2006)
    repair   time in s until a machine (or switch) that has crashed is back in service; inf: never
    spares   standby machines that replace crashed ones
    detection  time in s until a failure is detected; None: 0 for a crash, 10 min (PyTorch's NCCL timeout) for a hang
    restart  time in s until the job runs, after the failure has been detected and a machine is available: allocation,
             process start and rendezvous. Reading the checkpoint takes additional time (:class:`ddlsim.Checkpoints`)
    warning  advance notice in s before the provider reclaims a machine, as for spot instances (2 min on AWS, 30 s on
             Google Cloud and Azure). If there is time, the state is saved at the end of the current step (an elastic
             group continues without the machine). Then no work is lost, and the job restarts once a machine is
             available. None: no advance notice
    discount  price reduction for such machines, as a fraction; 0.7: 70 % off
    trace    CSV file of failures that replaces `mtbf`, with the columns ``time_s``, ``unit`` (number of the device,
             host, rack or switch among those that the run uses, from 0) and, if they differ, ``repair_s``
    machines_per_rack  number of consecutive machines of the cluster per rack; None: machines on the same first switch
             form a rack

    The clock of a part also runs while the job is down, and a repaired part is as good as new. A failure during a
    restart restarts the job again. Raises ConfigError for contradictory arguments and for arguments without effect.
    """

    mtbf: Annotated[float | str, quantity("time", "50000 h", infinite=True)] | None = None
    _: KW_ONLY
    per: Annotated[str, one_of("device", "host", "rack", "switch", "job")] = "device"
    kind: Annotated[str, one_of("crash", "hang")] = "crash"
    shape: Positive = 1.0
    repair: Annotated[float | str, quantity("time", "20 min", zero=True, infinite=True)] = 1200.0
    spares: Index = 0
    detection: Time | None = None
    restart: Time = 120.0
    trace: str | Path | None = None
    machines_per_rack: Count | None = None
    warning: Time | None = None
    discount: Share = 0.0

    def __post_init__(self) -> None:
        if (self.mtbf is None) == (self.trace is None):
            raise ConfigError("Failures: set either mtbf, such as mtbf='50000 h', or trace, a CSV file of failures")
        if self.per == _SOFTWARE and self.spares:
            raise ConfigError(
                f"Failures: spares = {self.spares} has no effect with per='job', because no machine fails; leave "
                "spares out"
            )
        if self.per == "switch" and self.spares:
            raise ConfigError(
                f"Failures: spares = {self.spares}: spare machines cannot replace a switch; use per='host', "
                "or leave spares out"
            )
        if self.machines_per_rack is not None and self.per != "rack":
            raise ConfigError(
                f"Failures: machines_per_rack = {self.machines_per_rack} has no effect with per={self.per!r}; leave "
                "machines_per_rack out, or use per='rack'"
            )

        for name, value in (("warning", self.warning), ("discount", self.discount or None)):
            if value is not None and (self.per == "switch" or not self.takes_machines):
                raise ConfigError(
                    f"Failures: {name} = {value!r} applies only to failures that put machines out of service "
                    f"(kind='crash' and per='device', 'host' or 'rack'), not to kind={self.kind!r} and "
                    f"per={self.per!r}; leave {name} out"
                )

    @property
    def warning_seconds(self) -> float:
        """Advance notice before a failure, in s; 0: none."""
        return 0.0 if self.warning is None else si(self.warning, "time")

    @property
    def detection_seconds(self) -> float:
        """Time in s until a failure is detected."""
        if self.detection is None:
            return COLLECTIVE_TIMEOUT if self.kind == "hang" else 0.0
        return si(self.detection, "time")

    @property
    def takes_machines(self) -> bool:
        """Whether a failure puts machines out of service until they are repaired."""
        return self.kind == "crash" and self.per != _SOFTWARE

    @property
    def never_repairs(self) -> bool:
        """Whether machines that crash at random are never repaired."""
        mean = si(self.mtbf or math.inf, "time")
        return self.takes_machines and self.trace is None and math.isinf(si(self.repair, "time")) and mean < math.inf

    @cached_property
    def recorded(self) -> tuple[Failure, ...]:
        """The failures in the `trace`, in chronological order. Raises ConfigError if the file cannot be read."""
        assert self.trace is not None
        columns = {
            "time_s": NotNegative,
            "unit": Index,
            "repair_s": Annotated[float, number(0.0, infinite=True)] | None,
        }
        rows = read_rows(Path(self.trace), columns, ("time_s", "unit"), "a trace of failures")
        for row in rows:
            if row["repair_s"] is None:
                row["repair_s"] = si(self.repair, "time")
        return tuple(sorted(Failure(float(row["time_s"]), row["unit"], float(row["repair_s"])) for row in rows))

    @checked
    def events(self, n_units: Count, seed: Seed = 0, index: Index = 0) -> Iterator[Failure]:
        """Yield the failures of `n_units` parts in chronological order, without end unless they come from a trace.

        seed   seed of the random failures
        index  number of the sample: each index gives a different sequence for the same seed

        Raises ConfigError for a trace with an unknown part.
        """
        if self.mtbf is not None:
            return self._drawn(si(self.mtbf, "time"), n_units, seed, index)
        for failure in self.recorded:
            if failure.unit >= n_units:
                raise ConfigError(
                    f"{self.trace}: unit = {failure.unit}: must be 0 to {n_units - 1}, because the run has {n_units} "
                    f"parts (per={self.per!r})"
                )
        return iter(self.recorded)

    def check_number(self, n_units: int, length: float) -> None:
        """Raise ConfigError if far more than `MOST` failures are expected in `length` s."""
        mean = si(self.mtbf or math.inf, "time")
        if length * n_units > (1.05 * MOST + n_units) * mean:  # certainly too many, whatever is sampled
            raise self._too_many(n_units, MOST / n_units * mean)

    def _too_many(self, n_units: int, seconds: float) -> ConfigError:
        return ConfigError(
            f"failures: more than {MOST:,} failures of {n_units} parts in {seconds:.4g} s; reduce max_time "
            "(30 days by default) to at most this time, or increase mtbf"
        )

    def _drawn(self, mean: float, n_units: int, seed: int, index: int) -> Iterator[Failure]:
        repair = si(self.repair, "time")
        # the clock of a part also runs while it is repaired
        for n, (time, unit) in enumerate(recurring(mean, self.shape, n_units, 0.0, seed, index, "failures")):
            if n >= MOST:
                raise self._too_many(n_units, time)
            yield Failure(time, unit, repair)


def units(failures: Failures, cluster: Cluster, nodes: Sequence[int], nbytes: Floats | None = None) -> list[list[int]]:
    """Return, for each part that can fail, the numbers of the run's machines that fail with it.

    A switch or a job counts as one machine to wait for. Switches are those on the routes of the run's messages:
    `nbytes` are the bytes carried by each channel. Raises ConfigError for machines whose rack is unknown.
    """
    if failures.per == _SOFTWARE:
        return [[0]]
    if failures.per == "switch":
        assert nbytes is not None
        sources = np.unique(cluster.link_src[nbytes[cluster.link_channel] > 0.0])
        n_switches = int(np.count_nonzero(cluster.is_fabric_switch[sources]))
        if not n_switches:
            raise ConfigError(
                f"failures: per = 'switch': no message of this run passes through a switch of {cluster.name!r}"
            )
        return [[switch] for switch in range(n_switches)]
    machine = machines_of(cluster, nodes)
    parts = ranks_of_parts(cluster, nodes, failures.per, failures.machines_per_rack)
    return [list(dict.fromkeys(machine[rank] for rank in ranks)) for ranks in parts]


@checked
@dataclass(frozen=True)
class Elastic:
    """Elastic training: when machines fail or return, the workers form a new group (torchrun, Horovod Elastic).

    The remaining workers continue with their parameters and optimizer state, so only the current step is lost. (If each
    worker has its own optimizer state, as in local SGD, that state is reset.) The new group redistributes the remaining
    samples of the epoch. A machine that returns joins at the end of a step and receives the model from another machine.
    If all machines fail at once, the state is lost, and training resumes from the latest checkpoint or, without
    checkpoints, starts over.

    Workers that shard the model or the optimizer state (FSDP, ZeRO, pipelines) lose a shard with each machine. The new
    group then resumes from the latest checkpoint. Before a machine joins, a checkpoint is written.

    min_workers  smallest number of workers that train; with fewer, training waits until machines return
    rejoin       time in s until a new group runs: rendezvous and creation of communicators
    rate         how the learning rate depends on the number n of remaining workers, of initially N: "same", it does not
                 change; "linear", it is multiplied by n / N (Goyal et al. 2017); "square-root", it is multiplied by
                 sqrt(n / N) (Krizhevsky 2014)
    batch        "worker": each worker keeps its batch size, so the global batch shrinks; "global": the survivors divide
                 the global batch equally, rounded down to whole samples. Strategies whose `batch_size` is that of all
                 workers (FSDP, Parallel, Hybrid, ...) keep it in either case
    """

    min_workers: Count = 1
    _: KW_ONLY
    rejoin: Annotated[float | str, quantity("time", "30 s", zero=True)] = 30.0
    rate: Annotated[str, one_of("same", "linear", "square-root")] = "same"
    batch: Annotated[str, one_of("worker", "global")] = "worker"

    @property
    def seconds(self) -> float:
        """Time in s until a new group runs."""
        return si(self.rejoin, "time")

    def rate_factor(self, n_workers: int, n_at_start: int) -> float:
        """Return the factor by which the learning rate is multiplied with `n_workers` of the `n_at_start` workers."""
        share = n_workers / n_at_start
        return {"same": 1.0, "linear": share, "square-root": math.sqrt(share)}[self.rate]

    def batch_size(self, batch_size: int, n_workers: int, n_at_start: int) -> int:
        """Return the number of samples per worker and step with `n_workers` of the `n_at_start` workers.

        batch_size  number of samples per worker and step at the start
        """
        return batch_size if self.batch == "worker" else max(1, batch_size * n_at_start // n_workers)
