"""An exchange between two bins against trying every one, and loads kept against loads summed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dflop_jax.schedule.solver.local_search import State, exchange
from dflop_jax.schedule.solver.problem import make_problem

LIMIT = 8.0


def best_of_all(problem, bins, a, b):
    """The least larger score of bins a and b over all ways to share what they hold; inf where no
    way keeps the limits of these two."""
    held, least = np.flatnonzero((bins == a) | (bins == b)), np.inf
    for ways in product((a, b), repeat=len(held)):
        tried = bins.copy()
        tried[held] = ways
        loads_RB = problem.loads(tried)
        if problem.fits(loads_RB[:, [a, b]]):
            least = min(least, problem.scores(loads_RB)[[a, b]].max())
    return least


@pytest.mark.parametrize("group, grouped", [(1, ()), (2, (0,)), (2, (0, 1))])
@pytest.mark.parametrize("kind", ["limits", "sizes", "carried"])
def test_exchange_is_the_best_of_all(group, grouped, kind):
    moved, rng = 0, np.random.default_rng(0)
    for _ in range(20):
        costs = rng.integers(1, 9, (9, 2)).astype(float)
        tokens = rng.integers(1, 5, 9).astype(float) if kind == "limits" else None
        limits = None if tokens is None else [LIMIT]
        problem = make_problem(costs, 4, limits, tokens, group, grouped)
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
    state = State(make_problem([3.0, 2.0], 2), np.array([0, 0]))
    assert exchange(state, 0, 1)
    assert sorted(state.score_B) == [2.0, 3.0]
    assert not exchange(state, 0, 1)
