"""Adaptive correction in a simulated training loop, and its parts by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Event,
    Group,
    Load,
    Price,
    Prices,
    ProgramId,
    Schedule,
    Shape,
    Task,
    Trace,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import (
    Correction,
    CorrectionState,
    Monitor,
    StepSample,
    add_ratios,
    add_sample,
    correct_prices,
    count_sampled_step,
    decide_sampling,
    drop_old_changes,
    expected_times,
    is_full,
    is_sampling,
    log_ratios,
    price_changes,
    price_digest,
    program_key,
    replay_samples,
    task_times,
    with_decision,
)
from dflop_jax.simulate.steps import simulate_step
from tests.schedule.conftest import bucket, make_batch, make_plan, make_prices

SEGMENTS = ("a", "b")
SLOW = 1.6


@pytest.fixture(scope="module")
def plan():
    sizes = [(14, 288), (12, 256), (8, 160), (4, 96)]
    return make_plan([bucket(a, (1, b)) for a, b in sizes])


def prices_of(plan, slow_bucket=None):
    """Profiled prices, or the hardware's: one shape class takes `SLOW` times as long."""
    slow = dict(plan.layout.buckets[slow_bucket].shapes) if slow_bucket is not None else {}
    return make_prices(plan, factor=lambda p: SLOW if slow.get(p.segment) == p.shape else 1.0)


def observe(state, layout, observed, predicted):
    return add_ratios(state, log_ratios(layout, observed, predicted))


def seconds_of(prices):
    return {program: price.static_s for program, price in prices.programs.items()}


def noisy(trace, rng):
    """Measured times scatter, and every twentieth task meets a hiccup."""
    events = []
    for e in trace.events:
        took = (e.end_s - e.start_s) * rng.lognormal(0, 0.03)
        took *= 6.0 if rng.random() < 0.05 else 1.0
        events.append(Event(e.submesh, e.segment, e.group, e.direction, 0.0, took))
    return Trace(trace.step, "measured", tuple(events))


def test_correction_recovers_most_of_the_loss_in_20_batches(plan):
    """On simulated hardware with one slow shape, against schedules by the true times from the start
    and against no correction, on the same batches."""
    profiled, hardware = prices_of(plan), prices_of(plan, slow_bucket=2)
    state, rng = Correction(), np.random.default_rng(0)

    def run(prices, step):
        loads = make_batch(np.random.default_rng(1000 + step), 48)
        schedule = schedule_batch(loads, plan, prices, SEGMENTS, step=step, work=100)
        return simulate_step(plan, schedule, hardware, SEGMENTS), schedule

    for step in range(20):
        trace, schedule = run(correct_prices(profiled, state), step)
        times = task_times(noisy(trace, rng), schedule)
        state = observe(state, plan.layout, times, seconds_of(profiled))
    corrected, blind, oracle = (
        sum(run(prices, step)[0].makespan_s for step in range(20, 36))
        for prices in (correct_prices(profiled, state), profiled, hardware)
    )
    assert state.factor("b/1x160/backward") == pytest.approx(SLOW, rel=0.15)
    assert state.factor("b/1x96/backward") == pytest.approx(1.0, rel=0.1)
    assert blind > 1.05 * oracle  # there is something to recover
    assert blind - corrected > 0.8 * (blind - oracle)


def test_factors_converge_and_resist_outliers(plan):
    prices = prices_of(plan)
    predicted = seconds_of(prices)
    program, name = ProgramId("b", Shape(1, 256), BACKWARD), "b/1x256/backward"
    state, factors = Correction(), []
    for runs in ([900.0], [2.0, 2.0, 500.0], [2.0] * 3, [2.0], [0.01], [2.0] * 2, [2.0]):
        observed = {program: [r * predicted[program] for r in runs]}
        state = observe(state, plan.layout, observed, predicted)
        factors.append(state.factor(name))
    assert list(state.logs) == [name]
    assert factors[0] == 1.0  # one step convinces nobody
    assert factors[-1] == pytest.approx(2.0)
    fixed = correct_prices(prices, state)
    assert fixed.programs[program].static_s == pytest.approx(2.0 * predicted[program])
    assert {p for p in fixed.programs if fixed.programs[p] != prices.programs[p]} == {program}


def test_correction_without_observations_changes_nothing(plan):
    prices = prices_of(plan)
    predicted = seconds_of(prices)
    some = next(iter(predicted))
    other = ProgramId("absent", Shape(1, 1), FORWARD)
    assert observe(Correction(), plan.layout, {}, predicted) == Correction()
    assert observe(Correction(), plan.layout, {some: [0.0]}, predicted) == Correction()
    assert observe(Correction(), plan.layout, {some: [1.0]}, {}) == Correction()
    assert observe(Correction(), plan.layout, {other: [1.0]}, {other: 2.0}) == Correction()
    assert correct_prices(prices, Correction()) == prices
    assert Correction().deviation == 0.0
    end = Prices({}, {Task("b", -1, UPDATE): 0.5})
    assert correct_prices(end, Correction()) == end


