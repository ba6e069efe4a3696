"""The HTML report of a study: one file that needs nothing else, and that says what the table says."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from defusedxml import ElementTree
from report_studies import experiments, learners, record, study
from typer.testing import CliRunner

import ddlsim
from ddlsim.cli import app
from ddlsim.errors import ConfigError
from ddlsim.report.html import html_report
from ddlsim.run.sensitivity import Sensitivity
from ddlsim.study import Study, load_table
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, FAILED, Outcome

#: the study of the last tests as a file
TOML = """
[base]
cluster = "office-1gbe"
model = "lenet5"
steps = 2
warmup = 0
compute = { type = "measured", step_time = "20 ms", batch_size = 32 }
[vary]
workers = [2, 4, 400]
batch_size = [8, 32]
"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, tables as lists of rows, text; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.tables, self.text = [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        where = self.open[-1] if self.open else ""
        self.text[where] = self.text.get(where, "") + data

    def all(self, name):
        return [attrs for tag, attrs in self.elements if tag == name]


@pytest.fixture(scope="module")
def html():
    found = [Sensitivity("compute speed", 0.1, 0.07), Sensitivity("bandwidth of nic", 0.1, 0.02)]
    return html_report(study(), question="Is <it> worth it?", sensitivities=found)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_nothing_is_loaded_from_anywhere(html, page):
    for tag, attrs in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster", "background"):
            if name in attrs:
                assert attrs[name].startswith(("data:", "#")), f"<{tag} {name}={attrs[name][:60]}>"
    assert "url(" not in page.text["style"]
    assert "@import" not in page.text["style"]
    assert not re.search(r"fetch|XMLHttpRequest|import\(", page.text["script"])
    assert "default-src 'none'" in html  # and the browser is told so


def test_every_picture_is_inside_and_described(page):
    images = page.all("img")
    assert len(images) == 8
    for image in images:
        head, _, data = image["src"].partition(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
        assert len(image["alt"]) > 20


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for attrs in page.all("a")]
    assert len(links) > 8
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    labels = [attrs["aria-labelledby"] for _, attrs in page.elements if "aria-labelledby" in attrs]
    assert set(labels) <= set(ids)


def test_tables_have_headings_and_even_rows(page):
    assert len(page.tables) == 3
    for head, *rows in page.tables:
        assert head
        assert all(tag == "th" and attrs["scope"] == "col" for tag, attrs in head)
        assert rows
        assert {len(row) for row in rows} == {len(head)}
    done, skipped_and_failed, runs = page.tables
    assert (len(done), len(skipped_and_failed), len(runs)) == (1 + 14, 1 + 2, 1 + 32)


def test_cells_sort_by_their_exact_numbers(page):
    """Configurations: #, three fields, throughput; texts of a field sort as the design has them."""
    _, *rows = page.tables[0]
    assert "data-largest-first" in page.all("button")[4]  # throughput: the largest first
    summary = study().summary
    assert [float(row[4][1]["data-sort"]) for row in rows] == summary["throughput"].tolist()
    order = {"25 Gbit/s": 0.0, "100 Gbit/s": 1.0}
    assert [float(row[3][1]["data-sort"]) for row in rows] == summary["cluster.nic.bandwidth"].map(order).tolist()


def test_what_users_write_is_text_and_nothing_else(html):
    assert "Is &lt;it&gt; worth it?" in html
    assert "&lt;too many&gt; &amp; no room" in html
    assert "<too many>" not in html


def test_title_answer_front_and_reasons_are_there(html, page):
    assert page.text["h1"] == "Study of resnet50 on rented"
    words = " ".join(re.sub(r"<[^>]*>", " ", html).split())
    assert "From the best configuration by throughput (64 workers, ring, NIC bandwidth 100 Gbit/s)" in words
    assert words.index("Effects of single changes") < words.index("Best throughput")
    assert "Best throughput 5,847 samples/s 95 % interval" in words
    assert "Cheapest per million samples" in words
    front = study().pareto("throughput", "cost_per_sample")
    marked = [attrs["id"] for tag, attrs in page.elements if tag == "tr" and attrs.get("class") == "front"]
    assert sorted(marked) == sorted(f"c{list(study().summary.index).index(i) + 1}" for i in front.index)
    assert "32 points, every configuration with 2 seeds: 27 done, 4 skipped, 1 failed." in words
    assert "failed 1 ZeroDivisionError: division by zero 8 workers, ring, NIC bandwidth 25 Gbit/s" in words
    assert "skipped 4 workers = 64:" in words
    assert "a note (27 runs)" in words


