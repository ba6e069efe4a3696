"""Chakra execution traces: plans come back as they were, others' traces run, what is wrong with one is said."""

import json
import struct

import numpy as np
import pytest
from plan_examples import changed, hand_made, random_plan, two_ranks, workload
from unrolled import data_parallel, sharded

from ddlsim import ConfigError
from ddlsim.cluster import star
from ddlsim.plan import KINDS, Draft, FusedQueue, PriorityQueue, read_chakra, with_parameter_servers
from ddlsim.plan.chakra_file import lengthened, put, read_nodes, varint
from ddlsim.workload.buckets import per_layer

HEAD = lengthened(put(1, "0.0.4"))
COMP, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
SWITCH = star(8, bandwidth=1e9, latency=0.0)
#: the third file of the all-gather of 1 MB over four NPUs in the examples of ASTRA-sim (MIT licence), as it is
ASTRA = bytes.fromhex(
    "070a05302e302e344a08021214616c6c5f6761746865725f346e7075735f314d421807520e0a0969735f6370755f6f70d80100520d0a09636f6d6d5f747970654802520f0a09636f6d6d5f73697a6548808040"
)


def attribute(name, number, value):
    return put(10, put(1, name) + put(number, value))


def node(number, kind, *attributes, name="n", needs=(), control=(), micros=0):
    """Return a node; needs unpacked, as proto2 writes them, control dependencies packed, as proto3 does."""
    body = put(1, number) + put(2, name) + put(3, kind) + b"".join(put(5, each) for each in needs) + put(7, micros)
    body += put(4, b"".join(varint(each) for each in control)) if control else b""
    return lengthened(body + b"".join(attributes))


def collective(number, kind, size, *more, **other):
    return node(number, COLLECTIVE, attribute("comm_type", 9, kind), attribute("comm_size", 9, size), *more, **other)


def message(number, size, peer, tag=0, *, sends, **more):
    where = attribute("comm_dst" if sends else "comm_src", 7, peer)
    kind = SEND if sends else RECEIVE
    return node(number, kind, attribute("comm_size", 9, size), where, attribute("comm_tag", 7, tag), **more)


