"""Transformers against closed forms: parameters, multiply-accumulates, and the layers that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from draws import slow

from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network
from ddlsim.schema import PLAIN
from ddlsim.workload.layers import Attention, CrossAttention, MixtureOfExperts, RMSNorm, Slice, SwiGLU
from ddlsim.workload.memory import layer_nbytes
from ddlsim.workload.model import Model, load_model, model_names, tensor_shapes
from ddlsim.workload.model_build import find_model_file
from ddlsim.workload.products import layer_products
from ddlsim.workload.roles import ATTENTION, blocks, kv_heads, rank_tensors

#: of the models whose layers are GPT-2's: width h, layers L, vocabulary V, sequence s
GPT = {
    "gpt2": (768, 12, 50257, 1024),
    "gpt2-xl": (1600, 48, 50257, 1024),
    "gpt3-175b": (12288, 96, 50257, 2048),
    "megatron-22b": (6144, 48, 51200, 2048),
    "megatron-530b": (20480, 105, 51200, 2048),
    "megatron-1t": (25600, 128, 51200, 2048),
    "mpt-30b": (7168, 48, 50368, 2048),
    "mpt-70b": (8192, 80, 50368, 2048),
    "megatron+dim=3072+layers=30+heads=32": (3072, 30, 51200, 2048),
    "mpt-7b+seq=8192": (4096, 32, 50368, 8192),
}


@pytest.mark.parametrize(("name", "row"), GPT.items())
def test_parameters_of_a_gpt(name: str, row: tuple[int, ...]):
    """Narayanan et al. 2021, equation 2, P = 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)), and a last normalisation."""
    h, n_layers, vocabulary, s = row
    assert load_model(name).n_params == 12 * n_layers * h**2 + 13 * n_layers * h + (vocabulary + s) * h + 2 * h


@pytest.mark.parametrize(("name", "row"), GPT.items())
def test_flops_of_a_gpt(name: str, row: tuple[int, ...]):
    """A step on B samples does 72 B s L h^2 (1 + s/(6 h) + V/(12 L h)) FLOPs, forward and twice that backward
    (Korthikanti et al. 2022, equation 7). With full recomputation of the layers, but not of the logits, it is
    96 B s L h^2 (1 + s/(6 h) + V/(16 L h)) (Narayanan et al. 2021, equation 3)."""
    h, n_layers, vocabulary, s = row
    model = load_model(name)
    logits = next(layer for layer in model.layers if layer.type == "tied_dense").flops
    step = 72 * s * n_layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * n_layers * h))
    assert 3 * model.flops == pytest.approx(step, rel=1e-12)
    recomputed = 96 * s * n_layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * n_layers * h))
    assert 4 * (model.flops - logits) + 3 * logits == pytest.approx(recomputed, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "h", "hidden", "kv", "n_layers"),
    [("llama-7b", 4096, 11008, 4096, 32), ("llama-70b", 8192, 28672, 1024, 80)],
)
def test_flops_of_a_llama(name: str, h: int, hidden: int, kv: int, n_layers: int):
    """A layer: s (2 h^2 + 2 h k) in projections, 2 s^2 h in scores and mixing, 3 s h f in the feed-forward network."""
    s = 4096
    layer = 2 * s * h * (h + kv) + 2 * s * s * h + 3 * s * h * hidden
    assert load_model(name).macs == n_layers * layer + s * h * 32000


def test_llama_has_no_biases_and_shares_keys_among_eight_queries():
    shapes = dict(tensor_shapes(load_model("llama-70b")))
    assert not any(name.endswith("bias") for name in shapes)
    assert shapes["layers.0.attention1.query.weight"] == (8192, 8192)
    assert shapes["layers.0.attention1.key.weight"] == (1024, 8192)
    assert shapes["layers.79.swiglu1.up.weight"] == (28672, 8192)
    assert shapes["layers.79.rms_norm2.weight"] == (8192,)


def test_transformer_by_hand():
    """torch.nn.Transformer() counts 44,140,544, two final normalisations of 2 x 512 among them. Per pair of sentences
    of s tokens an encoder layer does 4 s d^2 + 2 s^2 d + 2 s d f, a decoder layer an attention more of the same cost.
    """
    model = load_model("transformer-base")
    assert model.n_params == 44_140_544 - 2 * 2 * 512 + 37_000 * 512
    s, d, f = 32, 512, 2048
    attention, feed_forward = 4 * s * d * d + 2 * s * s * d, 2 * s * d * f
    assert model.macs == 6 * (attention + feed_forward) + 6 * (2 * attention + feed_forward) + s * d * 37_000
    assert model.layers[-1].out_shape == (32, 37_000)


def of_text() -> Iterator[Any]:
    """Yield the names of the models of text. Of each file, the first size is in `make test`."""
    seen = set()
    for name in model_names():
        path, _, _ = find_model_file(name, name, ())
        if '"embedding"' in path.read_text(encoding="utf-8"):
            yield slow(name) if path in seen else name
            seen.add(path)


@pytest.mark.parametrize("name", list(of_text()))
def test_a_block_holds_all_layers_of_its_transformer_layer(name):
    """Blocks follow each other without gaps, contain the same layers, and only embedding, final normalisation and
    output are in none. A decoder layer with self- and cross-attention is one block; the encoder is a single unit."""
    layers = load_model(name).layers
    ranges = blocks(layers)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    kinds = [[layer.type for layer in layers[first:end]] for first, end in ranges]
    assert all(each == kinds[-1] for each in kinds[name.startswith("transformer") :])
    for first, end in ranges:
        types = [layer.type for layer in layers[first:end]]
        assert any(layer.heads for layer in layers[first:end])
        assert {"dense", "mixture_of_experts"} & set(types)
    outside = [layer for first, end in ((0, ranges[0][0]), (ranges[-1][1], None)) for layer in layers[first:end]]
    assert not any(layer.heads or layer.type in ("swiglu", "mixture_of_experts") for layer in outside)
    assert sum(layer.n_params for layer in outside) + sum(
        layer.n_params for first, end in ranges for layer in layers[first:end]
    ) == sum(layer.n_params for layer in layers)


def test_the_encoders_output_reaches_every_decoder_layer():
    """Each decoder layer hands on 32 + 32 tokens: a cut between two of them carries both."""
    layers = {layer.name: layer for layer in load_model("transformer-base").layers}
    for i in range(6):
        assert layers[f"decoder.{i}.cross.concat1"].out_shape == (64, 512)
        assert layers[f"decoder.{i}.cross.branch2.cross_attention1"].out_shape == (32, 512)
        assert layers[f"decoder.{i}.self.concat1"].stored_nbytes == 0.0


def test_grouped_queries_cost_what_the_formulas_say():
    s, d, heads, kv_heads = 8, 64, 8, 2
    k = d * kv_heads // heads
    plain, grouped = Attention(heads).cost((s, d)), Attention(heads, kv_heads=kv_heads).cost((s, d))
    assert dict(grouped.tensors) == {
        "query.weight": d * d, "query.bias": d, "key.weight": k * d, "key.bias": k,
        "value.weight": k * d, "value.bias": k, "out.weight": d * d, "out.bias": d,
    }  # fmt: skip
    assert grouped.macs == s * (2 * d * d + 2 * d * k) + 2 * s * s * d
    assert plain.stored - grouped.stored == 2 * s * (d - k)
    assert plain.moved - grouped.moved == 3 * s * (d - k)
    assert Attention(heads, kv_heads=heads).cost((s, d)) == plain
    fused = Attention(heads, kv_heads=kv_heads, fused=True, bias=False).cost((s, d))
    assert fused.tensors == (("qkv.weight", (d + 2 * k) * d), ("out.weight", d * d))
    rotary = Attention(heads, kv_heads=kv_heads, rotary=True).cost((s, d))
    assert (rotary.moved - grouped.moved, rotary.tensors) == (2 * s * (d + k), grouped.tensors)


def test_attention_to_as_many_tokens_costs_what_self_attention_does():
    """Cross-attention reads its context beside its own tokens; in all else the two agree for equal lengths."""
    own, cross = Attention(4).cost((10, 32)), CrossAttention(4, context=10).cost((20, 32))
    assert (cross.out_shape, cross.tensors, cross.macs, cross.stored) == (
        own.out_shape, own.tensors, own.macs, own.stored,
    )  # fmt: skip
    assert cross.moved == own.moved + 10 * 32
    longer = CrossAttention(4, context=15).cost((20, 32))
    assert longer.out_shape == (5, 32)
    assert longer.macs == 2 * (5 + 15) * 32 * 32 + 2 * 5 * 15 * 32


def test_gated_and_normalised():
    gated = SwiGLU(24).cost((5, 8))
    assert (gated.out_shape, gated.tensors, gated.macs) == (
        (5, 24), (("gate.weight", 192), ("up.weight", 192)), 2 * 5 * 8 * 24,
    )  # fmt: skip
    assert gated.stored == 3 * 5 * 24
    assert RMSNorm().cost((5, 8)).tensors == (("weight", 8),)


def test_experts_cost_what_the_formulas_say():
    """A token is multiplied by the router and by three matrices of each of its experts. With one expert for all of the
    tokens it is a gated network of the same width, but for the router."""
    s, d, f, n, k = 6, 16, 24, 8, 2
    cost = MixtureOfExperts(n, k, f).cost((s, d))
    assert dict(cost.tensors) == {
        "router.weight": n * d, "gate.weight": n * d * f, "up.weight": n * d * f, "down.weight": n * d * f,
    }  # fmt: skip
    assert cost.macs == s * d * n + 3 * k * s * d * f
    assert cost.out_shape == (s, d)
    one, gated = MixtureOfExperts(1, 1, f).cost((s, d)), SwiGLU(f).cost((s, d))
    assert one.macs == gated.macs + s * f * d + s * d
    assert MixtureOfExperts(n, k, f, gated=False).cost((s, d)).macs == s * d * n + 2 * k * s * d * f
    twice = MixtureOfExperts(n, 2 * k, f).cost((s, d))
    assert twice.stored - cost.stored == k * s * (2 * d + 3 * f)
    assert twice.tensors == cost.tensors


def test_flops_of_mixtral():
    """Of its parameters a token uses 2 of 8 experts: 12.9 billion, as Jiang et al. state."""
    model = load_model("mixtral-8x7b+seq=64")
    matrices = {"gate.weight", "up.weight", "down.weight"}
    experts = sum(n for layer in model.layers for name, n in layer.tensors if name in matrices)
    assert model.n_params - experts * 6 / 8 == pytest.approx(12.9e9, rel=2e-3)
    embedding = 32000 * 4096
    norms = (2 * 32 + 1) * 4096
    scores = 32 * 2 * 64 * 64 * 4096
    assert model.macs == 64 * (model.n_params - experts * 6 / 8 - embedding - norms) + scores


def test_a_slice_costs_nothing():
    cost = Slice(2, 3).cost((8, 4, 4))
    assert (cost.out_shape, cost.macs, cost.moved, cost.stored) == ((3, 4, 4), 0.0, 0.0, 0.0)
    assert Slice(5).cost((8, 16)).out_shape == (3, 16)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Attention(8, kv_heads=3), r"kv_heads = 3: must divide heads = 8"),
        (lambda: PLAIN.build(Attention, {"heads": 8, "kv_heads": 0}, "layer"), r"kv_heads = 0: must be a positive"),
        (lambda: PLAIN.build(CrossAttention, {"heads": 4, "context": 0}, "layer"), r"context = 0: must be a positive"),
        (
            lambda: CrossAttention(4, context=8).cost((8, 16)),
            r"context = 8: must be less than the number of input tokens, 8",
        ),
        (lambda: CrossAttention(3, context=8).cost((9, 16)), r"heads = 3 must divide the 16 features"),
        (lambda: SwiGLU(4).cost((3, 8, 8)), r"the input must have shape \(tokens, features\)"),
        (lambda: MixtureOfExperts(2, 3, 8), r"active = 3: must be at most experts = 2"),
        (
            lambda: PLAIN.build(MixtureOfExperts, {"experts": 0, "active": 0, "units": 8}, "x"),
            r"experts = 0: must be a pos",
        ),
        (lambda: MixtureOfExperts(2, 1, 8).cost((8,)), r"the input must have shape \(tokens, features\)"),
        (lambda: PLAIN.build(RMSNorm, {"eps": 0.0}, "layer"), r"eps = 0.0: must be above 0"),
        (lambda: Slice(6, 3).cost((8, 4)), r"first = 6, count = 3: out of range"),
        (lambda: Slice(8).cost((8, 4)), r"first = 8, count = None: out of range"),
    ],
)
def test_layers_that_cannot_be(build, message: str):
    with pytest.raises(ConfigError, match=message):
        build()


def _traffic(model: Model) -> float:
    return math.fsum(layer.moved_nbytes for layer in model.layers)


def test_joining_without_a_copy_moves_nothing(tmp_path):
    """Two slices joined again: 2 x 12 numbers of 4 bytes are read and written with a copy, none without."""
    path = tmp_path / "mine.toml"
    text = (
        'title = "Mine"\ninput = [4, 3]\nlayers = [{ type = "concat", COPY branches = '
        '[[{ type = "slice", count = 1 }], [{ type = "slice", first = 1 }]] }]\n'
    )
    path.write_text(text.replace("COPY", ""))
    copied = load_model(path)
    path.write_text(text.replace("COPY", "copy = false,"))
    joined = load_model(path)
    assert (_traffic(copied), copied.activation_nbytes) == (96.0, 48.0)
    assert (_traffic(joined), joined.activation_nbytes, joined.layers[-1].out_shape) == (0.0, 0.0, (4, 3))
    path.write_text(text.replace("COPY", "copy = 0,"))
    with pytest.raises(ConfigError, match="copy = 0: must be true or false"):
        load_model(path)


WIDE = """
title = "Heads of another size"
input = [8]
layers = [
  { type = "embedding", vocabulary = 100, dim = 12 },
  { type = "residual", body = [
    { type = "attention", heads = 4, kv_heads = 2, head_size = 5, qk_norm = "$norm", out_bias = false },
  ] },
  { type = "dense", units = 100, bias = false },
]

