"""Adaptive correction in a simulated training loop, and its parts by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    Event,
    Load,
    Price,
    Prices,
    ProgramId,
    Shape,
    Trace,
    add_host_work,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import (
    Correction,
    CorrectionState,
    StepSample,
    add_ratios,
    add_sample,
    correct_prices,
    drop_old_changes,
    expected_times,
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


def observe(state, observed, predicted):
    return add_ratios(state, log_ratios(observed, predicted))


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
    """On simulated hardware with one slow shape, against schedules by the true times and by the
    predicted ones."""
    profiled, hardware = prices_of(plan), prices_of(plan, slow_bucket=2)
    state, rng = Correction(), np.random.default_rng(0)

    def run(prices, step):
        loads = make_batch(np.random.default_rng(1000 + step), 48)
        schedule = schedule_batch(loads, plan, prices, SEGMENTS, step=step, work=100)
        return simulate_step(plan, schedule, hardware, SEGMENTS), schedule

    for step in range(20):
        trace, schedule = run(correct_prices(profiled, state), step)
        times = task_times(noisy(trace, rng), schedule)
        state = observe(state, times, seconds_of(profiled))
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
        state = observe(state, observed, predicted)
        factors.append(state.factor(name))
    assert list(state.logs) == [name]
    assert factors[0] == 1.0  # one step convinces nobody
    assert factors[-1] == pytest.approx(2.0)
    fixed = correct_prices(prices, state)
    assert fixed.programs[program].static_s == pytest.approx(2.0 * predicted[program])
    assert {p for p in fixed.programs if fixed.programs[p] != prices.programs[p]} == {program}


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
        state = observe(state, task_times(as_seen(schedule), schedule), expected)
    assert groups == [9] * 12
    assert state.max_factor == pytest.approx(1.0)


def test_sampling_pauses_while_the_gain_is_below_the_overhead():
    """On while the newly learnt share of the gain exceeds the overhead; pauses double."""

    def after_window(state, step, ratio=0.4):
        for k in (step - 1, step):
            assert state.is_sampling(k)
            assert not state.is_full
            state = add_sample(state, StepSample(k, k + 1, "", {"a": ratio}, 0.0, 0.0))
        assert state.is_full
        assert not state.is_sampling(step + 1)  # until the gain is known
        return with_decision(state, 1.0, 0.1)

    state = after_window(CorrectionState("", window=2), 3)
    assert state.is_on  # all of the gain is new
    state = after_window(state, 5)
    assert state.is_on  # half of it
    state = after_window(state, 7)
    assert not state.is_on  # nothing new was learnt
    assert [state.is_sampling(k) for k in (56, 57)] == [False, True]
    state = after_window(state, 58)
    assert (state.is_on, state.next_step) == (False, 158)
    for step in (159, 400, 900):
        state = after_window(state, step, 0.8)
    assert state.is_on


ROW_S = 0.01
OWN_ROWS = make_plan([bucket(None, (4, 128)), bucket(None, (1, 128))], ranks={"b": 1})


def row_prices(host_s, *, shares_cores=True):
    """A row takes the device as long in every shape, so that padding is all a large group costs."""
    device_s = {ProgramId("b", s, BACKWARD): ROW_S * s.rows for s in OWN_ROWS.layout.shapes("b")}
    programs = {
        p: Price(float(add_host_work(s, host_s, shares_cores=shares_cores)))
        for p, s in device_s.items()
    }
    return Prices(programs, host_s=host_s, shares_cores=shares_cores)


@pytest.mark.parametrize(
    "host_s, shares_cores, rows",
    [
        (0.0, True, [1] * 7),
        (0.0, False, [1] * 7),
        (ROW_S, True, [4, 4]),  # 2 x (4 + 1) rows' seconds against 4 + 1 + 3 x (1 + 1)
        (3 * ROW_S, False, [4, 4]),  # 2 x 4 against 4 + 3 x 3
        (0.5 * ROW_S, False, [1] * 7),  # hidden
    ],
)
def test_small_groups_are_used_only_if_the_host_keeps_up(host_s, shares_cores, rows):
    """Seven full rows in groups of four rows, of which one would be empty, and of one."""
    loads = [Load({"b": (128,)})] * 7
    found = row_prices(host_s, shares_cores=shares_cores)
    schedule = schedule_batch(loads, OWN_ROWS, found, ["b"], work=400)
    assert [g.shape.rows for g in schedule.groups] == rows
    each_s = [max(ROW_S * n, host_s) if not shares_cores else ROW_S * n + host_s for n in rows]
    assert schedule.makespan_s == pytest.approx(sum(each_s))
    assert schedule.lower_bound_s <= schedule.makespan_s
    assert schedule.status == "optimal"


def test_price_digest_includes_host_work():
    without = Prices({ProgramId("b", Shape(1, 128), BACKWARD): Price(0.25)})
    assert price_digest(without) == "2be9e3e74dd0632b"
    some, other = (replace(without, host_s=0.5, shares_cores=c) for c in (True, False))
    assert len({price_digest(p) for p in (without, some, other)}) == 3
    unknown = CorrectionState(price_digest(some))
    assert replay_samples(unknown, samples_of(0)) == unknown


# ---- samples of a run give another the same prices, step by step ----

KNOWN_PLAN = make_plan([bucket(4, (1, 96)), bucket(2, (1, 64))])
KNOWN_PRICES = make_prices(KNOWN_PLAN)
KEY = price_digest(KNOWN_PRICES)
PROGRAMS = [program_key(p) for p in KNOWN_PRICES.programs]


def samples_of(seed: int, n: int = 20) -> list[StepSample]:
    """Steps are asked for 1 to 6 ahead, by a resumed run fewer than by the one before it."""
    rng, samples = np.random.default_rng(seed), []
    for step in np.cumsum(rng.integers(1, 3, n)).tolist():
        ratios = {p: float(rng.normal()) for p in PROGRAMS if rng.random() < 0.7}
        first = int(step + rng.integers(1, 7))
        samples.append(StepSample(step, first, KEY, ratios, float(rng.random()), 0.5))
    return samples


def prices_at(learnt: CorrectionState, step: int):
    changes = price_changes(KNOWN_PRICES, learnt)
    return changes[max(first)] if (first := [f for f in changes if f <= step]) else KNOWN_PRICES


def plainly(samples, step: int):
    """By definition: what was learnt last of what a step is scheduled by."""
    found = KNOWN_PRICES
    for n, sample in enumerate(samples, 1):
        if sample.first <= step:
            learnt = replay_samples(CorrectionState(KEY), samples[:n])
            found = correct_prices(KNOWN_PRICES, learnt.correction)
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
        assert replace(again, changes=()) == replace(whole, changes=())
        assert all(prices_at(again, s) == plainly(samples, s) for s in range(done, last + 9))
    assert drop_old_changes(whole, last + 9).changes == whole.changes[-1:]
