"""Task lists against the textbook schedules, and what every order must keep."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, UPDATE, Edge, SubmeshPlan, Task
from dflop_jax.simulate.task_graph import in_flight_limit, step_graph, submesh_resources
from dflop_jax.simulate.task_order import check_order, order_tasks, peak_groups_in_flight
from tests.simulate.cases import batch, chain, graph, group, names, random_case


def order_of(plan, counts, trainable=None, **kwargs):
    every = batch(plan, counts).groups
    tasks = step_graph(plan.layout, every, trainable or names(plan), **kwargs)
    return tasks, order_tasks(plan, tasks, every)


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
def test_1f1b_and_gpipe_equal_the_textbook_orders(stages, m):
    plan = chain(stages, sources=min(1, stages - 1))
    _, order = order_of(plan, m)
    _, all_forwards_first = order_of(chain(stages, order="gpipe"), m)
    for i, name in enumerate(names(plan)):
        assert letters(order, name) == textbook(i, stages, m)
        directions = "FB" if i < stages - 1 else "B"
        expected = " ".join(f"{d}{g}" for d in directions for g in range(m))
        assert letters(all_forwards_first, f"b{i}") == expected


@pytest.mark.parametrize("lookahead", [0, 1, 3, 9])
def test_lookahead_adds_forwards_before_the_first_backward(lookahead):
    _, order = order_of(chain(2, sources=1).with_scheduling(lookahead=lookahead), 6)
    first = letters(order, "a0").split(" B")[0]
    assert first == " ".join(f"F{g}" for g in range(min(6, 2 + lookahead)))


def test_orders_of_random_plans_are_complete_and_causal():
    rng = np.random.default_rng(0)
    for _ in range(150):
        plan, schedule, _, trainable = random_case(rng)
        tasks = step_graph(plan.layout, schedule.groups, trainable)
        order = order_tasks(plan, tasks, schedule.groups)
        check_order(tasks, order)
        if plan.scheduling.order == "1f1b":
            limit = in_flight_limit(plan, schedule.groups)
            assert all(n <= limit[s] for s, n in peak_groups_in_flight(order).items())


@pytest.mark.parametrize("frozen", [(), ("a0",), ("b0", "b1"), ("a0", "b0"), ("a0", "b0", "b1")])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_step_graph_has_the_expected_tasks(frozen, m):
    """From its definition: backward from the lowest trainable segment on, and in the last."""
    plan = chain(4, sources=1)
    trainable = [n for n in names(plan) if n not in frozen]
    wanted = {Task(n, NO_GROUP, d) for n in trainable for d in (REDUCE, UPDATE)}
    for i, n in enumerate(names(plan)):
        directions = [FORWARD] * (i < 3) + [BACKWARD] * (n in trainable or n > trainable[0])
        wanted |= {Task(n, 2 * k + (i > 0), d) for k in range(m) for d in directions}
    assert set(order_of(plan, m, trainable)[0].tasks) == wanted


def test_several_groups_that_feed_one_do_not_deadlock():
    """Six producers of one consumer run though 1F1B would allow two in flight."""
    plan = chain(2, sources=1)
    every = (*[group("a", feeds=(6,))] * 6, group("b"))
    tasks = step_graph(plan.layout, every, names(plan))
    order = order_tasks(plan, tasks, every)
    check_order(tasks, order)
    sources = tuple(Task("a0", g, FORWARD) for g in range(6))
    assert tasks.waits_for[Task("b0", 6, BACKWARD)] == sources
    assert peak_groups_in_flight(order) == {"a0": 6, "b0": 1}


def test_inner_edges_link_the_segments_of_their_layers():
    """A tap after the second layer of v is read before the third of l."""
    tap = Edge("v", "l", "deep", "after_two", leaves=2, enters=2)
    tasks, _ = order_of(graph("v:3", "l:3", edges=["vl", tap]), 1)
    assert set(tasks.waits_for[Task("l2", 1, BACKWARD)]) == {
        Task("l1", 1, FORWARD), Task("v1", 0, FORWARD)}  # fmt: skip
    assert set(tasks.waits_for[Task("v1", 0, BACKWARD)]) == {
        Task("v1", 0, FORWARD), Task("v2", 0, BACKWARD), Task("l2", 1, BACKWARD)}  # fmt: skip
    assert set(tasks.waits_for[Task("l0", 1, FORWARD)]) == {Task("v2", 0, FORWARD)}


def test_tied_parameters_order_reductions_and_updates():
    tasks, _ = order_of(chain(3, sources=1).with_layout(tied=("b",)), 1)
    assert Task("b1", NO_GROUP, REDUCE) in tasks.waits_for[Task("b0", NO_GROUP, REDUCE)]
    assert Task("b0", NO_GROUP, UPDATE) in tasks.waits_for[Task("b1", NO_GROUP, UPDATE)]


def test_invalid_orders_are_refused():
    tasks, order = order_of(chain(3, sources=1), 2)
    wrong = {"lacks": order[:-1], "before": order[::-1], "twice": (*order, order[0])}
    for problem, changed in wrong.items():
        with pytest.raises(ValueError, match=problem):
            check_order(tasks, changed)


@pytest.mark.parametrize("m", [0, 1, 3])
def test_evaluation_runs_forward_only(m):
    plan = chain(3, sources=1)
    tasks, order = order_of(plan, m, evaluate=True)
    assert {*order} == {
        Task(n, 2 * g + (n != "a0"), FORWARD) for n in names(plan) for g in range(m)
    }
    for g in range(m):
        assert tasks.waits_for[Task("b0", 2 * g + 1, FORWARD)] == (Task("a0", 2 * g, FORWARD),)


def test_segments_on_the_same_devices_share_a_resource_and_run_depth_first():
    plan = chain(3, sources=1, first=(0, 0, 0))
    assert len(set(submesh_resources(plan.layout).values())) == 1
    assert in_flight_limit(plan) == {"a0": 1, "b0": 1, "b1": 1}
    steps = [
        (t.segment, t.direction[0], t.group // 2) for t in order_of(plan, 2)[1] if t.group >= 0
    ]
    one = [("a0", "f"), ("b0", "f"), ("b1", "b"), ("b0", "b"), ("a0", "b")]
    assert steps == [(n, d, g) for g in (0, 1) for n, d in one]


def test_submeshes_that_overlap_indirectly_share_a_resource():
    plan = chain(4)
    blocks = zip(plan.layout.submeshes, ((0, 2), (1, 3), (3, 2), (5, 1)), strict=True)
    submeshes = tuple(SubmeshPlan(m.name, first, 1, 1, n) for m, (first, n) in blocks)
    plan = replace(plan, layout=replace(plan.layout, submeshes=submeshes))
    of = submesh_resources(plan.layout)
    assert of["b0"] == of["b1"] == of["b2"] != of["b3"]
    assert in_flight_limit(plan) == {"b0": 2, "b1": 2, "b2": 2, "b3": 1}
