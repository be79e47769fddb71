"""Search against a goal: planted solutions are found, limits and samples are kept."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.schedule.solver.bounds import lower_bound
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.ejection import pursue
from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.local_search import State, descend
from dflop_jax.schedule.solver.problem import make_problem


def planted(rng, n_bins):
    """Whole costs [6 n_bins, 2] that some assignment cuts into bins of exactly (30, 30)."""

    def cut():
        return np.diff([0, *sorted(rng.integers(0, 31, 5)), 30])

    return np.concatenate([np.stack([cut(), cut()], axis=1) for _ in range(n_bins)])


def total_excess(state, goal):
    loads = state.problem.loads(state.bins)[: state.problem.n_costs]
    return np.maximum(0, loads - goal).sum()


def check_whole(state, n):
    assert sorted(np.concatenate(state.members).tolist()) == list(range(n))
    assert np.allclose(state.loads_RB, state.problem.loads(state.bins))


@pytest.mark.parametrize("seed", range(6))
def test_finds_a_planted_assignment_where_descent_is_stuck(seed):
    problem = make_problem(planted(np.random.default_rng(seed), 10), 10)
    state = State(problem, lpt(problem))
    descend(state, 30.0, Budget(10**6))
    assert state.makespan == 31
    pursue(state, 30.0, Budget(20_000), 100, np.random.default_rng(0))
    assert state.makespan == 30
    check_whole(state, problem.n)


def test_ejections_lower_what_repair_alone_leaves():
    rng = np.random.default_rng(0)
    costs = np.concatenate([rng.dirichlet(np.full(6, 2.0), 2).T for _ in range(10)])
    problem, left = make_problem(costs, 10), []
    for patience in (0, 300):
        state = State(problem, lpt(problem))
        pursue(state, 1.003, Budget(50_000), patience, np.random.default_rng(0))
        left.append(total_excess(state, 1.003))
        check_whole(state, problem.n)
    assert left[0] > 0
    assert left[1] < 0.5 * left[0]


@pytest.mark.parametrize("group, grouped", [(1, ()), (2, (0,)), (4, (0, 1))])
def test_excess_never_grows(group, grouped):
    costs = np.random.default_rng(1).lognormal(0, 1, (60, 2)) * [1 / group if grouped else 1, 1]
    problem = make_problem(costs, 8, bin_group=group, grouped=grouped)
    state = State(problem, np.arange(60) % 8)
    rng, goal = np.random.default_rng(0), 1.001 * lower_bound(problem)
    excess = [total_excess(state, goal)]
    for _ in range(10):
        pursue(state, goal, Budget(3000), 5, rng)
        excess.append(total_excess(state, goal))
        check_whole(state, 60)
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(excess))
    assert excess[-1] < 0.2 * excess[0]


def test_keeps_limits():
    rng = np.random.default_rng(0)
    costs, tokens = rng.lognormal(0, 1, (40, 1)), rng.integers(1, 9, (40, 2)).astype(float)
    limits = np.ceil(tokens.sum(axis=0) / 8 * 1.3)
    problem = make_problem(costs, 8, limits, tokens)
    state = State(problem, lpt(problem))
    assert (state.bins >= 0).all()
    before = state.makespan
    pursue(state, costs.sum() / 8, Budget(20_000), 50, rng)
    assert problem.fits(state.loads_RB)
    assert state.makespan < before
    check_whole(state, 40)


def test_same_seed_same_bins_and_rounds_are_kept_to():
    problem = make_problem(np.random.default_rng(2).lognormal(0, 1, (80, 2)), 12)
    goal = problem.sizes_RN.sum(axis=1).max() / 12
    found = []
    for _ in range(2):
        state = State(problem, np.arange(80) % 12)
        budget = Budget(2000)
        pursue(state, goal, budget, 10**9, np.random.default_rng(3))
        assert -24 <= budget.left <= 0  # bins are priced together
        found.append(state.bins)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("n, n_bins", [(0, 1), (3, 1), (1, 2), (2, 5)])
def test_few_samples_and_bins(n, n_bins):
    problem = make_problem(np.ones((n, 2)), n_bins)
    state = State(problem, np.zeros(n, int))
    pursue(state, 0.5, Budget(1000), 5, np.random.default_rng(0))
    check_whole(state, n)


def test_bins_of_unlike_room_and_what_they_carry():
    """Every bin is filled in proportion to its room, what was there before included."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, (60, 1)).astype(float)
    room = np.array([20.0, 40.0, 80.0, 160.0])
    base = np.array([[10.0, 0.0, 0.0, 30.0]])
    whole = make_problem(sizes, 4)
    problem = replace(whole, scale_RB=1 / room[None], base_RB=base)
    state = State(problem, np.zeros(60, int))
    goal = (sizes.sum() + base.sum()) / room.sum() + 0.02
    pursue(state, goal, Budget(20_000), 100, rng)
    check_whole(state, 60)
    assert state.makespan <= goal * (1 + 1e-9)
    assert np.allclose(state.loads_RB[0] - base[0], np.bincount(state.bins, sizes[:, 0], 4))
