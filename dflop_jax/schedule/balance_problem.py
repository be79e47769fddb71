"""The balancing problem in array form, which the greedy and the local search solve, and their work
budget.

Shape suffixes: N samples, B bins, R resources (cost columns first, then capacity columns).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Relative difference between sums of the same floats in another order.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """Put N samples into B bins so that the largest cost load of a bin is minimal.

    The first `n_costs` rows of `sizes_RN` are costs, which are minimised; the other rows have hard
    limits `limits_R` (inf for costs). A resource in `grouped_R` is summed over each `group`
    consecutive bins. If bins differ in size, `scale_RB` multiplies a bin's cost loads (1 / its
    capacity). `base_RB` is the load that bins carry already; bins of a group carry the group's.
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

    @property
    def n_groups(self) -> int:
        return -(-self.n_bins // self.group)

    def loads(self, bins: Ints) -> Floats:
        """[R, B]: the loads of an assignment. Bins of a group each show the sum of a grouped
        resource. A sample in bin -1 is not assigned."""
        out_RB = np.zeros((len(self.sizes_RN), self.n_bins))
        is_assigned = bins >= 0
        bin_N = bins[is_assigned]
        group_of_B = np.arange(self.n_bins) // self.group
        for r, grouped in enumerate(self.grouped_R):
            weights = self.sizes_RN[r, is_assigned]
            if grouped:
                out_RB[r] = np.bincount(bin_N // self.group, weights, self.n_groups)[group_of_B]
            else:
                out_RB[r] = np.bincount(bin_N, weights, self.n_bins)
        return out_RB if self.base_RB is None else out_RB + self.base_RB

    def scores(self, loads_RB: Floats, bins: slice = slice(None)) -> Floats:
        """The largest scaled cost load of each bin. `loads_RB` may cover only the bins in
        `bins`."""
        costs_RB = loads_RB[: self.n_costs]
        costs_RB = costs_RB if self.scale_RB is None else costs_RB * self.scale_RB[:, bins]
        return costs_RB.max(axis=0, initial=0.0)


class Budget:
    """The work that a search may still spend. Work is counted, not timed, so a batch gets the same
    answer on a fast, a slow and a busy machine. One unit prices a pair of bins and takes about 100
    microseconds. A sub-budget also spends from its parent."""

    def __init__(self, work: float, whole: Budget | None = None):
        self.remaining, self._whole = work, whole
        self.spent = 0.0

    def spend(self, work: float = 1) -> None:
        self.remaining -= work
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def sub_budget(self, work: float) -> Budget:
        """A budget of at most `work` units, limited by what remains of this one."""
        return Budget(min(work, self.remaining), self)

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0
