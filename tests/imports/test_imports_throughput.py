"""Tables of throughput: long and wide, separators, missing cells; what is refused."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.throughput import read_throughput

LONG = "model,gpus,batch_size,images/s\n# measured in May\nvgg16,8,32,1480.5\nvgg16,16,32,2710\nresnet50,16,64,n/a\n"
WIDE = "#GPUs;baseline;ByteScheduler (images/s)\n8;1480.5;1900.2\n16;2710;-\n"


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_long_table(tmp_path):
    """8 ranks of 32 samples at 1480.5 samples/s take 256 / 1480.5 s."""
    path = write(tmp_path, LONG)
    rows = read_throughput(path)
    assert [(row.n_ranks, row.n_samples, row.variant) for row in rows] == [(8, 256, "vgg16"), (16, 512, "vgg16")]
    assert rows[0].seconds == pytest.approx(256 / 1480.5)
    assert rows[0].throughput == pytest.approx(1480.5)
    assert rows[0].place == f"{path}:3"


@pytest.mark.parametrize(("batch_size", "samples"), [(None, 1), (32, 256)], ids=["unknown", "given"])
def test_a_wide_table(tmp_path, batch_size, samples):
    rows = read_throughput(write(tmp_path, WIDE.lstrip("#")), batch_size=batch_size)
    assert [(row.n_ranks, row.variant, row.throughput) for row in rows] == [
        (8, "baseline", pytest.approx(1480.5)), (8, "ByteScheduler (images/s)", pytest.approx(1900.2)),
        (16, "baseline", pytest.approx(2710.0)),
    ]  # fmt: skip
    assert rows[0].n_samples == samples


def test_labels_of_a_wide_table_are_its_columns_without_numbers(tmp_path):
    rows = read_throughput(write(tmp_path, "network,workers,ps,allreduce\nvgg16,4,10,20\nresnet50,4,30,40\n"))
    assert [(row.variant, row.throughput) for row in rows] == [
        ("vgg16 ps", pytest.approx(10)), ("vgg16 allreduce", pytest.approx(20)), ("resnet50 ps", pytest.approx(30)),
        ("resnet50 allreduce", pytest.approx(40)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["throughput", "Images/sec", "samples_per_second", "speed (img/s)", "tokens/s"])
def test_names_of_throughput(tmp_path, name):
    (row,) = read_throughput(write(tmp_path, f"n_ranks\tdate\t{name}\n4\t2019\t100\n"))
    assert (row.variant, row.throughput) == ("2019", pytest.approx(100))


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (LONG, {"batch_size": 32}, r"table\.csv:1: the table has the column 'batch_size'; remove batch_size"),
        ("model,images/s\nvgg16,3\n", {}, ":1: needs one column of ranks, named like 'gpus' or 'workers', not 0"),
        ("gpus,workers,images/s\n1,1,3\n", {}, "not 2"),
        ("gpus,images/s\n", {}, r":1: has the names of columns, but no row follows; write one row per line below it"),
        ('gpus,images/s\n"1,2\n', {}, "not a table with one row per line"),
        ("", {}, "is empty"),
    ],
    ids=["batch", "ranks", "two", "heading", "quote", "empty"],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_throughput(write(tmp_path, text), **arguments)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1480.5", "fast", ":3: images/s = 'fast' is not a number"),
        ("vgg16,8", "vgg16,8.5", ":3: gpus = '8.5' must be an integer"),
        ("vgg16,16,32,2710", "vgg16,16,32", ":4: has 3 cells, but the heading has 4"),
        ("1480.5", "-3", ":3: images/s = '-3' must be from 0"),
        ("1480.5", "inf", ":3: images/s = 'inf' must be from 0"),
    ],
)
def test_a_cell_that_cannot_be_used_does_not_cost_the_others(tmp_path, old, new, message):
    n_rows = len(read_throughput(write(tmp_path, LONG)))
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        assert len(read_throughput(write(tmp_path, LONG.replace(old, new)))) == n_rows - 1
    with pytest.raises(ConfigError, match=":2: images/s = 'x' is not a number"):
        read_throughput(write(tmp_path, "gpus,images/s\n8,x\n"))


def test_tables_one_behind_the_other(tmp_path):
    rows = read_throughput(write(tmp_path, LONG + LONG.replace("1480.5", "1500")))
    assert [round(row.throughput, 1) for row in rows] == [1480.5, 2710.0, 1500.0, 2710.0]


def test_columns_of_machines_are_labels_and_columns_of_times_no_throughputs(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("gpus,nodes,ours,baseline\n8,1,100,50\n16,2,190,60\n")
    rows = read_throughput(path)
    assert [(row.n_ranks, row.throughput, row.variant) for row in rows] == [
        (8, 100.0, "1 ours"), (8, 50.0, "1 baseline"), (16, 190.0, "2 ours"), (16, 60.0, "2 baseline"),
    ]  # fmt: skip
    for name in ("seconds", "step time (ms)", "nbytes", "Latency", "busbw"):
        path.write_text(f"gpus,{name}\n8,100\n")
        with pytest.raises(ConfigError, match=r"t.csv:1: the column .* is not a throughput"):
            read_throughput(path)
    path.write_text("gpus,step time (ms),images/s\n8,100,3\n")  # the throughput is named
    assert [row.throughput for row in read_throughput(path)] == [3.0]