# ---- the host's work ----

ROWS = make_plan([bucket(None, (2, 128)), bucket(None, (1, 128))], ranks={"b": 1})
HOST_S = 0.004
# A group of two rows takes the device a little longer than two of one, and the host half as long.
DEVICE_S = {Shape(2, 128): 0.0404, Shape(1, 128): 0.02}


def host_prices(shares_cores=True):
    programs = {ProgramId("b", s, BACKWARD): Price(d + HOST_S) for s, d in DEVICE_S.items()}
    return Prices(programs, host_s=HOST_S, shares_cores=shares_cores)


def as_seen(schedule):
    """What a core that also dispatches shows of tasks: while one runs, others are dispatched."""
    device_s = [DEVICE_S[g.shape] for g in schedule.groups]
    slower = 1 + HOST_S * len(device_s) / sum(device_s)
    events = (Event("b", "b", i, BACKWARD, 0.0, slower * s) for i, s in enumerate(device_s))
    return Trace(schedule.step, "measured", tuple(events))


def test_host_work_does_not_move_to_long_programs():
    """17 full rows: eight groups of two and one of one, however long steps are sampled."""
    prices, state, groups = host_prices(), Correction(), []
    loads = [Load({"b": (128,)})] * 17
    for step in range(12):
        schedule = schedule_batch(
            loads, ROWS, correct_prices(prices, state), ["b"], step=step, work=0
        )
        groups.append(len(schedule.groups))
        expected = expected_times(ROWS, schedule, prices, ["b"])
        state = observe(state, ROWS.layout, task_times(as_seen(schedule), schedule), expected)
    assert groups == [9] * 12
    assert state.deviation == pytest.approx(0.0)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_expected_times_of_few_groups(n):
    groups = tuple(Group("b", Shape(1, 128)) for _ in range(n))
    schedule = Schedule(0, groups)
    for shares_cores in (True, False):  # alike, they take what they cost
        found = expected_times(ROWS, schedule, host_prices(shares_cores), ["b"])
        assert found == {
            ProgramId("b", Shape(1, 128), BACKWARD): pytest.approx(0.024) for _ in range(min(n, 1))
        }


def test_no_price_falls_below_the_host_work():
    prices = host_prices()
    name = "b/1x128/backward"
    fixed = correct_prices(prices, Correction({name: (math.log(0.01),) * 9}))
    assert fixed.programs[ProgramId("b", Shape(1, 128), BACKWARD)].static_s == HOST_S
    cheap = replace(prices, programs={p: Price(HOST_S / 2) for p in prices.programs})
    assert correct_prices(cheap, Correction()) == cheap


def test_task_times_are_grouped_by_program():
    """Groups of one shape run one program, whatever their buckets; sends and updates run none."""
    groups = tuple(Group("b", shape) for shape in (Shape(1, 96), Shape(1, 64), Shape(1, 96)))
    events = tuple(
        Event("m", "b", g, d, start, end)
        for g, d, start, end in (
            (0, FORWARD, 0.0, 1.0),
            (1, FORWARD, 1.0, 3.0),
            (1, "send", 3.0, 3.5),
            (2, FORWARD, 3.0, 6.0),
            (-1, UPDATE, 6.0, 9.0),
        )
    )
    times = task_times(Trace(0, "measured", events), Schedule(0, groups))
    assert times == {
        ProgramId("b", Shape(1, 96), FORWARD): (1.0, 3.0),
        ProgramId("b", Shape(1, 64), FORWARD): (2.0,),
    }
    assert {program_key(p) for p in times} == {"b/1x96/forward", "b/1x64/forward"}


def test_monitor_samples_while_the_gain_exceeds_the_overhead():
    """On while the newly learnt share of the gain exceeds the overhead; pauses double."""
    learnt = Correction({"a": (0.4,) * 4})
    monitor = count_sampled_step(Monitor(window=2, recheck_every=10, max_every=20))
    assert is_sampling(monitor, 1)
    assert not is_full(monitor)
    full = count_sampled_step(monitor)
    assert is_full(full)
    assert not is_sampling(full, 2)  # until the gain is known

    def after_window(monitor, step, state=learnt):
        return decide_sampling(
            count_sampled_step(count_sampled_step(monitor)), step, state, gain_s=1.0, overhead_s=0.1
        )

    monitor = decide_sampling(full, 1, learnt, gain_s=1.0, overhead_s=0.1)
    assert monitor.on  # all of the gain is new
    monitor = after_window(monitor, 3)
    assert (monitor.on, monitor.next_step) == (False, 13)  # nothing new was learnt
    assert not is_sampling(monitor, 12)
    assert is_sampling(monitor, 13)
    monitor = after_window(monitor, 14)
    assert (monitor.on, monitor.next_step) == (False, 34)
    monitor = after_window(monitor, 35)
    assert monitor.next_step == 55  # at most every 20 steps
    assert after_window(monitor, 56, Correction({"a": (0.8,) * 9})).on


