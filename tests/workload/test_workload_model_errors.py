"""Bad model files: one line that names file, layer, field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlsim.errors import ConfigError
from ddlsim.workload.model import load_model

HEAD = 'title = "T"\ninput = [3, 8, 8]\n'

#: (text of the file, the message after "FILE: ")
BAD = [
    ("layers = [", "not valid TOML"),
    ("input = [3]\nlayers = []", "key 'title' is missing; add title = ..."),
    (HEAD + "layers = []", "layers = []: list at least one layer"),
    (HEAD + 'layers = [{ type = "relu" }]\nlayer = 1', "unknown key 'layer'; did you mean 'layers'?"),
    (
        'title = "T"\ninput = [3, 0]\nlayers = [{ type = "relu" }]',
        "input = [3, 0]: must have 1 to 6 dimensions, each of size 1 to 1000000000",
    ),
    (HEAD + "trainable = 1\nlayers = []", "trainable = 1: must be True or False"),
    (HEAD + "layers = [3]", 'layers[0]: must be a table like {type = "relu"}, not 3'),
    (
        HEAD + "layers = [{ units = 3 }]",
        'layers[0]: type or block is missing; add type = "conv" or similar',
    ),
    (HEAD + 'layers = [{ type = "cov" }]', "layers[0]: unknown layer type 'cov'; did you mean 'conv'?"),
    (
        HEAD + 'layers = [{ type = "conv", channels = 4, kernal = 3 }]',
        "layers[0] (conv 'conv1'): unknown key 'kernal'; did you mean 'kernel'?",
    ),
    (
        HEAD + 'layers = [{ type = "conv", name = "stem", channels = 4 }]',
        "layers[0] (conv 'stem'): key 'kernel' is missing; add kernel = ...",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = "4", kernel = 3 }]',
        "layers[0] (conv 'conv1'): channels = '4': must be a positive integer",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = 4, kernel = 2.5 }]',
        "layers[0] (conv 'conv1'): kernel = 2.5: must be an integer or a list",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = true, kernel = 3 }]',
        "layers[0] (conv 'conv1'): channels = True: must be a positive integer",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = -4, kernel = 3 }]',
        "layers[0] (conv 'conv1'): channels = -4: must be a positive integer",
    ),
    (
        HEAD + 'layers = [{ type = "dropout", rate = nan }]',
        "layers.0.rate = nan: is no number",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = 4, kernel = [3, 3, 3] }]',
        "layers[0]: conv 'conv1': kernel = [3, 3, 3]: got 3 numbers, expected one for each of the 2 spatial dimensions",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = 4, kernel = 9 }]',
        "layers[0]: conv 'conv1': kernel (9, 9) is larger than the input (8, 8) with padding (0, 0)",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = 4, kernel = 3, groups = 2 }]',
        "layers[0]: conv 'conv1': groups = 2: must divide both the number of input channels (3)",
    ),
    (
        HEAD + 'layers = [{ type = "dense", units = 4 }]',
        "layers[0]: dense 'dense1': the input must have shape (features,) or (tokens, features), not (3, 8, 8)",
    ),
    (
        HEAD + 'layers = [{ type = "flatten" }, { type = "max_pool", kernel = 2 }]',
        "layers[1]: max_pool 'max_pool1': the input must have shape (channels, height, width), not (192,)",
    ),
    (
        HEAD + 'layers = [{ type = "residual", body = [{ type = "conv", channels = 4, kernel = 1 }] }]',
        "layers[0]: residual: the output of body is (4, 8, 8), that of shortcut (3, 8, 8); make them equal",
    ),
    (
        HEAD + 'layers = [{ type = "residual", bodi = [] }]',
        "layers[0] (residual): unknown key 'bodi'; did you mean 'body'?",
    ),
    (HEAD + 'layers = [{ type = "residual" }]', "layers[0].body: must be a list of layers, not None"),
    (
        HEAD + 'layers = [{ type = "concat", branches = [[{ type = "max_pool", kernel = 2 }], [{ type = "relu" }]] }]',
        "layers[0]: concat: the branches have outputs (3, 4, 4), (3, 8, 8); all but their first dimension must be",
    ),
    (
        HEAD + 'layers = [{ type = "concat", branches = [[]] }]',
        "layers[0]: concat: branches must be a list of at least two",
    ),
    (HEAD + 'layers = [{ block = "b" }]\n[blocks.c]\nlayers = []', "layers[0]: unknown block 'b'"),
    (
        HEAD + 'layers = [{ block = "b", repeat = 0 }]\n[blocks.b]\nlayers = []',
        "layers[0]: repeat = 0: must be an integer from 1 to 10000",
    ),
    (
        HEAD + 'layers = [{ block = "b" }]\n[blocks.b]\nlayers = [{ type = "dropout", rate = "$rate" }]',
        "layers[0]: block 'b' requires 'rate'; add rate = ...",
    ),
    (
        HEAD + 'layers = [{ block = "b", rat = 1 }]\n[blocks.b]\nlayers = [{ type = "dropout", rate = "$rate" }]',
        "layers[0] (block 'b'): unknown parameter 'rat'; did you mean 'rate'?",
    ),
    (
        HEAD + 'layers = [{ block = "b" }]\n[blocks.b]\nlayers = [{ block = "b" }]',
        "does a block contain itself?",
    ),
    (
        HEAD + 'layers = [{ block = "b" }]\n[blocks.b]\nlayer = []',
        "blocks.b: unknown key 'layer'; did you mean 'layers'?",
    ),
    (
        HEAD + 'layers = [{ block = "b", repeat = 10000 }]\n[blocks.b]\n'
        'layers = [{ type = "relu" }, { type = "relu" }]',
        "the model has more than 10000 layers; check the values of repeat",
    ),
    (
        HEAD + 'layers = [{ type = "relu", name = "a" }, { type = "relu", name = "a" }]',
        "a: two layers have this name; rename one of them",
    ),
    (
        HEAD + 'layers = [{ block = "a" }]\n[blocks.a]\nlayers = [{ block = "b", repeat = 10000 }]\n'
        "[blocks.b]\nlayers = []",
        "the model has more than 10000 blocks; check the values of repeat",
    ),
    (
        HEAD + 'layers = [{ type = "dense", units = 1000000000000 }]',
        "units = 1000000000000: must be at most 1000000000",
    ),
    (HEAD + "layers = " + "[" * 100_000, "nested too deeply"),
    (
        HEAD.replace("input = ", "input = [1, 999999999, 999999999]  #") + 'layers = [{ type = "flatten" }]',
        "input = [1, 999999999, 999999999]: a sample has 1e+18 elements, more than 1e+13; correct the sizes",
    ),
    (
        HEAD + 'layers = [{ type = "flatten" }, { type = "dense", units = 999999999 }, '
        '{ type = "dense", units = 999999999 }]',
        "dense2: 1e+18 parameters up to this layer exceed the limit of 1e+14; correct the sizes",
    ),
    (
        HEAD + 'layers = [{ type = "conv", channels = 9, kernel = 1, padding = 999999999 }]',
        "outputs per sample exceed the limit of 1e+13",
    ),
    (
        HEAD
        + 'layers = [{ block = "b", repeat = 10000 }]\n[blocks.b]\nlayers = ['
        + '{ type = "relu", option = "x" },' * 11
        + "]",
        "the model has more than 100000 entries; check the values of repeat",
    ),
    (HEAD + 'layers = [{ type = "batch_norm", eps = nan }]', "layers.0.eps = nan: is no number"),
    (HEAD + 'layers = [{ type = "relu", option = 3 }]', "layers[0]: option = 3: must be a name"),
    (
        HEAD + 'layers = [{ type = "relu", name = 3 }]',
        "layers[0]: name = 3: must be a non-empty string",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_bad_file(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"unknown model 'zzz'; known: alexnet, .* and \d+ more$"):
        load_model("zzz")
    for name in ("my.pt", "my.pt+option", "dir/my.bin", "model.py", "net.h5", Path("net.onnx")):
        with pytest.raises(ConfigError, match=r"models cannot be loaded from checkpoints or code; .*see: ddlsim"):
            load_model(name)
    with pytest.raises(ConfigError, match=r"unknown model 'gpt3-9\.7b'; did you mean 'gpt3-6\.7b'"):
        load_model("gpt3-9.7b")
    with pytest.raises(ConfigError, match="unknown model 'resnet51'; did you mean 'resnet50'"):
        load_model("resnet51")
    with pytest.raises(ConfigError, match=r"googlenet\.toml: unknown option 'aus'; did you mean 'aux'"):
        load_model("googlenet+aus")
    with pytest.raises(ConfigError, match=r"alexnet\.toml: unknown parameter 'layers'; known: none$"):
        load_model("alexnet+layers=2")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load_model(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="invalid UTF-8"):
        load_model(binary)
