"""`fits`: terms as published, remedies that keep their promise, words that a user can type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from draws import slow
from typer.testing import CliRunner

import ddlsim
from ddlsim import ConfigError, cli, fits
from ddlsim.readable import size
from ddlsim.workload.memory import Holding, memory_of

GIB = 2.0**30


def asked(change: str) -> dict[str, object]:
    """The arguments that a remedy names."""
    return dict(eval(f"dict({change})"))


@pytest.mark.parametrize(
    "call",
    [
        ("gpt2-xl", "a100-40g", 8, "fp16", "adam"), ("resnet50", "v100", 512), ("dlrm-criteo", "v100", 64),
        ("llama-7b", "a100-40g", 1, "bf16", "adam"), slow(("gpt3-175b", "a100-40g", 2, "fp16", "adam")),
        ("unet", "k80", 64, "fp32", "sgd"),
    ],
    ids=lambda call: call[0],
)  # fmt: skip
def test_remedies_do_what_they_say(call: tuple[object, ...]) -> None:
    """Asked again with a remedy's arguments, the answer is the memory that it names, and whether that fits."""
    answer = fits(*call)  # type: ignore[arg-type]
    assert not answer
    assert answer.memory.total > answer.capacity
    assert answer.remedies
    names = ("model", "device", "batch_size", "precision", "optimizer")
    for remedy in answer.remedies:
        again = fits(**{**dict(zip(names, call, strict=False)), **asked(remedy.change)})  # type: ignore[arg-type]
        assert again.memory == remedy.memory
        assert bool(again) == remedy.fits
        assert remedy.saves == pytest.approx(answer.memory.total - again.memory.total)
        assert remedy.saves > 0.0
    order = [remedy.fits for remedy in answer.remedies]
    assert order == sorted(order, reverse=True)
    saved = [remedy.saves for remedy in answer.remedies if not remedy.fits]
    assert saved == sorted(saved, reverse=True)


@pytest.mark.slow
def test_several_remedies_are_put_together_where_none_is_enough() -> None:
    question = {"batch_size": 2, "precision": "fp16", "optimizer": "adam"}
    first, *others = fits("gpt3-175b", "a100-80g", **question).remedies  # type: ignore[arg-type]
    assert first.fits
    assert not any(remedy.fits for remedy in others)
    together = asked(first.change)
    assert set(together) == {"recompute", "zero", "shards"}
    for left_out in ({"recompute"}, {"zero", "shards"}):  # and none of them is too much
        fewer = {name: value for name, value in together.items() if name not in left_out}
        assert not fits("gpt3-175b", "a100-80g", **{**question, **fewer})  # type: ignore[arg-type]


def test_ranks_without_zero_are_noted() -> None:
    """The number of ranks affects only the remedies, of which a model that fits has none."""
    few, many = fits("gpt2", "a100-40g"), fits("gpt2", "a100-40g", shards=8)
    assert few.memory == many.memory
    assert "(each of 8 ranks stores all of it: no ZeRO) fits on a100-40g" in str(many)
    assert "no ZeRO" not in str(fits("gpt2", "a100-40g", shards=8, zero=1)) + str(few)
    assert "no ZeRO" not in str(fits("dlrm", "a100-80g", shards=8))  # its tables are distributed


def test_what_fits_has_no_remedies() -> None:
    answer = fits("gpt2", "a100-40g", 8, "fp16", "adam")
    assert answer
    assert answer.remedies == ()
    stack = ddlsim.load_stack("pytorch")
    assert answer.memory == memory_of(ddlsim.load_model("gpt2"), 8, "fp16", Holding("adam", flash=True, stack=stack))
    assert answer.capacity == 40 * GIB
    needed = size(answer.memory.total)
    line = f"gpt2 with micro-batches of 8 in fp16 with adam under pytorch fits on a100-40g: needs {needed}"
    assert str(answer).splitlines()[0] == f"{line} of 42.95 GB"


