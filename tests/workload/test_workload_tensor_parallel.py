"""What a tensor-parallel rank computes and exchanges: identities of Megatron-LM's split, the kernels' curve by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddlsim import Affine, ConfigError, Measured, PerKernel, Roofline, load_device, load_model, load_stack, simulate
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.memory import Holding, layer_nbytes, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.products import Product, Timing, gemm_efficiency, kernel_times, layer_products, product_time
from ddlsim.workload.roles import ATTENTION, blocks, check_split, kv_heads, rank_tensors
from ddlsim.workload.tensor_parallel import tensor_parallel

A100, GPT2 = load_device("a100-80g"), load_model("gpt2")
KERNELS = A100.kernels
assert KERNELS is not None
STACK = load_stack("megatron-2021")


def workload(model: Model = GPT2, batch: int = 8, **options: object) -> Workload:
    return make_workload(model, A100, batch, precision="fp16", stack=STACK, **options)  # type: ignore[arg-type]


def kernel_seconds(
    batch: int, tensor: int = 1, *, sequence: bool = False, flash: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    return kernel_times(GPT2, Timing(A100, STACK, batch, "fp16", flash, tensor, sequence))


@pytest.mark.parametrize("t", [2, 4, 6])
def test_two_all_reduces_a_layer_and_pass(t: int) -> None:
    """b s h elements each; embedding, output layer and loss by the vocabulary."""
    shard, bsh = tensor_parallel(workload(), t), 8 * 1024 * 768
    first, end = blocks(GPT2.layers)[3]
    inside = [each for each in shard.collectives if first <= each.layer < end]
    assert [(each.kind, each.nbytes, each.phase) for each in inside] == (
        2 * [("all_reduce", 2.0 * bsh, "forward")] + 2 * [("all_reduce", 2.0 * bsh, "backward")]
    )
    ends = [each for each in shard.collectives if not any(a <= each.layer < b for a, b in blocks(GPT2.layers))]
    nbytes = [2.0 * bsh, 4.0 * 8 * 1024, 4.0 * 8 * 1024]
    assert [each.nbytes for each in ends if each.phase == "forward"] == nbytes
    assert [each.nbytes for each in ends if each.phase == "backward"] == [2.0 * bsh]
    ring = 2.0 * (t - 1) / t
    assert shard.exchanged("forward") == pytest.approx(ring * (12 * 2 * 2.0 * bsh + sum(nbytes)), rel=1e-12)
    again = tensor_parallel(workload(), t, recompute="full")
    assert again.exchanged("backward") - shard.exchanged("backward") == pytest.approx(
        ring * 12 * 2 * 2.0 * bsh, rel=1e-12
    )
    assert tensor_parallel(workload(), 1).collectives == ()


def test_sequence_parallelism_sends_the_same_and_gathers_once_more() -> None:
    plain, split = tensor_parallel(workload(), 4), tensor_parallel(workload(), 4, sequence=True)
    bsh, share = 2.0 * 8 * 1024 * 768, 3 / 4
    assert split.exchanged("forward") == pytest.approx(plain.exchanged("forward"), rel=1e-12)
    more = split.exchanged("backward") - plain.exchanged("backward")
    assert more == pytest.approx(share * bsh * (2 * 12), rel=1e-12)
    assert {each.kind for each in split.collectives if each.nbytes == bsh} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_travels_beside_products(recompute: str) -> None:
    """Every exchange of a transformer layer, by Transformer Engine's methods; bytes and seconds stay as they are."""
    work = workload(compute=PerKernel())
    plain = tensor_parallel(work, 4, sequence=True, recompute=recompute)
    beside = tensor_parallel(work, 4, sequence=True, recompute=recompute, tp_comm_overlap=True)
    assert tuple(each._replace(beside=None) for each in beside.collectives) == plain.collectives
    assert np.array_equal(beside.workload.backward, plain.workload.backward)
    first, end = blocks(GPT2.layers)[3]
    methods = {
        phase: [each.beside.method for each in beside.collectives if first <= each.layer < end
                and each.phase == phase and each.beside]
        for phase in ("forward", "backward")
    }  # fmt: skip
    assert methods["forward"] == 2 * ["ring_exchange", "pipeline"]
    again = 2 * ["ring_exchange", "pipeline"] if recompute == "full" else 2 * ["bulk"]
    assert sorted(methods["backward"]) == sorted([*again, *2 * ["ring_exchange", "bulk"]])
    assert all(each.beside is None for each in beside.collectives if not any(a <= each.layer < b for a, b in
               blocks(GPT2.layers)))  # fmt: skip

    qkv = next(each.beside for each in beside.collectives if each.beside)
    assert qkv.chunks == 4
    assert qkv.counted == qkv.slowed == product_time(Product(8 * 1024, 3 * 768 / 4, 768), A100, "fp16")
    out = next(each.beside for each in beside.collectives if each.beside and each.beside.method == "pipeline")
    assert out.chunks == 4
    # 16 of the 108 multiprocessors communicate: 64 x 3 tiles are three waves of 92 in the place of two of 108
    assert out.counted == product_time(Product(8 * 1024, 768, 768 / 4), A100, "fp16")
    assert out.slowed == pytest.approx(out.counted * 3 / 2, rel=1e-12)


