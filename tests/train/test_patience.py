"""Runs that end early, and evaluation on records of their own."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dflop_jax.cluster.peers import Peers
from dflop_jax.config import TrainConfig
from dflop_jax.report.evaluation_rows import read_evaluations
from dflop_jax.train import evaluate
from dflop_jax.train.patience import Patience, evaluations_since_lowest
from dflop_jax.train.planning import check_trainable
from dflop_jax.train.prepare import set_up
from dflop_jax.train.trainer import Trainer
from tests.data.media_cases import talk

from ..plans import nano_profile
from .resume_cases import CONFIG, PLAN, _in_a_folder_of_its_own, quick  # noqa: F401


@pytest.mark.parametrize(
    "losses, wanted",
    [
        ([], 0),
        ([2.0], 0),
        ([2.0, 1.0], 0),
        ([1.0, 2.0], 1),
        ([3.0, 1.0, 1.0, 2.0], 2),
        ([math.nan, 1.0, math.nan], 1),
        ([math.nan, math.inf, None], 3),
    ],
)
def test_evaluations_since_the_lowest(losses, wanted):
    steps = {10 * k: loss for k, loss in enumerate(losses)}
    assert evaluations_since_lowest(dict(reversed(steps.items()))) == wanted


def test_the_last_step_ends_nothing_early():
    def ends(most, *losses):
        patience = Patience(TrainConfig(early_stop=most, steps=4), None, Peers(), 0)
        return [bool(patience.ends(k + 1, loss)) for k, loss in enumerate(losses)]

    assert ends(1, 1.0, 2.0, 0.5, 0.7) == [False, True, False, False]
    assert ends(2, 1.0, 2.0, 3.0) == [False, False, True]
    assert ends(0, 1.0, 2.0, 3.0) == [False] * 3


def test_a_run_ends_where_its_loss_falls_no_more(quick, monkeypatch):
    """And goes on counting where an earlier start left off."""
    given = iter([3.0, 2.0, 2.5, 2.5, 2.5, 2.5])
    of = evaluate._held_out_loss
    monkeypatch.setattr(
        evaluate, "_held_out_loss", lambda *args: replace(of(*args), loss=next(given))
    )
    train = replace(CONFIG.train, steps=12, eval_every=2, eval_samples=4, early_stop=3)
    config = replace(CONFIG, train=replace(train, steps=6), run_dir="early")
    Trainer(config, plan=PLAN, profile=nano_profile()).fit()
    assert [r.loss for r in read_evaluations("early")] == [3.0, 2.0, 2.5]
    config = replace(config, train=train)
    result = Trainer(config, plan=PLAN, profile=nano_profile(), existing="resume").fit()
    assert "no lower held-out loss in 3 evaluations" in result.stopped_by
    assert result.evaluation.step == result.steps_done < 12
    rows = read_evaluations("early")
    assert rows[-1].step == result.steps_done
    # The third one is looked at again where the second start begins.
    assert sorted({r.step for r in rows}) == [2, 4, 6, 8, 10]


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
    place = set_up(config)
    train, held = place.source("train"), place.source("eval")
    assert (len(train), len(held)) == (5, 5)
    assert {train.label(k) for k in range(5)} == {f"train/data.json[{k}]" for k in range(5)}
    assert {held.label(k) for k in range(5)} == {f"held/data.json[{k}]" for k in range(5)}
    assert len(evaluate.held_out_samples(held, 3, 0)[""]) == 3
    shared = replace(CONFIG.train, eval_samples=0, eval_fraction=0.5)
    place = set_up(replace(config, data=replace(data, eval_path=""), train=shared))
    labels = [{s.label(k) for k in range(len(s))} for s in map(place.source, ("train", "eval"))]
    assert set.union(*labels) == {train.label(k) for k in range(5)}
    assert not set.intersection(*labels)


@pytest.mark.parametrize(
    "train, data, says",
    [
        ({"early_stop": 2}, {}, "train.early_stop=2 goes by held-out losses"),
        ({}, {"eval_path": "x.json"}, "is not evaluated on: train.eval_samples is 0"),
        (
            {"eval_fraction": 0.1},
            {"factory": "a:b"},
            "eval_fraction=0.1: data.factory says what is held out",
        ),
        (
            {"eval_fraction": 0.1, "eval_samples": 2},
            {"eval_path": "x.json"},
            "eval_fraction=0.1: data.eval_path says what is held out",
        ),
        (
            {"eval_samples": 2},
            {"eval_path": "x.json", "factory": "a:b"},
            "is not evaluated on: a data.factory has its own",
        ),
    ],
)
def test_what_would_not_be_evaluated_is_refused(train, data, says):
    plain = replace(CONFIG.train, eval_samples=0, eval_every=0)
    config = replace(
        CONFIG,
        train=replace(plain, **train),
        data=replace(CONFIG.data, **data),
        checkpoint=replace(CONFIG.checkpoint, keep_best=False),
    )
    with pytest.raises(ValueError, match=says):
        check_trainable(config)
