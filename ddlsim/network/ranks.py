"""Messages, and the ranks that send and receive them.

When a rank in a lane (a *thread*) has completed the sends and receives of its step, it is put on the list `ready`;
:func:`run_ready` advances all threads on it, which keeps the order of events simple.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.calendar import push_timer
from ddlsim.network.changes import has_changes
from ddlsim.network.flows import book_issue, two_sum
from ddlsim.network.state import CLIENT_SHIFT, DELIVERING, ENDED, FLOWING, FREE, WAITING, View
from ddlsim.network.transport import answer, asks

# ---------------------------------------------------------------- messages


@inlined
def issue(net: View, instance, message, nbytes, route, source, repetition):  # type: ignore[no-untyped-def]
    """Send a message from node `source` now: sender's overhead, then latency, then it flows."""
    slot = net.next_slot
    while net.slots[slot].state != FREE:
        slot = slot + 1 if slot + 1 < net.slots.size else 0
    net.next_slot = slot + 1 if slot + 1 < net.slots.size else 0
    net.slots[slot].state = WAITING
    net.slots[slot].instance = instance
    net.slots[slot].message = message
    net.slots[slot].route = route
    net.slots[slot].nbytes = nbytes
    net.slots[slot].repetition = repetition
    net.slots[slot].sequence = net.issue_sequence
    net.issue_sequence += 1
    book_issue(net, route, nbytes, 1.0)
    start = net.now
    if has_changes(net):
        start = max(start, net.nodes[source].stopped_until)
    overhead = net.nodes[source].send_overhead * net.routes[route].occupies
    if overhead > 0.0:
        start = max(start, net.nodes[source].send_free) + overhead
        net.nodes[source].send_free = start
    if net.transported == 1 and asks(net, slot):
        if instance >= 0 and not is_awaited(net, instance, message):
            net.asked[slot] = start + net.routes[route].latency
            net.parked[net.instances[instance].counters + net.messages[message].counter] = slot + 1
            return
        start += net.transports[route].round_trip
    push_timer(net, start + net.routes[route].latency, slot)


@inlined
def is_awaited(net: View, instance, message):  # type: ignore[no-untyped-def]
    """Whether the receiver of a message has entered the same step and repetition as its sender."""
    threads = net.instances[instance].threads
    receiver = threads + net.messages[message].dst
    if net.threads[receiver].step != net.messages[message].step:
        return False
    return net.threads[receiver].repetition == net.threads[threads + net.messages[message].src].repetition


@inlined
def finished(net: View, slot):  # type: ignore[no-untyped-def]
    """Handle the arrival of a message's last byte: the send ends; overhead and reduction may delay the delivery."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    reduce_time = 0.0
    target = message
    place = -1
    early = False
    if instance >= 0:
        target = net.messages[message].target
        reduce_time = net.messages[message].reduce * net.nodes[target].reduce_time * net.slots[slot].nbytes
        place = net.instances[instance].counters + net.messages[message].counter
        # it has overtaken an earlier repetition, which can happen if ranks send ahead
        early = net.ahead > 0 and net.slots[slot].repetition != net.arrivals[place].delivered
    overhead = net.nodes[target].recv_overhead * net.routes[net.slots[slot].route].occupies
    now = net.now
    done = now if not has_changes(net) else max(now, net.nodes[target].stopped_until)
    if overhead > 0.0:
        done = max(done, net.nodes[target].recv_free) + overhead
        net.nodes[target].recv_free = done
    done += reduce_time
    takes_time = overhead + reduce_time > 0.0
    if early:
        hold(net, slot, place, done)
        slot = -1
    while slot >= 0:
        if instance >= 0 and (net.ahead > 0 or net.messages[message].stride * net.messages[message].reduce > 0):
            # A smaller repetition is reduced sooner and may overtake the previous one. As arrivals are only counted, it
            # would then be mistaken for the earlier one. No rank waits for it before the earlier one has arrived.
            done = max(done, net.arrivals[place].last)
            net.arrivals[place].last = done
            net.arrivals[place].delivered += 1
        if takes_time or done > now:
            net.slots[slot].state = DELIVERING
            net.n_delivering += 1
            push_timer(net, done, slot)
        else:
            deliver(net, slot)
        slot = -1
        if instance >= 0 and net.ahead > 0:
            slot = next_held(net, place)
            if slot >= 0:
                done = max(net.trains[slot].done, now)
                takes_time = False
    if instance >= 0:
        thread = net.messages[message].src
        state = net.instances[instance].threads + thread
        net.threads[state].sends_left -= 1
        if net.threads[state].sends_left == net.ahead and net.threads[state].recvs_missing == 0:
            make_ready(net, instance, thread)


@inlined
def hold(net: View, slot, place, done):  # type: ignore[no-untyped-def]
    """Hold a message, received and reduced at `done`, until all earlier repetitions have arrived."""
    net.slots[slot].state = DELIVERING
    net.n_delivering += 1
    net.rerated += 1  # this round cannot be replayed
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
def next_held(net: View, place):  # type: ignore[no-untyped-def]
    """Release the held repetition that follows the last one known; return its slot, -1 if there is none."""
    slot = net.arrivals[place].held - 1
    if slot < 0 or net.slots[slot].repetition != net.arrivals[place].delivered:
        return -1
    net.arrivals[place].held = net.trains[slot].next
    net.slots[slot].state = FLOWING
    net.n_delivering -= 1
    return slot


@inlined
def deliver(net: View, slot):  # type: ignore[no-untyped-def]
    """Deliver the message to its receiver and free the slot."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    if net.slots[slot].state == DELIVERING:
        net.n_delivering -= 1
    net.slots[slot].state = FREE
    net.n_messages += 1
    net.delivered, net.delivered_low = two_sum(net.delivered, net.delivered_low, net.slots[slot].nbytes)
    if instance < 0:
        net.live_single -= 1
        net.live_sends -= 1
        report_completion(net, instance, 0)
        return
    counter = net.instances[instance].counters + net.messages[message].counter
    arrived = net.counters[counter] + 1
    net.counters[counter] = arrived
    thread = net.messages[message].dst
    state = net.instances[instance].threads + thread
    if net.threads[state].step == net.messages[message].step and arrived == net.threads[state].repetition + 1:
        net.threads[state].recvs_missing -= 1
        if net.threads[state].recvs_missing == 0 and net.threads[state].sends_left <= net.ahead:
            make_ready(net, instance, thread)


