"""Plans of tensor groups: the same as all ranks written out one by one, and what passes take on idle links."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from plan_examples import workload
from unrolled import pipeline

from ddlsim.cluster import load_cluster
from ddlsim.plan import Draft, Mesh, chunks_at
from ddlsim.plan.pipeline_orders import pass_order
from ddlsim.plan.plan import KINDS
from ddlsim.plan.tensor_ranks import _items, passes_of, tensor_ranks, timeline, with_exchanges
from ddlsim.workload.tensor_overlap import OverlappedProduct
from ddlsim.workload.tensor_parallel import Collective, Shard, tensor_parallel


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
def test_all_ranks_as_written_out_one_by_one(stages, tensor, order, micro_batches, sequence):
    cluster = machines(stages, tensor)
    nodes = Mesh(pipeline=stages, tensor=tensor).nodes(cluster).tolist()
    work = workload("char-transformer", 4)
    shard = tensor_parallel(work, tensor, sequence=sequence, recompute="full")
    n = len(work.forward)
    cuts = [n * i // stages for i in range(1, stages)]
    table, chunks = pass_order(order, stages, micro_batches, stages), chunks_at(shard.workload, cuts)
    split = [replace(chunk, enters=chunk.enters / tensor) if i else chunk for i, chunk in enumerate(chunks)]
    groups = pipeline(split, Mesh(pipeline=stages), micro_batches, table)
    passes = passes_of(groups, [shard], chunks, gather=not sequence)
    plan = tensor_ranks([groups], passes, tensor, np.zeros((stages, tensor), dtype=np.int64))
    plan.check()
    assert (plan.n_ranks, plan.tensor) == (stages * tensor, tensor)
    run = plan.execute(cluster, "ring", nodes=nodes)
    backward = run.end[np.isin(plan.kind, (0, 1, 3)) & (plan.name != 0)].max()
    every = written_out(shard, cuts, table, tensor, not sequence).execute(cluster, "ring", nodes=nodes)
    assert every.seconds == pytest.approx(backward, rel=1e-9)
    assert sum(each.nbytes for each in shard.collectives) > 0.0


@pytest.mark.parametrize("product", [0.2e-3, 1.6e-3, 7.3e-3])
@pytest.mark.parametrize(("method", "n"), [("ring_exchange", 8), ("ring_exchange", 2), ("pipeline", 4), ("bulk", 1)])
def test_a_product_and_the_collective_beside_it(method, n, product):
    """The chunks' longest path by hand, and what a layer waits for: 2.1 ms of a collective alone."""
    slowed = product if method == "ring_exchange" else product * 132 / 116
    beside = OverlappedProduct(method, n, product, slowed)
    piece, hop, part = slowed / n, 2.1e-3 / max(1, n - 1), 2.1e-3 / n
    expected = {
        "ring_exchange": max(slowed, (n - 1) * hop + piece),  # the last chunk is multiplied when it has come
        "pipeline": max(slowed + part, piece + 2.1e-3),
        "bulk": max(slowed, 2.1e-3),
    }[method]
    work = workload("char-transformer", 4)
    exchange = Collective("all_gather", 64e6, 3, "backward", beside)
    seconds = lambda kind, nbytes: 2.1e-3 * nbytes / 64e6 * (n / (n - 1) if KINDS[kind] == "send" else 1.0)  # noqa: E731
    alone = replace(work, backward=0.0 * work.backward)
    items = _items(alone, {("backward", 3): [exchange]}, "backward", (3, 4), 1, {})
    start, end = timeline(items, seconds)
    assert end.max() == pytest.approx(expected, rel=1e-12)
    assert sum((end - start)[[item.lane == 0 for item in items]]) == pytest.approx(slowed, rel=1e-12)
    shard = Shard(replace(work, backward=work.backward + product), 2, False, "none", (exchange,))
    waits = with_exchanges(shard, seconds).backward - shard.workload.backward
    assert waits[3] == pytest.approx(expected - product, rel=1e-9)
    assert not np.delete(waits, 3).any()
