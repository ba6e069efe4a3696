"""Models of other tools: parameters against published counts, work against bundled models, and what is refused."""

from __future__ import annotations

import json
import random
import re
import string
import struct
from pathlib import Path

import pytest

from ddlsim import AllReduce, simulate
from ddlsim.errors import ConfigError
from ddlsim.workload.model import Model, load_model, summary, tensor_shapes

#: fields of published config.json files that matter, and the parameters that huggingface transformers counts
CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text(encoding="utf-8"))
#: those whose parameters are counted only, and how many of them a token uses
COUNTED = {
    "deepseek-v3": 37_552_282_624,
    "deepseek-v2-lite": 2_661_150_208,
    "gpt-oss-120b": 5_711_982_912,
    "gpt-oss-20b": 4_187_440_704,
    "llama-4-scout": 17_172_894_720,
    "llama-4-maverick": 17_184_691_200,
    "qwen1.5-moe": 2_689_173_504,
    "glm-4.5-air": 13_424_123_904,
}


def _text(name: str) -> str:
    return json.dumps(CONFIGS[name]["config"])


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - COUNTED))
def test_parameters_of_a_config_are_exactly_the_published_ones(name: str):
    model = load_model(_text(name))
    assert model.n_params == CONFIGS[name]["parameters"]
    assert sum(n for layer in model.layers for _, n in layer.tensors) == model.n_params


@pytest.mark.parametrize(("name", "active"), COUNTED.items())
def test_what_is_counted_is_refused_with_its_parameters(name: str, active: int):
    """Model cards: DeepSeek-V3 has 671e9 and 37e9, V2-Lite 15.7e9 and 2.4e9, gpt-oss 116.83e9 and 5.13e9, 20.91e9 and
    3.61e9, Llama 4 109e9 or 400e9 and 17e9, Qwen1.5-MoE 14.3e9 and 2.7e9, GLM-4.5-Air 106e9 and 12e9; those that a
    token uses without the table of tokens, except in V3, Llama and Qwen."""
    total = CONFIGS[name]["parameters"]
    with pytest.raises(ConfigError) as error:
        load_model(_text(name))
    assert f"cannot be simulated yet. The model has {total:,} parameters, of which each token uses {active:,}" in str(
        error.value
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "bundled"),
    [
        ("llama-3.1-8b+seq=8192", "llama-3.1-8b"), ("qwen3-8b+seq=4096", "qwen3-8b"), ("gpt2", "gpt2"),
        ("mistral-7b+seq=4096", "mistral-7b"), ("gemma3-1b+seq=8192", "gemma-3-1b"), ("olmo3-7b", "olmo-3-7b"),
        ("nemotron-340b", "nemotron-4-340b"), ("bloom", "bloom-176b"), ("mixtral+seq=4096", "mixtral-8x7b"),
    ],
)  # fmt: skip
def test_a_config_costs_what_the_bundled_model_does(config: str, bundled: str):
    name, plus, options = config.partition("+")
    ours, theirs = load_model(_text(name) + plus + options), load_model(bundled)
    assert (ours.n_params, ours.flops, ours.input_shape) == (theirs.n_params, theirs.flops, theirs.input_shape)
    assert ours.activation_nbytes == theirs.activation_nbytes
    assert sum(layer.moved_nbytes for layer in ours.layers) == sum(layer.moved_nbytes for layer in theirs.layers)


def test_layouts_of_falcon():
    """Falcon 7B shares keys and values, 40B has groups of them and a norm per branch; 1B neither."""
    small = {**CONFIGS["falcon-7b"]["config"], "alibi": True, "bias": True, "multi_query": False}
    for changes in ({}, {"parallel_attn": False}):
        model = load_model(json.dumps(small | changes))
        dim, layers, vocabulary = 4544, 32, 65024
        norms = 2 if "parallel_attn" in changes else 1
        per_layer = 12 * dim**2 + 9 * dim + norms * 2 * dim
        assert model.n_params == vocabulary * dim + layers * per_layer + 2 * dim


