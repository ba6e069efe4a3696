"""Cost and energy of a run against sums done by hand."""

import dataclasses

import pytest

import ddlsim
from ddlsim.cluster import Host, MultiGpu, star, with_storage
from ddlsim.run.costs import cost_assumptions, cost_rate, energy_assumptions, priced

V100 = dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=40.0)


def simulated(cluster, **fields):
    given = {"batch_size": 32, "steps": 2, "warmup": 0, "device": V100} | fields
    return ddlsim.simulate(cluster, "resnet50", **given)


def machines(n_hosts=4, host=None, **fields):
    return star(n_hosts, bandwidth="10 Gbit/s", latency="10 us", host=host or Host(device="v100", **fields))


def test_a_run_pays_for_the_machines_that_it_uses():
    """2 of 4 machines at 3.60 USD/h: 2 * 3.60 / 3600 = 0.002 USD/s."""
    result = simulated(machines(price="3.60 USD/h"), workers=2)
    assert result.cost_rate == pytest.approx(0.002)
    assert result.cost == pytest.approx(0.002 * result.end_time)


def test_devices_in_a_machine_may_have_a_price_of_their_own():
    """A machine at 1.80 USD/h with 3 of its 4 GPUs used at 3.60 each: (1.80 + 3 * 3.60) / 3600 = 0.0035 USD/s."""
    interior = MultiGpu(4, device="v100", price="1.80 USD/h", device_price="3.60 USD/h")
    assert simulated(machines(2, interior), workers=3).cost_rate == pytest.approx(0.0035)


def test_the_device_has_the_price_where_the_machine_has_none():
    device = dataclasses.replace(V100, price=0.001)
    assert simulated(machines(), workers=3, device=device).cost_rate == pytest.approx(0.003)
    priced = ddlsim.Cluster.from_graph(machines()).with_costs(price="7.2 USD/h")  # that is then all of it
    assert simulated(priced, workers=3, device=device).cost_rate == pytest.approx(0.006)


def test_a_parameter_server_in_a_machine_of_its_own_is_paid_for():
    """3 workers, and 1 server in the fourth machine."""
    strategy = ddlsim.ParameterServer(servers=1, placement="own")
    assert simulated(machines(price="3.6 USD/h"), workers=3, strategy=strategy).cost_rate == pytest.approx(0.004)


def test_energy_counts_busy_and_idle_devices_and_the_switch():
    """2 devices at 300 W while they compute and 40 W otherwise, a switch at 100 W all the time."""
    cluster = ddlsim.Cluster.from_graph(machines()).with_costs(switch_power="100 W")
    result = simulated(cluster, workers=2)
    busy = result.workers["compute"].sum()
    expected = 300.0 * busy + 40.0 * (2.0 * result.end_time - busy) + 100.0 * result.end_time
    assert 0.0 < busy < 2.0 * result.end_time
    assert result.energy == pytest.approx(expected)
    assert result.power == pytest.approx(expected / result.end_time)


def test_one_worker_needs_no_switch():
    """One worker sends nothing: 300 W while it computes, which is all the time."""
    assert simulated(machines(), workers=1).power == pytest.approx(300.0)


def test_unknown_powers_are_assumed_and_said():
    """Without an idle power 2 devices draw 300 W all the time; a switch of unknown power is left out. With both given
    nothing is assumed."""
    result = simulated(machines(), workers=2, device="v100")
    assert result.power == pytest.approx(600.0)
    wanted = ["v100 at the datasheet's 300 W throughout", "switches left out"]
    assert energy_assumptions(result) == wanted
    assert result.to_dict()["energy_assumptions"] == wanted
    assert f"kWh per million samples: {wanted[0]}, {wanted[1]}" in str(result)
    table = ddlsim.Study(result.experiment, {"workers": [2]}).run(jobs=1)
    assert table.frame["energy"][0] == pytest.approx(result.energy)
    assert f"energy: {wanted[0]}, {wanted[1]}" in table.frame["notes"][0]
    assert f"energy: {wanted[0]}, {wanted[1]}" in str(table).splitlines()
    known = simulated(ddlsim.Cluster.from_graph(machines()).with_costs(switch_power="100 W"), workers=2)
    assert energy_assumptions(known) == []