@pytest.mark.parametrize(("model", "gated"), [("llama-3-8b", True), ("gpt2", False)])
def test_what_travels_beside_products_in_pytorch(model: str, gated: bool) -> None:
    """The input's gradient of attention and of gated MLPs is a sum of products, which the compiler does not overlap.
    FP8 halves what is gathered, and ranks sum the parts that they receive."""
    loaded, stack = load_model(model), replace(load_stack("torchtitan-compile"), name="async")
    options: dict[str, Any] = {"compute": PerKernel(), "precision": "fp8", "stack": stack}
    work = make_workload(loaded, load_device("h100"), 2, **options)
    plain = tensor_parallel(work, 4, sequence=True)
    beside = tensor_parallel(work, 4, sequence=True, tp_comm_overlap=True)
    first, end = blocks(loaded.layers)[3]
    inside = [each for each in beside.collectives if first <= each.layer < end]
    exposed = [each.kind for each in inside if each.beside is None]
    assert exposed == ["reduce_scatter"] * (2 if gated else 1)
    assert {each.beside.method for each in inside if each.beside} == {"ring_exchange"}
    length, width = loaded.layers[first].out_shape
    assert {(each.kind, each.nbytes) for each in inside} == {
        ("all_gather", 2.0 * length * width), ("reduce_scatter", 4.0 * length * width)
    }  # fmt: skip
    sums = beside.workload.forward[first:end].sum() - plain.workload.forward[first:end].sum()
    assert sums == pytest.approx(2 * 4.0 * length * width * 5 / 4 / work.memory_bandwidth, rel=1e-9)


def test_fp8_products_of_the_backward_pass_add_up_in_full_precision() -> None:
    """Both products of a dense layer take 1 / 0.959 times as long; nothing else does."""
    loaded, h100 = load_model("llama-3-8b"), load_device("h100")
    times = [
        kernel_times(loaded, Timing(h100, replace(load_stack("torchtitan"), slow_accumulation=slow), 2, "fp8", True))
        for slow in (False, True)
    ]
    assert np.array_equal(times[0][0], times[1][0])
    i = next(i for i, layer in enumerate(loaded.layers) if layer.type == "swiglu" and layer.block > 0)
    ((m, n, k, *_),) = layer_products(loaded.layers[i], "column", 2)
    share = load_stack("torchtitan").gemm
    products = sum(product_time(each, h100, "fp8", share) for each in (Product(m, k, n), Product(k, n, m)))
    assert times[1][1][i] - times[0][1][i] == pytest.approx(products * (1 / 0.959 - 1), rel=1e-9)
    assert times[1][1][-1] == times[0][1][-1]  # the output layer is in bf16


