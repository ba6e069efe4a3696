"""Names from elsewhere are shown on the terminal, in tables, pages and pictures, and never obeyed."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pandas as pd
import pytest
from draws import slow
from matplotlib.figure import Figure
from matplotlib.text import Text

import ddlsim
from ddlsim.cluster import Cluster, star
from ddlsim.errors import ConfigError
from ddlsim.output_files import csv_text, guarded, save_csv, unguarded
from ddlsim.printable import shown
from ddlsim.report.drawing import drawn
from ddlsim.study import Study

#: reverses what follows, colours the terminal, is markup of rich and of HTML, a formula of TeX and of a spreadsheet
NASTY = "=a\u202eb\x1b[31mc[red]d[/]e$f_{g$h<b>i</b>\u2066j\u061ck\rl:smile:"
EMBEDDING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_every_control_character_is_written_out():
    for number in range(0x110000):
        character = chr(number)
        obeyed = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in "\u200e\u200f\u061c\ufeff"
        obeyed |= unicodedata.bidirectional(character) in EMBEDDING
        if obeyed and character not in "\n\t":
            assert shown(character) == ascii(character)[1:-1] if character not in "\r" else shown(character) == "\\x0d"
        else:
            assert shown(character) == character


@pytest.mark.parametrize("text", ["", "plain", "höhe 5 µs", "a\tb\nc", "שלום", "👩‍💻"])
def test_other_texts_stay_as_they_are(text):
    assert shown(text) == text


def test_errors_show_them():
    assert str(ConfigError(f"name {NASTY}")) == f"name {shown(NASTY)}"
    assert "\x1b" not in shown(NASTY)


# ---------------------------------------------------------------- CSV


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=1+2", "'=1+2"), ("+1+2", "'+1+2"), ("@SUM(A1)", "'@SUM(A1)"), ("-2+3", "'-2+3"), ("\tx", "'\tx"),
     ("\nx", "'\nx"),
     ("\rx", "\\x0dx"), ("'=1", "''=1"), ("''@", "'''@"), ("-", "'-"), ("-1e3", "-1e3"), ("+5", "+5"), ("-inf", "-inf"),
     ("a=b", "a=b"), ("'quoted'", "'quoted'"), ("", ""), ("1-2", "1-2")],
)  # fmt: skip
def test_cells_that_spreadsheets_would_run(text, cell):
    assert guarded(text) == cell
    assert unguarded(cell) == shown(text)


def test_tables_as_csv(tmp_path):
    frame = pd.DataFrame({"=name": ["=1+2", "b", None], "x": [-1.5, 2.0, None], "n": pd.array([1, None, -3], "Int64")})
    assert csv_text(frame) == "'=name,x,n\n'=1+2,-1.5,1\nb,2.0,\n,,-3\n"
    save_csv(frame, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == csv_text(frame)


def test_measurements_come_back(tmp_path):
    from ddlsim.measure import Measurement
    from ddlsim.measure.table import append, open_table

    path, _ = open_table(tmp_path)
    for note in ("=cmd()", "-x", "'=quoted", "plain", "-5"):
        append(path, Measurement("collective", "all_reduce", 8, 2, median_s=1.25e-3, nbytes=1024, note=note))
    assert not re.search(r"(^|,)[=@-][^,\d]", path.read_text(), re.MULTILINE)
    assert [row.note for row in open_table(tmp_path)[1]] == ["=cmd()", "-x", "'=quoted", "plain", "-5"]


# ---------------------------------------------------------------- wherever a name is shown


@pytest.fixture(scope="module")
def cluster():
    return Cluster.from_graph(star(4, bandwidth="1 Gbit/s", latency="10 us"), NASTY)


@pytest.fixture(scope="module")
def result(cluster):
    return ddlsim.simulate(cluster, "lenet5", batch_size=8, workers=2, steps=2, warmup=0)


@pytest.fixture(scope="module")
def table(cluster):
    named = {NASTY: cluster, "_other": Cluster.from_graph(star(4, bandwidth="10 Gbit/s", latency="10 us"), "_other")}
    base = ddlsim.Experiment(cluster, "lenet5", batch_size=8, steps=1, warmup=0)
    return Study(base, {"cluster": named, "workers": [2, 3]}).run(jobs=1)


def test_in_texts(result, table, cluster):
    for text in (str(result), str(table), cluster.summary()):
        assert "\\u202e" in text
        assert not CONTROLS.search(text)


def test_in_pages(table, tmp_path):
    table.save_html(tmp_path / "r.html", title=NASTY)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert not CONTROLS.search(page)
    assert "<b>i</b>" not in page
    assert "a\\u202eb\\x1b[31mc[red]d" in page


def test_in_files(result, table, tmp_path):
    table.save(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text(encoding="utf-8")
    assert not CONTROLS.search(text)
    assert "\n'=a\\u202eb" in text
    result.save_trace(tmp_path / "t.json")
    assert not CONTROLS.search(str(json.loads((tmp_path / "t.json").read_text())))


def texts_of(axes):
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_text().strip()]


def test_in_pictures(result, table):
    """Nothing from a name is read as mathematics (which fails for what is none), or left out of a legend."""
    pictures = [
        result.plot_timeline(), result.plot_cluster(), result.plot_step_times(), table.plot_scaling(),
        table.plot_lines("cluster"), table.plot_pareto("throughput", "efficiency"),
    ]  # fmt: skip
    from ddlsim.report import study_figures

    pictures += [
        study_figures.heat_map(table, "cluster", "workers"), study_figures.breakdown(table),
        study_figures.one_change(table), study_figures.scatter(table),
        study_figures.tornado(result.sensitivities(), title=NASTY),
    ]  # fmt: skip
    n_named = 0
    for axes in pictures:
        for text in texts_of(axes):
            assert not CONTROLS.search(text.get_text())
            named = "\\u202e" in text.get_text()
            n_named += named
            if named:
                assert not text._preprocess_math(text.get_text())[1], text.get_text()
                assert "$" not in text.get_text().replace(r"\$", "")
    assert n_named >= len(pictures) - 2
    labels = [text.get_text() for text in table.plot_scaling().get_figure().legends[0].get_texts()]
    assert " _other" in labels


def test_dollars_are_drawn_as_dollars():
    text = Figure().text(0.5, 0.5, drawn("$5$ and 5$"))
    assert text._preprocess_math(text.get_text()) == ("$5$ and 5$", False)


# ---------------------------------------------------------------- on the terminal


def ddlsim_(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(ddlsim.__file__).parents[1]), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "ddlsim", *arguments], env=environment, stderr=subprocess.PIPE, check=False, **options
    )


@pytest.fixture
def nasty_file(cluster, tmp_path):
    cluster.save(tmp_path / "nasty.json")
    return tmp_path / "nasty.json"


def test_commands_show_names_and_errors(nasty_file, tmp_path):
    for file in (nasty_file, tmp_path / "no\x1b[31m\u202e.toml"):
        done = ddlsim_("show", "topology", str(file), stdout=subprocess.PIPE)
        text = (done.stdout + done.stderr).decode()
        assert "\\x1b[31m" in text
        assert "\\u202e" in text
        assert not CONTROLS.search(text)
        assert "Traceback" not in text


def test_tables_take_no_markup(capsys):
    from ddlsim.cli.output import print_table

    print_table([{"name": NASTY, "title": "[/red] [bold]x"}], False)
    printed = capsys.readouterr().out
    assert shown(NASTY) in printed
    assert "[/red] [bold]x" in printed


@pytest.mark.slow
def test_an_encoding_without_a_character_is_no_reason_to_fail(nasty_file):
    done = ddlsim_("show", "topology", str(nasty_file), stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "arguments", [slow(["models"]), ["devices", "--json"], slow(["show", "topology", "dgx-a100-pod"])]
)
def test_nobody_reads_on(arguments):
    """As in ddlsim models | head -1."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = ddlsim_(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments", [slow(["models"]), slow(["show", "topology", "dgx-a100-pod", "--json"]), ["--version"]]
)
def test_stdout_is_full(arguments):
    with Path("/dev/full").open("wb") as full:
        done = ddlsim_(*arguments, stdout=full)
    assert done.stderr.decode() == "error: the output: No space left on device\n"
    assert done.returncode == 2
