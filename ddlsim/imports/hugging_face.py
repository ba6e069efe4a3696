"""Configurations of huggingface transformers (config.json) as model files, with the parameters of its classes.

What a configuration leaves out has the default of its class there (transformers 4.57, models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlsim.errors import ConfigError, listed, shown
from ddlsim.imports.decoders import Decoder, Read, Table, not_simulated
from ddlsim.imports.json_values import Node

#: model_type -> what is the same in all of its models
_LLAMA: dict[str, Any] = {}
_GPT: dict[str, Any] = {
    "norm": "layer_norm", "gated": False, "fused": True, "rotary": False, "bias": True, "out_bias": True,
    "mlp_bias": True, "tied": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": {"fused": True},
    "qwen2": {"bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "all", "pre_norm": False, "post_norm": True},
    "olmo3": {"qk_norm": "all", "pre_norm": False, "post_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "post_norm": True},
    "gemma3_text": {"tied": True, "post_norm": True, "qk_norm": "head"},
    "nemotron": {"norm": "layer_norm", "gated": False},
    "mixtral": _LLAMA,
    "qwen3_moe": {"qk_norm": "head"},
    "gpt2": _GPT,
    "bloom": {**_GPT, "embedding_norm": True},
    "opt": {**_GPT, "fused": False},
    "gpt_neox": {**_GPT, "rotary": True, "tied": False, "parallel": "separate"},
    "phi": {**_GPT, "rotary": True, "tied": False, "fused": False, "parallel": "shared", "head_bias": True},
}
#: those of whose models only the parameters are counted; and the vision transformer
_COUNTED, _VISION = ("deepseek_v3", "deepseek_v2", "gpt_oss"), ("vit",)
#: other names of a field, in some classes
_NAMES = {
    "hidden_size": ("n_embd", "n_embed"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("ffn_dim", "n_inner"),
    "max_position_embeddings": ("n_positions", "seq_length"),
    "hidden_act": ("activation_function", "hidden_activation"),
    "num_local_experts": ("num_experts",),
}
#: features of a head where a configuration of Gemma leaves them out
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256}
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "relu2": "squared_relu"}
#: sequences of which a model is taken to be trained, where it reads longer ones
LONGEST = 8192


def is_config(value: object) -> bool:
    """Return whether a JSON value is a configuration of transformers."""
    return isinstance(value, Mapping) and ("model_type" in value or "architectures" in value)


def read_config(root: Node) -> Read:
    """Return the model file of a configuration, with `root` at the place that errors name.

    Raises ConfigError for a model that cannot be simulated, with its parameters where they are counted.
    """
    config = _Config(root)
    kind = config.kind
    if root.has("text_config") or root.has("vision_config"):
        raise root.error("is a model of text and images, which cannot be simulated; give its text_config alone")
    if kind in _COUNTED:
        raise _counted(config)
    if root.has("quantization_config"):
        quantized = root["quantization_config"]
        raise quantized.error("quantized weights are not trained; remove the field to simulate the model itself")
    if kind in _VISION:
        return _vision(config)
    name = config.architecture
    if name and not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise root["architectures"].error(f"{shown(name)} has another head than language models; give ...ForCausalLM")
    return _decoder(config)


class _Config:
    """A configuration: numbers by the names that transformers uses, whatever the class calls them."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.where = root.place.rstrip(": ")
        classes = [each.text() for each in root["architectures"].items()] if root.has("architectures") else []
        self.architecture = classes[0] if classes else ""
        self.kind = self._kind()

    def _kind(self) -> str:
        known = {name.replace("_", ""): name for name in (*FAMILIES, *_COUNTED, *_VISION)}
        name = self.root["model_type"].text() if self.root.has("model_type") else self.architecture
        if not name:
            raise self.root.error("model_type is missing, and architectures names no class; add model_type")
        plain = name.replace("_", "").lower()
        for ending in ("forcausallm", "lmheadmodel", "forimageclassification", "model"):
            plain = plain.removesuffix(ending)
        plain = {"gemma3": "gemma3text"}.get(plain, plain)
        if plain not in known:
            field = "model_type" if self.root.has("model_type") else "architectures"
            raise self.root[field].error(f"{shown(name)} is none of {', '.join(sorted(known.values()))}")
        return known[plain]

    def _named(self, name: str) -> Node | None:
        for each in (name, *_NAMES.get(name, ())):
            if self.root.has(each):
                return self.root[each]
        return None

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        node = self._named(name)
        if node is None and default is None:
            raise self.root.error(f"{name} is missing; is it a complete config.json?")
        if node is None:
            return default or 0
        if type(node.value) is not int or not 1 <= node.value <= 10**9:
            raise node.error(f"must be a whole number from 1 to 1e9, not {shown(node.value)}")
        return node.value

    def flag(self, name: str, default: bool) -> bool:
        node = self._named(name)
        if node is None:
            return default
        if not isinstance(node.value, bool):
            raise node.error(f"must be true or false, not {shown(node.value)}")
        return node.value

    def share(self, name: str, default: float = 0.0) -> float:
        node = self._named(name)
        if node is None:
            return default
        number = node.number()
        if not 0.0 <= number < 1.0:
            raise node.error(f"must be in [0, 1), not {shown(node.value)}")
        return number

    def text(self, name: str, default: str) -> str:
        node = self._named(name)
        return default if node is None else node.text()

    def refuse(self, name: str, wanted: object) -> None:
        """Raise ConfigError if a field has another value than the one that is simulated."""
        if self.root.has(name) and self.root[name].value != wanted:
            wrong = self.root[name]
            raise wrong.error(f"{shown(wrong.value)} cannot be simulated, only {shown(wanted)}")


