"""Data drift from what the plan was made for: what is seen of it, and a run that changes plans."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax import PlanConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.plan.evaluate import simulate
from dflop_jax.records import DataProfile, Plan, Profile
from dflop_jax.records.files import load as read
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import loop, redecide
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.redecide import (
    NewPlan,
    Redecider,
    find_drift,
    make_recent_profile,
    predict_saving,
)
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, TILE_TOKENS, bucket, load, nano_profile
from .resume_cases import CONFIG, STEPS

EVERY = 4
PLAN = NANO.with_layout(buckets=(bucket(32, 256),))  # room for every sample


def samples(rng, n, tiles, tokens):
    return [load(int(rng.poisson(tiles)), int(rng.integers(*tokens))) for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 300])
def test_samples_of_one_kind_do_not_drift(n):
    rng = np.random.default_rng(0)
    first = samples(rng, n, 3, (10, 500))
    assert find_drift(first, first) == 0
    if n > 2:
        assert find_drift(first, samples(rng, n, 3, (10, 500))) == 0
    else:  # however few there are, what never varied has changed
        assert find_drift([load(1, 10)] * n, [load(1, 20)] * n) == pytest.approx(3 / 4)


def test_drift_is_the_largest_change_of_a_mean():
    rng = np.random.default_rng(1)
    few, many = (samples(rng, 2000, tiles, (100, 101)) for tiles in (2, 4))
    squares = [
        np.mean([len(x.lengths("vision")) * TILE_TOKENS**2 for x in xs]) for xs in (few, many)
    ]
    assert find_drift(few, many) == pytest.approx(1 - squares[0] / squares[1], rel=1e-6)
    assert find_drift(many, few) == find_drift(few, many)
    none = [load(0, 100)] * 50
    assert find_drift(none, many) == 1  # a module that nothing used
    assert find_drift(none, none) == 0


def test_the_largest_samples_keep_their_room():
    known = DataProfile("d", 90, (load(1, 50), load(2, 40)), (load(9, 10),))
    seen = [load(0, 30), load(1, 20)]
    found = make_recent_profile(known, seen, range(4, 8))
    assert (found.source, found.n_total, found.loads) == ("d, steps 4 to 7", 90, tuple(seen))
    assert found.tail == (load(9, 10), load(2, 40), load(1, 50))
    assert make_recent_profile(found, seen, range(8, 12)).source == "d, steps 8 to 11"


def fit(run_dir, every=EVERY, plan=PLAN, **options):
    config = dataclasses.replace(
        CONFIG,
        run_dir=str(run_dir),
        cache_dir=str(run_dir.parent / "cache"),
        plan=PlanConfig(policy="dflop", devices=2, buckets=1, effort="quick", redecide_every=every),
        **options,
    )
    trainer = Trainer(config, plan=plan)
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
    look = Redecider.propose_plan

    def slow(self, done, step_s):
        return look(self, done, [1e5] * len(step_s))

    monkeypatch.setattr(Redecider, "propose_plan", slow)
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)


@pytest.fixture
def alive(monkeypatch):
    """What was alive of the last executor when the next began to train; no cycle is collected."""
    last: list[weakref.ref] = []
    seen: list[list[str]] = []
    run = TrainLoop.run

    def run_and_note(self, stack):
        seen.append([type(r()).__name__ for r in last if r() is not None])
        result = run(self, stack)
        state = self.ex.state
        arrays = jax.tree.leaves((state.params, state.masters, state.opt_state, state.grads))
        last[:] = map(weakref.ref, (self.ex, state, *arrays))
        return result

    monkeypatch.setattr(TrainLoop, "run", run_and_note)
    gc.disable()
    yield seen
    gc.enable()


@pytest.mark.slow
def test_a_run_changes_plans_and_learns_as_before(plain, long_steps, alive, tmp_path, capsys):
    result = fit(tmp_path / "run")
    said = capsys.readouterr().err
    assert "after step 4: samples changed by" in said
    assert said.count("changing to it") == 1
    assert "moved the state after step 4 to another plan" in said
    assert not any(alive)
    rows = read_metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(STEPS))
    assert [r["loss"] for r in rows] == list(result.losses)
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-4)
    assert result.losses[:EVERY] == plain.losses[:EVERY]
    assert (result.steps_done, result.compiles_after_warmup) == (STEPS, 0)
    assert result.evaluation.loss == pytest.approx(plain.evaluation.loss, rel=1e-4)
    plan = read(Plan, tmp_path / "run/plan.json")
    assert (
        plan.layout.buckets != PLAN.layout.buckets or plan.layout.segments != PLAN.layout.segments
    )
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[-1] < EVERY  # by `every`


@pytest.mark.slow
def test_a_move_without_room_goes_through_a_checkpoint(long_steps, tmp_path, monkeypatch, capsys):
    moved = fit(tmp_path / "moved")
    prepare = loop.prepare_handover

    def prepare_in_little_memory(context, *args, **more):
        config = dataclasses.replace(context.config, plan=PlanConfig(memory_bytes=1000))
        return prepare(dataclasses.replace(context, config=config), *args, **more)

    monkeypatch.setattr(loop, "prepare_handover", prepare_in_little_memory)
    capsys.readouterr()
    resumed = fit(tmp_path / "resumed")
    said = capsys.readouterr().err
    assert "resumed after step 4 of 12" in said
    assert "after step 4: no memory to move the state in; saving it" in said
    assert "moved" not in said
    assert moved.losses == resumed.losses


@pytest.fixture
def searches(monkeypatch):
    """Profiles that plans are searched for, and plans that the searches find."""
    asked: list[Profile] = []
    found: list[Plan] = []

    def search(place, profile):
        asked.append(profile)
        if not found:
            raise ValueError("nothing fits")
        return SimpleNamespace(plan=found.pop(0))

    monkeypatch.setattr(redecide, "make_plan", search)
    return SimpleNamespace(asked=asked, found=found)


def propose_plan(tiles, step_s):
    """(new plan, what was said) after step 20 of 100, of samples of so many tiles in place of 1."""
    said: list[str] = []
    train = dataclasses.replace(CONFIG.train, steps=100, global_batch=4)
    plan = PlanConfig(redecide_every=2, profile_samples=8)
    config = dataclasses.replace(CONFIG, train=train, plan=plan)
    profile = Profile(nano_profile().model, DataProfile("d", 9, (load(1, 20), load(1, 21))))
    run = SimpleNamespace(
        context=SimpleNamespace(config=config, peers=ProcessGroup()),
        ex=SimpleNamespace(plan=PLAN),
        profile=profile,
        change_s=50.0,
        progress=SimpleNamespace(log=said.append),
    )
    redecider = Redecider(run, lambda step: [load(tiles, 20 + i % 2) for i in range(4)])
    return redecider.propose_plan(20, [step_s, step_s]), " ".join(said)


def test_samples_as_planned_for_are_not_searched_for(searches):
    new, said = propose_plan(1, 1.0)
    assert (new, said) == (None, "after step 20: samples have not changed since planning")
    assert "no plan for the recent samples: nothing fits" in propose_plan(5, 1.0)[1]
    assert len(searches.asked) == 1


@pytest.mark.parametrize(
    "share, step_s, pays",
    [(0.5, 2.0, True), (0.5, 1.0, False), (0.02, 1e4, False)],
    ids=["pays", "costs more than it saves", "within what predictions are off"],
)
def test_a_plan_has_to_pay_in_the_steps_that_are_left(searches, monkeypatch, share, step_s, pays):
    other = PLAN.with_layout(buckets=(bucket(28, 256),))
    searches.found.append(other)
    monkeypatch.setattr(redecide, "predict_saving", lambda *_: (share, ""))
    new, said = propose_plan(3, step_s)
    assert f"would save {share:.0%} of a step" in said
    assert "in 80 steps, and cost 50.0 s" in said
    assert said.endswith("changing to it" if pays else "keeping the current one")
    assert new == (NewPlan(other, searches.asked[0]) if pays else None)


LOADS = tuple(load(2, 40 + i) for i in range(12))
LATE = dataclasses.replace(nano_profile(), data=DataProfile("d", 12, LOADS, (load(9, 90),)))


def saved(buckets) -> tuple[float | None, str]:
    train = dataclasses.replace(CONFIG.train, global_batch=4)
    config = dataclasses.replace(CONFIG, train=train, plan=PlanConfig(sampled_batches=2))
    return predict_saving(PLAN, PLAN.with_layout(buckets=buckets), LATE, config)


@pytest.mark.parametrize(
    "buckets, says",
    [
        (PLAN.layout.buckets, "the current plan is still the best"),
        ((bucket(8, 80),), "the best plan leaves out 1 samples that are trained on"),
        ((bucket(64, 512),), "the best plan for them is not faster"),
    ],
)
def test_a_plan_that_stays(buckets, says):
    assert saved(buckets) == (None, says)


def test_what_a_plan_saves_is_simulated_on_the_latest_batches():
    plans, batches = (PLAN, PLAN.with_layout(buckets=(bucket(16, 224),))), [LOADS[4:8], LOADS[8:]]
    now_s, then_s = (simulate(p, batches, LATE.model).makespan_s for p in plans)
    assert 0 < then_s < now_s
    assert saved(plans[1].layout.buckets) == (pytest.approx(1 - then_s / now_s), "")
