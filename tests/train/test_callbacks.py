"""A user's callbacks, records without supervision or held out, and flags that contradict."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dflop_jax import Callback, CheckpointConfig, Config, DataConfig, PlanConfig
from dflop_jax.config import override
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import evaluate
from dflop_jax.train.callbacks import Callbacks, StepDone, import_callbacks
from dflop_jax.train.planning import check_trainable
from dflop_jax.train.run_context import make_run_context
from dflop_jax.train.trainer import Trainer
from tests.data.media_cases import talk
from tests.report.runs import cells_of

from ..plans import nano_profile
from .resume_cases import CACHE, CONFIG, PLAN, STEPS, fit, steps_saved

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


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


class Everywhere(Callback):
    everywhere = True


@pytest.mark.parametrize("value", ["high", None, [1.0]])
def test_a_metric_that_is_no_number_is_refused(value):
    class Wrong(Callback):
        def after_step(self, done):
            return {"mine": value}

    done = StepDone(0, 1.0, {}, 1.0, True, None)
    with pytest.raises(ValueError, match=r"Wrong\.after_step: 'mine' is .*; return numbers"):
        Callbacks([Wrong()]).after_step(done)


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


ANSWER = "Yes."


def run(n, *, weight, steps, batch, **sections):
    """A run on `n` records of which one has an answer of that weight, the others of none."""
    records = []
    for k in range(n):
        answer = {"from": "gpt", "value": ANSWER, **({"weight": weight} if not k else {"loss": 0})}
        records.append({"id": str(k), "conversations": [{"from": "human", "value": "?"}, answer]})
    Path("records.json").write_text(json.dumps(records))
    data = DataConfig(path="records.json", max_tokens=96, workers=1)
    train = dataclasses.replace(
        CONFIG.train, steps=steps, global_batch=batch, eval_samples=0, eval_every=0
    )
    return fit("run", data=data, train=train, **sections)


def test_tokens_with_a_weight_count():
    run(4, weight=0.01, steps=4, batch=1)
    tokens = [r["supervised_tokens"] for r in read_metrics("run")]
    assert sorted(tokens) == [0, 0, 0, len(ANSWER) + 1]


@pytest.mark.parametrize("steps, limit, rows", [(3, 256, 3), (9, 8, 4)])
def test_a_run_without_any_is_refused(steps, limit, rows):
    with pytest.raises(ValueError, match=r"none of the first \d samples .* give answers a weight"):
        run(4, weight=0.0, steps=steps, batch=2, plan=PlanConfig(profile_samples=limit))
    assert len(read_metrics("run")) == rows


def test_records_to_evaluate_on_stay_out_of_training(quick):
    for name in ("train", "held"):
        Path(name).mkdir()
        Image.new("RGB", (20, 20)).save(f"{name}/a.png")
        records = [
            {"id": f"{name}{k}", "image": "a.png", "conversations": talk("<image>\nWhat?", name)}
            for k in range(5)
        ]
        Path(f"{name}/data.json").write_text(json.dumps(records))
    data = replace(CONFIG.data, path="train/data.json", eval_path="held/data.json")
    config = replace(CONFIG, data=data, train=replace(CONFIG.train, eval_samples=3))
    place = make_run_context(config)
    train, held = place.source("train"), place.source("eval")
    assert (len(train), len(held)) == (5, 5)
    assert {train.label(k) for k in range(5)} == {f"train/data.json[{k}]" for k in range(5)}
    assert {held.label(k) for k in range(5)} == {f"held/data.json[{k}]" for k in range(5)}
    assert len(evaluate.draw_held_out_samples(held, 3, 0)[""]) == 3
    shared = replace(CONFIG.train, eval_samples=0, eval_fraction=0.5)
    place = make_run_context(replace(config, data=replace(data, eval_path=""), train=shared))
    labels = [{s.label(k) for k in range(len(s))} for s in map(place.source, ("train", "eval"))]
    assert set.union(*labels) == {train.label(k) for k in range(5)}
    assert not set.intersection(*labels)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("data.eval_path=x.json", "is not evaluated on: train.eval_samples is 0"),
        ("data.eval_path=x.json data.factory=a:b", "evaluated on: a data.factory provides its own"),
        ("train.eval_fraction=0.1 data.factory=a:b", "0.1: data.factory already sets the held-out"),
        ("train.eval_fraction=0.1 train.eval_samples=2 data.eval_path=x.json",
         "0.1: data.eval_path already sets the held-out"),
        ("train.eval_every=2", "evaluates nothing: no sample is held out"),
        ("plan.redecide_every=4 checkpoint.every_s=0", "redecide_every=4 .* checkpoint.every_s=0"),
        ("train.steps=4 train.profile_steps=2:4", "profile_steps=2:4, but with train.steps=4"),
        ("checkpoint.keep_best=true", "keep_best needs checkpoints and held-out losses"),
        ("plan.hardware=h100 plan.devices=8", "plans for devices that this machine lacks"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(flags, says):
    config = override(Config(), dict(flag.split("=", 1) for flag in flags.split()))
    with pytest.raises(ValueError, match=says):
        check_trainable(config)
