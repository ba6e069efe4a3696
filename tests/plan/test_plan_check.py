"""Every rule of `check`: a good plan passes, and one in which it is broken is rejected, with the task named."""

import numpy as np
import pytest
from plan_examples import changed, hand_made, random_plan, reordered, swapped, two_ranks, with_value, without, workload
from unrolled import data_parallel, sharded

from ddlsim import ConfigError
from ddlsim.plan import KINDS, Draft, FusedQueue, Part, PriorityQueue, with_parameter_servers
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, FORWARD, UPDATE
from ddlsim.workload.buckets import one_bucket, partitioned, per_layer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("buckets", [one_bucket, per_layer, None])
@pytest.mark.parametrize("n_ranks", [1, 2, 5])
def test_data_parallelism_is_proved(n_ranks, buckets, accumulation):
    more = {} if buckets is None else {"buckets": buckets}
    data_parallel(workload(), n_ranks, **more, steps=3, accumulation=accumulation).check()


def test_plans_written_by_hand_are_proved():
    hand_made().check()
    for seed in range(20):
        random_plan(np.random.default_rng(seed)).check()
    Draft().plan().check()


def test_slices_of_tensors_are_parts_too():
    data_parallel(workload(), 2, lambda w: partitioned(w, 4e6), steps=2).check()


def refuses(plan, *texts):
    with pytest.raises(ConfigError) as error:
        plan.check()
    for text in texts:
        assert text in str(error.value)
    assert "\n" not in str(error.value)


def rows(plan, kind, rank=0, step=0):
    return np.flatnonzero((plan.kind == kind) & (plan.rank == rank) & (plan.step == step))


# ---------------------------------------------------------------- messages and collectives


def a_message():
    draft = Draft()
    draft.message(0, 1, 1e6, "activations", needs=[draft.work(0, 1.0)])
    return draft.plan()


def test_a_message_nobody_receives():
    refuses(without(a_message(), [2]), "row 1 (rank 0 stream: activations to rank 1, step 0): no task receives it")


def test_a_receive_without_a_send():
    refuses(without(a_message(), [1]), "row 1 (rank 1 stream: activations from rank 0, step 0): no task sends it")


def test_a_message_to_a_rank_that_does_not_receive_it():
    refuses(with_value(a_message(), "peer", 1, 0), "has no matching receive; the task with the same key is row 2")


def test_a_message_whose_ends_differ_in_size():
    refuses(with_value(a_message(), "nbytes", 2, 5.0), "sends 1000000 bytes, but row 2", " 5")


def test_two_messages_with_one_key():
    draft = Draft()
    draft.message(0, 1, 1e6)
    draft.message(0, 1, 1e6)
    refuses(with_value(draft.plan(), "key", slice(None), 0), "row 2", "another row has the same key")


def test_a_collective_that_a_member_never_enters():
    plan = two_ranks(3)
    gone = rows(plan, ALL_REDUCE, rank=1, step=1)[2]
    refuses(without(plan, [gone]), "all-reduce of part 2, step 1", "rank 1 of its group never enters")


def test_a_collective_that_a_member_enters_twice():
    plan = hand_made()
    refuses(with_value(plan, "lane", 7, plan.lane[6]), "row 7", "enters the same collective twice")


def test_a_collective_of_a_stranger():
    plan = hand_made()
    refuses(changed(plan, groups=((0,),)), "row 7", "not in the collective's group")


def test_a_collective_whose_members_disagree():
    plan = hand_made()
    refuses(with_value(plan, "nbytes", 7, 5.0), "row 7", "row 6", "but differ in bytes: 5 and 1e+06")


def queued(queue, **more):
    return data_parallel(workload(), 3, per_layer, steps=2, queue=queue, **more)


def test_queues_are_proved():
    for accumulation in (1, 2):
        queued(FusedQueue(), accumulation=accumulation).check()
        queued(PriorityQueue(), accumulation=accumulation).check()
        queued(PriorityQueue(), accumulation=accumulation, layer_by_layer=True).check()


def test_a_collective_in_two_queues():
    plan = queued(PriorityQueue())
    lanes = [lane if lane.rank != 1 else lane._replace(queue=-1) for lane in plan.lanes]
    refuses(changed(plan, lanes=tuple(lanes)), "but differ in queue: -1 and 0")