def written(tmp_path, *ranks, head=HEAD):
    for rank, nodes in enumerate(ranks):
        (tmp_path / f"t.{rank}.et").write_bytes(head + b"".join(nodes))
    return tmp_path / "t.et"


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "plan",
    [
        two_ranks(3, steps=2, accumulation=2), hand_made(), sharded(workload(), 2, steps=2), Draft().plan(),
        data_parallel(workload(), 2, steps=2, queue=FusedQueue("1 MB", "2 ms")),
        data_parallel(workload(), 2, per_layer, steps=2, queue=PriorityQueue(3), layer_by_layer=True),
        *(random_plan(np.random.default_rng(seed), 6, kinds=KINDS[8:16]) for seed in range(5)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_plan_comes_back_as_it_was(tmp_path, plan):
    if not len(plan):
        assert plan.to_chakra(tmp_path / "step.et") == []
        return
    files = plan.to_chakra(tmp_path / "step.et")
    assert [file.name for file in files[: plan.n_ranks]] == [f"step.{rank}.et" for rank in range(plan.n_ranks)]
    for path in (tmp_path / "step.et", tmp_path / "step", files[0]):
        assert read_chakra(path) == plan
    assert plan != changed(plan, seconds=plan.seconds + 1.0)


def test_others_read_what_is_written(tmp_path):
    """Types, sizes, groups and times stand where ASTRA-sim looks for them, and each lane is in order."""
    draft = Draft()
    for rank in range(4):
        draft.work(rank, 2.5e-3, "load")
    draft.collective("all_gather", (1, 3), 8e6, [[1], [3]])
    draft.message(0, 1, 1e6)
    files = draft.plan().to_chakra(tmp_path / "step.et")
    assert json.loads(files[-1].read_text()) == {"1": [1, 3]}
    _, (load, gather, receive) = read_nodes(files[1])
    assert (load.kind, load.micros, load.attributes["is_cpu_op"]) == ("COMP_NODE", 2500, False)
    assert gather.kind == "COMM_COLL_NODE"
    assert gather.data == [load.number]
    said = gather.attributes
    assert (said["comm_type"], said["comm_size"], said["pg_name"]) == (2, 4_000_000, "1")
    assert (receive.kind, receive.control) == ("COMM_RECV_NODE", [gather.number])
    said = receive.attributes
    assert (said["comm_src"], said["comm_dst"], said["comm_size"]) == (0, 1, 1_000_000)
    # taken as anybody's, it takes as long: without attributes of ours
    for file in files[:-1]:
        data = read_nodes(file)[1]
        body = [b"".join(attribute(k, 27 if isinstance(v, bool) else 29 if isinstance(v, str) else 9, int(v) if
                isinstance(v, bool) else v) for k, v in one.attributes.items() if not k.startswith("ddlsim"))
                for one in data]  # fmt: skip
        file.write_bytes(HEAD + b"".join(
            node(one.number, one.type, more, needs=one.data, control=one.control, micros=one.micros)
            for one, more in zip(data, body, strict=True)
        ))  # fmt: skip
    foreign = read_chakra(tmp_path / "step.et", groups=files[-1])
    assert foreign != draft.plan()
    assert foreign.execute(SWITCH).seconds == draft.plan().execute(SWITCH).seconds == 2.5e-3 + 4e-3


def test_push_pulls_become_messages(tmp_path):
    plan = with_parameter_servers(two_ranks(3, steps=2), 2)
    plan.to_chakra(tmp_path / "step.et")
    again = read_chakra(tmp_path / "step.et")
    assert (again.servers, len(again.rows(KINDS.index("push_pull")))) == ((3, 4), 0)
    sent = again.nbytes[again.rows(KINDS.index("send"))].sum()
    pushed = plan.collectives[plan.rank[plan.collectives] < 3]
    assert sent == 2 * plan.nbytes[pushed].sum()
    seconds = [each.execute(SWITCH, {"push_pull": "direct"}, nodes=range(5)).seconds for each in (plan, again)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_what_a_trace_cannot_say(tmp_path):
    class Mine(PriorityQueue):
        pass

    draft = Draft()
    first = draft.work(0, 1.0)
    draft.work(1, 1.0, needs=[first])
    for plan, text in (
        (draft.plan(), r"to_chakra: row 1 .*depends on row 0 .* of another rank, which a trace cannot express"),
        (data_parallel(workload(), 2, queue=Mine()), "cannot be stored in a trace"),
    ):
        with pytest.raises(ConfigError, match=text):
            plan.to_chakra(tmp_path / "x.et")
    assert not list(tmp_path.iterdir())


def test_files_of_a_plan_that_were_changed(tmp_path):
    files = two_ranks().to_chakra(tmp_path / "p.et")
    files[1].unlink()
    with pytest.raises(ConfigError, match=r"p\.0\.et: the plan consists of 2 files, but its folder contains only 1"):
        read_chakra(files[0])
    two_ranks().to_chakra(tmp_path / "p.et")
    data = files[0].read_bytes()
    changes = ((b"n_layers", b"n_lovers"), (b"ddlsim.kind", b"ddlsim.mind"), (b"[[0, 1]]", b"[[0, 9]]"))
    for old, new in changes:
        files[0].write_bytes(data.replace(old, new))
        with pytest.raises(ConfigError, match=r"p.0.et: (the ddlsim attributes are damaged|plan: groups\[0\])"):
            read_chakra(files[0])


# ---------------------------------------------------------------- other tools' traces


@pytest.mark.parametrize("name", ["all_gather.0.et", "all_gather.2.et", "all_gather.et"])
def test_a_file_of_astra_sim(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(ASTRA)
    plan = read_chakra(path, n_ranks=4)
    assert "4 all-gather" in str(plan)
    assert "all_gather_4npus_1MB" in str(plan)
    # comm_size is what each rank gives: 1 MiB to three others
    assert plan.execute(SWITCH).seconds == pytest.approx(3 * 2**20 / 1e9)
    assert read_chakra(path).execute(SWITCH).seconds == 0.0  # of one rank


def test_data_parallelism_as_text_converters_write_it(tmp_path):
    """Two layers: 1 + 1 ms forward, 2 + 1 ms backward, 4 MB each, in the order of the needs, beside each other."""
    nodes = [
        node(10, COMP, needs=[], micros=1000, name="fwd1"), node(11, COMP, needs=[10], micros=1000, name="fwd2"),
        node(12, COMP, needs=[11], micros=2000, name="bwd2"),
        collective(13, 0, 4_000_000, attribute("involved_dim", 28, put(1, b"\1\1")), needs=[12], name="sum2"),
        node(14, COMP, needs=[12], micros=1000, name="bwd1"), collective(15, 0, 4_000_000, needs=[14], name="sum1"),
        node(16, COMP, needs=[13, 15], name="update"),
    ]  # fmt: skip
    plan = read_chakra(written(tmp_path, nodes, nodes))
    plan.check()
    run = plan.execute(SWITCH)
    assert run.seconds == pytest.approx(12e-3)
    assert plan.critical_path() == pytest.approx(5e-3)


def test_messages_and_computations_of_ranks(tmp_path):
    """A pipeline of two: the receive waits beside what its rank computes, the second message has a tag of its own."""
    first = [node(0, COMP, micros=1000), message(1, 10**6, 1, 5, sends=True, needs=[0]),
             message(2, 2 * 10**6, 1, 6, sends=True, needs=[0])]  # fmt: skip
    second = [message(0, 2 * 10**6, 0, 6, sends=False), message(1, 10**6, 0, 5, sends=False),
              node(2, COMP, micros=1500), node(3, COMP, needs=[0, 1, 2], micros=1000)]  # fmt: skip
    run = read_chakra(written(tmp_path, first, second)).execute(SWITCH)
    assert run.seconds == pytest.approx(1e-3 + 3e-3 + 1e-3)


def test_streams_and_threads_of_pytorch(tmp_path):
    """Kernels of a stream come one after the other, those of others beside them; callers are no needs."""
    cpu = (attribute("is_cpu_op", 27, 1), attribute("rf_id", 9, 1), attribute("tid", 9, 3))
    nodes = [
        node(1, COMP, *cpu, control=[1], micros=100), node(2, COLLECTIVE, *cpu, control=[1], needs=[1], micros=200),
        node(3, COMP, attribute("stream", 9, 7), control=[99], needs=[1], micros=1000),
        node(4, COMP, attribute("stream", 9, 7), needs=[2], micros=1000),
        collective(5, 0, 10**6, attribute("stream", 9, 20), attribute("pg_name", 29, "0"), needs=[2]),
        node(6, COMP, attribute("stream", 9, 7), needs=[5], micros=1000),
    ]  # fmt: skip
    run = read_chakra(written(tmp_path, nodes, nodes)).execute(SWITCH)
    assert sorted({lane.name for lane in run.plan.lanes}) == ["cpu 3", "stream 20", "stream 7"]
    assert run.seconds == pytest.approx(100e-6 + 3000e-6)


def test_what_travels_takes_its_time_whoever_starts_it(tmp_path):
    """An all-reduce of 1 MB among two at 1 GB/s takes 1 ms, a message of 2 MB 2 ms, with is_cpu_op too; a barrier has
    no size."""
    cpu = attribute("is_cpu_op", 27, 1)
    size = attribute("comm_size", 9, 2 * 10**6)
    barrier = node(3, COLLECTIVE, attribute("comm_type", 9, 9), cpu, needs=[2])
    first = node(2, SEND, size, attribute("comm_dst", 7, 1), cpu, needs=[1])
    second = node(2, RECEIVE, size, attribute("comm_src", 7, 0), cpu, needs=[1])
    path = written(tmp_path, *([collective(1, 0, 10**6, cpu), part, barrier] for part in (first, second)))
    assert read_chakra(path).execute(SWITCH).seconds == pytest.approx(3e-3)


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"name": "x"}', '{"traceEvents": []}', '{"version": "0.0.4"}'])
def test_other_json_is_no_empty_plan(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x.json: (?:message 0: .* is not a field of a node|contains no nodes)"):
        read_chakra(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"t\.0\.et: contains no nodes; is it a Chakra trace"):
        read_chakra(written(tmp_path, [], [node(1, 0)]))


def test_process_groups(tmp_path):
    """Of a mapping, of a file, of PyTorch's metadata, and of the ranks that use them."""

    def nodes(rank):
        group = "even" if rank % 2 == 0 else "odd"
        return [collective(1, 0, 10**6 * (1 + rank % 2), attribute("pg_name", 29, group))]

    path = written(tmp_path, *map(nodes, range(4)))
    plan = read_chakra(path)
    assert set(plan.groups) == {(0, 2), (1, 3)}
    assert plan.execute(SWITCH).seconds == pytest.approx(2e-3)
    (tmp_path / "groups.json").write_text('{"even": [2, 0], "odd": [1, 3]}')
    assert set(read_chakra(path, groups=tmp_path / "groups.json").groups) == {(2, 0), (1, 3)}
    told = put(8, put(1, '[\'[{"pg_name": "even", "ranks": [2, 0]}, {"pg_name": "odd", "ranks": [1, 3]}]\']'))
    (tmp_path / "t.0.et").write_bytes(HEAD + node(7, 1, told) + nodes(0)[0])
    assert set(read_chakra(path).groups) == {(2, 0), (1, 3)}
    with pytest.raises(
        ConfigError, match=r"t\.0\.et: process group 'odd' contains rank 9, but only 4 ranks have traces"
    ):
        read_chakra(path, groups={"even": [0, 2], "odd": [1, 9]})
    with pytest.raises(ConfigError, match=r"rank 0 is not in its group \[2, 3\]"):
        read_chakra(path, groups={"even": [2, 3]})
    with pytest.raises(ConfigError, match=r"group 'even' = \(0, 0\): must be a list of distinct ranks"):
        read_chakra(path, groups={"even": [0, 0]})


@pytest.mark.parametrize(
    ("kind", "as_kind", "nbytes"),
    [(0, "all_reduce", 100), (1, "reduce", 100), (2, "all_gather", 200), (3, "gather", 200), (4, "scatter", 100),
     (5, "broadcast", 100), (6, "all_to_all", 100), (7, "reduce_scatter", 100), (8, "reduce_scatter", 100),
     (9, "all_reduce", 100)],
)  # fmt: skip
def test_every_collective_of_the_schema(tmp_path, kind, as_kind, nbytes):
    plan = read_chakra(written(tmp_path, *[[collective(1, kind, 100)]] * 2))
    assert [KINDS[each] for each in plan.kind] == [as_kind] * 2
    assert plan.nbytes.tolist() == [nbytes] * 2


def test_operations_at_a_speed(tmp_path):
    path = written(tmp_path, [node(1, COMP, attribute("num_ops", 13, 10**9), attribute("tensor_size", 13, 10**6))])
    with pytest.raises(ConfigError, match=r"node 1 \('n', COMP_NODE\): has num_ops = 1000000000 but no duration"):
        read_chakra(path)
    assert read_chakra(path, flops="1 TFLOP/s").execute(SWITCH).seconds == pytest.approx(1e-3)
    slow = read_chakra(path, flops="1 TFLOP/s", memory_bandwidth="100 MB/s")
    assert slow.execute(SWITCH).seconds == pytest.approx(10e-3)


def test_attributes_of_every_type(tmp_path):
    values = {3: 2.5, 7: -3, 9: -4, 11: 5, 13: 6, 15: 13, 17: 14, 27: 1, 29: "text", 31: b"raw"}
    lists = {4: struct.pack("<2d", 1.5, 2.5), 6: struct.pack("<2f", 1.5, 2.5), 10: varint(7) + varint(-8),
             20: struct.pack("<2I", 1, 2), 26: struct.pack("<2q", 1, -2), 28: b"\1\0"}  # fmt: skip
    more = [attribute(f"a{number}", number, value) for number, value in values.items()]
    more += [put(10, put(1, f"a{number}") + put(number, put(1, value))) for number, value in lists.items()]
    more.append(put(10, put(1, "a30") + put(30, put(1, "x") + put(1, "y"))))
    path = written(tmp_path, [node(1, COMP, *more)])
    said = read_nodes(tmp_path / "t.0.et")[1][0].attributes
    assert said == {
        "a3": 2.5, "a7": -3, "a9": -4, "a11": 5, "a13": 6, "a15": -7, "a17": 7, "a27": True, "a29": "text",
        "a31": "raw", "a4": [1.5, 2.5], "a6": [1.5, 2.5], "a10": [7, -8], "a20": [1, 2], "a26": [1, -2],
        "a28": [True, False], "a30": ["x", "y"],
    }  # fmt: skip
    assert read_chakra(path).execute(SWITCH).seconds == 0.0


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node(1, COMP, needs=[2])], r"t.0.et: node 1 \('n', COMP_NODE\): depends on node 2, which is not in the file"),
        ([node(1, COMP), node(1, COMP)], r"node 1 .*another node has the same number"),
        ([node(1, COMP, needs=[2]), node(2, COMP, needs=[1]), collective(3, 0, 5)], r"t.0.et: node .*dependency cycle"),
        ([node(1, COMP, put(11, b""))], r"message 1: the node has field 11, as in schemas before 0\.0\.4"),
        ([node(1, 8)], r"t\.0\.et: message 1: node 1 has type 8; the schema defines types 0 to 7"),
        ([collective(1, 10, 5)], "comm_type = 10: the schema defines 0 to 9"),
        ([collective(1, 0, -5)], "comm_size = -5: must be a non-negative integer"),
        ([node(1, COLLECTIVE, attribute("comm_size", 9, 5))], "has no comm_type, which a plan needs"),
        ([node(1, COLLECTIVE, attribute("comm_type", 9, 0))], r"t.0.et: node 1 .*has no comm_size, which"),
        ([node(1, COLLECTIVE, attribute("comm_type", 9, 0), attribute("is_cpu_op", 27, 1))], "has no comm_size"),
        ([node(1, SEND, attribute("comm_dst", 7, 1))], "has no comm_size"),
        ([node(1, 2, attribute("tensor_size", 13, 5), attribute("is_cpu_op", 27, 1))], "accesses memory but has no"),
        ([collective(1, 0, 5, attribute("involved_dim", 28, put(1, b"\1\0")))], r"involved_dim = \[True, False\]"),
        ([message(1, 5, 1, sends=True)], r"t.0.et: node 1 .*the matching receive is missing.*: 1 sent, 0 received"),
        ([message(1, 5, 1, sends=False)], "the matching send is missing"),
        ([message(1, 5, 99, sends=True)], "the matching receive is missing"),
        ([node(1, SEND, attribute("comm_size", 9, 5))], "has no comm_dst"),
        ([message(1, 5, 1, sends=True) + message(2, 5, 0, sends=True)], "comm_dst = 0: must be another rank"),
        ([node(1, SEND, attribute("comm_src", 7, 3), attribute("comm_size", 9, 5))], "comm_src = 3, in the file of"),
        ([node(1, 2, attribute("tensor_size", 13, 5))], "MEM_LOAD_NODE.*accesses memory but has no duration"),
        ([collective(1, 0, 5), collective(2, 0, 5)], "rank 1 of its group never enters .* rank 1 enters 1"),
        ([collective(1, 0, 6)], r"t.1.et: node 1 .*: .* enters all_reduce with 5 bytes, .* is all_reduce with 6"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say_is_refused(tmp_path, nodes, text):
    with pytest.raises(ConfigError, match=text) as error:
        read_chakra(written(tmp_path, nodes, [collective(1, 0, 5)]))
    assert "\n" not in str(error.value)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file, and there is no t\.0\.et in its folder"):
        read_chakra(tmp_path / "t.et")
    written(tmp_path, [collective(1, 0, 5)], [], [collective(1, 0, 5)])
    (tmp_path / "t.1.et").unlink()
    with pytest.raises(
        ConfigError, match=r"t\.1\.et: no such file, although there is t\.2\.et; provide one file per rank"
    ):
        read_chakra(tmp_path / "t.et")
    (tmp_path / "t.2.et").unlink()
    path = written(tmp_path, [node(1, COMP)], [])
    with pytest.raises(ConfigError, match="n_ranks = 4 has no effect with 2 files"):
        read_chakra(path, n_ranks=4)


def test_every_truncation_and_changed_byte_is_an_error_or_a_plan(tmp_path):
    path = written(tmp_path, [node(1, COMP, micros=5), collective(2, 0, 10**6, needs=[1], control=[1])])
    data = (tmp_path / "t.0.et").read_bytes()
    rng = np.random.default_rng(0)
    damaged = [data[:n] for n in range(len(data))]
    for place in range(len(data)):
        for value in (0, 0xFF, int(rng.integers(256))):
            damaged.append(data[:place] + bytes([value]) + data[place + 1 :])
    errors = []
    for each in damaged:
        (tmp_path / "t.0.et").write_bytes(each)
        try:
            assert len(read_chakra(path)) <= 2
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > len(damaged) / 4
    assert all("t.0.et" in error and "\n" not in error for error in errors)


# ---------------------------------------------------------------- as JSON


def as_json(*objects):
    return "".join(json.dumps(each, indent=2) for each in objects)


JSON = (
    {"version": "0.0.4"},
    {"id": "1", "name": "n", "type": "COMP_NODE", "durationMicros": "7"},
    {"id": "2", "name": "n", "type": "COMM_COLL_NODE", "dataDeps": ["1"], "attr": [
        {"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "4096"},
        {"name": "involved_dim", "boolList": {"values": [True, True]}}, {"name": "x", "doubleVal": 0.5},
        {"name": "is_cpu_op", "boolVal": False}, {"name": "pg_name", "stringVal": ""}]},
)  # fmt: skip


@pytest.mark.parametrize("snake", [False, True], ids=["camelCase", "snake_case"])
def test_what_the_jsonizer_makes_of_a_trace_is_the_same_plan(tmp_path, snake):
    path = written(tmp_path, [node(1, COMP, micros=7), collective(2, 0, 4096, needs=[1])])
    text = as_json(*JSON)
    if snake:
        text = text.replace("durationMicros", "duration_micros").replace("dataDeps", "data_deps")
        text = text.replace("int64Val", "int64_val").replace("boolList", "bool_list")
    for rank in range(2):
        (tmp_path / f"j.{rank}.json").write_text(text)
    binary, plan = read_chakra(tmp_path / "t.0.et", n_ranks=2), read_chakra(tmp_path / "j.0.json")
    assert path.name == "t.et"
    for name in ("seconds", "nbytes", "kind", "rank"):
        assert np.array_equal(getattr(plan, name), getattr(binary, name)), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (as_json(*JSON)[:-9], r"j\.json:8: message 2 is not valid JSON: .*; is the file complete\?"),
        (as_json(*JSON).replace("COMP_NODE", "CUDA_NODE"), "message 1: type = 'CUDA_NODE' is unknown; known: INV"),
        (as_json(*JSON).replace('"7"', '"-7"'), "message 1.durationMicros: '-7' must be a non-negative integer"),
        (as_json(*JSON).replace("dataDeps", "parents"), "message 2: 'parents' is not a field of a node"),
        (
            as_json(*JSON).replace('"name": "comm_type",', ""),
            r"message 2\.attr\[0\]: has no name; every attribute needs one",
        ),
        (as_json(*JSON[:1], [1]), "message 1: must be an object"),
    ],
    ids=["cut", "type", "negative", "field", "nameless", "list"],
)
def test_json_that_is_no_trace_is_refused_with_its_place(tmp_path, text, message):
    (tmp_path / "j.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_chakra(tmp_path / "j.json")
