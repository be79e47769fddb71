"""Which plan is taken where memory does not hold some of those that are tried."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflop_jax.plan.on_devices import PlanTooLarge, by_its_own, to_time
from dflop_jax.records import Predicted, Prices

from ..plans import chain

GIB = 2**30


def plan(name, seconds):
    return replace(chain(1), policy=name, predicted=Predicted(seconds)).with_scheduling(
        free_bytes={"l0": 2.0 * GIB}
    )


# By the profile a is the fastest, on the devices d.
PLANS = [plan("a", 1.0), plan("b", 2.0), plan("c", 3.0), plan("d", 4.0)]
TOOK_S = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}


class Evaluator:
    """Of devices of 10 GiB that plans fill, and of plans that need these GiB."""

    def __init__(self, needed, limit=10.0):
        self.needed = needed
        self.rules = SimpleNamespace(spec=SimpleNamespace(memory_bytes=limit * GIB))
        self.config = SimpleNamespace(effort="quick")

    def with_less_memory(self, n_bytes):
        return Evaluator(self.needed, (self.rules.spec.memory_bytes - n_bytes) / GIB)

    def fits(self, plan):
        return self.needed.get(plan.policy, 0.0) * GIB <= self.rules.spec.memory_bytes

    def evaluate(self, plan, about_s, prices=None):
        by_profile_s = plan.predicted.makespan_s
        return replace(plan, predicted=Predicted(prices.concurrency if prices else by_profile_s))

    def trial(self, number):
        return [[]]

    def trial_s(self, plan, number, prices):
        return prices.concurrency


def chosen(n, *, not_timed=None, no_step=None, needed=None):
    """(the plan, how many were timed, what was tried) where these plans are short of so many GiB
    while they are timed or in a step."""
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

    best, n_timed = by_its_own(Evaluator(needed or {}), PLANS, n, time_plan, try_step)
    return best, n_timed, "".join(tried)


def test_the_fastest_on_the_devices_is_taken_after_a_step():
    best, n_timed, tried = chosen(3)
    assert (best.policy, n_timed, tried) == ("c", 3, "abcC")
    assert best.scheduling.free_bytes == {"l0": 2.0 * GIB}


def test_one_that_is_too_large_to_be_timed_is_dropped():
    best, n_timed, tried = chosen(3, not_timed={"c": 0})
    assert (best.policy, n_timed, tried) == ("b", 2, "abcB")


def test_the_others_leave_free_what_one_was_short_of():
    best, _, tried = chosen(3, not_timed={"a": 1.5}, needed={"b": 9.0, "c": 8.0})
    assert (best.policy, tried) == ("c", "acC")  # 8.5 GiB are left to plan with
    assert best.scheduling.free_bytes == {"l0": 0.5 * GIB}
    # That of a step too, and of all that were dropped.
    best, _, tried = chosen(3, not_timed={"a": 0.5}, no_step={"c": 1.0}, needed={"b": 8.75})
    assert (best.policy, tried) == ("d", "abcCdD")
    assert best.scheduling.free_bytes == {"l0": 0.5 * GIB}


def test_the_next_is_tried_in_a_step():
    assert chosen(3, no_step={"c": 0, "b": 0})[2] == "abcCBA"


def test_beyond_the_finalists_one_after_the_other():
    assert chosen(1, not_timed={"a": 0, "b": 0}) == (replace(PLANS[2], predicted=Predicted(
        2.0, chosen_by_s=3.0)), 1, "abcC")  # fmt: skip


def test_without_finalists_by_the_profile():
    assert chosen(0) == (PLANS[0], 0, "aA")
    best, n_timed, tried = chosen(0, no_step={"a": 1.0}, needed={"b": 9.5})
    assert (best.policy, n_timed, tried) == ("c", 0, "aAcC")


@pytest.mark.parametrize(
    "short, remedy", [(1.0, "memory_bytes 6.442e+09, "), (0.0, "memory_bytes 9.664e+09, ")]
)
def test_where_none_is_left_the_remedy_is_named(short, remedy):
    """10 GiB less 1 GiB for each of four; or, where nothing is known, less a tenth."""
    every = {p.policy: short for p in PLANS}
    with pytest.raises(ValueError, match=r"no plan of the fastest .* \(4 tried\): d is large") as e:
        chosen(3, no_step=every)
    assert remedy in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "policies, n, expected",
    [
        (["orch"], 0, []),
        (["orch", "dip", "orch", "dflop"], 1, [0]),
        (["orch", "dip", "orch", "dflop", "orch", "orch"], 3, [0, 1, 2, 4]),
        (["orch", "orch", "dip"], 3, [0, 1, 2]),
    ],
)
def test_another_policy_takes_no_place_of_the_first(policies, n, expected):
    plans = [SimpleNamespace(policy=p, at=i) for i, p in enumerate(policies)]
    assert [p.at for p in to_time(plans, n)] == expected
