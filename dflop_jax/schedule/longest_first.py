"""Longest processing time first (Graham 1969), for several resources and hard limits."""

from __future__ import annotations

import math
from heapq import heapreplace

import numpy as np

from dflop_jax.schedule.balance_problem import ROUNDING, Floats, Ints, Problem


def longest_first(
    problem: Problem,
    order: Ints | None = None,
    start: Ints | None = None,
    open_bins: Ints | None = None,
) -> Ints:
    """[N]: the bin of each sample. Samples go largest first, each to the bin whose load it leaves
    lowest.

    The load of a bin is the maximum over cost columns. A sample that exceeds the limits of every
    bin gets -1. With `start`, only the samples in `order` are assigned; the others keep their bins.
    `open_bins` restricts the bins that are used.
    """
    sizes_RN, c = problem.sizes_RN, problem.n_costs
    if order is None:
        order = by_size(sizes_RN[:c])
    bins = np.full(problem.n_samples, -1) if start is None else start.copy()
    of_a_bin = [r for r, grouped in enumerate(problem.grouped_R) if not grouped]
    # The one resource that bins of a group do not share, if it is one.
    loads_RB, own_resource = problem.loads(bins), of_a_bin[0] if len(of_a_bin) == 1 else None
    open_B = np.arange(problem.n_bins) if open_bins is None else np.sort(open_bins)
    first_K = _first_of_equal_bins(problem, open_B) if own_resource is not None else open_B
    group_K = first_K // problem.group
    lo_K = np.searchsorted(group_K, group_K).tolist()
    hi_K = np.searchsorted(group_K, group_K, "right").tolist()
    load_RK = loads_RB[:, first_K]
    heaps: list[list[tuple[float, int]]] = []
    if own_resource is not None:
        each = np.split(open_B, np.searchsorted(open_B, first_K[1:]))
        heaps = [sorted(zip(loads_RB[own_resource, j].tolist(), j.tolist())) for j in each]
        load_RK[own_resource] = [heap[0][0] for heap in heaps]
    scale_CK = 1.0 if problem.scale_RB is None else problem.scale_RB[:, first_K]
    limits_R1 = (problem.limits_R * (1 + ROUNDING))[:, None]
    limited = len(sizes_RN) > c
    has_ties = any(problem.grouped_R) and problem.group > 1
    shared = [r for r, grouped in enumerate(problem.grouped_R) if grouped]
    after_RK, cost_CK = np.empty_like(load_RK), np.zeros((max(1, c), len(first_K)))
    score_K, *other_costs = cost_CK  # the largest is made in the first
    after_CK, written_CK = after_RK[:c], cost_CK[:c]
    sizes_NR1 = np.ascontiguousarray(sizes_RN.T)[:, :, None]
    for i in order.tolist():
        np.add(load_RK, sizes_NR1[i], out=after_RK)
        np.multiply(after_CK, scale_CK, out=written_CK)
        for cost_K in other_costs:
            np.maximum(score_K, cost_K, out=score_K)
        if limited:
            score_K[(after_RK[c:] > limits_R1[c:]).any(axis=0)] = np.inf
        k = int(score_K.argmin())
        min_score = float(score_K[k])
        if min_score == math.inf:
            continue
        if has_ties:  # bins of one group tie on the load they share: take the least loaded of them
            (tied,) = (score_K <= min_score * (1 + ROUNDING)).nonzero()
            if len(tied) > 1:
                k = int(tied[after_RK[:, tied].sum(axis=0).argmin()])
        load_RK[:, k] = after_RK[:, k]
        if hi_K[k] - lo_K[k] > 1:
            load_RK[shared, lo_K[k] : hi_K[k]] = after_RK[shared, k : k + 1]
        if own_resource is None:
            bins[i] = first_K[k]
        else:
            bins[i] = j = heaps[k][0][1]
            heapreplace(heaps[k], (float(after_RK[own_resource, k]), j))
            load_RK[own_resource, k] = heaps[k][0][0]
    return bins


def _first_of_equal_bins(problem: Problem, open_B: Ints) -> Ints:
    """The first bin of each run of open bins of one group and size. They differ only in the one
    load that is their own, so the least loaded of them is the best."""
    differs_from_previous = np.diff(open_B // problem.group) > 0
    if problem.scale_RB is not None:
        differs_from_previous |= (np.diff(problem.scale_RB[:, open_B], axis=1) != 0).any(axis=0)
    return open_B[np.append(True, differs_from_previous)]


def by_size(sizes_RN: Floats) -> Ints:
    """Sample order: largest first by the largest column, then by the sum, then by index."""
    if len(sizes_RN) == 0:
        return np.arange(sizes_RN.shape[1])
    return np.lexsort((-sizes_RN.sum(axis=0), -sizes_RN.max(axis=0)))
