"""Held-out samples answered while a run trains: by which parameters, how often, what follows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflop_jax.cluster.peers import Peers
from dflop_jax.evaluate import metrics
from dflop_jax.evaluate.in_training import held_out_answers
from dflop_jax.evaluate.questions import of_held_out
from dflop_jax.evaluate.run import evaluate
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.sampling import Sampling
from dflop_jax.report.trackers import evaluation_scalars
from dflop_jax.train.evaluate import Evaluation, held_out_samples
from dflop_jax.train.planning import check_trainable
from dflop_jax.train.prepare import set_up
from dflop_jax.train.trainer import Trainer

from ..plans import nano_profile
from .resume_cases import (
    CACHE,
    CONFIG,
    NANO_MODEL,
    PLAN,
    _in_a_folder_of_its_own,  # noqa: F401
    as_killed,
    evaluations,
    quick,  # noqa: F401
    steps_saved,
)

TRAIN = dataclasses.replace(
    CONFIG.train, steps=9, eval_samples=5, eval_every=3, eval_generate_every=6, eval_max_tokens=6,
    eval_metrics=("exact", "wer"), ema=0.5,
)  # fmt: skip
CHECKPOINT = dataclasses.replace(CONFIG.checkpoint, keep=1, keep_best=True, best_by="exact")
ANSWERED = dataclasses.replace(CONFIG, model=NANO_MODEL, train=TRAIN, checkpoint=CHECKPOINT)


def by_letters(a: metrics.ScoredAnswer) -> float:
    """In the place of a metric that a model must be good for: any other letter changes it."""
    return -float(sum(k * ord(letter) for k, letter in enumerate(a.said, 1)))


def fit(folder, existing="error", **checkpoint):
    config = dataclasses.replace(
        ANSWERED,
        run_dir=str(folder),
        checkpoint=dataclasses.replace(CHECKPOINT, **checkpoint),
        **CACHE,
    )
    trainer = Trainer(
        config, plan=PLAN, profile=nano_profile(), existing=existing, answers=held_out_answers
    )
    return trainer, trainer.fit()


@pytest.mark.slow
def test_answers_are_those_of_the_checkpoints_and_a_resumed_run_gives_them_again(monkeypatch):
    monkeypatch.setitem(metrics.OF_ONE, "exact", by_letters)
    trainer, result = fit("whole", keep=10)
    rows = evaluations("whole")
    assert [(r["step"], sorted(r["answers"])) for r in rows] == [
        (3, []), (6, ["exact", "wer"]), (9, ["exact", "wer"]),
    ]  # fmt: skip
    assert result.compiles_after_warmup == 0
    assert result.evaluation is not None
    assert result.evaluation.answers == rows[-1]["answers"]
    # Each as a generator of its own answers the same samples by the average in that checkpoint.
    source, config = trainer.place.source("eval"), trainer.config
    (chosen,) = held_out_samples(source, 5, config.data.seed).values()
    generator = Generator(config, None, trainer.place.devices[:1])
    asked = of_held_out(source, config.data, generator.model, generator.tokenizer, chosen)
    for row in rows[1:]:
        generator.load(f"whole/checkpoints/{row['step']:08d}", average=True)
        alone = evaluate(generator, asked, Sampling(6), TRAIN.eval_metrics, Peers())
        assert row["answers"] == alone.metrics
    assert rows[1]["answers"] != rows[2]["answers"]

    resumed = as_killed(Path("whole"), saved=6, rows=7)
    (resumed / "evaluations.jsonl").write_text("")  # it was killed before it had evaluated
    fit(resumed, "resume")
    assert evaluations(resumed) == rows[1:]
    exact = {row["step"]: row["answers"]["exact"] for row in rows[1:]}
    assert {*steps_saved(resumed)} == {9, max(exact, key=exact.__getitem__)}


def test_trackers_get_the_metrics():
    row = Evaluation(2, 2.0, None, answers={"exact": 0.25})
    assert str(row) == "held-out loss 2.0000, exact 0.250"
    assert evaluation_scalars(row) == {"held_out/loss": 2.0, "held_out/answers/exact": 0.25}


@pytest.mark.parametrize(
    "train, best_by, says",
    [
        ({"eval_samples": 0}, "loss", "needs held-out samples and checkpoints; give train.eval_s"),
        ({}, "anls", "best_by=anls: held-out samples are not answered so; give train.eval_gen"),
        ({"eval_generate_every": 0}, "exact", "best_by=exact: held-out samples are not answered"),
    ],
)
def test_what_cannot_be_answered_is_refused(train, best_by, says):
    config = dataclasses.replace(
        ANSWERED,
        train=dataclasses.replace(TRAIN, **train),
        checkpoint=dataclasses.replace(CHECKPOINT, best_by=best_by, keep_best=False),
    )
    with pytest.raises(ValueError, match=says):
        check_trainable(config)


def test_metrics_are_known_and_somebody_answers():
    with pytest.raises(ValueError, match="give Trainer answers=dflop_jax"):
        Trainer(ANSWERED, plan=PLAN, profile=nano_profile())
    train = dataclasses.replace(TRAIN, eval_metrics=("bleu",))
    place = set_up(dataclasses.replace(ANSWERED, train=train))
    with pytest.raises(ValueError, match="no metric 'bleu'; there are exact"):
        held_out_answers(place.config, place, place.source("eval"))
    train = dataclasses.replace(TRAIN, eval_samples=2)
    place = set_up(dataclasses.replace(CONFIG, train=train))
    with pytest.raises(ValueError, match="small:build does not answer in text; leave it out"):
        held_out_answers(place.config, place, place.source("eval"))
