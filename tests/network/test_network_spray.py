"""Messages on several equal paths: the same as one link as wide as all of them; every byte is accounted for."""

import dataclasses

import networkx as nx
import numpy as np
import pytest
from bundled_strategies import some
from draws import latin
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim import Affine, AllReduce, Background, Experiment, Job, LinkFault, Lognormal, Measured
from ddlsim.cluster import Cluster, fat_tree, leaf_spine, torus, with_detail
from ddlsim.cluster.calibrated import current_parameters, with_parameters
from ddlsim.errors import ConfigError
from ddlsim.network import Network

GB = 1e9
UNIT = {"bandwidth": 1.0, "latency": 1e-6}


def nvswitches(routing, n_switches=4):
    """8 GPUs on NVSwitches, drawn as a link from each GPU to each switch, 450 GB/s per GPU together."""
    graph = nx.Graph(name="hgx", routing=routing)
    for gpu in range(8):
        graph.add_node(f"gpu{gpu}", kind="gpu", host="machine", device="h100")
    for switch in range(n_switches):
        graph.add_node(f"nvswitch{switch}", kind="switch", host="machine")
        for gpu in range(8):
            graph.add_edge(
                f"gpu{gpu}", f"nvswitch{switch}", bandwidth=450 * GB / n_switches, latency=0.35e-6, kind="nvlink"
            )
    return graph


def lag(routing, n_links=4):
    """Two switches with 4 machines each, joined by 40 GB/s in so many links."""
    graph = nx.MultiGraph(name="lag", routing=routing)
    for i in range(8):
        graph.add_node(f"h{i}", kind="host")
        graph.add_edge(f"h{i}", f"s{i // 4}", bandwidth=10 * GB, latency=1e-6)
    for switch in ("s0", "s1"):
        graph.nodes[switch]["kind"] = "switch"
    for _ in range(n_links):
        graph.add_edge("s0", "s1", bandwidth=40 * GB / n_links, latency=1e-6)
    return graph


def planes(routing, n_planes=2):
    """8 machines with a port in each plane (or at each of two top-of-rack switches), 10 GB/s together."""
    graph = nx.Graph(name="planes", routing=routing)
    for plane in range(n_planes):
        graph.add_node(f"plane{plane}", kind="switch")
        for i in range(8):
            graph.add_node(f"h{i}", kind="host")
            graph.add_edge(f"h{i}", f"plane{plane}", bandwidth=10 * GB / n_planes, latency=1e-6)
    return graph


def spines(routing, n_spines=4):
    """A leaf-spine network whose trunks are so many."""
    return leaf_spine(
        2, 4, n_spines, bandwidth=10 * GB, latency=1e-6, trunk_bandwidth=40 * GB / n_spines, routing=routing
    )


DRAWN = {nvswitches: 4, lag: 4, planes: 2, spines: 4}


# ------------------------------------------------------------ values


def test_four_nvswitches_carry_450_gb_per_second():
    """2 (n - 1)/n S over 450 GB/s; over one switch of four, it takes four times as long."""
    time = 2 * 7 / 8 * GB / (450 * GB) + 14 * 0.7e-6
    assert ddlsim.collective_time(nvswitches("spray"), "ring", "1 GB") == pytest.approx(time, rel=1e-9)
    narrow = 2 * 7 / 8 * GB / (112.5 * GB) + 14 * 0.7e-6
    assert ddlsim.collective_time(nvswitches("shortest"), "ring", "1 GB") == pytest.approx(narrow, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "double_binary_tree", "default"])
@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_spraying_is_one_link_as_wide_as_all(draw, algorithm):
    sprayed = ddlsim.collective_time(draw("spray"), algorithm, "100 MB")
    assert sprayed == pytest.approx(ddlsim.collective_time(draw("shortest", 1), algorithm, "100 MB"), rel=1e-9)


STEPS = {"compute": Affine("20 ms", "1 ms"), "steps": 4, "warmup": 1}
STRATEGIES = some("halving local server asynchronous soft gossip ad-psgd fsdp pipeline")


