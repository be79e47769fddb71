"""An exchange between two bins against trying every one, and loads kept against loads summed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dflop_jax.schedule.solver.local_search import State, balance_problem, exchange

LIMIT = 8.0


def best_of_all(problem, bins, a, b):
    """The least larger score of bins a and b over all ways to share what they hold; inf where no
    way keeps the limits of these two."""
    held, least = np.flatnonzero((bins == a) | (bins == b)), np.inf
    for ways in product((a, b), repeat=len(held)):
        tried = bins.copy()
        tried[held] = ways
        loads_RB = problem.loads(tried)
        if (loads_RB[problem.n_costs :, [a, b]] <= LIMIT).all():
            least = min(least, problem.scores(loads_RB)[[a, b]].max())
    return least


@pytest.mark.parametrize("group, grouped", [(1, ()), (2, (0,)), (2, (0, 1))])
@pytest.mark.parametrize("kind", ["limits", "sizes", "carried"])
def test_exchange_is_the_best_of_all(group, grouped, kind):
    moved, rng = 0, np.random.default_rng(0)
    for _ in range(20):
        costs = rng.integers(1, 9, (9, 2)).astype(float)
        problem = balance_problem(costs, 4, group, grouped)
        if kind == "limits":
            tokens = rng.integers(1, 5, 9).astype(float)
            problem = replace(
                problem,
                sizes_RN=np.vstack((problem.sizes_RN, tokens)),
                limits_R=np.append(problem.limits_R, LIMIT),
                grouped_R=(*problem.grouped_R, False),
            )
        if kind == "sizes":
            problem = replace(problem, scale_RB=rng.uniform(0.5, 2.0, (2, 4)))
        if kind == "carried":
            base_RB = np.repeat(rng.integers(0, 9, (2, 4 // group)), group, axis=1)
            problem = replace(problem, base_RB=base_RB.astype(float))
        bins = rng.integers(0, 4, 9)
        state = State(problem, bins)
        a = int(state.score_B.argmax())
        b = int(rng.choice([j for j in range(4) if j != a]))
        before, best = state.score_B[[a, b]].max(), best_of_all(problem, bins, a, b)
        did = exchange(state, a, b)
        moved += did
        assert did == (best < before * (1 - 1e-9))
        assert state.score_B[[a, b]].max() == pytest.approx(min(best, before))
        assert np.allclose(state.loads_RB, problem.loads(state.bins))
        assert sorted(np.concatenate(state.members)) == list(range(9))
    assert moved > 3


def test_an_empty_bin_takes_what_relieves_the_other():
    state = State(balance_problem([3.0, 2.0], 2), np.array([0, 0]))
    assert exchange(state, 0, 1)
    assert sorted(state.score_B) == [2.0, 3.0]
    assert not exchange(state, 0, 1)