def two_models():
    """resnet50 and lenet5, of which lenet5 has ten times the samples/s; half the points are the same twice."""
    members, outcomes = [], {}
    for model, times in (("resnet50", 1.0), ("lenet5", 10.0)):
        for n in (8, 16):
            for order in ("a", "b"):
                key = f"{model}{n}{order}"
                members.append(Member(key, {"model": model, "workers": n, "fabric.order": order}, 0))
                found = record(n, times / (1.0 + n / 64.0), 0)
                outcomes[key] = Outcome(DONE, "", found, 0.1)
    return Table(["model", "workers", "fabric.order"], members, outcomes)


@pytest.mark.slow
def test_models_do_not_compete_and_equal_ones_stand_once():
    """100 * 16 / 1.25 = 1,280 samples/s of resnet50 with 16 workers, whatever the order; ten times that of lenet5."""
    table = two_models()
    html = html_report(table, question="Is the order of any use?")
    words = " ".join(re.sub(r"<[^>]*>", " ", html).split())
    assert "Different models, data sets or targets are not compared" in words
    for value in ("1,280", "12,800"):
        assert f"Best throughput {value} samples/s resnet50, 16 workers, a".replace(
            "resnet50", "resnet50" if value == "1,280" else "lenet5") + " and 1 other tied" in words  # fmt: skip
    assert "Pareto front: throughput against cost per million samples" in words
    front = Page(html).all("ol")
    assert len(front) == 2
    listed = re.findall(r'<ol class="front">(.*?)</ol>', html, re.DOTALL)
    assert [part.count("<li>") for part in listed] == [2, 2]  # 8 and 16 workers; both orders are equal
    assert all(part.count("and 1 other equal") == 2 for part in listed)
    assert words.index("a instead of b: the same throughput") < words.index("16 instead of 8 workers")  # asked for
    assert "resnet50: Scaling: throughput" in words
    rows = [int(row) for row in re.findall(r'href="#c(\d+)"', listed[1])]
    assert table.summary["model"].iloc[[row - 1 for row in rows]].eq("lenet5").all()


@pytest.mark.slow
def test_what_runs_cost_is_shown_where_they_have_an_end():
    """Four runs of 3 USD each."""
    words = " ".join(re.sub(r"<[^>]*>", " ", html_report(learners())).split())
    assert "all 4 runs to the end would cost 12 USD on these machines." in words
    assert "all 4 runs to the end would cost 12 USD on these machines" in str(learners())
    # the slow one never reaches the target, so changes are told by the accuracy
    assert "From the best configuration by accuracy (fast), unless another is named: fast instead of slow:" in words
    assert "would cost" not in str(study())  # a few steps


def test_manifests_say_everything_about_every_run(html):
    """What all have in common and what is a run's own together are its experiment."""
    parser = Pre()
    parser.feed(html)
    common, *own = ([line.split(" = ", 1) for line in block.splitlines()] for block in parser.blocks)
    table = study()
    assert len(own) == len(table.members)
    for member, lines in zip(table.members, own, strict=True):
        found = {path: json.loads(value) for path, value in [*common, *lines]}
        expected = json.loads(experiments(table)[member.key])
        flat = {f"{k}.{i}": w for k, v in expected.items() if isinstance(v, dict) for i, w in v.items()}
        flat |= {k: v for k, v in expected.items() if not isinstance(v, dict)}
        assert found == flat | {"key": member.key}


class Pre(HTMLParser):
    """The text of each <pre>."""

    def __init__(self):
        super().__init__()
        self.blocks, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "pre"
        if self.inside:
            self.blocks.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.blocks[-1] += data


@pytest.mark.slow
def test_the_same_study_gives_the_same_page():
    assert html_report(learners()) == html_report(learners())


@pytest.mark.slow
def test_a_large_study_stays_small_on_disk():
    table = study(n_seeds=5, workers=tuple(range(1, 26)))
    assert len(table.members) == 500
    text = html_report(table)
    assert len(text.encode()) < 5_000_000
    assert text.count("<tr id=") == 500 + 100


