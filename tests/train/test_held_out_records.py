"""Evaluation on records of their own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dflop_jax.train import evaluate
from dflop_jax.train.planning import check_trainable
from dflop_jax.train.run_context import make_run_context
from tests.data.media_cases import talk

from .resume_cases import CONFIG, PLAN, _in_a_folder_of_its_own, quick  # noqa: F401


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
    "train, data, says",
    [
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
