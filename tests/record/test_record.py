"""What ddlsim computes is what it computed when the record was made, but for the listed changes.

About sixty rows of all kinds are compared in `make test`, all rows in `make test-slow`. To see what differs, and to
list it as changed with a reason: ``python -m tests.record --help``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from typing import Any

import pytest
import record_measure as rm
from bundled_strategies import BUNDLED, VARIANTS
from record_rows import ROWS

from ddlsim import strategies
from ddlsim.cluster import star

NAMES = list(ROWS)
QUICK = 64
#: SHA-256 of the record
RECORD = "5cb9244b4b37c58e2104003399d70262c2cc4e95d0efb9b045a133d9a58a90a3"
SAMPLE = NAMES[11 :: len(NAMES) // QUICK]
KINDS = list(dict.fromkeys(name.partition("/")[0] for name in NAMES))


def record() -> dict[str, rm.Row]:
    return rm.files()[0]


def changes() -> dict[str, dict[str, Any]]:
    return rm.files()[1]


def compare(names: list[str]) -> None:
    """Fail with all that differs, row by row."""
    wrong = ["\n    ".join([name, *lines]) for name in names if (lines := rm.differences(name, record(), changes()))]
    assert not wrong, f"{len(wrong)} of {len(names)} rows differ; see python -m tests.record --help\n" + "\n".join(
        wrong
    )


def test_the_record_was_not_made_again() -> None:
    """What changes is listed in a file of its own, with a reason."""
    assert hashlib.sha256(rm.RECORD.read_bytes()).hexdigest() == RECORD


def test_the_record_is_complete() -> None:
    """Every row is recorded, or listed since; every change is of a row, has a reason, and is one."""
    assert set(record()) | set(changes()) == set(NAMES)
    for name, change in changes().items():
        assert change["reason"], name
        rm.expected(name, record(), changes())


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_rows_is_as_recorded(part: int) -> None:
    compare(SAMPLE[part::4])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_recorded(kind: str) -> None:
    compare([name for name in NAMES if name.partition("/")[0] == kind])


def test_every_bundled_strategy_is_listed() -> None:
    found = {type(one.strategy).__name__ for one in BUNDLED.values()}
    classes = {name: getattr(strategies, name) for name in strategies.__all__}
    public = {
        name
        for name, each in classes.items()
        if inspect.isclass(each) and hasattr(each, "start") and hasattr(each, "label") and name != "Strategy"
    }
    assert found == public == set(BUNDLED)
    assert {type(one.strategy).__name__ for one in VARIANTS.values()} <= public


# ------------------------------------------------------------ the comparison itself


def test_numbers_are_compared_closely_and_hashes_exactly() -> None:
    row = {
        "time": 2.0,
        "seconds": {"compute": [1.0, 1e-15], "idle": [0.0]},
        "params": "ab",
        "history": {"loss": [2.0, None], "nbytes": [1e9, 2e9]},
    }
    assert rm.different(row, json.loads(json.dumps(row))) == []
    assert rm.different(row, row | {"time": 2.0 * (1 + 1e-13)}) == []
    assert rm.different(row, row | {"seconds": {"compute": [1.0, 3e-15], "idle": [1e-14]}}) == []  # rounding
    assert rm.different(row, row | {"time": 2.0 * (1 + 1e-11)}) == ["time"]
    assert rm.different(row, row | {"params": "ac"}) == ["params"]
    assert rm.different(row, row | {"seconds": {"compute": [1.0, 1e-15]}}) == ["seconds"]
    assert rm.different(row, row | {"history": {"loss": [2.001, None], "nbytes": [1e9, 2e9]}}) == ["history"]
    assert rm.different(row, row | {"history": {"loss": [2.0, 1.0], "nbytes": [1e9, 2e9]}}) == ["history"]
    assert rm.different(row, {"refused": "ConfigError", "message": "no"}) == [*row, "refused"]


def test_long_arrays_show_values_that_trade_places() -> None:
    values = [float(i % 7) for i in range(100)]
    swapped = [values[1], values[0], *values[2:]]
    old, new = rm.array(values), rm.array(swapped)
    assert (old["n"], old["abs"], old["max"]) == (100, sum(values), 6.0)
    assert rm.field_same(old, rm.array([value * (1 + 1e-15) for value in values]))
    assert not rm.field_same(old, new)
    for n in (4, 100):  # equal values, and almost equal ones
        assert rm.field_same(rm.array([2.0] * n), rm.array([2.0] * (n - 1) + [2.0 * (1 + 1e-15)]))
        assert not rm.field_same(rm.array([2.0] * n), rm.array([2.0] * (n - 1) + [2.1]))


def test_a_listed_change_holds_and_must_be_one() -> None:
    recorded = {"row": {"time": 1.0, "nbytes": 5.0}}
    assert rm.expected("row", recorded, {"row": {"reason": "why", "fields": {"time": 2.0, "cost": 1.0}}}) == {
        "time": 2.0,
        "nbytes": 5.0,
        "cost": 1.0,
    }
    assert rm.expected("row", recorded, {"row": {"reason": "why", "fields": {"time": None}}}) == {"nbytes": 5.0}
    with pytest.raises(AssertionError, match="row: nbytes is listed as changed, but has the recorded value"):
        rm.expected("row", recorded, {"row": {"reason": "why", "fields": {"time": 2.0, "nbytes": 5.0}}})


def test_a_change_of_the_network_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import record_rows

    faster = rm.ddlsim.load_cluster(star(8, bandwidth="21 Mbit/s", latency="50 us"))
    row = functools.partial(record_rows.experiment, BUNDLED["AllReduce"].strategy, cluster=faster)
    monkeypatch.setitem(ROWS, "plain/AllReduce", lambda: rm.ddlsim.simulate(row()))
    lines = rm.differences("plain/AllReduce", record(), {})
    assert {"time", "step_ends", "seconds", "link_busy"} <= {line.partition(":")[0] for line in lines}
