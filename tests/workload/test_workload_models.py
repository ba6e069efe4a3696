"""Parameters, multiply-accumulates and shapes of the bundled models against the published ones."""

from __future__ import annotations

import math

import pytest

from ddlsim.workload.model import Concat, Leaf, Model, Node, Residual, Side, load_model, model_names

#: name -> (parameters, GMACs of the forward pass), as published; None where no figure was found.
#: Image models: torchvision's documentation of each weight ("num_params", "GFLOPS"); transformers: the
#: Hugging Face model cards' counts; LeNet-5 and the CIFAR CNN: their tutorials' printed summaries.
PUBLISHED: dict[str, tuple[int, float | None]] = {
    "lenet5": (61_706, None),
    "cifar-cnn": (122_570, None),
    "digits-cnn": (1_898, None),
    "shapes-cnn": (22_514, None),
    "alexnet": (61_100_840, 0.714),
    "vgg-a": (132_863_336, 7.609),
    "vgg16": (138_357_544, 15.47),
    "googlenet": (6_624_904, 1.498),
    "googlenet+aux": (13_004_888, None),
    "inception-v3": (23_834_568, 5.713),
    "inception-v3+aux": (27_161_264, None),
    "resnet18": (11_689_512, 1.814),
    "resnet18-cifar": (11_173_962, 0.556),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "resnext101-32x8d": (88_791_336, 16.414),
    "bert-base": (109_482_240, None),
    "bert-base+heads": (110_106_428, None),
    "bert-large": (335_141_888, None),
    "bert-large+heads": (336_226_108, None),
    "gpt2": (124_439_808, None),
    "gpt2-medium": (354_823_168, None),
    "gpt2-large": (774_030_080, None),
    "gpt2-xl": (1_557_611_200, None),
    "llama-7b": (6_738_415_616, None),
    "llama-13b": (13_015_864_320, None),
    "llama-70b": (68_976_648_192, None),
    "llama-3-8b": (8_030_261_248, None),
    "llama-3-70b": (70_553_706_496, None),
    "llama-3-405b": (405_853_388_800, None),
    **{
        f"llama-{size}": (n, None)
        for size, n in (
            ("2-7b", 6_738_415_616),
            ("2-13b", 13_015_864_320),
            ("2-34b", 33_743_970_304),
            ("2-70b", 68_976_648_192),
            ("3.1-8b", 8_030_261_248),
            ("3.1-70b", 70_553_706_496),
            ("3.1-405b", 405_853_388_800),
            ("3.2-1b", 1_235_814_400),
            ("3.2-3b", 3_212_749_824),
        )
    },
    "vit-b16": (86_567_656, 17.564),
    "vit-l16": (304_326_632, 61.555),
    "vit-h14": (632_045_800, 167.295),
    "olmo-3-7b": (7_298_011_136, None),
    "olmo-3-32b": (32_233_522_176, None),
    "qwen3-0.6b": (596_049_920, None),
    "qwen3-1.7b": (1_720_574_976, None),
    "qwen3-4b": (4_022_468_096, None),
    "qwen3-8b": (8_190_735_360, None),
    "qwen3-14b": (14_768_307_200, None),
    "qwen3-32b": (32_762_123_264, None),
    "mistral-7b": (7_241_732_096, None),
    "mistral-nemo-12b": (12_247_782_400, None),
    "gemma-2b": (2_506_172_416, None),
    "gemma-7b": (8_537_680_896, None),
    "gemma-2-2b": (2_614_341_888, None),
    "gemma-2-9b": (9_241_705_984, None),
    "gemma-2-27b": (27_227_128_320, None),
    "gemma-3-1b": (999_885_952, None),
    "bloom-176b": (176_247_271_424, None),
    "bloom-7b1": (7_069_016_064, None),
    "mixtral-8x7b": (46_702_792_704, None),
    "mixtral-8x22b": (140_620_634_112, None),
    "mpt-125m": (125_311_488, None),
    "mpt-350m": (355_985_408, None),
    "mpt-760m": (760_470_528, None),
    "mpt-1b": (1_315_950_592, None),
    "mpt-3b": (2_651_837_440, None),
    "mpt-7b": (6_658_859_008, None),
    "mpt-13b": (12_853_954_560, None),
    "mpt-30b": (29_975_214_080, None),
    "mpt-7b+seq=512": (6_652_567_552, None),
    "mpt-7b+seq=65536": (6_918_905_856, None),
    "vgg-19": (143_667_240, 19.632),
    "ffn": (638_433, None),
    "char-transformer": (28_316, None),  # by hand: 1,920 + 2 x 12,704 + 64 + 924
}

