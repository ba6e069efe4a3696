"""Flow completion times agree with SimGrid 4.1 (the head of simgrid_scenarios.json says how they were made)."""

import json
from pathlib import Path

import numpy as np
import pytest
from network_reference import Paths, finish_times, run_flows

from ddlsim.network import Network

FILE = Path(__file__).parents[1] / "data" / "simgrid_scenarios.json"
SCENARIOS = {s["name"]: s for s in json.loads(FILE.read_text())["scenarios"]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_flow_ends_when_simgrid_says_and_no_link_is_overloaded(name):
    scenario = SCENARIOS[name]
    assert [link["id"] for link in scenario["links"]] == list(range(len(scenario["links"])))
    flows = scenario["flows"]
    fabric = Paths(
        [link["bandwidth"] for link in scenario["links"]],
        [link["latency"] for link in scenario["links"]],
        [flow["route"] for flow in flows],
    )
    starts, nbytes = [f["start"] for f in flows], [f["bytes"] for f in flows]
    network = Network(fabric)
    end, n_checked = run_flows(network, fabric, starts, nbytes)
    assert n_checked >= len(flows)
    np.testing.assert_allclose(end, [f["simgrid_finish"] for f in flows], rtol=1e-9)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-11)
    carried = np.zeros(len(scenario["links"]))
    for flow in flows:
        carried[flow["route"]] += flow["bytes"]
    np.testing.assert_allclose(network.channel_nbytes, carried, rtol=1e-12)
