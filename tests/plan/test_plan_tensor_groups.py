"""Tensor groups as one rank of a plan take as long as all their ranks, written out with every collective."""

import networkx as nx
import numpy as np
import pytest
from plan_examples import workload
from unrolled import pipeline

from ddlsim.cluster import Cluster, MultiGpu, load_cluster, star
from ddlsim.collectives import build
from ddlsim.network import Network, schedule_time
from ddlsim.plan import Draft, Mesh, balanced, chunks_at
from ddlsim.plan.pipeline_orders import pass_order
from ddlsim.plan.tensor_groups import as_one_rank, overlap_plan, with_exchanges, with_shared_interfaces
from ddlsim.workload.beside import Beside
from ddlsim.workload.compute import make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model
from ddlsim.workload.tensor_parallel import Collective, tensor_parallel


def machines(n, per):
    """Return a cluster of machines whose devices have a fast switch inside, and each an interface of its own."""
    graph = nx.DiGraph()
    graph.add_node("fabric", kind="switch")
    for host in range(n):
        graph.add_node(f"inside{host}", kind="switch", host=f"host{host}")
        for i in range(per):
            name = f"h{host}g{i}"
            graph.add_node(name, kind="gpu", host=f"host{host}")
            for ends in ((name, f"inside{host}"), (f"inside{host}", name)):
                graph.add_edge(*ends, bandwidth=100e9, latency=1e-6)
            for ends in ((name, "fabric"), ("fabric", name)):
                graph.add_edge(*ends, bandwidth=5e9, latency=5e-6)
    return load_cluster(graph)


