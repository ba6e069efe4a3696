"""The integer program of Zou et al. 2017: an algorithm for each convolution within a memory bound."""

import itertools
import random

import pytest

import ddlsim
from ddlsim.planner.convolutions import Algorithm, choose_algorithms, convolution_options


def brute_force(options, memory):
    """Return the least seconds of all choices that fit."""
    fitting = (
        sum(algorithm.seconds for algorithm in choice)
        for choice in itertools.product(*options.values())
        if sum(algorithm.nbytes for algorithm in choice) <= memory
    )
    return min(fitting)


@pytest.mark.parametrize("seed", range(20))
def test_four_layers_against_all_choices(seed):
    draw = random.Random(seed)
    options = {
        f"conv{i}": tuple(
            Algorithm(f"a{j}", draw.uniform(1e-4, 1e-2), 0.0 if j == 0 else draw.uniform(1e6, 1e9))
            for j in range(draw.randint(1, 5))
        )
        for i in range(4)
    }
    for memory in (0.0, 3e8, 1e9, 4e9):
        chosen = choose_algorithms(options, memory)
        assert list(chosen) == list(options)
        assert sum(algorithm.nbytes for algorithm in chosen.values()) <= memory * (1 + 1e-9)
        least = brute_force(options, memory)
        assert sum(algorithm.seconds for algorithm in chosen.values()) == pytest.approx(least, rel=1e-9)


def test_vgg_by_hand():
    """conv 64 -> 64, 224 x 224, 3 x 3, 8 images: 2 * 9 * 64 * 64 * 224^2 * 8 operations, three passes."""
    model, device = ddlsim.load_model("vgg16"), ddlsim.load_device("v100")
    rate, pixels = 0.626 * 15.7e12, 224 * 224
    options = {algorithm.name: algorithm for algorithm in convolution_options(model, device, 8)["conv1.1.conv"]}
    flops = 2.0 * 9 * 64 * 64 * pixels * 8
    assert options["implicit_gemm"].seconds == pytest.approx(3 * flops / rate, rel=1e-12)
    assert options["implicit_gemm"].nbytes == 0.0
    winograd = 4.0 * (4 * 8 * pixels * 128 + 16 / 9 * 64 * 64 * 9)
    assert options["winograd"].nbytes == pytest.approx(winograd, rel=1e-12)
    assert options["fft"].nbytes == pytest.approx(4.0 * 226 * 226 * (8 * 64 + 64 * 64 + 8 * 64), rel=1e-12)


def test_more_memory_is_never_slower():
    """Without any every layer goes without a workspace; with all each has its fastest algorithm."""
    options = convolution_options(ddlsim.load_model("googlenet"), ddlsim.load_device("v100"), 64)
    fastest = {layer: min(algorithms, key=lambda a: a.seconds) for layer, algorithms in options.items()}
    seconds = []
    for memory in ("0 B", "256 MiB", "1 GiB", "1 TiB"):
        chosen = choose_algorithms(options, memory)
        seconds.append(sum(algorithm.seconds for algorithm in chosen.values()))
    assert all(algorithm.nbytes == 0.0 for algorithm in choose_algorithms(options, 0.0).values())
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[1] > seconds[-1]
    assert seconds[-1] == pytest.approx(sum(algorithm.seconds for algorithm in fastest.values()), rel=1e-12)


def test_what_cannot_be_chosen():
    needs = {"conv1": (Algorithm("gemm", 1e-3, 2e9),)}
    with pytest.raises(ddlsim.ConfigError, match="the smallest workspaces need 2 GB in total"):
        choose_algorithms(needs, "1 GB")
    with pytest.raises(ddlsim.ConfigError, match=r"options\['conv1'\] is empty"):
        choose_algorithms({"conv1": ()}, "1 GB")
    assert choose_algorithms({}, "1 GB") == {}
