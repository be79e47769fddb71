"""The fastest of a few plans, told apart by as many batches as it takes."""

from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.plan import judge
from dflop_jax.plan.finalist import Finalist

BATCHES = 4  # that have judged the plans before


def made_up(name, buckets=1):
    return SimpleNamespace(name=name, layout=SimpleNamespace(buckets=(None,) * buckets))


class Evaluator:
    """Plans take these seconds in a round, all times what the batches of the round bring."""

    def __init__(self, seconds, *, apart=0.0, effort="quick", n_rounds=12, samples=1):
        self.seconds, self.apart, self.n_rounds = seconds, apart, n_rounds
        self.samples = samples
        self.config, self.unseen = SimpleNamespace(effort=effort), [[]] * BATCHES
        self.asked = []

    def round_batches(self, number):
        return [[number] * self.samples] * 2  # a plain and a drifted one

    def round_s(self, plan, prices, batches):
        (number, *_), _ = batches
        self.asked.append((plan.name, number))
        noise = np.random.default_rng([number, *plan.name.encode()]).normal() * self.apart
        return self.seconds[plan.name] * (1 + number % 3) * (1 + noise)


def told(evaluator, before):
    plans = [Finalist(made_up(name), seconds=s) for name, s in before.items()]
    return judge.fastest(evaluator, plans)


def test_one_plan_or_one_that_leads_runs_no_more():
    evaluator = Evaluator({})
    assert told(evaluator, {"a": 2.0}).plan.name == "a"
    assert told(evaluator, {"a": 2.0, "b": 1.0, "c": 1.03}).plan.name == "b"
    assert not evaluator.asked


def test_more_batches_turn_what_few_said():
    """Rounds differ threefold, but the plans run the same ones."""
    evaluator = Evaluator({"a": 1.01, "b": 1.0}, apart=1e-4)
    best = told(evaluator, {"a": 1.0, "b": 1.001})
    assert best.plan.name == "b"
    rounds = [number for name, number in evaluator.asked if name == "b"]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) == 2  # the least that tell
    spans = [1.0 * (1 + r % 3) for r in rounds]
    assert best.seconds == pytest.approx((BATCHES * 1.001 + sum(spans)) / (BATCHES + 2), rel=1e-3)


@pytest.mark.parametrize("effort, times", [("quick", 1), ("full", 4)])
@pytest.mark.parametrize("larger", [1, 2])
def test_those_that_stay_together_cost_no_more_than_the_work(effort, times, larger):
    evaluator = Evaluator(
        dict.fromkeys("abc", 1.0),
        apart=0.02,
        effort=effort,
        n_rounds=99,
        samples=larger * judge.LARGE_BATCH,
    )
    told(evaluator, dict.fromkeys("abc", 1.0))
    cost = len(evaluator.asked) * 2 * larger * (judge.COMPARED_WORK + judge._BATCH_COST)
    assert 0.4 * times * judge._ALL_WORK <= cost <= times * judge._ALL_WORK


def test_equal_plans_are_not_compared_for_long():
    evaluator = Evaluator({"a": 1.0, "b": 1.0})
    assert told(evaluator, {"a": 1.0, "b": 1.0}).plan.name == "a"
    assert len(evaluator.asked) == 4


def test_it_is_right_more_often_than_few_batches_alone():
    """Of pairs that are 0.5% apart, judged with an error of 1% each before."""
    rng = np.random.default_rng(0)
    right, alone = 0, 0
    for k in range(40):
        before = {f"a{k}": 1.0 + 0.01 * rng.normal(), f"b{k}": 1.005 + 0.01 * rng.normal()}
        truth = {f"a{k}": 1.0, f"b{k}": 1.005}
        right += told(Evaluator(truth, apart=0.002), before).plan.name[0] == "a"
        alone += min(before, key=before.get)[0] == "a"
    assert right >= alone + 4