def _heads(config: _Config) -> tuple[int, int, int, int]:
    """Return width, heads, heads of keys and values, and features of a head."""
    dim, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", 4 if config.kind == "gemma3_text" else heads)
    default = _HEAD_DIM.get(config.kind, 128 if config.kind.startswith("qwen3") else dim // heads)
    size = config.count("head_dim", default)
    if heads % kv_heads:
        raise config.root["num_key_value_heads"].error(f"{kv_heads} must divide the {heads} heads of queries")
    if not config.root.has("head_dim") and default * heads != dim and default == dim // heads:
        raise config.root.error(f"num_attention_heads = {heads} must divide hidden_size = {dim}")
    return dim, heads, kv_heads, size


def _decoder(config: _Config) -> Read:
    kind, choices = config.kind, dict(FAMILIES[config.kind])
    dim, heads, kv_heads, size = _heads(config)
    reads = config.count("max_position_embeddings", 2048 if kind in ("bloom", "gpt2") else LONGEST)
    gated = choices.get("gated", True)
    hidden = 4 * dim if kind in ("bloom", "gpt2") else None
    choices |= _experts(config) or {"hidden": config.count("intermediate_size", hidden)}
    if not gated:
        choices["activation"] = _activation(config)
    if config.flag("attention_bias", bool(choices.get("bias"))):
        choices |= {"bias": True, "out_bias": kind != "qwen2"}
    choices["mlp_bias"] = config.flag("mlp_bias", choices.get("mlp_bias", False))
    choices["tied"] = config.flag("tie_word_embeddings", choices.get("tied", False))
    if kind in ("gpt2", "opt"):
        choices["dropout"] = config.share("resid_pdrop" if kind == "gpt2" else "dropout", 0.1)
        choices["positions"] = reads + (2 if kind == "opt" else 0)
        config.refuse("enable_bias", True)
        config.refuse("do_layer_norm_before", True)
        config.refuse("word_embed_proj_dim", dim)
    if kind == "gpt_neox" and not config.flag("use_parallel_residual", True):
        choices["parallel"] = None
    for name, wanted in (
        ("qk_layernorm", False),
        ("clip_qkv", None),
        ("apply_residual_connection_post_layernorm", False),
    ):
        config.refuse(name, wanted)
    window = config.count("sliding_window", 0) if config.flag("use_sliding_window", not kind.startswith("qwen")) else 0
    layers, vocabulary = config.count("num_hidden_layers"), config.count("vocab_size")
    decoder = Decoder(layers, dim, heads, kv_heads, size, vocabulary=vocabulary, seq=min(reads, LONGEST), **choices)
    table = decoder.table(f"{kind} of {layers} layers", f"{config.where}, a config.json")
    return Read(table, kind, reads, window, decoder.active, decoder.experts)


def _experts(config: _Config) -> dict[str, int]:
    """Return experts, how many of them a token uses, and their width; empty for a model without."""
    if config.kind not in ("mixtral", "qwen3_moe"):
        return {}
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [])
    width = "intermediate_size" if config.kind == "mixtral" else "moe_intermediate_size"
    numbers = {"experts": config.count("num_local_experts"), "active": config.count("num_experts_per_tok")}
    return {**numbers, "hidden": config.count(width)}


