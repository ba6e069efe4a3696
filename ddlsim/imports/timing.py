"""The common record of all imported time measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, shown
from ddlsim.imports.text import EntryError
from ddlsim.measure.table import OPERATIONS, Measurement
from ddlsim.units import LARGEST, in_range


@dataclass(frozen=True)
class Timing:
    """One measured duration.

    tool        source of the measurement: "nccl-tests", "osu", "iperf3", "ping", "kineto", "horovod", "mlperf" or
                "table"
    operation   the measured operation. Collectives are "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                "broadcast", "reduce", "gather", "scatter" and "barrier". Point-to-point operations are "p2p" (one
                message), "round_trip" (a message and its reply), "stream" (messages sent without waiting) and
                "bidirectional" (streams in both directions). Training operations are "step" and "epoch".
    n_ranks     number of participating ranks; 0: unknown
    nbytes      size in bytes; 0: none or unknown. For collectives, this is the full buffer of one rank: the input and
                output of an all-reduce, the output of an all-gather, or the input of a reduce-scatter or all-to-all.
                For point-to-point operations, it is the size of one message.
    seconds     the measured duration in seconds
    statistic   how `seconds` summarises the repetitions: "mean", "median" or "single"
    min_s       shortest repetition in seconds; None: unknown
    max_s       longest repetition in seconds; None: unknown
    n_reps      number of repetitions; None: unknown
    n_hosts     number of machines; 0: unknown
    dtype       element type as in NumPy; "": unknown
    n_samples   samples processed in this time by all ranks together, for "step" and "epoch"; 0 for other operations
    variant     string that distinguishes rows of the same operation: "in-place", or the name of a kernel or series
    place       location of the measurement: "file:line" or, for JSON without lines, the file and the location inside it
    """

    tool: str
    operation: str
    n_ranks: int
    nbytes: float
    seconds: float
    statistic: str = "mean"
    _: KW_ONLY
    min_s: float | None = None
    max_s: float | None = None
    n_reps: int | None = None
    n_hosts: int = 0
    dtype: str = ""
    n_samples: float = 0.0
    variant: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        """Raise EntryError, naming the place, for an impossible measurement; all readers use this check."""
        for name in ("nbytes", "n_samples", "n_ranks", "n_hosts", "seconds", "min_s", "max_s", "n_reps"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and in_range(value)):
                raise EntryError(
                    f"{self.place}: {name} = {shown(value)}: must be from 0 to {LARGEST:g}; remove this entry"
                )
        if self.seconds == 0:
            raise EntryError(f"{self.place}: {self.operation} has no duration; remove this entry")

    @property
    def bandwidth(self) -> float:
        """Bytes per second, nbytes / seconds (algbw in nccl-tests)."""
        return self.nbytes / self.seconds

    @property
    def throughput(self) -> float:
        """Samples per second, n_samples / seconds."""
        return self.n_samples / self.seconds


_BACKENDS = {"nccl-tests": "nccl", "osu": "mpi", "iperf3": "tcp", "ping": "icmp"}
#: operation, of any tool or of one -> experiment and operation of a measurement
_EXPERIMENTS = {operation: ("collective", operation) for operation in OPERATIONS["collective"]}
_EXPERIMENTS |= dict.fromkeys(("p2p", "round_trip", "stream (iperf3)"), ("point_to_point", "one_way"))
_EXPERIMENTS |= {"bidirectional (iperf3)": ("point_to_point", "both_ways"), "step": ("step", "training")}


@checked
def to_measurements(
    timings: Iterable[Timing], *, n_hosts: Count | None = None, model: str | None = None, version: str = ""
) -> list[Measurement]:
    """Convert timings to rows of the measurement table, as returned by :func:`ddlsim.measure.read_measurements`.

    n_hosts   number of machines, for timings that do not contain it (OSU, traces, throughput tables)
    model     name of the trained model, for training steps
    version   version of the measured software, such as "NCCL 2.18.3"

    If a tool does not print the median, the mean is used instead, and the ``note`` column says so. The one-way time of
    a message is taken to be half its round-trip time.

    Raises :class:`ConfigError` for timings that the table cannot represent: barriers, pipelined messages (OSU's
    bandwidth tests), collectives without a size, and steps without a model or batch size. The message gives the
    location of the timing.
    """
    return [_measurement(timing, n_hosts, model, version) for timing in timings]


def _measurement(timing: Timing, n_hosts: int | None, model: str | None, version: str) -> Measurement:
    entry = _EXPERIMENTS.get(timing.operation) or _EXPERIMENTS.get(f"{timing.operation} ({timing.tool})")
    if entry is None:
        what = f"{timing.operation} ({timing.tool}) cannot be represented in the table of measurements"
        raise ConfigError(f"{timing.place}: {what}; remove it")
    experiment, operation = entry
    hosts = timing.n_hosts or n_hosts
    if not hosts:
        raise ConfigError(f"{timing.place}: the number of machines is unknown; set n_hosts (--hosts)")
    if not timing.n_ranks:
        raise ConfigError(f"{timing.place}: the number of ranks is unknown; remove this row")
    if timing.operation == "round_trip":
        low, high = (None if value is None else value / 2 for value in (timing.min_s, timing.max_s))
        timing = replace(timing, seconds=timing.seconds / 2, min_s=low, max_s=high)
    batch = 0
    if experiment == "step":
        batch = round(timing.n_samples / timing.n_ranks)
        if batch < 1 or model is None:
            missing = "model" if batch else "batch size"
            raise ConfigError(f"{timing.place}: the {missing} of the training step is unknown; set it")
    elif timing.nbytes < 1:
        raise ConfigError(f"{timing.place}: the message size of {timing.operation} is missing or 0; remove this row")
    parts = [timing.tool, timing.variant, "" if timing.statistic == "median" else f"{timing.statistic}, not median"]
    nbytes, trained = (0, model or "") if experiment == "step" else (round(timing.nbytes), "")
    backend, repetitions, note = _BACKENDS.get(timing.tool, ""), timing.n_reps or 1, "; ".join(filter(None, parts))
    times = timing.seconds, nbytes, timing.min_s, timing.max_s, None, None, repetitions
    about = backend, timing.dtype or "float32", batch, trained, version, note
    return Measurement(experiment, operation, timing.n_ranks, hosts, *times, *about)
