"""Messages, and the ranks that send and receive them.

When a rank in a lane (a *thread*) has completed the sends and receives of its step, it is put on the list `ready`;
:func:`run_ready` advances all threads on it, which keeps the order of events simple.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.calendar import push_timer
from ddlsim.network.changes import has_changes
from ddlsim.network.flows import book_issue
from ddlsim.network.state import (
    AHEAD,
    CLIENT,
    CLIENT_SHIFT,
    DELIVERED,
    DELIVERING,
    ENDED,
    FLOWING,
    FREE,
    HEADERS,
    ISSUE_SEQUENCE,
    LIVE_SENDS,
    LIVE_SINGLE,
    LIVE_THREADS,
    N_DELIVERING,
    N_EVENTS,
    N_FOREIGN,
    N_LIVE,
    N_MESSAGES,
    N_OUT,
    N_READY,
    NEXT_SLOT,
    NOW,
    RERATED,
    STEPPED,
    STEPS_LEFT,
    TRANSPORTED,
    WAITING,
    Net,
)
from ddlsim.network.sums import count
from ddlsim.network.transport import answer, asks

# ---------------------------------------------------------------- messages


@inlined
def issue(net: Net, instance, message, nbytes, route, source, repetition):  # type: ignore[no-untyped-def]
    """Send a message from node `source` now: sender's overhead, then latency, then it flows."""
    slot = net.counts[NEXT_SLOT]
    while net.slots[slot].state != FREE:
        slot = slot + 1 if slot + 1 < net.slots.size else 0
    net.counts[NEXT_SLOT] = slot + 1 if slot + 1 < net.slots.size else 0
    net.slots[slot].state = WAITING
    net.slots[slot].instance = instance
    net.slots[slot].message = message
    net.slots[slot].route = route
    net.slots[slot].nbytes = nbytes
    net.slots[slot].repetition = repetition
    net.slots[slot].sequence = net.counts[ISSUE_SEQUENCE]
    net.counts[ISSUE_SEQUENCE] += 1
    book_issue(net, route, nbytes, 1.0)
    start = net.reals[NOW]
    if has_changes(net):
        start = max(start, net.nodes[source].stopped_until)
    overhead = net.nodes[source].send_overhead * net.routes[route].occupies
    if overhead > 0.0:
        start = max(start, net.nodes[source].send_free) + overhead
        net.nodes[source].send_free = start
    if net.counts[TRANSPORTED] == 1 and asks(net, slot):
        if instance >= 0 and not is_awaited(net, instance, message):
            net.asked[slot] = start + net.routes[route].latency
            net.parked[net.instances[instance].counters + net.messages[message].counter] = slot + 1
            return
        start += net.transports[route].round_trip
    push_timer(net, start + net.routes[route].latency, slot)


@inlined
def is_awaited(net: Net, instance, message):  # type: ignore[no-untyped-def]
    """Whether the receiver of a message has entered the same step and repetition as its sender."""
    threads = net.instances[instance].threads
    receiver = threads + net.messages[message].dst
    if net.threads[receiver].step != net.messages[message].step:
        return False
    return net.threads[receiver].repetition == net.threads[threads + net.messages[message].src].repetition


