"""Software stacks: what they set, low precisions by hand, recomputation per operator, and the defaults of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddlsim import (
    FSDP,
    AllReduce,
    ConfigError,
    Experiment,
    Measured,
    OverlapSlowdown,
    Parallel,
    PerKernel,
    device_names,
    load_device,
    load_model,
    load_stack,
    simulate,
    stack_names,
)
from ddlsim.plan import Chunk, fully_sharded, sharded
from ddlsim.plan.plan import ALL_GATHER
from ddlsim.run.prepare import prepare
from ddlsim.workload.buckets import one_bucket
from ddlsim.workload.compute import EXPOSED_TRAFFIC, Roofline, Workload, make_workload
from ddlsim.workload.contention import IN_MACHINE, OTHER
from ddlsim.workload.memory import Holding, kept_nbytes, memory_of
from ddlsim.workload.precision import LOW_PRECISIONS
from ddlsim.workload.products import Product, Timing, kernel_times, layer_products, product_time
from ddlsim.workload.roles import ATTENTION, blocks, saved_products, weight_units
from ddlsim.workload.tensor_parallel import tensor_parallel

H100, B200, A100 = load_device("h100"), load_device("b200"), load_device("a100-80g")
MODEL = load_model("llama-3-8b+layers=2+seq=2048")


def work(stack: str = "torchtitan", **options: object) -> Workload:
    options = {"compute": PerKernel(), "precision": "bf16"} | options
    return make_workload(MODEL, H100, 1, stack=stack, **options)  # type: ignore[arg-type]


def test_every_stack_is_complete() -> None:
    """Each names its release and the source of its figures."""
    for name in stack_names():
        stack = load_stack(name)
        assert (stack.name, load_stack(stack)) == (name, stack)
        assert stack.title
        assert stack.release
        assert stack.sources


def test_every_stack_names_the_devices_on_which_it_was_fitted(tmp_path: Path) -> None:
    for name in stack_names():
        stack = load_stack(name)
        stack.save(tmp_path / f"{name}.toml")
        assert load_stack(tmp_path / f"{name}.toml") == stack
        assert stack.fitted_devices is not None
        assert set(stack.fitted_devices) <= set(device_names())


@pytest.mark.parametrize("name", ["maxtext", "megatron@25.11", "deepspeed", "pytorch", "torchtitan-compile"])
def test_runs_note_devices_that_their_stack_was_not_fitted_on(name: str) -> None:
    experiment = Experiment("office-1gbe", MODEL, FSDP(), 4, 4, stack=name)
    for device in ("h100", "a100-80g", "b200", "l4", "tpu-v4"):
        fitted = load_stack(name).fitted_devices or ()
        where = f"fitted only on {', '.join(fitted)}" if fitted else "not fitted on any device"
        note = f"stack {name} was {where}: its overheads on {device} are assumptions"
        assert (note in prepare(experiment.with_(device=device)).notes) == (device not in fitted)
    alike = {"h200": "h100", "h800": "h100", "h100-pcie": "h100", "gb300": "b200", "a100-40g": "a100-80g"}
    for device, fitted in (*alike.items(), ("tpu-v5p", "tpu-v4"), ("h100", "a100-80g"), ("h100", "b200")):
        there = replace(load_stack(name), fitted_devices=(fitted,))
        found = prepare(experiment.with_(stack=there, device=device)).notes
        assert any("was fitted only on" in note for note in found) == (device not in alike)
    unknown = replace(load_stack(name), fitted_devices=None)
    assert not any("fitted" in note for note in prepare(experiment.with_(stack=unknown, device="l4")).notes)


def test_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="unknown stack 'megatrn'; did you mean 'megatron'"):
        load_stack("megatrn")
    with pytest.raises(ConfigError, match="unknown stack 'megatrn'"):
        simulate("dgx-h100-pod", MODEL, FSDP(), 8, workers=8, stack="megatrn")


def test_one_device_serves_several_stacks() -> None:
    """The slowest and the fastest way to compute the same model on an H100."""
    seconds = {name: work(name).step_time for name in ("torchtitan", "torchtitan-compile", "fsdp-eager", "megatron")}
    assert seconds["megatron"] < seconds["torchtitan-compile"] < seconds["torchtitan"]
    assert seconds["megatron"] < seconds["fsdp-eager"]


def test_fp8_product_by_hand() -> None:
    """4,096 cubed: 32 x 32 tiles of 128 x 128 are 7.76 waves of 132, so 8, each with its start and end."""
    kernels = H100.kernels
    assert kernels is not None
    rate = 1979e12 * kernels.gemm["fp8"] / 132
    expected = 8 * (2 * 128 * 128 * 4096 / rate + kernels.tile_time)
    assert product_time(Product(4096, 4096, 4096), H100, "fp8") == pytest.approx(expected, rel=1e-12)
    narrow = product_time(Product(65536, 65536, 16), H100, "mxfp8")  # by memory: operands of 8 bits, results of 16
    moved = 33 / 32 * 2 * 65536 * 16 + 2 * 65536**2
    assert narrow == pytest.approx(moved / (3.35e12 * kernels.streaming), rel=1e-12)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_low_precision_leaves_attention_and_the_output_layer_in_bf16(precision: str) -> None:
    """Layers outside the transformer layers keep their time; those inside get shorter, by less than their products."""
    times = [kernel_times(MODEL, Timing(B200, load_stack("megatron"), 4, kind, True)) for kind in ("bf16", precision)]
    inside = np.zeros(len(MODEL.layers), dtype=bool)
    for first, end in blocks(MODEL.layers):
        inside[first:end] = True
    for plain, low in zip(*times, strict=True):
        assert np.array_equal(plain[~inside], low[~inside])
        assert 0.3 * plain[inside].sum() < low[inside].sum() < plain[inside].sum()


def test_operands_that_are_quantised() -> None:
    """Attention quantises the inputs of both its products and the gradients of their outputs: 6 bytes per number on
    Hopper, besides what its products and other kernels take."""
    stack = replace(load_stack("megatron"), elementwise=1.0, forward_launch=0.0, backward_launch=0.0)
    i = next(i for i, layer in enumerate(MODEL.layers) if layer.heads)
    layer, seconds = MODEL.layers[i], {}
    for precision in ("bf16", "fp8"):
        timing = Timing(H100, stack, 1, precision, True)
        weights = [each for each in layer_products(layer, ATTENTION, 1) if not each.core]
        passes = [weights, [Product(*each) for m, n, k, *_ in weights for each in ((m, k, n), (k, n, m))]]
        made = [sum(timing.product(each, precision) for each in products) for products in passes]
        seconds[precision] = [column[i] - own for column, own in zip(kernel_times(MODEL, timing), made, strict=True)]
    assert H100.kernels is not None
    bandwidth = H100.memory_bandwidth * H100.kernels.streaming
    quantised = [(low - plain) * bandwidth / 6 for plain, low in zip(seconds["bf16"], seconds["fp8"], strict=True)]
    assert quantised == pytest.approx([2048 * (4096 + 4096), 2048 * (4096 + 2 * 1024 + 4096)], rel=1e-9)


def test_software_has_its_attention_on_all_variants_of_a_device() -> None:
    for name in ("h200", "h800", "h100-pcie", "h100-nvl", "h100-96g-500w"):
        for stack in map(load_stack, stack_names()):
            assert stack.attention_kernel(load_device(name)) == stack.attention_kernel(H100)


def test_precisions_need_their_rates() -> None:
    with pytest.raises(
        ConfigError, match="a100-80g does not support matrix products in fp8; supported: fp32, tf32, fp16, bf16"
    ):
        make_workload(MODEL, A100, 1, precision="fp8")
    with pytest.raises(ConfigError, match="h100 does not support matrix products in nvfp4"):
        make_workload(MODEL, H100, 1, precision="nvfp4")
    with pytest.raises(
        ConfigError, match="h100 does not support matrix products in mxfp8"
    ):  # no block scales before Blackwell
        make_workload(MODEL, H100, 1, precision="mxfp8")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_rooflines_know_no_low_precision(precision: str) -> None:
    """Their fractions were measured in 16 bits, and their arithmetic has no layers apart."""
    times = [make_workload(MODEL, B200, 1, compute=Roofline(), precision=kind) for kind in ("bf16", precision)]
    assert np.array_equal(times[0].forward, times[1].forward)


def test_weights_are_gathered_as_operands() -> None:
    """FP8 all-gathers: a byte per weight of products in transformer layers, two per other weight, in every unit."""
    workload = work(precision="fp8")
    for i, layer in enumerate(MODEL.layers):
        product = layer.heads or layer.type == "swiglu" or (layer.type == "dense" and layer.block > 0)
        assert workload.gathered_nbytes(i, i + 1) == (1.0 if product else 2.0), layer.name
    assert work("megatron", precision="fp8").gathered_nbytes(1, 9) == work().gathered_nbytes(1, 9) == 2.0
    nbytes = [workload.gathered_nbytes(i, i + 1) * layer.n_params for i, layer in enumerate(MODEL.layers)]
    units = weight_units(MODEL.layers)
    plan = fully_sharded(workload, 8, units).unroll(1)
    gathers = plan.rows(ALL_GATHER)
    for part, sent in zip(plan.part[gathers], plan.nbytes[gathers], strict=True):
        assert sent == pytest.approx(sum(nbytes[plan.parts[part].first : plan.parts[part].end]), rel=1e-12)
    buckets = sharded(workload, 8, one_bucket).unroll(1)
    assert buckets.nbytes[buckets.rows(ALL_GATHER)] == pytest.approx(sum(nbytes), rel=1e-12)
    holding, (first, end) = Holding(zero=3, shards=8, stack=workload.stack, gathered=1), blocks(MODEL.layers)[0]
    held, plain = (memory_of(MODEL, 1, precision, holding).buffers for precision in ("fp8", "bf16"))
    assert plain - held == sum(2.0 * layer.n_params for layer in MODEL.layers[first:end]) - sum(nbytes[first:end])


def test_collectives_take_multiprocessors() -> None:
    """16 of 132; steps that were measured include it."""
    inside = work().slowdown.beside(IN_MACHINE)
    assert 132 / 116 < inside < 1.35
    assert work(compute=Measured("1 s", 1)).slowdown == OverlapSlowdown()
    assert work("maxtext").slowdown == OverlapSlowdown()
    alone = replace(load_stack("torchtitan"), channels=0)
    run = {"strategy": FSDP(), "batch_size": 8, "workers": 8, "steps": 1}
    times = [simulate("dgx-h100-pod", MODEL, stack=stack, **run).step_time for stack in (alone, "torchtitan")]
    assert times[0] < times[1] < inside * times[0]
    assert simulate("dgx-h100-pod", MODEL, overlap_slowdown=1.0, **run).step_time == pytest.approx(times[0], rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3-8b+layers=2+seq=2048", "resnet50"])
@pytest.mark.parametrize("device", ["a100-80g", "h100", "b200"])
def test_every_layer_has_the_kernels_of_the_whole_model(name: str, device: str) -> None:
    """A stage of a pipeline can consist of an embedding or an output layer, or of dense layers, alone."""
    compute = Roofline() if name == "resnet50" and device != "h100" else PerKernel()
    whole = make_workload(load_model(name), load_device(device), 64, compute=compute, precision="bf16")
    each = [whole.cut(i, i + 1) for i in range(len(whole.model.layers))]
    assert {one.known_stack for one in each} == {whole.known_stack}
    factors = [one.slowdown.beside(IN_MACHINE) for one in each]
    assert min(factors) > 1.0 - 1e-12  # rounding
    assert (max(factors) > 1.001) == (whole.slowdown.beside(IN_MACHINE) > 1.001)


def test_exchanges_occupy_channels() -> None:
    """Between machines the channels of NCCL count, unless the stack sets a number."""

    def occupied(**values: object) -> list[int]:
        stack = replace(load_stack("torchtitan"), **values)  # type: ignore[arg-type]
        return [stack.occupied(channels) for channels in (IN_MACHINE, 4, OTHER)]

    assert occupied() == [16, 4, 16]
    assert occupied(network_channels=8) == [16, 8, 8]
    assert occupied(network_channels=0) == [16, 0, 0]
    assert occupied(channels=0) == [0, 0, 0]
    assert occupied(channels=0, network_channels=2) == [0, 2, 2]
    assert occupied(slowdown_scope="inside") == [16, 0, 0]
    assert occupied(slowdown_scope="between") == [0, 4, 16]
    factors = [work().slowdown.beside(channels) for channels in (OTHER, 8, 4, 2)]
    assert factors == sorted(factors, reverse=True)
    beside, alone = (
        np.sum(kernel_times(MODEL, Timing(H100, load_stack("torchtitan"), 1, "bf16", True, occupied=n))) for n in (4, 0)
    )
    assert factors[2] == beside / alone > 132 / 128


def test_products_take_longer_beside_collectives() -> None:
    """4,096 cubed on 116 of 132 multiprocessors: nine waves of 128 x 128 tiles instead of eight, and one tile more."""
    assert H100.kernels is not None
    product = Product(4096, 4096, 4096)
    rate = H100.peak_flops["bf16"] * H100.kernels.gemm["bf16"] / 132
    tile = 2 * 128 * 128 * 4096 / rate + H100.kernels.tile_time
    assert product_time(product, H100, "bf16") == pytest.approx(8 * tile, rel=1e-12)
    more = 2 * 256 * 128 * 4096 / rate
    assert product_time(product, H100, "bf16", units=116) == pytest.approx(9 * tile + more, rel=1e-12)
    share = product_time(product, A100, "fp16", units=100) / product_time(product, A100, "fp16")
    assert share == pytest.approx(math.ceil(2048 / 100) / math.ceil(2048 / 108), rel=1e-12)  # no persistent kernels


def test_other_kernels_have_fewer_multiprocessors() -> None:
    """116 of 132, whether memory limits them or arithmetic."""
    beside = Timing(
        H100, replace(load_stack("torchtitan"), forward_launch=0.0, backward_launch=0.0), 1, "bf16", True, occupied=16
    )
    alone = beside._replace(occupied=0)
    slower, faster = (np.sum(kernel_times(MODEL, each), axis=0) for each in (beside, alone))
    for layer, slow, fast in zip(MODEL.layers, slower, faster, strict=True):
        if layer.type in ("rmsnorm", "add"):
            assert slow == pytest.approx(132 / 116 * fast, rel=1e-12)
        else:
            assert slow >= fast


def test_a_tensor_rank_s_smaller_products_lose_more() -> None:
    whole = make_workload(
        load_model("llama-3-70b+layers=2"), H100, 1, stack="torchtitan", compute=PerKernel(), precision="bf16"
    )
    assert tensor_parallel(whole, 8).workload.slowdown.beside(IN_MACHINE) > whole.slowdown.beside(IN_MACHINE)


def test_unfused_softmax_moves_more() -> None:
    """Megatron's fused softmax needs micro-batch x heads / tensor to be a multiple of 4; 16 heads over 8 ranks: 2."""
    gpt = load_model("gpt3-1.3b+layers=2")
    stack = replace(load_stack("megatron-2021"), forward_launch=0.0, rank_delay=0.0)
    always = replace(stack, fused_softmax=0)
    times = [
        [kernel_times(gpt, Timing(A100, each, 1, "fp16", False, t))[0].sum() for each in (always, stack)]
        for t in (4, 8)
    ]
    assert times[0][1] == times[0][0]
    matrices = 2 * 16 / 8 * 2048**2  # elements, of both layers
    unfused, fused = 18.0, 4.0  # numbers moved per element, beside those of dropout
    kernels = A100.kernels
    assert kernels is not None
    more = 2.0 * (unfused - fused) * matrices / (A100.memory_bandwidth * kernels.streaming)
    assert times[1][1] - times[1][0] == pytest.approx(more, rel=1e-9)


