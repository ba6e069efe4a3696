"""When parts of a cluster fail, and what it takes until a training goes on."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Index, Positive, Seed, Share, checked, one_of, quantity
from ddlsim.cluster import Cluster
from ddlsim.cluster.machines import machines_of, ranks_of_parts
from ddlsim.errors import ConfigError, shown
from ddlsim.life.faults import recurring
from ddlsim.units import si

Floats = npt.NDArray[np.float64]

Row = TypeVar("Row")


def read_rows(
    path: Path, columns: Sequence[str], hint: str, what: str, row_of: Callable[[str, dict[str, str]], Row]
) -> list[Row]:
    """Return ``row_of("path:line", cells)`` of each row of a CSV file with these columns at least.

    Raises ConfigError for a file that cannot be read, saying `what` it should be, and for a missing column, with the
    `hint`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for name in columns:
                if name not in (reader.fieldnames or ()):
                    raise ConfigError(f"{path}: has no column {name!r}; {hint}")
            return [row_of(f"{path}:{line}", cells) for line, cells in enumerate(reader, 2)]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; {what}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file: {error}") from None


def _number(where: str, cells: dict[str, str], column: str) -> float:
    try:
        value = float(cells[column])
    except (TypeError, ValueError):
        value = math.nan
    never = column == "repair_s"  # is it repaired: inf
    if not (value >= 0.0 and (never or math.isfinite(value))):
        raise ConfigError(f"{where}: {column} = {shown(cells[column])}: must be a number of seconds of at least 0")
    return value


def _whole(where: str, cells: dict[str, str], column: str) -> int:
    text = cells[column]
    if text is None or not text.strip().isdecimal():
        raise ConfigError(f"{where}: {column} = {shown(text)}: must be a whole number from 0 on")
    return int(text)


#: s until a collective that hangs is given up: PyTorch's for NCCL (``default_pg_nccl_timeout``)
COLLECTIVE_TIMEOUT = 600.0
#: failures that are drawn at most
MOST = 1_000_000
#: what takes no machine out of service when it fails
_SOFTWARE = "job"

Time = Annotated[float | str, quantity("time", "20 min", zero=True)]


class Failure(NamedTuple):
    """A failure of a part: s after the start, number of the part, s until it is repaired."""

    time: float
    unit: int
    repair: float