def test_a_device_of_unknown_power_has_no_energy():
    """Files of measured devices contain power_w = 0 if the driver does not report it."""
    result = simulated(machines(price="3.60 USD/h"), workers=2, device=dataclasses.replace(V100, power_w=0.0))
    assert result.known("energy") is None
    assert "energy" not in str(result)
    with pytest.raises(ddlsim.ConfigError, match="the power of device 'v100' is unknown; set power_w in its file"):
        _ = result.energy


def test_a_storage_without_a_price_is_left_out_and_said():
    cluster = with_storage(machines(price="3.60 USD/h"), "storage", read="2 GB/s", bandwidth="10 Gbit/s")
    source = ddlsim.Input("cifar10", storage="storage")
    result = simulated(cluster, workers=2, input=source)
    assert result.cost_rate == pytest.approx(0.002)
    assert "USD per million samples: storage without price left out" in str(result)
    assert result.to_dict()["cost_assumptions"] == cost_assumptions(result) == ["storage without price left out"]
    table = ddlsim.Study(result.experiment, {"workers": [2]}).run(jobs=1)
    assert "cost: storage without price left out" in table.frame["notes"][0]
    assert cost_assumptions(simulated(cluster, workers=2)) == []


# ---------------------------------------------------------------- shared machines, spares, and who is not there

EIGHT = MultiGpu(8, device="v100", price="10 USD/h")
JOB = ddlsim.Experiment(
    ddlsim.Cluster.from_graph(machines(2, EIGHT)).with_costs(switch_power="100 W"), "resnet50",
    ddlsim.AllReduce("ring", "none"), 32, compute=ddlsim.Affine("1 s", 0.0), steps=10, warmup=0, device=V100,
)  # fmt: skip


def on(places, **fields):
    return JOB.with_(workers=places, **fields)


def test_two_jobs_on_one_machine_pay_for_it_once():
    """10 USD/h, not 20, in proportion to the devices in use."""
    jobs = ddlsim.simulate_jobs([ddlsim.Job(on([0, 1, 2]), "a"), ddlsim.Job(on([3]), "b")])
    rates = [3600.0 * jobs[name].cost_rate for name in "ab"]
    assert rates == pytest.approx([7.5, 2.5], rel=0.01)
    assert 3600.0 * jobs.alone["b"].cost_rate == pytest.approx(10.0)
    background = ddlsim.simulate(on([3], background=[ddlsim.Job(on([0, 1, 2]))]))
    assert 3600.0 * background.cost_rate == pytest.approx(2.5, rel=0.01)


def test_who_stays_longer_pays_for_the_rest():
    """Alone for 10 s, together for 10 s: a pays 10 + 5 s of the machine, b 5 s of it; all of it is paid for."""
    jobs = ddlsim.simulate_jobs([ddlsim.Job(on([0, 1], steps=20), "a"), ddlsim.Job(on([2, 3]), "b", start="10 s")])
    costs = [3600.0 * jobs[name].cost for name in "ab"]
    assert costs == pytest.approx([150.0, 50.0], rel=0.01)
    assert sum(costs) == pytest.approx(10.0 * jobs.end_time, rel=1e-9)


def test_jobs_share_the_energy_of_a_switch_and_the_price_of_a_server():
    """A switch of 100 W that two jobs use draws 100 W, not 200."""
    pairs = [[0, 8], [1, 9]]
    jobs = ddlsim.simulate_jobs([ddlsim.Job(on(places), str(i)) for i, places in enumerate(pairs)])
    for ran in jobs.runs:
        busy = ran.result.device_seconds["compute"].sum()
        devices = 300.0 * busy + 40.0 * (2.0 * ran.result.end_time - busy)
        assert ran.result.energy == pytest.approx(devices + 50.0 * ran.result.end_time, rel=1e-3)
        assert 3600.0 * ran.result.cost_rate == pytest.approx(10.0, rel=1e-3)  # half of two machines


def test_spares_are_paid_for():
    """Two machines and a spare of 2.40 USD/h each: 7.20, not 4.80 USD/h; spot machines and spares cost less."""
    cluster = ddlsim.Cluster.from_graph(machines()).with_costs(price="2.40 USD/h")
    failures = ddlsim.Failures("1000 h", per="host", spares=1)
    checkpoints = ddlsim.Checkpoints("1 h", stall="1 s")

    def paid(**fields):
        return 3600.0 * simulated(cluster, **{"workers": 2, "checkpoints": checkpoints, **fields}).cost_rate

    assert paid() == pytest.approx(4.80)
    assert paid(failures=failures) == pytest.approx(7.20)
    assert paid(failures=dataclasses.replace(failures, discount=0.5)) == pytest.approx(3.60)
    free = {"strategy": ddlsim.AsyncParameterServer(placement="colocated"), "checkpoints": None, "max_time": "1 h"}
    assert paid(failures=failures, **free) == pytest.approx(7.20)


