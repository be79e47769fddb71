"""Buckets that are not searched: a baseline's, from quantiles of arriving samples, and the spare
bucket for samples that no other bucket holds. They are compiled ahead like the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflop_jax.records import Bucket, Load, Plan, Shape
from dflop_jax.schedule.batch import Capacity, capacity_of, oversize, rows_needed
from dflop_jax.schedule.buckets.problem import Buckets, largest_first
from dflop_jax.schedule.buckets.sizes import round_up
from dflop_jax.schedule.sub_microbatches import merged_buckets

# Microbatches drawn to measure the needs of arrival order. Twice as many usually move the quantiles
# by less than one step of the shapes.
_ARRIVAL_DRAWS = 512


def arrival_buckets(
    loads: Sequence[Load],
    ranks: Mapping[str, int],
    per_rank: int,
    *,
    n_buckets: int = 4,
    piece_tokens: Mapping[str, int],
    token_multiple: int,
) -> Buckets:
    """Buckets of the arrival baseline: `per_rank` rows of one sample each in the last module,
    padded to the longest, and as many rows of the other modules as these samples' pieces need.

    Capacities are quantiles of the needs per rank of microbatches drawn in arrival order; the last
    bucket holds `per_rank` of the largest sample.
    """
    last = list(ranks)[-1]
    rng = np.random.default_rng(0)
    picks = rng.integers(len(loads), size=(_ARRIVAL_DRAWS, ranks[last], per_rank))
    needs: dict[str, tuple[np.ndarray, int]] = {}
    row_tokens: dict[str, int] = {}
    for m in ranks:
        lengths = [load.lengths(m) for load in loads]
        if not any(lengths):
            continue
        if m == last:
            unit = piece_tokens.get(m, token_multiple)
            sizes_N = np.array([sum(n) for n in lengths])
            drawn = sizes_N[picks].max(axis=(1, 2))
            needs[m] = np.array([round_up(v, unit) for v in drawn]), round_up(sizes_N.max(), unit)
            continue
        longest = max((max(n, default=0) for n in lengths), default=0)
        row_tokens[m] = piece_tokens.get(m) or round_up(longest, token_multiple)
        shape = Shape(1, row_tokens[m])
        rows_N = np.array([rows_needed(n, shape) for n in lengths], int)
        needs[m] = rows_N[picks].sum(axis=2).max(axis=1), int(rows_N.max()) * per_rank

    def bucket(amounts: Mapping[str, int]) -> Bucket:
        return Bucket.from_shapes(
            {
                m: (Shape(per_rank, n) if m == last else Shape(n, row_tokens[m])) if n else None
                for m, n in amounts.items()
            }
        )

    quantiles = np.arange(1, n_buckets) / n_buckets
    chosen = {
        bucket({m: int(np.quantile(drawn, q, method="higher")) for m, (drawn, _) in needs.items()})
        for q in quantiles
    }
    chosen.add(bucket({m: needed for m, (_, needed) in needs.items()}))
    return largest_first(list(chosen))


def sample_capacity(plan: Plan) -> Capacity:
    """The capacity that a bucket of the plan has for one sample: all data ranks, or one if a sample
    stays on the rank at which it arrives."""
    capacity = capacity_of(plan.layout)
    if plan.scheduling.grouping == "balanced":
        return capacity
    return Capacity(dict.fromkeys(capacity.ranks, 1), capacity.group_size)


def oversize_samples(loads: Sequence[Load], plan: Plan) -> list[int]:
    """Indices of the samples that no microbatch of the plan holds."""
    return oversize(loads, merged_buckets(plan.layout), sample_capacity(plan))


def spare_bucket(
    loads: Sequence[Load], capacity: Capacity, piece_tokens: Mapping[str, int], multiple: int
) -> Bucket:
    """The bucket that holds each of these samples alone, in rows of the longest piece.

    Args:
      piece_tokens: tokens of a row, for modules whose rows take one piece each.
      multiple: tokens of the rows of other modules are a multiple of it.
    """
    shapes: dict[str, Shape | None] = {}
    for m, ranks in capacity.ranks.items():
        longest = max((max(load.lengths(m), default=0) for load in loads), default=0)
        row = Shape(1, piece_tokens.get(m) or round_up(longest, multiple))
        rows = max(int(rows_needed(load.lengths(m), row)) for load in loads)
        shapes[m] = Shape(-(-rows // ranks), row.tokens) if longest else None
    return Bucket.from_shapes(shapes)
