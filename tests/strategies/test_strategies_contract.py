"""The strategy contract is all that other code asks a strategy, and only classes answer."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from bundled_strategies import BUNDLED, VARIANTS

import ddlsim
from ddlsim.run.strategy_names import STRATEGY_CLASSES
from ddlsim.strategies import contract

ROOT = Path(__file__).parents[2]
MODULES = set((ROOT / "ddlsim").rglob("*.py")) - {Path(contract.__file__)}
METHODS = contract.REQUIRED | contract.OPTIONAL
ASKING = re.compile(r"\b(getattr|hasattr|isinstance|issubclass)\(")
CLASSES = {*STRATEGY_CLASSES.values(), "Splits", "Strategy", "Contract", "OnFabric", "WithFabric", "Periodic"}
ASKED = re.compile("|".join({"strategy", "carrier", *CLASSES, *contract.OPTIONAL}))


def simulate(strategy, **more):
    return ddlsim.simulate("office-1gbe", "lenet5", strategy, 16, 4, steps=2, **more)


def test_fields_with_the_names_of_all_methods():
    """The run is that of the strategy without the fields, with defaults that are callable, too."""
    names = [name for name in METHODS if name not in ("start", "plan")]
    for default in (4, lambda *_: 4):
        fields = [(name, object, dataclasses.field(default=default)) for name in names]
        kind = dataclasses.make_dataclass("Own", fields, bases=(ddlsim.AllReduce,), frozen=True)
        own = contract.of(kind())
        assert own.updates(7, 4) == 7
        assert own.collectives().algorithms == {"algorithm": "default"}  # of the base class
        assert not own.shares_batch
        assert str(simulate(kind())) == str(simulate(ddlsim.AllReduce()))


def test_attributes_of_an_object_are_no_methods():
    class Own:
        label = "own"

        def __init__(self):
            self.stage = self.n_workers = self.cycle = self.plan = 3

        def start(self, context):
            ddlsim.AllReduce().start(context)

    own = contract.of(Own())
    assert (own.cycle_length, own.n_workers(), own.defines("plan")) == (1, None, False)
    assert simulate(Own()).step_time == simulate(ddlsim.AllReduce()).step_time


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (4, r"Own\.cycle is 4; it must be a method with the signature cycle\(\), or a dataclass field"),
        (property(lambda self: 4), r"Own\.cycle is a property; it must be a method with the signature cycle\(\)"),
        (lambda self, steps: 4, r"Own\.cycle has the parameters \(steps\); its signature must be cycle\(\)"),
        (lambda self: 0, r"Own\.cycle returned 0; it must return a positive integer"),
        (staticmethod(lambda: "4 steps"), r"Own\.cycle returned '4 steps'; it must return a positive integer"),
    ],
)
def test_what_is_wrong_with_a_method(attribute, said):
    kind = type("Own", (ddlsim.AllReduce,), {"cycle": attribute})
    with pytest.raises(ddlsim.ConfigError, match=said):
        simulate(kind(), warmup=None)


def test_arguments_by_keyword_count():
    def folded_program(self, workloads, micro_batches, *, cluster, nodes):
        return None

    with pytest.raises(ddlsim.ConfigError, match=r"must be folded_program\(workloads, .*, nodes\)"):
        contract.of(type("Own", (ddlsim.FSDP,), {"folded_program": folded_program})())


@pytest.mark.parametrize(
    ("defined", "lost"),
    [("start", {"program", "folded_program"}), ("program", {"folded_program", "peak_memory"})],
)
def test_what_describes_a_method_is_lost_with_it(defined, lost):
    def start(self, context):
        super(type(self), self).start(context)

    def program(self, workloads, accumulation):
        raise NotImplementedError

    kind = type("Own", (ddlsim.Parallel,), {defined: locals()[defined]})
    own, parent = contract.of(kind()), contract.of(ddlsim.Parallel())
    assert {name for name in METHODS if parent.defines(name) and not own.defines(name)} >= lost
    assert own.defines("n_workers")


def test_every_bundled_strategy_keeps_the_contract():
    for name in STRATEGY_CLASSES.values():
        contract._methods_of(getattr(ddlsim.strategies, name))


# ---------------------------------------------------------------- who else looks


def asked(text):
    """Return the lines of a module that ask what a strategy or carrier is or has."""
    found = []
    for node in ast.walk(ast.parse(text)) if ASKING.search(text) and ASKED.search(text) else ():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
            continue
        function, (thing, which) = node.func.id, node.args[:2]
        if not ASKING.match(f"{function}("):
            continue
        of_strategy = re.search(r"(strategy|carrier)[\])}]*$", ast.unparse(thing))
        names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(which)}
        of_class = function in ("isinstance", "issubclass") and names & CLASSES
        method = isinstance(which, ast.Constant) and which.value in contract.OPTIONAL
        if of_strategy or method or of_class:
            found.append(node.lineno)
    return found


def test_nobody_else_looks_at_strategies():
    places = {path.relative_to(ROOT).as_posix(): asked(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: lines for path, lines in places.items() if lines} == {}


def test_looking_is_found():
    looking = """
