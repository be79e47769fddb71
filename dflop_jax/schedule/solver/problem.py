"""The balancing problem in array form: what greedy and local search read.

Shape suffixes: N samples, B bins, R resources (cost columns first, then capacity columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    def n(self) -> int:
        return self.sizes_RN.shape[1]

    @property
    def alike(self) -> bool:
        """Whether all bins are of one size and empty at first."""
        return self.scale_RB is None and self.base_RB is None

    @property
    def n_groups(self) -> int:
        return -(-self.n_bins // self.group)

    def loads(self, bins: Ints) -> Floats:
        """[R, B]; a grouped resource shows its group's sum in each bin. -1 is in no bin."""
        out_RB = np.zeros((len(self.sizes_RN), self.n_bins))
        placed = bins >= 0
        where = bins[placed]
        group_of_B = np.arange(self.n_bins) // self.group
        for r, grouped in enumerate(self.grouped_R):
            weights = self.sizes_RN[r, placed]
            if grouped:
                out_RB[r] = np.bincount(where // self.group, weights, self.n_groups)[group_of_B]
            else:
                out_RB[r] = np.bincount(where, weights, self.n_bins)
        return out_RB if self.base_RB is None else out_RB + self.base_RB

    def costs(self, loads_RB: Floats, bins: slice = slice(None)) -> Floats:
        """(Scaled) cost loads of each bin; `loads_RB` may be those of some `bins` only."""
        costs_RB = loads_RB[: self.n_costs]
        return costs_RB if self.scale_RB is None else costs_RB * self.scale_RB[:, bins]

    def scores(self, loads_RB: Floats, bins: slice = slice(None)) -> Floats:
        """Largest (scaled) cost load of each bin; `loads_RB` may be those of some `bins` only."""
        return self.costs(loads_RB, bins).max(axis=0, initial=0.0)

    def makespan(self, bins: Ints) -> float:
        return float(self.scores(self.loads(bins)).max(initial=0.0))

    def fits(self, loads_RB: Floats) -> bool:
        limits_RB = self.limits_R[self.n_costs :, None]
        return bool((loads_RB[self.n_costs :] <= limits_RB * (1 + ROUNDING)).all())


def make_problem(
    costs: ArrayLike,
    n_bins: int,
    capacities: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    bin_group: int = 1,
    grouped: Sequence[int] = (),
) -> Problem:
    """The problem in array form; ValueError says what is wrong with the arguments.

    Args:
      costs, n_bins, bin_group, grouped: as for `balance`.
      capacities, tokens: what a bin holds [k] and what each sample uses [samples, k] (or
        [samples]); a hard limit for each of the k resources.
    """
    costs_NC = _columns("costs", costs)
    n, c = costs_NC.shape
    if n_bins < 1:
        raise ValueError(f"n_bins={n_bins} must be at least 1")
    if bin_group < 1 or n_bins % bin_group:
        raise ValueError(f"bin_group={bin_group} must divide n_bins={n_bins}")
    if (tokens is None) != (capacities is None):
        raise ValueError("tokens and capacities come together: what each sample uses, what fits")
    uses_NK = _columns("tokens", tokens if tokens is not None else np.zeros((n, 0)))
    limits_K = np.atleast_1d(np.asarray(capacities if capacities is not None else [], float))
    k = uses_NK.shape[1]
    if len(uses_NK) != n or limits_K.shape != (k,):
        raise ValueError(
            f"tokens has shape {uses_NK.shape} and capacities {limits_K.shape}; "
            f"expected ({n}, k) and (k,)"
        )
    if np.isnan(limits_K).any() or (limits_K < 0).any():
        raise ValueError(f"capacities must be >= 0, got {limits_K.tolist()}")
    if not set(grouped) <= set(range(c)):
        raise ValueError(f"grouped={tuple(grouped)} names columns outside 0..{c - 1}")
    return Problem(
        sizes_RN=np.ascontiguousarray(np.concatenate([costs_NC, uses_NK], axis=1).T),
        n_costs=c,
        limits_R=np.concatenate([np.full(c, np.inf), limits_K]),
        n_bins=n_bins,
        group=bin_group,
        grouped_R=tuple(i in grouped for i in range(c)) + (False,) * k,
    )


def _columns(name: str, values: ArrayLike) -> Floats:
    """`values` as float64 [N, columns]; one dim means one column."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(f"{name} must be [samples, columns], got shape {array.shape}")
    bad = ~np.isfinite(array) | (array < 0)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"{name}[{row}, {column}] is {array[row, column]}; "
            "every entry must be a finite number >= 0 (check the profile it was predicted from)"
        )
    return array
