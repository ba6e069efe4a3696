"""Bytes and seconds of compressed runs, against the exchange in one process and closed forms."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from compression_reference import COMPRESSORS, STAR, STRATEGIES, learn, timing
from draws import latin

import ddlsim
from ddlsim.compression import CodecCost, ErrorFeedback, hierarchical_exchange, sent_nbytes
from ddlsim.compression.choice import fitted
from ddlsim.compression.cost import FREE, SORT_V100
from ddlsim.errors import ConfigError
from ddlsim.streams import stream
from ddlsim.workload.model import tensor_shapes

N = 1898  # parameters of digits-cnn
LAYERS = (650, 1168, 80)  # of its layers, last first
TENSORS = tensor_shapes(ddlsim.load_model("digits-cnn"))
NONE = ddlsim.AllReduce("ring", overlap="none")
KNOWN = [name for name in COMPRESSORS if name != "threshold"]


def buckets(compressor):
    """The elements of each layer, last first; all of them together where the compressor is of the whole gradient."""
    if compressor.traits.whole:
        return [slice(0, N)]
    ends = np.cumsum(LAYERS)
    return [slice(N - end, N - end + n) for end, n in zip(ends.tolist(), LAYERS, strict=True)]


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(("name", "n_workers"), latin(KNOWN, [1, 3, 4]))
def test_an_all_reduce_run_sends_what_the_exchange_counts(name, n_workers):
    """Of steps 2, 3 and 4; some ranks of a tree are early, and their next step's first bucket is counted already."""
    compressor = COMPRESSORS[name]
    sent = 0.0
    for step in (2, 3, 4):
        for part in buckets(compressor):
            sizes = fitted(compressor, TENSORS, part).expected_nbytes(part.stop - part.start, step)
            sent += sum(sent_nbytes(compressor.traits.collective, [size] * n_workers).sum() for size in sizes)
    before, after = (timing(compressor, n_steps=n, workers=n_workers).nbytes_sent for n in (2, 5))
    assert after - before == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize(("name", "strategy"), latin(KNOWN, ["servers", "async"]))
def test_servers_get_a_payload_and_answer_it(name, strategy):
    """Steps 2, 3 and 4 of one worker: both rounds' payloads up; down 4 bytes per element (of a sketch, from a
    synchronous server, 8 per element that is kept), or 2 with FP16."""
    compressor = COMPRESSORS[name]
    parts = buckets(compressor) if strategy == "servers" else [slice(0, N)]
    up = sum(
        sum(fitted(compressor, TENSORS, part).expected_nbytes(part.stop - part.start, step))
        for part in parts
        for step in (2, 3, 4)
    )
    dense = 4 * N
    if compressor.traits.sparse_answer and strategy == "servers":
        dense = 2 * compressor.expected_nbytes(N)[-1]
    for down, answer in ((None, dense), (ddlsim.FP16(), 2 * N)):
        choice = ddlsim.Compression(compressor, down=down)
        before, after = (timing(choice, STRATEGIES[strategy], n, workers=1).nbytes_sent for n in (2, 5))
        assert after - before == pytest.approx(up + 3 * answer, rel=1e-12)


@dataclass
class Recording:
    """Passes everything on to a compressor, and keeps what went in and out."""

    inner: ErrorFeedback
    gradients: list = field(default_factory=list)
    payloads: list = field(default_factory=list)
    residual: dict = field(default_factory=dict)
    states: int = 0
    traits = ddlsim.TopK(0.5).traits

    def init(self, n, seed=0):
        self.states += 1
        return self.states, self.inner.init(n, seed)

    def encode(self, gradient, state, rng):
        worker, before = state
        payload, after = self.inner.encode(gradient, before, rng)
        self.gradients.append(gradient.astype(np.float64))
        self.payloads.append(payload.nbytes)
        self.residual[worker] = after.residual
        return payload, (worker, after)

    def decode(self, payload):
        return self.inner.decode(payload)

    def expected_nbytes(self, n, step=0):
        return self.inner.expected_nbytes(n, step)


