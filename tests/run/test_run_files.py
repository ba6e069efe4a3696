"""Experiment files: everything that can be written in Python can be written in a file, and mistakes are one line."""

import collections.abc
import contextlib
import dataclasses
import inspect
import sys
import typing

import pytest
from documentation import public_names

import ddlsim
from ddlsim import compression, optim, strategies
from ddlsim.arguments.annotations import alternatives
from ddlsim.arguments.checking import annotations_of
from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError
from ddlsim.run import files
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import SCHEMA
from ddlsim.schema import required
from ddlsim.workload import jitter

TRAINING = """
cluster = "office-1gbe"
model = "digits-cnn"
time_model = "lenet5"
batch_size = 8
max_time = "5 s"

[strategy]
type = "async-parameter-server"
staleness_scaling = { type = "exponential", rho = 0.2 }
delay_compensation = { variance_control = 0.04 }

[training]
data = "digits"
held_out = 0.25
optimizer = { type = "momentum", beta = 0.8, nesterov = true }
rate = { type = "warm-up", n_epochs = 2, then = { type = "steps", base = 0.1, milestones = [3, 4.5] } }
sharding = { type = "dirichlet", alpha = 0.5 }
growing_batch = { base = 8, milestones = [1.0, 2.0] }
evaluate_every = "10 ms"
epochs = 5
target_accuracy = 0.95
"""


def load(tmp_path, text, **more):
    path = tmp_path / "e.toml"
    path.write_text(text)
    return ddlsim.load_experiment(path, **more)


