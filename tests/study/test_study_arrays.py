"""`table.to_xarray()`: the points at their places, with what they are called and measured in."""

import sys

import numpy as np
import pytest
from study_parts import BASE, VARY

import ddlsim
from ddlsim.run.metrics import METRICS
from ddlsim.study import Range, Study


@pytest.fixture(scope="module")
def table():
    return Study(BASE, {**VARY, "workers": [2, 400]}, seeds=2).run(jobs=1)


def test_every_point_is_at_its_place(table):
    """Back as a frame it has the numbers of the table's own."""
    data = table.to_xarray()
    assert data.sizes == {"workers": 2, "strategy": 3, "cluster.nic.bandwidth": 2, "seed": 2}
    index = [*table.axes, "seed"]
    back = data.to_dataframe().reset_index().set_index(index)
    for _, row in table.frame.iterrows():
        found = back.loc[tuple(row[index])]
        assert found["status"] == row["status"]
        for name in METRICS:
            if name in table.frame:
                np.testing.assert_equal(found[name], float(row[name]))
    assert len(back) == len(table.frame)
    ring = {"workers": 2, "strategy": "all-reduce (ring, ddp)", "cluster.nic.bandwidth": "10 Gbit/s", "seed": 1}
    one = ddlsim.simulate(BASE.with_(workers=2, strategy=ddlsim.AllReduce("ring"), seed=1))
    assert data["throughput"].sel(ring).item() == one.throughput


def test_what_was_not_simulated_is_nan(table):
    data = table.to_xarray()
    skipped = data.sel(workers=400)
    assert (skipped["status"] == "skipped").all()
    assert np.isnan(skipped["throughput"]).all()
    assert np.isfinite(data["throughput"].sel(workers=2)).all()
    listed = Study(BASE, {"workers": [2, 4], "batch_size": [8, 16]}, design="list").run(jobs=1).to_xarray()
    assert listed["status"].sel(seed=0).values.tolist() == [["done", "missing"], ["missing", "done"]]
    assert np.isnan(listed["step_time"].sel(workers=2, batch_size=16, seed=0))


def test_variables_say_their_unit_and_what_people_call_them(table):
    data = table.to_xarray()
    assert data["throughput"].attrs == {"units": "samples/s", "long_name": "throughput"}
    assert data["efficiency"].attrs["units"] == "1"
    assert data["communication_share"].attrs["long_name"] == "exposed communication"
    assert data["workers"].dtype.kind == "i"
    assert data["strategy"].dtype.kind == "U"


def test_samples_are_no_grid_and_xarray_is_asked_for(monkeypatch, table):
    space = {"batch_size": Range(8, 9000, integer=True), "accumulation": Range(1, 9000, integer=True)}
    sample = Study(BASE.with_(steps=1), space, design="random", n_points=3).run(jobs=1)
    assert sample.to_xarray().sizes["batch_size"] == 3
    monkeypatch.setattr("ddlsim.study.table.MAX_CELLS", 8)
    with pytest.raises(
        ddlsim.ConfigError, match="the array of 3 x 3 x 1 elements for 3 points exceeds the limit of 8, because"
    ):
        sample.to_xarray()
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ddlsim.ConfigError, match=r"pip install 'ddlsim\[xarray\]'"):
        table.to_xarray()