@pytest.mark.parametrize("inner", [ddlsim.TopK(0.05), ddlsim.Threshold(0.02)], ids=["top-k", "threshold"])
@pytest.mark.parametrize("strategy", [NONE, ddlsim.ParameterServer(overlap="none")], ids=["all-reduce", "server"])
def test_nothing_is_lost_with_error_feedback(strategy, inner):
    """Over a run: what moved the parameters, rate / N times what arrived, plus the residuals are all gradients."""
    recording = Recording(ErrorFeedback(inner))
    result = learn(recording, strategy, n_updates=15)
    start = ddlsim.build_network("digits-cnn", 0).initial_params.astype(np.float64)
    arrived = 4 * (start - result.params) / 0.1
    left = np.sum([residual.astype(np.float64) for residual in recording.residual.values()], axis=0)
    assert len(recording.gradients) == 4 * 15
    np.testing.assert_allclose(arrived + left, np.sum(recording.gradients, axis=0), rtol=0, atol=2e-4)
    assert np.abs(left).max() > 1e-2


def test_sizes_that_depend_on_values_travel_as_they_are():
    """Ring all-gather: every payload crosses N - 1 hops; through a server once, and 4 N n bytes come back."""
    for strategy, hops, back in ((NONE, 3, 0), (ddlsim.ParameterServer(overlap="none"), 1, 10 * 4 * 4 * N)):
        recording = Recording(ErrorFeedback(ddlsim.Threshold(0.02)))
        result = learn(recording, strategy)
        assert len(set(recording.payloads)) > 10
        assert result.nbytes_sent == hops * sum(recording.payloads) + back


def test_fp16_halves_the_bytes():
    assert timing(ddlsim.FP16()).nbytes_sent == pytest.approx(timing(None).nbytes_sent / 2, rel=1e-12)


def test_dgc_at_25_percent_and_32_workers_is_8_times_the_dense_volume():
    """N times k values with indices: (N - 1) 8 n/4 against 2 (N - 1)/N 4 n is N/4."""

    def run(compression, n_steps):
        return timing(compression, NONE, n_steps, workers=32, cluster="cloud-25g-16x8-v100", model="vgg16")

    def nbytes(compression):  # of step 2: early ranks have begun the next one
        return run(compression, 3).nbytes_sent - run(compression, 2).nbytes_sent

    dgc = ddlsim.DGC(1, sparsities=(0.75,))
    assert nbytes(dgc) / nbytes(None) == pytest.approx(8.0, rel=1e-6)
    assert run(dgc, 2).step_time > 2.0 * run(None, 2).step_time