def test_a_queue_of_two_groups():
    draft = Draft()
    for group in ([0, 1], [1, 2]):
        draft.all_reduce(group, 1.0)
    plan = draft.plan()
    lanes = tuple(lane._replace(queue=0) for lane in plan.lanes)
    refuses(changed(plan, lanes=lanes, queues=(PriorityQueue(),)), "its queue is also used by another group")
    with pytest.raises(ConfigError, match="its queue below 0"):
        changed(plan, lanes=lanes)


def test_a_layer_that_goes_forward_before_its_own_update():
    """With updates layer by layer, every need of a forward pass counts."""
    plan = queued(PriorityQueue(), layer_by_layer=True)
    row = rows(plan, FORWARD, step=1)[5]
    need = plan.need_offsets[row]
    assert plan.kind[plan.needs[need]] == UPDATE
    refuses(with_value(plan, "needs", need, plan.needs[need] - 1), f"row {row} ", "forward", "whose weights it uses")


def test_an_update_that_does_not_wait_for_its_own_sum():
    plan = queued(PriorityQueue(), layer_by_layer=True)
    row = rows(plan, UPDATE)[5]
    need = plan.need_offsets[row]
    refuses(with_value(plan, "needs", need, plan.needs[need] - 2), f"row {row} ", "update", "whose gradients it uses")


# ---------------------------------------------------------------- circles


def test_needs_in_a_circle():
    draft = Draft()
    first = draft.work(0, 1.0, "a", lane="x", needs=[1])
    draft.work(0, 1.0, "b", lane="y", needs=[first])
    refuses(
        draft.plan(),
        "row 0 (rank 0 x: a, step 0) waits for row 1 (rank 0 y: b, step 0), which it needs",
        "dependency cycle",
    )


def test_a_lane_that_waits_for_what_stands_behind():
    draft = Draft()
    draft.work(0, 1.0, "a", needs=[1])
    draft.work(0, 1.0, "b")
    refuses(draft.plan(), "waits for row 0 (rank 0 compute: a, step 0), before it on its lane", "row 1")


def test_collectives_entered_in_conflicting_orders():
    plan = two_ranks()
    first, second = rows(plan, ALL_REDUCE, rank=1)[:2]
    refuses(
        swapped(plan, first, second),
        "dependency cycle",
        "all-reduce of part 0",
        "all-reduce of part 1",
        "same collective",
    )


def test_two_ranks_that_wait_for_each_others_message():
    draft = Draft()
    draft.message(0, 1, 1.0, "there")
    draft.message(1, 0, 1.0, "back")
    plan = draft.plan()  # each rank now receives before it sends
    refuses(reordered(plan, [3, 0, 1, 2]), "dependency cycle", "which sends to it", "before it on its lane")


# ---------------------------------------------------------------- passes


def test_a_micro_batch_that_never_goes_backward():
    plan = two_ranks()
    gone = rows(plan, BACKWARD, rank=1, step=1)
    refuses(without(plan, gone), "batch 1 of step 1 has no backward pass")


def test_a_layer_that_never_goes_backward():
    plan = two_ranks()
    gone = rows(plan, BACKWARD)[1]
    first = plan.first[gone]
    refuses(without(plan, [gone]), f"layer {first} has no backward pass for this batch")


def test_a_layer_that_goes_backward_twice():
    plan = two_ranks()
    row = rows(plan, BACKWARD)[1]
    refuses(with_value(plan, "end", row, plan.end[row] + 1), "has a second backward pass for this batch")


def test_a_layer_that_never_goes_forward():
    plan = two_ranks()
    row = rows(plan, FORWARD)[0]
    short = with_value(plan, "end", row, 3)
    refuses(short, f"row {row} (rank 0 compute: forward of layers 0..2", "layer 3 has no forward pass for")
    refuses(with_value(plan, "first", row, 3), "layer 0 has no forward pass")


def test_a_pass_without_a_micro_batch():
    plan = two_ranks()
    refuses(with_value(plan, "batch", rows(plan, FORWARD)[0], -1), "has no micro-batch")