[parameters]
norm = "head"
"""


@pytest.mark.parametrize(("norm", "scales"), [("head", (5, 5)), ("all", (20, 10))])
def test_attention_with_heads_of_another_size(tmp_path, norm: str, scales: tuple[int, int]):
    """Eight tokens of 12 features, 4 heads of 5: 20 features of queries, 10 of keys."""
    path = tmp_path / "wide.toml"
    path.write_text(WIDE)
    model = load_model(f"{path}+norm={norm}")
    layer = model.layers[1]
    assert dict(layer.tensors) == {
        "query.weight": 240, "query.bias": 20, "key.weight": 120, "key.bias": 10, "value.weight": 120, "value.bias": 10,
        "out.weight": 240, "query_norm.scale": scales[0], "key_norm.scale": scales[1],
    }  # fmt: skip
    assert dict(tensor_shapes(model))["attention1.out.weight"] == (12, 20)
    assert (layer.heads, layer.head_size, kv_heads(layer)) == (4, 5, 2)
    assert layer.macs == 8 * 12 * (20 + 10 + 10 + 20) + 2 * 8 * 8 * 20
    products = layer_products(layer, ATTENTION, 3)
    assert sum(p.m * p.n * p.k * p.copies for p in products) == 3 * layer.macs
    half = layer_products(layer, ATTENTION, 3, tensor=2)
    assert [(p.n, p.k, p.copies) for p in half] == [(20, 12, 1), (8, 5, 6), (5, 8, 6), (12, 10, 1)]
    # q, mixed values, k, v, and both before normalisation; the sum behind needs no output
    assert layer.stored_nbytes == 4 * (8 * (20 + 20 + 2 * 10 + 30) + 4 * 8 * 8)
    shard = dict(rank_tensors(layer, ATTENTION, 4))  # two ranks have a copy of each key head
    assert (shard["query.weight"], shard["key.weight"], shard["query_norm.scale"]) == (60, 60, scales[0])
    assert layer_nbytes(layer, "fp32", ATTENTION, 4) == (layer.stored_nbytes + 4 * 2 * 8 * 10) / 4


def test_heads_of_another_size_are_not_trained(tmp_path):
    path = tmp_path / "wide.toml"
    path.write_text(WIDE.replace("title", "trainable = true\ntitle").replace("kv_heads = 2, ", ""))
    with pytest.raises(ConfigError, match="attention with head_size set has a cost but no gradient"):
        build_network(path, 0)
