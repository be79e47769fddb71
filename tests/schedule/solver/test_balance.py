"""`balance` against brute force, LPT, and its own claims (bounds, limits, determinism)."""

import itertools

import numpy as np
import pytest

from dflop_jax.schedule.bounds.bins import (
    company_bound,
    lattice_step,
    lower_bound,
    shared_bin_bound,
)
from dflop_jax.schedule.solver import milp
from dflop_jax.schedule.solver.balance import balance
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import Problem, make_problem


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


def brute_force(costs, n_bins, capacities, tokens, group=1, grouped=()):
    """Least makespan over all assignments (None: none fits), by plain depth-first recursion."""
    n, c = costs.shape
    cost_load = np.zeros((c, n_bins))
    token_load = np.zeros((tokens.shape[1], n_bins))
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
                key = (*cost_load[:, b], *token_load[:, b])
                if key in tried:
                    continue
                tried.add(key)
            if (token_load[:, b] + tokens[i] > capacities).any():
                continue
            cost_load[:, b] += costs[i]
            token_load[:, b] += tokens[i]
            place(i + 1)
            cost_load[:, b] -= costs[i]
            token_load[:, b] -= tokens[i]

    place(0)
    return None if best[0] == np.inf else best[0]


@pytest.mark.parametrize("seed", range(200))
def test_small_instances_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    n, n_bins, modules = rng.integers(0, 10), rng.integers(1, 5), rng.integers(1, 4)
    whole = bool(rng.integers(2))
    costs = (
        rng.integers(0, 12, (n, modules)).astype(float) if whole else heavy_tailed(rng, n, modules)
    )
    tokens, capacities = np.zeros((n, 0)), np.zeros(0)
    if seed % 2:
        k = rng.integers(1, 3)
        tokens = rng.integers(0, 10, (n, k)).astype(float)
        capacities = np.ceil(tokens.sum(axis=0) / n_bins * rng.uniform(1.0, 1.4))
    best = brute_force(costs, n_bins, capacities, tokens)
    limits = {"tokens": tokens, "capacities": capacities} if seed % 2 else {}
    got = balance(costs, int(n_bins), time_limit_s=5.0, **limits)
    if best is None:
        assert got.status == "infeasible"
        return
    assert got.status == "optimal"
    assert got.makespan == pytest.approx(best, rel=1e-7, abs=1e-12)
    assert set(got.bins) <= set(range(n_bins))
    for column, capacity in enumerate(capacities):
        assert max(loads_of(got.bins, tokens, n_bins, 1, ())[column]) <= capacity


@pytest.mark.parametrize("seed", range(30))
def test_grouped_columns_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    n, n_bins, group = int(rng.integers(1, 8)), 4, 2
    costs = heavy_tailed(rng, n)
    costs[:, 0] *= 0.5
    best = brute_force(costs, n_bins, np.zeros(0), np.zeros((n, 0)), group, (0,))
    got = balance(costs, n_bins, bin_group=group, grouped=(0,), time_limit_s=5.0)
    assert got.status == "optimal"
    assert got.makespan == pytest.approx(best, rel=1e-7)
    loads = loads_of(got.bins, costs, n_bins, group, (0,))
    assert max(map(max, loads)) == pytest.approx(got.makespan)


def test_grouped_capacity_is_per_group():
    tokens = np.array([[3.0], [3.0], [3.0], [3.0]])
    both = {"bin_group": 2, "tokens": tokens, "grouped_tokens": (0,)}
    fits = balance(np.ones(4), 4, capacities=[6.0], **both)
    assert fits.status == "optimal"
    assert max(loads_of(fits.bins, tokens, 4, 2, (0,))[0]) <= 6
    assert balance(np.ones(4), 4, capacities=[5.0], **both).status == "infeasible"


def test_edge_cases_are_defined():
    empty = balance([], 3)
    assert (empty.bins.shape, empty.makespan, empty.status) == ((0,), 0.0, "optimal")
    assert balance(np.zeros((0, 2)), 1).status == "optimal"
    zero = balance(np.zeros((5, 2)), 2)
    assert (zero.makespan, zero.status) == (0.0, "optimal")
    assert set(zero.bins) <= {0, 1}
    assert balance(np.zeros((3, 0)), 2).makespan == 0.0
    few = balance([3.0, 1.0], 5)
    assert (few.makespan, few.status, len(set(few.bins))) == (3.0, "optimal", 2)
    one = balance([1.0, 2.0, 3.0], 1)
    assert (one.makespan, one.lower_bound, one.status) == (6.0, 6.0, "optimal")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1.0, np.nan], 2), r"costs\[1, 0\] is nan"),
        (([[1.0, -2.0]], 2), r"costs\[0, 1\] is -2"),
        (([1.0, np.inf], 2), "finite"),
        (([1.0], 0), "n_bins=0"),
        ((np.ones((1, 1, 1)), 1), "shape"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": [1.0, 1.0]}, "come together"),
        ({"tokens": [1.0], "capacities": [1.0]}, "shape"),
        ({"tokens": [1.0, 1.0], "capacities": [-1.0]}, "capacities"),
        ({"bin_group": 2}, "divide"),
        ({"grouped": (1,)}, "grouped"),
    ],
)
def test_arguments_that_do_not_match(options, message):
    with pytest.raises(ValueError, match=message):
        balance([1.0, 2.0], 3, **options)


