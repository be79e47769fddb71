"""Samples of a run give another the same prices, step by step."""

import numpy as np
import pytest

from dflop_jax.schedule.correction import (
    Learnt,
    StepSample,
    corrected,
    decided,
    digest,
    learn,
    name_of,
    needed_from,
    price_changes,
    replay,
    sampling,
)
from tests.schedule.conftest import bucket, make_plan, make_prices

PLAN = make_plan([bucket(4, (1, 96)), bucket(2, (1, 64))])
PRICES = make_prices(PLAN)
KEY = digest(PRICES)
PROGRAMS = [name_of(p) for p in PRICES.programs]


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


def prices_of(learnt: Learnt, step: int):
    changes = price_changes(PRICES, learnt)
    return changes[max(first)] if (first := [f for f in changes if f <= step]) else PRICES


def plainly(samples, step: int):
    """By definition: what was learnt last of what a step is scheduled by."""
    found = PRICES
    for n, sample in enumerate(samples, 1):
        if sample.first <= step:
            found = corrected(PRICES, replay(Learnt(KEY), samples[:n]).state)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_step_has_the_prices_that_it_had(seed):
    samples = samples_of(seed)
    last = samples[-1].step
    whole = replay(Learnt(KEY), samples)
    for step in range(0, last + 9, 3):
        assert prices_of(whole, step) == plainly(samples, step)
    # Of a checkpoint, made after some samples, and the rest from the file, read twice.
    for n in (0, 1, 7, 20):
        done = samples[n - 1].step + 1 if n else 0
        kept = needed_from(replay(Learnt(KEY), samples[:n]), done)
        assert len(kept.changes) <= 8
        again = replay(replay(kept, samples), samples)
        assert (again.state, again.monitor, again.last) == (whole.state, whole.monitor, last)
        assert all(prices_of(again, s) == plainly(samples, s) for s in range(done, last + 9))
    assert needed_from(whole, last + 9).changes == whole.changes[-1:]


def test_the_monitor_follows_from_the_samples_alone():
    quiet = [StepSample(k, k + 1, KEY, {PROGRAMS[0]: 0.1}, 0.0, 1e-3) for k in range(8)]
    full = replay(Learnt(KEY), quiet)
    assert full == learn(replay(Learnt(KEY), quiet[:7]), quiet[7])
    assert not sampling(full.monitor, 1000)  # what it gained is not known
    nothing_gained = decided(full, 0.0, 1e-3)
    assert [sampling(nothing_gained.monitor, k) for k in (8, 56, 57)] == [False, False, True]
    # The next sample, of whichever run, tells what was decided, once.
    for next_step, gain_s in ((57, 0.0), (9, 1.0)):
        sample = StepSample(next_step, next_step + 1, KEY, {PROGRAMS[0]: 0.1}, gain_s, 1e-3)
        after = learn(full, sample)
        assert after == learn(decided(full, gain_s, 1e-3), sample)
        assert (after.monitor.on, after.monitor.steps) == (True, 1)


def test_nothing_is_learnt_of_other_prices():
    other = make_prices(PLAN, factor=lambda p: 2.0 if p.segment == "a" else 1.0)
    assert digest(other) != KEY == digest(make_prices(PLAN))
    assert replay(Learnt(digest(other)), samples_of(0)) == Learnt(digest(other))


@pytest.mark.parametrize("wrong", [(3, 3, 0.0), (-1, 2, 0.0), (3, 4, float("nan"))])
def test_a_sample_checks_itself(wrong):
    step, first, ratio = wrong
    with pytest.raises(ValueError, match="a sample"):
        StepSample(step, first, KEY, {"a": ratio}, 0.0, 0.0)