@inlined
def finished(net: Net, slot):  # type: ignore[no-untyped-def]
    """Handle the arrival of a message's last byte: the send ends; overhead and reduction may delay the delivery."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    reduce_time = 0.0
    target = message
    if instance >= 0:
        target = net.messages[message].target
        reduce_time = net.messages[message].reduce * net.nodes[target].reduce_time * net.slots[slot].nbytes
    overhead = net.nodes[target].recv_overhead * net.routes[net.slots[slot].route].occupies
    now = net.reals[NOW]
    done = now if not has_changes(net) else max(now, net.nodes[target].stopped_until)
    if overhead > 0.0:
        done = max(done, net.nodes[target].recv_free) + overhead
        net.nodes[target].recv_free = done
    done += reduce_time
    takes_time = overhead + reduce_time > 0.0
    if instance >= 0 and is_early(net, slot, instance, message):
        hold(net, slot, net.instances[instance].counters + net.messages[message].counter, done)
        slot = -1
    while slot >= 0:
        if instance >= 0 and (net.counts[AHEAD] > 0 or net.messages[message].stride * net.messages[message].reduce > 0):
            done = in_order(net, net.instances[instance].counters + net.messages[message].counter, done)
        if takes_time or done > now:
            net.slots[slot].state = DELIVERING
            net.counts[N_DELIVERING] += 1
            push_timer(net, done, slot)
        else:
            deliver(net, slot)
        slot = -1
        if instance >= 0 and net.counts[AHEAD] > 0:
            slot = next_held(net, net.instances[instance].counters + net.messages[message].counter)
            if slot >= 0:
                done = max(net.trains[slot].done, now)
                takes_time = False
    if instance >= 0:
        thread = net.messages[message].src
        state = net.instances[instance].threads + thread
        net.threads[state].sends_left -= 1
        if net.threads[state].sends_left == net.counts[AHEAD] and net.threads[state].recvs_missing == 0:
            make_ready(net, instance, thread)


@inlined
def in_order(net: Net, place, done):  # type: ignore[no-untyped-def]
    """Return when a message that would be done at `done` counts as delivered: not before the previous repetition.

    A smaller repetition is reduced sooner and may overtake the previous one. As arrivals are only counted, it would
    then be mistaken for the earlier one. No rank waits for it before the earlier one has arrived.
    """
    done = max(done, net.arrivals[place].last)
    net.arrivals[place].last = done
    net.arrivals[place].known += 1
    return done


@inlined
def is_early(net: Net, slot, instance, message):  # type: ignore[no-untyped-def]
    """Whether a message has overtaken an earlier repetition, which can happen if ranks send ahead."""
    place = net.instances[instance].counters + net.messages[message].counter
    return net.counts[AHEAD] > 0 and net.slots[slot].repetition != net.arrivals[place].known


@inlined
def hold(net: Net, slot, place, done):  # type: ignore[no-untyped-def]
    """Hold a message, received and reduced at `done`, until all earlier repetitions have arrived."""
    net.slots[slot].state = DELIVERING
    net.counts[N_DELIVERING] += 1
    net.counts[RERATED] += 1  # this round cannot be replayed
    net.trains[slot].done = done
    before = -1
    following = net.arrivals[place].held - 1
    while following >= 0 and net.slots[following].repetition < net.slots[slot].repetition:
        before = following
        following = net.trains[following].next - 1
    net.trains[slot].next = following + 1
    if before < 0:
        net.arrivals[place].held = slot + 1
    else:
        net.trains[before].next = slot + 1


@inlined
def next_held(net: Net, place):  # type: ignore[no-untyped-def]
    """Release the held repetition that follows the last one known; return its slot, -1 if there is none."""
    slot = net.arrivals[place].held - 1
    if slot < 0 or net.slots[slot].repetition != net.arrivals[place].known:
        return -1
    net.arrivals[place].held = net.trains[slot].next
    net.slots[slot].state = FLOWING
    net.counts[N_DELIVERING] -= 1
    return slot


@inlined
def deliver(net: Net, slot):  # type: ignore[no-untyped-def]
    """Deliver the message to its receiver and free the slot."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    if net.slots[slot].state == DELIVERING:
        net.counts[N_DELIVERING] -= 1
    net.slots[slot].state = FREE
    net.counts[N_MESSAGES] += 1
    count(net, DELIVERED, net.slots[slot].nbytes, 1.0)
    if instance < 0:
        net.counts[LIVE_SINGLE] -= 1
        net.counts[LIVE_SENDS] -= 1
        report_completion(net, instance, 0)
        return
    counter = net.instances[instance].counters + net.messages[message].counter
    arrived = net.counters[counter] + 1
    net.counters[counter] = arrived
    thread = net.messages[message].dst
    state = net.instances[instance].threads + thread
    if net.threads[state].step == net.messages[message].step and arrived == net.threads[state].repetition + 1:
        net.threads[state].recvs_missing -= 1
        if net.threads[state].recvs_missing == 0 and net.threads[state].sends_left <= net.counts[AHEAD]:
            make_ready(net, instance, thread)


