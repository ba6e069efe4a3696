"""Hugging Face transformers configurations (config.json) as models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ddlsim.arguments import integer
from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError, shown
from ddlsim.imports.decoders import Read, decoder_table, kinds
from ddlsim.imports.json_values import Node
from ddlsim.plain import read_toml

#: parameter of the model file -> names of the field in different classes
NUMBERS = {
    "dim": ("hidden_size", "n_embd", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "hidden": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
}
EXPERTS = {"experts": ("num_local_experts", "num_experts"), "active": ("num_experts_per_tok",)}
VISION = {name: NUMBERS[name] for name in ("dim", "layers", "heads", "hidden")}
VISION |= {"image": ("image_size",), "patch": ("patch_size",), "channels": ("num_channels",)}
FLAGS = {"attention_bias": "bias", "mlp_bias": "mlp_bias"}
ACTIVATIONS = dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu")
ACTIVATIONS |= {"relu": "relu", "relu2": "squared_relu"}
#: fields of which only one value is supported
ONLY: dict[str, Any] = dict.fromkeys(
    ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "qkv_bias"), True
)
ONLY |= dict.fromkeys(("qk_layernorm", "apply_residual_connection_post_layernorm", "add_cross_attention"), False)
ONLY |= {"clip_qkv": None, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1}
#: kinds for which only the parameters are counted
COUNTED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text", "qwen2_moe")
#: types with the text model of another one
SAME = {"gemma3": "gemma3text", "llama4": "llama4text", "kimik2": "deepseekv3", "qwen3vltext": "qwen3"}
SAME |= {"qwen3vlmoetext": "qwen3moe", "qwen2vltext": "qwen2", "qwen25vltext": "qwen2"}
#: maximum sequence length that is assumed for training
LONGEST = 8192


def is_config(value: object) -> bool:
    """Return whether a JSON value is a transformers configuration."""
    return isinstance(value, Mapping) and ("model_type" in value or "architectures" in value)


def read_config(root: Node) -> Read:
    """Return the model file of a configuration. Errors name the place of `root`.

    Raises ConfigError if the model cannot be simulated, with its number of parameters if it can be counted.
    """
    classes = root["architectures"].items() if root.has("architectures") else []
    architecture = classes[0].text() if classes else ""
    if root.has("text_config") or root.has("vision_config"):
        raise root.error("models of text and images cannot be simulated; use its text_config alone")
    kind = _kind(root, root["model_type"].text() if root.has("model_type") else architecture)
    only = ONLY | {"mlp_bias": False} if kind in COUNTED else ONLY
    only = only | {"attention_bias": kind == "gpt_oss"} if kind in COUNTED and kind != "glm4_moe" else only
    for name, value in only.items():
        if root.has(name) and (node := root[name]).value != value:
            rule = f"the only supported value is {shown(value)}"
            raise node.error(f"{shown(node.value)} cannot be simulated; {rule}")
    if kind in COUNTED:
        raise _counted(root, kind)
    head = "ForImageClassification" if kind == "vit" else "ForCausalLM"
    if architecture and not architecture.endswith((head, "LMHeadModel")):
        reason = f"{shown(architecture)} has an unsupported head; only ...{head} can be simulated"
        raise root["architectures"].error(reason)
    if root.has("quantization_config"):
        quantized = root["quantization_config"]
        raise quantized.error("quantised weights cannot be trained; remove the field to simulate the unquantised model")
    return _vision(root) if kind == "vit" else _decoder(root, kind)


def _kind(root: Node, name: str) -> str:
    kind_of = {kind.replace("_", ""): kind for kind in (*kinds(), *COUNTED, "vit")}
    plain = name.replace("_", "").lower()
    for ending in ("forcausallm", "lmheadmodel", "forimageclassification", "model"):
        plain = plain.removesuffix(ending)
    plain = SAME.get(plain, plain)
    if plain not in kind_of:
        rule = f"must be one of {', '.join(sorted(kind_of.values()))}"
        raise root.error(f"model_type or architectures = {shown(name)}: {rule}")
    return kind_of[plain]


def _count(root: Node, *names: str, needed: bool = True) -> int:
    """Return the positive integer stored under one of the names; 0 if it is missing and not `needed`."""
    node = next((root[name] for name in names if root.has(name)), None)
    if node is None and needed:
        raise root.error(f"{names[0]} is missing; is it a complete config.json?")
    return 0 if node is None else cast(int, integer(1)(node.value, node.place))


def _or_none(root: Node, name: str) -> int:
    """Return the integer stored under a name that must be there; null is 0."""
    return 0 if root[name].value in (None, 0) else _count(root, name)


def _numbers(root: Node, fields: Mapping[str, tuple[str, ...]], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return the numbers in the configuration; fields without a default are required."""
    counts = {name: _count(root, *names, needed=name not in defaults) for name, names in fields.items()}
    return {name: n for name, n in counts.items() if n}


