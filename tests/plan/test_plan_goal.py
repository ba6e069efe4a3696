"""GOAL text: what it says runs, plans are written out in it, and what is wrong with a file is said."""

import dataclasses
import re

import numpy as np
import pytest
from plan_examples import hand_made, random_plan, two_ranks, workload
from unrolled import data_parallel, sharded

import ddlsim
from ddlsim import ConfigError
from ddlsim.cluster import racks, star, torus
from ddlsim.plan import KINDS, Draft, PriorityQueue, read_goal, with_parameter_servers

SWITCH = ddlsim.load_cluster(star(6, bandwidth=1e9, latency=1e-6))
#: as the README of LogGOPSim's generators writes it, with comments, CPUs and NICs
TEXT = """num_ranks 3 // three of them

rank 0 {
l1: calc 1000000 cpu 1
l2: send 1000000b to 1 tag 7 cpu 0 nic 0
l2 requires l1
calc 5
}
/* the second
waits */
rank 1 {
got: recv 1000000b from 0 tag 7
work: calc 2000000
work requires got
beside: calc 2500000 cpu 3
}
"""


def needs_a_later_row():
    """The first row needs the one behind it, on another lane, as rows of pipelines do."""
    draft = Draft()
    for lane in ("compute", "memory"):
        draft.work(0, 1e-3, lane=lane)
    draft.all_reduce(range(2), 1e6)
    plan = draft.plan()
    return dataclasses.replace(plan, need_offsets=np.minimum(np.arange(len(plan) + 1), 1), needs=np.array([1]))


def written(tmp_path, text):
    path = tmp_path / "x.goal"
    path.write_text(text)
    return path


def test_what_a_file_says(tmp_path):
    plan = read_goal(written(tmp_path, TEXT))
    plan.check()
    assert plan.n_ranks == 3
    run = plan.execute(SWITCH)
    assert run.seconds == pytest.approx(1e-3 + 1e-3 + 2e-6 + 2e-3)
    assert plan.critical_path() == pytest.approx(3e-3)
    names = {(lane.rank, lane.name) for lane in plan.lanes}
    assert names == {
        (0, "cpu 0"), (0, "cpu 1"), (0, "waiting"), (1, "cpu 0"), (1, "cpu 3"), (1, "waiting"), (2, "waiting"),
    }  # fmt: skip


def test_a_cpu_does_first_what_can_start_first(tmp_path):
    """The calc that stands first waits for a message, the other one does not wait for it."""
    text = (
        "num_ranks 2\nrank 0 {\nl1: recv 1000000b from 1 tag 0\nl2: calc 1000000\nl2 requires l1\nl3: calc 500000\n}\n"
        "rank 1 {\nl1: calc 700000\nl2: send 1000000b to 0 tag 0\nl2 requires l1\n}\n"
    )
    assert read_goal(written(tmp_path, text)).execute(SWITCH).seconds == pytest.approx(0.7e-3 + 1e-3 + 2e-6 + 1e-3)


def test_messages_with_a_tag_meet_in_order(tmp_path):
    text = (
        "num_ranks 2\nrank 0 {\nsend 8b to 1 tag 1\nsend 9b to 1 tag 1\nsend 7b to 1\n}\n"
        "rank 1 {\nrecv 7b from 0 tag 0\nrecv 8b from 0 tag 1\nrecv 9b from 0 tag 1\n}"
    )
    assert len(read_goal(written(tmp_path, text))) == 6


def test_what_starts_with_others_waits_for_what_they_wait_for(tmp_path):
    text = (
        "num_ranks 2\nrank 0 {\na: calc 1000\nb: send 1000000b to 1 tag 0\nb requires a\nc: send 1000000b to 1 tag 1\n"
        "c irequires b\nd: calc 300\nd irequires c\n}\n"
        "rank 1 {\nrecv 1000000b from 0 tag 0\nrecv 1000000b from 0 tag 1\n}"
    )
    run = read_goal(written(tmp_path, text)).execute(SWITCH)
    assert run.start[run.plan.kind == KINDS.index("send")].tolist() == pytest.approx([1e-6, 1e-6])
    (row,) = np.flatnonzero(np.isclose(run.plan.seconds, 3e-7))
    assert run.start[row] == pytest.approx(1e-6)


_IDENTIFIER = "[a-zA-Z][a-zA-Z0-9_]*"
_LINE = re.compile(
    rf"(?P<label>{_IDENTIFIER}): (?:calc \d+|(?:send \d+b to|recv \d+b from) \d+ tag (?P<tag>\d+)) cpu (?P<cpu>\d+)"
)