@pytest.mark.parametrize(
    ("name", "changes", "difference"),
    [
        ("llama-3.1-8b", {"num_key_value_heads": None}, 32 * 2 * 24 * 4096 * 128),  # every head has keys and values
        ("mistral-7b", {"num_key_value_heads": ...}, 0),  # the default of the class, unless it is null
        ("mistral-7b", {"num_key_value_heads": None}, 32 * 2 * 24 * 4096 * 128),
        ("gpt2", {"n_positions": ...}, 0),
        ("qwen3-8b", {"model_type": "qwen3_vl_text"}, 0),
        ("qwen3-30b-a3b", {"model_type": "qwen3_vl_moe_text"}, 0),
    ],
)
def test_defaults_and_equal_text_models(name: str, changes: dict[str, object], difference: int):
    """`...` removes a field."""
    config = {key: value for key, value in (CONFIGS[name]["config"] | changes).items() if value is not ...}
    assert load_model(json.dumps(config)).n_params - CONFIGS[name]["parameters"] == difference


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek-v3", {"model_type": "kimi_k2"}, "671,026,404,352 .* 37,552,282,624$"),
        ("deepseek-v3", {"num_nextn_predict_layers": 1}, "37,552,282,624; num_nextn_predict_layers are not counted$"),
        ("deepseek-v3", {"first_k_dense_replace": 0}, "The model has 703,"),
        ("deepseek-v3", {"q_lora_rank": ...}, "the key 'q_lora_rank' is missing"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias: True cannot be simulated"),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq: 2 cannot be simulated"),
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias: False cannot be simulated"),
        ("llama-4-maverick", {"moe_layers": [*range(1, 48, 2)]}, "The model has 400,711,848,960"),
        ("llama-4-maverick", {"moe_layers": [1]}, "The model has 33,149,916,160"),
        ("qwen1.5-moe", {"mlp_only_layers": [0]}, "mlp_only_layers: .0. cannot be simulated"),
        ("qwen1.5-moe", {"qkv_bias": False}, "qkv_bias: False cannot be simulated"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: True cannot be simulated"),
        ("opt-125m", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine: False cannot be"),
    ],
)
def test_variants_are_counted_or_named(name: str, fields: dict[str, object], message: str):
    config = {key: value for key, value in (CONFIGS[name]["config"] | fields).items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        load_model(json.dumps(config))


def test_models_of_text_and_images_name_their_text():
    """Whether the kind is known or not."""
    for kind in ("gemma3", "llama4", "mllama"):
        with pytest.raises(ConfigError, match="models of text and images cannot be simulated; use its text_config"):
            load_model(json.dumps({"model_type": kind, "text_config": {}, "vision_config": {}}))


def test_macs_of_a_vision_transformer():
    """ViT-B/16: 17.56e9 MACs at 224 pixels (torchvision, vit_b_16: 17.56 GFLOPS of fused operations)."""
    model = load_model(_text("vit-b16"))
    assert model.macs / 1e9 == pytest.approx(17.56, abs=0.05)
    assert model.layers[0].out_shape == (197, 768)
    assert dict(tensor_shapes(model))["embeddings.weight"] == (768, 3 * 16 * 16)
    assert sum(layer.heads for layer in model.layers) == 12 * 12
    assert model.tokens is None


def test_options_names_and_notes(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(_text("mistral-7b"))
    long = load_model(path)
    assert (long.name, long.input_shape) == ("mistral-7.24b", (8192,))
    assert list(long.notes) == [
        "assuming sequences of 8,192 tokens; the model supports up to 32,768 (set +seq=...)",
        "layers with a sliding window of 4,096 tokens are simulated with the cost of full attention",
    ]
    short = load_model(f"{path}+seq=2048+layers=4")
    assert (short.input_shape, short.notes) == ((2048,), ())
    assert short.name == f"mistral-{short.n_params / 1e9:.2f}b+seq=2048+layers=4"
    assert long.n_params - short.n_params == 28 * (long.n_params - 2 * 32000 * 4096 - 4096) // 32
    assert load_model(f"{tmp_path}/+seq=2048+layers=4") == short  # the folder of a checkpoint
    assert any(
        "each token uses 12,879,925,248 of the 46,702,792,704" in note for note in load_model(_text("mixtral")).notes
    )


def test_a_run_repeats_the_notes(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(_text("qwen2.5-0.5b").replace("}", ', "max_position_embeddings": 32768}'))
    result = simulate("dgx-h100-pod", f"{path}+layers=2", AllReduce(), workers=2, batch_size=1, precision="bf16")
    assert any("supports up to 32,768" in note for note in result.notes)


BASE = CONFIGS["llama-3.1-8b"]["config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "big"}, "model: hidden_size = 'big': must be a positive integer"),
        ({"hidden_size": -1}, "hidden_size = -1: must be a positive integer"),
        ({"hidden_size": 4096.5}, "hidden_size = 4096.5: must be a positive integer"),
        ({"hidden_size": 10**12}, "hidden_size = 1000000000000: must be at most 1000000000"),
        ({"hidden_size": True}, "hidden_size = True: must be a positive integer"),
        ({"hidden_size": None}, "hidden_size is missing; is it a complete config.json"),
        ({"num_hidden_layers": 10**8}, "repeat = 100000000: must be an integer from 1 to 10000"),
        ({"num_key_value_heads": 5}, "kv_heads = 5: must divide heads = 32"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33},
         "is not an integer for dim = 4096, heads = 33"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false, not 'yes'"),
        ({"model_type": "mamba"}, "model_type or architectures = 'mamba': must be one of bloom, .*vit"),
        ({"model_type": 3}, "model_type: must be a string, not 3"),
        ({"model_type": None, "architectures": []}, "model_type or architectures = '': must be one of"),
        ({"architectures": ["LlamaForTokenClassification"]}, "'LlamaForTokenClassification' has an unsupported head"),
        ({"text_config": {}}, "models of text and images cannot be simulated"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised weights cannot be trained"),
        ({"model_type": "opt", "hidden_act": "relu", "do_layer_norm_before": False},
         "do_layer_norm_before: False cannot be simulated"),
        ({"model_type": "nemotron", "hidden_act": "silu"}, "hidden_act = 'silu': must be one of gelu, .*relu2"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9, "moe_intermediate_size": 8},
         "active = 9: must be at most experts = 8"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers: .1. cannot be simulated"),
        ({"model_type": "deepseek_v3"}, "num_experts_per_tok is missing"),
        ({"model_type": "gpt2", "hidden_act": "gelu", "resid_pdrop": 2}, r"rate = 2.0: must be at least 0 and below 1"),
        ({"model_type": "vit", "architectures": None, "hidden_act": "gelu", "patch_size": 15},
         "patch = 15: must divide the height and width"),
    ],
)  # fmt: skip
def test_wrong_configs_are_errors_of_one_line(fields: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        load_model(json.dumps({**BASE, **fields}))
    assert "\n" not in str(error.value)


def test_damaged_configs_are_errors_of_one_line(tmp_path: Path):
    """Cut anywhere, or with any field replaced by something else."""
    text, path = json.dumps(BASE), tmp_path / "config.json"
    messages: list[tuple[str, str]] = []
    damaged = [text[:n] for n in range(1, len(text), 7)] + [text + "]", text + " seq=3", "{" * 100_000]
    for key in BASE:
        damaged += [json.dumps({**BASE, key: value}) for value in ([], {}, "", "x", -3, 0, 1e300, [1, [2]], {"a": 1})]
    for broken in damaged:
        for source in (broken, path):
            path.write_text(broken)
            try:
                load_model(source)  # a field may be of no consequence
            except ConfigError as error:
                messages.append((str(error), str(path)))
    assert len(messages) > 100
    assert all(text.startswith((path, "model")) and "\n" not in text for text, path in messages)


SCRIPT = """#!/bin/bash
# Runs a model; --num-layers 99 in a comment does not count
HIDDEN=4096
TP=${TP:-2}
CHECKPOINT=$1
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes $NUM_NODES)
MODEL_ARGS=(
    --num-layers 32   # as Llama
    --hidden-size ${HIDDEN}
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups "8"
    --seq-length 8192
    --max-position-embeddings 8192
    --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear
    --position-embedding-type rope --hidden-dropout 0.0 --attention-dropout 0
)
OTHER="--vocab-size 128256 \\
   --make-vocab-size-divisible-by 128 --lr 6.0e-5"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $OTHER \\
    --tensor-model-parallel-size $TP --micro-batch-size=1 --save $CHECKPOINT
"""


def test_a_script_of_megatron(tmp_path: Path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    model, llama = load_model(path), load_model("llama-3-8b")
    assert (model.n_params, model.flops) == (llama.n_params, llama.flops)  # 128,256 is a multiple of 256
    padded = load_model(SCRIPT.replace("TP:-2", "TP:-8"))
    assert padded.n_params - llama.n_params == 2 * 4096 * (129024 - 128256)
    assert load_model(f"{path}+layers=2+seq=1024").input_shape == (1024,)
    assert load_model(SCRIPT + "+layers=2").n_params == load_model(f"{path}+layers=2").n_params


GPT = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"


def test_megatron_in_yaml_and_options_for_missing_arguments():
    lines = [flag.replace(" ", ": ") for flag in f"{GPT} --swiglu true --padded-vocab-size 50304".split(" --")]
    model = load_model("MODEL_ARGS:\n  " + "\n  --".join([*lines, "qk-layernorm: false\n"]))
    assert model.layers == load_model(f"{GPT} --swiglu --padded-vocab-size 50304").layers
    bare = GPT.replace("--seq-length 1024", "--num-experts 8 --moe-layer-freq ([1]*24) --disable-bias-linear --swiglu")
    for args in ("--mtp-num-layers 0 --position-embedding-type yarn", "--swiglu"):  # rotary and learned positions
        small = load_model(f"{bare} {args}+seq=128+vocabulary=256")
        assert small.input_shape == (128,)
        assert small.layers == load_model(f"{bare} {args} --seq-length 128 --padded-vocab-size 256").layers


def test_arguments_of_megatron():
    model = load_model(f"{GPT} --max-position-embeddings 1024 --vocab-size 50257")
    medium = load_model("gpt2-medium")
    assert model.n_params == medium.n_params + (50304 - 50257) * 1024  # padded to a multiple of 128
    assert (
        model.activation_nbytes
        == load_model("megatron+dim=1024+layers=24+heads=16+seq=1024+vocabulary=50304").activation_nbytes
    )
    n = load_model(f"{GPT} --tokenizer-type GPT2BPETokenizer").n_params
    assert n == model.n_params
    null = load_model(f"{GPT} --tokenizer-type NullTokenizer --vocab-size 50304")
    assert null.n_params - n == 128 * 1024
    wide = load_model(f"{GPT} --padded-vocab-size 50304 --kv-channels 128")
    assert wide.n_params - n == 24 * (4 * 1024 * 1024 + 3 * 1024)
    squared = load_model(f"{GPT} --padded-vocab-size 50304 --squared-relu --disable-bias-linear --add-qkv-bias")
    assert {"squared_relu"} == {layer.type for layer in squared.layers} & {"squared_relu", "gelu"}
    experts = load_model(
        f"{GPT} --padded-vocab-size 1024 --disable-bias-linear --swiglu --num-experts 8 --moe-router-topk 1"
    )
    assert any("each token uses" in note for note in experts.notes)


@pytest.mark.parametrize(
    "dump",
    [
        "  num_layers ...... 24\n  hidden_size ... 1024\n  num_attention_heads .. 16\n  seq_length .... 1024\n"
        "  padded_vocab_size ... 50304\n  swiglu .... False\n num_experts ..... None\n  add_bias_linear .... True\n",
        "num_layers: 24\nhidden_size: 1024\nnum_attention_heads: 16\nseq_length: 1024\npadded_vocab_size: 50304\n",
        "Namespace(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=1024, padded_vocab_size=50304)",
        '{"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024,'
        ' "padded_vocab_size": 50304}',
    ],
    ids=["log", "yaml", "namespace", "json"],
)
def test_what_megatron_prints_and_saves(dump: str):
    assert load_model(dump).layers == load_model(f"{GPT} --padded-vocab-size 50304").layers
    bare = load_model(dump.replace("add_bias_linear .... True", "add_bias_linear .... False"))
    assert (bare.n_params < load_model(dump).n_params) == ("add_bias_linear" in dump)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-layers 24", "model: --hidden-size: is missing; add it"),
        ("--hidden-size 1024 --num-attention-heads 16", "model: --num-layers: is missing; add it"),
        (f"{GPT}", "--vocab-size: is missing; add it"),
        (GPT.replace(" 24", " x"), "--num-layers: 'x': must be an integer"),
        (GPT.replace(" 24", " $DEPTH"), "--num-layers: '.DEPTH': must be an integer .* replace the variable"),
        (f"{GPT.replace('16', '15')} --vocab-size 9", "is not an integer for dim = 1024, heads = 15"),
        (f"{GPT} --num-layers 12", "--num-layers: has several values, 12 and 24; keep one"),
        (f"{GPT} --vocab-size 9 --multi-latent-attention", "--multi-latent-attention: models with this option cannot"),
        (
            f"{GPT} --vocab-size 9 --position-embedding-type relative",
            "'relative' cannot be simulated; supported: learned_absolute",
        ),
        (f"{GPT} --vocab-size 9 --qk-layernorm", "can only be simulated with --normalization RMSNorm"),
        (
            f"{GPT} --vocab-size 9 --num-experts 8",
            "--num-experts: can only be simulated with --disable-bias-linear and --swiglu",
        ),
        (f"{GPT} --vocab-size 9 --hidden-dropout much", "--hidden-dropout: must be a finite number, not 'much'"),
        (f"{GPT} --vocab-size 9 +depth=3", "unknown parameter 'depth'"),
        (GPT.replace("--seq-length 1024", ""), "--seq-length: is missing; add it, or the option .seq="),
        (f"{GPT} --vocab-size 9 --ffn-hiden-size 99", "--ffn-hiden-size: is no .*; did you mean --ffn-hidden-size"),
        (f"{GPT} --vocab-size 9 --mtp-num-layers 1", "--mtp-num-layers: models with this option cannot"),
        (f"{GPT} --vocab-size 9 --moe-layer-freq ([0]+[1]*23)", "--moe-layer-freq: models with this option cannot"),
        (f"{GPT} --vocab-size 9 --spec custom.layers get_spec", "--spec: models with this option cannot"),
        (f"python pretrain_bert.py {GPT} --vocab-size 9", "pretrain_bert.py trains another architecture"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(arguments: str, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        load_model(arguments)
    assert "\n" not in str(error.value)


TABLE = """name,shape,dtype,flops
conv1.weight,64x3x7x7,float32,236027904
bn1.weight,[64],float32,
bn1.running_mean,64,float32,
bn1.num_batches_tracked,[],int64,
fc.weight,"1000, 512",torch.bfloat16,
fc.bias,1000,BF16,
"""


def test_a_table_of_tensors(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text(TABLE)
    model = load_model(path)
    assert model.n_params == 64 * 147 + 64 + 512_000 + 1000
    assert model.gradient_nbytes() == 4 * model.n_params
    assert model.flops == 236_027_904 + 2 * (64 + 513_000)
    assert dict(tensor_shapes(model)) == {
        "conv1.weight": (64, 147), "bn1.weight": (64,), "fc.weight": (1000, 512), "fc.bias": (1000,)
    }  # fmt: skip
    assert (
        "work of 3 tensors is estimated as 2 FLOPs per parameter per sample; activations are unknown" in model.notes[0]
    )
    assert "skipped 2 tensors: running statistics" in model.notes[1]
    assert not any("estimated" in note for note in load_model("name,shape,flops\na,3,6\n").notes)
    result = simulate("cloud-25g-16x8-v100", str(path), AllReduce(), workers=4, batch_size=8)
    assert set(model.notes) <= set(result.notes)
    assert isinstance(summary(model), str)


@pytest.mark.parametrize("shape", ["64x3", "64 x 3", "64*3", "64; 3", "[64, 3]", " ( 64, 3 ) ", "64 3", "(192,)"])
def test_shapes_are_written_in_several_ways(tmp_path: Path, shape: str):
    (tmp_path / "mine.csv").write_text(f'name,shape\na.weight,"{shape}"\n')
    assert load_model(tmp_path / "mine.csv").n_params == 192


WRONG = "64xx3|64x|x3|64x,3|64,,3|[64,,3]|[,]|(64,,)|64,|[64 3|64 3)|-64x3|64x0|64x3.5||x"


@pytest.mark.parametrize("shape", WRONG.split("|"))
def test_a_shape_with_a_missing_or_wrong_size_is_refused(tmp_path: Path, shape: str):
    (tmp_path / "mine.csv").write_text(f'name,shape\na.weight,"{shape}"\n')
    with pytest.raises(ConfigError, match=r"shape: .*must be at most 6 positive integers, like 64x3x7x7"):
        load_model(tmp_path / "mine.csv")


def _same(model: Model) -> bool:
    return [(layer.name, layer.tensors) for layer in model.layers] == [("a", (("weight", 12), ("bias", 3)))]


def test_tables_in_json_and_safetensors(tmp_path: Path):
    assert _same(load_model('{"a.weight": [3, 4], "a.bias": {"shape": [3], "dtype": "BF16"}}'))
    path = tmp_path / "table.json"
    path.write_text('[{"name": "a.weight", "shape": "(3, 4)"}, {"name": "a.bias", "shape": [3]}]')
    assert _same(load_model(path))
    header = {"__metadata__": {"format": "pt"}, "a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}
    data = json.dumps({**header, "a.bias": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(60))
    assert _same(load_model(path))
    path.write_bytes(data[:10])
    with pytest.raises(ConfigError, match="the safetensors header is missing"):
        load_model(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,shape\na.weight,3xfour\n", "mine.csv:2: shape: '3xfour': must be at most 6 positive integers"),
        ("name,shape\na.weight,3x0\n", "shape: '3x0': must be at most 6 positive integers"),
        ("name,shape\na.weight,3\na.weight,4\n", "'a.weight' appears twice"),
        ("name,shape\n", "no learned tensor found"),
        ("name,shape\n,3\n", "name: '' appears twice, or is empty"),
        ("name,shape,flops\na,3,-1\n", "flops: .*must not be negative"),
        ("name,shape\na,99999999999x99999999\n", r"1e\+19 parameters up to 'a'; correct the sizes"),
        ("name,size\na,3\n", "begins with 'name,size a,3', but must be a config.json, Megatron-LM arguments or a"),
        ('{"weight_map": {"a": "x.safetensors"}}', "an index without shapes; use one of its .safetensors files"),
        ('{"a": 3}', "a: must be a shape, not 3; a config.json needs its model_type"),
        ("", "begins with '', but must be a config.json"),
    ],
)
def test_wrong_tables_are_errors_of_one_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_model(path)
    assert re.match(rf"{path}", str(error.value))
    assert "\n" not in str(error.value)


def test_options_of_a_table_are_an_error(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text(TABLE)
    with pytest.raises(ConfigError, match="a table of tensors accepts no options; remove \\+seq=3"):
        load_model(f"{path}+seq=3")
    with pytest.raises(ConfigError, match="no such file"):
        load_model(tmp_path / "missing.json")


def _mutated(text: str, rng: random.Random) -> str:
    characters = list(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(characters))
        match rng.randrange(3):
            case 0:
                characters[at] = rng.choice(string.printable)
            case 1:
                del characters[at : at + rng.randint(1, 9)]
            case _:
                characters.insert(at, rng.choice(['"', "{", "}", "[", "--", "${", "9" * 20, "\r", "\0", "\ud800"]))
    return "".join(characters)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_sources_are_read_or_refused_in_one_line(tmp_path: Path, seed: int):
    rng, errors = random.Random(seed), 0
    for _ in range(40):
        text = _mutated(rng.choice([SCRIPT, TABLE, _text("gpt2"), _text("qwen3-30b-a3b"), _text("vit-b16")]), rng)
        path = tmp_path / rng.choice(["mine.json", "mine.sh", "mine.csv"])
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        for source in (text, path):
            try:
                load_model(source)
            except ConfigError as error:
                errors += 1
                refused = str(error)
                assert "\n" not in refused
    assert errors > 0