def test_a_training_run_as_a_file(tmp_path):
    assert load(tmp_path, TRAINING) == ddlsim.Experiment(
        "office-1gbe", "digits-cnn", time_model="lenet5", batch_size=8, max_time=5.0,
        strategy=ddlsim.AsyncParameterServer(
            staleness_scaling=strategies.ExponentialPenalty(0.2),
            delay_compensation=strategies.DelayCompensation(0.04),
        ),
        training=ddlsim.Training(
            "digits", 0.25, ddlsim.Momentum(0.8, nesterov=True),
            ddlsim.WarmUp(ddlsim.Steps(0.1, (3.0, 4.5)), 2.0), ddlsim.Dirichlet(0.5),
            growing_batch=ddlsim.GrowingBatch(8, (1.0, 2.0)), evaluate_every="10 ms", epochs=5.0, target_accuracy=0.95,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("given", "field", "value"), [
    ("rate = 0.5", "rate", 0.5), ("rate = 1", "rate", 1.0), ("held_out = 300", "held_out", 300),
    ("evaluate_every = 7", "evaluate_every", 7), ('loss = "mean_squared_error"', "loss", "mean_squared_error"),
    ('sharding = "by_class"', "sharding", "by_class"), ('optimizer = { type = "lars", trust = 0.01 }', "optimizer",
    optim.LARS(trust=0.01)), ("charge_evaluation = true", "charge_evaluation", True),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_fields_of_training(given, field, value, tmp_path):
    training = load(tmp_path, f'cluster = "office-1gbe"\n[training]\nupdates = 5\n{given}\n').training
    assert training is not None
    assert getattr(training, field) == value
    assert dataclasses.replace(training, **{field: getattr(ddlsim.Training(), field)}) == ddlsim.Training(updates=5)


@pytest.mark.parametrize(("table", "given"), [
    ('type = "top-k"\ndensity = 0.01', ddlsim.TopK(0.01)),
    ('compressor = { type = "error-feedback", inner = { type = "one-bit" } }\ndown = { type = "fp16" }\n'
     "cost = { encode = 1e-10 }",
     ddlsim.Compression(ddlsim.ErrorFeedback(ddlsim.OneBit()), ddlsim.FP16(), ddlsim.CodecCost(encode=1e-10))),
], ids=["compressor", "compression"])  # fmt: skip
def test_compression(table, given, tmp_path):
    top = 'cluster = "office-1gbe"\nmodel = "lenet5"\nstrategy = { type = "parameter-server" }'
    wanted = ddlsim.Experiment("office-1gbe", "lenet5", ddlsim.ParameterServer(), compression=given)
    assert load(tmp_path, f"{top}\n[compression]\n{table}") == wanted


def test_data_beside_the_file_are_found(tmp_path):
    (tmp_path / "mine.npz").touch()
    for name, found in (("mine.npz", str(tmp_path / "mine.npz")), ("digits", "digits"), ("no.npz", "no.npz")):
        training = load(tmp_path, f'cluster = "office-1gbe"\n[training]\nupdates = 5\ndata = "{name}"\n').training
        assert training is not None
        assert str(training.data) == found


def test_files_beside_the_file_take_options(tmp_path):
    (tmp_path / "pcs.toml").write_text(bundled_files("topologies")["office-1gbe"].read_text())
    (tmp_path / "net.toml").write_text(
        'title = "Net"\ninput = [4]\nlayers = [{ type = "dense", units = "$n" }]\n[sizes]\ns = { n = 3 }\n'
    )
    result = ddlsim.simulate(load(tmp_path, 'cluster = "pcs.toml+n_hosts=3"\nmodel = "net.toml+s"\nsteps = 1\n'))
    assert len(result.workers) == 3
    assert "net-s" in str(result)


@pytest.mark.parametrize(("old", "new", "words"), [
    ("held_out", "heldout", ["e.toml: training: unknown key 'heldout'", "did you mean 'held_out'?"]),
    ('"momentum"', '"momentun"', ["training.optimizer: unknown type 'momentun'", "did you mean 'momentum'?"]),
    ("beta", "betta", ["training.optimizer: unknown key 'betta'", "did you mean 'beta'?"]),
    ("beta = 0.8", "beta = 1.8", ["training.optimizer.beta = 1.8"]),
    ("nesterov = true", 'nesterov = "yes"', ["training.optimizer.nesterov = 'yes'", "True or False"]),
    ("base = 0.1, ", "", ["training.rate.then: key 'base' is missing"]),
    ('type = "warm-up", ', "", ["training.rate: key 'type' is missing", "cosine"]),
    ("alpha", "alhpa", ["training.sharding: unknown key 'alhpa'", "did you mean 'alpha'?"]),
    ("[1.0, 2.0]", "[2.0, 1.0]", ["training.growing_batch: GrowingBatch: milestones"]),
    ('"10 ms"', '"10 MB"', ["training.evaluate_every: '10 MB' is a size"]),
    ('"10 ms"', "true", ["training.evaluate_every = True"]),
    ("target_accuracy = 0.95", "target_accuracy = 95", ["training.target_accuracy = 95", "at most 1"]),
    ("rho = 0.2", 'rho = "0.2"', ["strategy.staleness_scaling.rho = '0.2': must be a number"]),
    ("time_model", "timemodel", ["unknown key 'timemodel'", "did you mean 'time_model'?"]),
    ('type = "async-parameter-server"', 'type = "async-parameter-server"\napply_time = 5', ["= 5: must be a string"]),
])  # fmt: skip
def test_mistakes_are_named_in_one_line(old, new, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, TRAINING.replace(old, new, 1))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "e.toml"))
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_can_have_every_field_of_an_experiment():
    fields = {field.name for field in dataclasses.fields(ddlsim.Experiment)}
    assert SCHEMA.arguments_of(ddlsim.Experiment).keys() == fields


def test_slowdowns_are_a_list_of_tables(tmp_path):
    slow = '{ ranks = [0, 2], start = "1 s", duration = "500 ms", factor = 3 }, { ranks = 1, start = "0 s", '
    experiment = load(tmp_path, f'cluster = "office-1gbe"\nslowdowns = [{slow}duration = "1 s", factor = 2.5 }}]')
    assert experiment.slowdowns == (ddlsim.Slowdown((0, 2), 1.0, 0.5, 3.0), ddlsim.Slowdown(1, 0.0, 1.0, 2.5))
    with pytest.raises(ConfigError, match=r"e.toml: slowdowns\[0\]: unknown key 'rank'; did you mean 'ranks'"):
        load(tmp_path, 'cluster = "office-1gbe"\nslowdowns = [{ rank = 1 }]')


def test_files_know_every_strategy_optimizer_schedule_and_jitter():
    def made_by(module, methods):
        classes = [getattr(module, name) for name in public_names(module.__name__)]
        return {c for c in classes if dataclasses.is_dataclass(c) and all(hasattr(c, m) for m in methods)}

    assert set(files.STRATEGIES.values()) == made_by(strategies, ("start", "label"))
    assert set(files.OVERLAPS.values()) == made_by(strategies, ("buckets",))
    assert set(files.OPTIMIZERS.values()) == made_by(optim, ("init", "update"))
    assert set(files.SCHEDULES.values()) == made_by(optim, ("rate",))
    assert set(files.COMPRESSORS.values()) == made_by(compression, ("traits", "encode"))
    assert set(files.JITTER.values()) == made_by(jitter, ("sample", "mean"))


@pytest.mark.parametrize("name", sorted(files.STRATEGIES))
def test_every_strategy_can_be_written_with_every_simple_field(name, tmp_path):
    kind = files.STRATEGIES[name]
    required = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    values = {p.name: 0.5 if p.name in ("alpha", "gamma") else 2 for p in required}
    if name == "fedavg":
        values["local_steps"] = 2  # or epochs
    lines = [f"{name} = {value}" for name, value in values.items()]
    types = annotations_of(kind)
    for field in dataclasses.fields(kind):
        if isinstance(field.default, bool | int | float) and str not in alternatives(types[field.name]):
            lines.append(f"{field.name} = {str(field.default).lower()}")
        elif isinstance(field.default, str):
            lines.append(f"{field.name} = '{field.default}'")
    text = "\n".join(['cluster = "office-1gbe"', "[strategy]", f'type = "{name}"', *lines])
    assert load(tmp_path, text).strategy == kind(**values)


def test_a_file_cannot_name_code(tmp_path):
    text = 'cluster = "office-1gbe"\n[strategy]\ntype = "sharded-update"\nall_gather = "os:abort"\n'
    with pytest.raises(ConfigError, match=r"strategy.all_gather = 'os:abort' would import code"):
        load(tmp_path, text)


CODE = """
from dataclasses import dataclass
import ddlsim
from ddlsim.optim import SGD

def star(n_ranks):
    return ddlsim.collectives.build("binomial_tree", n_ranks)

@dataclass(frozen=True)
class Damped(SGD):
    by: float = 1.0

@dataclass(frozen=True)
class Halves:
    at: int = 1

    def buckets(self, workload):
        return ddlsim.DdpBuckets(1e4, 1e4).buckets(workload)

class NoFields:
    pass
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module of the user's, which has not been imported."""
    (tmp_path / "users_own.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_own"
    sys.modules.pop("users_own", None)


@pytest.mark.parametrize(
    "line",
    [
        'strategy = { type = "users_own:Halves" }',
        'strategy = { type = "all-reduce", overlap = { type = "users_own:Halves", at = 2 } }',
        'strategy = { type = "all-reduce", overlap = "users_own:Halves" }',
        'fabric = { algorithm = "users_own:star" }',
        'compression = { type = "error-feedback", inner = { type = "users_own:Halves" } }',
        'jitter = { type = "users_own:Damped" }',
        'slowdowns = [{ type = "users_own:Damped" }]',
        'training = { optimizer = { type = "users_own:Damped", by = 0.5 } }',
    ],
)
def test_no_table_of_a_file_imports_code(line, code, tmp_path):
    with pytest.raises(ConfigError, match=r"e.toml: .* would import code; if you trust the file, set allow_code=True"):
        load(tmp_path, f'cluster = "office-1gbe"\n{line}\n')
    assert code not in sys.modules


def parts():
    """Every class that files can describe."""
    kinds, todo = set(), [Experiment]
    while todo:
        kind = todo.pop()
        if kind not in kinds:
            kinds.add(kind)
            todo += [inner for each in SCHEMA.arguments_of(kind).values() for inner in inside(each)]
    return sorted(kinds, key=lambda kind: kind.__name__)


def parts_with_texts():
    """Every class that files can describe, with the fields of it that take a text."""
    for kind in parts():
        for name, annotation in SCHEMA.arguments_of(kind).items():
            if "str" in str(annotation):
                yield kind, name


def test_every_part_comes_back_from_plain_values():
    """Parts that two numbers are enough for; experiments drawn at random: test_run_written."""
    missing = []
    for kind in parts():
        annotations = SCHEMA.arguments_of(kind)
        table = {name: plain_value(annotations[name]) for name in required(kind)}
        smaller = {name: 0.5 if value == 2 else value for name, value in table.items()}
        for each in (table, smaller):
            with contextlib.suppress(ConfigError):
                part = SCHEMA.structure(kind, each, "here")
                break
        else:
            missing.append(kind)
            continue
        assert SCHEMA.structure(kind, SCHEMA.table(part), "here") == part
        whole = SCHEMA.table(part, full=True)
        assert SCHEMA.table(SCHEMA.structure(kind, whole, "here"), full=True) == whole
    assert len(missing) < 20, missing


def plain_value(annotation):
    """A value of a field without a default: a time, texts, or a number."""
    if "dimension='time'" in str(annotation):
        return "1 s"
    if annotation is str:
        return "text"
    return ["text"] if annotation == tuple[str, ...] else 2


def inside(annotation):
    """Every class that a field can describe, in lists and mappings as well."""
    if typing.get_origin(annotation) is collections.abc.Callable:
        return []
    return [*SCHEMA.kinds(annotation).values(), *(k for each in typing.get_args(annotation) for k in inside(each))]


def test_no_text_of_any_part_is_imported_unless_that_is_allowed(code):
    for kind, field in parts_with_texts():
        annotations = SCHEMA.arguments_of(kind)
        needed = {name: "1 s" if "str" in str(annotations[name]) else 1 for name in required(kind)}
        for text in (f"{code}:star", f"hierarchical({code}:star, ring)", f" {code}:star(2)"):
            inner = [{"type": name, "inner": text} for name in list(SCHEMA.kinds(annotations[field]))[:1]]
            for value in (text, [text], {"type": text}, *inner):
                with contextlib.suppress(ConfigError):
                    SCHEMA.structure(kind, {**needed, field: value}, "here")
        assert code not in sys.modules, f"{kind.__name__}.{field}"


@pytest.mark.parametrize("text", ["users_own:star", "hierarchical(users_own:star, ring)"])
def test_the_function_that_builds_refuses_code_by_itself(text, code):
    with pytest.raises(ConfigError, match=r"here: algorithm = '.*' would import code"):
        SCHEMA.structure(ddlsim.AllReduce, {"algorithm": text}, "here")
    with pytest.raises(ConfigError, match=r"here.type = 'users_own:Damped' would import code"):
        SCHEMA.structure(optim.Optimizer, {"type": "users_own:Damped"}, "here")
    with pytest.raises(ConfigError, match=r"here\[1\] = 'users_own:star' would import code"):
        SCHEMA.value(list[str], ["ring", "users_own:star"], "here", "algorithm")
    assert code not in sys.modules
    assert SCHEMA.structure(ddlsim.AllReduce, {"algorithm": text}, "here", allow_code=True).algorithm == text


def test_names_of_files_nodes_and_jobs_may_have_colons():
    table = {"source": "pod:0", "target": "leaf:1", "start": "1 s", "duration": "1 s"}
    fault = SCHEMA.structure(ddlsim.LinkFault, table, "x")
    assert (fault.source, fault.target) == ("pod:0", "leaf:1")
    own = SCHEMA.arguments(Experiment, {"model": "C:\\nets\\own.toml"}, "here", partial=True)
    assert own["model"] == "C:\\nets\\own.toml"


def test_parts_of_ones_own_in_a_file_that_is_trusted(code, tmp_path):
    path = tmp_path / "e.toml"
    path.write_text("""
        cluster = "office-1gbe"
        strategy = { type = "all-reduce", overlap = { type = "users_own:Halves", at = 2 } }
        fabric = { algorithm = "users_own:star" }
        [training]
        epochs = 1
        optimizer = { type = "users_own:Damped", by = 0.5 }
    """)
    experiment = ddlsim.load_experiment(path, allow_code=True)
    own = sys.modules[code]
    assert experiment.strategy.overlap == own.Halves(2)
    assert experiment.training.optimizer == own.Damped(by=0.5)
    assert experiment.strategy.algorithm == "users_own:star"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ('"users_own:Damped", beta = 1', "unknown key 'beta'; known: by, weight_decay"),
        ('"users_own:Damped", by = "much"', "by = 'much': must be a finite number"),
        ('"users_own:Dampd"', "has no attribute 'Dampd'; expected 'package.module:Name'"),
        ('"no_such_module:X"', "expected 'package.module:Name', with its folder in PYTHONPATH"),
        ('"users_own:star"', "must be a dataclass with one field per setting"),
        ('"users_own:NoFields"', "must be a dataclass with one field per setting"),
    ],
)
def test_what_is_wrong_with_a_part_of_ones_own(kind, text, code, tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(f'cluster = "office-1gbe"\ntraining = {{ optimizer = {{ type = {kind} }} }}')
    with pytest.raises(ConfigError) as error:
        ddlsim.load_experiment(path, allow_code=True)
    assert text in str(error.value)
    assert "training.optimizer" in str(error.value)
