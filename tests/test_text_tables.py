"""Tables as text: their form anywhere, and how they fold at a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddlsim import text_tables
from ddlsim.text_tables import aligned, labelled

ROWS = [
    ("strategy", "workers", "samples/s"),
    ("all-reduce (ring, with 25 MiB buckets)", "8", "1,234.5"),
    ("servers", "16", "98.7"),
]


@pytest.fixture
def terminal(monkeypatch):
    """Call with a width: standard output is a terminal of that many columns."""

    def make(columns):
        monkeypatch.setattr(text_tables.sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


def test_columns_are_as_wide_as_their_widest_cell(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")  # which is of terminals
    assert aligned(ROWS, left=(0,)) == [
        "strategy                                workers  samples/s",
        "all-reduce (ring, with 25 MiB buckets)        8    1,234.5",
        "servers                                      16       98.7",
    ]
    assert aligned(ROWS[1:], indent=2)[1] == "                                 servers  16     98.7"


def test_at_a_terminal_words_fold_and_numbers_do_not(terminal):
    terminal(40)
    assert aligned(ROWS, left=(0,)) == [
        "strategy              workers  samples/s",
        "all-reduce (ring,           8    1,234.5",
        "with 25 MiB buckets)",
        "servers                    16       98.7",
    ]
    terminal(30)  # too narrow for any way to fold: the terminal breaks the lines
    assert len(aligned(ROWS)) == 3
    terminal(200)
    assert len(aligned(ROWS)) == 3


def test_what_is_no_terminal_can_have_a_width_too(terminal):
    assert len(aligned(ROWS, width=40)) == 4
    terminal(200)
    assert len(aligned(ROWS, width=40)) == 3


def test_wide_characters_count_as_two_columns():
    assert aligned([("計算機", "1"), ("node", "22")], left=(0,)) == ["計算機   1", "node    22"]


def test_control_characters_and_markup_are_shown():
    assert aligned([("[red]\x1b[31m:smile:", "\u202e1")]) == ["[red]\\x1b[31m:smile:  \\u202e1"]


def test_cells_of_several_lines_stay_in_their_column():
    assert aligned([("a\nb", "1"), ("c", "2")], left=(0,)) == ["a  1", "b", "c  2"]


def test_a_label_and_a_text_that_goes_on_below_itself(terminal):
    rows = [("workers", "8 on a cluster"), ("", "of four machines"), ("note", "one two three four five six seven")]
    assert labelled(rows) == [
        "workers       8 on a cluster",
        "              of four machines",
        "note          one two three four five six seven",
    ]
    terminal(34)
    assert labelled(rows)[2:] == ["note          one two three four", "              five six seven"]
    terminal(20)
    assert len(labelled(rows)) == 3


def test_without_an_output_tables_are_made_all_the_same(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert len(aligned(ROWS)) == 3


def test_rich_is_loaded_by_the_first_table_only():
    code = "import sys, ddlsim, ddlsim.text_tables; assert 'rich' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