#: name -> (parameters, their relative error at most), where the published figure is rounded; sources in the files
ROUNDED = {
    "gpt3-125m": (125e6, 0.005),
    "gpt3-350m": (356e6, 0.005),
    "gpt3-760m": (760e6, 0.005),
    "gpt3-1.3b": (1.3e9, 0.04),
    "gpt3-2.7b": (2.7e9, 0.04),
    "gpt3-6.7b": (6.7e9, 0.01),
    "gpt3-13b": (13.0e9, 0.02),
    "gpt3-175b": (175.0e9, 0.005),
    "megatron-22b": (22e9, 0.005),
    "megatron-175b": (174.6e9, 0.0005),
    "megatron-530b": (529.6e9, 0.0005),
    "megatron-1t": (1008.0e9, 0.0005),
    "megatron-1.7b": (1.7e9, 0.03),
    "megatron-3.6b": (3.6e9, 0.015),
    "megatron-7.5b": (7.5e9, 0.01),
    "megatron-18.4b": (18.4e9, 0.003),
    "megatron-39.1b": (39.1e9, 0.0005),
    "megatron-76.1b": (76.1e9, 0.001),
    "megatron-145.6b": (145.6e9, 0.0005),
    "megatron-310.1b": (310.1e9, 0.0005),
    "megatron-core-1.7b": (1.7e9, 0.03),
    "megatron-core-16b": (16e9, 0.01),
    "megatron-core-70b": (70e9, 0.005),
    "megatron-core-177b": (177e9, 0.002),
    "megatron-core-462b": (462e9, 0.002),
    "nemotron-4-15b": (15.7e9, 0.005),  # 3.2e9 and 12.5e9
    "nemotron-4-340b": (341.0e9, 0.0002),  # 9.4e9 and 331.6e9
    "maxtext-16b": (16e9, 0.02),
    "maxtext-22b": (22e9, 0.01),
    "maxtext-32b": (32e9, 0.02),
    "maxtext-52b": (52e9, 0.01),
    "maxtext-64b": (64e9, 0.02),
    "maxtext-128b": (128e9, 0.03),
    "maxtext-256b": (256e9, 0.03),
    "maxtext-512b": (512e9, 0.03),
    "maxtext-1024b": (1024e9, 0.03),
    "amoebanet-d-18-208": (82e6, 0.01),
    "amoebanet-d-18-416": (319.0e6, 0.0001),
    "amoebanet-d-18-544": (542.7e6, 0.0001),
    "unet-6-72": (362.2e6, 0.0002),
    "unet-11-128": (2.21e9, 0.002),
    "unet-24-128": (4.99e9, 0.001),
    "overfeat-fast": (145e6, 0.007),
    "transformer-base": (65e6, 0.031),
    "transformer-big": (213e6, 0.006),
    "speech-dnn": (45.1e6, 0.001),
}

#: those without a published count, or with one that depends on the data set; tests of their own
OTHERS = {
    "dlrm", "dlrm-criteo", "dlrm-criteo-large", "dlrm-criteo-xlarge", "clicks-dlrm", "mpt-70b", "amoebanet-d", "unet",
}  # fmt: skip