def test_backward_before_forward():
    refuses(swapped(hand_made(), 0, 1), "row 0 (rank 0 compute: backward", "whose activations it uses")


def test_backward_in_the_order_of_the_forward_pass():
    plan = two_ranks()
    first, second = rows(plan, BACKWARD)[1:3]
    refuses(swapped(plan, first, second), "backward", "may start before", "comes before it in the model")


def test_backward_on_another_rank():
    plan = hand_made()
    a, b = plan.lane[1], plan.lane[4]
    moved = with_value(with_value(plan, "lane", 1, b), "lane", 4, a)
    refuses(moved, "which are on another rank")


# ---------------------------------------------------------------- gradients


def test_a_gradient_summed_twice():
    """The same part is exchanged once more: afterwards it holds every micro-batch twice."""
    draft = Draft(1, [Part(1e6, 0, 1)])
    needs = []
    for rank in (0, 1):
        draft.work(rank, 1.0, kind="forward", batch=rank, layers=(0, 1))
        needs.append([draft.work(rank, 2.0, kind="backward", batch=rank, layers=(0, 1))])
    draft.all_reduce([0, 1], 1e6, needs, part=0)
    again = draft.all_reduce([0, 1], 1e6, needs, part=0)
    for rank in (0, 1):
        draft.work(rank, 0.25, kind="update", layers=(0, 1), needs=[again[rank]])
    refuses(draft.plan(), "row 8 (rank 0 compute: update of layer 0", "gradient of batch 0 is summed twice in part 0")


def test_a_gradient_summed_never():
    plan = two_ranks()
    gone = np.flatnonzero((plan.kind == ALL_REDUCE) & (plan.part == 3) & (plan.step == 1))
    refuses(without(plan, gone), "update", "step 1", "the gradient of batch 1 is never summed in part 3")


def test_a_part_summed_in_the_place_of_another():
    plan = two_ranks()
    wrong = np.flatnonzero((plan.kind == ALL_REDUCE) & (plan.part == 1) & (plan.step == 0))
    refuses(with_value(plan, "part", wrong, 2), "all-reduce of part 2, step 0", "may start before", "which it sums")


def test_groups_of_groups_sum_once():
    """Sums in pairs, then across the pairs; leaving out the second level is found."""
    for levels, text in (([[(0, 1), (2, 3)], [(0, 2), (1, 3)]], None), ([[(0, 1), (2, 3)]], "never summed"),
                         ([[(0, 1), (2, 3)], [(0, 1, 2, 3)]], "summed twice")):  # fmt: skip
        draft = Draft(1, [Part(1e6, 0, 1)])
        latest = {}
        for rank in range(4):
            draft.work(rank, 1.0, kind="forward", batch=rank, layers=(0, 1))
            latest[rank] = draft.work(rank, 2.0, kind="backward", batch=rank, layers=(0, 1))
        for groups in levels:
            for group in groups:
                made = draft.all_reduce(group, 1e6, [[latest[rank]] for rank in group], part=0)
                latest.update(zip(group, made, strict=True))
        for rank in range(4):
            draft.work(rank, 0.0, kind="update", layers=(0, 1), needs=[latest[rank]])
        draft.plan().check() if text is None else refuses(draft.plan(), f"is {text} in part 0; it must be summed once")


def test_a_bucket_that_leaves_before_it_is_full():
    plan = two_ranks()
    row = rows(plan, ALL_REDUCE)[2]
    need = plan.need_offsets[row]
    early = with_value(plan, "needs", need, rows(plan, BACKWARD)[0])
    refuses(early, f"row {row} (rank 0 stream: all-reduce of part 2", "may start before", "which it sums")


# ---------------------------------------------------------------- shards and servers


