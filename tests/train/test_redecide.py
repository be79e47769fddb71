"""Data drift from what the plan was made for: what is seen of it, and a run that changes plans."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import weakref
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, PlanConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cluster.peers import Peers
from dflop_jax.data import make_loader
from dflop_jax.plan.replan import BetterPlan, Question, SearchFacts
from dflop_jax.record_files import load as read
from dflop_jax.records import DataProfile, Plan, Profile
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.train import redecide
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.loop import Loop
from dflop_jax.train.prepare import set_up
from dflop_jax.train.redecide import NewPlan, PlanSearch, Redecider, drift, largest, observed
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


def fit(run_dir, every=EVERY, plan=PLAN, **options):
    config = dataclasses.replace(
        CONFIG,
        run_dir=str(run_dir),
        cache_dir=str(run_dir.parent / "cache"),
        plan=PlanConfig(
            policy="dflop", devices=2, buckets=1, effort="quick", finalists=0, redecide_every=every
        ),
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
    """Steps that seem to take so long that any gain pays, and that every search is over before
    the next look."""
    look = Redecider.look

    def patient(self, done, step_s):
        if self._search:
            self._search.wait()
        return look(self, done, [1e5] * len(step_s))

    monkeypatch.setattr(Redecider, "look", patient)
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)


@pytest.fixture
def alive(monkeypatch):
    """What was alive, when an executor was made, of the last one and of its arrays; no cycle is
    collected meanwhile."""
    last: list[weakref.ref] = []
    seen: list[list[str]] = []
    run, make = Loop.run, trainer_module.make_executor

    def run_and_note(self, stack, resumed):
        result = run(self, stack, resumed)
        state = self.ex.state
        arrays = jax.tree.leaves((state.params, state.masters, state.opt_state, state.grads))
        last[:] = map(weakref.ref, (self.ex, state, *arrays))
        return result

    def make_and_note(place, plan):
        seen.append([type(r()).__name__ for r in last if r() is not None])
        return make(place, plan)

    monkeypatch.setattr(Loop, "run", run_and_note)
    monkeypatch.setattr(trainer_module, "make_executor", make_and_note)
    gc.disable()
    yield seen
    gc.enable()


@pytest.mark.slow
def test_a_run_changes_plans_and_learns_as_before(plain, long_steps, alive, tmp_path, capsys):
    result = fit(tmp_path / "run")
    said = capsys.readouterr().err
    # Searched from step 4 on, while the devices trained.
    assert "after step 4: samples changed by" in said
    assert said.count("changing to it") == 1
    assert "resumed after step 8 of 12" in said
    assert alive == [[], []]
    rows = read_metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(STEPS))
    assert [r["loss"] for r in rows] == list(result.losses)
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-4)
    assert result.losses[: 2 * EVERY] == plain.losses[: 2 * EVERY]
    assert (result.steps_done, result.compiles_after_warmup) == (STEPS, 0)
    assert result.evaluation.loss == pytest.approx(plain.evaluation.loss, rel=1e-4)
    plan = read(Plan, tmp_path / "run/plan.json")
    assert (
        plan.layout.buckets != PLAN.layout.buckets or plan.layout.segments != PLAN.layout.segments
    )
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[-1] <= EVERY


def test_sigterm_while_another_plan_is_searched_ends_the_run(plain, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)

    def look(self, done, step_s):
        os.kill(os.getpid(), signal.SIGTERM)
        return NewPlan(PLAN.with_layout(buckets=(bucket(28, 256),)), nano_profile())

    monkeypatch.setattr(Redecider, "look", look)
    result = fit(tmp_path / "run")
    assert (result.preempted, result.steps_done, result.evaluation) == (True, EVERY, None)
    assert result.losses == plain.losses[:EVERY]
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[0] == EVERY
    assert read(Plan, tmp_path / "run/plan.json").layout.buckets == PLAN.layout.buckets


class Searched:
    """In place of a child process: questions as they are asked; answers when a test gives them."""

    asked: ClassVar[list[Question]] = []
    given: ClassVar[list[BetterPlan]] = []
    closed = 0

    def __init__(self, question):
        self.asked.append(question)

    @property
    def answer(self):
        return self.given.pop(0) if self.given else None

    def close(self):
        Searched.closed += 1


@pytest.fixture
def searches(monkeypatch):
    monkeypatch.setattr(redecide, "PlanSearch", Searched)
    monkeypatch.setattr(redecide, "search_facts", lambda place, profile: None)
    Searched.asked, Searched.given, Searched.closed = [], [], 0
    return Searched


def test_what_is_too_large_is_asked_for_and_a_search_may_outlast_the_run(
    plain, searches, monkeypatch, tmp_path
):
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)
    small = PLAN.with_layout(buckets=(bucket(4, 50),))
    train = dataclasses.replace(CONFIG.train, steps=6, eval_samples=0, eval_every=0)
    result = fit(tmp_path / "run", every=2, plan=small, train=train)
    assert (result.steps_done, result.preempted) == (6, False)
    (question,) = searches.asked
    assert (question.plan, searches.closed) == (small, 1)
    config = dataclasses.replace(CONFIG, run_dir=str(tmp_path))
    place = set_up(config)
    loader = make_loader(config, place.source())
    asked_for = [x for step in (0, 1) for x in loader.loads(step)]
    assert list(question.profile.data.loads) == asked_for
    assert beyond(asked_for, small)


# ---- looks, without a run ----


class Looks:
    """A redecider of made-up batches: of `tiles` tiles a sample, which a test changes."""

    def __init__(self):
        self.tiles = 1
        self.said: list[str] = []
        train = dataclasses.replace(CONFIG.train, steps=100, global_batch=4)
        plan = PlanConfig(redecide_every=2, profile_samples=8)
        config = dataclasses.replace(CONFIG, train=train, plan=plan)
        place = SimpleNamespace(config=config, peers=Peers())
        profile = Profile(nano_profile().model, DataProfile("d", 9, (load(1, 20), load(1, 21))))
        progress = SimpleNamespace(log=self.said.append)
        self.redecider = Redecider(place, profile, PLAN, self.loads, 50.0, progress)

    def loads(self, step):
        return [load(self.tiles, 20 + i % 2) for i in range(4)]

    def look(self, done, step_s=1.0):
        before = len(self.said)
        new = self.redecider.look(done, [step_s, step_s])
        return new, " ".join(self.said[before:])


def test_a_search_is_begun_once_and_its_answer_taken_when_it_is_there(searches):
    looks = Looks()
    assert looks.look(2) == (None, "after step 2: samples are as those that were planned for")
    looks.tiles = 3
    new, said = looks.look(4)
    assert (new, "searching for another plan" in said) == (None, True)
    assert looks.look(6) == looks.look(8) == (None, "")  # it is under way
    searches.given.append(BetterPlan(why="the plan is still the best"))
    new, said = looks.look(10)
    assert (new, "the plan is still the best" in said) == (None, True)
    # The same samples are not searched for again, others are.
    assert looks.look(12) == (None, "after step 12: samples are as those that were planned for")
    assert len(searches.asked) == 1
    looks.tiles = 5
    looks.look(14)
    assert [q.profile.data.loads for q in searches.asked] == [
        tuple(load(tiles, 20 + i % 2) for i in (0, 1, 2, 3) * 2) for tiles in (3, 5)
    ]
    looks.redecider.close()
    assert searches.closed == 2
    looks.redecider.close()
    assert searches.closed == 2


@pytest.mark.parametrize(
    "share, step_s, pays",
    [(0.5, 2.0, True), (0.5, 1.0, False), (0.02, 1e4, False)],
    ids=["pays", "costs more than it saves", "within what predictions are off"],
)
def test_a_plan_has_to_pay_in_the_steps_that_are_left(searches, share, step_s, pays):
    looks, other = Looks(), PLAN.with_layout(buckets=(bucket(28, 256),))
    looks.tiles = 3
    looks.look(2)
    searches.given.append(BetterPlan(other, share))
    new, said = looks.look(20, step_s)
    assert f"would save {share:.0%} of a step" in said
    assert "in 80 steps, and cost 50.0 s" in said
    assert said.endswith("changing to it" if pays else "going on")
    profile = searches.asked[0].profile
    assert new == (NewPlan(other, profile) if pays else None)


# ---- the child process ----


def question() -> Question:
    facts = SearchFacts(2, 4, PlanConfig(), 0.0, "auto", "auto", 32, (), ())
    return Question(nano_profile(), PLAN, facts)


def test_a_search_that_dies_is_no_plan(monkeypatch):
    monkeypatch.setattr("dflop_jax.children.program", lambda *_: "raise SystemExit(3)")
    search = PlanSearch(question())
    search.wait()
    assert search.answer == BetterPlan(why="the search for another plan died")
    search.close()


def test_a_search_under_way_is_ended(monkeypatch):
    monkeypatch.setattr("dflop_jax.children.program", lambda *_: "import time; time.sleep(600)")
    search = PlanSearch(question())
    assert search.answer is None
    search.close()
    assert search._child.exit_code is not None


def test_changing_needs_checkpoints(plain, tmp_path):
    with pytest.raises(ValueError, match=r"plan.redecide_every=4 .* checkpoint.every_s=0"):
        fit(tmp_path / "run", checkpoint=CheckpointConfig(every_s=0))
