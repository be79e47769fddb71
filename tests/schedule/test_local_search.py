"""`balance` and its parts against brute force and plain loops; an exchange against every one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dflop_jax.schedule.balance_problem import Problem, longest_first
from dflop_jax.schedule.local_search import State, balance, exchange

LIMIT = 8.0


def makespan(bins, costs, n_bins, group=1, grouped=()):
    """The largest load of a bin, or of a group, by plain loops."""
    largest = 0.0
    for column in range(costs.shape[1]):
        width = group if column in grouped else 1
        load = [0.0] * (n_bins // width)
        for i, b in enumerate(bins):
            load[b // width] += costs[i, column]
        largest = max(largest, *load)
    return largest


def brute_force(costs, n_bins, *more):
    """Least makespan over all assignments; the first sample's bin is the same by symmetry."""
    n = len(costs)
    every = product(range(n_bins), repeat=n - 1)
    return min(makespan((0, *bins), costs, n_bins, *more) for bins in every)


@pytest.mark.parametrize("grouped", [(), (0,)])
def test_balance_is_close_to_brute_force(grouped):
    ratios = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n, n_bins, modules = (int(x) for x in rng.integers((1, 1, 1), (7, 5, 4)))
        if grouped:
            n_bins, modules = 4, 2
        more = (1 + bool(grouped), grouped)
        costs = rng.lognormal(0, 1, (n, modules))
        costs[:, grouped] *= 0.5
        bins = balance(costs, n_bins, bin_group=more[0], grouped=grouped, work=200)
        assert set(bins) <= set(range(n_bins))
        ratios.append(makespan(bins, costs, n_bins, *more) / brute_force(costs, n_bins, *more))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) < 1.05
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.9


def test_balance_of_empty_and_single_inputs():
    assert balance([], 3).shape == balance(np.zeros((0, 2)), 1).shape == (0,)
    assert set(balance(np.zeros((5, 2)), 2)) <= {0, 1}
    assert set(balance(np.zeros((3, 0)), 2)) <= {0, 1}
    assert len(set(balance([3.0, 1.0], 5))) == 2
    assert balance([1.0, 2.0, 3.0], 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("arguments, options, message", [
    (([1.0, np.nan], 2), {}, r"costs\[1, 0\] is nan"),
    (([[1.0, -2.0]], 2), {}, r"costs\[0, 1\] is -2"),
    (([1.0, np.inf], 2), {}, "finite"),
    (([1.0], 0), {}, "n_bins=0"),
    ((np.ones((1, 1, 1)), 1), {}, "shape"),
    (([1.0, 2.0], 3), {"bin_group": 2}, "divide"),
    (([1.0, 2.0], 3), {"grouped": (1,)}, "grouped"),
])  # fmt: skip
def test_balance_names_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments, **options)


@pytest.mark.parametrize("seed", range(40))
def test_longest_first_equals_a_plain_loop_over_bins(seed):
    """With groups that share a load, bins of several sizes, what they carry already, limits, and
    some bins only."""
    rng = np.random.default_rng(seed)
    group, n_groups, n_costs, n = (int(x) for x in rng.integers((1, 1, 1, 0), (5, 5, 4, 30)))
    n_bins, limited = group * n_groups, bool(rng.integers(2))
    grouped = tuple(bool(r) for r in rng.integers(0, 2, n_costs + limited))

    def by_bin(values, r):
        return values[::group].repeat(group) if grouped[r] else values

    sizes = rng.integers(0, 6, (n_costs + limited, n)).astype(float)
    scale = np.array([by_bin(rng.choice([0.1, 0.2], n_bins), r) for r in range(n_costs)])
    base = [by_bin(rng.integers(0, 9, n_bins), r) for r in range(n_costs + limited)]
    limits = np.array([np.inf] * n_costs + [20.0] * limited)
    given = (limits, n_bins, group, grouped, scale, np.array(base, float))
    problem = Problem(sizes, n_costs, *given)
    only = rng.permutation(n_bins)[: int(rng.integers(1, n_bins + 1))]
    order = rng.permutation(n)

    want, loads = np.full(n, -1), np.array(base, float)
    for i in order:
        best = None
        for j in sorted(only.tolist()):
            after = loads[:, j] + sizes[:, i]
            score = (after[:n_costs] * scale[:, j]).max()
            if (after[n_costs:] > limits[n_costs:]).any():
                continue
            tie = after.sum() if any(grouped) and group > 1 else 0.0
            if best is None or (round(score, 6), tie) < best[0]:
                best = (round(score, 6), tie), j
        if best:
            want[i] = best[1]
            first = best[1] - best[1] % group
            for r, shared in enumerate(grouped):
                where = slice(first, first + group) if shared else best[1]
                loads[r, where] += sizes[r, i]
    np.testing.assert_array_equal(longest_first(problem, order, np.full(n, -1), only), want)


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


def problem_of(costs, n_bins, group=1, grouped=()):
    c = costs.shape[1]
    limits = np.full(c, np.inf)
    return Problem(costs.T.copy(), c, limits, n_bins, group, tuple(r in grouped for r in range(c)))


@pytest.mark.parametrize("group, grouped", [(1, ()), (2, (0,)), (2, (0, 1))])
@pytest.mark.parametrize("kind", ["limits", "sizes", "carried"])
def test_exchange_is_the_best_of_all_exchanges(group, grouped, kind):
    moved, rng = 0, np.random.default_rng(0)
    for _ in range(20):
        costs = rng.integers(1, 9, (9, 2)).astype(float)
        problem = problem_of(costs, 4, group, grouped)
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
