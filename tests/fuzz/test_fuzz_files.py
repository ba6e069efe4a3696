"""The quick part of the fuzz over files: some mutations of every document. All of them: python tests/fuzz."""

import random

import fuzz_commands
import pytest
from draws import seeds, slow
from fuzz_archives import store
from fuzz_attempt import Report
from fuzz_files import fuzz
from fuzz_targets import targets

pytestmark = pytest.mark.posix  # an alarm ends what hangs
#: commands that start processes, compile all there is, or need root: only in the whole run
SLOW = ("sweep", "recommend", "lab", "warm-up")


@pytest.mark.parametrize("n", [4, slow(12)])
@pytest.mark.parametrize(
    "target",
    [slow(each) if each.title.endswith("?") else each for each in targets()],  # "?": its kind has to be found out
    ids=lambda target: target.title,
)
def test_malformed_files_are_one_error_or_something_sane(target, n, tmp_path):
    report = fuzz(target, tmp_path, seed=1, n_mutations=n, n_damages=n // 3)
    assert not report.failures, str(report)
    assert report.counts["refused"] or n < 12


@pytest.mark.parametrize("third", seeds(1, 3))
def test_malformed_options_are_one_error(third, tmp_path):
    fuzz_commands.prepare(tmp_path, store())
    lines = [line for line in fuzz_commands.lines(tmp_path) if line[0] not in SLOW]
    report = Report()
    for name, words in random.Random(1).sample(lines, 60)[third::3]:
        fuzz_commands.attempt(report, name, words, tmp_path)
    assert not report.failures, str(report)
    assert report.counts["exit 2"]


def test_every_command_has_a_line():
    assert {name for name, _ in fuzz_commands.commands()} == {*fuzz_commands.LINES, *fuzz_commands.SERVES}