def test_infeasible_and_unplaced_samples():
    too_large = balance([1.0, 1.0], 2, tokens=[5.0, 1.0], capacities=[4.0])
    assert too_large.status == "infeasible"
    assert too_large.bins[0] == -1
    assert too_large.bins[1] >= 0


def test_pairs_that_cannot_share_are_proved_infeasible():
    crowded = balance(np.ones(21), 10, tokens=np.full(21, 3.0), capacities=[8.0])
    assert crowded.status == "infeasible"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n, n_bins, modules", [(40, 4, 1), (100, 16, 2), (200, 8, 3)])
def test_never_worse_than_lpt_nor_below_the_bound(seed, n, n_bins, modules):
    costs = heavy_tailed(np.random.default_rng(seed), n, modules)
    got = balance(costs, n_bins, time_limit_s=0.02, seed=seed)
    greedy = make_problem(costs, n_bins).makespan(lpt(make_problem(costs, n_bins)))
    assert got.lower_bound <= got.makespan * (1 + 1e-9)
    assert got.makespan <= greedy
    assert got.makespan == pytest.approx(max(map(max, loads_of(got.bins, costs, n_bins, 1, ()))))


def test_lpt_is_grahams():
    """Against the textbook rule with one module, in plain Python."""
    costs = np.random.default_rng(0).lognormal(0, 1, 50)
    loads = [0.0] * 7
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    problem = make_problem(costs, 7)
    assert problem.makespan(lpt(problem)) == pytest.approx(max(loads))


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


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_below_the_optimum_where_modules_conflict(seed):
    """Samples that load one module only, and whole-number costs: where the bound is not the mean"""
    rng = np.random.default_rng(seed)
    n, n_bins, modules = 8, int(rng.integers(1, 5)), int(rng.integers(1, 4))
    costs = rng.integers(0, 9, (n, modules)) * rng.integers(0, 2, (n, modules)) * 1.5
    best = brute_force(costs, n_bins, np.zeros(0), np.zeros((n, 0)))
    bound = lower_bound(make_problem(costs, n_bins))
    assert bound <= best * (1 + 1e-9)
    assert bound >= costs.sum(axis=0).max() / n_bins * (1 - 1e-9)


def test_company_bound_is_below_the_optimum_and_adds_to_the_others():
    """Samples that nearly fill a bin in one module, against brute force."""
    adds = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n_bins = int(rng.integers(2, 5))
        costs = np.minimum(rng.pareto(1.5, (8, 2)) + 0.05, 2.0)
        problem = make_problem(costs, n_bins)
        best = brute_force(costs, n_bins, np.zeros(0), np.zeros((8, 0)))
        plain = costs.sum(axis=0).max() / n_bins
        bound = max(company_bound(problem, v, 1 - v, plain) for v in (0, 1))
        assert plain <= bound <= best * (1 + 1e-9)
        adds += bound > max(plain, costs.max(), shared_bin_bound(problem.sizes_RN, problem))
    assert adds >= 3


def test_company_bound_by_hand():
    """Three bins and two samples of (10, 1): below T = 12 neither has room for a (2, 8), so each
    wastes T - 1 of l, and 26 + 2 (T - 1) exceeds 3 T. From 12 on it has."""
    costs = [[10.0, 1.0], [10.0, 1.0], *[[2.0, 8.0]] * 3]
    problem = make_problem(costs, 3)
    bound = company_bound(problem, 0, 1, 34 / 3)
    assert bound == pytest.approx(12.0, rel=1e-3)
    assert balance(costs, 3, time_limit_s=5.0).makespan == 12.0


@pytest.mark.parametrize("seed", range(20))
def test_grouped_bound_is_below_the_optimum(seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 9, (6, 2)) * rng.integers(0, 2, (6, 2)) * 1.0
    best = brute_force(costs, 4, np.zeros(0), np.zeros((6, 0)), 2, (0,))
    assert lower_bound(make_problem(costs, 4, bin_group=2, grouped=(0,))) <= best * (1 + 1e-9)


