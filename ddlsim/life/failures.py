"""When parts of a cluster fail, and what it takes until a training goes on."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from ddlsim.arguments import Count, Index, Positive, Seed, Share, checked, one_of, quantity
from ddlsim.errors import ConfigError, shown
from ddlsim.life.random_faults import recurring
from ddlsim.units import si

_COLUMNS = ("time_s", "unit", "repair_s")


def read_failures(path: Path, repair: float) -> list[tuple[float, int, float]]:
    """Return the (time in s, number of the part, s until it is repaired) of a file's rows; `repair` where it has no
    such column. Raises ConfigError, with the line, for what cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS[:2] if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path}: has no column {missing[0]!r}; give it time_s, unit and, if they differ, repair_s"
                )
            return [
                (
                    _number(path, line, row, "time_s"),
                    _whole(path, line, row, "unit"),
                    _number(path, line, row, "repair_s") if row.get("repair_s") else repair,
                )
                for line, row in enumerate(reader, 2)
            ]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; trace is a CSV file of failures") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file: {error}") from None


def _number(path: Path, line: int, row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    never = column == "repair_s"  # is it repaired: inf
    if not (value >= 0.0 and (never or math.isfinite(value))):
        raise ConfigError(f"{path}:{line}: {column} = {shown(row[column])}: must be a number of seconds of at least 0")
    return value


def _whole(path: Path, line: int, row: dict[str, str], column: str) -> int:
    text = row[column]
    if text is None or not text.strip().isdecimal():
        raise ConfigError(f"{path}:{line}: {column} = {shown(text)}: must be a whole number from 0 on")
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
    machines_per_rack  so many machines of the cluster, in its order, are a rack; None: those on the same first switch

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

    @cached_property
    def recorded(self) -> tuple[Failure, ...]:
        """The failures of the `trace`, by time. Raises ConfigError for a file that cannot be read."""
        assert self.trace is not None
        rows = read_failures(Path(self.trace), si(self.repair, "time"))
        return tuple(sorted(Failure(*row) for row in rows))

    @checked
    def events(self, n_units: Count, seed: Seed = 0, life: Index = 0) -> Iterator[Failure]:
        """Return the failures of so many parts by time, without end but for those of a trace; other numbers `life`
        have other ones. Raises ConfigError for a trace that names a part that is not there."""
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
