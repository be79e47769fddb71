"""The simulator against closed forms and the conservation of work; list-scheduled orders against
the textbook's; jobs that share cores, by hand."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dflop_jax.records import NO_GROUP, REDUCE, UPDATE, Schedule, Task
from dflop_jax.simulate.steps import (
    SimJob,
    run_jobs,
    simulate_schedules,
    simulate_step,
    with_list_order,
)
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import list_schedules, order_tasks
from tests.simulate.cases import alone_s, batch, chain, names, prices, random_case, same_prices


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_equal_stages_take_m_plus_p_minus_1_rounds(order, stages, m):
    """The closed form of both schedules: (m + p - 1) (F + B), bubble (p - 1) / (m + p - 1)."""
    plan = chain(stages, sources=min(1, stages - 1), order=order)
    trace = simulate_step(plan, batch(plan, m), same_prices(plan, 1.0, 2.0, 3.0), names(plan))
    assert trace.makespan_s == pytest.approx((m + stages - 1) * 3.0)
    for fraction in trace.busy_fraction().values():
        assert fraction == pytest.approx(m / (m + stages - 1))


def test_shared_cores_conserve_work():
    """Work is neither lost nor made: cores deliver at most `concurrency` device seconds a second,
    and each task gets its own, which follows from integrating the speeds between events."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        plan, schedule, priced, trainable = random_case(rng)
        cores = float(rng.uniform(0.5, 6.0))
        trace = simulate_step(plan, schedule, replace(priced, concurrency=cores), trainable)
        size = {m.name: m.n_devices for m in plan.layout.submeshes}
        edges = sorted({t for e in trace.events for t in (e.start_s, e.end_s)})
        done = dict.fromkeys(range(len(trace.events)), 0.0)
        for a, b in itertools.pairwise(edges):
            live = [i for i, e in enumerate(trace.events) if e.start_s <= a and e.end_s >= b]
            total = sum(size[trace.events[i].submesh] for i in live)
            for i in live:
                alone = min(size[trace.events[i].submesh], cores)
                share = size[trace.events[i].submesh] * min(1.0, cores / total)
                done[i] += (b - a) * share / alone
        for i, e in enumerate(trace.events):
            want = alone_s(priced, schedule, Task(e.segment, e.group, e.direction))
            assert done[i] == pytest.approx(want, abs=1e-6)
        free = simulate_step(plan, schedule, priced, trainable)
        assert trace.makespan_s >= free.makespan_s - 1e-9


def test_a_step_without_groups_takes_only_its_updates():
    plan = chain(2, sources=1)
    priced = prices(plan, {("a0", REDUCE): 1.0, ("b0", REDUCE): 2.0, ("b0", UPDATE): 4.0})
    none = Schedule(0, ())
    assert simulate_step(plan, none, prices(plan, {}), names(plan)).makespan_s == 0.0
    trace = simulate_step(plan, none, priced, names(plan))
    starts = {(e.segment, e.direction): e.start_s for e in trace.events}
    assert starts["a0", UPDATE] == starts["b0", UPDATE] == 2.0  # the norm needs every reduction
    assert trace.makespan_s == 6.0


def test_steps_follow_one_another():
    plan = chain(2, sources=1)
    priced = same_prices(plan, 1.0, 2.0, 3.0)
    one = simulate_step(plan, batch(plan, 2), priced, names(plan))
    steps = [batch(plan, 2, step=s) for s in (5, 6, 7)]
    trace = simulate_schedules(plan, steps, priced, names(plan))
    assert trace.step == 5
    assert trace.source == one.source == "simulated"
    assert trace.makespan_s == pytest.approx(3 * one.makespan_s)
    assert sorted({e.group for e in trace.events}) == [NO_GROUP, *range(12)]
    third = [e for e in trace.events if e.group >= 8]
    assert min(e.start_s for e in third) == pytest.approx(2 * one.makespan_s)
    assert simulate_schedules(plan, [], priced, names(plan)).events == ()


def test_list_order_is_the_better_of_two():
    rng, better = np.random.default_rng(3), 0
    for _ in range(60):
        plan, schedule, priced, trainable = random_case(rng, sends=True)
        graph = step_graph(plan.layout, schedule.groups, trainable)
        numbers = list_schedules(plan, graph, schedule.groups, partial(alone_s, priced, schedule))
        orders = [tuple(graph.tasks[t] for t in order) for order in numbers]
        assert orders[0] == order_tasks(plan, graph, schedule.groups)
        textbook_s, priced_s = (
            simulate_step(plan, replace(schedule, order=o), priced, trainable).makespan_s
            for o in orders
        )
        ordered = with_list_order(plan, schedule, priced, trainable)
        assert ordered.order in orders
        least_s = min(textbook_s, priced_s)
        assert ordered.makespan_s == pytest.approx(least_s, rel=1e-8, abs=1e-12)
        assert ordered.makespan_s == simulate_step(plan, ordered, priced, trainable).makespan_s
        better += priced_s < textbook_s * (1 - 1e-6)
    assert better > 3  # prices do change the order


def test_transfers_and_computation_do_not_slow_each_other():
    jobs = [SimJob("a", 2.0, devices=1), SimJob("b", 2.0, devices=1), SimJob("link", 3.0)]
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.0, 4.0, 3.0])
    # A job that the transfer brings joins in the middle: from 3 s on three share a core.
    jobs.append(SimJob("c", 2.0, (2,), devices=1))
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.5, 4.5, 3.0, 6.0])