def test_recomputation_per_operator() -> None:
    """Of Llama's seven products the second, fourth and sixth are repeated: keys, output and up."""
    (first, end), *_ = blocks(MODEL.layers)
    kept = [is_kept for each in saved_products(MODEL.layers, "operators")[first:end] for _, is_kept in each]
    assert kept == [True, False, True, False, True, False, True]
    plain, some, full = (tensor_parallel(work(), 1, recompute=how).workload for how in ("none", "operators", "full"))
    assert plain.backward_time < some.backward_time < full.backward_time
    h, kv, f = 4096, 1024, 14336
    outside = kept_nbytes(MODEL.layers, "bf16", recompute="full", flash=True)[0] - 2 * 2 * 2048 * h
    # entering, queries, values, attention and gate, and in eager mode down, which only the sum takes
    for stack, n in (("torchtitan-compile", 3), ("torchtitan", 4)):
        nbytes, again = kept_nbytes(MODEL.layers, "bf16", recompute="operators", flash=True, stack=load_stack(stack))
        assert nbytes - outside == pytest.approx(2 * 2.0 * 2048 * (n * h + kv + f), rel=1e-12)
        assert again > 0.0


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (4, False), (4, True)])
def test_recomputation_of_all_but_products(tensor: int, sequence: bool) -> None:
    """Kept are the layer's input and the outputs of products with weights, without that of down, which only a sum
    takes. Attention and element-wise work are repeated; with neither products nor their exchanges."""
    ways = ("none", "selective", "dots-saveable", "operators", "full")
    shards = [tensor_parallel(work(), tensor, sequence=sequence, recompute=how) for how in ways]
    seconds = [shard.workload.backward_time for shard in shards]
    assert seconds == sorted(seconds)
    assert shards[2].collectives == shards[0].collectives
    h, kv, f = 4096, 1024, 14336
    full, kept = (
        kept_nbytes(MODEL.layers, "bf16", tensor=tensor, sequence=sequence, recompute=how, flash=True)[0]
        for how in ("full", "dots-saveable")
    )
    split, summed = h + 2 * kv + 2 * f, h  # queries, keys, values and the halves of SwiGLU; attention's output
    assert kept - full == pytest.approx(2 * 2.0 * 2048 * (split / tensor + summed / (tensor if sequence else 1)))


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize(("precision", "low"), [("bf16", 2.0), ("fp8", 1.0), ("mxfp8", 1.0 + 1 / 32)])
def test_inputs_of_products_in_eight_bits(precision: str, low: float, tensor: int) -> None:
    """Transformer Engine keeps what normalisations and SwiGLU make in 8 bits, and a copy in 8 bits of what attention
    keeps in 16; torchao keeps all in 16 bits."""

    def kept(stack: str, precision: str) -> float:
        more = {"tensor": tensor, "sequence": tensor > 1, "flash": True, "stack": load_stack(stack)}
        return kept_nbytes(MODEL.layers, precision, **more)[0]  # type: ignore[arg-type]

    h, f = 4096, 14336
    change = (low - 2.0) * (2 * h + f) + (low * h if low < 2.0 else 0.0)
    assert kept("megatron", precision) - kept("megatron", "bf16") == pytest.approx(2 * 2048 / tensor * change, rel=1e-9)
    assert kept("torchtitan", precision) == kept("torchtitan", "bf16")