def exchanged(*levels, n_ranks=4, updates=None, steps=1):
    """Return a plan of one part in which ranks do this after their backward pass, in this order: "update", or a kind
    of collective with its groups. `updates` are the ranks that update."""
    draft = Draft(1, [Part(1e6, 0, 1)])
    latest = {rank: [] for rank in range(n_ranks)}
    for step in range(steps):
        for rank in range(n_ranks):
            work = {"batch": rank, "layers": (0, 1), "step": step}
            draft.work(rank, 1.0, kind="forward", needs=latest[rank], **work)
            latest[rank] = [draft.work(rank, 2.0, kind="backward", **work)]
        for level in levels:
            if level == "update":
                for rank in updates or range(n_ranks):
                    latest[rank] = [draft.work(rank, 0.1, kind=level, layers=(0, 1), needs=latest[rank], step=step)]
                continue
            kind, *groups = level
            for group in groups:
                made = draft.collective(kind, group, 1e6, [latest[rank] for rank in group], part=0, step=step)
                latest.update((rank, [row]) for rank, row in zip(group, made, strict=True))
    return draft.plan()


SCATTER, GATHER = ("reduce_scatter", (0, 1, 2, 3)), ("all_gather", (0, 1, 2, 3))
PAIRS, ACROSS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "levels",
    [
        [SCATTER, "update", GATHER],  # ZeRO
        [SCATTER, GATHER, "update"],  # an all-reduce in two parts
        [("reduce_scatter", *PAIRS), ("all_reduce", *ACROSS), "update", ("all_gather", *PAIRS)],  # hybrid sharding
        [("reduce_scatter", *PAIRS), ("reduce_scatter", *ACROSS), "update", ("all_gather", *ACROSS),
         ("all_gather", *PAIRS)],
        [("reduce", (2, 0, 1, 3)), ("broadcast", (2, 0, 1, 3)), "update"],
        [("reduce", *PAIRS), ("all_reduce", (0, 2)), ("broadcast", *PAIRS), "update"],
    ],
)  # fmt: skip
def test_shards_are_proved(levels):
    for steps in (1, 3):
        exchanged(*levels, steps=steps).check()


def test_one_rank_updates_for_all():
    exchanged(("reduce", (2, 0, 1, 3)), "update", ("broadcast", (2, 0, 1, 3)), updates=[2], steps=2).check()
    refuses(exchanged(("reduce", (2, 0, 1, 3)), "update", updates=[2]), "rank 0", "no update follows")
    refuses(exchanged(("reduce", (2, 0, 1, 3)), "update", ("broadcast", (0, 1, 2, 3)), updates=[2]),
            "row 13 (rank 0 stream: broadcast of part 0", "part 0 is not updated on its")  # fmt: skip


@pytest.mark.parametrize(
    ("levels", "texts"),
    [
        ([SCATTER, "update"], ["row 12 (rank 0", "after this task, its rank has only 0.25 of the updated weights"]),
        ([SCATTER, "update", ("all_gather", *PAIRS)], ["rank 0", "has only 0.5 of the updated weights of part 0"]),
        ([SCATTER, "update", ("all_gather", (1, 0, 2, 3))], ["its range of the part does not begin"]),
        ([("reduce_scatter", *PAIRS), "update", ("all_gather", *PAIRS)], ["batch 2 is never summed in part 0"]),
        ([SCATTER, ("all_reduce", (0, 1, 2, 3)), "update", GATHER], ["differs from that of the first member"]),
        ([("all_reduce", *PAIRS), "update", ("all_reduce", *ACROSS)], ["may start before", "whose gradients it uses"]),
        ([("reduce_scatter", *PAIRS), ("all_gather", *ACROSS), "update"], ["its range of the part does not begin"]),
        ([("reduce_scatter", *PAIRS), "update", ("all_gather", *PAIRS)], ["row 12", "batch 2 is never summed"]),
        ([("all_to_all", (0, 1, 2, 3)), "update"], ["row 8", "all-to-all of part 0", "cannot sum or gather a part"]),
        ([("reduce_scatter", *PAIRS), ("reduce_scatter", *ACROSS), "update", ("all_gather", *PAIRS)],
         ["row 21 (rank 1", "its range of the part does not begin"]),
    ],
)  # fmt: skip
def test_what_is_never_whole(levels, texts):
    refuses(exchanged(*levels), *texts)


def test_shards_of_shards_of_shards():
    """Of eight ranks, in pairs of pairs of pairs."""
    pairs = [[(rank, rank | bit) for rank in range(8) if not rank & bit] for bit in (1, 2, 4)]
    levels = [*(("reduce_scatter", *each) for each in pairs), "update"]
    refuses(exchanged(*levels, n_ranks=8), "reduce-scatter", "it scatters a part for the third time")


