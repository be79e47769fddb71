"""Lower bounds on the makespan, so that a small gap is known to be small and a zero gap is proved.

The LP relaxation of the assignment adds nothing to the averages (x = 1/B is feasible in it and
costs exactly the largest average), so no LP is solved here: what is tighter comes from
integrality.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints, Problem

# Steps of a lattice to the largest cost; a finer one rounds bounds by less than a millionth of it.
_FINEST_LATTICE = 1_000_000
# Large samples whose company is looked at, of a batch; twice as many cost twice the time, and raise
# bounds where more bins than these have one.
_MAX_LARGE = 128
# Bisections of [known, 1.5 known]; one more halves the 3e-5 of the bound that are given away.
_COMPANY_BISECTIONS = 14


def lower_bound(problem: Problem) -> float:
    """Largest of: averages, largest sample, what must share a bin; on the lattice of the costs."""
    c = problem.n_costs
    if c == 0 or problem.n == 0:
        return 0.0
    best = shared_bin_bound(problem.sizes_RN[:c], problem)
    for cost_N, grouped in zip(problem.sizes_RN[:c], problem.grouped_R):
        bins = problem.n_groups if grouped else problem.n_bins
        bound = max(cost_N.sum() / bins, crowding_bound(cost_N, bins))
        best = max(best, _round_up(bound, lattice_step(cost_N)))
    for v, l in permutations(range(c), 2):
        best = trade_off_bound(problem, v, l, best)
        best = company_bound(problem, v, l, best)
    return float(best)


def trade_off_bound(problem: Problem, v: int, l: int, known: float) -> float:
    """A bound >= known: large samples that load only `l` leave room in `v` that nothing can use.

    Take any ratio p >= 1 and lower v to v' = min(v, p l), which can only lower the makespan T. A
    bin's excess e = p l - v' >= 0 adds up over its samples. As l <= T and v <= F (T rounded down
    to v's lattice), the bin holds v' <= min(F, p T - e), i.e. it wastes max(0, e - (p T - F)) of
    F. That is superadditive in e, so B F >= sum v' + sum_i max(0, e_i - (p T - F)). Bisection
    finds a T that breaks this, for ratios p drawn from the samples' own.
    """
    v_N, l_N = problem.sizes_RN[v], problem.sizes_RN[l]
    bins, step = problem.n_bins, lattice_step(v_N)
    if problem.grouped_R[v] or problem.grouped_R[l]:  # at group level an own load is <= group * T
        bins = problem.n_groups
        v_N = v_N if problem.grouped_R[v] else v_N / problem.group
        l_N = l_N if problem.grouped_R[l] else l_N / problem.group
        step = step if problem.grouped_R[v] else 0.0
    used = l_N > 0
    if not used.any() or known <= 0:
        return known
    ratios = np.quantile(v_N[used] / l_N[used], np.linspace(0.05, 1.0, 20))
    best = known
    for ratio in np.unique(ratios[ratios > 1.0]):
        lowered_N = np.minimum(v_N, ratio * l_N)
        excess_N, volume = ratio * l_N - lowered_N, lowered_N.sum()

        def breaks(
            t: float, e_N: Floats = excess_N, volume: float = volume, p: float = ratio
        ) -> bool:
            floor = np.floor(t / step + 1e-6) * step if step > 0 else t
            wasted = np.maximum(0.0, e_N - (p * t - floor)).sum()
            return bool(volume + wasted > bins * floor * (1 + ROUNDING))

        low, high = best, 2 * best
        if not breaks(low):
            continue
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if breaks(middle) else (low, middle)
        best = low
    return best


def company_bound(problem: Problem, v: int, l: int, known: float) -> float:
    """A bound >= known: a sample that nearly fills its bin in `v` keeps little company there, and
    what that brings of `l` may not fill the bin.

    No two samples with v > T / 2 share a bin. Beside such a sample i fit at most r = T - v_i of
    samples none larger than r, which bring at most a fractional knapsack's worth of `l`; if that
    and l_i stay below T, the bin wastes the rest: B T >= sum l + the waste. Several such samples
    compete for the same company, so the knapsack of their rooms together is looked at too.
    Bisection for T.
    """
    if problem.grouped_R[v] or problem.grouped_R[l] or known <= 0:
        return known
    v_N, l_N = problem.sizes_RN[v], problem.sizes_RN[l]
    useful = np.flatnonzero(l_N > 0)  # the others bring nothing
    ranked = useful[np.argsort(v_N[useful] / l_N[useful], kind="stable")]
    largest = np.argsort(-v_N, kind="stable")[: min(problem.n_bins, _MAX_LARGE)]

    def brought(room: float, each: float, apart: Ints) -> float:
        """Most `l` of samples not `apart`, none above `each`, that a volume `room` of v holds."""
        company = ranked[(v_N[ranked] <= each) & ~np.isin(ranked, apart)]
        volume = np.cumsum(v_N[company])
        whole = int(np.searchsorted(volume, room, side="right"))
        total = float(l_N[company[:whole]].sum())
        if whole < len(company):
            rest = room - (volume[whole - 1] if whole else 0.0)
            total += float(rest * l_N[company[whole]] / v_N[company[whole]])
        return total

    def breaks(t: float) -> bool:
        large = largest[(v_N[largest] > t / 2) & (l_N[largest] < t)]
        room = t - v_N[large]
        alone = [
            t - l_N[i] - brought(r, r, large[k : k + 1])
            for k, (i, r) in enumerate(zip(large, room))
        ]
        wasteful = np.array(alone) > 0 if alone else np.zeros(0, bool)
        wasted = float(np.sum(np.array(alone)[wasteful])) if alone else 0.0
        large, room = large[wasteful], room[wasteful]
        for k in range(1, len(large) + 1):
            left_by_large = k * t - l_N[large[:k]].sum()
            wasted = max(wasted, left_by_large - brought(room[:k].sum(), room[k - 1], large))
        return bool(l_N.sum() + wasted > problem.n_bins * t * (1 + ROUNDING))

    if not breaks(known):
        return known
    low, high = known, 1.5 * known
    for _ in range(_COMPANY_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if breaks(middle) else (low, middle)
    return low


def crowding_bound(cost_N: Floats, bins: int) -> float:
    """Of the k * bins + 1 largest samples some k + 1 share a bin: at least their k + 1 smallest."""
    large_N = np.sort(cost_N)[::-1]
    total_N = np.concatenate([[0.0], np.cumsum(large_N)])
    k = np.arange((len(large_N) - 1) // bins + 1) if len(large_N) else np.arange(0)
    last = k * bins + 1  # samples considered
    return float((total_N[last] - total_N[last - k - 1]).max(initial=0.0))


def shared_bin_bound(costs_RN: Floats, problem: Problem) -> float:
    """Two of the B + 1 largest samples share a bin: the cheapest such pair, over all columns.

    Stronger than the crowding of one column when large samples differ in which module they load.
    """
    largest_N = costs_RN.max(axis=0)
    bins = problem.n_bins
    if len(largest_N) <= bins:
        return float(largest_N.max())
    top = np.argsort(-largest_N, kind="stable")[: bins + 1]
    if len(costs_RN) == 1:  # the two smallest of them
        return float(max(largest_N[top[-2:]].sum(), largest_N.max()))
    pair = np.add.outer(costs_RN[0, top], costs_RN[0, top])
    for cost_N in costs_RN[1:]:
        np.maximum(pair, np.add.outer(cost_N[top], cost_N[top]), out=pair)
    np.fill_diagonal(pair, np.inf)
    return float(max(pair.min(), largest_N.max()))


def lattice_step(cost_N: Floats) -> float:
    """The largest q of which every cost is a multiple (1 for whole numbers); 0 if there is none.

    Costs of equal pieces are a whole number of them times a price, so loads come in steps.
    """
    values = np.unique(cost_N[cost_N > 0])
    if len(values) == 0:
        return 0.0
    tolerance = values[-1] * 1e-10
    step = 0.0
    for value in values:  # Euclid on floats
        a, b = float(value), step
        while b > tolerance:
            a, b = b, a % b
            if a - b < tolerance:
                b = 0.0
        step = a
        if step * _FINEST_LATTICE < values[-1]:
            return 0.0
    whole = np.round(values / step)
    exact = np.abs(values - whole * step).max() <= ROUNDING * values[-1]
    return step if exact else 0.0


def _round_up(bound: float, step: float) -> float:
    """The least multiple of `step` that is not below `bound`."""
    return float(np.ceil(bound / step - 1e-6) * step) if step > 0 else bound


def cannot_fit(problem: Problem) -> bool:
    """Whether the limits alone show that no assignment exists."""
    for r in range(problem.n_costs, len(problem.sizes_RN)):
        size_N, limit = problem.sizes_RN[r], problem.limits_R[r] * (1 + ROUNDING)
        bins = problem.n_groups if problem.grouped_R[r] else problem.n_bins
        need = max(size_N.sum() / bins, crowding_bound(size_N, bins)) if len(size_N) else 0.0
        if _round_up(need, lattice_step(size_N)) > limit:
            return True
    return False
