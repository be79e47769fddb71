"""Task lists against the textbook schedules, and what every order must keep."""

import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Bucket,
    Edge,
    Group,
    Layout,
    Plan,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.simulate.task_graph import in_flight_limit, step_graph, submesh_resources
from dflop_jax.simulate.task_order import check_order, order_tasks, peak_groups_in_flight
from tests.plans import chain, groups, random_plan


def names(plan):
    return [s.name for s in plan.layout.segments]


def order_of(plan, buckets, trainable=None, **kwargs):
    every = groups(plan, buckets)
    graph = step_graph(
        plan.layout, every, names(plan) if trainable is None else trainable, **kwargs
    )
    return graph, order_tasks(plan, graph, every)


def letters(order, segment):
    """A segment's part of an order, such as "F0 F1 B0 B1", its own groups counted from 0."""
    mine = [t for t in order if t.segment == segment and t.group != NO_GROUP]
    number = {g: i for i, g in enumerate(sorted({t.group for t in mine}))}
    return " ".join(f"{t.direction[0].upper()}{number[t.group]}" for t in mine)


def textbook(stage: int, stages: int, m: int) -> str:
    """1F1B (Narayanan et al.): warm up, alternate, drain; the last stage's forward is in its B."""
    if stage == stages - 1:
        return " ".join(f"B{g}" for g in range(m))
    warm = min(stages - 1 - stage, m)
    out = [f"F{g}" for g in range(warm)]
    for g in range(m):
        out += [f"F{g + warm}"] if g + warm < m else []
        out.append(f"B{g}")
    return " ".join(out)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("m", [0, 1, 2, 3, 5, 8])
def test_1f1b_equals_the_textbook_order(stages, m):
    plan = chain(stages, vision=min(1, stages - 1))
    _, order = order_of(plan, [0] * m)
    for i, name in enumerate(names(plan)):
        assert letters(order, name) == textbook(i, stages, m)


@pytest.mark.parametrize("stages", range(2, 6))
@pytest.mark.parametrize("m", [1, 4])
def test_gpipe_runs_all_forwards_first(stages, m):
    plan = chain(stages, order="gpipe")
    _, order = order_of(plan, [0] * m)
    forwards = " ".join(f"F{g}" for g in range(m))
    backwards = " ".join(f"B{g}" for g in range(m))
    for name in names(plan)[:-1]:
        assert letters(order, name) == f"{forwards} {backwards}"
    assert letters(order, names(plan)[-1]) == backwards


@pytest.mark.parametrize("lookahead", [0, 1, 3, 9])
def test_lookahead_adds_forwards_before_the_first_backward(lookahead):
    plan = chain(2, vision=1).with_scheduling(lookahead=lookahead)
    _, order = order_of(plan, [0] * 6)
    first = letters(order, "v0").split(" B")[0]
    assert first == " ".join(f"F{g}" for g in range(min(6, 2 + lookahead)))
    assert letters(order, "l0") == letters(order_of(chain(2, vision=1), [0] * 6)[1], "l0")


def test_orders_of_random_plans_are_complete_and_causal():
    rng = np.random.default_rng(0)
    for _ in range(150):
        plan = random_plan(rng)
        m = int(rng.integers(0, 7))
        buckets = [int(b) for b in rng.integers(0, 2, m)]
        trainable = [n for n in names(plan) if rng.random() < 0.7] or names(plan)[-1:]
        graph, order = order_of(plan, buckets, trainable)
        assert len(order) == len(set(order)) == len(graph.tasks)
        assert set(order) == set(graph.tasks)
        place = {t: i for i, t in enumerate(order)}
        assert all(place[d] < place[t] for t in order for d in graph.waits_for[t])
        if plan.scheduling.order == "1f1b":
            limit = in_flight_limit(plan)
            assert all(n <= limit[s] for s, n in peak_groups_in_flight(order).items())
        assert order == order_of(plan, buckets, trainable)[1]


def expected_tasks(plan, every, trainable):
    """The task set from its definition: by hand, not by walking the graph."""
    chained = names(plan)
    lowest = min(chained.index(n) for n in trainable)
    tasks = set()
    for g, group in enumerate(every):
        for i, s in enumerate(plan.layout.segments):
            if s.module != group.module:
                continue
            if i < len(chained) - 1:
                tasks.add(Task(s.name, g, FORWARD))
            if i >= lowest or i == len(chained) - 1:
                tasks.add(Task(s.name, g, BACKWARD))
    return tasks | {Task(n, NO_GROUP, d) for n in trainable for d in (REDUCE, UPDATE)}


@pytest.mark.parametrize("frozen", [(), ("v0",), ("l0", "l1"), ("v0", "l0"), ("v0", "l0", "l1")])
@pytest.mark.parametrize("buckets", [[], [0], [1], [0, 1, 0, 1, 1]])
def test_step_graph_has_the_expected_tasks(frozen, buckets):
    plan = chain(4, vision=1)
    trainable = [n for n in names(plan) if n not in frozen]
    graph, _ = order_of(plan, buckets, trainable)
    assert set(graph.tasks) == expected_tasks(plan, groups(plan, buckets), trainable)


def test_groups_without_sources_wait_for_nothing():
    plan = chain(2, vision=1)
    graph, order = order_of(plan, [1, 0, 1])  # groups: l, v and l, l
    assert letters(order, "v0") == "F0 B0"
    assert letters(order, "l0") in ("B0 B1 B2", "B0 B2 B1")  # B1 waits for its tiles
    assert graph.waits_for[Task("l0", 0, BACKWARD)] == ()
    assert graph.waits_for[Task("l0", 2, BACKWARD)] == (Task("v0", 1, FORWARD),)