def _flag(root: Node, name: str) -> bool:
    if not isinstance(root[name].value, bool):
        raise root[name].error(f"must be true or false, not {shown(root[name].value)}")
    return root[name].value is True


def _activation(root: Node) -> str:
    name = next((root[name].text() for name in ("hidden_act", "activation_function") if root.has(name)), "gelu")
    if name not in ACTIVATIONS:
        raise root.error(f"hidden_act = {shown(name)}: must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _decoder(root: Node, kind: str) -> Read:
    table, values = decoder_table(kind)
    values |= _numbers(root, NUMBERS, values)
    if values["mlp"] == "experts":
        values |= _numbers(root, EXPERTS, {})
    if kind == "qwen3_moe":
        values["hidden"] = _count(root, "moe_intermediate_size")
    if isinstance(root.value, Mapping) and root.value.get("num_key_value_heads", 0) is None:
        values["kv_heads"] = values["heads"]
    reads = _count(root, "max_position_embeddings", "n_positions", "seq_length", needed=False)
    reads = reads or (1024 if kind == "gpt2" else 2048)
    values |= {"seq": min(reads, LONGEST)} | {to: _flag(root, name) for name, to in FLAGS.items() if root.has(name)}
    if root.has("tie_word_embeddings"):
        values["output"] = "tied_dense" if _flag(root, "tie_word_embeddings") else "dense"
    if values["mlp"] == "ungated":
        values["activation"] = _activation(root)
    if values["dropped"] == "dropout":  # OPT reserves two rows
        values["positions"] = reads + (2 if kind == "opt" else 0)
        dropout = next((root[name] for name in ("resid_pdrop", "dropout") if root.has(name)), None)
        values["dropout"] = 0.1 if dropout is None else dropout.nonnegative()
    if root.has("use_bias"):
        values["bias"] = values["mlp_bias"] = _flag(root, "use_bias")
    if kind == "falcon":
        values |= _falcon(root, values)
    if root.has("word_embed_proj_dim") and root["word_embed_proj_dim"].value != values["dim"]:
        raise root["word_embed_proj_dim"].error("cannot be simulated unless it equals hidden_size")
    if root.has("use_parallel_residual") and not _flag(root, "use_parallel_residual"):
        values["order"] = "pre_norm"
    has_window = _flag(root, "use_sliding_window") if root.has("use_sliding_window") else kind[:4] != "qwen"
    window = _count(root, "sliding_window", needed=False) if has_window else 0
    return Read({**table, "parameters": values}, kind, reads, window)


def _falcon(root: Node, values: dict[str, Any]) -> dict[str, Any]:
    """Return Falcon's variations: models from 40B on have a norm per branch, and grouped queries."""
    flags = {name: root.has(name) and _flag(root, name) for name in ("new_decoder_architecture", "bias", "alibi")}
    grouped = flags["new_decoder_architecture"]
    single = not grouped and (not root.has("multi_query") or _flag(root, "multi_query"))
    heads = _count(root, "num_kv_heads", needed=grouped) if grouped else 1 if single else values["heads"]
    order = "parallel" if grouped and _count(root, "num_ln_in_parallel_attn", needed=False) != 1 else "parallel_shared"
    if not grouped and root.has("parallel_attn") and not _flag(root, "parallel_attn"):
        order = "pre_norm"
    biased = flags["bias"]
    return {"kv_heads": heads, "order": order, "rotary": not flags["alibi"], "bias": biased, "mlp_bias": biased}


def _vision(root: Node) -> Read:
    """Return the bundled vision transformer with a configuration's numbers."""
    table: dict[str, Any] = read_toml(bundled_files("models")["vit"])
    values = {**table["parameters"], **_numbers(root, VISION, table["parameters"])}
    labels = root["id2label"].value if root.has("id2label") else None
    n_labels = len(labels) if isinstance(labels, dict) else 0
    values["classes"] = n_labels or _count(root, "num_labels", needed=False) or 2
    if _activation(root) != "gelu":
        raise root.error("only hidden_act = gelu can be simulated in vision transformers")
    return Read({**table, "parameters": values, "sizes": {}}, "vit")


def _counted(root: Node, kind: str) -> ConfigError:
    """Return the error, with the number of parameters, for experts whose layers are not simulated."""
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_experts_per_tok")
    dim, layers, vocabulary, heads, active = (_count(root, name) for name in names)
    tied = root.has("tie_word_embeddings") and _flag(root, "tie_word_embeddings")
    rest, dense = vocabulary * dim * (1 if tied else 2) + dim + 2 * dim * layers, 0
    if of_deepseek := kind.startswith("deepseek"):
        nope, rope, value = (_count(root, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        kv_rank, q_rank, queries = _count(root, "kv_lora_rank"), _or_none(root, "q_lora_rank"), heads * (nope + rope)
        attention = (dim + queries + 1) * q_rank if q_rank else dim * queries
        attention += dim * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value) + heads * value * dim
        what = "multi-head latent attention, and shared experts,"
    else:  # biases: of queries, keys and values
        kv, of_qwen, what = _count(root, "num_key_value_heads"), kind == "qwen2_moe", "shared experts"
        size = dim // heads if of_qwen else _count(root, "head_dim")
        is_set = {name: root.has(name) and _flag(root, name) for name in ("attention_bias", "use_qk_norm")}
        attention = 2 * dim * (heads + kv) * size + (2 * size if kind == "glm4_moe" and is_set["use_qk_norm"] else 0)
        if of_qwen or kind == "gpt_oss" or is_set["attention_bias"]:
            attention += (heads + 2 * kv) * size
    if of_deepseek or kind == "glm4_moe":
        n_experts, dense = _count(root, "n_routed_experts"), _or_none(root, "first_k_dense_replace")
        expert = 3 * dim * _count(root, "moe_intermediate_size")
        shared = _or_none(root, "n_shared_experts") * expert
        rest += dense * 3 * dim * _count(root, "intermediate_size")
    else:
        n_experts = _count(root, "num_experts" if of_qwen else "num_local_experts")
        width = _count(root, "moe_intermediate_size" if of_qwen else "intermediate_size")
        expert = shared = 3 * dim * width
        if kind == "gpt_oss":  # one attention sink per head; all products have biases
            attention, expert, shared = attention + dim + heads, expert + 2 * width + dim, n_experts
            what = "attention sinks, and experts with biases,"
        elif of_qwen:  # a gate for the shared expert
            shared = 3 * dim * _count(root, "shared_expert_intermediate_size") + dim
        else:  # Llama 4: every n-th layer has experts
            every = _count(root, "interleave_moe_layer_step", needed=False) or 1
            dense = layers - (len(root["moe_layers"].items()) if root.has("moe_layers") else layers // every)
            rest += dense * 3 * dim * _count(root, "intermediate_size_mlp", needed=dense > 0)
    shared += n_experts * dim  # the router
    total = rest + layers * attention + (layers - dense) * (shared + n_experts * expert)
    used = total - (layers - dense) * (n_experts - active) * expert
    sizes = f"The model has {total:,} parameters, of which each token uses {used:,}"
    has_more = root.has("num_nextn_predict_layers") and root["num_nextn_predict_layers"].value != 0
    more = "; num_nextn_predict_layers are not counted" if has_more else ""
    return root.error(f"{what} cannot be simulated yet. {sizes}{more}")
