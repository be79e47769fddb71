"""The fastest of some plans, told apart by as many trials as it takes."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.plan import race
from dflop_jax.plan.candidate import WORTH_PROGRAMS, Candidate

FIRST = race._FIRST


def candidate(name, buckets=1, kept=(), **known):
    layout = SimpleNamespace(buckets=(None,) * buckets)
    plan = SimpleNamespace(name=name, layout=layout, scheduling=SimpleNamespace(kept=kept))
    return Candidate(plan, **known)


class Evaluator:
    """Plans take these seconds in a trial, all times what the batches of the trial bring."""

    def __init__(self, seconds, *, apart=0.0, effort="quick", samples=1):
        self.seconds, self.apart, self.samples = seconds, apart, samples
        self.config = SimpleNamespace(effort=effort)
        self.asked, self.looked = Counter(), Counter()

    def with_lookahead(self, plan):
        self.looked[plan.name] += 1
        return plan

    def trial(self, number):
        return [[number] * self.samples] * 2  # a plain and a drifted one

    def trial_s(self, plan, number, prices):
        assert number == self.asked[plan.name]  # each once, in order
        self.asked[plan.name] += 1
        noise = np.random.default_rng([number, *plan.name.encode()]).normal() * self.apart
        return self.seconds[plan.name] * (1 + number % 3) * (1 + noise)


def raced(evaluator, **plans):
    plans = {name: plans.get(name, candidate(name)) for name in evaluator.seconds}
    return [f.plan.name for f in race.race(evaluator, list(plans.values()))]


@pytest.mark.parametrize("seconds, apart, known, order, asked", [
    ({}, 0.0, {}, "", {}),
    ({"a": 1.0}, 0.0, {}, "a", {}),
    # Those far behind leave after the first trials.
    ({"a": 1.3, "b": 1.0, "c": 1.2}, 0.0, {}, "bca", dict.fromkeys("abc", FIRST)),
    # The slower half leaves, of six others three; the rest go on until they are told apart.
    ({n: 1 + 0.01 * i for i, n in enumerate("abcdefg")}, 1e-4, {}, "abcdefg",
     dict.fromkeys("abcd", race._TELLING) | dict.fromkeys("efg", FIRST)),
    # What has run is not run again.
    ({"a": 1.0, "b": 1.2}, 0.0, {"a": (1.0, 2.0)}, "ab", {"b": FIRST}),
    # Equal plans are not compared for long, and no plan runs more than the most trials.
    ({"a": 1.0, "b": 1.0}, 0.0, {}, "ab", dict.fromkeys("ab", race._TELLING)),
    ({"c": 1.0, "d": 1.001}, 0.03, {}, None, dict.fromkeys("cd", race._MOST)),
])  # fmt: skip
def test_plans_run_as_many_trials_as_tell_them_apart(seconds, apart, known, order, asked):
    """Trials differ threefold, but the plans run the same ones."""
    evaluator = Evaluator(seconds, apart=apart)
    got = raced(evaluator, **{n: candidate(n, trials_s=trials) for n, trials in known.items()})
    assert order is None or got == [*order]
    assert evaluator.asked == asked
    assert len(seconds) < 2 or evaluator.looked == dict.fromkeys(asked, 1)


def test_prices_of_its_own_come_with_the_lookahead_that_suits_them():
    evaluator = Evaluator({"a": 1.0, "b": 1.2})
    raced(evaluator, a=candidate("a", prices="its own"))
    assert evaluator.looked == {"b": 1}


@pytest.mark.parametrize("effort, times", [("quick", 1), ("full", 4)])
@pytest.mark.parametrize("larger", [1, 4])
def test_those_that_stay_together_cost_no_more_than_the_work(effort, times, larger):
    names = [f"p{i}" for i in range(24 * times // larger)]
    samples = larger * race.LARGE_BATCH
    evaluator = Evaluator(dict.fromkeys(names, 1.0), apart=0.02, effort=effort, samples=samples)
    raced(evaluator)
    assert all(evaluator.asked[n] >= FIRST for n in names)
    beyond = sum(evaluator.asked.values()) - FIRST * len(names)
    cost = beyond * 2 * larger * (race.TRIAL_WORK + race._BATCH_COST)
    assert 0.4 * times * race._ALL_WORK <= cost <= times * race._ALL_WORK


@pytest.mark.parametrize("faster", [1e-9, 1e-2])
def test_what_differs_by_rounding_is_equal_and_fewer_buckets_win(faster):
    for names in ("fm", "mf"):
        evaluator = Evaluator({n: 1 - faster * (n == "m") for n in names})
        order = raced(evaluator, f=candidate("f", 2), m=candidate("m", 3))
        assert order[0] == ("f" if faster < 1e-6 else "m")


@pytest.mark.parametrize("saved, worth", [(0.9, False), (1.1, True)])
def test_second_policies_are_worth_their_programs(saved, worth):
    evaluator = Evaluator({"plain": 1.0, "second": 1 - saved * WORTH_PROGRAMS})
    order = raced(evaluator, second=candidate("second", kept=("some",)))
    assert order[0] == ("second" if worth else "plain")


def test_new_plans_race_the_fastest_alone():
    evaluator = Evaluator({"a": 1.0, "b": 1.05, "new": 1.02, "best": 0.9})
    before = race.race(evaluator, [candidate("a"), candidate("b")])
    assert race.joined(evaluator, before, []) == before
    asked = evaluator.asked["b"]
    after = race.joined(evaluator, before, [candidate("new"), candidate("best")])
    assert [f.plan.name for f in after] == ["best", "a", "new", "b"]
    assert evaluator.asked["b"] == asked


def test_a_glance_sorts_by_the_first_trials_and_tells_what_is_close():
    evaluator = Evaluator({"a": 1.06, "b": 1.0, "c": 1.04})
    seen = race.at_a_glance(evaluator, [candidate(n) for n in "abc"])
    assert [f.plan.name for f in seen] == ["b", "c", "a"]
    assert {len(f.trials_s) for f in seen} == {FIRST}
    assert race.close_to_best(seen) == seen[:2]
    assert race.at_a_glance(evaluator, []) == []


def test_it_is_right_more_often_than_the_first_trials_alone():
    """Of eight plans half a percent apart, whose trials differ by 1%."""
    right, alone = 0, 0
    for k in range(80):
        evaluator = Evaluator({f"{i}{k}": 1 + 0.005 * i for i in range(8)}, apart=0.01)
        right += raced(evaluator)[0] == f"0{k}"
        evaluator.asked.clear()
        seen = race.at_a_glance(evaluator, [candidate(n) for n in evaluator.seconds])
        alone += seen[0].plan.name == f"0{k}"
    assert right >= alone + 8, (right, alone)