def test_a_language_model_is_held_as_its_software_does() -> None:
    """bf16, Adam and fused attention unless set; ZeRO stage 3 is FSDP's, tensor groups are Megatron-LM's."""
    answer = fits("llama-3-8b", "h100", shards=64, zero=3)
    assert answer
    assert answer.question == "llama-3-8b with micro-batches of 1 in bf16 with adam under torchtitan"
    assert fits("llama-3-8b", "h100", tensor=8).question.endswith("under megatron")
    old = fits("llama-3-8b", "h100", shards=64, zero=3, flash=False)
    assert old.memory.activations > 4 * answer.memory.activations
    assert {remedy.change for remedy in old.remedies if remedy.fits} >= {"flash=True", "recompute='full'"}
    assert fits("llama-3-8b", "h100", shards=64, zero=3, stack="megatron").memory.buffers < answer.memory.buffers
    assert fits("llama-3-8b", "h100", precision="fp8").memory == fits("llama-3-8b", "h100").memory
    in_8_bits, in_16 = (fits("llama-3-8b", "h100", precision=each, stack="megatron").memory for each in ("fp8", "bf16"))
    assert in_8_bits.activations < in_16.activations
    assert fits("gpt2", "v100").question == "gpt2 with micro-batches of 1 in fp32 with momentum"


@pytest.mark.parametrize("stack", [None, "megatron-2021"])
def test_remedies_are_those_of_the_stack(stack: str | None) -> None:
    answer = fits("llama-3-8b", "a100-80g", 2, stack=stack)
    for remedy in answer.remedies:
        arguments = {"batch_size": 2, **asked(remedy.change)}
        assert fits("llama-3-8b", "a100-80g", stack=stack, **arguments).memory == remedy.memory  # type: ignore[arg-type]


def test_stages_hold_their_layers_and_live_micro_batches() -> None:
    """GPT-3 175B as published (Korthikanti et al. 2022): 12 layers a stage; the first keeps 8 micro-batches, times
    1 + 7/24 with three chunks. The activations in figure 1 are without the embedding's mask and output."""
    answer = fits(
        "megatron-175b", "a100-80g", 1, "fp16", "adam", gradient_dtype="fp32", tensor=8, pipeline=8, interleave=3,
        sequence=True, recompute="selective",
    )  # fmt: skip
    live, s, h = 8 * (1 + 7 / 24), 2048, 12288
    embedding = s * h / 8 * (1 + 2)  # mask, and what the first layer takes
    assert (answer.memory.activations - live * embedding) / GIB == pytest.approx(12.3515625, abs=0.01)
    few = fits("megatron-175b", "a100-80g", 1, "fp16", "adam", tensor=8, pipeline=8, micro_batches=2)
    many = fits("megatron-175b", "a100-80g", 1, "fp16", "adam", tensor=8, pipeline=8, micro_batches=64)
    assert many.memory.activations == pytest.approx(4 * few.memory.activations, rel=0.02)


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_interleaved_stages_hold_at_most_all_micro_batches(micro_batches: int) -> None:
    """As in a run: with one micro-batch per stage, no stage holds more than all of them."""
    split = {"tensor": 2, "pipeline": 4, "interleave": 2, "sequence": True}
    strategy = ddlsim.Parallel(data=2, micro_batch=1, sharded=True, cut="layers", **split)
    run = ddlsim.simulate("dgx-h100-pod", "llama-3-8b", strategy, 2 * micro_batches, 16, steps=1, warmup=0)
    answer = fits("llama-3-8b", "h100", zero=1, shards=2, micro_batches=micro_batches, **split)  # type: ignore[arg-type]
    assert run.memory is not None
    assert answer.memory.total == pytest.approx(run.memory.needed, rel=0.003)


@pytest.mark.parametrize("recompute", ["selective", "dots-saveable", "operators", "full"])
def test_recomputed_matrices_need_memory(recompute: str) -> None:
    """Of 32 heads with 16,384 tokens in 16 bits, 17.2 GB at a time, unless attention is fused."""
    fused, unfused = (
        fits("llama-3-8b+seq=16384", "h100", zero=3, shards=64, recompute=recompute, flash=flash).memory
        for flash in (True, False)
    )
    assert fused.activations == unfused.activations
    assert unfused.buffers - fused.buffers > 0.0
    if recompute == "selective":
        gathered = fits("llama-3-8b+seq=512", "h100", zero=3, shards=64, recompute="full").memory.buffers
        assert unfused.buffers == pytest.approx(32 * 16384**2 * 2 + gathered, rel=0.03)


