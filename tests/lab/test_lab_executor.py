"""Every collective runs over real TCP, on this computer's loopback, and gives the right result."""

import dataclasses
import socket
import threading
from contextlib import contextmanager
from multiprocessing import Pipe

import numpy as np
import pytest

from ddlsim.collectives import Schedule, algorithm_names, build, messages
from ddlsim.collectives.all_reduce import binomial_tree, ring
from ddlsim.collectives.push_pull import push_pull
from ddlsim.lab.laboratory import Ranks
from ddlsim.lab.rank import Executor, LabError, Prepare, boundaries, problem, program_of, promises, serve
from ddlsim.measure import OPERATIONS

CASES = [(kind, name) for kind in OPERATIONS["collective"] for name in algorithm_names(kind)]


@contextmanager
def ranks_in_threads(n_ranks):
    """Ranks as the laboratory has them, but threads of this process, on the loopback."""
    pairs = [Pipe() for _ in range(n_ranks)]
    threads = [
        threading.Thread(target=serve, args=(theirs, rank, "127.0.0.1", "reno"), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for thread in threads:
        thread.start()
    ours = tuple(pair[0] for pair in pairs)
    try:
        ranks = Ranks(ours, tuple(f"machine{rank}" for rank in range(n_ranks)))
        ranks.meet()
        yield ranks
    finally:
        for pipe in ours:
            pipe.close()
        for thread in threads:
            thread.join(10)
        for _, theirs in pairs:
            theirs.close()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("n_ranks", "per_host"), [(2, 1), (3, 1), (6, 2)])
def test_every_collective_is_right_at_every_size(n_ranks, per_host):
    """One float for all, odd sizes that no number of chunks divides, and more than a socket takes at once."""
    with ranks_in_threads(n_ranks) as ranks:
        for kind, name in CASES:
            for nbytes in (4, 4 * 1009, 400_000):
                schedule = build(name, n_ranks, nbytes, [rank // per_host for rank in range(n_ranks)], kind)
                taken = ranks.repeat(Prepare(schedule, nbytes), 1, 10.0)  # checks the result on every rank
                assert len(taken) == 1, (kind, name)
                assert taken[0].seconds > 0


@pytest.mark.parametrize("n_servers", [1, 2, 3])
def test_workers_get_the_sum_from_their_servers(n_servers):
    with ranks_in_threads(3 + n_servers) as ranks:
        order = Prepare(push_pull(3, n_servers), 40_000, n_silent=n_servers)
        assert len(ranks.repeat(order, 2, 10.0)) == 2


def test_lanes_and_answers_without_any_byte_of_the_buffer():
    with ranks_in_threads(4) as ranks:
        for schedule in (binomial_tree(4, answer=100), build("pipelined_ring(3)", 4)):
            ranks.repeat(Prepare(schedule, 36_000), 1, 10.0)


def test_a_wrong_result_is_seen_and_told():
    """The second lap of a ring shifted the wrong way leaves parts of the buffer without the sum."""
    right = ring(3)
    (first, second), = right.lanes  # fmt: skip
    wrong = dataclasses.replace(right, lanes=((first, dataclasses.replace(second, shift=0)),))
    with ranks_in_threads(3) as ranks:
        ranks.repeat(Prepare(right, 4096), 1, 10.0)
        with pytest.raises(
            LabError, match=r"rank \d \(machine\d\): the result of the collective is wrong: \d+ of 1024 elements"
        ):
            ranks.repeat(Prepare(wrong, 4096), 1, 10.0)


def test_a_rank_that_waits_for_a_message_nobody_sends_says_so():
    program = program_of(Schedule(2, 1, ((messages([0], [1], reduce=True),),)), 1, 64)
    here, there = socket.socketpair()
    with (
        here,
        there,
        pytest.raises(
            LabError, match=r"no byte was sent or received for 0\.05 s, while waiting in lane 0, step 0 for rank 0"
        ),
    ):
        Executor(program, {(0, 0): here}, np.zeros(16, np.float32)).run(patience=0.05)


def test_a_rank_whose_peer_is_gone_says_so():
    program = program_of(Schedule(2, 1, ((messages([0], [1], reduce=True),),)), 1, 64)
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(LabError, match="rank 0 closed its connection"):
        Executor(program, {(0, 0): here}, np.zeros(16, np.float32)).run()


def test_a_rank_that_ends_too_soon_is_named():
    ours, theirs = Pipe()
    theirs.close()
    with ours, pytest.raises(LabError, match=r"rank 0 \(alpha\) ended unexpectedly"):
        Ranks((ours,), ("alpha",)).hear(1.0)


def test_early_messages_wait_for_their_round():
    """Rank 0 is two messages ahead before rank 1 begins; each counts in its own round, in this order:
    first 5 replaces 1, then 10 is added: 15."""
    schedule = Schedule(2, 1, ((messages([0], [1], reduce=False), messages([0], [1], reduce=True)),))
    here, there = socket.socketpair()
    with here, there:
        there.sendall(np.float32([5.0]).tobytes() + np.float32([10.0]).tobytes())
        buffer = np.float32([1.0])
        Executor(program_of(schedule, 1, 4), {(0, 0): here}, buffer).run()
    assert buffer[0] == 15.0


def test_what_is_sent_is_what_was_there_when_the_round_began():
    """Both ranks swap the same chunk; the copy sent is the old value, even if the new one comes first."""
    schedule = Schedule(2, 1, ((messages([0, 1], [1, 0], reduce=False),),))
    (send,) = program_of(schedule, 0, 4).lanes[0][0].sends
    assert send.snapshot
    (send, *_) = program_of(ring(3), 0, 12).lanes[0][0].sends  # another chunk than the one that comes
    assert not send.snapshot


def test_promises_name_the_first_wrong_element():
    schedule = ring(2)
    (promise,) = promises(schedule, 0, boundaries(schedule, 8), 8)
    result = promise.values.copy()
    assert problem(result, (promise,)) == ""
    result[3] += 1
    assert "1 of 8 elements are wrong; element 3" in problem(result, (promise,))


def test_chunks_are_cut_at_whole_elements_by_weight():
    """Weights 1, 1, 2 of 10 elements: 2.5, 2.5, 5, so the ends are 2.5 -> 2, 5, 10."""
    schedule = dataclasses.replace(ring(3), chunk_weight=np.array([1.0, 1.0, 2.0]))
    assert boundaries(schedule, 10).tolist() == [0, 2, 5, 10]