getattr(experiment.strategy, name)
hasattr(type(self.strategy), "x")
hasattr(rule, "plan_nodes")
isinstance(rule, (str, strategies.AllReduce))
isinstance(strategies[0].strategy, object)
isinstance(self.carrier, Coded)
"""
    assert asked(looking) == [2, 3, 4, 5, 6, 7]
    assert asked("isinstance(strategies, list); getattr(strategies, name); contract.of(strategy).stage(w, 0, 1)") == []


def test_the_page_lists_the_methods():
    """Each row is made of the signature and the docstring."""
    rows = []
    for name, (positional, keywords) in contract.OPTIONAL.items():
        text = " ".join(inspect.getdoc(getattr(contract.Contract, name)).replace("``", "`").split())
        returns, default = (part.strip().rstrip(".") for part in text.split("Default: "))
        parameters = ", ".join((*positional, *("*",) * bool(keywords), *keywords))
        rows.append(f"| `{name}({parameters})` | {returns} | {default} |")
    page = (ROOT / "docs" / "write_your_own" / "strategy.md").read_text(encoding="utf-8")
    table = page.partition("| method | returns | default |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == rows


#: strategies whose number of updates says nothing about who waits: one gradient, or several, make an update
ROUNDS = (ddlsim.KSync(1), ddlsim.KBatchSync(1), ddlsim.FedAvg(0.5, local_steps=1), ddlsim.FedAvg(0.3, local_steps=1))
FREE = (ddlsim.KAsync(1), ddlsim.KBatchAsync(3), ddlsim.SoftSync(1), ddlsim.FedBuff(3, 1), ddlsim.StaleSynchronous(0))
TIMED = [one.strategy for one in {**BUNDLED, **VARIANTS}.values() if one.batch_size == 8 and not one.needs_data]


@pytest.mark.parametrize("strategy", [*ROUNDS, *FREE, *TIMED], ids=lambda strategy: strategy.label)
def test_waits_for_all_is_what_crashes_of_workers_do(strategy):
    """Workers that do not wait for each other crash one by one; where they wait, a step is the time between updates."""
    failures = ddlsim.Failures("1 s", per="host", repair="50 ms", restart="5 ms")
    more = {"failures": failures, "max_time": "3 s", "compute": ddlsim.Affine(1e-3, 1e-4), "warmup": 1}
    result = simulate(strategy, **more)
    waits = contract.of(strategy).waits_for_all()
    assert waits == (result.recorder.down is None)
    assert not (waits and result.has_own_steps)
    if not result.has_own_steps:
        assert result.step_time == pytest.approx(np.mean(np.diff([time for time, _ in result.measured_updates])))
