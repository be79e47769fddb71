"""The simulator against closed forms, a re-implementation and the conservation of work."""

import itertools

import numpy as np
import pytest

from dflop_jax.pipeline.order import order_tasks, resources, step_graph
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REDUCE,
    UPDATE,
    LayerTiming,
    Microbatch,
    ModelProfile,
    ModuleShape,
    SampleShape,
    Schedule,
    Task,
)
from dflop_jax.sim import simulate
from dflop_jax.sim.pipeline import simulate_schedules, simulate_step
from dflop_jax.sim.predict import bucket_costs
from tests.plans import chain, random_plan


def names(plan):
    return [s.name for s in plan.segments]


def same_seconds(plan, forward_s, backward_s, last_s):
    """Every segment alike; the last one does both in its backward."""
    out = {}
    for n in names(plan):
        for b in range(len(plan.buckets)):
            out[Task(n, b, FORWARD)] = forward_s
            out[Task(n, b, BACKWARD)] = last_s if n == names(plan)[-1] else backward_s
    return out


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_equal_stages_take_m_plus_p_minus_1_rounds(order, stages, m):
    """The closed form of both schedules: (m + p - 1) (F + B), bubble (p - 1) / (m + p - 1)."""
    plan = chain(stages, vision=min(1, stages - 1), order=order)
    seconds = same_seconds(plan, 1.0, 2.0, 3.0)
    trace = simulate_step(plan, [0] * m, seconds, names(plan))
    assert trace.makespan_s == pytest.approx((m + stages - 1) * 3.0)
    for fraction in trace.busy_fraction().values():
        assert fraction == pytest.approx(m / (m + stages - 1))


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("encoder, llm", [((1.0, 2.0), 7.0), ((0.5, 0.5), 1.5), ((2.0, 3.0), 1.0)])
def test_two_unequal_stages_fill_and_then_run_at_the_slowest(m, encoder, llm):
    plan = chain(2, vision=1)
    forward_s, backward_s = encoder
    seconds = {
        Task("v0", 0, FORWARD): forward_s,
        Task("v0", 0, BACKWARD): backward_s,
        Task("l0", 0, BACKWARD): llm,
    }
    trace = simulate_step(plan, [0] * m, seconds, names(plan))
    if llm >= forward_s + backward_s:  # the LLM never waits after its first input
        want = forward_s + m * llm + backward_s
    else:  # the encoder waits for the LLM once or never, then has m rounds of its own
        wait = max(0.0, llm - (forward_s if m > 1 else 0.0))
        want = m * (forward_s + backward_s) + wait
    assert trace.makespan_s == pytest.approx(want)


@pytest.mark.parametrize("concurrency, factor", [(1.0, 2.0), (1.5, 4 / 3), (2.0, 1.0), (9.0, 1.0)])
def test_overlapping_tasks_share_the_cores(concurrency, factor):
    # Text-only groups for the LLM and frozen forwards of the encoder need nothing of each other.
    plan = chain(2, vision=1)
    seconds = {Task("v0", 0, FORWARD): 3.0, Task("l0", 1, BACKWARD): 3.0}
    trace = simulate_step(plan, [1, 0], seconds, ["l0"], concurrency=concurrency)
    assert trace.makespan_s == pytest.approx(3.0 * factor)


def test_one_task_alone_is_never_slowed_down():
    # Durations are those of a task alone on its submesh, crowded or not.
    plan = chain(1)
    trace = simulate_step(plan, [0], {Task("l0", 0, BACKWARD): 3.0}, ["l0"], concurrency=0.5)
    assert trace.makespan_s == pytest.approx(3.0)


def test_the_longer_of_two_overlapping_tasks_speeds_up_when_alone():
    plan = chain(2, vision=1)
    seconds = {Task("v0", 0, FORWARD): 1.0, Task("l0", 1, BACKWARD): 3.0}
    trace = simulate_step(plan, [1, 0], seconds, ["l0"], concurrency=1.0)
    ends = {(e.segment, e.group): e.end_s for e in trace.events}
    assert ends["v0", 1] == pytest.approx(2.0)  # both at half speed
    assert ends["l0", 0] == pytest.approx(4.0)  # two seconds left, alone


def replay(plan, buckets, seconds, trainable):
    """Unlimited cores: fixed point of start = max(end of inputs, end of the one before)."""
    graph = step_graph(plan, buckets, trainable)
    of = resources(plan)
    where = {s.name: of[s.submesh] for s in plan.segments}
    free, end, spans = {}, {}, {}
    for t in order_tasks(plan, graph):  # in list order all inputs are known already
        key = t if t.group < 0 else Task(t.segment, buckets[t.group], t.direction)
        start = max([free.get(where[t.segment], 0.0), *(end[d] for d in graph.waits_for[t])])
        end[t] = free[where[t.segment]] = start + seconds.get(key, 0.0)
        spans[t] = (start, end[t])
    return spans


def random_case(rng):
    plan = random_plan(rng)
    buckets = [int(b) for b in rng.integers(0, 2, int(rng.integers(0, 6)))]
    trainable = [n for n in names(plan) if rng.random() < 0.8] or names(plan)[-1:]
    kinds = [(b, d) for b in (0, 1) for d in (FORWARD, BACKWARD)] + [(-1, REDUCE), (-1, UPDATE)]
    seconds = {
        Task(n, b, d): float(rng.exponential()) * (rng.random() < 0.9)
        for n in names(plan)
        for b, d in kinds
    }
    return plan, buckets, seconds, trainable