def test_every_bundled_model_is_in_the_table():
    assert {name.split("+")[0] for name in PUBLISHED} | set(ROUNDED) | OTHERS == set(model_names())


@pytest.mark.parametrize(("name", "n_params", "error"), [(name, *row) for name, row in ROUNDED.items()])
def test_parameters_agree_with_rounded_ones(name: str, n_params: float, error: float):
    assert load_model(name).n_params == pytest.approx(n_params, rel=error)


@pytest.mark.parametrize(("name", "n_params"), [(name, row[0]) for name, row in PUBLISHED.items()])
def test_parameters_are_exactly_the_published_ones(name: str, n_params: int):
    model = load_model(name)
    assert model.n_params == n_params
    assert model.gradient_nbytes() == 4.0 * n_params
    assert model.gradient_nbytes(2) == 2.0 * n_params


@pytest.mark.parametrize(("name", "gmacs"), [(name, row[1]) for name, row in PUBLISHED.items() if row[1]])
def test_multiply_accumulates_agree_with_the_published_ones(name: str, gmacs: float):
    model = load_model(name)
    assert model.macs == pytest.approx(gmacs * 1e9, rel=2e-3)
    assert model.flops == 2.0 * model.macs


def test_small_models_by_hand():
    """LeNet-5: 28^2 * 6 * 25 + 10^2 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10 MACs."""
    assert load_model("lenet5").macs == 117_600 + 240_000 + 48_000 + 10_080 + 840


def test_bert_by_hand():
    """A layer on s tokens of d features: 4 s d^2 + 2 s^2 d in attention, 8 s d^2 in the two dense layers."""
    s, d = 512, 768
    pooler = d * d
    assert load_model("bert-base").macs == 12 * (12 * s * d * d + 2 * s * s * d) + pooler


def test_dlrm_exchanges_its_dense_part_only():
    """Bottom 13-512-256-64-16; 27 vectors make 27 * 26 / 2 = 351 products, so the top is 367-512-256-1."""
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 16 + 16
    top = 367 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    model = load_model("dlrm")
    assert model.gradient_nbytes() == 4.0 * (bottom + top)
    assert model.n_params == bottom + top + 16 * 33_762_577


@pytest.mark.parametrize(
    ("name", "n_tables", "gib"), [("dlrm-criteo", 32_709_138, 16), ("dlrm-criteo-large", 177_944_291, 85),
                                  ("dlrm-criteo-xlarge", 882_774_575, 421)],
)  # fmt: skip
def test_criteo_tables(name: str, n_tables: int, gib: int):
    """The source states the tables' sizes. The bottom is 13-512-256-128, the top 479-1024-1024-512-256-1, as
    128 + 27 * 26 / 2 = 479."""
    model = load_model(name)
    widths = ((13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1))
    dense = sum(n_in * n_out + n_out for n_in, n_out in widths)
    assert model.gradient_nbytes() == 4.0 * dense
    assert model.n_params == dense + 128 * n_tables
    assert round(4 * 128 * n_tables / 2**30) == gib


