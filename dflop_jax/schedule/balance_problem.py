"""The balancing problem in array form: what greedy and local search read; and their budget.

Shape suffixes: N samples, B bins, R resources (cost columns first, then capacity columns).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Sums of the same floats in another order differ by this much, relative to the load.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """Put N samples into B bins so that the largest cost load of a bin is least.

    `sizes_RN`: the first `n_costs` rows are costs (minimised), the others have hard `limits_R`
    (inf for costs). A resource in `grouped_R` is summed over each `group` consecutive bins.
    `scale_RB`, where bins differ in size, multiplies a bin's cost loads (1 / its capacity).
    `base_RB` is what bins carry already (a group's in each of its bins).
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
        """[R, B]; a grouped resource shows its group's sum in each bin. -1 is in no bin."""
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
        """Largest (scaled) cost load of each bin; `loads_RB` may be those of some `bins` only."""
        costs_RB = loads_RB[: self.n_costs]
        costs_RB = costs_RB if self.scale_RB is None else costs_RB * self.scale_RB[:, bins]
        return costs_RB.max(axis=0, initial=0.0)


class Budget:
    """What a search may still do, counted in work, so that the same batch gives the same answer on
    a fast, a slow and a busy machine: a unit is a pair of bins priced, about 100 microseconds. A
    `part` spends from its whole."""

    def __init__(self, work: float, whole: Budget | None = None):
        self.remaining, self._whole = work, whole
        self.spent = 0.0

    def spend(self, work: float = 1) -> None:
        self.remaining -= work
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def sub_budget(self, work: float) -> Budget:
        """A budget of at most so much of this one."""
        return Budget(min(work, self.remaining), self)

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0