def test_products_of_unknown_kernels_are_their_flops_share() -> None:
    v100 = make_workload(GPT2, load_device("v100"), 8)
    shard = tensor_parallel(v100, 4, sequence=True, tp_comm_overlap=True)
    each = next(each for each in shard.collectives if each.beside)
    assert each.beside is not None
    qkv, scores = 2.0 * 8 * 1024 * 768 * 3 * 192, 2.0 * 8 * 3 * 1024 * 1024 * 64
    share = qkv / (qkv * 4 / 3 + 2.0 * scores)
    assert each.beside.counted == pytest.approx(shard.workload.forward[each.layer] * share, rel=1e-12)
    assert each.beside.slowed == each.beside.counted


@pytest.mark.parametrize("t", [1, 2, 3, 4, 12])
def test_a_rank_holds_its_part_of_the_parameters(t: int) -> None:
    """Matrices over t; of a layer, norms (4 h) and the biases of the two sums (2 h) are on every rank."""
    shard, h, v = tensor_parallel(workload(), t), 768, 50257
    layer = (12 * h * h + 7 * h) / t + 6 * h
    expected = v * h / t + 1024 * h + 12 * layer + 2 * h
    assert shard.workload.gradient_nbytes == pytest.approx(4.0 * expected, rel=1e-12)
    assert shard.workload.tensor_nbytes.sum() == pytest.approx(4.0 * expected, rel=1e-12)
    assert shard.memory.weights == pytest.approx(2.0 * expected, rel=1e-12)
    assert shard.workload.optimizer == pytest.approx(workload().optimizer * expected / GPT2.n_params, rel=1e-12)


def test_a_product_by_hand() -> None:
    """4,096 x 4,096 by 4,096: 64 x 32 tiles of 64 x 128 are 18.96 waves of 108, so 19; 0.821 of 312 TFLOP/s. Larger
    tiles fill their last wave less, smaller ones take the time per wave more often."""
    seconds = product_time(Product(4096, 4096, 4096), A100, "fp16")
    assert seconds == pytest.approx(19 * (108 * 64 * 128 * 2 * 4096 / (0.821 * 312e12) + 1.8e-6), rel=1e-12)
    narrow = product_time(Product(4096, 4096, 16), A100, "fp16")  # limited by memory: 33.8 MB at 0.8 of 2,039 GB/s
    assert narrow == pytest.approx(2 * (2 * 4096 * 16 + 4096**2) / (0.8 * 2039e9), rel=1e-12)
    few, many = Product(50, 50, 4096, 8), Product(64 * 12, 64 * 9, 4096)
    assert product_time(few, A100, "fp16") == product_time(many, A100, "fp16")


def test_larger_products_are_more_efficient() -> None:
    """Up to the fraction: no size beats it, and whole waves reach it but for the time per wave."""
    sizes = [256, 512, 1024, 4096, 128 * 108]
    shares = [gemm_efficiency("a100-80g", n, n, n) for n in sizes]
    assert shares == sorted(shares)
    assert shares[-1] <= 0.821 * (1 + 1e-12)
    assert shares[0] < 0.1
    tile = 108 * 128 * 256 * 2 * 8192 / (0.821 * 312e12)
    whole = gemm_efficiency(A100, 128 * 12, 256 * 9, 8192, "bf16")
    assert whole == pytest.approx(0.821 * tile / (tile + 1.8e-6), rel=1e-12)


@pytest.mark.parametrize("device", ["h100", "b200", "gb200", "b300", "gb300"])
def test_products_of_one_wave_of_small_tiles(device: str) -> None:
    """2,048 x 1,024 by 4,096: 128 tiles of 128 x 128 are one wave on 132 or 148 multiprocessors, and half of them take
    as long. Twice as many are two waves: on Blackwell, 16.9, 12.9 and 28.4 us were measured for 128, 64 and 256 tiles
    (openxla/xla, matmul_interpolator_data.h, sm_100)."""
    half, full, double = (product_time(Product(2048, n, 4096), load_device(device), "bf16") for n in (512, 1024, 2048))
    assert half == full
    assert double == pytest.approx(2 * full, rel=1e-12)


