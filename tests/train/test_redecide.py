"""Data drift from what the plan was made for: what is seen of it, and a run that changes plans."""

from __future__ import annotations

import dataclasses
import os
import signal

import jax
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, PlanConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.plan.search import SearchResult
from dflop_jax.record_files import load as read
from dflop_jax.records import DataProfile, Plan, Predicted, Profile
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import redecide
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.redecide import NewPlan, Redecider, drift, largest, observed
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, TILE_TOKENS, bucket, load, nano_profile
from .resume_cases import CONFIG, STEPS

EVERY = 4
PLAN = dataclasses.replace(NANO, buckets=(bucket(32, 256),))  # room for every sample


def samples(rng, n, tiles, tokens):
    return [load(int(rng.poisson(tiles)), int(rng.integers(*tokens))) for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 300])
def test_samples_of_one_kind_do_not_drift(n):
    rng = np.random.default_rng(0)
    first = samples(rng, n, 3, (10, 500))
    assert drift(first, first) == 0
    if n > 2:
        assert drift(first, samples(rng, n, 3, (10, 500))) == 0
    else:  # however few there are, what never varied has changed
        assert drift([load(1, 10)] * n, [load(1, 20)] * n) == pytest.approx(3 / 4)


def test_drift_is_the_largest_change_of_a_mean():
    rng = np.random.default_rng(1)
    few, many = (samples(rng, 2000, tiles, (100, 101)) for tiles in (2, 4))
    squares = [
        np.mean([len(x.lengths("vision")) * TILE_TOKENS**2 for x in xs]) for xs in (few, many)
    ]
    assert drift(few, many) == pytest.approx(1 - squares[0] / squares[1], rel=1e-6)
    assert drift(many, few) == drift(few, many)
    none = [load(0, 100)] * 50
    assert drift(none, many) == 1  # a module that nothing used
    assert drift(none, none) == 0


def test_the_largest_samples_keep_their_room():
    known = DataProfile("d", 90, (load(1, 50), load(2, 40)), (load(9, 10),))
    seen = [load(0, 30), load(1, 20)]
    found = observed(known, seen, range(4, 8))
    assert (found.source, found.n_total, found.loads) == ("d, steps 4 to 7", 90, tuple(seen))
    assert found.tail == (load(9, 10), load(2, 40), load(1, 50))
    assert observed(found, seen, range(8, 12)).source == "d, steps 8 to 11"


@pytest.mark.parametrize("n", [0, 1, 50])
def test_largest_by_comparing_all_pairs(n):
    rng = np.random.default_rng(n)
    loads = [load(int(rng.integers(0, 8)), int(rng.integers(1, 40))) for _ in range(n)]
    asks = {(x.tokens("vision"), x.tokens("llm")) for x in loads}
    above = {a for a in asks if any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in asks)}
    found = [(x.tokens("vision"), x.tokens("llm")) for x in largest(loads)]
    assert sorted(found) == sorted(asks - above)


def fit(run_dir, every=EVERY, **options):
    config = dataclasses.replace(
        CONFIG,
        run_dir=str(run_dir),
        cache_dir=str(run_dir.parent / "cache"),
        plan=PlanConfig(
            policy="dflop", devices=2, buckets=1, effort="quick", finalists=0, redecide_every=every
        ),
        **options,
    )
    trainer = Trainer(config, plan=PLAN)
    loads = tuple(trainer.source.load(i) for i in range(len(trainer.source)))
    profiled = DataProfile("scenes", len(loads), (load(0, 20), load(1, 30)), loads)
    trainer.profile = Profile(nano_profile().model, profiled)
    return trainer.fit()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that keeps its plan."""
    jax.devices()  # all of them, before the run asks for two
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "write_summary", lambda folder: None)
        return fit(tmp_path_factory.mktemp("plain") / "run", every=0)


@pytest.fixture
def long_steps(monkeypatch):
    """Steps that seem to take so long that any gain pays."""
    look = Redecider.look
    monkeypatch.setattr(
        Redecider, "look", lambda self, done, step_s: look(self, done, [1e5] * len(step_s))
    )
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)


def test_a_run_changes_plans_and_learns_as_before(plain, long_steps, tmp_path, capsys):
    result = fit(tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("changing to it") == 1
    assert "resumed after step 4 of 12" in said
    rows = read_metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(STEPS))
    assert [r["loss"] for r in rows] == list(result.losses)
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-4)
    assert result.losses[:EVERY] == plain.losses[:EVERY]
    assert (result.steps_done, result.compiles_after_warmup) == (STEPS, 0)
    assert result.evaluation.loss == pytest.approx(plain.evaluation.loss, rel=1e-4)
    plan = read(Plan, tmp_path / "run/plan.json")
    assert plan.buckets != PLAN.buckets or plan.segments != PLAN.segments
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[-1] <= EVERY


def test_sigterm_while_another_plan_is_searched_ends_the_run(plain, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)

    def look(self, done, step_s):
        os.kill(os.getpid(), signal.SIGTERM)
        return NewPlan(dataclasses.replace(PLAN, buckets=(bucket(28, 256),)), nano_profile())

    monkeypatch.setattr(Redecider, "look", look)
    result = fit(tmp_path / "run")
    assert (result.preempted, result.steps_done, result.evaluation) == (True, EVERY, None)
    assert result.losses == plain.losses[:EVERY]
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[0] == EVERY
    assert read(Plan, tmp_path / "run/plan.json").buckets == PLAN.buckets


def test_nothing_better_and_too_dear_go_on(plain, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)
    answers = [
        dataclasses.replace(PLAN, predicted=Predicted(1.0)),
        None,
        dataclasses.replace(PLAN, buckets=(bucket(4, 96),)),
        dataclasses.replace(PLAN, buckets=(bucket(28, 256),)),
    ]

    def make_plan(place, profile):
        plan = answers.pop(0)
        if plan is None:
            raise ValueError("nothing fits")
        return SearchResult(plan, (), 0, 0, 0, 0)

    monkeypatch.setattr(redecide, "make_plan", make_plan)
    monkeypatch.setattr(redecide, "drift", lambda *loads: 1.0 if answers else 0.0)
    result = fit(tmp_path / "run", every=2)
    said = capsys.readouterr().err
    assert "the plan is still the best" in said
    assert "no plan for the samples of late: nothing fits" in said
    assert "the best plan leaves out" in said
    assert "samples changed by 100%; another plan would save" in said
    assert said.count(": going on") == 1
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-6)
    assert not answers


def test_changing_needs_checkpoints(plain, tmp_path):
    with pytest.raises(ValueError, match=r"plan.redecide_every=4 .* checkpoint.every=0"):
        fit(tmp_path / "run", checkpoint=CheckpointConfig(every=0))
