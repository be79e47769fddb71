"""The balancing problem in array form, LPT scheduling (longest processing time first, Graham 1969)
for several resources with hard limits, and the work budget of searches.

Shape suffixes: N samples, B bins, R resources (cost columns first, then capacity columns), K runs
of equal bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-9  # relative difference between sums of the same floats in another order
# Items that a plain loop places per unit of work: 8,192 samples into 1,000 bins take 45 ms.
ITEMS_PER_WORK = 16


@dataclass(frozen=True)
class Problem:
    """Put N samples into B bins so that the largest cost load of a bin is minimal.

    The first `n_costs` rows of `sizes_RN` are costs, which are minimised; the other rows have hard
    limits `limits_R` (inf for costs). A resource in `grouped_R` is summed over each `group`
    consecutive bins. If bins differ in size, `scale_RB` multiplies a bin's cost loads (1 / its
    capacity). `base_RB` is the initial load of each bin; for grouped resources, of its group.
    """

    sizes_RN: Floats
    n_costs: int
    limits_R: Floats
    n_bins: int
    group: int
    grouped_R: tuple[bool, ...]
    scale_RB: Floats | None = None
    base_RB: Floats | None = None

    @property
    def n_samples(self) -> int:
        return self.sizes_RN.shape[1]

    def loads(self, bins: Ints) -> Floats:
        """Return the loads [R, B] of an assignment (bin -1: unassigned). For a grouped resource,
        each bin has the sum over its group."""
        out_RB = np.zeros((len(self.sizes_RN), self.n_bins))
        is_assigned = bins >= 0
        for r, grouped in enumerate(self.grouped_R):
            width = self.group if grouped else 1
            weights = self.sizes_RN[r, is_assigned]
            sums = np.bincount(bins[is_assigned] // width, weights, self.n_bins // width)
            out_RB[r] = sums.repeat(width)
        return out_RB if self.base_RB is None else out_RB + self.base_RB

    def scores(self, loads_RB: Floats, bins: slice = slice(None)) -> Floats:
        """Return the largest scaled cost load of each bin in `bins`, the columns of `loads_RB`."""
        costs_RB = loads_RB[: self.n_costs]
        costs_RB = costs_RB if self.scale_RB is None else costs_RB * self.scale_RB[:, bins]
        return costs_RB.max(axis=0, initial=0.0)


class Budget:
    """The remaining work of a search. Work is counted, not timed, so that results do not depend on
    the machine. One unit evaluates the exchanges of two bins in about 100 microseconds."""

    def __init__(self, work: float, whole: Budget | None = None):
        self.remaining, self._whole = work, whole
        self.spent = 0.0

    def spend(self, work: float = 1) -> None:
        self.remaining -= work
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def sub_budget(self, work: float) -> Budget:
        """Return a budget of at most `work` units, which also spends from this one."""
        return Budget(min(work, self.remaining), self)

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0


def longest_first(
    problem: Problem, order: Ints, start: Ints | None = None, open_bins: Ints | None = None
) -> Ints:
    """Return the bin of each sample, [N]. Samples are placed in this order, each into the bin of
    `open_bins` with the lowest score afterwards; -1 if none has room. Samples outside of `order`
    keep their bins in `start`."""
    sizes_RN, c = problem.sizes_RN, problem.n_costs
    bins = np.full(problem.n_samples, -1) if start is None else start.copy()
    of_a_bin = [r for r, grouped in enumerate(problem.grouped_R) if not grouped]
    # The resource that is not grouped, if there is exactly one.
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
    score_K, *other_costs = cost_CK  # the first row becomes the maximum over costs
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
        if has_ties:  # bins of a group tie on the grouped load: take the least loaded of them
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
    """Return the first of each run of bins that differ only in loads that are not grouped."""
    differs_from_previous = np.diff(open_B // problem.group) > 0
    if problem.scale_RB is not None:
        differs_from_previous |= (np.diff(problem.scale_RB[:, open_B], axis=1) != 0).any(axis=0)
    return open_B[np.append(True, differs_from_previous)]


def order_by_size(sizes_RN: Floats) -> Ints:
    """Return the sample order: largest first by the largest size, the sum of sizes, the index."""
    if len(sizes_RN) == 0:
        return np.arange(sizes_RN.shape[1])
    return np.lexsort((-sizes_RN.sum(axis=0), -sizes_RN.max(axis=0)))