def test_small_layers_take_the_time_of_their_launches() -> None:
    """19 kernels a layer forward: two normalisations, attention (8), two dropouts, two dense layers with bias (4),
    GELU, two sums."""
    forward, backward = kernel_seconds(1)
    for first, end in blocks(GPT2.layers):
        assert forward[first:end].sum() == pytest.approx(19 * STACK.forward_launch, rel=1e-9)
        assert backward[first:end].sum() == pytest.approx(19 * STACK.backward_launch, rel=1e-9)
    large, _ = kernel_seconds(64)
    first, end = blocks(GPT2.layers)[0]
    assert large[first:end].sum() > 19 * STACK.forward_launch


def test_flash_attention_and_width_take_less_time() -> None:
    one = kernel_seconds(64)[0].sum()
    assert kernel_seconds(64, flash=True)[0].sum() < 0.9 * one
    two, both = (kernel_seconds(64, 2, sequence=s)[0].sum() for s in (False, True))
    assert 0.5 * one < both < two < one


def test_what_is_computed_again() -> None:
    plain, some, full = (tensor_parallel(workload(batch=32), 2, recompute=r) for r in ("none", "selective", "full"))
    ranges = blocks(GPT2.layers)
    again = full.workload.backward - plain.workload.backward
    for first, end in ranges:
        assert again[first:end] == pytest.approx(plain.workload.forward[first:end], rel=1e-9)
    assert again[ranges[-1][1] :].sum() == 0.0
    scores = (some.workload.backward - plain.workload.backward)[[layer.heads > 0 for layer in GPT2.layers]]
    assert np.all((scores > 0.0) & (scores < again.max()))
    assert some.memory.activations < plain.memory.activations


def test_a_known_step_keeps_its_sum_on_one_rank_and_shrinks_with_more() -> None:
    known = workload(compute=Measured("200 ms", 8))
    one = tensor_parallel(known, 1).workload
    assert one.step_time == pytest.approx(0.2, rel=1e-12)
    two, by_kernel = tensor_parallel(known, 2).workload, tensor_parallel(workload(), 2).workload
    assert 0.1 < two.step_time < 0.2
    ratio = by_kernel.forward / tensor_parallel(workload(), 1).workload.forward
    assert two.forward == pytest.approx(known.forward * ratio, rel=1e-9)
    half = tensor_parallel(workload(speed=0.5), 2).workload
    assert half.forward == pytest.approx(2.0 * by_kernel.forward, rel=1e-12)


def test_without_known_kernels_split_layers_take_their_share() -> None:
    v100 = make_workload(GPT2, load_device("v100"), 8)
    shard = tensor_parallel(v100, 4).workload
    attention = next(i for i, layer in enumerate(GPT2.layers) if layer.heads)
    norm = next(i for i, layer in enumerate(GPT2.layers) if layer.type == "layer_norm")
    assert shard.forward[attention] == v100.forward[attention] / 4
    assert shard.forward[norm] == v100.forward[norm]
    assert tensor_parallel(v100, 4, sequence=True).workload.forward[norm] == v100.forward[norm] / 4


