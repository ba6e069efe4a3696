"""`Schedule`: which rank sends which chunk to which rank, in which round. Pure data, without time or values.

The buffer is cut in `n_chunks` chunks. A message carries chunks of its sender to the *same* chunks of its receiver,
where they are combined with (`reduce`) or replace the present data. A sender sends the data that it held when it
entered the round, even if it receives into the same chunk meanwhile. ``docs/architecture.md`` states how rounds are
executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Index, NotNegative, Positive, checked, integer, one_of
from ddlsim.arguments.annotations import array_of
from ddlsim.readable import count
from ddlsim.text_tables import aligned

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation


Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

#: kinds of collectives; `ddlsim.collectives.check` defines exactly what each one computes
KINDS = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
#: kinds that reduce; the others only move data
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
Kind = Annotated[str, one_of(*KINDS)]
#: numbers of ranks or chunks as arguments
Wholes = Annotated[npt.ArrayLike, array_of(np.int64, scalar=True)]
#: of a collective; rounds list messages, and some algorithms send one from each rank to each other one
Ranks = Annotated[int, integer(1, 10**6)]
#: fields of a round that are None or contain one number per message
PER_MESSAGE = ("latency", "wire", "handled")
#: number of segments into which pipelined algorithms divide the buffer
Segments = Annotated[int, integer(1, 10**6)]


@checked
@dataclass(frozen=True, eq=False)
class Round:
    """A set of m messages that may be in flight at the same time, optionally repeated.

    src, dst  (m,)  sending and receiving ranks
    start     (m,)  first chunk that each message carries, from 0 to n_chunks - 1
    count     (m,)  number of consecutive chunks that each message carries; chunk 0 follows chunk n_chunks - 1
    reduce          True: the receiver combines the data with its own; False: the data replaces the receiver's data
    repeat          number of times that the round is executed
    shift           number of chunks by which `start` advances (modulo n_chunks) after each repetition
    slots     (k,)  offsets from `start`, for messages whose chunks are not consecutive: every message carries the k
                    chunks (start + slots) mod n_chunks, and `count` must be k. None: consecutive chunks
    header          bytes that a protocol adds to each message, independent of the buffer size. With a header, `count`
                    may be 0; such a message only informs the receiver that the sender has reached this round.
    latency   (m,)  time in seconds from issuing a message until its bytes flow; None: the latency of its route
    wire      (m,)  bytes on the wire per byte carried, multiplied by the schedule's `wire`; None: 1
    handled   (m,)  bytes handled by GPU multiprocessors per byte on the wire, multiplied by the schedule's `handled`;
                    None: 1
    """

    src: Ints
    dst: Ints
    start: Ints
    count: Ints
    reduce: bool
    repeat: Index = 1
    shift: int = 0
    slots: Ints | None = None
    header: NotNegative = 0.0
    latency: Floats | None = None
    wire: Floats | None = None
    handled: Floats | None = None


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The messages of a collective on `n_ranks` ranks, round by round.

    lanes         concurrent, independent sequences of rounds, which must use different chunks
    chunk_weight  (n_chunks,) relative sizes of the chunks; None: equal sizes
    kind          the collective that the schedule implements, such as "all_reduce"
    root          root rank of a broadcast or reduce; with `groups`, the position of the root in each group
    groups        disjoint communicators, each given as a sequence of ranks. The i-th rank of a communicator owns block
                  i. None: a single communicator of all ranks, in order
    block_of      (n_chunks,) the block to which each chunk belongs. Every block must have the same number of chunks.
                  None: blocks are contiguous
    copies        number of full buffers that the chunks span. It exceeds 1 only for algorithms that store the
                  contributions of several ranks separately and add them at the end; member i of a group then starts
                  with its own contribution in copy i mod `copies`.
    wire          bytes on the wire per byte of the buffer; 1 if the protocol adds nothing
    handled       bytes that GPU multiprocessors handle per byte on the wire, at least 1. If multiprocessors are slower
                  than links, a message occupies its links for as long as they need for `handled` times its bytes.
    """

    n_ranks: Ranks
    n_chunks: Count
    lanes: tuple[tuple[Round, ...], ...]
    chunk_weight: Floats | None = None
    kind: str = "all_reduce"
    root: Index = 0
    groups: tuple[Ints, ...] | None = None
    block_of: Ints | None = None
    copies: Count = 1
    wire: Positive = 1.0
    handled: Positive = 1.0

    def __repr__(self) -> str:
        return f"<Schedule of {title(self)}>"

    def __str__(self) -> str:
        lines = [title(self), sent(self), "", *aligned(cells(self), LEFT), *more(self)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        return page(title(self), lines([sent(self)]), grid(cells(self), LEFT), lines(more(self)))

    def blocks(self, n_members: int) -> Ints:
        """Return the block of each chunk of one copy in a group of `n_members` ranks, shape (n_chunks / copies,)."""
        n_chunks = self.n_chunks // self.copies
        return np.arange(n_chunks) * n_members // n_chunks if self.block_of is None else self.block_of

    @property
    def n_rounds(self) -> int:
        """Number of rounds in all lanes, including repetitions."""
        return sum(r.repeat for lane in self.lanes for r in lane)

    @property
    def n_messages(self) -> int:
        """Number of messages in all lanes, including repetitions."""
        return sum(r.repeat * len(r.src) for lane in self.lanes for r in lane)

    def chunks(self, round: Round, repetition: int = 0) -> tuple[Ints, Ints]:
        """Return the chunks that the messages of a round carry in one `repetition`.

        The result is `(owner, chunk)`, both of shape (n_carried,): message ``owner[i]`` of the round carries
        ``chunk[i]``.
        """
        first = (round.start + repetition * round.shift) % self.n_chunks
        if round.slots is not None:
            carried = (first[:, None] + round.slots) % self.n_chunks
            return np.repeat(np.arange(len(first)), len(round.slots)), carried.ravel()
        owner = np.repeat(np.arange(len(first)), round.count)
        begin = np.cumsum(round.count) - round.count
        return owner, (first[owner] + np.arange(len(owner)) - begin[owner]) % self.n_chunks

    def message_bytes(self, nbytes: float, round: Round, repetition: int = 0) -> Floats:
        """Return the size of each message of `round` in bytes, without `round.header`, shape (m,).

        nbytes      size of the buffer on each rank, in bytes
        repetition  index of the repetition, which matters only if `chunk_weight` is set and is not periodic in
                    `round.shift`
        """
        wire = 1.0 if round.wire is None else round.wire
        if self.chunk_weight is None:
            return np.asarray(round.count * (nbytes * self.wire * self.copies / self.n_chunks) * wire, dtype=np.float64)
        owner, chunk = self.chunks(round, repetition)
        if not len(owner):
            return np.zeros(len(round.src))
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        weight = np.add.reduceat(self.chunk_weight[chunk], first)
        total = self.chunk_weight.sum()
        return np.asarray(weight * (nbytes * self.wire * self.copies / total) * wire, dtype=np.float64)

    @checked
    def animate(self, path: str | Path | None = None, *, seconds: Positive = 0.8) -> FuncAnimation:
        """Animate the contents of every rank's chunks, round by round.

        path     file to which the animation is written (.gif, .webp or .html); None: no file
        seconds  duration of each round in the animation, in s

        In a notebook, the returned animation is displayed with playback controls.
        :func:`ddlsim.report.animation.animate` describes the picture. Raises ConfigError for more than 32 ranks, 128
        chunks or 200 rounds.
        """
        from ddlsim.report.animation import animate

        return animate(self, path, seconds=seconds)

    @checked
    def bytes_sent(self, nbytes: NotNegative) -> Floats:
        """Return the number of bytes that each rank puts on the wire in total, without headers, shape (n_ranks,)."""
        return self._sent(nbytes, handled=False)

    @checked
    def bytes_handled(self, nbytes: NotNegative) -> Floats:
        """Return the bytes that links could carry while each rank's multiprocessors handle its messages.

        The shape is (n_ranks,). The values equal :meth:`bytes_sent` unless multiprocessors are slower than links.
        """
        return self._sent(nbytes, handled=True)

    def _sent(self, nbytes: float, handled: bool) -> Floats:
        total = np.zeros(self.n_ranks)
        for lane in self.lanes:
            for round in lane:
                n_distinct = 1 if self.chunk_weight is None or round.shift == 0 else round.repeat
                for repetition in range(n_distinct):
                    size = self.message_bytes(nbytes, round, repetition) * (round.repeat / n_distinct)
                    if handled:
                        size *= self.handled * (1.0 if round.handled is None else round.handled)
                    total += np.bincount(round.src, weights=size, minlength=self.n_ranks)
        return total


#: a collective algorithm: a function of the number of ranks (and keyword parameters) that returns a Schedule
Collective: TypeAlias = Callable[..., Schedule]


@checked
def messages(
    src: Wholes,
    dst: Wholes,
    start: Wholes = 0,
    count: Wholes = 1,
    *,
    reduce: bool,
    repeat: Index = 1,
    shift: int = 0,
    slots: Ints | None = None,
    header: NotNegative = 0.0,
) -> Round:
    """Build a :class:`Round` from lists or arrays.

    The arguments have the same meaning as in :class:`Round`. A single number for `dst`, `start` or `count` applies to
    all messages.
    """
    src = np.array(src, dtype=np.int64, ndmin=1)
    slots = None if slots is None else np.atleast_1d(slots)
    if slots is not None:
        count = len(slots)

    def filled(values: npt.ArrayLike) -> Ints:
        if isinstance(values, int):
            return np.full(len(src), values, dtype=np.int64)
        array = np.asarray(values, dtype=np.int64)
        return array if array.ndim else np.full(len(src), array, dtype=np.int64)

    return Round(src, filled(dst), filled(start), filled(count), reduce, repeat, shift, slots, header)


#: number of rounds in the table, and messages shown per round
N_ROUNDS, N_MESSAGES = 12, 3
#: left-aligned columns of the table
LEFT = (0, 5, 6)


def title(schedule: Schedule) -> str:
    """Return the kind and the size as a line."""
    sizes = (
        count(schedule.n_ranks, "rank"),
        count(schedule.n_chunks, "chunk"),
        count(schedule.n_rounds, "round"),
        count(schedule.n_messages, "message"),
    )
    return f"{schedule.kind.replace('_', '-')}: {', '.join(sizes)}"


def sent(schedule: Schedule) -> str:
    """Return a line on the bytes that each rank puts on the wire and handles, relative to its buffer."""
    sends, handles = (_times(share) for share in (schedule.bytes_sent(1.0), schedule.bytes_handled(1.0)))
    slower = "" if sends == handles else f" and, limited by its multiprocessors, takes as long as for {handles} times"
    return f"each rank sends {sends} times the bytes of its buffer{slower}"


def _times(share: Floats) -> str:
    """Format the range of some numbers."""
    low, high = float(share.min()), float(share.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def cells(schedule: Schedule) -> list[tuple[str, ...]]:
    """Return the header and one row for each of the first rounds; the columns :data:`LEFT` contain text."""
    head = ("lane, round", "repeats", "messages", "buffers on wire", "handled", "receivers", "message: chunks")
    rows = [(f"{i}, {k}", round) for i, lane in enumerate(schedule.lanes) for k, round in enumerate(lane)]
    return [head, *((name, *_cells(schedule, round)) for name, round in rows[:N_ROUNDS])]


def more(schedule: Schedule) -> list[str]:
    """Return a line with the number of remaining rounds, if any."""
    n = sum(map(len, schedule.lanes))
    return [f"... and {n - N_ROUNDS} more"] if n > N_ROUNDS else []


def _cells(schedule: Schedule, round: Round) -> tuple[str, ...]:
    owner, chunk = schedule.chunks(round)
    texts = []
    for i in range(min(len(round.src), N_MESSAGES)):
        carried = chunk[owner == i]
        shown = " ".join(map(str, carried[:4])) + (" ..." if len(carried) > 4 else "")
        texts.append(f"{round.src[i]} -> {round.dst[i]}: {shown or 'none'}")
    if len(round.src) > N_MESSAGES:
        texts.append("...")
    if round.repeat > 1 and round.shift:
        texts.append(f"chunks {round.shift:+d} after each repetition")
    does = "combine" if round.reduce else "overwrite"
    sent = schedule.message_bytes(1.0, round) * round.repeat
    handled = sent * schedule.handled * (1.0 if round.handled is None else round.handled)
    volumes = (f"{float(nbytes.sum()):.4g}" for nbytes in (sent, handled))
    return f"{round.repeat:,}", f"{len(round.src):,}", *volumes, does, "; ".join(texts)
