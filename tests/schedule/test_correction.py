"""Adaptive correction in a simulated training loop, and its parts by hand."""

import math

import msgspec
import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, UPDATE, Bucket, Event, Task, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import (
    Correction,
    Monitor,
    corrected,
    decide,
    observe,
    predicted_gain_s,
    program_of,
    sampling,
    task_times,
)
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs
from tests.schedule.conftest import make_batch, make_plan

SEGMENTS = ("vision", "llm")
SLOW = 1.6


@pytest.fixture(scope="module")
def plan():
    return make_plan([Bucket(14, 288), Bucket(12, 256), Bucket(8, 160), Bucket(4, 96)])


def seconds_of(plan, slow_bucket=None):
    """Profiled seconds, or the hardware's: one shape class takes `SLOW` times as long."""
    out = {}
    for b, bucket in enumerate(plan.buckets):
        factor = SLOW if b == slow_bucket else 1.0
        vision_s, llm_s = 0.004 * bucket.tiles + 0.005, 0.0006 * bucket.tokens + 0.01
        out[Task("vision", b, FORWARD)] = factor * vision_s / 3
        out[Task("vision", b, BACKWARD)] = factor * vision_s * 2 / 3
        out[Task("llm", b, BACKWARD)] = factor * llm_s
    return out


def noisy(trace, rng):
    """Measured times scatter, and every twentieth task meets a hiccup."""
    events = []
    for e in trace.events:
        took = (e.end_s - e.start_s) * rng.lognormal(0, 0.03)
        took *= 6.0 if rng.random() < 0.05 else 1.0
        events.append(Event(e.submesh, e.segment, e.group, e.direction, 0.0, took))
    return Trace(trace.step, "measured", tuple(events))


class Loop:
    """Training on simulated hardware: schedule by corrected costs, run, sample, correct."""

    def __init__(self, plan, slow_bucket, overhead_s=1e-3):
        self.plan, self.overhead_s = plan, overhead_s
        self.profiled = seconds_of(plan)
        self.hardware = seconds_of(plan, slow_bucket)
        self.state, self.monitor = Correction(), Monitor()
        self.rng = np.random.default_rng(0)
        self.sampled: list[bool] = []

    def costs(self, seconds):
        return bucket_costs(self.plan, seconds, SEGMENTS)

    def run(self, step, costs):
        """(makespan on the hardware, its trace, the buckets that ran)."""
        shapes = make_batch(np.random.default_rng(1000 + step), 48)
        schedule = schedule_batch(shapes, self.plan, costs, step=step, max_rounds=800)
        ran = [g[0].bucket for g in schedule.groups]
        trace = simulate_step(self.plan, ran, self.hardware, SEGMENTS)
        return trace.makespan_s, trace, ran

    def step(self, step):
        costs = self.costs(corrected(self.profiled, self.plan, self.state))
        makespan_s, trace, ran = self.run(step, costs)
        self.sampled.append(sampling(self.monitor, step))
        if self.sampled[-1]:
            times = task_times(noisy(trace, self.rng), ran)
            self.state = observe(self.state, self.plan, times, self.profiled)
            shapes = make_batch(np.random.default_rng(1000 + step), 48)
            new = self.costs(corrected(self.profiled, self.plan, self.state))
            gain_s = predicted_gain_s(
                shapes, self.plan, self.costs(self.profiled), new, max_rounds=400
            )
            self.monitor = decide(
                self.monitor, step, self.state, gain_s=gain_s, overhead_s=self.overhead_s
            )
        return makespan_s


@pytest.mark.parametrize("slow_bucket", [0, 2])
def test_most_of_the_loss_is_recovered_within_20_batches(plan, slow_bucket):
    """Against an oracle that schedules by the true times from the start, and against no
    correction, on the same batches."""
    loop = Loop(plan, slow_bucket)
    for step in range(20):
        loop.step(step)
    rest = range(20, 40)
    ours = sum(loop.step(step) for step in rest)
    blind = sum(loop.run(step, loop.costs(loop.profiled))[0] for step in rest)
    oracle = sum(loop.run(step, loop.costs(loop.hardware))[0] for step in rest)
    assert blind > 1.05 * oracle  # there is something to recover
    assert blind - ours > 0.8 * (blind - oracle)


def test_sampling_stops_when_predictions_are_right_and_looks_again_now_and_then(plan):
    loop = Loop(plan, slow_bucket=None)
    for step in range(200):
        loop.step(step)
    assert loop.state.deviation < 0.1
    assert loop.sampled[0]
    assert not loop.sampled[10]
    assert sum(loop.sampled[20:]) > 0
    assert sum(loop.sampled) < 40