# ---- samples of a run give another the same prices, step by step ----

KNOWN_PLAN = make_plan([bucket(4, (1, 96)), bucket(2, (1, 64))])
KNOWN_PRICES = make_prices(KNOWN_PLAN)
KEY = price_digest(KNOWN_PRICES)
PROGRAMS = [program_key(p) for p in KNOWN_PRICES.programs]


def samples_of(seed: int, n: int = 20) -> list[StepSample]:
    """Steps are asked for 1 to 6 ahead, by a resumed run fewer than by the one before it."""
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers(1, 3, n))
    return [
        StepSample(
            int(step),
            int(step + rng.integers(1, 7)),
            KEY,
            {p: float(rng.normal()) for p in PROGRAMS if rng.random() < 0.7},
            float(rng.random()),
            0.5,
        )
        for step in steps
    ]


def prices_at(learnt: CorrectionState, step: int):
    changes = price_changes(KNOWN_PRICES, learnt)
    return changes[max(first)] if (first := [f for f in changes if f <= step]) else KNOWN_PRICES


def plainly(samples, step: int):
    """By definition: what was learnt last of what a step is scheduled by."""
    found = KNOWN_PRICES
    for n, sample in enumerate(samples, 1):
        if sample.first <= step:
            found = correct_prices(
                KNOWN_PRICES, replay_samples(CorrectionState(KEY), samples[:n]).state
            )
    return found


@pytest.mark.parametrize("seed", range(5))
def test_replayed_samples_give_every_step_the_same_prices(seed):
    samples = samples_of(seed)
    last = samples[-1].step
    whole = replay_samples(CorrectionState(KEY), samples)
    for step in range(0, last + 9, 3):
        assert prices_at(whole, step) == plainly(samples, step)
    # Of a checkpoint, made after some samples, and the rest from the file, read twice.
    for n in (0, 1, 7, 20):
        done = samples[n - 1].step + 1 if n else 0
        kept = drop_old_changes(replay_samples(CorrectionState(KEY), samples[:n]), done)
        assert len(kept.changes) <= 8
        again = replay_samples(replay_samples(kept, samples), samples)
        assert (again.state, again.monitor, again.last) == (whole.state, whole.monitor, last)
        assert all(prices_at(again, s) == plainly(samples, s) for s in range(done, last + 9))
    assert drop_old_changes(whole, last + 9).changes == whole.changes[-1:]


def test_monitor_state_follows_from_the_samples():
    quiet = [StepSample(k, k + 1, KEY, {PROGRAMS[0]: 0.1}, 0.0, 1e-3) for k in range(8)]
    full = replay_samples(CorrectionState(KEY), quiet)
    assert full == add_sample(replay_samples(CorrectionState(KEY), quiet[:7]), quiet[7])
    assert not is_sampling(full.monitor, 1000)  # what it gained is not known
    nothing_gained = with_decision(full, 0.0, 1e-3)
    assert [is_sampling(nothing_gained.monitor, k) for k in (8, 56, 57)] == [False, False, True]
    # The next sample, of whichever run, tells what was decided, once.
    for next_step, gain_s in ((57, 0.0), (9, 1.0)):
        sample = StepSample(next_step, next_step + 1, KEY, {PROGRAMS[0]: 0.1}, gain_s, 1e-3)
        after = add_sample(full, sample)
        assert after == add_sample(with_decision(full, gain_s, 1e-3), sample)
        assert (after.monitor.on, after.monitor.steps) == (True, 1)


def test_samples_of_other_prices_are_ignored():
    other = make_prices(KNOWN_PLAN, factor=lambda p: 2.0 if p.segment == "a" else 1.0)
    assert price_digest(other) != KEY == price_digest(make_prices(KNOWN_PLAN))
    assert replay_samples(CorrectionState(price_digest(other)), samples_of(0)) == CorrectionState(
        price_digest(other)
    )


@pytest.mark.parametrize("wrong", [(3, 3, 0.0), (-1, 2, 0.0), (3, 4, float("nan"))])
def test_invalid_samples_are_refused(wrong):
    step, first, ratio = wrong
    with pytest.raises(ValueError, match="a sample"):
        StepSample(step, first, KEY, {"a": ratio}, 0.0, 0.0)