@pytest.mark.parametrize(("draw", "strategy"), latin([lag, planes, spines], STRATEGIES))
def test_so_are_runs(draw, strategy):
    """Planned steps, servers, asynchronous workers and peers; with jitter, so that messages start at any time."""
    times = [
        ddlsim.simulate(
            graph, "resnet18", STRATEGIES[strategy], batch_size=8, workers=8, jitter=Lognormal(0.3), **STEPS
        ).step_time
        for graph in (draw("spray"), draw("shortest", 1))
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_so_are_jobs_with_faults_and_background_traffic():
    """Two jobs, a source of traffic, and a port at half its rate."""
    made = {}
    for graph in (spines("spray"), spines("shortest", 1)):
        jobs = [
            Job(Experiment(graph, "resnet18", AllReduce("ring"), 8, [0, 4, 1, 5], jitter=Lognormal(0.2), **STEPS)),
            Job(Experiment(graph, "resnet18", AllReduce("halving_doubling"), 8, [2, 6, 3, 7], **STEPS)),
            Background("h0", "h7", "3 GB/s"),
        ]
        fault = LinkFault("h1", "leaf0", "30 ms", "40 ms", 0.5)
        made[graph.graph["routing"]] = ddlsim.simulate_jobs(jobs, faults=[fault])
    for name in made["spray"].names:
        one, other = (made[routing][name] for routing in ("spray", "shortest"))
        assert one.step_time == pytest.approx(other.step_time, rel=1e-9)
        assert one.nbytes_sent == pytest.approx(other.nbytes_sent, rel=1e-9)


# ------------------------------------------------------------ shares


def check_shares(cluster, src, dst):
    """What leaves the source arrives; nodes pass on what they get; links lie on paths as short as the route."""
    routes, split = cluster.routes(src, dst), cluster.split_routes(src, dst)
    for i in range(len(src)):
        links, share = split.path(i)
        assert len(set(links.tolist())) == len(links)
        through = np.zeros(cluster.n_nodes)
        np.add.at(through, cluster.link_dst[links], share)
        np.subtract.at(through, cluster.link_src[links], share)
        ends = np.zeros(cluster.n_nodes)
        ends[dst[i]], ends[src[i]] = 1.0, -1.0
        np.testing.assert_allclose(through, ends, atol=1e-12)
        assert share.sum() == pytest.approx(len(routes[i]), rel=1e-12)
        assert share @ cluster.link_latency[links] == pytest.approx(cluster.link_latency[routes[i]].sum(), rel=1e-9)


@pytest.mark.parametrize(
    "graph",
    [fat_tree(4, **UNIT), torus((4, 3), **UNIT), lag("ecmp"), planes("ecmp", 3)],
    ids=["fat tree", "torus", "lag", "planes"],
)
@pytest.mark.parametrize("connections", [None, 1, 3, 64])
def test_shares_add_up(graph, connections):
    """Sprayed (None), and by ECMP over connections that are hashed by themselves."""
    cluster = Cluster.from_graph(graph)
    src, dst = (nodes.ravel() for nodes in np.meshgrid(cluster.workers, cluster.workers, indexing="ij"))
    src, dst = src[src != dst], dst[src != dst]
    if connections is not None:
        cluster = with_detail(cluster, transport="infiniband", connections=connections, unordered=True)
    cluster = dataclasses.replace(cluster, routing="spray" if connections is None else "ecmp")
    check_shares(cluster, src, dst)
    if connections == 1:
        assert cluster.split_routes(src, dst).links.tolist() == cluster.routes(src, dst).links.tolist()


def test_every_node_divides_evenly():
    """4 of 16 hosts' worth of paths between pods of a fat tree of 4 ports: 1/2 per aggregation, 1/4 per core."""
    cluster = Cluster.from_graph(fat_tree(4, bandwidth=1.0, latency=1e-6, routing="spray"))
    split = cluster.split_routes(cluster.workers[:1], cluster.workers[-1:])
    assert sorted(split.share.tolist()) == [0.25] * 8 + [0.5] * 4 + [1.0] * 2


def test_channels_of_nccl_are_hashed_by_themselves():
    """Each lane of a schedule has connections of its own."""
    cluster = Cluster.from_graph(lag("ecmp"))
    src, dst = np.repeat(cluster.workers[:1], 64), np.repeat(cluster.workers[-1:], 64)
    trunks = cluster.split_routes(src, dst, np.arange(64)).links.reshape(64, 3)[:, 1]
    assert np.bincount(trunks)[np.unique(trunks)].min() > 5
    assert len(np.unique(trunks)) == 4
    one = cluster.split_routes(src, dst, np.zeros(64, dtype=np.int64)).links
    assert len(np.unique(one)) == 3


def test_queue_pairs_spread_a_pairs_messages():
    """One message between two machines with two ports: a connection fills one port, 64 nearly both."""
    times = {}
    for connections in (1, 2, 64):
        cluster = with_detail(
            Cluster.from_graph(planes("ecmp")), transport="infiniband", connections=connections, unordered=True
        )
        times[connections] = ddlsim.collective_time(cluster, "ring", "100 MB")
    assert times[1] > times[2] > times[64]
    sprayed = ddlsim.collective_time(planes("spray"), "ring", "100 MB")
    assert sprayed <= times[64] < 1.3 * sprayed


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_random_networks_shares_add_up(seed):
    rng = np.random.default_rng(seed)
    graph = nx.MultiGraph(nx.gnm_random_graph(9, 16, seed=seed), routing="spray")
    graph.remove_nodes_from([n for n in graph if n not in nx.node_connected_component(graph, 0)])
    nx.set_node_attributes(graph, "host", "kind")
    for u, v, key in list(graph.edges(keys=True)):
        graph.edges[u, v, key].update(bandwidth=float(rng.integers(1, 3)), latency=float(rng.integers(0, 3)) * 1e-6)
        if rng.random() < 0.3:
            graph.add_edge(u, v, **graph.edges[u, v, key])
    cluster = Cluster.from_graph(graph)
    src, dst = np.nonzero(~np.eye(cluster.n_nodes, dtype=bool))
    check_shares(cluster, src, dst)


# ------------------------------------------------------------ what else there is


@pytest.mark.slow
def test_known_costs_book_their_bytes_on_all_paths():
    """`cost="nccl"`: a link that carried everything would take longer than the tuner expects."""
    runs = [
        ddlsim.simulate(
            graph, "vgg16", AllReduce("ring", "none", cost="nccl"), workers=8, batch_size=32,
            compute=Measured("0.1 s", 32), steps=3, warmup=1,
        )
        for graph in (nvswitches("spray"), nvswitches("shortest", 1))
    ]  # fmt: skip
    assert runs[0].step_time == pytest.approx(runs[1].step_time, rel=1e-9)
    nbytes = runs[0].link_columns["nbytes"]
    assert sum(nbytes) == pytest.approx(sum(runs[1].link_columns["nbytes"]), rel=1e-9)
    assert max(nbytes) == pytest.approx(max(runs[1].link_columns["nbytes"]) / 4, rel=1e-9)


def test_a_trunk_that_is_lost_leaves_the_others():
    """Two flows of 10 GB/s to one leaf over 4 trunks of 5 GB/s, 20 GB; at 1 s one is lost, found out at once: the rest
    of them share 15 GB/s."""
    cluster = Cluster.from_graph(
        leaf_spine(2, 2, 4, bandwidth=10 * GB, latency=0.0, trunk_bandwidth=5 * GB, routing="spray")
    )
    ends = [
        (cluster.node_names[src], cluster.node_names[dst])
        for src, dst in zip(cluster.link_src, cluster.link_dst, strict=True)
    ]
    trunk = ends.index(("leaf0", "spine2"))
    network = Network(cluster)
    channel = int(cluster.link_channel[trunk])
    network.will_change([(1.0, np.inf, channel, 0.0)], (), [(1.0, np.inf, frozenset([trunk]))])
    network.send(cluster.workers[:2], cluster.workers[2:], np.array([20 * GB, 20 * GB]), 0.0)
    assert network.advance().time == pytest.approx(1.0 + 20 * GB / (15 * GB), rel=1e-9)
    carried = network.channel_nbytes[cluster.link_channel]
    assert carried[trunk] == pytest.approx(5 * GB, rel=1e-9)
    ups = [nbytes for nbytes, (src, dst) in zip(carried, ends, strict=True) if src == "leaf0" and dst[:5] == "spine"]
    assert sum(ups) == pytest.approx(40 * GB, rel=1e-9)


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_calibration_sets_what_two_workers_send(draw):
    """Parameters are those of messages, on however many links."""
    sprayed, plain = (Cluster.from_graph(graph) for graph in (draw("spray"), draw("shortest", 1)))
    parameters = current_parameters(sprayed)
    assert parameters == pytest.approx(current_parameters(plain), rel=1e-12)
    slower = {name: 0.7 * value for name, value in parameters.items() if name.endswith((".bandwidth", ".latency"))}
    times = [ddlsim.collective_time(with_parameters(cluster, slower), "ring", "10 MB") for cluster in (sprayed, plain)]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_ports_with_buffers_need_one_path():
    cluster = with_detail(Cluster.from_graph(lag("spray")), transport="tcp-cubic", buffer="64 KiB")
    with pytest.raises(ConfigError, match="buffer: losses at switch ports require single-path routing"):
        ddlsim.collective_time(cluster, "ring", "1 MB")


# ------------------------------------------------------------ notes


def notes(graph, algorithm="ring"):
    run = ddlsim.simulate(
        graph, "vgg16", AllReduce(algorithm), workers=8, batch_size=32, compute=Measured("0.1 s", 32), steps=3, warmup=1
    )
    return [note for note in run.notes if note.startswith("equal paths")]


@pytest.mark.parametrize("routing", ["shortest", "ecmp"])
@pytest.mark.parametrize(
    ("draw", "algorithm", "link"),
    [(nvswitches, "ring", "gpu"), (planes, "ring", "plane"), (lag, "halving_doubling", "s0 -> s1")],
    ids=["NVSwitches", "planes", "lag"],
)
def test_a_run_on_one_of_several_equal_paths_says_so(draw, algorithm, link, routing):
    (note,) = notes(draw(routing), algorithm)
    assert link in note
    assert note.endswith("carried nothing; routing = 'spray' uses all of them")
    assert not notes(draw("spray"), algorithm)
    assert not notes(draw(routing, 1), algorithm)


def test_a_run_that_other_paths_would_not_help_does_not():
    """A ring crosses the trunks once in each direction, and the machine's port is no wider; d-mod-k uses all trunks."""
    assert not notes(lag("shortest"), "ring")
    assert not notes(spines("d-mod-k"), "halving_doubling")


# ------------------------------------------------------------ files


@pytest.mark.parametrize("suffix", ["toml", "json", "graphml"])
def test_files_keep_the_routing(tmp_path, suffix):
    path = tmp_path / f"cluster.{suffix}"
    Cluster.from_graph(nvswitches("spray")).save(path)
    assert ddlsim.load_cluster(path).routing == "spray"
    narrow, wide = (ddlsim.collective_time(graph, "ring", "1 MB") for graph in (nvswitches("shortest"), path))
    assert wide < narrow


def test_a_name_can_set_the_routing(tmp_path):
    path = tmp_path / "hgx.toml"
    Cluster.from_graph(nvswitches("shortest")).save(path)
    assert ddlsim.load_cluster(f"{path}+routing=spray").routing == "spray"
    for name in ("fat-tree-k8-10g", "torus-2d", "office-1gbe"):
        assert ddlsim.load_cluster(f"{name}+routing=spray").routing == "spray"
    with pytest.raises(ConfigError, match=r"\+routing=spry: unknown routing policy 'spry'; did you mean 'spray'"):
        ddlsim.load_cluster(f"{path}+routing=spry")
