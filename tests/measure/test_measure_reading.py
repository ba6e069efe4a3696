"""The table of measurements: read strictly, with errors that a writer can act on."""

import json

import pytest

from ddlsim.errors import ConfigError
from ddlsim.measure import OPERATIONS, Measurement, read_measurements

HEADER = "experiment,operation,n_ranks,n_hosts,nbytes,median_s"


def written(tmp_path, text, name="x.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_written_by_hand(tmp_path):
    """Units, comments, empty cells, text with commas, columns in any order."""
    path = written(
        tmp_path,
        "# from a paper\nmedian_s,experiment,operation,n_ranks,n_hosts,nbytes,min_s,note\n"
        '12.5 ms,collective,all_reduce,16,2,100 MB,,"ring, in place"\n\n'
        "3e-6,point_to_point,one_way,4,1,4,0.000002,\n",
    )
    first, second = read_measurements(path)
    assert first == Measurement(
        "collective", "all_reduce", 16, 2, median_s=0.0125, nbytes=100_000_000, note="ring, in place"
    )
    assert first.bandwidth == 8e9
    assert (second.min_s, second.n_pairs, second.n_repetitions) == (2e-6, 2, 1)


def test_json_lines_and_a_folder(tmp_path):
    row = {"experiment": "step", "operation": "training", "n_ranks": 1, "n_hosts": 1, "median_s": "97 ms"}
    written(tmp_path, json.dumps(row | {"model": "resnet50", "batch_size": 32}) + "\n", "b.jsonl")
    written(tmp_path, f"{HEADER}\nmemory,copy,2,1,1 MiB,1 ms\n", "a.csv")
    written(tmp_path, "not a table", "readme.txt")
    copy, step = read_measurements(tmp_path)
    assert (copy.operation, copy.nbytes) == ("copy", 2**20)
    assert (step.model, step.batch_size, step.median_s) == ("resnet50", 32, 0.097)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("collective,all_reduce,8,1,4,-1", "median_s = -1: must be finite and above 0, like 0.0012 or '1.2 ms'"),
        ("collective,all_reduce,8,1,4,nan", "median_s = nan: must be"),
        ("collective,all_reduce,8,1,4,", "key 'median_s' is missing; add"),
        ("collective,all_reduce,8,1,4 s,1", "nbytes: '4 s' is a time, not a size; write it like '100 MB'"),
        ("collective,all_reduce,8,1,1.5,1", "nbytes = 1.5: must be a non-negative integer"),
        ("collective,all_reduce,x,1,4,1", "n_ranks = 'x': must be a positive integer"),
        ("collective,all_reduce,0,1,4,1", "n_ranks = 0: must be a positive integer"),
        ("collective,all_reduce,8,9,4,1", "n_hosts = 9: must be at most n_ranks = 8"),
        ("collective,all_reduce,1,1,4,1", "n_ranks = 1: a collective requires at least 2 ranks"),
        ("collective,allreduce,8,1,4,1", "unknown collective operation 'allreduce'; did you mean 'all_reduce'?"),
        ("collectiv,all_reduce,8,1,4,1", "unknown experiment 'collectiv'; did you mean 'collective'?"),
        ("collective,all_reduce,8,1,,1", "nbytes is missing or 0; collective requires a size"),
        ("point_to_point,one_way,3,1,4,1", "n_ranks = 3: must be even, because point_to_point has two ranks per pair"),
        ("step,training,1,1,,1", "batch_size is missing; a step requires model and batch_size"),
        ("step,training,1,1,4,1", "nbytes = 4: a step has no message size; leave nbytes out"),
        ("memory,copy,1,1,4,1,5", "7 cells for 6 columns; quote strings that contain commas"),
    ],
    ids=lambda value: value.replace(",", "_") if value[:3] in ("col", "poi", "ste", "mem") else "",
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = written(tmp_path, f"{HEADER}\n# the next line is wrong\n{row}\n")
    with pytest.raises(ConfigError) as error:
        read_measurements(path)
    assert str(error.value).startswith(f"{path}: line 3: {message}")
    assert "\n" not in str(error.value)


def test_quantiles_must_rise(tmp_path):
    path = written(tmp_path, f"{HEADER},p25_s,max_s\nmemory,copy,1,1,4,2,1,1.5\n")
    with pytest.raises(ConfigError, match=r"line 2: max_s = 1\.5: must be at least the previous quantile"):
        read_measurements(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "experiment,median\n", "line 1: unknown column 'median'; did you mean 'median_s'?"),
        ("b.csv", f"{HEADER},nbytes\n", "line 1: column 'nbytes' occurs twice"),
        ("c.csv", f"{HEADER}\n", "contains no measurements"),
        ("d.jsonl", '{"experiment": \n', "line 1: invalid JSON"),
        ("e.jsonl", "[1]\n", "line 1: must be an object"),
        ("f.jsonl", '{"experiment": "memory", "n_rank": 2}\n', "line 1: unknown key 'n_rank'; did you mean"),
        ("g.xlsx", "", "unknown format '.xlsx'"),
    ],
    ids=lambda value: value if value.endswith(("csv", "jsonl", "xlsx")) else "",
)
def test_a_bad_file_is_named(tmp_path, name, text, message):
    path = written(tmp_path, text, name)
    with pytest.raises(ConfigError) as error:
        read_measurements(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_measurements(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match=r"contains no \.csv or \.jsonl file"):
        read_measurements(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="invalid UTF-8"):
        read_measurements(tmp_path / "binary.csv")


def test_the_page_describes_every_column_and_operation(pytestconfig, tmp_path):
    from ddlsim.measure.table import COLUMNS

    page = (pytestconfig.rootpath / "docs" / "formats" / "measurements.md").read_text(encoding="utf-8")
    for name in (*COLUMNS, *OPERATIONS, *(name for names in OPERATIONS.values() for name in names)):
        assert f"`{name}`" in page
    example = page.split("```csv\n")[1].split("```")[0]
    assert len(read_measurements(written(tmp_path, example))) == 2
