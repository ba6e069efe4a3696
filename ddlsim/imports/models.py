"""Models that other tools describe, told apart by what they contain.

===================================  ================================================================================
a configuration of transformers      JSON with ``model_type`` or ``architectures``; also a folder with a ``config.json``
arguments of Megatron-LM             a text or script with ``--num-layers``, or the list of arguments in its log
a table of tensors                   CSV with the columns name and shape, JSON, or the header of ``.safetensors``
===================================  ================================================================================

A source is a path or the text itself; options follow behind a plus, as for model files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ddlsim.bundled import split_options
from ddlsim.errors import ConfigError, shown
from ddlsim.imports.decoders import Read
from ddlsim.imports.hugging_face import is_config, read_config
from ddlsim.imports.json_values import Node, parse_json
from ddlsim.imports.megatron import is_megatron, read_megatron
from ddlsim.imports.tensors import is_csv, read_csv, read_json, safetensors_header
from ddlsim.imports.text import SourceText, read_text
from ddlsim.workload.model import Model
from ddlsim.workload.model_build import model_of

#: endings of files that are read; TOML is ddlsim's own
SUFFIXES = (".json", ".sh", ".txt", ".log", ".args", ".yaml", ".yml", ".csv", ".safetensors")
#: how errors call a text that is no file
TEXT = Path("model")
#: what no path has
_CONTENT = re.compile(r"^\s*\{|\n|(?:^|\s)--[a-z]|^Namespace\(")
_OPTIONS = re.compile(r"((?:\+\w+=[^+\s]*)*)\s*$")


def is_foreign(source: str | Path) -> bool:
    """Return whether a source of a model is for this module."""
    if isinstance(source, str) and _CONTENT.search(source):
        return True
    stem, _ = split_options(str(source))
    is_path = isinstance(source, Path) or "/" in stem
    return stem.endswith(SUFFIXES) or (is_path and os.path.isfile(os.path.join(stem, "config.json")))


def import_model(source: str | Path) -> Model:
    """Return the model that a file or a text of another tool describes.

    Raises ConfigError, in one line with file, field and value, for what cannot be read, and for a model that cannot be
    simulated, with its parameters where they are counted.
    """
    text, options = _text(source)
    if isinstance(text, Node):
        read: Read | Model = read_json(text)
    elif text.text.lstrip()[:1] in ("{", "["):
        root = parse_json(text)
        if not is_config(root.value) and is_megatron(root.value):
            read = read_megatron(text, root.value)
        else:
            read = read_config(root) if is_config(root.value) else read_json(root)
    elif is_megatron(text.text):
        read = read_megatron(text)
    elif is_csv(text):
        read = read_csv(text)
    else:
        start = shown(" ".join(text.text[:200].split())[:60])
        what = "no config.json, arguments of Megatron-LM or table of tensors (name, shape)"
        raise text.error(None, f"begins with {start}, which is {what}; models of ddlsim are .toml files")
    where = str(text.path) if isinstance(text, SourceText) else text.place.rstrip(": ")
    if isinstance(read, Model):
        if options:
            raise ConfigError(f"{where}: is a table of tensors, which has no options; leave +{options[0]} out")
        return read
    model = model_of(read.table, where, read.kind, options)
    return dataclasses.replace(model, name=_name(model, read), notes=_notes(model, read))


def _text(source: str | Path) -> tuple[SourceText | Node, Sequence[str]]:
    """Return the text, or the header of a file of tensors, and the options behind it."""
    if isinstance(source, str) and source.lstrip()[:1] == "{":
        try:
            _, end = json.JSONDecoder().raw_decode(source.lstrip())
        except (ValueError, RecursionError):
            return SourceText(TEXT, source), ()  # the reader's error names the line
        text, rest = source.lstrip()[:end], source.lstrip()[end:].strip()
        if rest and not rest.startswith("+"):
            raise ConfigError(f"{TEXT}: {shown(rest)} follows the JSON; options begin with a plus, like +seq=4096")
        return SourceText(TEXT, text), rest.split("+")[1:]
    if isinstance(source, str) and _CONTENT.search(source) and not os.path.isfile(split_options(source)[0]):
        options = _OPTIONS.search(source)
        assert options is not None  # it also fits nothing
        return SourceText(TEXT, source[: options.start()]), options[1].split("+")[1:]
    stem, given = split_options(str(source))
    path = Path(stem) / "config.json" if os.path.isdir(stem) else Path(stem)
    if path.suffix == ".safetensors":
        return safetensors_header(path), given
    return read_text(path), given


def _name(model: Model, read: Read) -> str:
    settings = "".join(f"+{option}" for option in model.options)
    return f"{read.kind}-{model.n_params / 1e9:.2f}b{settings}"


def _notes(model: Model, read: Read) -> tuple[str, ...]:
    """Return what a reader of results should know of the model."""
    notes, seq = [], model.input_shape[0]
    if seq < read.reads and not any(option.startswith("seq=") for option in model.options):
        notes.append(
            f"{model.title}: the model reads up to {read.reads:,}; set +seq=... if it is trained on longer ones"
        )
    if 0 < read.window < seq:
        notes.append(f"layers that attend to the last {read.window:,} tokens only are taken to cost full attention")
    if read.experts:
        sizes = [n for layer in model.layers for name, n in layer.tensors if layer.type == "mixture_of_experts"]
        routers = [n for layer in model.layers for name, n in layer.tensors if name == "router.weight"]
        active = model.n_params - (sum(sizes) - sum(routers)) // read.experts * (read.experts - read.active)
        notes.append(f"a token uses {active:,} of the {model.n_params:,} parameters")
    return tuple(notes)
