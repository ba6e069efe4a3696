"""PyTorch traces: steps, collectives on GPU and CPU with their sizes, layers; several ranks; what is refused."""

import gzip
import json
import math

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.kineto import fastest_over_ranks, read_kineto

BASE = 1740461679000000.0  # traces count microseconds since 1970, or since the machine started


def span(name, ts, dur, cat="cpu_op", tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": BASE + ts, "dur": dur, "args": args}


def write(tmp_path, events, name="trace.json", **top):
    top = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}, **top}
    path = tmp_path / name
    text = json.dumps({**top, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def gpu_events():
    """Two steps of one all-reduce of 1024 floats and one all-gather of 8 * 512 bfloat16."""
    events = []
    for step, start in ((3, 0.0), (4, 1000.0)):
        events += [
            span(f"ProfilerStep#{step}", start, 1000.0, "user_annotation"),
            span(f"ProfilerStep#{step}", start + 5, 990.0, "gpu_user_annotation", "stream 7"),
            span(
                "record_param_comms", start + 10, 20, **{
                    "External id": 10 * step, "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1024,
                    "Out msg nelems": 1024, "Group size": 4,
                },
            ),
            span("nccl:all_reduce", start + 10, 20, "user_annotation"),
            span(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, long)", start + 50, 40.0 + step, "kernel",
                "stream 20", **{"External id": 10 * step, "stream": 20},
            ),
            span(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", start + 200, 80.0, "kernel",
                "stream 20", **{
                    "Collective name": "_allgather_base", "In msg nelems": 512, "Out msg nelems": 4096,
                    "dtype": "BFloat16", "Group size": 8,
                },
            ),
        ]  # fmt: skip
    return events


@pytest.mark.parametrize("name", ["trace.json", "trace.pt.trace.json.gz"])
def test_steps_and_collectives_of_a_gpu_trace(tmp_path, name):
    trace = read_kineto(write(tmp_path, gpu_events(), name), batch_size=32)
    assert [(step.variant, step.seconds, step.n_samples) for step in trace.steps] == [
        ("ProfilerStep#3", pytest.approx(1e-3), 256.0), ("ProfilerStep#4", pytest.approx(1e-3), 256.0)
    ]  # fmt: skip
    assert [(row.operation, row.n_ranks, row.nbytes, row.dtype) for row in trace.collectives] == [
        ("all_reduce", 4, 4096, "float32"), ("all_gather", 8, 8192, "bfloat16")
    ] * 2  # fmt: skip
    assert trace.collectives[0].seconds == pytest.approx(43e-6)
    assert trace.collectives[0].variant == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert (trace.rank, trace.n_ranks) == (0, 8)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclKernel_SendRecv", "p2p"),
    ],
)
def test_old_kernels_have_names_but_no_sizes(tmp_path, kernel, operation):
    (row,) = read_kineto(write(tmp_path, [span(kernel, 5, 7.0, "Kernel", "stream 1")])).collectives
    assert (row.operation, row.nbytes, row.n_ranks) == (operation, 0, 8)


def test_gloo_spans_have_dimensions(tmp_path):
    """Three tensors: 10 and 2 * 3 floats, 2 doubles: 64 + 16 bytes. An all-gather's input is one rank's part."""
    shapes = {"Input Dims": [[10], [2, 3], [2]], "Input type": ["float", "float", "double"]}
    events = [
        span("gloo:all_reduce", 5, 800.0, "user_annotation", **shapes),
        span("gloo:all_gather", 900, 80.0, "user_annotation", **{"Input Dims": [[3]], "Input type": ["long int"]}),
        span("gloo:barrier_of_mine", 990, 8.0, "user_annotation"),
    ]
    rows = read_kineto(write(tmp_path, events)).collectives
    assert [(row.operation, row.nbytes) for row in rows] == [("all_reduce", 80), ("all_gather", 8 * 24)]