@checked
@dataclass(frozen=True)
class Failures:
    """Failures that stop a synchronous training, which goes on from its latest checkpoint (or, :class:`ddlsim.Elastic`,
    without those who failed). Asynchronous workers do not stop for each other: one that crashes loses the gradient that
    it works on, is missing until it is back, and takes the model that there is then.

    mtbf     mean time between failures of one part, such as "50000 h"
    per      what fails: each "device", each "host" (machine), each "rack" (all its machines at once: its switch, its
             power feed), each "switch" between its machines (which stay as they are), or the "job" as a whole
             (software; then nothing is repaired)
    kind     "crash": the others notice soon, and the machine is out of service until it is repaired. "hang": they wait
             for it until their time-out, and it starts again where it was
    shape    of the Weibull distribution of the times between failures: 1 is exponential, below 1 early failures are
             more frequent (0.7 to 0.8 in Schroeder and Gibson 2006, large systems of LANL)
    repair   until a machine (or a switch) that has crashed can be used again; inf: never
    spares   machines that stand ready to take the place of one that has crashed
    notice   until a failure is noticed; None: at once of a crash, after 10 min of a hang, PyTorch's time-out of NCCL
    restart  from then (and when there is a machine) until the job runs: allocation, start of the processes,
             rendezvous; reading the checkpoint comes on top (:class:`ddlsim.Checkpoints`)
    warning  how long before a machine is taken away that is announced, as for spot instances (2 min at AWS, 30 s at
             Google and Azure). At the end of the step under way the state is saved (or, elastic, the group goes on
             without it), if that is over before; then nothing is lost, and the job starts again where there is a
             machine. None: it is not
    discount  by what share machines that may be taken away so are cheaper than their price; 0.7: 70 % off
    trace    instead of `mtbf`: CSV file of failures with the columns ``time_s`` and ``unit`` (number of the device,
             host, rack or switch on the run's way, from 0) and, if they differ, ``repair_s``
    machines_per_rack  consecutive machines of the cluster per rack; None: those on the same first switch are a rack

    The clock of a part runs also while the job is down; one that fails is as new after its repair. A failure while
    the job starts makes it start again. Raises ConfigError for values that make no sense.
    """

    mtbf: Annotated[float | str, quantity("time", "50000 h", infinite=True)] | None = None
    _: KW_ONLY
    per: Annotated[str, one_of("device", "host", "rack", "switch", "job")] = "device"
    kind: Annotated[str, one_of("crash", "hang")] = "crash"
    shape: Positive = 1.0
    repair: Annotated[float | str, quantity("time", "20 min", zero=True, infinite=True)] = 1200.0
    spares: Index = 0
    notice: Time | None = None
    restart: Time = 120.0
    trace: str | Path | None = None
    machines_per_rack: Count | None = None
    warning: Time | None = None
    discount: Share = 0.0

    def __post_init__(self) -> None:
        if (self.mtbf is None) == (self.trace is None):
            raise ConfigError("Failures: give either mtbf, such as mtbf='50000 h', or trace, a CSV file of failures")
        if self.per == _SOFTWARE and self.spares:
            raise ConfigError(f"Failures: spares = {self.spares} have no effect with per='job': no machine fails then")
        if self.per == "switch" and self.spares:
            raise ConfigError(f"Failures: spares = {self.spares} are machines, which replace no switch: use per='host'")
        if self.machines_per_rack is not None and self.per != "rack":
            raise ConfigError(
                f"Failures: machines_per_rack = {self.machines_per_rack} has no effect with per={self.per!r}; leave it "
                "out, or use per='rack'"
            )

        for name, value in (("warning", self.warning), ("discount", self.discount or None)):
            if value is not None and (self.per == "switch" or not self.takes_machines):
                raise ConfigError(
                    f"Failures: {name} = {value!r} is for machines that are taken away, kind='crash' of a device, host "
                    f"or rack, not for kind={self.kind!r}, per={self.per!r}; leave it out"
                )

    @property
    def seconds_of_warning(self) -> float:
        """s from the announcement of a failure to it."""
        return 0.0 if self.warning is None else si(self.warning, "time")

    @property
    def seconds_to_notice(self) -> float:
        """s until a failure is noticed."""
        if self.notice is None:
            return COLLECTIVE_TIMEOUT if self.kind == "hang" else 0.0
        return si(self.notice, "time")

    @property
    def takes_machines(self) -> bool:
        """Whether what fails is out of service until it is repaired."""
        return self.kind == "crash" and self.per != _SOFTWARE

    @property
    def never_repairs(self) -> bool:
        """Whether machines that crash, at random, are out of service for ever."""
        mean = si(self.mtbf or math.inf, "time")
        return self.takes_machines and self.trace is None and math.isinf(si(self.repair, "time")) and mean < math.inf

    @cached_property
    def recorded(self) -> tuple[Failure, ...]:
        """The failures of the `trace`, by time. Raises ConfigError for a file that cannot be read."""
        assert self.trace is not None
        repair = si(self.repair, "time")

        def failure(where: str, cells: dict[str, str]) -> Failure:
            repaired = _number(where, cells, "repair_s") if cells.get("repair_s") else repair
            return Failure(_number(where, cells, "time_s"), _whole(where, cells, "unit"), repaired)

        hint, what = "give it time_s, unit and, if they differ, repair_s", "trace is a CSV file of failures"
        return tuple(sorted(read_rows(Path(self.trace), ("time_s", "unit"), hint, what, failure)))

    @checked
    def events(self, n_units: Count, seed: Seed = 0, life: Index = 0) -> Iterator[Failure]:
        """Yield the failures of `n_units` parts by time, endlessly unless they come from a trace; each number `life`
        is another sample. Raises ConfigError for a trace with an unknown part."""
        return self._traced(n_units) if self.mtbf is None else self._drawn(n_units, seed, life)

    def _traced(self, n_units: int) -> Iterator[Failure]:
        for failure in self.recorded:
            if failure.unit >= n_units:
                raise ConfigError(
                    f"{self.trace}: unit = {failure.unit} is not there: the run has {n_units} parts "
                    f"(per={self.per!r}), 0 to {n_units - 1}"
                )
        return iter(self.recorded)

    def _drawn(self, n_units: int, seed: int, life: int) -> Iterator[Failure]:
        assert self.mtbf is not None
        mean, repair = si(self.mtbf, "time"), si(self.repair, "time")
        # the clock of a part runs on while it is repaired
        for n, (time, unit) in enumerate(recurring(mean, self.shape, n_units, 0.0, seed, life, "failures")):
            if n >= MOST:
                raise ConfigError(
                    f"failures: more than {MOST:,} failures of {n_units} parts in {time:.4g} s; shorten the run's "
                    "max_time, or increase mtbf"
                )
            yield Failure(time, unit, repair)