def test_heads_of_keys_and_values_are_copied_where_there_are_fewer_than_ranks() -> None:
    """Llama 2 70B: 64 heads of 128 features, 8 of keys and values; of 32 ranks four have each of these."""
    model = load_model("llama-70b")
    layer = next(layer for layer in model.layers if layer.heads)
    assert kv_heads(layer) == 8
    d, k = 8192, 1024
    for tensor, part in ((4, 4), (8, 8), (32, 8)):
        sizes = dict(rank_tensors(layer, ATTENTION, tensor))
        assert sizes == {"query.weight": d * d / tensor, "key.weight": d * k / part, "value.weight": d * k / part,
                         "out.weight": d * d / tensor}  # fmt: skip
        products = layer_products(layer, ATTENTION, 1, tensor)
        assert products[0] == (layer.out_shape[0], d / tensor + 2 * k / part, d, 1.0, False)
        kept = layer_nbytes(layer, "bf16", ATTENTION, tensor, scores=False)
        once = layer_nbytes(layer, "bf16", ATTENTION, 1, scores=False)
        copied = 2 * 2 * layer.out_shape[0] * k * (1 / part - 1 / tensor)
        assert kept == pytest.approx(once / tensor + copied, rel=1e-12)
    memory = [memory_of(model, 1, "bf16", Holding(tensor=tensor)).weights for tensor in (8, 32)]
    assert memory[1] > memory[0] / 4 + 2 * len(blocks(model.layers)) * 2 * d * k * (1 / 8 - 1 / 32) * 0.99
    fused = load_model("gpt2").layers[2:]
    assert {kv_heads(layer) for layer in fused if layer.heads} == {12}
    odd = replace(layer, tensors=(("key.weight", d * 128 * 12), ("out.weight", d * d)))
    with pytest.raises(ConfigError, match=r"tensor = 8: neither divides nor is a multiple of the number of key and"):
        check_split(replace(model, layers=(odd,)), 8)


def test_suggested_numbers_of_ranks_can_split_the_model() -> None:
    n_wrong = 0
    for name in ("gpt2-xl", "llama-3-8b", "qwen3-14b", "qwen3-32b", "gemma-3-1b", "llama-3.2-3b"):
        model = load_model(name)
        for tensor in range(2, 70):
            with contextlib.suppress(ConfigError):
                check_split(model, tensor)
                continue
            with pytest.raises(ConfigError, match="; use tensor=") as error:
                check_split(model, tensor)
            for suggested in str(error.value).rpartition("=")[2].split(" or "):
                n_wrong += 1
                check_split(model, int(suggested))
    assert n_wrong > 100


def test_cuts_of_a_shard_are_the_whole() -> None:
    shard = tensor_parallel(workload(), 4)
    n, middle = len(GPT2.layers), blocks(GPT2.layers)[6][0]
    cuts = [shard.workload.cut(0, middle), shard.workload.cut(middle, n)]
    assert sum(cut.forward_time for cut in cuts) == pytest.approx(shard.workload.forward_time, rel=1e-12)
    memory = [memory_of(cut.model, 8, "fp16", Holding(tensor=4)) for cut in cuts]
    copy = 2.0 * 768 * 50257 / 4  # of the embedding, for the output layer that is tied to it
    assert sum(each.weights for each in memory) == pytest.approx(shard.memory.weights + copy, rel=1e-12)
    whole = memory_of(GPT2, 8, "fp16", Holding(tensor=4))
    assert sum(each.activations for each in memory) == pytest.approx(whole.activations, rel=1e-12)


