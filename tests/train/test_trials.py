"""Trials: which plan a run takes by real steps, and a run that trains under each of its plans."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax import Callback, PlanConfig
from dflop_jax.records import Plan, SubmeshPlan
from dflop_jax.records.files import load as read
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import choose_plan
from dflop_jax.train.run_context import trial_steps
from dflop_jax.train.trainer import Trainer
from dflop_jax.train.trials import (
    Trial,
    TrialRun,
    choose_trial,
    drop_pending,
    find_pending,
    list_results,
    make_trials,
    max_alternatives,
    next_plan,
)

from ..plans import NANO, bucket, nano_profile
from .resume_cases import CONFIG, PLAN, STEPS, quick, whole  # noqa: F401 (fixtures)

N = 3  # steps of a trial, of which two warm up


def plan_of(policy: str) -> Plan:
    return dataclasses.replace(NANO, policy=policy)


def trial(policy="a", predicted=1.0, ratios=(), sampled=1.0, failure="") -> Trial:
    return Trial(plan_of(policy), predicted, sampled, tuple(ratios), tuple(ratios), failure)


@pytest.mark.parametrize("trials, chosen", [
    ([], None),
    ([trial()], None),  # not measured
    ([trial(failure="too large")], None),
    ([trial(ratios=[9.0])], "a"),
    # The calibrated step counts, not the measured or the predicted one.
    ([trial("a", 1.0, [1.5] * 6, 1.0), trial("b", 1.2, [1.2] * 6, 1.1)], "b"),
    ([trial("a", 1.0, [1.0] * 6, 1.3), trial("b", 1.2, [1.1] * 6, 1.1)], "b"),
    # Within noise, or within 1%, the predicted one counts.
    ([trial("a", 1.0, [1.0, 1.1, 1.2, 1.3]), trial("b", 1.2, [0.9, 1.05, 1.15, 1.2])], "a"),
    ([trial("a", 1.0, [1.009] * 6), trial("b", 1.2, [1.0] * 6)], "a"),
    ([trial("a", 1.0, [1.02] * 6), trial("b", 1.2, [1.0] * 6)], "b"),
    # One step that took long does not count.
    ([trial("a", 1.0, [1.2] * 6), trial("b", 1.2, [*[1.0] * 5, 50.0])], "b"),
    ([trial("a", 1.0, [1.0], failure=""), trial("b", failure="too large"), trial("c")], "a"),
])  # fmt: skip
def test_the_plan_with_the_lowest_calibrated_step_is_chosen(trials, chosen):
    for order in itertools.permutations(trials):
        best = choose_trial(order)
        assert (best and best.plan.policy) == chosen


def test_noisy_steps_choose_the_faster_plan_or_the_predicted_one():
    """By simulation: steps with 4% of noise; a plan that is slower by d is rarely taken."""
    rng = np.random.default_rng(0)
    taken = dict.fromkeys((0.0, 0.02, 0.1), 0)
    for d in taken:
        for _ in range(200):
            a, b = (1 + x + 0.04 * rng.standard_normal(6) for x in (d, 0.0))
            taken[d] += choose_trial([trial("a", 1.0, a), trial("b", 1.1, b)]).plan.policy == "b"
    assert taken[0.0] <= 200 * 0.45  # equal: rather as predicted
    assert taken[0.1] >= 200 * 0.98
    assert taken[0.0] < taken[0.02] < taken[0.1]


def test_what_is_left_to_try():
    plans = [plan_of(p) for p in "abc"]
    assert make_trials(plans[:1]) == make_trials([]) == ()
    trials = make_trials(plans)
    assert next_plan(trials) == plans[0]
    trials = drop_pending(trials, "too large")
    assert next_plan(trials) == plans[1]
    run = TrialRun(trials, 10, N, sampled_s=2.0)
    for step, seconds in enumerate((9.0, 8.0, 3.0), 10):
        run.add_step(step, seconds, simulated_s=1.5)
    assert run.stop_step == 13
    trials = run.results()
    assert (trials[1].ratios, trials[1].calibrated_s) == ((2.0,), 4.0)
    assert next_plan(trials) == plans[2]
    assert next_plan(drop_pending(trials, "too large")) == plans[1]
    assert next_plan(drop_pending(drop_pending(trials, "large"), "large")) is None
    assert find_pending(()) is next_plan(()) is None
    # A single step has no warm-up.
    one = TrialRun(trials, 0, 1, sampled_s=2.0)
    one.add_step(0, 1.0, 1.0)
    assert next_plan(one.results()) == plans[2]


@pytest.mark.parametrize(
    "ratios, ends", [([2.0] * 2, False), ([2.0] * 3, True), ([1.05] * 9, False)]
)
def test_a_trial_of_a_much_slower_plan_ends_early(ratios, ends):
    trials = (trial("a", ratios=[1.0] * 6), trial("b"))
    run = TrialRun(trials, 0, 20, sampled_s=1.0)
    for step, ratio in enumerate(ratios, 2):
        run.add_step(step, ratio, 1.0)
    assert run.is_decided == ends
    alone = TrialRun((trial("b"),), 0, 20, sampled_s=1.0)
    alone.add_step(2, 5.0, 1.0)
    assert not alone.is_decided  # there is no other to compare with


def test_every_trial_has_its_outcome():
    trials = [
        trial("a", 1.0, [1.0, 1.005, 1.02] * 2), trial("b", 1.1, [0.99, 1.0, 1.02] * 2),
        trial("c", 1.2, [1.5] * 6), trial("d", 1.3, failure="does not fit"),
    ]  # fmt: skip
    says = [r.outcome for r in list_results(trials)]
    assert says == [
        "chosen: 0.5% slower than the fastest, within noise, and predicted to be faster",
        "within noise of the fastest", "50.0% slower than the fastest", "dropped: does not fit",
    ]  # fmt: skip
    unfinished = list_results([*trials, trial("e")])
    assert unfinished[0].outcome == "within noise of the fastest"
    assert unfinished[-1].outcome == "not measured yet"
    assert list_results([trial(ratios=[1.0])])[0].outcome == "chosen: the fastest"
    assert list_results(()) == ()


@pytest.mark.parametrize("trials, policy, steps, saves, expected", [
    (-1, "auto", 200, True, 8), (-1, "auto", 199, True, 0), (-1, "orch", 900, True, 0),
    (-1, "auto", 900, False, 0), (0, "auto", 900, True, 0), (5, "auto", 20, True, 5),
])  # fmt: skip
def test_long_runs_of_auto_try_plans(trials, policy, steps, saves, expected):
    plan = PlanConfig(policy=policy, trials=trials)
    checkpoint = dataclasses.replace(CONFIG.checkpoint, every=0, every_s=600.0 * saves)
    train = dataclasses.replace(CONFIG.train, steps=steps)
    config = dataclasses.replace(CONFIG, plan=plan, train=train, checkpoint=checkpoint)
    assert trial_steps(config) == expected
    config = dataclasses.replace(config, plan=dataclasses.replace(plan, trials=expected))
    left = [3 * expected, 3 * expected - 1]
    assert [max_alternatives(config, steps - n) for n in left] == [2 * (expected > 0), 0]


# ---- a run of three plans ----

ORCH = dataclasses.replace(NANO, policy="orch").with_layout(
    buckets=(bucket(4, 96),), submeshes=tuple(SubmeshPlan(m, 0, 1, 2, 1) for m in ("vision", "llm"))
)
DIP = dataclasses.replace(PLAN, policy="dip").with_layout(buckets=(bucket(10, 192),))
PLANS = [ORCH, PLAN, DIP]
STEP_S = {"orch": 3.0, "dflop": 1.0, "dip": 2.0}


class Stop(Callback):
    """A kill before a step."""

    def __init__(self, step):
        self.step = step

    def before_step(self, step):
        if step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def tried(quick, monkeypatch, tmp_path):
    """What is searched and measured: three plans, of which steps seem to take so long."""
    searches = []

    def search(*_, max_alternatives, **options):
        searches.append(max_alternatives)
        return SimpleNamespace(plan=PLANS[0], alternatives=tuple(PLANS[1:]))

    add_step = TrialRun.add_step

    def add(self, step, step_s, simulated_s):
        add_step(self, step, STEP_S[self._pending.plan.policy], simulated_s)

    monkeypatch.setattr(choose_plan, "make_plan", search)
    monkeypatch.setattr(choose_plan, "check_before_measuring", lambda *_: None)
    monkeypatch.setattr(TrialRun, "add_step", add)
    monkeypatch.chdir(tmp_path)
    return searches


def fit(existing="error", callbacks=(), n=N):
    jax.devices()
    plan = PlanConfig(devices=2, trials=n)
    config = dataclasses.replace(CONFIG, run_dir="run", cache_dir="cache", plan=plan)
    return Trainer(config, profile=nano_profile(), existing=existing, callbacks=callbacks).fit()


def assert_as_without_trials(whole):
    rows = read_metrics("run")
    assert [r["step"] for r in rows] == list(range(STEPS))
    expected = [r["loss"] for r in read_metrics(whole)]
    np.testing.assert_allclose([r["loss"] for r in rows], expected, rtol=1e-4)
    plan = read(Plan, "run/plan.json")
    assert plan.policy == "dflop"
    return [(r.policy, r.outcome) for r in plan.trials]


OUTCOMES = ["slower than the fastest", "chosen: the fastest", "slower than the fastest"]


@pytest.mark.slow
def test_a_run_trains_under_each_plan_and_goes_on_under_the_fastest(tried, whole):
    result = fit()
    outcomes = assert_as_without_trials(whole)
    assert [p for p, _ in outcomes] == ["orch", "dflop", "dip"]
    assert all(said.endswith(says) for (_, said), says in zip(outcomes, OUTCOMES, strict=True))
    assert (len(result.losses), result.compiles_after_warmup, tried) == (STEPS, 0, [2])


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, N + 2, 2 * N + 1, 3 * N + 1])
def test_a_run_that_is_killed_in_a_trial_makes_the_same_choice(tried, whole, step):
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[Stop(step)])
    fit("resume")
    assert [p for p, _ in assert_as_without_trials(whole)] == ["orch", "dflop", "dip"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["init_for_restore", "calibrate", "run_step"])
def test_a_plan_that_does_not_fit_is_dropped(tried, whole, monkeypatch, part):
    run, failed = getattr(Executor, part), []

    def run_or_fail(self, *args, **options):
        policy = self.plan.policy
        if policy == "dip" or (part == "run_step" and policy == "orch"):
            failed.append(policy)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        return run(self, *args, **options)

    monkeypatch.setattr(Executor, part, run_or_fail)
    fit()
    outcomes = dict(assert_as_without_trials(whole))
    assert outcomes["dflop"] == "chosen: the fastest"
    assert all("ran out of it" in outcomes[policy] for policy in failed)
    assert sorted(failed) == (["dip", "orch"] if part == "run_step" else ["dip"])
