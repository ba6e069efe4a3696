"""Megatron-LM arguments (megatron/training/arguments.py) as models.

They are read from text, from a shell script (which is never executed), or from Megatron's printed or saved arguments
(``num_layers ...... 32``, ``num_layers: 32``, ``Namespace(num_layers=32)``). Arguments unrelated to the model are
ignored.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.decoders import Read, decoder_table
from ddlsim.imports.json_values import Node
from ddlsim.imports.text import SourceText

_SCRIPT = re.compile(r"--num[-_](?:layers|attention[-_]heads)\b")
_PRINTED = re.compile(r"\b([a-z]\w+)['\"]?[ \t]*(?:\.{2,}|=|:)[ \t]*['\"]?([^\s,)'\"}]+)")
#: an assignment in a script, of a word or a quoted string
_ASSIGNED = re.compile(r"(?m)^[ \t]*(?:export[ \t]+|local[ \t]+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|(]+)")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
#: also in the YAML of Megatron's tests: --num-layers: 12
_FLAG = re.compile(r"(?:^|(?<=\s))--([a-z][\w-]*)(?:[ \t]*=[ \t]*|:[ \t]+|\s+|$)((?!--)[^\s]*)?")
_OTHER_SCRIPT = re.compile(r"\bpretrain_(?:bert|t5|ict|retro|vision_\w+|vlm|mamba|mamba_hybrid)\.py\b")
#: arguments that define a different architecture, unless they have one of these values
_UNSUPPORTED = (
    "multi-latent-attention", "apply-residual-connection-post-layernorm", "mtp-num-layers", "moe-layer-freq",
    "moe-shared-expert-intermediate-size", "is-hybrid-model", "hybrid-override-pattern", "decoder-num-layers",
    "heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json", "window-size", "spec",
    "hybrid-layer-pattern", "experimental-attention-variant", "linear-attention-freq", "attention-output-gate",
    "moe-latent-size", "enable-mhc-connections", "vision-model-type", "quick-geglu", "post-self-attn-layernorm",
    "mtp-hybrid-override-pattern",
)  # fmt: skip
_HARMLESS = re.compile(r"0|-1|1|\[1\]\*\d+")  # --moe-layer-freq [1]*48: all layers
#: parameter of the model file -> Megatron's argument
_NUMBERS = {
    "layers": "num-layers",
    "dim": "hidden-size",
    "heads": "num-attention-heads",
    "head_size": "kv-channels",
    "hidden": "ffn-hidden-size",
    "experts": "num-experts",
    "active": "moe-router-topk",
}
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_OTHERS = ("seq-length", "max-position-embeddings", "vocab-size", "num-query-groups", "swiglu")
_SWITCHES = ("group-query-attention", "disable-bias-linear", "add-qkv-bias", "squared-relu", "qk-layernorm")
_CHOICES = ("untie-embeddings-and-output-weights", "position-embedding-type", "moe-ffn-hidden-size", "normalization")
#: flags that define the model; others with almost these names are misspelled
_KNOWN = [*_NUMBERS.values(), *_OTHERS, *_SWITCHES, *_CHOICES]
#: flags that options of the model replace
_OPTIONS = {"seq-length": "seq", "vocab-size": "vocabulary"}


def is_argument(name: str) -> bool:
    """Return whether an option without its dashes, such as "num-layers", describes a model of Megatron-LM."""
    return name.replace("_", "-") in (*_NUMBERS.values(), *_OTHERS)


def is_megatron(text: str) -> bool:
    """Return whether a text contains Megatron-LM arguments."""
    return bool(_SCRIPT.search(text) or {"num_layers", "hidden_size"} <= {name for name, _ in _PRINTED.findall(text)})


def read_megatron(source: SourceText, options: Collection[str] = ()) -> Read:
    """Return the model file defined by the arguments; `options` are the parameters that the caller sets."""
    is_script = bool(_SCRIPT.search(source.text))
    parsed = _Arguments(source, _script(source.text) if is_script else _printed(source.text))
    if other := _OTHER_SCRIPT.search(source.text):
        raise source.error(None, f"{other[0]} trains another architecture; only decoders (pretrain_gpt.py) are read")
    for flag in _UNSUPPORTED:
        harmless = "0" if flag == "mtp-num-layers" else _HARMLESS
        if flag in parsed.flags and not re.fullmatch(harmless, parsed.text(flag)):
            raise parsed.error(flag, "models with this option cannot be simulated yet")
    for flag in sorted(parsed.flags.keys() - set(_KNOWN)) if is_script else ():
        if near := difflib.get_close_matches(flag, _KNOWN, 1, 0.9):
            raise parsed.error(flag, f"is no argument of Megatron-LM; did you mean --{near[0]}?")
    table, values = decoder_table("llama")
    values |= {"hidden": "4 * $dim", "fused": True}
    has_experts, gated = "num-experts" in parsed.flags, "swiglu" in parsed.flags
    values |= {name: parsed.count(_NUMBERS[name]) for name in ("layers", "dim", "heads")}  # required
    values |= {name: parsed.count(flag) for name, flag in _NUMBERS.items() if flag in parsed.flags}
    if gated and "ffn-hidden-size" not in parsed.flags:
        values["hidden"] = 8 * values["dim"] // 3 // 64 * 64
    biased, rms = "disable-bias-linear" not in parsed.flags, parsed.text("normalization", "LayerNorm") == "RMSNorm"
    if has_experts and (biased or not gated):
        raise parsed.error("num-experts", "can only be simulated with --disable-bias-linear and --swiglu")
    if "qk-layernorm" in parsed.flags and not rms:
        raise parsed.error("qk-layernorm", "can only be simulated with --normalization RMSNorm")
    values["mlp"] = "experts" if has_experts else "gated" if gated else "ungated"
    if has_experts:
        values |= {
            "active": parsed.count("moe-router-topk", 2),
            "hidden": parsed.count("moe-ffn-hidden-size", values["hidden"]),
        }
    if "group-query-attention" in parsed.flags:
        values["kv_heads"] = parsed.count("num-query-groups", 1)
    rotary = "use-rotary-position-embeddings" in parsed.flags
    position = parsed.text("position-embedding-type", "rope" if rotary else "learned_absolute")
    if position not in _POSITIONS:
        rule = f"cannot be simulated; supported: {', '.join(_POSITIONS)}"
        raise parsed.error("position-embedding-type", f"{shown(position)} {rule}")
    length = "encoder-seq-length" if "encoder-seq-length" in parsed.flags else "seq-length"
    learned, limited = position == "learned_absolute", "max-position-embeddings" in parsed.flags
    values |= {
        "seq": 1 if "seq" in options else parsed.count(length),
        "vocabulary": 1 if "vocabulary" in options else _vocabulary(parsed),
        "norm": "rms_norm" if rms else "layer_norm",
        "qk_norm": "head" if "qk-layernorm" in parsed.flags else "none",
        "activation": "squared_relu" if "squared-relu" in parsed.flags else "gelu",
        "rotary": position in ("rope", "yarn"),
        "positions": (parsed.count("max-position-embeddings") if limited else "$seq") if learned else 0,
        "bias": biased or "add-qkv-bias" in parsed.flags,
        "out_bias": biased,
        "mlp_bias": biased,
        "output": "dense" if "untie-embeddings-and-output-weights" in parsed.flags else "tied_dense",
        "dropout": Node(parsed.text("hidden-dropout", "0.1"), f"{source.path}: --hidden-dropout").number(),
    }
    values["dropped"] = "dropout" if values["dropout"] else "none"
    return Read({**table, "parameters": values}, "megatron")


def _vocabulary(parsed: _Arguments) -> int:
    """Return the rows of the embedding: the vocabulary, padded to a multiple for tensor-parallel ranks."""
    if "padded-vocab-size" in parsed.flags:
        return parsed.count("padded-vocab-size")
    tokenizer = parsed.text("tokenizer-type", "")
    words = parsed.count("vocab-size", 50257 if tokenizer == "GPT2BPETokenizer" else None)
    multiple = parsed.count("make-vocab-size-divisible-by", 128) * parsed.count("tensor-model-parallel-size", 1)
    return math.ceil((words + (tokenizer == "NullTokenizer")) / multiple) * multiple


def _printed(text: str) -> dict[str, set[str]]:
    """Return printed arguments, without those that are off or have no value."""
    flags = {name.replace("_", "-"): {value} for name, value in _PRINTED.findall(text)}
    if flags.pop("add-bias-linear", {""}) & {"False", "false"}:
        flags["disable-bias-linear"] = {"True"}
    return {flag: values for flag, values in flags.items() if not values & {"False", "false", "None", "null"}}


def _script(text: str) -> dict[str, set[str]]:
    """Return the values of all flags in a script; variables with a single value are substituted."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ")
    variables: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        default = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", word := value.strip("\"'"))  # TP=${TP:-8}
        variables.setdefault(name, set()).add(default[1] if default else word)

    def value_of(match: re.Match[str]) -> str:
        values = variables.get(match[1] or match[3], {match[2]} if match[2] else set())
        return next(iter(values)) if len(values) == 1 and not any("--" in value for value in values) else match[0]

    for _ in range(5):  # variables can refer to variables
        text = _VARIABLE.sub(value_of, text)
    flags: dict[str, set[str]] = {}
    for name, value in _FLAG.findall(re.sub(r"[\"'()]", " ", text)):
        if value != "false":  # of YAML
            flags.setdefault(name.replace("_", "-"), set()).add(value.rstrip("\\;"))
    return flags


@dataclass
class _Arguments:
    """Values by flag, without the dashes; a flag with several values is an error where it is used."""

    source: SourceText
    flags: dict[str, set[str]]

    def error(self, flag: str, reason: str) -> ConfigError:
        return self.source.error(None, f"--{flag}: {reason}")

    def text(self, flag: str, default: str | None = None) -> str:
        values = sorted(self.flags.get(flag, () if default is None else (default,)))
        if len(values) != 1:
            more = f", or the option +{_OPTIONS[flag]}=" if flag in _OPTIONS else ""
            what = f"has several values, {' and '.join(values)}; keep one" if values else f"is missing; add it{more}"
            raise self.error(flag, what)
        return values[0]

    def count(self, flag: str, default: int | None = None) -> int:
        value = self.text(flag, None if default is None else str(default))
        if not value.isdecimal() or len(value) > 10 or not 1 <= int(value) <= 10**9:
            why = "; replace the variable with the number" if "$" in value else ""
            raise self.error(flag, f"{shown(value)}: must be an integer from 1 to 1e9{why}")
        return int(value)
