"""What a run measures before its first step, by its expected seconds."""

import dataclasses

import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.train.start_budget import MIN_START_S, SEARCH_S, describe_start, plan_start

AUTO = PlanConfig(buckets=2)
# (shapes, effort, buckets, whether with trials) in the order in which they are added.
MEASURES = [
    (1, "quick", 1, False),
    (1, "quick", 2, False),
    (1, "quick", 2, True),
    (2, "quick", 2, True),
    (3, "quick", 2, True),
    (3, "full", 2, True),
]


def start(run_s, shape_s=10.0, config=AUTO, n_plans=1, **changes):
    config = dataclasses.replace(config, **changes)
    return plan_start(config, run_s=run_s, shape_s=shape_s, max_shapes=3, n_plans=n_plans)


def measures(budget):
    return budget.n_shapes, budget.effort, budget.n_buckets, budget.n_plans


def seconds(n_shapes, effort, n_buckets, n_plans):
    return 10.0 * (n_shapes + n_plans * n_buckets) + SEARCH_S[effort]


@pytest.mark.parametrize("n_plans", [1, 3])
@pytest.mark.parametrize("run_s", [0, 60, 2_000, 2_700, 3_000, 3_400, 4_000, 5_000, 1e6])
def test_auto_takes_the_last_measures_that_fit(run_s, n_plans):
    """By trying all in their order; the limit is 3% of the run, or a minute."""
    limit_s = max(60.0, 0.03 * run_s)
    rows = [(*m[:3], n_plans if m[3] else 1) for m in MEASURES]
    fitting = [row for row in rows if seconds(*row) <= limit_s]
    budget = start(run_s, n_plans=n_plans)
    assert measures(budget) == fitting[-1]
    assert budget.limit_s == limit_s
    assert sum(budget.seconds.values()) == seconds(*measures(budget)) <= limit_s
    assert list(budget.seconds) == ["profile", "plan", "compile"]


def test_the_first_plan_is_made_whatever_it_takes():
    budget = start(0.0, shape_s=1_000.0)
    assert measures(budget) == (1, "quick", 1, 1)
    assert budget.limit_s == MIN_START_S < sum(budget.seconds.values())


def test_given_effort_is_followed():
    for run_s in (0.0, 1e9):
        assert measures(start(run_s, effort="quick", n_plans=3)) == (1, "quick", 2, 3)
        assert measures(start(run_s, effort="full", n_plans=3)) == (3, "full", 2, 3)


def test_given_trials_are_kept():
    assert measures(start(0.0, n_plans=3, trials=8)) == (1, "quick", 1, 3)
    assert measures(start(0.0, n_plans=3)) == (1, "quick", 2, 1)


def test_lines_for_the_log():
    text = str(start(4_000))
    assert "start-up may take 2 min (the steps are expected to take 1 h 6 min)" in text
    assert "estimate profile 30 s, plan 1 min, compile 20 s" in text
    line = describe_start({"profile": 30.0, "compile": 60.0}, 210.0)
    assert line == "start-up: 1 min 30 s, 30.0% of the run (profile 30 s, compile 1 min)"
