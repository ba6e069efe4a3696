"""The dependency graph of a plan: tasks, lanes and the longest chain are where they belong."""

import pytest
from matplotlib.patches import Rectangle
from plan_examples import hand_made, two_ranks, workload
from unrolled import data_parallel

from ddlsim import ConfigError
from ddlsim.plan import KINDS, Draft, PriorityQueue
from ddlsim.report.gantt import STYLES
from ddlsim.report.plan_graph import CRITICAL, MOST
from ddlsim.workload.buckets import per_layer


def boxes(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_zorder() == 3]


def critical(axes):
    from matplotlib.colors import to_rgba

    return [box for box in boxes(axes) if box.get_edgecolor() == to_rgba(CRITICAL)]


def test_every_kind_has_a_colour_of_its_own():
    assert sorted(STYLES) == sorted(KINDS)
    assert len(set(STYLES.values())) == len(KINDS)


def test_the_graph_of_a_step(tmp_path):
    axes = hand_made().plot(tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 1000
    assert len(boxes(axes)) == 10
    texts = [text.get_text() for text in axes.texts if text.get_text()]
    assert texts.count("F 0") == texts.count("AR 0") == texts.count("U 0") == 2
    assert {"rank 0 compute", "rank 1 stream"} <= set(texts)
    # forward, backward, log, update of one rank: 3.75 s, one after the other
    chain = critical(axes)
    assert len({box.get_y() for box in chain}) == 1
    assert [box.get_x() for box in chain] == sorted(box.get_x() for box in chain)
    assert len(chain) == 4
    assert "critical path 3.75 s" in axes.get_title()


def test_a_task_stands_right_of_what_it_needs():
    plan = two_ranks(3, steps=2)
    axes = plan.plot(n_ranks=3)
    x = [box.get_x() for box in boxes(axes)]
    for row in range(len(plan)):
        for need in plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]].tolist():
            assert x[need] < x[row]
        assert plan.previous[row] < 0 or x[plan.previous[row]] < x[row]


def test_large_plans_are_drawn_in_part():
    plan = data_parallel(workload("vgg16"), 64, per_layer, steps=8, queue=PriorityQueue())
    axes = plan.plot()
    assert len(boxes(axes)) == MOST
    assert "ranks 0, 21, 42, 63 are drawn" in axes.get_title()
    assert "the first 400 of their" in axes.get_title()
    with pytest.raises(ConfigError, match="the plan has no tasks"):
        Draft().plan().plot()