@inlined
def report_completion(net: Net, instance, rank):  # type: ignore[no-untyped-def]
    """Report a completion to its client, which may not be the one that now advances time."""
    client = (-1 - instance) >> CLIENT_SHIFT if instance < 0 else net.instances[instance].client
    if client != net.counts[CLIENT]:
        i = net.counts[N_FOREIGN]
        net.foreign[i].id = instance
        net.foreign[i].rank = rank
        net.foreign[i].client = client
        net.counts[N_FOREIGN] = i + 1
        return
    i = net.counts[N_OUT]
    net.out[i].id = instance
    net.out[i].rank = rank
    net.counts[N_OUT] = i + 1


@inlined
def collect(net: Net):  # type: ignore[no-untyped-def]
    """Report the completions that wait to the client that now advances time, if they are its own."""
    n = net.counts[N_FOREIGN]
    net.counts[N_FOREIGN] = 0
    for i in range(n):
        report_completion(net, net.foreign[i].id, net.foreign[i].rank)


# ---------------------------------------------------------------- ranks and rounds


@inlined
def make_ready(net: Net, instance, thread):  # type: ignore[no-untyped-def]
    """Let a thread continue at this instant. It can be on the list only once, because it waits for nothing else."""
    i = net.counts[N_READY]
    net.ready[i].instance = instance
    net.ready[i].thread = thread
    net.counts[N_READY] = i + 1


@inlined
def run_ready(net: Net):  # type: ignore[no-untyped-def]
    """Let all ready threads enter their next step, and further ones whose messages have already arrived."""
    i = 0
    while i < net.counts[N_READY]:
        instance = net.ready[i].instance
        thread = net.ready[i].thread
        i += 1
        table = net.instances[instance]
        state = table.threads + thread
        first = net.tables[net.programs[table.program].thread + thread]
        step = net.threads[state].step
        repetition = net.threads[state].repetition
        entered = True
        while entered:
            if step < 0:
                step = first  # the thread joins
            else:
                repetition += 1
                if repetition == net.steps[step].repeat:
                    step = net.steps[step].next
                    repetition = 0
            if step < 0:
                end_thread(net, instance, thread)
                break
            entered = enter_step(net, table, instance, thread, step, repetition)
    net.counts[N_READY] = 0


@inlined
def enter_step(net: Net, table, instance, thread, step, repetition):  # type: ignore[no-untyped-def]
    """Start a step: issue its sends, count the missing receives. Returns True if the thread need not wait."""
    state = table.threads + thread
    net.threads[state].step = step
    net.threads[state].repetition = repetition
    if net.threads[state].entered != net.counts[N_EVENTS]:
        net.threads[state].entered = net.counts[N_EVENTS]
        net.counts[STEPPED] += 1
    left = net.steps[step].repeat - 1 - repetition if repetition > 0 else -1
    net.counts[STEPS_LEFT] = min(net.counts[STEPS_LEFT], left)
    low = net.steps[step].send
    high = net.steps[step].send_end
    net.threads[state].sends_left += high - low
    missing = 0
    for i in range(net.steps[step].recv, net.steps[step].recv_end):
        if net.counters[table.counters + net.messages[net.tables[i]].counter] <= repetition:
            missing += 1
            if net.counts[TRANSPORTED] == 1 and is_awaited(net, instance, net.tables[i]):
                answer(net, table.counters + net.messages[net.tables[i]].counter)
    net.threads[state].recvs_missing = missing
    for message in range(low, high):
        place = net.messages[message].weight + repetition * net.messages[message].stride
        nbytes = table.nbytes * net.weights[place]
        if net.counts[HEADERS] == 1:
            nbytes += net.headers[place]
        route = net.messages[message].route
        issue(net, instance, message, nbytes, route, net.messages[message].source, repetition)
    return net.threads[state].sends_left <= net.counts[AHEAD] and missing == 0


@inlined
def end_thread(net: Net, instance, thread):  # type: ignore[no-untyped-def]
    """End a thread; its rank ends with its last thread."""
    table = net.instances[instance]
    program = net.programs[table.program]
    rank = thread % program.n_ranks
    net.threads[table.threads + thread].step = ENDED
    net.counts[LIVE_THREADS] -= 1
    net.counters[table.ranks + rank] -= 1
    if net.counters[table.ranks + rank] > 0:
        return
    report_completion(net, instance, rank)
    net.instances[instance].ranks_left -= 1
    if net.instances[instance].ranks_left == 0:
        net.counts[N_LIVE] -= 1
        net.counts[LIVE_SENDS] -= program.sends_bound