def test_a_tied_output_layer_without_its_embedding_has_a_copy() -> None:
    gpt2 = ddlsim.load_model("gpt2")
    head = replace(gpt2, layers=gpt2.layers[-1:])
    assert memory_of(head, 0, "fp16").weights == 2.0 * 768 * 50257
    assert memory_of(head, 0, "fp16", Holding(tensor=4)).weights == 2.0 * 768 * 50257 / 4


def test_on_the_command_line() -> None:
    line = ["fits", "gpt2-xl", "a100-40g", "-b", "8", "--precision", "fp16", "--optimizer", "adam"]
    result = CliRunner().invoke(cli.app, line)
    assert result.exit_code == 0
    assert result.stdout.strip() == str(fits("gpt2-xl", "a100-40g", 8, "fp16", "adam"))
    options = [
        "--zero", "3", "--shards", "8", "--tensor", "5", "--sequence", "--pipeline", "2", "--micro-batches", "4",
        "--interleave", "2", "--recompute", "selective", "--offload", "--gradient-dtype", "fp32",
    ]  # fmt: skip
    told = json.loads(CliRunner().invoke(cli.app, [*line, *options, "--json"]).stdout)
    answer = fits(
        "gpt2-xl", "a100-40g", 8, "fp16", "adam", zero=3, shards=8, tensor=5, sequence=True, pipeline=2,
        micro_batches=4, interleave=2, recompute="selective", offload=True, gradient_dtype="fp32",
    )  # fmt: skip
    assert told["total"] == answer.memory.total
    assert told["fits"] is True
    convolutions = CliRunner().invoke(cli.app, ["fits", "resnet50", "v100", "--workspace", "4 MiB"])
    assert convolutions.stdout.strip() == str(fits("resnet50", "v100", workspace="4 MiB"))


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models" / "memory.md").read_text(encoding="utf-8")
    printed = str(fits("gpt2-xl", "a100-40g", 8, "fp16", "adam")).splitlines()
    for line in printed[:14]:
        assert not line or f"    {line}\n" in page


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fits("gpt2-xxl", "a100-40g"), "unknown model 'gpt2-xxl'; did you mean 'gpt2-xl'"),
        (lambda: fits("gpt2-xl", "a100"), "unknown device 'a100'; did you mean 'a100-"),
        (lambda: fits("gpt2-xl", "a100-40g", 0), "batch_size = 0: must be a positive integer"),
        (lambda: fits("gpt2-xl", "a100-40g", precision="fp7"), "precision = 'fp7'"),
        (lambda: fits("gpt2-xl", "a100-40g", tensor=8), "tensor = 8: does not divide the 25 heads of .* of gpt2-xl"),
        (lambda: fits("gpt2", "a100-40g", pipeline=13), "pipeline = 13: gpt2 has only 12 transformer layers; use at"),
        (lambda: fits("lenet5", "v100", pipeline=99), "pipeline = 99: lenet5 has only .* layers after which it can be"),
        (lambda: fits("gpt2", "a100-40g", interleave=2), "interleave = 2: requires pipeline parallelism"),
        (lambda: fits("gpt2", "a100-40g", micro_batches=2), "micro_batches = 2: has no effect without pipeline"),
        (lambda: fits("resnet50", "v100", tensor=2), "tensor = 2: resnet50 has no attention layers"),
        (lambda: fits("resnet50", "v100", recompute="selective"), "recompute = 'selective' has no effect, because res"),
        (lambda: fits("resnet50", "v100", recompute="operators"), "recompute = 'operators' has no effect, because res"),
        (lambda: fits("resnet50", "v100", flash=True), "flash = True has no effect, because resnet50 has no attention"),
        (lambda: fits("gpt2", "a100-40g", zero=2), "zero = 2: has no effect with shards = 1"),
        (lambda: fits("resnet50", "h100", stack="megatron"), "stack = 'megatron': has no effect, because the rates of"),
        (lambda: fits("gpt2", "v100", stack="megatron"), "stack = 'megatron': has no effect, because the rates of"),
        (lambda: fits("gpt2", "a100-40g", workspace="1 GiB"), "workspace has no effect, because gpt2 has no convolu"),
        (lambda: fits("gpt2", "a100-40g", precision="fp8"), "a100-40g does not support matrix products in fp8"),
    ],
)  # fmt: skip
def test_bad_questions(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
