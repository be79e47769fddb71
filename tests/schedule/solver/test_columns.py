"""Configuration LP and dives against enumeration of all patterns and of all assignments."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from dflop_jax.schedule.solver.balance import balance
from dflop_jax.schedule.solver.bounds import lower_bound
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.columns import Master, applies, dive, excludes_below
from dflop_jax.schedule.solver.patterns import best_filling, kinds_of, random_fillings
from dflop_jax.schedule.solver.problem import make_problem


def all_patterns(kinds):
    """Every filling of a bin, by plain products of counts."""
    every = itertools.product(*(range(c + 1) for c in kinds.counts_K))
    patterns = np.array(list(every))
    return patterns[(patterns @ kinds.cells_RK.T <= kinds.room_R).all(axis=1)]


def tiles_and_tokens(rng, n):
    """Whole tiles, and tokens that follow them loosely."""
    tiles = rng.integers(0, 8, n) * (rng.random(n) < 0.7)
    return np.stack([tiles, tiles * 0.7 + rng.lognormal(0, 0.6, n)], axis=1)


def small_kinds(seed, *, down=True):
    rng = np.random.default_rng(seed)
    costs = tiles_and_tokens(rng, 9)
    problem = make_problem(costs, 3)
    return kinds_of(problem, 1.1 * costs.sum(axis=0).max() / 3 + 2, 50, down=down), rng


@pytest.mark.parametrize("seed", range(20))
def test_best_filling_is_the_best_of_all(seed):
    kinds, rng = small_kinds(seed)
    worth = rng.random(len(kinds.counts_K)) * (rng.random(len(kinds.counts_K)) < 0.8)
    left = rng.integers(0, kinds.counts_K + 1)
    patterns = all_patterns(kinds)
    allowed = patterns[(patterns <= left).all(axis=1)]
    value, counts = best_filling(kinds, left, worth, Budget(1e9))
    assert value == pytest.approx((allowed @ worth).max())
    assert worth @ counts == pytest.approx(value)
    assert (counts <= left).all()
    assert (kinds.cells_RK @ counts <= kinds.room_R).all()


@pytest.mark.parametrize("seed", range(5))
def test_random_fillings_fit(seed):
    kinds, rng = small_kinds(seed)
    left = rng.integers(0, kinds.counts_K + 1)
    worth = rng.random(len(left))
    found = random_fillings(kinds, left, worth, 16, rng)
    assert (found <= left).all()
    assert (found @ kinds.cells_RK.T <= kinds.room_R).all()
    most, _ = best_filling(kinds, left, worth, Budget(1e9))
    assert 0.8 * most <= (found @ worth).max() <= most + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_column_generation_reaches_the_lp_over_all_patterns(seed):
    kinds, rng = small_kinds(seed)
    patterns = all_patterns(kinds)
    every = linprog(np.ones(len(patterns)), A_ub=-patterns.T, b_ub=-kinds.counts_K)
    cover = Master(kinds).cover(kinds.counts_K, every.fun * (1 - 1e-4), Budget(1e9), rng)
    assert every.fun * (1 - 1e-4) < cover.least_bins <= every.fun * (1 + 1e-7)
    assert every.fun * (1 - 1e-7) <= cover.bins
    enough = Master(kinds).cover(kinds.counts_K, every.fun * (1 + 1e-4), Budget(1e9), rng)
    assert enough.bins <= every.fun * (1 + 2e-4)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_below_the_makespan_fits_in_cells_rounded_down(seed):
    rng = np.random.default_rng(seed)
    costs, tokens = tiles_and_tokens(rng, 12), rng.integers(1, 6, 12)
    problem = make_problem(costs, 3, [tokens.sum()], tokens)
    bins = rng.integers(0, 3, 12)
    kinds = kinds_of(problem, problem.makespan(bins) * (1 + 1e-7), 70, down=True)
    held = np.zeros((3, len(kinds.counts_K)), int)
    sized = kinds.kind_N >= 0
    np.add.at(held, (bins[sized], kinds.kind_N[sized]), 1)
    assert (held @ kinds.cells_RK.T <= kinds.room_R).all()
    assert (held.sum(axis=0) == kinds.counts_K).all()


def test_exclusion_by_hand():
    """Three bins for three fives and five threes: 10 on average, but a bin of 10 holds (5, 5),
    (5, 3) or (3, 3, 3): at 1/2 a five and 1/3 a three that is at most 1, and all are worth 19/6."""
    problem = make_problem([5.0] * 3 + [3.0] * 5, 3)
    rng = np.random.default_rng(0)
    assert lower_bound(problem) == 10
    assert excludes_below(problem, 11.0, 500, Budget(1e9), rng)
    assert not excludes_below(problem, 11.5, 500, Budget(1e9), rng)


def test_exclusion_is_right_and_beats_the_other_bounds():
    """Against the optimum of small instances, proved by enumeration."""
    proofs = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        costs, n_bins = rng.choice([0.0, 4.0, 5.0, 7.0], (10, 2)), int(rng.integers(3, 5))
        problem = make_problem(costs, n_bins)
        best = balance(costs, n_bins, time_limit_s=10.0)
        assert best.status == "optimal"
        assert applies(problem)
        assert not excludes_below(problem, best.makespan * 1.001, 500, Budget(1e9), rng)
        if lower_bound(problem) < best.makespan * (1 - 1e-6):
            proofs += excludes_below(problem, best.makespan, 500, Budget(1e9), rng)
    assert proofs >= 10


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limited", [False, True])
def test_dive_places_every_sample_near_the_goal(seed, limited):
    rng = np.random.default_rng(seed)
    costs = tiles_and_tokens(rng, 80)
    tokens = rng.integers(1, 6, 80)
    limits = {"tokens": tokens, "capacities": [np.ceil(1.2 * tokens.sum() / 10)]}
    problem = make_problem(costs, 10, **(limits if limited else {}))
    goal = 1.03 * costs.sum(axis=0).max() / 10
    bins = dive(problem, goal, Budget(1e9), rng)
    assert bins is not None
    assert set(bins) <= set(range(10))
    assert problem.fits(problem.loads(bins))
    assert problem.makespan(bins) <= 1.25 * goal


def test_out_of_reach_out_of_time_and_unsuitable():
    rng = np.random.default_rng(0)
    costs = tiles_and_tokens(rng, 40)
    problem = make_problem(costs, 5)
    average = costs.sum(axis=0).max() / 5
    assert dive(problem, 0.9 * average, Budget(1e9), rng) is None
    assert dive(problem, 1.1 * average, Budget(0), rng) is None
    assert not excludes_below(problem, average, 500, Budget(0), rng)
    assert excludes_below(problem, 0.9 * average, 500, Budget(1e9), rng)
    assert not applies(make_problem(rng.lognormal(0, 1, (40, 2)), 5))
    assert not applies(make_problem(costs, 4, bin_group=2, grouped=(0,)))
    assert not applies(make_problem(np.zeros((0, 2)), 3))
