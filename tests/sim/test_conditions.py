"""Sends, collectives, noise and stragglers: longest paths, closed forms and distributions."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.pipeline.order import order_tasks, resources, step_graph
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REDUCE,
    RETURN,
    SEND,
    UPDATE,
    Microbatch,
    SampleShape,
    Schedule,
    Task,
)
from dflop_jax.sim import simulate
from dflop_jax.sim.pipeline import Noise, simulate_schedules, simulate_step
from dflop_jax.sim.predict import schedule_batches, simulate_scheduled
from tests.plans import chain, random_plan
from tests.sim.test_simulate import constant_profile, names, random_case, same_seconds


def random_sends(rng, plan):
    return {
        Task(n, b, d): float(rng.exponential()) * (rng.random() < 0.7)
        for n, b, d in itertools.product(names(plan), (0, 1), (FORWARD, BACKWARD))
    }


def longest_paths(plan, buckets, seconds, sends, trainable):
    """Start and end of every task by relaxing all edges until nothing moves.

    Nodes are tasks and, for each edge between tasks of one group on different submeshes, the send
    upon it; edges are dependencies and, per resource and link, the dispatch order.
    """
    graph = step_graph(plan, buckets, trainable)
    order = order_tasks(plan, graph)
    of, on = resources(plan), {s.name: s.submesh for s in plan.segments}
    long, edges, turns = {}, [], defaultdict(list)
    for task in order:
        key = task if task.group < 0 else Task(task.segment, buckets[task.group], task.direction)
        long[task] = seconds.get(key, 0.0)
        turns[of[on[task.segment]]].append(task)
        for other in order:  # who waits for this task, through a send or at once
            if task not in graph.waits_for[other]:
                continue
            crosses = task.group >= 0 and on[task.segment] != on[other.segment]
            if crosses and task.direction == FORWARD:
                size = sends.get(Task(task.segment, buckets[task.group], FORWARD), 0.0)
            elif crosses and other.direction == BACKWARD and task.direction == BACKWARD:
                size = sends.get(Task(other.segment, buckets[task.group], BACKWARD), 0.0)
            else:
                size = 0.0
            if size:
                send = (task, other)
                long[send] = size
                edges += [(task, send), (send, other)]
                turns[on[task.segment], on[other.segment]].append(send)
            else:
                edges.append((task, other))
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


def test_sends_and_tasks_take_the_longest_path():
    rng = np.random.default_rng(0)
    for _ in range(150):
        plan, buckets, seconds, trainable = random_case(rng)
        sends = random_sends(rng, plan)
        trace = simulate_step(plan, buckets, seconds, trainable, sends=sends)
        assert spans_of(trace) == longest_paths(plan, buckets, seconds, sends, trainable)


def test_no_sends_and_no_noise_change_nothing():
    rng = np.random.default_rng(1)
    for _ in range(50):
        plan, buckets, seconds, trainable = random_case(rng)
        cores = float(rng.choice([0.5, 2.0, 99.0]))
        plain = simulate_step(plan, buckets, seconds, trainable, concurrency=cores)
        zero = dict.fromkeys(random_sends(rng, plan), 0.0)
        quiet = Noise(seed=3, stragglers=dict.fromkeys([m.name for m in plan.submeshes], 1.0))
        assert plain == simulate_step(
            plan, buckets, seconds, trainable, concurrency=cores, sends=zero, noise=quiet
        )


@pytest.mark.parametrize("m", [1, 2, 8])
def test_short_sends_cost_only_the_fill_and_the_drain(m):
    """Between them they hide behind the LLM, which is the slowest and never waits."""
    plan = chain(2, vision=1)
    seconds = {
        Task("v0", 0, FORWARD): 1.0,
        Task("v0", 0, BACKWARD): 1.0,
        Task("l0", 0, BACKWARD): 4.0,
    }
    sends = {Task("v0", 0, FORWARD): 0.5, Task("v0", 0, BACKWARD): 0.25}
    trace = simulate_step(plan, [0] * m, seconds, names(plan), sends=sends)
    assert trace.makespan_s == pytest.approx(1.0 + 0.5 + 4.0 * m + 0.25 + 1.0)
    there = [e for e in trace.events if e.direction == SEND]
    back = [e for e in trace.events if e.direction == RETURN]
    assert {(e.submesh, e.segment) for e in there} == {("v0 → l0", "v0")}
    assert {(e.submesh, e.segment) for e in back} == {("l0 → v0", "v0")}
    assert [e.group for e in there] == [e.group for e in back] == list(range(m))


@pytest.mark.parametrize("m", [1, 2, 8])
def test_a_link_carries_one_send_at_a_time(m):
    plan = chain(2, vision=1, order="gpipe")
    seconds = {Task("v0", 0, FORWARD): 1.0, Task("l0", 0, BACKWARD): 1.0}
    trace = simulate_step(plan, [0] * m, seconds, ["l0"], sends={Task("v0", 0, FORWARD): 5.0})
    assert trace.makespan_s == pytest.approx(1.0 + 5.0 * m + 1.0)


def test_segments_of_one_submesh_send_nothing():
    plan = chain(3, vision=1)
    together = replace(
        plan,
        submeshes=plan.submeshes[:1],
        segments=tuple(replace(s, submesh="v0") for s in plan.segments),
    )
    sends = {Task(n, 0, d): 9.0 for n in names(plan) for d in (FORWARD, BACKWARD)}
    seconds = same_seconds(together, 1.0, 2.0, 3.0)
    trace = simulate_step(together, [0], seconds, names(plan), sends=sends)
    assert trace == simulate_step(together, [0], seconds, names(plan))


def test_collectives_end_the_step_and_overlap_other_submeshes():
    plan = chain(2, vision=1)
    seconds = {
        Task("v0", 0, FORWARD): 1.0,
        Task("v0", 0, BACKWARD): 2.0,
        Task("l0", 0, BACKWARD): 3.0,
        Task("l0", -1, REDUCE): 1.5,
        Task("v0", -1, REDUCE): 0.25,
        Task("l0", -1, UPDATE): 1.0,
    }
    trace = simulate_step(plan, [0], seconds, names(plan))
    spans = spans_of(trace)
    assert spans[Task("l0", -1, REDUCE)] == (4.0, 5.5)  # while v0 runs backward, 4 s to 6 s
    assert spans[Task("v0", -1, REDUCE)] == (6.0, 6.25)
    assert spans[Task("l0", -1, UPDATE)] == (6.25, 7.25)


def durations(trace):
    return {t: end - start for t, (start, end) in spans_of(trace).items()}


def test_noise_is_log_normal_of_mean_one_and_repeats_by_seed():
    plan = chain(2, vision=1)
    seconds = same_seconds(plan, 1.0, 1.0, 1.0)

    def draw(seed, sigma=0.3, step=0, **more):
        return simulate_step(
            plan, [0] * 300, seconds, names(plan), step=step, noise=Noise(seed, sigma), **more
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert durations(draw(1)) != durations(draw(1, step=1))
    factors = np.array([v for t, v in durations(draw(1)).items() if t.group >= 0])
    assert len(factors) == 900
    assert np.log(factors).std() == pytest.approx(0.3, rel=0.1)  # 4 standard errors
    assert np.log(factors).mean() == pytest.approx(-0.045, abs=0.04)
    assert factors.mean() == pytest.approx(1.0, abs=0.042)
    # Sends have draws of their own: the tasks keep theirs.
    sends = {Task("v0", 0, FORWARD): 1.0, Task("v0", 0, BACKWARD): 1.0}
    both, alone = draw(1, sends=sends), durations(draw(1))
    assert all(abs(v - alone[t]) < 1e-9 for t, v in durations(both).items())
    sent = [e.end_s - e.start_s for e in both.events if e.direction in (SEND, RETURN)]
    assert np.log(sent).std() == pytest.approx(0.3, rel=0.12)


def test_stragglers_slow_their_tasks_and_no_others():
    rng = np.random.default_rng(5)
    plan, buckets, seconds = chain(3, vision=1), [0, 1, 0], {}
    for n, b, d in itertools.product(names(plan), (0, 1), (FORWARD, BACKWARD)):
        seconds[Task(n, b, d)] = float(rng.exponential())
    before = durations(simulate_step(plan, buckets, seconds, names(plan)))
    noise = Noise(stragglers={"l0": 2.5})
    after = durations(simulate_step(plan, buckets, seconds, names(plan), noise=noise))
    for task, value in before.items():
        assert after[task] == pytest.approx(value * (2.5 if task.segment == "l0" else 1.0))


def test_every_step_of_a_trace_draws_anew():
    plan = chain(1)
    groups = ((Microbatch(0, ((),)),),)
    seconds = {Task("l0", 0, BACKWARD): 1.0}
    schedules = [Schedule(s, groups) for s in range(3)]
    trace = simulate_schedules(plan, schedules, seconds, ["l0"], noise=Noise(sigma=0.5))
    assert len(set(durations(trace).values()) - {0.0}) == 3


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_durations_and_factors_are_refused(bad):
    plan = random_plan(np.random.default_rng(0))
    last = names(plan)[-1]
    for table in (
        {"seconds": {Task(last, 0, BACKWARD): bad}},
        {"sends": {Task(last, 0, FORWARD): bad}},
    ):
        with pytest.raises(ValueError, match="finite and not negative"):
            simulate_step(plan, [0], **({"seconds": {}} | table), trainable=[last])
    for fields in ({"sigma": bad}, {"stragglers": {"llm": bad}}, {"seed": -1}):
        with pytest.raises(ValueError, match="noise needs"):
            Noise(**fields)
    with pytest.raises(ValueError, match="'lmm' is no submesh of the plan; it has"):
        simulate_step(plan, [0], {}, [last], noise=Noise(stragglers={"lmm": 2.0}))


def test_whole_batches_take_conditions_too():
    plan, profile = chain(2, vision=1, tiles=2), constant_profile(1.0, 3.0)
    batch = [SampleShape(2, 8, 40)] * 2  # fills one bucket of 2 tiles and 64 tokens each
    plain = simulate(plan, [batch], profile).makespan_s
    sends = {Task("v0", 0, d): 0.5 for d in (FORWARD, BACKWARD)}
    collectives = {Task(n, -1, REDUCE): 2.0 for n in names(plan)}
    slow = simulate(plan, [batch], profile, sends=sends, collectives=collectives)
    # The drain ends in the encoder's backward, its gradients' way and its collective.
    assert slow.makespan_s == pytest.approx(plain + 0.5 + 0.5 + 2.0)
    noise = Noise(stragglers={"v0": 2.0, "l0": 2.0})
    assert simulate(plan, [batch], profile, noise=noise).makespan_s == pytest.approx(2 * plain)
    schedules = schedule_batches(plan, [batch], profile)
    assert simulate_scheduled(plan, schedules, profile).makespan_s == plain
