"""Devices that compute more slowly while they communicate. Compiled.

There are several kinds of communication, such as within a machine and between machines. Each kind has a factor that
multiplies the duration of work. If several kinds are in progress at a device, the largest factor counts.

Work is measured in seconds at full speed. A device is slower from the start to the end of any communication, including
the time in which that waits for others, because a kernel of the communication library occupies some of its units
throughout. When communication begins or ends, the end of the device's current task is rescheduled.

The functions below take the tables `t` of an executor (with its ``counts``, ``calendar``, ``slow``, ``devices`` and
``contention``), the records of its `tasks`, and how its calendar numbers their ends: `what` + `n_events` * row.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.calendar import N_CALENDAR, SEQUENCE, insert, pop, push
from ddlsim.network.state import record

N_STALE = 19  # place in `counts`: outdated events of the calendar, which have been rescheduled

#: factor of a standstill, in which no work is done (finite, so that the product of two is still a number)
STANDSTILL = 1e100
#: from the `until` of the previous row to its own (s), work takes `factor` times as long; the last row never ends
SLOW = record("f until factor")
#: row: the current task, -1 if none; work: its remaining seconds at time `since` (s); slowed: number of periods in
#: which communication has slowed work
DEVICE = record("f work since", "n row slowed")
#: factor: of work beside communication of one kind; active: number of those in progress. Device d has the rows d *
#: n_kinds to (d + 1) * n_kinds - 1
CONTENTION = record("f factor", "n active")


@inlined
def slowed(slow, i, now, work):  # type: ignore[no-untyped-def]
    """Return how long `work` seconds take from `now`, as :func:`ddlsim.workload.jitter.slowed_duration`."""
    begin = now
    while slow[i].until <= now:
        i += 1
    while work * slow[i].factor > slow[i].until - now:
        work -= (slow[i].until - now) / slow[i].factor
        now = slow[i].until
        i += 1
    return now + work * slow[i].factor - begin


@inlined
def stood_still(slow, i, begin, end):  # type: ignore[no-untyped-def]
    """Return the seconds of standstill from `begin` to `end`."""
    seconds = 0.0
    while begin < end:
        until = min(slow[i].until, end)
        if until > begin:
            if slow[i].factor >= STANDSTILL:
                seconds += until - begin
            begin = until
        i += 1
    return seconds


@inlined
def _worked(slow, i, begin, end):  # type: ignore[no-untyped-def]
    """Return the seconds of work done from `begin` to `end`, the inverse of :func:`slowed`."""
    if i < 0:
        return end - begin
    work = 0.0
    while slow[i].until < end:
        if slow[i].until > begin:
            work += (slow[i].until - begin) / slow[i].factor
            begin = slow[i].until
        i += 1
    return work + (end - begin) / slow[i].factor


@inlined
def _pace(t, device):  # type: ignore[no-untyped-def]
    """Return the factor that now multiplies the duration of a device's work."""
    factor = 1.0
    n_kinds = t.contention.size // t.devices.size
    for i in range(device * n_kinds, (device + 1) * n_kinds):
        if t.contention[i].active > 0 and t.contention[i].factor > factor:
            factor = t.contention[i].factor
    return factor


@inlined
def _slows(t, device, pace):  # type: ignore[no-untyped-def]
    """Whether a pace delays the end of a device's current task, whose work can be too little to change the clock."""
    begin, work = t.devices[device].since, t.devices[device].work
    return begin + work * pace > begin + work


@inlined
def begin_work(t, tasks, device, row, seconds, start, what, n_events):  # type: ignore[no-untyped-def]
    """Let the task `row` begin on a device at `start` (s); -1: on none, as fast as its own intervals allow."""
    if device >= 0:
        t.devices[device].row = row
        t.devices[device].work = seconds
        t.devices[device].since = start
        _schedule(t, tasks, device, start, what, n_events)
        return
    if tasks[row].slow >= 0:
        seconds = slowed(t.slow, tasks[row].slow, start, seconds)
    push(t.counts, t.calendar, start + seconds, what + n_events * row)


@inlined
def _schedule(t, tasks, device, now, what, n_events):  # type: ignore[no-untyped-def]
    """Schedule the end of a device's current task at its present speed, as the calendar item `what` + `n_events` *
    row."""
    row = t.devices[device].row
    pace = _pace(t, device)
    seconds = t.devices[device].work * pace
    if _slows(t, device, pace):
        t.devices[device].slowed += 1
    if tasks[row].slow >= 0:
        seconds = slowed(t.slow, tasks[row].slow, now, seconds)
    tasks[row].ticket = t.counts[SEQUENCE]
    push(t.counts, t.calendar, now + seconds, what + n_events * row)


@inlined
def change(t, tasks, device, kind, more, now, what, n_events):  # type: ignore[no-untyped-def]
    """Let one exchange of a kind `more` (1) or less (-1) be under way at a device, whose task may begin later."""
    before = _pace(t, device)
    t.contention[device * (t.contention.size // t.devices.size) + kind].active += more
    row = t.devices[device].row
    if row >= 0 and _pace(t, device) != before:
        now = max(now, t.devices[device].since)
        if now <= t.devices[device].since and _slows(t, device, before):  # but no time has passed
            t.devices[device].slowed -= 1
        done = _worked(t.slow, tasks[row].slow, t.devices[device].since, now) / before
        t.devices[device].work = max(t.devices[device].work - done, 0.0)
        t.devices[device].since = now
        t.counts[N_STALE] += 1
        if t.counts[N_STALE] > t.devices.size:
            _compact(t.counts, t.calendar, tasks, row, what, n_events)
        _schedule(t, tasks, device, now, what, n_events)


@inlined
def next_event(t, tasks, what, n_events):  # type: ignore[no-untyped-def]
    """Return the time of the next event, inf if there is none; discard outdated ends of tasks before it."""
    while t.counts[N_STALE] > 0 and _stale(tasks, t.calendar[0].item, t.calendar[0].sequence, what, n_events):
        pop(t.counts, t.calendar)
        t.counts[N_STALE] -= 1
    return t.calendar[0].time if t.counts[N_CALENDAR] > 0 else np.inf


@inlined
def _stale(tasks, item, sequence, what, n_events):  # type: ignore[no-untyped-def]
    """Whether an event is an outdated end of a task."""
    if item < 0 or item % n_events != what:
        return False
    row = item // n_events
    return tasks[row].ticket >= 0 and tasks[row].ticket != sequence


@inlined
def _compact(counts, calendar, tasks, row, what, n_events):  # type: ignore[no-untyped-def]
    """Remove outdated events from the calendar, including the end of the task `row`, which is being rescheduled."""
    tasks[row].ticket = counts[SEQUENCE]
    n = 0
    for i in range(counts[N_CALENDAR]):
        time = calendar[i].time
        sequence = calendar[i].sequence
        item = calendar[i].item
        if not _stale(tasks, item, sequence, what, n_events):
            insert(calendar, n, time, sequence, item)
            n += 1
    counts[N_CALENDAR] = n
    counts[N_STALE] = 0
