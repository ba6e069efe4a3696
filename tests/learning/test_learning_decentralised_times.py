"""How long steps of decentralised strategies take: closed forms on an idle star, to the last digits."""

import math

import networkx
import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import star
from ddlsim.collectives import cost

COMPUTE = 5e-3  # s of a step
BANDWIDTH = 1.001e9  # bytes/s
NBYTES = 8.008e6  # of two dense layers: 8 ms on a link
ON_LINK = NBYTES / BANDWIDTH


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "two-layers.toml"
    path.write_text(
        'title = "Two equal layers"\nsources = ["made up"]\ninput = [1000]\n'
        'layers = [{ type = "dense", units = 1000 }, { type = "dense", units = 1000 }]\n'
    )
    return path


def ends(model, strategy, steps, n=4, latency=0.0, **more):
    """Times at which updates were made, and the result."""
    hosts = star(n, bandwidth=BANDWIDTH, latency=latency)
    more = {"compute": ddlsim.Measured(COMPUTE, 1), "workers": n} | more
    result = ddlsim.simulate(hosts, model, strategy, 1, steps=steps, warmup=0, **more)
    return np.array([time for time, _ in result.recorder.updates]), result


def ring(n, latency=0.0):
    return cost.ring(n, NBYTES, 2 * latency, 1 / BANDWIDTH)