def test_inputs_that_a_tensor_group_gathers() -> None:
    """PyTorch's tensor parallelism keeps them whole: two of each of two layers, and that of the output layer. It does
    not gather them again in the backward pass."""
    kept = [
        kept_nbytes(MODEL.layers, "bf16", tensor=4, sequence=True, flash=True, stack=load_stack(stack))[0]
        for stack in ("megatron", "torchtitan")
    ]
    assert kept[1] - kept[0] == pytest.approx(0.75 * (2 * 2 + 1) * 2.0 * 2048 * 4096, rel=1e-9)
    again, not_again = (
        sum(each.kind == "all_gather" for each in tensor_parallel(work(stack=stack), 4, sequence=True).collectives)
        for stack in ("megatron", "torchtitan")
    )
    assert again - not_again == 2 * 2


def test_the_loss_at_its_peak() -> None:
    """12 bytes per logit in eager fp32, of which 4 are kept anyway, and 2 more reserved; 16 for each logit of a rank
    that has a quarter of the vocabulary."""
    logits = 2048 * 128256
    for tensor, held in ((1, 12.0), (4, 16.0)):
        plain, eager = (
            memory_of(MODEL, 1, "bf16", Holding("adam", tensor=tensor, recompute="full", flash=True, stack=stack))
            for stack in (None, load_stack("fsdp-eager"))
        )
        assert eager.total - plain.total == pytest.approx((held - 4.0) * logits / tensor - plain.buffers, rel=1e-12)
        assert (plain.reserved, eager.reserved) == (0.0, pytest.approx(2.0 * logits / tensor))
    holding = Holding("adam", recompute="full", flash=True, stack=load_stack("fsdp-eager"))
    assert memory_of(MODEL, 1, "fp32", holding).reserved == 0.0  # there are no logits in 16 bits


