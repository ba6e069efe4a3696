"""Where embedding tables lie, what that costs in a step, and what is said where they do not fit."""

from __future__ import annotations

import pytest

from ddlsim.workload.model import load_model
from ddlsim.workload.table_placement import (
    HostMemory,
    Placement,
    Shard,
    Space,
    Table,
    place,
    tables_of,
    work_of,
)  # fmt: skip

FIVE = [Table(rows, 8, 2) for rows in (100, 70, 60, 50, 40)]
ROOMY = Space(1e9)


def placed(*arguments, **more) -> Placement:
    found = place(*arguments, **more)
    assert isinstance(found, Placement)
    return found


def test_tables_of_a_model():
    tables = tables_of(load_model("dlrm"))
    assert len(tables) == 26
    assert tables[2] == Table(10131227, 16, 1)


def test_whole_tables_go_to_who_looks_up_least_and_holds_least():
    """100 | 70 | 60, then everybody has one: 50 to 60, 40 to 70."""
    placement = placed(FIVE, 3, "table-wise", ROOMY)
    assert [[shard.table for shard in placement.of(rank)] for rank in range(3)] == [[0], [1, 4], [2, 3]]
    assert [placement.columns(rank) for rank in range(3)] == [8, 16, 16]


def test_room_decides_before_lookups_do():
    """150 rows of 32 bytes fit: 100 + 50 | 70 + 60; the 40 are one too many for the second."""
    placement = placed(FIVE, 2, "table-wise", Space(170 * 32.0))
    assert [[shard.table for shard in placement.of(rank)] for rank in range(2)] == [[0, 3], [1, 2, 4]]
    assert place(FIVE, 2, "table-wise", Space(150 * 32.0)) == Shard(4, 0, 40, 8)  # tried last


def test_columns_and_rows():
    columns = placed(FIVE, 4, "column-wise", ROOMY)
    assert {(s.rows, s.columns) for s in columns.shards} == {(t.rows, 2) for t in FIVE}
    assert [columns.columns(rank) for rank in range(4)] == [10] * 4
    rows = placed(FIVE, 4, "row-wise", ROOMY)
    assert [shard.rows for shard in rows.shards if shard.table == 1] == [17, 18, 17, 18]
    assert rows.row_wise_columns == 40
    assert [rows.columns(rank) for rank in range(4)] == [0] * 4
    seven = placed(FIVE, 7, "column-wise", ROOMY)  # 4 is what divides the 8 columns
    assert {shard.columns for shard in seven.shards} == {2}


def test_small_tables_are_on_all_ranks():
    placement = placed(FIVE, 3, "table-wise", ROOMY, replicate=50 * 32.0)
    assert placement.replicated == (3, 4)
    assert placement.replicated_params == 90 * 8
    assert {shard.table for shard in placement.shards} == {0, 1, 2}


def test_the_largest_tables_move_to_the_host():
    """Two ranks with room for 125 rows each: 320 are too many, and so are 220 + 20 that are cached of the first."""
    space = Space(125 * 32.0, host=HostMemory(200 * 32.0, cache_load_factor=0.2))
    placement = placed(FIVE, 2, "table-wise", space)
    assert {shard.table for shard in placement.shards if shard.on_host} == {0}
    for rank in range(2):
        assert sum(space.on_device(shard) for shard in placement.of(rank)) <= space.device
    assert place(FIVE, 2, "table-wise", Space(20 * 32.0, host=HostMemory(200 * 32.0))) is not None
    tiny = place(FIVE, 2, "table-wise", Space(20 * 32.0, host=HostMemory(90 * 32.0)))
    assert isinstance(tiny, Shard)


def test_the_rank_of_the_bottom_mlp_has_none():
    placement = placed(FIVE, 3, "table-wise", ROOMY, without=frozenset({0}))
    assert placement.of(0) == []
    assert len(placement.of(1)) + len(placement.of(2)) == 5


def test_lookups_and_updates_by_hand():
    """A rank with tables of 70 and 40 rows of 8 fp32, 2 rows of each for a sample, 3 ranks with 10 samples:
    30 x 2 x 2 x 32 bytes are read, and 2.5 times as many in the update; with Adagrad 8 more for each of 120 rows."""
    placement = placed(FIVE, 3, "table-wise", ROOMY)
    read = 30 * 2 * 2 * 32.0
    work = work_of(placement, 1, 10, ROOMY, 1e6, False)
    assert work.lookup == pytest.approx(read / 1e6)
    assert work.update == pytest.approx(2.5 * read / 1e6)
    assert (work.columns, work.indices) == (16, 4)
    adagrad = work_of(placement, 1, 10, ROOMY, 1e6, True)
    assert adagrad.update == pytest.approx((2.5 * read + 8 * 120) / 1e6)


def test_lookups_by_rows_are_shared_out():
    by_rows, whole = placed(FIVE, 4, "row-wise", ROOMY), placed(FIVE, 4, "table-wise", ROOMY)
    total = sum(work_of(whole, rank, 10, ROOMY, 1e6, True).lookup for rank in range(4))
    shares = [work_of(by_rows, rank, 10, ROOMY, 1e6, True) for rank in range(4)]
    assert sum(share.lookup for share in shares) == pytest.approx(total)
    assert sum(share.indices for share in shares) == pytest.approx(10)
    assert max(share.lookup for share in shares) < 1.05 * total / 4


def test_misses_of_the_cache_take_the_time_of_the_host():
    """All of 2 x 32 bytes of each of 20 samples: a quarter from the host, ten times as slow."""
    host = HostMemory(1e6, bandwidth=1e5, hit_rate=0.75, cache_load_factor=0.0)
    placement = placed([Table(100, 8, 2)], 1, "table-wise", Space(1000.0, host=host))
    assert placement.shards[0].on_host
    work = work_of(placement, 0, 20, Space(1000.0, host=host), 1e6, False)
    assert work.lookup == pytest.approx(20 * 64 * (0.75 / 1e6 + 0.25 / 1e5))