def check_as_txt2bin(text):
    """Hold a file to what LogGOPSim's compiler takes (src/LogGOPSim/txt2bin.re at d5bb14a): a label is known from its
    line to the end of the rank; cpu is a byte, tag has 32 bits. Messages are on a CPU without passes."""
    calc, messages, labels = set(), set(), set()
    for line in text.splitlines():
        if line == "}":
            assert not calc & messages
            calc, messages, labels = set(), set(), set()
        elif match := _LINE.fullmatch(line):
            assert int(match["cpu"]) < 2**8
            assert int(match["tag"] or 0) < 2**32
            (calc if match["tag"] is None else messages).add(int(match["cpu"]))
            labels.add(match["label"])
        elif match := re.fullmatch(rf"({_IDENTIFIER}) requires ({_IDENTIFIER})", line):
            assert set(match.groups()) <= labels
        else:
            assert re.fullmatch(r"num_ranks \d+|rank \d+ \{|", line)


@pytest.mark.parametrize(
    ("plan", "algorithm"),
    [
        (two_ranks(4, steps=2), "ring"), (two_ranks(4, steps=2), "halving_doubling"), (hand_made(), "ring"),
        (sharded(workload(), 3, steps=2), {"all_gather": "direct"}), (two_ranks(6), "pipelined_ring"),
        (needs_a_later_row(), "ring"),
        *((random_plan(np.random.default_rng(seed), 6, kinds=KINDS[8:16]), "ring") for seed in range(4)),
    ],
)  # fmt: skip
def test_a_plan_takes_as_long_written_out(tmp_path, plan, algorithm):
    """Up to the rounding to whole nanoseconds and bytes; and what has been read is written as it was."""
    path = plan.to_goal(tmp_path / "a.goal", algorithm)
    check_as_txt2bin(path.read_text())
    again = read_goal(path)
    assert {KINDS[kind] for kind in again.kind} <= {"compute", "send", "receive"}
    seconds = plan.execute(SWITCH, algorithm, rank_order="given").seconds
    assert again.execute(SWITCH).seconds == pytest.approx(seconds, rel=1e-6)
    assert read_goal(again.to_goal(tmp_path / "b.goal")).execute(SWITCH).seconds == again.execute(SWITCH).seconds


@pytest.mark.parametrize(
    "graph",
    [
        racks(2, 4, bandwidth="1 GB/s", latency="5 us", trunk_bandwidth="100 MB/s", trunk_latency="20 us"),
        torus([4, 2], bandwidth="1 GB/s", latency="5 us"),
    ],
)
def test_a_plan_takes_as_long_as_its_simulation_on_a_cluster(tmp_path, graph):
    """The default algorithms are those of the simulation: hierarchical ones, and those of a torus."""
    cluster = ddlsim.load_cluster(graph)
    plan = two_ranks(8, steps=2)
    simulated = plan.execute(cluster).seconds
    written_out = read_goal(plan.to_goal(tmp_path / "a.goal", cluster=cluster))
    assert written_out.execute(cluster).seconds == pytest.approx(simulated, rel=1e-6)
    in_rings = read_goal(plan.to_goal(tmp_path / "b.goal"))
    assert in_rings.execute(cluster).seconds != pytest.approx(simulated, rel=1e-3)
    nodes = cluster.workers[:8].tolist()[::-1]
    placed = read_goal(plan.to_goal(tmp_path / "c.goal", cluster=cluster, nodes=nodes))
    again = placed.execute(cluster, nodes=nodes).seconds
    assert again == pytest.approx(plan.execute(cluster, nodes=nodes).seconds, rel=1e-6)
    with pytest.raises(ConfigError, match="to_goal: nodes has no effect without a cluster"):
        plan.to_goal(tmp_path / "d.goal", nodes=nodes)


@pytest.mark.parametrize(("cluster", "n"), [("dgx1-v100", 8), ("dgx-h100-pod", 16)])
def test_latencies_of_nccl_delay_the_sends(cluster, n, tmp_path):
    """The bytes of a small all-reduce take no time, so its time is that of its latencies; rings add none."""
    draft = Draft()
    draft.all_reduce(range(n), 10.0)
    plan = draft.plan()
    for algorithm, are_delayed in (("nccl", True), ("ring", False)):
        path = plan.to_goal(tmp_path / "a.goal", algorithm, cluster=cluster)
        again = read_goal(path).execute(cluster).seconds
        assert again == pytest.approx(plan.execute(cluster, algorithm=algorithm).seconds, rel=2e-3)
        check_as_txt2bin(text := path.read_text(encoding="utf-8"))
        assert ("_after" in text) == are_delayed


def test_servers_are_written_out(tmp_path):
    plan = with_parameter_servers(two_ranks(3, steps=2), 2)
    again = read_goal(plan.to_goal(tmp_path / "a.goal"))
    nodes = SWITCH.workers[:5].tolist()
    assert again.execute(SWITCH).seconds == pytest.approx(plan.execute(SWITCH, nodes=nodes).seconds, rel=1e-6)


def test_a_plan_of_messages_comes_back_as_it_was(tmp_path):
    plan = read_goal(written(tmp_path, TEXT))
    assert read_goal(plan.to_goal(tmp_path / "again.goal")) == plan


