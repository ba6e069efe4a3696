"""Busy intervals of channels: the kernel's log, expanded on first access."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry, inlined
from ddlsim.network.state import BUSY, REPEAT, SPANS, Floats, Ints, Records

Flags = npt.NDArray[np.bool_]


class Logged(NamedTuple):
    """A part of the busy log: intervals (BUSY), and the spans of rounds that were repeated (REPEAT)."""

    rows: Records
    repeats: Records


def busy_rows(channel: Ints, start: Floats | float, end: Floats | float) -> Records:
    """Return intervals as rows of the log."""
    rows = np.empty(len(channel), dtype=BUSY)
    rows["channel"], rows["other"], rows["start"], rows["end"] = channel, -1, start, end
    return rows


class BusyIntervals:
    """Time intervals in which channels were busy, sorted by channel and time.

    The columns ``channel``, ``start`` and ``end`` (times in seconds) are arrays of shape (n,), with one element per
    interval. They are computed on first access from a compact log that stores a repeated round only once.

    parts       recorded parts of the log, in chronological order
    n_channels  number of channels of the network
    others      additional intervals, in any order
    kept        (n_channels,) whether to include each channel; None: include all channels
    """

    def __init__(
        self, parts: list[Logged], n_channels: int, others: Records | None = None, kept: Flags | None = None
    ) -> None:
        self._parts, self._n_channels, self._others = parts, n_channels, others
        self._kept = np.ones(n_channels, dtype=np.bool_) if kept is None else kept

    @cached_property
    def channel(self) -> Ints:
        """Channel of each interval, shape (n,)."""
        return np.repeat(np.arange(self._n_channels), np.diff(self._columns[0]))

    @property
    def start(self) -> Floats:
        """Start of each interval, in s, shape (n,)."""
        return self._columns[1]

    @property
    def end(self) -> Floats:
        """End of each interval, in s, shape (n,)."""
        return self._columns[2]

    def of(self, channel: int) -> tuple[Floats, Floats]:
        """Return the start and end times of the intervals of one channel, in s."""
        offsets, start, end = self._columns
        rows = slice(offsets[channel], offsets[channel + 1])
        return start[rows], end[rows]

    def only(self, channels: Sequence[int]) -> BusyIntervals:
        """Return the intervals of the given channels only, so that the columns of a large network fit in memory."""
        kept = np.zeros(self._n_channels, dtype=np.bool_)
        kept[channels] = True
        return BusyIntervals(self._parts, self._n_channels, self._others, kept & self._kept)

    def beside(self, rows: Records) -> BusyIntervals:
        """Return these intervals together with other rows of dtype BUSY, in any order."""
        return BusyIntervals(self._parts, self._n_channels, rows, self._kept)

    def copied(self, source: Ints, others: Records) -> BusyIntervals:
        """Return the intervals of channels that are busy whenever their source channel is, plus other rows.

        source  (n_channels,) the channel from which each takes its intervals
        others  rows of dtype BUSY, in any order
        """
        offsets, start, end = self._columns
        counts = np.diff(offsets)[source]
        place = np.arange(counts.sum()) + np.repeat(offsets[source] - (np.cumsum(counts) - counts), counts)
        rows = busy_rows(np.repeat(np.arange(len(source)), counts), start[place], end[place])
        return BusyIntervals([], self._n_channels, np.concatenate([rows, others]))

    def seconds(self) -> Floats:
        """Return the total busy time of each channel in s, shape (n_channels,), without computing the columns."""
        return self._sums[1]

    @cached_property
    def _all_parts(self) -> list[Logged]:
        others = [] if self._others is None else [Logged(self._others, np.empty(0, dtype=REPEAT))]
        return [*self._parts, *others]

    @cached_property
    def _sums(self) -> tuple[Ints, Floats]:
        """(number of intervals, busy s) of each channel."""
        number, seconds = np.zeros(self._n_channels, dtype=np.int64), np.zeros(self._n_channels)
        for rows, repeats in self._all_parts:
            _add_up(rows, repeats, number, seconds)
        return np.where(self._kept, number, 0), np.where(self._kept, seconds, 0.0)

    @cached_property
    def _columns(self) -> tuple[Ints, Floats, Floats]:
        """(CSR offsets by channel, starts, ends)."""
        offsets = np.concatenate([[0], np.cumsum(self._sums[0])])
        start, end = np.empty((2, offsets[-1]))
        place = np.where(self._kept, offsets[:-1], -1)
        for rows, repeats in self._all_parts:
            instants = np.empty((len(rows), 2), dtype=np.int64)
            _write_out(rows, repeats, place, start, end, np.empty(SPANS), instants)
        if self._others is not None:
            by_time = np.lexsort((start, np.repeat(np.arange(self._n_channels), np.diff(offsets))))
            start, end = start[by_time], end[by_time]
        return offsets, start, end


@entry
def _add_up(rows, repeats, number, seconds):  # type: ignore[no-untyped-def]
    """Add the number of intervals and busy s in a part of the log to the totals per channel."""
    k = 0
    for i in range(rows.size):
        row = rows[i]
        while k < repeats.size and repeats[k].last <= i:
            k += 1
        times = 1 + (repeats[k].times if k < repeats.size and repeats[k].first <= i else 0)
        for channel in (row.channel, row.other):
            if channel >= 0:
                number[channel] += times
                seconds[channel] += times * (row.end - row.start)


@inlined
def _nearest(moments, final, time):  # type: ignore[no-untyped-def]
    """Return the place of the instant nearest to `time`; rounding separates them in episodes that are replayed."""
    at = 0
    while at < final and abs(moments[at + 1] - time) <= abs(moments[at] - time):
        at += 1
    return at


@entry
def _write_out(rows, repeats, place, start, end, moments, instants):  # type: ignore[no-untyped-def]
    """Write the intervals of a part of the log to the next places of their channels, unless these are negative;
    repeated rounds by the same floating-point additions as in the kernel (:mod:`ddlsim.network.rounds`).

    moments   space for the instants of a round, s
    instants  (n_rows, 2) space for the places of starts and ends in `moments`
    """
    i = k = 0
    while i < rows.size:
        n = times = final = 0
        last = i + 1
        now = 0.0
        while k + n < repeats.size and repeats[k + n].first == i:
            final = max(final, repeats[k + n].effect)
            n += 1
        if n > 0:
            last = repeats[k].last
            times = repeats[k].times
            now = repeats[k].begin
        for number in range(times + 1):
            moments[0] = now
            for at in range(1, final + 1):
                moments[at] = np.inf
            for span in range(k, k + n):
                time = (moments[repeats[span].cause] + repeats[span].before) + repeats[span].length
                moments[repeats[span].effect] = min(moments[repeats[span].effect], time)
            now = moments[final]
            for j in range(i, last):
                row = rows[j]
                begin, over = row.start, row.end
                if number == 0:
                    instants[j, 0] = _nearest(moments, final, begin)
                    instants[j, 1] = _nearest(moments, final, over)
                else:
                    begin, over = moments[instants[j, 0]], moments[instants[j, 1]]
                for channel in (row.channel, row.other):
                    if channel >= 0 and place[channel] >= 0:
                        start[place[channel]] = begin
                        end[place[channel]] = over
                        place[channel] += 1
        i = last
        k += n