def test_weights_that_are_used_before_they_are_gathered():
    plan = exchanged(SCATTER, "update", GATHER, steps=2)
    forward = rows(plan, FORWARD, step=1)[0]
    update = rows(plan, UPDATE)[0]
    early = with_value(plan, "needs", plan.need_offsets[forward], update)
    refuses(early, f"row {forward} (rank 0 compute: forward", "all-gather of part 0", "whose weights it uses")
    gather = rows(plan, KINDS.index("all_gather"))[0]
    scattered = rows(plan, KINDS.index("reduce_scatter"))[0]
    early = with_value(plan, "needs", plan.need_offsets[gather], scattered)
    refuses(
        early, f"row {gather} (rank 0 stream: all-gather", "may start before", "update", "whose weights it distributes"
    )


def test_sums_of_different_gradients_are_not_put_together():
    """Each pair gathers shards of sums of other ranks' gradients."""
    levels = [("reduce_scatter", (0, 2), (3, 1)), ("all_gather", (0, 1), (3, 2)), "update"]
    refuses(exchanged(*levels), "its sum differs from that of the first member of its group")


def test_ranks_that_do_it_in_another_order():
    """Rank 0 gathers before it updates, rank 1 after."""
    draft = Draft(1, [Part(1e6, 0, 1)])
    ready = []
    for rank in (0, 1):
        draft.work(rank, 1.0, kind="forward", batch=rank, layers=(0, 1))
        ready.append([draft.work(rank, 1.0, kind="backward", batch=rank, layers=(0, 1))])
    scattered = draft.collective("reduce_scatter", (0, 1), 1e6, ready, part=0)
    after = draft.work(1, 0.1, kind="update", layers=(0, 1), needs=[scattered[1]])
    gathered = draft.collective("all_gather", (0, 1), 1e6, [[], [after]], part=0)
    draft.work(0, 0.1, kind="update", layers=(0, 1), needs=[gathered[0]])
    refuses(draft.plan(), "row 8 (rank 1 stream: all-gather", "its sum differs from that of the first member")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_sharded_updates_are_proved(overlap, accumulation):
    plan = sharded(workload(), 3, steps=3, overlap=overlap, accumulation=accumulation)
    plan.check()
    forward = rows(plan, FORWARD, rank=1, step=1)[2 if overlap else 0]
    need = plan.need_offsets[forward]
    assert KINDS[plan.kind[plan.needs[need]]] == "all_gather"
    early = with_value(plan, "needs", need, plan.needs[need] - 1)
    if overlap:
        refuses(early, f"row {forward} (rank 1 compute: forward", "all-gather", "whose weights it uses")
    gathers = np.flatnonzero((plan.kind == KINDS.index("all_gather")) & (plan.part == 2) & (plan.step == 1))
    refuses(without(plan, gathers), "its rank has only 0.333 of the updated weights of part 2")


def test_servers_are_proved():
    plan = with_parameter_servers(two_ranks(3, steps=2), 2)
    plan.check()
    assert plan.servers == (3, 4)
    gone = np.flatnonzero((plan.kind == KINDS.index("push_pull")) & (plan.part == 3) & (plan.step == 1))
    refuses(without(plan, gone), "update", "step 1", "is never summed in part 3")
    refuses(without(plan, gone[-1:]), "push-pull of part 3, step 1", "rank 4 of its group never enters")
    for servers in ((), (3,), (0, 4), (0, 1, 2, 3, 4)):
        refuses(changed(plan, servers=servers), "push-pull", "its group must consist of workers followed by servers")
    with pytest.raises(ConfigError, match=r"servers = \(9,\): must be ranks below 5"):
        changed(plan, servers=(9,))


def test_a_queue_of_two_kinds():
    plan = queued(PriorityQueue())
    one = np.flatnonzero(plan.key == plan.key[rows(plan, ALL_REDUCE)[3]])
    refuses(with_value(plan, "kind", one, KINDS.index("all_gather")), "its queue is also used by another kind")


