"""Devices that compute more slowly while they communicate. Compiled.

Exchanges are of several kinds, such as those inside a machine and those between machines, and each kind has a factor by
which work takes longer. If several kinds are under way at a device, the largest factor counts.

Work is counted in seconds at full speed. A device is slower while any exchange is under way at it: a kernel of a
communication library holds some of its units from its start to its end, those times included in which it waits for
others. When that begins or ends, the end of the task that the device works on is planned anew.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.calendar import N_CALENDAR, SEQUENCE, insert, push
from ddlsim.network.state import record

N_STALE = 19  # place in `counts`: events of the calendar that have been planned anew

#: how many times as long work takes that stands still: none is done (of two at once, the product is still a number)
STANDSTILL = 1e100
#: up to the time `until` (s), since the entry before, work takes `factor` times as long; the last entry is for ever
SLOW = record(until="f", factor="f")
#: row: the task that a device works on, -1 if none; work: seconds of it that were left at `since` (s)
DEVICE = record(work="f", since="f", row="n")
#: factor: how many times as long a device's work takes beside exchanges of one kind; active: how many are under way.
#: Device d has the rows d * n_kinds to (d + 1) * n_kinds - 1
CONTENTION = record(factor="f", active="n")


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
    """Return the seconds from `begin` to `end` in which no work is done at all."""
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
    """Return the seconds of work that are done from `begin` to `end`, the reverse of :func:`slowed`."""
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
def _pace(devices, contention, device):  # type: ignore[no-untyped-def]
    """Return how many times as long work takes at a device now."""
    factor = 1.0
    n_kinds = contention.size // devices.size
    for i in range(device * n_kinds, (device + 1) * n_kinds):
        if contention[i].active > 0 and contention[i].factor > factor:
            factor = contention[i].factor
    return factor


@inlined
def schedule(  # type: ignore[no-untyped-def]
    counts, calendar, tasks, slow, devices, contention, device, now, what, n_events
):
    """Let the task that a device works on end when it will at the present pace: as the item `what` + `n_events` * row
    of the calendar."""
    row = devices[device].row
    seconds = devices[device].work * _pace(devices, contention, device)
    if tasks[row].slow >= 0:
        seconds = slowed(slow, tasks[row].slow, now, seconds)
    tasks[row].ticket = counts[SEQUENCE]
    push(counts, calendar, now + seconds, what + n_events * row)


@inlined
def change(  # type: ignore[no-untyped-def]
    counts, calendar, tasks, slow, devices, contention, device, kind, more, now, what, n_events
):
    """Let one exchange of a kind `more` (1) or less (-1) be under way at a device, whose task may begin later."""
    before = _pace(devices, contention, device)
    contention[device * (contention.size // devices.size) + kind].active += more
    row = devices[device].row
    if row >= 0 and _pace(devices, contention, device) != before:
        now = max(now, devices[device].since)
        done = _worked(slow, tasks[row].slow, devices[device].since, now) / before
        devices[device].work = max(devices[device].work - done, 0.0)
        devices[device].since = now
        counts[N_STALE] += 1
        if counts[N_STALE] > devices.size:
            _compact(counts, calendar, tasks, row, what, n_events)
        schedule(counts, calendar, tasks, slow, devices, contention, device, now, what, n_events)


@inlined
def stale(tasks, item, sequence, what, n_events):  # type: ignore[no-untyped-def]
    """Whether an event is the end of a task which has been planned anew since."""
    if item < 0 or item % n_events != what:
        return False
    row = item // n_events
    return tasks[row].ticket >= 0 and tasks[row].ticket != sequence


@inlined
def _compact(counts, calendar, tasks, row, what, n_events):  # type: ignore[no-untyped-def]
    """Take out of the calendar what has been planned anew, and what is just being: the end of the task `row`."""
    tasks[row].ticket = counts[SEQUENCE]
    n = 0
    for i in range(counts[N_CALENDAR]):
        time = calendar[i].time
        sequence = calendar[i].sequence
        item = calendar[i].item
        if not stale(tasks, item, sequence, what, n_events):
            insert(calendar, n, time, sequence, item)
            n += 1
    counts[N_CALENDAR] = n
    counts[N_STALE] = 0
