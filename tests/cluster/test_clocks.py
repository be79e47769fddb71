"""What a clock lacks to another, found again and again on a network that delays."""

from __future__ import annotations

import random

import pytest

from dflop_jax.cluster.clocks import ROUND_TRIPS, ClockOffset

DAY_S = 86_400


def test_an_undelayed_round_trip_is_exact():
    clock = ClockOffset()
    assert clock.seconds == 0.0
    # The peer's clock is 100 s behind; it answers after a second.
    clock.add(sent_s=500.0, received_s=400.25, answered_s=401.25, back_s=501.5)
    assert clock.seconds == 100.0


def test_a_clock_is_followed_for_a_day():
    """20 ppm, a beat a second; every trip waits somewhere, most of them long, one way only."""
    rng = random.Random(0)
    drift, ahead_s, clock = 20e-6, 7.0, ClockOffset()

    def theirs(ours_s: float) -> float:
        return ahead_s + (1 + drift) * ours_s

    for beat in range(0, DAY_S, 60):  # 20 beats of every minute
        for i in range(20):
            sent_s = float(beat + i)
            waits_s = [rng.choice([1e-4, 0.05, 0.3]) * rng.random() for _ in range(2)]
            came_s = sent_s + waits_s[0]
            left_s = came_s + rng.random()
            clock.add(sent_s, theirs(came_s), theirs(left_s), left_s + waits_s[1])
        now_s = left_s + waits_s[1]
        assert clock.seconds == pytest.approx(now_s - theirs(now_s), abs=0.05)
    assert drift * DAY_S > 1.7  # what a comparison at the start would be off by


def test_the_quickest_of_the_newest_counts():
    clock = ClockOffset()
    clock.add(0.0, 0.0, 0.0, 0.0)  # exact, but soon too old
    for i in range(1, ROUND_TRIPS):
        clock.add(float(i), i + 5.5, i + 5.5, i + 1.0)  # 5 s ahead, 1 s on the way
    assert clock.seconds == 0.0
    clock.add(99.0, 104.0, 104.0, 99.5)  # 4.75 s ahead, half a second on the way
    assert clock.seconds == -4.75
