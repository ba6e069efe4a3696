"""Horovod timelines: whole and cut, fused tensors, negotiation; what is refused."""

import json

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.horovod import read_horovod


def tensor(pid, name, shape, start=100):
    """A negotiation of 50 us between 2 ranks, then 300 us of which the transfer takes 200."""
    end = {"ph": "E", "ts": start + 360, "pid": pid, "args": {"dtype": "float32", "shape": shape}}
    rows = [("B", "NEGOTIATE_ALLREDUCE", 0), ("X", "0", 10), ("X", "1", 50), ("E", "", 50), ("B", "ALLREDUCE", 60),
            ("B", "QUEUE", 60), ("E", "", 80), ("B", "NCCL_ALLREDUCE", 100), ("E", "", 300)]  # fmt: skip
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}]
    events += [{"ph": phase, "name": what, "ts": start + ts, "pid": pid, "dur": 0} for phase, what, ts in rows]
    return [*events, end]


def write(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_text(text, encoding="utf-8")
    return path


def listed(events):
    return "[\n" + ",\n".join(json.dumps(event) for event in events)


FUSED = tensor(1, "conv1", "[64, 3, 7, 7]") + tensor(2, "fc", "[1000]") + tensor(3, "bn", "[64]", 1000)


@pytest.mark.parametrize(
    "text",
    [listed(FUSED) + "\n]", listed(FUSED), listed(FUSED) + ",\n", listed(FUSED) + ',\n{"ph": "B", "na'],
    ids=["whole", "open", "comma", "cut"],
)
def test_operations_and_transfers(tmp_path, text):
    """conv1 and fc share one transfer: (9408 + 1000) * 4 bytes; bn comes later."""
    timeline = read_horovod(write(tmp_path, text))
    first = timeline.operations[0]
    assert [operation.tensor for operation in timeline.operations] == ["conv1", "fc", "bn"]
    assert (first.negotiation_s, first.seconds, first.transfer_s) == pytest.approx((50e-6, 300e-6, 200e-6))
    assert (first.operation, first.nbytes, first.dtype) == ("all_reduce", 9408 * 4, "float32")
    assert [(row.nbytes, row.n_ranks, row.variant) for row in timeline.collectives] == [
        ((9408 + 1000) * 4, 2, "2 tensors fused"), (256, 2, "bn")
    ]  # fmt: skip
    assert timeline.collectives[0].seconds == pytest.approx(200e-6)


BEGIN = {"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1}


def test_an_unknown_shape_leaves_the_size_open(tmp_path):
    for shape in ("?", "[64,,3]", "[,3]", "[3,]", "[-3]"):
        timeline = read_horovod(write(tmp_path, listed(tensor(1, "a", shape) + tensor(2, "b", "[8]")) + "]"))
        assert [row.nbytes for row in timeline.collectives] == [0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"ph": "E", "ts": 5, "pid": 1}], r"traceEvents\[0\]: an operation on tensor .* ends without having begun"),
        ([BEGIN, {"ph": "E", "ts": 4, "pid": 1}], "ALLREDUCE has an end time that is missing or earlier"),
        ([BEGIN], "no finished ALLREDUCE"),
    ],
    ids=["end", "backwards", "open"],
)
def test_what_is_refused_is_named(tmp_path, events, message):
    with pytest.raises(ConfigError, match=message):
        read_horovod(write(tmp_path, listed(events) + "]"))


def test_no_json_names_the_line(tmp_path):
    with pytest.raises(ConfigError, match=r"timeline\.json:2: not valid JSON"):
        read_horovod(write(tmp_path, "[\n{'ph': 1},\n{'ph': 2}\n]"))


@pytest.mark.parametrize("end", ["\n]", "", ',\n{"ph": "B", "na'], ids=["whole", "open", "cut"])
def test_names_with_ends_of_lines_and_tabs_as_they_are(tmp_path, end):
    timeline = read_horovod(write(tmp_path, listed(FUSED).replace("conv1", "conv\n\t1") + end))
    assert timeline.operations[0].tensor == "conv\n\t1"
    assert len(timeline.operations) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([{"ph": "E", "ts": 5, "pid": 9}], r"traceEvents\[36\]: an operation on tensor .* ends without having begun"),
        ([{**BEGIN, "pid": 9}, {"ph": "E", "ts": 4, "pid": 9}], r"traceEvents\[37\]: ALLREDUCE has an end time"),
        ([{**BEGIN, "pid": 9}, {"ph": "E", "ts": "x", "pid": 9}], r"traceEvents\[37\]: ALLREDUCE has an end time"),
        ([{"ph": "X", "name": "0", "ts": 5, "dur": -1, "pid": 9}], r"traceEvents\[36\].dur = -1 must be"),
        ([3], r"traceEvents\[36\] is not an object"),
    ],
    ids=["end", "backwards", "no-time", "negative", "no-object"],
)
def test_an_event_that_cannot_be_used_does_not_cost_the_timeline(tmp_path, bad, message):
    n_events = len(FUSED)
    message = message.replace("36", str(n_events)).replace("37", str(n_events + 1))
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        assert len(read_horovod(write(tmp_path, listed([*FUSED, *bad]) + "]")).operations) == 3
