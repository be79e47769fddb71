"""The user's own code in a run: what it is told, the metrics that it adds, and how it ends one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dflop_jax import Callback, CheckpointConfig
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.report.trackers import step_scalars
from dflop_jax.train.callbacks import Callbacks, StepDone, import_callbacks
from dflop_jax.train.trainer import Trainer
from tests.report.runs import cells_of

from ..plans import nano_profile
from .resume_cases import (  # noqa: F401
    CACHE,
    CONFIG,
    PLAN,
    STEPS,
    _in_a_folder_of_its_own,
    quick,
    steps_saved,
)


class Seen(Callback):
    """Notes what it is told, adds a metric, and ends the run at a step."""

    def __init__(self, stops_at: int | None = None):
        self.stops_at, self.told = stops_at, []

    def before_step(self, step):
        self.told.append(("before", step))

    def after_step(self, done):
        self.told.append(("after", done.step))
        assert done.loss == done.row.loss
        if done.step == self.stops_at:
            self.stop("low enough")
        return {"loss_squared": done.loss**2}

    def after_evaluation(self, step, row):
        self.told.append(("evaluated", step))
        assert math.isfinite(row.loss)

    def after_save(self, step, folder):
        self.told.append(("saved", step))
        assert (folder / "manifest.json").exists()

    def at_end(self, result):
        self.told.append(("end", result.steps_done))


def train(callback: Callback, **sections: Any):
    config = dataclasses.replace(CONFIG, run_dir="run", **CACHE, **sections)
    return Trainer(config, plan=PLAN, profile=nano_profile(), callbacks=[callback]).fit()


def test_a_callback_is_told_of_all_and_adds_a_metric():
    seen = Seen()
    result = train(seen)
    assert (result.steps_done, result.stopped_by) == (STEPS, "")
    of = {kind: [n for k, n in seen.told if k == kind] for kind, _ in seen.told}
    assert of["before"] == of["after"] == list(range(STEPS))
    assert of["evaluated"] == [4, 8, 12]
    assert sorted(of["saved"]) == [3, 6, 9, 12]
    assert seen.told[-1] == ("end", STEPS)
    for step in range(STEPS):
        assert seen.told.index(("before", step)) < seen.told.index(("after", step))
    rows = read_metrics("run")
    assert [r["own"] for r in rows] == [{"loss_squared": r["loss"] ** 2} for r in rows]
    assert "own metric loss_squared, median" in cells_of("run")


def test_a_callback_ends_a_run_as_if_it_were_done():
    seen = Seen(stops_at=4)
    result = train(seen, checkpoint=CheckpointConfig(every=3))
    # The step after it was dispatched when it was told, and the one after that as it was said.
    assert (result.steps_done, result.preempted, result.stopped_by) == (7, False, "low enough")
    assert result.evaluation.step == 7
    assert steps_saved("run") == (7, 6, 3)
    assert seen.told[-1] == ("end", 7)


def test_what_is_added_is_tracked():
    row = StepMetrics(step=1, loss=2.0, supervised_tokens=3, step_s=0.5, own={"mine": 4.0})
    assert step_scalars(row)["own/mine"] == 4.0


class Everywhere(Callback):
    everywhere = True


def test_only_those_that_say_so_are_called_elsewhere():
    both = [Callback(), Everywhere()]
    assert Callbacks(both).active == both
    assert Callbacks(both, is_process_0=False).active == both[1:]


@pytest.mark.parametrize("value", ["high", None, [1.0]])
def test_a_metric_that_is_no_number_is_refused(value):
    class Wrong(Callback):
        def after_step(self, done):
            return {"mine": value}

    done = StepDone(0, 1.0, {}, 1.0, True, None)
    with pytest.raises(ValueError, match=r"Wrong\.after_step: 'mine' is .*; return numbers"):
        Callbacks([Wrong()]).after_step(done)


def test_two_callbacks_do_not_share_a_name():
    class One(Callback):
        def after_step(self, done):
            return {"mine": 1.0}

    done = StepDone(0, 1.0, {}, 1.0, True, None)
    assert Callbacks([One()]).after_step(done) == {"mine": 1.0}
    with pytest.raises(ValueError, match="each under a name of its own"):
        Callbacks([One(), One()]).after_step(done)


def make() -> Callback:
    return Everywhere()


one = Everywhere()


def test_flags_name_callbacks():
    here = __name__
    made = import_callbacks([f"{here}:Everywhere", f"{here}:make", f"{here}:one"])
    assert [type(c) for c in made] == [Everywhere] * 3
    assert made[2] is one
    for wrong in (f"{here}:nobody", "no.such.module:x", f"{here}:PLAN", f"{here}:train", "x"):
        with pytest.raises(ValueError, match="--callbacks=") as error:
            import_callbacks([wrong])
        assert "\n" not in str(error.value)