def test_several_groups_that_feed_one_do_not_deadlock():
    """Six producers of one consumer run though 1F1B would allow two in flight."""
    plan = chain(2, vision=1)
    low, high = plan.layout.shapes("vision")[0], plan.layout.shapes("llm")[0]
    every = (*(Group("vision", low, (6,)) for _ in range(6)), Group("llm", high))
    graph = step_graph(plan.layout, every, names(plan))
    order = order_tasks(plan, graph, every)
    check_order(graph, order)
    assert graph.waits_for[Task("l0", 6, BACKWARD)] == tuple(
        Task("v0", g, FORWARD) for g in range(6)
    )
    assert peak_groups_in_flight(order) == {"v0": 6, "l0": 1}


def test_inner_edges_link_the_segments_of_their_layers():
    """Of v's layers 0, 1, 2 and l's 0, 1, 2, a segment each, a tap after the second layer of v is
    read before the third of l."""
    tap = Edge("v", "l", "deep", "after_two", leaves=2, enters=2)
    meshes = tuple(SubmeshPlan(f"{m}{i}", 3 * (m == "l") + i, 1, 1, 1)
                   for m in "vl" for i in range(3))  # fmt: skip
    segments = tuple(
        SegmentPlan(f"{m}{i}", m, i, i + 1, f"{m}{i}", i == 0, i == 2)
        for m in "vl"
        for i in range(3)
    )
    shapes = {"v": Shape(1, 4), "l": Shape(1, 8)}
    plan = Plan(
        "test",
        Layout(meshes, segments, (Bucket.from_shapes(shapes),), edges=(Edge("v", "l", "x"), tap)),
    )
    every = groups(plan, [0])
    graph = step_graph(plan.layout, every, [s.name for s in segments])
    assert set(graph.waits_for[Task("l2", 1, BACKWARD)]) == {
        Task("l1", 1, FORWARD), Task("v1", 0, FORWARD)}  # fmt: skip
    assert set(graph.waits_for[Task("v1", 0, BACKWARD)]) == {
        Task("v1", 0, FORWARD), Task("v2", 0, BACKWARD), Task("l2", 1, BACKWARD)}  # fmt: skip
    assert set(graph.waits_for[Task("l0", 1, FORWARD)]) == {Task("v2", 0, FORWARD)}


def test_tied_parameters_order_reductions_and_updates():
    plan = chain(3, vision=1).with_layout(tied=("llm",))
    graph, _ = order_of(plan, [0])
    assert Task("l1", NO_GROUP, REDUCE) in graph.waits_for[Task("l0", NO_GROUP, REDUCE)]
    assert Task("l0", NO_GROUP, UPDATE) in graph.waits_for[Task("l1", NO_GROUP, UPDATE)]


def test_invalid_orders_are_refused():
    plan = chain(3, vision=1)
    graph, order = order_of(plan, [0, 0])
    check_order(graph, order)
    with pytest.raises(ValueError, match="lacks"):
        check_order(graph, order[:-1])
    with pytest.raises(ValueError, match="before"):
        check_order(graph, order[::-1])
    with pytest.raises(ValueError, match="twice"):
        check_order(graph, (*order, order[0]))


@pytest.mark.parametrize("m", [0, 1, 3])
def test_evaluation_runs_forward_only(m):
    plan = chain(3, vision=1)
    graph, order = order_of(plan, [0] * m, evaluate=True)
    assert {t.direction for t in order} <= {FORWARD}
    want = {Task(n, 2 * g + (n != "v0"), FORWARD) for n in names(plan) for g in range(m)}
    assert set(order) == want
    assert len(order) == len(want)
    for g in range(m):
        before = (Task("v0", 2 * g, FORWARD),)
        assert graph.waits_for[Task("l0", 2 * g + 1, FORWARD)] == before


def test_segments_on_the_same_devices_share_a_resource_and_run_depth_first():
    plan = chain(3, vision=1, first=(0, 0, 0))
    assert len(set(submesh_resources(plan.layout).values())) == 1
    assert in_flight_limit(plan) == {"v0": 1, "l0": 1, "l1": 1}
    _, order = order_of(plan, [0, 0])
    steps = [(t.segment, t.direction[0], t.group // 2) for t in order if t.group >= 0]
    one = [("v0", "f"), ("l0", "f"), ("l1", "b"), ("l0", "b"), ("v0", "b")]
    assert steps == [(n, d, g) for g in (0, 1) for n, d in one]


def test_submeshes_that_overlap_indirectly_share_a_resource():
    submeshes = tuple(SubmeshPlan(n, f, 1, 1, k) for n, f, k in (("a", 0, 2), ("c", 3, 2)))
    submeshes += (SubmeshPlan("b", 1, 1, 3, 1), SubmeshPlan("far", 5, 1, 1, 1))
    segments = tuple(
        SegmentPlan(n, "llm", i, i + 1, n, i == 0, i == 3)
        for i, n in enumerate(("a", "b", "c", "far"))
    )
    plan = Plan("test", Layout(submeshes, segments, (Bucket.from_shapes({"llm": Shape(1, 8)}),)))
    of = submesh_resources(plan.layout)
    assert of["a"] == of["b"] == of["c"] != of["far"]
    assert in_flight_limit(plan) == {"a": 2, "b": 2, "c": 2, "far": 1}


def test_a_frozen_encoder_runs_depth_first_on_shared_devices():
    plan = chain(2, vision=1, first=(0, 0))
    _, order = order_of(plan, [0, 0, 0], ["l0"])
    steps = [(t.segment, t.group // 2) for t in order if t.group >= 0]
    assert steps == [(n, g) for g in range(3) for n in ("v0", "l0")]  # one group's features held