def test_a_broadcast_is_no_barrier_for_its_root():
    """The root goes on, and sends what the others wait for before they enter; the other way round is a circle."""
    for root, works in ((0, True), (1, False)):
        draft = Draft()
        draft.collective("broadcast", (root, 1 - root), 1e6)
        draft.message(0, 1, 1.0)
        plan = draft.plan()  # rank 1 receives before it enters
        own = [row for row in range(4) if plan.rank[row] == 1]
        order = [row for row in range(4) if plan.rank[row] == 0] + own[::-1]
        if works:
            reordered(plan, order).check()
        else:
            refuses(reordered(plan, order), "dependency cycle", "which comes before another member of its collective")


# ---------------------------------------------------------------- weights


def test_an_update_before_its_gradients_are_whole():
    plan = two_ranks()
    row = rows(plan, UPDATE)[0]
    early = with_value(plan, "needs", plan.need_offsets[row], rows(plan, ALL_REDUCE)[-2])
    refuses(early, f"row {row} (rank 0 compute: update", "may start before", "whose gradients it uses")


def test_a_forward_pass_before_the_update():
    plan = two_ranks()
    update, forward = rows(plan, UPDATE)[0], rows(plan, FORWARD, step=1)[0]
    refuses(swapped(plan, update, forward), f"row {update} (rank 0 compute: forward", "whose weights it uses")


def test_a_step_without_an_update():
    plan = two_ranks()
    refuses(without(plan, rows(plan, UPDATE)), "is never used, because no update follows")


def test_an_update_of_a_few_layers_only():
    plan = two_ranks()
    row = rows(plan, UPDATE)[0]
    refuses(with_value(plan, "first", row, 100), "is never used, because no update follows")


def test_a_second_update():
    plan = hand_made()
    refuses(with_value(with_value(plan, "kind", 2, UPDATE), "end", 2, 1), "part 0 is updated twice in this step")


def test_weights_of_a_rank_that_does_not_update_them():
    """A rank that only goes forward in step 1 uses what nobody has updated there."""
    plan = two_ranks(steps=2)
    moved = rows(plan, FORWARD, rank=0, step=1)
    refuses(with_value(plan, "lane", moved, 2), "which are on another rank")


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("kind", 17, r"kind\[0\] = 17 is out of range"),
        ("seconds", -1.0, r"seconds\[0\] = -1"),
        ("seconds", np.nan, r"seconds\[0\] = nan"),
        ("nbytes", np.inf, r"nbytes\[0\] = inf"),
        ("lane", 77, r"lane\[0\] = 77"),
        ("end", 2, r"end\[0\] = 2"),
        ("step", 100, r"step\[0\] = 100"),
        ("needs", 99, r"needs\[0\] = 99: must be a row from 0 to 9"),
    ],
)
def test_columns_that_point_to_nothing(column, value, text):
    with pytest.raises(ConfigError, match=text):
        with_value(hand_made(), column, 0, value)


def test_columns_of_other_lengths():
    with pytest.raises(ConfigError, match=r"seconds has shape \(3,\); expected \(10,\)"):
        changed(hand_made(), seconds=np.zeros(3))
    with pytest.raises(ConfigError, match=r"groups\[0\]"):
        changed(hand_made(), groups=((0, 5),))


def test_columns_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        hand_made().seconds[0] = 3.0


def test_a_table_that_one_can_read():
    text = str(hand_made())
    kinds = "2 forward, 2 backward, 2 update, 2 compute, 2 all-reduce"
    assert text.splitlines()[0] == f"10 tasks of 2 ranks in 1 step: {kinds}"
    assert text.splitlines()[1] == "lanes: 8 on 'compute', 2 on 'stream'"
    assert text.splitlines()[3] == "row  lane       task                                    ms  MB  needs  holds MB"
    assert text.splitlines()[5] == "  1  0 compute  backward of layer 0, batch 0, step 0  2000              -0.0001"
    assert text.splitlines()[10] == "  6  0 stream   all-reduce of part 0, step 0                 1      1"
    assert "... and 72 more" in str(two_ranks(4))
    assert repr(hand_made()) == "<Plan: 10 tasks on 4 lanes of 2 ranks, 1 steps>"