def test_lattice_step():
    assert lattice_step(np.array([4.0, 6.0, 0.0])) == pytest.approx(2.0)
    assert lattice_step(np.array([3, 7, 10]) * 0.0137) == pytest.approx(0.0137)
    assert lattice_step(np.random.default_rng(0).lognormal(0, 1, 20)) == 0.0
    assert lattice_step(np.zeros(3)) == 0.0


def test_same_seed_and_work_give_the_same_bins():
    costs = heavy_tailed(np.random.default_rng(3), 120)
    runs = [balance(costs, 40, seed=5, work=300, time_limit_s=60.0) for _ in range(2)]
    assert (runs[0].bins == runs[1].bins).all()


def test_more_work_is_never_worse():
    costs = np.random.default_rng(4).lognormal(0, 0.7, (150, 2))
    spans = [balance(costs, 30, work=r, time_limit_s=60.0).makespan for r in (0, 20, 200, 2000)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


def test_stop_at_ends_the_search():
    costs = heavy_tailed(np.random.default_rng(1), 100)
    greedy = balance(costs, 10, work=0)
    easy = balance(costs, 10, stop_at=greedy.makespan, time_limit_s=60.0)
    assert (easy.bins == greedy.bins).all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("group, grouped", [(1, ()), (2, (0,))])
def test_milp_improves_to_the_optimum_and_its_bound_holds(seed, group, grouped):
    """Started from a bad assignment of a small instance, over all bins: brute force is met."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 9, (7, 2)).astype(float)
    problem = make_problem(costs, 4, bin_group=group, grouped=grouped)
    state = State(problem, np.arange(7) % 2)
    best = brute_force(costs, 4, np.zeros(0), np.zeros((7, 0)), group, grouped)
    result = milp.resolve(state, np.arange(4), Budget(1e6))
    assert result.improved == (best < problem.makespan(np.arange(7) % 2))
    assert state.makespan == pytest.approx(best)
    assert best * (1 - 1e-3) <= result.lower_bound <= best * (1 + 1e-9)
    assert sorted(np.concatenate(state.members)) == list(range(7))
    assert np.allclose(state.loads_RB, problem.loads(state.bins))


def test_milp_keeps_limits():
    tokens = np.array([4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    costs = np.array([5.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    problem = make_problem(costs, 2, capacities=[6.0], tokens=tokens)
    state = State(problem, np.array([0, 1, 0, 0, 1, 1]))
    milp.resolve(state, np.arange(2), Budget(1e6))
    assert state.makespan == brute_force(costs[:, None], 2, np.array([6.0]), tokens[:, None])
    assert problem.fits(state.loads_RB)


@pytest.mark.parametrize("whole_tiles", [True, False])
def test_search_with_solvers_keeps_every_sample(whole_tiles):
    """The path taken when seconds remain; dives and proofs only where a module has whole costs."""
    costs = np.random.default_rng(1).pareto(1.8, (48, 2)) + 0.1
    if whole_tiles:
        costs[:, 0] = np.ceil(costs[:, 0])
    short = balance(costs, 12, work=0)
    got = balance(costs, 12, time_limit_s=0.8)
    assert short.lower_bound <= got.lower_bound <= got.makespan <= short.makespan
    assert got.makespan == pytest.approx(max(map(max, loads_of(got.bins, costs, 12, 1, ()))))


def test_tight_capacities_are_packed():
    """A perfect packing exists (each bin holds parts of a cut whole) though LPT on costs fails."""
    rng = np.random.default_rng(0)
    parts = [
        np.diff([0, *sorted(rng.choice(np.arange(1, 100), 5, replace=False)), 100])
        for _ in range(8)
    ]
    tokens = np.concatenate(parts).astype(float)
    costs = rng.lognormal(0, 1, len(tokens))
    got = balance(costs, 8, tokens=tokens, capacities=[104.0], work=20_000, time_limit_s=20.0)
    assert got.status in ("feasible", "optimal")
    assert np.bincount(got.bins, tokens, 8).max() <= 104


def test_permuting_samples_of_a_small_instance_changes_no_makespan():
    costs = heavy_tailed(np.random.default_rng(2), 6)
    spans = [
        balance(costs[list(p)], 3, time_limit_s=5.0).makespan
        for p in itertools.islice(itertools.permutations(range(6)), 0, 720, 144)
    ]
    assert np.allclose(spans, spans[0])
