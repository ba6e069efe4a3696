"""What things show in notebooks: well-formed, harmless HTML with the words of their text, without simulating."""

import ast
import dataclasses
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import ddlsim
from ddlsim import notebook
from ddlsim.cluster import star
from ddlsim.collectives import build
from ddlsim.measure import Measurement
from ddlsim.network import Network
from ddlsim.report.compare import compare
from ddlsim.run.seeds import SeedRun, Seeds
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, Outcome
from ddlsim.validation import MeasuredRun
from ddlsim.workload.memory import memory_of

PACKAGE = Path(__file__).parents[1] / "ddlsim"
#: markup, an entity, an attribute's end, an escape sequence, and what reverses the text after it
NASTY = "a<b>&amp;\"'<script>x</script>\x1b[31m\u202e"
TAGS = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "br", "details", "summary"}
ATTRIBUTES = {"style", "scope"}


class Page(HTMLParser):
    """The text of a piece of HTML; raises AssertionError where it is not well formed, or has more than text in it."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES
        if tag == "br":
            self.text.append("\n")
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.text.append("\n")

    def handle_data(self, data):
        self.text.append(data)


def cluster():
    graph = star(2, bandwidth="10 Gbit/s", latency="10 us")
    graph.graph.update(name=NASTY, title=NASTY)
    return ddlsim.load_cluster(graph)


def model():
    return dataclasses.replace(ddlsim.load_model("lenet5"), name=NASTY, title=NASTY)


def experiment():
    data = ddlsim.shapes(24, 32)
    training = ddlsim.Training(data, held_out=8, rate=0.1, updates=2, evaluate_every=1, target_accuracy=0.1)
    seconds = ddlsim.Affine(0.01, 0.01)
    return ddlsim.Experiment(cluster(), "shapes-cnn", batch_size=8, compute=seconds, training=training)


def result():
    return ddlsim.simulate(experiment())


def timed():
    """A run whose text has an interval and a stability, which its HTML leaves out until they are known."""
    return ddlsim.simulate(
        cluster(), model(), batch_size=8, steps=2, compute=ddlsim.Affine(0.01, 0.01), jitter=ddlsim.Lognormal(0.1)
    )


def seeds():
    rows = tuple(result().evaluations)
    return Seeds(experiment(), tuple(SeedRun(n, rows, 1.0 + n, 100.0, 1e6, 0.0, "") for n in range(2)))


def plan():
    made = ddlsim.simulate("office-1gbe", "lenet5", batch_size=8, steps=1, warmup=0).plan
    return dataclasses.replace(made, lanes=tuple(lane._replace(name=NASTY) for lane in made.lanes))


def table():
    record = {"n_workers": 2, "throughput": 10.0, "efficiency": 0.5, "step_time": 1.0}
    members = [Member(name, {"cluster": name}, 0) for name in (NASTY, "b")]
    return Table(["cluster"], members, {NASTY: Outcome(DONE, "", record), "b": Outcome("failed", NASTY)})


def recommended():
    ways = [ddlsim.AllReduce("ring")]
    return ddlsim.recommend(cluster(), "lenet5", workers=[1, 2], batch_sizes=[8], n_best=2, jobs=1, strategies=ways)


def calibration():
    sizes = (1, 10**4, 10**7)
    rows = [Measurement("point_to_point", "one_way", 2, 2, median_s=1e-5 + n * 8e-10, nbytes=n) for n in sizes]
    return ddlsim.calibrate(rows, cluster())


def intervals():
    settings = {
        "failures": ddlsim.Failures("2 h", per="host"),
        "checkpoints": ddlsim.Checkpoints("10 min", stall="2 s"),
    }
    plain = {
        "model": model(),
        "batch_size": 8,
        "steps": 1,
        "warmup": 0,
        "compute": ddlsim.Affine(0.01, 0.01),
        "max_time": "5 h",
    }
    return ddlsim.best_checkpoint_interval(ddlsim.Experiment(cluster(), **plain, **settings), n_timelines=2)


def failure_timeline():
    settings = {"failures": ddlsim.Failures("50 h"), "checkpoints": ddlsim.Checkpoints("10 min", stall="2 s")}
    return ddlsim.simulate(cluster(), model(), steps=1, compute=ddlsim.Affine(0.01, 0.01), **settings).failure_timeline


def validation():
    runs = [MeasuredRun(workers=n, batch_size=8, throughput=50.0 * n) for n in (1, 2)]
    return ddlsim.validate(runs, cluster(), "lenet5", explain=0)


def several_jobs():
    run = ddlsim.Experiment(cluster(), "lenet5", batch_size=8, workers=1, steps=1, warmup=0)
    jobs = ddlsim.simulate_jobs([ddlsim.Job(run, NASTY), ddlsim.Job(run, "b")])
    assert jobs.slowdowns  # which displaying simulates not, but shows
    return jobs


def placements():
    run = ddlsim.Experiment(cluster(), "lenet5", batch_size=8, workers=1, steps=1, warmup=0)
    return ddlsim.place([ddlsim.Job(run, NASTY)], tries=2)


#: class -> how to make one, with names that are meant to do harm wherever it has names
MAKERS = {
    "Cluster": cluster,
    "Model": model,
    "Schedule": lambda: build("ring", 4),
    "Plan": plan,
    "Memory": lambda: memory_of(ddlsim.load_model("lenet5"), 8),
    "Result": result,
    "Seeds": seeds,
    "Comparison": lambda: compare({NASTY: result()}, 0.1),
    "Table": table,
    "Recommendation": recommended,
    "Calibration": calibration,
    "Validation": validation,
    "CheckpointIntervals": intervals,
    "Jobs": several_jobs,
    "Placements": placements,
    "FailureTimeline": failure_timeline,
}
#: whose text stands elsewhere than in str()
TEXTS = {"Cluster": lambda shown: shown.summary(), "Model": lambda shown: shown.name}


def words(text):
    return set(re.findall(r"[^\W_]+", text))


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture
def no_simulation(monkeypatch):
    def refuse(*args):
        raise AssertionError("displaying simulates")

    monkeypatch.setattr(Network, "__init__", refuse)


def test_every_class_that_shows_itself_is_here():
    sources = [(path, path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    found = [
        (node.name, path.parent.name)
        for path, source in sources
        if "_repr_html_" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(item, ast.FunctionDef) and item.name == "_repr_html_" for item in node.body)
    ]
    names = [name for name, _ in found]
    assert sorted(names) == sorted([*MAKERS, "RoundByRound"])  # tests/report/test_report_animation.py


@pytest.mark.parametrize("name", MAKERS)
def test_html_has_the_words_of_the_text_and_nothing_that_a_browser_obeys(made, name, no_simulation):
    html = made[name]._repr_html_()
    shown = "".join(Page(html).text)
    assert words(TEXTS.get(name, str)(made[name])) <= words(shown)
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert made[name]._repr_html_() == html


def test_a_run_shows_what_is_known_of_it():
    run = timed()
    assert "call result.interval() to simulate it" in run._repr_html_()
    assert "(95 %), from jitter" in str(run)  # for which it is simulated
    assert "(95 %), from jitter" in run._repr_html_()


def test_splits_of_a_model_are_a_table():
    found = ddlsim.recommend(
        "dgx1-v100", "bert-base", workers=[2], batch_sizes=[8], n_best=1, jobs=1, strategies=[ddlsim.Splits()]
    )
    assert '<th scope="col"' in found._repr_html_()
    assert words(str(found)) <= words("".join(Page(found._repr_html_()).text))


def test_pictures_show_themselves_by_the_axes_that_functions_return(made):
    axes = made["Result"].plot_timeline()
    png, size = axes._repr_png_()
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        assert image.size == pytest.approx((2 * size["width"], 2 * size["height"]), abs=2)
    assert axes.figure._repr_png_() == (png, size)
    assert [panel._repr_png_()[1] for panel in made["Result"].plot_learning()] == [{"width": 675, "height": 285}] * 2


def test_labels_go_on_below_each_other():
    html = notebook.labelled([("links", "a"), ("", "b"), ("", ""), ("note", "c")])
    assert Page(html).text.count("links") == 1
    assert "a<br>b" in html
    assert html.count("<tr>") == 2


@pytest.mark.slow
def test_the_page_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (PACKAGE.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    namespace = {"__name__": "notebooks"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "notebooks.md", "exec"), namespace)
    assert {path.name for path in tmp_path.iterdir()} == {"ring.gif", "ring.html", "plan.png", "step.png"}