def test_per_kernel_computes_runs() -> None:
    """They are the default of transformers, with the stack of the strategy."""
    runs = [
        simulate("dgx-a100-pod", "gpt2", batch_size=8, workers=2, precision="fp16", steps=2, **options)
        for options in ({}, {"compute": PerKernel(), "stack": "pytorch"})
    ]
    assert runs[0].step_time == runs[1].step_time
    run, device = runs[0], load_device("a100-40g")
    assert "kernels of a100" in run.workloads[0].basis
    assert run.workloads[0].flash
    expected, _ = kernel_times(GPT2, Timing(device, load_stack("pytorch"), 8, "fp16", True))
    assert run.workloads[0].forward == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tensor_parallel(workload(), 5),
            "tensor = 5: does not divide the 12 heads of .* of gpt2; use tensor=4 or 6",
        ),
        (lambda: tensor_parallel(workload(), 0), "tensor = 0: must be a positive integer"),
        (lambda: tensor_parallel(workload(), 1, sequence=True), "sequence = True: requires tensor parallelism"),
        (lambda: tensor_parallel(workload(), 3, sequence=True), "1024 tokens cannot be divided evenly among tensor ="),
        (
            lambda: tensor_parallel(workload(), 2, tp_comm_overlap=True),
            "tp_comm_overlap = True: requires sequence parallelism; set sequence=True",
        ),
        (lambda: tensor_parallel(workload(), 2, recompute="segments"), "recompute = 'segments': must be one of none,"),
        (
            lambda: tensor_parallel(make_workload(load_model("vgg16"), A100, 1), 2),
            "tensor = 2: tensor parallelism requires attention layers, but vgg16 has none; set tensor=1",
        ),
        (lambda: workload(load_model("vgg16"), compute=PerKernel()), "PerKernel requires a transformer, or a conv"),
        (
            lambda: make_workload(GPT2, load_device("v100"), 1, compute=PerKernel()),
            r"PerKernel: v100 has no kernel rates for fp32; use Roofline\(\)",
        ),
        (lambda: make_workload(GPT2, A100, 1, compute=PerKernel()), "kernel rates for fp32; use fp16 or bf16"),
        (
            lambda: make_workload(GPT2, load_device("v100"), 1, precision="fp16", compute=PerKernel()),
            "PerKernel: v100 has no kernel rates for fp16; devices with rates: a100-40g, a100-80g",
        ),
        (
            lambda: gemm_efficiency("v100", 8, 8, 8),
            "v100 has no kernel rates for fp16; devices with rates: a100-40g, a100",
        ),
        (lambda: gemm_efficiency("a100-40g", 0, 8, 8), "m = 0: must be finite and above 0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_curves_and_rooflines_are_left_alone() -> None:
    """Who does not ask for kernels gets what there was before."""
    for compute in (None, Roofline(), Affine(0.0, "1 ms")):
        work = workload(compute=compute)
        assert "kernels" not in work.basis
    assert replace(A100, kernels=None).kernels is None


@pytest.mark.parametrize(
    "compute", [None, PerKernel(), Roofline(), Roofline(efficiency=0.3), Affine("9 ms", "1 ms")], ids=str
)
@pytest.mark.parametrize("batches", [1, 4])
def test_recomputation_repeats_forward_passes_wherever_times_come_from(compute: object, batches: int) -> None:
    """One rank has all of the work; "full" adds the forward passes of transformer layers, and neither the wait for
    samples nor the additions of gradients, wherever the seconds come from."""
    whole = make_workload(GPT2, A100, 2, precision="fp16", stack=load_stack("pytorch"), compute=compute)  # type: ignore[arg-type]
    waiting = np.zeros_like(whole.forward)
    waiting[0] = 0.25
    work = replace(whole, forward=whole.forward + waiting, wait=0.25).accumulating(batches)
    inside = np.zeros(len(GPT2.layers))
    for first, end in blocks(GPT2.layers):
        inside[first:end] = 1.0
    one, again = (tensor_parallel(work, 1, recompute=each).workload for each in ("none", "full"))
    for rank in (one, again):
        np.testing.assert_allclose(rank.forward, work.forward, rtol=1e-12)
    np.testing.assert_allclose(one.backward, work.backward, rtol=1e-12)
    np.testing.assert_allclose(again.backward, work.backward + inside * whole.forward, rtol=1e-12)
    selective = tensor_parallel(work, 1, recompute="selective").workload.backward_time
    assert one.backward_time < selective < again.backward_time


@pytest.mark.parametrize("compute", [PerKernel(), Roofline(), Affine("9 ms", "1 ms")], ids=str)
def test_ranks_wait_for_their_samples_as_one_device_does(compute: object) -> None:
    """A split makes the work of a rank smaller, and leaves the wait for samples as it is."""
    work = make_workload(GPT2, A100, 2, precision="fp16", compute=compute)  # type: ignore[arg-type]
    waiting = np.zeros_like(work.forward)
    waiting[0] = 0.25
    late = replace(work, forward=work.forward + waiting, wait=0.25)
    for t in (2, 4):
        np.testing.assert_allclose(
            tensor_parallel(late, t).workload.forward, tensor_parallel(work, t).workload.forward + waiting, rtol=1e-12
        )
