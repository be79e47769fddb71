"""Which candidates are looked at closely after a glance at all."""

from types import SimpleNamespace

import pytest

from dflop_jax.plan import finalists

ORCH, DFLOP, DIP = "orch", "dflop", "dip"


def looked_at(glances, n):
    """Indices of the candidates (policy, seconds at a glance) that are evaluated, in order; each is
    finished."""
    plans = [SimpleNamespace(policy=p, seconds=s, at=i) for i, (p, s) in enumerate(glances)]
    candidate = SimpleNamespace(bound_s=0.0)
    evaluator = SimpleNamespace(
        glance_s=lambda plan: plan.seconds,
        evaluate=lambda plan, bound_s: plan,
        judged_s=lambda plan: plan.seconds,
    )

    def finish(plan):
        return SimpleNamespace(**vars(plan), finished=True)

    tried = [finalists._Refined(p, candidate, 1) for p in plans]
    judged = finalists._judged(evaluator, tried, n, finish)
    assert all(j.plan.finished and j.of is tried[j.plan.at] for j in judged)
    return [j.plan.at for j in judged]


@pytest.mark.parametrize(
    "glances, n, expected",
    [
        ([], 3, []),
        ([(ORCH, 1.0)], 0, [0]),  # the fastest always
        ([(ORCH, 2.0), (ORCH, 1.0), (ORCH, 3.0)], 2, [1, 0]),  # as many as asked for, in order
        ([(ORCH, 1.0), (ORCH, 1.04), (ORCH, 1.06)], 1, [0, 1]),  # and all that are close
        ([(ORCH, 1.0), (DIP, 1.14), (DIP, 1.145)], 1, [0, 1]),  # another policy's first
        ([(ORCH, 1.0), (DIP, 1.16)], 1, [0]),  # unless it is far behind
        ([(ORCH, 1.0), (DIP, 1.1), (DIP, 1.12), (ORCH, 1.2), (ORCH, 1.3)], 2, [0, 1, 3]),
        ([(ORCH, 1.0), (DIP, 1.2)], 2, [0]),  # which takes no place of the fastest's policy
        ([(ORCH, 1.0), (DFLOP, 1.1), (DIP, 1.12), (ORCH, 1.1)], 1, [0, 1, 2]),
    ],
)  # fmt: skip
def test_the_first_the_close_and_the_first_of_other_policies(glances, n, expected):
    assert looked_at(glances, n) == expected


@pytest.mark.parametrize(
    "policies, n, expected",
    [
        ([ORCH], 0, []),
        ([ORCH, DIP, ORCH, DFLOP], 1, [0]),
        ([ORCH, DIP, ORCH, DFLOP, ORCH, ORCH], 3, [0, 1, 2, 4]),
        ([ORCH, ORCH, DIP], 3, [0, 1, 2]),
    ],
)
def test_another_policy_takes_no_place_of_the_first(policies, n, expected):
    plans = [SimpleNamespace(policy=p, at=i) for i, p in enumerate(policies)]
    assert [p.at for p in finalists.to_time(plans, n)] == expected