def _activation(config: _Config) -> str:
    name = config.text("hidden_act", "gelu")
    plain = "gelu" if name.startswith("gelu") else name
    if plain not in _ACTIVATIONS:
        raise ConfigError(f"{config.where}: hidden_act = {shown(name)}: must be one of {listed(_ACTIVATIONS)}")
    return _ACTIVATIONS[plain]


def _vision(config: _Config) -> Read:
    """Return a vision transformer (Dosovitskiy et al. 2021) with its classifier, or its pooler where it has none."""
    dim, heads, _, _ = _heads(config)
    image, patch = config.count("image_size", 224), config.count("patch_size", 16)
    hidden, bias = config.count("intermediate_size", 4 * dim), config.flag("qkv_bias", True)
    if image % patch:
        raise config.root["patch_size"].error(f"{patch} must divide image_size = {image}")
    labels = config.root["id2label"].value if config.root.has("id2label") else None
    n_labels = len(labels) if isinstance(labels, dict) and labels else config.count("num_labels", 2)
    head: list[Table] = [{"type": "dense", "name": "classifier", "units": n_labels}]
    if config.architecture.endswith("Model"):
        head = [{"type": "dense", "name": "pooler", "units": dim}, {"type": "tanh"}]
    attention = {"type": "attention", "heads": heads, "bias": bias, "out_bias": True}
    mlp = [{"type": "dense", "units": hidden}, {"type": _activation(config)}, {"type": "dense", "units": dim}]
    encoder = [{"type": "residual", "body": [{"type": "layer_norm"}, *body]} for body in ([attention], mlp)]
    embedding = {"type": "patch_embedding", "name": "embeddings", "patch": patch, "dim": dim}
    layers = config.count("num_hidden_layers")
    table: Table = {
        "title": f"vision transformer of {layers} layers",
        "sources": [f"{config.where}, a config.json"],
        "input": [config.count("num_channels", 3), image, image],
        "layers": [
            embedding, {"block": "encoder", "name": "layers", "repeat": "$layers"},
            {"type": "layer_norm"}, {"type": "take", "count": 1}, {"type": "flatten"}, *head,
        ],
        "blocks": {"encoder": {"layers": encoder}},
        "parameters": {"layers": layers},
    }  # fmt: skip
    return Read(table, "vit")


def _counted(config: _Config) -> ConfigError:
    """Return the error, with its parameters, for a model of experts whose layers are not simulated."""
    dim, layers, vocabulary = (config.count(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config.count("num_attention_heads")
    rest = vocabulary * dim * (1 if config.flag("tie_word_embeddings", False) else 2) + dim + 2 * dim * layers
    k = config.count("num_experts_per_tok")
    if config.kind == "gpt_oss":  # attention with biases and a sink for each head; experts with biases
        size, kv, width = (
            config.count("head_dim", 64),
            config.count("num_key_value_heads"),
            config.count("intermediate_size"),
        )
        n_experts, n_moe = config.count("num_local_experts"), layers
        attention = (dim + 1) * (heads + 2 * kv) * size + (heads * size + 1) * dim + heads
        expert, always = 3 * dim * width + 2 * width + dim, (dim + 1) * n_experts
        what = "attention sinks, and experts with biases,"
    else:
        nope, rope, value = (config.count(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        kv_rank, q_rank = config.count("kv_lora_rank"), config.count("q_lora_rank", 0)
        queries = heads * (nope + rope)
        attention = (dim + queries + 1) * q_rank if q_rank else dim * queries
        attention += dim * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value) + heads * value * dim
        n_experts = config.count("n_routed_experts")
        dense = config.count("first_k_dense_replace", 0)
        n_moe, width = layers - dense, config.count("moe_intermediate_size")
        expert = 3 * dim * width
        always = n_experts * dim + config.count("n_shared_experts", 0) * expert
        rest += dense * 3 * dim * config.count("intermediate_size")
        what = "multi-head latent attention, and shared experts,"
    total = rest + layers * attention + n_moe * (always + n_experts * expert)
    return not_simulated(config.where, what, total, total - n_moe * (n_experts - k) * expert)
