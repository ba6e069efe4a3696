"""How long finding the k largest takes, by radix selection or as in 2021; a sketch is of the whole gradient."""

import math

import pytest

import ddlsim
from ddlsim import AllReduce, Compression, CountSketch, ErrorFeedback, GTopK, MSTopK, ParameterServer, TopK
from ddlsim.runtime.codec import Seconds
from ddlsim.workload.compute import make_workload

K = 0.001
AFTERWARDS = AllReduce(overlap="none")


def run(compression, strategy=AFTERWARDS, cluster="aws-10g-16", model="resnet50", **more):
    more = {"workers": 16, "device": "v100", "steps": 2, "warmup": 1, **more}
    return ddlsim.simulate(cluster, model, strategy, 32, compression=compression, **more)


@pytest.mark.parametrize(("compressor", "sort", "passes"), [
    (TopK(K), 1, 0.0), (GTopK(K), 1, 0.0), (ErrorFeedback(TopK(K)), 1, 5.0), (MSTopK(K, 30), 0, 32.0),
    (CountSketch(K, 5, 1000), 0, 2 * 5 + 28.0), (ErrorFeedback(CountSketch(K, 5, 1000)), 0, 2 * 5 + 28.0 + 5.0),
], ids=str)  # fmt: skip
def test_encoding_by_sorting(compressor, sort, passes):
    """5e-10 s n log2 n for each top-k of the frameworks; all else passes of 4n bytes at 720 GB/s, and the payload."""
    workload = make_workload(ddlsim.load_model("resnet50"), ddlsim.load_device("v100"), 32)
    n, nbytes = 25_557_032, sum(compressor.expected_nbytes(25_557_032))
    expected = sort * 5.0e-10 * n * math.log2(n) + (4.0 * n * passes + nbytes if passes else 0.0) / 720e9
    seconds = Seconds(Compression(compressor, cost="sort")).encode(workload, n, nbytes)
    assert seconds == pytest.approx(expected, rel=1e-9)


def test_the_result_says_which_profile():
    texts = {cost: " ".join(run(Compression(TopK(K), cost=cost)).notes) for cost in (None, "radix", "sort")}
    assert "the largest elements are found by radix selection (cost = 'radix')" in texts[None]
    assert texts["radix"] == texts[None]
    assert "by sorting, as frameworks did up to 2021 (cost = 'sort')" in texts["sort"]
    with pytest.raises(ddlsim.ConfigError, match="radix"):
        Compression(TopK(K), cost="radex")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_mstopk_is_faster_than_the_exact_top_k_of_its_time(model):
    """Shi et al. 2021 on 16 x 8 V100 and 25 Gbit/s Ethernet. A radix selection has overtaken it since."""

    def throughput(compressor, cost):
        return run(
            Compression(ErrorFeedback(compressor), cost=cost), AllReduce("hierarchical", "none"), "cloud-25g-16x8-v100",
            model, workers=128, precision="fp16",
        ).throughput  # fmt: skip

    assert throughput(MSTopK(K), "sort") > 1.3 * throughput(TopK(K), "sort")
    assert throughput(MSTopK(K), "radix") < throughput(TopK(K), "radix")


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "resnet18-cifar"])
def test_order_of_gs_sgd_gtopk_and_sketched_sgd(model):
    """Dai et al. 2021: 1.3 to 3.1 times gTop-k and 1.1 to 1.2 times Sketched-SGD, on clusters that we do not know."""
    columns = round(K * ddlsim.load_model(model).n_params)
    sketch = Compression(ErrorFeedback(CountSketch(K, 5, columns)), cost="sort")
    gs_sgd = run(sketch, AllReduce("halving_doubling", "none"), model=model).throughput
    sketched_sgd = run(sketch, ParameterServer(placement="colocated"), model=model).throughput
    gtopk = run(Compression(ErrorFeedback(GTopK(K)), cost="sort"), model=model).throughput
    assert gs_sgd > 1.3 * gtopk
    assert 1.05 < gs_sgd / sketched_sgd < 1.4


# ---------------------------------------------------------------- sketches


@pytest.mark.parametrize("strategy", [AllReduce, ParameterServer])
def test_a_sketch_is_of_the_whole_gradient(strategy):
    """Whatever the overlap, one sketch travels, and the result says so."""
    more = {"placement": "colocated"} if strategy is ParameterServer else {}
    results = [run(CountSketch(K, 5, 1000), strategy(overlap=overlap, **more)) for overlap in ("none", "ddp", "layer")]
    assert [result.step_time for result in results] == [results[0].step_time] * 3
    assert not any("needs the whole gradient" in note for note in results[0].notes)
    assert all(any("needs the whole gradient" in note for note in result.notes) for result in results[1:])
    with pytest.raises(ddlsim.ConfigError, match="ShardedUpdate: the compressor needs the whole gradient"):
        run(CountSketch(K, 5, 1000), ddlsim.ShardedUpdate(overlap="ddp"))


def test_a_server_answers_a_sketch_with_indices_and_values():
    """Up: 4 rows columns + 4k bytes, down 8k, for each worker that is not the server's own machine."""
    result = run(CountSketch(K, 5, 1000), ParameterServer(placement="colocated"), workers=2, steps=20)
    k = round(K * 25_557_032)
    each = 4 * 5 * 1000 + 4 * k + 8 * k
    assert result.nbytes_sent / len(result.recorder.updates) == pytest.approx(2 * each, rel=0.1)


def test_the_profile_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("""
cluster = "office-1gbe"
[compression]
compressor = { type = "top-k", density = 0.01 }
cost = "sort"
""")
    assert ddlsim.load_experiment(path).compression == Compression(TopK(0.01), cost="sort")
