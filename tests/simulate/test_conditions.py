"""Sends, collectives, noise and stragglers: longest paths, closed forms and distributions."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, RETURN, SEND, SendId, Task
from dflop_jax.simulate.steps import Noise, simulate_step
from dflop_jax.simulate.task_graph import step_graph, submesh_resources
from dflop_jax.simulate.task_order import order_tasks
from tests.simulate.cases import (
    ONE,
    TWO,
    batch,
    chain,
    names,
    prices,
    random_case,
    same_prices,
)


def crossing(plan, schedule, before, after):
    """The send between a task and one that waits for it, None where nothing crosses devices."""
    submesh = {s.name: s.submesh for s in plan.layout.segments}
    if NO_GROUP in (before.group, after.group):
        return None
    if submesh[before.segment] == submesh[after.segment]:
        return None
    low, high = (before, after) if before.direction == FORWARD else (after, before)
    shape = schedule.groups[high.group].shape
    return SendId(low.segment, high.segment, shape, before.direction)


def longest_paths(plan, schedule, priced, order, graph):
    """Start and end of every task by relaxing all edges until nothing moves.

    Nodes are tasks and, for each edge between tasks of groups on different submeshes, the send
    upon it; edges are dependencies and, per resource and link, the dispatch order.
    """
    resource, submesh = (
        submesh_resources(plan.layout),
        {s.name: s.submesh for s in plan.layout.segments},
    )
    long, edges, turns = {}, [], defaultdict(list)
    for task in order:
        long[task] = priced.task_s(plan.layout, schedule, task)
        turns[resource[submesh[task.segment]]].append(task)
        for other in order:  # who waits for this task, through a send or at once
            if task not in graph.waits_for[other]:
                continue
            size = priced.sends.get(crossing(plan, schedule, task, other), 0.0)
            if size:
                send = (task, other)
                long[send] = size
                edges += [(task, send), (send, other)]
            else:
                edges.append((task, other))
    for task in order:  # a task's sends leave in the canonical order of those that read them
        for other in graph.tasks:
            if (task, other) in long:
                turns[submesh[task.segment], submesh[other.segment]].append((task, other))
    edges += [e for chained in turns.values() for e in itertools.pairwise(chained)]
    start = dict.fromkeys(long, 0.0)
    moved = True
    while moved:
        moved = False
        for a, b in edges:
            if start[a] + long[a] > start[b]:
                start[b], moved = start[a] + long[a], True
    return {t: (start[t], start[t] + long[t]) for t in order}


def spans_of(trace):
    return {
        Task(e.segment, e.group, e.direction): (e.start_s, e.end_s)
        for e in trace.events
        if e.direction not in (SEND, RETURN)
    }


def random_order(rng, graph):
    """Any order that the graph allows."""
    waiting = {t: len(graph.waits_for[t]) for t in graph.tasks}
    ready, order = [t for t, n in waiting.items() if n == 0], []
    while ready:
        task = ready.pop(int(rng.integers(0, len(ready))))
        order.append(task)
        for t in (graph.tasks[i] for i in graph.followers[graph.task_index[task]]):
            waiting[t] -= 1
            ready += [t] if waiting[t] == 0 else []
    return tuple(order)


def test_tasks_and_sends_follow_the_longest_path():
    """With cores for all; where the schedule has an order of its own, it is followed."""
    rng = np.random.default_rng(0)
    sent = 0
    for _ in range(120):
        plan, schedule, priced, trainable = random_case(rng, sends=True, concurrency=99.0)
        graph = step_graph(plan.layout, schedule.groups, trainable)
        order = order_tasks(plan, graph, schedule.groups)
        if rng.random() < 0.5:
            order = random_order(rng, graph)
            schedule = replace(schedule, order=order)
        trace = simulate_step(plan, schedule, priced, trainable)
        assert trace.step == schedule.step
        assert spans_of(trace) == longest_paths(plan, schedule, priced, order, graph)
        sent += len(trace.events) - len(spans_of(trace))
    assert sent > 500


@pytest.mark.parametrize("m", [1, 2, 8])
def test_short_sends_cost_only_fill_and_drain(m):
    """Between them they hide behind the reader, which is the slowest and never waits."""
    plan = chain(2, sources=1)
    priced = prices(
        plan,
        {("a0", FORWARD): 1.0, ("a0", BACKWARD): 1.0, ("b0", BACKWARD): 4.0},
        {("a0", "b0", FORWARD): 0.5, ("a0", "b0", BACKWARD): 0.25},
    )
    schedule = batch(plan, m)
    trace = simulate_step(plan, schedule, priced, names(plan))
    assert trace.makespan_s == pytest.approx(1.0 + 0.5 + 4.0 * m + 0.25 + 1.0)
    there = [e for e in trace.events if e.direction == SEND]
    back = [e for e in trace.events if e.direction == RETURN]
    assert {(e.submesh, e.segment) for e in there} == {("a0 → b0", "a0")}
    assert {(e.submesh, e.segment) for e in back} == {("b0 → a0", "a0")}
    producers = [i for i, g in enumerate(schedule.groups) if g.module == "a"]
    assert [e.group for e in there] == [e.group for e in back] == producers


def test_segments_of_one_submesh_send_nothing():
    plan = chain(3, sources=1)
    together = plan.with_layout(
        submeshes=plan.layout.submeshes[:1],
        segments=tuple(replace(s, submesh="a0") for s in plan.layout.segments),
    )
    sends = {(u, n, d): 9.0 for u in names(plan) for n in names(plan) for d in (FORWARD, BACKWARD)}
    priced = same_prices(together, 1.0, 2.0, 3.0, sends=sends)
    trace = simulate_step(together, batch(plan, 1), priced, names(plan))
    plain = replace(priced, sends={})
    assert trace == simulate_step(together, batch(plan, 1), plain, names(plan))


def played(plan, schedule, priced, trainable, awaited):
    """(start, end) of every task: the thread walks the order, and before a task of an awaited
    submesh sleeps until its devices have done all they were given."""
    graph = step_graph(plan.layout, schedule.groups, trainable)
    resource, submesh = (
        submesh_resources(plan.layout),
        {s.name: s.submesh for s in plan.layout.segments},
    )
    now, free, spans = 0.0, {}, {}
    for task in order_tasks(plan, graph, schedule.groups):
        on = resource[submesh[task.segment]]
        if submesh[task.segment] in awaited:
            now = max(now, free.get(on, 0.0))
        inputs = [spans[d][1] for d in graph.waits_for[task]]
        start = max([now, free.get(on, 0.0), *inputs])
        spans[task] = start, start + priced.task_s(plan.layout, schedule, task)
        free[on] = spans[task][1]
    return spans


def test_synchronous_dispatch_equals_a_simple_replay():
    rng = np.random.default_rng(0)
    later = 0
    for _ in range(120):
        plan, schedule, priced, trainable = random_case(rng)
        awaited = {m.name for m in plan.layout.submeshes if rng.random() < 0.6}
        trace = simulate_step(plan, schedule, priced, trainable, synchronous=awaited)
        assert spans_of(trace) == played(plan, schedule, priced, trainable, awaited)
        free = simulate_step(plan, schedule, priced, trainable)
        assert trace.makespan_s >= free.makespan_s
        later += trace.makespan_s > free.makespan_s
    assert later > 10  # it does hold tasks up


def durations(trace):
    return {t: end - start for t, (start, end) in spans_of(trace).items()}


def test_noise_is_log_normal_with_mean_one_and_a_seed():
    plan = chain(2, sources=1)
    priced = same_prices(plan, 1.0, 1.0, 1.0)

    def draw(seed, sigma=0.3, step=0, priced=priced):
        schedule = batch(plan, 300, step=step)
        return simulate_step(plan, schedule, priced, names(plan), noise=Noise(seed, sigma))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert durations(draw(1)) != durations(draw(1, step=1))
    factors = np.array([v for t, v in durations(draw(1)).items() if t.group >= 0])
    assert len(factors) == 900
    assert np.log(factors).std() == pytest.approx(0.3, rel=0.1)  # 4 standard errors
    assert np.log(factors).mean() == pytest.approx(-0.045, abs=0.04)
    assert factors.mean() == pytest.approx(1.0, abs=0.042)
    # Sends have draws of their own: the tasks keep theirs.
    sends = {("a0", "b0", d): 1.0 for d in (FORWARD, BACKWARD)}
    both, alone = draw(1, priced=same_prices(plan, 1.0, 1.0, 1.0, sends=sends)), durations(draw(1))
    assert all(abs(v - alone[t]) < 1e-9 for t, v in durations(both).items())
    sent = [e.end_s - e.start_s for e in both.events if e.direction in (SEND, RETURN)]
    assert np.log(sent).std() == pytest.approx(0.3, rel=0.12)


def test_stragglers_slow_only_their_tasks():
    rng = np.random.default_rng(5)
    plan = chain(3, sources=1)
    schedule = batch(plan, 3, shapes=(ONE, TWO, ONE))
    priced = prices(
        plan,
        {
            (n, d, shape): float(rng.exponential())
            for n, d, shape in itertools.product(names(plan), (FORWARD, BACKWARD), (ONE, TWO))
        },
    )
    before = durations(simulate_step(plan, schedule, priced, names(plan)))
    noise = Noise(stragglers={"b0": 2.5})
    after = durations(simulate_step(plan, schedule, priced, names(plan), noise=noise))
    for task, value in before.items():
        assert after[task] == pytest.approx(value * (2.5 if task.segment == "b0" else 1.0))
    assert len(before) == 3 * 5 + 3 * 2


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_invalid_durations_and_factors_are_refused(bad):
    plan = chain(2, sources=1)
    for table in (
        {"seconds": {("b0", BACKWARD): bad}},
        {"seconds": {("b0", REDUCE): bad}},
        {"seconds": {}, "sends": {("a0", "b0", FORWARD): bad}},
    ):
        with pytest.raises(ValueError, match="finite and not negative"):
            prices(plan, **table)
    for fields in ({"sigma": bad}, {"stragglers": {"b0": bad}}, {"seed": -1}):
        with pytest.raises(ValueError, match="noise needs"):
            Noise(**fields)
    straggler = Noise(stragglers={"bb": 2.0})
    with pytest.raises(ValueError, match="'bb' is no submesh of the plan; it has a0, b0"):
        simulate_step(plan, batch(plan, 1), prices(plan, {}), ["b0"], noise=straggler)
