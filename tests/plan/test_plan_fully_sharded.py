"""ZeRO stage 3, FSDP and hybrid sharding as plans: starts of gathers, bytes, memory, and what proofs refuse."""

import numpy as np
import pytest
from draws import few
from plan_examples import changed, with_value, without, workload
from split_models import chain
from unrolled import fully_sharded, sharded

from ddlsim import ConfigError, PerKernel, load_device, load_model
from ddlsim.cluster import load_cluster, star
from ddlsim.network import Network
from ddlsim.plan.execute import run_to_end
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, BACKWARD, BROADCAST, FORWARD, REDUCE_SCATTER, UPDATE
from ddlsim.plan.schedules import Schedules
from ddlsim.workload.compute import make_workload


def units(rng, n, **more):
    return chain(rng.uniform(0.1, 1.0, n), rng.uniform(0.1, 2.0, n), weights=1000, **more)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_when_units_are_gathered(prefetch, accumulation):
    """start_l = max(end_compute_(l - 1 - k), end_gather_(l - 1)), compute_l = max(end_compute_(l - 1), end_gather_l),
    with reduce-scatters (in the last micro-batch) that share the links left out by a tiny gradient."""
    n, ranks = 5, 4
    work = units(np.random.default_rng(prefetch), n)
    work.grad_nbytes[:] *= 1e-12  # bytes of gradients on the wire
    plan = fully_sharded(work, ranks, prefetch=prefetch, accumulation=accumulation)
    plan = changed(plan, nbytes=np.where(plan.kind == ALL_GATHER, 4000.0, plan.nbytes))
    run = plan.execute(star(ranks, bandwidth=4000.0 * 3 / 4 / 0.5, latency=0.0))
    computes = [row for row in plan.rows(FORWARD, BACKWARD) if plan.rank[row] == 0]
    gathers = [row for row in plan.rows(ALL_GATHER) if plan.rank[row] == 0]
    assert len(computes) == len(gathers) == 2 * n * accumulation
    computed = gathered = 0.0
    ends = []
    for nth, (compute, gather) in enumerate(zip(computes, gathers, strict=True)):
        at = nth - 1 - prefetch
        gathered = max(ends[at] if at >= 0 else 0.0, gathered) + 0.5
        assert run.end[gather] == pytest.approx(gathered, rel=1e-9)
        computed = max(computed, gathered) + plan.seconds[compute]
        assert run.end[compute] == pytest.approx(computed, rel=1e-9)
        ends.append(computed)


def bytes_of_ranks(plan, n):
    """Return the bytes that each of n ranks sends by rings."""
    cluster = load_cluster(star(n, bandwidth=1e9, latency=0.0))
    network = Network(cluster)
    nodes = cluster.workers[:n]
    run_to_end(plan, network, nodes, Schedules(plan, "ring", cluster, nodes))
    out = [cluster.link_channel[cluster.link_src == node] for node in nodes]
    return np.array([network.channel_nbytes[channels].sum() for channels in out])


@pytest.mark.parametrize(("stack", "reduced", "forward", "backward"), [
    ("torchtitan", "fp32", 4, 4 + 6), ("torchtitan", "bf16", 4, 4 + 4),
    ("fsdp-eager", "fp32", 0, 4 + 6 + 8), ("fsdp-eager", "bf16", 0, 4 + 4), ("deepspeed", "bf16", 0, 0),
])  # fmt: skip
def test_copies_of_weights_and_gradients(stack, reduced, forward, backward):
    """Bytes of each parameter that are copied after a gather and before a sum."""
    options = {"compute": PerKernel(), "stack": stack, "gradient_dtype": reduced}
    work = make_workload(load_model("gpt2"), load_device("h100"), 4, precision="bf16", **options)
    one, two = (fully_sharded(work, n, no_sync=False) for n in (1, 2))
    n_params = work.model.n_params
    for kind, nbytes in ((FORWARD, forward), (BACKWARD, backward)):
        alone, shared = (plan.seconds[(plan.kind == kind) & (plan.rank == 0)].sum() for plan in (one, two))
        assert shared - alone == pytest.approx(nbytes * n_params / work.memory_bandwidth, rel=1e-9)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_each_stage(n):
    """(N - 1)/N (g + w) P with stages 1 and 2, (g + 2 w) P with stage 3, (g + w) P if it keeps weights."""
    work = workload("resnet18", gradient_dtype="fp32")
    gradients = work.gradient_nbytes
    share = (n - 1) / n
    for plan, expected in (
        (sharded(work, n), 2.0), (fully_sharded(work, n), 3.0), (fully_sharded(work, n, reshard=False), 2.0),
    ):  # fmt: skip
        assert bytes_of_ranks(plan, n) == pytest.approx(np.full(n, share * expected * gradients), rel=1e-6)
    half = workload("resnet18", precision="fp16", gradient_dtype="fp32")
    assert bytes_of_ranks(fully_sharded(half, n), n) == pytest.approx(np.full(n, share * 2.0 * gradients), rel=1e-6)


