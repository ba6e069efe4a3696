"""A schedule in words: what it is in a line, and its rounds as a table."""

from __future__ import annotations

from ddlsim.collectives.schedule import Floats, Round, Schedule
from ddlsim.readable import count
from ddlsim.text_tables import aligned

#: rounds that are shown, and messages of each
N_ROUNDS, N_MESSAGES = 12, 3
#: columns of the table that are words
LEFT = (0, 5, 6)


def text(schedule: Schedule) -> str:
    """Return what ``print(schedule)`` shows."""
    return "\n".join([title(schedule), sent(schedule), "", *aligned(cells(schedule), LEFT), *more(schedule)])


def title(schedule: Schedule) -> str:
    """Return kind and size."""
    sizes = (count(schedule.n_ranks, "rank"), count(schedule.n_chunks, "chunk"), count(schedule.n_rounds, "round"),
             count(schedule.n_messages, "message"))  # fmt: skip
    return f"{schedule.kind.replace('_', '-')}: {', '.join(sizes)}"


def sent(schedule: Schedule) -> str:
    """Return how many times its buffer a rank puts on the wire, and handles, where its multiprocessors are slower."""
    sends, handles = (_times(share) for share in (schedule.bytes_sent(1.0), schedule.bytes_handled(1.0)))
    slower = "" if sends == handles else f"; its multiprocessors are slower than the links, as if these were {handles}"
    return f"each rank sends {sends} times the bytes of its buffer{slower}"


def _times(share: Floats) -> str:
    """Return the range of some numbers."""
    low, high = float(share.min()), float(share.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def cells(schedule: Schedule) -> list[tuple[str, ...]]:
    """Return a row for each of the first rounds as they are written, with a head; the columns :data:`LEFT` hold
    words."""
    head = ("lane, round", "times", "messages", "buffers on the wire", "handled", "receivers", "message: chunks")
    rows = [(f"{i}, {k}", round) for i, lane in enumerate(schedule.lanes) for k, round in enumerate(lane)]
    return [head, *((name, *_cells(schedule, round)) for name, round in rows[:N_ROUNDS])]


def more(schedule: Schedule) -> list[str]:
    """Return a line about the rounds that are not among the first, if there are any."""
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
        texts.append(f"then chunks {round.shift:+d} each time")
    does = "combine" if round.reduce else "overwrite"
    sent = schedule.message_bytes(1.0, round) * round.repeat
    handled = sent * schedule.handled * (1.0 if round.handled is None else round.handled)
    volumes = (f"{float(each.sum()):.4g}" for each in (sent, handled))
    return f"{round.repeat:,}", f"{len(round.src):,}", *volumes, does, "; ".join(texts)
