"""`Splits` in files: questions to `recommend`, studies; and nowhere else."""

import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import FP16, FSDP, AllReduce, ConfigError, Experiment, Parallel, Splits, Study, Target, simulate
from ddlsim.cli import app
from ddlsim.planner import load_question
from ddlsim.study import load_study

QUESTION = """
clusters = ["dgx1-v100"]
model = "bert-base"
workers = [8]
batch_sizes = [16]
n_best = 2
compressions = ["none"]

[[strategies]]
type = "splits"
tensor = [1, 2]
pipeline = [2]
micro_batch = [2]
recompute = ["none"]
sequence = [true]
stage = [0, 1]
cut = ["balanced", "layers"]
p2p = ["exchange"]
order = ["1f1b"]
algorithm = "ring"

[[strategies]]
type = "fsdp"
stage = 3
micro_batch = 2

[target]
throughput = "1 samples/s"
objective = "time"

[base]
precision = "fp16"
"""
SPLITS = Splits(tensor=(1, 2), pipeline=(2,), micro_batch=(2,), recompute=("none",), stage=(0, 1),
                cut=("balanced", "layers"), p2p=("exchange",), algorithm="ring")  # fmt: skip
STUDY = """
[base]
cluster = "dgx1-v100"
model = "bert-base"
batch_size = 16
steps = 1
warmup = 0

[vary]
strategy = [
  {type = "splits", tensor = [2], pipeline = [1, 2, 3], micro_batch = [2], recompute = ["none"], interleave = [1]},
  {type = "all-reduce"},
]
"""


def written(tmp_path, text):
    path = tmp_path / "asked.toml"
    path.write_text(text)
    return path


def test_a_question_is_the_arguments_that_it_names(tmp_path):
    asked = load_question(written(tmp_path, QUESTION))
    assert asked["strategies"] == (SPLITS, FSDP(stage=3, micro_batch=2))
    assert asked["target"] == Target(throughput="1 samples/s", objective="time")
    assert asked["compressions"] == (None,)
    assert asked["base"].precision == "fp16"
    assert {name: asked[name] for name in ("clusters", "model", "workers", "batch_sizes", "n_best")} == {
        "clusters": ("dgx1-v100",), "model": "bert-base", "workers": (8,), "batch_sizes": (16,), "n_best": 2,
    }  # fmt: skip
    assert "samples" not in asked


def test_the_command_asks_the_question_and_options_go_before_it(tmp_path, monkeypatch):
    asked = []

    def ask(**arguments):
        asked.append(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr(ddlsim, "recommend", ask)
    path = written(tmp_path, QUESTION)
    CliRunner().invoke(app, ["recommend", str(path)])
    CliRunner().invoke(app, ["recommend", str(path), "-b", "32", "--stage", "0,3", "--shard", "4", "--tensor", "2",
                             "--cut", "layers", "--p2p", "overlapped,in turns", "--objective", "cost"])  # fmt: skip
    first, second = asked
    question = load_question(path)
    assert first["clusters"][0].name == "dgx1-v100"
    assert {**first, "clusters": question["clusters"], "jobs": None} == {**question, "jobs": None}
    assert second["batch_sizes"] == [32]
    assert second["strategies"] == [
        Splits(tensor=(2,), stage=(0, 3), shard=(4,), cut=("layers",), p2p=("overlapped", "in turns"))
    ]
    assert second["target"] == Target(throughput="1 samples/s", objective="cost")
    assert second["base"] == question["base"]


@pytest.mark.parametrize(("text", "said"), [
    ("stage = [0, 1]", "strategies[0].stage[0] = 4: must be an integer from 0 to 3"),
    ("cut = [", "strategies[0]: Splits: shard = [8] has no effect without stage 3; add 3 to stage, or remove shard"),
    ('type = "splits"', "unknown type 'split'; did you mean 'splits'?"),
    ('objective = "time"', "target.objective = 'speed': must be 'time' or 'cost'"),
    ('precision = "fp16"', "base: unknown key 'precisions'; did you mean 'precision'?"),
    ("n_best = 2", "n_best = True: must be a positive integer"),
])  # fmt: skip
def test_bad_questions_are_refused(tmp_path, text, said):
    bad = {
        "stage = [0, 1]": "stage = [4]", "cut = [": "shard = [8]\ncut = [", 'type = "splits"': 'type = "split"',
        'objective = "time"': 'objective = "speed"', 'precision = "fp16"': 'precisions = "fp16"',
        "n_best = 2": "n_best = true",
    }  # fmt: skip
    path = written(tmp_path, QUESTION.replace(text, bad[text]))
    with pytest.raises(ConfigError) as error:
        load_question(path)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_code_in_a_question_needs_leave(tmp_path):
    path = written(tmp_path, QUESTION.replace('type = "fsdp"', 'type = "own:Way"'))
    with pytest.raises(ConfigError, match="would import code; if you trust the file, set allow_code=True"):
        load_question(path)


def test_a_study_tries_all_ways(tmp_path):
    study = load_study(written(tmp_path, STUDY))
    ways = [point.experiment.strategy for point in study.points]
    assert ways == [
        *(Parallel(tensor=2, pipeline=p, micro_batch=2, sequence=True, sharded=True) for p in (1, 2)), AllReduce(),
    ]  # fmt: skip
    assert len({point.settings["strategy"] for point in study.points}) == 3
    frame = study.run(jobs=1).frame
    assert list(frame["status"]) == ["done"] * 3
    same = simulate("dgx1-v100", "bert-base", ways[1], batch_size=16, steps=1, warmup=0)
    assert frame["throughput"][1] == same.throughput


def test_a_study_says_which_configurations_have_no_way():
    base = Experiment("dgx1-v100", "bert-base", steps=1, warmup=0)
    splits = Splits(tensor=(2,), pipeline=(4,), micro_batch=(2,), recompute=("none",))
    study = Study(base, {"strategy, batch_size": [(splits, 4), (splits, 3)], "compression": {"half": FP16()}})
    assert [point.settings["compression"] for point in study.points] == ["half", "half"]
    first, second = study.points
    assert first.experiment.strategy == Parallel(tensor=2, pipeline=4, micro_batch=2, sequence=True)
    assert first.experiment.batch_size == 4
    assert second.experiment is None
    assert (
        "no valid way to split bert-base over 8 workers with batch_size = 3: 1 x the batch size is not a"
        in second.error
    )


def test_one_run_takes_one_way(tmp_path):
    with pytest.raises(
        ConfigError, match=r"must be a strategy such as .* \(Splits are only for recommend and studies\)"
    ):
        simulate("dgx1-v100", "bert-base", Splits())
    path = written(tmp_path, 'cluster = "dgx1-v100"\nmodel = "bert-base"\nstrategy = {type = "splits"}')
    with pytest.raises(ConfigError, match="Splits are only for recommend and studies"):
        ddlsim.load_experiment(path)