@pytest.mark.parametrize(
    ("model", "layer", "shape"),
    [
        ("alexnet", "conv1", (64, 55, 55)),
        ("alexnet", "max_pool3", (256, 6, 6)),
        ("vgg16", "conv5.2.relu", (512, 14, 14)),
        ("resnet50", "max_pool1", (64, 56, 56)),
        ("resnet50", "layer2.0.conv2", (128, 28, 28)),
        ("resnet50", "layer2.0.shortcut.conv", (512, 28, 28)),
        ("resnet152", "layer3.35.conv3", (1024, 14, 14)),
        ("googlenet", "inception3a.concat1", (256, 28, 28)),
        ("googlenet", "max_pool1", (64, 56, 56)),  # ceil mode: floor would give 55
        ("inception-v3", "mixed6a.concat1", (768, 17, 17)),
        ("inception-v3", "mixed7c.concat1", (2048, 8, 8)),
        ("bert-large", "layer.23.attention1", (512, 1024)),
        ("ffn", "conv_lom", (1, 33, 33, 33)),
        ("overfeat-fast", "max_pool2", (256, 12, 12)),
        ("overfeat-fast", "max_pool3", (1024, 6, 6)),
        ("unet", "level0.skip.branch1.level1.skip.concat1", (256, 96, 96)),
        ("unet", "level0.skip.concat1", (128, 192, 192)),
        ("amoebanet-d", "stem2.cell.branch1.concat1", (384, 56, 56)),
        ("amoebanet-d", "avg_pool1", (4096, 1, 1)),
    ],
)
def test_shapes(model: str, layer: str, shape: tuple[int, ...]):
    assert {found.name: found.out_shape for found in load_model(model).layers}[layer] == shape


#: models whose structure is walked: of families with sizes the smallest
STRUCTURES = sorted(
    {
        name
        for name in PUBLISHED
        if not name.startswith(("gpt2-", "llama-", "mpt-", "mixtral-8x22b", "qwen3-", "bloom-"))
    }
    | {
        "llama-7b",
        "qwen3-0.6b",
        "bloom-7b1",
        "mpt-125m",
        "transformer-base",
        "amoebanet-d",
        "unet",
        "overfeat-fast",
        "dlrm-criteo",
    }
)


def _leaves(nodes: tuple[Node, ...]) -> list[int]:
    """Return the layer indices that a walk of the structure meets, joins after what they join."""
    found: list[int] = []
    for node in nodes:
        match node:
            case Leaf(index=index):
                found.append(index)
            case Residual(body=body, shortcut=shortcut, index=index):
                found += [*_leaves(body), *_leaves(shortcut), index]
            case Concat(branches=branches, index=index):
                found += [*(i for branch in branches for i in _leaves(branch)), index]
            case Side(body=body):
                found += _leaves(body)
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_structure_holds_every_layer_once_in_order(name: str):
    model = load_model(name)
    assert _leaves(model.structure) == list(range(len(model.layers)))


def _check_flow(model: Model, nodes: tuple[Node, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Walk the graph as an executor would; return the output shape."""
    for node in nodes:
        match node:
            case Leaf(index=index):
                assert model.layers[index].in_shape == shape
                shape = model.layers[index].out_shape
            case Residual(body=body, shortcut=shortcut):
                out = _check_flow(model, body, shape)
                assert _check_flow(model, shortcut, shape) == out
                shape = out
            case Concat(branches=branches, index=index):
                parts = [_check_flow(model, branch, shape) for branch in branches]
                shape = (sum(part[0] for part in parts), *parts[0][1:])
                assert model.layers[index].out_shape == shape
            case Side(body=body):
                _check_flow(model, body, shape)
    return shape


@pytest.mark.parametrize("name", STRUCTURES)
def test_shapes_flow_through_the_structure(name: str):
    model = load_model(name)
    out = _check_flow(model, model.structure, model.input_shape)
    if model.input_shape == (3, 224, 224):
        assert out == (1000,)
    for layer in model.layers:
        assert sum(n for _, n in layer.tensors) == layer.n_params
        assert layer.activation_nbytes == 4.0 * math.prod(layer.out_shape)


def test_only_the_first_layer_of_a_chain_needs_no_input_gradient():
    layers = load_model("resnet50").layers
    assert [layer.name for layer in layers if not layer.input_grad] == ["conv1"]


def test_a_model_passes_through_and_a_path_is_read(tmp_path):
    model = load_model("lenet5")
    assert load_model(model) is model
    path = tmp_path / "mine.toml"
    path.write_text('title = "Mine"\ninput = [4]\nlayers = [{ type = "dense", units = 3 }]\n')
    assert load_model(path).n_params == 15
    assert load_model(str(path)).name == "mine"
