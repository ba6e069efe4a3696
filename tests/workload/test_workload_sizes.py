"""Parameters and sizes of model files: what names and values mean, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError
from ddlsim.workload.model import load_model, model_names

FILE = """
title = "Mine $size of $width"
input = ["$n"]
layers = [
  { block = "unit", repeat = "$depth" },
  { type = "dense", units = "$width / 2 + 1" },
]

[blocks.unit]
layers = [{ type = "dense", units = "2 * $width - $n" }]

[parameters]
n = 4
depth = 1

[sizes]
s = { width = 6 }
l = { width = 8, depth = 3 }
"""


def _file(tmp_path: Path, text: str = FILE) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_sizes_and_settings(tmp_path):
    path = _file(tmp_path)
    small = load_model(f"{path}+s")
    assert [layer.out_shape for layer in small.layers] == [(8,), (4,)]
    assert (small.name, small.title, small.options) == ("mine-s", "Mine s of 6", ())
    large = load_model(f"{path}+l+n=3+depth=2")
    assert (large.input_shape, [layer.out_shape for layer in large.layers]) == ((3,), [(13,), (13,), (5,)])
    assert (large.name, large.options) == ("mine-l+n=3+depth=2", ("n=3", "depth=2"))
    free = load_model(f"{path}+width=6")
    assert (free.name, free.title) == ("mine+width=6", "Mine of 6")
    assert free.layers == small.layers


def test_names_of_bundled_sizes():
    """A file whose parameters have no values of their own is there by its sizes only."""
    names = model_names()
    assert {"gpt2", "gpt2-xl", "mpt-7b", "llama-3-8b", "dlrm", "dlrm-criteo", "dlrm-criteo-large"} <= set(names)
    assert not {"mpt", "llama", "megatron", "transformer"} & set(names)
    assert "mpt" in bundled_files("models")
    assert load_model("gpt2-xl").name == "gpt2-xl"
    assert load_model("gpt2+xl") == load_model("gpt2-xl")
    assert load_model("dlrm-criteo-large").name == "dlrm-criteo-large"


def test_parameters_that_follow_from_others():
    """Any model of a family, from the numbers of its table alone."""
    numbers = "layers=32+dim=4096+hidden=28672+heads=64"
    assert load_model(f"maxtext+{numbers}+head_size=128").layers == load_model("maxtext-16b").layers
    plain = load_model("maxtext+layers=48+dim=6144+hidden=24576+heads=24+head_size=256+mlp=ungated")
    assert plain.layers == load_model("maxtext-22b").layers
    assert load_model(f"llama+{numbers}").layers[2].head_size == 64  # 4096 / 64, and as many key-value heads as heads
    assert load_model(f"llama+{numbers}+head_size=128").n_params == load_model("maxtext-16b").n_params
    tied = load_model("llama-7b+output=tied_dense")
    assert load_model("llama-7b").n_params - tied.n_params == 32000 * 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mlp=plain", "unknown block 'plain'; known: decoder, gated, ungated"),
        ("head_size=big", "head_size = 'big': must be a number"),
        ("kv_heads=one", "kv_heads = 'one': must be a number"),
        ("kv_heads=5", "kv_heads = 5: must divide heads = 64"),
    ],
)
def test_values_that_a_family_cannot_have(options: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_model(f"maxtext-16b+{options}")
    with pytest.raises(ConfigError, match=r"parameters: '\$dim / \$heads' is not an integer for dim = 100, heads = 3"):
        load_model("llama-7b+dim=100+heads=3")


def test_a_bundled_model_is_read_once_and_a_file_every_time(tmp_path):
    assert load_model("gpt2-xl") is load_model("gpt2-xl")
    path = _file(tmp_path)
    assert load_model(f"{path}+s") is not load_model(f"{path}+s")
    _file(tmp_path, FILE.replace("width = 6", "width = 10"))
    assert load_model(f"{path}+s").layers[-1].out_shape == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", r"mine.toml: width has no value; choose a size \(\+s, \+l\) or add \+width=\.\.\."),
        ("+s+l", "'s' and 'l' are both sizes; choose one"),
        ("+s+wdth=3", "unknown parameter 'wdth'; did you mean 'width'"),
        ("+s+xl", "unknown option 'xl'; did you mean 'l'"),
        ("+s+n=four", "n = 'four': must be a number, such as n=1024"),
        ("+s+n=", "n = '': must be a number"),
        ("+s+n=0", r"input = \[0\]: must have 1 to 6 dimensions"),
        ("+s+n=1.5", r"input = \[1.5\]: must have 1 to 6 dimensions"),
        ("+s+width=7", r"layers: '\$width / 2 \+ 1' is not an integer for width = 7"),
        ("+s+width=2.0", r"'\$width / 2 \+ 1' requires an integer, but width = 2.0"),
        ("+s+n=20", "units = -8: must be a positive integer"),
        ("+s+depth=0", "repeat = 0: must be an integer from 1"),
        ("+s+depth=true", "repeat = True: must be an integer|repeat = true: must be an integer"),
    ],
)
def test_options_that_cannot_be(tmp_path, options: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_model(_file(tmp_path) + options)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("$width / 2 + 1", "$width ** 9", "is not an integer expression; use one such as"),
        ("$width / 2 + 1", "$width / 0", "is not an integer for width = 6"),
        ("$width / 2 + 1", "len($width)", "is not an integer expression"),
        ("$width / 2 + 1", "$width +", "is not an integer expression"),
        ("$width / 2 + 1", "-" * 100_000 + "$width", "is not an integer expression"),
        ("2 * $width - $n", "2 * $with - $n", "block 'unit' requires 'with'"),
        ("depth = 1", "depth = 1\nspare = 2", r"parameters: 'spare' is not used; write \"\$spare\""),
        ("[sizes]", "[size]", "unknown key 'size'; did you mean 'sizes'"),
        ('input = ["$n"]', 'input = ["$m"]', r"input = \['\$m'\]: must have 1 to 6 dimensions"),
        ("s = { width = 6 }", "s = 6", r"sizes.*must be a mapping"),
    ],
)
def test_files_that_cannot_be(tmp_path, old: str, new: str, message: str):
    text = FILE.replace(old, new)
    assert text != FILE
    with pytest.raises(ConfigError, match=message):
        load_model(_file(tmp_path, text) + "+s")


def test_unknown_names_are_answered_with_the_nearest():
    pairs = (("gpt2-xxl", "gpt2-xl"), ("llama-7", "llama-7b"), ("vgg19", "vgg-19"), ("gpt3-175", "gpt3-175b"))
    for name, nearest in pairs:
        with pytest.raises(ConfigError, match=f"unknown model '{name}'; did you mean '{nearest}'"):
            load_model(name)
    with pytest.raises(ConfigError, match=r"dim has no value; choose a size \(mpt-125m, .*mpt-70b\) or add \+dim="):
        load_model("mpt")


def test_an_empty_branch_is_the_input_itself(tmp_path):
    """As in a U-Net: what skips the deeper levels."""
    text = """
title = "Mine"
input = [2, 4, 4]
layers = [
  { type = "concat", branches = [[{ type = "max_pool", kernel = 2 }, { type = "upsample", scale = 2 }], []] },
]
"""
    model = load_model(_file(tmp_path, text))
    assert model.layers[-1].out_shape == (4, 4, 4)
