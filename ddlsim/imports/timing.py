"""The one row that all measurements of time become."""

from __future__ import annotations

from dataclasses import dataclass

from ddlsim.errors import shown
from ddlsim.imports.text import EntryError
from ddlsim.units import LARGEST, in_range


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured duration.

    tool        what measured it: "nccl-tests", "osu", "iperf3", "ping", "kineto", "horovod", "mlperf", "table"
    operation   "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather",
                "scatter", "barrier"; "p2p" (one message, one way), "round_trip" (there and back), "stream"
                (messages sent without waiting), "bidirectional" (streams both ways); "step" (one training step),
                "epoch"
    n_ranks     ranks that took part; 0 where the file does not say
    nbytes      the whole buffer of one rank: input and output of an all-reduce, the output of an all-gather, the
                input of a reduce-scatter or all-to-all; the message of "p2p", "stream", "round_trip" and, per
                direction, of "bidirectional". 0 where there is none or the file does not say
    seconds     the duration; `statistic` says which one of the repetitions: "mean", "median", "single"
    min_s, max_s, n_reps   over the repetitions, where the file says
    n_hosts     machines that the ranks were on; 0 where the file does not say
    dtype       type of the elements as numpy names it; "" where the file does not say
    n_samples   samples trained on in that time by all ranks together (operation "step"), else 0
    variant     what distinguishes rows of the same operation: "in-place", a kernel's or a series' name
    place       "file:line"; JSON without lines: "file" and the place inside
    """

    tool: str
    operation: str
    n_ranks: int
    nbytes: float
    seconds: float
    statistic: str = "mean"
    min_s: float | None = None
    max_s: float | None = None
    n_reps: int | None = None
    n_hosts: int = 0
    dtype: str = ""
    n_samples: float = 0.0
    variant: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        """Raise EntryError, naming the place, for what no measurement can be: whoever reads a file ends up here."""
        for name in ("nbytes", "n_samples", "n_ranks", "n_hosts", "seconds", "min_s", "max_s", "n_reps"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and in_range(value)):
                rule = f"must be finite and not negative (at most {LARGEST:g})"
                raise EntryError(f"{self.place}: {name} = {shown(value)}: {rule}; leave this entry out")
        if self.seconds == 0:
            raise EntryError(f"{self.place}: {self.operation} takes no time; leave this entry out")

    @property
    def bandwidth(self) -> float:
        """nbytes / seconds, in bytes/s (what nccl-tests calls algbw)."""
        return self.nbytes / self.seconds

    @property
    def throughput(self) -> float:
        """n_samples / seconds, in samples/s."""
        return self.n_samples / self.seconds