def test_defaults_of_a_run() -> None:
    """Transformers on devices whose kernels are known: bf16, Adam, the strategy's stack, flash attention."""
    made = prepare(Experiment("dgx-h100-pod", MODEL, FSDP(), 8, workers=8)).experiment
    assert (made.precision, made.gradient_dtype, made.optimizer) == ("bf16", "fp32", "adam")
    assert load_stack(made.stack or "").name == "torchtitan"
    parallel = prepare(Experiment("dgx-h100-pod", MODEL, Parallel(tensor=2, data=4), 4, workers=8))
    assert parallel.workloads[0].stack.name == "megatron"
    assert parallel.workloads[0].flash
    other = prepare(Experiment("dgx-h100-pod", "resnet50", batch_size=8, workers=8)).experiment
    assert (other.precision, other.gradient_dtype, other.optimizer) == ("tf32", "fp32", None)
    other = prepare(Experiment("dgx1-v100", "resnet50", batch_size=8, workers=8)).experiment
    assert (other.precision, other.gradient_dtype, other.optimizer) == ("fp32", "fp32", None)
    tpu = prepare(Experiment("tpu-v5e", MODEL, FSDP(), 256, workers=256)).workloads[0]
    assert tpu.stack.name == "maxtext"
    unfused = prepare(Experiment("dgx-h100-pod", MODEL, FSDP(), 8, workers=8, flash=False)).workloads[0]
    assert not unfused.flash


