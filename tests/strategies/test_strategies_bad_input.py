"""Splits of a model that do not work are refused in one line, with numbers and what works, through every door: Python,
an experiment file, the command line. Nothing of the wrong type is a traceback."""

import dataclasses
import itertools
import json
import re
import sys
from typing import Any

import pytest
from draws import rows

import ddlsim
from ddlsim import (
    FSDP,
    ConfigError,
    EmbeddingParallel,
    Experiment,
    ExpertParallel,
    Hybrid,
    Parallel,
    cli,
    simulate,
)
from ddlsim.run.files import STRATEGIES
from ddlsim.strategies.split_rules import Rules, sizes_wanted
from ddlsim.workload.model import load_model

#: strategy, its fields, model, batch size, what is said: all with 8 workers of a DGX-1
REFUSED: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("parallel", {"tensor": 2, "pipeline": 2, "data": 3}, "gpt2", 8,
     "data 3 x pipeline 2 x tensor 2 = 12: must equal the number of workers, 8; the nearest valid sizes are tensor=2, "
     "pipeline=2, data=2"),
    ("parallel", {"tensor": 3, "pipeline": 2}, "gpt2", 8,
     "pipeline 2 x tensor 3 = 6: must divide the number of workers, 8; the nearest valid sizes are tensor=4, "
     "pipeline=2, data=1; tensor=2, pipeline=2, data=2; tensor=4, pipeline=1, data=2; workers=6"),
    ("parallel", {"pipeline": 8, "interleave": 16}, "gpt2", 8,
     "pipeline 8 x 16 chunks = 128: gpt2 has only 124 layers; the nearest valid sizes are interleave=15; "),
    ("parallel", {"pipeline": 4, "cut": "layers", "interleave": 2}, "gpt2", 16,
     "cut = 'layers' with pipeline 4 x 2 chunks = 8: the number of chunks must divide the 12 transformer layers of "
     "gpt2; the nearest valid sizes are interleave=1; tensor=1, pipeline=2, data=4; "),
    ("parallel", {"pipeline": 4, "cut": "layers"}, "resnet18", 8,
     "cut = 'layers': resnet18 has no transformer layers; use cut='balanced'"),
    ("parallel", {"pipeline": 4, "interleave": 3}, "gpt2", 12,
     "batch_size = 12: must be a multiple of 8 (data 2 x micro_batch 1 x pipeline 4, because stages with "
     "interleave = 3 take turns of 4 micro-batches); "
     "the nearest valid sizes are batch_size=16; batch_size=8; "),
    ("parallel", {"tensor": 8}, "gpt2", 8,
     "tensor = 8: does not divide the 12 heads of h.0.attention1 of gpt2; the nearest valid sizes are "
     "tensor=4, pipeline=1, data=2; "),
    ("parallel", {"tensor": 8}, "resnet18", 8,
     "resnet18 has no attention layers, which tensor parallelism needs; the nearest valid sizes are tensor=1"),
    ("parallel", {"pipeline": 2, "micro_batch": 3}, "gpt2", 8,
     "batch_size = 8: must be a multiple of 12 (data 4 x micro_batch 3); the nearest valid sizes are batch_size=12; "
     "micro_batch=1; "),
    ("parallel", {"pipeline": 4, "order": "2bw"}, "resnet18", 2,
     "batch_size = 2: must be at least 8 (data 2 x micro_batch 1 x pipeline 4), because '2bw' needs a micro-batch for "
     "each stage; the nearest valid sizes are batch_size=8; "),
    ("parallel", {"pipeline": 4, "order": "pipedream", "interleave": 2}, "resnet18", 8,
     "interleave = 2 has no effect with order = 'pipedream'"),
    ("parallel", {"pipeline": 4, "order": "pipedream", "sharded": True}, "resnet18", 8,
     "sharded = True needs a synchronous order such as '1f1b', not 'pipedream'"),
    ("parallel", {"pipeline": 4, "order": "pipedream", "micro_batch": 2}, "resnet18", 8,
     "micro_batch = 2 cannot be combined with batch_size = 8 and order = 'pipedream', which updates the weights after "
     "every micro-batch: the batch would be split over 2 replicas into micro-batches of 4; remove micro_batch"),
    ("parallel", {"order": [[["F", 0, 0], ["B", 0, 0]]]}, "resnet18", 24,
     "batch_size = 24: must be 8 (data 8 x micro_batch 1 x 1 micro-batches in the table of order); the nearest "
     "valid sizes are batch_size=8"),
    ("parallel", {"pipeline": 2, "order": [[["F", 0, 0], ["B", 0, 0]]]}, "resnet18", 8,
     "pipeline = 2: must be 1, the number of stages in the table of order; the nearest valid sizes are tensor=1, "
     "pipeline=1, data=8"),
    ("parallel", {"order": [[["F", 0, 0]]]}, "resnet18", 8, "order: ('B', 0, 0) is missing"),
    ("parallel", {"order": [[["F", 0, -1]]]}, "resnet18", 8, "order[0][0] = ('F', 0, -1): must be ('F', 'B' or 'W',"),
    ("parallel", {"pipeline": 2, "recompute": "selective"}, "resnet18", 8, "resnet18 has no transformer layers"),
    ("fsdp", {}, "gpt2", 63, "batch_size = 63: must be a multiple of 8 (8 workers); use 56 or 64"),
    ("fsdp", {"micro_batch": 5}, "gpt2", 64, "must be a multiple of 40 (8 workers x micro_batch 5); use 40 or 80"),
    ("fsdp", {"shard": 3}, "gpt2", 64, "FSDP: shard = 3: must divide the number of workers, 8; use one of 1, 2, 4, 8"),
    ("fsdp", {"units": []}, "gpt2", 64, "units = []: must be an increasing list of layer numbers that starts at 0"),
    ("fsdp", {"units": [0, 124]}, "gpt2", 64, "starts at 0 and stays below 124, the number of layers in gpt2"),
    ("fsdp", {"recompute": "full"}, "resnet18", 64, "FSDP: recompute = 'full' has no effect, because resnet18 has no"),
    ("fsdp", {"stage": 4}, "resnet18", 64, "stage = 4: must be an integer from 1 to 3"),
    ("fsdp", {"stage": 2, "prefetch": 1}, "resnet18", 64, "prefetch = 1 has no effect with stage = 2"),
    ("hybrid", {"groups": {"fc9": 2}}, "vgg-a", 64, "unknown layer 'fc9'; did you mean 'fc8'?"),
    ("hybrid", {"groups": {"pool1": 2}}, "vgg-a", 64, "groups of vgg-a: unknown layer 'pool1'"),
    ("hybrid", {"groups": {"fc6": 3}}, "vgg-a", 64, "groups['fc6'] = 3: must divide the number of workers, 8;"),
    ("hybrid", {"groups": {"type": "distribution", "data": 3, "model": 5}}, "vgg-a", 64,
     "data 3 x model 5 = 15: must equal the number of workers, 8; use data=4, model=2 or data=2, model=4"),
    ("hybrid", {}, "vgg-a", 63, "batch_size = 63: must be a multiple of 8 (8 workers) with Hybrid; use 56 or 64"),
    ("embedding-parallel", {}, "resnet18", 64, "the model 'resnet18' has no embedding_bag layers"),
    ("embedding-parallel", {}, "dlrm", 63,
     "batch_size = 63: must be a multiple of 8 (8 workers) with EmbeddingParallel; use 56 or 64"),
    ("expert-parallel", {}, "resnet18", 64, "model 'resnet18' has no mixture_of_experts"),
]  # fmt: skip


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["ddlsim", "run", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(("name", "fields", "model", "batch_size", "text"), rows(REFUSED, 8))
def test_what_does_not_go_together(
    name: str, fields: dict[str, Any], model: str, batch_size: int, text: str, monkeypatch, capsys, tmp_path
) -> None:
    groups = fields.get("groups")
    arguments = fields
    if isinstance(groups, dict) and "type" in groups:
        arguments = {"groups": ddlsim.Distribution(data=groups["data"], model=groups["model"])}
    with pytest.raises(ConfigError) as error:
        simulate("dgx1-v100", model, STRATEGIES[name](**arguments), batch_size=batch_size)
    assert text in str(error.value)
    assert "\n" not in str(error.value)

    path = tmp_path / "run.toml"
    table = {"cluster": "dgx1-v100", "model": model, "batch_size": batch_size, "strategy": {"type": name, **fields}}
    path.write_text("\n".join(f"{key} = {toml(value)}" for key, value in table.items()))
    typed = "".join(f"+{key}={toml(value)}" for key, value in fields.items())
    for door in [[str(path)], ["dgx1-v100", "-m", model, "-b", str(batch_size), "--strategy", name + typed]]:
        said = refused(monkeypatch, capsys, *door)
        assert text in said
        assert said.count("\n") == 1


def test_a_table_of_passes_from_a_file_runs(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'cluster = "dgx1-v100"\nmodel = "lenet5"\nbatch_size = 2\nworkers = 2\nsteps = 1\n'
        'strategy = {type = "parallel", pipeline = 2, order = [[["F", 0, 0], ["F", 0, 1], ["B", 0, 0], ["B", 0, 1]], '
        '[["F", 1, 0], ["B", 1, 0], ["F", 1, 1], ["B", 1, 1]]]}'
    )
    said = ddlsim.load_experiment(path)
    assert said.strategy.order[1][1] == ("B", 1, 0)
    same = simulate("dgx1-v100", "lenet5", Parallel(pipeline=2), batch_size=2, workers=2, steps=1)
    assert simulate(said).step_time == pytest.approx(same.step_time)


@pytest.mark.parametrize("model", ["gpt2", "llama-70b", "resnet18"])
def test_the_nearest_that_work_do(model: str) -> None:
    network = load_model(model)
    for strategy, batch_size, workers in [
        (Parallel(tensor=8, pipeline=3, interleave=4), 100, 32), (Parallel(tensor=5), 7, 7),
        (Parallel(pipeline=4, order="2bw", micro_batch=3), 10, 24),
    ]:  # fmt: skip
        rules, wanted = Rules(strategy, network, workers), sizes_wanted(strategy, batch_size, workers)
        near = list(rules.near(wanted))
        assert near
        assert rules.broken(wanted)
        distances = [sizes.distance(wanted) for sizes in near]
        assert distances == pytest.approx(sorted(distances))
        for sizes in near[:2]:
            changes = {name: value for name, value in sizes._asdict().items() if name != "batch_size"}
            dataclasses.replace(strategy, **changes).check_sizes(network, sizes.batch_size, workers)


def test_no_split_is_named_twice() -> None:
    """Of all sizes that are wrong: a split other than the one that was wanted stands there once, with one batch."""
    n_named = 0
    for tensor, pipeline, data, micro_batch in itertools.product((1, 3, 4), (1, 3, 5), (None, 2), (1, 3)):
        strategy = Parallel(tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch)
        for model, workers, batch_size in itertools.product(("gpt2", "resnet18"), (8, 12), (7, 24)):
            said = ""
            try:
                strategy.check_sizes(load_model(model), batch_size, workers)
            except ConfigError as error:
                said = str(error)
            named = re.findall(r"tensor=\d+, pipeline=\d+, data=\d+", said)
            assert " does;" not in said
            assert len(named) == len(set(named)), said
            n_named += len(named)
    assert n_named > 100


def test_more_stages_than_devices() -> None:
    with pytest.raises(
        ConfigError, match=r"data 4 x pipeline 4 x tensor 1 = 16: must equal the number of workers, 8; the nearest"
    ):
        simulate("dgx1-v100", "gpt2", Parallel(pipeline=4, data=4), batch_size=16)


@pytest.mark.parametrize(("strategy", "model", "batch_size", "text"), [
    (Parallel(pipeline=4, micro_batch=16), "bert-large", 256,
     "; the nearest that fit: recompute='selective' (15.3 GB); recompute='full' (3.6 GB)"),
    (FSDP(), "llama-70b", 64, "optimizer alone are 827.7 GB: use 49 workers or more, of which the cluster has only 8"),
    (FSDP(stage=1), "gpt2-xl", 8, "; the nearest that fit: stage="),
    (Hybrid(), "vgg-a", 80000, "; the largest batch that fits is 323; of all workers together batch_size=2584"),
])  # fmt: skip
def test_what_does_not_fit_says_what_would(strategy, model: str, batch_size: int, text: str) -> None:
    said = simulate("dgx1-v100", model, strategy, batch_size=batch_size, steps=1, warmup=0).warnings
    assert text in said[0]
    assert len(said) == 1


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_what_would_fit_names_each_split_once(micro_batch: int) -> None:
    strategy = Parallel(pipeline=2, micro_batch=micro_batch)
    run = simulate("dgx1-v100", "llama-7b", strategy, 64, precision="fp16", optimizer="adam", steps=1, warmup=0)
    (said,) = run.warnings
    meshes = re.findall(r"tensor=\d+, pipeline=\d+, data=\d+", said)
    assert len(meshes) == len(set(meshes)) == 2


BAD = [
    None, True, -1, 0, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "ring\n", b"x", (), [], {}, [0],
    [-1], [[]], ["a"], {"a": 1}, {1: "a"}, object(), int, lambda: 0, [("F", 0, 0)], [[("F", 0, 0)]], [[("F", 0)]],
    {"fc6": "x"},
]  # fmt: skip


@pytest.mark.parametrize("make", [Parallel, FSDP, Hybrid, EmbeddingParallel, ExpertParallel])
def test_nothing_of_the_wrong_type_is_a_traceback(make) -> None:
    """Whatever a field is, it is refused in a line or it runs."""
    said = []
    for field in dataclasses.fields(make):
        for value in BAD:
            try:
                strategy = make(**{field.name: value})
                simulate(Experiment("dgx1-v100", "lenet5", strategy, 8, steps=1, warmup=0))
            except ConfigError as error:
                said.append(str(error))
    assert len(said) > 0.7 * len(BAD) * len(dataclasses.fields(make))
    assert not any("\n" in line for line in said)