def test_bytes_of_hybrid_sharding():
    """Inside groups of S as with S ranks, and an all-reduce of P / S over their R copies."""
    work, size, copies = workload("resnet18"), 4, 2
    expected = (size - 1) / size * 3.0 + 2.0 * (copies - 1) / copies / size
    sent = bytes_of_ranks(fully_sharded(work, size * copies, shard=size), size * copies)
    assert sent == pytest.approx(np.full(size * copies, expected * work.gradient_nbytes), rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "more", few([{}, {"prefetch": 0}, {"reshard": False}, {"shard": 2}, {"shard": 1}, {"shard": 3}], 3)
)
def test_it_is_proved(more, accumulation):
    fully_sharded(workload("resnet18"), 6, steps=3, accumulation=accumulation, **more).check()
    fully_sharded(workload("resnet18"), 6, [0, 30, 50], steps=2, **more).check()


@pytest.mark.parametrize("more", [{}, {"shard": 2}, {"reshard": False}])
def test_gradients_of_every_micro_batch_are_scattered(more):
    """m (g + 2 w) P bytes instead of (g + 2 m w) P, of m micro-batches."""
    work, m = workload("resnet18"), 3
    each = fully_sharded(work, 4, steps=2, accumulation=m, no_sync=False, **more)
    each.check()
    last = fully_sharded(work, 4, steps=2, accumulation=m, **more)
    assert len(each.rows(REDUCE_SCATTER)) == m * len(last.rows(REDUCE_SCATTER))
    scattered = [plan.nbytes[plan.rows(REDUCE_SCATTER)].sum() for plan in (each, last)]
    assert scattered[0] == pytest.approx(m * scattered[1])
    assert len(each.rows(ALL_REDUCE)) == len(last.rows(ALL_REDUCE))
    stage_2 = sharded(work, 4, steps=2, accumulation=m, no_sync=False)
    stage_2.check()
    assert len(stage_2.rows(REDUCE_SCATTER)) == m * len(sharded(work, 4, steps=2).rows(REDUCE_SCATTER))


def test_ranks_of_different_speed():
    fast, slow = (chain([seconds] * 3, [2.0 * seconds] * 3) for seconds in (1.0, 2.0))
    plan = fully_sharded([fast, slow], steps=2)
    plan.check()
    assert plan.seconds[plan.rank == 1].tolist() == (2.0 * plan.seconds[plan.rank == 0]).tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_units_are_in_memory(prefetch):
    """As many as are ahead and the one that computes, beside activations."""
    work = units(np.random.default_rng(0), 6, stored=[0.0] * 6)
    plan = fully_sharded(work, 2, prefetch=prefetch, accumulation=2)
    assert plan.peak_memory().tolist() == [4000.0 * (prefetch + 1)] * 2
    assert plan.holds[plan.rank == 0].sum() == 0.0
    kept = fully_sharded(work, 2, reshard=False)
    assert kept.peak_memory().tolist() == [4000.0 * 6] * 2


def refuses(plan, *texts):
    with pytest.raises(ConfigError) as error:
        plan.check()
    for text in texts:
        assert text in str(error.value), str(error.value)


def example(**more):
    return fully_sharded(chain([1.0] * 3, [2.0] * 3), 2, steps=2, **more)


def rows(plan, kind, step):
    return plan.rows(kind)[(plan.step[plan.rows(kind)] == step) & (plan.rank[plan.rows(kind)] == 0)]