@pytest.mark.slow
def test_a_study_that_learns_is_ranked_by_its_target():
    text = html_report(learners())
    words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    assert "First to the target accuracy" in words
    assert "not by every seed" in words  # the slow one
    assert "Learning curves" in words


def test_a_study_in_which_nothing_ended_still_says_why():
    table = Table(["workers"], [Member("a", {"workers": 8}, 0)], {"a": Outcome(FAILED, "ValueError: no")})
    page = Page(html_report(table))
    assert "No configuration has completed" in page.text["strong"]
    assert "ValueError: no" in page.text["td"]
    assert not page.all("img")


def test_values_of_any_kind_have_their_place():
    """Numbers sort by their value; where a field also has others, all sort as the design has them."""
    values = [(True, "none", 16), (False, 3, 4), (True, 0.5, 8)]
    members = [Member(f"k{i}", dict(zip(("flag", "mixed", "batch_size"), v, strict=True)), 0)
               for i, v in enumerate(values)]  # fmt: skip
    found = record(2, 0.5, 0) | {"accuracy": 0.0, "loss": 1.0, "updates": 1, "epochs": 0.0}
    table = Table(["flag", "mixed", "batch_size"], members, {m.key: Outcome(DONE, "", found, 0.1) for m in members})
    _, *rows = Page(html_report(table)).tables[0]
    assert [[cell[1]["data-sort"] for cell in row[1:4]] for row in rows] == [
        ["0", "0", "16"], ["1", "1", "4"], ["0", "2", "8"]
    ]  # fmt: skip


@pytest.mark.slow
def test_a_study_that_was_stopped_says_so():
    table = study(spoil=False)
    kept = {key: outcome for key, outcome in table.outcomes.items() if key.startswith("8-")}
    text = html_report(Table(table.axes, table.members, kept, interrupted=True))
    assert "8 done, 24 missing; interrupted: run the study again to continue." in " ".join(text.split())
    assert "not simulated yet: run the study again to continue" in text


def test_an_unknown_metric_is_refused():
    with pytest.raises(ConfigError, match="unknown metric 'througput'; did you mean 'throughput'"):
        html_report(study(), metric="througput")
    with pytest.raises(ConfigError, match="no configuration has a known energy"):
        html_report(study(), metric="energy")


def test_from_a_study_to_the_page_and_from_its_store_by_the_command(tmp_path):
    store, page = tmp_path / "study.sqlite", tmp_path / "report.html"
    base = ddlsim.Experiment("office-1gbe", "lenet5", steps=2, warmup=0, compute=ddlsim.Measured("20 ms", 32))
    made = Study(base, vary={"workers": [2, 4, 400], "batch_size": [8, 32]})
    made.run(store, jobs=1)
    made.save_html(page)
    whole = page.read_text(encoding="utf-8")
    Page(whole)
    assert "Sensitivity" in whole
    assert "Study of lenet5 on office-1gbe" in whole
    command = ["report", str(store), "--html", str(page)]
    done = CliRunner().invoke(app, [*command, "--question", "Why?"])
    assert done.exit_code == 0, done.output
    again = page.read_text(encoding="utf-8")
    assert "Why?" in again
    assert "Sensitivity" not in again  # a store has no experiments to simulate
    same, other = tmp_path / "same.toml", tmp_path / "other.toml"
    same.write_text(TOML)
    other.write_text(TOML.replace("[8, 32]", "[8, 64]"))
    assert CliRunner().invoke(app, [*command, "--study", str(same)]).exit_code == 0
    assert page.read_text(encoding="utf-8") == whole
    refused = CliRunner().invoke(app, [*command, "--study", str(other)])
    assert "the table belongs to another study" in str(refused.exception)
    assert str(load_table(store)) in CliRunner().invoke(app, ["report", str(store)]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.sqlite"], "nowhere.sqlite: no such file"),
        (["study.sqlite", "--title", "x"], "--title has no effect without --html"),
        (["study.sqlite", "--html", "report.pdf"], "choose a name that ends in .html"),
        (["study.sqlite", "--html", "nowhere/report.html"], "the folder 'nowhere' does not exist"),
    ],
    ids=["no-store", "no-page", "no-html", "no-folder"],
)
def test_mistakes_are_explained(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
