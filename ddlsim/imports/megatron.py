"""Arguments of Megatron-LM (megatron/training/arguments.py) as model files.

They are read from a text, from a shell script, which is never executed, and from what Megatron prints or saves of
them (``num_layers ...... 32``, ``num_layers: 32``, ``Namespace(num_layers=32)``). Arguments that do not concern the
model have no effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.decoders import Decoder, Read
from ddlsim.imports.text import SourceText

_MARK = re.compile(r"(?:--num[-_]layers\b|\bnum_layers['\"]?\s*(?:\.{2,}|=|:)\s*\d)")
#: an assignment of a script: one word, something in quotes, or a list in parentheses
_ASSIGNED = re.compile(r"(?m)^[ \t]*(?:export[ \t]+|local[ \t]+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|(]+)")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
_FLAG = re.compile(r"(?:^|(?<=\s))--([a-z][\w-]*)(?:[ \t]*=[ \t]*|\s+|$)((?!--)[^\s]*)?")
_PRINTED = re.compile(r"\b([a-z]\w+)['\"]?[ \t]*(?:\.{2,}|=|:)[ \t]*['\"]?([^\s,)'\"]+)")
#: arguments that make a model of another form
_OTHERS = (
    "multi-latent-attention", "apply-residual-connection-post-layernorm", "mtp-num-layers", "moe-layer-freq",
    "moe-shared-expert-intermediate-size", "is-hybrid-model", "hybrid-override-pattern", "decoder-num-layers",
    "heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json", "window-size",
)  # fmt: skip
#: an argument as it is printed -> the flag that sets it to false
_NEGATED = {"add-bias-linear": "disable-bias-linear"}


def is_megatron(value: object) -> bool:
    """Return whether a text has arguments of Megatron-LM, or a JSON object is what it saves of them."""
    if isinstance(value, str):
        return _MARK.search(value) is not None
    return isinstance(value, Mapping) and {"num_layers", "hidden_size", "num_attention_heads"} <= value.keys()


def read_megatron(source: SourceText, saved: object = None) -> Read:
    """Return the model file that arguments make, in a text or `saved` as JSON.

    Raises ConfigError for arguments that make a model of another form, and for numbers that are missing or wrong.
    """
    if isinstance(saved, Mapping):
        arguments = _Arguments(source, _printed({str(key): str(value) for key, value in saved.items()}.items()))
    elif re.search(r"--num[-_]layers\b", source.text):
        arguments = _Arguments(source, _flags(source))
    else:
        arguments = _Arguments(source, _printed(_PRINTED.findall(source.text)))
    return _decoder(arguments)


def _printed(pairs: Any) -> dict[str, str]:
    """Return arguments by flag; those that are off or have no value are left out."""
    flags = {}
    for name, value in pairs:
        flag = name.replace("_", "-")
        if flag in _NEGATED:
            flag, value = _NEGATED[flag], {"False": "True", "false": "True"}.get(value, "None")
        if value not in ("False", "false", "None", "null"):
            flags[flag] = "" if value in ("True", "true") else value
    return flags


def _flags(source: SourceText) -> dict[str, str]:
    """Return the values of all flags in a script, its variables replaced."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", source.text).replace("\\\n", " ")
    variables: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        default = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", word := value.strip("\"'"))  # TP=${TP:-8}
        variables.setdefault(name, set()).add(default[1] if default else word)

    def value_of(match: re.Match[str]) -> str:
        values = variables.get(match[1] or match[3], {match[2]} if match[2] else set())
        # what has several values is only an error where an argument of the model uses it
        return next(iter(values)) if len(values) == 1 and not any("--" in value for value in values) else match[0]

    for _ in range(5):  # variables that name variables
        text = _VARIABLE.sub(value_of, text)
    flags: dict[str, str] = {}
    for name, value in _FLAG.findall(re.sub(r"[\"'()]", " ", text)):
        flag, text_value = name.replace("_", "-"), value.rstrip("\\;")
        if flag in flags and flags[flag] != text_value and flag in (*_NUMBERS, *_TEXTS):
            raise source.error(
                None, f"--{flag} has two values, {flags[flag]} and {text_value}; give those of one model"
            )
        flags[flag] = text_value
    return flags


_NUMBERS = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
    "seq-length", "encoder-seq-length", "max-position-embeddings", "vocab-size", "padded-vocab-size",
    "make-vocab-size-divisible-by", "tensor-model-parallel-size", "num-experts", "moe-router-topk",
    "moe-ffn-hidden-size",
)  # fmt: skip
_TEXTS = ("normalization", "position-embedding-type", "tokenizer-type", "hidden-dropout")