def test_weights_that_nothing_gathers():
    plan = example()
    for nth, text in ((1, "may start before"), (None, "but no all_gather provides the rest for this batch")):
        gathers = rows(plan, ALL_GATHER, 1)
        own = gathers[plan.part[gathers] == 1][: nth or 2]
        refuses(without(plan, np.flatnonzero(np.isin(plan.key, plan.key[own]))), text)


def test_a_pass_that_does_not_wait_for_its_weights():
    plan = example()
    row = rows(plan, FORWARD, 1)[1]
    need = plan.need_offsets[row]
    early = with_value(plan, "needs", need, plan.needs[need] - 6)
    refuses(early, "may start before the end of", "all-gather of part 1")


def test_weights_that_are_gathered_before_they_are_updated():
    plan = example()
    gather = rows(plan, ALL_GATHER, 1)[0]
    first, end = plan.need_offsets[gather], plan.need_offsets[gather + 1]
    assert plan.kind[plan.needs[first:end]].tolist() == [UPDATE]
    early = with_value(plan, "needs", first, rows(plan, BACKWARD, 0)[0])
    refuses(early, "all-gather of part 0", "may start before", "update", "whose weights it gathers")


def test_shares_that_are_not_the_whole():
    plan = fully_sharded(chain([1.0] * 3, [2.0] * 3), 4, steps=2, shard=2)
    gathers = plan.rows(ALL_GATHER)
    assert plan.groups[:2] == ((0, 1), (2, 3))
    assert set(plan.peer[gathers]) == {0, 1}
    swapped = np.where((plan.kind == ALL_GATHER) & (plan.peer == 0), len(plan.groups), plan.peer)
    other = changed(plan, groups=(*plan.groups, (1, 0)), peer=swapped)
    refuses(other, "the shards of its group do not add up to part 0")


def test_sums_that_are_missing():
    plan = fully_sharded(chain([1.0] * 3, [2.0] * 3), 4, steps=2, shard=2)
    for kind in (REDUCE_SCATTER, ALL_REDUCE):
        gone = plan.rows(kind)[plan.step[plan.rows(kind)] == 0]
        keys = plan.key[gone][:1]
        refuses(without(plan, np.flatnonzero(np.isin(plan.key, keys))), "part")


def early_sum(part=1):
    """Return a plan that scatters after each micro-batch, and rank 0's row of the first of a part."""
    plan = fully_sharded(chain([1.0] * 3, [2.0] * 3), 4, steps=2, accumulation=2, no_sync=False, shard=2)
    early = plan.rows(REDUCE_SCATTER)
    return plan, int(early[(plan.batch[early] == 0) & (plan.part[early] == part)][0])


def test_early_sums_that_come_too_early():
    plan, row = early_sum()
    other = rows(plan, BACKWARD, 0)[0]  # of part 2
    assert plan.first[other] == 2
    early = with_value(plan, "needs", plan.need_offsets[row], other)
    refuses(early, "reduce-scatter of part 1", "may start before the end of", "which it sums")


def test_early_sums_of_other_shares():
    plan, row = early_sum()
    group = len(plan.groups)
    same = (plan.key == plan.key[row]) & (plan.kind == REDUCE_SCATTER)
    other = changed(plan, groups=(*plan.groups, (1, 0)), peer=np.where(same, group, plan.peer))
    refuses(other, "its group has no sum of part 1 at the end of the step")
    summed = changed(plan, kind=np.where(same, ALL_REDUCE, plan.kind))
    refuses(summed, "its group has no sum of part 1 at the end of the step")
    pushed = changed(plan, kind=np.where(same, BROADCAST, plan.kind))
    refuses(pushed, "only all_reduce and reduce_scatter can sum the gradients of a single micro-batch")


def test_what_does_not_fit():
    work = workload("resnet18")
    with pytest.raises(ConfigError, match="shard = 4: must divide the number of ranks, 6; use 3 or 6"):
        fully_sharded(work, 6, shard=4)
    for wrong in ([1, 2], [0, 5, 5], [0, 500], []):
        with pytest.raises(
            ConfigError,
            match="must be an increasing list of layer numbers that starts at 0",
        ):
            fully_sharded(work, 2, wrong)
    with pytest.raises(ConfigError, match=r"units = \[0, 2, 4\]: layers 2 to 3 of resnet18 have no weights"):
        fully_sharded(work, 2, [0, 2, 4])