def module_events(start=0.0, slow=1.0):
    """A Sequential of Conv2d and Linear. Sequence numbers 16 (conv), 20 and 21 (linear: transpose, addmm)."""
    number = int(start) // 100

    def op(name, ts, dur, sequence):
        return span(name, start + ts, dur, **{"Sequence number": sequence + number, "Fwd thread id": 0})

    def back(name, ts, dur, sequence):
        args = {"Sequence number": sequence + number, "Fwd thread id": 1}
        return span(f"autograd::engine::evaluate_function: {name}", start + ts, dur * slow, "cpu_op", 9, **args)

    return [
        span("aten::zero_", start + 1, 1.0, **{"Sequence number": 16 + number, "Fwd thread id": 0}),
        span("nn.Module: Sequential_0", start + 5, 100.0, "python_function"),
        span("nn.Module: Conv2d_0", start + 10, 30.0 * slow, "python_function"),
        op("aten::conv2d", 12, 20.0, 16),
        span("nn.Module: Linear_0", start + 70, 20.0 * slow, "python_function"),
        op("aten::linear", 71, 15.0, 20), op("aten::t", 72, 1.0, 20), op("aten::addmm", 75, 9.0, 21),
        back("AddmmBackward0", 200, 11.0, 21), back("TBackward0", 215, 2.0, 20),
        back("ConvolutionBackward0", 230, 50.0, 16), back("NllLossBackward0", 190, 3.0, 25),
        span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", start + 285, 4.0, "cpu_op", 9),
    ]  # fmt: skip


def test_layers_on_the_cpu_take_the_time_of_their_spans(tmp_path):
    layers = read_kineto(write(tmp_path, module_events())).layers
    assert [(layer.name, layer.kind, layer.n_calls) for layer in layers] == [
        ("Conv2d_0", "Conv2d", 1.0), ("Linear_0", "Linear", 1.0)
    ]  # fmt: skip
    assert [layer.forward_s for layer in layers] == pytest.approx([30e-6, 20e-6], rel=1e-3)
    assert [layer.backward_s for layer in layers] == pytest.approx([50e-6, 13e-6], rel=1e-3)


def test_the_median_over_the_steps_counts(tmp_path):
    events = [span(f"ProfilerStep#{i}", 1000.0 * i, 1000.0, "user_annotation") for i in range(3)]
    for i, slow in enumerate((1.0, 1.1, 1.3)):
        events += module_events(1000.0 * i, slow)
    (conv, _) = read_kineto(write(tmp_path, events)).layers
    assert conv.forward_s == pytest.approx(33e-6, rel=1e-2)


def test_layers_on_the_gpu_take_the_time_of_their_kernels(tmp_path):
    """The convolution launches 100 us forward, 150 us backward; the launch of a collective is nobody's."""
    events = module_events()
    for moment, tid, correlation, seconds, name in (
        (13, 7, 1, 60.0, "implicit_gemm"), (14, 7, 2, 40.0, "bias"), (76, 7, 3, 5.0, "sgemm"),
        (231, 9, 4, 150.0, "wgrad"), (201, 9, 5, 7.0, "sgemm"), (202, 9, 6, 900.0, "ncclDevKernel_AllReduce_Sum_f32"),
        (95, 7, 7, 33.0, "softmax"),
    ):  # fmt: skip
        events.append(span("cudaLaunchKernel", moment, 1.0, "cuda_runtime", tid, correlation=correlation))
        events.append(span(name, moment + 500, seconds, "kernel", "stream 7", correlation=correlation))
    layers = read_kineto(write(tmp_path, events)).layers
    assert [(layer.forward_s, layer.backward_s) for layer in layers] == [
        (pytest.approx(100e-6), pytest.approx(150e-6)), (pytest.approx(5e-6), pytest.approx(7e-6))
    ]  # fmt: skip


