"""Longest processing time first (Graham 1969), for several resources and hard limits."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints, Problem


def lpt(
    problem: Problem,
    order: Ints | None = None,
    start: Ints | None = None,
    only: Ints | None = None,
) -> Ints:
    """bins[N]: each sample, largest first, goes to the bin whose load it leaves least.

    The load is the largest over cost columns. A sample that fits no bin (limits) gets -1. With
    `start` only the samples in `order` are placed, the others stay; `only` names the bins to use.
    """
    sizes_RN, c = problem.sizes_RN, problem.n_costs
    if order is None:
        order = by_size(sizes_RN[:c])
    if start is None and only is None and _is_plain(problem):
        return _to_lightest(sizes_RN[0], order, problem.n_bins)
    bins = np.full(problem.n, -1) if start is None else start.copy()
    loads_RB = problem.loads(bins)
    closed_B = np.zeros(problem.n_bins)
    if only is not None:
        closed_B[:] = np.inf
        closed_B[only] = 0.0
    limits_R1 = (problem.limits_R * (1 + ROUNDING))[:, None]
    limited = len(sizes_RN) > c
    spread = any(problem.grouped_R) and problem.group > 1
    after_RB, score_B = np.empty_like(loads_RB), np.empty(problem.n_bins)
    cost_RB, scale_RB = np.empty((c, problem.n_bins)), problem.scale_RB
    sizes_NR1 = np.ascontiguousarray(sizes_RN.T)[:, :, None]
    for i in order.tolist():
        np.add(loads_RB, sizes_NR1[i], out=after_RB)
        if scale_RB is None:
            np.maximum.reduce(after_RB[:c], axis=0, out=score_B, initial=0.0)
        else:
            np.multiply(after_RB[:c], scale_RB, out=cost_RB)
            np.maximum.reduce(cost_RB, axis=0, out=score_B, initial=0.0)
        score_B += closed_B
        if limited:
            score_B[(after_RB[c:] > limits_R1[c:]).any(axis=0)] = np.inf
        j = int(score_B.argmin())
        if score_B[j] == np.inf:
            continue
        if spread:  # bins of one group tie on the load they share: take the least loaded of them
            tied = np.flatnonzero(score_B <= score_B[j] * (1 + ROUNDING))
            j = int(tied[after_RB[:, tied].sum(axis=0).argmin()])
        bins[i] = j
        first = j - j % problem.group
        for r, grouped in enumerate(problem.grouped_R):
            where = slice(first, first + problem.group) if grouped else slice(j, j + 1)
            loads_RB[r, where] = after_RB[r, j]
    return bins


def _is_plain(problem: Problem) -> bool:
    """Whether bins are alike and only one cost counts."""
    one = len(problem.sizes_RN) == problem.n_costs == 1
    return one and problem.alike and not (problem.grouped_R[0] and problem.group > 1)


def _to_lightest(size_N: Floats, order: Ints, n_bins: int) -> Ints:
    """The same for one cost and bins alike, of which the lightest is kept at the top of a heap."""
    bins = np.empty(len(size_N), np.int64)
    lightest = [(0.0, j) for j in range(n_bins)]
    sizes = size_N[order].tolist()
    for i, size in zip(order.tolist(), sizes):
        load, j = lightest[0]
        bins[i] = j
        heapreplace(lightest, (load + size, j))
    return bins


def by_size(sizes_RN: Floats) -> Ints:
    """Sample order: largest first by the largest column, then by the sum, then by index."""
    if len(sizes_RN) == 0:
        return np.arange(sizes_RN.shape[1])
    return np.lexsort((-sizes_RN.sum(axis=0), -sizes_RN.max(axis=0)))
