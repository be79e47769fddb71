"""`balance` and its parts against brute force, LPT and plain loops."""

import numpy as np
import pytest

from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.local_search import balance, balance_problem
from dflop_jax.schedule.solver.problem import Problem


def heavy_tailed(rng, n, modules=2):
    return rng.lognormal(0, 1, (n, modules))


def loads_of(bins, sizes, n_bins, group, grouped):
    """Plain-loop loads: the oracle of what a bin (or group) carries."""
    out = []
    for column in range(sizes.shape[1]):
        width = group if column in grouped else 1
        load = [0.0] * (n_bins // width)
        for i, b in enumerate(bins):
            load[b // width] += sizes[i, column]
        out.append(load)
    return out


def brute_force(costs, n_bins, group=1, grouped=()):
    """Least makespan over all assignments, by plain depth-first recursion."""
    n, c = costs.shape
    cost_load = np.zeros((c, n_bins))
    best = [np.inf]

    def place(i):
        merged = cost_load.copy()
        for column in grouped:
            by_group = cost_load[column].reshape(-1, group).sum(axis=1)
            merged[column] = np.repeat(by_group, group)
        reached = merged.max(initial=0.0)
        if reached >= best[0]:
            return
        if i == n:
            best[0] = reached
            return
        tried = set()
        for b in range(n_bins):
            if group == 1:  # bins with equal content are the same choice
                key = tuple(cost_load[:, b])
                if key in tried:
                    continue
                tried.add(key)
            cost_load[:, b] += costs[i]
            place(i + 1)
            cost_load[:, b] -= costs[i]

    place(0)
    return best[0]


def makespan(bins, costs, n_bins, group=1, grouped=()):
    return max(map(max, loads_of(bins, costs, n_bins, group, grouped)))


@pytest.mark.parametrize("grouped", [(), (0,)])
def test_small_instances_are_close_to_brute_force(grouped):
    ratios = []
    for seed in range(30 if grouped else 100):
        rng = np.random.default_rng(seed)
        n, n_bins, modules = (int(x) for x in rng.integers((1, 1, 1), (10, 5, 4)))
        if grouped:
            n, n_bins, modules = min(n, 7), 4, 2
        more = (1 + bool(grouped), grouped)
        costs = heavy_tailed(rng, n, modules)
        costs[:, grouped] *= 0.5
        bins = balance(costs, n_bins, bin_group=more[0], grouped=grouped, work=200)
        assert set(bins) <= set(range(n_bins))
        ratios.append(makespan(bins, costs, n_bins, *more) / brute_force(costs, n_bins, *more))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) < 1.05
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.9


def test_edge_cases_are_defined():
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
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments, **options)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n, n_bins, modules", [(40, 4, 1), (100, 16, 2), (200, 8, 3)])
def test_never_worse_than_lpt_nor_below_the_mean(seed, n, n_bins, modules):
    costs = heavy_tailed(np.random.default_rng(seed), n, modules)
    got = makespan(balance(costs, n_bins, work=200, seed=seed), costs, n_bins)
    greedy = makespan(lpt(balance_problem(costs, n_bins)), costs, n_bins)
    assert max(costs.sum(axis=0).max() / n_bins, costs.max()) <= got * (1 + 1e-9)
    assert got <= greedy


@pytest.mark.parametrize("seed", range(40))
def test_lpt_looks_at_every_bin(seed):
    """Against the rule over all bins in plain Python: groups that share a load, bins of several
    sizes, what they carry already, limits, and some bins only."""
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
    np.testing.assert_array_equal(lpt(problem, order, np.full(n, -1), only), want)


def test_more_work_is_never_worse():
    costs = np.random.default_rng(4).lognormal(0, 0.7, (150, 2))
    spans = [makespan(balance(costs, 30, work=r), costs, 30) for r in (0, 20, 200, 2000)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]
