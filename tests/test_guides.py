"""Guides do what they say: their commands and code run in order, and print what stands below them."""

import pytest
from documentation import ROOT
from test_write_your_own import assert_printed, run_page

GUIDES = ("tutorial.md", "which_algorithm.md", "comparison.md")


@pytest.mark.slow  # a guide is a whole program
@pytest.mark.parametrize("guide", GUIDES)
def test_the_guide_prints_what_it_shows(guide, tmp_path, monkeypatch, capsys):
    shown = 0
    for printed, text in run_page(ROOT / "docs" / guide, tmp_path, monkeypatch, capsys):
        if printed is not None:
            assert_printed(printed, text)
            shown += 1
    assert shown >= 3
