"""Import of models described by other tools, recognised by their content.

=================================  ==================================================================================
a configuration of transformers    JSON with ``model_type`` or ``architectures``; also a folder with a ``config.json``
arguments of Megatron-LM           ``--num-layers`` or similar, or ``num_layers`` and ``hidden_size`` with their values
a table of tensors                 JSON, CSV with the columns name and shape, or the header of ``.safetensors``
=================================  ==================================================================================

A source is a path or the text itself; options follow after a plus, as for model files.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.decoders import Read
from ddlsim.imports.hugging_face import is_config, read_config
from ddlsim.imports.json_values import Node, parse_json
from ddlsim.imports.megatron import is_megatron, read_megatron
from ddlsim.imports.tensors import is_csv, read_csv, read_json, safetensors_header
from ddlsim.imports.text import SourceText, read_text
from ddlsim.workload.model import Model
from ddlsim.workload.model_build import CONTENT, model_of

#: the options behind a text
_OPTIONS = re.compile(r"((?:\+\w+=[^+\s]*)*)\s*$")


def import_model(source: str | Path, stem: str, options: list[str]) -> Model:
    """Return the model that a file or a text of another tool describes.

    stem, options  the parts of the source if it is a path with options
    """
    text, options = _content(source, stem, options)
    read = _read(text, [option.partition("=")[0] for option in options])
    where = str(text.path) if isinstance(text, SourceText) else text.place.rstrip(": ")
    if isinstance(read, Model):
        if options:
            raise ConfigError(f"{where}: a table of tensors accepts no options; remove +{options[0]}")
        return read
    made_of = {"title": f"{read.kind} of $layers layers", "sources": [f"{where}, read as {read.kind}"]}
    model = model_of({**read.table, **made_of}, where, read.kind, options)
    name = "+".join((f"{read.kind}-{model.n_params / 1e9:.2f}b", *model.options))
    return dataclasses.replace(model, name=name, notes=_notes(model, read))


def _content(source: str | Path, stem: str, options: list[str]) -> tuple[SourceText | Node, list[str]]:
    """Return the text, or the header of a tensor file, and the options after it."""
    if isinstance(source, str) and CONTENT.search(source) and not os.path.isfile(stem):
        match = _OPTIONS.search(source)
        assert match is not None  # always matches, possibly nothing
        return SourceText(Path("model"), source[: match.start()]), match[1].split("+")[1:]
    path = Path(stem) / "config.json" if os.path.isdir(stem) else Path(stem)
    return (safetensors_header(path) if path.suffix == ".safetensors" else read_text(path)), options


def _read(text: SourceText | Node, options: list[str]) -> Read | Model:
    if isinstance(text, Node):
        return read_json(text)
    root = parse_json(text) if text.text.lstrip()[:1] in ("{", "[") else None
    if root is not None and is_config(root.value):
        return read_config(root)
    if is_megatron(text.text):
        return read_megatron(text, options)
    if root is not None:
        return read_json(root)
    if is_csv(text):
        return read_csv(text)
    kinds = "a config.json, Megatron-LM arguments or a table of tensors (name, shape)"
    start = shown(" ".join(text.text[:200].split())[:60])
    raise text.error(None, f"begins with {start}, but must be {kinds}; ddlsim's own models are .toml files")


def _notes(model: Model, read: Read) -> tuple[str, ...]:
    """Return notes on the assumptions about the model."""
    notes, seq = [], model.input_shape[0]
    if seq < read.reads and not any(option.startswith("seq=") for option in model.options):
        notes.append(f"assuming sequences of {seq:,} tokens; the model supports up to {read.reads:,} (set +seq=...)")
    if 0 < read.window < seq:
        notes.append(
            f"layers with a sliding window of {read.window:,} tokens are simulated with the cost of full attention"
        )
    of_experts = [dict(layer.tensors) for layer in model.layers if layer.type == "mixture_of_experts"]
    if of_experts:
        experts, active = (read.table["parameters"][name] for name in ("experts", "active"))
        idle = sum(n for tensors in of_experts for name, n in tensors.items() if name != "router.weight")
        used = model.n_params - idle // experts * (experts - active)
        notes.append(f"each token uses {used:,} of the {model.n_params:,} parameters")
    return tuple(notes)