def units(failures: Failures, cluster: Cluster, nodes: Sequence[int], nbytes: Floats | None = None) -> list[list[int]]:
    """Return the numbers of the machines of a run that each part which can fail takes out of service.

    A switch or a job counts for one machine that is waited for. Switches are those that the run's messages went
    through: `nbytes` are what each channel carried. Raises ConfigError for machines whose rack is unknown.
    """
    if failures.per == _SOFTWARE:
        return [[0]]
    if failures.per == "switch":
        assert nbytes is not None
        sources = np.unique(cluster.link_src[nbytes[cluster.link_channel] > 0.0])
        n_switches = int(np.count_nonzero(cluster.is_fabric_switch[sources]))
        if not n_switches:
            raise ConfigError(
                f"failures: per = 'switch', but no message of the run goes through one in {cluster.name!r}"
            )
        return [[switch] for switch in range(n_switches)]
    machine = machines_of(cluster, nodes)
    parts = ranks_of_parts(cluster, nodes, failures.per, failures.machines_per_rack)
    return [list(dict.fromkeys(machine[rank] for rank in ranks)) for ranks in parts]


@checked
@dataclass(frozen=True)
class Elastic:
    """A group of workers that forms anew when machines fail, and when they are back (PyTorch's torchrun, Horovod's
    Elastic).

    Survivors go on from the parameters and the optimizer's state that they hold (where each has a state of its own, as
    in local SGD, it begins anew); what is lost is the step under way. The new group shares out the samples anew, from
    where the epoch was. A machine that is back joins at the end of a step, and gets the model from another one. Where
    all fail at once, the state is lost: the training goes back to its latest checkpoint, or begins again.

    Workers that hold parts of a model or of the optimizer's state (FSDP, ZeRO, pipelines) lose them with a machine.
    They go back to the latest checkpoint, which the new group reads; before a machine joins, one is made.

    min_workers  with fewer the training waits until machines are back
    rejoin       until a new group runs: rendezvous, communicators
    rate         what becomes of the learning rate with n workers instead of the N at the start: "same"; "linear", n / N
                 times (Goyal et al. 2017); "square-root" of that (Krizhevsky 2014)
    batch        "worker": each worker keeps its batch size, so the global batch shrinks; "global": the survivors divide
                 the global batch into equal whole numbers of samples
    """

    min_workers: Count = 1
    _: KW_ONLY
    rejoin: Annotated[float | str, quantity("time", "30 s", zero=True)] = 30.0
    rate: Annotated[str, one_of("same", "linear", "square-root")] = "same"
    batch: Annotated[str, one_of("worker", "global")] = "worker"

    @property
    def seconds(self) -> float:
        """s until a new group runs."""
        return si(self.rejoin, "time")

    def rate_factor(self, n_workers: int, n_at_start: int) -> float:
        """Return what the learning rate is multiplied with."""
        share = n_workers / n_at_start
        return {"same": 1.0, "linear": share, "square-root": math.sqrt(share)}[self.rate]

    def batch_size(self, batch_size: int, n_workers: int, n_at_start: int) -> int:
        """Return the samples of each worker in a step."""
        return batch_size if self.batch == "worker" else max(1, batch_size * n_at_start // n_workers)
