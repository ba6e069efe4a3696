"""`rings`: what they prove, what leaves machines by which member, and their time beside that of one ring."""

import numpy as np
import pytest

from ddlsim import ConfigError, load_cluster
from ddlsim.cluster import MultiGpu, star
from ddlsim.collectives import build
from ddlsim.collectives.check import check
from ddlsim.network import schedule_time

KINDS = ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "hosts", [[0] * 5, [0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1], [0, 1, 2], None]
)
def test_they_are_proved(kind, hosts):
    n = 5 if hosts is None else len(hosts)
    schedule = build("rings", n, 1e6, hosts, kind)
    check(schedule)
    assert schedule.bytes_sent(1e6) == pytest.approx(np.full(n, (n - 1) / n * 1e6))
    one = build("ring", n, 1e6, hosts, kind)
    n_rings = 1 if hosts is None or len(set(hosts)) == 1 else min(np.bincount(hosts))
    assert schedule.n_messages == n_rings * one.n_messages


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_leaves_its_machine_once(kind):
    hosts = np.repeat(np.arange(3), 4)
    (((lap,),)) = build("rings", 12, 1e6, hosts.tolist(), kind).lanes
    crosses = hosts[lap.src] != hosts[lap.dst]
    assert sorted(lap.src[crosses].tolist()) == sorted(lap.dst[crosses].tolist()) == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_all_adapters_together(kind):
    """n of B bytes/s: S (p - 1)/p / (n B) between machines whose inside is much faster."""
    host = MultiGpu(4, "nvswitch", "a100-80g", nvlink_bandwidth=1e15, nvlink_latency=0.0, pcie_bandwidth=1e15,
                    pcie_latency=0.0, n_pcie_switches=4, n_nics=4)  # fmt: skip
    cluster = load_cluster(star(3, bandwidth=1e9, latency=0.0, host=host))
    nodes, hosts = cluster.workers.tolist(), np.repeat(np.arange(3), 4).tolist()
    seconds = {
        name: schedule_time(cluster, build(name, 12, 1e9, hosts, kind), nodes, 1e9) for name in ("ring", "rings")
    }
    assert seconds["ring"] == pytest.approx(11 / 12, rel=1e-6)
    assert seconds["rings"] == pytest.approx(11 / 12 / 4, rel=1e-6)


def test_chunks_of_the_wrong_member():
    schedule = build("rings", 4, 1e6, [0, 0, 1, 1], "all_gather")
    object.__setattr__(schedule, "owners", np.roll(schedule.owners, 1))
    with pytest.raises(ConfigError, match="is left with"):
        check(schedule)
    object.__setattr__(schedule, "owners", np.zeros(8, dtype=np.int64))
    with pytest.raises(ConfigError, match="owners must name each of the 4 ranks"):
        check(schedule)