def test_hierarchical_top_k_sends_what_the_exchange_counts_and_less_between_machines():
    """2 machines with 8 workers each (HiTopKComm): shards of 1898 elements are 237 or 238."""
    compressor = ErrorFeedback(ddlsim.MSTopK(0.05))
    gradients = [stream(0, rank, "g").standard_normal(N).astype(np.float32) for rank in range(16)]
    states = [compressor.init(N // 8 + (rank % 8 < N % 8)) for rank in range(16)]
    done = hierarchical_exchange(compressor, gradients, states, [stream(0, r, "x") for r in range(16)], 8)
    cluster = "cloud-25g-16x8-v100"
    result = timing(compressor, ddlsim.AllReduce("hierarchical", "none"), 2, 16, cluster)
    assert result.nbytes_sent == pytest.approx(2 * (done.sent_inside.sum() + done.sent_between.sum()), rel=1e-12)
    flat = timing(compressor, NONE, 2, 16, cluster, "vgg16")
    nested = timing(compressor, ddlsim.AllReduce("hierarchical", "none"), 2, 16, cluster, "vgg16")
    assert nested.step_time < flat.step_time
    assert any("HiTopKComm" in note for note in nested.notes)


def test_hierarchical_top_k_averages_the_gradient():
    strategy = ddlsim.AllReduce("hierarchical")
    training = ddlsim.Training(rate=0.1, updates=10, batching=False)

    def params(compression):
        return ddlsim.simulate(
            "cloud-25g-16x8-v100", "digits-cnn", strategy, 16, 16, training=training, compression=compression
        ).params  # fmt: skip

    np.testing.assert_allclose(params(ddlsim.TopK(1.0)), params(None), rtol=0, atol=1e-6)
    assert np.abs(params(ddlsim.TopK(0.1)) - params(None)).max() > 1e-3


# ---------------------------------------------------------------- seconds


def step_seconds(compression, strategy=NONE, **more):
    """Seconds of the second of two steps without jitter."""
    result = timing(compression, strategy, 2, **more)
    (first, _), (second, _) = result.recorder.updates
    return second - first


@pytest.mark.parametrize(("name", "collectives"), [
    ("fp16", [("ring", "all_reduce", 2 * N)]),
    ("top-k", [("ring", "all_gather", 4 * 8 * 190)]),
    ("g-top-k", [("binomial_tree", "all_reduce", 8 * 190)]),
    ("count-sketch", [("ring", "all_reduce", 4 * 5 * 64), ("ring", "all_reduce", 4 * 190)]),
    ("power-sgd", [("ring", "all_reduce", 4 * 2 * (8 + 16 + 10)),  # rows
                   ("ring", "all_reduce", 4 * (2 * (9 + 72 + 64) + 8 + 16 + 10))]),
])  # fmt: skip
def test_exchanges_take_the_time_of_their_collectives(name, collectives):
    """No overlap, encoding for nothing: forward, backward, the collectives one after the other, the optimizer."""
    choice = ddlsim.Compression(COMPRESSORS[name], cost=FREE)
    alone = timing(choice, NONE, 2).workloads[0].step_time
    travel = sum(
        ddlsim.collective_time(STAR, algorithm, nbytes, kind=kind, ranks=4) for algorithm, kind, nbytes in collectives
    )
    assert step_seconds(choice) == pytest.approx(alone + travel, rel=1e-9)


def test_a_majority_vote_takes_two_laps_of_a_quarter_each():
    """On a star with N = 4: 3 shards of S/4 at once to their counters, then 3 hops of S/4 around the ring."""
    choice = ddlsim.Compression(ddlsim.SignSGD(), cost=FREE)
    alone, nbytes = timing(choice, NONE, 2).workloads[0].step_time, (N + 7) // 8
    up = ddlsim.collective_time(STAR, "direct", nbytes, kind="reduce_scatter", ranks=4)
    down = ddlsim.collective_time(STAR, "ring", nbytes, kind="all_gather", ranks=4)
    assert step_seconds(choice) == pytest.approx(alone + up + down, rel=1e-9)


COST = CodecCost(encode=1e-7, decode=3e-8, overhead=1e-5)
E, D = 1e-5 + 1e-7 * N, 1e-5 + 3e-8 * N


@pytest.mark.parametrize(("strategy", "down", "seconds"), [
    (NONE, None, E + 4 * D),  # an all-gather: everybody decodes 4 payloads
    (ddlsim.ParameterServer(overlap="none"), None, E + 4 * D),  # the server decodes 4
    (ddlsim.ParameterServer(overlap="none"), ddlsim.TopK(0.1), E + 4 * D + E + D),  # it encodes, workers decode
], ids=["all-reduce", "server", "both"])  # fmt: skip
def test_encoding_and_decoding_take_the_time_given(strategy, down, seconds):
    free, slow = (ddlsim.Compression(ddlsim.TopK(0.1), down, cost) for cost in (FREE, COST))
    assert step_seconds(slow, strategy) - step_seconds(free, strategy) == pytest.approx(seconds, rel=1e-9)
    names = [span.name for span in timed(slow, strategy).recorder.spans if span.kind == "compute"]
    assert names.count("encode") == 2 * 4
    assert names.count("decode") == (0 if down is None and strategy is not NONE else 2 * 4)


def timed(compression, strategy):
    from ddlsim.run.simulate import run

    return run(
        ddlsim.Experiment(STAR, "digits-cnn", strategy, 16, 4, steps=2, warmup=0, compression=compression),
        keep_spans=True,
    )


def test_an_asynchronous_worker_alone_encodes_waits_for_the_server_and_decodes():
    strategy = ddlsim.AsyncParameterServer()
    free, slow = (ddlsim.Compression(ddlsim.TopK(0.1), ddlsim.TopK(0.1), cost) for cost in (FREE, COST))
    difference = step_seconds(slow, strategy, workers=1) - step_seconds(free, strategy, workers=1)
    assert difference == pytest.approx(E + D + E + D, rel=1e-9)  # worker, server, server, worker


def test_the_estimate_is_memory_traffic_over_bandwidth():
    """FP16 of n elements: 4n read, 2n written; then 2n read, 4n written."""
    free = step_seconds(ddlsim.Compression(ddlsim.FP16(), cost=FREE))
    bandwidth = timing(None).workloads[0].memory_bandwidth
    assert bandwidth == pytest.approx(0.8 * ddlsim.load_device("desktop-cpu").memory_bandwidth)
    assert step_seconds(ddlsim.FP16()) - free == pytest.approx(12 * N / bandwidth, rel=1e-6)
    assert step_seconds(ddlsim.FP16(), speed=(0.5,) * 4) > free


@pytest.mark.parametrize(("compressor", "kernels"), [(ddlsim.FP16(), 1 + 1), (ddlsim.TopK(0.01), 11 + 4),
                                                     (ddlsim.ErrorFeedback(ddlsim.OneBit()), 2 + 3 + 4)])  # fmt: skip
def test_small_pieces_cost_their_launches(compressor, kernels):
    """A GPU takes 5 us for each kernel at least: those of encoding, and one for each of four payloads gathered (or for
    the one sum). A slow memory hides them behind the traffic."""
    device = ddlsim.load_device("v100")
    launched, free = (step_seconds(ddlsim.Compression(compressor, cost=cost), device=device) for cost in (None, FREE))
    assert launched - free == pytest.approx(kernels * 5e-6, rel=1e-6)
    slow = dataclasses.replace(device, memory_bandwidth=1e8)
    without = dataclasses.replace(slow, launch_time=0.0)
    of_each = [step_seconds(compressor, device=each, optimizer=None) for each in (slow, without)]
    assert of_each[0] == pytest.approx(of_each[1], rel=1e-9)


def test_sorting_costs_what_was_published():
    """5.0e-10 n log2 n s: of VGG-16's 138 million gradients 1.87 s, more than their exchange saves."""
    choice = ddlsim.Compression(ddlsim.TopK(0.001), cost=SORT_V100)
    slow, free = (
        step_seconds(each, cluster="cloud-25g-16x8-v100+transport=ideal", model="vgg16", workers=16)
        for each in (choice, ddlsim.Compression(ddlsim.TopK(0.001), cost=FREE))
    )
    n = ddlsim.load_model("vgg16").n_params
    assert slow - free == pytest.approx(5.0e-10 * n * np.log2(n), rel=1e-6)


def test_encoding_hides_no_communication_but_overlaps_it():
    """Bucket by bucket: while one travels the next is computed and encoded, so it costs less than one after all."""
    cost = CodecCost(encode=1e-6, decode=1e-6)
    layered, whole = (
        step_seconds(ddlsim.Compression(ddlsim.FP16(), cost=cost), ddlsim.AllReduce(overlap=overlap))
        for overlap in ("layer", "none")
    )
    assert layered < whole


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("name", ["digits-cnn", "lenet5", "resnet18-cifar", "char-transformer"])
def test_tensors_have_the_shapes_of_the_network_that_runs(name):
    slots = [(slot.name, slot.shape) for slot in ddlsim.build_network(name, 0).slots]
    rows = [(name, (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else shape) for name, shape in slots]
    assert list(tensor_shapes(ddlsim.load_model(name))) == rows


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "dlrm"])
def test_tensors_cover_every_exchanged_parameter(name):
    model = ddlsim.load_model(name)
    shapes = [shape for _, shape in tensor_shapes(model)]
    assert 4 * sum(int(np.prod(shape)) for shape in shapes) == model.gradient_nbytes()
    assert max(shapes, key=lambda shape: shape[0])[1:] == {"gpt2": (768,), "bert-base": (768,), "dlrm": (13,)}[name]


# ---------------------------------------------------------------- two models


@pytest.mark.parametrize("strategy", ["all-reduce", "servers", "async"])
def test_the_clock_of_another_model_has_its_bytes_and_seconds(strategy):
    chosen, compressor = STRATEGIES[strategy], ErrorFeedback(ddlsim.PowerSGD(2))
    two = learn(compressor, chosen, n_updates=6, time_model="resnet18")
    one = timing(compressor, chosen, 6, model="resnet18")
    assert [t for t, _ in one.recorder.updates[:6]] == [t for t, _ in two.recorder.updates]
    assert any("those of" in note and "resnet18" in note for note in two.notes)
    if strategy == "all-reduce":  # compressed as one: what a run without overlap does
        alone = learn(compressor, NONE, n_updates=6)
        assert two.params.tobytes() == alone.params.tobytes()


def test_sizes_that_depend_on_values_scale_with_the_other_model():
    recording = Recording(ErrorFeedback(ddlsim.Threshold(0.02)))
    strategy = ddlsim.ParameterServer(overlap="none")
    result = learn(recording, strategy, n_updates=3, workers=1, time_model="lenet5")
    n = ddlsim.load_model("lenet5").n_params
    assert result.nbytes_sent == pytest.approx(sum(recording.payloads) * n / N + 3 * 4 * n, rel=1e-12)


# ---------------------------------------------------------------- what does not fit


class Computing:
    """A user's strategy that sends nothing."""

    label = "computing"

    def updates(self, steps: int, n_workers: int) -> int:
        return steps

    def start(self, context):
        for worker in context.workers:
            context.loop.env.process(worker.gradient())


LEARNING = ddlsim.Training("digits", updates=2)


@pytest.mark.parametrize(("change", "message"), [
    ({"strategy": ddlsim.AllReduce(overlap="horovod"), "compression": ddlsim.Threshold(0.1), "training": LEARNING},
     "size of its output depends on the input values, but tensor fusion requires known sizes; use overlap = 'none'"),
    ({"strategy": ddlsim.AllReduce(overlap=ddlsim.Priority("100 B")), "compression": ddlsim.PowerSGD(2)},
     "'.*' is divided among several servers or partitions; .* overlap = 'layer'"),
    ({"strategy": ddlsim.ParameterServer(local_reduction=True)}, "local_reduction sums gradients"),
    ({"strategy": Computing()}, "no effect with computing, which sends nothing through an Exchange"),
    ({"strategy": ddlsim.DPSGD(), "compression": ErrorFeedback(ddlsim.TopK(0.1))}, "a form of error feedback"),
    ({"strategy": ddlsim.ElasticAveraging(0.2), "compression": ErrorFeedback(ddlsim.TopK(0.1))}, "of error feedback"),
    ({"strategy": ddlsim.DPSGD(), "compression": ddlsim.Compression(ddlsim.TopK(0.1), down=ddlsim.FP16())},
     "down = FP16 has no effect with DPSGD"),
    ({"compression": ddlsim.Compression(ddlsim.TopK(0.1), down=ddlsim.FP16())}, "down = FP16 has no effect"),
    ({"compression": "top-k"}, "must be a compressor such as ddlsim.TopK"),
    ({"compression": ddlsim.TopK}, "must be a compressor such as ddlsim.TopK"),
    ({"compression": ddlsim.PowerSGD(2, {"w": (2, 949)})}, "takes the shapes from its model; remove shapes"),
    ({"compression": ddlsim.PowerSGD(2), "strategy": ddlsim.ParameterServer(2)}, "'.*' is divided among several"),
    ({"compression": ddlsim.PowerSGD(2), "strategy": ddlsim.AsyncParameterServer(2)}, "use one server"),
    ({"gradient_dtype": "fp16"}, "gradient_dtype = 'fp16' cannot be combined with compression"),
    ({"compression": ddlsim.Threshold(0.1)}, "depends on the input values, which a timing-only run does not have"),
    ({"compression": ddlsim.Compression(ddlsim.TopK(0.1), down=ErrorFeedback(ddlsim.TopK(0.1))),
      "strategy": ddlsim.AsyncParameterServer()}, r"down = ErrorFeedback\(TopK\).*a form of error feedback"),
])  # fmt: skip
def test_what_does_not_fit_is_said(change, message):
    given = {"model": "digits-cnn", "workers": 2, "compression": ddlsim.TopK(0.1)} | change
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(STAR, **given)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ddlsim.Compression("top-k"), "compressor = 'top-k': must be a compressor"),
    (lambda: ddlsim.Compression(ddlsim.TopK(0.1), down=0.1), "down = 0.1: must be a compressor"),
    (lambda: ddlsim.Compression(ddlsim.TopK(0.1), cost=1e-9), "must be a CodecCost"),
])  # fmt: skip
def test_bad_compression_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("workers", "compressor", "message"), [
    (12, ddlsim.TopK(0.1), r"the same number of workers on every machine, not \[4, 8\]"),
    (16, ddlsim.Threshold(0.1), "depends on the input values"),
])  # fmt: skip
def test_hierarchies_that_do_not_fit_are_refused(workers, compressor, message):
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(
            "cloud-25g-16x8-v100", "digits-cnn", ddlsim.AllReduce("hierarchical"), 16, workers,
            training=ddlsim.Training(updates=2), compression=compressor,
        )  # fmt: skip


def test_collectives_that_take_the_place_of_the_ring_are_said():
    notes = timing(ddlsim.SignSGD()).notes
    assert any("majority vote" in note and "instead of the all-reduce 'ring'" in note for note in notes)


@dataclass(frozen=True)
class Refusing(ddlsim.FP16):
    """Gives up at a worker's fourth gradient."""

    def init(self, n, seed=0):
        return 0

    def encode(self, gradient, state, rng):
        if state == 3:
            raise ConfigError("FP16: too large")
        return super().encode(gradient, None, rng)[0], state + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_cannot_be_compressed_end_the_run_as_diverged(strategy):
    result = learn(Refusing(), STRATEGIES[strategy], n_updates=20)
    assert result.stop_reason.startswith("diverged: worker ")
    assert "step 3: FP16: too large" in result.stop_reason
    assert len(result.recorder.updates) >= 3