def test_fsdp_memory_counts_the_optimizer_once() -> None:
    """16 bytes per parameter over 8 ranks, activations, two gathered layers and the loss."""
    made = prepare(Experiment("dgx-h100-pod", MODEL, FSDP(), 8, workers=8))
    assert made.fullest is not None
    assert made.stages[0].memory is not None
    assert made.fullest.needed == pytest.approx(made.stages[0].memory.total, rel=1e-12)


def test_low_precisions_keep_bf16_activations() -> None:
    assert set(LOW_PRECISIONS) == {"fp8", "mxfp8", "nvfp4"}
    assert memory_of(MODEL, 1, "fp8").weights == memory_of(MODEL, 1, "bf16").weights


MIXED = """
hosts = [{ name = "new", device = "h100", n_gpus = 1, inside = "pcie_tree" },
         { name = "old", device = "v100", n_gpus = 1, inside = "pcie_tree" }]
switches = [{ name = "switch" }]
links = [{ between = ["new", "switch"], bandwidth = "100 Gbit/s", latency = "5 us" },
         { between = ["old", "switch"], bandwidth = "100 Gbit/s", latency = "5 us" }]
"""


def test_defaults_are_those_of_all_devices(tmp_path: Path) -> None:
    """A V100 beside an H100 has no bf16, whichever comes first; two devices with known kernels compute by them."""
    names = []
    for i, (first, second) in enumerate([("h100", "v100"), ("v100", "h100"), ("a100-80g", "h100")]):
        path = tmp_path / f"{i}.toml"
        path.write_text(MIXED.replace('"h100"', f'"{first}"', 1).replace('"v100"', f'"{second}"', 1))
        names.append(prepare(Experiment(str(path), "gpt2", batch_size=1)).experiment.precision)
    assert names == ["fp32", "fp32", "bf16"]


