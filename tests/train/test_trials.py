"""Trials: which plan a run takes by real steps, and a run that trains under each of its plans."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
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
from dflop_jax.train.callbacks import FitResult
from dflop_jax.train.resume import RunState, drop_failed_plans, record_failure
from dflop_jax.train.run_context import count_compiles, trial_steps
from dflop_jax.train.trainer import Trainer
from dflop_jax.train.trials import (
    Trial,
    TrialRun,
    choose_trial,
    drop_failed,
    drop_pending,
    find_pending,
    list_results,
    make_trials,
    max_trials,
    next_plan,
    plan_key,
)

from ..plans import NANO, bucket, nano_profile
from .resume_cases import (  # noqa: F401 (fixtures)
    CACHE,
    CONFIG,
    PLAN,
    STEPS,
    assert_as_whole,
    quick,
    whole,
)

N = 3  # steps of a trial, of which two warm up
RTOL = 1e-6  # of losses under plans that add in another order


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
    assert [max_trials(config, steps - n) for n in left] == [3 if expected else 1, 1]


@pytest.mark.parametrize("failed, left", [("", "ab"), ("a", "b"), ("b", "a"), ("ab", "")])
def test_a_resumed_run_drops_plans_whose_failure_is_recorded(tmp_path, failed, left):
    trials = (trial("a", ratios=[1.0]), trial("b"))
    state = RunState(step=8, plan=next_plan(trials), prices="prices", trials=trials)
    folder = tmp_path / "checkpoints"
    assert drop_failed_plans(RunState(), folder) == RunState()
    for policy in failed:
        record_failure(folder, plan_of(policy), "too large")
        record_failure(folder, plan_of(policy), "of another process")
    if not left:
        with pytest.raises(ValueError, match="no plan of the trials fits into memory: too large"):
            drop_failed_plans(state, folder)
        return
    got = drop_failed_plans(state, folder)
    assert [t.plan.policy for t in got.trials if not t.failure] == [*left]
    assert {t.failure for t in got.trials if t.failure} == ({"too large"} if failed else set())
    assert got.plan.policy == left[-1]
    assert got.prices == (None if "b" in failed else "prices")
    again = {plan_key(t.plan): "again" for t in got.trials if t.failure}
    assert drop_failed(got.trials, again) == got.trials


# ---- a run of three plans ----

ORCH = dataclasses.replace(NANO, policy="orch").with_layout(
    buckets=(bucket(4, 96),), submeshes=tuple(SubmeshPlan(m, 0, 1, 2, 1) for m in ("vision", "llm"))
)
DIP = dataclasses.replace(PLAN, policy="dip").with_layout(buckets=(bucket(10, 192),))
PLANS = [ORCH, PLAN, DIP]
STEP_S = {"orch": 3.0, "dflop": 1.0, "dip": 2.0}
SHORT = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
COMPILE = Executor.compile  # not `compiled_once`
TRIED: list[tuple[Path, FitResult, list[int]]] = []  # of `tried_whole`, once it is there


class Stop(Callback):
    """A kill before a step."""

    def __init__(self, step):
        self.step = step

    def before_step(self, step):
        if step == self.step:
            raise KeyboardInterrupt


def try_three_plans(patch) -> list[int]:
    """Make runs search and try three plans, whose steps seem to take so long; returns how many
    alternatives each search is asked for."""
    searches, add_step = [], TrialRun.add_step

    def search(*_, max_alternatives, **options):
        searches.append(max_alternatives)
        return SimpleNamespace(plan=PLANS[0], alternatives=PLANS[1 : 1 + max_alternatives])

    def add(self, step, step_s, simulated_s):
        add_step(self, step, STEP_S[self._pending.plan.policy], simulated_s)

    patch.setattr(choose_plan, "make_plan", search)
    patch.setattr(choose_plan, "check_before_measuring", lambda *_: None)
    patch.setattr(TrialRun, "add_step", add)
    return searches


@pytest.fixture
def tried(quick, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return try_three_plans(monkeypatch)


@pytest.fixture
def tried_whole(tried, tmp_path_factory):
    """The folder of a run with trials that nothing interrupts, its result, and `tried`."""
    if not TRIED:
        folder = tmp_path_factory.mktemp("tried") / "run"
        TRIED.append((folder, fit(folder), [*tried]))
    return TRIED[0]


def fit(run_dir="run", existing="error", callbacks=(), **changes):
    jax.devices()
    plan = PlanConfig(devices=2, trials=N, **changes)
    config = dataclasses.replace(CONFIG, run_dir=str(run_dir), **CACHE, plan=plan)
    return Trainer(config, profile=nano_profile(), existing=existing, callbacks=callbacks).fit()


def assert_as_without_trials(run_dir, whole) -> dict[str, str]:
    """Returns the outcome of each trial, by policy."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(STEPS))
    expected = [r["loss"] for r in read_metrics(whole)]
    np.testing.assert_allclose([r["loss"] for r in rows], expected, rtol=RTOL)
    plan = read(Plan, f"{run_dir}/plan.json")
    assert plan.policy == "dflop"
    assert [r.policy for r in plan.trials] == ["orch", "dflop", "dip"]
    return {r.policy: r.outcome for r in plan.trials}


@pytest.mark.slow
def test_a_run_trains_under_each_plan_and_goes_on_under_the_fastest(tried_whole, whole):
    folder, result, searches = tried_whole
    outcomes = assert_as_without_trials(folder, whole)
    assert outcomes["dflop"] == "chosen: the fastest"
    assert all(outcomes[p].endswith("slower than the fastest") for p in ("orch", "dip"))
    assert (len(result.losses), result.compiles_after_warmup, searches) == (STEPS, 0, [2])


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, N + 2, 2 * N + 1, 3 * N + 1])
def test_a_run_that_is_killed_in_a_trial_goes_on_as_if_it_were_not(tried_whole, monkeypatch, step):
    """Bit for bit, with every program from the compilation cache."""
    folder, _, _ = tried_whole
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[Stop(step)])
    monkeypatch.setattr(Executor, "compile", COMPILE)
    with count_compiles() as counts:
        fit(existing="resume")
    assert_as_whole("run", folder)
    assert read(Plan, "run/plan.json").trials == read(Plan, folder / "plan.json").trials
    assert counts.compiled == counts.cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["init_for_restore", "calibrate", "rehearse", "run_step"])
def test_a_plan_that_does_not_fit_is_dropped(tried, whole, monkeypatch, part):
    run, failed = getattr(Executor, part), []

    def run_or_fail(self, *args, **options):
        policy = self.plan.policy
        if policy == "dip" or (part == "run_step" and policy == "orch"):
            failed.append(policy)
            raise jax.errors.JaxRuntimeError(SHORT)
        return run(self, *args, **options)

    monkeypatch.setattr(Executor, part, run_or_fail)
    fit(memory_bytes=1e12)  # limited, so that plans rehearse a step
    outcomes = assert_as_without_trials("run", whole)
    assert outcomes["dflop"] == "chosen: the fastest"
    assert all("ran out of it" in outcomes[policy] for policy in failed)
    assert sorted(failed) == (["dip", "orch"] if part == "run_step" else ["dip"])


@pytest.mark.slow
def test_a_new_search_leaves_out_a_plan_that_has_failed(tried, whole):
    record_failure(Path("run/checkpoints"), ORCH, "too large")
    Path("run/lock").touch()  # the folder of a run
    fit(existing="resume")
    assert assert_as_without_trials("run", whole)["orch"] == "dropped: too large"
