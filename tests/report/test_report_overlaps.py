"""In no picture of the library do texts lie on each other or end beyond its edge: a conformance list, with the data
that is worst for each. A function that draws belongs here (`test_every_picture_is_in_the_list`)."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
from picture_overlaps import overlaps
from report_studies import learners, record, study

import ddlsim
from ddlsim.collectives import build, states
from ddlsim.plan import Draft
from ddlsim.report import drawing, plots, study_figures
from ddlsim.report.animation import ring_of_ranks, round_times
from ddlsim.report.cluster_plot import cluster_plot
from ddlsim.report.learning import plot_learning
from ddlsim.run.sensitivity import Sensitivity
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, Outcome
from ddlsim.validation import Validation

LONG = "Hierarchical(within=Ring(), across=HalvingDoubling()), TopK(0.001), momentum correction"


@pytest.fixture(scope="module")
def runs():
    """Worker counts of all sizes, close together at the end."""
    base = ddlsim.Experiment("star-1024-10g", "lenet5", steps=2, jitter=ddlsim.Lognormal(0.2))
    return ddlsim.scaling(base, [1, 2, 4, 8, 12, 16, 24, 32, 48, 60, 64])


@pytest.fixture(scope="module")
def learned():
    training = ddlsim.Training("digits", updates=6, rate=0.1, evaluate_every=2)
    return ddlsim.simulate("office-1gbe", "digits-cnn", batch_size=8, workers=2, training=training)


def validation(low, high, n=8):
    """Measured runs whose throughputs are between two numbers, with intervals."""
    values = np.geomspace(low, high, n)
    rows = [
        SimpleNamespace(
            run=SimpleNamespace(throughput=value), predicted=1.03 * value, fitted=i == 0,
            interval=SimpleNamespace(low=0.97 * value, high=1.06 * value),
        )
        for i, value in enumerate(values)
    ]  # fmt: skip
    return SimpleNamespace(rows=rows, cluster=SimpleNamespace(name="cloud-25g-16x8-v100-calibrated-last-week.toml"))


def sampled(n=60):
    """A design with fields of wide and narrow ranges, numbers, units, and long names."""
    draw = np.random.default_rng(0)
    members, outcomes = [], {}
    for i in range(n):
        settings = {
            "workers": int(draw.integers(1, 1025)), "batch_size": int(draw.integers(8, 4096)),
            "cluster.nic.bandwidth": f"{float(draw.uniform(1.0, 400.0)):.4g} Gbit/s",
            "cluster.nic.latency": f"{float(draw.uniform(1.0, 90.0)):.4g} us",
            "jitter.sigma": float(draw.uniform(0, 1)),
            "strategy": ("ring", LONG, "ParameterServer(4)", "AsynchronousGossip(peers=2, topology='ring')")[i % 4],
        }  # fmt: skip
        members.append(Member(str(i), settings, 0))
        outcomes[str(i)] = Outcome(DONE, "", record(settings["workers"], 1.0 / (1.0 + i / n), 0), 0.1)
    return Table(list(members[0].settings), members, outcomes)


def long_names():
    """Twelve configurations whose names are long, a few of them equal."""
    members, outcomes = [], {}
    for n in (8, 12, 16, 1000, 1024, 2048):
        for strategy in (LONG, LONG.replace("Ring", "Tree")):
            key = f"{n}{strategy}"
            members.append(Member(key, {"workers": n, "strategy": strategy}, 0))
            outcomes[key] = Outcome(DONE, "", record(n, 0.99 if n < 20 else 0.5, 0), 0.1)
    return Table(["workers", "strategy"], members, outcomes)


def gains(n=14):
    return [Sensitivity(f"bandwidth of {'very ' * (i % 4)}long links {i}", 0.1, 0.4 / (i - 5.5)) for i in range(n)]


def lonely():
    graph = nx.path_graph([f"a-machine-with-a-very-long-name-{i}" for i in range(14)])
    nx.set_node_attributes(graph, "host", "kind")
    for _, _, data in graph.edges(data=True):
        data |= {"bandwidth": "1 Gbit/s", "latency": "1 us"}
    return ddlsim.load_cluster(graph)


def plan(n=6):
    draft = Draft(n_layers=100)
    for rank in range(n):
        row = draft.work(rank, 1e-3 * (rank + 1), "a long name", kind="forward", layers=(0, 100))
        row = draft.work(rank, 2e-3, kind="backward", needs=[row], layers=(0, 100), step=rank)
        if rank:
            draft.message(rank - 1, rank, 1e6, needs=[row])
    return draft.plan()


def several_jobs(n):
    """Return jobs with long names, on a few machines each."""
    made = ddlsim.Experiment("two-racks-oversubscribed", "lenet5", batch_size=8, workers=2, steps=3)
    jobs = [ddlsim.Job(made, f"{i} {LONG}" if i % 2 else f"job {i}") for i in range(n)]
    return ddlsim.simulate_jobs(jobs, timeline=True)


#: what draws -> pictures of it
PICTURES = {
    "plots.scaling": lambda runs, _: [plots.scaling(runs)[0], plots.scaling({LONG: runs, "another": runs[:4]})[0]],
    "gantt.timeline": lambda runs, _: [runs[-1].plot_timeline(), runs[1].plot_timeline(n_workers=2)],
    "plots.breakdown": lambda runs, _: [
        plots.breakdown({"one": runs[0]}), plots.breakdown({f"{i} {LONG}": run for i, run in enumerate(runs)}),
    ],
    "gantt.jobs_timeline": lambda runs, _: [several_jobs(1).plot_timeline(), several_jobs(5).plot_timeline()],
    "plots.step_times": lambda runs, _: [runs[-1].plot_step_times()],
    "learning.plot_learning": lambda _, learned: [
        plot_learning(learned, x=x)[0] for x in ("time", "updates", "epoch", "nbytes")
    ] + [plot_learning({LONG: learned, "another": learned})[0]],
    "cluster_plot.cluster_plot": lambda runs, _: [
        runs[-1].plot_cluster(), cluster_plot(lonely()), cluster_plot(ddlsim.load_cluster("dgx1-v100")),
    ],
    "gantt.gantt": lambda *_: [plan().execute("office-1gbe").plot(), plan(40).execute("star-1024-10g").plot()],
    "plan_graph.graph": lambda *_: [plan().plot(), plan(40).plot(n_ranks=40)],
    "study_figures.scaling": lambda *_: [
        study_figures.scaling(study()), study_figures.scaling(long_names()),
        study_figures.scaling(long_names(), metric="efficiency"),
    ],
    "study_figures.lines": lambda *_: [
        study_figures.lines(study(), "cluster.nic.bandwidth"), study_figures.lines(long_names(), "strategy"),
        study_figures.lines(long_names(), "workers", metric="efficiency"), study_figures.lines(long_names(), "workers"),
        study_figures.lines(study(workers=(8,), spoil=False), "strategy", metric="step_time"),
    ],
    "study_figures.pareto": lambda *_: [
        study_figures.pareto(study(), "throughput", "cost_per_sample"),
        study_figures.pareto(long_names(), "throughput", "efficiency"),
        study_figures.pareto(study(workers=(8,), spoil=False), "throughput", "cost_per_sample"),
        study_figures.pareto(sampled(), "throughput", "efficiency"),
    ],
    "study_figures.scatter": lambda *_: [study_figures.scatter(sampled()), study_figures.scatter(study())],
    "study_figures.heat_map": lambda *_: [
        study_figures.heat_map(study(), "workers", "strategy"),
        study_figures.heat_map(long_names(), "strategy", "workers", metric="throughput"),
        study_figures.heat_map(study(workers=range(1000, 1016), spoil=False), "workers", "strategy", metric="speedup"),
    ],
    "study_figures.breakdown": lambda *_: [study_figures.breakdown(study()), study_figures.breakdown(long_names())],
    "study_figures.one_change": lambda *_: [
        study_figures.one_change(study()), study_figures.one_change(long_names()),
        study_figures.one_change(study(workers=(8,), spoil=False)),
    ],
    "study_figures.tornado": lambda *_: [
        study_figures.tornado(gains(), title=LONG), study_figures.tornado(gains(1)),
        study_figures.tornado([Sensitivity("compute speed", 0.1, 0.09), Sensitivity("bandwidth of nic", 0.1, -0.0)]),
    ],
    "study_figures.learning": lambda *_: [study_figures.learning(learners())],
    "animation.ring_of_ranks": lambda *_: [ring_of_ranks(list(states(build("ring", n)))[1]) for n in (2, 8, 20, 64)],
    "animation.round_times": lambda *_: [round_times(np.cumsum([0.0, *times]), 1) for times in ([1.0], [2e-5] * 200)],
    "comparison.plot": lambda *_: [
        Validation.plot(validation(low, high))
        for low, high in ((900.0, 1100.0), (120.0, 700.0), (1e2, 1e6), (0.02, 0.9), (41_000.0, 43_000.0), (1.0, 12.0))
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_no_texts_of_a_picture_overlap(name, runs, learned):
    for i, axes in enumerate(PICTURES[name](runs, learned)):
        assert overlaps(axes.get_figure(root=True)) == [], f"picture {i}"


def test_every_picture_is_in_the_list():
    """Functions that make a figure and hand it to :func:`ddlsim.report.drawing.saved`."""
    drawn = set()
    for path in Path(ddlsim.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # bokeh has a `figure`, too
        ours = re.search(r"from ddlsim\.report\.drawing import (\([^)]*|[^\n(]*)\b(figure|single)\b", text)
        for function in ast.parse(text).body if ours else ():
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                names = {one.id for one in called if isinstance(one, ast.Name)}
                if names & {"figure", "single"} and path.stem != "drawing":
                    drawn.add(f"{path.stem}.{function.name}")
    helped = {"study_figures.scaling", "study_figures.lines", "comparison.plot"}  # by a helper, or a method
    assert drawn | helped == PICTURES.keys()


def test_overlaps_and_what_is_cut_off_are_found():
    made = drawing.figure(4.0, 3.0)
    axes = made.subplots()
    axes.set_xticks([0.0, 0.01, 1.0], ["a long label", "another label", "c"])
    axes.set_xlim(0.0, 1.0)
    (found,) = overlaps(made)
    assert "'a long label' and 'another label' overlap" in found
    axes.set_xticks([0.0, 1.0])
    axes.set_xlim(0.0, 0.9)  # the tick beyond is not seen
    assert overlaps(made) == []
    made.text(0.9, 0.5, "more than there is room for")
    assert "'more than there is room for' is cut off" in overlaps(made)