def test_the_fastest_rank_did_not_wait(tmp_path):
    traces = []
    for rank, wait in enumerate((0.0, 500.0)):
        events = gpu_events()
        for event in events:
            event["dur"] += wait * (event["cat"] == "kernel")
        info = {"rank": rank, "world_size": 8}
        traces.append(read_kineto(write(tmp_path, events, f"{rank}.json", distributedInfo=info)))
    rows = fastest_over_ranks(traces)
    assert [row.seconds for row in rows] == [row.seconds for row in traces[0].collectives]
    short = read_kineto(write(tmp_path, gpu_events()[:6], "short.json"))
    with pytest.raises(ConfigError, match="the traces have different numbers of collectives, 4, 2"):
        fastest_over_ranks([traces[0], short])
    other = read_kineto(write(tmp_path, gpu_events()[:5] * 2 + gpu_events()[4:6], "other.json"))
    with pytest.raises(ConfigError, match=r"different numbers of collectives|different collectives"):
        fastest_over_ranks([traces[0], other])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [\n{"ph": "X", \n', r"trace\.json:3: not valid JSON"),
        ('{"traceEvents": {}}', "the list 'traceEvents' is missing"),
        ('{"traceEvents": [3]}', r"traceEvents\[0\] is not an object"),
        ('{"traceEvents": [{"ph": "X", "ts": "now"}]}', r"traceEvents\[0\].ts = 'now' must be a number"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": -3}]}', r"traceEvents\[0\].dur = -3"),
        ('{"traceEvents": []}', "no ProfilerStep, collective or nn.Module found"),
        (
            '{"distributedInfo": {"rank": 4, "world_size": 2}, "traceEvents": []}',
            "rank = 4 is not valid for world_size = 2",
        ),
        ('{"traceEvents": [{"ph": "X", "name": "ProfilerStep#1", "ts": 1}]}', "step has no duration"),
    ],
)
def test_what_is_refused_is_named(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_kineto(path)


@pytest.mark.parametrize("size", [-1, 0.5, float("nan"), 10**400, "x"], ids=["negative", "half", "nan", "huge", "text"])
def test_sizes_that_no_message_has(tmp_path, size):
    events = gpu_events()
    events[2]["args"]["In msg nelems"] = size
    message = r"traceEvents\[4\]: In msg nelems = .* must be a non-negative integer"
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        assert len(read_kineto(write(tmp_path, events)).collectives) == 3
    alone = {**events[2]["args"], "Collective name": "allreduce"}
    with pytest.raises(ConfigError, match=r"traceEvents\[0\]: In msg nelems"):
        read_kineto(write(tmp_path, [span("ncclDevKernel_AllReduce_x", 0, 5.0, "kernel", **alone)]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (span("aten::mm", 20, -3), r"traceEvents\[12\].dur = -3 must be a non-negative number of microseconds"),
        (span("aten::mm", float("inf"), 3), r"traceEvents\[12\].ts = inf must be a number of microseconds"),
        (span("aten::mm", 20, "long"), r"traceEvents\[12\].dur = 'long' must be a non-negative number of microseconds"),
        (span("ProfilerStep#5", 2000, 0, "user_annotation"), r"traceEvents\[12\]: step has no duration"),
        (7, r"traceEvents\[12\] is not an object"),
    ],
    ids=["negative", "inf", "text", "no-time", "no-object"],
)
def test_an_event_that_cannot_be_used_does_not_cost_the_trace(tmp_path, bad, message):
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        trace = read_kineto(write(tmp_path, [*gpu_events(), bad]))
    assert (len(trace.steps), len(trace.collectives)) == (2, 4)


def test_numbers_as_c_prints_them(tmp_path):
    """Kineto writes a copy of no duration with ``"memory bandwidth (GB/s)": inf``, which is no JSON."""
    path = write(tmp_path, [*gpu_events(), span("Memcpy", 30, 0, "gpu_memcpy", **{"memory bandwidth (GB/s)": 12345.5})])
    text = path.read_text().replace("12345.5", "inf").replace('"Memcpy"', '"Memcpy -nan, inf\\" \n"')
    for number in ("inf", "-inf", "nan", "-nan", "-nan(ind)", "Infinity"):
        path.write_text(text.replace("inf}", number + "}"))
        assert (len(read_kineto(path).steps), len(read_kineto(path).collectives)) == (2, 4)


@pytest.mark.parametrize("n", [10, 9])
def test_kernels_beside_a_collective_are_compared_with_the_same_alone(tmp_path, n):
    """A product takes 37.5 instead of 30 us there, a smaller one 15 instead of 10; of fewer than 20 nothing is said."""
    events = [span("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0, 60.0 * n, "kernel", 20)]
    for start, large, small in ((0.0, 37.5, 15.0), (60.0 * n, 30.0, 10.0)):
        for i in range(n):
            events.append(span("gemm", start + 60 * i, large, "kernel", 7, grid=[96, 1, 1], block=[128, 1, 1]))
            events.append(span("gemm", start + 60 * i + 40, small, "kernel", 7, grid=[8, 1, 1], block=[128, 1, 1]))
    events.append(span("softmax", 20.0, 99.0, "kernel", 8, grid=[1]))  # never alone
    events.append(span("gemm", 60.0 * n - 20, 40.0, "kernel", 8, grid=[96, 1, 1], block=[128, 1, 1]))  # half beside
    slowdown = read_kineto(write(tmp_path, events)).overlap_slowdown
    assert slowdown == pytest.approx(52.5 / 40.0) if n == 10 else math.isnan(slowdown)


def test_kernels_of_rccl_and_times_before_the_base(tmp_path):
    args = {"Collective name": "allreduce", "In msg nelems": 1024, "Group size": 8, "dtype": "Float"}
    kernel = {"ph": "X", "cat": "kernel", "name": "rcclGenericKernel<1>(x)", "ts": -5.0, "dur": 50.0, "args": args}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [kernel]}))
    (row,) = read_kineto(path).collectives
    assert (row.operation, row.n_ranks, row.nbytes, row.seconds) == ("all_reduce", 8, 4096, pytest.approx(50e-6))