def test_8_bits_without_a_rate_of_their_own_reach_the_share_of_bf16() -> None:
    """TPU v5p: the same peak in both, so the same times, not a roofline's."""
    parts = "tpu-v5p", "maxtext-32b", FSDP()
    results = [simulate(*parts, workers=64, steps=1, precision=kind) for kind in ("bf16", "fp8")]
    assert results[1].experiment.gradient_dtype == results[0].experiment.gradient_dtype
    assert 0.9 * results[0].throughput < results[1].throughput < 1.1 * results[0].throughput


# ------------------------------------------------------------ gradients of micro-batches


def computing(strategy: object, workers: int, n_batches: int, stack: str) -> float:
    """Seconds in which a worker computes in a step of `n_batches` micro-batches of one sample."""
    each = {"batch_size": 1, "accumulation": n_batches}
    if not isinstance(strategy, AllReduce):  # the batch is that of all workers
        each = {"batch_size": n_batches * (workers if isinstance(strategy, FSDP) else 1)}
    result = simulate(
        "dgx-h100-pod", MODEL, strategy, workers=workers, steps=1, warmup=0, stack=stack, precision="bf16",
        overlap_slowdown=OverlapSlowdown(1, 1), **each,
    )  # type: ignore[arg-type]  # fmt: skip
    return float(result.shares["compute"] * result.step_time)


def passes(strategy: object, stack: str) -> float:
    """Seconds of the passes of a micro-batch, of which a step has only one."""
    workload = work(stack)
    if isinstance(strategy, Parallel):
        workload = tensor_parallel(workload, strategy.tensor, sequence=strategy.sequence).workload
    return workload.forward_time + workload.backward_time


