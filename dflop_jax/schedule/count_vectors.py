"""List count vectors, cheapest first: numbers of groups of each bucket that may hold a batch.

Necessary conditions on volume (tokens of every module, in total and of the samples that only some
buckets hold) are checked for all cheap vectors at once. `packing.py` tests whether samples pack.

Shape suffixes: C buckets (or candidate buckets), D conditions, X count vectors, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.balance_problem import ROUNDING, Floats, Ints
from dflop_jax.schedule.batch import Batch

# Maximum number of count vectors after each bucket, with at most this many buckets; fewer vectors
# with more buckets. Doubling it doubles the time if it is reached.
_MAX_VECTORS, _BUCKETS_OF_MOST_VECTORS = 20_000, 4
# Conditions on multiples of a size: the quantiles of volume at which sizes are taken, and the share
# of a size above which the remainder counts. Each pair adds a condition for every module.
_UNIT_QUANTILES, _REST_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.5, 0.95)
# Maximum shares of a row that a large piece leaves free. On 12 batches with clips, the gap between
# bound and schedule is 2.5% with all of these, 2.9% with those up to 1/4 and 6.1% with none.
_LARGE_SIZE_GAPS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)


@dataclass(frozen=True)
class Conditions:
    """Conditions capacity_DC @ counts_C >= need_D that every feasible count vector satisfies."""

    capacity_DC: Floats
    need_D: Floats

    @property
    def alone_C(self) -> Floats:
        """Numbers of groups [C] with which a bucket alone satisfies each condition it affects."""
        capacity_DC = np.where(self.capacity_DC > 0, self.capacity_DC, np.inf)
        return (self.need_D[:, None] / capacity_DC).max(axis=0, initial=0.0)


def volume_conditions(
    batch: Batch,
    buckets: Sequence[Bucket],
    modules: Sequence[str] | None = None,
    *,
    is_bound: bool = False,
) -> Conditions:
    """Return conditions on the volume of modules (None: all), of pieces in rows and of samples in
    microbatches.

    - For each capacity x among the buckets, the samples larger than x must fit, in volume, into the
      buckets larger than x.
    - For a superadditive u, the sizes in a bin satisfy sum u(size) <= u(capacity). `_superadditive`
      counts whole multiples of a common size.
    - If `is_bound`, any u(size) gives a condition whose capacity is the largest sum of u in a bin
      (`_large_size_conditions`). Packing does not need these conditions.
    """
    modules = batch.modules if modules is None else modules
    capacity_MC = {
        m: np.array([batch.microbatch_tokens(b, m) for b in buckets], float) for m in modules
    }
    rows, needs = [], []
    for module in modules:
        row_C = np.array([batch.row_tokens(b, module) for b in buckets], float)
        count_C = np.array([batch.rows(b, module) for b in buckets], float)
        bin_kinds = [(batch.longest[module], batch.lengths[module], row_C, count_C)]
        if batch.n_pieces[module].max(initial=0) > 1:
            totals_N = batch.tokens[module]
            bin_kinds.append((totals_N, totals_N, capacity_MC[module], (count_C > 0).astype(float)))
        for size_N, packed, bin_C, bins_C in bin_kinds:
            for limit in [0.0, *np.unique(bin_C)[:-1]]:
                large_N, able_C = size_N > limit, bin_C > limit
                rows += [capacity_MC[m] * able_C for m in modules]
                needs += [float(batch.tokens[m][large_N].sum()) for m in modules]
            for unit, rest_share in product(_common_sizes(packed), _REST_SHARES):
                rows.append(_superadditive(bin_C, unit, rest_share) * bins_C)
                needs.append(float(_superadditive(packed, unit, rest_share).sum()))
            for max_counted_C, need in _large_size_conditions(packed, bin_C) if is_bound else ():
                rows.append(max_counted_C * bins_C)
                needs.append(need)
    need_D = np.array(needs) * (1 - ROUNDING)  # rounding errors must not require one more group
    # Merge conditions with equal left-hand sides; keep the largest need.
    capacity_DC, place_D = np.unique(np.array(rows), axis=0, return_inverse=True)
    max_need_D = np.zeros(len(capacity_DC))
    np.maximum.at(max_need_D, place_D.ravel(), need_D)
    is_needed = max_need_D > 0
    return Conditions(capacity_DC[is_needed] * batch.capacity.group_size, max_need_D[is_needed])


def _common_sizes(size_N: Ints) -> Floats:
    """Return sizes at even steps of the cumulative volume."""
    ordered = np.sort(size_N[size_N > 0]).astype(float)
    if len(ordered) == 0:
        return ordered
    volume_share = np.cumsum(ordered) / ordered.sum()
    return np.unique(ordered[np.searchsorted(volume_share, _UNIT_QUANTILES)])


def _superadditive(size: Floats | Ints, unit: float, rest_share: float) -> Floats:
    """Return Gomory's rounding function u: whole multiples of `unit`, plus the rescaled part of the
    remainder above `rest_share` of a unit, so that u(x) + u(y) <= u(x + y)."""
    whole = np.floor(size / unit + ROUNDING)
    rest = np.maximum(0.0, size / unit - whole)
    return whole + np.maximum(0.0, rest - rest_share) / (1 - rest_share)


def _large_size_conditions(sizes: Ints, bin_C: Floats) -> Iterator[tuple[Floats, float]]:
    """Yield conditions from weighted sizes: the largest weight that a bin of each bucket holds [C],
    and the total weight of all sizes.

    A weighting has a bin size L and a smallest large size b. Large sizes, from b to L, have weight
    L. Sizes that fit beside a large one into L have weight 0. The weight of any other size is the
    size. A bin with n large sizes has n * b less room for others; its weight is the maximum over n.
    """
    ordered = np.sort(sizes).astype(float)
    for bin_size in np.unique(bin_C[bin_C > 0]):
        fitting = ordered[: np.searchsorted(ordered, bin_size, side="right")]
        first = np.searchsorted(fitting, bin_size * (1 - np.array(_LARGE_SIZE_GAPS)), side="right")
        for min_large in np.unique(fitting[first[first < len(fitting)]]):
            is_large = (ordered >= min_large) & (ordered <= bin_size)
            others = ordered[~is_large & (ordered > bin_size - min_large)]
            n = np.arange(int(bin_C.max() // min_large) + 1)[:, None]
            free_C = bin_C - n * min_large
            others_C = np.where(free_C >= others.min(initial=np.inf), free_C, 0.0)
            count_C = np.where(free_C >= 0, n * bin_size + others_C, 0.0).max(axis=0)
            yield count_C, float(bin_size * is_large.sum() + others.sum())


def list_covers(conditions: Conditions, cost_C: Floats, ceiling: float) -> tuple[Ints, bool]:
    """Return (counts_XC, complete): the count vectors that satisfy the conditions and cost at most
    `ceiling`, by cost, then decreasing capacity. `complete` is False if there are too many to list.
    Buckets are added one after another; a partial vector whose lower bound exceeds the ceiling is
    dropped."""
    capacity_DC, need_D = conditions.capacity_DC, conditions.need_D
    max_vectors = int(_MAX_VECTORS * min(1.0, _BUCKETS_OF_MOST_VECTORS / max(1, len(cost_C))) ** 2)
    counts_XC = np.zeros((1, len(cost_C)), np.int64)
    cost_X = np.zeros(1)
    open_DX = need_D[:, None]  # below 0: more than is needed
    complete = True
    for c, cost in enumerate(cost_C):
        useful = capacity_DC[:, c] > 0
        groups_DX = open_DX[useful] / capacity_DC[useful, c, None]
        max_groups_X = np.ceil(groups_DX.max(axis=0, initial=0.0))  # more groups do not help
        if cost > 0:
            left_X = np.maximum(0.0, ceiling - cost_X)
            max_groups_X = np.minimum(max_groups_X, np.floor(left_X / cost + 1e-6))
        n_X = max_groups_X.astype(np.int64) + 1
        rows = np.repeat(np.arange(len(counts_XC)), n_X)
        add = np.arange(len(rows)) - (np.cumsum(n_X) - n_X)[rows]
        cost_X = cost_X[rows] + add * cost
        open_DX = open_DX[:, rows] - np.multiply.outer(capacity_DC[:, c], add)
        bound_X = cost_X + _remaining_cost(open_DX, capacity_DC[:, c + 1 :], cost_C[c + 1 :])
        listed = np.flatnonzero(bound_X <= ceiling * (1 + ROUNDING))
        if len(listed) > max_vectors:
            rounded_X = np.round(bound_X[listed] / max(ceiling, 1e-30), 9)
            listed = listed[np.argsort(rounded_X, kind="stable")[:max_vectors]]
            complete = False
        counts_XC = counts_XC[rows[listed]]
        cost_X, open_DX = cost_X[listed], open_DX[:, listed]
        counts_XC[:, c] = add[listed]
    room_X = np.round((need_D[:, None] - open_DX).sum(axis=0), 3)
    order = np.lexsort((-room_X, np.round(cost_X / max(ceiling, 1e-30), 9)))
    return counts_XC[order], complete


def _remaining_cost(open_DX: Floats, capacity_DC: Floats, cost_C: Floats) -> Floats:
    """Return a lower bound on the cost of satisfying open conditions with the remaining buckets."""
    price_DC = np.full(capacity_DC.shape, np.inf)
    np.divide(cost_C, capacity_DC, out=price_DC, where=capacity_DC > 0)
    price_DX = price_DC.min(axis=1, initial=np.inf)[:, None]
    cost_DX = np.multiply(open_DX, price_DX, out=np.zeros_like(open_DX), where=open_DX > 0)
    return cost_DX.max(axis=0, initial=0.0)


def fractional_bound(conditions: Conditions, cost_C: Floats) -> float:
    """Return a lower bound on the cost of any cover: the costliest condition, with fractional
    groups."""
    return float(_remaining_cost(conditions.need_D[:, None], conditions.capacity_DC, cost_C)[0])
