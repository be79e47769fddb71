"""When a run saves by time, and which of its checkpoints is the best."""

import math

import numpy as np
import pytest

from dflop_jax.config import CheckpointConfig
from dflop_jax.report.evaluation_rows import HeldOutRow
from dflop_jax.report.spent import LOST, STOPPED, TRAINING, Spent
from dflop_jax.train.cadence import (
    DEVICE_HOURS_A_FAILURE,
    Cadence,
    best_interval_s,
    failure_s,
)
from dflop_jax.train.saves import Best, best_of


def expected_s(between_s: float, save_s: float, mtbf_s: float) -> float:
    """Wall seconds a second of training, with failures of a Poisson process (Daly, eq. 20)."""
    return mtbf_s * math.expm1((between_s + save_s) / mtbf_s) / between_s


@pytest.mark.parametrize("save_s", [1e-3, 0.5, 20.0, 300.0, 1000.0])
@pytest.mark.parametrize("mtbf_s", [600.0, 36_000.0])
def test_the_interval_loses_least(save_s, mtbf_s):
    tried = np.geomspace(0.01, 10 * mtbf_s, 20_000)
    least = min(expected_s(t, save_s, mtbf_s) for t in tried)
    between_s = best_interval_s(save_s, mtbf_s) - save_s
    assert expected_s(between_s, save_s, mtbf_s) <= 1.002 * least


def test_failures_are_weighed_against_what_was_known_before():
    assert failure_s(1000.0, 0.0, 0) == 1000.0
    assert failure_s(1000.0, 200.0, 3) == 300.0
    assert failure_s(1000.0, 1e9, 10_000) == pytest.approx(1e5, rel=1e-3)


class Clock:
    def __init__(self) -> None:
        self.now_s, self.busy = 50.0, False

    def cadence(self, spent=None, n_devices=8, **config) -> Cadence:
        checkpoint = CheckpointConfig(**config)
        return Cadence(checkpoint, n_devices, spent, lambda: self.busy, lambda: self.now_s)

    def saves(self, cadence: Cadence, n_steps: int, step_s: float, waits_s: float) -> list[float]:
        """Seconds at which saves begin; the step after each waits so long for it."""
        begun, wait_s = [], 0.0
        for _ in range(n_steps):
            self.now_s += step_s
            due = cadence.is_due(wait_s)
            wait_s = 0.0
            if due:
                cadence.begin_save()
                begun.append(self.now_s)
                wait_s = waits_s
        return begun


def test_seconds_between_checkpoints():
    clock = Clock()
    assert clock.saves(clock.cadence(every=100, every_s=10.0), 9, 4.0, 0.5) == [62, 74, 86]
    assert clock.saves(clock.cadence(every=100), 9, 4.0, 0.5) == []
    assert clock.saves(clock.cadence(every=0), 9, 4.0, 0.5) == []


def test_no_save_begins_while_one_is_under_way():
    clock = Clock()
    for config in ({"every_s": 1.0}, {"every": -1}):
        cadence = clock.cadence(**config)
        clock.now_s += 5
        clock.busy = True
        assert not cadence.is_due(0.0)
        clock.busy = False
        assert cadence.is_due(0.0)


def test_saves_come_as_often_as_pays_by_what_one_costs():
    clock = Clock()
    begun = clock.saves(clock.cadence(every=-1, n_devices=1024), 3_000, 2.0, 0.5)
    assert begun[0] == 52.0  # at once, to be measured
    mtbf_s = DEVICE_HOURS_A_FAILURE * 3600 / 1024
    young_s = math.sqrt(2 * 0.5 * mtbf_s)  # 419 s
    assert np.diff(begun) == pytest.approx(young_s, rel=0.03)  # grows a little without failures
    assert len(begun) > 10


def test_what_failed_often_saves_often():
    clock = Clock()
    spent = Spent({TRAINING: 10_000.0, LOST: 4_000.0, STOPPED: 1e9}, 2e9, 21, 20)
    cadence = clock.cadence(spent, every=-1, n_devices=1024)
    begun = clock.saves(cadence, 1_000, 2.0, 0.5)
    # 20 failures in what was trained and lost, and one that the prior stands for.
    mtbf_s = (DEVICE_HOURS_A_FAILURE * 3600 / 1024 + 14_000) / 21
    assert np.diff(begun) == pytest.approx(math.sqrt(2 * 0.5 * mtbf_s), abs=2.0)  # 95 s


def test_the_best_is_of_the_checkpoints_that_are_there():
    losses = {0: 9.0, 4: 2.0, 8: 3.0, 12: math.nan, 16: 2.5, 20: 2.5}
    rows = [HeldOutRow(s, None if math.isnan(x) else x, None) for s, x in losses.items()]
    assert best_of(rows, losses) == Best(4, 2.0)
    assert best_of(rows, [8, 12, 20, 16]) == Best(16, 2.5)
    assert best_of(rows, [12]) == best_of([], [1]) == Best()
    assert Best().is_beaten_by(1e9)
    assert not Best().is_beaten_by(math.nan)
    assert not Best(4, 2.0).is_beaten_by(2.0)