def test_an_asynchronous_worker_whose_machine_is_away_draws_no_power(tmp_path):
    """One of two workers is lost after 4 s of 100, for good or for 50 s."""
    for repair, present in (("inf", 4.0), ("50", 50.0)):
        file = tmp_path / f"{repair}.csv"
        file.write_text(f"time_s,unit,repair_s\n4,1,{repair}\n")
        failures = ddlsim.Failures(trace=file, per="host", restart=0.0)
        result = ddlsim.simulate(
            machines(3), "lenet5", ddlsim.AsyncParameterServer(), 32, 2, failures=failures, device=V100,
            compute=ddlsim.Affine("1 s", 0.0), max_time="100 s", steps=10**6, warmup=0,
        )  # fmt: skip
        busy = result.device_seconds["compute"].sum()
        assert busy == pytest.approx(100.0 + present, abs=0.5)
        assert result.energy == pytest.approx(300.0 * busy + 40.0 * (100.0 + present - busy))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulated(machines()).cost, "machine 'h0' .* has no price; set one: cluster.with_costs"),
        (
            lambda: simulated(star(2, bandwidth="1 Gbit/s", latency="1 us"), device=None).energy,
            "the workers' devices in cluster .* are unknown; for example, set device",
        ),
        (lambda: machines(price="3 W"), "is a power, not a price"),
        (lambda: ddlsim.Cluster.from_graph(machines()).with_costs(switch_power=-1.0), "must be finite and not neg"),
    ],
    ids=["price", "device", "unit", "negative"],
)
def test_what_is_not_known_is_an_error_with_a_remedy(make, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        make()


def test_costs_are_read_from_files_and_survive_being_written(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'switch_power = "150 W"\n[generator]\ntype = "star"\nn_hosts = 3\nbandwidth = "10 Gbit/s"\nlatency = "10 us"\n'
        '[host]\ndevice = "v100"\nprice = "3.06 USD/h"\ndevice_price = "2 USD/h"\n'
    )
    read = ddlsim.load_cluster(path)
    read.save(tmp_path / "again.json")
    for cluster in (read, ddlsim.load_cluster(tmp_path / "again.json")):
        assert cluster.host_price.tolist() == pytest.approx([3.06 / 3600.0] * 3)
        assert cluster.device_price[cluster.workers].tolist() == pytest.approx([2.0 / 3600.0] * 3)
        assert cluster.switch_power[cluster.is_fabric_switch].tolist() == [150.0]


def test_a_bundled_cluster_with_a_published_price():
    """Eight p3.2xlarge at 3.06 USD/h."""
    result = ddlsim.simulate("aws-p3-2xlarge", "resnet50", steps=2)
    assert 3600.0 * cost_rate(result) == pytest.approx(8 * 3.06)


def test_a_cloud_s_price_is_that_of_a_machine_s_devices():
    """Eight H100 on AWS are a p5.48xlarge, also where a run uses four of them."""
    cluster = ddlsim.load_cluster("aws-p5-48xlarge+n_hosts=2")
    aws = priced(cluster, "aws")
    assert aws.host_price is not None
    assert (3600.0 * aws.host_price).tolist() == pytest.approx([55.04, 55.04])
    base = ddlsim.Experiment(cluster, "resnet50", workers=4, steps=1)
    table = ddlsim.Study(base, {"cluster.price": ["aws", "2 USD/h"]}).run(jobs=1)
    costs = table.frame["cost_per_sample"]
    assert costs[0] / costs[1] == pytest.approx(55.04 / 2.0)
    with pytest.raises(ddlsim.ConfigError, match="the catalogue has no 'aws' price for device 'knl-7230'"):
        priced(ddlsim.load_cluster("theta"), "aws")
    with pytest.raises(ddlsim.ConfigError, match="does not specify its devices, so the price at 'aws' is unknown"):
        priced(ddlsim.load_cluster(star(2, bandwidth="1 Gbit/s", latency="1 us")), "aws")