@inlined
def report_completion(net: View, instance, rank):  # type: ignore[no-untyped-def]
    """Report a completion to its client, which may not be the one that now advances time."""
    client = (-1 - instance) >> CLIENT_SHIFT if instance < 0 else net.instances[instance].client
    if client != net.client:
        i = net.n_foreign
        net.foreign[i].id = instance
        net.foreign[i].rank = rank
        net.foreign[i].client = client
        net.n_foreign = i + 1
        return
    i = net.n_out
    net.out[i].id = instance
    net.out[i].rank = rank
    net.n_out = i + 1


@inlined
def collect(net: View):  # type: ignore[no-untyped-def]
    """Report the completions that wait to the client that now advances time, if they are its own."""
    n = net.n_foreign
    net.n_foreign = 0
    for i in range(n):
        report_completion(net, net.foreign[i].id, net.foreign[i].rank)


# ---------------------------------------------------------------- ranks and rounds


@inlined
def make_ready(net: View, instance, thread):  # type: ignore[no-untyped-def]
    """Let a thread continue at this instant. It can be on the list only once, because it waits for nothing else."""
    i = net.n_ready
    net.ready[i].instance = instance
    net.ready[i].thread = thread
    net.n_ready = i + 1


@inlined
def run_ready(net: View):  # type: ignore[no-untyped-def]
    """Let all ready threads enter their next step, and further ones whose messages have already arrived."""
    i = 0
    while i < net.n_ready:
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
    net.n_ready = 0


@inlined
def enter_step(net: View, table, instance, thread, step, repetition):  # type: ignore[no-untyped-def]
    """Start a step: issue its sends, count the missing receives. Returns True if the thread need not wait."""
    state = table.threads + thread
    net.threads[state].step = step
    net.threads[state].repetition = repetition
    if net.threads[state].entered != net.n_events:
        net.threads[state].entered = net.n_events
        net.stepped += 1
    left = net.steps[step].repeat - 1 - repetition if repetition > 0 else -1
    net.steps_left = min(net.steps_left, left)
    low = net.steps[step].send
    high = net.steps[step].send_end
    net.threads[state].sends_left += high - low
    missing = 0
    for i in range(net.steps[step].recv, net.steps[step].recv_end):
        if net.counters[table.counters + net.messages[net.tables[i]].counter] <= repetition:
            missing += 1
            if net.transported == 1 and is_awaited(net, instance, net.tables[i]):
                answer(net, table.counters + net.messages[net.tables[i]].counter)
    net.threads[state].recvs_missing = missing
    for message in range(low, high):
        place = net.messages[message].weight + repetition * net.messages[message].stride
        nbytes = table.nbytes * net.weights[place]
        if net.has_headers == 1:
            nbytes += net.headers[place]
        route = net.messages[message].route
        issue(net, instance, message, nbytes, route, net.messages[message].source, repetition)
    return net.threads[state].sends_left <= net.ahead and missing == 0


@inlined
def end_thread(net: View, instance, thread):  # type: ignore[no-untyped-def]
    """End a thread; its rank ends with its last thread."""
    table = net.instances[instance]
    program = net.programs[table.program]
    rank = thread % program.n_ranks
    net.threads[table.threads + thread].step = ENDED
    net.live_threads -= 1
    net.counters[table.ranks + rank] -= 1
    if net.counters[table.ranks + rank] > 0:
        return
    report_completion(net, instance, rank)
    net.instances[instance].ranks_left -= 1
    if net.instances[instance].ranks_left == 0:
        net.n_live -= 1
        net.live_sends -= program.sends_bound
