"""Rounds until the fastest plan is certain; the choice where memory does not hold some plans."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.plan import time_plans
from dflop_jax.plan.candidate import MIN_SECOND_REMAT_GAIN, Candidate
from dflop_jax.plan.time_plans import PlanTooLarge, choose_fitting_plan
from dflop_jax.records import Predicted, Prices

from ..plans import chain

FIRST = time_plans._MIN_ROUNDS


def candidate(name, buckets=1, kept=(), **known):
    layout = SimpleNamespace(buckets=(None,) * buckets)
    plan = SimpleNamespace(name=name, layout=layout, scheduling=SimpleNamespace(residuals=kept))
    return Candidate(plan, **known)


class Evaluator:
    """Plans take these seconds in a round, times a factor of the round's batches."""

    def __init__(self, seconds, *, apart=0.0, effort="quick", samples=1):
        self.seconds, self.apart, self.samples = seconds, apart, samples
        self.config = SimpleNamespace(effort=effort)
        self.asked, self.looked = Counter(), Counter()

    def with_lookahead(self, plan):
        self.looked[plan.name] += 1
        return plan

    def round_batches(self, number):
        return [[number] * self.samples] * 2  # a plain and a drifted one

    def simulate_round(self, plan, number):
        assert number == self.asked[plan.name]  # each once, in order
        self.asked[plan.name] += 1
        noise = np.random.default_rng([number, *plan.name.encode()]).normal() * self.apart
        return self.seconds[plan.name] * (1 + number % 3) * (1 + noise)


def halved(evaluator, **plans):
    plans = {name: plans.get(name, candidate(name)) for name in evaluator.seconds}
    return [f.plan.name for f in time_plans.successive_halving(evaluator, list(plans.values()))]


@pytest.mark.parametrize("seconds, apart, known, order, asked", [
    ({}, 0.0, {}, "", {}),
    ({"a": 1.0}, 0.0, {}, "a", {}),
    # Much slower plans leave after the first rounds.
    ({"a": 1.3, "b": 1.0, "c": 1.2}, 0.0, {}, "bca", dict.fromkeys("abc", FIRST)),
    # The slower half leaves, three of six others; the rest run on until the order is certain.
    ({n: 1 + 0.01 * i for i, n in enumerate("abcdefg")}, 1e-4, {}, "abcdefg",
     dict.fromkeys("abcd", time_plans._MIN_TESTED_ROUNDS) | dict.fromkeys("efg", FIRST)),
    # What has run is not run again.
    ({"a": 1.0, "b": 1.2}, 0.0, {"a": (1.0, 2.0)}, "ab", {"b": FIRST}),
    # Equal plans are not compared for long, and no plan runs more than the most rounds.
    ({"a": 1.0, "b": 1.0}, 0.0, {}, "ab", dict.fromkeys("ab", time_plans._MIN_TESTED_ROUNDS)),
    ({"c": 1.0, "d": 1.001}, 0.03, {}, None, dict.fromkeys("cd", time_plans._MAX_ROUNDS)),
])  # fmt: skip
def test_rounds_end_when_plans_are_certainly_different(seconds, apart, known, order, asked):
    """Rounds differ threefold, but the plans run the same ones."""
    evaluator = Evaluator(seconds, apart=apart)
    begun = {n: candidate(n, round_seconds=rounds) for n, rounds in known.items()}
    got = halved(evaluator, **begun)
    assert order is None or got == [*order]
    assert evaluator.asked == asked
    assert len(seconds) < 2 or evaluator.looked == dict.fromkeys(asked, 1)