def written_out(shard, cuts, order, tensor, gathers):
    """Return the plan of all ranks: stage s has the ranks s * tensor and on; every collective is a row for each."""
    draft, ends = Draft(), [0, *cuts, len(shard.workload.forward)]
    cut, stages = chunks_at(shard.workload, cuts), len(order)
    sent = {}

    def run(stage, phase, chunk, micro):
        """Let a group go through its layers, in pieces between its exchanges."""
        group = range(stage * tensor, (stage + 1) * tensor)
        layers = range(ends[chunk], ends[chunk + 1])
        latest = [sent.get((phase, chunk, micro, rank), []) for rank in group]
        seconds = shard.workload.forward if phase == "F" else shard.workload.backward
        to = chunk + (1 if phase == "F" else -1)
        entering = cut[chunk].enters if phase == "F" else cut[min(chunk + 1, stages - 1)].enters
        if latest[0] and gathers:
            latest = [[row] for row in draft.collective("all_gather", group, entering, latest, lane="compute")]
        for layer in layers if phase == "F" else reversed(layers):
            for rank, needs in zip(group, latest, strict=True):
                draft.work(rank, float(seconds[layer]), needs=needs)
            latest = [[] for _ in group]
            for each in shard.collectives:
                if each.layer == layer and each.phase == ("forward" if phase == "F" else "backward"):
                    draft.collective(each.kind, group, each.nbytes, lane="compute")
            last = [draft.work(rank, 0.0) for rank in group]
        if 0 <= to < stages:
            bytes_of_all = cut[max(chunk, to)].enters
            for i, rank in enumerate(group):
                other = to * tensor + i
                lanes = (f"{phase} out", f"{phase} in")
                sent[phase, to, micro, other] = [
                    draft.message(rank, other, bytes_of_all / tensor, needs=[last[i]], lanes=lanes)[1]
                ]

    at = [0] * stages
    while any(i < len(passes) for i, passes in zip(at, order, strict=True)):
        for stage, passes in enumerate(order):
            while at[stage] < len(passes):
                kind, chunk, micro = passes[at[stage]]
                first = (kind == "F" and chunk == 0) or (kind == "B" and chunk == stages - 1)
                if not first and (kind, chunk, micro, stage * tensor) not in sent:
                    break
                run(stage, kind, chunk, micro)
                at[stage] += 1
    return draft.plan()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("stages", "tensor", "order", "micro_batches"), [
    (1, 2, "gpipe", 2), (2, 2, "gpipe", 3), (2, 4, "1f1b", 4), (3, 2, "1f1b", 5),
])  # fmt: skip
def test_a_group_as_one_rank_takes_as_long_as_all_its_ranks(stages, tensor, order, micro_batches, sequence):
    cluster = machines(stages, tensor)
    nodes = Mesh(pipeline=stages, tensor=tensor).nodes(cluster)
    work = workload("char-transformer", 4)
    shard = tensor_parallel(work, tensor, sequence=sequence, recompute="full")
    n = len(work.forward)
    cuts = [n * i // stages for i in range(1, stages)]
    table = pass_order(order, stages, micro_batches, stages)

    def seconds(kind, nbytes):
        return schedule_time(cluster, build("ring", tensor, nbytes, None, kind), nodes[:tensor].tolist(), nbytes)

    chunks = chunks_at(with_exchanges(shard.workload, shard.collectives, seconds), cuts)
    folded = as_one_rank(chunks, tensor, lambda chunk: 0.0, gather=None if sequence else seconds)
    one = pipeline(folded, Mesh(pipeline=stages), micro_batches, table)
    alone = one.execute(cluster, nodes=nodes[::tensor].tolist())
    backward = alone.end[np.isin(one.kind, (0, 1))].max()
    every = written_out(shard, cuts, table, tensor, not sequence).execute(cluster, "ring", nodes=nodes.tolist())
    assert every.seconds == pytest.approx(backward, rel=1e-9)
    assert sum(each.nbytes for each in shard.collectives) > 0.0


@pytest.mark.parametrize("product", [0.2e-3, 1.6e-3, 7.3e-3])
@pytest.mark.parametrize(("method", "n"), [("ring_exchange", 8), ("ring_exchange", 2), ("pipeline", 4), ("bulk", 1)])
def test_a_product_and_the_collective_beside_it(method, n, product):
    """The chunks' longest path by hand, and what a layer waits for: 2.1 ms of a collective alone."""
    slowed = product if method == "ring_exchange" else product * 132 / 116
    beside, travels = Beside(method, n, product, slowed), lambda kind, nbytes: 2.1e-3 * nbytes / 64e6
    piece, hop, part = slowed / n, 2.1e-3 / max(1, n - 1), 2.1e-3 / n
    expected = {
        "ring_exchange": max(slowed, (n - 1) * hop + piece),  # the last chunk is multiplied when it has come
        "pipeline": max(slowed + part, piece + 2.1e-3),
        "bulk": max(slowed, 2.1e-3),
    }[method]
    plan = overlap_plan(beside, "all_gather", 64e6, travels)
    assert plan.critical_path() == pytest.approx(expected, rel=1e-12)
    assert sum(plan.seconds) == pytest.approx(slowed + 2.1e-3, rel=1e-12)
    work = workload("char-transformer", 4)
    exchange = Collective("all_gather", 64e6, 3, "backward", beside)
    waits = with_exchanges(work, [exchange], travels).backward - work.backward
    assert waits[3] == pytest.approx(expected - product, rel=1e-9)
    assert not np.delete(waits, 3).any()


def test_what_a_rank_keeps_and_sends():
    shard = tensor_parallel(workload("char-transformer", 4), 2)
    chunks = chunks_at(shard.workload, [4])
    split = as_one_rank(chunks, 2, lambda chunk: 1000.0, gather=None)
    assert split[1].enters == chunks[1].enters / 2
    assert split[0].enters == chunks[0].enters
    assert [chunk.stored.sum() for chunk in split] == pytest.approx([1000.0] * 2)
    plan = pipeline(split, Mesh(pipeline=2), 4)
    plan.check()
    assert plan.peak_memory() == pytest.approx([2000.0, 1000.0])


@pytest.mark.parametrize(("n_nics", "times"), [(1, 4.0), (2, 2.0), (4, 1.0)])
def test_members_that_share_an_interface_send_together(n_nics, times):
    """Four GPUs send their quarters to another machine at once: over one interface that takes four times as long."""
    host = MultiGpu(
        n_gpus=4, inside="nvswitch", device="v100", nvlink_bandwidth="150 GB/s", pcie_bandwidth="1000 GB/s",
        nvlink_latency=0.0, pcie_latency=0.0, n_nics=n_nics, n_pcie_switches=n_nics,
    )  # fmt: skip
    cluster = Cluster.from_graph(star(4, bandwidth="10 Gbit/s", latency=0.0, host=host))
    bert = make_workload(load_model("bert-base"), load_device("v100"), 1)
    plan = pipeline(balanced(bert, 2), Mesh(data=2, pipeline=2), 2)
    nodes = cluster.workers.reshape(4, 4)
    shared = with_shared_interfaces(plan, cluster, nodes)
    travels = plan.nbytes > 0.0
    np.testing.assert_allclose(shared.nbytes[travels] / plan.nbytes[travels], times, rtol=1e-12)
    network = Network(cluster)  # what all four really take
    ids = network.send(nodes[0].tolist(), nodes[1].tolist(), np.full(4, 1e6), 0.0)
    arrivals = []
    while (done := network.advance()) is not None:
        arrivals += [done.time] * len(done.ids)
    assert len(arrivals) == len(ids)
    assert max(arrivals) == pytest.approx(times * 1e6 / 1.25e9, rel=1e-9)
