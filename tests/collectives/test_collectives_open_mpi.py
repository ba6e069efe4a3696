"""What Open MPI runs: which algorithm for which ranks and sizes, and what that costs where p is no power of two."""

import pytest

import ddlsim
from ddlsim.cluster import load_cluster, star, with_detail
from ddlsim.collectives import build, check, cost
from ddlsim.collectives.build import size_class


@pytest.mark.parametrize(
    ("n", "nbytes", "wanted"),
    [
        (2, 100.0, "recursive_doubling"), (3, 5000.0, "ring"), (3, 1e6, "halving_doubling"),
        (8, 8191.0, "recursive_doubling"), (8, 8192.0, "halving_doubling"), (24, 32.0, "ring"),
        (48, 1e4, "halving_doubling"), (100, 262143.0, "recursive_doubling"), (128, 1e5, "binomial_tree"),
        (128, 2e5, "recursive_doubling"), (256, 4096.0, "halving_doubling"), (16, 1e9, "halving_doubling"),
    ],
)  # fmt: skip
def test_the_choice(n, nbytes, wanted):
    schedule = build("open_mpi", n, nbytes)
    check(schedule)
    assert str(schedule) == str(build(wanted, n, nbytes))


def test_large_buffers_take_twice_as_long_as_a_ring_where_p_is_no_power_of_two():
    """Five hosts: one folds, four exchange: S before, 3/2 S in between and S after, 8/5 S in a ring. Eager messages of
    those that need not fold would meet the folding ones; above 64 KiB Open MPI's TCP asks first."""
    rate, nbytes = 1.25e9, 40 * 2.0**20
    five, four = (
        with_detail(load_cluster(star(n, bandwidth=rate, latency=0.0)), transport="tcp-cubic", rendezvous="64 KiB")
        for n in (5, 4)
    )
    ring, mpi = (ddlsim.collective_time(five, name, nbytes) for name in ("ring", "open_mpi"))
    assert ring == pytest.approx(1.6 * nbytes / rate)
    assert mpi == pytest.approx(3.5 * nbytes / rate)
    wanted = cost.halving_doubling(4, nbytes, alpha=0.0, beta=1 / rate)
    assert ddlsim.collective_time(four, "open_mpi", nbytes) == pytest.approx(wanted)


def test_sizes_between_the_same_powers_of_two_share_a_schedule():
    sizes = [size_class("open_mpi", nbytes, "all_reduce", None) for nbytes in (5000.0, 8191.0, 8192.0, 9000.0)]
    assert sizes[0] == sizes[1] != sizes[2] == sizes[3]


def test_a_run_decides_for_each_bucket():
    result = ddlsim.simulate("office-1gbe", "resnet18", ddlsim.AllReduce("open_mpi"), 32, 5, steps=2)
    slower = ddlsim.simulate("office-1gbe", "resnet18", ddlsim.AllReduce("ring"), 32, 5, steps=2)
    assert result.step_time > 1.5 * slower.step_time