@pytest.mark.parametrize(
    ("strategy", "workers", "share"),
    [
        (AllReduce("ring", overlap="none"), 2, 1.0),
        (FSDP(no_sync=True, micro_batch=1), 2, 1.0),
        (FSDP(stage=1, micro_batch=1), 2, 1.0),
        (FSDP(micro_batch=1), 2, 0.0),  # each micro-batch's gradients are reduce-scattered
        (FSDP(stage=2, micro_batch=1), 2, 0.0),
        (Parallel(data=1, micro_batch=1), 1, 1.0),
        (Parallel(tensor=2, data=1, micro_batch=1, sequence=True), 2, 0.5),
    ],
    ids=["all-reduce", "no_sync", "stage 1", "stage 3", "stage 2", "one worker", "tensor"],
)
@pytest.mark.parametrize("stack", ["fsdp-eager", "megatron-2021", "megatron-2021@2022-05", "megatron"])
def test_gradients_of_micro_batches_are_added(strategy: object, workers: int, share: float, stack: str) -> None:
    """Each micro-batch but the first reads its gradients and the sum, and writes the sum: 3 x 2 bytes a parameter. A
    product that also computes the sum only reads it; if sums are in fp32, it writes 2 bytes more, in the first, too.
    FSDP1 joins the gradients of bf16 (4 bytes a parameter) and divides them before and after their reduction (2)."""
    one, two, four = (computing(strategy, workers, n, stack) for n in (1, 2, 4))
    rate = 0.8 * H100.memory_bandwidth / MODEL.n_params
    first, later = {"megatron": (0.0, 2.0), "megatron-2021@2022-05": (2.0, 4.0)}.get(stack, (0.0, 6.0))
    exposed = EXPOSED_TRAFFIC if load_stack(stack).fuses_accumulation else 1.0
    split = 0.5 if isinstance(strategy, Parallel) and strategy.tensor == 2 else 1.0
    each = exposed * (split * first + share * later) / rate
    copies = stack == "fsdp-eager" and isinstance(strategy, FSDP) and strategy.stage == 3 and not strategy.no_sync
    each += copies * 8.0 / rate
    assert four - two == pytest.approx(2.0 * (two - one), rel=1e-9)
    assert two - one == pytest.approx(passes(strategy, stack) + each, rel=1e-3 if share == 0.5 else 1e-9)


@pytest.mark.parametrize(
    ("sharded", "whole", "workers"),
    [
        (FSDP(micro_batch=1), FSDP(micro_batch=1, no_sync=True), 1),
        (FSDP(stage=2, micro_batch=1), FSDP(stage=1, micro_batch=1), 1),
        (FSDP(micro_batch=1, shard=1), FSDP(micro_batch=1, shard=1, no_sync=True), 2),
        (Parallel(micro_batch=1, sharded="full"), Parallel(micro_batch=1), 1),
        (Parallel(tensor=2, micro_batch=1, sharded="full"), Parallel(tensor=2, micro_batch=1), 2),
    ],
    ids=["stage 3", "stage 2", "groups of one", "parallel", "tensor"],
)
def test_a_single_shard_is_the_whole_gradient(sharded: object, whole: object, workers: int) -> None:
    """Micro-batches add up gradients in the same time if each group that shards them has one worker."""
    assert computing(sharded, workers, 4, "torchtitan") == pytest.approx(
        computing(whole, workers, 4, "torchtitan"), rel=1e-12
    )


def test_gradients_are_added_when_weights_are_computed() -> None:
    """Passes that compute the gradients of inputs alone take the same time in every micro-batch."""
    one, many = (Chunk(0, len(MODEL.layers), work("torchtitan").accumulating(n), 0.0) for n in (1, 4))
    of_inputs = [each.workload.backward - each.weight_seconds for each in (one, many)]
    np.testing.assert_allclose(*of_inputs, rtol=1e-9, atol=1e-15)
    assert many.weight_seconds.sum() - one.weight_seconds.sum() == pytest.approx(many.workload.accumulation_time.sum())


def test_gradients_are_added_in_fp32() -> None:
    """FSDP2 converts the first 16-bit gradient (2 + 4 bytes per parameter) and adds the others to it (2 + 2 x 4);
    DeepSpeed's BF16_Optimizer converts each and then adds it (2 + 4 + 3 x 4). ZeRO adds in 16 bits."""
    moved = {
        stack: [
            n * work(stack).accumulating(n).accumulation_time.sum() * 0.8 * H100.memory_bandwidth / MODEL.n_params
            for n in (1, 2, 4)
        ]
        for stack in ("torchtitan", "torchtitan-compile", "megatron-2021@deepspeed-bf16", "deepspeed")
    }
    assert moved["torchtitan"] == moved["torchtitan-compile"] == pytest.approx([0.0, 6.0 + 10.0, 6.0 + 3 * 10.0])
    assert moved["megatron-2021@deepspeed-bf16"] == pytest.approx([0.0, 2 * 18.0, 4 * 18.0])
    assert moved["deepspeed"] == pytest.approx([0.0, 6.0, 3 * 6.0])
    held = [FSDP(no_sync=each).stages([work("torchtitan")] * 8)[0].memory for each in (False, True)]
    assert [each.gradients / MODEL.n_params for each in held if each] == pytest.approx([2.0 / 8, 4.0])


