"""The table on disk survives interruptions and belongs to the benchmarks."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.measure.table import append, open_table

ROW = Measurement("collective", "all_reduce", 8, 2, median_s=1.25e-3, nbytes=1024, min_s=1e-3, note='two, "quoted"')
STEP = Measurement("step", "training", 1, 1, median_s=0.1, model="lenet5", batch_size=32)


def test_rows_come_back_as_they_were(tmp_path):
    path, rows = open_table(tmp_path / "new" / "folder")
    assert rows == []
    append(path, ROW)
    append(path, STEP)
    assert open_table(path.parent) == (path, [ROW, STEP])


def test_every_cut_of_the_last_line_leaves_a_table(tmp_path):
    """Whatever an interrupted run wrote of its last row: the rows before are kept, and a row can be added."""
    path, _ = open_table(tmp_path)
    append(path, ROW)
    before = path.read_bytes()
    append(path, STEP)
    whole = path.read_bytes()
    for end in range(len(before), len(whole) + 1):
        path.write_bytes(whole[:end])
        rows = open_table(tmp_path)[1]
        assert rows[0] == ROW
        assert rows[1:] in ([], [STEP])
        append(path, STEP)
        assert open_table(tmp_path)[1] == [*rows, STEP]


def test_a_table_of_somebody_else_is_left_alone(tmp_path):
    path = tmp_path / "measurements.csv"
    path.write_text("experiment,operation\nmemory,copy")
    with pytest.raises(ConfigError, match=r"measurements\.csv: the columns"):
        open_table(tmp_path)
    assert path.read_text() == "experiment,operation\nmemory,copy"


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_table(tmp_path / "file")