def test_what_goal_cannot_say(tmp_path):
    draft = Draft()
    draft.work(1, 1.0, needs=[draft.work(0, 1.0)])
    for plan, text in (
        (draft.plan(), r"to_goal: row 1 .*depends on row 0 .* of another rank, which GOAL cannot express"),
        (data_parallel(workload(), 2, queue=PriorityQueue()), "is launched by a queue, and GOAL has no queues"),
    ):
        with pytest.raises(ConfigError, match=text):
            plan.to_goal(tmp_path / "x.goal")
    large = Draft()
    for _ in range(2):
        large.all_reduce(range(1024), 1e6)
    with pytest.raises(ConfigError, match="the plan has 4,190,208 messages, more than 2,000,000; export fewer"):
        large.plan().to_goal(tmp_path / "x.goal")
    many = Draft()
    for lane in range(256):
        many.work(0, 1e-3, lane=f"stream {lane}")
    with pytest.raises(ConfigError, match="uses CPU 256, but LogGOPSim supports only CPUs 0 to 255; use fewer lanes"):
        many.plan().to_goal(tmp_path / "x.goal")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x\.goal: contains no num_ranks; is it a GOAL file\?"),
        ("num_ranks 0\n", "x.goal:1: num_ranks 0"),
        ("num_ranks 3\n", r"x\.goal: contains no operations; is the file complete\?"),
        ("num_ranks 99999999999999999999999\n", "x.goal:1: num_ranks .*: must be at most 1000000"),
        ("rank 0 {\n}\n", "x.goal:1: num_ranks must come first"),
        ("num_ranks 2\nrank 2 {\n}\n", r"x\.goal:2: rank 2: must be 0 to 1 \(num_ranks\)"),
        ("num_ranks 2\nrank 0 {\nrank 1 {\n}\n", r"x\.goal:3: rank 0 is not closed"),
        ("num_ranks 2\nrank 0 {\n}\nrank 0 {\n}", r"x\.goal:4: rank 0 occurs twice"),
        ("num_ranks 2\nrank 0 {\ncalc 5\n", "x.goal: ends inside rank 0; is the file complete"),
        ("num_ranks 2\ncalc 5\n", "x.goal:2: 'calc 5': expected num_ranks N, or rank N"),
        ("num_ranks 2\nrank 0 {\nl1: clac 5\n}", r"x\.goal:3: 'l1: clac 5': is not an operation"),
        ("num_ranks 2\nrank 0 {\nl1: send 8 to 1\n}", r"x\.goal:3: 'l1: send 8 to 1': is not an operation"),
        ("num_ranks 2\nrank 0 {\nl1: send 8b from 1\n}", "x.goal:3: send ... from: write 'send 8b to 1'"),
        ("num_ranks 2\nrank 0 {\nsend 8b to 0\n}", "x.goal:3: rank 0 sends to itself"),
        ("num_ranks 2\nrank 0 {\nsend 8b to 7\n}", r"x\.goal:3: to 7: must be 0 to 1 \(num_ranks\)"),
        ("num_ranks 2\nrank 0 {\nrecv 8b from -1 tag 0\n}", r"x\.goal:3: a receive of a plan needs a sender and a tag"),
        ("num_ranks 2\nrank 0 {\nrecv 8b from 1 tag -1\n}", r"x\.goal:3: a receive of a plan needs a sender and a tag"),
        ("num_ranks 2\nrank 0 {\nsend 8b to 1\n}", r"x\.goal:3: the matching receive is missing.*: 1 sent, 0 received"),
        ("num_ranks 2\nrank 0 {\nrecv 8b from 1\n}", "x.goal:3: the matching send is missing"),
        ("num_ranks 2\nrank 0 {\nsend 8b to 1\n}\nrank 1 {\nrecv 9b from 0\n}", "x.goal:6: receives 9 bytes"),
        ("num_ranks 1\nrank 0 {\nl1: calc 5\nl1: calc 6\n}", r"x\.goal:4: label l1 is used twice"),
        ("num_ranks 1\nrank 0 {\nl1: calc 5\nl1 requires l2\n}", r"x\.goal:4: label l2 is not defined on this rank"),
        ("num_ranks 1\nrank 0 {\na: calc 5\nb: calc 5\na requires b\nb requires a\n}", r"goal:[34]: dependency cycle"),
        ("num_ranks 1\nrank 0 {\na: calc 5\nb: calc 5\nb irequires a\n}", "x.goal:5: b waits for the start of"),
        ("num_ranks 1\nrank 0 {\ncalc 99999999999999999999\n}", "x.goal:3: calc .*: must be at most"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_goal(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_every_truncation_is_an_error_or_a_plan(tmp_path):
    errors = []
    for end in range(len(TEXT)):
        try:
            read_goal(written(tmp_path, TEXT[:end]))
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > len(TEXT) / 2
    assert all("x.goal" in error and "\n" not in error for error in errors)