def test_gradients_are_added_in_the_type_in_which_they_are_kept() -> None:
    kept = [replace(load_stack("fsdp-eager"), main_gradients=each) for each in (None, "bf16", "fp32")]
    assert [
        work(stack).accumulating(2).accumulation_time.sum() * 0.8 * H100.memory_bandwidth / MODEL.n_params * 2
        for stack in kept
    ] == pytest.approx([6.0, 6.0, 10.0])


def test_measured_steps_include_an_update_and_add_no_gradients() -> None:
    measured = make_workload(MODEL, H100, 1, compute=Measured("97 ms", 1), precision="bf16")
    assert measured.accumulating(8) is measured


# ------------------------------------------------------------ rates


@pytest.mark.parametrize("name", ["mixtral-8x7b", "llama-3-8b", "bert-large", "vit-b16", "gpt3-1.3b"])
@pytest.mark.parametrize("occupied", [0, 16])
def test_no_layer_is_faster_than_the_products_of_its_device(name: str, occupied: int) -> None:
    """What a layer computes takes at least its FLOPs over the rate that large products reach, on what is left."""
    device, stack, model = load_device("h100"), load_stack("torchtitan"), load_model(name)
    timing = Timing(device, stack, 4, "bf16", False, occupied=occupied)
    assert device.kernels is not None
    rate = device.kernels.gemm["bf16"] * stack.gemm * timing.free * device.peak_flops["bf16"]
    forward, _ = kernel_times(model, timing)
    flops = np.array([4.0 * layer.flops for layer in model.layers])
    assert (flops <= forward * rate * (1.0 + 1e-9)).all()


EXPERTS = """
title = "One layer with experts"
input = [1024]
layers = [
  {{ type = "embedding", vocabulary = 64, positions = 1024, dim = 512 }},
  {{ type = "residual", body = [ {{ type = "attention", heads = 4 }} ] }},
  {{ type = "residual", body = [
    {{ type = "mixture_of_experts", experts = 4, active = 2, units = 2048, gated = {} }},
  ] }},
]
"""


@pytest.mark.parametrize("gated", [False, True])
def test_experts_by_hand(tmp_path: Path, gated: bool) -> None:
    """4 experts of 1,024 tokens of 512 features, each of which goes to 2: products of 512 rows, four at a time."""
    (tmp_path / "experts.toml").write_text(EXPERTS.format(str(gated).lower()), encoding="utf-8")
    model = load_model(tmp_path / "experts.toml")
    device, stack = load_device("h100"), replace(load_stack("torchtitan"), forward_launch=0.0, backward_launch=0.0)
    timing = Timing(device, stack, 1, "bf16", False)
    forward, backward = kernel_times(model, timing)
    place = next(i for i, layer in enumerate(model.layers) if layer.type == "mixture_of_experts")
    wide = 4096 if gated else 2048

    def products(*sizes: Product) -> float:
        return sum(timing.product(each, "bf16") for each in sizes)

    around = 2.0 * (3 * 2048 * 512 + 1024 * 512 + 2 * 1024 * 4)
    made = 2.0 * 2048 * 2048
    assert forward[place] == pytest.approx(
        products(Product(1024, 4, 512), Product(512, wide, 512, 4), Product(512, 512, 2048, 4))
        + timing.streamed(around + (3.0 if gated else 2.0) * made)
    )
    assert backward[place] == pytest.approx(
        products(Product(1024, 512, 4), Product(512, 4, 1024))
        + products(Product(512, 512, wide, 4), Product(512, wide, 512, 4))
        + products(Product(512, 2048, 512, 4), Product(2048, 512, 512, 4))
        + timing.streamed(around + (5.0 if gated else 3.0) * made)
    )


def test_equal_loads_of_experts_are_noted() -> None:
    """Unless the user gave the time of a step, of which nobody knows how tokens were routed."""
    short = ("dgx-h100-pod", "mixtral-8x7b+layers=2", AllReduce(), 1)
    simulated, given = (
        simulate(*short, workers=1, steps=1, warmup=0, compute=each) for each in (None, Measured("1 s", 1))
    )
    assert any("uneven routing" in note for note in simulated.notes)
    assert not any("uneven routing" in note for note in given.notes)
    dense = simulate("dgx-h100-pod", MODEL, AllReduce(), 1, workers=1, steps=1, warmup=0)
    assert not any("uneven routing" in note for note in dense.notes)