def test_enough_cores_equal_the_replay():
    rng = np.random.default_rng(0)
    for _ in range(150):
        plan, buckets, seconds, trainable = random_case(rng)
        trace = simulate_step(plan, buckets, seconds, trainable, concurrency=99.0)
        want = replay(plan, buckets, seconds, trainable)
        got = {Task(e.segment, e.group, e.direction): (e.start_s, e.end_s) for e in trace.events}
        assert got.keys() == want.keys()
        for t in want:
            assert got[t] == pytest.approx(want[t], abs=1e-9)


def test_shared_cores_keep_the_work():
    """Work is neither lost nor made: cores deliver at most `concurrency` device seconds a second,
    and each task gets its own, which follows from integrating the speeds between events."""
    rng = np.random.default_rng(1)
    for _ in range(100):
        plan, buckets, seconds, trainable = random_case(rng)
        cores = float(rng.uniform(0.5, 6.0))
        trace = simulate_step(plan, buckets, seconds, trainable, concurrency=cores)
        size = {m.name: m.n_devices for m in plan.submeshes}
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
            key = Task(e.segment, e.group if e.group < 0 else buckets[e.group], e.direction)
            assert done[i] == pytest.approx(seconds.get(key, 0.0), abs=1e-6)
        free = simulate_step(plan, buckets, seconds, trainable)
        assert trace.makespan_s >= free.makespan_s - 1e-9


def test_no_group_takes_no_time_but_updates():
    plan = chain(2, vision=1)
    seconds = {
        Task("v0", -1, REDUCE): 1.0,
        Task("l0", -1, REDUCE): 2.0,
        Task("l0", -1, UPDATE): 4.0,
    }
    assert simulate_step(plan, [], {}, names(plan)).makespan_s == 0.0
    trace = simulate_step(plan, [], seconds, names(plan))
    starts = {(e.segment, e.direction): e.start_s for e in trace.events}
    assert starts["v0", UPDATE] == starts["l0", UPDATE] == 2.0  # the norm needs every reduction
    assert trace.makespan_s == 6.0


def test_steps_follow_one_another():
    plan = chain(2, vision=1)
    seconds = same_seconds(plan, 1.0, 2.0, 3.0)
    one = simulate_step(plan, [0, 0], seconds, names(plan))
    groups = tuple((Microbatch(0, ((),)),) for _ in range(2))
    trace = simulate_schedules(plan, [Schedule(s, groups) for s in (5, 6, 7)], seconds, names(plan))
    assert trace.step == 5
    assert trace.makespan_s == pytest.approx(3 * one.makespan_s)
    assert sorted({e.group for e in trace.events}) == [-1, 0, 1, 2, 3, 4, 5]
    third = [e for e in trace.events if e.group in (4, 5)]
    assert min(e.start_s for e in third) == pytest.approx(2 * one.makespan_s)
    assert simulate_schedules(plan, [], seconds, names(plan)).events == ()


def constant_profile(layer_s, backward_s):
    """A profile whose layers cost the same at any shape; no ends."""
    timings = tuple(
        LayerTiming(m, 1, ModuleShape(i, 16), layer_s, backward_s, 0.0, 0.0)
        for m in ("vision", "llm")
        for i in (1, 2)
    )
    zero = {"vision": 0, "llm": 0}
    one = {"vision": 1, "llm": 1}
    half = {"vision": 0.5, "llm": 0.5}
    return ModelProfile("k", "cpu", timings, zero, zero, one, half, {"vision": 16}, concurrency=8.0)


def test_simulate_runs_whole_batches():
    plan = chain(2, vision=1, tiles=2)
    profile = constant_profile(1.0, 3.0)
    assert CostModel(profile).task_seconds(plan)[Task("v0", 0, FORWARD)] == pytest.approx(1.0)
    two = [SampleShape(2, 8, 40)] * 2  # each fills a bucket of 2 tiles and 64 tokens
    trace = simulate(plan, [two, two[:1], two], profile)
    # One group: F 1, LLM 3, B 3. Two: F0 F1 of 1, LLM 1-4 and 4-7, B0 4-7, B1 7-10.
    by_m = {1: 1.0 + 3.0 + 3.0, 2: 2 * (1.0 + 3.0) + 2.0}
    assert trace.makespan_s == pytest.approx(2 * by_m[2] + by_m[1])
    assert trace.source == "simulated"
    # A frozen encoder runs no backward: 1 s to fill, then 3 s a group.
    assert simulate(plan, [two], profile, trainable=["l0"]).makespan_s == pytest.approx(7.0)
    with pytest.raises(ValueError, match="bucket"):
        simulate(plan, [[SampleShape(3, 8, 40)]], profile)


def test_bucket_costs_take_the_slowest_segment_per_microbatch():
    plan = chain(4, vision=1)
    seconds = {
        Task("v0", 0, FORWARD): 1.0,
        Task("v0", 0, BACKWARD): 4.0,
        Task("l0", 0, FORWARD): 2.0,
        Task("l0", 0, BACKWARD): 5.0,
        Task("l1", 0, FORWARD): 1.0,
        Task("l1", 0, BACKWARD): 5.5,
        Task("l2", 0, FORWARD): 50.0,  # evaluation only
        Task("l2", 0, BACKWARD): 6.0,
    }
    assert bucket_costs(plan, seconds, names(plan)).seconds == ((5.0, 7.0), (0.0, 0.0))
    assert bucket_costs(plan, seconds, ["l0"]).seconds[0] == (1.0, 7.0)
    # Below the only trainable segment nothing runs backward.
    assert bucket_costs(plan, seconds, ["l2"]).seconds[0] == (1.0, 6.0)