@pytest.mark.parametrize("effort, times, larger", [("quick", 1, 1), ("full", 4, 4)])
def test_equal_plans_use_at_most_the_budget_of_rounds(effort, times, larger):
    names = [f"p{i}" for i in range(24 * times // larger)]
    samples = larger * time_plans.LARGE_BATCH
    evaluator = Evaluator(dict.fromkeys(names, 1.0), apart=0.02, effort=effort, samples=samples)
    halved(evaluator)
    beyond = sum(evaluator.asked.values()) - FIRST * len(names)
    cost = beyond * 2 * larger * (time_plans.ROUND_WORK + time_plans._BATCH_COST)
    assert 0.4 * times * time_plans._MAX_WORK <= cost <= times * time_plans._MAX_WORK


@pytest.mark.parametrize("saved, worth", [(0.9, False), (1.1, True)])
def test_second_remat_must_save_more_than_its_programs_cost(saved, worth):
    evaluator = Evaluator({"plain": 1.0, "second": 1 - saved * MIN_SECOND_REMAT_GAIN})
    order = halved(evaluator, second=candidate("second", kept=("some",)))
    assert order[0] == ("second" if worth else "plain")


GIB = 2**30


# By the profile a is the fastest, on the devices d.
FREE = chain(1).with_scheduling(free_bytes={"l0": 2.0 * GIB})
PLANS = [replace(FREE, policy=p, predicted=Predicted(i + 1.0)) for i, p in enumerate("abcd")]
TOOK_S = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}


class Devices:
    """Of devices of 10 GiB that plans fill, and of plans that need these GiB."""

    def __init__(self, needed, limit=10.0):
        self.needed = needed
        self.context = SimpleNamespace(spec=SimpleNamespace(memory_bytes=limit * GIB))
        self.config = SimpleNamespace(effort="quick")

    def with_less_memory(self, n_bytes):
        return Devices(self.needed, (self.context.spec.memory_bytes - n_bytes) / GIB)

    def fits(self, plan):
        return self.needed.get(plan.policy, 0.0) * GIB <= self.context.spec.memory_bytes

    def evaluate(self, plan, about_s, prices=None):
        by_profile_s = plan.predicted.makespan_s
        return replace(plan, predicted=Predicted(prices.concurrency if prices else by_profile_s))


def chosen(*, not_timed=None, no_step=None, needed=None):
    """(the plan, the GiB of the evaluator's limit, what was tried) where these plans are short of
    so many GiB while they are timed or in a step."""
    tried = []

    def time_plan(plan):
        tried.append(plan.policy)
        if plan.policy in (not_timed or {}):
            raise PlanTooLarge(f"{plan.policy} is large", not_timed[plan.policy] * GIB)
        return Prices({}, concurrency=TOOK_S[plan.policy])

    def try_step(plan, prices):
        assert prices.concurrency == TOOK_S[plan.policy]
        tried.append(plan.policy.upper())
        if plan.policy in (no_step or {}):
            raise PlanTooLarge(f"{plan.policy} is large", no_step[plan.policy] * GIB)

    plan, devices = choose_fitting_plan(Devices(needed or {}), PLANS, time_plan, try_step)
    return plan, devices.context.spec.memory_bytes / GIB, "".join(tried)


@pytest.mark.parametrize("refused, expected, free_gib", [
    ({}, ("a", 10.0, "aA"), 2.0),  # though another one takes less by its own programs
    # A plan that is too large is dropped while it is timed or in a step.
    ({"not_timed": {"a": 0}}, ("b", 10.0, "abB"), 2.0),
    ({"not_timed": {"a": 0, "b": 0}, "no_step": {"c": 0}}, ("d", 10.0, "abcCdD"), 2.0),
    # The others leave free what it was short of.
    ({"not_timed": {"a": 1.5}, "needed": {"b": 9.0, "c": 8.0}}, ("c", 8.5, "acC"), 0.5),
    ({"not_timed": {"a": 0.5}, "no_step": {"b": 1.0}, "needed": {"c": 8.75}},
     ("d", 8.5, "abBdD"), 0.5),
    ({"needed": {"a": 10.5}}, ("b", 10.0, "bB"), 2.0),
])  # fmt: skip
def test_the_fastest_plan_that_the_devices_hold_is_taken(refused, expected, free_gib):
    best, limit_gib, tried = chosen(**refused)
    assert (best.policy, limit_gib, tried) == expected
    assert best.scheduling.free_bytes == {"l0": free_gib * GIB}
    i = "abcd".index(best.policy)
    assert best.predicted.chosen_by_s == i + 1.0
    assert best.predicted.makespan_s == TOOK_S[best.policy]


@pytest.mark.parametrize("short, remedy", [(1.0, "6.442e"), (0.0, "1.02e")])
def test_error_names_a_remedy_where_no_plan_fits(short, remedy):
    """10 GiB less 1 GiB for each of four; or, where nothing is known, less what plans leave."""
    message = rf"none of the fastest plans .* \(4 tried\): d is large; .*memory_bytes {remedy}.*, "
    with pytest.raises(ValueError, match=message):
        chosen(no_step={p.policy: short for p in PLANS})
    with pytest.raises(ValueError, match=r"\(0 tried\): none was tried"):
        choose_fitting_plan(Devices({}), [], None, None)