@pytest.mark.parametrize("tau", [1, 2, 7])
@pytest.mark.parametrize("latency", [0.0, 50e-6])
def test_local_sgd_shares_an_all_reduce_among_its_steps(model, tau, latency):
    """t_c + t_ar / tau in the mean; the all-reduce comes at the end of a period."""
    times, result = ends(model, ddlsim.LocalSGD(tau), 3 * tau, latency=latency)
    assert times[-1] / (3 * tau) == pytest.approx(COMPUTE + ring(4, latency) / tau, rel=1e-12)
    k = np.arange(1, 3 * tau + 1)
    np.testing.assert_allclose(times, k * COMPUTE + k // tau * ring(4, latency), rtol=1e-12)
    assert result.nbytes_sent == pytest.approx(3 * 4 * 2 * 3 / 4 * NBYTES)


@pytest.mark.parametrize("tau", [2, 5, 20])
def test_the_speed_up_of_periodic_averaging(model, tau):
    """(1 + a) / (1 + a / tau) with a = D / Y (Wang and Joshi 2019, section 3)."""
    a = ring(4) / COMPUTE
    synchronous, _ = ends(model, ddlsim.AllReduce("ring", "none"), 20)
    periodic, _ = ends(model, ddlsim.LocalSGD(tau), 20)
    assert synchronous[-1] / periodic[-1] == pytest.approx((1 + a) / (1 + a / tau), rel=1e-12)


@pytest.mark.parametrize(("tau", "delay"), [(1, 1), (2, 1), (3, 1), (4, 2), (4, 3), (4, 4), (10, 5)])
@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_dasgd_waits_only_for_what_does_not_fit_into_the_delay(model, tau, delay, slow):
    """tau t_c + max(0, t_ar - d t_c) for tau steps: nothing but computing if the all-reduce fits into d steps."""
    compute = COMPUTE * slow
    times, result = ends(model, ddlsim.DaSGD(tau, delay), 6 * tau + delay, compute=ddlsim.Measured(compute, 1))
    late = max(0.0, ring(4) - delay * compute)
    period = times[5 * tau - 1 + delay] - times[4 * tau - 1 + delay]
    assert period == pytest.approx(tau * compute + late, rel=1e-12)
    table = result.workers
    if late == 0.0:
        assert (table[["communication", "waiting"]] == 0.0).all(axis=None)
    else:
        np.testing.assert_allclose(table["communication"], 6 * late, rtol=1e-9)


@pytest.mark.parametrize("strategy", [ddlsim.OverlapLocalSGD(2), ddlsim.CoCoDSGD(2)], ids=lambda s: s.label)
@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_averages_that_travel_for_a_period(model, strategy, slow):
    """A period takes the longer of its steps and the all-reduce."""
    compute = COMPUTE * slow
    times, _ = ends(model, strategy, 12, compute=ddlsim.Measured(compute, 1))
    assert times[9] - times[7] == pytest.approx(max(2 * compute, ring(4)), rel=1e-12)


def test_block_momentum_takes_no_time(model):
    assert ends(model, ddlsim.BMUF(4), 8)[0].tolist() == ends(model, ddlsim.LocalSGD(4), 8)[0].tolist()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_sharded_update_computes_an_nth_of_it(model, n):
    """Gradient, reduce-scatter, 1/N of the update, all-gather; as many bytes as a ring all-reduce."""
    times, result = ends(model, ddlsim.ShardedUpdate(), 3, n=n, latency=50e-6, compute=None, device="desktop-cpu")
    workload = result.workloads[0]
    half = (n - 1) * 100e-6 + (n - 1) / n * ON_LINK
    step = workload.forward_time + workload.backward_time + half + workload.optimizer / n + half
    assert workload.optimizer > 1e-4
    np.testing.assert_allclose(times, step * np.arange(1, 4), rtol=1e-12)
    whole, reduced = ends(
        model, ddlsim.AllReduce("ring", "none"), 3, n=n, latency=50e-6, compute=None, device="desktop-cpu"
    )
    assert result.nbytes_sent == pytest.approx(reduced.nbytes_sent, rel=1e-12)
    assert whole[-1] - times[-1] == pytest.approx(3 * (1 - 1 / n) * workload.optimizer, rel=1e-9)


def test_the_slowest_makes_all_wait_only_when_they_average(model):
    """Speeds 1 and 1/2: a period of 4 ends after 4 slow steps, when the fast one has waited for half of it."""
    times, result = ends(model, ddlsim.LocalSGD(4), 8, n=2, speed=(1.0, 0.5))
    assert times[-1] == pytest.approx(8 * 2 * COMPUTE + 2 * ring(2), rel=1e-12)
    assert result.workers["waiting"].tolist() == pytest.approx([8 * COMPUTE, 0.0])
    assert result.workers["communication"].tolist() == pytest.approx([2 * ring(2)] * 2)


# ---------------------------------------------------------------- gossip


@pytest.mark.parametrize(("graph", "n_neighbours"), [("ring", 2), ("complete", 5), (networkx.cubical_graph(), 3)])
@pytest.mark.parametrize("slow", [1.0, 10.0])
def test_dpsgd_hides_its_exchange_behind_the_gradient(model, graph, n_neighbours, slow):
    """Everybody's port carries d S bytes each way while the gradient is computed: max(t_c, 2 alpha + d S / B)."""
    n = 8 if n_neighbours == 3 else 6
    times, result = ends(model, ddlsim.DPSGD(graph), 5, n=n, latency=50e-6, compute=ddlsim.Measured(COMPUTE * slow, 1))
    step = max(COMPUTE * slow, 100e-6 + n_neighbours * ON_LINK)
    np.testing.assert_allclose(times, step * np.arange(1, 6), rtol=1e-12)
    started = math.ceil(result.nbytes_sent / (n * n_neighbours * NBYTES) - 1e-9)  # the sixth may just have begun
    assert started in (5, 6)


@pytest.mark.parametrize("slow", [1.0, 10.0])
def test_adpsgd_makes_only_those_who_ask_wait(model, slow):
    """There and back: 2 (2 alpha + S / B), beside the gradient."""
    compute = COMPUTE * slow
    _, result = ends(model, ddlsim.ADPSGD("ring"), 40, n=2, latency=50e-6, compute=ddlsim.Measured(compute, 1))
    asks, answers = result.recorder.step_end
    assert np.diff(answers) == pytest.approx(compute)
    assert np.diff(asks) == pytest.approx(max(compute, 2 * (100e-6 + ON_LINK)))
    assert result.workers["communication"][1] == 0.0


def test_nobody_waits_for_gossip(model):
    """Every worker makes its steps at its own speed, as long as a push has time to arrive before the next."""
    compute, speed = ddlsim.Measured(0.1, 1), (1.0, 1.0, 0.5, 0.25)
    times, result = ends(model, ddlsim.GossipSGD(0.25), 50, n=4, compute=compute, speed=speed)
    assert np.diff(result.recorder.step_end[0]) == pytest.approx(0.1)
    assert len(times) / times[-1] == pytest.approx(2.75 / 0.1, rel=0.03)
    assert (result.workers[["communication", "waiting"]] == 0.0).all(axis=None)
    assert result.nbytes_sent / NBYTES == pytest.approx(0.25 * 200, abs=4 * math.sqrt(200 * 0.25 * 0.75))


def test_a_worker_has_one_push_on_the_wire(model):
    """With p = 1 and pushes that take longer than a step, it is the wire that sets the pace."""
    _, result = ends(model, ddlsim.GossipSGD(1.0), 20, n=2)
    assert np.diff(result.recorder.step_end[0][2:]) == pytest.approx(max(COMPUTE, ON_LINK))


def test_the_seed_of_a_timing_run_draws_the_partners(model):
    def bytes_received(seed):
        result = ends(model, ddlsim.GossipSGD(0.5), 30, n=6, seed=seed)[1]
        return result.links["nbytes"].tolist()

    assert bytes_received(1) == bytes_received(1) != bytes_received(2)