def test_a_slowdown_that_comes_late_is_found_by_a_recheck(plan):
    loop = Loop(plan, slow_bucket=None)
    for step in range(30):
        loop.step(step)
    assert not loop.sampled[-1]
    loop.hardware = seconds_of(plan, 2)
    for step in range(30, 90):
        loop.step(step)
    assert loop.state.factor("llm/1x160/backward") == pytest.approx(SLOW, rel=0.15)
    assert loop.state.factor("llm/1x96/backward") == pytest.approx(1.0, rel=0.1)


def test_factors_meet_the_ratio_and_resist_outliers(plan):
    predicted = seconds_of(plan)
    task, name = Task("llm", 1, BACKWARD), "llm/1x256/backward"
    state, factors = Correction(), []
    for runs in ([900.0], [2.0, 2.0, 500.0], [2.0] * 3, [2.0], [0.01], [2.0] * 2, [2.0]):
        observed = {task: [r * predicted[task] for r in runs]}
        state = observe(state, plan, observed, predicted)
        factors.append(state.factor(name))
    assert list(state.logs) == [name]
    assert factors[0] == 1.0  # one step convinces nobody
    assert factors[-1] == pytest.approx(2.0)
    fixed = corrected(predicted, plan, state)
    assert fixed[task] == pytest.approx(2.0 * predicted[task])
    others = {t: s for t, s in predicted.items() if t != task}
    assert {t: s for t, s in fixed.items() if t != task} == others


def test_old_steps_are_forgotten(plan):
    predicted = seconds_of(plan)
    task = Task("vision", 0, FORWARD)
    state = Correction()
    for ratio in [3.0] * 20 + [1.0] * 6:
        state = observe(state, plan, {task: [ratio * predicted[task]]}, predicted)
    assert state.factor("vision/14/forward") == pytest.approx(1.0)


def test_nothing_observed_changes_nothing(plan):
    predicted = seconds_of(plan)
    zero = Task("llm", 0, BACKWARD)
    assert observe(Correction(), plan, {}, predicted) == Correction()
    assert observe(Correction(), plan, {zero: [0.0]}, predicted) == Correction()
    assert observe(Correction(), plan, {zero: [1.0]}, {}) == Correction()
    assert corrected(predicted, plan, Correction()) == predicted
    assert Correction().deviation == 0.0
    update = {Task("llm", -1, UPDATE): 0.5}
    assert corrected(update, plan, Correction()) == update


def test_buckets_that_share_a_shape_share_a_factor():
    plan = make_plan([Bucket(8, 128), Bucket(4, 128)])
    names = [program_of(plan, Task("llm", b, BACKWARD)) for b in (0, 1)]
    assert names == ["llm/1x128/backward"] * 2
    assert program_of(plan, Task("vision", 1, FORWARD)) == "vision/4/forward"


def test_task_times_are_grouped_by_bucket():
    events = tuple(
        Event("m", "llm", g, d, start, end)
        for g, d, start, end in (
            (0, FORWARD, 0.0, 1.0),
            (1, FORWARD, 1.0, 3.0),
            (2, FORWARD, 3.0, 6.0),
            (-1, UPDATE, 6.0, 9.0),
        )
    )
    assert task_times(Trace(0, "measured", events), [5, 7, 5]) == {
        Task("llm", 5, FORWARD): (1.0, 3.0),
        Task("llm", 7, FORWARD): (2.0,),
    }


def test_state_is_json():
    state = Correction({"llm/1x256/backward": (0.0, math.log(1.6))})
    assert msgspec.json.decode(msgspec.json.encode(state), type=Correction) == state
    monitor = Monitor(before=state)
    assert msgspec.json.decode(msgspec.json.encode(monitor), type=Monitor) == monitor


def test_the_rule_of_the_monitor():
    """On while the newly learnt share of the gain exceeds the overhead; pauses double."""
    learnt = Correction({"a": (0.4,) * 4})
    monitor = Monitor(window=2, recheck_every=10, max_every=20)
    monitor = decide(monitor, 0, learnt, gain_s=1.0, overhead_s=0.1)
    assert monitor.on  # the window is not full
    monitor = decide(monitor, 1, learnt, gain_s=1.0, overhead_s=0.1)
    assert monitor.on  # all of the gain is new
    for step in (2, 3):
        monitor = decide(monitor, step, learnt, gain_s=1.0, overhead_s=0.1)
    assert (monitor.on, monitor.next_step) == (False, 13)  # nothing new was learnt
    assert not sampling(monitor, 12)
    assert sampling(monitor, 13)
    for step in (13, 14):
        monitor = decide(monitor, step, learnt, gain_s=1.0, overhead_s=0.1)
    assert (monitor.on, monitor.next_step) == (False, 34)
    for step in (34, 35):
        monitor = decide(monitor, step, learnt, gain_s=1.0, overhead_s=0.1)
    assert monitor.next_step == 55  # at most every 20 steps
    moved = Correction({"a": (0.8,) * 9})
    for step in (55, 56):
        monitor = decide(monitor, step, moved, gain_s=1.0, overhead_s=0.1)
    assert monitor.on