class _Arguments:
    """Arguments by flag, without the dashes."""

    def __init__(self, source: SourceText, flags: Mapping[str, str]) -> None:
        self.source, self.flags = source, flags

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def error(self, flag: str, reason: str) -> ConfigError:
        return self.source.error(None, f"--{flag}: {reason}")

    def count(self, flag: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        if flag not in self.flags and default is None:
            raise self.error(flag, "is missing; add it")
        value = self.flags.get(flag, str(default))
        if not value.isdecimal() or not 1 <= int(value[:12]) <= 10**9 or len(value) > 10:
            why = "; give the number in place of the variable" if "$" in value else ""
            raise self.error(flag, f"{shown(value)}: must be a whole number from 1 to 1e9{why}")
        return int(value)

    def choice(self, flag: str, default: str, known: tuple[str, ...]) -> str:
        value = self.flags.get(flag, default)
        if value not in known:
            raise self.error(flag, f"{shown(value)} cannot be simulated, only {', '.join(known)}")
        return value


def _decoder(given: _Arguments) -> Read:
    for flag in _OTHERS:
        if given.has(flag) and given.flags[flag] not in ("0", "1", "-1"):
            raise given.error(flag, "makes a model that cannot be simulated yet")
    dim, heads = given.count("hidden-size"), given.count("num-attention-heads")
    if not given.has("kv-channels") and dim % heads:
        raise given.error("num-attention-heads", f"{heads} must divide --hidden-size {dim}; or add --kv-channels")
    grouped = given.has("group-query-attention") and given.has("num-query-groups")
    kv_heads = given.count("num-query-groups") if grouped else heads
    gated, layers = given.has("swiglu"), given.count("num-layers")
    seq = given.count("encoder-seq-length" if given.has("encoder-seq-length") else "seq-length")
    rotary = given.has("use-rotary-position-embeddings")
    position = given.choice("position-embedding-type", "rope" if rotary else "learned_absolute",
                            ("learned_absolute", "rope", "none"))  # fmt: skip
    norm = given.choice("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    if given.has("qk-layernorm") and norm == "LayerNorm":
        raise given.error("qk-layernorm", "can be simulated with --normalization RMSNorm only")
    biased = not given.has("disable-bias-linear")
    hidden = given.count("ffn-hidden-size", 8 * dim // 3 // 64 * 64 if gated else 4 * dim)
    experts = given.count("num-experts") if given.has("num-experts") else 0
    if experts and biased:
        raise given.error("num-experts", "can be simulated with --disable-bias-linear only")
    decoder = Decoder(
        layers, dim, heads, kv_heads, given.count("kv-channels", dim // heads),
        hidden=given.count("moe-ffn-hidden-size", hidden) if experts else hidden,
        vocabulary=_vocabulary(given), seq=seq, norm="rms_norm" if norm == "RMSNorm" else "layer_norm",
        qk_norm="head" if given.has("qk-layernorm") else None, gated=gated,
        activation="squared_relu" if given.has("squared-relu") else "gelu", fused=True, rotary=position == "rope",
        bias=biased or given.has("add-qkv-bias"), out_bias=biased, mlp_bias=biased,
        tied=not given.has("untie-embeddings-and-output-weights"), dropout=_dropout(given),
        positions=given.count("max-position-embeddings", seq) if position == "learned_absolute" else 0,
        experts=experts, active=given.count("moe-router-topk", 2) if experts else 0,
    )  # fmt: skip
    table = decoder.table(f"Megatron-LM GPT of {layers} layers", f"{given.source.path}, arguments of Megatron-LM")
    return Read(table, "gpt", active=decoder.active, experts=decoder.experts)


def _dropout(given: _Arguments) -> float:
    value = given.flags.get("hidden-dropout", "0.1")
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not 0.0 <= rate < 1.0:
        raise given.error("hidden-dropout", f"{shown(value)}: must be in [0, 1)")
    return rate


def _vocabulary(given: _Arguments) -> int:
    """Return the rows of the embedding: words, padded so that tensor-parallel ranks share them evenly."""
    if given.has("padded-vocab-size"):
        return given.count("padded-vocab-size")
    tokenizer = given.flags.get("tokenizer-type", "")
    if not given.has("vocab-size") and tokenizer != "GPT2BPETokenizer":
        raise given.error("vocab-size", "is missing, and the tokenizer does not tell; add it, or --padded-vocab-size")
    words = given.count("vocab-size", 50257) + (tokenizer == "NullTokenizer")
    multiple = given.count("make-vocab-size-divisible-by", 128) * given.count("tensor-model-parallel-size", 1)
    return math.ceil(words / multiple) * multiple
