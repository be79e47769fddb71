"""Sends, collectives, noise and stragglers: longest paths, a replay and distributions."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, RETURN, SEND, SendId
from dflop_jax.simulate.steps import Noise, simulate_step
from dflop_jax.simulate.task_graph import segment_resources, step_graph
from dflop_jax.simulate.task_order import order_tasks
from tests.simulate.cases import (
    ONE,
    TWO,
    alone_s,
    batch,
    chain,
    names,
    prices,
    random_case,
    same_prices,
    spans_of,
)


def crossing(submesh, schedule, before, after):
    """The send between a task and one that waits for it, None where nothing crosses devices."""
    if NO_GROUP in (before.group, after.group) or submesh[before.segment] == submesh[after.segment]:
        return None
    low, high = (before, after) if before.direction == FORWARD else (after, before)
    shape = schedule.groups[high.group].shape
    return SendId(low.segment, high.segment, shape, before.direction)


def longest_paths(plan, schedule, priced, order, graph):
    """Start and end of every task by relaxing all edges until nothing moves.

    Nodes are tasks and, for each edge between tasks of groups on different submeshes, the send
    upon it; edges are dependencies and, per resource and link, the dispatch order.
    """
    resource = segment_resources(plan.layout)
    submesh = {s.name: s.submesh for s in plan.layout.segments}
    long, edges, turns = {}, [], defaultdict(list)
    for task in order:
        long[task] = alone_s(priced, schedule, task)
        turns[resource[task.segment]].append(task)
        for other in (t for t in order if task in graph.waits_for[t]):
            size = priced.sends.get(crossing(submesh, schedule, task, other), 0.0)
            if size:
                long[task, other] = size
                edges += [(task, (task, other)), ((task, other), other)]
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
    rng, sent = np.random.default_rng(0), 0
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


@pytest.mark.parametrize("m", [1, 8])
def test_sends_are_events_of_links(m):
    """Between them they hide behind the reader, which is the slowest and never waits."""
    plan = chain(2, sources=1)
    seconds = {("a0", FORWARD): 1.0, ("a0", BACKWARD): 1.0, ("b0", BACKWARD): 4.0}
    sends = {("a0", "b0", FORWARD): 0.5, ("a0", "b0", BACKWARD): 0.25}
    trace = simulate_step(plan, batch(plan, m), prices(plan, seconds, sends), names(plan))
    assert trace.makespan_s == pytest.approx(1.0 + 0.5 + 4.0 * m + 0.25 + 1.0)
    for kind, link in ((SEND, "a0 → b0"), (RETURN, "b0 → a0")):
        found = [e for e in trace.events if e.direction == kind]
        assert {e.submesh for e in found} == {link}
        assert [(e.segment, e.group) for e in found] == [("a0", 2 * i) for i in range(m)]


def played(plan, schedule, priced, trainable, awaited):
    """(start, end) of every task: the thread walks the order, and before a task of an awaited
    submesh sleeps until its devices have done all they were given."""
    graph = step_graph(plan.layout, schedule.groups, trainable)
    resource = segment_resources(plan.layout)
    submesh = {s.name: s.submesh for s in plan.layout.segments}
    now, free, spans = 0.0, {}, {}
    for task in order_tasks(plan, graph, schedule.groups):
        on = resource[task.segment]
        if submesh[task.segment] in awaited:
            now = max(now, free.get(on, 0.0))
        start = max([now, free.get(on, 0.0), *(spans[d][1] for d in graph.waits_for[task])])
        spans[task] = start, start + alone_s(priced, schedule, task)
        free[on] = spans[task][1]
    return spans


def test_synchronous_dispatch_equals_a_simple_replay():
    rng, later = np.random.default_rng(0), 0
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
    sends = {("a0", "b0", d): 1.0 for d in (FORWARD, BACKWARD)}

    def draw(seed, step=0, **more):
        schedule, priced = batch(plan, 300, step=step), same_prices(plan, 1.0, 1.0, 1.0, **more)
        return simulate_step(plan, schedule, priced, names(plan), noise=Noise(seed, 0.3))

    assert draw(1) == draw(1) != draw(2)
    assert durations(draw(1)) != durations(draw(1, step=1))
    factors = np.array([v for t, v in durations(draw(1)).items() if t.group >= 0])
    assert len(factors) == 900
    assert np.log(factors).std() == pytest.approx(0.3, rel=0.1)  # 4 standard errors
    assert factors.mean() == pytest.approx(1.0, abs=0.042)
    # Sends have draws of their own: the tasks keep theirs.
    both, alone = draw(1, sends=sends), durations(draw(1))
    assert all(abs(v - alone[t]) < 1e-9 for t, v in durations(both).items())
    sent = [e.end_s - e.start_s for e in both.events if e.direction in (SEND, RETURN)]
    assert np.log(sent).std() == pytest.approx(0.3, rel=0.12)


def test_stragglers_slow_only_their_tasks():
    rng, plan = np.random.default_rng(5), chain(3, sources=1)
    schedule = batch(plan, 3, shapes=(ONE, TWO, ONE))
    keys = itertools.product(names(plan), (FORWARD, BACKWARD), (ONE, TWO))
    priced = prices(plan, {key: float(rng.exponential()) for key in keys})
    before, after = (
        durations(simulate_step(plan, schedule, priced, names(plan), noise=noise))
        for noise in (None, Noise(stragglers={"b0": 2.5}))
    )
    for task, value in before.items():
        assert after[task] == pytest.approx(value * (2.5 if task.segment == "b0" else 1.0))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_invalid_durations_and_factors_are_refused(bad):
    plan = chain(2, sources=1)
    for key in (("b0", BACKWARD), ("b0", REDUCE)):
        with pytest.raises(ValueError, match="finite and not negative"):
            prices(plan, {key: bad})
    with pytest.raises(ValueError, match="finite and not negative"):
        prices(plan, {}, {("a0", "b0", FORWARD): bad})
    for fields in ({"sigma": bad}, {"stragglers": {"b0": bad}}, {"seed": -1}):
        with pytest.raises(ValueError, match="noise needs"):
            Noise(**fields)
    straggler = Noise(stragglers={"bb": 2.0})
    with pytest.raises(ValueError, match="'bb' is not a submesh of the plan; it has a0, b0"):
        simulate_step(plan, batch(plan, 1), prices(plan, {}), ["b0"], noise=straggler)
